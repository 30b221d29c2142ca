/* op.c - the frame of every op call: unbox, check, run, release, raise; and registration. See op.h. */
#include "op.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

static _Thread_local int last_error_kind = MX_ERROR_NONE;
static _Thread_local bool check_only;
static _Atomic uint32_t option_flags;

int mx_take_error_kind(void) {
    int kind = last_error_kind;
    last_error_kind = MX_ERROR_NONE;
    return kind;
}

void mx_set_flags(uint32_t flags) { atomic_store(&option_flags, flags); }

void mx_set_check_only(bool on) { check_only = on; }

uint32_t mx_get_flags(void) { return atomic_load(&option_flags); }

/* ---- threads ------------------------------------------------------------------------------------------------- */

/* A forked child inherits the OpenMP pool's bookkeeping but not its threads; entering a parallel region there can wait
 * for ever. So a child runs on its calling thread. */
static _Atomic bool in_forked_child;

static void note_fork(void) { atomic_store(&in_forked_child, true); }

static void torch_threads(int64_t count, int64_t grain, mx_range_fn f, void *ctx) {
    if (count <= grain || atomic_load(&in_forked_child) ||
        mx_torch.torch_parallel_for(0, count, grain, f, ctx) != 0) {
        f(0, count, ctx);
    }
}

/* ---- schema -------------------------------------------------------------------------------------------------- */

/* Reads "name(Type a, Tensor(a!) b, ...) -> ()" into a signature; types are Tensor, int and bool. */
static void parse_schema(const char *text, struct mx_signature *signature) {
    text = strchr(text, '(') + 1;
    while (*text != ')') {
        struct mx_arg *arg = &signature->args[signature->num_args++];
        arg->kind = strncmp(text, "Tensor", 6) == 0 ? MX_ARG_TENSOR
                    : strncmp(text, "int", 3) == 0  ? MX_ARG_INT
                                                    : MX_ARG_BOOL;
        arg->is_out = strncmp(text, "Tensor(", 7) == 0;
        arg->name = strchr(text, ' ') + 1;
        arg->name_len = (int)strcspn(arg->name, ",)");
        text = arg->name + arg->name_len;
        text += strspn(text, ", ");
    }
}

/* ---- one call ------------------------------------------------------------------------------------------------ */

/* Reads a tensor's properties once. Getters fail only on a null handle, which libtorch never passes. */
static bool unbox_tensor(struct mx_call *call, const struct mx_arg *arg, StableIValue slot) {
    struct mx_tensor *t = &call->tensors[call->num_tensors++];
    int64_t *sizes = NULL, *strides = NULL;
    int32_t failed = 0;
    t->name = arg->name;
    t->name_len = arg->name_len;
    t->is_out = arg->is_out;
    memcpy(&t->handle, &slot, sizeof t->handle);
    failed |= mx_torch.aoti_torch_get_dim(t->handle, &t->num_dims);
    failed |= mx_torch.aoti_torch_get_sizes(t->handle, &sizes);
    failed |= mx_torch.aoti_torch_get_strides(t->handle, &strides);
    failed |= mx_torch.aoti_torch_get_dtype(t->handle, &t->dtype);
    failed |= mx_torch.aoti_torch_get_device_type(t->handle, &t->device_type);
    failed |= mx_torch.aoti_torch_get_device_index(t->handle, &t->device_index);
    failed |= mx_torch.aoti_torch_get_data_ptr(t->handle, &t->data);
    t->sizes = sizes;
    t->strides = strides;
    return !failed ||
           mx_fail(call, MX_ERROR_RUNTIME, "%.*s: torch refused to describe the tensor", arg->name_len, arg->name);
}

/* Takes every argument off the stack, also after a failure: each handle must be known to be released. */
static bool unbox(struct mx_call *call, const StableIValue *stack) {
    const struct mx_signature *signature = call->op->signature;
    bool ok = true;
    for (int i = 0; i < signature->num_args; i++) {
        const struct mx_arg *arg = &signature->args[i];
        int64_t value;
        memcpy(&value, &stack[i], sizeof value);
        switch (arg->kind) {
        case MX_ARG_TENSOR:
            ok = unbox_tensor(call, arg, stack[i]) && ok;
            break;
        case MX_ARG_INT:
            call->ints[call->num_ints++] = value;
            break;
        case MX_ARG_BOOL:
            call->ints[call->num_ints++] = (value & 0xFF) != 0; /* only the low byte is defined */
            break;
        }
    }
    return ok;
}

/* The backend of a thread that wants arguments checked and nothing done; it serves every device. */
static int check_matmul(const struct mx_matmul *args, const struct mx_exec *exec) {
    (void)args;
    (void)exec;
    return MX_OK;
}

static int check_quantize(const struct mx_quantize *args, const struct mx_exec *exec) {
    (void)args;
    (void)exec;
    return MX_OK;
}

static int check_inv_rope(const struct mx_inv_rope *args, const struct mx_exec *exec) {
    (void)args;
    (void)exec;
    return MX_OK;
}

