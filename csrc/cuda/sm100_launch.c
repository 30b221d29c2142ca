/* sm100_launch.c - see sm100.h: checks, tensor maps and launches of the Blackwell matrix product. */
#include "sm100.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "cublaslt.h"
#include "driver.h"
#include "simt.h"

__attribute__((format(printf, 2, 3))) static int refuse(const struct mx_exec *exec, const char *format, ...) {
    va_list args;
    if (exec->err != NULL && exec->err_bytes > 0) {
        va_start(args, format);
        vsnprintf(exec->err, exec->err_bytes, format, args);
        va_end(args);
    }
    return MX_UNSUPPORTED;
}

/* ---- operands -------------------------------------------------------------------------------------------------- */

/* x [T, G, K] as the copy engine sees it: columns, groups, tokens. A dimension of size 1 has no stride of its own. */
static struct mx_cuda_tensor token_tensor(const struct mx_matmul *args, int box_tokens) {
    const uint64_t any = (uint64_t)mx_ceil_div(args->k, 16) * 16;
    return (struct mx_cuda_tensor){
        .name = args->x_scale.layout == MX_SCALE_F8_128X4 ? "z" : "x",
        .data = args->x,
        .element_bytes = 1,
        .num_dims = 3,
        .size = {(uint64_t)args->k, (uint64_t)args->num_groups, (uint64_t)args->num_tokens},
        .stride = {args->num_groups > 1 ? (uint64_t)args->x_stride_group : any,
                   args->num_tokens > 1 ? (uint64_t)args->x_stride_token : any},
        .box = {MX_SM100_K, 1, (uint32_t)box_tokens},
        .swizzle_bytes = 128,
    };
}

/* w [G, N, K]: columns, rows, groups. */
static struct mx_cuda_tensor weight_tensor(const struct mx_matmul *args) {
    const uint64_t any = (uint64_t)mx_ceil_div(args->k, 16) * 16;
    return (struct mx_cuda_tensor){
        .name = "w",
        .data = args->w,
        .element_bytes = 1,
        .num_dims = 3,
        .size = {(uint64_t)args->k, (uint64_t)args->num_rows, (uint64_t)args->num_groups},
        .stride = {args->num_rows > 1 ? (uint64_t)args->w_stride_row : any,
                   args->num_groups > 1 ? (uint64_t)args->w_stride_group : any},
        .box = {MX_SM100_K, MX_SM100_ROWS, 1},
        .swizzle_bytes = 128,
    };
}

/* log2 of a power of two, -1 for anything else. */
static int log2_exact(int64_t n) {
    int shift = 0;
    while (n > 1 && n % 2 == 0) {
        n /= 2;
        shift++;
    }
    return n == 1 ? shift : -1;
}

/* Scales as the kernel reads them. `name` for messages. */
static int bind_scales(struct mx_sm100_scales *out, const struct mx_scales *s, const char *name, int64_t k,
                       const struct mx_exec *exec) {
    const uintptr_t words =
        (uintptr_t)s->data | (uintptr_t)s->stride_group | (uintptr_t)s->stride_row | (uintptr_t)s->stride_col;
    *out = (struct mx_sm100_scales){
        .data = s->data,
        .stride_group = s->stride_group,
        .stride_row = s->stride_row,
        .stride_col = s->stride_col,
        .layout = s->layout,
        .num_col_tiles = (int32_t)s->num_col_tiles,
    };
    if (s->layout != MX_SCALE_BLOCKS) {
        return words % 4 == 0 ? MX_OK
                              : refuse(exec, "%s: address and strides must be multiples of 4 bytes, got remainder %d",
                                       name, (int)(words % 4));
    }
    out->row_shift = log2_exact(s->block_rows);
    out->col_shift = s->block_cols >= k ? 30 : log2_exact(s->block_cols / MX_BLOCK);
    if (out->row_shift < 0) {
        return refuse(exec, "%s: rows per scale must be a power of two, got %d", name, (int)s->block_rows);
    }
    if (out->col_shift < 0 || (s->block_cols < k && s->block_cols % MX_BLOCK != 0)) {
        return refuse(exec, "%s: columns per scale must be 32 times a power of two, or all, got %lld", name,
                      (long long)s->block_cols);
    }
    return MX_OK;
}

