/* cublaslt.c - see cublaslt.h. */
#include "cublaslt.h"

#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "driver.h"

/* ---- what is used of cublasLt.h -------------------------------------------------------------------------------- */

/* Numbers of the public header, which not every machine that builds this package has; they are part of the library's
 * ABI. Names as there, without their prefixes. */
enum {
    STATUS_SUCCESS = 0,
    STATUS_NOT_SUPPORTED = 15,
    COMPUTE_32F = 68, /* cublasComputeType_t */
    R_32F = 0,        /* cudaDataType */
    R_16BF = 14,
    R_8F_E4M3 = 28,
    OP_N = 0, /* cublasOperation_t */
    OP_T = 1,
    DESC_TRANSA = 3, /* cublasLtMatmulDescAttributes_t */
    DESC_TRANSB = 4,
    DESC_A_SCALE_POINTER = 17,
    DESC_B_SCALE_POINTER = 18,
    DESC_A_SCALE_MODE = 31,
    DESC_B_SCALE_MODE = 32,
    SCALE_VEC32_UE8M0 = 2, /* cublasLtMatmulMatrixScale_t */
    PREF_MAX_WORKSPACE_BYTES = 1
};

struct lt_algo {
    uint64_t data[8];
};

struct lt_heuristic {
    struct lt_algo algo;
    size_t workspace_bytes;
    int status;
    float num_waves;
    int reserved[4];
};

/* Prototypes of the functions used; descriptors are opaque. */
#define LT_FUNCTIONS(X)                                                                                              \
    X(size_t, GetVersion, (void))                                                                                    \
    X(const char *, GetStatusString, (int))                                                                          \
    X(int, Create, (void **))                                                                                        \
    X(int, MatmulDescCreate, (void **, int, int))                                                                    \
    X(int, MatmulDescDestroy, (void *))                                                                              \
    X(int, MatmulDescSetAttribute, (void *, int, const void *, size_t))                                              \
    X(int, MatrixLayoutCreate, (void **, int, uint64_t, uint64_t, int64_t))                                          \
    X(int, MatrixLayoutDestroy, (void *))                                                                            \
    X(int, MatmulPreferenceCreate, (void **))                                                                        \
    X(int, MatmulPreferenceDestroy, (void *))                                                                        \
    X(int, MatmulPreferenceSetAttribute, (void *, int, const void *, size_t))                                        \
    X(int, MatmulAlgoGetHeuristic,                                                                                   \
      (void *, void *, void *, void *, void *, void *, void *, int, struct lt_heuristic *, int *))                   \
    X(int, Matmul,                                                                                                   \
      (void *, void *, const void *, const void *, void *, const void *, void *, const void *, const void *, void *, \
       void *, void *, const struct lt_algo *, void *, size_t, CUstream))

static struct {
#define LT_FIELD(result, name, args) result(*name) args;
    LT_FUNCTIONS(LT_FIELD)
#undef LT_FIELD
} lt;

/* ---- state ----------------------------------------------------------------------------------------------------- */

/* A product up to its pointers. */
struct lt_shape {
    int64_t device, num_tokens, num_rows, k, x_stride, w_stride, out_stride;
};

struct lt_known {
    struct lt_shape shape;
    struct lt_algo algo;
    int usable; /* 0: the library has no algorithm */
};

enum { NUM_KNOWN = 512 };
enum { LT_UNTRIED, LT_READY, LT_MISSING };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int state = LT_UNTRIED; /* all below under the lock */
static char state_error[256];
static void *handles[MX_CUDA_MAX_DEVICES];
static struct lt_known known[NUM_KNOWN];
static int num_known, next_known;

__attribute__((format(printf, 4, 5))) static int report(int code, char *err, size_t n, const char *format, ...) {
    va_list args;
    if (err != NULL && n > 0) {
        va_start(args, format);
        vsnprintf(err, n, format, args);
        va_end(args);
    }
    return code;
}

