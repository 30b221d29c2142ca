/*
 * module.c - the CPython module vllm_megaattn._C.
 *
 * Importing it resolves libtorch's C shim and registers the ops under torch.ops.vllm_megaattn; the few functions here
 * are for `info`, for the Python front end's error types and for switches. Multi-phase init, limited API 3.10.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "cpu/cpu_features.h"
#include "op.h"
#ifdef MX_WITH_CUDA
#include "cuda/cublaslt.h"
#include "cuda/driver.h"
#endif

#ifndef MX_NVCC_VERSION
#define MX_NVCC_VERSION NULL /* a CPU-only build */
#endif

/* ---- functions ------------------------------------------------------------------------------------------------- */

static PyObject *take_error_kind(PyObject *self, PyObject *unused) {
    (void)self;
    (void)unused;
    return PyLong_FromLong(mx_take_error_kind());
}

static PyObject *set_flags(PyObject *self, PyObject *flags) {
    (void)self;
    unsigned long value = PyLong_AsUnsignedLong(flags);
    if (value == (unsigned long)-1 && PyErr_Occurred()) {
        return NULL;
    }
    mx_set_flags((uint32_t)value);
    Py_RETURN_NONE;
}

static PyObject *get_flags(PyObject *self, PyObject *unused) {
    (void)self;
    (void)unused;
    return PyLong_FromUnsignedLong(mx_get_flags());
}

static PyObject *set_check_only(PyObject *self, PyObject *on) {
    (void)self;
    int value = PyObject_IsTrue(on);
    if (value < 0) {
        return NULL;
    }
    mx_set_check_only(value);
    Py_RETURN_NONE;
}

/* Names of the embedded kernel images, empty in a CPU-only build. */
static PyObject *image_names(void) {
    PyObject *names = PyList_New(0);
#ifdef MX_WITH_CUDA
    for (int i = 0; names && i < mx_cuda_num_images; i++) {
        PyObject *name = PyUnicode_FromString(mx_cuda_images[i].name);
        if (!name || PyList_Append(names, name) != 0) {
            Py_CLEAR(names);
        }
        Py_XDECREF(name);
    }
#endif
    return names;
}

static PyObject *build_info(PyObject *self, PyObject *unused) {
    (void)self;
    (void)unused;
    char torch_version[32];
    PyOS_snprintf(torch_version, sizeof torch_version, "%d.%d", (int)(mx_torch.version >> 56),
                  (int)(mx_torch.version >> 48 & 0xFF));
    return Py_BuildValue("{s:s, s:s, s:s, s:z, s:N}", "version", MX_VERSION, "compiler", __VERSION__, "torch_abi",
                         torch_version, "cuda", MX_NVCC_VERSION, "images", image_names());
}

static PyObject *cpu_info(PyObject *self, PyObject *unused) {
    (void)self;
    (void)unused;
    return Py_BuildValue("{s:s, s:s}", "variant", mx_cpu_variant_name(), "features", mx_cpu_feature_list());
}

static PyObject *cuda_status(PyObject *self, PyObject *index) {
    char reason[256] = "this build has no CUDA kernels";
    int usable = 0;
    long device = PyLong_AsLong(index);
    (void)self;
    if (device == -1 && PyErr_Occurred()) {
        return NULL;
    }
#ifdef MX_WITH_CUDA
    usable = mx_cuda_status((int)device, reason, sizeof reason) == MX_OK;
#endif
    return Py_BuildValue("(Ns)", PyBool_FromLong(usable), reason);
}

static PyObject *cuda_prepare(PyObject *self, PyObject *index) {
    char reason[256] = "this build has no CUDA kernels";
    int code = MX_UNSUPPORTED;
    long device = PyLong_AsLong(index);
    (void)self;
    if (device == -1 && PyErr_Occurred()) {
        return NULL;
    }
#ifdef MX_WITH_CUDA
    Py_BEGIN_ALLOW_THREADS;
    code = mx_cuda_prepare_device((int)device, reason, sizeof reason);
    Py_END_ALLOW_THREADS;
#endif
    if (code != MX_OK) {
        return PyErr_Format(PyExc_RuntimeError, "cuda:%ld: %s", device, reason);
    }
    Py_RETURN_NONE;
}

