/* op_check.c - the checks of the op layer. Each message names the op, the argument, the expected and the actual. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "op.h"

bool mx_fail(struct mx_call *call, int kind, const char *format, ...) {
    char text[sizeof call->err];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    snprintf(call->err, sizeof call->err, "%s: %.*s", call->op->name, (int)(sizeof call->err - 40), text);
    call->error_kind = kind;
    return false;
}

/* ---- how things are spelled in a message ----------------------------------------------------------------------- */

static const char *dtype_name(int32_t dtype, char *spare, size_t spare_bytes) {
#define MX_NAME_DTYPE(name) {mx_torch.dtype_##name, #name},
    const struct {
        int32_t code;
        const char *name;
    } names[] = {MX_TORCH_DTYPES(MX_NAME_DTYPE) MX_NAME_DTYPE(float8_e8m0fnu)};
#undef MX_NAME_DTYPE
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (names[i].code == dtype) {
            return names[i].name;
        }
    }
    snprintf(spare, spare_bytes, "dtype code %d", (int)dtype);
    return spare;
}

static int64_t element_bytes(int32_t dtype) {
    if (dtype == mx_torch.dtype_bfloat16) {
        return 2;
    }
    if (dtype == mx_torch.dtype_int32 || dtype == mx_torch.dtype_float32) {
        return 4;
    }
    return dtype == mx_torch.dtype_int64 || dtype == mx_torch.dtype_float64 ? 8 : 1;
}

/* "[2, 3]" of sizes or strides. */
static const char *list_text(const int64_t *values, int64_t num, char *text, size_t text_bytes) {
    size_t used = 1;
    text[0] = '[';
    for (int64_t i = 0; i < num && used + 24 < text_bytes; i++) {
        used += (size_t)snprintf(text + used, text_bytes - used, "%s%lld", i ? ", " : "", (long long)values[i]);
    }
    snprintf(text + used, text_bytes - used, "]");
    return text;
}

static const char *device_text(int32_t type, int32_t index, char *text, size_t text_bytes) {
    if (type == mx_torch.device_cpu) {
        return "cpu";
    }
    snprintf(text, text_bytes, type == mx_torch.device_cuda ? "cuda:%d" : "device type %d",
             type == mx_torch.device_cuda ? (int)index : (int)type);
    return text;
}

/* ---- one tensor ------------------------------------------------------------------------------------------------ */

bool mx_check_dtype(struct mx_call *call, const struct mx_tensor *t, int32_t dtype) {
    char want[32], got[32];
    return t->dtype == dtype || mx_fail(call, MX_ERROR_TYPE, "%.*s must have dtype %s, got %s", t->name_len, t->name,
                                        dtype_name(dtype, want, sizeof want), dtype_name(t->dtype, got, sizeof got));
}

bool mx_check_num_dims(struct mx_call *call, const struct mx_tensor *t, int64_t num_dims, const char *shape) {
    char got[128];
    return t->num_dims == num_dims || mx_fail(call, MX_ERROR_VALUE, "%.*s must have shape %s, got %s", t->name_len,
                                              t->name, shape, list_text(t->sizes, t->num_dims, got, sizeof got));
}

bool mx_check_sizes(struct mx_call *call, const struct mx_tensor *t, int num_dims, const int64_t *sizes,
                    const char *shape) {
    char want[128], got[128];
    if (t->num_dims == num_dims && memcmp(t->sizes, sizes, (size_t)num_dims * sizeof *sizes) == 0) {
        return true;
    }
    return mx_fail(call, MX_ERROR_VALUE, "%.*s must have shape %s = %s, got %s", t->name_len, t->name, shape,
                   list_text(sizes, num_dims, want, sizeof want), list_text(t->sizes, t->num_dims, got, sizeof got));
}

static bool is_empty(const struct mx_tensor *t) {
    for (int64_t d = 0; d < t->num_dims; d++) {
        if (t->sizes[d] == 0) {
            return true;
        }
    }
    return false;
}

