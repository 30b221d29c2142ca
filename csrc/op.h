/*
 * op.h - the op layer: what stands between torch's boxed calls and the kernels of kernels.h.
 *
 * One call goes: unbox -> check -> choose backend -> run -> release handles -> raise as the last act. op.c does the
 * frame, op_check.c the checks, ops_*.c one op family each. An op is described by its schema alone: the names, kinds
 * and mutability of its arguments are read from the schema text, so that a message can never name another argument.
 *
 * Ownership: libtorch hands over one handle per tensor; op.c deletes every one on every path before it raises, because
 * the C++ exception that carries an error to Python unwinds through these frames without running any cleanup.
 * Threads: calls run without the GIL, on any thread; nothing here is shared but read-only tables.
 */
#ifndef VLLM_MEGAATTN_OP_H
#define VLLM_MEGAATTN_OP_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels.h"
#include "torch_shim.h"

#define MX_MAX_ARGS 20
#define MX_MAX_DIMS 4

enum mx_error_kind { /* what the Python front end turns the RuntimeError into */
                     MX_ERROR_NONE = 0,
                     MX_ERROR_VALUE = 1,
                     MX_ERROR_TYPE = 2,
                     MX_ERROR_RUNTIME = 3,
};

/* A tensor argument as the kernel side sees it. Sizes and strides are borrowed from the handle. */
struct mx_tensor {
    const char *name; /* as in the schema, "name" up to name_len */
    int name_len;
    bool is_out; /* marked (a!) in the schema */
    AtenTensorHandle handle;
    void *data;
    int64_t num_dims;
    const int64_t *sizes, *strides; /* strides in elements */
    int32_t dtype, device_type, device_index;
};

struct mx_op;

enum mx_arg_kind { MX_ARG_TENSOR, MX_ARG_INT, MX_ARG_BOOL };

/* An op's arguments as its schema text spells them, read once at registration. */
struct mx_signature {
    int num_args;
    struct mx_arg {
        enum mx_arg_kind kind;
        bool is_out;      /* marked (a!) */
        const char *name; /* points into the schema, name_len characters */
        int name_len;
    } args[MX_MAX_ARGS];
};

/* One boxed call. */
struct mx_call {
    const struct mx_op *op;
    struct mx_tensor tensors[MX_MAX_ARGS]; /* tensor arguments in schema order */
    int64_t ints[MX_MAX_ARGS];             /* ints and bools in schema order; an enum beside each op names them */
    int num_tensors, num_ints;
    const struct mx_backend *backend; /* of the tensors' device */
    struct mx_exec exec;
    int error_kind; /* enum mx_error_kind */
    char err[512];
};

struct mx_op {
    const char *name;
    const char *schema;
    struct mx_signature *signature;    /* filled from schema by mx_register_ops() */
    bool (*run)(struct mx_call *call); /* false after mx_fail() */
    void (*boxed)(StableIValue *stack, uint64_t num_args, uint64_t num_outputs);
    bool cpu_only;
};

/* Every op of the package; ends with NULL. */
extern const struct mx_op *const mx_ops[];

/* Defines the boxed entry point of an op: torch passes it no context, so each op needs a function of its own. */
#define MX_DEFINE_OP(id, op_schema, run_fn, is_cpu_only)                                                             \
    static void id##_boxed(StableIValue *stack, uint64_t num_args, uint64_t num_outputs);                            \
    static struct mx_signature id##_signature;                                                                       \
    const struct mx_op mx_op_##id = {#id, op_schema, &id##_signature, run_fn, id##_boxed, is_cpu_only};              \
    static void id##_boxed(StableIValue *stack, uint64_t num_args, uint64_t num_outputs) {                           \
        mx_op_call(&mx_op_##id, stack, num_args, num_outputs);                                                       \
    }

void mx_op_call(const struct mx_op *op, StableIValue *stack, uint64_t num_args, uint64_t num_outputs);

/* Registers every op with torch; false and one line in err on failure. Call once per process. */
bool mx_register_ops(char *err, size_t err_bytes);

/* Kind of the last error raised on this thread, and forgets it. */
int mx_take_error_kind(void);

