/* sm100_plan.c - see sm100_plan.h. */
#include "sm100_plan.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* ---- the model ------------------------------------------------------------------------------------------------- */

static int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

int64_t mx_sm100_stage_cycles(int ctas, int width) {
    const int64_t x_rows = width / ctas;
    const int64_t product = 4 * max64(width / 2, (MX_SM100_ROWS + x_rows) * 32 / 128);
    const int64_t bytes = MX_SM100_W_BYTES + x_rows * MX_SM100_K + MX_TILE_BYTES * (1 + mx_ceil_div(width, 128));
    return max64(product, bytes / MX_SM100_MODEL_SM_BYTES);
}

/* Clocks that HBM needs for what must be read and written at least once. */
static int64_t memory_cycles(const struct mx_sm100_problem *p) {
    const int64_t weights = p->num_groups * p->num_rows * p->k, tokens = p->num_tokens * p->num_groups * p->k;
    const int64_t results = p->num_tokens * p->num_groups * p->num_rows;
    return ((weights + tokens) * 33 / 32 + 2 * results) / MX_SM100_MODEL_HBM_BYTES;
}

/* ---- cutting --------------------------------------------------------------------------------------------------- */

static int64_t ceil16(int64_t n) { return (n + 15) / 16 * 16; }

/* Cuts the tokens of `num_rows` row tiles into at most `num_t` tiles. */
static void cut_tokens(struct mx_sm100_cut *cut, int64_t num_tokens, int64_t first_row, int64_t num_rows,
                       int64_t num_t) {
    cut->first_row = (int32_t)first_row;
    cut->num_rows = (int32_t)num_rows;
    cut->width = (int32_t)ceil16(mx_ceil_div(num_tokens, num_t));
    cut->num_t = (int32_t)mx_ceil_div(num_tokens, cut->width);
    cut->num_tiles = cut->num_rows * cut->num_t;
}

/* Cuts all row tiles so that `blocks` blocks get `waves` tiles each, as nearly as widths of 16 allow: some row
 * tiles are cut into c token tiles, the others into c + 1. False if a tile would be too wide. */
static int cut_evenly(struct mx_sm100_tiling *tiling, int64_t num_tokens, int64_t row_tiles, int64_t blocks,
                      int64_t waves) {
    const int64_t most = mx_ceil_div(num_tokens, 16), wanted = waves * blocks;
    const int64_t c = min64(most, max64(1, wanted / row_tiles));
    const int64_t finer = c < most ? max64(0, min64(row_tiles, wanted - c * row_tiles)) : 0;
    memset(tiling->cut, 0, sizeof tiling->cut);
    cut_tokens(&tiling->cut[0], num_tokens, 0, row_tiles, c);
    if (tiling->cut[0].width > MX_SM100_MAX_TOKENS) {
        return 0;
    }
    if (finer > 0) {
        struct mx_sm100_cut narrow;
        cut_tokens(&narrow, num_tokens, row_tiles - finer, finer, c + 1);
        if (narrow.width < tiling->cut[0].width) {
            cut_tokens(&tiling->cut[0], num_tokens, 0, row_tiles - finer, c);
            tiling->cut[1] = narrow;
            if (finer == row_tiles) {
                tiling->cut[0] = narrow;
                memset(&tiling->cut[1], 0, sizeof tiling->cut[1]);
            }
        }
    }
    return 1;
}

/* Tiles of block b out of `blocks` among those from `begin` to `end`. */
static int64_t tiles_of(int64_t b, int64_t blocks, int64_t begin, int64_t end) {
    const int64_t up_to_end = end > b ? mx_ceil_div(end - b, blocks) : 0;
    const int64_t up_to_begin = begin > b ? mx_ceil_div(begin - b, blocks) : 0;
    return up_to_end - up_to_begin;
}

/* Clocks of the busiest persistent block. */
static int64_t busiest_cycles(const struct mx_sm100_tiling *tiling, int64_t blocks, int ctas, int64_t num_k) {
    int64_t most = 0, cost[2] = {0, 0}, last_width = 0;
    const int64_t first = tiling->cut[0].num_tiles, all = first + tiling->cut[1].num_tiles;
    for (int i = 0; i < 2; i++) {
        if (tiling->cut[i].num_tiles > 0) {
            cost[i] = max64(num_k * mx_sm100_stage_cycles(ctas, tiling->cut[i].width),
                            (int64_t)tiling->cut[i].width * MX_SM100_MODEL_TOKEN) +
                      MX_SM100_MODEL_TILE_GAP;
            last_width = tiling->cut[i].width;
        }
    }
    /* Counts change only where the blocks of the last round of a cut end. */
    const int64_t candidates[] = {0, first % blocks, all % blocks};
    for (int i = 0; i < 3; i++) {
        const int64_t b = candidates[i];
        most = max64(most, tiles_of(b, blocks, 0, first) * cost[0] + tiles_of(b, blocks, first, all) * cost[1]);
    }
    return MX_SM100_MODEL_START + most + last_width * MX_SM100_MODEL_TOKEN;
}

