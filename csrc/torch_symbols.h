/*
 * torch_symbols.h - the one list of libtorch symbols this package uses.
 *
 * Each row is X(return type, name, (argument types)). torch_shim.c turns the list into a table filled with dlsym;
 * tests/test_torch_abi.py includes it from C++ beside the installed torch's own headers and static_asserts that every
 * prototype is theirs. The prototypes follow torch/csrc/inductor/aoti_torch/c/shim.h and torch/csrc/stable/c/shim.h
 * (PyTorch, BSD-3-Clause, Copyright (c) 2016- Facebook, Inc. and the PyTorch contributors): C functions on opaque
 * handles, promised for two years per release.
 *
 * The includer defines AtenTensorHandle, TorchLibraryHandle, AOTITorchError and StableIValue.
 */
#ifndef VLLM_MEGAATTN_TORCH_SYMBOLS_H
#define VLLM_MEGAATTN_TORCH_SYMBOLS_H

/* In libtorch_cpu, all present from torch 2.10 on. */
#define MX_TORCH_SYMBOLS(X)                                                                                          \
    X(uint64_t, aoti_torch_abi_version, (void))                                                                      \
    X(void, aoti_torch_check, (bool, const char *, const char *, uint32_t, const char *))                            \
    X(AOTITorchError, aoti_torch_library_init_fragment,                                                              \
      (const char *, const char *, uint32_t, TorchLibraryHandle *))                                                  \
    X(AOTITorchError, aoti_torch_library_init_impl,                                                                  \
      (const char *, const char *, const char *, uint32_t, TorchLibraryHandle *))                                    \
    X(AOTITorchError, aoti_torch_library_def, (TorchLibraryHandle, const char *))                                    \
    X(AOTITorchError, torch_library_impl,                                                                            \
      (TorchLibraryHandle, const char *, void (*)(StableIValue *, uint64_t, uint64_t), uint64_t))                    \
    X(AOTITorchError, aoti_torch_delete_tensor_object, (AtenTensorHandle))                                           \
    X(AOTITorchError, aoti_torch_get_data_ptr, (AtenTensorHandle, void **))                                          \
    X(AOTITorchError, aoti_torch_get_dim, (AtenTensorHandle, int64_t *))                                             \
    X(AOTITorchError, aoti_torch_get_sizes, (AtenTensorHandle, int64_t **))                                          \
    X(AOTITorchError, aoti_torch_get_strides, (AtenTensorHandle, int64_t **))                                        \
    X(AOTITorchError, aoti_torch_get_dtype, (AtenTensorHandle, int32_t *))                                           \
    X(AOTITorchError, aoti_torch_get_device_type, (AtenTensorHandle, int32_t *))                                     \
    X(AOTITorchError, aoti_torch_get_device_index, (AtenTensorHandle, int32_t *))                                    \
    X(int32_t, aoti_torch_dtype_float8_e4m3fn, (void))                                                               \
    X(int32_t, aoti_torch_dtype_float8_e5m2, (void))                                                                 \
    X(int32_t, aoti_torch_dtype_bfloat16, (void))                                                                    \
    X(int32_t, aoti_torch_dtype_float16, (void))                                                                     \
    X(int32_t, aoti_torch_dtype_float32, (void))                                                                     \
    X(int32_t, aoti_torch_dtype_float64, (void))                                                                     \
    X(int32_t, aoti_torch_dtype_bool, (void))                                                                        \
    X(int32_t, aoti_torch_dtype_uint8, (void))                                                                       \
    X(int32_t, aoti_torch_dtype_int8, (void))                                                                        \
    X(int32_t, aoti_torch_dtype_int16, (void))                                                                       \
    X(int32_t, aoti_torch_dtype_int32, (void))                                                                       \
    X(int32_t, aoti_torch_dtype_int64, (void))                                                                       \
    X(int32_t, aoti_torch_device_type_cpu, (void))                                                                   \
    X(int32_t, aoti_torch_device_type_cuda, (void))                                                                  \
    X(AOTITorchError, torch_parallel_for, (int64_t, int64_t, int64_t, void (*)(int64_t, int64_t, void *), void *))

/* Younger than the oldest supported torch, or only in some builds: NULL where absent. */
#define MX_TORCH_OPTIONAL_SYMBOLS(X) X(int32_t, torch_dtype_float8_e8m0fnu, (void)) /* torch 2.11 */

/* In libtorch_cuda, absent from CPU builds of torch. */
#define MX_TORCH_CUDA_SYMBOLS(X) X(AOTITorchError, aoti_torch_get_current_cuda_stream, (int32_t, void **))

/* The element types above, by torch's own names: aoti_torch_dtype_<name>() gives the code that mx_torch.dtype_<name>
 * keeps and messages spell as <name>. */
#define MX_TORCH_DTYPES(X)                                                                                           \
    X(float8_e4m3fn)                                                                                                 \
    X(float8_e5m2)                                                                                                   \
    X(bfloat16) X(float16) X(float32) X(float64) X(bool) X(uint8) X(int8) X(int16) X(int32) X(int64)

/* The getter of this one came with torch 2.11; the enum is append-only and part of torch's file format, so the number
 * holds for 2.10 too. */
#define MX_TORCH_FLOAT8_E8M0FNU 44

#define MX_TORCH_OLDEST         "2.10"

#endif /* VLLM_MEGAATTN_TORCH_SYMBOLS_H */
