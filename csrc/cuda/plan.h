/*
 * plan.h - which kernel runs a tiled matrix product on Hopper, and how: pure functions, no CUDA, testable anywhere.
 *
 * Numerics, the contract between all kernels. A kernel's form is decided by the operands alone, never by the number of
 * tokens, and (but for one exception) all kernels of one form give the same bits:
 *
 *   wide    x has one scale per 256 columns (the caller vouches for it: x_span), the weights one per 32 rows (or a
 *           multiple) over all of K, K is a multiple of 256 and at least 512. For each span of 256 columns the tensor
 *           core sums 8 products of k = 32 in increasing order of k into fresh registers; then
 *           acc = fma(partial, x_scale[token, span], acc), starting from 0, in one chain over increasing spans; the
 *           result is acc * w_scale. wgmma gives the same bits whichever operand stands on its M side.
 *           Between 65 and some hundred tokens plan.c may take kernels that sum 2 or 4 consecutive parts of K in a chain
 *           each and add these in order, and up to 64 tokens sm90_decode.h's kernels add several chains, always the same
 *           for given weights; unless MX_FLAG_BATCH_INVARIANT asks for the one chain.
 *   per 32  everything else: acc = fma(partial of 32 columns, x_scale * w_scale, acc), in increasing order.
 *
 * Then the result is rounded to BF16, and quantised from that where MXFP8 is asked for. Scales are powers of two, so
 * multiplying by them is exact as long as nothing leaves FP32's range: results stay exact only while acc in units of the
 * weights' scale is below 2^128 (wide) and x_scale * w_scale is a normal FP32 number (per 32).
 *
 *     struct mx_gemm_problem problem = mx_gemm_problem_of(args, exec->flags);
 *     struct mx_gemm_plan plan;
 *     if (mx_plan_gemm(&problem, dev->num_sms, dev->smem_bytes, &plan)) { launch plan.config->kernel ... }
 */
#ifndef VLLM_MEGAATTN_CUDA_PLAN_H
#define VLLM_MEGAATTN_CUDA_PLAN_H

#include <stdbool.h>
#include <stdint.h>

#include "../kernels.h"
#include "sm90_params.h"

#ifdef __cplusplus
extern "C" {
#endif

enum mx_gemm_form {
    MX_FORM_WIDE = 0,
    MX_FORM_PER32 = 1,      /* weight scales per 32 rows or a multiple */
    MX_FORM_PER32_ROWS = 2, /* weight scales per row */
};

/* What the kernel writes: 0 for BF16, else the scale span of an MXFP8 result. */
struct mx_gemm_problem {
    int64_t num_tokens, num_groups, num_rows, k;
    int32_t form;         /* enum mx_gemm_form */
    int32_t output;       /* 0, 32, 128 or 256 */
    bool batch_invariant; /* only kernels that sum in one chain */
};

/* One shipped kernel. */
struct mx_gemm_config {
    const char *kernel; /* extern "C" name */
    int32_t form;
    int32_t output;
    int32_t block_m, block_n; /* tokens and weight rows of a block's tile */
    int32_t stages;           /* of 128 columns in the ring */
    int32_t threads;
    int32_t cluster_m, cluster_n;
    int32_t split;    /* parts of K in a cluster: with several the sum is not the one chain of the contract */
    int32_t stage_ns; /* H200: a stage of a tile, operands at hand; from measured sizes */
};

struct mx_gemm_plan {
    const struct mx_gemm_config *config;
    struct mx_sm90_tiling tiling;
    uint32_t grid, block, cluster, smem_bytes;
    int32_t estimated_ns;
};

/* The table of shipped kernels, for tests and `info`. */
extern const struct mx_gemm_config mx_gemm_configs[];
extern const int mx_num_gemm_configs;

enum mx_gemm_form mx_gemm_form_of(const struct mx_matmul *args);

struct mx_gemm_problem mx_gemm_problem_of(const struct mx_matmul *args, uint32_t flags);

/* Fills in grid, tiling and shared memory of running `problem` with `config`. False if the device has too little. */
bool mx_plan_gemm_with(const struct mx_gemm_problem *problem, const struct mx_gemm_config *config, int num_sms,
                       int smem_bytes, struct mx_gemm_plan *plan);

/* The quickest of the shipped kernels by the table's times; false if none takes the problem. */
bool mx_plan_gemm(const struct mx_gemm_problem *problem, int num_sms, int smem_bytes, struct mx_gemm_plan *plan);

#ifdef __cplusplus
}
#endif

#endif /* VLLM_MEGAATTN_CUDA_PLAN_H */
