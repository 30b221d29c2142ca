/*
 * sm100_gemm.cuh - pieces of the Blackwell matrix product: the order of the tiles, the ring of operand stages, scale
 * words in the order the tensor core wants, and the way results leave the registers.
 *
 * An epilogue warp sees 32 weight rows of a tile, one per lane, and its tokens in registers, one per column of tensor
 * memory:
 *
 *              token 0  1  2 ..
 *     lane 0 [  acc[0] acc[1] .. ]   row 32 w            \
 *     lane 1 [                   ]   row 32 w + 1         } one MX block per token: 32 lanes, one warp-wide maximum
 *      ...                                               /
 */
#ifndef VLLM_MEGAATTN_SM100_GEMM_CUH
#define VLLM_MEGAATTN_SM100_GEMM_CUH

#include "sm100_params.h"
#include "tcgen05_sm100.cuh"

/* What the epilogue writes. */
enum mx_output { OUT_BF16 = 0, OUT_MX32 = 32 };

/* ---- tiles ----------------------------------------------------------------------------------------------- */

struct tile {
    int group, row; /* first weight row, within the group */
    int token;      /* first token */
    int width;      /* tokens the instruction takes: a multiple of 16; those from num_tokens on do not exist */
    int cut;
};

MX_DEVICE int num_tiles(const struct mx_sm100_tiling &tiling) {
    return tiling.cut[0].num_tiles + tiling.cut[1].num_tiles;
}

/* Tile number `index`: cut 0 before cut 1; in a cut, bands of row tiles, then token tiles, row tiles innermost. */
template <int CTAS> MX_DEVICE struct tile locate_tile(const struct mx_sm100_tiling &tiling, int index) {
    struct tile t;
    int row_tile, token_tile = 0;
    t.cut = index >= tiling.cut[0].num_tiles;
    index -= t.cut ? tiling.cut[0].num_tiles : 0;
    const struct mx_sm100_cut &cut = tiling.cut[t.cut];
    if (cut.num_t == 1) { /* few tokens: spares three divisions on the way to the first copy */
        row_tile = cut.first_row + index;
    } else {
        const int band = index / (tiling.band * cut.num_t);
        const int rows = min(tiling.band, cut.num_rows - band * tiling.band);
        index -= band * tiling.band * cut.num_t;
        token_tile = index / rows;
        row_tile = cut.first_row + band * tiling.band + index - token_tile * rows;
    }
    t.width = cut.width;
    t.token = token_tile * cut.width;
    t.group = row_tile / tiling.rows_per_group;
    t.row = (row_tile - t.group * tiling.rows_per_group) * (MX_SM100_ROWS * CTAS);
    return t;
}

/* ---- ring ------------------------------------------------------------------------------------------------ */

/* Position in the ring of stages; `parity` flips every time round. */
struct ring {
    uint32_t stage, parity;
};

MX_DEVICE void ring_advance(struct ring &r, int num_stages) {
    r.stage++;
    if (r.stage == (uint32_t)num_stages) {
        r.stage = 0;
        r.parity ^= 1;
    }
}

/* ---- scales ---------------------------------------------------------------------------------------------- */

/* The tensor core's scale word of a row: the bytes of four 32-column blocks, lowest K in the low byte. PACKED and
 * F8_128X4 keep it as one aligned word. A lane's share of TILES x 128 rows is rows lane, lane + 32, lane + 64,
 * lane + 96 of each 128: */
template <int TILES> struct scale_words {
    uint32_t word[TILES][4];
};

/* Where its words of K block 0 are; those of K block k are k * step further. NULL for rows that do not exist. */
template <int TILES> struct scale_rows {
    const uint8_t *row[TILES][4];
    int64_t step;
};

template <int TILES>
MX_DEVICE void locate_scale_rows(struct scale_rows<TILES> &rows, const struct mx_sm100_scales &s, int group, int row,
                                 int row_end) {
    const uint8_t *base = s.data + group * s.stride_group;
    rows.step = s.layout == MX_SCALE_PACKED ? s.stride_col : MX_TILE_BYTES;
#pragma unroll
    for (int i = 0; i < TILES; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int r = row + i * 128 + j * 32 + threadIdx.x % 32;
            const int64_t offset =
                s.layout == MX_SCALE_PACKED ? r * s.stride_row : mx_f8_128x4_offset(r, 0, s.num_col_tiles);
            rows.row[i][j] = r < row_end ? base + offset : NULL;
        }
    }
}

