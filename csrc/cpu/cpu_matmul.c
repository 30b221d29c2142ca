/*
 * cpu_matmul.c - the grouped matrix product: how the work is cut, decoded once and multiplied.
 *
 *     out[t, g, n] = sum over k of x[t, g, k] * w[g, n, k]
 *
 * A unit of work is (g, a block of tokens, a few rows n); a thread gets a range of units and takes neighbours
 * together:
 *
 *     for each panel of K (as many chunks as keep the decoded x small)
 *         decode x[block of tokens, panel]                     stays in L2 over all rows
 *         for each tile of 6 rows n
 *             for each chunk of the panel
 *                 decode w[6 rows, chunk]                      stays in L1 over all tokens
 *                 for each tile of tokens
 *                     sums[t, n] += dot products of the chunk  16 lanes a product, in registers
 *     round sums to BF16, write or quantise
 *
 * With few tokens the decoding of w is most of the work and memory bandwidth the limit; with many tokens the FMAs
 * are. The order of summation is that of cpu_internal.h whatever the cut.
 */
#include <stdatomic.h>
#include <stdlib.h>

#include "cpu_internal.h"

enum {
    MAX_BLOCK_TOKENS = 128,       /* tokens over which one decoding of w is spread */
    BLOCK_ROWS = 384,             /* rows over which one decoding of x is spread if K needs several panels */
    PANEL_BYTES = 768 * 1024,     /* decoded x: leaves room for w and the sums in an L2 of 1 to 2 MiB */
    PREFETCH_BYTES = 512,         /* see prefetch_next */
    MIN_PIECE_PRODUCTS = 1 << 18, /* a thread is not woken for less: 3 us (many tokens) to 30 us (one) */
};

/* Scales of one chunk of one row, or of several rows that share them. */
struct row_scales {
    uint8_t byte[MX_CPU_CHUNK_BLOCKS];
    float factor[MX_CPU_CHUNK_BLOCKS]; /* for the variant's `decode` */
    bool suspect; /* there is a byte that makes a row irregular (cpu_internal.h) if its block lives */
};

/* A row of x of the panel. */
struct x_row {
    uint8_t byte[MX_CPU_CHUNK_BLOCKS];
    bool irregular;
};

struct plan {
    const struct mx_matmul *args;
    const struct mx_cpu_variant *variant;
    int64_t block_tokens, num_token_blocks; /* T is cut into blocks of almost equal size */
    int64_t unit_rows, num_units;           /* N is cut into units ... */
    int64_t block_rows;                     /* ... and a block takes this many rows at most */
    int64_t num_chunks, panel_chunks;       /* K is cut into chunks, a panel is some of them */
    atomic_bool out_of_memory;
};

/* What one thread needs, allocated once a range. */
struct scratch {
    uint8_t *x;           /* decoded x    [panel_chunks][block_tokens][MX_CPU_ROW] */
    struct x_row *x_rows; /*              [panel_chunks][block_tokens] */
    uint8_t *w;           /* decoded w    [MX_CPU_TILE_ROWS][MX_CPU_ROW] */
    float *sums;          /*              [block_rows / 6][block_tokens][6]: tile after tile */
    float *sums_t;        /* one token's  [block_rows] */
    uint16_t *z_t;        /* BF16 of it   [block_rows], where it gets quantised */
    int64_t group, token; /* which part of x is decoded: its group, first token ... */
    int64_t panel;        /* ... and panel; -1 for none */
};

/* A thread's current block. */
struct block {
    int64_t group;
    int64_t token, num_tokens;
    int64_t row, num_rows;
};

static int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }

static int chunk_blocks(const struct plan *plan, int64_t chunk) {
    int64_t left = plan->args->k - chunk * MX_CPU_CHUNK;
    return (int)(min_of(left, MX_CPU_CHUNK) / MX_BLOCK);
}

static int64_t panel_end(const struct plan *plan, int64_t panel) {
    return min_of((panel + 1) * plan->panel_chunks, plan->num_chunks);
}

/* Rows of a block, whole tiles. */
static int64_t padded_rows(const struct plan *plan) {
    return mx_ceil_div(plan->block_rows, MX_CPU_TILE_ROWS) * MX_CPU_TILE_ROWS;
}

/* ---- scales of a row --------------------------------------------------------------------------------------- */

