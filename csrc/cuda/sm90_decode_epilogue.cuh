/*
 * sm90_decode_epilogue.cuh - from accumulators to output in the decode kernels: sums over chains, then over the
 * blocks of a cluster that share K, each block finishing some of the tokens; weight scales, rounding, quantisation.
 */
#ifndef VLLM_MEGAATTN_SM90_DECODE_EPILOGUE_CUH
#define VLLM_MEGAATTN_SM90_DECODE_EPILOGUE_CUH

#include "sm90_decode.cuh"
#include "sm90_quantize.cuh"

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

/* Where a block keeps the part of block `from` for the tokens of block `owner`: float [owned tokens][ROW_BYTES / 4]
 * each, without the own one if that stays in the staging area. */
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

/* Results of rows 64 * tile + 2 * lane and the next for COUNT of the block's tokens: i, i + MMA_WARPS, ... Tokens
 * that the block does not own read as one that it does. */
template <class S, int COUNT>
MX_DEVICE void load_sums(float2 (&sum)[COUNT][S::TILES], int i, const struct mx_sm90_decode_params &p,
                         const struct share &b) {
    const uint32_t row = threadIdx.x % 32 * 8;
    const int parts = S::SPLIT ? 1 << p.split_log2 : S::CHAINS;
    uint32_t token[COUNT];
#pragma unroll
    for (int u = 0; u < COUNT; u++) {
        token[u] = min(i + u * S::MMA_WARPS, b.owned_tokens - 1);
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

#endif /* VLLM_MEGAATTN_SM90_DECODE_EPILOGUE_CUH */
