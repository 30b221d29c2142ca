/*
 * sm90_gemm_cluster.cu - the wide matrix product (sm90_gemm_span.cuh) for a middling number of tokens: whole tiles would
 * be too few to occupy the device, or too many bytes on the way from L2 to each SM, so the blocks of a cluster share
 * them. A launch has one cluster per tile.
 *
 *     CLUSTER_N = 2   two blocks side by side send each other half of the tokens they share. Together they have the 256
 *                     columns of the widest scale, for which they tell each other the maxima of their rows.
 *     SPLIT = S       S blocks (or such pairs) take a part of K each. Every part is summed in one chain; then each of
 *                     the S blocks gets the others' sums of some of the rows, adds the parts in increasing order of K
 *                     and stores those rows:
 *
 *                     rows of a tile    0 .. M/S - 1     M/S .. 2M/S - 1    ...
 *                     stored by part         0                  1           ...
 *
 * With S > 1 the sum is not the one chain of the other wide kernels: plan.c keeps these out where a token's bits must not
 * depend on the number of tokens.
 *
 * The small tiles take less than half of the registers, so that their blocks can start, and fetch their first weights,
 * beside the last ones of the kernel before.
 */
#include "sm90_gemm_span.cuh"

#define MAXIMA_BYTES 1024 /* [block of the pair x warpgroup along N][pairs of rows] packed maxima */

/* ---- sums of several parts of K ---------------------------------------------------------------------------- */

/* The part of K whose block stores this warp's 16 rows. */
template <class C> MX_DEVICE int storing_part(int row) {
    static_assert(C::BLOCK_M / 16 % C::SPLIT == 0, "whole warps store");
    return row / 16 / (C::BLOCK_M / 16 / C::SPLIT);
}

/* Sums cross over in the ring, which is no longer needed: [part][accumulators 4 i to 4 i + 3][thread], of the threads with
 * the rows that the receiving block stores. */
template <class C> struct sums_layout {
    static constexpr int ROWS16 = C::BLOCK_M / 16 / C::SPLIT, THREADS = 32 * ROWS16 * C::GROUPS_N;
    static constexpr int QUADS = C::GROUP_N / 8, STEP = THREADS * 16, PART = QUADS * STEP;
    static_assert(C::SPLIT * PART <= C::STAGES * C::STAGE_BYTES, "a block's sums must fit into the ring");
};

template <class C> MX_DEVICE uint32_t sums_address(const struct consumer<C> &c, int part) {
    typedef struct sums_layout<C> layout;
    const int thread = (c.col / C::GROUP_N * layout::ROWS16 + c.row / 16 % layout::ROWS16) * 32 + threadIdx.x % 32;
    return c.smem + part * layout::PART + thread * 16;
}

template <class C> MX_DEVICE void send_sums(const struct consumer<C> &c, int rank) {
    const int to = storing_part<C>(c.row) * C::SHARERS + sharer<C>(rank);
    const uint32_t address = map_to_rank(sums_address(c, k_part<C>(rank)), to);
#pragma unroll
    for (int i = 0; i < sums_layout<C>::QUADS; i++) {
        const float *acc = &c.acc[i / (C::HALF_N / 8)][i % (C::HALF_N / 8) * 4];
        store_cluster_v4_f32(address + i * sums_layout<C>::STEP, acc[0], acc[1], acc[2], acc[3]);
    }
}

/* NOTE: a block's own part goes the same way: adding it from registers, in its place, took so many more that it spilled. */
template <class C> MX_DEVICE void add_sums(struct consumer<C> &c) {
    const uint32_t address = sums_address(c, 0);
#pragma unroll
    for (int i = 0; i < sums_layout<C>::QUADS; i++) {
        float *acc = &c.acc[i / (C::HALF_N / 8)][i % (C::HALF_N / 8) * 4];
#pragma unroll
        for (int part = 0; part < C::SPLIT; part++) {
            const float4 sum = load_shared_v4_f32(address + part * sums_layout<C>::PART + i * sums_layout<C>::STEP);
            acc[0] = part == 0 ? sum.x : acc[0] + sum.x;
            acc[1] = part == 0 ? sum.y : acc[1] + sum.y;
            acc[2] = part == 0 ? sum.z : acc[2] + sum.z;
            acc[3] = part == 0 ? sum.w : acc[3] + sum.w;
        }
    }
}

