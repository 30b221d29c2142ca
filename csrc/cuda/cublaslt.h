/*
 * cublaslt.h - MXFP8 products by NVIDIA's cuBLASLt, opened at run time: the second route for wo_b on Blackwell.
 *
 * The library is the one torch has loaded (libcublasLt.so.13, else .12), found by dlopen; the package links nothing.
 * Both operands are e4m3 with UE8M0 scales per 32 columns in the F8_128x4 layout, which cuBLASLt calls VEC32_UE8M0
 * ("1D Block Scaling Factors Layout"); the result is BF16. No workspace is given, so no algorithm that needs one is
 * chosen.
 *
 * The heuristic's answer costs tens of microseconds, so it is kept per (device, shape, strides), up to 512 of them,
 * the oldest replaced first. State is guarded by a lock; every function may be called from any thread and inside a
 * capture.
 */
#ifndef VLLM_MEGAATTN_CUBLASLT_H
#define VLLM_MEGAATTN_CUBLASLT_H

#include <stddef.h>

#include "../kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Whether the library can be opened: MX_OK and its version as major * 10000 + minor * 100 + patch, else
 * MX_UNSUPPORTED and the reason. Touches no device. */
int mx_cublaslt_status(long *version, char *err, size_t n);

/* Whether the operands have a form cuBLASLt takes: MX_OK, else MX_UNSUPPORTED naming the argument. */
int mx_cublaslt_check(const struct mx_matmul *args, char *err, size_t n);

/* Runs a checked product on exec->stream. MX_UNSUPPORTED if the library has no algorithm for it on this device. */
int mx_cublaslt_matmul(const struct mx_matmul *args, const struct mx_exec *exec);

#ifdef __cplusplus
}
#endif

#endif /* VLLM_MEGAATTN_CUBLASLT_H */
