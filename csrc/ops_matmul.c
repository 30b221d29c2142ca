/* ops_matmul.c - the grouped einsum (wo_a) and the GEMM (wo_b): checks and arguments for the kernel mx_matmul. */
#include "op.h"

/* Weights e4m3 [G, N, K] with any group and row stride, or [G * N, K]. */
bool mx_bind_weight(struct mx_call *call, const struct mx_tensor *w, int64_t groups, int64_t *num_groups,
                    int64_t *rows, int64_t *k, int64_t *stride_group, int64_t *stride_row) {
    if (!mx_check_dtype(call, w, mx_torch.dtype_float8_e4m3fn)) {
        return false;
    }
    if (w->num_dims == 2) {
        *num_groups = groups ? groups : 1;
        if (!mx_check_multiple(call, w, 0, *num_groups)) {
            return false;
        }
        *rows = w->sizes[0] / *num_groups;
        *stride_row = w->strides[0];
        *stride_group = *rows * *stride_row;
    } else {
        if (!mx_check_num_dims(call, w, 3, "[G, N, K] or [G*N, K]")) {
            return false;
        }
        *num_groups = w->sizes[0];
        *rows = w->sizes[1];
        *stride_group = w->strides[0];
        *stride_row = w->strides[1];
        if (groups && *num_groups != groups) {
            return mx_fail(call, MX_ERROR_VALUE, "%.*s must have G = %lld groups like x, got %lld", w->name_len,
                           w->name, (long long)groups, (long long)*num_groups);
        }
    }
    *k = w->sizes[w->num_dims - 1];
    return mx_check_positive(call, w, 0) && mx_check_positive(call, w, (int)w->num_dims - 2) &&
           mx_check_multiple(call, w, (int)w->num_dims - 1, MX_BLOCK) && mx_check_last_stride(call, w);
}

bool mx_bind_einsum(struct mx_call *call, const struct mx_einsum_tensors *t, int64_t x_span, int64_t scale_span,
                    struct mx_matmul *out) {
    const struct mx_tensor *x = t->x, *w = t->w, *z = t->z;
    int64_t num_groups;
    *out = (struct mx_matmul){.x_span = x_span, .scale_span = scale_span};

    /* x [T, G, K]: packed words cover 128 columns */
    if (!mx_check_dtype(call, x, mx_torch.dtype_float8_e4m3fn) || !mx_check_num_dims(call, x, 3, "[T, G, K]") ||
        !mx_check_positive(call, x, 1) || !mx_check_multiple(call, x, 2, 128) || !mx_check_last_stride(call, x)) {
        return false;
    }
    out->num_tokens = x->sizes[0];
    out->num_groups = x->sizes[1];
    out->x = x->data;
    out->x_stride_token = x->strides[0];
    out->x_stride_group = x->strides[1];

    /* w [G, N, K] */
    if (!mx_bind_weight(call, w, out->num_groups, &num_groups, &out->num_rows, &out->k, &out->w_stride_group,
                        &out->w_stride_row)) {
        return false;
    }
    out->w = w->data;
    if (out->k != x->sizes[2]) {
        return mx_fail(call, MX_ERROR_VALUE, "%.*s must have K = %lld columns like %.*s, got %lld", w->name_len,
                       w->name, (long long)x->sizes[2], x->name_len, x->name, (long long)out->k);
    }
    if (!mx_bind_packed_scale(call, t->x_scale, out->num_tokens, out->num_groups, out->k, &out->x_scale) ||
        !mx_bind_weight_scale(call, t->w_scale, out->num_groups, out->num_rows, out->k, &out->w_scale) ||
        !mx_check_span(call, "x_span", x_span, out->k, true)) {
        return false;
    }

    if (!t->z_scale) { /* z BF16 [T, G, N] */
        const int64_t sizes[] = {out->num_tokens, out->num_groups, out->num_rows};
        if (!mx_check_dtype(call, z, mx_torch.dtype_bfloat16) || !mx_check_sizes(call, z, 3, sizes, "[T, G, N]") ||
            !mx_check_last_stride(call, z)) {
            return false;
        }
        out->out_bf16 = z->data;
        out->out_stride_token = z->strides[0];
        out->out_stride_group = z->strides[1];
        return true;
    }

    /* z e4m3 [T, G * N] and its F8_128x4 scales; a span must not straddle two groups */
    const int64_t sizes[] = {out->num_tokens, out->num_groups * out->num_rows};
    struct mx_scales z_scale;
    if (out->num_rows % MX_BLOCK != 0) {
        return mx_fail(call, MX_ERROR_VALUE,
                       "%.*s must have a multiple of 32 rows a group for an MXFP8 result, got N = %lld", w->name_len,
                       w->name, (long long)out->num_rows);
    }
    if (!mx_check_span(call, "scale_span", scale_span, out->num_rows, false) ||
        !mx_check_dtype(call, z, mx_torch.dtype_float8_e4m3fn) || !mx_check_sizes(call, z, 2, sizes, "[T, G*N]") ||
        !mx_check_last_stride(call, z) || !mx_bind_f8_128x4(call, t->z_scale, sizes[0], sizes[1], &z_scale)) {
        return false;
    }
    out->out_e4m3 = z->data;
    out->out_stride_token = z->strides[0];
    out->out_scale = t->z_scale->data;
    return true;
}

