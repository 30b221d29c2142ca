/*
 * driver.h - the CUDA driver, opened at run time, and what is known about each device.
 *
 * The package links neither libcuda nor the CUDA runtime: libcuda.so.1 is opened with dlopen on first use, so the same
 * module imports on a machine without a GPU and says there why no kernel can run. The machine code of the kernels is
 * part of the module (`mx_cuda_images`, one fat binary per .cu file) and is loaded into a device's primary context, the
 * one torch uses, the first time that device is needed.
 *
 * State is kept per device ordinal, is written once under a lock and never changes or goes away afterwards, so every
 * function may be called from any thread. Nothing here touches a device before it is asked to.
 *
 *     const struct mx_cuda_device *dev = mx_cuda_device(exec->device_index, exec->err, exec->err_bytes);
 *     struct mx_cuda_launch launch = {.kernel = "mx_simt_quantize_1_32", .grid = {132, 1, 1}, .block = 256, ...};
 *     return dev == NULL ? MX_FAILED : mx_cuda_launch(dev, &launch, exec);
 *
 * Functions that return int return an mx_code; text goes to `err` (at most `n` bytes, one line).
 */
#ifndef VLLM_MEGAATTN_CUDA_DRIVER_H
#define VLLM_MEGAATTN_CUDA_DRIVER_H

#include <cuda.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MX_CUDA_MAX_DEVICES 64

/* One fat binary per .cu file, embedded by the build. */
struct mx_cuda_image {
    const char *name;
    const void *data;
    size_t bytes;
};
extern const struct mx_cuda_image mx_cuda_images[];
extern const int mx_cuda_num_images;

/* A kernel of the loaded images: its extern "C" name and its handle. */
struct mx_cuda_function {
    const char *name; /* owned by the driver, valid as long as the module is loaded (always) */
    CUfunction handle;
};

/* What the host side knows about one device. Immutable once published. */
struct mx_cuda_device {
    int ordinal;
    CUdevice handle;
    CUcontext context; /* the primary context, retained for the life of the process */
    int capability;    /* 10 * major + minor */
    int num_sms;
    int smem_bytes; /* shared memory one block may ask for */
    int num_functions;
    struct mx_cuda_function *functions; /* sorted by name */
};

/* MX_OK if this device can run the kernels; else MX_UNSUPPORTED and the reason. Creates no context, loads nothing. */
int mx_cuda_status(int device, char *reason, size_t n);

/* Loads every image for the device, whole, whatever CUDA_MODULE_LOADING says. Call it before the first capture where
 * that is possible; it is legal inside one too. Later calls return at once. */
int mx_cuda_prepare_device(int device, char *err, size_t n);

/* The prepared device, preparing it if need be; NULL and the reason in `err` if that fails. */
const struct mx_cuda_device *mx_cuda_device(int device, char *err, size_t n);

/* Makes that device's context the calling thread's current one, which the driver wants for tensor maps and launches and
 * a thread that never used CUDA does not have. `*pushed` goes to mx_cuda_leave, which restores what was current. */
const struct mx_cuda_device *mx_cuda_enter(const struct mx_exec *exec, bool *pushed);
void mx_cuda_leave(bool pushed);

/* The kernel of that name, or NULL. */
CUfunction mx_cuda_find_function(const struct mx_cuda_device *dev, const char *name);

/* One kernel launch. */
struct mx_cuda_launch {
    const char *kernel; /* extern "C" name */
    uint32_t grid[3];   /* in blocks; grid[0] is a multiple of cluster */
    uint32_t cluster;   /* blocks per cluster along x; 0 or 1: no cluster */
    uint32_t block;     /* threads */
    uint32_t smem_bytes;
    void **params; /* one pointer per kernel parameter */
};

/* Launches on exec->stream of `dev`, with programmatic dependent launch unless exec->flags has MX_FLAG_NO_PDL: every
 * kernel of this package runs griddepcontrol.wait before it touches what an earlier kernel may have written. The
 * device has been entered. */
int mx_cuda_launch(const struct mx_cuda_device *dev, const struct mx_cuda_launch *launch, const struct mx_exec *exec);

/* Writes "<text>, got <value>" to exec->err and returns MX_UNSUPPORTED. */
int mx_cuda_refuse(const struct mx_exec *exec, const char *text, long long value);

/* Refuses with the remainder where an address or a stride in bytes (several may be or-ed) is no multiple of `align`, a
 * power of two. */
int mx_cuda_check_aligned(const struct mx_exec *exec, const char *text, const void *data, int64_t strides, int align);

/* For x < 2^32 / divisor: x / divisor = (x * reciprocal) >> 32. A divisor of 1 does not fit, 0 stands for it. */
static inline uint32_t mx_cuda_reciprocal(int64_t divisor) {
    return divisor == 1 ? 0 : (uint32_t)mx_ceil_div((int64_t)1 << 32, divisor);
}

/* How many clusters of this launch fit on the device at once; 0 if the driver cannot say. */
int mx_cuda_max_active_clusters(const struct mx_cuda_device *dev, const struct mx_cuda_launch *launch);

/* A tensor of bytes, or of BF16 when element_bytes is 2, as the copy engine sees it. Dimension 0 is the contiguous one;
 * stride[i] is the distance in bytes between neighbours along dimension i + 1. */
struct mx_cuda_tensor {
    const char *name; /* argument's name, for messages */
    const void *data; /* 16-byte aligned */
    int element_bytes;
    int num_dims; /* 2 to 5 */
    cuuint64_t size[5];
    cuuint64_t stride[4]; /* bytes, multiples of 16 */
    cuuint32_t box[5];    /* elements one copy brings in; positions outside the tensor read as zero */
    int swizzle_bytes;    /* 0, 32, 64 or 128: width of the swizzled row in shared memory */
};

/* Whether the copy engine can take it; if not, MX_UNSUPPORTED and a message that names the argument and the number. */
int mx_cuda_check_tensor(const struct mx_cuda_tensor *tensor, char *err, size_t n);

/* Encodes the map that a kernel takes as its __grid_constant__ parameter. Checks the tensor first; a device has been
 * entered. */
int mx_cuda_encode_tensor(CUtensorMap *map, const struct mx_cuda_tensor *tensor, char *err, size_t n);

#ifdef __cplusplus
}
#endif

#endif /* VLLM_MEGAATTN_CUDA_DRIVER_H */
