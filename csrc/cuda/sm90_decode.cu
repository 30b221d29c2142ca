/*
 * sm90_decode.cu - out[t, g, n] = sum over k of x[t, g, k] * w[g, n, k] for T <= 64, limited by reading w once.
 *
 * What is computed and in which order stands in sm90_decode.h. The warps of a block:
 *
 *     0 .. 4 TILES CHAINS - 1   warpgroups: products, promotion, epilogue; they also quantise BF16 activations.
 *                               Warpgroup i has rows 64 (i % TILES) .. of the tile and every CHAINS-th span, from
 *                               i / TILES on. (One warpgroup alone leaves the tensor cores idle most of the time:
 *                               a product of 64 x N x 32 takes it some 66 + N / 2 cycles, whether or not it depends
 *                               on the one before.)
 *     next                      copies the weights; these do not depend on the previous kernel and start at once
 *     last (e4m3 only)          copies the activations
 *
 * Blocks of a cluster share a set of weight rows and split K (rank % split), or own neighbouring rows and share the
 * scales of their output (rank / split). Only ordinary launches, clusters and programmatic dependent launch are used:
 * no flags in global memory, no assumption that two blocks run at the same time unless they form a cluster.
 *
 * Beside this file: sm90_decode.cuh (template parameters, shared memory, the block's share), sm90_decode_source.cuh
 * (BF16 activations), sm90_decode_epilogue.cuh (sums over chains and blocks, output).
 */
#include "sm90_decode_epilogue.cuh"
#include "sm90_decode_source.cuh"

/* ---- copies ---------------------------------------------------------------------------------------------- */

/* Position in a ring: slot, and the parity of the phase to wait for. */
struct ring {
    int slot, parity;
};

MX_DEVICE void ring_advance(struct ring *r, int steps, int stages) {
    r->slot += steps;
    if (r->slot >= stages) {
        r->slot -= stages;
        r->parity ^= 1;
    }
}

/* Weight warp, one lane. The slots of the first round are free: nothing is waited for. NOTE: no more than w_in_flight
 * slots are under way at a time: more do not arrive sooner, but everything else queues behind them. */
MX_DEVICE void copy_weights(const CUtensorMap *w_map, const struct mx_sm90_decode_params &p, const struct share &b) {
    const uint32_t half_bytes = p.tile_rows * SWIZZLE_BYTES;
    struct ring fill = {0, 1}, landing = {0, 0};
    if (p.trigger_span == 0) {
        grid_launch_dependents();
    }
#pragma unroll 1
    for (int span = 0; span < p.num_spans; span++) {
        uint32_t slot = b.smem + W_RING + fill.slot * 2 * half_bytes, full = b.smem + W_FULL + 8 * fill.slot;
        int k = (b.first_span + span) * MX_DECODE_SPAN;
        if (span >= p.w_in_flight) {
            mbarrier_wait(b.smem + W_FULL + 8 * landing.slot, landing.parity);
            ring_advance(&landing, 1, p.w_stages);
        }
        if (span >= p.w_stages) {
            mbarrier_wait(b.smem + W_EMPTY + 8 * fill.slot, fill.parity);
        }
        mbarrier_arrive_expect(full, 2 * half_bytes);
        tma_load_3d_hint(slot, w_map, k, b.row, b.group, full, MX_L2_EVICT_FIRST);
        tma_load_3d_hint(slot + half_bytes, w_map, k + SWIZZLE_BYTES, b.row, b.group, full, MX_L2_EVICT_FIRST);
        if (span + 1 == p.trigger_span) {
            grid_launch_dependents();
        }
        ring_advance(&fill, 1, p.w_stages);
    }
}

/* Activation warp, one lane. Tokens past the last read as zero. */
template <class S>
MX_DEVICE void copy_activations(const CUtensorMap *x_map, const struct mx_sm90_decode_params &p,
                                const struct share &b) {
    struct ring r = {0, 1};
#pragma unroll 1
    for (int span = 0; span < p.num_spans; span++) {
        uint32_t slot = b.smem + p.x_ring + r.slot * S::N * MX_DECODE_SPAN, full = b.smem + X_FULL + 8 * r.slot;
        int k = (b.first_span + span) * MX_DECODE_SPAN;
        if (span >= p.x_stages) {
            mbarrier_wait(b.smem + X_EMPTY + 8 * r.slot, r.parity);
        }
        mbarrier_arrive_expect(full, S::N * MX_DECODE_SPAN);
        tma_load_3d(slot, x_map, k, b.group, 0, full);
        tma_load_3d(slot + S::N * SWIZZLE_BYTES, x_map, k + SWIZZLE_BYTES, b.group, 0, full);
        ring_advance(&r, 1, p.x_stages);
    }
}

