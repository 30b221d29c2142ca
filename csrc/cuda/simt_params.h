/*
 * simt_params.h - what the host hands to the kernels that move data once, one struct per kernel, plain C and CUDA C++
 * alike.
 *
 * Pointers are device pointers; strides are in bytes unless a comment says otherwise.
 */
#ifndef VLLM_MEGAATTN_SIMT_PARAMS_H
#define VLLM_MEGAATTN_SIMT_PARAMS_H

#include <stdint.h>

/* mx_simt_quantize_*: BF16 [T, G, C / G] -> e4m3 [T, C] and F8_128x4 scales. */
struct mx_simt_quantize_params {
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

/* mx_simt_inv_rope_*: BF16 [T, heads, D] -> e4m3 [T, G, K] and packed scale words. */
struct mx_simt_inv_rope_params {
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
    int32_t heads_per_step;      /* mx_simt_inv_rope_4_same_d: 1024 / head_dim */
    int32_t k;
    int32_t order; /* enum mx_rope_order */
    int32_t cache; /* enum mx_rope_cache */
};

#endif /* VLLM_MEGAATTN_SIMT_PARAMS_H */
