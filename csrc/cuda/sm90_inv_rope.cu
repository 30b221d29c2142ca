/*
 * sm90_inv_rope.cu - inverse rotary embedding of the attention output and its quantisation, at the speed of a copy.
 *
 * A warp takes 256 of a group's K columns at a time, 8 consecutive ones per lane: one 16-byte load, one 8-byte store.
 * Whatever the order of the columns, 8 that start at a multiple of 8 come from one head and are consecutive there.
 * Blocks go through the pieces of a group, the groups of a token, then the tokens, as memory does.
 */
#include "../kernels.h"
#include "sm90_params.h"
#include "sm90_quantize.cuh"

/* Where the lane's 8 columns of x come from. */
struct head_column {
    int head; /* within the group */
    int d;    /* first of the 8 values */
};

MX_DEVICE struct head_column locate(const struct mx_sm90_inv_rope_params &p, int col) {
    struct head_column at;
    if (p.order == MX_ORDER_STANDARD) { /* col = head * D + d */
        at.head = (int)divide(col, p.divisor_reciprocal);
        at.d = col - at.head * p.head_dim;
    } else { /* col = (d / 32 * heads_per_group + head) * 32 + d % 32 */
        int block = col / MX_BLOCK;
        int d_block = (int)divide(block, p.divisor_reciprocal);
        at.head = block - d_block * p.heads_per_group;
        at.d = d_block * MX_BLOCK + col % MX_BLOCK;
    }
    return at;
}

/* The factors of the lane's four pairs; pairs in front of the rotated values keep what they are. */
struct rotation {
    float cos[4], sin[4];
};

MX_DEVICE void load_rotation(const struct mx_sm90_inv_rope_params &p, struct rotation &r, int d, int64_t position) {
    const float *row = p.cos_sin + position * p.cos_sin_stride;
    const int first = (d - (p.head_dim - p.rope_dim)) / 2; /* pair; negative: not rotated */
    const bool halves = p.cache == MX_ROPE_HALVES;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int pair = max(first + i, 0);
        r.cos[i] = __ldg(row + (halves ? pair : 2 * pair));
        r.sin[i] = __ldg(row + (halves ? pair + p.rope_dim / 2 : 2 * pair + 1));
    }
}

/* Rotates one pair back and rounds it to BF16. The order of operations is kernels.h's. */
MX_DEVICE uint32_t rotate_pair(uint32_t pair, float cos, float sin) {
    const float even = bf16_low(pair), odd = bf16_high(pair);
    return pack_bf16(__fmaf_rn(odd, sin, __fmul_rn(even, cos)), __fmaf_rn(-even, sin, __fmul_rn(odd, cos)));
}

MX_DEVICE uint4 rotate_8(const struct mx_sm90_inv_rope_params &p, uint4 v, int d, const struct rotation &r) {
    const int first = d - (p.head_dim - p.rope_dim);
    v.x = first >= 0 ? rotate_pair(v.x, r.cos[0], r.sin[0]) : v.x;
    v.y = first >= -2 ? rotate_pair(v.y, r.cos[1], r.sin[1]) : v.y;
    v.z = first >= -4 ? rotate_pair(v.z, r.cos[2], r.sin[2]) : v.z;
    v.w = first >= -6 ? rotate_pair(v.w, r.cos[3], r.sin[3]) : v.w;
    return v;
}

/* Handles UNROLL pieces of 256 columns per warp, all loads before the first use. SAME_D: the pieces lie whole heads
 * apart in standard order, so all of them rotate by the same angles. */