/* What the kernel writes by words. Results themselves leave element by element, so they may lie anywhere. */
static int check_output(const struct mx_matmul *args, const struct mx_exec *exec) {
    if (args->out_e4m3 == NULL) {
        return MX_OK;
    }
    if (args->scale_span != MX_BLOCK) {
        return refuse(
            exec,
            "scale_span must be 32 on Blackwell, whose tensor cores read a scale per 32 columns anyway, got %lld",
            (long long)args->scale_span);
    }
    if ((uintptr_t)args->out_scale % 4 != 0) {
        return refuse(exec, "z_scale: address must be a multiple of 4 bytes, got remainder %d",
                      (int)((uintptr_t)args->out_scale % 4));
    }
    return MX_OK;
}

/* ---- launch ---------------------------------------------------------------------------------------------------- */

int mx_sm100_matmul_planned(const struct mx_matmul *args, const struct mx_sm100_plan *plan,
                            const struct mx_exec *exec) {
    static const char *const kernels[2][2] = {{"mx_sm100_gemm_bf16", "mx_sm100_gemm_mx32"},
                                              {"mx_sm100_gemm_pair_bf16", "mx_sm100_gemm_pair_mx32"}};
    const int quantized = args->out_e4m3 != NULL;
    const struct mx_sm100_cut *cut = plan->tiling.cut;
    const struct mx_cuda_device *dev;
    struct mx_cuda_tensor w, x;
    CUtensorMap w_map, x_map[2];
    struct mx_sm100_gemm_params params = {
        .num_tokens = (int32_t)args->num_tokens,
        .num_groups = (int32_t)args->num_groups,
        .num_rows = (int32_t)args->num_rows,
        .k = (int32_t)args->k,
        .split = plan->split,
        .num_stages = plan->num_stages,
        .x_bytes = plan->x_bytes,
        .x_tiles = plan->x_tiles,
        .acc_count = plan->acc_count,
        .tmem_columns = plan->tmem_columns,
        .scale_column = plan->scale_column,
        .tiling = plan->tiling,
        .out = quantized ? args->out_e4m3 : (uint8_t *)args->out_bf16,
        .out_stride_token = quantized ? args->out_stride_token : 2 * args->out_stride_token,
        .out_stride_group = quantized ? args->num_rows : 2 * args->out_stride_group,
        .out_scale = quantized ? args->out_scale : NULL,
        .scale_col_tiles = (int32_t)mx_ceil_div(args->num_groups * args->num_rows, MX_TILE_COLS * MX_BLOCK),
    };
    void *kernel_params[] = {&w_map, &x_map[0], &x_map[1], &params};
    const struct mx_cuda_launch launch = {
        .kernel = kernels[plan->ctas - 1][quantized],
        .grid = {plan->grid, 1, 1},
        .cluster = plan->cluster,
        .block = MX_SM100_THREADS(plan->ctas),
        .smem_bytes = plan->smem_bytes,
        .params = kernel_params,
    };
    int code = check_output(args, exec);
    dev =
        mx_cuda_device(exec->device_index, exec->err, exec->err_bytes); /* opens the driver, which encodes the maps */
    if (dev == NULL) {
        return MX_FAILED;
    }
    if (code == MX_OK) {
        code = bind_scales(&params.w_scale, &args->w_scale, "w_scale", args->k, exec);
    }
    if (code == MX_OK) {
        code = bind_scales(&params.x_scale, &args->x_scale,
                           args->x_scale.layout == MX_SCALE_F8_128X4 ? "z_scale" : "x_scale", args->k, exec);
    }
    if (code != MX_OK) {
        return code;
    }
    if (args->x_scale.layout == MX_SCALE_BLOCKS) {
        return refuse(exec, "x_scale: must be packed int32 words or F8_128x4");
    }
    w = weight_tensor(args);
    x = token_tensor(args, cut[0].width / plan->ctas);
    code = mx_cuda_encode_tensor(&w_map, &w, exec->err, exec->err_bytes);
    if (code == MX_OK) {
        code = mx_cuda_encode_tensor(&x_map[0], &x, exec->err, exec->err_bytes);
    }
    x_map[1] = x_map[0];
    if (code == MX_OK && cut[1].num_tiles > 0) {
        x = token_tensor(args, cut[1].width / plan->ctas);
        code = mx_cuda_encode_tensor(&x_map[1], &x, exec->err, exec->err_bytes);
    }
    if (code != MX_OK) {
        return code;
    }
    return mx_cuda_launch(dev, &launch, exec);
}

