/*
 * sm100_gemm.cu - the grouped matrix product on Blackwell's block-scaled tensor cores, true scales per 32 columns of
 * both operands: wo_a with BF16 or fused MXFP8 output, wo_b with BF16 output, few tokens and many.
 *
 * One kernel, three ways to run it (sm100_plan.h chooses):
 *
 *   split     few tokens: reading the weights is the work. A cluster shares the K of one tile; each block multiplies
 *             its part of K, sends the FP32 sums of every 4 tokens to the block that owns them, which adds the parts
 *             in rank order. One tile per cluster.
 *   pairs     many tokens: CTAS = 2, two blocks multiply 256 rows x up to 256 tokens as one instruction, each loading
 *             its own 128 rows of weights and half of the tokens. Persistent, two accumulators.
 *   single    the same with one block per tile: when pairs are switched off, or a cluster of one.
 *
 * Warps of a block, 32 threads each:
 *
 *     0         copies weights and tokens to shared memory by TMA
 *     1         copies scales to tensor memory, multiplies
 *     2 (, 8)   weight scales to shared memory, in the tensor core's order; the second warp in pairs only
 *     3 (, 9)   token scales, the same
 *     4 - 7     epilogue: tensor memory to registers, BF16, quantisation, global memory
 *
 *     stage full  <- TMA bytes, 1 arrival of its thread, 1 per operand of a scale warp (of both blocks in a pair)
 *     stage empty <- tcgen05.commit behind the stage's products
 *     tile full   <- tcgen05.commit behind the tile's products
 *     tile free   <- epilogue warps, after their last load
 *
 * Order of operations, the same for BF16 and MXFP8 output: each element's products accumulate in K order in the
 * tensor core (one FP32 chain per part of a split), parts are added in rank order, the sum is rounded to BF16 once.
 */
#include "sm100_gemm.cuh"

/* ---- what every role needs ------------------------------------------------------------------------------- */

struct block {
    uint32_t smem;
    struct mx_sm100_smem map;
    uint32_t tmem;
    int rank;             /* in the cluster */
    int first, step, end; /* tiles of this block (pair, cluster) */
    int k_begin, k_end;   /* blocks of 128 columns */
};

MX_DEVICE uint32_t full_barrier(const struct block &b, uint32_t stage) {
    return b.smem + b.map.barriers + stage * 16;
}
MX_DEVICE uint32_t empty_barrier(const struct block &b, uint32_t stage) { return full_barrier(b, stage) + 8; }

MX_DEVICE uint32_t tile_full_barrier(const struct block &b, int acc) {
    return b.smem + b.map.barriers + MX_SM100_MAX_STAGES * 16 + acc * 16;
}
MX_DEVICE uint32_t tile_free_barrier(const struct block &b, int acc) { return tile_full_barrier(b, acc) + 8; }
/* Bytes of the partial sums in a split; in a pair the odd block's word that it has tensor memory. */
MX_DEVICE uint32_t partials_barrier(const struct block &b) { return tile_full_barrier(b, 2); }
MX_DEVICE uint32_t peer_ready_barrier(const struct block &b) { return tile_full_barrier(b, 2); }
MX_DEVICE uint32_t tmem_slot(const struct block &b) { return tile_full_barrier(b, 2) + 8; }

/* In a pair the even block multiplies for both, so its barriers count for both. */
template <int CTAS> MX_DEVICE bool is_leader(const struct block &b) { return CTAS == 1 || b.rank == 0; }

template <int CTAS> MX_DEVICE uint32_t leader_barrier(uint32_t bar) { return CTAS == 1 ? bar : map_to_rank(bar, 0); }

/* ---- copies ---------------------------------------------------------------------------------------------- */

