/*
 * driver_on_host.cpp - the functions of libcuda that csrc/cuda/driver.c opens, for devices that do not exist.
 *
 * The package's own host code (plans, tensor maps, launches) runs unchanged on top of them. Device memory is host memory
 * that a test registers. A module image is the path of a kernel library that host_build.py made. Launches run at once, on the
 * calling thread; if one fails, cuGetErrorString gives the emulator's message.
 */
#include <cuda.h>
#include <dlfcn.h>
#include <link.h>

#include <cstdio>
#include <cstring>
#include <memory>

#include "memory.h"
#include "runtime.h"
#include "tma.h"

namespace {

struct Device {
    const char *name;
    int major, minor, num_sms;
};

/* Two sizes of each: the small ones make persistent kernels walk several tiles a block. */
const Device DEVICES[] = {
    {"emulated H200", 9, 0, 132},   {"emulated Hopper with 4 SMs", 9, 0, 4},
    {"emulated B200", 10, 0, 148},  {"emulated Blackwell with 4 SMs", 10, 0, 4},
    {"emulated GB300", 10, 3, 152},
};
const int NUM_DEVICES = sizeof DEVICES / sizeof DEVICES[0];

struct Function {
    const emu_kernel *kernel;
    int device;
    int max_dynamic_bytes;
};

struct Module {
    std::vector<std::unique_ptr<Function>> functions;
};

std::string last_error;
CUcontext current_context; /* a context is its device's number + 1 */
uint64_t launches;         /* since emu_reset */

int device_of(CUcontext context) { return (int)(intptr_t)context - 1; }

CUresult refuse(CUresult code, const char *format, ...) __attribute__((format(printf, 2, 3)));
CUresult refuse(CUresult code, const char *format, ...) {
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    last_error = text;
    return code;
}

/* Lets kernels read the constants of their own library. */
int note_segments(struct dl_phdr_info *info, size_t, void *wanted) {
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const char *low = (const char *)info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
        if (info->dlpi_phdr[i].p_type == PT_LOAD && (const char *)wanted >= low &&
            (const char *)wanted < low + info->dlpi_phdr[i].p_memsz) {
            for (int j = 0; j < info->dlpi_phnum; j++) {
                if (info->dlpi_phdr[j].p_type == PT_LOAD) {
                    low = (const char *)info->dlpi_addr + info->dlpi_phdr[j].p_vaddr;
                    emu::add_image(low, low + info->dlpi_phdr[j].p_memsz);
                }
            }
            return 1;
        }
    }
    return 0;
}

} // namespace

/* ---- start, devices, contexts ---------------------------------------------------------------------------- */

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }

CUresult cuDriverGetVersion(int *version) {
    *version = 13000;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **name) {
    *name = error == CUDA_ERROR_LAUNCH_FAILED       ? "CUDA_ERROR_LAUNCH_FAILED"
            : error == CUDA_ERROR_INVALID_VALUE     ? "CUDA_ERROR_INVALID_VALUE"
            : error == CUDA_ERROR_NO_BINARY_FOR_GPU ? "CUDA_ERROR_NO_BINARY_FOR_GPU"
            : error == CUDA_ERROR_NOT_SUPPORTED     ? "CUDA_ERROR_NOT_SUPPORTED"
            : error == CUDA_ERROR_FILE_NOT_FOUND    ? "CUDA_ERROR_FILE_NOT_FOUND"
                                                    : "CUDA_ERROR";
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult, const char **text) {
    *text = last_error.c_str();
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
    *count = NUM_DEVICES;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = ordinal;
    return ordinal >= 0 && ordinal < NUM_DEVICES ? CUDA_SUCCESS : refuse(CUDA_ERROR_INVALID_VALUE, "no such device");
}

CUresult cuDeviceGetName(char *name, int bytes, CUdevice device) {
    snprintf(name, (size_t)bytes, "%s", DEVICES[device].name);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
        *value = DEVICES[device].major;
        break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
        *value = DEVICES[device].minor;
        break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
        *value = DEVICES[device].num_sms;
        break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
        *value = (int)emu::MAX_SHARED;
        break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
        *value = 228 * 1024;
        break;
    case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
        *value = 1;
        break;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE:
        *value = 50 << 20;
        break;
    default:
        return refuse(CUDA_ERROR_NOT_SUPPORTED, "device attribute %d is not emulated", (int)attribute);
    }
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    *context = (CUcontext)(intptr_t)(device + 1);
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = current_context;
    return CUDA_SUCCESS;
}

static std::vector<CUcontext> context_stack;