/* ---- plans ----------------------------------------------------------------------------------------------------- */

__attribute__((format(printf, 3, 4))) static int refuse(char *err, size_t n, const char *format, ...) {
    va_list args;
    va_start(args, format);
    if (err != NULL && n > 0) {
        vsnprintf(err, n, format, args);
    }
    va_end(args);
    return MX_UNSUPPORTED;
}

static uint32_t smem_of(const struct mx_sm100_plan *plan, int num_stages) {
    const int partial_bytes = mx_sm100_partial_bytes(plan->tiling.cut[0].width, plan->split);
    return mx_sm100_smem_map(num_stages, plan->x_bytes, plan->x_tiles, partial_bytes).total;
}

/* As many stages as fit, at most `wanted`; 0 if not even one does. */
static int fit_stages(const struct mx_sm100_plan *plan, int wanted, uint32_t smem_bytes) {
    int num = wanted < MX_SM100_MAX_STAGES ? wanted : MX_SM100_MAX_STAGES;
    while (num > 0 && smem_of(plan, num) > smem_bytes) {
        num--;
    }
    return num;
}

/* What follows from the widths. */
static void complete_tiles(struct mx_sm100_plan *plan) {
    const struct mx_sm100_cut *cut = plan->tiling.cut;
    const int widest = cut[0].width > cut[1].width ? cut[0].width : cut[1].width;
    plan->x_bytes = widest / plan->ctas * MX_SM100_K;
    plan->x_tiles = (widest + 127) / 128;
}

static int plan_split(const struct mx_sm100_problem *p, int num_sms, uint32_t smem_bytes, struct mx_sm100_plan *plan,
                      char *err, size_t n) {
    enum { MIN_STAGES = 3, MAX_TOKENS = 128, MAX_SPLIT = 8 /* blocks of a portable cluster */ };
    const int64_t row_tiles = p->num_groups * mx_ceil_div(p->num_rows, MX_SM100_ROWS);
    const int64_t num_k = mx_ceil_div(p->k, MX_SM100_K), token_tiles = mx_ceil_div(p->num_tokens, MAX_TOKENS);
    /* Two blocks of an SM, and what the system keeps for each, share its 228 KB: 113 KB each. */
    const uint32_t half = smem_bytes / 2 - 512;
    int64_t own_k, resident, rounds;

    plan->ctas = 1;
    plan->split = (int32_t)max64(1, min64(min64(MAX_SPLIT, num_k), num_sms / row_tiles));
    plan->tiling.rows_per_group = (int32_t)(row_tiles / p->num_groups);
    plan->tiling.band = plan->tiling.rows_per_group;
    cut_tokens(&plan->tiling.cut[0], p->num_tokens, 0, row_tiles, token_tiles);
    complete_tiles(plan);

    own_k = mx_ceil_div(num_k, plan->split);
    plan->num_stages = fit_stages(plan, (int)min64(own_k, MX_SM100_MAX_STAGES), half);
    if (plan->num_stages < min64(own_k, MIN_STAGES)) {
        plan->num_stages = fit_stages(plan, (int)min64(own_k, MX_SM100_MAX_STAGES), smem_bytes);
    }
    if (plan->num_stages < min64(own_k, 2)) {
        return refuse(err, n, "two stages need %u bytes of shared memory, the device gives %u", smem_of(plan, 2),
                      smem_bytes);
    }
    plan->smem_bytes = smem_of(plan, plan->num_stages);
    plan->acc_count = 1;
    plan->scale_column = plan->tiling.cut[0].width;
    plan->tmem_columns = 32;
    while (plan->tmem_columns < plan->scale_column + 2 * MX_SM100_SCALE_COLUMNS) {
        plan->tmem_columns *= 2;
    }
    plan->cluster = (uint32_t)plan->split;
    plan->grid = (uint32_t)(plan->tiling.cut[0].num_tiles * plan->split);

    resident = plan->smem_bytes <= half ? 2 : 1;
    rounds = mx_ceil_div((int64_t)plan->grid, resident * num_sms);
    /* A full round of two blocks per SM shares the SM. */
    rounds = resident == 2 && plan->grid > (uint32_t)num_sms ? 2 * rounds : rounds;
    plan->cycles = MX_SM100_MODEL_START +
                   rounds * (own_k * mx_sm100_stage_cycles(1, plan->tiling.cut[0].width) + MX_SM100_MODEL_FINISH);
    plan->cycles += plan->split > 1 ? 500 + plan->tiling.cut[0].width * 8 : 0; /* exchange */
    plan->cycles += mx_ceil_div(plan->tiling.cut[0].width, plan->split) * MX_SM100_MODEL_TOKEN;
    plan->cycles = max64(plan->cycles, MX_SM100_MODEL_START + MX_SM100_MODEL_FINISH + memory_cycles(p));
    return MX_OK;
}

