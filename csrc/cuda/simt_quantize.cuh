/*
 * simt_quantize.cuh - BF16 to MXFP8 inside a warp: the rules of mxfp8.h on packed registers.
 *
 * A lane holds 8 consecutive columns as four BF16 pairs, a warp therefore 256 columns. The largest magnitude is taken
 * on the BF16 bits as integers, which orders NaN above Inf above every finite number; so a poisoned block shows itself
 * in the maximum and needs no test of its own.
 */
#ifndef VLLM_MEGAATTN_SIMT_QUANTIZE_CUH
#define VLLM_MEGAATTN_SIMT_QUANTIZE_CUH

#include "../mxfp8.h"
#include "ptx_sm90.cuh"

#define MX_COLS_PER_LANE 8
#define MX_COLS_PER_WARP 256

/* x / divisor by its reciprocal ceil(2^32 / divisor), for x < 2^32 / divisor; a reciprocal of 0 stands for divisor 1. */
MX_DEVICE uint32_t divide(uint32_t x, uint32_t reciprocal) { return reciprocal == 0 ? x : __umulhi(x, reciprocal); }

/* Larger of each half of two pairs of BF16 magnitudes (sign bits cleared). */
MX_DEVICE uint32_t max_pairs(uint32_t a, uint32_t b) { return __vmaxu2(a, b); }

MX_DEVICE uint32_t magnitude_pair(uint32_t pair) { return pair & 0x7FFF7FFFu; }

/* The larger half of a pair. */
MX_DEVICE uint32_t max_of_pair(uint32_t pair) { return max(pair >> 16, pair & 0xFFFFu); }

MX_DEVICE uint32_t max_magnitude(uint4 v) {
    return max_of_pair(max_pairs(max_pairs(magnitude_pair(v.x), magnitude_pair(v.y)),
                                 max_pairs(magnitude_pair(v.z), magnitude_pair(v.w))));
}

/* Maximum over the lanes that share a span of 32, 128 or 256 columns: 4, 16 or 32 lanes. */
template <int SPAN> MX_DEVICE uint32_t max_over_span(uint32_t amax) {
#pragma unroll
    for (int lanes = 1; lanes < SPAN / MX_COLS_PER_LANE; lanes *= 2) {
        amax = max(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, lanes));
    }
    return amax;
}

/* mx_scale_from_amax without branches. */
MX_DEVICE uint32_t scale_from_amax(uint32_t amax) {
    const int byte = max((int)((amax + 0x1Fu) >> 7) - 8, 0);
    return amax >= MX_BF16_INF ? MX_SCALE_NAN : (uint32_t)byte;
}

/* What an element is multiplied by before it is rounded: 2^(127 - scale). A flushed block (scale 0) is multiplied by
 * zero, which keeps its signs, a poisoned one (0xFF) by NaN, which the conversion turns into 0x7F. */
MX_DEVICE float quantize_multiplier(uint32_t scale) {
    uint32_t bits = (254 - scale) << 23;
    bits = scale == 0 ? 0 : bits;
    bits = scale == MX_SCALE_NAN ? 0x7FC00000u : bits;
    return __uint_as_float(bits);
}

/* Four BF16 values (two pairs) to four e4m3 bytes. */
MX_DEVICE uint32_t quantize_4(uint32_t pair0, uint32_t pair1, float multiplier) {
    uint32_t low = pack_e4m3(bf16_low(pair0) * multiplier, bf16_high(pair0) * multiplier);
    uint32_t high = pack_e4m3(bf16_low(pair1) * multiplier, bf16_high(pair1) * multiplier);
    return low | high << 16;
}

/* The scale word of 128 columns (16 lanes), the same in all of them: byte j belongs to lanes 4 j to 4 j + 3. */
template <int SPAN> MX_DEVICE uint32_t scale_word(uint32_t scale) {
    if (SPAN > 32) {
        return scale * 0x01010101u;
    }
    uint32_t word = scale << (8 * (threadIdx.x / 4 % 4));
    word |= __shfl_xor_sync(0xFFFFFFFFu, word, 4);
    word |= __shfl_xor_sync(0xFFFFFFFFu, word, 8);
    return word;
}

/* Rules 1 to 6 for the warp's 256 columns: returns the lane's 8 bytes, and the scale word of its 128 columns. */
template <int SPAN> MX_DEVICE uint2 quantize_8(uint4 v, uint32_t *word) {
    const uint32_t scale = scale_from_amax(max_over_span<SPAN>(max_magnitude(v)));
    const float multiplier = quantize_multiplier(scale);
    *word = scale_word<SPAN>(scale);
    return make_uint2(quantize_4(v.x, v.y, multiplier), quantize_4(v.z, v.w, multiplier));
}

#endif /* VLLM_MEGAATTN_SIMT_QUANTIZE_CUH */
