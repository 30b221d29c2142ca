/*
 * sm90_gemm_wide.cu - matrix product on MXFP8 whose scales are wide: one per 256 columns of a token, one per 32 weight
 * rows over all of K. K is a multiple of 256, at least 512.
 *
 * The tensor cores sum 256 columns (a span: two stages of the ring) into fresh registers; then
 *
 *     acc = fma(partial, x_scale[token, span], acc)
 *
 * span after span, and the weights' scale multiplies the end result once. Every tile shape and cluster size here gives
 * the same bits (plan.h says what else keeps to this order).
 *
 * A tile of 256 columns is two column halves of 128 that use one set of partial registers in turn. While a half's
 * products run, the CUDA cores finish another half: the first half's results leave under the second half's last span,
 * the second half's under the first span of the next tile.
 *
 *     tensor cores   ... | half 0, last span | half 1, last span | half 0, first span | half 1, first span | ...
 *     CUDA cores     ... |   promote half 1  |   store half 0    |    store half 1    |                    | ...
 */
#include "sm90_gemm_span.cuh"

/* ---- epilogue -------------------------------------------------------------------------------------------- */

/* What a tile needs beside its accumulators until it is stored. */
template <class C> struct pending {
    uint8_t w_scale[C::HALVES * C::BLOCKS];
    struct rounded_half<C::BLOCKS> rounded; /* OUT_MX256: first half, while the second one is still multiplied */
};

/* NOTE: loaded a whole tile ahead of their use. The compiler places the epilogue between products that are still to be
 * started, where waiting for memory would keep the tensor cores waiting too. */
template <class C>
MX_DEVICE void load_weight_scales(struct pending<C> &held, const struct mx_sm90_gemm_params &p,
                                  const struct tile &t) {
#pragma unroll
    for (int i = 0; i < C::HALVES * C::BLOCKS; i++) {
        held.w_scale[i] = weight_scale_byte(p.w_scale, t.group, min(t.n + i * MX_BLOCK, p.num_rows - 1));
    }
}

template <class C>
MX_DEVICE void decode_weight_scales(const struct pending<C> &held, int half, float (&w)[C::BLOCKS]) {
#pragma unroll
    for (int i = 0; i < C::BLOCKS; i++) {
        w[i] = mx_f32_from_scale(held.w_scale[half * C::BLOCKS + i]);
    }
}

/* The first of two halves is complete: store it, or keep it until the second one's maximum is known. */
template <class C>
MX_DEVICE void finish_first_half(struct consumer<C> &c, struct pending<C> &held, const struct mx_sm90_gemm_params &p,
                                 const struct tile &t) {
    float w[C::BLOCKS];
    decode_weight_scales(held, 0, w);
    if constexpr (C::OUTPUT == OUT_MX256) {
        round_half(held.rounded, c.acc[0], w);
    } else {
        store_columns<C::OUTPUT>(p, t, c.row, t.n, c.acc[0], w);
    }
}

/* The last half is complete. */
template <class C>
MX_DEVICE void finish_last_half(struct consumer<C> &c, struct pending<C> &held, const struct mx_sm90_gemm_params &p,
                                const struct tile &t) {
    constexpr int HALF = C::HALVES - 1;
    float w[C::BLOCKS];
    decode_weight_scales(held, HALF, w);
    if constexpr (C::OUTPUT == OUT_MX256) {
        struct rounded_half<C::BLOCKS> second;
        round_half(second, c.acc[HALF], w);
        store_both_halves(p, t, c.row, t.n, held.rounded, second);
    } else {
        store_columns<C::OUTPUT>(p, t, c.row, t.n + HALF * C::HALF_N, c.acc[HALF], w);
    }
}

/* ---- main loop ------------------------------------------------------------------------------------------- */

/* One span of a tile. FIRST also finishes the previous tile, LAST starts finishing this one. */
template <class C, bool FIRST, bool LAST>
MX_DEVICE void consume_span(struct consumer<C> &c, struct pending<C> &held, const struct mx_sm90_gemm_params &p,
                            const struct tile &t, const struct tile &previous) {
    uint32_t stage[SPAN_STAGES];
    const uint32_t low_byte = c.low_scale, high_byte = c.high_scale;
    float low_scale = 0.0f, high_scale = 0.0f;
    if (!LAST) {
        load_token_scales(c); /* of the next span */
    }
#pragma unroll
    for (int half = 0; half < C::HALVES; half++) {
        /* Start the products */
#pragma unroll
        for (int i = 0; i < SPAN_STAGES; i++) {
            if (half == 0) {
                stage[i] = c.r.stage;
                mbarrier_wait(full_barrier<C>(c.smem, stage[i]), c.r.parity);
                ring_advance<C::STAGES>(c.r);
            }
            multiply_stage(c, stage[i], half, i > 0);
        }

        /* Meanwhile bring out what is finished */
        if (FIRST && half == 0) {
            if (previous.group >= 0) {
                finish_last_half(c, held, p, previous);
            }
            load_weight_scales(held, p, t);
        }
        if (LAST && half == 1) {
            finish_first_half(c, held, p, t);
        }

        /* Free the stages as soon as their last reader is through, and promote */
        if (half == C::HALVES - 1) {
            wgmma_wait<SPAN_STAGES - 1>();
            release_stage<C>(c.smem, stage[0]);
        }
        wgmma_wait<0>();
        if (half == C::HALVES - 1) {
            release_stage<C>(c.smem, stage[SPAN_STAGES - 1]);
        }
        if (half == 0) {
            low_scale = mx_f32_from_scale((uint8_t)low_byte);
            high_scale = mx_f32_from_scale((uint8_t)high_byte);
        }
        promote<C, FIRST>(c, half, low_scale, high_scale);
    }
}