/* Looks up every function; the name of a missing one, else NULL. */
static const char *resolve(void *library) {
#define LT_LOAD(result, name, args)                                                                                  \
    *(void **)&lt.name = dlsym(library, "cublasLt" #name);                                                           \
    if (lt.name == NULL) {                                                                                           \
        return "cublasLt" #name;                                                                                     \
    }
    LT_FUNCTIONS(LT_LOAD)
#undef LT_LOAD
    return NULL;
}

/* Opens the library once per process. Call with the lock held. */
static int open_library(char *err, size_t n) {
    static const char *const names[] = {"libcublasLt.so.13", "libcublasLt.so.12"};
    if (state == LT_UNTRIED) {
        void *library = NULL;
        const char *missing = NULL;
        state = LT_MISSING;
        /* The copy that torch uses first: two of them in a process would each take memory for their kernels. */
        for (int pass = 0; pass < 2 && library == NULL; pass++) {
            for (size_t i = 0; i < sizeof names / sizeof names[0] && library == NULL; i++) {
                library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL | (pass == 0 ? RTLD_NOLOAD : 0));
            }
        }
        if (library == NULL) {
            snprintf(state_error, sizeof state_error, "cuBLASLt cannot be opened: neither %s nor %s was found",
                     names[0], names[1]);
        } else if ((missing = resolve(library)) != NULL) {
            snprintf(state_error, sizeof state_error, "cuBLASLt has no %s", missing);
        } else if (lt.GetVersion() < 120800) {
            snprintf(state_error, sizeof state_error, "cuBLASLt %zu is older than 12.8, the first with MXFP8",
                     lt.GetVersion());
        } else {
            state = LT_READY;
        }
    }
    return state == LT_READY ? MX_OK : report(MX_UNSUPPORTED, err, n, "%s", state_error);
}

int mx_cublaslt_status(long *version, char *err, size_t n) {
    int code;
    pthread_mutex_lock(&lock);
    code = open_library(err, n);
    if (code == MX_OK) {
        *version = (long)lt.GetVersion();
    }
    pthread_mutex_unlock(&lock);
    return code;
}

/* ---- checks ---------------------------------------------------------------------------------------------------- */

int mx_cublaslt_check(const struct mx_matmul *args, char *err, size_t n) {
    const struct {
        const char *name;
        uintptr_t bits; /* address and strides, in bytes, joined */
    } aligned[] = {
        {"z", (uintptr_t)args->x | (uintptr_t)(args->num_tokens > 1 ? args->x_stride_token : 0)},
        {"w", (uintptr_t)args->w | (uintptr_t)(args->num_rows > 1 ? args->w_stride_row : 0)},
        {"y", (uintptr_t)args->out_bf16 | (uintptr_t)(args->num_tokens > 1 ? 2 * args->out_stride_token : 0)},
        {"z_scale", (uintptr_t)args->x_scale.data},
        {"w_scale", (uintptr_t)args->w_scale.data},
    };
    if (args->num_groups != 1 || args->out_bf16 == NULL) {
        return report(MX_UNSUPPORTED, err, n, "cuBLASLt takes one group with BF16 output, got %lld groups",
                      (long long)args->num_groups);
    }
    if (args->x_scale.layout != MX_SCALE_F8_128X4) {
        return report(MX_UNSUPPORTED, err, n, "z_scale: cuBLASLt takes the F8_128x4 layout only");
    }
    if (args->w_scale.layout != MX_SCALE_F8_128X4) {
        return report(MX_UNSUPPORTED, err, n, "w_scale: cuBLASLt takes the 1-D F8_128x4 layout only");
    }
    if (args->k % 128 != 0) { /* else it would read padding columns, whose contents nobody promises */
        return report(MX_UNSUPPORTED, err, n, "w: cuBLASLt needs a multiple of 128 columns, got %lld",
                      (long long)args->k);
    }
    if (args->num_rows % 8 != 0) {
        return report(MX_UNSUPPORTED, err, n, "w: cuBLASLt needs a multiple of 8 rows, got %lld",
                      (long long)args->num_rows);
    }
    for (size_t i = 0; i < sizeof aligned / sizeof aligned[0]; i++) {
        if (aligned[i].bits % 16 != 0) {
            return report(MX_UNSUPPORTED, err, n,
                          "%s: cuBLASLt needs address and stride to be multiples of 16 bytes, got remainder %d",
                          aligned[i].name, (int)(aligned[i].bits % 16));
        }
    }
    return MX_OK;
}

