/*
 * sm90_gemm_per32.cu - matrix product on any MXFP8: a scale per 32 columns of a token and any scale form of the weights.
 *
 * Every 32 columns of K the tensor cores' sum goes into fresh registers and
 *
 *     acc = fma(partial, x_scale[token, block] * w_scale[n, block], acc)
 *
 * The CUDA cores' FMAs, one per 32 products, are the limit, not the tensor cores. So that these never keep them waiting,
 * a tile's columns are multiplied in pieces of 64 with two sets of partial registers: a piece is promoted while the next
 * one is multiplied, by three consumer warpgroups in competition.
 *
 * The producer warpgroup's other three warps turn scale bytes into FP32 factors in shared memory, stage by stage.
 */
#include "sm90_gemm_store.cuh"

#define BLOCKS_PER_STAGE (BLOCK_K / MX_BLOCK) /* 32-column blocks of K in a stage */
#define NUM_SCALE_WARPS  3
#define PIECE_N          64 /* columns of a set of partial sums */

/* How weight scales lie in shared memory: one per 32 rows and block, or one per row and block. */
template <class C_, bool PER_ROW_> struct per32_config : C_ {
    static constexpr bool PER_ROW = PER_ROW_;
    static constexpr int PIECES = C_::BLOCK_N / PIECE_N; /* of the tile's columns, multiplied one after the other */
    static constexpr int FIRST_SCALE_WARP = 4 * C_::CONSUMERS + 1;
    static constexpr int CONSUMER_REGS = C_::CONSUMERS == 3 ? 152 : 216, PRODUCER_REGS = C_::CONSUMERS == 3 ? 56 : 72;
    static constexpr int X_SCALE_BYTES = BLOCKS_PER_STAGE * C_::BLOCK_M * 4; /* float [block][token] */
    static constexpr int W_SCALE_COUNT = PER_ROW ? C_::BLOCK_N : C_::BLOCK_N / MX_BLOCK;
    static constexpr int W_SCALE_BYTES = BLOCKS_PER_STAGE * W_SCALE_COUNT * 4; /* float [block][row or 32 rows] */
    static constexpr int SCALE_BYTES = X_SCALE_BYTES + W_SCALE_BYTES;
};

template <class C> MX_DEVICE uint32_t x_scale_address(uint32_t smem, uint32_t stage) {
    return smem + C::STAGES * (C::STAGE_BYTES + 16) + stage * C::SCALE_BYTES;
}

template <class C> MX_DEVICE uint32_t w_scale_address(uint32_t smem, uint32_t stage) {
    return x_scale_address<C>(smem, stage) + C::X_SCALE_BYTES;
}

/* ---- scale warps ----------------------------------------------------------------------------------------- */

/* Where a row's scale bytes start, in bytes from the operand's first (the host keeps it below 2^32). PACKED and F8_128X4
 * keep the four of a stage in an aligned word, `word_step` further every stage. */
MX_DEVICE uint32_t locate_scale_row(const struct mx_scales &s, int group, int row) {
    return (uint32_t)(group * s.stride_group + (s.layout == MX_SCALE_F8_128X4
                                                    ? mx_f8_128x4_offset(row, 0, s.num_col_tiles)
                                                    : row / s.block_rows * s.stride_row));
}

MX_DEVICE int64_t word_step(const struct mx_scales &s) {
    return s.layout == MX_SCALE_F8_128X4 ? MX_TILE_BYTES : s.stride_col;
}

MX_DEVICE uint32_t load_scale_word(const struct mx_scales &s, uint32_t row, int stage) {
    return *(const uint32_t *)(s.data + row + stage * word_step(s));
}

/* A row's four scales as loaded. BLOCKS keep them apart until they are used, so that nothing waits for them before; with
 * a row per lane and load there are too few registers for that. */
template <class C> struct weight_bytes {
    uint32_t byte[C::PER_ROW ? 1 : BLOCKS_PER_STAGE];
};

