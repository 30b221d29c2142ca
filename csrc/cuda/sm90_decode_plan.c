/* sm90_decode_plan.c - which tile, cut of K and rings a decode problem gets. Pure, no CUDA. See sm90_decode.h. */
#include "sm90_decode.h"

#include <stdio.h>

enum {
    BLOCK_M = 64, /* rows of one tensor core instruction */
    MAX_CLUSTER = 8,
    NUM_SMS = 132, /* of the devices that were measured; fixed, because the bits depend on what follows from it */
    FEW_ROWS = 16 * BLOCK_M,
    BLOCK_RESERVED = 1024, /* bytes of shared memory that a block takes besides its own */
};

/* Rows of a block's tile: both of two instructions, one's, or fewer. */
enum tile { DOUBLE = 2 * BLOCK_M, WHOLE = BLOCK_M, PART = BLOCK_M - 8 };

/* The shipped kernels and their rings: slots of weights, how many of them may be under way, slots of activations, and
 * after how many spans the next kernel may start; for blocks with up to `share` spans. The first two sections come from
 * a random search over whole chains of DeepSeek-V4 shards on an H200, with cold weights (wo_a's share of K is 16, 8, 8
 * and 4 spans at TP 1, 2, 4 and 8, wo_b's 32, 16, 8 and 4). What it found: 48 to 64 KB of weights under way are enough
 * for each SM, and more delay the activations; where everything fits, the next kernel's blocks sit beside the running
 * ones with all of their weights under way. Where blocks meet for the scales of their output, clusters of 4 fit only if
 * two blocks share an SM: rings are short there. */
