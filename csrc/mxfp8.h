/*
 * mxfp8.h - the numeric and layout rules of MXFP8, each stated once.
 *
 * Every kernel of this package, C or CUDA, takes its rules from here: how a block gets its scale byte, how an
 * element is rounded, how a byte is decoded, and where the scale of (row, block) lives in memory.
 *
 * The format (OCP MX v1.0): elements are e4m3 bytes (sign, 4 exponent bits with bias 7, 3 mantissa bits; largest
 * finite 448, NaN = 0x7F / 0xFF, no infinity). Each 32 consecutive elements along K share one UE8M0 byte s:
 *
 *     value = e4m3 * 2^(s - 127)          s = 0 is 2^-127, s = 254 is 2^127, s = 255 is NaN for the whole block
 *
 * The quantiser's rules:
 *   1. s = 127 + e, e the smallest integer with amax <= 448 * 2^e, where amax is the largest magnitude of the
 *      block's values AFTER they were rounded to BF16. Integer test on the BF16 bits, no reciprocal, no exponent floor.
 *   2. A block of zeros: s = 0, data zero, signs kept.
 *   3. amax <= 448 * 2^-127 (rule 1 gives s <= 0): s = 0 and the data is flushed to zero, signs kept.
 *   4. Any NaN or Inf in a block: s = 0xFF and every element 0x7F. Never laundered, never spread to another block.
 *   5. Elements: round to nearest even, saturating at 448.
 *   6. A block may share one scale with its neighbours (a "span" of 64, 128, 256, ... columns): the rules hold with
 *      amax taken over the span, and the byte is repeated. Still valid MXFP8.
 *
 * Build without fast-math and without flush-to-zero: byte 0 and byte 254 need FP32 subnormals.
 * The header is plain C11 and CUDA C++; functions are static inline and pure.
 */
#ifndef VLLM_MEGAATTN_MXFP8_H
#define VLLM_MEGAATTN_MXFP8_H

#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define MX_FN static __host__ __device__ __forceinline__
#else
#define MX_FN static inline
#endif

#define MX_BLOCK      32   /* elements that share a scale byte */
#define MX_E4M3_NAN   0x7F /* what an element of a poisoned block holds */
#define MX_SCALE_NAN  0xFF /* UE8M0 NaN */
#define MX_SCALE_ONE  127  /* UE8M0 of 1.0 */
#define MX_BF16_INF   0x7F80
#define MX_TILE_ROWS  128 /* F8_128x4: rows of a scale tile ... */
#define MX_TILE_COLS  4   /* ... and its block columns (4 x 32 elements) */
#define MX_TILE_BYTES 512

/* ---- bit casts and BF16 ---------------------------------------------------------------------------------- */

