/*
 * cpu_dot_avx512.c - decode, dot product and row functions with AVX-512 (F, BW, VL, DQ): one vector of 16 floats
 * is the 16 lanes of the order of summation.
 *
 * Functions carry their instruction set as an attribute, so the file needs no compiler flags; nothing here runs
 * before cpu_features.c has found the instructions.
 */
#include "cpu_rows.h"

#if defined(__x86_64__)

#include <immintrin.h>
#include <string.h>

#define AVX512_TARGET "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c"
#define AVX512        __attribute__((target(AVX512_TARGET)))
#define AVX512_INL    static inline __attribute__((always_inline, target(AVX512_TARGET)))
#define BF16          __attribute__((target(AVX512_TARGET ",avx512bf16")))
#define BF16_INL      static inline __attribute__((always_inline, target(AVX512_TARGET ",avx512bf16")))

/* ---- decode ------------------------------------------------------------------------------------------------ */

AVX512 static void avx512_find_factors(const uint8_t *scale, float *factor) {
    row_find_factors(scale, 256.0f, factor);
}

/* e4m3 -> FP32 goes through half precision, whose conversion handles subnormals at full speed: with the sign moved to
 * bit 15 and the seven other bits to bits 13..7, an e4m3 byte is the half-precision number e4m3 * 2^-8. Only NaN is
 * not (0x7F reads as 1.875, the largest pattern) and gets patched, if there is one. */
AVX512 static void avx512_decode(const uint8_t *elements, const float *factor, int num_blocks, void *out) {
    const __m512i sign_and_magnitude = _mm512_set1_epi16((short)0xBF80), magnitude = _mm512_set1_epi16(0x3F80);
    float *out_row = out;
    __m512i largest = _mm512_setzero_si512();
    for (int b = 0; b < num_blocks; b++, elements += MX_BLOCK, out_row += MX_BLOCK) {
        /* Sign extension fills bits 15..7 with the sign; the shift leaves it in 15 and 14, the mask in 15 */
        __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)elements));
        __m512i shifted = _mm512_slli_epi16(wide, 7);
        __m512i half = _mm512_and_si512(shifted, sign_and_magnitude);
        largest = _mm512_max_epu16(largest, _mm512_and_si512(shifted, magnitude));

        __m512 f = _mm512_set1_ps(factor[b]);
        __m512 lower = _mm512_cvtph_ps(_mm512_castsi512_si256(half));
        __m512 upper = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1));
        _mm512_storeu_ps(out_row, _mm512_mul_ps(lower, f));
        _mm512_storeu_ps(out_row + 16, _mm512_mul_ps(upper, f));
    }
    if (_mm512_cmpeq_epi16_mask(largest, magnitude)) {
        const int num_elements = num_blocks * MX_BLOCK;
        row_patch_nan(elements - num_elements, num_elements, out_row - num_elements);
    }
}

/* ---- dot product ------------------------------------------------------------------------------------------- */

/* Step 3 for eight vectors at once: the result's element n is the folded vector n. Each level adds the two halves of
 * what is left of a vector and puts two vectors into one. */
AVX512_INL __m256 fold_eight(const __m512 *v) {
    __m512 half[4], quarter[2];

    /* lane l + lane l + 8:  [ v0 (8) | v1 (8) ] */
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512 kept = _mm512_mask_blend_ps(0xFF00, v[2 * i], v[2 * i + 1]);
        __m512 moved = _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x4E);
        half[i] = _mm512_add_ps(kept, moved);
    }
    /* lane l + lane l + 4:  [ v0 (4) | v1 (4) | v2 (4) | v3 (4) ] */
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        __m512 low = _mm512_shuffle_f32x4(half[2 * i], half[2 * i + 1], 0x88);
        __m512 high = _mm512_shuffle_f32x4(half[2 * i], half[2 * i + 1], 0xDD);
        quarter[i] = _mm512_add_ps(low, high);
    }
    /* lane l + lane l + 2:  [ v0 (2), v4 (2) | v1 (2), v5 (2) | ... ] */
    __m512 eighth = _mm512_add_ps(_mm512_shuffle_ps(quarter[0], quarter[1], 0x44),
                                  _mm512_shuffle_ps(quarter[0], quarter[1], 0xEE));
    /* lane 0 + lane 1:      [ v0, v0, v4, v4 | v1, v1, v5, v5 | ... ] */
    __m512 whole = _mm512_add_ps(eighth, _mm512_permute_ps(eighth, 0xB1));
    const __m512i pick = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 0, 0, 0, 0, 0, 0, 0);
    return _mm512_castps512_ps256(_mm512_permutexvar_ps(pick, whole));
}