/* Announces a stage's bytes, of both blocks in a pair, and starts the copy of this block's weights. */
template <int CTAS>
MX_DEVICE void load_weights(const struct block &b, const CUtensorMap *w_map, uint32_t stage, const struct tile &t,
                            int k_block) {
    const uint32_t dst = b.smem + stage * b.map.stage_bytes, full = full_barrier(b, stage);
    if (is_leader<CTAS>(b)) {
        mbarrier_arrive_expect(full, MX_SM100_W_BYTES * CTAS + t.width * MX_SM100_K);
    }
    if (CTAS == 2) {
        tma_load_3d_pair(dst, w_map, k_block * MX_SM100_K, t.row + b.rank * MX_SM100_ROWS, t.group,
                         leader_barrier<CTAS>(full));
    } else {
        tma_load_3d(dst, w_map, k_block * MX_SM100_K, t.row, t.group, full);
    }
}

/* Starts the copy of this block's tokens: all of the tile's, or the rank's half. */
template <int CTAS>
MX_DEVICE void load_tokens(const struct block &b, const CUtensorMap *x_map, uint32_t stage, const struct tile &t,
                           int k_block) {
    const uint32_t dst = b.smem + stage * b.map.stage_bytes + MX_SM100_W_BYTES, full = full_barrier(b, stage);
    if (CTAS == 2) {
        tma_load_3d_pair(dst, x_map, k_block * MX_SM100_K, t.group, t.token + b.rank * (t.width / 2),
                         leader_barrier<CTAS>(full));
    } else {
        tma_load_3d(dst, x_map, k_block * MX_SM100_K, t.group, t.token, full);
    }
}

/* Stages whose weights are requested before the previous kernel has ended: the ring, or the first tile if that is
 * less. */
MX_DEVICE int num_early_stages(const struct block &b, const struct mx_sm100_gemm_params &p) {
    return b.first < b.end ? min(p.num_stages, b.k_end - b.k_begin) : 0;
}

template <int CTAS>
MX_DEVICE void load_early(const struct block &b, const CUtensorMap *w_map, const struct mx_sm100_gemm_params &p) {
    const int num_early = num_early_stages(b, p);
    if (num_early > 0) {
        const struct tile t = locate_tile<CTAS>(p.tiling, b.first);
        for (int i = 0; i < num_early; i++) {
            load_weights<CTAS>(b, w_map, i, t, b.k_begin + i);
        }
    }
}

/* One thread: keeps the ring full. */
template <int CTAS>
MX_DEVICE void produce(const struct block &b, const CUtensorMap *w_map, const CUtensorMap *x_map0,
                       const CUtensorMap *x_map1, const struct mx_sm100_gemm_params &p) {
    int num_loaded = num_early_stages(b, p); /* stages whose weights are under way already */
    struct ring r = {0, 1};                  /* the first wait on a fresh barrier passes with parity 1 */

    grid_dependency_wait();
    fence_proxy_async(); /* x may have been written by ordinary stores; the copy engine reads it now */

    for (int index = b.first; index < b.end; index += b.step) {
        const struct tile t = locate_tile<CTAS>(p.tiling, index);
        const CUtensorMap *x_map = t.cut == 0 ? x_map0 : x_map1;
        for (int k = b.k_begin; k < b.k_end; k++) {
            if (num_loaded > 0) {
                num_loaded--;
            } else {
                mbarrier_wait(empty_barrier(b, r.stage), r.parity);
                load_weights<CTAS>(b, w_map, r.stage, t, k);
            }
            load_tokens<CTAS>(b, x_map, r.stage, t, k);
            ring_advance(r, p.num_stages);
        }
    }
}

/* ---- scales ---------------------------------------------------------------------------------------------- */

#define SCALE_BATCH 4 /* K blocks whose words are loaded before the first is stored: hides the latency of L2 */

/* Warps per operand that deliver scales in turn, a K block each. One keeps up in a block of its own; in the odd
 * block of a pair every arrival has to carry a fence of cluster scope, so two share that time. */
template <int CTAS> constexpr int SCALE_WARPS = CTAS;