/* ---- maxima of rows over several warps --------------------------------------------------------------------- */

/* Whether a scale spans more columns than a warp has. */
template <class C>
constexpr bool exchanges_maxima =
    (C::OUTPUT == OUT_MX256 && C::GROUP_N < 256) || (C::OUTPUT == OUT_MX128 && C::GROUP_N < 128);

/* Behind the barriers: a block writes to it in its neighbour while that one may still multiply. */
template <class C> MX_DEVICE uint32_t maxima_address(uint32_t smem, int part, int entry) {
    static_assert(C::CLUSTER_N * C::GROUPS_N * C::BLOCK_M / 2 * 4 <= MAXIMA_BYTES, "one word for two rows");
    return full_barrier<C>(smem, C::STAGES) + (part * (C::BLOCK_M / 2) + entry) * 4;
}

/* All threads of the cluster, storing or not. */
MX_DEVICE void sync_cluster() {
    __syncwarp();
    cluster_arrive();
    cluster_wait();
}

/* From the maxima of the lane's rows over the warp's columns those over all columns that share a scale. */
template <class C>
MX_DEVICE uint32_t exchange_maxima(const struct consumer<C> &c, uint32_t amax, int rank, bool stores) {
    const int own = sharer<C>(rank), part = own * C::GROUPS_N + c.col / C::GROUP_N,
              entry = c.row / 16 * 8 + c.row % 8;
    if (stores && threadIdx.x % 4 == 0) {
#pragma unroll
        for (int i = 0; i < C::SHARERS; i++) {
            store_cluster_u32(map_to_rank(maxima_address<C>(c.smem, part, entry), rank - own + i), amax);
        }
    }
    sync_cluster();
    if (stores) {
#pragma unroll
        for (int i = 0; i < C::SHARERS * C::GROUPS_N; i++) {
            if (C::OUTPUT == OUT_MX256 || i / C::GROUPS_N == own) {
                amax = max_pairs(amax, load_shared_u32(maxima_address<C>(c.smem, i, entry)));
            }
        }
    }
    return amax;
}

/* ---- epilogue -------------------------------------------------------------------------------------------- */

/* BF16 in columns that are not a multiple of 32: pairs straight from the fragment, 16 bytes a quad. */
template <class C>
MX_DEVICE void store_pairs(const struct consumer<C> &c, const struct mx_sm90_gemm_params &p, const struct tile &t,
                           const float (&w_scale)[C::HALF_N / 16]) {
    const struct out_rows rows = locate_rows(p, t, c.row);
#pragma unroll
    for (int j = 0; j < C::HALF_N / 8; j++) {
        const float *acc = &c.acc[0][4 * j];
        const int col = t.n + c.col + 8 * j + threadIdx.x % 4 * 2;
        if (rows.low != NULL && col < p.num_rows) {
            *(uint32_t *)(rows.low + col * 2) = pack_bf16(acc[0] * w_scale[j / 2], acc[1] * w_scale[j / 2]);
        }
        if (rows.high != NULL && col < p.num_rows) {
            *(uint32_t *)(rows.high + col * 2) = pack_bf16(acc[2] * w_scale[j / 2], acc[3] * w_scale[j / 2]);
        }
    }
}

/* What a warp finishes without the maxima of others. */
template <class C>
MX_DEVICE void store_own(const struct consumer<C> &c, const struct mx_sm90_gemm_params &p, const struct tile &t,
                         const struct weight_scales<C> &w) {
    float w_scale[C::HALVES][weight_scales<C>::COUNT];
#pragma unroll
    for (int half = 0; half < C::HALVES; half++) {
        decode_weight_scales(w, half, w_scale[half]);
    }
    if constexpr (C::HALF_N % MX_BLOCK != 0) {
        store_pairs(c, p, t, w_scale[0]);
    } else {
#pragma unroll
        for (int half = 0; half < C::HALVES; half++) {
            store_columns<C::OUTPUT>(p, t, c.row, t.n + c.col + half * C::HALF_N, c.acc[half], w_scale[half]);
        }
    }
}