template <int UNROLL, int WARPS, bool SAME_D, int SPAN>
MX_DEVICE void inv_rope_token(const struct mx_sm90_inv_rope_params &p) {
    constexpr int STEP = WARPS * MX_COLS_PER_WARP;
    const uint32_t row = divide(blockIdx.x, p.blocks_reciprocal);
    const uint32_t in_row = blockIdx.x - row * (p.num_pieces * p.num_groups);
    const uint32_t in_token = divide(in_row, p.pieces_reciprocal), piece = in_row - in_token * p.num_pieces;
    const int first_col = piece * UNROLL * STEP + threadIdx.x * MX_COLS_PER_LANE;
    const int64_t token = row, group = in_token;
    const uint8_t *attn = p.attn + token * p.attn_stride_token + group * p.heads_per_group * p.attn_stride_head;
    uint8_t *x = p.x + token * p.x_stride_token + group * p.x_stride_group + first_col;
    uint8_t *x_scale = p.x_scale + token * p.xs_stride_token + group * p.xs_stride_group +
                       (uint32_t)first_col / 128 * p.xs_stride_word;
    const int64_t x_scale_step = STEP / 128 * p.xs_stride_word;
    const int first_rotated = p.head_dim - p.rope_dim;
    const bool writes_scale = threadIdx.x % 16 == 0;
    int d[UNROLL];
    uint4 values[UNROLL];
    struct rotation r;

    grid_launch_dependents();
    grid_dependency_wait();

    const int64_t position = p.positions[token * p.positions_stride];
    struct head_column at = locate(p, first_col);
#pragma unroll
    for (int i = 0; i < UNROLL; i++) {
        if (!SAME_D && i > 0) {
            at = locate(p, first_col + i * STEP);
        }
        d[i] = at.d;
        values[i] = make_uint4(0, 0, 0, 0);
        if (first_col + i * STEP < p.k) {
            const int head = at.head + (SAME_D ? i * p.heads_per_step : 0);
            values[i] = load_global_stream_v4(attn + head * p.attn_stride_head + at.d * 2);
        }
    }
    const bool poisoned = position < 0 || position >= p.num_positions;
    if (SAME_D && !poisoned && d[0] + MX_COLS_PER_LANE > first_rotated) {
        load_rotation(p, r, d[0], position);
    }
#pragma unroll
    for (int i = 0; i < UNROLL; i++) {
        const bool exists = first_col + i * STEP < p.k;
        if (poisoned) {
            values[i] = make_uint4(0x7FFF7FFFu, 0x7FFF7FFFu, 0x7FFF7FFFu, 0x7FFF7FFFu);
        } else if (d[i] + MX_COLS_PER_LANE > first_rotated && exists) {
            if (!SAME_D) {
                load_rotation(p, r, d[i], position);
            }
            values[i] = rotate_8(p, values[i], d[i], r);
        }
        __syncwarp();
        uint32_t word;
        const uint2 bytes = quantize_8<SPAN>(values[i], &word);
        if (exists) {
            *(uint2 *)(x + i * STEP) = bytes;
        }
        if (exists && writes_scale) {
            *(uint32_t *)x_scale = word;
        }
        x_scale += x_scale_step;
    }
}

#define MX_INV_ROPE_KERNEL(NAME, UNROLL, WARPS, SAME_D, SPAN)                                                        \
    extern "C" __global__ void __launch_bounds__(32 * WARPS) NAME(const struct mx_sm90_inv_rope_params p) {          \
        inv_rope_token<UNROLL, WARPS, SAME_D, SPAN>(p);                                                              \
    }

/* The shipped forms; sm90_stream.c names them. Few tokens: more blocks, each with one piece a warp. */
/* clang-format off */
/*                 name                            unroll  warps  same d  span */
MX_INV_ROPE_KERNEL(mx_sm90_inv_rope_1_32,          1,      8,     false,  32)
MX_INV_ROPE_KERNEL(mx_sm90_inv_rope_1_128,         1,      8,     false,  128)
MX_INV_ROPE_KERNEL(mx_sm90_inv_rope_1_256,         1,      8,     false,  256)
MX_INV_ROPE_KERNEL(mx_sm90_inv_rope_4_32,          4,      4,     false,  32)
MX_INV_ROPE_KERNEL(mx_sm90_inv_rope_4_128,         4,      4,     false,  128)
MX_INV_ROPE_KERNEL(mx_sm90_inv_rope_4_256,         4,      4,     false,  256)
MX_INV_ROPE_KERNEL(mx_sm90_inv_rope_4_same_d_32,   4,      4,     true,   32)
MX_INV_ROPE_KERNEL(mx_sm90_inv_rope_4_same_d_128,  4,      4,     true,   128)
MX_INV_ROPE_KERNEL(mx_sm90_inv_rope_4_same_d_256,  4,      4,     true,   256)
/* clang-format on */