template <class C> MX_DEVICE void consume(uint32_t smem, const struct mx_sm90_gemm_params &p, int rank) {
    static_assert(C::STAGES >= 2 * SPAN_STAGES, "both stages of a span are held while the next span arrives");
    const int num_spans = p.k / (SPAN_STAGES * BLOCK_K);
    struct consumer<C> c;
    struct pending<C> held;
    struct tile previous = {-1, 0, 0};
    init_consumer(c, smem, p);

    for (int index = blockIdx.x / C::CLUSTER; index < p.tiling.num_tiles; index += gridDim.x / C::CLUSTER) {
        const struct tile t = locate_tile<C>(p.tiling, index, rank);
        start_token_scales(c, p, t, 0);
        consume_span<C, true, false>(c, held, p, t, previous);
        for (int i = 1; i < num_spans - 1; i++) {
            consume_span<C, false, false>(c, held, p, t, previous);
        }
        consume_span<C, false, true>(c, held, p, t, previous);
        previous = t;
    }
    if (previous.group >= 0) {
        finish_last_half(c, held, p, previous);
    }
}

/* ---- kernel ---------------------------------------------------------------------------------------------- */

template <class C>
MX_DEVICE void gemm_wide(const CUtensorMap *x_map, const CUtensorMap *w_map, const struct mx_sm90_gemm_params &p) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t smem = smem_address(shared), warpgroup = threadIdx.x / 128;
    const int rank = C::CLUSTER > 1 ? (int)cluster_rank() : 0;

    start_ring<C>(smem, x_map, w_map, p, 1, rank);

    if (warpgroup == C::CONSUMERS) {
        set_max_registers_down<PRODUCER_REGS>();
        if (threadIdx.x == 128 * C::CONSUMERS) {
            produce<C>(smem, x_map, w_map, p, rank);
        }
    } else {
        set_max_registers_up<CONSUMER_REGS>();
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

#define MX_WIDE_KERNEL(NAME, BLOCK_N, STAGES, CLUSTER_M, CLUSTER_N, OUTPUT)                                          \
    extern "C" __global__ void __launch_bounds__(384, 1)                                                             \
        NAME(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,                   \
             const __grid_constant__ struct mx_sm90_gemm_params p) {                                                 \
        gemm_wide<gemm_config<2, 1, BLOCK_N, STAGES, CLUSTER_M, CLUSTER_N, 1, OUTPUT>>(&x_map, &w_map, p);           \
    }

/* The shipped forms; plan.c names them. 4 stages of 48 KB or 6 of 36 fill the 227 KB of shared memory. */
/* clang-format off */
/*             name                           BLOCK_N  stages  cluster M, N  output */
MX_WIDE_KERNEL(mx_sm90_gemm_wide_256x1_bf16,  256,     4,      1, 1,         OUT_BF16)
MX_WIDE_KERNEL(mx_sm90_gemm_wide_256x2_bf16,  256,     4,      2, 1,         OUT_BF16)
MX_WIDE_KERNEL(mx_sm90_gemm_wide_256x1_mx32,  256,     4,      1, 1,         OUT_MX32)
MX_WIDE_KERNEL(mx_sm90_gemm_wide_256x2_mx32,  256,     4,      2, 1,         OUT_MX32)
MX_WIDE_KERNEL(mx_sm90_gemm_wide_256x1_mx128, 256,     4,      1, 1,         OUT_MX128)
MX_WIDE_KERNEL(mx_sm90_gemm_wide_256x2_mx128, 256,     4,      2, 1,         OUT_MX128)
MX_WIDE_KERNEL(mx_sm90_gemm_wide_256x1_mx256, 256,     4,      1, 1,         OUT_MX256)
MX_WIDE_KERNEL(mx_sm90_gemm_wide_256x2_mx256, 256,     4,      2, 1,         OUT_MX256)
MX_WIDE_KERNEL(mx_sm90_gemm_wide_160x1_bf16,  160,     6,      1, 1,         OUT_BF16)
MX_WIDE_KERNEL(mx_sm90_gemm_wide_160x2_bf16,  160,     6,      2, 1,         OUT_BF16)
/* clang-format on */
