/*
 * sm90_gemm_store.cuh - how a finished tile leaves the registers: times the weights' scale, rounded to BF16, and either
 * stored so or quantised on the spot by the rules of mxfp8.h.
 *
 * Accumulator fragments are wgmma's: a quad of lanes holds neighbouring columns of one row, and of the row 8 below. A
 * row's 32 columns lie in one quad, so a block's maximum takes two shuffles.
 */
#ifndef VLLM_MEGAATTN_SM90_GEMM_STORE_CUH
#define VLLM_MEGAATTN_SM90_GEMM_STORE_CUH

#include "sm90_gemm.cuh"

/* ---- 32 columns of two rows ------------------------------------------------------------------------------- */

/* Transposes 4 x 4 words inside a quad: lane q ends with word q of each of the quad's lanes. */
MX_DEVICE void transpose_quad(uint32_t (&w)[4]) {
    const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
    const uint32_t a = __shfl_xor_sync(0xFFFFFFFFu, odd ? w[0] : w[1], 1);
    const uint32_t b = __shfl_xor_sync(0xFFFFFFFFu, odd ? w[2] : w[3], 1);
    const uint32_t u0 = odd ? a : w[0], u1 = odd ? w[1] : a, u2 = odd ? b : w[2], u3 = odd ? w[3] : b;
    const uint32_t c = __shfl_xor_sync(0xFFFFFFFFu, upper ? u0 : u2, 2);
    const uint32_t d = __shfl_xor_sync(0xFFFFFFFFu, upper ? u1 : u3, 2);
    w[0] = upper ? c : u0;
    w[1] = upper ? d : u1;
    w[2] = upper ? u2 : c;
    w[3] = upper ? u3 : d;
}

/* A lane's share of 32 result columns, rounded to BF16: pair j of a row holds columns 8 j + 2 q and + 1 (q = lane % 4);
 * `low` belongs to the lane's first row, `high` to the row 8 below. */
struct block_pairs {
    uint32_t low[4], high[4];
};

/* Rounds 16 accumulators of the fragment times the weights' scale. */
MX_DEVICE void round_block(struct block_pairs &b, const float *acc, float w_scale) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        b.low[j] = pack_bf16(acc[4 * j] * w_scale, acc[4 * j + 1] * w_scale);
        b.high[j] = pack_bf16(acc[4 * j + 2] * w_scale, acc[4 * j + 3] * w_scale);
    }
}

/* Largest BF16 magnitude of both rows over the lane's columns: low row in the low half. */
MX_DEVICE uint32_t block_amax(const struct block_pairs &b) {
    uint32_t low = magnitude_pair(b.low[0]), high = magnitude_pair(b.high[0]);
#pragma unroll
    for (int j = 1; j < 4; j++) {
        low = max_pairs(low, magnitude_pair(b.low[j]));
        high = max_pairs(high, magnitude_pair(b.high[j]));
    }
    return max_pairs(__byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632));
}

MX_DEVICE uint32_t max_over_quad(uint32_t amax) {
    amax = max_pairs(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, 1));
    return max_pairs(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, 2));
}

/* Writes 32 columns of both rows as BF16, 16 bytes a lane, 64 a quad. A row pointer is NULL where nothing is stored. */
MX_DEVICE void store_block_bf16(struct block_pairs &b, uint8_t *low_row, uint8_t *high_row, int col, int num_cols) {
    const int first = col + threadIdx.x % 4 * 8;
    transpose_quad(b.low);
    transpose_quad(b.high);
    if (low_row != NULL && first < num_cols) {
        *(uint4 *)(low_row + first * 2) = make_uint4(b.low[0], b.low[1], b.low[2], b.low[3]);
    }
    if (high_row != NULL && first < num_cols) {
        *(uint4 *)(high_row + first * 2) = make_uint4(b.high[0], b.high[1], b.high[2], b.high[3]);
    }
}