/* byte[b] = mx_scale_at(s, group, row, first + b), with the address arithmetic done once a row. */
static void gather_scales(const struct mx_scales *s, int64_t group, int64_t row, int64_t first, int num_blocks,
                          uint8_t *byte) {
    const uint8_t *base = s->data + group * s->stride_group;

    /* PACKED and F8_128X4: four bytes a word; a chunk starts on a word */
    if (s->layout == MX_SCALE_PACKED || s->layout == MX_SCALE_F8_128X4) {
        bool packed = s->layout == MX_SCALE_PACKED;
        const uint8_t *word = base + (packed ? row * s->stride_row + first / 4 * s->stride_col
                                             : mx_f8_128x4_offset(row, first, s->num_col_tiles));
        int64_t step = packed ? s->stride_col : MX_TILE_BYTES;
        int b = 0;
        for (; b + 4 <= num_blocks; b += 4, word += step) {
            memcpy(byte + b, word, 4);
        }
        for (int i = 0; b + i < num_blocks; i++) {
            byte[b + i] = word[i];
        }
        return;
    }

    /* BLOCKS: one byte covers `repeat` blocks of 32 */
    int64_t repeat = s->block_cols / MX_BLOCK;
    const uint8_t *source = base + row / s->block_rows * s->stride_row + first / repeat * s->stride_col;
    if (repeat == 1 && s->stride_col == 1) {
        memcpy(byte, source, (size_t)num_blocks);
        return;
    }
    int64_t used = first % repeat;
    for (int b = 0; b < num_blocks; b++) {
        byte[b] = *source;
        if (++used == repeat) {
            used = 0;
            source += s->stride_col;
        }
    }
}

static bool is_regular_byte(uint8_t byte) {
    return ((byte >= MX_CPU_SCALE_MIN) & (byte <= MX_CPU_SCALE_MAX)) | (byte == MX_SCALE_NAN);
}

/* The scales of one chunk of one row. */
static void find_scales(const struct mx_cpu_variant *variant, const struct mx_scales *s, int64_t group, int64_t row,
                        int64_t chunk, int num_blocks, struct row_scales *scales) {
    memset(scales->byte, MX_SCALE_ONE, sizeof scales->byte);
    gather_scales(s, group, row, chunk * MX_CPU_CHUNK_BLOCKS, num_blocks, scales->byte);
    uint8_t suspects = 0;
    for (int b = 0; b < MX_CPU_CHUNK_BLOCKS; b++) { /* a fixed count: a few vector operations */
        suspects |= !is_regular_byte(scales->byte[b]);
    }
    scales->suspect = suspects;
    variant->find_factors(scales->byte, scales->factor);
}

/* Whether `row` has the scales of the row before it. */
static bool shares_scales(const struct mx_scales *s, int64_t row) {
    return s->layout == MX_SCALE_BLOCKS && row % s->block_rows != 0;
}

static bool is_irregular(const uint8_t *elements, const struct row_scales *scales, int num_blocks) {
    for (int b = 0; b < num_blocks && scales->suspect; b++) {
        uint8_t bits = 0;
        for (int i = 0; i < MX_BLOCK; i++) {
            bits |= elements[b * MX_BLOCK + i];
        }
        if (!is_regular_byte(scales->byte[b]) && (bits & 0x7F)) {
            return true;
        }
    }
    return false;
}

/* ---- passes over one block --------------------------------------------------------------------------------- */

static const uint8_t *x_elements(const struct mx_matmul *args, int64_t group, int64_t token, int64_t chunk) {
    return args->x + token * args->x_stride_token + group * args->x_stride_group + chunk * MX_CPU_CHUNK;
}

static const uint8_t *w_elements(const struct mx_matmul *args, int64_t group, int64_t row, int64_t chunk) {
    return args->w + group * args->w_stride_group + row * args->w_stride_row + chunk * MX_CPU_CHUNK;
}

