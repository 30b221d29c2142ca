/* ops_o_proj.c - the whole projection as one op: [inverse RoPE + quantise ->] einsum -> GEMM. And the list of ops.
 *
 * The intermediate results are arguments, allocated by the caller through torch: the ops allocate nothing, keep nothing
 * between calls and can be captured in a CUDA graph. */
#include "op.h"

struct o_proj_tensors {
    struct mx_einsum_tensors a; /* z and z_scale are set by bind_o_proj */
    const struct mx_tensor *wo_b, *wo_b_scale;
    const struct mx_tensor *z, *z_scale; /* e4m3 [T, G * N] and its scales */
    const struct mx_tensor *z_bf16;      /* BF16 [T, G, N]; the fused path does without, but may be quicker with it */
    const struct mx_tensor *y;
};

static bool run_o_proj_bound(struct mx_call *call, struct o_proj_tensors *t, const struct mx_inv_rope *rope,
                             bool fused, int64_t x_span, int64_t scale_span) {
    struct mx_matmul a, b;
    struct mx_quantize quantize;
    const bool has_bf16 = !fused || t->z_bf16->num_dims != 1;
    t->a.z = fused ? t->z : t->z_bf16;
    t->a.z_scale = fused ? t->z_scale : NULL;
    if (!mx_bind_einsum(call, &t->a, x_span, scale_span, &a) ||
        (has_bf16 && !mx_bind_quantize(call, &(struct mx_quantize_tensors){t->z_bf16, t->z, t->z_scale}, scale_span,
                                       &quantize)) ||
        !mx_bind_gemm(call, &(struct mx_gemm_tensors){t->z, t->z_scale, t->wo_b, t->wo_b_scale, t->y}, scale_span,
                      &b)) {
        return false;
    }
    struct mx_o_proj args = {.rope = rope, .a = &a, .quantize = has_bf16 ? &quantize : NULL, .b = &b};
    return mx_finish(call, call->backend->o_proj(&args, &call->exec));
}

enum { O_PROJ_FUSED, O_PROJ_X_SPAN, O_PROJ_SCALE_SPAN }; /* the ints of the schema below, in order */

static bool run_o_proj(struct mx_call *call) {
    const struct mx_tensor *t = call->tensors;
    struct o_proj_tensors tensors = {.a = {.x = &t[0], .x_scale = &t[1], .w = &t[2], .w_scale = &t[3]},
                                     .wo_b = &t[4],
                                     .wo_b_scale = &t[5],
                                     .z = &t[6],
                                     .z_scale = &t[7],
                                     .z_bf16 = &t[8],
                                     .y = &t[9]};
    return run_o_proj_bound(call, &tensors, NULL, call->ints[O_PROJ_FUSED] != 0, call->ints[O_PROJ_X_SPAN],
                            call->ints[O_PROJ_SCALE_SPAN]);
}

MX_DEFINE_OP(o_proj,
             "o_proj(Tensor x, Tensor x_scale, Tensor wo_a, Tensor wo_a_scale, Tensor wo_b, Tensor wo_b_scale, "
             "Tensor(a!) z, Tensor(b!) z_scale, Tensor(c!) z_bf16, Tensor(d!) y, bool fused, int x_span, "
             "int scale_span) -> ()",
             run_o_proj, false)

/* the ints of the schema below, in order */
enum { FROM_ATTN_ORDER, FROM_ATTN_CACHE, FROM_ATTN_FUSED, FROM_ATTN_SCALE_SPAN };

static bool run_o_proj_from_attn(struct mx_call *call) {
    const struct mx_tensor *t = call->tensors;
    int64_t order = call->ints[FROM_ATTN_ORDER], cache = call->ints[FROM_ATTN_CACHE];
    int64_t scale_span = call->ints[FROM_ATTN_SCALE_SPAN];
    bool fused = call->ints[FROM_ATTN_FUSED] != 0;
    struct o_proj_tensors tensors = {.a = {.x = &t[7], .x_scale = &t[8], .w = &t[3], .w_scale = &t[4]},
                                     .wo_b = &t[5],
                                     .wo_b_scale = &t[6],
                                     .z = &t[9],
                                     .z_scale = &t[10],
                                     .z_bf16 = &t[11],
                                     .y = &t[12]};
    struct mx_inv_rope rope;
    return mx_bind_inv_rope(call, &(struct mx_inv_rope_tensors){&t[0], &t[1], &t[2], &t[7], &t[8]}, order, cache,
                            scale_span, &rope) &&
           run_o_proj_bound(call, &tensors, &rope, fused, scale_span, scale_span);
}

MX_DEFINE_OP(o_proj_from_attn,
             "o_proj_from_attn(Tensor attn, Tensor positions, Tensor cos_sin, Tensor wo_a, Tensor wo_a_scale, "
             "Tensor wo_b, Tensor wo_b_scale, Tensor(a!) x, Tensor(b!) x_scale, Tensor(c!) z, Tensor(d!) z_scale, "
             "Tensor(e!) z_bf16, Tensor(f!) y, int order, int cache, bool fused, int scale_span) -> ()",
             run_o_proj_from_attn, false)

extern const struct mx_op mx_op_einsum_fp8_sfd128x4, mx_op_einsum_fp8_bf16, mx_op_mxfp8_gemm_wo_b;
extern const struct mx_op mx_op_mxfp8_quantize_sfd128x4, mx_op_inv_rope_mxfp8_quantize, mx_op_reblock_weight;

const struct mx_op *const mx_ops[] = {
    &mx_op_einsum_fp8_sfd128x4, &mx_op_einsum_fp8_bf16,         &mx_op_mxfp8_quantize_sfd128x4,
    &mx_op_mxfp8_gemm_wo_b,     &mx_op_inv_rope_mxfp8_quantize, &mx_op_o_proj,
    &mx_op_o_proj_from_attn,    &mx_op_reblock_weight,          NULL,
};
