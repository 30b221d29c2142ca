/* plan.c - see plan.h. */
#include "plan.h"

#define BLOCK_K          128
#define BAND_ROWS        2048 /* tokens per band: 512 or 8192 cost up to 10 % (measured) */
#define MAXIMA_BYTES     1024 /* of sm90_gemm_pair.cu */
#define HBM_BYTES_PER_NS 4100 /* an H200 reading weights once (measured) */
#define START_NS         2500 /* launch, first loads and last stores (measured: 2 to 4 us) */
#define EXCHANGE_NS      2500 /* two blocks adding their sums (measured) */
#define SPLIT_PENALTY    110  /* %: what a kernel with two chains must save, since it costs batch invariance */

/* clang-format off */
const struct mx_gemm_config mx_gemm_configs[] = {
    /* kernel                             form                output  tile        stages  warpgroups  cluster  split  ns a stage: alone, busy */
    {"mx_sm90_gemm_wide_256x1_bf16",       MX_FORM_WIDE,       0,      128, 256,   4,      2,          1, 1,    1,     620,  745},
    {"mx_sm90_gemm_wide_256x2_bf16",       MX_FORM_WIDE,       0,      128, 256,   4,      2,          2, 1,    1,     620,  735},
    {"mx_sm90_gemm_wide_160x1_bf16",       MX_FORM_WIDE,       0,      128, 160,   6,      2,          1, 1,    1,     340,  480},
    {"mx_sm90_gemm_wide_160x2_bf16",       MX_FORM_WIDE,       0,      128, 160,   6,      2,          2, 1,    1,     340,  475},
    {"mx_sm90_gemm_wide_256x1_mx32",       MX_FORM_WIDE,       32,     128, 256,   4,      2,          1, 1,    1,     625,  750},
    {"mx_sm90_gemm_wide_256x2_mx32",       MX_FORM_WIDE,       32,     128, 256,   4,      2,          2, 1,    1,     625,  740},
    {"mx_sm90_gemm_wide_256x1_mx128",      MX_FORM_WIDE,       128,    128, 256,   4,      2,          1, 1,    1,     625,  750},
    {"mx_sm90_gemm_wide_256x2_mx128",      MX_FORM_WIDE,       128,    128, 256,   4,      2,          2, 1,    1,     625,  740},
    {"mx_sm90_gemm_wide_256x1_mx256",      MX_FORM_WIDE,       256,    128, 256,   4,      2,          1, 1,    1,     625,  750},
    {"mx_sm90_gemm_wide_256x2_mx256",      MX_FORM_WIDE,       256,    128, 256,   4,      2,          2, 1,    1,     625,  740},
    {"mx_sm90_gemm_pair_64x128_bf16",      MX_FORM_WIDE,       0,      64,  128,   8,      2,          1, 2,    1,     50,   415},
    {"mx_sm90_gemm_pair_64x128_mx32",      MX_FORM_WIDE,       32,     64,  128,   8,      2,          1, 2,    1,     50,   415},
    {"mx_sm90_gemm_pair_64x128_mx128",     MX_FORM_WIDE,       128,    64,  128,   8,      2,          1, 2,    1,     50,   415},
    {"mx_sm90_gemm_pair_64x128_mx256",     MX_FORM_WIDE,       256,    64,  128,   8,      2,          1, 2,    1,     50,   415},
    {"mx_sm90_gemm_pair_128x128_bf16",     MX_FORM_WIDE,       0,      128, 128,   6,      2,          1, 2,    1,     250,  510},
    {"mx_sm90_gemm_pair_128x128_mx32",     MX_FORM_WIDE,       32,     128, 128,   6,      2,          1, 2,    1,     250,  510},
    {"mx_sm90_gemm_pair_128x128_mx128",    MX_FORM_WIDE,       128,    128, 128,   6,      2,          1, 2,    1,     250,  510},
    {"mx_sm90_gemm_pair_128x128_mx256",    MX_FORM_WIDE,       256,    128, 128,   6,      2,          1, 2,    1,     250,  510},
    {"mx_sm90_gemm_split_128x80_bf16",     MX_FORM_WIDE,       0,      128, 80,    8,      2,          1, 1,    2,     140,  370},
    {"mx_sm90_gemm_split_128x128_bf16",    MX_FORM_WIDE,       0,      128, 128,   6,      2,          1, 1,    2,     260,  600},
    {"mx_sm90_gemm_split_128x160_bf16",    MX_FORM_WIDE,       0,      128, 160,   6,      2,          1, 1,    2,     340,  600},
    {"mx_sm90_gemm_split_128x256_bf16",    MX_FORM_WIDE,       0,      128, 256,   4,      2,          1, 1,    2,     560,  740},
    {"mx_sm90_gemm_split_64x256_mx32",     MX_FORM_WIDE,       32,     64,  256,   5,      2,          1, 1,    2,     300,  780},
    {"mx_sm90_gemm_split_64x256_mx128",    MX_FORM_WIDE,       128,    64,  256,   5,      2,          1, 1,    2,     300,  780},
    {"mx_sm90_gemm_split_64x256_mx256",    MX_FORM_WIDE,       256,    64,  256,   5,      2,          1, 1,    2,     300,  780},
    {"mx_sm90_gemm_split_128x256_mx32",    MX_FORM_WIDE,       32,     128, 256,   4,      2,          1, 1,    2,     580,  770},
    {"mx_sm90_gemm_split_128x256_mx128",   MX_FORM_WIDE,       128,    128, 256,   4,      2,          1, 1,    2,     580,  770},
    {"mx_sm90_gemm_split_128x256_mx256",   MX_FORM_WIDE,       256,    128, 256,   4,      2,          1, 1,    2,     580,  770},
    {"mx_sm90_gemm_per32_bf16",            MX_FORM_PER32,      0,      192, 128,   5,      3,          1, 1,    1,     1150, 1150},
    {"mx_sm90_gemm_per32_mx32",            MX_FORM_PER32,      32,     192, 128,   5,      3,          1, 1,    1,     1150, 1150},
    {"mx_sm90_gemm_per32_mx128",           MX_FORM_PER32,      128,    192, 128,   5,      3,          1, 1,    1,     1150, 1150},
    {"mx_sm90_gemm_per32_mx256",           MX_FORM_PER32,      256,    128, 256,   4,      2,          1, 1,    1,     1690, 1690},
    {"mx_sm90_gemm_per32_rows_bf16",       MX_FORM_PER32_ROWS, 0,      128, 128,   5,      2,          1, 1,    1,     1360, 1360},
    {"mx_sm90_gemm_per32_rows_mx32",       MX_FORM_PER32_ROWS, 32,     128, 128,   5,      2,          1, 1,    1,     1360, 1360},
    {"mx_sm90_gemm_per32_rows_mx128",      MX_FORM_PER32_ROWS, 128,    128, 128,   5,      2,          1, 1,    1,     1360, 1360},
    {"mx_sm90_gemm_per32_rows_mx256",      MX_FORM_PER32_ROWS, 256,    128, 256,   4,      2,          1, 1,    1,     2820, 2820},
};
/* clang-format on */
const int mx_num_gemm_configs = sizeof mx_gemm_configs / sizeof mx_gemm_configs[0];

