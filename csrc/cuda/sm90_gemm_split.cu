/*
 * sm90_gemm_split.cu - the wide matrix product (sm90_gemm_span.cuh) for a middling number of tokens, where whole tiles are
 * too few to occupy the device: two blocks of a cluster share a tile, each on half of K.
 *
 * Each sums its spans in one chain; then a warp of one block sends its accumulators to the other block's same warp, which
 * adds the two sums and stores. So each block stores half of the tile's rows:
 *
 *     two warpgroups one above the other (64 rows each):  block 0 stores the upper one's rows, block 1 the lower one's
 *     two warpgroups side by side (the same 64 rows):     block 0 stores rows 0 to 31, block 1 rows 32 to 63
 *
 * The sum of two chains is not the one chain of the other wide kernels: plan.c keeps these out where a token's bits must
 * not depend on the number of tokens. A launch has one cluster per tile.
 */
#include "sm90_gemm_span.cuh"

#define STORE_BARRIER 1 /* named barrier of the warps that store */

/* Which block of the cluster stores this warp's rows. */
template <class C> MX_DEVICE int storing_rank() {
    return C::GROUPS_N == 1 ? threadIdx.x / 128 : threadIdx.x % 128 / 64;
}

/* A thread's slot for accumulators 4 i to 4 i + 3, in the memory of the ring that is no longer needed. */
template <class C> MX_DEVICE uint32_t exchange_slot(uint32_t smem, int half, int i) {
    static_assert(C::HALVES * C::HALF_N / 2 * 4 * 128 * C::CONSUMERS <= C::STAGES * C::STAGE_BYTES,
                  "the accumulators of a block must fit into the ring");
    return smem + ((half * (C::HALF_N / 8) + i) * 128 * C::CONSUMERS + threadIdx.x) * 16;
}

template <class C> MX_DEVICE void send_sums(const struct consumer<C> &c, int to) {
#pragma unroll
    for (int half = 0; half < C::HALVES; half++) {
#pragma unroll
        for (int i = 0; i < C::HALF_N / 8; i++) {
            const float *acc = &c.acc[half][4 * i];
            store_cluster_v4_f32(map_to_rank(exchange_slot<C>(c.smem, half, i), to), acc[0], acc[1], acc[2], acc[3]);
        }
    }
}