template <class C>
MX_DEVICE void load_weight_bytes(struct weight_bytes<C> &w, const struct mx_scales &s, uint32_t row, int stage,
                                 int num_blocks) {
    const uint32_t blocks_per_byte = (uint32_t)(s.block_cols / MX_BLOCK);
    if (s.layout != MX_SCALE_BLOCKS) {
        w.byte[0] = load_scale_word(s, row, stage);
        return;
    }
    if (C::PER_ROW) {
        w.byte[0] = 0;
    }
#pragma unroll
    for (int i = 0; i < BLOCKS_PER_STAGE; i++) {
        const uint32_t k_block = min(stage * BLOCKS_PER_STAGE + i, num_blocks - 1);
        const uint32_t byte =
            s.data[row + (blocks_per_byte == 1 ? k_block : k_block / blocks_per_byte) * s.stride_col];
        if (C::PER_ROW) {
            w.byte[0] |= byte << (8 * i);
        } else {
            w.byte[C::PER_ROW ? 0 : i] = byte;
        }
    }
}

template <class C> MX_DEVICE uint32_t combine_bytes(const struct weight_bytes<C> &w, const struct mx_scales &s) {
    if constexpr (C::PER_ROW) {
        return w.byte[0];
    } else {
        return s.layout != MX_SCALE_BLOCKS ? w.byte[0]
                                           : w.byte[0] | w.byte[1] << 8 | w.byte[2] << 16 | w.byte[3] << 24;
    }
}

/* Some byte is 0x00 or 0xFF, whose factor is not just the byte in the exponent's place. */
MX_DEVICE bool has_special(uint32_t word) {
    const uint32_t zeros = (word - 0x01010101u) & ~word, ones = (~word - 0x01010101u) & word;
    return ((zeros | ones) & 0x80808080u) != 0;
}

/* Writes the factors of one row's four blocks, lowest K first; of blocks past the end of K zero, whatever the padding
 * holds. */
MX_DEVICE void store_factors(uint32_t address, uint32_t block_stride, uint32_t word, int valid) {
    if (valid >= BLOCKS_PER_STAGE && !has_special(word)) {
        store_shared_u32(address, word << 23 & 0x7F800000u);
        store_shared_u32(address + block_stride, word << 15 & 0x7F800000u);
        store_shared_u32(address + 2 * block_stride, word << 7 & 0x7F800000u);
        store_shared_u32(address + 3 * block_stride, word >> 1 & 0x7F800000u);
    } else {
#pragma unroll 1
        for (int i = 0; i < BLOCKS_PER_STAGE; i++) {
            const float factor = i < valid ? mx_f32_from_scale((uint8_t)(word >> (8 * i))) : 0.0f;
            store_shared_f32(address + i * block_stride, factor);
        }
    }
}

/* The warps take stages in turn, so that each has three stages' time for loads and conversions. A lane has rows `lane`,
 * `lane` + 32, ... of both operands. */