/* What a scale warp keeps from tile to tile. */
struct scale_turn {
    struct ring r;
    int next; /* K blocks of the tile until this warp's turn */
};

template <int CTAS> MX_DEVICE struct scale_turn first_turn(const struct mx_sm100_gemm_params &p, int turn) {
    struct scale_turn s = {{0, 1}, turn};
    if (turn > 0) {
        ring_advance(s.r, p.num_stages);
    }
    return s;
}

/* Waits for the stage, puts a K block's words there and says so. */
template <int CTAS, int TILES>
MX_DEVICE void deliver_scales(const struct block &b, const struct mx_sm100_gemm_params &p,
                              const struct scale_words<TILES> &words, uint32_t tiles, struct ring &r) {
    mbarrier_wait(empty_barrier(b, r.stage), r.parity);
    store_scale_words(words, tiles + r.stage * (TILES * MX_TILE_BYTES));
    if (threadIdx.x % 32 == 0) {
        if (is_leader<CTAS>(b)) {
            mbarrier_arrive(full_barrier(b, r.stage));
        } else {
            mbarrier_arrive_release_cluster(leader_barrier<CTAS>(full_barrier(b, r.stage)));
        }
    }
    for (int i = 0; i < SCALE_WARPS<CTAS>; i++) {
        ring_advance(r, p.num_stages);
    }
}

/* Scales that are words in memory: this warp's K blocks of a tile, rows from `row` on. */
template <int CTAS, int TILES>
MX_DEVICE void produce_scale_words(const struct block &b, const struct mx_sm100_gemm_params &p,
                                   const struct mx_sm100_scales &scales, int group, int row, int row_end,
                                   uint32_t tiles, struct scale_turn &turn) {
    constexpr int STEP = SCALE_WARPS<CTAS>;
    struct scale_rows<TILES> rows;
    int k = b.k_begin + turn.next;
    locate_scale_rows(rows, scales, group, row, row_end);
    while (k < b.k_end) {
        struct scale_words<TILES> words[SCALE_BATCH];
#pragma unroll
        for (int i = 0; i < SCALE_BATCH; i++) {
            if (k + i * STEP < b.k_end) {
                load_scale_words(words[i], rows, k + i * STEP);
            }
        }
#pragma unroll
        for (int i = 0; i < SCALE_BATCH; i++) {
            if (k < b.k_end) {
                deliver_scales<CTAS>(b, p, words[i], tiles, turn.r);
                k += STEP;
            }
        }
    }
    turn.next = k - b.k_end;
}

/* The weights' scales. They do not depend on the previous kernel. */
template <int CTAS>
MX_DEVICE void produce_weight_scales(const struct block &b, const struct mx_sm100_gemm_params &p, int turn_of) {
    const uint32_t tiles = b.smem + b.map.w_scale;
    struct scale_turn turn = first_turn<CTAS>(p, turn_of);
    for (int index = b.first; index < b.end; index += b.step) {
        const struct tile t = locate_tile<CTAS>(p.tiling, index);
        const int row = t.row + (CTAS == 2 ? b.rank * MX_SM100_ROWS : 0);
        if (p.w_scale.layout != MX_SCALE_BLOCKS) {
            produce_scale_words<CTAS, 1>(b, p, p.w_scale, t.group, row, p.num_rows, tiles, turn);
            continue;
        }
        int k = b.k_begin + turn.next;
#pragma unroll 1
        for (; k < b.k_end; k += SCALE_WARPS<CTAS>) {
            struct scale_words<1> words;
            load_scale_bytes(words, p.w_scale, t.group, row, p.num_rows, k, p.k / MX_BLOCK);
            deliver_scales<CTAS>(b, p, words, tiles, turn.r);
        }
        turn.next = k - b.k_end;
    }
}

