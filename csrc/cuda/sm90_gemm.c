/* sm90_gemm.c - launches of the tiled matrix products, sm90_gemm_*.cu. */
#include "plan.h"
#include "sm90.h"

#include <stdio.h>

/* x [T, G, K] as the copy engine sees it: columns, groups, tokens. A dimension of size 1 has no stride of its own. */
static struct mx_cuda_tensor token_tensor(const struct mx_matmul *args, const struct mx_gemm_config *config) {
    const uint64_t any = (uint64_t)mx_ceil_div(args->k, 16) * 16;
    return (struct mx_cuda_tensor){
        .name = args->x_scale.layout == MX_SCALE_F8_128X4 ? "z" : "x",
        .data = args->x,
        .element_bytes = 1,
        .num_dims = 3,
        .size = {(uint64_t)args->k, (uint64_t)args->num_groups, (uint64_t)args->num_tokens},
        .stride = {args->num_groups > 1 ? (uint64_t)args->x_stride_group : any,
                   args->num_tokens > 1 ? (uint64_t)args->x_stride_token : any},
        .box = {128, 1, (uint32_t)(config->block_m / config->cluster_n)},
        .swizzle_bytes = 128,
    };
}

/* w [G, N, K]: columns, rows, groups. */
static struct mx_cuda_tensor weight_tensor(const struct mx_matmul *args, const struct mx_gemm_config *config) {
    const uint64_t any = (uint64_t)mx_ceil_div(args->k, 16) * 16;
    return (struct mx_cuda_tensor){
        .name = "w",
        .data = args->w,
        .element_bytes = 1,
        .num_dims = 3,
        .size = {(uint64_t)args->k, (uint64_t)args->num_rows, (uint64_t)args->num_groups},
        .stride = {args->num_rows > 1 ? (uint64_t)args->w_stride_row : any,
                   args->num_groups > 1 ? (uint64_t)args->w_stride_group : any},
        .box = {128, (uint32_t)(config->block_n / config->cluster_m), 1},
        .swizzle_bytes = 128,
    };
}

/* Results leave in vectors of 8 elements: 16 bytes of BF16, 8 of e4m3. */
static int check_output(const struct mx_matmul *args, const struct mx_exec *exec) {
    const int64_t row_bytes = args->out_e4m3 != NULL ? args->out_stride_token : 2 * args->out_stride_token;
    const int64_t group_bytes = args->out_e4m3 != NULL ? 0 : 2 * args->out_stride_group;
    const uintptr_t address = args->out_e4m3 != NULL ? (uintptr_t)args->out_e4m3 : (uintptr_t)args->out_bf16;
    if (args->num_rows % 8 != 0) {
        return mx_cuda_refuse(exec, "number of weight rows N must be a multiple of 8", args->num_rows);
    }
    if (address % 16 != 0) {
        return mx_cuda_refuse(exec, "output address must be a multiple of 16 bytes: remainder",
                              (long long)(address % 16));
    }
    if (args->num_tokens > 1 && row_bytes % 16 != 0) {
        return mx_cuda_refuse(exec, "output token stride must be a multiple of 16 bytes", row_bytes);
    }
    if (args->num_groups > 1 && group_bytes % 16 != 0) {
        return mx_cuda_refuse(exec, "output group stride must be a multiple of 16 bytes", group_bytes);
    }
    if (args->out_e4m3 != NULL && (uintptr_t)args->out_scale % 4 != 0) {
        return mx_cuda_refuse(exec, "output scale address must be a multiple of 4 bytes: remainder",
                              (long long)((uintptr_t)args->out_scale % 4));
    }
    return MX_OK;
}

/* Bytes of 1 x 32 blocks that lie as packed words do are packed words, which load four at a time. */
static struct mx_scales as_words(const struct mx_scales *s, int64_t k) {
    struct mx_scales words = *s;
    const uintptr_t all = (uintptr_t)s->data | (uintptr_t)s->stride_group | (uintptr_t)s->stride_row;
    if (s->layout == MX_SCALE_BLOCKS && s->block_rows == 1 && s->block_cols == MX_BLOCK && s->stride_col == 1 &&
        all % 4 == 0 && k % 128 == 0) {
        words.layout = MX_SCALE_PACKED;
        words.stride_col = 4;
    }
    return words;
}