static int plan_persistent(const struct mx_sm100_problem *p, int num_sms, uint32_t smem_bytes, int ctas, int waves,
                           struct mx_sm100_plan *plan, char *err, size_t n) {
    const int64_t rows_per_group = mx_ceil_div(p->num_rows, MX_SM100_ROWS * ctas),
                  num_k = mx_ceil_div(p->k, MX_SM100_K);
    const int64_t row_tiles = p->num_groups * rows_per_group, blocks = num_sms / ctas;
    const int64_t least = mx_ceil_div(row_tiles * mx_ceil_div(p->num_tokens, MX_SM100_MAX_TOKENS), blocks);
    int64_t best = -1;

    plan->ctas = ctas;
    plan->split = 1;
    for (int64_t w = waves > 0 ? waves : least; w <= (waves > 0 ? waves : least + 3); w++) {
        struct mx_sm100_tiling tiling = {.rows_per_group = (int32_t)rows_per_group,
                                         .band = (int32_t)min64(rows_per_group, 32)};
        if (cut_evenly(&tiling, p->num_tokens, row_tiles, blocks, w)) {
            const int64_t cycles = busiest_cycles(&tiling, blocks, ctas, num_k);
            if (best < 0 || cycles < best) {
                best = cycles;
                plan->tiling = tiling;
            }
        }
    }
    if (best < 0) {
        return refuse(err, n, "no cut of %lld tokens into %d tiles per block", (long long)p->num_tokens, waves);
    }
    complete_tiles(plan);
    plan->num_stages = fit_stages(plan, MX_SM100_MAX_STAGES, smem_bytes);
    if (plan->num_stages < 2) {
        return refuse(err, n, "two stages need %u bytes of shared memory, the device gives %u", smem_of(plan, 2),
                      smem_bytes);
    }
    plan->smem_bytes = smem_of(plan, plan->num_stages);
    plan->acc_count = 2;
    plan->scale_column = MX_SM100_SCALE_COLUMN;
    plan->tmem_columns = 512;
    plan->cluster = (uint32_t)ctas;
    plan->grid = (uint32_t)(ctas * min64(blocks, plan->tiling.cut[0].num_tiles + plan->tiling.cut[1].num_tiles));
    plan->cycles = max64(best, MX_SM100_MODEL_START + MX_SM100_MODEL_FINISH + memory_cycles(p));
    return MX_OK;
}

int mx_sm100_make_plan_form(const struct mx_sm100_problem *problem, int num_sms, int smem_bytes, int form, int waves,
                            struct mx_sm100_plan *plan, char *err, size_t n) {
    const int64_t row_tiles = problem->num_groups * mx_ceil_div(problem->num_rows, MX_SM100_ROWS);
    const int64_t limit = (int64_t)1 << 30;
    const uint32_t usable = (uint32_t)smem_bytes - 1024; /* a block's system share may be counted in */
    memset(plan, 0, sizeof *plan);
    plan->form = form;
    if (problem->num_tokens >= limit || problem->k >= limit || problem->num_rows * problem->num_groups >= limit ||
        row_tiles * mx_ceil_div(problem->num_tokens, 16) >= limit) {
        return refuse(err, n, "x: sizes [%lld, %lld, %lld] by %lld rows are beyond 32-bit tile numbers",
                      (long long)problem->num_tokens, (long long)problem->num_groups, (long long)problem->k,
                      (long long)problem->num_rows);
    }
    if (form == MX_SM100_SPLIT) {
        return plan_split(problem, num_sms, usable, plan, err, n);
    }
    return plan_persistent(problem, num_sms, usable, form == MX_SM100_PAIR ? 2 : 1, waves, plan, err, n);
}

int mx_sm100_make_plan(const struct mx_sm100_problem *problem, int num_sms, int smem_bytes, uint32_t flags,
                       struct mx_sm100_plan *plan, char *err, size_t n) {
    const int persistent = flags & MX_FLAG_NO_PAIRS || num_sms < 2 ? MX_SM100_SINGLE : MX_SM100_PAIR;
    struct mx_sm100_plan other;
    int code = mx_sm100_make_plan_form(problem, num_sms, smem_bytes, MX_SM100_SPLIT, 0, plan, err, n);
    if (flags & MX_FLAG_BATCH_INVARIANT || (code == MX_OK && problem->num_tokens <= MX_SM100_ALWAYS_SPLIT)) {
        return code;
    }
    if (mx_sm100_make_plan_form(problem, num_sms, smem_bytes, persistent, 0, &other, err, n) == MX_OK &&
        (code != MX_OK || other.cycles < plan->cycles)) {
        *plan = other;
        code = MX_OK;
    }
    return code;
}
