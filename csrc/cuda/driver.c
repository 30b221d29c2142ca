/* driver.c - see driver.h. */
#include "driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- the driver's functions ------------------------------------------------------------------------------ */

/* Every driver function used, under its exported (versioned) name. The newest came with driver 550 (CUDA 12.4). */
#define MX_DRIVER_FUNCTIONS(X)                                                                                       \
    X(cuInit)                                                                                                        \
    X(cuDriverGetVersion)                                                                                            \
    X(cuGetErrorName)                                                                                                \
    X(cuGetErrorString)                                                                                              \
    X(cuDeviceGet)                                                                                                   \
    X(cuDeviceGetCount)                                                                                              \
    X(cuDeviceGetName)                                                                                               \
    X(cuDeviceGetAttribute)                                                                                          \
    X(cuDevicePrimaryCtxRetain)                                                                                      \
    X(cuCtxGetCurrent)                                                                                               \
    X(cuCtxPushCurrent_v2)                                                                                           \
    X(cuCtxPopCurrent_v2)                                                                                            \
    X(cuThreadExchangeStreamCaptureMode)                                                                             \
    X(cuModuleLoadData)                                                                                              \
    X(cuModuleGetFunctionCount)                                                                                      \
    X(cuModuleEnumerateFunctions)                                                                                    \
    X(cuFuncGetName)                                                                                                 \
    X(cuFuncLoad)                                                                                                    \
    X(cuFuncGetAttribute)                                                                                            \
    X(cuFuncSetAttribute)                                                                                            \
    X(cuLaunchKernelEx)                                                                                              \
    X(cuOccupancyMaxActiveClusters)                                                                                  \
    X(cuTensorMapEncodeTiled)

static struct {
#define MX_DRIVER_FIELD(name) __typeof__(&name) name;
    MX_DRIVER_FUNCTIONS(MX_DRIVER_FIELD)
#undef MX_DRIVER_FIELD
} driver;

enum { MX_DRIVER_UNTRIED, MX_DRIVER_READY, MX_DRIVER_MISSING };

static pthread_mutex_t state_lock = PTHREAD_MUTEX_INITIALIZER;
static int driver_state = MX_DRIVER_UNTRIED; /* under state_lock */
static char driver_error[256];
static _Atomic(const struct mx_cuda_device *) devices[MX_CUDA_MAX_DEVICES];

__attribute__((format(printf, 4, 5))) static int report(int code, char *err, size_t n, const char *format, ...) {
    va_list args;
    if (err != NULL && n > 0) {
        va_start(args, format);
        vsnprintf(err, n, format, args);
        va_end(args);
    }
    return code;
}

/* "cuModuleLoadData: CUDA_ERROR_NO_BINARY_FOR_GPU (no kernel image is available ...), at: simt_quantize" */
static int report_driver(CUresult result, const char *call, const char *doing, char *err, size_t n) {
    const char *name = "unknown error", *text = "no description";
    driver.cuGetErrorName(result, &name);
    driver.cuGetErrorString(result, &text);
    return report(MX_FAILED, err, n, "%s: %s (%s), at: %s", call, name, text, doing);
}

