/* ops_quantize.c - the ops that make MXFP8: quantisation of z, inverse RoPE + quantisation, re-blocking of weights. */
#include "op.h"

bool mx_bind_quantize(struct mx_call *call, const struct mx_quantize_tensors *t, int64_t scale_span,
                      struct mx_quantize *out) {
    const struct mx_tensor *z = t->z, *q = t->q;
    struct mx_scales q_scale;
    *out = (struct mx_quantize){.num_groups = 1, .scale_span = scale_span};

    /* z BF16 [T, C], or [T, G, C / G] whose columns are taken group by group */
    if (!mx_check_dtype(call, z, mx_torch.dtype_bfloat16)) {
        return false;
    }
    if (z->num_dims == 3) {
        if (!mx_check_positive(call, z, 1)) {
            return false;
        }
        out->num_groups = z->sizes[1];
        out->z_stride_group = z->strides[1];
    } else if (!mx_check_num_dims(call, z, 2, "[T, C] or [T, G, N]")) {
        return false;
    }
    int last = (int)z->num_dims - 1;
    if (!mx_check_multiple(call, z, last, MX_BLOCK) || !mx_check_last_stride(call, z) ||
        !mx_check_span(call, "scale_span", scale_span, z->sizes[last], false)) {
        return false;
    }
    out->num_tokens = z->sizes[0];
    out->num_cols = out->num_groups * z->sizes[last];
    out->z = z->data;
    out->z_stride_token = z->strides[0];

    const int64_t sizes[] = {out->num_tokens, out->num_cols};
    if (!mx_check_dtype(call, q, mx_torch.dtype_float8_e4m3fn) || !mx_check_sizes(call, q, 2, sizes, "[T, C]") ||
        !mx_check_last_stride(call, q) || !mx_bind_f8_128x4(call, t->q_scale, sizes[0], sizes[1], &q_scale)) {
        return false;
    }
    out->q = q->data;
    out->q_stride_token = q->strides[0];
    out->q_scale = t->q_scale->data;
    return true;
}

enum { QUANTIZE_SCALE_SPAN }; /* the int of the schema below */

static bool run_quantize(struct mx_call *call) {
    const struct mx_tensor *t = call->tensors;
    struct mx_quantize args;
    return mx_bind_quantize(call, &(struct mx_quantize_tensors){&t[0], &t[1], &t[2]}, call->ints[QUANTIZE_SCALE_SPAN],
                            &args) &&
           mx_finish(call, call->backend->quantize(&args, &call->exec));
}

MX_DEFINE_OP(mxfp8_quantize_sfd128x4,
             "mxfp8_quantize_sfd128x4(Tensor z, Tensor(a!) q, Tensor(b!) q_scale, int scale_span) -> ()",
             run_quantize, false)

/* ---- inverse RoPE + quantise ----------------------------------------------------------------------------------- */

bool mx_bind_inv_rope(struct mx_call *call, const struct mx_inv_rope_tensors *t, int64_t order, int64_t cache,
                      int64_t scale_span, struct mx_inv_rope *out) {
    const struct mx_tensor *attn = t->attn, *positions = t->positions, *cos_sin = t->cos_sin, *x = t->x;
    *out = (struct mx_inv_rope){.order = (int32_t)order, .cache = (int32_t)cache, .scale_span = scale_span};

    /* attn BF16 [T, heads, D]; heads behind the last group's are padding and never read (ops.py asks the caller first) */
    if (!mx_check_dtype(call, attn, mx_torch.dtype_bfloat16) || !mx_check_num_dims(call, attn, 3, "[T, heads, D]") ||
        !mx_check_positive(call, attn, 1) || !mx_check_multiple(call, attn, 2, MX_BLOCK) ||
        !mx_check_last_stride(call, attn)) {
        return false;
    }
    out->num_tokens = attn->sizes[0];
    out->head_dim = attn->sizes[2];
    out->attn = attn->data;
    out->attn_stride_token = attn->strides[0];
    out->attn_stride_head = attn->strides[1];

    /* positions int64 [T] */
    if (!mx_check_dtype(call, positions, mx_torch.dtype_int64) ||
        !mx_check_sizes(call, positions, 1, &out->num_tokens, "[T]")) {
        return false;
    }
    out->positions = positions->data;
    out->positions_stride = positions->strides[0];

    /* cos_sin FP32 [positions, R], R <= D and even */
    if (!mx_check_dtype(call, cos_sin, mx_torch.dtype_float32) ||
        !mx_check_num_dims(call, cos_sin, 2, "[positions, rope_dim]") || !mx_check_positive(call, cos_sin, 0) ||
        !mx_check_multiple(call, cos_sin, 1, 2) || !mx_check_last_stride(call, cos_sin)) {
        return false;
    }
    if (cos_sin->sizes[1] > out->head_dim) {
        return mx_fail(call, MX_ERROR_VALUE, "cos_sin must have at most D = %lld columns, got %lld",
                       (long long)out->head_dim, (long long)cos_sin->sizes[1]);
    }
    out->cos_sin = cos_sin->data;
    out->cos_sin_stride = cos_sin->strides[0];
    out->num_positions = cos_sin->sizes[0];
    out->rope_dim = cos_sin->sizes[1];

    /* x e4m3 [T, G, K]; K = heads per group * D */
    if (!mx_check_dtype(call, x, mx_torch.dtype_float8_e4m3fn) || !mx_check_num_dims(call, x, 3, "[T, G, K]") ||
        !mx_check_positive(call, x, 1) || !mx_check_multiple(call, x, 2, 128) ||
        !mx_check_multiple(call, x, 2, out->head_dim) || !mx_check_last_stride(call, x)) {
        return false;
    }
    out->num_groups = x->sizes[1];
    out->heads_per_group = x->sizes[2] / out->head_dim;
    if (x->sizes[0] != out->num_tokens) {
        return mx_fail(call, MX_ERROR_VALUE, "x must have T = %lld tokens like attn, got %lld",
                       (long long)out->num_tokens, (long long)x->sizes[0]);
    }
    if (out->num_groups * out->heads_per_group > attn->sizes[1]) {
        return mx_fail(call, MX_ERROR_VALUE, "attn must have at least %lld heads (%lld groups of %lld), got %lld",
                       (long long)(out->num_groups * out->heads_per_group), (long long)out->num_groups,
                       (long long)out->heads_per_group, (long long)attn->sizes[1]);
    }
    out->x = x->data;
    out->x_stride_token = x->strides[0];
    out->x_stride_group = x->strides[1];

    struct mx_scales x_scale;
    if (!mx_check_span(call, "scale_span", scale_span, x->sizes[2], false) ||
        !mx_bind_packed_scale(call, t->x_scale, out->num_tokens, out->num_groups, x->sizes[2], &x_scale)) {
        return false;
    }
    out->x_scale = t->x_scale->data;
    out->xs_stride_token = x_scale.stride_row;
    out->xs_stride_group = x_scale.stride_group;
    out->xs_stride_word = x_scale.stride_col;
    if (order != MX_ORDER_STANDARD && order != MX_ORDER_CHUNK_INTERLEAVED) {
        return mx_fail(call, MX_ERROR_VALUE, "order must be 0 (standard) or 1 (chunk-interleaved), got %lld",
                       (long long)order);
    }
    if (cache != MX_ROPE_HALVES && cache != MX_ROPE_INTERLEAVED) {
        return mx_fail(call, MX_ERROR_VALUE, "cache must be 0 (halves) or 1 (interleaved), got %lld",
                       (long long)cache);
    }
    return true;
}

