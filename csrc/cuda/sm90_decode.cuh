/*
 * sm90_decode.cuh - what all parts of the decode kernels know: template parameters, shared memory, a block's share.
 */
#ifndef VLLM_MEGAATTN_SM90_DECODE_CUH
#define VLLM_MEGAATTN_SM90_DECODE_CUH

#include "sm90_decode.h"
#include "wgmma_sm90.cuh"

constexpr int SWIZZLE_BYTES = 128; /* bytes of a row in one half of a slot */

/* Named barriers; 0 is __syncthreads. */
constexpr int START_BARRIER = 1;  /* the block: mbarriers are initialised */
constexpr int MMA_BARRIER = 2;    /* the warpgroups */
constexpr int SCALES_BARRIER = 3; /* warpgroups -> activation warp: the loads of the scales have left */

/* Template parameters: N tokens (padded), TILES of 64 rows, CHAINS that share a block's spans, SPLIT whether blocks
 * share K, FROM where activations come from (enum mx_sm90_decode_from). */
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

/* Offsets of the barriers in bytes. They come first so that their addresses are constants; tiles follow at multiples
 * of 1024, as the 128-byte swizzle wants it. */
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

#endif /* VLLM_MEGAATTN_SM90_DECODE_CUH */
