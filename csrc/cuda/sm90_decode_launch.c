/* sm90_decode_launch.c - from the seam's structs to launches of the decode kernels. See sm90_decode.h. */
#include "sm90_decode.h"

#include <stdio.h>

#include "sm90.h"

/* The smallest k with 2^k >= n. */
static int32_t log2_of(int32_t n) {
    int32_t k = 0;
    while (1 << k < n) {
        k++;
    }
    return k;
}

static struct mx_sm90_decode_params matmul_params(const struct mx_sm90_decode_plan *plan,
                                                  const struct mx_matmul *args) {
    const uint32_t element = args->out_e4m3 != NULL ? 1 : 2;
    return (struct mx_sm90_decode_params){
        .tile_rows = plan->tile_rows,
        .w_stages = plan->w_stages,
        .w_in_flight = plan->w_in_flight,
        .x_stages = plan->x_stages,
        .num_spans = plan->num_spans / plan->split,
        .trigger_span = plan->trigger_span,
        .x_ring = plan->x_ring,
        .parts = plan->parts,
        .scales = plan->scales,
        .amax = plan->amax,
        .split_log2 = log2_of(plan->split),
        .owned_log2 = log2_of(plan->n / plan->split),
        .span_tiles = plan->span_tiles,
        .scale_span = (int32_t)args->scale_span,
        .num_tokens = (int32_t)args->num_tokens,
        .num_rows = (int32_t)args->num_rows,
        .w_scale = args->w_scale.data,
        .w_scale_stride_group = (uint32_t)args->w_scale.stride_group,
        .w_scale_stride_row = (uint32_t)args->w_scale.stride_row,
        .out = args->out_e4m3 != NULL ? args->out_e4m3 : (uint8_t *)args->out_bf16,
        .out_stride_token = (uint32_t)args->out_stride_token * element,
        .out_stride_group = (uint32_t)args->out_stride_group * element,
        .out_scale = args->out_e4m3 != NULL ? args->out_scale : NULL,
        .num_col_tiles = (int32_t)mx_ceil_div(args->num_groups * args->num_rows, MX_TILE_COLS * MX_BLOCK),
    };
}

/* Scale bytes of the activations: word of (token, span). A dimension of size 1 has no stride. */
static struct mx_sm90_decode_scales scale_params(const struct mx_matmul *args) {
    const struct mx_scales *s = &args->x_scale;
    const int64_t group = args->num_groups > 1 ? s->stride_group : 0, row = args->num_tokens > 1 ? s->stride_row : 0;
    if (s->layout == MX_SCALE_F8_128X4) { /* row t lies at 16 (t % 32) + 4 (t / 32); a span is two tiles */
        return (struct mx_sm90_decode_scales){s->data, (uint32_t)group, 2 * MX_TILE_BYTES, 16, 4};
    }
    return (struct mx_sm90_decode_scales){s->data, (uint32_t)group, (uint32_t)(2 * s->stride_col), (uint32_t)row,
                                          (uint32_t)(32 * row)};
}

static struct mx_sm90_decode_source attention_source(const struct mx_inv_rope *rope) {
    const int interleaved = rope->order == MX_ORDER_CHUNK_INTERLEAVED;
    const int64_t divisor = interleaved ? rope->heads_per_group : rope->head_dim / MX_BLOCK;
    return (struct mx_sm90_decode_source){
        .x = (const uint8_t *)rope->attn,
        .stride_token = (uint32_t)(rope->attn_stride_token * 2),
        .stride_group = (uint32_t)(rope->attn_stride_head * rope->heads_per_group * 2),
        .stride_head = (uint32_t)(rope->attn_stride_head * 2),
        .interleaved = interleaved,
        .divisor = (int32_t)divisor,
        .divisor_reciprocal = mx_cuda_reciprocal(divisor),
        .token_reciprocal = (uint32_t)mx_ceil_div(1 << 20, rope->num_tokens),
        .rope_first = (int32_t)(rope->head_dim - rope->rope_dim),
        .rope_dim = (int32_t)rope->rope_dim,
        .cache = rope->cache,
        .cos_sin = rope->cos_sin,
        .cos_sin_stride = rope->cos_sin_stride,
        .positions = rope->positions,
        .positions_stride = rope->positions_stride,
        .num_positions = rope->num_positions,
    };
}