static int own_matmul(const struct mx_matmul *args, const struct mx_exec *exec) {
    const struct mx_sm100_problem problem = {args->num_tokens, args->num_groups, args->num_rows, args->k};
    const struct mx_cuda_device *dev = mx_cuda_device(exec->device_index, exec->err, exec->err_bytes);
    struct mx_sm100_plan plan;
    int code;
    if (dev == NULL) {
        return MX_FAILED;
    }
    code =
        mx_sm100_make_plan(&problem, dev->num_sms, dev->smem_bytes, exec->flags, &plan, exec->err, exec->err_bytes);
    return code == MX_OK ? mx_sm100_matmul_planned(args, &plan, exec) : code;
}

/* ---- routes ---------------------------------------------------------------------------------------------------- */

int mx_sm100_route(const struct mx_matmul *args, const struct mx_exec *exec, char *reason, size_t n) {
    char why[192] = "";
    long version = 0;
    const int is_wo_b = args->num_groups == 1 && args->out_bf16 != NULL && args->x_scale.layout == MX_SCALE_F8_128X4;
    const int forced = (exec->flags & MX_FLAG_WO_B_CUBLASLT) != 0;
    if (!is_wo_b) {
        snprintf(reason, n, "own kernel: cuBLASLt is for wo_b only");
        return MX_ROUTE_OWN;
    }
    if (exec->flags & MX_FLAG_WO_B_OWN) {
        snprintf(reason, n, "own kernel: requested");
        return MX_ROUTE_OWN;
    }
    if (exec->flags & MX_FLAG_BATCH_INVARIANT) {
        snprintf(reason, n, "%s: cuBLASLt does not promise batch invariance", forced ? "refused" : "own kernel");
        return forced ? MX_ROUTE_REFUSED : MX_ROUTE_OWN;
    }
    if (mx_cublaslt_check(args, why, sizeof why) != MX_OK || mx_cublaslt_status(&version, why, sizeof why) != MX_OK) {
        snprintf(reason, n, "%s: %s", forced ? "refused" : "own kernel", why);
        return forced ? MX_ROUTE_REFUSED : MX_ROUTE_OWN;
    }
    snprintf(reason, n, "cuBLASLt %ld: %s", version,
             forced ? "requested" : "preferred until the own kernel has been checked on this hardware");
    return MX_ROUTE_CUBLASLT;
}

int mx_sm100_matmul(const struct mx_matmul *args, const struct mx_exec *exec) {
    char reason[256];
    int code;
    if (args->num_tokens == 0) {
        return MX_OK;
    }
    switch (mx_sm100_route(args, exec, reason, sizeof reason)) {
    case MX_ROUTE_REFUSED:
        return refuse(exec, "mxfp8_gemm_wo_b: %s", reason);
    case MX_ROUTE_CUBLASLT:
        code = mx_cublaslt_matmul(args, exec);
        if (code != MX_UNSUPPORTED || exec->flags & MX_FLAG_WO_B_CUBLASLT) {
            return code;
        }
        return own_matmul(args, exec);
    default:
        return own_matmul(args, exec);
    }
}

int mx_sm100_o_proj(const struct mx_o_proj *args, const struct mx_exec *exec) {
    const struct mx_cuda_device *dev;
    int code = MX_OK;
    if (args->a->num_tokens == 0) {
        return MX_OK;
    }
    dev = mx_cuda_device(exec->device_index, exec->err, exec->err_bytes);
    if (dev == NULL) {
        return MX_FAILED;
    }
    if (args->rope != NULL) {
        code = mx_simt_inv_rope(dev, args->rope, exec);
    }
    if (code == MX_OK) {
        code = mx_sm100_matmul(args->a, exec);
    }
    if (code == MX_OK && args->a->out_e4m3 == NULL) {
        code = mx_simt_quantize(dev, args->quantize, exec);
    }
    return code == MX_OK ? mx_sm100_matmul(args->b, exec) : code;
}