CUresult cuCtxPushCurrent(CUcontext context) {
    context_stack.push_back(current_context);
    current_context = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent(CUcontext *context) {
    if (context_stack.empty()) {
        return refuse(CUDA_ERROR_INVALID_CONTEXT, "cuCtxPopCurrent without a push");
    }
    *context = current_context;
    current_context = context_stack.back();
    context_stack.pop_back();
    return CUDA_SUCCESS;
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *) { return CUDA_SUCCESS; }

/* ---- modules --------------------------------------------------------------------------------------------- */

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    const char *path = (const char *)image;
    const Device &device = DEVICES[device_of(current_context)];
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        return refuse(CUDA_ERROR_FILE_NOT_FOUND, "%s", dlerror());
    }
    const emu_kernel *kernels = (const emu_kernel *)dlsym(library, "emu_kernels");
    const int *count = (const int *)dlsym(library, "emu_num_kernels"),
              *arch = (const int *)dlsym(library, "emu_arch");
    if (!kernels || !count || !arch || *arch / 10 != device.major) {
        return refuse(CUDA_ERROR_NO_BINARY_FOR_GPU, "%s holds no kernels for %s", path, device.name);
    }
    dl_iterate_phdr(note_segments, (void *)kernels);
    auto loaded = std::make_unique<Module>();
    for (int i = 0; i < *count; i++) {
        loaded->functions.push_back(
            std::make_unique<Function>(Function{&kernels[i], device_of(current_context), 48 << 10}));
    }
    *module = (CUmodule)loaded.release(); /* modules stay loaded, as in the package */
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunctionCount(unsigned *count, CUmodule module) {
    *count = (unsigned)((Module *)module)->functions.size();
    return CUDA_SUCCESS;
}

CUresult cuModuleEnumerateFunctions(CUfunction *functions, unsigned count, CUmodule module) {
    for (unsigned i = 0; i < count; i++) {
        functions[i] = (CUfunction)((Module *)module)->functions[i].get();
    }
    return CUDA_SUCCESS;
}

CUresult cuFuncGetName(const char **name, CUfunction function) {
    *name = ((Function *)function)->kernel->name;
    return CUDA_SUCCESS;
}

CUresult cuFuncLoad(CUfunction) { return CUDA_SUCCESS; }

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    const Function &f = *(Function *)function;
    switch (attribute) {
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
        *value = 0;
        break;
    case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES:
        *value = 0;
        break;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
        *value = f.max_dynamic_bytes;
        break;
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
        *value = f.kernel->max_threads ? (int)f.kernel->max_threads : 1024;
        break;
    default:
        return refuse(CUDA_ERROR_NOT_SUPPORTED, "function attribute %d is not emulated", (int)attribute);
    }
    return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES && value <= (int)emu::MAX_SHARED) {
        ((Function *)function)->max_dynamic_bytes = value;
        return CUDA_SUCCESS;
    }
    if (attribute == CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED ||
        (attribute == CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT && value >= -1 && value <= 100)) {
        return CUDA_SUCCESS;
    }
    return refuse(CUDA_ERROR_INVALID_VALUE, "function attribute %d = %d", (int)attribute, value);
}

/* ---- launches -------------------------------------------------------------------------------------------- */