template <class C>
MX_DEVICE void provide_scales(uint32_t smem, const struct mx_sm90_gemm_params &p, int warp, int rank) {
    constexpr int X_ROWS = C::BLOCK_M / 32, W_ROWS = (C::W_SCALE_COUNT + 31) / 32;
    static_assert(C::STAGES >= NUM_SCALE_WARPS, "a step through the ring wraps around once at most");
    const int num_k = (p.k + BLOCK_K - 1) / BLOCK_K, num_blocks = p.k / MX_BLOCK, lane = threadIdx.x % 32;
    uint32_t stage = warp, parity = 1; /* the warp's next place in the ring */
    int next = warp;                   /* the warp's next stage, counted from the tile's first */

    grid_dependency_wait();
    for (int index = blockIdx.x / C::CLUSTER; index < p.tiling.num_tiles; index += gridDim.x / C::CLUSTER) {
        const struct tile t = locate_tile<C>(p.tiling, index, rank);
        uint32_t x_rows[X_ROWS], x_words[X_ROWS], w_rows[W_ROWS];
        struct weight_bytes<C> w_bytes[W_ROWS];
#pragma unroll
        for (int j = 0; j < X_ROWS; j++) {
            x_rows[j] = locate_scale_row(p.x_scale, t.group, min(t.token + lane + j * 32, p.num_tokens - 1));
            x_words[j] = load_scale_word(p.x_scale, x_rows[j], min(next, num_k - 1));
        }
#pragma unroll
        for (int j = 0; j < W_ROWS; j++) {
            const int n = t.n + (lane + j * 32) * (C::PER_ROW ? 1 : MX_BLOCK);
            w_rows[j] = locate_scale_row(p.w_scale, t.group, min(n, p.num_rows - 1));
            load_weight_bytes(w_bytes[j], p.w_scale, w_rows[j], min(next, num_k - 1), num_blocks);
        }
        for (; next < num_k; next += NUM_SCALE_WARPS) {
            const int valid = num_blocks - next * BLOCKS_PER_STAGE, ahead = min(next + NUM_SCALE_WARPS, num_k - 1);
            const uint32_t x_address = x_scale_address<C>(smem, stage) + lane * 4;
            const uint32_t w_address = w_scale_address<C>(smem, stage) + lane * 4;
            mbarrier_wait(empty_barrier<C>(smem, stage), parity);
#pragma unroll
            for (int j = 0; j < X_ROWS; j++) {
                store_factors(x_address + j * 128, C::BLOCK_M * 4, x_words[j], valid);
            }
#pragma unroll
            for (int j = 0; j < W_ROWS; j++) {
                if (lane + j * 32 < C::W_SCALE_COUNT) {
                    store_factors(w_address + j * 128, C::W_SCALE_COUNT * 4, combine_bytes(w_bytes[j], p.w_scale),
                                  valid);
                }
            }
            /* NOTE: every lane for its own stores. One arrival after __syncwarp would be enough for the memory model, but
             * not for compute-sanitizer's racecheck. */
            mbarrier_arrive(full_barrier<C>(smem, stage));
#pragma unroll
            for (int j = 0; j < X_ROWS; j++) {
                x_words[j] = load_scale_word(p.x_scale, x_rows[j], ahead);
            }
#pragma unroll
            for (int j = 0; j < W_ROWS; j++) {
                if (lane + j * 32 < C::W_SCALE_COUNT) {
                    load_weight_bytes(w_bytes[j], p.w_scale, w_rows[j], ahead, num_blocks);
                }
            }
            stage += NUM_SCALE_WARPS;
            if (stage >= C::STAGES) {
                stage -= C::STAGES;
                parity ^= 1;
            }
        }
        next -= num_k;
    }
}

/* ---- consumers ------------------------------------------------------------------------------------------- */

template <class C> struct consumer {
    float acc[C::BLOCK_N / 2];
    float partial[2][PIECE_N / 2]; /* one is promoted while the other is filled */

    uint32_t smem;
    uint64_t x_descriptor, w_descriptor; /* of stage 0, this warpgroup's rows */
    struct ring r;
    int row; /* of the tile: the lane's first row; the second one is 8 below */
};

/* Starts partial = x[64 rows][32] * w[piece][32]^T on one 32-column block of a stage. */
template <class C> MX_DEVICE void multiply_piece(struct consumer<C> &c, int block, int piece) {
    const uint64_t x = c.x_descriptor + c.r.stage * (C::STAGE_BYTES / 16);
    const uint64_t w = c.w_descriptor + c.r.stage * (C::STAGE_BYTES / 16) + piece * (PIECE_N * BLOCK_K / 16);
    wgmma_fence();
    wgmma_m64k32(c.partial[piece % 2], x + 2 * block, w + 2 * block, false);
    wgmma_commit();
}

/* The activations' factors of one block: of the lane's two rows. */
struct row_factors {
    float low, high;
};

template <class C> MX_DEVICE struct row_factors load_row_factors(const struct consumer<C> &c, int block) {
    const uint32_t address = x_scale_address<C>(c.smem, c.r.stage) + (block * C::BLOCK_M + c.row) * 4;
    return {load_shared_f32(address), load_shared_f32(address + 32)};
}

/* acc = fma(partial, x_scale * w_scale, acc) for one block and piece. */
template <class C>
MX_DEVICE void promote_piece(struct consumer<C> &c, const struct row_factors &rows, const float2 &w, int piece) {
    const float *partial = c.partial[piece % 2];
    float *acc = c.acc + piece * (PIECE_N / 2);
    const float low[2] = {rows.low * w.x, rows.low * w.y}, high[2] = {rows.high * w.x, rows.high * w.y};
#pragma unroll
    for (int i = 0; i < PIECE_N / 2; i += 4) {
        acc[i] = __fmaf_rn(partial[i], low[i / 16], acc[i]);
        acc[i + 1] = __fmaf_rn(partial[i + 1], low[i / 16], acc[i + 1]);
        acc[i + 2] = __fmaf_rn(partial[i + 2], high[i / 16], acc[i + 2]);
        acc[i + 3] = __fmaf_rn(partial[i + 3], high[i / 16], acc[i + 3]);
    }
}