/* The tokens' scales, of the whole tile in either block of a pair. */
template <int CTAS, int TILES>
MX_DEVICE void produce_token_scales(const struct block &b, const struct mx_sm100_gemm_params &p, int turn_of) {
    const uint32_t tiles = b.smem + b.map.x_scale;
    struct scale_turn turn = first_turn<CTAS>(p, turn_of);
    grid_dependency_wait();
    for (int index = b.first; index < b.end; index += b.step) {
        const struct tile t = locate_tile<CTAS>(p.tiling, index);
        produce_scale_words<CTAS, TILES>(b, p, p.x_scale, t.group, t.token, min(p.num_tokens, t.token + t.width),
                                         tiles, turn);
    }
}

/* ---- products -------------------------------------------------------------------------------------------- */

/* Whether the two accumulators can share columns: a question of the widest tile. */
MX_DEVICE bool accumulators_overlap(const struct mx_sm100_gemm_params &p) {
    return p.acc_count == 2 && max(p.tiling.cut[0].width, p.tiling.cut[1].width) > MX_SM100_ACC_STRIDE;
}

/* One thread (of the leader): for every stage, scales to tensor memory, then four products of 32 columns. */
template <int CTAS> MX_DEVICE void multiply(const struct block &b, const struct mx_sm100_gemm_params &p) {
    const uint64_t w_descriptor = operand_descriptor(b.smem);
    const uint64_t x_descriptor = operand_descriptor(b.smem + MX_SM100_W_BYTES);
    struct ring r = {0, 0}, behind = {0, 0}; /* `behind`: two stages back */
    uint32_t scale_buffer = 0;
    int num_behind = -2; /* stages up to the one that is two back */
    int num_done = 0;    /* tiles of this block so far */

    for (int index = b.first; index < b.end; index += b.step, num_done++) {
        const struct tile t = locate_tile<CTAS>(p.tiling, index);
        const int acc = num_done & (p.acc_count - 1);
        const uint32_t d = b.tmem + acc * MX_SM100_ACC_STRIDE;
        const uint32_t instruction = mma_instruction(MX_SM100_ROWS * CTAS, t.width);

        /* Wait for the epilogue to have emptied the accumulator (the one used two tiles ago), or, where it shares
         * columns with the last tile's, those columns of that one: the epilogue gets there only after the other is
         * empty. */
        const int needed = num_done - (accumulators_overlap(p) ? 1 : 2);
        if (needed >= 0) {
            if (CTAS == 2) {
                mbarrier_wait_cluster(tile_free_barrier(b, needed & 1), needed >> 1 & 1);
            } else {
                mbarrier_wait(tile_free_barrier(b, needed & 1), needed >> 1 & 1);
            }
            tcgen05_fence_after();
        }

        for (int k = b.k_begin; k < b.k_end; k++) {
            const uint32_t sfa = b.tmem + p.scale_column + scale_buffer * MX_SM100_SCALE_COLUMNS, sfb = sfa + 4;
            const uint64_t w = w_descriptor + (r.stage * b.map.stage_bytes >> 4);
            const uint64_t x = x_descriptor + (r.stage * b.map.stage_bytes >> 4);
            const int num_steps = min(4, p.k / MX_BLOCK - k * 4);
            /* The products of two stages back have read the scales that are overwritten now. Nothing promises that
             * a copy waits for them by itself; one stage of products is still under way, so this wait costs
             * nothing. */
            if (num_behind >= 0) {
                mbarrier_wait(empty_barrier(b, behind.stage), behind.parity);
                ring_advance(behind, p.num_stages);
            }
            num_behind++;
            if (CTAS == 2) { /* part of the stage was written by the other block's threads */
                mbarrier_wait_cluster(full_barrier(b, r.stage), r.parity);
            } else {
                mbarrier_wait(full_barrier(b, r.stage), r.parity);
            }
            tcgen05_fence_after();
            tmem_copy_scales<CTAS>(sfa, scale_descriptor(b.smem + b.map.w_scale + r.stage * MX_TILE_BYTES));
            const uint32_t x_scale = b.smem + b.map.x_scale + r.stage * (p.x_tiles * MX_TILE_BYTES);
            tmem_copy_scales<CTAS>(sfb, scale_descriptor(x_scale));
            if (t.width > MX_TILE_ROWS) {
                tmem_copy_scales<CTAS>(sfb + 4, scale_descriptor(x_scale + MX_TILE_BYTES));
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (i < num_steps) { /* scale bytes beyond K are nobody's */
                    mma_mxf8<CTAS>(d, w + i * MX_DESCRIPTOR_K_STEP, x + i * MX_DESCRIPTOR_K_STEP,
                                   mma_instruction_step(instruction, i), sfa, sfb, k > b.k_begin || i > 0);
                }
            }
            tcgen05_commit<CTAS>(empty_barrier(b, r.stage));
            ring_advance(r, p.num_stages);
            scale_buffer ^= 1;
        }
        tcgen05_commit<CTAS>(tile_full_barrier(b, acc));
    }
}

