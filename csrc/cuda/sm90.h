/*
 * sm90.h - the families of Hopper kernels behind cuda_backend.c. Each function checks what its kernels cannot take,
 * answers MX_UNSUPPORTED with the argument's name and the number, and launches; none allocates or synchronises.
 */
#ifndef VLLM_MEGAATTN_CUDA_SM90_H
#define VLLM_MEGAATTN_CUDA_SM90_H

#include "driver.h"
#include "plan.h"
#include "simt.h"

/* sm90_gemm.c: tiled matrix products, any number of tokens. */
int mx_sm90_gemm(const struct mx_cuda_device *dev, const struct mx_matmul *args, const struct mx_exec *exec);

/* The same by a given plan, for benchmarks and tests; the operands have passed the checks. */
int mx_sm90_gemm_planned(const struct mx_cuda_device *dev, const struct mx_matmul *args,
                         const struct mx_gemm_plan *plan, const struct mx_exec *exec);

/* wo_a with BF16 z where the quantiser expects it. */
struct mx_matmul mx_sm90_write_bf16(const struct mx_matmul *a, const struct mx_quantize *quantize);

/* Kernels for few tokens (T <= 64). MX_UNSUPPORTED says that the problem is not theirs, the tiled kernels then take it;
 * weak, because a build may leave them out. */
__attribute__((weak, visibility("hidden"))) int mx_sm90_decode_matmul(const struct mx_matmul *args,
                                                                      const struct mx_exec *exec);
__attribute__((weak, visibility("hidden"))) int mx_sm90_decode_o_proj(const struct mx_o_proj *args,
                                                                      const struct mx_exec *exec);

#endif /* VLLM_MEGAATTN_CUDA_SM90_H */