/* clang-format off */
static const struct {
    int32_t from, tile, chains, split, meet, share, n;
    int32_t w_stages, w_in_flight, x_stages, trigger_span;
} kernels[] = {
    /* from                    tile  chains  split  meet  share    n  w slots  under way  x slots  trigger */
    {MX_DECODE_FROM_E4M3,       WHOLE, 2,      0,     0,    16,      8,   12,       3,         6,        9},
    {MX_DECODE_FROM_E4M3,       WHOLE, 2,      0,     0,    16,     16,   10,       2,        12,       10},
    {MX_DECODE_FROM_E4M3,       WHOLE, 2,      0,     0,    16,     32,   10,       2,         6,        7},
    {MX_DECODE_FROM_E4M3,       WHOLE, 2,      0,     0,    16,     64,    8,       3,         4,       14},
    {MX_DECODE_FROM_E4M3,       WHOLE, 2,      1,     0,     4,      8,    4,       2,         4,        3},
    {MX_DECODE_FROM_E4M3,       WHOLE, 2,      1,     0,     4,     16,    4,       3,         4,        1},
    {MX_DECODE_FROM_E4M3,       WHOLE, 2,      1,     0,     4,     32,    4,       2,         4,        1},
    {MX_DECODE_FROM_E4M3,       WHOLE, 2,      1,     0,     4,     64,    4,       2,         4,        1},
    {MX_DECODE_FROM_E4M3,       WHOLE, 2,      1,     0,     8,      8,    8,       3,         8,        5},
    {MX_DECODE_FROM_E4M3,       WHOLE, 2,      1,     0,     8,     16,    8,       3,         8,        4},
    {MX_DECODE_FROM_E4M3,       WHOLE, 2,      1,     0,     8,     32,    7,       2,         6,        5},
    {MX_DECODE_FROM_E4M3,       WHOLE, 2,      1,     0,     8,     64,    6,       2,         6,        7},
    {MX_DECODE_FROM_E4M3,       PART,  2,      0,     0,     8,      8,    8,       2,         8,        8},
    {MX_DECODE_FROM_E4M3,       PART,  2,      0,     0,     8,     16,    8,       3,         8,        8},
    {MX_DECODE_FROM_E4M3,       PART,  2,      0,     0,     8,     32,    8,       3,         8,        3},
    {MX_DECODE_FROM_E4M3,       PART,  2,      0,     0,     8,     64,    7,       4,         6,        1},
    {MX_DECODE_FROM_E4M3,       PART,  2,      0,     0,    16,      8,   12,       5,         8,       14},
    {MX_DECODE_FROM_E4M3,       PART,  2,      0,     0,    16,     16,   12,       4,         6,        6},
    {MX_DECODE_FROM_E4M3,       PART,  2,      0,     0,    16,     32,   13,       4,         6,        4},
    {MX_DECODE_FROM_E4M3,       PART,  2,      0,     0,    16,     64,   13,       4,         6,       16},
    {MX_DECODE_FROM_E4M3,       PART,  2,      0,     0,    32,      8,   14,       5,         6,       20},
    {MX_DECODE_FROM_E4M3,       PART,  2,      0,     0,    32,     16,   16,       5,         8,       20},
    {MX_DECODE_FROM_E4M3,       PART,  2,      0,     0,    32,     32,   18,       4,         4,        4},
    {MX_DECODE_FROM_E4M3,       PART,  2,      0,     0,    32,     64,   11,       5,         6,       20},
    {MX_DECODE_FROM_E4M3,       PART,  4,      0,     0,     4,      8,    4,       2,         4,        2},
    {MX_DECODE_FROM_E4M3,       PART,  4,      0,     0,     4,     16,    4,       2,         4,        4},
    {MX_DECODE_FROM_E4M3,       PART,  4,      0,     0,     4,     32,    4,       2,         4,        0},
    {MX_DECODE_FROM_E4M3,       PART,  4,      0,     0,     4,     64,    4,       3,         4,        4},
    {MX_DECODE_FROM_ATTENTION,  WHOLE, 2,      1,     0,     4,      8,    4,       2,         0,        1},
    {MX_DECODE_FROM_BF16,       PART,  4,      0,     0,     4,      8,    4,       2,         0,        2},
    {MX_DECODE_FROM_BF16,       PART,  2,      0,     0,     8,      8,    8,       2,         0,        5},
    {MX_DECODE_FROM_BF16,       PART,  2,      0,     0,    16,      8,   13,       5,         0,        2},
    {MX_DECODE_FROM_BF16,       PART,  2,      0,     0,    32,      8,   14,       5,         0,       12},
    /* one chain */
    {MX_DECODE_FROM_E4M3,       WHOLE, 1,      0,     0,    32,      8,    8,       6,         8,        0},
    {MX_DECODE_FROM_E4M3,       WHOLE, 1,      0,     0,    32,     16,    8,       6,         8,        0},
    {MX_DECODE_FROM_E4M3,       WHOLE, 1,      0,     0,    32,     32,    8,       5,         4,        0},
    {MX_DECODE_FROM_E4M3,       WHOLE, 1,      0,     0,    32,     64,    8,       4,         4,        0},
    {MX_DECODE_FROM_E4M3,       PART,  1,      0,     0,    32,      8,    8,       6,         8,        0},
    {MX_DECODE_FROM_E4M3,       PART,  1,      0,     0,    32,     16,    8,       6,         8,        0},
    {MX_DECODE_FROM_E4M3,       PART,  1,      0,     0,    32,     32,    8,       5,         4,        0},
    {MX_DECODE_FROM_E4M3,       PART,  1,      0,     0,    32,     64,    8,       4,         4,        0},
    /* blocks meet */
    {MX_DECODE_FROM_E4M3,       WHOLE, 1,      0,     1,    16,      8,    4,       3,         8,       12},
    {MX_DECODE_FROM_E4M3,       WHOLE, 1,      0,     1,    16,     16,    4,       3,         8,       12},
    {MX_DECODE_FROM_E4M3,       WHOLE, 1,      0,     1,    16,     32,    4,       3,         4,       14},
    {MX_DECODE_FROM_E4M3,       WHOLE, 1,      0,     1,    16,     64,    4,       2,         2,       14},
    {MX_DECODE_FROM_E4M3,       WHOLE, 2,      0,     1,    16,      8,    4,       3,         8,       14},
    {MX_DECODE_FROM_E4M3,       WHOLE, 2,      0,     1,    16,     16,    4,       3,         8,       14},
    {MX_DECODE_FROM_E4M3,       WHOLE, 2,      0,     1,    16,     32,    4,       3,         4,       14},
    {MX_DECODE_FROM_E4M3,       WHOLE, 2,      0,     1,    16,     64,    4,       2,         2,       14},
    {MX_DECODE_FROM_E4M3,       WHOLE, 4,      0,     1,     4,      8,    4,       3,         8,        0},
    {MX_DECODE_FROM_E4M3,       WHOLE, 4,      0,     1,     4,     16,    4,       3,         8,        0},
    {MX_DECODE_FROM_E4M3,       WHOLE, 4,      0,     1,     4,     32,    4,       3,         4,        0},
    {MX_DECODE_FROM_E4M3,       WHOLE, 4,      0,     1,     4,     64,    4,       3,         4,        0},
    {MX_DECODE_FROM_E4M3,       WHOLE, 2,      1,     1,     8,      8,    8,       6,         8,        1},
    {MX_DECODE_FROM_E4M3,       WHOLE, 2,      1,     1,     8,     16,    8,       6,         8,        1},
    {MX_DECODE_FROM_E4M3,       WHOLE, 2,      1,     1,     8,     32,    6,       6,         4,        8},
    {MX_DECODE_FROM_E4M3,       WHOLE, 2,      1,     1,     8,     64,    8,       4,         4,        8},
    {MX_DECODE_FROM_E4M3,       DOUBLE, 2,      1,     1,     8,      8,    4,       4,         4,        1},
    {MX_DECODE_FROM_E4M3,       DOUBLE, 2,      1,     1,     8,     16,    4,       4,         4,        1},
    {MX_DECODE_FROM_E4M3,       DOUBLE, 2,      1,     1,     8,     32,    4,       4,         4,        1},
    {MX_DECODE_FROM_E4M3,       DOUBLE, 2,      1,     1,     8,     64,    4,       4,         4,        1},
};
/* clang-format on */

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

    /* Shared memory: barriers, both rings (later the staged sums), parts from other blocks, scales, maxima. The
     * tensor cores read whole tiles of 64 rows, the last one's missing rows from behind the ring. */
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

