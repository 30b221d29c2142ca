/*
 * sm90_decode_source.cuh - BF16 activations to swizzled e4m3 tiles in shared memory, inside the decode kernels.
 *
 * The work is cut into tasks of one token x 256 columns: a warp's 32 lanes hold 8 columns each, one 16-byte load and
 * one 8-byte store.
 */
#ifndef VLLM_MEGAATTN_SM90_DECODE_SOURCE_CUH
#define VLLM_MEGAATTN_SM90_DECODE_SOURCE_CUH

#include "simt_quantize.cuh"
#include "sm90_decode.h"

/* Where a lane's 8 columns of a span come from: a head of the group, and the first of 8 values there. */
struct source_column {
    uint32_t head, d;
};

MX_DEVICE struct source_column source_locate(const struct mx_sm90_decode_source &p, uint32_t col) {
    uint32_t block = col / MX_BLOCK;
    uint32_t quotient = p.divisor_reciprocal == 0 ? block : __umulhi(block, p.divisor_reciprocal);
    uint32_t remainder = block - quotient * p.divisor;
    uint32_t head = p.interleaved ? remainder : quotient, d_block = p.interleaved ? quotient : remainder;
    return {head, d_block * MX_BLOCK + col % MX_BLOCK};
}

/* Cosines and sines of the lane's four pairs. */
struct source_angles {
    float4 cos, sin;
};

/* `first`: how far into the rotated part the lane's columns start, a multiple of 8. */
MX_DEVICE struct source_angles source_load_angles(const struct mx_sm90_decode_source &p, int64_t position,
                                                  int first) {
    const float *row = p.cos_sin + position * p.cos_sin_stride;
    struct source_angles a;
    if (p.cache == MX_ROPE_HALVES) {
        a.cos = *(const float4 *)(row + first / 2);
        a.sin = *(const float4 *)(row + p.rope_dim / 2 + first / 2);
    } else {
        float4 low = *(const float4 *)(row + first), high = *(const float4 *)(row + first + 4);
        a.cos = make_float4(low.x, low.z, high.x, high.z);
        a.sin = make_float4(low.y, low.w, high.y, high.w);
    }
    return a;
}

/* Rotates one pair back and rounds it to BF16; the order of operations is kernels.h's. */
MX_DEVICE uint32_t source_rotate(uint32_t pair, float cos, float sin) {
    float even = bf16_low(pair), odd = bf16_high(pair);
    return pack_bf16(__fmaf_rn(odd, sin, __fmul_rn(even, cos)), __fmaf_rn(-even, sin, __fmul_rn(odd, cos)));
}

MX_DEVICE uint4 source_rotate_8(uint4 v, const struct source_angles &a) {
    return make_uint4(source_rotate(v.x, a.cos.x, a.sin.x), source_rotate(v.y, a.cos.y, a.sin.y),
                      source_rotate(v.z, a.cos.z, a.sin.z), source_rotate(v.w, a.cos.w, a.sin.w));
}

/* The block's share of the work and where its tiles go in shared memory. */
struct source_target {
    uint32_t tiles;  /* [num_spans][2 halves][N tokens][128 swizzled bytes] */
    uint32_t scales; /* float [num_spans][N] */
    int first_span, num_spans, num_tokens, group;
};

/* Zeroes the rows and scales of the tokens past the last. It reads nothing, so it may run before the previous kernel
 * is done. */
template <int N, int WARPS> MX_DEVICE void source_clear_padding(const struct source_target &to) {
    constexpr int UNITS = MX_DECODE_SPAN / 16; /* 16-byte stores per token and span */
#pragma unroll 1
    for (int i = threadIdx.x; i < to.num_spans * N * UNITS; i += WARPS * 32) {
        if (i / (UNITS / 2) % N >= to.num_tokens) {
            store_shared_v4_f32(to.tiles + i * 16, make_float4(0.0f, 0.0f, 0.0f, 0.0f));
        }
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < to.num_spans * N; i += WARPS * 32) {
        if (i % N >= to.num_tokens) {
            store_shared_f32(to.scales + i * 4, 0.0f);
        }
    }
}

