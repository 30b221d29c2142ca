/* cpu_quantize.c - BF16 [T, C] -> MXFP8 with F8_128x4 scales. The rules are mxfp8.h's, the row function a
 * variant's. */
#include "cpu_internal.h"

enum { MIN_PIECE_VALUES = 1 << 15 }; /* a thread is not woken for less: about 10 us */

void mx_cpu_quantize_columns(const struct mx_cpu_variant *variant, const uint16_t *z, int64_t cols, int64_t span,
                             uint8_t *q, uint8_t *q_scale, int64_t token, int64_t col, int64_t num_col_tiles) {
    for (int64_t c = 0; c < cols; c += span) {
        uint8_t byte = variant->quantize(z + c, span, q + c);
        for (int64_t b = (col + c) / MX_BLOCK; b < (col + c + span) / MX_BLOCK; b++) {
            q_scale[mx_f8_128x4_offset(token, b, num_col_tiles)] = byte;
        }
    }
}

struct job {
    const struct mx_quantize *args;
    const struct mx_cpu_variant *variant;
};

/* Item index -> (token, group), groups fastest. A span lies within a group. */
static void run_items(int64_t begin, int64_t end, void *ctx) {
    const struct job *job = ctx;
    const struct mx_quantize *args = job->args;
    const int64_t group_cols = args->num_cols / args->num_groups;
    const int64_t num_col_tiles = mx_ceil_div(args->num_cols / MX_BLOCK, MX_TILE_COLS);
    for (int64_t item = begin; item < end; item++) {
        int64_t t = item / args->num_groups, g = item % args->num_groups;
        mx_cpu_quantize_columns(job->variant, args->z + t * args->z_stride_token + g * args->z_stride_group,
                                group_cols, args->scale_span, args->q + t * args->q_stride_token + g * group_cols,
                                args->q_scale, t, g * group_cols, num_col_tiles);
    }
}

int mx_cpu_quantize(const struct mx_quantize *args, const struct mx_exec *exec) {
    if (args->num_tokens == 0) {
        return MX_OK;
    }
    struct job job = {args, mx_cpu_choose(exec)};
    if (!job.variant) {
        return MX_UNSUPPORTED;
    }
    /* Scale bytes beyond the tokens and columns are 0x00; the others are written below */
    memset(args->q_scale, 0, (size_t)mx_f8_128x4_bytes(args->num_tokens, args->num_cols / MX_BLOCK));
    int64_t item_values = args->num_cols / args->num_groups;
    mx_cpu_parallel_for(exec, args->num_tokens * args->num_groups,
                        mx_ceil_div(MIN_PIECE_VALUES, item_values ? item_values : 1), run_items, &job);
    return MX_OK;
}
