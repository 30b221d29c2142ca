/*
 * sm90_params.h - what the host hands to each kernel, one struct per kernel, plain C and CUDA C++ alike.
 *
 * Pointers are device pointers; strides are in bytes unless a comment says otherwise.
 */
#ifndef VLLM_MEGAATTN_SM90_PARAMS_H
#define VLLM_MEGAATTN_SM90_PARAMS_H

#include <stdint.h>

#include "../mxfp8.h"

/* mx_sm90_quantize_*: BF16 [T, G, C / G] -> e4m3 [T, C] and F8_128x4 scales. */
struct mx_sm90_quantize_params {
    int32_t num_pieces;         /* blocks per token */
    uint32_t pieces_reciprocal; /* ceil(2^32 / num_pieces); 0 stands for 1 piece */
    const uint8_t *z;
    int64_t z_stride_token, z_stride_group;
    uint8_t *q;
    int64_t q_stride_token;
    uint8_t *q_scale;
    int32_t num_tokens, num_cols;
    int32_t cols_per_group;
    uint32_t group_reciprocal; /* ceil(2^32 / cols_per_group); read only where there are several groups */
    int32_t num_groups;
};

/* mx_sm90_inv_rope_*: BF16 [T, heads, D] -> e4m3 [T, G, K] and packed scale words. */
struct mx_sm90_inv_rope_params {
    int32_t num_pieces, num_groups; /* blocks per token and group */
    uint32_t blocks_reciprocal;     /* ceil(2^32 / (num_pieces * num_groups)); 0 stands for a product of 1 */
    uint32_t pieces_reciprocal;     /* ceil(2^32 / num_pieces); 0 stands for 1 piece */
    const uint8_t *attn;
    int64_t attn_stride_token, attn_stride_head;
    const int64_t *positions;
    int64_t positions_stride; /* elements */
    const float *cos_sin;
    int64_t cos_sin_stride; /* elements */
    int64_t num_positions;
    uint8_t *x;
    int64_t x_stride_token, x_stride_group;
    uint8_t *x_scale;
    int64_t xs_stride_token, xs_stride_group, xs_stride_word;
    int32_t heads_per_group, head_dim, rope_dim;
    uint32_t divisor_reciprocal; /* ceil(2^32 / d), d = head_dim (standard order) or heads_per_group (interleaved) */
    int32_t heads_per_step;      /* mx_sm90_inv_rope_4_same_d: 1024 / head_dim */
    int32_t k;
    int32_t order; /* enum mx_rope_order */
    int32_t cache; /* enum mx_rope_cache */
};

/* How a product is cut into tiles of a kernel's BLOCK_M tokens x BLOCK_N weight rows, per group. */
struct mx_sm90_tiling {
    int32_t num_m, num_n; /* cluster tiles along tokens and along weight rows, per group */
    int32_t num_tiles;    /* num_groups * num_m * num_n */
    int32_t band;         /* cluster tiles along tokens that are finished before the next ones start: keeps x in L2 */
};

/* mx_sm90_gemm_*: out[t, g, n] = sum_k x[t, g, k] * w[g, n, k]. The operands themselves come as tensor maps. */
struct mx_sm90_gemm_params {
    int32_t num_tokens, num_groups, num_rows, k;
    struct mx_sm90_tiling tiling;
    struct mx_scales x_scale, w_scale;
    uint8_t *out; /* BF16 [T, G, N] or e4m3 [T, G * N] */
    int64_t out_stride_token, out_stride_group;
    uint8_t *out_scale; /* F8_128x4, or NULL */
    int32_t scale_col_tiles;
};

#endif /* VLLM_MEGAATTN_SM90_PARAMS_H */
