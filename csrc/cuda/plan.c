/* plan.c - see plan.h. */
#include "plan.h"

#define BLOCK_K      128
#define BAND_ROWS    2048 /* tokens per band: 512 or 8192 cost up to 10 % (measured) */
#define MAXIMA_BYTES 1024 /* of sm90_gemm_cluster.cu */

/* What the estimates go by: fitted to 158 times of 39 sizes of wo_a and wo_b (65 to 512 tokens) on an H200, which they meet
 * within 9 % (rms); the kernel they choose was at most 6.2 % behind the best one there. */
#define START_NS         3000 /* launch, first loads and last stores */
#define EXCHANGE_NS      2200 /* blocks adding their sums */
#define HBM_BYTES_PER_NS 4100 /* reading weights once */
#define HBM_SHARE 21 /* %: what of that time does not disappear behind the rest; twice if several tiles read them */
#define L2_BYTES_PER_NS 14100 /* from L2 to all SMs */
#define OVERLAP         5 / 9 /* how much of the shorter of multiplying and loading shows */
#define SPLIT_PENALTY   110   /* %: what a kernel with several chains must save, since it costs batch invariance */
#define NARROW_ROWS     2048  /* weight rows up to which a product's result may well be quantised: wo_a, not wo_b */

/* clang-format off */
const struct mx_gemm_config mx_gemm_configs[] = {
    /* kernel                              form                output  tile         stages  threads  cluster  split  ns a stage */
    {"mx_sm90_gemm_wide_256x1_bf16",        MX_FORM_WIDE,       0,      128, 256,   4,      384,     1, 1,    1,     500},
    {"mx_sm90_gemm_wide_256x2_bf16",        MX_FORM_WIDE,       0,      128, 256,   4,      384,     2, 1,    1,     510},
    {"mx_sm90_gemm_wide_160x1_bf16",        MX_FORM_WIDE,       0,      128, 160,   6,      384,     1, 1,    1,     250},
    {"mx_sm90_gemm_wide_160x2_bf16",        MX_FORM_WIDE,       0,      128, 160,   6,      384,     2, 1,    1,     315},
    {"mx_sm90_gemm_wide_256x1_mx32",        MX_FORM_WIDE,       32,     128, 256,   4,      384,     1, 1,    1,     505},
    {"mx_sm90_gemm_wide_256x2_mx32",        MX_FORM_WIDE,       32,     128, 256,   4,      384,     2, 1,    1,     515},
    {"mx_sm90_gemm_wide_256x1_mx128",       MX_FORM_WIDE,       128,    128, 256,   4,      384,     1, 1,    1,     505},
    {"mx_sm90_gemm_wide_256x2_mx128",       MX_FORM_WIDE,       128,    128, 256,   4,      384,     2, 1,    1,     515},
    {"mx_sm90_gemm_wide_256x1_mx256",       MX_FORM_WIDE,       256,    128, 256,   4,      384,     1, 1,    1,     505},
    {"mx_sm90_gemm_wide_256x2_mx256",       MX_FORM_WIDE,       256,    128, 256,   4,      384,     2, 1,    1,     515},
    {"mx_sm90_gemm_64x128x2_s1_bf16",       MX_FORM_WIDE,       0,      64,  128,   6,      288,     1, 2,    1,     190},
    {"mx_sm90_gemm_64x128x2_s1_mx32",       MX_FORM_WIDE,       32,     64,  128,   6,      288,     1, 2,    1,     190},
    {"mx_sm90_gemm_64x128x2_s1_mx128",      MX_FORM_WIDE,       128,    64,  128,   6,      288,     1, 2,    1,     190},
    {"mx_sm90_gemm_64x128x2_s1_mx256",      MX_FORM_WIDE,       256,    64,  128,   6,      288,     1, 2,    1,     190},
    {"mx_sm90_gemm_64x128x2_s2_bf16",       MX_FORM_WIDE,       0,      64,  128,   6,      288,     1, 2,    2,     190},
    {"mx_sm90_gemm_64x128x2_s2_mx32",       MX_FORM_WIDE,       32,     64,  128,   6,      288,     1, 2,    2,     190},
    {"mx_sm90_gemm_64x128x2_s2_mx128",      MX_FORM_WIDE,       128,    64,  128,   6,      288,     1, 2,    2,     190},
    {"mx_sm90_gemm_64x128x2_s2_mx256",      MX_FORM_WIDE,       256,    64,  128,   6,      288,     1, 2,    2,     190},
    {"mx_sm90_gemm_64x128x2_s4_bf16",       MX_FORM_WIDE,       0,      64,  128,   6,      288,     1, 2,    4,     190},
    {"mx_sm90_gemm_64x128x2_s4_mx32",       MX_FORM_WIDE,       32,     64,  128,   6,      288,     1, 2,    4,     190},
    {"mx_sm90_gemm_64x128x2_s4_mx128",      MX_FORM_WIDE,       128,    64,  128,   6,      288,     1, 2,    4,     190},
    {"mx_sm90_gemm_64x128x2_s4_mx256",      MX_FORM_WIDE,       256,    64,  128,   6,      288,     1, 2,    4,     190},
    {"mx_sm90_gemm_128x128x2_s1_bf16",      MX_FORM_WIDE,       0,      128, 128,   6,      288,     1, 2,    1,     305},
    {"mx_sm90_gemm_128x128x2_s1_mx32",      MX_FORM_WIDE,       32,     128, 128,   6,      288,     1, 2,    1,     305},
    {"mx_sm90_gemm_128x128x2_s1_mx128",     MX_FORM_WIDE,       128,    128, 128,   6,      288,     1, 2,    1,     305},
    {"mx_sm90_gemm_128x128x2_s1_mx256",     MX_FORM_WIDE,       256,    128, 128,   6,      288,     1, 2,    1,     305},
    {"mx_sm90_gemm_128x128x2_s2_bf16",      MX_FORM_WIDE,       0,      128, 128,   6,      288,     1, 2,    2,     305},
    {"mx_sm90_gemm_128x128x2_s2_mx32",      MX_FORM_WIDE,       32,     128, 128,   6,      288,     1, 2,    2,     305},
    {"mx_sm90_gemm_128x128x2_s2_mx128",     MX_FORM_WIDE,       128,    128, 128,   6,      288,     1, 2,    2,     305},
    {"mx_sm90_gemm_128x128x2_s2_mx256",     MX_FORM_WIDE,       256,    128, 128,   6,      288,     1, 2,    2,     305},
    {"mx_sm90_gemm_128x128x2_s4_bf16",      MX_FORM_WIDE,       0,      128, 128,   6,      288,     1, 2,    4,     305},
    {"mx_sm90_gemm_128x128x2_s4_mx32",      MX_FORM_WIDE,       32,     128, 128,   6,      288,     1, 2,    4,     305},
    {"mx_sm90_gemm_128x128x2_s4_mx128",     MX_FORM_WIDE,       128,    128, 128,   6,      288,     1, 2,    4,     305},
    {"mx_sm90_gemm_128x128x2_s4_mx256",     MX_FORM_WIDE,       256,    128, 128,   6,      288,     1, 2,    4,     305},
    {"mx_sm90_gemm_192x128x2_s1_bf16",      MX_FORM_WIDE,       0,      192, 128,   5,      512,     1, 2,    1,     440},
    {"mx_sm90_gemm_192x128x2_s1_mx32",      MX_FORM_WIDE,       32,     192, 128,   5,      512,     1, 2,    1,     440},
    {"mx_sm90_gemm_192x128x2_s1_mx128",     MX_FORM_WIDE,       128,    192, 128,   5,      512,     1, 2,    1,     440},
    {"mx_sm90_gemm_192x128x2_s1_mx256",     MX_FORM_WIDE,       256,    192, 128,   5,      512,     1, 2,    1,     440},
    {"mx_sm90_gemm_128x80x1_s2_bf16",       MX_FORM_WIDE,       0,      128, 80,    6,      288,     1, 1,    2,     120},
    {"mx_sm90_gemm_128x128x1_s2_bf16",      MX_FORM_WIDE,       0,      128, 128,   6,      288,     1, 1,    2,     285},
    {"mx_sm90_gemm_128x160x1_s2_bf16",      MX_FORM_WIDE,       0,      128, 160,   6,      384,     1, 1,    2,     255},
    {"mx_sm90_gemm_128x256x1_s2_bf16",      MX_FORM_WIDE,       0,      128, 256,   4,      384,     1, 1,    2,     540},
    {"mx_sm90_gemm_per32_bf16",             MX_FORM_PER32,      0,      192, 128,   5,      512,     1, 1,    1,     1150},
    {"mx_sm90_gemm_per32_mx32",             MX_FORM_PER32,      32,     192, 128,   5,      512,     1, 1,    1,     1150},
    {"mx_sm90_gemm_per32_mx128",            MX_FORM_PER32,      128,    192, 128,   5,      512,     1, 1,    1,     1150},
    {"mx_sm90_gemm_per32_mx256",            MX_FORM_PER32,      256,    128, 256,   4,      384,     1, 1,    1,     1690},
    {"mx_sm90_gemm_per32_rows_bf16",        MX_FORM_PER32_ROWS, 0,      128, 128,   5,      384,     1, 1,    1,     1360},
    {"mx_sm90_gemm_per32_rows_mx32",        MX_FORM_PER32_ROWS, 32,     128, 128,   5,      384,     1, 1,    1,     1360},
    {"mx_sm90_gemm_per32_rows_mx128",       MX_FORM_PER32_ROWS, 128,    128, 128,   5,      384,     1, 1,    1,     1360},
    {"mx_sm90_gemm_per32_rows_mx256",       MX_FORM_PER32_ROWS, 256,    128, 256,   4,      384,     1, 1,    1,     2820},
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

/* Kernels whose blocks have one tile each. */
static bool is_clustered(const struct mx_gemm_config *config) { return config->cluster_n > 1 || config->split > 1; }

/* Operand stages and their barriers; the per-32 kernels keep FP32 factors beside them. */
static int64_t shared_bytes(const struct mx_gemm_config *config) {
    int64_t stage = (int64_t)(config->block_m + config->block_n) * BLOCK_K + 16;
    if (config->form != MX_FORM_WIDE) {
        int64_t w_scales = config->form == MX_FORM_PER32_ROWS ? config->block_n : config->block_n / MX_BLOCK;
        stage += (config->block_m + w_scales) * (BLOCK_K / MX_BLOCK) * 4;
    }
    return config->stages * stage + (is_clustered(config) ? MAXIMA_BYTES : 0);
}

/* Clusters that find room at a time. Large ones must lie in one part of the device, each of which leaves some SMs over:
 * an H200 with 132 SMs holds 66 of 2, 30 of 4, 15 of 8 (measured). */
static int64_t max_clusters(int num_sms, int64_t cluster) {
    return (cluster > 2 ? (int64_t)num_sms * 10 / 11 : num_sms) / cluster;
}

static int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }

