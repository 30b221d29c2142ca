/*
 * sm90_gemm_span.cuh - the step that all wide matrix products share: the tensor cores sum a span of 256 columns, two
 * stages of the ring, into fresh registers; then acc = fma(partial, x_scale[token, span], acc).
 */
#ifndef VLLM_MEGAATTN_SM90_GEMM_SPAN_CUH
#define VLLM_MEGAATTN_SM90_GEMM_SPAN_CUH

#include "sm90_gemm_store.cuh"

#define SPAN_STAGES   2  /* ring stages per promotion: 256 columns */
#define PRODUCER_REGS 40 /* with 24 the producer spills */
#define CONSUMER_REGS 232

/* A consumer thread's registers. */
template <class C> struct consumer {
    float acc[C::HALVES][C::HALF_N / 2];
    float partial[C::HALF_N / 2];

    uint32_t smem;
    uint64_t x_descriptor, w_descriptor; /* of stage 0, this warpgroup's rows */
    struct ring r;
    int row, col; /* of the tile: the lane's first row (the second one is 8 below), the warpgroup's first column */

    /* Scale bytes of the lane's two rows: where the next span's are, and those loaded ahead */
    const uint8_t *low_scale_ptr, *high_scale_ptr;
    int64_t scale_stride;
    uint32_t low_scale, high_scale;
};

template <class C>
MX_DEVICE void init_consumer(struct consumer<C> &c, uint32_t smem, const struct mx_sm90_gemm_params &p) {
    const uint32_t warpgroup = warp_uniform(threadIdx.x / 128);
    c.smem = smem;
    c.x_descriptor = wgmma_descriptor(smem + warpgroup / C::GROUPS_N * 64 * BLOCK_K);
    c.w_descriptor = wgmma_descriptor(smem + C::X_BYTES + warpgroup % C::GROUPS_N * C::GROUP_N * BLOCK_K);
    c.r = {0, 0};
    c.row = warpgroup / C::GROUPS_N * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    c.col = warpgroup % C::GROUPS_N * C::GROUP_N;
    c.scale_stride = token_scale_stride_256(p.x_scale);
}

/* Scale bytes of the next span, and the one after that next time. */
template <class C> MX_DEVICE void load_token_scales(struct consumer<C> &c) {
    c.low_scale = load_global_u8(c.low_scale_ptr);
    c.high_scale = load_global_u8(c.high_scale_ptr);
    c.low_scale_ptr += c.scale_stride;
    c.high_scale_ptr += c.scale_stride;
}

/* Points the scale pointers at the lane's rows of a tile, first span `span`, and loads that span's bytes. */
template <class C>
MX_DEVICE void start_token_scales(struct consumer<C> &c, const struct mx_sm90_gemm_params &p, const struct tile &t,
                                  int span) {
    const int token = t.token + c.row, last_token = p.num_tokens - 1;
    c.low_scale_ptr = token_scale_ptr(p.x_scale, t.group, min(token, last_token)) + span * c.scale_stride;
    c.high_scale_ptr = token_scale_ptr(p.x_scale, t.group, min(token + 8, last_token)) + span * c.scale_stride;
    load_token_scales(c);
}

/* Starts partial = x[64 rows][128] * w[half][128]^T on one stage, on top of what is there if `accumulate`. */
template <class C> MX_DEVICE void multiply_stage(struct consumer<C> &c, uint32_t stage, int half, bool accumulate) {
    const uint64_t x = c.x_descriptor + stage * (C::STAGE_BYTES / 16);
    const uint64_t w = c.w_descriptor + stage * (C::STAGE_BYTES / 16) + half * (C::HALF_N * BLOCK_K / 16);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < BLOCK_K / 32; i++) {
        wgmma_m64k32(c.partial, x + 2 * i, w + 2 * i, accumulate || i > 0);
    }
    wgmma_commit();
}