/* ---- running --------------------------------------------------------------------------------------------------- */

/* One product as cuBLASLt sees it, column-major: D [N, T] = A^T B with A = weights [K, N] and B = tokens [K, T]. */
struct lt_product {
    void *desc, *a, *b, *d;
};

#define CHECK_LT(call, args_, doing)                                                                                 \
    do {                                                                                                             \
        int status_ = lt.call args_;                                                                                 \
        if (status_ != STATUS_SUCCESS) {                                                                             \
            code = report(MX_FAILED, exec->err, exec->err_bytes, "cublasLt%s: %s, at: %s", #call,                    \
                          lt.GetStatusString(status_), doing);                                                       \
            goto done;                                                                                               \
        }                                                                                                            \
    } while (0)

static void destroy_product(struct lt_product *p) {
    if (p->desc != NULL) {
        lt.MatmulDescDestroy(p->desc);
    }
    if (p->a != NULL) {
        lt.MatrixLayoutDestroy(p->a);
    }
    if (p->b != NULL) {
        lt.MatrixLayoutDestroy(p->b);
    }
    if (p->d != NULL) {
        lt.MatrixLayoutDestroy(p->d);
    }
}

static int create_product(struct lt_product *p, const struct mx_matmul *args, const struct lt_shape *shape,
                          const struct mx_exec *exec) {
    const int32_t op_t = OP_T, op_n = OP_N, mode = SCALE_VEC32_UE8M0;
    const void *w_scale = args->w_scale.data, *x_scale = args->x_scale.data;
    const uint64_t rows = (uint64_t)args->num_rows, tokens = (uint64_t)args->num_tokens, k = (uint64_t)args->k;
    int code = MX_OK;
    CHECK_LT(MatmulDescCreate, (&p->desc, COMPUTE_32F, R_32F), "describing the product");
    CHECK_LT(MatmulDescSetAttribute, (p->desc, DESC_TRANSA, &op_t, sizeof op_t), "transposing w");
    CHECK_LT(MatmulDescSetAttribute, (p->desc, DESC_TRANSB, &op_n, sizeof op_n), "not transposing z");
    CHECK_LT(MatmulDescSetAttribute, (p->desc, DESC_A_SCALE_MODE, &mode, sizeof mode), "MXFP8 scales of w");
    CHECK_LT(MatmulDescSetAttribute, (p->desc, DESC_B_SCALE_MODE, &mode, sizeof mode), "MXFP8 scales of z");
    CHECK_LT(MatmulDescSetAttribute, (p->desc, DESC_A_SCALE_POINTER, &w_scale, sizeof w_scale), "w_scale");
    CHECK_LT(MatmulDescSetAttribute, (p->desc, DESC_B_SCALE_POINTER, &x_scale, sizeof x_scale), "z_scale");
    CHECK_LT(MatrixLayoutCreate, (&p->a, R_8F_E4M3, k, rows, shape->w_stride), "w");
    CHECK_LT(MatrixLayoutCreate, (&p->b, R_8F_E4M3, k, tokens, shape->x_stride), "z");
    CHECK_LT(MatrixLayoutCreate, (&p->d, R_16BF, rows, tokens, shape->out_stride), "y");
done:
    return code;
}