/* Process-wide switches, enum mx_flag; set from Python, read at each call. */
void mx_set_flags(uint32_t flags);
uint32_t mx_get_flags(void);

/* While on, ops that this thread calls check their arguments, on any device, and run nothing. */
void mx_set_check_only(bool on);

/* Maps an mx_code of a kernel to the call's outcome. */
bool mx_finish(struct mx_call *call, int code);

/* ---- checks (op_check.c): each returns false after writing "<op>: <argument> must ..., got ..." --------------- */

bool mx_fail(struct mx_call *call, int kind, const char *format, ...) __attribute__((format(printf, 3, 4)));

bool mx_check_dtype(struct mx_call *call, const struct mx_tensor *t, int32_t dtype);
bool mx_check_num_dims(struct mx_call *call, const struct mx_tensor *t, int64_t num_dims, const char *shape);
/* Sizes must equal `sizes`; `shape` spells them with names, like "[T, G, K/128]". */
bool mx_check_sizes(struct mx_call *call, const struct mx_tensor *t, int num_dims, const int64_t *sizes,
                    const char *shape);
bool mx_check_last_stride(struct mx_call *call, const struct mx_tensor *t);
bool mx_check_contiguous(struct mx_call *call, const struct mx_tensor *t);
bool mx_check_multiple(struct mx_call *call, const struct mx_tensor *t, int dim, int64_t multiple);
bool mx_check_positive(struct mx_call *call, const struct mx_tensor *t, int dim);
/* All tensors on one device; outputs without internal overlap and disjoint from every other argument. */
bool mx_check_devices(struct mx_call *call);
bool mx_check_no_overlap(struct mx_call *call);
bool mx_check_span(struct mx_call *call, const char *name, int64_t span, int64_t columns, bool any_multiple_of_32);

/* Scale operands: the form is told by dtype and shape. */
bool mx_bind_packed_scale(struct mx_call *call, const struct mx_tensor *t, int64_t rows, int64_t groups, int64_t k,
                          struct mx_scales *out);
bool mx_bind_weight_scale(struct mx_call *call, const struct mx_tensor *t, int64_t groups, int64_t rows, int64_t k,
                          struct mx_scales *out);
bool mx_bind_f8_128x4(struct mx_call *call, const struct mx_tensor *t, int64_t rows, int64_t columns,
                      struct mx_scales *out);

/* ---- binders (ops_*.c): check the tensors of one kernel and fill its arguments ----------------------------------- */

struct mx_einsum_tensors {
    const struct mx_tensor *x, *x_scale, *w, *w_scale;
    const struct mx_tensor *z, *z_scale; /* z_scale NULL: z is BF16 [T, G, N] */
};
bool mx_bind_einsum(struct mx_call *call, const struct mx_einsum_tensors *t, int64_t x_span, int64_t scale_span,
                    struct mx_matmul *out);

struct mx_gemm_tensors {
    const struct mx_tensor *z, *z_scale, *w, *w_scale, *y;
};
bool mx_bind_gemm(struct mx_call *call, const struct mx_gemm_tensors *t, int64_t z_span, struct mx_matmul *out);

struct mx_quantize_tensors {
    const struct mx_tensor *z, *q, *q_scale;
};
bool mx_bind_quantize(struct mx_call *call, const struct mx_quantize_tensors *t, int64_t scale_span,
                      struct mx_quantize *out);

struct mx_inv_rope_tensors {
    const struct mx_tensor *attn, *positions, *cos_sin, *x, *x_scale;
};
bool mx_bind_inv_rope(struct mx_call *call, const struct mx_inv_rope_tensors *t, int64_t order, int64_t cache,
                      int64_t scale_span, struct mx_inv_rope *out);

/* Weights [G, N, K] or [G * N, K]; `groups` 0 means "as w says" and needs three dimensions. */
bool mx_bind_weight(struct mx_call *call, const struct mx_tensor *w, int64_t groups, int64_t *num_groups,
                    int64_t *rows, int64_t *k, int64_t *stride_group, int64_t *stride_row);

#endif /* VLLM_MEGAATTN_OP_H */
