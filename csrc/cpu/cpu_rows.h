/*
 * cpu_rows.h - functions of a variant that need no intrinsics, written once. Each cpu_dot_*.c wraps them in functions
 * of its instruction set, so the compiler makes vector code of the same text for each.
 */
#ifndef VLLM_MEGAATTN_CPU_ROWS_H
#define VLLM_MEGAATTN_CPU_ROWS_H

#include <math.h>

#include "cpu_internal.h"

#define MX_ROW_FN static inline __attribute__((always_inline))

/* unit * 2^(byte - 127), but never Inf: bytes above MX_CPU_SCALE_MAX occur with zeros, which must stay zeros, and in
 * irregular rows. */
MX_ROW_FN void row_find_factors(const uint8_t *scale, float unit, float *factor) {
    for (int b = 0; b < MX_CPU_CHUNK_BLOCKS; b++) {
        bool huge = scale[b] > MX_CPU_SCALE_MAX && scale[b] != MX_SCALE_NAN;
        factor[b] = unit * mx_f32_from_scale(huge ? MX_CPU_SCALE_MAX : scale[b]);
    }
}

/* Overwrites out[k] with NaN where elements[k] is NaN; for decoders that turn 0x7F into a number. */
MX_ROW_FN void row_patch_nan(const uint8_t *elements, int num_elements, float *out) {
    for (int k = 0; k < num_elements; k++) {
        if ((elements[k] & 0x7F) == MX_E4M3_NAN) {
            out[k] = NAN;
        }
    }
}

/* Step 3 of the order of summation: folds the lanes in halves. */
MX_ROW_FN float row_fold_lanes(float *lane) {
    for (int half = MX_CPU_LANES / 2; half > 0; half /= 2) {
        for (int l = 0; l < half; l++) {
            lane[l] += lane[l + half];
        }
    }
    return lane[0];
}

/* Steps 2 and 3 for any scale bytes. The scales of a pair of blocks are multiplied first, 2^e with e = x byte + w
 * byte - 254. Outside [-238, 238] an FMA's result no longer depends on e: every product but zero overflows, or is
 * far below half an ulp of anything FP32 can hold. So e stops there, and its two halves keep both factors
 * representable: 448 * 2^119 < 2^128, and 2^-9 * 2^-119 is a subnormal multiple of 2^-149. */
MX_ROW_FN float row_dot_exact(const uint8_t *x, const uint8_t *x_scale, const uint8_t *w, const uint8_t *w_scale,
                              int num_blocks) {
    float lane[MX_CPU_LANES] = {0};
    for (int b = 0; b < num_blocks; b++, x += MX_BLOCK, w += MX_BLOCK) {
        int e = x_scale[b] + w_scale[b] - 254;
        e = e < -238 ? -238 : e > 238 ? 238 : e;
        float x_factor = mx_f32_from_scale((uint8_t)(127 + e / 2));
        float w_factor = mx_f32_from_scale((uint8_t)(127 + e - e / 2));
        if (x_scale[b] == MX_SCALE_NAN || w_scale[b] == MX_SCALE_NAN) {
            x_factor = NAN;
        }
        for (int l = 0; l < MX_CPU_LANES; l++) {
            float x_upper = mx_f32_from_e4m3(x[16 + l]) * x_factor, x_lower = mx_f32_from_e4m3(x[l]) * x_factor;
            float w_upper = mx_f32_from_e4m3(w[16 + l]) * w_factor, w_lower = mx_f32_from_e4m3(w[l]) * w_factor;
            lane[l] = fmaf(x_upper, w_upper, lane[l]);
            lane[l] = fmaf(x_lower, w_lower, lane[l]);
        }
    }
    return row_fold_lanes(lane);
}

MX_ROW_FN void row_round_bf16(const float *sums, int64_t count, uint16_t *out) {
    for (int64_t i = 0; i < count; i++) {
        out[i] = sums[i] != sums[i] ? 0x7FC0 : mx_bf16_from_f32(sums[i]);
    }
}

MX_ROW_FN uint8_t row_quantize(const uint16_t *values, int64_t count, uint8_t *out) {
    uint32_t amax = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t magnitude = values[i] & 0x7FFFu;
        amax = magnitude > amax ? magnitude : amax;
    }
    uint8_t scale = mx_scale_from_amax(amax);
    for (int64_t i = 0; i < count; i++) {
        out[i] = mx_quantize_element(mx_f32_from_bf16(values[i]), scale);
    }
    return scale;
}

MX_ROW_FN void row_inv_rotate(const uint16_t *in, const float *cos, const float *sin, int64_t step, int64_t num_pairs,
                              uint16_t *out) {
    for (int64_t i = 0; i < num_pairs; i++) {
        float even = mx_f32_from_bf16(in[2 * i]), odd = mx_f32_from_bf16(in[2 * i + 1]);
        float c = cos[i * step], s = sin[i * step];
        out[2 * i] = mx_bf16_from_f32(fmaf(odd, s, even * c));
        out[2 * i + 1] = mx_bf16_from_f32(fmaf(-even, s, odd * c));
    }
}

#endif /* VLLM_MEGAATTN_CPU_ROWS_H */