/* Task -> span and token. */
struct source_task {
    int span, token;
};

MX_DEVICE struct source_task source_find_task(const struct mx_sm90_decode_source &p, const struct source_target &to,
                                              int task) {
    int span = (int)(((uint32_t)task * p.token_reciprocal) >> 20);
    return {span, task - span * to.num_tokens};
}

MX_DEVICE struct source_column source_find_column(const struct mx_sm90_decode_source &p,
                                                  const struct source_target &to, struct source_task t) {
    return source_locate(p, (to.first_span + t.span) * MX_DECODE_SPAN + threadIdx.x % 32 * MX_COLS_PER_LANE);
}

/* Position of the task's token; -1 poisons it. */
MX_DEVICE int source_load_position(const struct mx_sm90_decode_source &p, struct source_task t) {
    int64_t wanted = p.positions[t.token * p.positions_stride];
    return wanted >= 0 && wanted < p.num_positions ? (int)wanted : -1;
}

/* Rotates the task's values where they lie in the rotated part of a head. */
MX_DEVICE uint4 source_apply_rope(uint4 v, const struct mx_sm90_decode_source &p, const struct source_target &to,
                                  struct source_task t, int position) {
    int first = (int)source_find_column(p, to, t).d - p.rope_first;
    if (position < 0) {
        return make_uint4(0x7FFF7FFFu, 0x7FFF7FFFu, 0x7FFF7FFFu, 0x7FFF7FFFu);
    }
    return first >= 0 ? source_rotate_8(v, source_load_angles(p, position, first)) : v;
}

/* Quantises the task's values into their tile. */
template <int N> MX_DEVICE void source_store(uint4 v, struct source_task t, const struct source_target &to) {
    const int lane = threadIdx.x % 32;
    uint32_t scale = scale_from_amax(__reduce_max_sync(0xFFFFFFFFu, max_magnitude(v)));
    float multiplier = quantize_multiplier(scale);
    uint32_t tile = to.tiles + t.span * (N * MX_DECODE_SPAN) + lane / 16 * (N * 128);
    uint32_t chunk = (lane % 16 / 2) ^ (t.token % 8); /* the 128-byte swizzle */
    store_shared_v2_u32(tile + t.token * 128 + chunk * 16 + lane % 2 * 8, quantize_4(v.x, v.y, multiplier),
                        quantize_4(v.z, v.w, multiplier));
    if (lane == 0) {
        store_shared_f32(to.scales + (t.span * N + t.token) * 4, mx_f32_from_scale((uint8_t)scale));
    }
}

/* Warp `warp` of WARPS does its tasks, COUNT at a time for their loads to overlap. */
template <int N, int WARPS, int COUNT, bool ROTATE>
MX_DEVICE void source_quantize(const struct mx_sm90_decode_source &p, const struct source_target &to, int warp) {
    const int num_tasks = to.num_spans * to.num_tokens;
    const uint8_t *x = p.x + to.group * p.stride_group;
#pragma unroll 1
    for (int first = warp; first < num_tasks; first += COUNT * WARPS) {
        uint4 values[COUNT];
        int position[COUNT];
#pragma unroll
        for (int u = 0; u < COUNT; u++) {
            if (first + u * WARPS < num_tasks) {
                struct source_task t = source_find_task(p, to, first + u * WARPS);
                struct source_column at = source_find_column(p, to, t);
                values[u] =
                    load_global_stream_v4(x + (t.token * p.stride_token + at.head * p.stride_head + at.d * 2));
                position[u] = ROTATE ? source_load_position(p, t) : 0;
            }
        }
#pragma unroll
        for (int u = 0; u < COUNT; u++) {
            if (first + u * WARPS < num_tasks) {
                struct source_task t = source_find_task(p, to, first + u * WARPS);
                if (ROTATE) {
                    values[u] = source_apply_rope(values[u], p, to, t, position[u]);
                    __syncwarp();
                }
                source_store<N>(values[u], t, to);
            }
        }
    }
}

#endif /* VLLM_MEGAATTN_SM90_DECODE_SOURCE_CUH */
