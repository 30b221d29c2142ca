/*
 * cpu_dot_scalar.c - decode, dot product and row functions in plain C: what the other variants are compared with, and
 * what runs on processors they do not know. fmaf needs no hardware FMA to be right, only to be fast.
 */
#include "cpu_rows.h"

/* ---- decode ------------------------------------------------------------------------------------------------ */

static void scalar_find_factors(const uint8_t *scale, float *factor) { row_find_factors(scale, 1.0f, factor); }

static void scalar_decode(const uint8_t *elements, const float *factor, int num_blocks, void *out) {
    float *out_row = out;
    for (int b = 0; b < num_blocks; b++) {
        for (int i = 0; i < MX_BLOCK; i++) {
            out_row[b * MX_BLOCK + i] = mx_f32_from_e4m3(elements[b * MX_BLOCK + i]) * factor[b];
        }
    }
}

/* ---- dot product ------------------------------------------------------------------------------------------- */

static void scalar_dot(const void *x, const void *w, int num_tokens, int num_blocks, float *sums) {
    for (int t = 0; t < num_tokens; t++) {
        for (int n = 0; n < MX_CPU_TILE_ROWS; n++) {
            const float *x_t = (const float *)x + (int64_t)t * MX_CPU_ROW;
            const float *w_n = (const float *)w + (int64_t)n * MX_CPU_ROW;
            float lane[MX_CPU_LANES] = {0};
            for (int b = 0; b < num_blocks; b++, x_t += MX_BLOCK, w_n += MX_BLOCK) {
                for (int l = 0; l < MX_CPU_LANES; l++) {
                    lane[l] = fmaf(x_t[16 + l], w_n[16 + l], lane[l]);
                    lane[l] = fmaf(x_t[l], w_n[l], lane[l]);
                }
            }
            sums[t * MX_CPU_TILE_ROWS + n] = row_fold_lanes(lane);
        }
    }
}

static float scalar_dot_exact(const uint8_t *x, const uint8_t *x_scale, const uint8_t *w, const uint8_t *w_scale,
                              int num_blocks) {
    return row_dot_exact(x, x_scale, w, w_scale, num_blocks);
}

/* ---- rows -------------------------------------------------------------------------------------------------- */

static void scalar_round_bf16(const float *sums, int64_t count, uint16_t *out) { row_round_bf16(sums, count, out); }

static uint8_t scalar_quantize(const uint16_t *values, int64_t count, uint8_t *out) {
    return row_quantize(values, count, out);
}

static void scalar_inv_rotate(const uint16_t *in, const float *cos, const float *sin, int64_t step, int64_t num_pairs,
                              uint16_t *out) {
    row_inv_rotate(in, cos, sin, step, num_pairs, out);
}

const struct mx_cpu_variant mx_cpu_scalar = {
    .name = "scalar",
    .element_bytes = sizeof(float),
    .max_tokens = 4,
    .find_factors = scalar_find_factors,
    .decode = scalar_decode,
    .dot = scalar_dot,
    .dot_exact = scalar_dot_exact,
    .round_bf16 = scalar_round_bf16,
    .quantize = scalar_quantize,
    .inv_rotate = scalar_inv_rotate,
};