bool mx_check_last_stride(struct mx_call *call, const struct mx_tensor *t) {
    char got[128];
    return t->sizes[t->num_dims - 1] <= 1 || t->strides[t->num_dims - 1] == 1 || is_empty(t) ||
           mx_fail(call, MX_ERROR_VALUE, "%.*s must have stride 1 in its last dimension, got strides %s", t->name_len,
                   t->name, list_text(t->strides, t->num_dims, got, sizeof got));
}

bool mx_check_contiguous(struct mx_call *call, const struct mx_tensor *t) {
    char got[128];
    int64_t expected = 1;
    for (int64_t d = t->num_dims - 1; d >= 0 && !is_empty(t); d--) {
        if (t->sizes[d] != 1 && t->strides[d] != expected) {
            return mx_fail(call, MX_ERROR_VALUE, "%.*s must be contiguous, got strides %s", t->name_len, t->name,
                           list_text(t->strides, t->num_dims, got, sizeof got));
        }
        expected *= t->sizes[d];
    }
    return true;
}

bool mx_check_multiple(struct mx_call *call, const struct mx_tensor *t, int dim, int64_t multiple) {
    int64_t size = t->sizes[dim];
    return (size > 0 && size % multiple == 0) ||
           mx_fail(call, MX_ERROR_VALUE, "%.*s must have a positive multiple of %lld as size %d, got %lld",
                   t->name_len, t->name, (long long)multiple, dim, (long long)size);
}

bool mx_check_positive(struct mx_call *call, const struct mx_tensor *t, int dim) {
    char got[128];
    return t->sizes[dim] > 0 ||
           mx_fail(call, MX_ERROR_VALUE, "%.*s must have a positive size in dimension %d, got 0 in %s", t->name_len,
                   t->name, dim, list_text(t->sizes, t->num_dims, got, sizeof got));
}

/* Spans that a producer writes are 32, 128 or 256; those a caller vouches for may be any multiple of 32. */
bool mx_check_span(struct mx_call *call, const char *name, int64_t span, int64_t columns, bool any_multiple_of_32) {
    if (any_multiple_of_32) {
        return (span > 0 && span % MX_BLOCK == 0) ||
               mx_fail(call, MX_ERROR_VALUE, "%s must be a positive multiple of 32, got %lld", name, (long long)span);
    }
    if (span != 32 && span != 128 && span != 256) {
        return mx_fail(call, MX_ERROR_VALUE, "%s must be 32, 128 or 256, got %lld", name, (long long)span);
    }
    return columns % span == 0 || mx_fail(call, MX_ERROR_VALUE, "%s must divide the %lld columns it covers, got %lld",
                                          name, (long long)columns, (long long)span);
}

/* ---- all tensors of a call ------------------------------------------------------------------------------------- */

bool mx_check_devices(struct mx_call *call) {
    const struct mx_tensor *first = &call->tensors[0];
    char want[32], got[32];
    for (int i = 0; i < call->num_tensors; i++) {
        const struct mx_tensor *t = &call->tensors[i];
        if (t->device_type != first->device_type || t->device_index != first->device_index) {
            return mx_fail(call, MX_ERROR_VALUE, "%.*s must be on %s like %.*s, got %s", t->name_len, t->name,
                           device_text(first->device_type, first->device_index, want, sizeof want), first->name_len,
                           first->name, device_text(t->device_type, t->device_index, got, sizeof got));
        }
        if (t->num_dims > MX_MAX_DIMS) {
            return mx_fail(call, MX_ERROR_VALUE, "%.*s must have at most %d dimensions, got %lld", t->name_len,
                           t->name, MX_MAX_DIMS, (long long)t->num_dims);
        }
    }
    return true;
}

/* Bytes from the first to behind the last element; torch strides are never negative. */
static int64_t extent_bytes(const struct mx_tensor *t) {
    int64_t last = 0;
    for (int64_t d = 0; d < t->num_dims; d++) {
        last += (t->sizes[d] - 1) * t->strides[d];
    }
    return (last + 1) * element_bytes(t->dtype);
}

