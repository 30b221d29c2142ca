/*
 * sm90_gemm.cuh - what the tiled matrix products share: the order of the tiles, and the ring of operand stages between
 * the copy engine and the tensor cores.
 *
 * A block computes BLOCK_M tokens x BLOCK_N weight rows. Two or three warpgroups of 128 threads multiply, 64 tokens each;
 * one thread of another warpgroup keeps the copy engine busy.
 */
#ifndef VLLM_MEGAATTN_SM90_GEMM_CUH
#define VLLM_MEGAATTN_SM90_GEMM_CUH

#include "simt_quantize.cuh"
#include "sm90_params.h"
#include "wgmma_sm90.cuh"

#define BLOCK_K 128 /* bytes of K per stage: one row of the 128-byte swizzle */

/* What an epilogue writes. */
enum mx_output { OUT_BF16 = 0, OUT_MX32 = 32, OUT_MX128 = 128, OUT_MX256 = 256 };

/* ---- tiles ----------------------------------------------------------------------------------------------- */

struct tile {
    int group;
    int token, n; /* first token and first weight row of this block's part */
};

/* A block's place in its cluster: among those that load for each other, and which part of K it takes. */
template <class C> MX_DEVICE int sharer(int rank) { return C::SHARERS > 1 ? rank % C::SHARERS : 0; }
template <class C> MX_DEVICE int k_part(int rank) { return rank / C::SHARERS; }

/* Cluster tile number `index`: groups outermost, then bands of tokens, then weight rows, tokens innermost.
 *
 *            n 0   n 1   n 2
 *     m 0     0     2     4    \ band 0
 *     m 1     1     3     5    /
 *     m 2     6     8    10    \ band 1
 *     m 3     7     9    11    /
 */
template <class C> MX_DEVICE struct tile locate_tile(const struct mx_sm90_tiling &tiling, int index, int rank) {
    const int per_group = tiling.num_m * tiling.num_n, per_band = tiling.band * tiling.num_n;
    const int group = index / per_group, in_group = index - group * per_group;
    const int band = in_group / per_band, in_band = in_group - band * per_band;
    const int band_rows = min(tiling.band, tiling.num_m - band * tiling.band);
    const int n = in_band / band_rows, m = band * tiling.band + in_band - n * band_rows;
    const int block_m = m * C::CLUSTER_M + (C::CLUSTER_M > 1 ? sharer<C>(rank) : 0);
    const int block_n = n * C::CLUSTER_N + (C::CLUSTER_N > 1 ? sharer<C>(rank) : 0);
    return {group, block_m * C::BLOCK_M, block_n * C::BLOCK_N};
}

/* ---- ring ------------------------------------------------------------------------------------------------ */

/* Position in the ring of stages; `parity` flips every time round. */
struct ring {
    uint32_t stage, parity;
};

template <int STAGES> MX_DEVICE void ring_advance(struct ring &r) {
    r.stage++;
    if (r.stage == STAGES) {
        r.stage = 0;
        r.parity ^= 1;
    }
}

/* ---- scales ---------------------------------------------------------------------------------------------- */

/* First scale byte of a token, and how far apart the bytes of neighbouring 256-column spans are. */
MX_DEVICE const uint8_t *token_scale_ptr(const struct mx_scales &s, int group, int token) {
    const uint8_t *base = s.data + group * s.stride_group;
    return s.layout == MX_SCALE_PACKED ? base + token * s.stride_row
                                       : base + mx_f8_128x4_offset(token, 0, s.num_col_tiles);
}

MX_DEVICE int64_t token_scale_stride_256(const struct mx_scales &s) {
    return s.layout == MX_SCALE_PACKED ? 2 * s.stride_col : 2 * MX_TILE_BYTES;
}

/* Scale byte of the 32 weight rows from n on; blocks of 2^i >= 32 rows by all of K. */
MX_DEVICE uint32_t weight_scale_byte(const struct mx_scales &s, int group, int n) {
    return __ldg(s.data + group * s.stride_group + (n >> (__ffs(s.block_rows) - 1)) * s.stride_row);
}

/* ---- stages ---------------------------------------------------------------------------------------------- */

/* One shipped form. Two blocks of a cluster sit one above the other and share weights (CLUSTER_M = 2), or side by side
 * and share tokens (CLUSTER_N = 2): each loads half of the common operand and sends it to both. And SPLIT such sets of
 * blocks share the work of their tiles, each on its part of K. */
template <int CONSUMERS_, int GROUPS_N_, int BLOCK_N_, int STAGES_, int CLUSTER_M_, int CLUSTER_N_, int SPLIT_,
          int OUTPUT_>
