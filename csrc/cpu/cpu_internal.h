/*
 * cpu_internal.h - what the files of the CPU backend share: the order of summation, and the functions that exist once
 * per instruction set.
 *
 * The order of summation. FP32 addition is not associative, so the result of a dot product is only defined together
 * with an order. This one is fixed by K alone, and every variant follows it to the bit; the number of tokens, the
 * number of threads, blocking, strides and the form in which scales are stored have no influence:
 *
 *     1. K is cut into chunks of MX_CPU_CHUNK columns; the last one may be shorter.
 *     2. A chunk is summed in 16 lanes that start at +0. Each block of 32 columns feeds lane l with two values, the
 *        upper half of the block first:
 *
 *            lane[l] = fma(x[16 + l], w[16 + l], lane[l]);   lane[l] = fma(x[l], w[l], lane[l])
 *
 *        where x and w are dequantised values, e4m3 * 2^(byte - 127), as real numbers: fma rounds once.
 *     3. The 16 lanes are folded in halves: lane l takes lane l + 8, then l + 4, l + 2, l + 1.
 *     4. The sums of the chunks are added in the order of k to a sum that starts at +0.
 *
 * Step 2 is what one VDPBF16PS does when the columns l and 16 + l of a block share a 32-bit lane, and what two FMAs
 * do on any other machine. A product of two e4m3 values has 8 significant bits, so it is exact; rounding happens in
 * additions only.
 *
 * Regular rows. Variants multiply decoded values, so these must be FP32 (or BF16) numbers, and their products must
 * stay clear of FP32's subnormal range, where VDPBF16PS flushes. Scale bytes 73 to 246 guarantee both: the smallest
 * product is 2^-9 * 2^-9 * 2^(2 * (73 - 127)) = 2^-126, the largest value 448 * 2^(246 - 127) < 2^128. NaN (255) is
 * fine as well, and so is any byte of a block of zeros. A row of a chunk that holds another byte is irregular: its
 * dot products come from `dot_exact`, which is slow and right everywhere. Attention outputs and weights of real
 * models lie near byte 120; the slow path is for completeness.
 */
#ifndef VLLM_MEGAATTN_CPU_INTERNAL_H
#define VLLM_MEGAATTN_CPU_INTERNAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels.h"

#define MX_CPU_SCALE_MIN    73 /* scale bytes of regular rows, see above */
#define MX_CPU_SCALE_MAX    246

#define MX_CPU_LANES        16
#define MX_CPU_CHUNK        1024 /* columns summed in one go: part of the order of summation */
#define MX_CPU_CHUNK_BLOCKS (MX_CPU_CHUNK / MX_BLOCK)
/* Elements between two decoded rows. Not a power of two: rows 4096 bytes apart would share the sets of an L1. */
#define MX_CPU_ROW       (MX_CPU_CHUNK + 32)
#define MX_CPU_TILE_ROWS 6  /* weight rows that are decoded and multiplied together: 24 KiB of FP32, half an L1 */
#define MX_CPU_SUMS      32 /* room for the results of `dot`, a multiple of 8 */

/* The functions of one instruction set. Decoded elements are FP32, or BF16 where `element_bytes` is 2; in which order
 * a row is stored within a block is the variant's own affair. */
struct mx_cpu_variant {
    const char *name;
    int element_bytes;
    int max_tokens; /* largest `num_tokens` of `dot` */

    /* What `decode` multiplies the blocks of a chunk by, for their MX_CPU_CHUNK_BLOCKS scale bytes: 2^(byte - 127)
     * times a constant that makes up for the way in which it reads the elements. NaN for byte 255, never Inf. */
    void (*find_factors)(const uint8_t *scale, float *factor);

    /* Decodes num_blocks * 32 elements of one row: out[k] = e4m3(elements[k]) * 2^(scale[k / 32] - 127). */
    void (*decode)(const uint8_t *elements, const float *factor, int num_blocks, void *out);

    /* One chunk of a tile: sums[t * MX_CPU_TILE_ROWS + n] = steps 2 and 3 above, for `num_tokens` rows of x and
     * MX_CPU_TILE_ROWS rows of w, decoded rows MX_CPU_ROW elements apart. May write up to MX_CPU_SUMS values. */
    void (*dot)(const void *x, const void *w, int num_tokens, int num_blocks, float *sums);

    /* One dot product over one chunk from the stored bytes, whatever the scale bytes are. */
    float (*dot_exact)(const uint8_t *x, const uint8_t *x_scale, const uint8_t *w, const uint8_t *w_scale,
                       int num_blocks);

    /* out[i] = BF16 of sums[i]; every NaN becomes 0x7FC0, since variants differ in the sign of NaN. */
    void (*round_bf16)(const float *sums, int64_t count, uint16_t *out);

    /* Quantises `count` BF16 values (a multiple of 32) that share one scale; returns its byte. */
    uint8_t (*quantize)(const uint16_t *values, int64_t count, uint8_t *out);

    /* Rotates `num_pairs` interleaved pairs back: out = the pairs of `in`, in BF16; cos and sin lie `step` floats
     * apart from pair to pair. */
    void (*inv_rotate)(const uint16_t *in, const float *cos, const float *sin, int64_t step, int64_t num_pairs,
                       uint16_t *out);
};

extern const struct mx_cpu_variant mx_cpu_scalar;
#if defined(__x86_64__)
extern const struct mx_cpu_variant mx_cpu_avx2;
extern const struct mx_cpu_variant mx_cpu_avx512;
extern const struct mx_cpu_variant mx_cpu_avx512bf16;
#endif

/* The variant in use, or NULL after writing the reason to exec->err. Safe to call from several threads at once. */
const struct mx_cpu_variant *mx_cpu_choose(const struct mx_exec *exec);

/* Writes one line to exec->err and returns `code`. */
int mx_cpu_fail(const struct mx_exec *exec, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* exec->parallel_for, or one call on this thread. */
void mx_cpu_parallel_for(const struct mx_exec *exec, int64_t count, int64_t grain, mx_range_fn f, void *ctx);

int mx_cpu_matmul(const struct mx_matmul *args, const struct mx_exec *exec);
int mx_cpu_quantize(const struct mx_quantize *args, const struct mx_exec *exec);
int mx_cpu_inv_rope(const struct mx_inv_rope *args, const struct mx_exec *exec);
int mx_cpu_reblock(const struct mx_reblock *args, const struct mx_exec *exec);

/* Quantises `cols` columns of one token from column `col` on; their scale bytes go to the F8_128x4 buffer. */
void mx_cpu_quantize_columns(const struct mx_cpu_variant *variant, const uint16_t *z, int64_t cols, int64_t span,
                             uint8_t *q, uint8_t *q_scale, int64_t token, int64_t col, int64_t num_col_tiles);

#endif /* VLLM_MEGAATTN_CPU_INTERNAL_H */