template <int TILES>
MX_DEVICE void load_scale_words(struct scale_words<TILES> &w, const struct scale_rows<TILES> &rows, int k_block) {
#pragma unroll
    for (int i = 0; i < TILES; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            w.word[i][j] = rows.row[i][j] != NULL ? *(const uint32_t *)(rows.row[i][j] + k_block * rows.step) : 0;
        }
    }
}

/* The same for weights with a byte per block of rows and columns. Blocks of K from num_blocks on give 0. */
MX_DEVICE void load_scale_bytes(struct scale_words<1> &w, const struct mx_sm100_scales &s, int group, int row,
                                int row_end, int k_block, int num_blocks) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const int r = row + j * 32 + threadIdx.x % 32;
        const uint8_t *bytes = s.data + group * s.stride_group + (r >> s.row_shift) * s.stride_row;
        w.word[0][j] = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int block = k_block * 4 + i;
            if (r < row_end && block < num_blocks) {
                w.word[0][j] |= (uint32_t)bytes[(block >> s.col_shift) * s.stride_col] << (8 * i);
            }
        }
    }
}

/* Puts them where tmem_copy_scales expects them: row L of a 512-byte tile holds the words of rows L, L + 32,
 * L + 64 and L + 96, which is also the F8_128x4 order. Ordinary stores, so every lane fences before the warp's
 * arrival. */
template <int TILES> MX_DEVICE void store_scale_words(const struct scale_words<TILES> &w, uint32_t tile) {
    const uint32_t row = tile + threadIdx.x % 32 * 16;
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        store_shared_v4_u32(row + i * MX_TILE_BYTES, w.word[i][0], w.word[i][1], w.word[i][2], w.word[i][3]);
    }
    fence_proxy_async_shared();
    __syncwarp();
}

/* ---- results --------------------------------------------------------------------------------------------- */

/* What an epilogue thread needs of a tile to place its results. */
struct result_row {
    uint8_t *out;       /* element (token 0, this lane's row) */
    bool valid;         /* the row exists */
    uint32_t out_scale; /* shared memory: byte of (token 0 of the tile, this warp's 32 rows); MXFP8 only */
};

/* What an element is multiplied by before it is rounded, 2^(127 - scale), as BF16 bits. A flushed block (scale 0) is
 * multiplied by zero, which keeps its signs, a poisoned one (0xFF) by NaN, which the conversion turns into 0x7F. */
MX_DEVICE uint32_t quantize_multiplier(uint32_t scale) {
    const uint32_t bits = scale == 0 ? 0 : (254 - scale) << 7;
    return scale == MX_SCALE_NAN ? 0x7FC0 : bits;
}

/* Maxima over the warp's 32 rows of 2 * PAIRS tokens' magnitudes, two tokens a word: lane l ends with those of pair
 * l * PAIRS / 32. While there are several pairs, each step hands half of them to the other half of the lanes.
 * NOTE: BF16 bits compared as integers put NaN above Inf above every finite number. */
template <int PAIRS> MX_DEVICE uint32_t max_over_rows(const uint32_t (&pairs)[PAIRS]) {
    uint32_t m[PAIRS];
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        m[i] = pairs[i] & 0x7FFF7FFFu;
    }
#pragma unroll
    for (int offset = 16, n = PAIRS / 2; offset > 0; offset /= 2, n /= 2) {
        const bool upper = threadIdx.x & offset;
        if (n == 0) {
            m[0] = __vmaxu2(m[0], __shfl_xor_sync(0xFFFFFFFFu, m[0], offset));
        }
#pragma unroll
        for (int i = 0; i < n; i++) {
            const uint32_t keep = upper ? m[i + n] : m[i], give = upper ? m[i] : m[i + n];
            m[i] = __vmaxu2(keep, __shfl_xor_sync(0xFFFFFFFFu, give, offset));
        }
    }
    return m[0];
}

/* Rounds COUNT tokens' accumulators of this lane's row to BF16 and writes them, from tile token `local` on. A warp's
 * store covers one token's 32 rows: 64 bytes of BF16 or one 32-byte sector of e4m3, no transposition needed. */
