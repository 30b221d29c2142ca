/*
 * sm100.h - the Blackwell kernels (compute capability 10.0 and 10.3) as the CUDA backend calls them.
 *
 * Nothing here allocates device memory, synchronises or keeps device state; everything is launched on exec->stream of
 * exec->device_index. Functions return an mx_code and write one line to exec->err unless it is MX_OK.
 *
 * wo_b (one group, BF16 output, activation scales F8_128x4) has two routes:
 *
 *     own         sm100_gemm.cu
 *     cuBLASLt    cublaslt.h, when the library can be opened and takes the operands
 *
 * MX_FLAG_WO_B_OWN and MX_FLAG_WO_B_CUBLASLT force one; what a forced route cannot take is MX_UNSUPPORTED. With
 * neither flag cuBLASLt is preferred, because the package's own kernel has not been run on this hardware yet
 * (docs/blackwell.md), except with MX_FLAG_BATCH_INVARIANT, which cuBLASLt does not promise. mx_sm100_route says
 * which and why.
 */
#ifndef VLLM_MEGAATTN_SM100_H
#define VLLM_MEGAATTN_SM100_H

#include "../kernels.h"
#include "sm100_plan.h"

#ifdef __cplusplus
extern "C" {
#endif

int mx_sm100_matmul(const struct mx_matmul *args, const struct mx_exec *exec);

/* The own kernel by a given plan, for tests and benchmarks. */
int mx_sm100_matmul_planned(const struct mx_matmul *args, const struct mx_sm100_plan *plan,
                            const struct mx_exec *exec);

/* The whole projection: inverse RoPE and quantiser of simt.h, products as above. */
int mx_sm100_o_proj(const struct mx_o_proj *args, const struct mx_exec *exec);

enum mx_sm100_route_id {
    MX_ROUTE_OWN = 0,
    MX_ROUTE_CUBLASLT = 1,
    MX_ROUTE_REFUSED = 2, /* a forced route that cannot take the operands */
};

/* The route a product takes, an mx_sm100_route_id, and the reason in one line. Opens cuBLASLt, launches nothing. */
int mx_sm100_route(const struct mx_matmul *args, const struct mx_exec *exec, char *reason, size_t n);

#ifdef __cplusplus
}
#endif

#endif /* VLLM_MEGAATTN_SM100_H */
