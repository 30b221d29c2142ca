/*
 * cuda_backend.c - the CUDA backend: routes every call of kernels.h to a family of kernels.
 *
 * Everything runs on the stream of the call, on the device of its tensors. No call allocates device memory, synchronises
 * or keeps anything, so calls may be captured into graphs and run on several streams at once. The first call on a device
 * loads the kernels (driver.h), which is legal inside a capture too.
 */

#include "sm100.h"
#include "sm90.h"
#include "sm90_decode.h"

static bool is_blackwell(const struct mx_cuda_device *dev) { return dev->capability / 10 == 10; }

/* Whether the kernels for few tokens are asked first. */
static bool takes_decode(const struct mx_matmul *args, const struct mx_exec *exec) {
    return args->num_tokens <= MX_DECODE_MAX_TOKENS && !(exec->flags & MX_FLAG_NO_DECODE);
}

struct mx_matmul mx_sm90_write_bf16(const struct mx_matmul *a, const struct mx_quantize *quantize) {
    struct mx_matmul args = *a;
    args.out_e4m3 = NULL;
    args.out_scale = NULL;
    args.out_bf16 = (uint16_t *)(uintptr_t)quantize->z;
    args.out_stride_token = quantize->z_stride_token;
    args.out_stride_group = quantize->z_stride_group;
    return args;
}

/* Whether z is quantised sooner by a kernel of its own although wo_a could do it: with few tokens and few rows the
 * blocks that share a scale wait for each other longer than a launch takes. Measured on an H200 (TP8, 96 and 128 tokens:
 * 14.2 against 13.8 us). */
static bool quantizes_apart(const struct mx_o_proj *args) {
    const struct mx_matmul *a = args->a;
    return a->out_e4m3 != NULL && args->quantize != NULL && args->quantize->num_groups == a->num_groups &&
           a->num_tokens <= 128 && a->num_groups * a->num_rows <= 1024;
}

/* What the functions of the backend do on a device that has been entered; there are tokens. */

static int run_matmul(const struct mx_cuda_device *dev, const struct mx_matmul *args, const struct mx_exec *exec) {
    if (is_blackwell(dev)) {
        return mx_sm100_matmul(args, exec);
    }
    if (takes_decode(args, exec) && mx_sm90_decode_matmul != NULL) {
        int code = mx_sm90_decode_matmul(args, exec);
        if (code != MX_UNSUPPORTED) {
            return code;
        }
    }
    return mx_sm90_gemm(dev, args, exec);
}

static int run_o_proj(const struct mx_cuda_device *dev, const struct mx_o_proj *args, const struct mx_exec *exec) {
    struct mx_matmul a = *args->a;
    int code = MX_OK;
    if (is_blackwell(dev)) {
        return mx_sm100_o_proj(args, exec);
    }
    if (takes_decode(args->a, exec) && mx_sm90_decode_o_proj != NULL) {
        code = mx_sm90_decode_o_proj(args, exec);
        if (code != MX_UNSUPPORTED) {
            return code;
        }
        code = MX_OK;
    }
    if (args->rope != NULL) {
        code = mx_simt_inv_rope(dev, args->rope, exec);
    }
    if (quantizes_apart(args)) {
        a = mx_sm90_write_bf16(&a, args->quantize);
    }
    if (code == MX_OK) {
        code = run_matmul(dev, &a, exec);
    }
    if (code == MX_OK && a.out_e4m3 == NULL) {
        code = mx_simt_quantize(dev, args->quantize, exec);
    }
    return code == MX_OK ? run_matmul(dev, args->b, exec) : code;
}

/* cuda_<name>: enters the device, runs, leaves. */
#define DEFINE_ENTRY(name, args_type, num_tokens_of, run)                                                            \
    static int cuda_##name(const struct args_type *args, const struct mx_exec *exec) {                               \
        const struct mx_cuda_device *dev;                                                                            \
        bool pushed;                                                                                                 \
        int code = MX_FAILED;                                                                                        \
        if ((num_tokens_of) == 0) {                                                                                  \
            return MX_OK;                                                                                            \
        }                                                                                                            \
        dev = mx_cuda_enter(exec, &pushed);                                                                          \
        if (dev != NULL) {                                                                                           \
            code = run(dev, args, exec);                                                                             \
        }                                                                                                            \
        mx_cuda_leave(pushed);                                                                                       \
        return code;                                                                                                 \
    }
DEFINE_ENTRY(matmul, mx_matmul, args->num_tokens, run_matmul)
DEFINE_ENTRY(quantize, mx_quantize, args->num_tokens, mx_simt_quantize)
DEFINE_ENTRY(inv_rope, mx_inv_rope, args->num_tokens, mx_simt_inv_rope)
DEFINE_ENTRY(o_proj, mx_o_proj, args->a->num_tokens, run_o_proj)

const struct mx_backend mx_backend_cuda = {
    .name = "cuda",
    .matmul = cuda_matmul,
    .quantize = cuda_quantize,
    .inv_rope = cuda_inv_rope,
    .o_proj = cuda_o_proj,
    .reblock = NULL, /* weights are re-blocked once, at load, on the CPU: op.c refuses other devices */
};