/* The same under a scale that spans the columns of several warps. */
template <class C>
MX_DEVICE void store_shared_scale(const struct consumer<C> &c, const struct mx_sm90_gemm_params &p,
                                  const struct tile &t, const struct weight_scales<C> &w, int rank, bool stores) {
    float w_scale[C::BLOCKS];
    struct rounded_half<C::BLOCKS> own;
    decode_weight_scales(w, 0, w_scale);
    round_half(own, c.acc[0], w_scale);
    const uint32_t amax = exchange_maxima(c, max_over_quad(own.amax), rank, stores);
    if (stores) {
        const uint32_t scales = scales_from_amax(amax);
        const struct out_rows rows = locate_rows(p, t, c.row);
#pragma unroll
        for (int i = 0; i < C::BLOCKS; i++) {
            store_quantized(own.b[i], rows, scales, t.n + c.col + i * MX_BLOCK, p.num_rows);
        }
        store_scales<C::BLOCKS>(p, t, rows, t.n + c.col, (scales & 0xFF) * 0x01010101u, (scales >> 16) * 0x01010101u);
    }
}

/* ---- kernel ---------------------------------------------------------------------------------------------- */

/* A warpgroup's part. Between the sum and the end, its barriers are those of leave_cluster. */
template <class C> MX_DEVICE void run_consumer(uint32_t smem, const struct mx_sm90_gemm_params &p, int rank) {
    const struct tile t = locate_tile<C>(p.tiling, blockIdx.x / C::CLUSTER, rank);
    struct consumer<C> c;
    struct weight_scales<C> w;
    init_consumer(c, smem, p);
    if (C::SPLIT == 1) {
        load_weight_scales(w, p, t, c.col);
    }
    grid_dependency_wait();
    sum_spans(c, p, t, rank);
    if (C::SPLIT > 1) {
        load_weight_scales(w, p, t, c.col); /* hidden by the exchange; the main loop has no registers to spare */
    }

    const bool stores = C::SPLIT == 1 || storing_part<C>(c.row) == k_part<C>(rank);
    if constexpr (C::SPLIT > 1) {
        sync_cluster(); /* all blocks have used up their rings */
        send_sums(c, rank);
        sync_cluster();
        if (stores) {
            add_sums(c);
        }
    }
    if constexpr (exchanges_maxima<C>) {
        store_shared_scale(c, p, t, w, rank, stores);
    } else if (stores) {
        store_own(c, p, t, w);
    }
}

/* A block must not leave while its neighbours may still write to it: at least one of these barriers follows the last
 * product. The loading warp takes part in all of them. */
template <class C> MX_DEVICE void leave_cluster(bool loader) {
    constexpr int LATER = (C::SPLIT > 1 ? 2 : 0) + (exchanges_maxima<C> ? 1 : 0);
    if (LATER == 0 && C::CLUSTER > 1) {
        __syncwarp();
        cluster_arrive_relaxed();
        cluster_wait();
    }
    if (loader) {
#pragma unroll
        for (int i = 0; i < LATER; i++) {
            sync_cluster();
        }
    }
}

/* LOADERS: warps beside the consumers. One of them loads; where consumers need more than 168 registers, four, whose own
 * registers the consumers get. */