/* Writes 32 columns of both rows as e4m3, 8 bytes a lane, 32 a quad. */
MX_DEVICE void store_block_e4m3(const struct block_pairs &b, float low_multiplier, float high_multiplier,
                                uint8_t *low_row, uint8_t *high_row, int col, int num_cols) {
    const int first = col + threadIdx.x % 4 * 8;
    uint32_t w[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        w[j] = pack_e4m3(bf16_low(b.low[j]) * low_multiplier, bf16_high(b.low[j]) * low_multiplier) |
               pack_e4m3(bf16_low(b.high[j]) * high_multiplier, bf16_high(b.high[j]) * high_multiplier) << 16;
    }
    transpose_quad(w);
    if (low_row != NULL && first < num_cols) {
        *(uint2 *)(low_row + first) = make_uint2(__byte_perm(w[0], w[1], 0x5410), __byte_perm(w[2], w[3], 0x5410));
    }
    if (high_row != NULL && first < num_cols) {
        *(uint2 *)(high_row + first) = make_uint2(__byte_perm(w[0], w[1], 0x7632), __byte_perm(w[2], w[3], 0x7632));
    }
}

/* Writes one row's COUNT scale bytes from column `col` of the group on: 4 as a word, 2 as half of one, where F8_128x4
 * words are whole; else byte by byte, the group's own ones only. The last columns of the last group take along the
 * padding. */
template <int COUNT>
MX_DEVICE void store_scale_bytes(const struct mx_sm90_gemm_params &p, int group, int64_t row, int col,
                                 uint32_t bytes) {
    static_assert(COUNT == 2 || COUNT == 4, "half of a word or all of it");
    const int first = (group * p.num_rows + col) / MX_BLOCK; /* block column in z */
    uint8_t *out = p.out_scale + mx_f8_128x4_offset(row, first, p.scale_col_tiles);
    if (p.num_rows % 128 == 0) {
        if (COUNT == 4) {
            *(uint32_t *)out = bytes;
        } else {
            *(uint16_t *)out = (uint16_t)bytes;
        }
        return;
    }
    const int valid = min(COUNT, (p.num_rows - col) / MX_BLOCK), total = p.num_groups * p.num_rows / MX_BLOCK;
    for (int i = 0; i < valid; i++) {
        p.out_scale[mx_f8_128x4_offset(row, first + i, p.scale_col_tiles)] = (uint8_t)(bytes >> (8 * i));
    }
    if (valid > 0 && first + valid == total) {
        for (int i = total; i < p.scale_col_tiles * MX_TILE_COLS; i++) {
            p.out_scale[mx_f8_128x4_offset(row, i, p.scale_col_tiles)] = 0;
        }
    }
}

/* ---- a half of a tile ------------------------------------------------------------------------------------ */

/* Where the lane's two rows of a tile go; NULL for rows that do not exist. */
struct out_rows {
    uint8_t *low, *high;
    int64_t low_token; /* the other one is 8 further */
    bool have_scales;  /* the rows lie in the padded range, whose scale bytes are all written */
};

/* `row` is the lane's first row of the tile. */
MX_DEVICE struct out_rows locate_rows(const struct mx_sm90_gemm_params &p, const struct tile &t, int row) {
    struct out_rows rows;
    rows.low_token = (int64_t)t.token + row;
    uint8_t *low = p.out + t.group * p.out_stride_group + rows.low_token * p.out_stride_token;
    rows.low = rows.low_token < p.num_tokens ? low : NULL;
    rows.high = rows.low_token + 8 < p.num_tokens ? low + 8 * p.out_stride_token : NULL;
    rows.have_scales = rows.low_token < mx_ceil_div(p.num_tokens, MX_TILE_ROWS) * MX_TILE_ROWS;
    return rows;
}

/* Scale bytes of both rows (bits 0 to 7 and 16 to 23) from their maxima. */
MX_DEVICE uint32_t scales_from_amax(uint32_t amax) {
    return scale_from_amax(amax & 0xFFFF) | scale_from_amax(amax >> 16) << 16;
}

/* Quantises and stores the 32-column block that starts at `col` of the group. */
MX_DEVICE void store_quantized(const struct block_pairs &b, const struct out_rows &rows, uint32_t scales, int col,
                               int num_cols) {
    store_block_e4m3(b, quantize_multiplier(scales & 0xFF), quantize_multiplier(scales >> 16), rows.low, rows.high,
                     col, num_cols);
}

