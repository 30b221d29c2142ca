/*
 * sm90_decode.h - the projections for few tokens (T <= 64) on Hopper: what the host plans and what the kernels get.
 *
 * At this size the work is reading the weights once. They stand on the M side of the tensor core instruction (64 rows
 * each), tokens on the N side, padded to 8, 16, 32 or 64. A block keeps `tile_rows` rows of the weight in flight
 * through a ring of shared memory, 256 columns (one span) a slot:
 *
 *                  K ->   span 0   span 1   span 2  ...
 *     tile_rows rows    [ slot 0 | slot 1 | slot 2 | ...      256 bytes of each row, two swizzled halves of 128
 *
 * Numerics. A span's 8 products (k = 32 each) accumulate in fresh registers; then acc = fma(partial, scale of the
 * token's span, acc), a chain over the spans in increasing order; the weight's scale (one byte per 32 rows over all
 * of K) multiplies the end result. With one chain (split 1, chains 1) that is what the large-T kernels compute, bit
 * for bit. Otherwise K is cut into `split` consecutive shares, one per block of a cluster, each share's spans go to
 * `chains` chains in turn, and the result is the sum over shares of the sum over their chains, both in order. Plans
 * choose the cut by the shape of the weights alone, so a token's bits never depend on the number of tokens, up to 64.
 *
 * Activations come as e4m3 with scale bytes equal over 256 columns, by the copy engine; or as BF16, which the block
 * quantises itself while its weights are under way (for the attention output: after the inverse rotary embedding).
 *
 * Host functions are pure or launch; nothing here allocates, synchronises or keeps state. They return an mx_code.
 */
#ifndef VLLM_MEGAATTN_SM90_DECODE_H
#define VLLM_MEGAATTN_SM90_DECODE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MX_DECODE_MAX_TOKENS    64
#define MX_DECODE_SPAN          256  /* columns per promotion, per scale of x, and per ring slot */
#define MX_DECODE_MAX_STAGES    31   /* slots of a ring: barriers are laid out for so many */
#define MX_DECODE_BARRIER_BYTES 1024 /* 4 x 31 + 2 barriers of 8 bytes, in front of the tiles */
#define MX_DECODE_PAD           4    /* floats between the sums of two tokens that shift the banks */

/* Where a kernel's activations come from. */
enum mx_sm90_decode_from {
    MX_DECODE_FROM_E4M3 = 0,      /* e4m3 with one scale per 256 columns */
    MX_DECODE_FROM_BF16 = 1,      /* a BF16 matrix, quantised inside, one scale per 256 columns */
    MX_DECODE_FROM_ATTENTION = 2, /* the attention output: inverse rotary embedding, then the same */
};

/* ---- what the kernels get -------------------------------------------------------------------------------- */

/* Pointers are device pointers, strides and offsets are in bytes unless said otherwise; 32 bits are enough for 64
 * tokens, and they keep the code that runs before the first copy short. */
struct mx_sm90_decode_params {
    int32_t tile_rows;    /* weight rows per block, a multiple of 8 up to 64 or 128 */
    int32_t w_stages;     /* slots of the weight ring */
    int32_t w_in_flight;  /* slots that may be under way at a time */
    int32_t x_stages;     /* slots of the activation ring; all of the block's spans where it quantises */
    int32_t num_spans;    /* of the block: its share of ceil(K / 256) */
    int32_t trigger_span; /* the next kernel may start once this many of them are requested */

    uint32_t x_ring, parts, scales, amax; /* where they start in shared memory */

    int32_t split_log2;           /* blocks that share K: 1, 2, 4 or 8 */
    int32_t owned_log2;           /* tokens a block finishes: N / split */
    int32_t span_tiles;           /* blocks along N that share a scale of the output */
    int32_t scale_span;           /* of the output: 32, 128 or 256 */
    int32_t num_tokens, num_rows; /* T, and N of one group */

    const uint8_t *w_scale; /* uint8 [G, N / 32] */
    uint32_t w_scale_stride_group, w_scale_stride_row;

    uint8_t *out; /* BF16 [T, G, N], or e4m3 [T, G * N] when out_scale is set */
    uint32_t out_stride_token, out_stride_group;
    uint8_t *out_scale;    /* F8_128x4, or NULL */
    int32_t num_col_tiles; /* of out_scale: ceil(G * N / 128) */
};