enum { INV_ROPE_ORDER, INV_ROPE_CACHE, INV_ROPE_SCALE_SPAN }; /* the ints of the schema below, in order */

static bool run_inv_rope(struct mx_call *call) {
    const struct mx_tensor *t = call->tensors;
    struct mx_inv_rope args;
    return mx_bind_inv_rope(call, &(struct mx_inv_rope_tensors){&t[0], &t[1], &t[2], &t[3], &t[4]},
                            call->ints[INV_ROPE_ORDER], call->ints[INV_ROPE_CACHE], call->ints[INV_ROPE_SCALE_SPAN],
                            &args) &&
           mx_finish(call, call->backend->inv_rope(&args, &call->exec));
}

MX_DEFINE_OP(
    inv_rope_mxfp8_quantize,
    "inv_rope_mxfp8_quantize(Tensor attn, Tensor positions, Tensor cos_sin, Tensor(a!) x, Tensor(b!) x_scale, "
    "int order, int cache, int scale_span) -> ()",
    run_inv_rope, false)

/* ---- re-blocking of weights ------------------------------------------------------------------------------------ */

static bool run_reblock(struct mx_call *call) {
    const struct mx_tensor *w = &call->tensors[0], *w_scale = &call->tensors[1], *out_w = &call->tensors[2];
    const struct mx_tensor *out_scale = &call->tensors[3], *stats = &call->tensors[4];
    struct mx_reblock args = {0};
    struct mx_scales blocks;

    if (!mx_check_num_dims(call, w, 3, "[G, N, K]") ||
        !mx_bind_weight(call, w, 0, &args.num_groups, &args.num_rows, &args.k, &args.w_stride_group,
                        &args.w_stride_row) ||
        !mx_bind_weight_scale(call, w_scale, args.num_groups, args.num_rows, args.k, &args.w_scale)) {
        return false;
    }
    args.w = w->data;
    if (!mx_check_dtype(call, out_w, mx_torch.dtype_float8_e4m3fn) ||
        !mx_check_sizes(call, out_w, 3, w->sizes, "[G, N, K]") || !mx_check_contiguous(call, out_w) ||
        !mx_check_dtype(call, out_scale, mx_torch.dtype_uint8) ||
        !mx_check_num_dims(call, out_scale, 3, "[G, N/block_rows, K/block_cols]") ||
        !mx_bind_weight_scale(call, out_scale, args.num_groups, args.num_rows, args.k, &blocks) ||
        !mx_check_contiguous(call, out_scale)) {
        return false;
    }
    args.out_w = out_w->data;
    args.out_scale = out_scale->data;
    args.block_rows = blocks.block_rows;
    args.block_cols = blocks.block_cols;

    const int64_t three = 3;
    if (!mx_check_dtype(call, stats, mx_torch.dtype_float64) || !mx_check_sizes(call, stats, 1, &three, "[3]") ||
        !mx_check_contiguous(call, stats)) {
        return false;
    }
    args.stats = stats->data;
    return mx_finish(call, call->backend->reblock(&args, &call->exec));
}

MX_DEFINE_OP(
    reblock_weight,
    "reblock_weight(Tensor w, Tensor w_scale, Tensor(a!) out_w, Tensor(b!) out_scale, Tensor(c!) stats) -> ()",
    run_reblock, true)