/* ---- epilogue -------------------------------------------------------------------------------------------- */

#define EPILOGUE_COLUMNS 16 /* tokens a warp takes from tensor memory at a time */
#define EPILOGUE_BARRIER 1  /* named barrier of the four epilogue warps */

template <int CTAS, int OUTPUT>
MX_DEVICE struct result_row locate_row(const struct block &b, const struct mx_sm100_gemm_params &p,
                                       const struct tile &t, int acc) {
    const int warp = threadIdx.x / 32 % 4, row = t.row + threadIdx.x % 128;
    struct result_row result;
    result.valid = row < p.num_rows;
    result.out = p.out + t.group * p.out_stride_group + (int64_t)row * (OUTPUT == OUT_BF16 ? 2 : 1);
    result.out_scale = b.smem + b.map.out_scale + acc * (4 * MX_SM100_MAX_TOKENS) + warp;
    return result;
}

/* Tells the multiplying thread that this warp needs an accumulator (or the columns it shares) no more. */
template <int CTAS> MX_DEVICE void release_accumulator(const struct block &b, int acc) {
    tcgen05_fence_before();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        if (CTAS == 2) {
            mbarrier_arrive_release_cluster(leader_barrier<CTAS>(tile_free_barrier(b, acc)));
        } else {
            mbarrier_arrive(tile_free_barrier(b, acc));
        }
    }
}

/* The four epilogue warps of a block whose tiles are its own. */
template <int CTAS, int OUTPUT>
MX_DEVICE void finish_tiles(const struct block &b, const struct mx_sm100_gemm_params &p) {
    const uint32_t lanes = threadIdx.x / 32 % 4 << 21; /* first lane of the warp, in the address's upper half */
    int num_done = 0;

    for (int index = b.first; index < b.end; index += b.step, num_done++) {
        struct tile t = locate_tile<CTAS>(p.tiling, index);
        const int acc = num_done & (p.acc_count - 1);
        const bool overlap = accumulators_overlap(p);
        t.row += CTAS == 2 ? b.rank * MX_SM100_ROWS : 0;
        const struct result_row row = locate_row<CTAS, OUTPUT>(b, p, t, acc);
        const uint32_t d = b.tmem + lanes + acc * MX_SM100_ACC_STRIDE;
        const int num_chunks = t.width / EPILOGUE_COLUMNS;

        mbarrier_wait(tile_full_barrier(b, acc), num_done / p.acc_count & 1);
        tcgen05_fence_after();
        for (int i = 0; i < num_chunks; i++) {
            /* Where the accumulators share columns, those go first: the last ones of accumulator 0, the
             * first of accumulator 1. */
            const int column = (overlap && acc == 0 ? num_chunks - 1 - i : i) * EPILOGUE_COLUMNS;
            uint32_t values[EPILOGUE_COLUMNS];
            tmem_load_x16(values, d + column);
            tmem_wait_load();
            if (i == (overlap ? min(1, num_chunks - 1) : num_chunks - 1)) {
                release_accumulator<CTAS>(b, acc);
            }
            store_tokens<OUTPUT>(p, row, t, values, column);
        }
        if (OUTPUT != OUT_BF16) {
            /* NOTE: one barrier per tile is enough, the table has room for two tiles. */
            named_barrier_sync(EPILOGUE_BARRIER, 128);
            store_scales(p, t, b.smem + b.map.out_scale + acc * (4 * MX_SM100_MAX_TOKENS), 0, num_scale_rows(p, t));
        }
    }
}