bool mx_bind_gemm(struct mx_call *call, const struct mx_gemm_tensors *t, int64_t z_span, struct mx_matmul *out) {
    const struct mx_tensor *z = t->z, *w = t->w, *y = t->y;
    *out = (struct mx_matmul){.num_groups = 1, .x_span = z_span};

    /* z e4m3 [T, K] with F8_128x4 scales */
    if (!mx_check_dtype(call, z, mx_torch.dtype_float8_e4m3fn) || !mx_check_num_dims(call, z, 2, "[T, K]") ||
        !mx_check_multiple(call, z, 1, MX_BLOCK) || !mx_check_last_stride(call, z) ||
        !mx_bind_f8_128x4(call, t->z_scale, z->sizes[0], z->sizes[1], &out->x_scale) ||
        !mx_check_span(call, "z_span", z_span, z->sizes[1], true)) {
        return false;
    }
    out->num_tokens = z->sizes[0];
    out->x = z->data;
    out->x_stride_token = z->strides[0];

    /* w e4m3 [N, K] */
    if (!mx_check_dtype(call, w, mx_torch.dtype_float8_e4m3fn) || !mx_check_num_dims(call, w, 2, "[N, K]") ||
        !mx_check_positive(call, w, 0) || !mx_check_last_stride(call, w)) {
        return false;
    }
    if (w->sizes[1] != z->sizes[1]) {
        return mx_fail(call, MX_ERROR_VALUE, "%.*s must have K = %lld columns like %.*s, got %lld", w->name_len,
                       w->name, (long long)z->sizes[1], z->name_len, z->name, (long long)w->sizes[1]);
    }
    out->num_rows = w->sizes[0];
    out->k = w->sizes[1];
    out->w = w->data;
    out->w_stride_row = w->strides[0];

    /* y BF16 [T, N] */
    const int64_t sizes[] = {out->num_tokens, out->num_rows};
    if (!mx_bind_weight_scale(call, t->w_scale, 1, out->num_rows, out->k, &out->w_scale) ||
        !mx_check_dtype(call, y, mx_torch.dtype_bfloat16) || !mx_check_sizes(call, y, 2, sizes, "[T, N]") ||
        !mx_check_last_stride(call, y)) {
        return false;
    }
    out->out_bf16 = y->data;
    out->out_stride_token = y->strides[0];
    return true;
}

/* ---- einsum_fp8_sfd128x4 --------------------------------------------------------------------------------------- */

enum { SFD128X4_X_SPAN, SFD128X4_SCALE_SPAN }; /* the ints of the schema below, in order */

static bool run_einsum_sfd128x4(struct mx_call *call) {
    const struct mx_tensor *t = call->tensors;
    struct mx_matmul args;
    return mx_bind_einsum(call, &(struct mx_einsum_tensors){&t[0], &t[1], &t[2], &t[3], &t[4], &t[5]},
                          call->ints[SFD128X4_X_SPAN], call->ints[SFD128X4_SCALE_SPAN], &args) &&
           mx_finish(call, call->backend->matmul(&args, &call->exec));
}

MX_DEFINE_OP(
    einsum_fp8_sfd128x4,
    "einsum_fp8_sfd128x4(Tensor x, Tensor x_scale, Tensor w, Tensor w_scale, Tensor(a!) z, Tensor(b!) z_scale, "
    "int x_span, int scale_span) -> ()",
    run_einsum_sfd128x4, false)

/* ---- einsum_fp8_bf16 ------------------------------------------------------------------------------------------- */

enum { BF16_X_SPAN }; /* the int of the schema below */

static bool run_einsum_bf16(struct mx_call *call) {
    const struct mx_tensor *t = call->tensors;
    struct mx_matmul args;
    return mx_bind_einsum(call, &(struct mx_einsum_tensors){&t[0], &t[1], &t[2], &t[3], &t[4], NULL},
                          call->ints[BF16_X_SPAN], MX_BLOCK, &args) &&
           mx_finish(call, call->backend->matmul(&args, &call->exec));
}

MX_DEFINE_OP(einsum_fp8_bf16,
             "einsum_fp8_bf16(Tensor x, Tensor x_scale, Tensor w, Tensor w_scale, Tensor(a!) z, int x_span) -> ()",
             run_einsum_bf16, false)

/* ---- mxfp8_gemm_wo_b ------------------------------------------------------------------------------------------- */

enum { GEMM_Z_SPAN }; /* the int of the schema below */

static bool run_gemm_wo_b(struct mx_call *call) {
    const struct mx_tensor *t = call->tensors;
    struct mx_matmul args;
    return mx_bind_gemm(call, &(struct mx_gemm_tensors){&t[0], &t[1], &t[2], &t[3], &t[4]}, call->ints[GEMM_Z_SPAN],
                        &args) &&
           mx_finish(call, call->backend->matmul(&args, &call->exec));
}

MX_DEFINE_OP(mxfp8_gemm_wo_b,
             "mxfp8_gemm_wo_b(Tensor z, Tensor z_scale, Tensor w, Tensor w_scale, Tensor(a!) y, int z_span) -> ()",
             run_gemm_wo_b, false)