/* A matrix [T, G, C / G] is G heads of C / G values. */
static struct mx_sm90_decode_source matrix_source(const struct mx_quantize *z) {
    const int64_t divisor = z->num_cols / z->num_groups / MX_BLOCK;
    return (struct mx_sm90_decode_source){
        .x = (const uint8_t *)z->z,
        .stride_token = (uint32_t)(z->z_stride_token * 2),
        .stride_head = (uint32_t)(z->z_stride_group * 2),
        .divisor = (int32_t)divisor,
        .divisor_reciprocal = mx_cuda_reciprocal(divisor),
        .token_reciprocal = (uint32_t)mx_ceil_div(1 << 20, z->num_tokens),
    };
}

/* Weights as {K, N, G}; a block's copies are tile_rows x 128 bytes. */
static int encode_weights(CUtensorMap *map, const struct mx_matmul *args, int tile_rows, const struct mx_exec *exec) {
    const int64_t group = args->num_groups == 1 ? args->w_stride_row * args->num_rows : args->w_stride_group;
    const struct mx_cuda_tensor w = {
        .name = "w",
        .data = args->w,
        .element_bytes = 1,
        .num_dims = 3,
        .size = {(uint64_t)args->k, (uint64_t)args->num_rows, (uint64_t)args->num_groups},
        .stride = {(uint64_t)args->w_stride_row, (uint64_t)group},
        .box = {128, (uint32_t)tile_rows, 1},
        .swizzle_bytes = 128,
    };
    return mx_cuda_encode_tensor(map, &w, exec->err, exec->err_bytes);
}

/* e4m3 activations as {K, G, T}; tokens past the last read as zero. */
static int encode_activations(CUtensorMap *map, const struct mx_matmul *args, int n, const struct mx_exec *exec) {
    const int64_t group = args->num_groups == 1 ? mx_ceil_div(args->k, 16) * 16 : args->x_stride_group;
    const int64_t token = args->num_tokens == 1 ? mx_ceil_div(args->k, 16) * 16 : args->x_stride_token;
    const struct mx_cuda_tensor x = {
        .name = "x",
        .data = args->x,
        .element_bytes = 1,
        .num_dims = 3,
        .size = {(uint64_t)args->k, (uint64_t)args->num_groups, (uint64_t)args->num_tokens},
        .stride = {(uint64_t)group, (uint64_t)token},
        .box = {128, 1, (uint32_t)n},
        .swizzle_bytes = 128,
    };
    return mx_cuda_encode_tensor(map, &x, exec->err, exec->err_bytes);
}

int mx_sm90_decode_run(const struct mx_sm90_decode_plan *plan, const struct mx_matmul *args,
                       const struct mx_inv_rope *rope, const struct mx_quantize *source, const struct mx_exec *exec) {
    static const char *const from_names[] = {"e4m3", "bf16", "attn"};
    const struct mx_cuda_device *dev = mx_cuda_device(exec->device_index, exec->err, exec->err_bytes);
    struct mx_sm90_decode_params params = matmul_params(plan, args);
    struct mx_sm90_decode_scales scales;
    struct mx_sm90_decode_source from;
    CUtensorMap w_map, x_map;
    char kernel[64];
    void *pointers[4] = {&w_map, &params, &from, NULL};
    struct mx_cuda_launch launch = {
        .kernel = kernel,
        .grid = {plan->cluster, plan->tiles, plan->groups},
        .cluster = plan->cluster,
        .block = plan->block,
        .smem_bytes = plan->smem_bytes,
        .params = pointers,
    };
    int code = dev != NULL ? encode_weights(&w_map, args, plan->tile_rows, exec) : MX_FAILED;
    if (code != MX_OK) {
        return code;
    }
    snprintf(kernel, sizeof kernel, "mx_sm90_decode_%s_%dx%d%s_%d", from_names[plan->from],
             plan->tile_rows > 64 ? 128 : 64, plan->chains, plan->split > 1 ? "_split" : "", plan->n);
    if (plan->from == MX_DECODE_FROM_E4M3) {
        scales = scale_params(args);
        pointers[1] = &x_map;
        pointers[2] = &params;
        pointers[3] = &scales;
        code = encode_activations(&x_map, args, plan->n, exec);
    } else {
        from = rope != NULL ? attention_source(rope) : matrix_source(source);
    }
    return code == MX_OK ? mx_cuda_launch(dev, &launch, exec) : code;
}

/* ---- what these kernels take ----------------------------------------------------------------------------- */

/* Offsets in the kernels have 32 bits. */
static int check_extent(const struct mx_exec *exec, const char *text, int64_t bytes) {
    return bytes > UINT32_MAX ? mx_cuda_refuse(exec, text, bytes) : MX_OK;
}