/* The same with a weight scale per row: the lane's columns 8 j + 2 q and + 1 have factors of their own. */
template <class C>
MX_DEVICE void promote_piece_per_row(struct consumer<C> &c, const struct row_factors &rows, int block, int piece) {
    const uint32_t w_scale = w_scale_address<C>(c.smem, c.r.stage) +
                             (block * C::W_SCALE_COUNT + piece * PIECE_N + threadIdx.x % 4 * 2) * 4;
    const float *partial = c.partial[piece % 2];
    float *acc = c.acc + piece * (PIECE_N / 2);
#pragma unroll
    for (int i = 0; i < PIECE_N / 2; i += 4) {
        const float2 w = load_shared_v2_f32(w_scale + i * 8);
        acc[i] = __fmaf_rn(partial[i], rows.low * w.x, acc[i]);
        acc[i + 1] = __fmaf_rn(partial[i + 1], rows.low * w.y, acc[i + 1]);
        acc[i + 2] = __fmaf_rn(partial[i + 2], rows.high * w.x, acc[i + 2]);
        acc[i + 3] = __fmaf_rn(partial[i + 3], rows.high * w.y, acc[i + 3]);
    }
}

/* NUM blocks of a stage from `first` on: the next piece is started before the one before it is promoted. Nothing is in
 * flight at the end; a product pending over a loop's back edge would make the compiler wait after every one. */
template <class C, int NUM> MX_DEVICE void consume_blocks(struct consumer<C> &c, int first) {
    constexpr int STEPS = NUM * C::PIECES;
    struct row_factors rows = {0.0f, 0.0f};
    multiply_piece(c, first, 0);
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        const int block = first + step / C::PIECES, piece = step % C::PIECES;
        if (step + 1 < STEPS) {
            multiply_piece(c, first + (step + 1) / C::PIECES, (step + 1) % C::PIECES);
        }
        if (piece == 0) {
            rows = load_row_factors(c, block);
        }
        float2 w = make_float2(0.0f, 0.0f);
        if (!C::PER_ROW) {
            w = load_shared_v2_f32(w_scale_address<C>(c.smem, c.r.stage) +
                                   (block * C::W_SCALE_COUNT + piece * 2) * 4);
        }
        if (step + 1 < STEPS) {
            wgmma_wait<1>();
        } else {
            wgmma_wait<0>();
        }
        if constexpr (C::PER_ROW) {
            promote_piece_per_row(c, rows, block, piece);
        } else {
            promote_piece(c, rows, w, piece);
        }
    }
}

template <class C> MX_DEVICE void consume_stage(struct consumer<C> &c) {
    mbarrier_wait(full_barrier<C>(c.smem, c.r.stage), c.r.parity);
    if constexpr (C::PER_ROW) {
#pragma unroll 1 /* short of registers */
        for (int block = 0; block < BLOCKS_PER_STAGE; block++) {
            consume_blocks<C, 1>(c, block);
        }
    } else {
        consume_blocks<C, BLOCKS_PER_STAGE>(c, 0);
    }
    __syncwarp(); /* all lanes have read the factors */
    release_stage<C>(c.smem, c.r.stage);
    ring_advance<C::STAGES>(c.r);
}

