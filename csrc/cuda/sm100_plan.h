/*
 * sm100_plan.h - how a matrix product is run on Blackwell: pure functions, no CUDA, testable anywhere.
 *
 * The plan depends on the sizes, the number of SMs and the flags, never on what is written: BF16 and MXFP8 output
 * take the same tiles and the same split of K, so the fused bytes equal those of quantising the BF16 result.
 *
 * Numerics. Unsplit (singles, pairs), an element is one FP32 chain over K in the tensor core, whatever the tile:
 * every such plan gives the same bits. Split, it is `split` chains over consecutive parts of K, added in order; the
 * number of parts follows from groups, rows, K and SMs alone, so all split plans of one weight give the same bits
 * too, and MX_FLAG_BATCH_INVARIANT keeps every number of tokens on them. Without the flag a token's last bits may
 * change where the plan changes from split to pairs.
 *
 *     struct mx_sm100_plan plan;
 *     code = mx_sm100_make_plan(&problem, dev->num_sms, dev->smem_bytes, exec->flags, &plan, err, n);
 */
#ifndef VLLM_MEGAATTN_SM100_PLAN_H
#define VLLM_MEGAATTN_SM100_PLAN_H

#include <stdint.h>

#include "../kernels.h"
#include "sm100_params.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Up to so many tokens the split form is taken whatever the model says: a decode batch that grows and shrinks
 * stays on the same bits, and two blocks per SM let the next kernel's weights in early. */
#define MX_SM100_ALWAYS_SPLIT 64

struct mx_sm100_problem {
    int64_t num_tokens, num_groups, num_rows, k;
};

enum mx_sm100_form {
    MX_SM100_SPLIT = 0,  /* one tile per cluster, K shared by its blocks (or a single block) */
    MX_SM100_PAIR = 1,   /* persistent, two blocks per product */
    MX_SM100_SINGLE = 2, /* persistent, one block per product */
};

struct mx_sm100_plan {
    int32_t form; /* enum mx_sm100_form */
    int32_t ctas; /* blocks per product: 1 or 2 */
    int32_t split;
    int32_t num_stages;
    int32_t x_bytes, x_tiles; /* see mx_sm100_gemm_params */
    int32_t acc_count, tmem_columns, scale_column;
    uint32_t grid, cluster, smem_bytes;
    struct mx_sm100_tiling tiling;
    int64_t cycles; /* the model's estimate without the launch, SM clocks; what the choice is made by */
};

/* The plan for a device; MX_UNSUPPORTED and the reason in err if none fits. */
int mx_sm100_make_plan(const struct mx_sm100_problem *problem, int num_sms, int smem_bytes, uint32_t flags,
                       struct mx_sm100_plan *plan, char *err, size_t n);

/* The same in a given form, for tests and estimates. `waves`, persistent forms only: tiles per block (pair) that the
 * tokens are cut for, 0 for the quickest by the model. */
int mx_sm100_make_plan_form(const struct mx_sm100_problem *problem, int num_sms, int smem_bytes, int form, int waves,
                            struct mx_sm100_plan *plan, char *err, size_t n);

/* The model that orders plans, in SM clocks and bytes per clock; scripts/roofline_gb200.py prints what it predicts.
 *
 * NOTE: none of this has been measured on a Blackwell GPU. Published or derived: an instruction of 128 (pairs: 256) x
 * width x 32 takes width / 2 clocks and reads its operands from shared memory at 128 bytes a clock; an SM takes in at
 * most 64 bytes a clock from L2, 52 assumed; HBM delivers 7.2 of 8 TB/s, at 1.92 GHz 3750 bytes a clock. */
enum {
    MX_SM100_MODEL_SM_BYTES = 52,
    MX_SM100_MODEL_HBM_BYTES = 3750,
    MX_SM100_MODEL_START = 2500,   /* first instruction to first product: barriers, latency of the first weights */
    MX_SM100_MODEL_TILE_GAP = 200, /* between two tiles of a persistent block */
    MX_SM100_MODEL_FINISH = 1200,  /* last product to last store, few tokens */
    MX_SM100_MODEL_TOKEN = 12 /* epilogue, per token of a tile: BF16; MXFP8 takes twice that, but its K hides it */
};

/* Clocks that a tile spends on one block of 128 columns. */
int64_t mx_sm100_stage_cycles(int ctas, int width);

#ifdef __cplusplus
}
#endif

#endif /* VLLM_MEGAATTN_SM100_PLAN_H */
