/*
 * cpu_inv_rope.c - attention output -> x: undo the rotary embedding of the last R values of each head, bring the
 * values of a group into the order that wo_a's columns have, quantise.
 *
 *     attn[t, head, D]:   [ D - R values as they are | R/2 pairs (even, odd), rotated by the position's angle ]
 *
 * A group's K = heads * D values come in one of two orders: head after head, or 32 values of every head in turn,
 * which is how vLLM's fused attention kernel writes them.
 */
#include <stdatomic.h>
#include <stdlib.h>

#include "cpu_internal.h"

enum { MIN_PIECE_VALUES = 1 << 14 }; /* a thread is not woken for less: about 10 us */

struct job {
    const struct mx_inv_rope *args;
    const struct mx_cpu_variant *variant;
    atomic_bool out_of_memory;
};

/* All scales NaN, and the elements as rule 4 of mxfp8.h wants them. */
static void poison(uint8_t *x, uint8_t *x_scale, int64_t k, int64_t stride_word) {
    memset(x, MX_E4M3_NAN, (size_t)k);
    for (int64_t word = 0; word < k / (4 * MX_BLOCK); word++) {
        memset(x_scale + word * stride_word, MX_SCALE_NAN, 4);
    }
}

/* One head: head[D] = attn[D] with its last R values rotated back by the row of cos_sin. */
static void unrotate_head(const struct job *job, const uint16_t *attn, const float *cos_sin, uint16_t *head) {
    const struct mx_inv_rope *args = job->args;
    const int64_t num_kept = args->head_dim - args->rope_dim, num_pairs = args->rope_dim / 2;
    const bool halves = args->cache == MX_ROPE_HALVES;
    memcpy(head, attn, (size_t)num_kept * sizeof *head);
    job->variant->inv_rotate(attn + num_kept, cos_sin, cos_sin + (halves ? num_pairs : 1), halves ? 1 : 2, num_pairs,
                             head + num_kept);
}

/* Item index -> (token, group), groups fastest. */
static void run_items(int64_t begin, int64_t end, void *ctx) {
    struct job *job = ctx;
    const struct mx_inv_rope *args = job->args;
    const int64_t D = args->head_dim, heads = args->heads_per_group, K = heads * D;
    uint16_t *values = malloc((size_t)(K + D) * sizeof *values); /* [K] a group in its final order, [D] one head */
    if (!values) {
        atomic_store(&job->out_of_memory, true);
        return;
    }
    uint16_t *head = values + K;

    for (int64_t item = begin; item < end; item++) {
        int64_t t = item / args->num_groups, g = item % args->num_groups;
        const uint16_t *attn_tg = args->attn + t * args->attn_stride_token + g * heads * args->attn_stride_head;
        uint8_t *x_tg = args->x + t * args->x_stride_token + g * args->x_stride_group;
        uint8_t *x_scale_tg = args->x_scale + t * args->xs_stride_token + g * args->xs_stride_group;

        int64_t position = args->positions[t * args->positions_stride];
        if (position < 0 || position >= args->num_positions) {
            poison(x_tg, x_scale_tg, K, args->xs_stride_word);
            continue;
        }

        /* Rotate back and order */
        const float *cos_sin = args->cos_sin + position * args->cos_sin_stride;
        for (int64_t h = 0; h < heads; h++) {
            if (args->order == MX_ORDER_STANDARD) {
                unrotate_head(job, attn_tg + h * args->attn_stride_head, cos_sin, values + h * D);
                continue;
            }
            unrotate_head(job, attn_tg + h * args->attn_stride_head, cos_sin, head);
            for (int64_t c = 0; c < D / MX_BLOCK; c++) {
                memcpy(values + (c * heads + h) * MX_BLOCK, head + c * MX_BLOCK, MX_BLOCK * sizeof *head);
            }
        }

        /* Quantise, one byte for a span */
        for (int64_t k = 0; k < K; k += args->scale_span) {
            uint8_t byte = job->variant->quantize(values + k, args->scale_span, x_tg + k);
            for (int64_t b = k / MX_BLOCK; b < (k + args->scale_span) / MX_BLOCK; b++) {
                x_scale_tg[b / 4 * args->xs_stride_word + b % 4] = byte;
            }
        }
    }
    free(values);
}

int mx_cpu_inv_rope(const struct mx_inv_rope *args, const struct mx_exec *exec) {
    if (args->num_tokens == 0) {
        return MX_OK;
    }
    struct job job = {.args = args, .variant = mx_cpu_choose(exec)};
    if (!job.variant) {
        return MX_UNSUPPORTED;
    }
    int64_t item_values = args->heads_per_group * args->head_dim;
    mx_cpu_parallel_for(exec, args->num_tokens * args->num_groups,
                        mx_ceil_div(MIN_PIECE_VALUES, item_values ? item_values : 1), run_items, &job);
    if (atomic_load(&job.out_of_memory)) {
        return mx_cpu_fail(exec, MX_FAILED, "inv_rope: no memory for a group of %lld values", (long long)item_values);
    }
    return MX_OK;
}