/* x[block of tokens, panel], unless it is there already. */
static void decode_x(const struct plan *plan, struct scratch *scratch, const struct block *block, int64_t panel) {
    const int64_t row_bytes = MX_CPU_ROW * plan->variant->element_bytes;
    if (scratch->group == block->group && scratch->token == block->token && scratch->panel == panel) {
        return;
    }
    for (int64_t chunk = panel * plan->panel_chunks; chunk < panel_end(plan, panel); chunk++) {
        for (int64_t t = 0; t < block->num_tokens; t++) {
            const uint8_t *x_t = x_elements(plan->args, block->group, block->token + t, chunk);
            const int num_blocks = chunk_blocks(plan, chunk);
            int64_t row = (chunk - panel * plan->panel_chunks) * plan->block_tokens + t;
            struct row_scales scales;
            find_scales(plan->variant, &plan->args->x_scale, block->group, block->token + t, chunk, num_blocks,
                        &scales);
            memcpy(scratch->x_rows[row].byte, scales.byte, sizeof scales.byte);
            scratch->x_rows[row].irregular = is_irregular(x_t, &scales, num_blocks);
            plan->variant->decode(x_t, scales.factor, num_blocks, scratch->x + row * row_bytes);
        }
    }
    scratch->group = block->group;
    scratch->token = block->token;
    scratch->panel = panel;
}

/* Asks for the start of the row that follows `row` by a tile, or of its next chunk, so that it arrives while this
 * tile is multiplied. The hardware's prefetcher, which would not guess the jump, takes over from there; asking for
 * all of it fills the queue of outstanding loads and is slower (measured on a Xeon, 5 % at T = 1).
 *
 * Inlined by force: GCC takes a function that only prefetches for one without effects and drops calls of it. */
static inline __attribute__((always_inline)) void prefetch_next(const struct plan *plan, const struct block *block,
                                                                int64_t row, int64_t panel, int64_t chunk) {
    if (chunk + 1 < panel_end(plan, panel)) {
        chunk++;
    } else if (row + MX_CPU_TILE_ROWS < block->row + block->num_rows) {
        row += MX_CPU_TILE_ROWS;
        chunk = panel * plan->panel_chunks;
    } else {
        return;
    }
    const uint8_t *elements = w_elements(plan->args, block->group, row, chunk);
    for (int i = 0; i < PREFETCH_BYTES && i < chunk_blocks(plan, chunk) * MX_BLOCK; i += 64) {
        __builtin_prefetch(elements + i, 0, 3);
    }
}

/* sums of rows [row, row + 6) += dot products of one chunk, for all tokens of the block. */
static void multiply_tile(const struct plan *plan, struct scratch *scratch, const struct block *block, int64_t row,
                          int num_rows, int64_t panel, int64_t chunk) {
    const struct mx_matmul *args = plan->args;
    const struct mx_cpu_variant *variant = plan->variant;
    const int num_blocks = chunk_blocks(plan, chunk);
    const int64_t row_bytes = MX_CPU_ROW * variant->element_bytes;
    const uint8_t *w[MX_CPU_TILE_ROWS];
    struct row_scales scales[MX_CPU_TILE_ROWS], *w_scales[MX_CPU_TILE_ROWS];
    bool w_irregular[MX_CPU_TILE_ROWS], any_irregular = false;

    /* Decode w[6 rows, chunk]; in a tile that N cuts short, the last row stands in for the missing ones */
    for (int n = 0; n < MX_CPU_TILE_ROWS; n++) {
        int64_t row_n = row + min_of(n, num_rows - 1);
        w[n] = w_elements(args, block->group, row_n, chunk);
        prefetch_next(plan, block, row_n, panel, chunk);
        if (n > 0 && shares_scales(&args->w_scale, row_n)) {
            w_scales[n] = w_scales[n - 1];
        } else {
            w_scales[n] = &scales[n];
            find_scales(variant, &args->w_scale, block->group, row_n, chunk, num_blocks, w_scales[n]);
        }
        w_irregular[n] = is_irregular(w[n], w_scales[n], num_blocks);
        any_irregular |= w_irregular[n];
        variant->decode(w[n], w_scales[n]->factor, num_blocks, scratch->w + n * row_bytes);
    }

    float *sums = scratch->sums + (row - block->row) * plan->block_tokens;
    for (int64_t t0 = 0; t0 < block->num_tokens; t0 += variant->max_tokens) {
        float tile[MX_CPU_SUMS];
        const int num_tokens = (int)min_of(variant->max_tokens, block->num_tokens - t0);
        const int64_t x_row = (chunk - panel * plan->panel_chunks) * plan->block_tokens + t0;
        variant->dot(scratch->x + x_row * row_bytes, scratch->w, num_tokens, num_blocks, tile);

        /* Replace the products of irregular rows */
        for (int t = 0; t < num_tokens; t++) {
            const struct x_row *x_t = &scratch->x_rows[x_row + t];
            for (int n = 0; n < num_rows && (x_t->irregular || any_irregular); n++) {
                if (x_t->irregular || w_irregular[n]) {
                    tile[t * MX_CPU_TILE_ROWS + n] =
                        variant->dot_exact(x_elements(args, block->group, block->token + t0 + t, chunk), x_t->byte,
                                           w[n], w_scales[n]->byte, num_blocks);
                }
            }
        }

        /* Step 4 of the order of summation */
        for (int i = 0; i < num_tokens * MX_CPU_TILE_ROWS; i++) {
            sums[t0 * MX_CPU_TILE_ROWS + i] += tile[i];
        }
    }
}