/* Quads of 4 tokens of the tile that hold a token at all. */
MX_DEVICE int num_quads(const struct mx_sm100_gemm_params &p, const struct tile &t) {
    return (min(t.width, p.num_tokens - t.token) + 3) / 4;
}

/* Those of them that this block of a split finishes. */
MX_DEVICE int num_own_quads(const struct block &b, const struct mx_sm100_gemm_params &p, const struct tile &t) {
    const int per_rank = mx_sm100_quads_per_rank(t.width, p.split);
    return max(0, min(per_rank, num_quads(p, t) - b.rank * per_rank));
}

/* Shared memory of the block that owns it: partial sums of 4 tokens, this thread's row, from block `rank`. */
MX_DEVICE uint32_t partial_address(const struct block &b, int per_rank, int rank, int slot) {
    return b.smem + b.map.partials + (rank * per_rank + slot) * MX_SM100_QUAD_BYTES + threadIdx.x % 128 * 16;
}

/* The four epilogue warps of a block that has multiplied its part of K of the cluster's one tile:
 *
 *     block 0, K part 0   [ quads 0 1 | 2 3 | 4 5 | 6 7 ]
 *     block 1, K part 1   [    0 1    |           ...   ]       each block receives its own column from all,
 *     block 2, K part 2   [                             ]       adds them up from top to bottom and stores
 */
template <int OUTPUT> MX_DEVICE void finish_split(const struct block &b, const struct mx_sm100_gemm_params &p) {
    const struct tile t = locate_tile<1>(p.tiling, b.first);
    const struct result_row row = locate_row<1, OUTPUT>(b, p, t, 0);
    const uint32_t d = b.tmem + (threadIdx.x / 32 % 4 << 21);
    const int num = num_quads(p, t), per_rank = mx_sm100_quads_per_rank(t.width, p.split);
    const int num_own = num_own_quads(b, p, t);
    int owner = 0, slot = 0;

    mbarrier_wait(tile_full_barrier(b, 0), 0);
    tcgen05_fence_after();
    for (int quad = 0; quad < num; quad += 4) {
        uint32_t v[EPILOGUE_COLUMNS];
        tmem_load_x16(v, d + quad * 4);
        tmem_wait_load();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t address = partial_address(b, per_rank, b.rank, slot);
            const float v0 = __uint_as_float(v[4 * i]), v1 = __uint_as_float(v[4 * i + 1]);
            const float v2 = __uint_as_float(v[4 * i + 2]), v3 = __uint_as_float(v[4 * i + 3]);
            if (quad + i < num && owner == b.rank) {
                store_shared_v4_f32(address, v0, v1, v2, v3); /* read back by the same thread */
            } else if (quad + i < num) {
                store_async_v4_f32(map_to_rank(address, owner), v0, v1, v2, v3,
                                   map_to_rank(partials_barrier(b), owner));
            }
            slot++;
            if (slot == per_rank) {
                slot = 0;
                owner++;
            }
        }
    }
    if (num_own > 0) {
        mbarrier_wait_cluster(partials_barrier(b), 0);
    }
    for (int i = 0; i < num_own; i++) {
        float4 sum = load_shared_v4_f32(partial_address(b, per_rank, 0, i));
        for (int rank = 1; rank < p.split; rank++) {
            const float4 part = load_shared_v4_f32(partial_address(b, per_rank, rank, i));
            sum.x = __fadd_rn(sum.x, part.x);
            sum.y = __fadd_rn(sum.y, part.y);
            sum.z = __fadd_rn(sum.z, part.z);
            sum.w = __fadd_rn(sum.w, part.w);
        }
        const uint32_t values[4] = {__float_as_uint(sum.x), __float_as_uint(sum.y), __float_as_uint(sum.z),
                                    __float_as_uint(sum.w)};
        store_tokens<OUTPUT>(p, row, t, values, (b.rank * per_rank + i) * 4);
    }
    if (OUTPUT != OUT_BF16) {
        const int num_rows = num_scale_rows(p, t), first = b.rank * per_rank * 4;
        const int end = b.rank == p.split - 1 ? num_rows : min(num_rows, first + per_rank * 4);
        named_barrier_sync(EPILOGUE_BARRIER, 128);
        store_scales(p, t, b.smem + b.map.out_scale, first, end);
    }
}