static int check_output(const struct mx_matmul *args, const struct mx_exec *exec) {
    const int64_t element = args->out_e4m3 != NULL ? 1 : 2; /* two neighbours are stored at once */
    const void *out = args->out_e4m3 != NULL ? (const void *)args->out_e4m3 : (const void *)args->out_bf16;
    const int64_t token = args->num_tokens > 1 ? args->out_stride_token * element : 0;
    const int64_t group = args->num_groups > 1 && element == 2 ? args->out_stride_group * element : 0;
    int code;
    if (args->num_rows % 2 != 0) {
        return mx_cuda_refuse(exec, "number of weight rows N must be even", args->num_rows);
    }
    if ((code = mx_cuda_check_aligned(exec, "output: address and strides must be pairs of elements: remainder", out,
                                      token | group, (int)(2 * element))) != MX_OK) {
        return code;
    }
    return check_extent(exec, "output must span less than 2^32 bytes",
                        args->num_tokens * token + args->num_groups * (group + args->num_rows * element));
}

static int check_scales(const struct mx_matmul *args, const struct mx_exec *exec) {
    const struct mx_sm90_decode_scales s = scale_params(args);
    const int64_t groups = args->num_groups - 1;
    int code;
    if (args->w_scale.block_rows != MX_BLOCK) {
        return mx_cuda_refuse(exec, "weight scales must cover 32 rows each", args->w_scale.block_rows);
    }
    if (args->x_scale.layout == MX_SCALE_BLOCKS) {
        return mx_cuda_refuse(exec, "activation scales must be packed or F8_128x4, layout", args->x_scale.layout);
    }
    if ((code = mx_cuda_check_aligned(exec, "activation scales must be aligned to 4 bytes: remainder", s.x_scale,
                                      (int64_t)(s.stride_group | s.stride_row | s.stride_span), 4)) != MX_OK ||
        (code = check_extent(exec, "weight scales must span less than 2^32 bytes",
                             groups * args->w_scale.stride_group +
                                 args->num_rows / MX_BLOCK * args->w_scale.stride_row)) != MX_OK) {
        return code;
    }
    return args->x_scale.layout == MX_SCALE_F8_128X4
               ? MX_OK
               : check_extent(exec, "activation scales must span less than 2^32 bytes",
                              groups * args->x_scale.stride_group + args->num_tokens * args->x_scale.stride_row +
                                  args->k / MX_BLOCK / 4 * args->x_scale.stride_col);
}

/* Whether this product is one for these kernels; the tiled kernels take it otherwise. */
static int check_matmul(const struct mx_matmul *args, const struct mx_exec *exec) {
    int code;
    if (args->num_tokens > MX_DECODE_MAX_TOKENS) {
        return mx_cuda_refuse(exec, "number of tokens must be at most 64", args->num_tokens);
    }
    if (mx_gemm_form_of(args) != MX_FORM_WIDE) {
        return mx_cuda_refuse(exec, "decode kernels take scales of x over 256 columns and prepared weights: x_span",
                              args->x_span);
    }
    return (code = check_output(args, exec)) != MX_OK ? code : check_scales(args, exec);
}

/* Whether BF16 rows can be read inside a kernel: 16 bytes at a time, 256 columns a scale, offsets of 32 bits. */
static bool can_read_bf16(const void *data, int64_t num_tokens, int64_t stride_token, int64_t num_inner,
                          int64_t stride_inner, int64_t scale_span) {
    const int64_t token = num_tokens > 1 ? stride_token : 0, inner = num_inner > 1 ? stride_inner : 0;
    return scale_span == MX_DECODE_SPAN && (((uintptr_t)data | (uintptr_t)(2 * token | 2 * inner)) % 16) == 0 &&
           2 * (num_tokens * token + num_inner * inner) <= UINT32_MAX;
}

static bool can_rope_inside(const struct mx_inv_rope *rope) {
    const int64_t row = rope->num_positions > 1 ? rope->cos_sin_stride : 0;
    return can_read_bf16(rope->attn, rope->num_tokens, rope->attn_stride_token,
                         rope->num_groups * rope->heads_per_group, rope->attn_stride_head, rope->scale_span) &&
           rope->rope_dim % 8 == 0 && (((uintptr_t)rope->cos_sin | (uintptr_t)(4 * row)) % 16) == 0;
}