template <class C> MX_DEVICE void consume(uint32_t smem, const struct mx_sm90_gemm_params &p, int rank) {
    const uint32_t warpgroup = warp_uniform(threadIdx.x / 128);
    const int num_k = (p.k + BLOCK_K - 1) / BLOCK_K;
    struct consumer<C> c;
    c.smem = smem;
    c.x_descriptor = wgmma_descriptor(smem + warpgroup * 64 * BLOCK_K);
    c.w_descriptor = wgmma_descriptor(smem + C::X_BYTES);
    c.r = {0, 0};
    c.row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;

    for (int index = blockIdx.x / C::CLUSTER; index < p.tiling.num_tiles; index += gridDim.x / C::CLUSTER) {
#pragma unroll
        for (int i = 0; i < C::BLOCK_N / 2; i++) {
            c.acc[i] = 0.0f;
        }
        for (int i = 0; i < num_k; i++) {
            consume_stage(c);
        }

        const struct tile t = locate_tile<C>(p.tiling, index, rank);
        const float w_scale[4] = {1.0f, 1.0f, 1.0f, 1.0f}; /* already applied */
        if constexpr (C::OUTPUT == OUT_MX256) {
            struct rounded_half<4> first, second;
            round_half(first, c.acc, w_scale);
            round_half(second, c.acc + 64, w_scale);
            store_both_halves(p, t, c.row, t.n, first, second);
        } else {
            store_columns<C::OUTPUT>(p, t, c.row, t.n, c.acc, w_scale);
        }
    }
}

/* ---- kernel ---------------------------------------------------------------------------------------------- */

template <class C>
MX_DEVICE void gemm_per32(const CUtensorMap *x_map, const CUtensorMap *w_map, const struct mx_sm90_gemm_params &p) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t smem = smem_address(shared), warp = threadIdx.x / 32;
    const int rank = C::CLUSTER > 1 ? (int)cluster_rank() : 0;

    start_ring<C>(smem, x_map, w_map, p, 1 + 32, rank); /* the copy engine's thread and a scale warp's lanes */

    if (warp >= 4 * C::CONSUMERS) {
        set_max_registers_down<C::PRODUCER_REGS>();
        if (warp >= C::FIRST_SCALE_WARP) {
            provide_scales<C>(smem, p, warp - C::FIRST_SCALE_WARP, rank);
        } else if (threadIdx.x == 128 * C::CONSUMERS) {
            produce<C>(smem, x_map, w_map, p, rank);
        }
    } else {
        set_max_registers_up<C::CONSUMER_REGS>();
        grid_dependency_wait();
        consume<C>(smem, p, rank);
    }

    /* A block must not leave while its neighbour may still write to it */
    if (C::CLUSTER > 1) {
        __syncwarp();
        cluster_arrive_relaxed();
        cluster_wait();
    }
}

#define MX_PER32_KERNEL(NAME, CONSUMERS, BLOCK_N, STAGES, OUTPUT, PER_ROW)                                           \
    extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), 1)                                           \
        NAME(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,                   \
             const __grid_constant__ struct mx_sm90_gemm_params p) {                                                 \
        gemm_per32<per32_config<gemm_config<CONSUMERS, 1, BLOCK_N, STAGES, 1, 1, 1, OUTPUT>, PER_ROW>>(&x_map,       \
                                                                                                       &w_map, p);   \
    }

/* The shipped forms; plan.c names them. Three warpgroups where registers allow: a 256-column maximum needs 256
 * columns of accumulators, and scales per weight row need addresses and factors. */
/* clang-format off */
/*              name                           consumers  BLOCK_N  stages  output      weight scale per row */
MX_PER32_KERNEL(mx_sm90_gemm_per32_bf16,       3,         128,     5,      OUT_BF16,   false)
MX_PER32_KERNEL(mx_sm90_gemm_per32_mx32,       3,         128,     5,      OUT_MX32,   false)
MX_PER32_KERNEL(mx_sm90_gemm_per32_mx128,      3,         128,     5,      OUT_MX128,  false)
MX_PER32_KERNEL(mx_sm90_gemm_per32_mx256,      2,         256,     4,      OUT_MX256,  false)
MX_PER32_KERNEL(mx_sm90_gemm_per32_rows_bf16,  2,         128,     5,      OUT_BF16,   true)
MX_PER32_KERNEL(mx_sm90_gemm_per32_rows_mx32,  2,         128,     5,      OUT_MX32,   true)
MX_PER32_KERNEL(mx_sm90_gemm_per32_rows_mx128, 2,         128,     5,      OUT_MX128,  true)
MX_PER32_KERNEL(mx_sm90_gemm_per32_rows_mx256, 2,         256,     4,      OUT_MX256,  true)
/* clang-format on */