/* acc = fma(partial, scale of the row, acc); the first span of a tile starts from zero. */
template <class C, bool FIRST>
MX_DEVICE void promote(struct consumer<C> &c, int half, float low_scale, float high_scale) {
    float *acc = c.acc[half];
#pragma unroll
    for (int i = 0; i < C::HALF_N / 2; i += 4) {
        acc[i] = __fmaf_rn(c.partial[i], low_scale, FIRST ? 0.0f : acc[i]);
        acc[i + 1] = __fmaf_rn(c.partial[i + 1], low_scale, FIRST ? 0.0f : acc[i + 1]);
        acc[i + 2] = __fmaf_rn(c.partial[i + 2], high_scale, FIRST ? 0.0f : acc[i + 2]);
        acc[i + 3] = __fmaf_rn(c.partial[i + 3], high_scale, FIRST ? 0.0f : acc[i + 3]);
    }
}

/* ---- one tile a block, epilogue at the end ------------------------------------------------------------------ */

/* All spans of this block's part of K. */
template <class C>
MX_DEVICE void sum_spans(struct consumer<C> &c, const struct mx_sm90_gemm_params &p, const struct tile &t, int rank) {
    const struct k_range range = locate_k<C>(p.k, rank);
    const int num_spans = (range.end - range.begin) / (SPAN_STAGES * BLOCK_K);
#pragma unroll
    for (int i = 0; i < C::HALVES * C::HALF_N / 2; i++) {
        c.acc[i / (C::HALF_N / 2)][i % (C::HALF_N / 2)] = 0.0f;
    }
    start_token_scales(c, p, t, range.begin / (SPAN_STAGES * BLOCK_K));
    for (int span = 0; span < num_spans; span++) {
        const uint32_t low_byte = c.low_scale, high_byte = c.high_scale;
        uint32_t stage[SPAN_STAGES];
        if (span + 1 < num_spans) {
            load_token_scales(c);
        }
#pragma unroll
        for (int half = 0; half < C::HALVES; half++) {
#pragma unroll
            for (int i = 0; i < SPAN_STAGES; i++) {
                if (half == 0) {
                    stage[i] = c.r.stage;
                    mbarrier_wait(full_barrier<C>(c.smem, stage[i]), c.r.parity);
                    ring_advance<C::STAGES>(c.r);
                }
                multiply_stage(c, stage[i], half, i > 0);
            }
            if (half == C::HALVES - 1) {
                wgmma_wait<SPAN_STAGES - 1>();
                release_stage<C>(c.smem, stage[0]);
            }
            wgmma_wait<0>();
            if (half == C::HALVES - 1) {
                release_stage<C>(c.smem, stage[SPAN_STAGES - 1]);
            }
            promote<C, false>(c, half, mx_f32_from_scale((uint8_t)low_byte), mx_f32_from_scale((uint8_t)high_byte));
        }
    }
}

/* Weight scale bytes of the warpgroup's columns, one per STEP of them: loaded before the main loop, which hides it. */
template <class C> struct weight_scales {
    static constexpr int STEP = C::HALF_N % MX_BLOCK == 0 ? MX_BLOCK : 16, COUNT = C::HALF_N / STEP;
    uint32_t words[C::HALVES][(COUNT + 3) / 4]; /* four bytes a register */
};

template <class C>
MX_DEVICE void load_weight_scales(struct weight_scales<C> &w, const struct mx_sm90_gemm_params &p,
                                  const struct tile &t, int col) {
    typedef struct weight_scales<C> scales;
#pragma unroll
    for (int i = 0; i < C::HALVES * scales::COUNT; i++) {
        const int n = min(t.n + col + i * scales::STEP, p.num_rows - 1), j = i % scales::COUNT;
        const uint32_t byte = weight_scale_byte(p.w_scale, t.group, n) << (8 * (j % 4));
        uint32_t *word = &w.words[i / scales::COUNT][j / 4];
        *word = j % 4 == 0 ? byte : *word | byte;
    }
}

template <class C>
MX_DEVICE void decode_weight_scales(const struct weight_scales<C> &w, int half,
                                    float (&factors)[weight_scales<C>::COUNT]) {
#pragma unroll
    for (int i = 0; i < weight_scales<C>::COUNT; i++) {
        factors[i] = mx_f32_from_scale((uint8_t)(w.words[half][i / 4] >> (8 * (i % 4))));
    }
}

#endif /* VLLM_MEGAATTN_SM90_GEMM_SPAN_CUH */