/* sums -> BF16 -> out, or BF16 -> e4m3 and scale bytes -> out. */
static void write_block(const struct plan *plan, const struct scratch *scratch, const struct block *block) {
    const struct mx_matmul *args = plan->args;
    const int64_t num_col_tiles = mx_ceil_div(args->num_groups * args->num_rows / MX_BLOCK, MX_TILE_COLS);
    for (int64_t t = 0; t < block->num_tokens; t++) {
        for (int64_t n = 0; n < block->num_rows; n += MX_CPU_TILE_ROWS) {
            memcpy(scratch->sums_t + n, scratch->sums + n * plan->block_tokens + t * MX_CPU_TILE_ROWS,
                   MX_CPU_TILE_ROWS * sizeof(float));
        }
        int64_t token = block->token + t;
        if (args->out_bf16) {
            plan->variant->round_bf16(scratch->sums_t, block->num_rows,
                                      args->out_bf16 + token * args->out_stride_token +
                                          block->group * args->out_stride_group + block->row);
        } else {
            int64_t col = block->group * args->num_rows + block->row;
            plan->variant->round_bf16(scratch->sums_t, block->num_rows, scratch->z_t);
            mx_cpu_quantize_columns(plan->variant, scratch->z_t, block->num_rows, args->scale_span,
                                    args->out_e4m3 + token * args->out_stride_token + col, args->out_scale, token,
                                    col, num_col_tiles);
        }
    }
}

static void run_block(const struct plan *plan, struct scratch *scratch, const struct block *block) {
    memset(scratch->sums, 0, (size_t)(plan->block_tokens * padded_rows(plan)) * sizeof(float));
    for (int64_t panel = 0; panel * plan->panel_chunks < plan->num_chunks; panel++) {
        decode_x(plan, scratch, block, panel);
        for (int64_t row = block->row; row < block->row + block->num_rows; row += MX_CPU_TILE_ROWS) {
            int num_rows = (int)min_of(MX_CPU_TILE_ROWS, block->row + block->num_rows - row);
            for (int64_t chunk = panel * plan->panel_chunks; chunk < panel_end(plan, panel); chunk++) {
                multiply_tile(plan, scratch, block, row, num_rows, panel, chunk);
            }
        }
    }
    write_block(plan, scratch, block);
}

/* ---- a thread's range of units ------------------------------------------------------------------------------ */

static size_t align_up(size_t bytes) { return (bytes + 63) / 64 * 64; }

/* All of a thread's scratch in one allocation; the caller frees the result. */
static void *allocate_scratch(const struct plan *plan, struct scratch *scratch) {
    const size_t row_bytes = (size_t)(MX_CPU_ROW * plan->variant->element_bytes);
    const size_t x_rows = (size_t)(plan->panel_chunks * plan->block_tokens);
    const size_t x_bytes = align_up(x_rows * row_bytes), w_bytes = align_up(MX_CPU_TILE_ROWS * row_bytes);
    const size_t sums_bytes = align_up((size_t)(plan->block_tokens * padded_rows(plan)) * sizeof(float));
    const size_t sums_t_bytes = align_up((size_t)padded_rows(plan) * sizeof(float));
    const size_t z_bytes = align_up((size_t)plan->block_rows * sizeof(uint16_t));
    const size_t x_rows_bytes = align_up(x_rows * sizeof(struct x_row));
    uint8_t *memory = aligned_alloc(64, x_bytes + w_bytes + sums_bytes + sums_t_bytes + z_bytes + x_rows_bytes);
    if (memory) {
        uint8_t *next = memory;
        scratch->x = next;
        scratch->w = next += x_bytes;
        scratch->sums = (float *)(next += w_bytes);
        scratch->sums_t = (float *)(next += sums_bytes);
        scratch->z_t = (uint16_t *)(next += sums_t_bytes);
        scratch->x_rows = (struct x_row *)(next + z_bytes);
        scratch->group = scratch->token = scratch->panel = -1;
    }
    return memory;
}