/* The whole of acc[tokens * 6], folded. */
AVX512_INL void fold_tile(const __m512 *acc, const int tokens, float *sums) {
    const int count = tokens * MX_CPU_TILE_ROWS;
#pragma GCC unroll 3
    for (int i = 0; i < count; i += 8) {
        __m512 v[8];
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            v[j] = i + j < count ? acc[i + j] : _mm512_setzero_ps();
        }
        _mm256_storeu_ps(sums + i, fold_eight(v));
    }
}

/* A register tile of `tokens` x 6 accumulators over one chunk: 4 x 6 accumulators, 6 vectors of w and one of x are 31
 * of the 32 registers. `tokens` is a constant where this is inlined, so the loops over it unroll. */
AVX512_INL void dot_tile(const float *x, const float *w, const int tokens, int num_blocks, float *sums) {
    __m512 acc[4 * MX_CPU_TILE_ROWS];
#pragma GCC unroll 24
    for (int i = 0; i < tokens * MX_CPU_TILE_ROWS; i++) {
        acc[i] = _mm512_setzero_ps();
    }
    for (int k = 0; k < num_blocks * MX_BLOCK; k += MX_BLOCK) {
#pragma GCC unroll 2
        for (int half = 16; half >= 0; half -= 16) { /* the upper half of the block first */
            __m512 w_n[MX_CPU_TILE_ROWS];
#pragma GCC unroll 6
            for (int n = 0; n < MX_CPU_TILE_ROWS; n++) {
                w_n[n] = _mm512_loadu_ps(w + n * MX_CPU_ROW + k + half);
            }
#pragma GCC unroll 4
            for (int t = 0; t < tokens; t++) {
                __m512 x_t = _mm512_loadu_ps(x + t * MX_CPU_ROW + k + half);
#pragma GCC unroll 6
                for (int n = 0; n < MX_CPU_TILE_ROWS; n++) {
                    __m512 *acc_tn = &acc[t * MX_CPU_TILE_ROWS + n];
                    *acc_tn = _mm512_fmadd_ps(x_t, w_n[n], *acc_tn);
                }
            }
        }
    }
    fold_tile(acc, tokens, sums);
}

AVX512 static void avx512_dot(const void *x, const void *w, int num_tokens, int num_blocks, float *sums) {
    switch (num_tokens) {
    case 1:
        dot_tile(x, w, 1, num_blocks, sums);
        break;
    case 2:
        dot_tile(x, w, 2, num_blocks, sums);
        break;
    case 3:
        dot_tile(x, w, 3, num_blocks, sums);
        break;
    default:
        dot_tile(x, w, 4, num_blocks, sums);
    }
}

AVX512 static float avx512_dot_exact(const uint8_t *x, const uint8_t *x_scale, const uint8_t *w,
                                     const uint8_t *w_scale, int num_blocks) {
    return row_dot_exact(x, x_scale, w, w_scale, num_blocks);
}

/* ---- rows -------------------------------------------------------------------------------------------------- */

AVX512 static void avx512_round_bf16(const float *sums, int64_t count, uint16_t *out) {
    row_round_bf16(sums, count, out);
}

/* mx_e4m3_from_f32 for 16 finite values, branch-free: both ways of rounding, then the right one. */
AVX512_INL __m128i e4m3_from_f32(__m512 value) {
    __m512i bits = _mm512_castps_si512(value);
    __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7FFFFFFF));
    __m512i sign = _mm512_and_si512(_mm512_srli_epi32(bits, 24), _mm512_set1_epi32(0x80));

    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(magnitude, 20), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(magnitude, _mm512_set1_epi32(0x7FFFF)), odd);
    __m512i normal = _mm512_sub_epi32(_mm512_srli_epi32(rounded, 20), _mm512_set1_epi32(120 << 3));

    __m512 shifted = _mm512_add_ps(_mm512_castsi512_ps(magnitude), _mm512_set1_ps(16384.0f));
    __m512i subnormal = _mm512_sub_epi32(_mm512_castps_si512(shifted), _mm512_set1_epi32(0x46800000));

    __mmask16 small = _mm512_cmplt_epu32_mask(magnitude, _mm512_set1_epi32(0x3C800000));
    __m512i byte = _mm512_mask_mov_epi32(normal, small, subnormal);
    byte = _mm512_min_epu32(byte, _mm512_set1_epi32(0x7E));
    return _mm512_cvtepi32_epi8(_mm512_or_si512(byte, sign));
}