template <class C, int LOADERS>
MX_DEVICE void gemm_cluster(const CUtensorMap *x_map, const CUtensorMap *w_map, const struct mx_sm90_gemm_params &p) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t smem = smem_address(shared);
    const int rank = C::CLUSTER > 1 ? (int)cluster_rank() : 0;
    const bool loader = threadIdx.x >= 128 * C::CONSUMERS;

    start_ring<C>(smem, x_map, w_map, p, 1, rank);

    if (loader) {
        if (LOADERS == 4) {
            set_max_registers_down<C::CONSUMERS == 2 ? 40 : 32>();
        }
        if (threadIdx.x == 128 * C::CONSUMERS) {
            produce<C>(smem, x_map, w_map, p, rank);
        }
    } else {
        if (LOADERS == 4) {
            set_max_registers_up<C::CONSUMERS == 2 ? 232 : 160>();
        }
        run_consumer<C>(smem, p, rank);
    }
    leave_cluster<C>(loader);
}

#define MX_CLUSTER_KERNEL(NAME, CONSUMERS, GROUPS_N, BLOCK_N, STAGES, CLUSTER_N, SPLIT, LOADERS, PER_SM, OUTPUT)     \
    extern "C" __global__ void __launch_bounds__(128 * CONSUMERS + 32 * LOADERS, PER_SM)                             \
        NAME(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,                   \
             const __grid_constant__ struct mx_sm90_gemm_params p) {                                                 \
        gemm_cluster<gemm_config<CONSUMERS, GROUPS_N, BLOCK_N, STAGES, 1, CLUSTER_N, SPLIT, OUTPUT>, LOADERS>(       \
            &x_map, &w_map, p);                                                                                      \
    }

#define MX_CLUSTER_KERNELS(NAME, ...)                                                                                \
    MX_CLUSTER_KERNEL(NAME##_bf16, __VA_ARGS__, OUT_BF16)                                                            \
    MX_CLUSTER_KERNEL(NAME##_mx32, __VA_ARGS__, OUT_MX32)                                                            \
    MX_CLUSTER_KERNEL(NAME##_mx128, __VA_ARGS__, OUT_MX128)                                                          \
    MX_CLUSTER_KERNEL(NAME##_mx256, __VA_ARGS__, OUT_MX256)

/* The shipped forms, named by their tile, "x1" or "x2" blocks side by side and "s" parts of K; plan.c names them. The
 * last column only limits registers: small tiles keep to what would let two blocks share an SM. */
/* clang-format off */
/*                 name                              warpgroups, along N  BLOCK_N  stages  cluster N  split  loaders  a SM */
MX_CLUSTER_KERNELS(mx_sm90_gemm_64x128x2_s1,         2, 2,                128,     6,      2,         1,     1,       2)
MX_CLUSTER_KERNELS(mx_sm90_gemm_64x128x2_s2,         2, 2,                128,     6,      2,         2,     1,       2)
MX_CLUSTER_KERNELS(mx_sm90_gemm_64x128x2_s4,         2, 2,                128,     6,      2,         4,     1,       2)
MX_CLUSTER_KERNELS(mx_sm90_gemm_128x128x2_s1,        2, 1,                128,     6,      2,         1,     1,       1)
MX_CLUSTER_KERNELS(mx_sm90_gemm_128x128x2_s2,        2, 1,                128,     6,      2,         2,     1,       1)
MX_CLUSTER_KERNELS(mx_sm90_gemm_128x128x2_s4,        2, 1,                128,     6,      2,         4,     1,       1)
MX_CLUSTER_KERNELS(mx_sm90_gemm_192x128x2_s1,        3, 1,                128,     5,      2,         1,     4,       1)
MX_CLUSTER_KERNEL( mx_sm90_gemm_128x80x1_s2_bf16,    2, 1,                80,      6,      1,         2,     1,       1, OUT_BF16)
MX_CLUSTER_KERNEL( mx_sm90_gemm_128x128x1_s2_bf16,   2, 1,                128,     6,      1,         2,     1,       1, OUT_BF16)
MX_CLUSTER_KERNEL( mx_sm90_gemm_128x160x1_s2_bf16,   2, 1,                160,     6,      1,         2,     4,       1, OUT_BF16)
MX_CLUSTER_KERNEL( mx_sm90_gemm_128x256x1_s2_bf16,   2, 1,                256,     4,      1,         2,     4,       1, OUT_BF16)
/* clang-format on */