template <int OUTPUT, int COUNT>
MX_DEVICE void store_tokens(const struct mx_sm100_gemm_params &p, const struct result_row &row, const struct tile &t,
                            const uint32_t (&acc)[COUNT], int local) {
    constexpr int PAIRS = COUNT / 2, LANES = 32 / PAIRS; /* lanes that know a pair's maximum */
    const int lane = threadIdx.x % 32;
    const int num_valid = row.valid ? p.num_tokens - t.token - local : 0; /* may be above COUNT, or negative */
    uint8_t *out = row.out + (t.token + local) * p.out_stride_token;
    uint32_t pairs[PAIRS];
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        pairs[i] = pack_bf16(__uint_as_float(acc[2 * i]), __uint_as_float(acc[2 * i + 1]));
    }
    if (OUTPUT == OUT_BF16) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            if (i < num_valid) {
                *(uint16_t *)out = (uint16_t)(pairs[i / 2] >> (i % 2 * 16));
            }
            out += p.out_stride_token;
        }
        return;
    }

    const uint32_t amax = max_over_rows(pairs);
    const uint32_t low = mx_scale_from_amax(amax & 0xFFFF), high = mx_scale_from_amax(amax >> 16);
    const uint32_t multipliers = quantize_multiplier(low) | quantize_multiplier(high) << 16;
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        /* NOTE: exact wherever the product does not round to zero in e4m3. */
        const uint32_t v = multiply_bf16_pair(pairs[i], __shfl_sync(0xFFFFFFFFu, multipliers, i * LANES));
        const uint32_t bytes = pack_e4m3(bf16_low(v), bf16_high(v));
        if (2 * i < num_valid) {
            *out = (uint8_t)bytes;
        }
        out += p.out_stride_token;
        if (2 * i + 1 < num_valid) {
            *out = (uint8_t)(bytes >> 8);
        }
        out += p.out_stride_token;
    }
    if (lane % LANES < 2) { /* one lane per token */
        const int i = lane / LANES * 2 + lane % LANES;
        store_shared_u8(row.out_scale + (local + i) * 4, i < num_valid ? (lane % LANES == 0 ? low : high) : 0);
    }
}

/* Writes one token's scale bytes of the tile's 128 rows: one word where N is a multiple of 128, so that the
 * F8_128x4 word is this tile's alone; else the bytes that are, and with the last group's last ones the padding
 * after them. */
MX_DEVICE void store_scale_word(const struct mx_sm100_gemm_params &p, const struct tile &t, int64_t token,
                                uint32_t word) {
    const int first = (t.group * p.num_rows + t.row) / MX_BLOCK;
    if (p.num_rows % 128 == 0) {
        *(uint32_t *)(p.out_scale + mx_f8_128x4_offset(token, first, p.scale_col_tiles)) = word;
        return;
    }
    const int num_valid = min(4, (p.num_rows - t.row) / MX_BLOCK), num_all = p.num_groups * p.num_rows / MX_BLOCK;
    for (int i = 0; i < num_valid; i++) {
        p.out_scale[mx_f8_128x4_offset(token, first + i, p.scale_col_tiles)] = (uint8_t)(word >> (8 * i));
    }
    if (first + num_valid == num_all) {
        for (int i = num_all; i < p.scale_col_tiles * MX_TILE_COLS; i++) {
            p.out_scale[mx_f8_128x4_offset(token, i, p.scale_col_tiles)] = 0;
        }
    }
}

/* Writes the scale words of the tile's tokens from `first` to `end` (of this block, in a split), gathered in shared
 * memory at `table`; those of tokens that do not exist are 0x00 and were never gathered. */
MX_DEVICE void store_scales(const struct mx_sm100_gemm_params &p, const struct tile &t, uint32_t table, int first,
                            int end) {
    if (t.row >= p.num_rows) {
        return; /* the second block of a pair, where N has only rows for the first */
    }
    for (int i = first + threadIdx.x % 128; i < end; i += 128) {
        const uint32_t word = t.token + i < p.num_tokens ? load_shared_u32(table + i * 4) : 0;
        store_scale_word(p, t, (int64_t)t.token + i, word);
    }
}

/* Rows of scales a token tile writes: its tokens, and in the last tile the padding up to a multiple of 128. */
MX_DEVICE int num_scale_rows(const struct mx_sm100_gemm_params &p, const struct tile &t) {
    const bool last = t.token + t.width >= p.num_tokens;
    return last ? (p.num_tokens + MX_TILE_ROWS - 1) / MX_TILE_ROWS * MX_TILE_ROWS - t.token : t.width;
}

#endif /* VLLM_MEGAATTN_SM100_GEMM_CUH */