AVX512 static uint8_t avx512_quantize(const uint16_t *values, int64_t count, uint8_t *out) {
    __m512i largest = _mm512_setzero_si512();
    for (int64_t i = 0; i < count; i += MX_BLOCK) {
        __m512i bits = _mm512_loadu_si512(values + i);
        largest = _mm512_max_epu16(largest, _mm512_and_si512(bits, _mm512_set1_epi16(0x7FFF)));
    }
    /* the larger of the two halves of each 32-bit lane, then of the lanes */
    largest = _mm512_max_epu32(_mm512_srli_epi32(largest, 16), _mm512_and_si512(largest, _mm512_set1_epi32(0xFFFF)));
    uint8_t scale = mx_scale_from_amax(_mm512_reduce_max_epu32(largest));
    if (scale == 0 || scale == MX_SCALE_NAN) {
        for (int64_t i = 0; i < count; i++) {
            out[i] = mx_quantize_element(mx_f32_from_bf16(values[i]), scale);
        }
        return scale;
    }
    __m512 inverse = _mm512_set1_ps(mx_f32_from_scale_inverse(scale));
    for (int64_t i = 0; i < count; i += 16) {
        __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(values + i)));
        __m512 value = _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
        _mm_storeu_si128((__m128i *)(out + i), e4m3_from_f32(_mm512_mul_ps(value, inverse)));
    }
    return scale;
}

AVX512 static void avx512_inv_rotate(const uint16_t *in, const float *cos, const float *sin, int64_t step,
                                     int64_t num_pairs, uint16_t *out) {
    row_inv_rotate(in, cos, sin, step, num_pairs, out);
}

/* ---- the same with BF16 products --------------------------------------------------------------------------- */

/* A regular row's values are BF16 numbers, the upper halves of their FP32 patterns. Within a block, the 32-bit lane l
 * holds column l below and column 16 + l above, the order in which VDPBF16PS adds. */
AVX512_INL void pack_bf16_row(const float *row, int num_blocks, uint16_t *out) {
    for (int k = 0; k < num_blocks * MX_BLOCK; k += MX_BLOCK) {
        __m512i lower = _mm512_srli_epi32(_mm512_castps_si512(_mm512_loadu_ps(row + k)), 16);
        __m512i upper = _mm512_castps_si512(_mm512_loadu_ps(row + k + 16));
        _mm512_storeu_si512(out + k, _mm512_mask_blend_epi16(0xAAAAAAAAu, lower, upper));
    }
}

/* A magnitude m of e4m3 is m << 4 in BF16, up to the exponent: (byte - 7) << 7 is what the scale and the difference of
 * the two biases add to it. Subnormals are not; these are theirs (3 is 1.5 * 2: one above 2, of exponent -1 where 4 has
 * 0, and half a mantissa). Zero lies so far below that it stays below any exponent. */
#define SUBNORMALS (short)0x8000, -2 * 128, -1 * 128, -1 * 128 + 64, 0, 32, 64, 96

/* The exponent is added as an integer: a third of the instructions of the way through FP32, which is left to rows with
 * NaN in them. */