static CUresult read_attributes(const CUlaunchConfig *config, emu::Launch &l) {
    for (unsigned i = 0; i < config->numAttrs; i++) {
        const CUlaunchAttribute &a = config->attrs[i];
        switch (a.id) {
        case CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
            l.cluster = a.value.clusterDim.x;
            if (a.value.clusterDim.y != 1 || a.value.clusterDim.z != 1) {
                return refuse(CUDA_ERROR_NOT_SUPPORTED, "clusters are emulated along x only");
            }
            break;
        case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION:
            l.overlaps = a.value.programmaticStreamSerializationAllowed != 0;
            break;
        case CU_LAUNCH_ATTRIBUTE_COOPERATIVE:
            break;
        default:
            return refuse(CUDA_ERROR_NOT_SUPPORTED, "launch attribute %d is not emulated", (int)a.id);
        }
    }
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **params, void **) {
    const Function &f = *(Function *)function;
    emu::Launch l;
    l.kernel = f.kernel;
    l.grid = {config->gridDimX, config->gridDimY, config->gridDimZ};
    l.block = {config->blockDimX, config->blockDimY, config->blockDimZ};
    l.shared_bytes = config->sharedMemBytes;
    l.capability = 10 * DEVICES[f.device].major + DEVICES[f.device].minor;
    CUresult code = read_attributes(config, l);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    if (device_of(current_context) != f.device) {
        return refuse(CUDA_ERROR_INVALID_CONTEXT, "%s was loaded for device %d, the current one is %d",
                      f.kernel->name, f.device, device_of(current_context));
    }
    if ((int)l.shared_bytes > f.max_dynamic_bytes) {
        return refuse(CUDA_ERROR_INVALID_VALUE, "%s: %u bytes of shared memory, allowed are %d", f.kernel->name,
                      l.shared_bytes, f.max_dynamic_bytes);
    }
    /* The driver copies parameters at the launch: here pointers to them, then each one on 128 bytes. */
    auto padded = [](size_t n) { return (n + 127) / 128 * 128; };
    size_t bytes = padded(f.kernel->num_params * sizeof(void *)), at = bytes;
    for (uint32_t i = 0; i < f.kernel->num_params; i++) {
        bytes += padded(f.kernel->param_bytes[i]);
    }
    std::vector<char> storage(bytes + 128);
    char *base = (char *)padded((uintptr_t)storage.data());
    void **copies = (void **)base;
    for (uint32_t i = 0; i < f.kernel->num_params; i++) {
        memcpy(base + at, params[i], f.kernel->param_bytes[i]);
        copies[i] = base + at;
        at += padded(f.kernel->param_bytes[i]);
    }
    emu::set_parameters(storage.data(), storage.size());
    l.params = copies;
    last_error = emu::run_launch(l);
    emu::set_parameters(nullptr, 0);
    launches++;
    return last_error.empty() ? CUDA_SUCCESS : CUDA_ERROR_LAUNCH_FAILED;
}

/* As measured on an H200: one block of nearly all shared memory an SM, clusters inside groups of SMs. */
CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config) {
    emu::Launch l;
    CUresult code = read_attributes(config, l);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    const Function &f = *(Function *)function;
    const int sms = DEVICES[f.device].num_sms, size = (int)l.cluster;
    if ((int)config->sharedMemBytes > f.max_dynamic_bytes) {
        return refuse(CUDA_ERROR_INVALID_VALUE, "%s: too much shared memory", f.kernel->name);
    }
    *count = size <= 2 || sms < 100 ? sms / size : sms * 10 / 11 / size;
    return CUDA_SUCCESS;
}

/* ---- tensor maps ----------------------------------------------------------------------------------------- */

/* The limits are those of the driver's documentation of cuTensorMapEncodeTiled. */
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *size, const cuuint64_t *stride, const cuuint32_t *box,
                                const cuuint32_t *element_stride, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
    static const uint8_t SWIZZLES[] = {0, 32, 64, 128};
    if (current_context == nullptr) { /* found out on an H200, the documentation does not say so */
        return refuse(CUDA_ERROR_INVALID_CONTEXT, "cuTensorMapEncodeTiled without a current context");
    }
    emu::TensorMap m = {};
    m.magic = emu::TENSOR_MAP_MAGIC;
    m.address = (char *)address;
    m.rank = (uint8_t)rank;
    m.element_bytes = type == CU_TENSOR_MAP_DATA_TYPE_UINT8                                                ? 1
                      : type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 || type == CU_TENSOR_MAP_DATA_TYPE_UINT16 ? 2
                      : type == CU_TENSOR_MAP_DATA_TYPE_INT32 || type == CU_TENSOR_MAP_DATA_TYPE_UINT32 ||
                              type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                          ? 4
                          : 0;
    if (m.element_bytes == 0 || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || (int)swizzle > 3 ||
        fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) {
        return refuse(CUDA_ERROR_NOT_SUPPORTED,
                      "tensor map of type %d, interleave %d, swizzle %d, fill %d is not emulated", (int)type,
                      (int)interleave, (int)swizzle, (int)fill);
    }
    m.swizzle_bytes = SWIZZLES[swizzle];
    if ((uintptr_t)map % 64 != 0 || (uintptr_t)address % 16 != 0 || rank < 1 || rank > 5) {
        return refuse(CUDA_ERROR_INVALID_VALUE, "tensor map at %p, of address %p, of rank %u", (void *)map, address,
                      rank);
    }
    for (uint32_t i = 0; i < rank; i++) {
        if (size[i] == 0 || size[i] > 1ull << 32 || box[i] == 0 || box[i] > 256 || element_stride[i] != 1) {
            return refuse(CUDA_ERROR_INVALID_VALUE,
                          "tensor map: dimension %u has size %llu, box %u, element stride %u", i,
                          (unsigned long long)size[i], box[i], element_stride[i]);
        }
        m.size[i] = size[i];
        m.box[i] = (uint16_t)box[i];
    }
    for (uint32_t i = 0; i + 1 < rank; i++) {
        if (stride[i] % 16 != 0 || stride[i] >= 1ull << 40) {
            return refuse(CUDA_ERROR_INVALID_VALUE, "tensor map: stride %llu of dimension %u",
                          (unsigned long long)stride[i], i + 1);
        }
        m.stride[i] = stride[i];
    }
    const uint32_t row = box[0] * m.element_bytes;
    if (row % 16 != 0 || (m.swizzle_bytes && row > m.swizzle_bytes)) {
        return refuse(CUDA_ERROR_INVALID_VALUE, "tensor map: the box is %u bytes wide, the swizzle %u", row,
                      m.swizzle_bytes);
    }
    if (m.swizzle_bytes && row != m.swizzle_bytes) {
        return refuse(CUDA_ERROR_NOT_SUPPORTED,
                      "tensor map: a box of %u bytes under a %u-byte swizzle is not emulated", row, m.swizzle_bytes);
    }
    memset(map, 0, sizeof *map);
    memcpy(map, &m, sizeof m);
    return CUDA_SUCCESS;
}