static void run_units(int64_t begin, int64_t end, void *ctx) {
    struct plan *plan = ctx;
    struct scratch scratch;
    void *memory = allocate_scratch(plan, &scratch);
    if (!memory) {
        atomic_store(&plan->out_of_memory, true);
        return;
    }
    for (int64_t unit = begin; unit < end;) {
        /* Unit index -> (g, block of tokens, unit of rows), rows fastest; take the rows up to the end of the range */
        int64_t unit_in_rows = unit % plan->num_units;
        int64_t token_block = unit / plan->num_units % plan->num_token_blocks;
        int64_t taken = min_of(plan->num_units - unit_in_rows, end - unit);
        taken = min_of(taken, plan->block_rows / plan->unit_rows);

        struct block block = {
            .group = unit / plan->num_units / plan->num_token_blocks,
            .token = token_block * plan->block_tokens,
            .row = unit_in_rows * plan->unit_rows,
        };
        block.num_tokens = min_of(plan->block_tokens, plan->args->num_tokens - block.token);
        block.num_rows = min_of(taken * plan->unit_rows, plan->args->num_rows - block.row);
        run_block(plan, &scratch, &block);
        unit += taken;
    }
    free(memory);
}

/* ---- entry -------------------------------------------------------------------------------------------------- */

int mx_cpu_matmul(const struct mx_matmul *args, const struct mx_exec *exec) {
    if (args->num_tokens == 0) {
        return MX_OK;
    }
    struct plan plan = {.args = args, .variant = mx_cpu_choose(exec)};
    if (!plan.variant) {
        return MX_UNSUPPORTED;
    }

    /* T: blocks of equal size but the last */
    plan.num_token_blocks = mx_ceil_div(args->num_tokens, MAX_BLOCK_TOKENS);
    plan.block_tokens = mx_ceil_div(args->num_tokens, plan.num_token_blocks);
    plan.num_token_blocks = mx_ceil_div(args->num_tokens, plan.block_tokens);
    /* N: units hold whole spans, so that one thread sees all columns of a scale */
    plan.unit_rows = args->out_e4m3 ? max_of(MX_BLOCK, args->scale_span) : MX_BLOCK;
    plan.num_units = mx_ceil_div(args->num_rows, plan.unit_rows);
    plan.block_rows = min_of(max_of(1, BLOCK_ROWS / plan.unit_rows), plan.num_units) * plan.unit_rows;
    /* K: as many chunks as fit */
    plan.num_chunks = mx_ceil_div(args->k, MX_CPU_CHUNK);
    int64_t fitting = PANEL_BYTES / (plan.block_tokens * MX_CPU_ROW * plan.variant->element_bytes);
    plan.panel_chunks = max_of(1, min_of(plan.num_chunks, fitting));

    /* Scale bytes beyond the tokens and columns are 0x00; the others are written below */
    if (args->out_e4m3) {
        memset(args->out_scale, 0,
               (size_t)mx_f8_128x4_bytes(args->num_tokens, args->num_groups * args->num_rows / MX_BLOCK));
    }

    int64_t unit_products = plan.block_tokens * plan.unit_rows * args->k;
    mx_cpu_parallel_for(exec, args->num_groups * plan.num_token_blocks * plan.num_units,
                        mx_ceil_div(MIN_PIECE_PRODUCTS, max_of(1, unit_products)), run_units, &plan);
    if (atomic_load(&plan.out_of_memory)) {
        return mx_cpu_fail(exec, MX_FAILED, "matmul: no memory for the scratch of T = %lld tokens, K = %lld",
                           (long long)args->num_tokens, (long long)args->k);
    }
    return MX_OK;
}
