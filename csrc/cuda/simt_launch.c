/* simt_launch.c - see simt.h: launches of the kernels that move data once: simt_quantize.cu and simt_inv_rope.cu. */
#include "simt.h"

#include <stdbool.h>
#include <stdio.h>

#include "simt_params.h"

/* Grid of a kernel: pieces of `unroll` x 256 columns per warp. */
struct stream_plan {
    int32_t unroll; /* 1 for few tokens (more blocks), else 4 (more loads in flight) */
    uint32_t block;
    uint32_t pieces; /* blocks along the columns */
};

static struct stream_plan plan_stream(int64_t num_rows, int64_t num_cols, int num_sms) {
    /* A warp takes 256 columns at a time. Four at once need enough rows that all SMs still have 4 blocks. */
    struct stream_plan plan = {.unroll = 4, .block = 128};
    if (num_rows * mx_ceil_div(num_cols, 4096) < 4 * (int64_t)num_sms) {
        plan = (struct stream_plan){.unroll = 1, .block = 256};
    }
    plan.pieces = (uint32_t)mx_ceil_div(num_cols, (int64_t)plan.block * 8 * plan.unroll);
    return plan;
}

/* Blocks are numbered in 32 bits, and the kernels divide that number by `per_token`. */
static int check_grid(const struct mx_exec *exec, int64_t num_tokens, int64_t per_token) {
    return num_tokens * per_token > INT32_MAX || num_tokens * per_token * per_token > UINT32_MAX
               ? mx_cuda_refuse(exec, "too many tokens for this many columns", num_tokens)
               : MX_OK;
}

int mx_simt_quantize(const struct mx_cuda_device *dev, const struct mx_quantize *args, const struct mx_exec *exec) {
    const int64_t padded_tokens = mx_ceil_div(args->num_tokens, MX_TILE_ROWS) * MX_TILE_ROWS;
    const struct stream_plan plan = plan_stream(padded_tokens, args->num_cols, dev->num_sms);
    const int64_t many_tokens = args->num_tokens > 1, many_groups = args->num_groups > 1;
    char kernel[64];
    struct mx_simt_quantize_params params = {
        .num_pieces = (int32_t)plan.pieces,
        .pieces_reciprocal = mx_cuda_reciprocal(plan.pieces),
        .z = (const uint8_t *)args->z,
        .z_stride_token = many_tokens * 2 * args->z_stride_token,
        .z_stride_group = many_groups * 2 * args->z_stride_group,
        .q = args->q,
        .q_stride_token = many_tokens * args->q_stride_token,
        .q_scale = args->q_scale,
        .num_tokens = (int32_t)args->num_tokens,
        .num_cols = (int32_t)args->num_cols,
        .cols_per_group = (int32_t)(args->num_cols / args->num_groups),
        .group_reciprocal = mx_cuda_reciprocal(args->num_cols / args->num_groups),
        .num_groups = (int32_t)args->num_groups,
    };
    void *kernel_params[] = {&params};
    struct mx_cuda_launch launch = {
        .kernel = kernel,
        .grid = {(uint32_t)padded_tokens * plan.pieces, 1, 1},
        .block = plan.block,
        .params = kernel_params,
    };
    int code;
    if ((code = check_grid(exec, padded_tokens, plan.pieces)) != MX_OK) {
        return code;
    }
    if (args->num_groups > 1 && args->num_cols * params.cols_per_group > UINT32_MAX) {
        return mx_cuda_refuse(exec, "number of columns is too large for several groups", args->num_cols);
    }
    if (args->num_cols > 1 << 20) {
        return mx_cuda_refuse(exec, "number of columns must be at most 2^20", args->num_cols);
    }
    if ((code = mx_cuda_check_aligned(exec, "z: address and strides must be multiples of 16 bytes: remainder",
                                      args->z, params.z_stride_token | params.z_stride_group, 16)) != MX_OK ||
        (code = mx_cuda_check_aligned(exec, "q: address and strides must be multiples of 8 bytes: remainder", args->q,
                                      params.q_stride_token, 8)) != MX_OK ||
        (code = mx_cuda_check_aligned(exec, "q_scale: address must be a multiple of 4 bytes: remainder",
                                      args->q_scale, 0, 4)) != MX_OK) {
        return code;
    }
    snprintf(kernel, sizeof kernel, "mx_simt_quantize_%d_%d", plan.unroll, (int)args->scale_span);
    return mx_cuda_launch(dev, &launch, exec);
}

