/*
 * sm90_decode.cu - out[t, g, n] = sum over k of x[t, g, k] * w[g, n, k] for T <= 64, limited by reading w once.
 *
 * What is computed and in which order stands in sm90_decode.h. The warps of a block:
 *
 *     0 .. 4 TILES CHAINS - 1   warpgroups: products, promotion, epilogue; they also quantise BF16 activations.
 *                               Warpgroup i has rows 64 (i % TILES) .. of the tile and every CHAINS-th span, from
 *                               i / TILES on. (One warpgroup alone leaves the tensor cores idle most of the time: a
 *                               product of 64 x N x 32 takes it some 66 + N / 2 cycles, whether or not it depends on the
 *                               one before.)
 *     next                      copies the weights; these do not depend on the previous kernel and start at once
 *     last (e4m3 only)          copies the activations
 *
 * Blocks of a cluster share a set of weight rows and split K (rank % split), or own neighbouring rows and share the
 * scales of their output (rank / split). Only ordinary launches, clusters and programmatic dependent launch are used: no
 * flags in global memory, no assumption that two blocks run at the same time unless they form a cluster.
 *
 * Template parameters, as members of a `shape`: N tokens (padded), TILES of 64 rows and CHAINS as above, SPLIT whether
 * blocks share K, FROM where activations come from (enum mx_sm90_decode_from).
 */
#include "sm90_decode.h"
#include "sm90_decode_source.cuh"
#include "wgmma_sm90.cuh"

constexpr int SWIZZLE_BYTES = 128; /* bytes of a row in one half of a slot */

/* Named barriers; 0 is __syncthreads. */
constexpr int START_BARRIER = 1;  /* the block: mbarriers are initialised */
constexpr int MMA_BARRIER = 2;    /* the warpgroups */
constexpr int SCALES_BARRIER = 3; /* warpgroups -> activation warp: the loads of the scales have left */

template <int N_, int TILES_, int CHAINS_, bool SPLIT_, int FROM_> struct shape {
    static constexpr int N = N_, TILES = TILES_, CHAINS = CHAINS_, FROM = FROM_;
    static constexpr bool SPLIT = SPLIT_, E4M3 = FROM_ == MX_DECODE_FROM_E4M3;
    static constexpr int M = 64 * TILES;
    static constexpr int MMA_WARPS = 4 * TILES * CHAINS, MMA_THREADS = 32 * MMA_WARPS;
    static constexpr int WEIGHT_WARP = MMA_WARPS, THREADS = MMA_THREADS + (E4M3 ? 64 : 32);
    static constexpr int ROW_BYTES = (M + MX_DECODE_PAD) * 4; /* the sums of one token */
    /* Sums travel to their owners value by value when tokens are few, which is quickest; else by the copy engine. */
    static constexpr bool BULK = SPLIT && N >= 32;
    /* Two blocks share an SM (this kernel's, or one of the next kernel's) unless that takes too many registers. */
    static constexpr int BLOCKS_PER_SM = THREADS > 512 && N == 64 ? 1 : 2;
};

/* ---- shared memory and the block's share ----------------------------------------------------------------- */

/* Offsets of the barriers in bytes. They come first so that their addresses are constants; tiles follow at multiples of
 * 1024, as the 128-byte swizzle wants it. */
constexpr int W_FULL = 0, W_EMPTY = W_FULL + 8 * MX_DECODE_MAX_STAGES, X_FULL = W_EMPTY + 8 * MX_DECODE_MAX_STAGES,
              X_EMPTY = X_FULL + 8 * MX_DECODE_MAX_STAGES, PARTS_FULL = X_EMPTY + 8 * MX_DECODE_MAX_STAGES,
              AMAX_FULL = PARTS_FULL + 8, W_RING = MX_DECODE_BARRIER_BYTES;
static_assert(AMAX_FULL + 8 <= W_RING && W_RING % 1024 == 0, "tiles must start at 1024 bytes, behind the barriers");