enum mx_gemm_form mx_gemm_form_of(const struct mx_matmul *args) {
    const struct mx_scales *w = &args->w_scale;
    if (w->layout != MX_SCALE_BLOCKS || w->block_rows % MX_BLOCK != 0 || (w->block_rows & (w->block_rows - 1)) != 0) {
        return MX_FORM_PER32_ROWS;
    }
    return w->block_cols >= args->k && args->x_span % 256 == 0 && args->k % 256 == 0 && args->k >= 512
               ? MX_FORM_WIDE
               : MX_FORM_PER32;
}

struct mx_gemm_problem mx_gemm_problem_of(const struct mx_matmul *args, uint32_t flags) {
    return (struct mx_gemm_problem){
        .num_tokens = args->num_tokens,
        .num_groups = args->num_groups,
        .num_rows = args->num_rows,
        .k = args->k,
        .form = mx_gemm_form_of(args),
        .output = args->out_e4m3 != NULL ? (int32_t)args->scale_span : 0,
        .batch_invariant = (flags & MX_FLAG_BATCH_INVARIANT) != 0,
    };
}

/* Operand stages and their barriers; the per-32 kernels keep FP32 factors beside them. */
static int64_t shared_bytes(const struct mx_gemm_config *config) {
    int64_t stage = (int64_t)(config->block_m + config->block_n) * BLOCK_K + 16;
    if (config->form != MX_FORM_WIDE) {
        int64_t w_scales = config->form == MX_FORM_PER32_ROWS ? config->block_n : config->block_n / MX_BLOCK;
        stage += (config->block_m + w_scales) * (BLOCK_K / MX_BLOCK) * 4;
    }
    return config->stages * stage + (config->cluster_n > 1 ? MAXIMA_BYTES : 0);
}