struct gemm_config {
    static constexpr int CONSUMERS = CONSUMERS_; /* warpgroups that multiply */
    static constexpr int GROUPS_N = GROUPS_N_;   /* how many of them sit side by side along N */
    static constexpr int BLOCK_M = 64 * CONSUMERS / GROUPS_N, BLOCK_N = BLOCK_N_;
    static constexpr int STAGES = STAGES_, CLUSTER_M = CLUSTER_M_, CLUSTER_N = CLUSTER_N_, SPLIT = SPLIT_;
    static constexpr int OUTPUT = OUTPUT_;
    static constexpr int SHARERS = CLUSTER_M * CLUSTER_N, CLUSTER = SHARERS * SPLIT;
    static constexpr int GROUP_N = BLOCK_N / GROUPS_N;   /* columns of a warpgroup */
    static constexpr int HALVES = GROUP_N > 160 ? 2 : 1; /* parts of them that share the partial sums' registers */
    static constexpr int HALF_N = GROUP_N / HALVES;
    static constexpr int BLOCKS = HALF_N / MX_BLOCK; /* 32-column blocks of a half */
    static constexpr int X_BYTES = BLOCK_M * BLOCK_K, W_BYTES = BLOCK_N * BLOCK_K, STAGE_BYTES = X_BYTES + W_BYTES;

    static_assert(SHARERS <= 2, "the multicast masks and shares are for two blocks");
    static_assert(CLUSTER <= 8, "larger clusters need an attribute of the kernel");
    static_assert(HALF_N % MX_BLOCK == 0 || OUTPUT == OUT_BF16, "MXFP8 leaves in blocks of 32 columns");
    static_assert(W_BYTES % (1024 * CLUSTER_M) == 0 && X_BYTES % (1024 * CLUSTER_N) == 0,
                  "swizzle atoms are 8 rows of 128 bytes");
    static_assert(OUTPUT != OUT_MX256 || BLOCK_N * CLUSTER_N == 256, "a 256-column maximum must lie in one cluster");
};

/* Shared memory: STAGES x [x tile | w tile], then STAGES x {full, empty} barriers, then what a kernel adds. */
template <class C> MX_DEVICE uint32_t full_barrier(uint32_t smem, uint32_t stage) {
    return smem + C::STAGES * C::STAGE_BYTES + stage * 16;
}

template <class C> MX_DEVICE uint32_t empty_barrier(uint32_t smem, uint32_t stage) {
    return full_barrier<C>(smem, stage) + 8;
}

/* Full takes `full_arrivals` and the announced bytes, empty one arrival per consumer warp of each block
 * that shares the stage. One thread. */
template <class C> MX_DEVICE void init_barriers(uint32_t smem, uint32_t full_arrivals) {
    for (int i = 0; i < C::STAGES; i++) {
        mbarrier_init(full_barrier<C>(smem, i), full_arrivals);
        mbarrier_init(empty_barrier<C>(smem, i), 4 * C::CONSUMERS * C::SHARERS);
    }
    mbarrier_fence_init();
}

/* All threads: the barriers of all blocks that load for this one are ready. */
template <class C> MX_DEVICE void sync_blocks() {
    if (C::SHARERS > 1) {
        __syncwarp();
        cluster_arrive();
        cluster_wait();
    } else {
        __syncthreads();
    }
}

/* A consumer warp has read the stage: tells the producers of all blocks that write to it. */
template <class C> MX_DEVICE void release_stage(uint32_t smem, uint32_t stage) {
    const uint32_t empty = empty_barrier<C>(smem, stage), lane = threadIdx.x % 32;
    if (C::SHARERS == 1 && lane == 0) {
        mbarrier_arrive(empty);
    }
    if (C::SHARERS > 1 && lane < C::SHARERS) {
        const uint32_t first = C::SPLIT > 1 ? cluster_rank() / C::SHARERS * C::SHARERS : 0;
        mbarrier_arrive_remote(map_to_rank(empty, first + lane));
    }
}

template <class C>
MX_DEVICE void load_weights(uint32_t smem, const CUtensorMap *w_map, uint32_t stage, const struct tile &t, int k,
                            int rank) {
    const uint32_t dst = smem + stage * C::STAGE_BYTES + C::X_BYTES, full = full_barrier<C>(smem, stage);
    if (C::CLUSTER_M == 2) {
        const int rows = C::BLOCK_N / 2, own = sharer<C>(rank);
        tma_load_3d_multicast(dst + own * (C::W_BYTES / 2), w_map, k, t.n + own * rows, t.group, full,
                              (uint16_t)(3 << (rank - own)));
    } else {
        tma_load_3d(dst, w_map, k, t.n, t.group, full);
    }
}