/* The cut of K and the rows of a tile. Bits depend on the cut alone, so it follows from the weights alone, whatever
 * the number of tokens, the form of the activations and that of the output; the rows do depend on the output. */
static void choose_cut(struct mx_sm90_decode_plan *plan, const struct mx_sm90_decode_shape *shape) {
    const int64_t rows = shape->num_groups * shape->num_rows;
    const int64_t num_spans = mx_ceil_div(shape->k, MX_DECODE_SPAN);
    const int64_t rows_per_sm = mx_ceil_div(mx_ceil_div(rows, NUM_SMS), 8) * 8;
    plan->split = 1;
    plan->tile_rows = (int32_t)min_i64(max_i64(rows_per_sm, MX_BLOCK), BLOCK_M);
    if (shape->one_chain) {
        plan->chains = 1;
    } else if (rows_per_sm > MX_BLOCK) {                                    /* a tile for each SM */
        plan->chains = plan->tile_rows < BLOCK_M && num_spans <= 4 ? 4 : 2; /* four: one span each */
    } else { /* too few rows: several blocks for each tile */
        plan->split = rows <= FEW_ROWS ? 4 : 2;
        while (num_spans % plan->split != 0) {
            plan->split /= 2;
        }
        plan->chains = 2;
        plan->tile_rows = BLOCK_M;
    }
    if (shape->scale_span != 0) { /* as many whole tiles as the blocks of a cluster can share a scale */
        plan->tile_rows = shape->scale_span / BLOCK_M * plan->split > MAX_CLUSTER ? 2 * BLOCK_M : BLOCK_M;
    }
}

