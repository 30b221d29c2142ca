/*
 * cpu_dot_avx2.c - decode, dot product and row functions with AVX2, FMA and F16C: two vectors of 8 floats are the 16
 * lanes of the order of summation.
 *
 * Functions carry their instruction set as an attribute, so the file needs no compiler flags; nothing here runs
 * before cpu_features.c has found the instructions.
 */
#include "cpu_rows.h"

#if defined(__x86_64__)

#include <immintrin.h>

#define AVX2     __attribute__((target("avx2,fma,f16c")))
#define AVX2_INL static inline __attribute__((always_inline, target("avx2,fma,f16c")))

/* ---- decode ------------------------------------------------------------------------------------------------ */

AVX2 static void avx2_find_factors(const uint8_t *scale, float *factor) { row_find_factors(scale, 256.0f, factor); }

/* e4m3 -> FP32 goes through half precision, whose conversion handles subnormals at full speed: with the sign moved to
 * bit 15 and the seven other bits to bits 13..7, an e4m3 byte is the half-precision number e4m3 * 2^-8. Only NaN is
 * not (0x7F reads as 1.875, the largest pattern) and gets patched, if there is one. */
AVX2 static void avx2_decode(const uint8_t *elements, const float *factor, int num_blocks, void *out) {
    const __m256i sign_and_magnitude = _mm256_set1_epi16((short)0xBF80), magnitude = _mm256_set1_epi16(0x3F80);
    float *out_row = out;

    __m256i largest = _mm256_setzero_si256();
    for (int b = 0; b < num_blocks; b++) {
        __m256 f = _mm256_set1_ps(factor[b]);
#pragma GCC unroll 2
        for (int k = b * MX_BLOCK; k < (b + 1) * MX_BLOCK; k += 16) {
            /* Sign extension fills bits 15..7 with the sign; the shift leaves it in 15 and 14, the mask in 15 */
            __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(elements + k)));
            __m256i shifted = _mm256_slli_epi16(wide, 7);
            __m256i half = _mm256_and_si256(shifted, sign_and_magnitude);
            largest = _mm256_max_epu16(largest, _mm256_and_si256(shifted, magnitude));

            __m256 lower = _mm256_cvtph_ps(_mm256_castsi256_si128(half));
            __m256 upper = _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1));
            _mm256_storeu_ps(out_row + k, _mm256_mul_ps(lower, f));
            _mm256_storeu_ps(out_row + k + 8, _mm256_mul_ps(upper, f));
        }
    }
    if (_mm256_movemask_epi8(_mm256_cmpeq_epi16(largest, magnitude))) {
        row_patch_nan(elements, num_blocks * MX_BLOCK, out_row);
    }
}

/* ---- dot product ------------------------------------------------------------------------------------------- */

/* Step 3 for four vectors of lanes l + (l + 8): element n of the result is the folded vector n. */
AVX2_INL __m128 fold_four(const __m256 *v) {
    /* lane l + lane l + 4:  [ v0 (4) | v1 (4) ], [ v2 (4) | v3 (4) ] */
    __m256 v01 = _mm256_add_ps(_mm256_permute2f128_ps(v[0], v[1], 0x20), _mm256_permute2f128_ps(v[0], v[1], 0x31));
    __m256 v23 = _mm256_add_ps(_mm256_permute2f128_ps(v[2], v[3], 0x20), _mm256_permute2f128_ps(v[2], v[3], 0x31));
    /* lane l + lane l + 2:  [ v0 (2), v2 (2) | v1 (2), v3 (2) ] */
    __m256 half = _mm256_add_ps(_mm256_shuffle_ps(v01, v23, 0x44), _mm256_shuffle_ps(v01, v23, 0xEE));
    /* lane 0 + lane 1:      [ v0, v0, v2, v2 | v1, v1, v3, v3 ] */
    __m256 whole = _mm256_add_ps(half, _mm256_permute_ps(half, 0xB1));
    return _mm_unpacklo_ps(_mm_permute_ps(_mm256_castps256_ps128(whole), 0x08),
                           _mm_permute_ps(_mm256_extractf128_ps(whole, 1), 0x08));
}