int mx_simt_inv_rope(const struct mx_cuda_device *dev, const struct mx_inv_rope *args, const struct mx_exec *exec) {
    const int64_t k = args->heads_per_group * args->head_dim;
    const struct stream_plan plan = plan_stream(args->num_tokens * args->num_groups, k, dev->num_sms);
    const int64_t many_tokens = args->num_tokens > 1, many_groups = args->num_groups > 1;
    const int64_t divisor = args->order == MX_ORDER_STANDARD ? args->head_dim : args->heads_per_group;
    const bool same_d =
        args->order == MX_ORDER_STANDARD && 1024 % args->head_dim == 0; /* a block steps by 1024 columns */
    char kernel[64];
    struct mx_simt_inv_rope_params params = {
        .num_pieces = (int32_t)plan.pieces,
        .num_groups = (int32_t)args->num_groups,
        .blocks_reciprocal = mx_cuda_reciprocal((int64_t)plan.pieces * args->num_groups),
        .pieces_reciprocal = mx_cuda_reciprocal(plan.pieces),
        .attn = (const uint8_t *)args->attn,
        .attn_stride_token = many_tokens * 2 * args->attn_stride_token,
        .attn_stride_head = 2 * args->attn_stride_head,
        .positions = args->positions,
        .positions_stride = args->positions_stride,
        .cos_sin = args->cos_sin,
        .cos_sin_stride = args->cos_sin_stride,
        .num_positions = args->num_positions,
        .x = args->x,
        .x_stride_token = many_tokens * args->x_stride_token,
        .x_stride_group = many_groups * args->x_stride_group,
        .x_scale = args->x_scale,
        .xs_stride_token = args->xs_stride_token,
        .xs_stride_group = args->xs_stride_group,
        .xs_stride_word = args->xs_stride_word,
        .heads_per_group = (int32_t)args->heads_per_group,
        .head_dim = (int32_t)args->head_dim,
        .rope_dim = (int32_t)args->rope_dim,
        .divisor_reciprocal = mx_cuda_reciprocal(divisor),
        .heads_per_step = (int32_t)(1024 / args->head_dim),
        .k = (int32_t)k,
        .order = args->order,
        .cache = args->cache,
    };
    void *kernel_params[] = {&params};
    struct mx_cuda_launch launch = {
        .kernel = kernel,
        .grid = {(uint32_t)(args->num_tokens * args->num_groups) * plan.pieces, 1, 1},
        .block = plan.block,
        .params = kernel_params,
    };
    int code;
    if ((code = check_grid(exec, args->num_tokens, plan.pieces * args->num_groups)) != MX_OK) {
        return code;
    }
    if (k * divisor > UINT32_MAX) {
        return mx_cuda_refuse(exec, "columns per group are too many for heads of this size", k);
    }
    if (k > 1 << 20) {
        return mx_cuda_refuse(exec, "columns per group must be at most 2^20", k);
    }
    if ((code = mx_cuda_check_aligned(exec, "attn: address and strides must be multiples of 16 bytes: remainder",
                                      args->attn, params.attn_stride_token | params.attn_stride_head, 16)) != MX_OK ||
        (code = mx_cuda_check_aligned(exec, "x: address and strides must be multiples of 8 bytes: remainder", args->x,
                                      params.x_stride_token | params.x_stride_group, 8)) != MX_OK ||
        (code = mx_cuda_check_aligned(
             exec, "x_scale: address must be a multiple of 4 bytes: remainder", args->x_scale,
             args->xs_stride_token | args->xs_stride_group | args->xs_stride_word, 4)) != MX_OK) {
        return code;
    }
    snprintf(kernel, sizeof kernel, "mx_simt_inv_rope_%d%s_%d", plan.unroll,
             plan.unroll > 1 && same_d ? "_same_d" : "", (int)args->scale_span);
    return mx_cuda_launch(dev, &launch, exec);
}