/* Runs one driver call; on an error writes it to err and jumps to `done` with code = MX_FAILED. */
#define CHECK_DRIVER(call, args, doing)                                                                              \
    do {                                                                                                             \
        CUresult result_ = driver.call args;                                                                         \
        if (result_ != CUDA_SUCCESS) {                                                                               \
            code = report_driver(result_, #call, doing, err, n);                                                     \
            goto done;                                                                                               \
        }                                                                                                            \
    } while (0)

/* Opens libcuda.so.1 and initialises it, once per process. Call with state_lock held. */
static int open_driver(char *err, size_t n) {
    if (driver_state == MX_DRIVER_UNTRIED) {
        void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
        CUresult result = CUDA_SUCCESS;
        driver_state = MX_DRIVER_MISSING;
        if (library == NULL) {
            snprintf(driver_error, sizeof driver_error, "no CUDA driver: %s", dlerror());
            return report(MX_UNSUPPORTED, err, n, "%s", driver_error);
        }
#define MX_DRIVER_LOAD(name)                                                                                         \
    *(void **)&driver.name = dlsym(library, #name);                                                                  \
    if (driver.name == NULL) {                                                                                       \
        snprintf(driver_error, sizeof driver_error,                                                                  \
                 "the CUDA driver has no %s; these kernels need driver 580 (CUDA 13.0) or newer", #name);            \
        return report(MX_UNSUPPORTED, err, n, "%s", driver_error);                                                   \
    }
        MX_DRIVER_FUNCTIONS(MX_DRIVER_LOAD)
#undef MX_DRIVER_LOAD
        result = driver.cuInit(0);
        if (result != CUDA_SUCCESS) {
            report_driver(result, "cuInit", "starting the CUDA driver", driver_error, sizeof driver_error);
            return report(MX_UNSUPPORTED, err, n, "%s", driver_error);
        }
        driver_state = MX_DRIVER_READY;
    }
    if (driver_state == MX_DRIVER_MISSING) {
        return report(MX_UNSUPPORTED, err, n, "%s", driver_error);
    }
    return MX_OK;
}

/* ---- devices --------------------------------------------------------------------------------------------- */

/* Whether some image is for this family of devices: "sm90_..." for 9.0, "sm100_..." for 10.0 and 10.3. */
static int have_images(int capability) {
    for (int i = 0; i < mx_cuda_num_images; i++) {
        const int family = atoi(mx_cuda_images[i].name + strspn(mx_cuda_images[i].name, "sm"));
        if (family == capability || (family == 100 && capability / 10 == 10)) {
            return 1;
        }
    }
    return 0;
}

/* Fills in what can be asked without a context. Call with state_lock held and the driver open. */
static int query_device(int device, struct mx_cuda_device *dev, char *err, size_t n) {
    int count = 0, major = 0, minor = 0, code = MX_OK;
    char name[128] = "";
    CHECK_DRIVER(cuDeviceGetCount, (&count), "counting devices");
    if (device < 0 || device >= count || device >= MX_CUDA_MAX_DEVICES) {
        return report(MX_UNSUPPORTED, err, n, "device cuda:%d does not exist: the driver shows %d", device, count);
    }
    dev->ordinal = device;
    CHECK_DRIVER(cuDeviceGet, (&dev->handle, device), "asking for the device");
    CHECK_DRIVER(cuDeviceGetName, (name, sizeof name, dev->handle), "asking for the device's name");
    CHECK_DRIVER(cuDeviceGetAttribute, (&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, dev->handle),
                 "asking for the compute capability");
    CHECK_DRIVER(cuDeviceGetAttribute, (&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, dev->handle),
                 "asking for the compute capability");
    CHECK_DRIVER(cuDeviceGetAttribute, (&dev->num_sms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, dev->handle),
                 "asking for the number of SMs");
    CHECK_DRIVER(cuDeviceGetAttribute,
                 (&dev->smem_bytes, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, dev->handle),
                 "asking for the shared memory per block");
    dev->capability = 10 * major + minor;
    if (!have_images(dev->capability)) {
        return report(MX_UNSUPPORTED, err, n,
                      "cuda:%d (%s) has compute capability %d.%d, for which no kernels were built", device, name,
                      major, minor);
    }
done:
    return code;
}

static int compare_functions(const void *a, const void *b) {
    return strcmp(((const struct mx_cuda_function *)a)->name, ((const struct mx_cuda_function *)b)->name);
}

/* Appends the kernels of one image to dev->functions, loaded and allowed to use all of a block's shared memory. An image
 * without code for this device is passed over. */
static int load_image(struct mx_cuda_device *dev, const struct mx_cuda_image *image, char *err, size_t n) {
    int code = MX_OK;
    unsigned count = 0;
    CUmodule module = NULL;
    CUfunction *handles = NULL;
    struct mx_cuda_function *grown = NULL;

    CUresult loaded = driver.cuModuleLoadData(&module, image->data);
    if (loaded == CUDA_ERROR_NO_BINARY_FOR_GPU) {
        return MX_OK;
    }
    if (loaded != CUDA_SUCCESS) {
        return report_driver(loaded, "cuModuleLoadData", image->name, err, n);
    }
    CHECK_DRIVER(cuModuleGetFunctionCount, (&count, module), image->name);
    handles = malloc((count + 1) * sizeof *handles);
    grown = realloc(dev->functions, (dev->num_functions + count + 1) * sizeof *grown);
    if (grown != NULL) {
        dev->functions = grown;
    }
    if (handles == NULL || grown == NULL) {
        code = report(MX_FAILED, err, n, "out of memory while loading %s", image->name);
        goto done;
    }
    CHECK_DRIVER(cuModuleEnumerateFunctions, (handles, count, module), image->name);
    for (unsigned i = 0; i < count; i++) {
        struct mx_cuda_function *function = &dev->functions[dev->num_functions];
        int static_bytes = 0;
        function->handle = handles[i];
        CHECK_DRIVER(cuFuncGetName, (&function->name, handles[i]), image->name);
        CHECK_DRIVER(cuFuncLoad, (handles[i]),
                     function->name); /* else the first launch loads it, even in a capture */
        CHECK_DRIVER(cuFuncGetAttribute, (&static_bytes, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, handles[i]),
                     function->name);
        CHECK_DRIVER(cuFuncSetAttribute,
                     (handles[i], CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, dev->smem_bytes - static_bytes),
                     function->name);
        /* NOTE: a kernel whose blocks want another split of L1 and shared memory than those running cannot start
         * beside them, which would undo programmatic dependent launch. */
        CHECK_DRIVER(cuFuncSetAttribute, (handles[i], CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100),
                     function->name);
        dev->num_functions++;
    }
done:
    free(handles);
    return code;
}

static int load_images(struct mx_cuda_device *dev, char *err, size_t n) {
    int code = MX_OK, pushed = 0;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    CUcontext popped = NULL;

    CHECK_DRIVER(cuDevicePrimaryCtxRetain, (&dev->context, dev->handle), "retaining the primary context");
    CHECK_DRIVER(cuCtxPushCurrent_v2, (dev->context), "making the primary context current");
    pushed = 1;
    /* NOTE: loading a module may allocate, which a capture on this or another thread would otherwise forbid. */
    CHECK_DRIVER(cuThreadExchangeStreamCaptureMode, (&mode), "relaxing the capture mode");
    for (int i = 0; i < mx_cuda_num_images && code == MX_OK; i++) {
        code = load_image(dev, &mx_cuda_images[i], err, n);
    }
    driver.cuThreadExchangeStreamCaptureMode(&mode);
    qsort(dev->functions, (size_t)dev->num_functions, sizeof *dev->functions, compare_functions);
done:
    if (pushed) {
        driver.cuCtxPopCurrent_v2(&popped);
    }
    return code;
}

int mx_cuda_status(int device, char *reason, size_t n) {
    struct mx_cuda_device probe = {0};
    int code;
    pthread_mutex_lock(&state_lock);
    code = open_driver(reason, n);
    if (code == MX_OK) {
        code = query_device(device, &probe, reason, n);
    }
    pthread_mutex_unlock(&state_lock);
    return code;
}

int mx_cuda_prepare_device(int device, char *err, size_t n) {
    struct mx_cuda_device *dev = NULL;
    int code = MX_OK;
    if (device >= 0 && device < MX_CUDA_MAX_DEVICES &&
        atomic_load_explicit(&devices[device], memory_order_acquire) != NULL) {
        return MX_OK;
    }
    pthread_mutex_lock(&state_lock);
    code = open_driver(err, n);
    if (code == MX_OK && device >= 0 && device < MX_CUDA_MAX_DEVICES && atomic_load(&devices[device]) != NULL) {
        goto done; /* another thread was faster */
    }
    if (code == MX_OK) {
        dev = calloc(1, sizeof *dev);
        code = dev != NULL ? query_device(device, dev, err, n) : report(MX_FAILED, err, n, "out of memory");
    }
    if (code == MX_OK) {
        code = load_images(dev, err, n);
    }
    if (code == MX_OK) {
        atomic_store_explicit(&devices[device], dev, memory_order_release);
        dev = NULL;
    }
done:
    pthread_mutex_unlock(&state_lock);
    if (dev != NULL) {
        free(dev->functions);
        free(dev);
    }
    return code;
}

const struct mx_cuda_device *mx_cuda_device(int device, char *err, size_t n) {
    if (mx_cuda_prepare_device(device, err, n) != MX_OK) {
        return NULL;
    }
    return atomic_load_explicit(&devices[device], memory_order_acquire);
}

CUfunction mx_cuda_find_function(const struct mx_cuda_device *dev, const char *name) {
    struct mx_cuda_function key = {name, NULL}, *found = NULL;
    found = bsearch(&key, dev->functions, (size_t)dev->num_functions, sizeof key, compare_functions);
    return found != NULL ? found->handle : NULL;
}

/* ---- launches -------------------------------------------------------------------------------------------- */

/* Translates a launch; `attributes` has room for two. */
static CUlaunchConfig launch_config(const struct mx_cuda_launch *launch, CUstream stream, int pdl,
                                    CUlaunchAttribute *attributes) {
    CUlaunchConfig config = {
        .gridDimX = launch->grid[0],
        .gridDimY = launch->grid[1],
        .gridDimZ = launch->grid[2],
        .blockDimX = launch->block,
        .blockDimY = 1,
        .blockDimZ = 1,
        .sharedMemBytes = launch->smem_bytes,
        .hStream = stream,
        .attrs = attributes,
    };
    if (launch->cluster > 1) {
        CUlaunchAttribute *attribute = &attributes[config.numAttrs++];
        memset(attribute, 0, sizeof *attribute);
        attribute->id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
        attribute->value.clusterDim.x = launch->cluster;
        attribute->value.clusterDim.y = 1;
        attribute->value.clusterDim.z = 1;
    }
    if (pdl) {
        CUlaunchAttribute *attribute = &attributes[config.numAttrs++];
        memset(attribute, 0, sizeof *attribute);
        attribute->id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attribute->value.programmaticStreamSerializationAllowed = 1;
    }
    return config;
}

const struct mx_cuda_device *mx_cuda_enter(const struct mx_exec *exec, bool *pushed) {
    const struct mx_cuda_device *dev = mx_cuda_device(exec->device_index, exec->err, exec->err_bytes);
    char *err = exec->err;
    size_t n = exec->err_bytes;
    int code = MX_OK;
    CUcontext current = NULL;
    *pushed = false;
    if (dev == NULL) {
        return NULL;
    }
    CHECK_DRIVER(cuCtxGetCurrent, (&current), "asking for the current context");
    if (current != dev->context) {
        CHECK_DRIVER(cuCtxPushCurrent_v2, (dev->context), "making the primary context current");
        *pushed = true;
    }
done:
    return code == MX_OK ? dev : NULL;
}

void mx_cuda_leave(bool pushed) {
    CUcontext popped = NULL;
    if (pushed) {
        driver.cuCtxPopCurrent_v2(&popped);
    }
}

int mx_cuda_launch(const struct mx_cuda_device *dev, const struct mx_cuda_launch *launch,
                   const struct mx_exec *exec) {
    char *err = exec->err;
    size_t n = exec->err_bytes;
    int code = MX_OK;
    CUlaunchAttribute attributes[2];
    CUlaunchConfig config =
        launch_config(launch, (CUstream)exec->stream, !(exec->flags & MX_FLAG_NO_PDL), attributes);
    CUfunction function = mx_cuda_find_function(dev, launch->kernel);

    if (function == NULL) {
        return report(MX_FAILED, err, n, "kernel %s was not built for cuda:%d", launch->kernel, dev->ordinal);
    }
    CHECK_DRIVER(cuLaunchKernelEx, (&config, function, launch->params, NULL), launch->kernel);
done:
    return code;
}

int mx_cuda_refuse(const struct mx_exec *exec, const char *text, long long value) {
    if (exec->err != NULL && exec->err_bytes > 0) {
        snprintf(exec->err, exec->err_bytes, "%s, got %lld", text, value);
    }
    return MX_UNSUPPORTED;
}

int mx_cuda_check_aligned(const struct mx_exec *exec, const char *text, const void *data, int64_t strides,
                          int align) {
    const uintptr_t remainder = ((uintptr_t)data | (uintptr_t)strides) % (uintptr_t)align;
    return remainder != 0 ? mx_cuda_refuse(exec, text, (long long)remainder) : MX_OK;
}

int mx_cuda_max_active_clusters(const struct mx_cuda_device *dev, const struct mx_cuda_launch *launch) {
    int count = 0;
    CUcontext popped = NULL;
    CUlaunchAttribute attributes[2];
    CUlaunchConfig config = launch_config(launch, NULL, 0, attributes);
    CUfunction function = mx_cuda_find_function(dev, launch->kernel);
    if (function == NULL || driver.cuCtxPushCurrent_v2(dev->context) != CUDA_SUCCESS) {
        return 0;
    }
    if (driver.cuOccupancyMaxActiveClusters(&count, function, &config) != CUDA_SUCCESS) {
        count = 0;
    }
    driver.cuCtxPopCurrent_v2(&popped);
    return count;
}

/* ---- tensor maps ----------------------------------------------------------------------------------------- */

int mx_cuda_check_tensor(const struct mx_cuda_tensor *tensor, char *err, size_t n) {
    if ((uintptr_t)tensor->data % 16 != 0) {
        return report(MX_UNSUPPORTED, err, n, "%s: address must be a multiple of 16 bytes, got remainder %d",
                      tensor->name, (int)((uintptr_t)tensor->data % 16));
    }
    for (int i = 0; i + 1 < tensor->num_dims; i++) {
        /* 2^40 is the copy engine's limit on a stride. */
        if (tensor->stride[i] % 16 != 0 || tensor->stride[i] >= (uint64_t)1 << 40) {
            return report(MX_UNSUPPORTED, err, n, "%s: stride must be a multiple of 16 bytes below 2^40, got %llu",
                          tensor->name, (unsigned long long)tensor->stride[i]);
        }
    }
    for (int i = 0; i < tensor->num_dims; i++) {
        if (tensor->size[i] == 0 || tensor->size[i] > (uint64_t)1 << 32) {
            return report(MX_UNSUPPORTED, err, n, "%s: size must be 1 to 2^32, got %llu", tensor->name,
                          (unsigned long long)tensor->size[i]);
        }
    }
    return MX_OK;
}

int mx_cuda_encode_tensor(CUtensorMap *map, const struct mx_cuda_tensor *tensor, char *err, size_t n) {
    static const cuuint32_t unit_steps[5] = {1, 1, 1, 1, 1};
    CUtensorMapDataType type =
        tensor->element_bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8;
    CUtensorMapSwizzle swizzle = tensor->swizzle_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                 : tensor->swizzle_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                 : tensor->swizzle_bytes == 32 ? CU_TENSOR_MAP_SWIZZLE_32B
                                                               : CU_TENSOR_MAP_SWIZZLE_NONE;
    int code = mx_cuda_check_tensor(tensor, err, n);
    if (code != MX_OK) {
        return code;
    }
    CHECK_DRIVER(cuTensorMapEncodeTiled,
                 (map, type, (cuuint32_t)tensor->num_dims, (void *)(uintptr_t)tensor->data, tensor->size,
                  tensor->stride, tensor->box, unit_steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
                 tensor->name);
done:
    return code;
}
