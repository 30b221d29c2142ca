/* sm90_decode_plan.c - which tile, split and rings a decode problem gets. Pure functions, no CUDA. See sm90_decode.h. */
#include "sm90_decode.h"

#include <stdio.h>

enum { BLOCK_M = 64, MAX_CLUSTER = 8 };

static int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }

/* Slots of a ring for a share of K: a slot that is used twice must be used by the same chain, or its phases could be
 * mistaken for each other. */
static int32_t ring_stages(int64_t stages, int64_t share, int64_t chains) {
    stages = min_i64(stages, MX_DECODE_MAX_STAGES);
    return (int32_t)(stages >= share ? share : stages / chains * chains);
}

int mx_sm90_decode_complete(struct mx_sm90_decode_plan *plan, const struct mx_sm90_decode_shape *shape, char *err,
                            size_t n) {
    const int e4m3 = plan->from == MX_DECODE_FROM_E4M3, tiles = plan->tile_rows > BLOCK_M ? 2 : 1;
    const int64_t row_bytes = (tiles * BLOCK_M + MX_DECODE_PAD) * 4; /* the sums of one token */
    int64_t share, parts_bytes, rings_end, end;
    plan->num_spans = (int32_t)mx_ceil_div(shape->k, MX_DECODE_SPAN);
    share = plan->num_spans / plan->split;
    plan->w_stages = ring_stages(plan->w_stages, share, plan->chains);
    plan->w_in_flight = (int32_t)min_i64(plan->w_in_flight, plan->w_stages);
    plan->x_stages = e4m3 ? ring_stages(plan->x_stages, share, plan->chains) : (int32_t)share;
    plan->trigger_span = (int32_t)min_i64(plan->trigger_span, share);
    plan->span_tiles = (int32_t)max_i64(shape->scale_span / (tiles * BLOCK_M), 1);
    plan->cluster = (uint32_t)(plan->split * plan->span_tiles);
    plan->tiles = (uint32_t)mx_ceil_div(mx_ceil_div(shape->num_rows, plan->tile_rows), plan->span_tiles);
    plan->groups = (uint32_t)shape->num_groups;
    plan->block = (uint32_t)(128 * tiles * plan->chains + (e4m3 ? 64 : 32));

    /* Shared memory: barriers, both rings (later the staged sums), parts from other blocks, scales, maxima. The tensor
     * cores read whole tiles of 64 rows, the last one's missing rows from behind the ring. */
    parts_bytes = plan->split > 1 ? plan->n * row_bytes : 0;
    if (plan->n >= 32) { /* the own part stays in the staging area */
        parts_bytes = parts_bytes / plan->split * (plan->split - 1);
    }
    plan->x_ring = (uint32_t)(MX_DECODE_BARRIER_BYTES + plan->w_stages * plan->tile_rows * MX_DECODE_SPAN);
    rings_end = max_i64(plan->x_ring + (int64_t)plan->x_stages * plan->n * MX_DECODE_SPAN,
                        MX_DECODE_BARRIER_BYTES + plan->chains * plan->n * row_bytes);
    plan->parts = (uint32_t)max_i64(rings_end, plan->x_ring + (tiles * BLOCK_M - plan->tile_rows) * 128);
    plan->scales = plan->parts + (uint32_t)parts_bytes;
    plan->amax = plan->scales + (uint32_t)(share * plan->n * 4);
    end = plan->amax + 4 * plan->n * 4;
    plan->smem_bytes = (uint32_t)end;

    if (plan->num_spans % plan->split != 0 || plan->cluster > MAX_CLUSTER || plan->n < shape->num_tokens ||
        plan->tile_rows > 2 * BLOCK_M || plan->w_in_flight < 1 ||
        min_i64(plan->x_stages, plan->w_stages) < min_i64(plan->chains, share) ||
        (shape->scale_span != 0 && plan->tile_rows % BLOCK_M != 0 && shape->scale_span != MX_BLOCK) ||
        (shape->scale_span != 0 && plan->tile_rows % MX_BLOCK != 0) || end > shape->smem_bytes) {
        snprintf(
            err, n,
            "decode plan does not fit: %lld tokens in %d, %d spans over %d blocks, cluster %u, %d rows, %lld of %d "
            "bytes of shared memory",
            (long long)shape->num_tokens, plan->n, plan->num_spans, plan->split, plan->cluster, plan->tile_rows,
            (long long)end, shape->smem_bytes);
        return MX_UNSUPPORTED;
    }
    return MX_OK;
}