template <class C>
MX_DEVICE void load_tokens(uint32_t smem, const CUtensorMap *x_map, uint32_t stage, const struct tile &t, int k,
                           int rank) {
    const uint32_t dst = smem + stage * C::STAGE_BYTES, full = full_barrier<C>(smem, stage);
    if (C::CLUSTER_N == 2) {
        const int rows = C::BLOCK_M / 2, own = sharer<C>(rank);
        tma_load_3d_multicast(dst + own * (C::X_BYTES / 2), x_map, k, t.group, t.token + own * rows, full,
                              (uint16_t)(3 << (rank - own)));
    } else {
        tma_load_3d(dst, x_map, k, t.group, t.token, full);
    }
}

/* ---- producer -------------------------------------------------------------------------------------------- */

/* This block's part of K, in columns. Parts are whole spans of 256 columns. */
struct k_range {
    int begin, end;
};

template <class C> MX_DEVICE struct k_range locate_k(int k, int rank) {
    if (C::SPLIT == 1) {
        return {0, k};
    }
    const int spans = k / 256, part = k_part<C>(rank), each = spans / C::SPLIT, more = spans % C::SPLIT;
    const int begin = part * each + min(part, more); /* the first `more` parts have a span more */
    return {begin * 256, (begin + each + (part < more ? 1 : 0)) * 256};
}

/* Columns of K in stages, of this block's part. */
template <class C> MX_DEVICE int count_stages(int k, int rank) {
    const struct k_range range = locate_k<C>(k, rank);
    return (range.end - range.begin + BLOCK_K - 1) / BLOCK_K;
}

/* One thread: starts the first weights on their way, as much as the ring takes. They do not depend on the kernel before
 * this one, which may still be running. */
template <class C>
MX_DEVICE void produce_early(uint32_t smem, const CUtensorMap *w_map, const struct mx_sm90_gemm_params &p, int rank) {
    const struct tile t = locate_tile<C>(p.tiling, blockIdx.x / C::CLUSTER, rank);
    const int num_early = min(count_stages<C>(p.k, rank), C::STAGES);
    for (int i = 0; i < num_early; i++) {
        mbarrier_arrive_expect(full_barrier<C>(smem, i), C::STAGE_BYTES);
        load_weights<C>(smem, w_map, i, t, locate_k<C>(p.k, rank).begin + i * BLOCK_K, rank);
    }
}

/* One thread: fills the ring with the stages of this block's tiles, in the order the consumers use them. */
template <class C>
MX_DEVICE void produce(uint32_t smem, const CUtensorMap *x_map, const CUtensorMap *w_map,
                       const struct mx_sm90_gemm_params &p, int rank) {
    const int begin = locate_k<C>(p.k, rank).begin, num_k = count_stages<C>(p.k, rank);
    const int num_early = min(num_k, C::STAGES), first = blockIdx.x / C::CLUSTER, step = gridDim.x / C::CLUSTER;
    struct ring r = {0, 1}; /* the first wait on a fresh barrier passes with parity 1 */

    grid_dependency_wait();
    fence_proxy_async(); /* that kernel wrote x by ordinary stores */

    for (int index = first; index < p.tiling.num_tiles; index += step) {
        const struct tile t = locate_tile<C>(p.tiling, index, rank);
        for (int i = 0; i < num_k; i++) {
            const int k = begin + i * BLOCK_K;
            if (index != first || i >= num_early) {
                mbarrier_wait(empty_barrier<C>(smem, r.stage), r.parity);
                mbarrier_arrive_expect(full_barrier<C>(smem, r.stage), C::STAGE_BYTES);
                load_weights<C>(smem, w_map, r.stage, t, k, rank);
            }
            load_tokens<C>(smem, x_map, r.stage, t, k, rank);
            ring_advance<C::STAGES>(r);
        }
    }
}

/* All threads: sets up the ring and starts the first weights. Where the blocks of a cluster load for each other, they
 * must know that the other one is there. */
template <class C>
MX_DEVICE void start_ring(uint32_t smem, const CUtensorMap *x_map, const CUtensorMap *w_map,
                          const struct mx_sm90_gemm_params &p, uint32_t full_arrivals, int rank) {
    const bool producer = threadIdx.x == 128 * C::CONSUMERS;
    if (producer) {
        tma_prefetch_map(w_map);
        tma_prefetch_map(x_map);
        init_barriers<C>(smem, full_arrivals);
        if (C::SHARERS == 1) {
            produce_early<C>(smem, w_map, p, rank);
        }
    }
    sync_blocks<C>();
    if (producer && C::SHARERS > 1) {
        produce_early<C>(smem, w_map, p, rank);
    }
    grid_launch_dependents();
}

#endif /* VLLM_MEGAATTN_SM90_GEMM_CUH */