/* The per-32 kernels hold offsets into the scales in 32 bits. */
static int check_scale_extent(const char *text, const struct mx_scales *s, int64_t groups, int64_t rows,
                              const struct mx_exec *exec) {
    const int64_t last = s->layout == MX_SCALE_F8_128X4 ? mx_f8_128x4_offset(rows - 1, 0, s->num_col_tiles)
                                                        : (rows - 1) / s->block_rows * s->stride_row;
    const int64_t extent = (groups - 1) * s->stride_group + last;
    return extent > UINT32_MAX ? mx_cuda_refuse(exec, text, extent) : MX_OK;
}

/* The per-32 kernels read activations' scales, and packed or tiled weight scales, as 32-bit words. */
static int check_scale_words(const char *text, const struct mx_scales *s, const struct mx_exec *exec) {
    const uintptr_t all =
        (uintptr_t)s->data | (uintptr_t)s->stride_group | (uintptr_t)s->stride_row | (uintptr_t)s->stride_col;
    if (s->layout != MX_SCALE_BLOCKS && all % 4 != 0) {
        return mx_cuda_refuse(exec, text, (long long)(all % 4));
    }
    return MX_OK;
}

int mx_sm90_gemm_planned(const struct mx_cuda_device *dev, const struct mx_matmul *args,
                         const struct mx_gemm_plan *plan, const struct mx_exec *exec) {
    const bool quantized = args->out_e4m3 != NULL;
    const struct mx_cuda_tensor x = token_tensor(args, plan->config), w = weight_tensor(args, plan->config);
    CUtensorMap x_map, w_map;
    struct mx_sm90_gemm_params params = {
        .num_tokens = (int32_t)args->num_tokens,
        .num_groups = (int32_t)args->num_groups,
        .num_rows = (int32_t)args->num_rows,
        .k = (int32_t)args->k,
        .tiling = plan->tiling,
        .x_scale = args->x_scale,
        .w_scale = as_words(&args->w_scale, args->k),
        .out = quantized ? args->out_e4m3 : (uint8_t *)args->out_bf16,
        .out_stride_token = quantized ? args->out_stride_token : 2 * args->out_stride_token,
        .out_stride_group = quantized ? args->num_rows : 2 * args->out_stride_group,
        .out_scale = quantized ? args->out_scale : NULL,
        .scale_col_tiles = (int32_t)mx_ceil_div(args->num_groups * args->num_rows, MX_TILE_COLS * MX_BLOCK),
    };
    void *kernel_params[] = {&x_map, &w_map, &params};
    const struct mx_cuda_launch launch = {
        .kernel = plan->config->kernel,
        .grid = {plan->grid, 1, 1},
        .cluster = plan->cluster,
        .block = plan->block,
        .smem_bytes = plan->smem_bytes,
        .params = kernel_params,
    };
    int code = mx_cuda_encode_tensor(&x_map, &x, exec->err, exec->err_bytes);
    if (code == MX_OK) {
        code = mx_cuda_encode_tensor(&w_map, &w, exec->err, exec->err_bytes);
    }
    return code == MX_OK ? mx_cuda_launch(dev, &launch, exec) : code;
}

int mx_sm90_gemm(const struct mx_cuda_device *dev, const struct mx_matmul *args, const struct mx_exec *exec) {
    const struct mx_gemm_problem problem = mx_gemm_problem_of(args, exec->flags);
    struct mx_gemm_plan plan;
    int code;
    if (args->num_tokens > INT32_MAX - 256) {
        return mx_cuda_refuse(exec, "number of tokens must be below 2^31 - 256", args->num_tokens);
    }
    if ((code = check_output(args, exec)) != MX_OK ||
        (code = check_scale_words("activation scales must be aligned to 4 bytes: remainder", &args->x_scale, exec)) !=
            MX_OK ||
        (code = check_scale_words("weight scales must be aligned to 4 bytes: remainder", &args->w_scale, exec)) !=
            MX_OK) {
        return code;
    }
    if (problem.form != MX_FORM_WIDE &&
        ((code = check_scale_extent("activation scales must span less than 2^32 bytes", &args->x_scale,
                                    args->num_groups, args->num_tokens, exec)) != MX_OK ||
         (code = check_scale_extent("weight scales must span less than 2^32 bytes", &args->w_scale, args->num_groups,
                                    args->num_rows, exec)) != MX_OK)) {
        return code;
    }
    if (!mx_plan_gemm(&problem, dev->num_sms, dev->smem_bytes, &plan)) {
        return mx_cuda_refuse(exec, "no kernel fits this problem: K", args->k);
    }
    return mx_sm90_gemm_planned(dev, args, &plan, exec);
}