/* Warpgroups: the scales of all (span, token) of this block as floats. All loads of a round leave before the first
 * one is used, and before those of the activations, behind which they would queue; a round is up to 32 spans. */
template <class S>
MX_DEVICE void load_scales(const struct mx_sm90_decode_scales &q, const struct mx_sm90_decode_params &p,
                           const struct share &b) {
    constexpr int STEP = S::MMA_THREADS / S::N,
                  LOADS = STEP < 32 ? 32 / STEP : 1; /* spans at once; loads of a lane */
    const int token = threadIdx.x % S::N, first = threadIdx.x / S::N;
    const uint8_t *from = q.x_scale + (b.group * q.stride_group + (b.first_span + first) * q.stride_span +
                                       token % 32 * q.stride_row + token / 32 * q.stride_row_32);
#pragma unroll 1
    for (int base = 0; base < p.num_spans; base += LOADS * STEP) {
        uint32_t word[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            word[i] = 0;
            if (base + first + i * STEP < p.num_spans && token < p.num_tokens) {
                word[i] = *(const uint32_t *)(from + (base + i * STEP) * q.stride_span);
            }
        }
        if (base == 0) {
            named_barrier_arrive(SCALES_BARRIER, S::MMA_THREADS + 32);
        }
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            if (base + first + i * STEP < p.num_spans) {
                store_shared_f32(b.smem + p.scales + ((base + first + i * STEP) * S::N + token) * 4,
                                 mx_f32_from_scale((uint8_t)word[i]));
            }
        }
    }
}

/* ---- products and promotion ------------------------------------------------------------------------------ */

/* Issues the 8 products of 64 rows x 256 columns. NOTE: the descriptors differ from a warp-uniform one in the low
 * word only; so they stay in uniform registers and the products are issued back to back. */
template <class S>
MX_DEVICE void multiply_span(float (&partial)[S::N / 2], uint32_t w_tile, uint32_t x_tile, uint32_t half_bytes) {
    const uint64_t high = wgmma_descriptor(0) >> 32 << 32;
    const uint32_t w = warp_uniform((uint32_t)wgmma_descriptor(w_tile));
    const uint32_t x = warp_uniform((uint32_t)wgmma_descriptor(x_tile));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 8; k++) { /* 32 columns are 2 units of 16 bytes */
        uint32_t w_k = w + (k / 4) * (half_bytes / 16) + 2 * (k % 4);
        uint32_t x_k = x + (k / 4) * (S::N * SWIZZLE_BYTES / 16) + 2 * (k % 4);
        wgmma_m64k32(partial, high | w_k, high | x_k, k > 0);
    }
    wgmma_commit();
}

/* acc += partial * scale of the token's span. */
template <class S> MX_DEVICE void promote(float (&acc)[S::N / 2], const float (&partial)[S::N / 2], uint32_t scales) {
#pragma unroll
    for (int j = 0; j < S::N / 8; j++) {
        float2 scale = load_shared_v2_f32(scales + (8 * j + threadIdx.x % 4 * 2) * 4);
        acc[4 * j + 0] = __fmaf_rn(partial[4 * j + 0], scale.x, acc[4 * j + 0]);
        acc[4 * j + 1] = __fmaf_rn(partial[4 * j + 1], scale.y, acc[4 * j + 1]);
        acc[4 * j + 2] = __fmaf_rn(partial[4 * j + 2], scale.x, acc[4 * j + 2]);
        acc[4 * j + 3] = __fmaf_rn(partial[4 * j + 3], scale.y, acc[4 * j + 3]);
    }
}

/* The warpgroup's chain. */
template <class S>
MX_DEVICE void multiply(float (&acc)[S::N / 2], const struct mx_sm90_decode_params &p, const struct share &b,
                        int tile, int chain) {
    const uint32_t half_bytes = p.tile_rows * SWIZZLE_BYTES;
    struct ring w = {chain, 0}, x = {chain, 0};
    float partial[S::N / 2];
#pragma unroll
    for (int i = 0; i < S::N / 2; i++) {
        acc[i] = 0.0f;
    }
#pragma unroll 1
    for (int span = chain; span < p.num_spans; span += S::CHAINS) {
        uint32_t w_slot = b.smem + W_RING + w.slot * 2 * half_bytes;
        uint32_t x_slot = b.smem + p.x_ring + x.slot * S::N * MX_DECODE_SPAN;
        mbarrier_wait(b.smem + W_FULL + 8 * w.slot, w.parity);
        if (S::E4M3) {
            mbarrier_wait(b.smem + X_FULL + 8 * x.slot, x.parity);
        }
        multiply_span<S>(partial, w_slot + tile * 64 * SWIZZLE_BYTES, x_slot, half_bytes);
        wgmma_wait<0>();
        wgmma_pin(partial);
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            mbarrier_arrive(b.smem + W_EMPTY + 8 * w.slot);
            if (S::E4M3) {
                mbarrier_arrive(b.smem + X_EMPTY + 8 * x.slot);
            }
        }
        promote<S>(acc, partial, b.smem + p.scales + span * S::N * 4);
        ring_advance(&w, S::CHAINS, p.w_stages);
        ring_advance(&x, S::CHAINS, p.x_stages);
    }
}