/* True if two index tuples of t may share an element: some dimension's stride does not clear the smaller ones. */
static bool has_internal_overlap(const struct mx_tensor *t) {
    int64_t reach = 0; /* largest offset reachable in the dimensions taken so far */
    bool taken[MX_MAX_DIMS] = {false};
    for (int64_t step = 0; step < t->num_dims; step++) {
        int64_t next = -1;
        for (int64_t d = 0; d < t->num_dims; d++) {
            if (!taken[d] && (next < 0 || t->strides[d] < t->strides[next])) {
                next = d;
            }
        }
        taken[next] = true;
        if (t->sizes[next] > 1) {
            if (t->strides[next] <= reach) {
                return true;
            }
            reach += (t->sizes[next] - 1) * t->strides[next];
        }
    }
    return false;
}

bool mx_check_no_overlap(struct mx_call *call) {
    char got[128];
    for (int i = 0; i < call->num_tensors; i++) {
        const struct mx_tensor *out = &call->tensors[i];
        if (!out->is_out || is_empty(out)) {
            continue;
        }
        if (has_internal_overlap(out)) {
            return mx_fail(call, MX_ERROR_VALUE, "%.*s is written and must not overlap itself, got strides %s",
                           out->name_len, out->name, list_text(out->strides, out->num_dims, got, sizeof got));
        }
        const char *out_begin = out->data, *out_end = out_begin + extent_bytes(out);
        for (int j = 0; j < call->num_tensors; j++) {
            const struct mx_tensor *t = &call->tensors[j];
            const char *begin = t->data;
            if (j != i && !is_empty(t) && begin < out_end && out_begin < begin + extent_bytes(t)) {
                return mx_fail(call, MX_ERROR_VALUE,
                               "%.*s is written and may share memory with %.*s: their byte ranges overlap",
                               out->name_len, out->name, t->name_len, t->name);
            }
        }
    }
    return true;
}

/* ---- scale operands -------------------------------------------------------------------------------------------- */

static bool is_scale_byte(int32_t dtype) {
    return dtype == mx_torch.dtype_uint8 || dtype == mx_torch.dtype_float8_e8m0fnu;
}

/* int32 [rows, groups, k/128]: four UE8M0 bytes a word, any strides. */
bool mx_bind_packed_scale(struct mx_call *call, const struct mx_tensor *t, int64_t rows, int64_t groups, int64_t k,
                          struct mx_scales *out) {
    const int64_t sizes[] = {rows, groups, k / 128};
    if (!mx_check_dtype(call, t, mx_torch.dtype_int32) || !mx_check_sizes(call, t, 3, sizes, "[T, G, K/128]")) {
        return false;
    }
    *out = (struct mx_scales){.data = t->data,
                              .layout = MX_SCALE_PACKED,
                              .block_rows = 1,
                              .block_cols = MX_BLOCK,
                              .stride_row = 4 * t->strides[0],
                              .stride_group = 4 * t->strides[1],
                              .stride_col = 4 * t->strides[2]};
    return true;
}

bool mx_bind_f8_128x4(struct mx_call *call, const struct mx_tensor *t, int64_t rows, int64_t columns,
                      struct mx_scales *out) {
    int64_t num_blocks = columns / MX_BLOCK;
    if (t->dtype == mx_torch.dtype_int32 && columns % 128 == 0) {
        const int64_t words[] = {mx_ceil_div(rows, 128), columns / 128, 128};
        if (!mx_check_sizes(call, t, 3, words, "[ceil(rows/128), columns/128, 128]")) {
            return false;
        }
    } else if (is_scale_byte(t->dtype)) {
        const int64_t bytes[] = {mx_f8_128x4_bytes(rows, num_blocks)};
        if (!mx_check_sizes(call, t, 1, bytes, "[F8_128x4 bytes: ceil128(rows) * ceil4(columns/32)]")) {
            return false;
        }
    } else {
        char got[32];
        return mx_fail(
            call, MX_ERROR_TYPE,
            "%.*s must have dtype uint8 or float8_e8m0fnu (1-D F8_128x4), or int32 where the columns are a "
            "multiple of 128, got %s",
            t->name_len, t->name, dtype_name(t->dtype, got, sizeof got));
    }
    *out = (struct mx_scales){.data = t->data,
                              .layout = MX_SCALE_F8_128X4,
                              .block_rows = 1,
                              .block_cols = MX_BLOCK,
                              .num_col_tiles = mx_ceil_div(num_blocks, MX_TILE_COLS)};
    return mx_check_contiguous(call, t);
}