/* Asks for the best algorithm that needs no workspace. Call with the lock held. */
static int ask_heuristic(struct lt_known *entry, void *handle, const struct lt_product *p,
                         const struct mx_exec *exec) {
    struct lt_heuristic answer;
    const uint64_t workspace = 0;
    void *preference = NULL;
    int code = MX_OK, num_answers = 0, status;
    memset(&answer, 0, sizeof answer);
    CHECK_LT(MatmulPreferenceCreate, (&preference), "choosing an algorithm");
    CHECK_LT(MatmulPreferenceSetAttribute, (preference, PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace),
             "choosing an algorithm");
    status = lt.MatmulAlgoGetHeuristic(handle, p->desc, p->a, p->b, p->d, p->d, preference, 1, &answer, &num_answers);
    if (status != STATUS_SUCCESS && status != STATUS_NOT_SUPPORTED) {
        code = report(MX_FAILED, exec->err, exec->err_bytes, "cublasLtMatmulAlgoGetHeuristic: %s",
                      lt.GetStatusString(status));
        goto done;
    }
    entry->usable = status == STATUS_SUCCESS && num_answers > 0 && answer.status == STATUS_SUCCESS;
    entry->algo = answer.algo;
done:
    if (preference != NULL) {
        lt.MatmulPreferenceDestroy(preference);
    }
    return code;
}

/* The device's handle and the shape's algorithm, made on first use. Call with the device's context current. */
static int prepare(const struct lt_shape *shape, const struct lt_product *p, const struct mx_exec *exec,
                   void **handle, struct lt_algo *algo) {
    int code = MX_OK, usable = 0;
    pthread_mutex_lock(&lock);
    if (handles[shape->device] == NULL) {
        CHECK_LT(Create, (&handles[shape->device]), "opening the library on the device");
    }
    *handle = handles[shape->device];
    for (int i = 0; i < num_known; i++) {
        if (memcmp(&known[i].shape, shape, sizeof *shape) == 0) {
            usable = known[i].usable;
            *algo = known[i].algo;
            goto found;
        }
    }
    {
        struct lt_known entry = {.shape = *shape};
        code = ask_heuristic(&entry, *handle, p, exec);
        if (code != MX_OK) {
            goto done;
        }
        known[next_known] = entry;
        next_known = (next_known + 1) % NUM_KNOWN;
        num_known += num_known < NUM_KNOWN;
        usable = entry.usable;
        *algo = entry.algo;
    }
found:
    if (!usable) {
        code = report(
            MX_UNSUPPORTED, exec->err, exec->err_bytes,
            "cuBLASLt has no MXFP8 algorithm without workspace for [%lld, %lld] x [%lld, %lld] on this device",
            (long long)shape->num_tokens, (long long)shape->k, (long long)shape->num_rows, (long long)shape->k);
    }
done:
    pthread_mutex_unlock(&lock);
    return code;
}

int mx_cublaslt_matmul(const struct mx_matmul *args, const struct mx_exec *exec) {
    const float alpha = 1.0f, beta = 0.0f;
    const struct lt_shape shape = {
        .device = exec->device_index,
        .num_tokens = args->num_tokens,
        .num_rows = args->num_rows,
        .k = args->k,
        .x_stride = args->num_tokens > 1 ? args->x_stride_token : args->k,
        .w_stride = args->num_rows > 1 ? args->w_stride_row : args->k,
        .out_stride = args->num_tokens > 1 ? args->out_stride_token : args->num_rows,
    };
    struct lt_product product = {0};
    struct lt_algo algo;
    void *handle = NULL;
    long version;
    int code = mx_cublaslt_status(&version, exec->err, exec->err_bytes);
    if (code != MX_OK) {
        return code;
    }
    code = create_product(&product, args, &shape, exec);
    if (code == MX_OK) {
        code = prepare(&shape, &product, exec, &handle, &algo);
    }
    if (code != MX_OK) {
        goto done;
    }
    CHECK_LT(Matmul,
             (handle, product.desc, &alpha, args->w, product.a, (void *)(uintptr_t)args->x, product.b, &beta,
              args->out_bf16, product.d, args->out_bf16, product.d, &algo, NULL, 0, (CUstream)exec->stream),
             "multiplying");
done:
    destroy_product(&product);
    return code;
}