bool mx_plan_gemm_with(const struct mx_gemm_problem *problem, const struct mx_gemm_config *config, int num_sms,
                       int smem_bytes, struct mx_gemm_plan *plan) {
    const int64_t cluster = config->cluster_m * config->cluster_n * config->split;
    /* An MXFP8 result's padding rows are part of its scales, so tiles cover them too. */
    const int64_t rows =
        problem->output ? mx_ceil_div(problem->num_tokens, MX_TILE_ROWS) * MX_TILE_ROWS : problem->num_tokens;
    const int64_t num_m = mx_ceil_div(rows, config->block_m * config->cluster_m);
    const int64_t num_n = mx_ceil_div(problem->num_rows, config->block_n * config->cluster_n);
    const int64_t num_tiles = problem->num_groups * num_m * num_n, slots = num_sms / cluster;
    const int64_t bytes = shared_bytes(config), num_k = mx_ceil_div(problem->k, BLOCK_K);
    if (bytes > smem_bytes || slots < 1 || num_tiles > INT32_MAX || num_k > INT32_MAX / BLOCK_K) {
        return false;
    }
    if ((config->split > 1 || config->cluster_n > 1) && num_tiles > slots) {
        return false; /* one tile per block */
    }
    if (config->split > 1 && problem->batch_invariant) {
        return false; /* two chains */
    }
    const int64_t band = BAND_ROWS / (config->block_m * config->cluster_m);
    /* Blocks slow each other down, because they share the way from L2: between the two measured times by their number. */
    const int64_t waves = mx_ceil_div(num_tiles, slots), active = num_tiles < slots ? num_tiles * cluster : num_sms;
    const int64_t stage_ns = config->alone_ns + (config->busy_ns - config->alone_ns) * active / num_sms;
    const int64_t exchange_ns = config->split > 1 ? EXCHANGE_NS : 0;
    const int64_t multiply_ns = waves * num_k * stage_ns / config->split;
    const int64_t read_ns = problem->num_groups * problem->num_rows * problem->k / HBM_BYTES_PER_NS;
    const int64_t estimate = START_NS + exchange_ns + (multiply_ns > read_ns ? multiply_ns : read_ns);
    *plan = (struct mx_gemm_plan){
        .config = config,
        .tiling = {.num_m = (int32_t)num_m,
                   .num_n = (int32_t)num_n,
                   .num_tiles = (int32_t)num_tiles,
                   .band = (int32_t)band},
        .grid = (uint32_t)((num_tiles < slots ? num_tiles : slots) * cluster),
        .block = (uint32_t)(128 * (config->warpgroups + 1)),
        .cluster = (uint32_t)cluster,
        .smem_bytes = (uint32_t)bytes,
        .estimated_ns = estimate < INT32_MAX ? (int32_t)estimate : INT32_MAX,
    };
    return true;
}

/* What plans are compared by. */
static int64_t weighted_ns(const struct mx_gemm_plan *plan) {
    return (int64_t)plan->estimated_ns * (plan->config->split > 1 ? SPLIT_PENALTY : 100);
}

/* The quickest kernel for `problem` among those with that split; any if split is 0. */
static bool find_quickest(const struct mx_gemm_problem *problem, int split, int num_sms, int smem_bytes,
                          struct mx_gemm_plan *plan) {
    bool found = false;
    for (int i = 0; i < mx_num_gemm_configs; i++) {
        const struct mx_gemm_config *config = &mx_gemm_configs[i];
        struct mx_gemm_plan candidate;
        if (config->form == problem->form && config->output == problem->output &&
            (split == 0 || config->split == split) &&
            mx_plan_gemm_with(problem, config, num_sms, smem_bytes, &candidate) &&
            (!found || weighted_ns(&candidate) < weighted_ns(plan))) {
            *plan = candidate;
            found = true;
        }
    }
    return found;
}

bool mx_plan_gemm(const struct mx_gemm_problem *problem, int num_sms, int smem_bytes, struct mx_gemm_plan *plan) {
    /* A BF16 result and its quantisation must come from the same sums, so the BF16 kernels decide whether K is split. */
    struct mx_gemm_problem bf16 = *problem;
    bf16.output = 0;
    return find_quickest(&bf16, 0, num_sms, smem_bytes, plan) &&
           find_quickest(problem, plan->config->split, num_sms, smem_bytes, plan);
}
