/*
 * torch_shim.h - libtorch's stable C shim, declared in C and resolved at import time.
 *
 * torch's headers are C++, its functions are not: this header declares the handles and torch_symbols.h the functions.
 * Nothing is linked: mx_torch_load() finds the libtorch that `import torch` has already mapped and fills `mx_torch`,
 * so one binary serves every torch from MX_TORCH_OLDEST on, CPU and CUDA builds alike.
 *
 * Usage:
 *     char err[256];
 *     if (!mx_torch_load(err, sizeof err)) { ... ImportError(err) ... }
 *     mx_torch.aoti_torch_get_dim(handle, &ndim);
 *
 * The table is written once, under the import lock, and read-only afterwards.
 */
#ifndef VLLM_MEGAATTN_TORCH_SHIM_H
#define VLLM_MEGAATTN_TORCH_SHIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "torch_symbols.h"

typedef struct AtenTensorOpaque *AtenTensorHandle;     /* at::Tensor, owned by whoever unboxed it */
typedef struct TorchLibraryOpaque *TorchLibraryHandle; /* torch::Library, kept for the life of the process */
typedef int32_t AOTITorchError;                        /* 0 is success */
typedef uint64_t StableIValue;                         /* one argument slot of a boxed call */

#define MX_DECLARE_POINTER(ret, name, args) ret(*name) args;
#define MX_DECLARE_DTYPE(name)              int32_t dtype_##name;
struct mx_torch_table {
    MX_TORCH_SYMBOLS(MX_DECLARE_POINTER)
    MX_TORCH_OPTIONAL_SYMBOLS(MX_DECLARE_POINTER)
    MX_TORCH_CUDA_SYMBOLS(MX_DECLARE_POINTER)
    /* Codes of torch's enums, asked once. */
    MX_TORCH_DTYPES(MX_DECLARE_DTYPE)
    MX_DECLARE_DTYPE(float8_e8m0fnu)
    int32_t device_cpu, device_cuda;
    uint64_t version; /* aoti_torch_abi_version(): 0x020A... is 2.10 */
};
#undef MX_DECLARE_POINTER
#undef MX_DECLARE_DTYPE

extern struct mx_torch_table mx_torch;

/* Fills mx_torch. On failure returns false and writes one line that names the missing library or symbol. */
bool mx_torch_load(char *err, size_t err_bytes);

#endif /* VLLM_MEGAATTN_TORCH_SHIM_H */