template <class C> MX_DEVICE void add_sums(struct consumer<C> &c) {
#pragma unroll
    for (int half = 0; half < C::HALVES; half++) {
#pragma unroll
        for (int i = 0; i < C::HALF_N / 8; i++) {
            const float4 sum = load_shared_v4_f32(exchange_slot<C>(c.smem, half, i));
            float *acc = &c.acc[half][4 * i];
            acc[0] += sum.x;
            acc[1] += sum.y;
            acc[2] += sum.z;
            acc[3] += sum.w;
        }
    }
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

/* OUT_MX256 with the two warpgroups side by side: each has 128 of the columns, and the rows' maxima of its own. */
template <class C>
MX_DEVICE void store_side_by_side(const struct consumer<C> &c, const struct mx_sm90_gemm_params &p,
                                  const struct tile &t, const float (&w_scale)[C::BLOCKS]) {
    const struct out_rows rows = locate_rows(p, t, c.row);
    const int col = t.n + c.col, storing_threads = 32 * 2 * C::GROUPS_N;
    struct rounded_half<C::BLOCKS> own;
    round_half(own, c.acc[0], w_scale);

    /* Exchange maxima through the exchange slots, which this thread and its counterpart have read already */
    const uint32_t maxima = exchange_slot<C>(c.smem, 0, 0) - threadIdx.x * 16;
    named_barrier_sync(STORE_BARRIER, storing_threads);
    store_shared_u32(maxima + threadIdx.x * 4, own.amax);
    named_barrier_sync(STORE_BARRIER, storing_threads);
    const uint32_t other = load_shared_u32(maxima + (threadIdx.x ^ 128) * 4);

    const uint32_t scales = scales_from_amax(max_over_quad(max_pairs(own.amax, other)));
#pragma unroll
    for (int i = 0; i < C::BLOCKS; i++) {
        store_quantized(own.b[i], rows, scales, col + i * MX_BLOCK, p.num_rows);
    }
    store_scales<C::BLOCKS>(p, t, rows, col, (scales & 0xFF) * 0x01010101u, (scales >> 16) * 0x01010101u);
}

template <class C>
MX_DEVICE void store_tile(struct consumer<C> &c, const struct mx_sm90_gemm_params &p, const struct tile &t,
                          const struct weight_scales<C> &w) {
    float w_scale[C::HALVES][weight_scales<C>::COUNT];
#pragma unroll
    for (int half = 0; half < C::HALVES; half++) {
        decode_weight_scales(w, half, w_scale[half]);
    }
    if constexpr (C::HALF_N % MX_BLOCK != 0) {
        store_pairs(c, p, t, w_scale[0]);
    } else if constexpr (C::OUTPUT == OUT_MX256 && C::GROUPS_N == 2) {
        store_side_by_side(c, p, t, w_scale[0]);
    } else if constexpr (C::OUTPUT == OUT_MX256) {
        struct rounded_half<C::BLOCKS> first, second;
        round_half(first, c.acc[0], w_scale[0]);
        round_half(second, c.acc[1], w_scale[1]);
        store_both_halves(p, t, c.row, t.n, first, second);
    } else {
#pragma unroll
        for (int half = 0; half < C::HALVES; half++) {
            store_columns<C::OUTPUT>(p, t, c.row, t.n + c.col + half * C::HALF_N, c.acc[half], w_scale[half]);
        }
    }
}

/* ---- kernel ---------------------------------------------------------------------------------------------- */

template <class C>
MX_DEVICE void gemm_split(const CUtensorMap *x_map, const CUtensorMap *w_map, const struct mx_sm90_gemm_params &p) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t smem = smem_address(shared), warpgroup = threadIdx.x / 128;
    const int rank = (int)cluster_rank();

    start_ring<C>(smem, x_map, w_map, p, 1, rank);

    if (warpgroup == C::CONSUMERS) {
        set_max_registers_down<PRODUCER_REGS>();
        if (threadIdx.x == 128 * C::CONSUMERS) {
            produce<C>(smem, x_map, w_map, p, rank);
        }
        __syncwarp();
        cluster_arrive(); /* both blocks have used up their rings */
        cluster_wait();
        cluster_arrive(); /* sums are sent */
        cluster_wait();
    } else {
        set_max_registers_up<CONSUMER_REGS>();
        const struct tile t = locate_tile<C>(p.tiling, blockIdx.x / C::CLUSTER, rank);
        struct consumer<C> c;
        struct weight_scales<C> w;
        init_consumer(c, smem, p);
        load_weight_scales(w, p, t, c.col);
        grid_dependency_wait();
        sum_spans(c, p, t, rank);

        cluster_arrive();
        cluster_wait();
        if (storing_rank<C>() != rank) {
            send_sums(c, 1 - rank);
        }
        __syncwarp();
        cluster_arrive();
        cluster_wait();
        if (storing_rank<C>() == rank) {
            add_sums(c);
            store_tile(c, p, t, w);
        }
    }
}

#define MX_SPLIT_KERNEL(NAME, GROUPS_N, BLOCK_N, STAGES, OUTPUT)                                                     \
    extern "C" __global__ void __launch_bounds__(384, 1)                                                             \
        NAME(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,                   \
             const __grid_constant__ struct mx_sm90_gemm_params p) {                                                 \
        gemm_split<gemm_config<2, GROUPS_N, BLOCK_N, STAGES, 1, 1, 2, OUTPUT>>(&x_map, &w_map, p);                   \
    }

/* The shipped forms, named by their tile; plan.c names them. */
/* clang-format off */
/*              name                                warpgroups along N  BLOCK_N  stages  output */
MX_SPLIT_KERNEL(mx_sm90_gemm_split_128x80_bf16,     1,                  80,      8,      OUT_BF16)
MX_SPLIT_KERNEL(mx_sm90_gemm_split_128x128_bf16,    1,                  128,     6,      OUT_BF16)
MX_SPLIT_KERNEL(mx_sm90_gemm_split_128x160_bf16,    1,                  160,     6,      OUT_BF16)
MX_SPLIT_KERNEL(mx_sm90_gemm_split_128x256_bf16,    1,                  256,     4,      OUT_BF16)
MX_SPLIT_KERNEL(mx_sm90_gemm_split_64x256_mx32,     2,                  256,     5,      OUT_MX32)
MX_SPLIT_KERNEL(mx_sm90_gemm_split_64x256_mx128,    2,                  256,     5,      OUT_MX128)
MX_SPLIT_KERNEL(mx_sm90_gemm_split_64x256_mx256,    2,                  256,     5,      OUT_MX256)
MX_SPLIT_KERNEL(mx_sm90_gemm_split_128x256_mx32,    1,                  256,     4,      OUT_MX32)
MX_SPLIT_KERNEL(mx_sm90_gemm_split_128x256_mx128,   1,                  256,     4,      OUT_MX128)
MX_SPLIT_KERNEL(mx_sm90_gemm_split_128x256_mx256,   1,                  256,     4,      OUT_MX256)
/* clang-format on */