/* This block's share of the problem. */
struct share {
    uint32_t smem;
    int k_rank, n_rank; /* in the cluster: of those that split K; of those that share output scales */
    int row, group;     /* first weight row */
    int first_span;
    int first_token, owned_tokens; /* whose results this block finishes */
};

/* Grid: blocks of a cluster, tiles, groups. */
template <class S> MX_DEVICE struct share find_share(const struct mx_sm90_decode_params &p) {
    extern __shared__ __align__(1024) uint8_t smem[];
    struct share b;
    b.smem = smem_address(smem);
    b.k_rank = S::SPLIT ? blockIdx.x & ((1 << p.split_log2) - 1) : 0;
    b.n_rank = S::SPLIT ? blockIdx.x >> p.split_log2 : blockIdx.x;
    b.row = (blockIdx.y * p.span_tiles + b.n_rank) * p.tile_rows;
    b.group = blockIdx.z;
    b.first_span = b.k_rank * p.num_spans;
    b.first_token = b.k_rank << p.owned_log2;
    b.owned_tokens = max(0, min(1 << p.owned_log2, p.num_tokens - b.first_token));
    return b;
}

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

/* Warpgroups: the scales of all (span, token) of this block as floats. All loads of a round leave before the first one is
 * used, and before those of the activations, behind which they would queue; a round is up to 32 spans. */
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

/* Issues the 8 products of 64 rows x 256 columns. NOTE: the descriptors differ from a warp-uniform one in the low word
 * only; so they stay in uniform registers and the products are issued back to back. */
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

/* ---- sums over chains and blocks ------------------------------------------------------------------------- */

/* Staging, where the rings were: float [CHAINS][N tokens][ROW_BYTES / 4], a token's rows side by side. */
template <class S> MX_DEVICE uint32_t staged(const struct share &b, int chain, int token) {
    return b.smem + W_RING + (chain * S::N + token) * S::ROW_BYTES;
}

/* The warpgroup's accumulators to staging. */
template <class S>
MX_DEVICE void stage_chain(const float (&acc)[S::N / 2], const struct share &b, int tile, int chain) {
    const int lane = threadIdx.x % 32, row = 64 * tile + threadIdx.x / 32 % 4 * 16 + lane / 4;
    const uint32_t to = staged<S>(b, chain, lane % 4 * 2) + row * 4;
#pragma unroll
    for (int j = 0; j < S::N / 8; j++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            store_shared_f32(to + (8 * j + e) * S::ROW_BYTES, acc[4 * j + e]);
            store_shared_f32(to + (8 * j + e) * S::ROW_BYTES + 8 * 4, acc[4 * j + 2 + e]);
        }
    }
}

/* Four rows of a token, added up over the chains. */
template <class S> MX_DEVICE float4 sum_chains(const struct share &b, int token, int row) {
    float4 sum = load_shared_v4_f32(staged<S>(b, 0, token) + row * 4);
#pragma unroll
    for (int chain = 1; chain < S::CHAINS; chain++) {
        float4 v = load_shared_v4_f32(staged<S>(b, chain, token) + row * 4);
        sum = make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w);
    }
    return sum;
}

/* Where a block keeps the part of block `from` for the tokens of block `owner`: float [owned tokens][ROW_BYTES / 4] each,
 * without the own one if that stays in the staging area. */
template <class S>
MX_DEVICE uint32_t part_address(const struct mx_sm90_decode_params &p, const struct share &b, int from, int owner) {
    int slot = S::BULK && from > owner ? from - 1 : from;
    return b.smem + p.parts + (slot << p.owned_log2) * S::ROW_BYTES;
}