/* Activations that are e4m3 already. The byte of (token t, span s) lies at
 * x_scale + s * stride_span + (t % 32) * stride_row + (t / 32) * stride_row_32, which covers packed words and
 * F8_128x4. */
struct mx_sm90_decode_scales {
    const uint8_t *x_scale; /* 4-byte aligned, so are the strides: a whole word is read, its low byte used */
    uint32_t stride_group, stride_span, stride_row, stride_row_32;
};

/* Activations that are BF16 still. 32 columns from 32 * c of a group come from head c / B, values 32 * (c % B) .. of
 * it (standard order, B = D / 32), or from head c % heads, values 32 * (c / heads) .. (chunk-interleaved). A plain
 * matrix is heads of its contiguous runs. */
struct mx_sm90_decode_source {
    const uint8_t *x; /* BF16, 16-byte aligned, so are the strides */
    uint32_t stride_token, stride_group, stride_head;
    int32_t interleaved;         /* the order */
    int32_t divisor;             /* B or heads */
    uint32_t divisor_reciprocal; /* ceil(2^32 / divisor), 0 for divisor 1 */
    uint32_t token_reciprocal;   /* ceil(2^20 / num_tokens) */
    int32_t rope_first;          /* D - R: where the rotated values start, a multiple of 8 */
    int32_t rope_dim;            /* R, a multiple of 8 */
    int32_t cache;               /* enum mx_rope_cache */
    const float *cos_sin;        /* [num_positions, R], 16-byte aligned rows */
    int64_t cos_sin_stride;      /* elements */
    const int64_t *positions;    /* [T] */
    int64_t positions_stride;    /* elements */
    int64_t num_positions;
};

/* ---- planning and launching (host) ----------------------------------------------------------------------- */

/* What a plan depends on. */
struct mx_sm90_decode_shape {
    int64_t num_tokens, num_groups, num_rows, k;
    int32_t from;       /* enum mx_sm90_decode_from */
    int32_t scale_span; /* of an e4m3 output; 0: BF16 output */
    int32_t smem_bytes; /* one block may ask for */
    bool one_chain;     /* the sum as the large-T kernels compute it */
};

/* How a problem is run. */
struct mx_sm90_decode_plan {
    int32_t from;
    int32_t n;         /* tokens, padded: 8, 16, 32 or 64 */
    int32_t tile_rows; /* see mx_sm90_decode_params for these */
    int32_t split, chains;
    int32_t w_stages, w_in_flight, x_stages;
    int32_t trigger_span;

    int32_t num_spans, span_tiles;
    uint32_t tiles, groups, cluster, block;           /* grid {cluster, tiles, groups} */
    uint32_t x_ring, parts, scales, amax, smem_bytes; /* offsets in shared memory and its size */
};

/* Fills in what follows from the shape and the plan's first fields (from .. trigger_span): rings no longer than the
 * block's share, sizes of grid, cluster and shared memory. MX_UNSUPPORTED and a reason if that does not fit. */
int mx_sm90_decode_complete(struct mx_sm90_decode_plan *plan, const struct mx_sm90_decode_shape *shape, char *err,
                            size_t n);

/* The plan of a shape, complete. The cut (split, chains) follows from num_groups, num_rows, k and one_chain alone.
 * MX_UNSUPPORTED and a reason if there is no such kernel or shared memory is too small. */
int mx_sm90_decode_choose(struct mx_sm90_decode_plan *plan, const struct mx_sm90_decode_shape *shape, char *err,
                          size_t n);

/* The quickest way through the whole projection; all ways give the same bits. */
struct mx_sm90_decode_route {
    bool rope_inside;     /* wo_a's kernel rotates and quantises the attention output itself */
    bool quantize_inside; /* wo_b's kernel quantises the BF16 z itself; else a kernel between does, which is quicker
                           * than wo_a's blocks meeting for their scales */
};
struct mx_sm90_decode_route mx_sm90_decode_choose_route(int32_t wo_a_split, int64_t num_tokens);

/* Runs `args` by that plan. `rope` is the source for FROM_ATTENTION, `source` that for FROM_BF16; both NULL else. */
int mx_sm90_decode_run(const struct mx_sm90_decode_plan *plan, const struct mx_matmul *args,
                       const struct mx_inv_rope *rope, const struct mx_quantize *source, const struct mx_exec *exec);

#ifdef __cplusplus
}
#endif

#endif /* VLLM_MEGAATTN_SM90_DECODE_H */