/* H200. Blocks multiply, one tile after the other, while the operands come through L2, the weights from HBM. */
static int64_t estimate_ns(const struct mx_gemm_problem *problem, const struct mx_gemm_config *config, int64_t num_m,
                           int64_t num_tiles, int64_t slots) {
    const int64_t cluster = config->cluster_m * config->cluster_n * config->split;
    const int64_t stages = mx_ceil_div(mx_ceil_div(problem->k, BLOCK_K), config->split);
    const int64_t stage_bytes = (config->block_m / config->cluster_n + config->block_n / config->cluster_m) * BLOCK_K;
    const int64_t waves = mx_ceil_div(num_tiles, slots), starts = is_clustered(config) ? waves : 1;
    const int64_t multiply = waves * stages * config->stage_ns;
    const int64_t weights = problem->num_groups * problem->num_rows * problem->k / HBM_BYTES_PER_NS;
    const int64_t load = num_tiles * cluster * stages * stage_bytes / L2_BYTES_PER_NS +
                         weights * (num_m > 1 ? 2 : 1) * HBM_SHARE / 100;
    return starts * START_NS + (config->split > 1 ? EXCHANGE_NS : 0) + max_i64(multiply, load) +
           min_i64(multiply, load) * OVERLAP;
}

bool mx_plan_gemm_with(const struct mx_gemm_problem *problem, const struct mx_gemm_config *config, int num_sms,
                       int smem_bytes, struct mx_gemm_plan *plan) {
    const int64_t cluster = config->cluster_m * config->cluster_n * config->split;
    /* An MXFP8 result's padding rows are part of its scales, so tiles cover them too. */
    const int64_t rows =
        problem->output ? mx_ceil_div(problem->num_tokens, MX_TILE_ROWS) * MX_TILE_ROWS : problem->num_tokens;
    const int64_t num_m = mx_ceil_div(rows, config->block_m * config->cluster_m);
    const int64_t num_n = mx_ceil_div(problem->num_rows, config->block_n * config->cluster_n);
    const int64_t num_tiles = problem->num_groups * num_m * num_n, slots = max_clusters(num_sms, cluster);
    const int64_t bytes = shared_bytes(config), num_k = mx_ceil_div(problem->k, BLOCK_K);
    const int64_t band = max_i64(BAND_ROWS / (config->block_m * config->cluster_m), 1);
    int64_t num_clusters, estimate;
    if (bytes > smem_bytes || slots < 1 || num_tiles > INT32_MAX / cluster || num_k > INT32_MAX / BLOCK_K) {
        return false;
    }
    if (config->split > 1 && (problem->batch_invariant || problem->k / 256 < config->split)) {
        return false; /* several chains; of a span at least */
    }
    num_clusters = is_clustered(config) ? num_tiles : min_i64(num_tiles, slots);
    estimate = estimate_ns(problem, config, num_m, num_tiles, slots);
    *plan = (struct mx_gemm_plan){
        .config = config,
        .tiling = {.num_m = (int32_t)num_m,
                   .num_n = (int32_t)num_n,
                   .num_tiles = (int32_t)num_tiles,
                   .band = (int32_t)band},
        .grid = (uint32_t)(num_clusters * cluster),
        .block = (uint32_t)config->threads,
        .cluster = (uint32_t)cluster,
        .smem_bytes = (uint32_t)bytes,
        .estimated_ns = (int32_t)min_i64(estimate, INT32_MAX),
    };
    return true;
}

