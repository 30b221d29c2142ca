/*
 * sm90_gemm_pair.cu - the wide matrix product (sm90_gemm_span.cuh) for a middling number of tokens, in one chain: small
 * tiles, so that there is one for every SM. What limits them is the way from L2 to the SMs, so the two blocks of a
 * cluster sit side by side and send each other half of the tokens they share.
 *
 * Tiles are 128 columns wide; the pair's 256 have a common scale where scale spans are that wide, for which the blocks
 * tell each other the maxima of their rows. A launch has one tile per block.
 */
#include "sm90_gemm_span.cuh"

#define MAXIMA_BYTES 1024 /* [block of the pair x warpgroup along N][32 or 64 pairs of rows] packed maxima */

/* Behind the barriers: a block writes to it in its neighbour while that one still multiplies. */
template <class C> MX_DEVICE uint32_t maxima_address(uint32_t smem, int part, int entry) {
    static_assert(C::CLUSTER_N * C::GROUPS_N * C::BLOCK_M / 2 * 4 <= MAXIMA_BYTES, "one word for two rows");
    return full_barrier<C>(smem, C::STAGES) + (part * (C::BLOCK_M / 2) + entry) * 4;
}

/* The lane's rows' maxima over all columns that share a scale, from those over the warp's columns. Called by all
 * threads of the pair, also by those that have no rows (the producer's warpgroup, with `rows` false). */
template <class C> MX_DEVICE uint32_t exchange_maxima(uint32_t smem, uint32_t amax, int row, int rank, bool rows) {
    const int part = C::GROUPS_N == 1 ? 0 : threadIdx.x / 128; /* warpgroup along N */
    const int entry = row / 16 * 8 + row % 8;
    if (rows && threadIdx.x % 4 == 0) {
#pragma unroll
        for (int i = 0; i < C::CLUSTER; i++) {
            const uint32_t address = maxima_address<C>(smem, rank * C::GROUPS_N + part, entry);
            store_cluster_u32(map_to_rank(address, i), amax);
        }
    }
    __syncwarp();
    cluster_arrive();
    cluster_wait();
    if (rows) {
#pragma unroll
        for (int i = 0; i < C::CLUSTER * C::GROUPS_N; i++) {
            if (C::OUTPUT == OUT_MX256 || i / C::GROUPS_N == rank) {
                amax = max_pairs(amax, load_shared_u32(maxima_address<C>(smem, i, entry)));
            }
        }
    }
    return amax;
}

/* Whether a scale spans more columns than a warp has. */
template <class C>
constexpr bool exchanges_maxima = C::OUTPUT == OUT_MX256 || (C::OUTPUT == OUT_MX128 && C::GROUPS_N > 1);

/* ---- epilogue -------------------------------------------------------------------------------------------- */

template <class C>
MX_DEVICE void store_tile(struct consumer<C> &c, const struct mx_sm90_gemm_params &p, const struct tile &t,
                          const struct weight_scales<C> &w, int rank) {
    float w_scale[C::BLOCKS];
    decode_weight_scales(w, 0, w_scale);
    if constexpr (!exchanges_maxima<C>) {
        store_columns<C::OUTPUT>(p, t, c.row, t.n + c.col, c.acc[0], w_scale);
    } else {
        struct rounded_half<C::BLOCKS> own;
        round_half(own, c.acc[0], w_scale);
        const uint32_t amax = exchange_maxima<C>(c.smem, max_over_quad(own.amax), c.row, rank, true);
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

template <class C>
MX_DEVICE void gemm_pair(const CUtensorMap *x_map, const CUtensorMap *w_map, const struct mx_sm90_gemm_params &p) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t smem = smem_address(shared), warpgroup = threadIdx.x / 128;
    const int rank = (int)cluster_rank();

    start_ring<C>(smem, x_map, w_map, p, 1, rank);

    if (warpgroup == C::CONSUMERS) {
        set_max_registers_down<PRODUCER_REGS>();
        if (threadIdx.x == 128 * C::CONSUMERS) {
            produce<C>(smem, x_map, w_map, p, rank);
        }
        if constexpr (exchanges_maxima<C>) {
            exchange_maxima<C>(smem, 0, 0, rank, false);
        }
    } else {
        set_max_registers_up<CONSUMER_REGS>();
        const struct tile t = locate_tile<C>(p.tiling, blockIdx.x / C::CLUSTER, rank);
        struct consumer<C> c;
        struct weight_scales<C> w;
        init_consumer(c, smem, p);
        load_weight_scales(w, p, t, c.col);
        grid_dependency_wait();
        sum_spans(c, p, t, rank);
        store_tile(c, p, t, w, rank);
    }

    /* A block must not leave while its neighbour may still write to it */
    __syncwarp();
    cluster_arrive_relaxed();
    cluster_wait();
}

#define MX_PAIR_KERNEL(NAME, GROUPS_N, STAGES, OUTPUT)                                                               \
    extern "C" __global__ void __launch_bounds__(384, 1)                                                             \
        NAME(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,                   \
             const __grid_constant__ struct mx_sm90_gemm_params p) {                                                 \
        gemm_pair<gemm_config<2, GROUPS_N, 128, STAGES, 1, 2, 1, OUTPUT>>(&x_map, &w_map, p);                        \
    }

/* The shipped forms, named by their tile; plan.c names them. */
/* clang-format off */
/*             name                              warpgroups along N  stages  output */
MX_PAIR_KERNEL(mx_sm90_gemm_pair_64x128_bf16,    2,                  8,      OUT_BF16)
MX_PAIR_KERNEL(mx_sm90_gemm_pair_64x128_mx32,    2,                  8,      OUT_MX32)
MX_PAIR_KERNEL(mx_sm90_gemm_pair_64x128_mx128,   2,                  8,      OUT_MX128)
MX_PAIR_KERNEL(mx_sm90_gemm_pair_64x128_mx256,   2,                  8,      OUT_MX256)
MX_PAIR_KERNEL(mx_sm90_gemm_pair_128x128_bf16,   1,                  6,      OUT_BF16)
MX_PAIR_KERNEL(mx_sm90_gemm_pair_128x128_mx32,   1,                  6,      OUT_MX32)
MX_PAIR_KERNEL(mx_sm90_gemm_pair_128x128_mx128,  1,                  6,      OUT_MX128)
MX_PAIR_KERNEL(mx_sm90_gemm_pair_128x128_mx256,  1,                  6,      OUT_MX256)
/* clang-format on */