MX_FN uint32_t mx_bits_of_f32(float f) {
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

MX_FN float mx_f32_of_bits(uint32_t u) {
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

MX_FN float mx_f32_from_bf16(uint16_t b) { return mx_f32_of_bits((uint32_t)b << 16); }

/* Round to nearest even. A finite value from 2^128 * (1 - 2^-9) on becomes Inf; NaN stays NaN (quiet, sign kept). */
MX_FN uint16_t mx_bf16_from_f32(float f) {
    uint32_t u = mx_bits_of_f32(f);
    if ((u & 0x7FFFFFFFu) > 0x7F800000u) {
        return (uint16_t)((u >> 16) | 0x0040u);
    }
    return (uint16_t)((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
}

/* ---- scale bytes ----------------------------------------------------------------------------------------- */

/* Byte of a block whose largest BF16 magnitude has the bits `amax` (sign cleared). Rules 1 to 4: a mantissa above
 * 0x60 means above 1.75, so the power of two must carry; 448 = 1.75 * 2^8 explains the 8. */
MX_FN uint8_t mx_scale_from_amax(uint32_t amax) {
    int byte;
    if (amax >= MX_BF16_INF) {
        return MX_SCALE_NAN;
    }
    byte = (int)((amax + 0x1Fu) >> 7) - 8;
    return (uint8_t)(byte > 0 ? byte : 0);
}

/* 2^(byte - 127) exactly: byte 0 is the FP32 subnormal 2^-127, byte 255 is NaN. */
MX_FN float mx_f32_from_scale(uint8_t byte) {
    uint32_t bits = (uint32_t)byte << 23;
    if (byte == 0) {
        bits = 0x00400000u;
    }
    if (byte == MX_SCALE_NAN) {
        bits = 0x7FC00000u;
    }
    return mx_f32_of_bits(bits);
}

/* 2^(127 - byte), what an element is multiplied by before it is rounded to e4m3. Only for bytes that
 * mx_scale_from_amax can return for live data, 1..247: there it is a normal FP32 number. */
MX_FN float mx_f32_from_scale_inverse(uint8_t byte) { return mx_f32_of_bits((uint32_t)(254 - byte) << 23); }

/* ---- e4m3 elements --------------------------------------------------------------------------------------- */

/* Round to nearest even, saturate at 448 (Inf too), keep the sign of zero; NaN becomes 0x7F. */
MX_FN uint8_t mx_e4m3_from_f32(float f) {
    uint32_t u = mx_bits_of_f32(f);
    uint32_t sign = (u >> 24) & 0x80u;
    uint32_t mag = u & 0x7FFFFFFFu;
    if (mag > 0x7F800000u) {
        return MX_E4M3_NAN;
    }
    if (mag >= 0x43E00000u) { /* 448 and above */
        return (uint8_t)(sign | 0x7Eu);
    }
    if (mag >= 0x3C800000u) { /* 2^-6, the smallest normal: keep 3 of 23 mantissa bits, rebias 127 -> 7 */
        uint32_t rounded = mag + 0x7FFFFu + ((mag >> 20) & 1u);
        return (uint8_t)(sign | ((rounded >> 20) - (120u << 3)));
    }
    /* Subnormals are multiples of 2^-9: adding 2^14 leaves exactly them in the low mantissa bits, rounded to even. */
    mag = mx_bits_of_f32(mx_f32_of_bits(mag) + 16384.0f) - 0x46800000u;
    return (uint8_t)(sign | mag);
}

/* Exact value of an element: every e4m3 number is an FP32 number. */
MX_FN float mx_f32_from_e4m3(uint8_t e) {
    uint32_t sign = (uint32_t)(e & 0x80u) << 24;
    uint32_t mag = e & 0x7Fu;
    if (mag == MX_E4M3_NAN) {
        return mx_f32_of_bits(0x7FC00000u | sign);
    }
    if (mag < 8) { /* zero and subnormals: mag * 2^-9 */
        return mx_f32_of_bits(mx_bits_of_f32((float)mag * 0.001953125f) | sign);
    }
    return mx_f32_of_bits(sign | ((mag << 20) + (120u << 23)));
}

/* One element of a block whose scale byte is known: rules 3, 4 and 5. `value` is a BF16 number. */
MX_FN uint8_t mx_quantize_element(float value, uint8_t scale) {
    if (scale == MX_SCALE_NAN) {
        return MX_E4M3_NAN;
    }
    if (scale == 0) {
        return (uint8_t)((mx_bits_of_f32(value) >> 24) & 0x80u);
    }
    return mx_e4m3_from_f32(value * mx_f32_from_scale_inverse(scale));
}

/* ---- where scale bytes live ------------------------------------------------------------------------------ */

MX_FN int64_t mx_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* F8_128x4 (cuBLASLt's 1-D block scaling layout, torch's SWIZZLE_32_4_4, TransformerEngine's GEMM-swizzled form):
 * 128 rows x 4 block columns make a 512-byte tile, tiles lie row-major, and inside a tile
 *
 *     byte 16 * i + 4 * j + c   holds   row 32 * j + i, block column c       (i < 32, j < 4, c < 4)
 *
 * so one 16-byte group holds rows i, i+32, i+64, i+96 and one aligned 32-bit word holds a row's four bytes. */
MX_FN int64_t mx_f8_128x4_offset(int64_t row, int64_t col, int64_t num_col_tiles) {
    int64_t tile = (row >> 7) * num_col_tiles + (col >> 2);
    return tile * MX_TILE_BYTES + (row & 31) * 16 + ((row >> 5) & 3) * 4 + (col & 3);
}

/* Bytes of an F8_128x4 buffer for `rows` rows and `cols` block columns, whole tiles; padding bytes are 0x00. */
MX_FN int64_t mx_f8_128x4_bytes(int64_t rows, int64_t cols) {
    return mx_ceil_div(rows, MX_TILE_ROWS) * mx_ceil_div(cols, MX_TILE_COLS) * MX_TILE_BYTES;
}

/* Where the scale byte of (group, row, k-block of 32) lives. One description for every form the package reads. */
enum mx_scale_layout {
    MX_SCALE_BLOCKS =
        0, /* uint8 [G, ceil(rows/block_rows), ceil(K/block_cols)], any strides (1x32, 32x32, 128x128, ...) */
    MX_SCALE_PACKED =
        1, /* int32 [G, rows, K/128], four bytes along K per word, lowest K in the low byte, any strides */
    MX_SCALE_F8_128X4 = 2, /* the tiled layout above; one group */
};

struct mx_scales {
    const uint8_t *data;   /* borrowed from the caller's tensor for the duration of the call */
    int32_t layout;        /* enum mx_scale_layout */
    int32_t block_rows;    /* BLOCKS: rows that share one byte; else 1 */
    int64_t block_cols;    /* BLOCKS: K elements that share one byte, a multiple of 32; else 32 */
    int64_t stride_group;  /* bytes from one group to the next */
    int64_t stride_row;    /* BLOCKS, PACKED: bytes from one (block) row to the next */
    int64_t stride_col;    /* BLOCKS: bytes between block columns; PACKED: bytes between words */
    int64_t num_col_tiles; /* F8_128X4: ceil(ceil(K/32) / 4) */
};

MX_FN uint8_t mx_scale_at(const struct mx_scales *s, int64_t group, int64_t row, int64_t k_block) {
    const uint8_t *base = s->data + group * s->stride_group;
    switch (s->layout) {
    case MX_SCALE_PACKED:
        return base[row * s->stride_row + (k_block >> 2) * s->stride_col + (k_block & 3)];
    case MX_SCALE_F8_128X4:
        return base[mx_f8_128x4_offset(row, k_block, s->num_col_tiles)];
    default:
        return base[(row / s->block_rows) * s->stride_row + (k_block * MX_BLOCK / s->block_cols) * s->stride_col];
    }
}

#endif /* VLLM_MEGAATTN_MXFP8_H */