/* Sends the block's sums to the blocks that own the tokens. */
template <class S> MX_DEVICE void send_sums(const struct mx_sm90_decode_params &p, const struct share &b) {
    constexpr int QUARTERS = S::M / 4; /* of a token's rows, four at a time */
    const uint32_t first_rank = b.n_rank << p.split_log2, owned = 1 << p.owned_log2;
#pragma unroll 2
    for (int i = threadIdx.x; i < p.num_tokens * QUARTERS; i += S::MMA_THREADS) {
        int token = i / QUARTERS, row = i % QUARTERS * 4;
        float4 v = sum_chains<S>(b, token, row);
        if (S::BULK) {
            store_shared_v4_f32(staged<S>(b, 0, token) + row * 4, v);
        } else if (row < p.tile_rows) {
            int owner = token >> p.owned_log2;
            uint32_t to = part_address<S>(p, b, b.k_rank, owner) + (token & (owned - 1)) * S::ROW_BYTES + row * 4;
            store_async_v4_f32(map_to_rank(to, first_rank + owner), v.x, v.y, v.z, v.w,
                               map_to_rank(b.smem + PARTS_FULL, first_rank + owner));
        }
    }
    if (S::BULK) {
        fence_proxy_async_shared();
        named_barrier_sync(MMA_BARRIER, S::MMA_THREADS);
        const int owner = threadIdx.x, first = owner << p.owned_log2;
        const int count = min((int)owned, p.num_tokens - first);
        if (owner < 1 << p.split_log2 && owner != b.k_rank && count > 0) {
            bulk_copy_to_rank(map_to_rank(part_address<S>(p, b, b.k_rank, owner), first_rank + owner),
                              staged<S>(b, 0, first), count * S::ROW_BYTES,
                              map_to_rank(b.smem + PARTS_FULL, first_rank + owner));
        }
    }
}

/* Bytes that arrive for the tokens this block owns: with bulk copies the own part stays where it is. */
template <class S>
MX_DEVICE uint32_t expected_part_bytes(const struct mx_sm90_decode_params &p, const struct share &b) {
    const uint32_t split = 1 << p.split_log2;
    return S::BULK ? (split - 1) * b.owned_tokens * S::ROW_BYTES : split * b.owned_tokens * p.tile_rows * 4;
}

/* Results of rows 64 * tile + 2 * lane and the next for COUNT of the block's tokens: i, i + MMA_WARPS, ... Tokens that the
 * block does not own read as one that it does. */
template <class S, int COUNT>
MX_DEVICE void load_sums(float2 (&sum)[COUNT][S::TILES], int i, const struct mx_sm90_decode_params &p,
                         const struct share &b) {
    const uint32_t row = threadIdx.x % 32 * 8, owned = 1 << p.owned_log2;
    const int parts = S::SPLIT ? 1 << p.split_log2 : S::CHAINS;
    uint32_t token[COUNT];
#pragma unroll
    for (int u = 0; u < COUNT; u++) {
        token[u] = min((uint32_t)(i + u * S::MMA_WARPS), owned - 1);
#pragma unroll
        for (int tile = 0; tile < S::TILES; tile++) {
            sum[u][tile] = make_float2(0.0f, 0.0f);
        }
    }
#pragma unroll 2
    for (int part = 0; part < parts; part++) {
        uint32_t from = S::SPLIT ? part_address<S>(p, b, part, b.k_rank) : staged<S>(b, part, 0);
        if (S::BULK && part == b.k_rank) {
            from = staged<S>(b, 0, b.first_token);
        }
#pragma unroll
        for (int u = 0; u < COUNT; u++) {
#pragma unroll
            for (int tile = 0; tile < S::TILES; tile++) {
                float2 v = load_shared_v2_f32(from + token[u] * S::ROW_BYTES + tile * 64 * 4 + row);
                sum[u][tile].x += v.x;
                sum[u][tile].y += v.y;
            }
        }
    }
}

/* ---- epilogue -------------------------------------------------------------------------------------------- */

/* Scale bytes of the lane's two rows, of the first 64 rows in the low byte, of the second in the next. */
template <class S>
MX_DEVICE uint32_t load_weight_scales(const struct mx_sm90_decode_params &p, const struct share &b) {
    uint32_t bytes = 0;
#pragma unroll
    for (int tile = 0; tile < S::TILES; tile++) {
        uint32_t row = min(b.row + 64 * tile + 2 * (threadIdx.x % 32), p.num_rows - 1);
        bytes |= (uint32_t)p.w_scale[b.group * p.w_scale_stride_group + row / MX_BLOCK * p.w_scale_stride_row]
                 << (8 * tile);
    }
    return bytes;
}