static PyObject *cublaslt_status(PyObject *self, PyObject *unused) {
    char text[256] = "this build has no CUDA kernels";
    int usable = 0;
    (void)self;
    (void)unused;
#ifdef MX_WITH_CUDA
    long version = 0;
    usable = mx_cublaslt_status(&version, text, sizeof text) == MX_OK;
    if (usable) {
        PyOS_snprintf(text, sizeof text, "cuBLASLt %ld", version);
    }
#endif
    return Py_BuildValue("(Ns)", PyBool_FromLong(usable), text);
}

static PyMethodDef methods[] = {
    {"build_info", build_info, METH_NOARGS, "Versions and embedded kernel images of this build, as a dict."},
    {"cpu_info", cpu_info, METH_NOARGS, "CPU variant in use and the features found, as a dict."},
    {"cuda_status", cuda_status, METH_O, "(usable, reason) of a CUDA device index; loads nothing."},
    {"cuda_prepare", cuda_prepare, METH_O, "Loads the kernels for a CUDA device index; RuntimeError says why not."},
    {"cublaslt_status", cublaslt_status, METH_NOARGS, "(usable, version or reason) of cuBLASLt; opens the library."},
    {"take_error_kind", take_error_kind, METH_NOARGS,
     "Kind of the last error an op raised on this thread (1 value, 2 type, 3 runtime), then forgets it."},
    {"set_flags", set_flags, METH_O, "Sets the process-wide switches (enum mx_flag in kernels.h)."},
    {"get_flags", get_flags, METH_NOARGS, "The process-wide switches."},
    {"set_check_only", set_check_only, METH_O,
     "While true, ops that this thread calls check their arguments, on any device, and run nothing."},
    {NULL, NULL, 0, NULL} /* sentinel */
};

/* ---- initialisation -------------------------------------------------------------------------------------------- */

/* torch's registry is per process, so a second execution of the module (importlib.reload, a subinterpreter) must not
 * register again. Runs under the import lock. */
static int exec_module(PyObject *module) {
    static const struct {
        const char *name;
        long value;
    } flags[] = {{"FLAG_BATCH_INVARIANT", MX_FLAG_BATCH_INVARIANT},
                 {"FLAG_NO_PDL", MX_FLAG_NO_PDL},
                 {"FLAG_NO_PAIRS", MX_FLAG_NO_PAIRS},
                 {"FLAG_WO_B_OWN", MX_FLAG_WO_B_OWN},
                 {"FLAG_WO_B_CUBLASLT", MX_FLAG_WO_B_CUBLASLT},
                 {"FLAG_NO_DECODE", MX_FLAG_NO_DECODE}};
    static bool registered;
    char err[256];
    for (size_t i = 0; i < sizeof flags / sizeof flags[0]; i++) {
        if (PyModule_AddIntConstant(module, flags[i].name, flags[i].value) != 0) {
            return -1;
        }
    }
    if (PyModule_AddIntConstant(module, "VALUE_ERROR", MX_ERROR_VALUE) != 0 ||
        PyModule_AddIntConstant(module, "TYPE_ERROR", MX_ERROR_TYPE) != 0) {
        return -1;
    }
    if (!registered) {
        if (!mx_torch_load(err, sizeof err) || !mx_register_ops(err, sizeof err)) {
            PyErr_SetString(PyExc_ImportError, err);
            return -1;
        }
        registered = true;
    }
    return 0;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, exec_module}, {0, NULL} /* sentinel */
};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "vllm_megaattn._C",
    .m_doc = "C core of vllm_megaattn; importing it registers torch.ops.vllm_megaattn.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__C(void) { return PyModuleDef_Init(&module_def); }
