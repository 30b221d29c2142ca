/* torch_shim.c - fills the table of torch_shim.h from the libtorch that is already loaded. */
#define _GNU_SOURCE
#include "torch_shim.h"

#include <dlfcn.h>
#include <stdio.h>

struct mx_torch_table mx_torch;

/* RTLD_NOLOAD finds the library by the SONAME that `import torch` mapped and never loads one of its own. libtorch is
 * opened RTLD_LOCAL by Python, so looking a symbol up globally would not find it. */
static void *find_loaded(const char *soname) { return dlopen(soname, RTLD_LAZY | RTLD_NOLOAD); }

/* Function pointers leave dlsym as void *; POSIX guarantees the round trip through memory. */
static bool resolve(void *library, const char *name, void *slot) {
    void *symbol = library ? dlsym(library, name) : NULL;
    *(void **)slot = symbol;
    return symbol != NULL;
}

bool mx_torch_load(char *err, size_t err_bytes) {
    void *cpu = find_loaded("libtorch_cpu.so");
    void *cuda = find_loaded("libtorch_cuda.so");
    if (!cpu) {
        snprintf(err, err_bytes,
                 "vllm_megaattn._C: libtorch_cpu.so is not loaded; `import torch` (>= " MX_TORCH_OLDEST ") first");
        return false;
    }
#define MX_RESOLVE(ret, name, args)                                                                                  \
    if (!resolve(cpu, #name, &mx_torch.name)) {                                                                      \
        snprintf(err, err_bytes,                                                                                     \
                 "vllm_megaattn._C: this torch has no symbol " #name "; torch >= " MX_TORCH_OLDEST " is needed");    \
        return false;                                                                                                \
    }
#define MX_RESOLVE_OPTIONAL(ret, name, args) (void)resolve(cpu, #name, &mx_torch.name);
#define MX_RESOLVE_CUDA(ret, name, args)     (void)resolve(cuda, #name, &mx_torch.name);
    MX_TORCH_SYMBOLS(MX_RESOLVE)
    MX_TORCH_OPTIONAL_SYMBOLS(MX_RESOLVE_OPTIONAL)
    MX_TORCH_CUDA_SYMBOLS(MX_RESOLVE_CUDA)

    mx_torch.version = mx_torch.aoti_torch_abi_version();
#define MX_ASK_DTYPE(name) mx_torch.dtype_##name = mx_torch.aoti_torch_dtype_##name();
    MX_TORCH_DTYPES(MX_ASK_DTYPE)
    mx_torch.dtype_float8_e8m0fnu =
        mx_torch.torch_dtype_float8_e8m0fnu ? mx_torch.torch_dtype_float8_e8m0fnu() : MX_TORCH_FLOAT8_E8M0FNU;
    mx_torch.device_cpu = mx_torch.aoti_torch_device_type_cpu();
    mx_torch.device_cuda = mx_torch.aoti_torch_device_type_cuda();
    return true;
}
