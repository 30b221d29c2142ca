/*
 * sm100_params.h - what the host hands to the Blackwell matrix product, plain C and CUDA C++ alike.
 *
 * Weights stand on the M side of the tensor core instruction, 128 rows a block, tokens on the N side, so a tile is
 * "row tile x token tile" and its token width is free in steps of 16:
 *
 *     D[row, token] = sum over k of (w[row, k] * w_scale) * (x[token, k] * x_scale)
 *
 * Pointers are device pointers; strides are in bytes.
 */
#ifndef VLLM_MEGAATTN_SM100_PARAMS_H
#define VLLM_MEGAATTN_SM100_PARAMS_H

#include <stdint.h>

#include "../mxfp8.h"

#define MX_SM100_ROWS          128   /* weight rows of a block: the M of a one-block instruction */
#define MX_SM100_K             128   /* columns of K per stage: one 128-byte swizzle row, one scale word */
#define MX_SM100_MAX_TOKENS    256   /* of a tile: the N of the instruction */
#define MX_SM100_W_BYTES       16384 /* weight tile of a stage */
#define MX_SM100_MAX_STAGES    16
#define MX_SM100_THREADS(ctas) ((ctas) == 2 ? 320 : 256)
#define MX_SM100_QUAD_BYTES    2048 /* split partials: 4 tokens x 128 rows x 4 bytes */

/* Tensor memory of a kernel that keeps two accumulators, 512 columns in all: accumulators at 0 and 232, two
 * buffers of scales (4 columns for the weights, up to 8 for the tokens) from 488. Up to 232 tokens the
 * accumulators lie apart; wider ones share columns 232 to 255, which the epilogue therefore empties first. */
#define MX_SM100_ACC_STRIDE    232
#define MX_SM100_SCALE_COLUMN  488
#define MX_SM100_SCALE_COLUMNS 12 /* of one buffer */

/* mx_scales as the kernel reads it: a word of four bytes, one per 32 columns, for (group, row, block of 128
 * columns). */
struct mx_sm100_scales {
    const uint8_t *data;
    int64_t stride_group, stride_row, stride_col; /* PACKED: of words; BLOCKS: of block rows and block columns */
    int32_t layout;                               /* enum mx_scale_layout */
    int32_t row_shift;                            /* BLOCKS: log2 of rows per byte */
    int32_t col_shift;                            /* BLOCKS: log2 of 32-column blocks per byte */
    int32_t num_col_tiles;                        /* F8_128X4 */
};

/* Row tiles that cut their tokens alike. */
struct mx_sm100_cut {
    int32_t first_row, num_rows; /* in row tiles, counted over all groups */
    int32_t num_t, width;        /* token tiles, and tokens in each (a multiple of 16) */
    int32_t num_tiles;           /* num_rows * num_t */
};

/* All tiles: cut 0 first, then cut 1 (which may be empty). The kernel of that many blocks (pairs, clusters) takes
 * tiles b, b + blocks, b + 2 * blocks, ...; two widths let that come out even. */
struct mx_sm100_tiling {
    int32_t rows_per_group; /* row tiles of a group */
    int32_t band;           /* row tiles that are walked before the next token tile: they share its tokens in L2 */
    struct mx_sm100_cut cut[2];
};

struct mx_sm100_gemm_params {
    int32_t num_tokens, num_groups, num_rows, k; /* T, G, N, K */
    int32_t split; /* blocks of a cluster that share K, added up in rank order; else 1 */
    int32_t num_stages;
    int32_t x_bytes;   /* token tile of a stage, of this block (half of it in a pair), widest cut */
    int32_t x_tiles;   /* 512-byte scale tiles of a stage's tokens: ceil(widest cut / 128) */
    int32_t acc_count; /* accumulators in tensor memory: 1 (one tile per block) or 2 */
    int32_t tmem_columns, scale_column;
    struct mx_sm100_tiling tiling;
    struct mx_sm100_scales w_scale, x_scale;
    uint8_t *out; /* BF16 [T, G, N] or e4m3 [T, G * N] */
    int64_t out_stride_token, out_stride_group;
    uint8_t *out_scale;      /* F8_128x4, or NULL */
    int32_t scale_col_tiles; /* of out_scale */
};

/* Shared memory, from its 1024-aligned start:
 *
 *     stages x [weights 16 KB | tokens x_bytes]     operands, 128-byte swizzle
 *     stages x 512                                  weight scales, F8_128x4 tile order
 *     stages x x_tiles x 512                        token scales
 *     2 x 1024                                      MXFP8 output: scale bytes [token][32-row block] of two tiles
 *     split partials [rank][quad][row][4]           split only
 *     barriers, 8 bytes each, and the tensor memory address
 */
struct mx_sm100_smem {
    uint32_t stage_bytes, w_scale, x_scale, out_scale, partials, barriers, total;
};

MX_FN struct mx_sm100_smem mx_sm100_smem_map(int num_stages, int x_bytes, int x_tiles, int partial_bytes) {
    struct mx_sm100_smem map;
    map.stage_bytes = MX_SM100_W_BYTES + (uint32_t)x_bytes;
    map.w_scale = map.stage_bytes * (uint32_t)num_stages;
    map.x_scale = map.w_scale + MX_TILE_BYTES * (uint32_t)num_stages;
    map.out_scale = map.x_scale + MX_TILE_BYTES * (uint32_t)(num_stages * x_tiles);
    map.partials = map.out_scale + 2 * 4 * MX_SM100_MAX_TOKENS;
    map.barriers = map.partials + (uint32_t)partial_bytes;
    map.total = map.barriers + 8 * (2 * MX_SM100_MAX_STAGES + 6);
    return map;
}

/* Quads of 4 tokens that each block of a split owns: it receives the partials of that many and finishes them. */
MX_FN int mx_sm100_quads_per_rank(int width, int split) { return (width / 4 + split - 1) / split; }

MX_FN int mx_sm100_partial_bytes(int width, int split) {
    return split > 1 ? split * mx_sm100_quads_per_rank(width, split) * MX_SM100_QUAD_BYTES : 0;
}

#endif /* VLLM_MEGAATTN_SM100_PARAMS_H */
