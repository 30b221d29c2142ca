/*
 * simt.h - the kernels without tensor cores, the same source for every architecture (compute capability 9.0 and up):
 * inverse RoPE and the quantiser, which move data once.
 *
 * Each function checks what its kernels cannot take, answers MX_UNSUPPORTED with the argument's name and the number, and
 * launches; none allocates or synchronises.
 */
#ifndef VLLM_MEGAATTN_CUDA_SIMT_H
#define VLLM_MEGAATTN_CUDA_SIMT_H

#include "../kernels.h"
#include "driver.h"

int mx_simt_quantize(const struct mx_cuda_device *dev, const struct mx_quantize *args, const struct mx_exec *exec);
int mx_simt_inv_rope(const struct mx_cuda_device *dev, const struct mx_inv_rope *args, const struct mx_exec *exec);

#endif /* VLLM_MEGAATTN_CUDA_SIMT_H */