/* Which of the known block sizes cuts `size` into `num` blocks; 0 if none. Candidates that give the same count mean
 * the same scales (one block covers everything), so the first match is as good as any. */
static int64_t find_block(int64_t size, int64_t num, const int64_t *candidates, int count) {
    for (int i = 0; i < count; i++) {
        if (mx_ceil_div(size, candidates[i]) == num) {
            return candidates[i];
        }
    }
    return 0;
}

bool mx_bind_weight_scale(struct mx_call *call, const struct mx_tensor *t, int64_t groups, int64_t rows, int64_t k,
                          struct mx_scales *out) {
    char got[128];
    const int64_t row_blocks[] = {1, 32, 128}, col_blocks[] = {k, 32, 128, 256};
    if (t->num_dims == 1 && groups == 1 && is_scale_byte(t->dtype)) {
        return mx_bind_f8_128x4(call, t, rows, k, out);
    }
    if (t->dtype != mx_torch.dtype_int32 && !is_scale_byte(t->dtype)) {
        return mx_fail(
            call, MX_ERROR_TYPE, "%.*s must have dtype uint8, float8_e8m0fnu or int32 (four packed bytes), got %s%s",
            t->name_len, t->name, dtype_name(t->dtype, got, sizeof got),
            t->dtype == mx_torch.dtype_float32 ? "; prepare_weight() converts power-of-two float32 scales" : "");
    }
    /* 2-D tensors hold the groups one below the other: [G * R, C]. */
    int64_t per_group = t->num_dims == 3                                ? t->sizes[1]
                        : t->num_dims == 2 && t->sizes[0] % groups == 0 ? t->sizes[0] / groups
                                                                        : -1;
    bool groups_match = t->num_dims == 2 || (t->num_dims == 3 && t->sizes[0] == groups);
    if (groups_match && per_group > 0) {
        int64_t cols = t->sizes[t->num_dims - 1];
        int64_t stride_row = t->strides[t->num_dims - 2], stride_col = t->strides[t->num_dims - 1];
        int64_t stride_group = t->num_dims == 3 ? t->strides[0] : per_group * stride_row;
        if (t->dtype == mx_torch.dtype_int32) {
            if (k % 128 == 0 && cols == k / 128 && per_group == rows) {
                *out = (struct mx_scales){.data = t->data,
                                          .layout = MX_SCALE_PACKED,
                                          .block_rows = 1,
                                          .block_cols = MX_BLOCK,
                                          .stride_group = 4 * stride_group,
                                          .stride_row = 4 * stride_row,
                                          .stride_col = 4 * stride_col};
                return true;
            }
        } else {
            int64_t block_rows = find_block(rows, per_group, row_blocks, 3),
                    block_cols = find_block(k, cols, col_blocks, 4);
            if (block_rows && block_cols) {
                *out = (struct mx_scales){.data = t->data,
                                          .layout = MX_SCALE_BLOCKS,
                                          .block_rows = (int32_t)block_rows,
                                          .block_cols = block_cols,
                                          .stride_group = stride_group,
                                          .stride_row = stride_row,
                                          .stride_col = stride_col};
                return true;
            }
        }
    }
    return mx_fail(
        call, MX_ERROR_VALUE,
        "%.*s must hold the scales of %lld x [%lld, %lld] weights: int32 [G, N, K/128], or bytes [G, N/r, K/c] "
        "with r in {1, 32, 128} and c in {32, 128, 256, K} (2-D: [G*N/r, K/c])%s, got %s",
        t->name_len, t->name, (long long)groups, (long long)rows, (long long)k,
        groups == 1 ? ", or 1-D F8_128x4" : "", list_text(t->sizes, t->num_dims, got, sizeof got));
}