/* Shortens the plan's rings, the larger one first, until they fit. */
static int fit_rings(struct mx_sm90_decode_plan *plan, const struct mx_sm90_decode_shape *shape, char *err,
                     size_t n) {
    const int64_t half = (shape->smem_bytes + BLOCK_RESERVED) / 2 - BLOCK_RESERVED;
    for (;;) {
        struct mx_sm90_decode_plan tried = *plan;
        const int code = mx_sm90_decode_complete(&tried, shape, err, n);
        /* Large clusters do not all find room at one block per SM */
        const bool crowded = tried.cluster >= 4 && tried.cluster * tried.tiles * tried.groups > NUM_SMS / 2;
        const bool fits = code == MX_OK && !(crowded && tried.smem_bytes > half);
        const bool shorter_x = plan->from == MX_DECODE_FROM_E4M3 && plan->x_stages > plan->chains;
        const bool shorter_w = plan->w_stages > plan->chains;
        if (fits || (code == MX_OK && !shorter_x && !shorter_w)) {
            *plan = tried;
            return MX_OK;
        }
        if (shorter_x && (!shorter_w || plan->x_stages * plan->n >= plan->w_stages * plan->tile_rows)) {
            plan->x_stages -= plan->chains;
        } else if (shorter_w) {
            plan->w_stages -= plan->chains;
        } else {
            return code;
        }
    }
}

/* The rings of the plan's kernel; false if there is no such kernel. The nearest entry: of the tile's size rather than
 * not, for as many spans as the block has, or for the most there are. */
static bool choose_rings(struct mx_sm90_decode_plan *plan, const struct mx_sm90_decode_shape *shape) {
    const bool is_double = plan->tile_rows > BLOCK_M, meet = shape->scale_span > (is_double ? DOUBLE : WHOLE);
    const int64_t share = mx_ceil_div(shape->k, MX_DECODE_SPAN) / plan->split;
    int64_t best = INT64_MAX;
    for (size_t i = 0; i < sizeof kernels / sizeof kernels[0]; i++) {
        const bool fits = kernels[i].from == plan->from && (kernels[i].tile == DOUBLE) == is_double &&
                          kernels[i].chains == plan->chains && kernels[i].split == (plan->split > 1) &&
                          kernels[i].meet == meet && kernels[i].n == plan->n;
        const int64_t other_tile = (kernels[i].tile == PART) != (plan->tile_rows < BLOCK_M);
        const int64_t distance = kernels[i].share >= share ? kernels[i].share : 256 - kernels[i].share;
        if (fits && other_tile * 1024 + distance < best) {
            best = other_tile * 1024 + distance;
            plan->w_stages = kernels[i].w_stages;
            plan->w_in_flight = kernels[i].w_in_flight;
            plan->x_stages = kernels[i].x_stages;
            plan->trigger_span = kernels[i].trigger_span;
        }
    }
    return best < INT64_MAX;
}

int mx_sm90_decode_choose(struct mx_sm90_decode_plan *plan, const struct mx_sm90_decode_shape *shape, char *err,
                          size_t n) {
    int32_t padded = 8;
    while (padded < shape->num_tokens) {
        padded *= 2;
    }
    *plan = (struct mx_sm90_decode_plan){.from = shape->from, .n = padded};
    choose_cut(plan, shape);
    if (choose_rings(plan, shape)) {
        return fit_rings(plan, shape, err, n);
    }
    snprintf(err, n, "no decode kernel for %lld tokens, source %d, %d chains, split %d, %d rows",
             (long long)shape->num_tokens, plan->from, plan->chains, plan->split, plan->tile_rows);
    return MX_UNSUPPORTED;
}

struct mx_sm90_decode_route mx_sm90_decode_choose_route(int32_t wo_a_split, int64_t num_tokens) {
    /* From chains measured on an H200 with 1, 2, 4 and 8 tokens: quantising inside saves launches and costs time per
     * token. That blocks which share K are 1, 2 or 4 stands for the size of the shard. */
    switch (wo_a_split) {
    case 1:
        return (struct mx_sm90_decode_route){false, num_tokens <= 2};
    case 2:
        return (struct mx_sm90_decode_route){false, num_tokens <= 4};
    default:
        return (struct mx_sm90_decode_route){true, num_tokens <= 8};
    }
}