AVX512 static void avx512bf16_decode(const uint8_t *elements, const float *factor, int num_blocks, void *out) {
    static const short small_values[32] = {SUBNORMALS};
    static const short interleaved[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                          8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i table = _mm512_loadu_si512(small_values), order = _mm512_loadu_si512(interleaved);
    const __m512i low_bits = _mm512_set1_epi16(0x7F), sign_bit = _mm512_set1_epi16((short)0x8000);
    __m512i largest = _mm512_setzero_si512();
    uint16_t *out_row = out;
    int largest_exponent = 0;
    for (int b = 0; b < num_blocks; b++) {
        uint32_t bits;
        memcpy(&bits, &factor[b], sizeof bits);
        const int exponent = (int)(bits >> 23); /* scale byte + 8: find_factors multiplies by 256 */
        const __m512i bias = _mm512_set1_epi16((short)((exponent - 15) * 128));
        largest_exponent = exponent > largest_exponent ? exponent : largest_exponent;

        __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(elements + b * MX_BLOCK)));
        wide = _mm512_permutexvar_epi16(order, wide);
        __m512i magnitude = _mm512_and_si512(wide, low_bits);
        __mmask32 is_small = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8));
        __m512i value = _mm512_mask_permutexvar_epi16(_mm512_slli_epi16(magnitude, 4), is_small, magnitude, table);
        value = _mm512_max_epi16(_mm512_adds_epi16(value, bias), _mm512_setzero_si512());
        largest = _mm512_max_epu16(largest, magnitude);
        _mm512_storeu_si512(out_row + b * MX_BLOCK, _mm512_or_si512(value, _mm512_and_si512(wide, sign_bit)));
    }
    if (_mm512_cmpeq_epi16_mask(largest, low_bits) || largest_exponent == 0xFF) {
        float row[MX_CPU_CHUNK];
        avx512_decode(elements, factor, num_blocks, row);
        pack_bf16_row(row, num_blocks, out);
    }
}

BF16_INL void dot_tile_bf16(const uint16_t *x, const uint16_t *w, const int tokens, int num_blocks, float *sums) {
    __m512 acc[4 * MX_CPU_TILE_ROWS];
#pragma GCC unroll 24
    for (int i = 0; i < tokens * MX_CPU_TILE_ROWS; i++) {
        acc[i] = _mm512_setzero_ps();
    }
    for (int k = 0; k < num_blocks * MX_BLOCK; k += MX_BLOCK) {
        __m512bh w_n[MX_CPU_TILE_ROWS];
#pragma GCC unroll 6
        for (int n = 0; n < MX_CPU_TILE_ROWS; n++) {
            w_n[n] = (__m512bh)_mm512_loadu_si512(w + n * MX_CPU_ROW + k);
        }
#pragma GCC unroll 4
        for (int t = 0; t < tokens; t++) {
            __m512bh x_t = (__m512bh)_mm512_loadu_si512(x + t * MX_CPU_ROW + k);
#pragma GCC unroll 6
            for (int n = 0; n < MX_CPU_TILE_ROWS; n++) {
                __m512 *acc_tn = &acc[t * MX_CPU_TILE_ROWS + n];
                *acc_tn = _mm512_dpbf16_ps(*acc_tn, x_t, w_n[n]);
            }
        }
    }
    fold_tile(acc, tokens, sums);
}

BF16 static void avx512bf16_dot(const void *x, const void *w, int num_tokens, int num_blocks, float *sums) {
    switch (num_tokens) {
    case 1:
        dot_tile_bf16(x, w, 1, num_blocks, sums);
        break;
    case 2:
        dot_tile_bf16(x, w, 2, num_blocks, sums);
        break;
    case 3:
        dot_tile_bf16(x, w, 3, num_blocks, sums);
        break;
    default:
        dot_tile_bf16(x, w, 4, num_blocks, sums);
    }
}

const struct mx_cpu_variant mx_cpu_avx512 = {
    .name = "avx512",
    .element_bytes = sizeof(float),
    .max_tokens = 4,
    .find_factors = avx512_find_factors,
    .decode = avx512_decode,
    .dot = avx512_dot,
    .dot_exact = avx512_dot_exact,
    .round_bf16 = avx512_round_bf16,
    .quantize = avx512_quantize,
    .inv_rotate = avx512_inv_rotate,
};

const struct mx_cpu_variant mx_cpu_avx512bf16 = {
    .name = "avx512bf16",
    .element_bytes = sizeof(uint16_t),
    .max_tokens = 4,
    .find_factors = avx512_find_factors,
    .decode = avx512bf16_decode,
    .dot = avx512bf16_dot,
    .dot_exact = avx512_dot_exact,
    .round_bf16 = avx512_round_bf16,
    .quantize = avx512_quantize,
    .inv_rotate = avx512_inv_rotate,
};

#endif /* __x86_64__ */