/* A register tile of `tokens` x 6 accumulators of eight lanes, first for lanes 0 to 7, then for 8 to 15: 2 x 6
 * accumulators, 2 vectors of x and one of w are 15 of the 16 registers. `tokens` is a constant where this is inlined,
 * so the loops over it unroll. */
AVX2_INL void dot_tile(const float *x, const float *w, const int tokens, int num_blocks, float *sums) {
    const int count = tokens * MX_CPU_TILE_ROWS;
    __m256 folded[2 * MX_CPU_TILE_ROWS + 2]; /* lane l + lane l + 8; 6 sums are padded to 8 */
    for (int first_lane = 0; first_lane < MX_CPU_LANES; first_lane += 8) {
        __m256 acc[2 * MX_CPU_TILE_ROWS];
#pragma GCC unroll 12
        for (int i = 0; i < count; i++) {
            acc[i] = _mm256_setzero_ps();
        }
        for (int k = first_lane; k < num_blocks * MX_BLOCK; k += MX_BLOCK) {
#pragma GCC unroll 2
            for (int half = 16; half >= 0; half -= 16) { /* the upper half of the block first */
                __m256 x_t[2];
#pragma GCC unroll 2
                for (int t = 0; t < tokens; t++) {
                    x_t[t] = _mm256_loadu_ps(x + t * MX_CPU_ROW + k + half);
                }
#pragma GCC unroll 6
                for (int n = 0; n < MX_CPU_TILE_ROWS; n++) {
                    __m256 w_n = _mm256_loadu_ps(w + n * MX_CPU_ROW + k + half);
#pragma GCC unroll 2
                    for (int t = 0; t < tokens; t++) {
                        __m256 *acc_tn = &acc[t * MX_CPU_TILE_ROWS + n];
                        *acc_tn = _mm256_fmadd_ps(x_t[t], w_n, *acc_tn);
                    }
                }
            }
        }
#pragma GCC unroll 12
        for (int i = 0; i < count; i++) {
            folded[i] = first_lane ? _mm256_add_ps(folded[i], acc[i]) : acc[i];
        }
    }
    folded[count] = folded[count + 1] = _mm256_setzero_ps();
#pragma GCC unroll 3
    for (int i = 0; i < count; i += 4) {
        _mm_storeu_ps(sums + i, fold_four(folded + i));
    }
}

AVX2 static void avx2_dot(const void *x, const void *w, int num_tokens, int num_blocks, float *sums) {
    if (num_tokens == 1) {
        dot_tile(x, w, 1, num_blocks, sums);
    } else {
        dot_tile(x, w, 2, num_blocks, sums);
    }
}

AVX2 static float avx2_dot_exact(const uint8_t *x, const uint8_t *x_scale, const uint8_t *w, const uint8_t *w_scale,
                                 int num_blocks) {
    return row_dot_exact(x, x_scale, w, w_scale, num_blocks);
}

/* ---- rows -------------------------------------------------------------------------------------------------- */

AVX2 static void avx2_round_bf16(const float *sums, int64_t count, uint16_t *out) {
    row_round_bf16(sums, count, out);
}

AVX2 static uint8_t avx2_quantize(const uint16_t *values, int64_t count, uint8_t *out) {
    return row_quantize(values, count, out);
}

AVX2 static void avx2_inv_rotate(const uint16_t *in, const float *cos, const float *sin, int64_t step,
                                 int64_t num_pairs, uint16_t *out) {
    row_inv_rotate(in, cos, sin, step, num_pairs, out);
}

const struct mx_cpu_variant mx_cpu_avx2 = {
    .name = "avx2",
    .element_bytes = sizeof(float),
    .max_tokens = 2,
    .find_factors = avx2_find_factors,
    .decode = avx2_decode,
    .dot = avx2_dot,
    .dot_exact = avx2_dot_exact,
    .round_bf16 = avx2_round_bf16,
    .quantize = avx2_quantize,
    .inv_rotate = avx2_inv_rotate,
};

#endif /* __x86_64__ */