/* The lane's results as BF16 pairs; 0 for rows the block does not have. */
template <class S, int COUNT>
MX_DEVICE void round_sums(uint32_t (&pair)[COUNT][S::TILES], int i, uint32_t w_bytes,
                          const struct mx_sm90_decode_params &p, const struct share &b) {
    float2 sum[COUNT][S::TILES];
    load_sums<S>(sum, i, p, b);
#pragma unroll
    for (int tile = 0; tile < S::TILES; tile++) {
        const int row = 64 * tile + threadIdx.x % 32 * 2;
        const bool own_row = row < p.tile_rows && b.row + row < p.num_rows;
        const float w_scale = mx_f32_from_scale((uint8_t)(w_bytes >> (8 * tile)));
#pragma unroll
        for (int u = 0; u < COUNT; u++) {
            pair[u][tile] = own_row ? pack_bf16(sum[u][tile].x * w_scale, sum[u][tile].y * w_scale) : 0;
        }
    }
}

/* BF16 output: a warp per token, two neighbouring rows per lane and tile; several tokens at once, for their loads to
 * overlap. */
template <class S>
MX_DEVICE void finish_bf16(uint32_t w_bytes, const struct mx_sm90_decode_params &p, const struct share &b) {
    constexpr int COUNT = S::N >= 32 ? 4 : 1;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int i = warp; i < b.owned_tokens; i += COUNT * S::MMA_WARPS) {
        uint32_t pair[COUNT][S::TILES];
        round_sums<S>(pair, i, w_bytes, p, b);
#pragma unroll
        for (int u = 0; u < COUNT; u++) {
            const int token = i + u * S::MMA_WARPS;
            uint8_t *out = p.out + ((b.first_token + token) * p.out_stride_token + b.group * p.out_stride_group);
#pragma unroll
            for (int tile = 0; tile < S::TILES; tile++) {
                const int row = 64 * tile + 2 * lane;
                if (token < b.owned_tokens && row < p.tile_rows && b.row + row < p.num_rows) {
                    *(uint32_t *)(out + (b.row + row) * 2) = pair[u][tile];
                }
            }
        }
    }
}

/* Byte of F8_128x4 for a token below 128 and a block column. */
MX_DEVICE uint8_t *scale_byte(const struct mx_sm90_decode_params &p, uint32_t token, uint32_t col) {
    return p.out_scale + (col / MX_TILE_COLS * MX_TILE_BYTES + token % 32 * 16 + token / 32 * 4 + col % MX_TILE_COLS);
}

/* Scale bytes that belong to no token, or to no column: 0x00. */
MX_DEVICE void zero_scale_padding(const struct mx_sm90_decode_params &p, const struct share &b) {
    const int first = (b.group * p.num_rows + b.row) / MX_BLOCK;
    const int end = first + min(p.tile_rows, p.num_rows - b.row) / MX_BLOCK;
    const bool last = b.row + p.tile_rows >= p.num_rows && b.group + 1 == gridDim.z;
    const int token = threadIdx.x;
#pragma unroll 1
    for (int col = first; col < (last ? p.num_col_tiles * MX_TILE_COLS : end); col++) {
        if (token < MX_TILE_ROWS && (token >= p.num_tokens || col >= end)) {
            *scale_byte(p, token, col) = 0;
        }
    }
}

/* Quantises the lane's two values by the maximum of their span and stores them with the span's scale bytes. */
MX_DEVICE void store_mxfp8(const struct mx_sm90_decode_params &p, const struct share &b, int token, int row,
                           uint32_t pair, uint32_t amax) {
    const int col = b.group * p.num_rows + b.row + row;
    uint32_t scale = scale_from_amax(amax);
    float multiplier = quantize_multiplier(scale);
    if (row < p.tile_rows && b.row + row < p.num_rows) {
        *(uint16_t *)(p.out + (token * p.out_stride_token + col)) =
            (uint16_t)pack_e4m3(bf16_low(pair) * multiplier, bf16_high(pair) * multiplier);
        if (row % MX_BLOCK == 0) {
            *scale_byte(p, token, col / MX_BLOCK) = (uint8_t)scale;
        }
    }
}

