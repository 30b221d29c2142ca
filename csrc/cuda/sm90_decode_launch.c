/* sm90_decode_launch.c - from the seam's structs to launches of the decode kernels. See sm90_decode.h. */
#include "sm90_decode.h"

#include <stdio.h>

#include "driver.h"

/* The smallest k with 2^k >= n. */
static int32_t log2_of(int32_t n) {
    int32_t k = 0;
    while (1 << k < n) {
        k++;
    }
    return k;
}

static uint32_t reciprocal(int64_t divisor) {
    return divisor == 1 ? 0 : (uint32_t)mx_ceil_div((int64_t)1 << 32, divisor);
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

/* Scale bytes of the activations: word of (token, span). */
static struct mx_sm90_decode_scales scale_params(const struct mx_scales *s) {
    if (s->layout == MX_SCALE_F8_128X4) { /* row t lies at 16 (t % 32) + 4 (t / 32); a span is two tiles */
        return (struct mx_sm90_decode_scales){s->data, (uint32_t)s->stride_group, 2 * MX_TILE_BYTES, 16, 4};
    }
    return (struct mx_sm90_decode_scales){s->data, (uint32_t)s->stride_group, (uint32_t)(2 * s->stride_col),
                                          (uint32_t)s->stride_row, (uint32_t)(32 * s->stride_row)};
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
        .divisor_reciprocal = reciprocal(divisor),
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
        .divisor_reciprocal = reciprocal(divisor),
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
        scales = scale_params(&args->x_scale);
        pointers[1] = &x_map;
        pointers[2] = &params;
        pointers[3] = &scales;
        code = encode_activations(&x_map, args, plan->n, exec);
    } else {
        from = rope != NULL ? attention_source(rope) : matrix_source(source);
    }
    return code == MX_OK ? mx_cuda_launch(dev, &launch, exec) : code;
}