/* ---- the kernel ------------------------------------------------------------------------------------------ */

/* A warpgroup's part. */
template <class S>
MX_DEVICE void run_warpgroup(const struct mx_sm90_decode_params &p, const struct mx_sm90_decode_scales *scales,
                             const struct mx_sm90_decode_source *source, const struct share &b, bool clustered) {
    const int warp = warp_uniform(threadIdx.x / 32), tile = warp / 4 % S::TILES, chain = warp / 4 / S::TILES;
    uint32_t w_bytes = load_weight_scales<S>(p, b);
    float acc[S::N / 2];

    const struct source_target tiles = {b.smem + p.x_ring, b.smem + p.scales, b.first_span,
                                        p.num_spans,       p.num_tokens,      b.group};
    if constexpr (!S::E4M3) {
        source_clear_padding<S::N, S::MMA_WARPS>(tiles);
    }

    /* What follows may read or overwrite what the previous kernel used */
    grid_dependency_wait();
    if constexpr (S::E4M3) {
        load_scales<S>(*scales, p, b);
    } else {
        constexpr bool ROTATE = S::FROM == MX_DECODE_FROM_ATTENTION;
        source_quantize<S::N, S::MMA_WARPS, S::MMA_WARPS == 16 ? 2 : 4, ROTATE>(*source, tiles, warp);
        fence_proxy_async_shared();
    }
    named_barrier_sync(MMA_BARRIER, S::MMA_THREADS);
    if (p.out_scale != NULL && b.k_rank == 0) {
        zero_scale_padding(p, b);
    }

    multiply<S>(acc, p, b, tile, chain);
    named_barrier_sync(MMA_BARRIER, S::MMA_THREADS); /* no product reads the rings any more */
    stage_chain<S>(acc, b, tile, chain);
    named_barrier_sync(MMA_BARRIER, S::MMA_THREADS);

    if (clustered) {
        cluster_wait(); /* the others' barriers are ready */
    }
    if (S::SPLIT) {
        send_sums<S>(p, b);
        if (b.owned_tokens > 0) {
            mbarrier_wait_cluster(b.smem + PARTS_FULL, 0);
        }
    }
    asm volatile("" : "+r"(w_bytes)); /* NOTE: keeps the wait for that load from moving up to the load */
    if (p.out_scale == NULL) {
        finish_bf16<S>(w_bytes, p, b);
    } else {
        finish_mxfp8<S>(w_bytes, p, b);
    }
}

/* Initialises the barriers that the weight warp does not need. */
template <class S> MX_DEVICE void init_barriers(const struct mx_sm90_decode_params &p, const struct share &b) {
    if (S::E4M3) {
#pragma unroll 1
        for (int i = 0; i < p.x_stages; i++) {
            mbarrier_init(b.smem + X_FULL + 8 * i, 1);
            mbarrier_init(b.smem + X_EMPTY + 8 * i, 4 * S::TILES);
        }
    }
    mbarrier_init(b.smem + PARTS_FULL, 1);
    mbarrier_init(b.smem + AMAX_FULL, 1);
    if (S::SPLIT) {
        mbarrier_arrive_expect(b.smem + PARTS_FULL, expected_part_bytes<S>(p, b));
    }
    if (p.span_tiles > 1) {
        mbarrier_arrive_expect(b.smem + AMAX_FULL, p.span_tiles * b.owned_tokens * 4);
    }
    mbarrier_fence_init();
}