/* The quickest kernel for `problem` with that output that cuts K into `split` parts. */
static bool find_quickest(const struct mx_gemm_problem *problem, int output, int split, int num_sms, int smem_bytes,
                          struct mx_gemm_plan *plan) {
    struct mx_gemm_problem wanted = *problem;
    bool found = false;
    wanted.output = output;
    for (int i = 0; i < mx_num_gemm_configs; i++) {
        const struct mx_gemm_config *config = &mx_gemm_configs[i];
        struct mx_gemm_plan candidate;
        if (config->form == problem->form && config->output == output && config->split == split &&
            mx_plan_gemm_with(&wanted, config, num_sms, smem_bytes, &candidate) &&
            (!found || candidate.estimated_ns < plan->estimated_ns)) {
            *plan = candidate;
            found = true;
        }
    }
    return found;
}

bool mx_plan_gemm(const struct mx_gemm_problem *problem, int num_sms, int smem_bytes, struct mx_gemm_plan *plan) {
    /* A BF16 result and its quantisation must come from the same sums, so what decides how K is cut does not depend on
     * which is asked for: the time of both together, or of BF16 where nobody quantises. */
    int64_t best_ns = INT64_MAX;
    bool found = false;
    for (int split = 1; split <= 4; split *= 2) {
        struct mx_gemm_plan bf16, mxfp8, candidate;
        if (find_quickest(problem, 0, split, num_sms, smem_bytes, &bf16) &&
            find_quickest(problem, 256, split, num_sms, smem_bytes, &mxfp8) &&
            find_quickest(problem, problem->output, split, num_sms, smem_bytes, &candidate)) {
            const int64_t quantised_ns = problem->num_rows <= NARROW_ROWS ? mxfp8.estimated_ns : 0;
            const int64_t weighted_ns = (bf16.estimated_ns + quantised_ns) * (split > 1 ? SPLIT_PENALTY : 100);
            if (weighted_ns < best_ns) {
                best_ns = weighted_ns;
                *plan = candidate;
                found = true;
            }
        }
    }
    return found;
}
