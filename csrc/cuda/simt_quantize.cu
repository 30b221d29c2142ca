/*
 * simt_quantize.cu - BF16 [T, C] to MXFP8 with F8_128x4 scales, at the speed of a copy.
 *
 * A warp takes 256 columns of one token at a time, a block a piece of a token; pieces of a token, then tokens, of the
 * padded range: rows T .. ceil128(T) - 1 get scale bytes 0x00 and nothing else.
 */
#include "simt_params.h"
#include "simt_quantize.cuh"

/* Quantises UNROLL pieces of 256 columns per warp, all loads before the first use. */
template <int UNROLL, int WARPS, int SPAN> MX_DEVICE void quantize_token(const struct mx_simt_quantize_params &p) {
    constexpr int STEP = WARPS * MX_COLS_PER_WARP;
    const uint32_t row = divide(blockIdx.x, p.pieces_reciprocal), piece = blockIdx.x - row * p.num_pieces;
    const int first_col = piece * UNROLL * STEP + threadIdx.x * MX_COLS_PER_LANE;
    const int64_t token = row;
    const bool padding = token >= p.num_tokens;
    const int64_t num_col_tiles = mx_ceil_div(p.num_cols, MX_TILE_COLS * MX_BLOCK);
    uint8_t *q_scale = p.q_scale + mx_f8_128x4_offset(token, 0, num_col_tiles);
    uint8_t *q = p.q + token * p.q_stride_token + first_col;
    uint4 values[UNROLL];

    grid_launch_dependents();
    grid_dependency_wait();

#pragma unroll
    for (int i = 0; i < UNROLL; i++) {
        const int col = first_col + i * STEP;
        values[i] = make_uint4(0, 0, 0, 0);
        if (!padding && col < p.num_cols) {
            const int group = p.num_groups == 1 ? 0 : (int)divide(col, p.group_reciprocal);
            const uint8_t *z = p.z + token * p.z_stride_token + group * p.z_stride_group;
            values[i] = load_global_stream_v4(z + (col - group * p.cols_per_group) * 2);
        }
    }
#pragma unroll
    for (int i = 0; i < UNROLL; i++) {
        const int col = first_col + i * STEP;
        uint32_t word;
        const uint2 bytes = quantize_8<SPAN>(values[i], &word);
        if (!padding && col < p.num_cols) {
            *(uint2 *)(q + i * STEP) = bytes;
        }
        /* NOTE: past the last column, and past the last token, values are zero, so are their scale bytes. */
        if (threadIdx.x % 16 == 0 && col < p.num_cols) {
            *(uint32_t *)(q_scale + (uint32_t)col / 128 * MX_TILE_BYTES) = word;
        }
    }
}

#define MX_QUANTIZE_KERNEL(NAME, UNROLL, WARPS, SPAN)                                                                \
    extern "C" __global__ void __launch_bounds__(32 * WARPS) NAME(const struct mx_simt_quantize_params p) {          \
        quantize_token<UNROLL, WARPS, SPAN>(p);                                                                      \
    }

/* The shipped forms; simt_launch.c names them. Few tokens: more blocks, each with one piece a warp. */
/* clang-format off */
/*                 name                     unroll  warps  span */
MX_QUANTIZE_KERNEL(mx_simt_quantize_1_32,   1,      8,     32)
MX_QUANTIZE_KERNEL(mx_simt_quantize_1_128,  1,      8,     128)
MX_QUANTIZE_KERNEL(mx_simt_quantize_1_256,  1,      8,     256)
MX_QUANTIZE_KERNEL(mx_simt_quantize_4_32,   4,      4,     32)
MX_QUANTIZE_KERNEL(mx_simt_quantize_4_128,  4,      4,     128)
MX_QUANTIZE_KERNEL(mx_simt_quantize_4_256,  4,      4,     256)
/* clang-format on */