static int check_o_proj(const struct mx_o_proj *args, const struct mx_exec *exec) {
    (void)args;
    (void)exec;
    return MX_OK;
}

static int check_reblock(const struct mx_reblock *args, const struct mx_exec *exec) {
    (void)args;
    (void)exec;
    return MX_OK;
}

static const struct mx_backend backend_check = {.name = "check",
                                                .matmul = check_matmul,
                                                .quantize = check_quantize,
                                                .inv_rope = check_inv_rope,
                                                .o_proj = check_o_proj,
                                                .reblock = check_reblock};

static bool choose_backend(struct mx_call *call) {
    const struct mx_tensor *t = &call->tensors[0];
    call->exec = (struct mx_exec){.flags = mx_get_flags(),
                                  .device_index = t->device_index,
                                  .parallel_for = torch_threads,
                                  .err = call->err,
                                  .err_bytes = sizeof call->err};
    if (check_only) {
        call->backend = &backend_check;
        return true;
    }
    if (t->device_type == mx_torch.device_cpu) {
        call->backend = &mx_backend_cpu;
        return true;
    }
    if (call->op->cpu_only) {
        return mx_fail(call, MX_ERROR_VALUE, "%.*s must be on the CPU: this op runs once, at load", t->name_len,
                       t->name);
    }
#ifdef MX_WITH_CUDA
    if (!mx_torch.aoti_torch_get_current_cuda_stream ||
        mx_torch.aoti_torch_get_current_cuda_stream(t->device_index, &call->exec.stream) != 0) {
        return mx_fail(call, MX_ERROR_RUNTIME, "torch gave no current stream for cuda:%d", (int)t->device_index);
    }
    call->backend = &mx_backend_cuda;
    return true;
#else
    return mx_fail(call, MX_ERROR_RUNTIME,
                   "this build of vllm_megaattn has no CUDA kernels; install it where nvcc is found, or with "
                   "VLLM_MEGAATTN_CUDA=1 to learn what is missing");
#endif
}

void mx_op_call(const struct mx_op *op, StableIValue *stack, uint64_t num_args, uint64_t num_outputs) {
    struct mx_call call;
    (void)num_args; /* torch has matched the call against the schema */
    (void)num_outputs;
    call.op = op;
    call.num_tensors = call.num_ints = 0;
    call.error_kind = MX_ERROR_NONE;

    bool ok = unbox(&call, stack) && mx_check_devices(&call) && choose_backend(&call) && mx_check_no_overlap(&call) &&
              op->run(&call);

    for (int i = 0; i < call.num_tensors; i++) {
        mx_torch.aoti_torch_delete_tensor_object(call.tensors[i].handle);
    }
    if (!ok) {
        last_error_kind = call.error_kind;
        /* Throws a c10::Error through this frame: nothing may follow. */
        mx_torch.aoti_torch_check(false, op->name, __FILE__, __LINE__, call.err);
    }
}

bool mx_finish(struct mx_call *call, int code) {
    if (code == MX_OK) {
        return true;
    }
    char reason[sizeof call->err]; /* the kernel wrote its line into call->err */
    memcpy(reason, call->err, sizeof reason);
    return mx_fail(call, code == MX_UNSUPPORTED ? MX_ERROR_VALUE : MX_ERROR_RUNTIME, "%s", reason);
}

/* ---- registration -------------------------------------------------------------------------------------------- */

bool mx_register_ops(char *err, size_t err_bytes) {
    static const char *const keys[] = {"CPU", "CUDA"}; /* CUDA on a CPU-only torch just fills a table slot */
    TorchLibraryHandle defs, impls;                    /* never deleted: that would deregister the ops */

    pthread_atfork(NULL, NULL, note_fork);
    if (mx_torch.aoti_torch_library_init_fragment("vllm_megaattn", __FILE__, __LINE__, &defs) != 0) {
        snprintf(err, err_bytes, "torch refused to open the namespace vllm_megaattn");
        return false;
    }
    for (int i = 0; mx_ops[i]; i++) {
        parse_schema(mx_ops[i]->schema, mx_ops[i]->signature);
        if (mx_torch.aoti_torch_library_def(defs, mx_ops[i]->schema) != 0) {
            snprintf(err, err_bytes, "torch refused the schema of %s", mx_ops[i]->name);
            return false;
        }
    }
    for (size_t k = 0; k < sizeof keys / sizeof keys[0]; k++) {
        if (mx_torch.aoti_torch_library_init_impl("vllm_megaattn", keys[k], __FILE__, __LINE__, &impls) != 0) {
            snprintf(err, err_bytes, "torch refused dispatch key %s", keys[k]);
            return false;
        }
        for (int i = 0; mx_ops[i]; i++) {
            /* The conversion rules of torch 2.10 are what unbox() above is written for. */
            const uint64_t rules = (2ULL << 56) | (10ULL << 48);
            if (mx_torch.torch_library_impl(impls, mx_ops[i]->name, mx_ops[i]->boxed, rules) != 0) {
                snprintf(err, err_bytes, "torch refused the %s kernel of %s", keys[k], mx_ops[i]->name);
                return false;
            }
        }
    }
    return true;
}