/* ---- kernel ---------------------------------------------------------------------------------------------- */

/* One thread: makes the barriers. */
template <int CTAS> MX_DEVICE void init_barriers(const struct block &b, const struct mx_sm100_gemm_params &p) {
    for (int i = 0; i < p.num_stages; i++) {
        mbarrier_init(full_barrier(b, i), 1 + 2 * CTAS); /* the leader's copying thread and every scale warp */
        mbarrier_init(empty_barrier(b, i), 1);
    }
    for (int i = 0; i < 2; i++) {
        mbarrier_init(tile_full_barrier(b, i), 1);
        mbarrier_init(tile_free_barrier(b, i), 4 * CTAS); /* epilogue warps */
    }
    mbarrier_init(partials_barrier(b), 1); /* peer_ready in a pair */
    mbarrier_fence_init();
    fence_proxy_async_shared(); /* the copy engine, which reports to them, is another proxy */
}

#define TMEM_BARRIER         2 /* named barrier of warp 1 and the epilogue: tensor memory is there */
#define TMEM_BARRIER_THREADS 160

/* Warp 1: allocates tensor memory and tells the epilogue, in a pair the odd block's also the leader.
 * NOTE: not before the previous kernel has ended: one of its blocks on this SM might still have to allocate, and
 * would wait for columns that are only given back after it. For the same reason the next kernel may start only
 * after the allocation. */
template <int CTAS> MX_DEVICE void take_tensor_memory(struct block &b, const struct mx_sm100_gemm_params &p) {
    grid_dependency_wait();
    tmem_alloc<CTAS>(tmem_slot(b), p.tmem_columns);
    tmem_relinquish<CTAS>();
    grid_launch_dependents();
    __syncwarp();
    b.tmem = load_shared_u32(tmem_slot(b));
    tcgen05_fence_before();
    named_barrier_arrive(TMEM_BARRIER, TMEM_BARRIER_THREADS);
    if (CTAS == 2 && !is_leader<CTAS>(b) && threadIdx.x % 32 == 0) {
        mbarrier_arrive_release_cluster(leader_barrier<CTAS>(peer_ready_barrier(b)));
    }
    if (CTAS == 2 && is_leader<CTAS>(b)) {
        mbarrier_wait_cluster(peer_ready_barrier(b), 0);
        tcgen05_fence_after();
    }
    __syncwarp();
}

