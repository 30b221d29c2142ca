/*
 * kernels.h - the seam between the op layer and the kernels of a backend.
 *
 * A kernel knows nothing of torch: it takes sizes, pointers and strides in a struct and returns a code. The op layer
 * (ops_*.c) has checked every shape, dtype, stride and device before it fills the struct, so kernels do not check
 * again; they may still answer MX_UNSUPPORTED for what a device cannot do, with a reason in exec->err.
 *
 * Every backend is one `struct mx_backend` with the same functions, so the CPU backend is the reference beside each
 * CUDA kernel. All pointers are borrowed for the duration of the call (CUDA: until the stream has run the launch).
 * No kernel allocates device memory, synchronises, or keeps state between calls.
 *
 * Units: sizes in elements, strides in elements of the pointer's type unless a comment says bytes.
 * Empty problems (num_tokens == 0) return MX_OK before anything else.
 */
#ifndef VLLM_MEGAATTN_KERNELS_H
#define VLLM_MEGAATTN_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#include "mxfp8.h"

#ifdef __cplusplus
extern "C" {
#endif

enum mx_code {
    MX_OK = 0,
    MX_UNSUPPORTED = 1, /* this backend cannot run this problem on this device; exec->err says why */
    MX_FAILED = 2,      /* the device or the system refused; exec->err says what */
};

/* Runs f(begin, end, ctx) over disjoint pieces of [0, count), about `grain` long or longer, on the caller's threads. A
 * piece may be run a second time after a failure, so f must overwrite its results, never add to them. */
typedef void (*mx_range_fn)(int64_t begin, int64_t end, void *ctx);
typedef void (*mx_parallel_for)(int64_t count, int64_t grain, mx_range_fn f, void *ctx);

enum mx_flag {
    MX_FLAG_BATCH_INVARIANT = 1, /* a token's bits must not depend on num_tokens */
    MX_FLAG_NO_PDL = 2,          /* launch without programmatic dependent launch */
    MX_FLAG_NO_PAIRS = 4,        /* Blackwell: one block per product, never the two of a pair */
    MX_FLAG_WO_B_OWN = 8,        /* Blackwell: wo_b by the package's own kernel, never by cuBLASLt */
    MX_FLAG_WO_B_CUBLASLT = 16,  /* Blackwell: wo_b by cuBLASLt, or MX_UNSUPPORTED; neither flag: see cuda/sm100.h */
    MX_FLAG_NO_DECODE = 32,      /* Hopper: the tiled kernels for any number of tokens */
};

/* Where and how to run; owned by the caller. */
struct mx_exec {
    uint32_t flags;               /* enum mx_flag */
    int32_t device_index;         /* CUDA ordinal, -1 on the CPU */
    void *stream;                 /* CUstream, NULL on the CPU */
    mx_parallel_for parallel_for; /* CPU threads; NULL runs on the calling thread */
    char *err;                    /* receives one line on MX_UNSUPPORTED / MX_FAILED */
    size_t err_bytes;
};

/* Grouped matrix product on MXFP8 operands, the core of both projections:
 *
 *     out[t, g, n] = sum over k of x[t, g, k] * w[g, n, k]
 *
 * wo_a is the case with G groups; wo_b the case num_groups = 1 with x = z. The accumulator is FP32; where it is
 * rounded to BF16 first and whatever is written derives from that value. Exactly one of out_bf16 / out_e4m3 is set. */
struct mx_matmul {
    int64_t num_tokens, num_groups, num_rows, k; /* T, G, N, K; K % 32 == 0 */

    const uint8_t *x; /* e4m3 [T, G, K], last stride 1 */
    int64_t x_stride_token, x_stride_group;
    struct mx_scales x_scale; /* rows are tokens; PACKED or F8_128X4 */
    int64_t x_span; /* columns over which the caller vouches that x's scale bytes are equal; 32 = no promise */

    const uint8_t *w; /* e4m3 [G, N, K], last stride 1 */
    int64_t w_stride_group, w_stride_row;
    struct mx_scales w_scale; /* rows are n */

    uint16_t *out_bf16; /* BF16 [T, G, N], last stride 1, or NULL */
    int64_t out_stride_token, out_stride_group;

    uint8_t *out_e4m3;  /* e4m3 [T, G * N] with row stride out_stride_token, or NULL; N % scale_span == 0 */
    uint8_t *out_scale; /* F8_128x4 of [T, G * N / 32], every byte written, padding 0x00 */
    int64_t scale_span; /* columns that share one scale: 32, 128 or 256 */
};

/* BF16 [T, C] -> MXFP8 with F8_128x4 scales. */
struct mx_quantize {
    int64_t num_tokens, num_cols; /* C % 32 == 0 and C % scale_span == 0 */
    const uint16_t *z;            /* BF16 [T, G, C / G], last stride 1 */
    int64_t num_groups, z_stride_token, z_stride_group;
    uint8_t *q; /* e4m3 [T, C], row stride q_stride_token */
    int64_t q_stride_token;
    uint8_t *q_scale; /* F8_128x4 of [T, C / 32], every byte written, padding 0x00 */
    int64_t scale_span;
};

enum mx_rope_order {
    MX_ORDER_STANDARD = 0,         /* column = head * D + d */
    MX_ORDER_CHUNK_INTERLEAVED = 1 /* column = (d / 32 * heads_per_group + head) * 32 + d % 32 */
};
enum mx_rope_cache {
    MX_ROPE_HALVES = 0,     /* a row of cos_sin is cos[0 .. R/2) followed by sin[0 .. R/2) */
    MX_ROPE_INTERLEAVED = 1 /* a row of cos_sin is cos[0], sin[0], cos[1], sin[1], ... */
};

/* Inverse rotary embedding of the attention output, then quantisation.
 *
 * The last R of a head's D values are R/2 interleaved pairs (even, odd), rotated back in FP32, in this order of
 * operations (both products of a sum are not rounded alike, so the order is part of the contract):
 *
 *     even' = fma(odd, sin, even * cos)        odd' = fma(-even, sin, odd * cos)
 *
 * Every value is then rounded to BF16 and quantised by the rules of mxfp8.h, scale_span columns of a group at a time.
 * A position outside [0, num_positions) poisons its token: all scales 0xFF (NaN), on every backend. */
struct mx_inv_rope {
    int64_t num_tokens, num_groups, heads_per_group, head_dim, rope_dim; /* D % 32 == 0, R even, R <= D */
    const uint16_t *attn;                                                /* BF16 [T, >= G * heads_per_group, D] */
    int64_t attn_stride_token, attn_stride_head;
    const int64_t *positions; /* [T] */
    int64_t positions_stride;
    const float *cos_sin; /* [num_positions, R], last stride 1 */
    int64_t cos_sin_stride, num_positions;
    int32_t order; /* enum mx_rope_order */
    int32_t cache; /* enum mx_rope_cache */

    uint8_t *x; /* e4m3 [T, G, K], K = heads_per_group * D, last stride 1 */
    int64_t x_stride_token, x_stride_group;
    uint8_t *x_scale; /* int32 words [T, G, K / 128] seen as bytes; K % 128 == 0 */
    int64_t xs_stride_token, xs_stride_group, xs_stride_word; /* in bytes */
    int64_t scale_span;                                       /* 32, 128 or 256; K % scale_span == 0 */
};

/* Gives weights one scale per `block_rows` x `block_cols` block: the largest of the scales it replaces, where blocks of
 * zeros and NaN blocks have no say (the latter stay NaN element by element); elements are shifted by the difference
 * and rounded to even, exact unless they reach e4m3's subnormal range. */
struct mx_reblock {
    int64_t num_groups, num_rows, k;
    const uint8_t *w; /* e4m3 [G, N, K] */
    int64_t w_stride_group, w_stride_row;
    struct mx_scales w_scale;
    uint8_t *out_w;     /* e4m3 [G, N, K] contiguous */
    uint8_t *out_scale; /* uint8 [G, ceil(N / block_rows), ceil(K / block_cols)] contiguous */
    int64_t block_rows, block_cols;
    double *stats; /* [3]: elements whose value changed, sum of squared differences, sum of squares */
};

/* The whole projection. `rope` is NULL when x comes quantised; else a.x is the scratch that rope writes. When fused
 * (a.out_e4m3 is set), a writes e4m3 z straight; else a writes BF16 z, `quantize` turns it into e4m3, and b reads that.
 * A fused call may bring `quantize` too: then a's or b's kernel may quantise a BF16 z that lies there in between. */
struct mx_o_proj {
    const struct mx_inv_rope *rope;
    const struct mx_matmul *a;
    const struct mx_quantize *quantize;
    const struct mx_matmul *b;
};

/* A backend. Each function returns an mx_code. */
struct mx_backend {
    const char *name;
    int (*matmul)(const struct mx_matmul *args, const struct mx_exec *exec);
    int (*quantize)(const struct mx_quantize *args, const struct mx_exec *exec);
    int (*inv_rope)(const struct mx_inv_rope *args, const struct mx_exec *exec);
    int (*o_proj)(const struct mx_o_proj *args, const struct mx_exec *exec);
    int (*reblock)(const struct mx_reblock *args,
                   const struct mx_exec *exec); /* NULL on CUDA: runs once, on the CPU */
};

extern const struct mx_backend mx_backend_cpu;
#ifdef MX_WITH_CUDA
extern const struct mx_backend mx_backend_cuda;
#endif

#ifdef __cplusplus
}
#endif

#endif /* VLLM_MEGAATTN_KERNELS_H */