/* Writes the scale bytes of COUNT x 32 columns for both rows; padding rows get zeros. One lane of a quad does it. */
template <int COUNT>
MX_DEVICE void store_scales(const struct mx_sm90_gemm_params &p, const struct tile &t, const struct out_rows &rows,
                            int col, uint32_t low_bytes, uint32_t high_bytes) {
    if (threadIdx.x % 4 == 0 && rows.have_scales && col < p.num_rows) {
        store_scale_bytes<COUNT>(p, t.group, rows.low_token, col, rows.low != NULL ? low_bytes : 0);
        store_scale_bytes<COUNT>(p, t.group, rows.low_token + 8, col, rows.high != NULL ? high_bytes : 0);
    }
}

/* Writes BLOCKS x 32 finished columns from `col` of the group on; w_scale has one factor per 32 columns. */
template <int OUTPUT, int BLOCKS>
MX_DEVICE void store_columns(const struct mx_sm90_gemm_params &p, const struct tile &t, int row, int col,
                             const float *acc, const float (&w_scale)[BLOCKS]) {
    static_assert(OUTPUT != OUT_MX128 || BLOCKS == 4, "a 128-column maximum must lie in one warp");
    const struct out_rows rows = locate_rows(p, t, row);
    struct block_pairs b[BLOCKS];
    uint32_t amax[BLOCKS], low_word = 0, high_word = 0;

#pragma unroll
    for (int i = 0; i < BLOCKS; i++) {
        round_block(b[i], acc + 16 * i, w_scale[i]);
        amax[i] = block_amax(b[i]);
    }
    if constexpr (OUTPUT == OUT_BF16) {
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            store_block_bf16(b[i], rows.low, rows.high, col + i * MX_BLOCK, p.num_rows);
        }
    } else {
        if (OUTPUT == OUT_MX128) {
#pragma unroll
            for (int i = 1; i < BLOCKS; i++) {
                amax[0] = max_pairs(amax[0], amax[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            const uint32_t scales = scales_from_amax(max_over_quad(amax[OUTPUT == OUT_MX128 ? 0 : i]));
            store_quantized(b[i], rows, scales, col + i * MX_BLOCK, p.num_rows);
            low_word |= (scales & 0xFF) << (8 * i);
            high_word |= scales >> 16 << (8 * i);
        }
        store_scales<BLOCKS>(p, t, rows, col, low_word, high_word);
    }
}

/* OUT_MX256: the first half, rounded, waiting for the second one's maximum. */
template <int BLOCKS> struct rounded_half {
    struct block_pairs b[BLOCKS];
    uint32_t amax;
};

template <int BLOCKS>
MX_DEVICE void round_half(struct rounded_half<BLOCKS> &half, const float *acc, const float (&w_scale)[BLOCKS]) {
    half.amax = 0;
#pragma unroll
    for (int i = 0; i < BLOCKS; i++) {
        round_block(half.b[i], acc + 16 * i, w_scale[i]);
        half.amax = max_pairs(half.amax, block_amax(half.b[i]));
    }
}

/* OUT_MX256: writes two neighbouring halves of 128 columns under their common scale. */
MX_DEVICE void store_both_halves(const struct mx_sm90_gemm_params &p, const struct tile &t, int row, int col,
                                 const struct rounded_half<4> &first, const struct rounded_half<4> &second) {
    const struct out_rows rows = locate_rows(p, t, row);
    const uint32_t scales = scales_from_amax(max_over_quad(max_pairs(first.amax, second.amax)));
    const uint32_t low_word = (scales & 0xFF) * 0x01010101u, high_word = (scales >> 16) * 0x01010101u;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        store_quantized(first.b[i], rows, scales, col + i * MX_BLOCK, p.num_rows);
        store_quantized(second.b[i], rows, scales, col + 128 + i * MX_BLOCK, p.num_rows);
    }
    store_scales<4>(p, t, rows, col, low_word, high_word);
    store_scales<4>(p, t, rows, col + 128, low_word, high_word);
}

#endif /* VLLM_MEGAATTN_SM90_GEMM_STORE_CUH */