template <int CTAS, int OUTPUT>
MX_DEVICE void gemm(const CUtensorMap *w_map, const CUtensorMap *x_map0, const CUtensorMap *x_map1,
                    const struct mx_sm100_gemm_params &p) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const int warp = warp_uniform(threadIdx.x / 32);
    const int cluster = CTAS == 2 ? 2 : p.split;
    const int num_k = (p.k + MX_SM100_K - 1) / MX_SM100_K;
    struct block b;
    b.smem = smem_address(shared);
    b.map = mx_sm100_smem_map(p.num_stages, p.x_bytes, p.x_tiles,
                              mx_sm100_partial_bytes(p.tiling.cut[0].width, CTAS == 2 ? 1 : p.split));
    b.rank = cluster > 1 ? cluster_rank() : 0;
    b.first = blockIdx.x / cluster;
    b.step = gridDim.x / cluster;
    b.end = num_tiles(p.tiling);
    b.k_begin = CTAS == 2 ? 0 : num_k * b.rank / p.split;
    b.k_end = CTAS == 2 ? num_k : num_k * (b.rank + 1) / p.split;

    /* Make the barriers; where nobody else's are involved, start reading weights at once. */
    if (warp == 0 && elect_one()) {
        init_barriers<CTAS>(b, p);
        if (CTAS == 1) {
            load_early<CTAS>(b, w_map, p);
        }
        if (p.split > 1 && CTAS == 1) {
            const int num_own = num_own_quads(b, p, locate_tile<1>(p.tiling, b.first));
            mbarrier_arrive_expect(partials_barrier(b), (p.split - 1) * num_own * MX_SM100_QUAD_BYTES);
        }
    }
    __syncwarp();
    if (cluster > 1) { /* the other blocks run, and their barriers exist */
        cluster_arrive();
        cluster_wait();
    } else {
        __syncthreads();
    }

    if (warp == 0) {
        if (elect_one()) {
            if (CTAS == 2) {
                load_early<CTAS>(b, w_map, p);
            }
            produce<CTAS>(b, w_map, x_map0, x_map1, p);
        }
    } else if (warp == 1) {
        take_tensor_memory<CTAS>(b, p);
        if (is_leader<CTAS>(b) && elect_one()) {
            multiply<CTAS>(b, p);
        }
    } else if (warp == 2 || warp == 8) {
        produce_weight_scales<CTAS>(b, p, warp / 8);
    } else if (warp == 3 || warp == 9) {
        if (p.x_tiles == 1) {
            produce_token_scales<CTAS, 1>(b, p, warp / 8);
        } else {
            produce_token_scales<CTAS, 2>(b, p, warp / 8);
        }
    } else {
        grid_dependency_wait(); /* the kernel before this one may still read what is written here */
        named_barrier_sync(TMEM_BARRIER, TMEM_BARRIER_THREADS);
        tcgen05_fence_after();
        b.tmem = load_shared_u32(tmem_slot(b));
        if (CTAS == 1 && p.split > 1) {
            finish_split<OUTPUT>(b, p);
        } else {
            finish_tiles<CTAS, OUTPUT>(b, p);
        }
    }

    /* Leave together: a block must not end while another one of its cluster sends to it or multiplies for it. */
    tcgen05_fence_before();
    __syncwarp();
    if (cluster > 1) {
        cluster_arrive_relaxed();
        cluster_wait();
    }
    __syncthreads();
    if (warp == 1) {
        tcgen05_fence_after();
        tmem_dealloc<CTAS>(b.tmem, p.tmem_columns);
    }
}

#define MX_SM100_KERNEL(name, ctas, output, blocks_per_sm)                                                           \
    extern "C" __global__ void __launch_bounds__(MX_SM100_THREADS(ctas), blocks_per_sm)                              \
        name(const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap x_map0,                  \
             const __grid_constant__ CUtensorMap x_map1, const __grid_constant__ struct mx_sm100_gemm_params p) {    \
        gemm<ctas, output>(&w_map, &x_map0, &x_map1, p);                                                             \
    }

/* Two blocks per SM for few tokens: the next kernel's blocks then load their weights beside this one's. */
MX_SM100_KERNEL(mx_sm100_gemm_bf16, 1, OUT_BF16, 2)
MX_SM100_KERNEL(mx_sm100_gemm_mx32, 1, OUT_MX32, 2)
MX_SM100_KERNEL(mx_sm100_gemm_pair_bf16, 2, OUT_BF16, 1)
MX_SM100_KERNEL(mx_sm100_gemm_pair_mx32, 2, OUT_MX32, 1)