template <class S>
MX_DEVICE void decode_matmul(const CUtensorMap *w_map, const CUtensorMap *x_map,
                             const struct mx_sm90_decode_params &p, const struct mx_sm90_decode_scales *scales,
                             const struct mx_sm90_decode_source *source) {
    const int warp = warp_uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    const struct share b = find_share<S>(p);
    const bool clustered = S::SPLIT || p.span_tiles > 1;

    if (warp == S::WEIGHT_WARP) { /* waits for nobody */
        if (lane == 0) {
#pragma unroll 1
            for (int i = 0; i < p.w_stages; i++) {
                mbarrier_init(b.smem + W_FULL + 8 * i, 1);
                mbarrier_init(b.smem + W_EMPTY + 8 * i, 4 * S::TILES);
            }
            mbarrier_fence_init();
            fence_proxy_async_shared();
        }
        __syncwarp();
        named_barrier_arrive(START_BARRIER, S::THREADS);
        if (clustered) {
            cluster_arrive_relaxed();
        }
        if (lane == 0) {
            copy_weights(w_map, p, b);
        }
    } else {
        if (threadIdx.x == 0) {
            init_barriers<S>(p, b);
        }
        __syncwarp();
        named_barrier_sync(START_BARRIER, S::THREADS);
        if (clustered) {
            cluster_arrive_relaxed();
        }
        if (warp < S::MMA_WARPS) {
            run_warpgroup<S>(p, scales, source, b, clustered);
        } else {
            named_barrier_sync(SCALES_BARRIER, S::MMA_THREADS + 32);
            if (lane == 0) {
                grid_dependency_wait();
                copy_activations<S>(x_map, p, b);
            }
        }
    }

    /* Nobody leaves a cluster while another block may still read his shared memory */
    __syncwarp();
    if (clustered && warp >= S::MMA_WARPS) {
        cluster_wait();
    }
    if (S::BULK) {
        cluster_arrive_relaxed();
        cluster_wait();
    }
}

/* clang-format off */
#define DECODE_BOUNDS(...) __launch_bounds__((shape<__VA_ARGS__>::THREADS), (shape<__VA_ARGS__>::BLOCKS_PER_SM))
#define DECODE_E4M3(n, tiles, chains, split, name)                                                                   \
    extern "C" __global__ void DECODE_BOUNDS(n, tiles, chains, split, MX_DECODE_FROM_E4M3)                           \
    mx_sm90_decode_e4m3_##name##_##n(                                                                                \
        const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap x_map,                        \
        const __grid_constant__ struct mx_sm90_decode_params p,                                                      \
        const __grid_constant__ struct mx_sm90_decode_scales scales) {                                               \
        decode_matmul<shape<n, tiles, chains, split, MX_DECODE_FROM_E4M3>>(&w_map, &x_map, p, &scales, NULL);        \
    }
#define DECODE_BF16(n, tiles, chains, split, name, from_name, from)                                                  \
    extern "C" __global__ void DECODE_BOUNDS(n, tiles, chains, split, from)                                          \
    mx_sm90_decode_##from_name##_##name##_##n(                                                                       \
        const __grid_constant__ CUtensorMap w_map, const __grid_constant__ struct mx_sm90_decode_params p,           \
        const __grid_constant__ struct mx_sm90_decode_source source) {                                               \
        decode_matmul<shape<n, tiles, chains, split, from>>(&w_map, NULL, p, NULL, &source);                         \
    }

/* The shipped forms; sm90_decode_plan.c lists them too. Columns: N, tiles, chains, split, name, source. */
DECODE_E4M3( 8, 1, 1, false, 64x1)
DECODE_E4M3(16, 1, 1, false, 64x1)
DECODE_E4M3(32, 1, 1, false, 64x1)
DECODE_E4M3(64, 1, 1, false, 64x1)
DECODE_E4M3( 8, 1, 2, false, 64x2)
DECODE_E4M3(16, 1, 2, false, 64x2)
DECODE_E4M3(32, 1, 2, false, 64x2)
DECODE_E4M3(64, 1, 2, false, 64x2)
DECODE_E4M3( 8, 1, 4, false, 64x4)
DECODE_E4M3(16, 1, 4, false, 64x4)
DECODE_E4M3(32, 1, 4, false, 64x4)
DECODE_E4M3(64, 1, 4, false, 64x4)
DECODE_E4M3( 8, 1, 2, true,  64x2_split)
DECODE_E4M3(16, 1, 2, true,  64x2_split)
DECODE_E4M3(32, 1, 2, true,  64x2_split)
DECODE_E4M3(64, 1, 2, true,  64x2_split)
DECODE_E4M3( 8, 2, 2, true,  128x2_split)
DECODE_E4M3(16, 2, 2, true,  128x2_split)
DECODE_E4M3(32, 2, 2, true,  128x2_split)
DECODE_E4M3(64, 2, 2, true,  128x2_split)
DECODE_BF16( 8, 1, 2, false, 64x2,       bf16, MX_DECODE_FROM_BF16)
DECODE_BF16( 8, 1, 4, false, 64x4,       bf16, MX_DECODE_FROM_BF16)
DECODE_BF16( 8, 1, 2, true,  64x2_split, attn, MX_DECODE_FROM_ATTENTION)