static bool can_quantize_inside(const struct mx_quantize *z) {
    return can_read_bf16(z->z, z->num_tokens, z->z_stride_token, z->num_groups, z->z_stride_group, z->scale_span);
}

/* ---- the backend's functions ----------------------------------------------------------------------------- */

static int choose(struct mx_sm90_decode_plan *plan, const struct mx_matmul *args, int32_t from,
                  const struct mx_cuda_device *dev, const struct mx_exec *exec) {
    const struct mx_sm90_decode_shape shape = {
        .num_tokens = args->num_tokens,
        .num_groups = args->num_groups,
        .num_rows = args->num_rows,
        .k = args->k,
        .from = from,
        .scale_span = args->out_e4m3 != NULL ? (int32_t)args->scale_span : 0,
        .smem_bytes = dev->smem_bytes,
        .one_chain = (exec->flags & MX_FLAG_BATCH_INVARIANT) != 0,
    };
    return mx_sm90_decode_choose(plan, &shape, exec->err, exec->err_bytes);
}

int mx_sm90_decode_matmul(const struct mx_matmul *args, const struct mx_exec *exec) {
    const struct mx_cuda_device *dev = mx_cuda_device(exec->device_index, exec->err, exec->err_bytes);
    struct mx_sm90_decode_plan plan;
    int code = dev != NULL ? check_matmul(args, exec) : MX_FAILED;
    if (code == MX_OK) {
        code = choose(&plan, args, MX_DECODE_FROM_E4M3, dev, exec);
    }
    return code == MX_OK ? mx_sm90_decode_run(&plan, args, NULL, NULL, exec) : code;
}

int mx_sm90_decode_o_proj(const struct mx_o_proj *args, const struct mx_exec *exec) {
    const struct mx_cuda_device *dev = mx_cuda_device(exec->device_index, exec->err, exec->err_bytes);
    struct mx_matmul a = *args->a;
    struct mx_sm90_decode_plan a_plan, b_plan, inside;
    struct mx_sm90_decode_route route;
    const bool fused = a.out_e4m3 != NULL;
    const struct mx_quantize *bf16_z = /* where BF16 z may go */
        args->quantize != NULL && args->quantize->num_groups == a.num_groups ? args->quantize : NULL;
    const bool mxfp8_z = fused && bf16_z == NULL;
    int code = dev != NULL ? MX_OK : MX_FAILED;
    if (code != MX_OK || (code = check_matmul(&a, exec)) != MX_OK || (code = check_matmul(args->b, exec)) != MX_OK ||
        (code = choose(&a_plan, &a, MX_DECODE_FROM_E4M3, dev, exec)) != MX_OK ||
        (code = choose(&b_plan, args->b, MX_DECODE_FROM_E4M3, dev, exec)) != MX_OK) {
        return code;
    }

    /* The quickest route that these arguments allow. Unfused, z is quantised by a kernel of its own. */
    route = mx_sm90_decode_choose_route(a_plan.split, a.num_tokens);
    route.quantize_inside = route.quantize_inside && fused && bf16_z != NULL && can_quantize_inside(bf16_z) &&
                            choose(&inside, args->b, MX_DECODE_FROM_BF16, dev, exec) == MX_OK;
    if (route.quantize_inside) {
        b_plan = inside;
    }
    if (fused && !mxfp8_z) {
        a = mx_sm90_write_bf16(&a, bf16_z);
        if ((code = check_output(&a, exec)) != MX_OK ||
            (code = choose(&a_plan, &a, MX_DECODE_FROM_E4M3, dev, exec)) != MX_OK) {
            return code;
        }
    }
    route.rope_inside = route.rope_inside && args->rope != NULL && can_rope_inside(args->rope) &&
                        choose(&inside, &a, MX_DECODE_FROM_ATTENTION, dev, exec) == MX_OK;
    if (route.rope_inside) {
        a_plan = inside;
    } else if (args->rope != NULL && (code = mx_simt_inv_rope(dev, args->rope, exec)) != MX_OK) {
        return code;
    }

    code = mx_sm90_decode_run(&a_plan, &a, route.rope_inside ? args->rope : NULL, NULL, exec);
    if (code == MX_OK && !mxfp8_z && !route.quantize_inside) {
        code = mx_simt_quantize(dev, args->quantize, exec);
    }
    return code == MX_OK ? mx_sm90_decode_run(&b_plan, args->b, NULL, route.quantize_inside ? bf16_z : NULL, exec)
                         : code;
}
