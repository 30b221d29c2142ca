/* cpu_backend.c - the CPU backend: its table of functions, the whole projection, and what every kernel needs. */
#include <stdarg.h>
#include <stdio.h>

#include "cpu_internal.h"

int mx_cpu_fail(const struct mx_exec *exec, int code, const char *format, ...) {
    if (exec->err && exec->err_bytes) {
        va_list list;
        va_start(list, format);
        vsnprintf(exec->err, exec->err_bytes, format, list);
        va_end(list);
    }
    return code;
}

struct range {
    mx_range_fn f;
    void *ctx;
};

/* A program may have told its thread to flush FP32 subnormals (torch.set_flush_denormal); torch's workers do not hear
 * of it, so a result would depend on which thread made it. Byte 0 is a subnormal scale: on x86-64 they always count.
 * Elsewhere each thread's own setting holds, and a program must leave it off. */
static void run_with_subnormals(int64_t begin, int64_t end, void *ctx) {
    const struct range *range = ctx;
#if defined(__x86_64__)
    const unsigned flush_bits = 0x8040; /* FTZ and DAZ of MXCSR */
    const unsigned saved = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(saved & ~flush_bits);
    range->f(begin, end, range->ctx);
    __builtin_ia32_ldmxcsr(saved);
#else
    range->f(begin, end, range->ctx);
#endif
}

void mx_cpu_parallel_for(const struct mx_exec *exec, int64_t count, int64_t grain, mx_range_fn f, void *ctx) {
    struct range range = {f, ctx};
    if (count <= 0) {
        return;
    }
    if (exec->parallel_for) {
        exec->parallel_for(count, grain, run_with_subnormals, &range);
    } else {
        run_with_subnormals(0, count, &range);
    }
}

/* attn -> x -> z -> y. Each step sees the bytes of the one before, so the fused and the unfused path agree to the
 * bit: both round the einsum to BF16 and quantise that. */
static int mx_cpu_o_proj(const struct mx_o_proj *args, const struct mx_exec *exec) {
    int code = args->rope ? mx_cpu_inv_rope(args->rope, exec) : MX_OK;
    if (code == MX_OK) {
        code = mx_cpu_matmul(args->a, exec);
    }
    if (code == MX_OK && args->a->out_bf16) {
        code = mx_cpu_quantize(args->quantize, exec);
    }
    return code == MX_OK ? mx_cpu_matmul(args->b, exec) : code;
}

const struct mx_backend mx_backend_cpu = {
    .name = "cpu",
    .matmul = mx_cpu_matmul,
    .quantize = mx_cpu_quantize,
    .inv_rope = mx_cpu_inv_rope,
    .o_proj = mx_cpu_o_proj,
    .reblock = mx_cpu_reblock,
};
