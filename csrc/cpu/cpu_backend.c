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

void mx_cpu_parallel_for(const struct mx_exec *exec, int64_t count, int64_t grain, mx_range_fn f, void *ctx) {
    if (count <= 0) {
        return;
    }
    if (exec->parallel_for) {
        exec->parallel_for(count, grain, f, ctx);
    } else {
        f(0, count, ctx);
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
