/*
 * sm90_params.h - what the host hands to each kernel, one struct per kernel, plain C and CUDA C++ alike.
 *
 * Pointers are device pointers; strides are in bytes unless a comment says otherwise.
 */
#ifndef VLLM_MEGAATTN_SM90_PARAMS_H
#define VLLM_MEGAATTN_SM90_PARAMS_H

#include <stdint.h>

#include "../mxfp8.h"

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
