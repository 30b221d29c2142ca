/*
 * cpu_reblock.c - gives weights coarser scale blocks, once at load: 1x32 or 32x32 blocks become blocks of
 * block_rows x block_cols, for kernels that want one scale byte for many columns.
 *
 * The new byte is the largest of the bytes it replaces, so no element can overflow: elements of a block whose byte
 * was smaller by d are multiplied by 2^-d and rounded to even, which is exact as long as they stay normal numbers
 * (or, as subnormals, lose only zero bits). Two kinds of blocks have no say in the new byte, and keep their values
 * whatever it is: blocks of zeros, and NaN blocks (byte 255), whose elements become NaN one by one.
 */
#include <stdlib.h>

#include "cpu_internal.h"

enum {
    MAX_SHIFT = 32, /* 448 * 2^-32 is far below the smallest subnormal, so larger shifts give the same zeros */
    BLOCK_NAN = -1, /* new byte: every block it replaces is NaN */
};

struct job {
    const struct mx_reblock *args;
    double value[256];                   /* of an e4m3 byte; 0 for NaN, which the statistics leave out */
    uint8_t shifted[MAX_SHIFT + 1][256]; /* e4m3 byte -> e4m3 byte of value * 2^-d */
    double *stats;                       /* [items][3], added up in order at the end */
};

static double scale_value(int byte) { return (double)mx_f32_from_scale((uint8_t)byte); }

static const uint8_t *elements_at(const struct mx_reblock *args, int64_t g, int64_t n, int64_t k_block) {
    return args->w + g * args->w_stride_group + n * args->w_stride_row + k_block * MX_BLOCK;
}

static bool has_live_element(const uint8_t *elements) {
    for (int i = 0; i < MX_BLOCK; i++) {
        if (elements[i] & 0x7F) {
            return true;
        }
    }
    return false;
}

/* The byte for rows [n0, n1) x blocks of 32 columns [b0, b1): the largest of the blocks that hold something; of
 * blocks of zeros if there are no others; NaN if there are not even those. */
static uint8_t new_scale(const struct mx_reblock *args, int64_t g, int64_t n0, int64_t n1, int64_t b0, int64_t b1) {
    int live = BLOCK_NAN, zero = BLOCK_NAN;
    for (int64_t n = n0; n < n1; n++) {
        for (int64_t b = b0; b < b1; b++) {
            int byte = mx_scale_at(&args->w_scale, g, n, b);
            if (byte == MX_SCALE_NAN || (byte <= live && byte <= zero)) {
                continue;
            }
            if (has_live_element(elements_at(args, g, n, b))) {
                live = byte > live ? byte : live;
            } else {
                zero = byte > zero ? byte : zero;
            }
        }
    }
    int byte = live != BLOCK_NAN ? live : zero;
    return byte == BLOCK_NAN ? MX_SCALE_NAN : (uint8_t)byte;
}

/* 32 elements get the byte `to` instead of `from`. */
static void rescale_block(const struct job *job, const uint8_t *elements, int from, int to, uint8_t *out,
                          double *stats) {
    if (from == MX_SCALE_NAN) {
        memset(out, MX_E4M3_NAN, MX_BLOCK);
        return;
    }

    /* A byte above the new one belongs to a block of zeros */
    int shift = to - from < 0 ? 0 : to - from;
    const uint8_t *shifted = job->shifted[shift < MAX_SHIFT ? shift : MAX_SHIFT];
    double squares = 0.0, differences = 0.0, from_to = scale_value(to) / scale_value(from);
    for (int i = 0; i < MX_BLOCK; i++) {
        double before = job->value[elements[i]], after;
        out[i] = shifted[elements[i]];
        after = job->value[out[i]] * from_to;
        squares += before * before;
        if (after != before) {
            stats[0] += 1.0;
            differences += (after - before) * (after - before);
        }
    }
    stats[1] += differences * scale_value(from) * scale_value(from);
    stats[2] += squares * scale_value(from) * scale_value(from);
}

/* Item index -> (g, a row of new blocks). */
static void run_items(int64_t begin, int64_t end, void *ctx) {
    const struct job *job = ctx;
    const struct mx_reblock *args = job->args;
    const int64_t num_block_rows = mx_ceil_div(args->num_rows, args->block_rows);
    const int64_t num_block_cols = mx_ceil_div(args->k, args->block_cols);
    for (int64_t item = begin; item < end; item++) {
        int64_t g = item / num_block_rows, n0 = item % num_block_rows * args->block_rows;
        int64_t n1 = n0 + args->block_rows < args->num_rows ? n0 + args->block_rows : args->num_rows;
        memset(job->stats + 3 * item, 0, 3 * sizeof(double)); /* an item may be run again */
        for (int64_t c = 0; c < num_block_cols; c++) {
            int64_t k0 = c * args->block_cols;
            int64_t k1 = k0 + args->block_cols < args->k ? k0 + args->block_cols : args->k;
            uint8_t to = new_scale(args, g, n0, n1, k0 / MX_BLOCK, k1 / MX_BLOCK);
            args->out_scale[item * num_block_cols + c] = to;
            for (int64_t n = n0; n < n1; n++) {
                for (int64_t b = k0 / MX_BLOCK; b < k1 / MX_BLOCK; b++) {
                    rescale_block(job, elements_at(args, g, n, b), mx_scale_at(&args->w_scale, g, n, b), to,
                                  args->out_w + (g * args->num_rows + n) * args->k + b * MX_BLOCK,
                                  job->stats + 3 * item);
                }
            }
        }
    }
}

int mx_cpu_reblock(const struct mx_reblock *args, const struct mx_exec *exec) {
    const int64_t num_items = args->num_groups * mx_ceil_div(args->num_rows, args->block_rows);
    struct job job = {.args = args, .stats = calloc((size_t)num_items + 1, 3 * sizeof(double))};
    if (!job.stats) {
        return mx_cpu_fail(exec, MX_FAILED, "reblock: no memory for the statistics of %lld rows of blocks",
                           (long long)num_items);
    }

    /* Tables over all 256 bytes */
    for (int e = 0; e < 256; e++) {
        float value = mx_f32_from_e4m3((uint8_t)e);
        job.value[e] = value == value ? value : 0.0;
        for (int d = 0; d <= MAX_SHIFT; d++) {
            bool nan = (e & 0x7F) == MX_E4M3_NAN; /* keeps its sign bit too */
            job.shifted[d][e] = nan ? (uint8_t)e : mx_e4m3_from_f32(value * mx_f32_from_scale((uint8_t)(127 - d)));
        }
    }

    mx_cpu_parallel_for(exec, num_items, 1, run_items, &job);
    memset(args->stats, 0, 3 * sizeof(double));
    for (int64_t item = 0; item < num_items; item++) {
        for (int i = 0; i < 3; i++) {
            args->stats[i] += job.stats[3 * item + i];
        }
    }
    free(job.stats);
    return MX_OK;
}