/* ---- for host.py ----------------------------------------------------------------------------------------- */

extern "C" {

void emu_register(void *p, size_t bytes, const char *name) { emu::register_buffer(p, bytes, name); }

/* Forgets buffers, faults and options. */
void emu_reset() {
    emu::forget_buffers();
    emu::options = emu::Options();
    last_error.clear();
    launches = 0;
}

/* 0, or -1 if there is no such option. */
int emu_set_option(const char *name, uint64_t value) {
    const std::string option = name;
    if (option == "delivery") {
        emu::options.delivery = (emu::Delivery)value;
    } else if (option == "seed") {
        emu::options.seed = (uint32_t)value;
    } else if (option == "elect_lane") {
        emu::options.elect_lane = (uint32_t)value;
    } else if (option == "max_steps") {
        emu::options.max_steps = value;
    } else if (option == "check_races") {
        emu::options.check_races = value != 0;
    } else if (option.rfind("flip.", 0) == 0) {
        emu::options.flip[option.substr(5)] = value;
    } else {
        return -1;
    }
    return 0;
}

/* Launches one kernel of a library on its own; 0 or a CUresult. */
int emu_launch(const char *library, const char *kernel, const unsigned *grid, unsigned block, unsigned clusters,
               unsigned shared_bytes, int overlaps, int device, void **params) {
    CUcontext context, popped;
    CUmodule module;
    cuDevicePrimaryCtxRetain(&context, device);
    cuCtxPushCurrent(context);
    CUresult code = cuModuleLoadData(&module, library);
    if (code == CUDA_SUCCESS) {
        code = refuse(CUDA_ERROR_NOT_FOUND, "%s holds no kernel %s", library, kernel);
        for (auto &function : ((Module *)module)->functions) {
            if (strcmp(function->kernel->name, kernel) == 0) {
                CUlaunchAttribute attributes[2] = {};
                attributes[0].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
                attributes[0].value.clusterDim.x = clusters;
                attributes[0].value.clusterDim.y = attributes[0].value.clusterDim.z = 1;
                attributes[1].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
                attributes[1].value.programmaticStreamSerializationAllowed = overlaps;
                const CUlaunchConfig config = {grid[0], grid[1],      grid[2], block,      1,
                                               1,       shared_bytes, nullptr, attributes, 2};
                function->max_dynamic_bytes = (int)emu::MAX_SHARED;
                code = cuLaunchKernelEx(&config, (CUfunction)function.get(), params, nullptr);
            }
        }
    }
    cuCtxPopCurrent(&popped);
    return code;
}

const char *emu_last_error() { return last_error.c_str(); }

uint64_t emu_num_launches() { return launches; }

/* Of the latest launch. */
uint64_t emu_counter(const char *name) {
    auto found = emu::counters.find(name);
    return found == emu::counters.end() ? 0 : found->second;
}

/* The host code's dlopen, by the linker's --wrap: libcuda is this library. */
void *__wrap_dlopen(const char *name, int mode) {
    if (name && strcmp(name, "libcuda.so.1") == 0) {
        Dl_info info;
        if (!dladdr((void *)emu_last_error, &info)) {
            return nullptr;
        }
        name = info.dli_fname;
    }
    return dlopen(name, mode);
}
}