/* MXFP8 output. A scale covers 32 rows (16 lanes), all rows of the block, or those of the span_tiles blocks that meet
 * their maxima in shared memory. */
template <class S>
MX_DEVICE void finish_mxfp8(uint32_t w_bytes, const struct mx_sm90_decode_params &p, const struct share &b) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    /* Over the first sums of the token, which only this warp has read */
    const uint32_t kept = (S::SPLIT ? b.smem + p.parts : staged<S>(b, 0, 0)) + lane * 4;
#pragma unroll 1
    for (int i = warp; i < b.owned_tokens; i += S::MMA_WARPS) {
        uint32_t pair[1][S::TILES], amax[S::TILES], widest = 0;
        round_sums<S>(pair, i, w_bytes, p, b);
#pragma unroll
        for (int tile = 0; tile < S::TILES; tile++) {
            amax[tile] = max_of_pair(magnitude_pair(pair[0][tile]));
            amax[tile] = __reduce_max_sync(lane < 16 ? 0x0000FFFFu : 0xFFFF0000u, amax[tile]);
            widest = max(widest, amax[tile]);
        }
        widest = max(widest, __shfl_xor_sync(0xFFFFFFFFu, widest, 16));
        __syncwarp(); /* all lanes have read their sums, which the stores below may overwrite */
#pragma unroll
        for (int tile = 0; tile < S::TILES; tile++) {
            if (p.span_tiles == 1) {
                store_mxfp8(p, b, b.first_token + i, 64 * tile + 2 * lane, pair[0][tile],
                            p.scale_span == MX_BLOCK ? amax[tile] : widest);
            } else {
                store_shared_u32(kept + i * S::ROW_BYTES + tile * 64 * 4, pair[0][tile]);
            }
        }
        if (p.span_tiles > 1 && lane < p.span_tiles) { /* one lane tells each of the blocks that share the scale */
            uint32_t rank = (lane << p.split_log2) + b.k_rank;
            uint32_t to = b.smem + p.amax + ((b.n_rank << p.owned_log2) + i) * 4;
            store_async_f32(map_to_rank(to, rank), __uint_as_float(widest), map_to_rank(b.smem + AMAX_FULL, rank));
        }
    }
    if (p.span_tiles == 1 || b.owned_tokens == 0) {
        return;
    }
    mbarrier_wait_cluster(b.smem + AMAX_FULL, 0);
#pragma unroll 1
    for (int i = warp; i < b.owned_tokens; i += S::MMA_WARPS) {
        uint32_t widest = 0;
#pragma unroll 1
        for (int rank = 0; rank < p.span_tiles; rank++) {
            widest = max(widest, load_shared_u32(b.smem + p.amax + ((rank << p.owned_log2) + i) * 4));
        }
#pragma unroll
        for (int tile = 0; tile < S::TILES; tile++) {
            store_mxfp8(p, b, b.first_token + i, 64 * tile + 2 * lane,
                        load_shared_u32(kept + i * S::ROW_BYTES + tile * 64 * 4), widest);
        }
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

    /* What follows may read or overwrite what the previous kernel used */
    grid_dependency_wait();
    if constexpr (S::E4M3) {
        load_scales<S>(*scales, p, b);
    } else {
        constexpr bool ROTATE = S::FROM == MX_DECODE_FROM_ATTENTION;
        const struct source_target to = {b.smem + p.x_ring, b.smem + p.scales, b.first_span,
                                         p.num_spans,       p.num_tokens,      b.group};
        source_quantize<S::N, S::MMA_WARPS, S::MMA_WARPS == 16 ? 2 : 4, ROTATE>(*source, to, warp);
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
DECODE_BF16( 8, 1, 4, false, 64x4,       bf16, MX_DECODE_FROM_BF16)
DECODE_BF16( 8, 1, 2, true,  64x2_split, attn, MX_DECODE_FROM_ATTENTION)
