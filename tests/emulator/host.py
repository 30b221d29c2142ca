"""Runs the package's CUDA backend on the emulator: the real host code (csrc/cuda/*.c) and the kernels' own source.

    emu = Emulator()                                     # compiles what is new, loads the libraries
    with emu.session(emu.HOPPER, x=x, w=w, out=out):     # these arrays are the device's memory
        emu.call("cuda", "matmul", args)                 # raises EmulatorError with the emulator's message

Arrays are numpy's; a kernel that touches a byte outside the registered ones ends with an error.
"""

from __future__ import annotations

import contextlib
import ctypes
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import host_build as build
import numpy as np

byte_bounds = getattr(np, "byte_bounds", None) or np.lib.array_utils.byte_bounds
INT64, INT32, POINTER = ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p


class EmulatorError(Exception):
    """What went wrong in a launch: the kernel's fault, with place and state."""


class Unsupported(EmulatorError):
    """The backend answered MX_UNSUPPORTED."""


# ---- structs of csrc/kernels.h and csrc/mxfp8.h ----------------------------------------------------------------


class Scales(ctypes.Structure):
    _fields_ = (
        ("data", POINTER),
        ("layout", INT32),
        ("block_rows", INT32),
        ("block_cols", INT64),
        ("stride_group", INT64),
        ("stride_row", INT64),
        ("stride_col", INT64),
        ("num_col_tiles", INT64),
    )


class Exec(ctypes.Structure):
    _fields_ = (
        ("flags", ctypes.c_uint32),
        ("device_index", INT32),
        ("stream", POINTER),
        ("parallel_for", POINTER),
        ("err", ctypes.c_char_p),
        ("err_bytes", ctypes.c_size_t),
    )


class Matmul(ctypes.Structure):
    _fields_ = (
        ("num_tokens", INT64),
        ("num_groups", INT64),
        ("num_rows", INT64),
        ("k", INT64),
        ("x", POINTER),
        ("x_stride_token", INT64),
        ("x_stride_group", INT64),
        ("x_scale", Scales),
        ("x_span", INT64),
        ("w", POINTER),
        ("w_stride_group", INT64),
        ("w_stride_row", INT64),
        ("w_scale", Scales),
        ("out_bf16", POINTER),
        ("out_stride_token", INT64),
        ("out_stride_group", INT64),
        ("out_e4m3", POINTER),
        ("out_scale", POINTER),
        ("scale_span", INT64),
    )


class Quantize(ctypes.Structure):
    _fields_ = (
        ("num_tokens", INT64),
        ("num_cols", INT64),
        ("z", POINTER),
        ("num_groups", INT64),
        ("z_stride_token", INT64),
        ("z_stride_group", INT64),
        ("q", POINTER),
        ("q_stride_token", INT64),
        ("q_scale", POINTER),
        ("scale_span", INT64),
    )


class InvRope(ctypes.Structure):
    _fields_ = (
        ("num_tokens", INT64),
        ("num_groups", INT64),
        ("heads_per_group", INT64),
        ("head_dim", INT64),
        ("rope_dim", INT64),
        ("attn", POINTER),
        ("attn_stride_token", INT64),
        ("attn_stride_head", INT64),
        ("positions", POINTER),
        ("positions_stride", INT64),
        ("cos_sin", POINTER),
        ("cos_sin_stride", INT64),
        ("num_positions", INT64),
        ("order", INT32),
        ("cache", INT32),
        ("x", POINTER),
        ("x_stride_token", INT64),
        ("x_stride_group", INT64),
        ("x_scale", POINTER),
        ("xs_stride_token", INT64),
        ("xs_stride_group", INT64),
        ("xs_stride_word", INT64),
        ("scale_span", INT64),
    )


class OProj(ctypes.Structure):
    _fields_ = (
        ("rope", ctypes.POINTER(InvRope)),
        ("a", ctypes.POINTER(Matmul)),
        ("quantize", ctypes.POINTER(Quantize)),
        ("b", ctypes.POINTER(Matmul)),
    )


BACKEND_FUNCTIONS = ("matmul", "quantize", "inv_rope", "o_proj", "reblock")


class Backend(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), *((name, POINTER) for name in BACKEND_FUNCTIONS))


# ---- arguments from arrays -------------------------------------------------------------------------------------


def aligned(shape: int | tuple[int, ...], dtype: type, fill: int | None = None) -> np.ndarray:
    """An array that starts at a multiple of 256 bytes, like device memory; `fill`: what every byte holds."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(count + 256, np.uint8)
    start = -raw.ctypes.data % 256
    view = raw[start : start + count]
    if fill is not None:
        view[:] = fill
    return view.view(dtype).reshape(shape)


def device_copy(array: np.ndarray) -> np.ndarray:
    """The same numbers where device memory would lie."""
    copy = aligned(array.shape, array.dtype)
    copy[...] = array
    return copy


BLOCKS, PACKED, F8_128X4 = 0, 1, 2


def packed_scales(words: np.ndarray) -> Scales:
    """int32 words [T, G, K / 128] with any strides."""
    token, group, word = words.strides
    return Scales(words.ctypes.data, PACKED, 1, 32, group, token, word, 0)


def block_scales(blocks: np.ndarray, block_rows: int, block_cols: int) -> Scales:
    """uint8 [G, rows, cols], a byte per block_rows x block_cols elements."""
    group, row, col = blocks.strides
    return Scales(blocks.ctypes.data, BLOCKS, block_rows, block_cols, group, row, col, 0)


def tiled_scales(data: np.ndarray, cols: int) -> Scales:
    """F8_128x4 of `cols` columns of 32."""
    return Scales(data.ctypes.data, F8_128X4, 1, 32, 0, 0, 0, -(-cols // 4))


# ---- the emulator ----------------------------------------------------------------------------------------------


class Emulator:
    """The libraries of one set of kernels. `kernels`: their sources, by default all of an architecture."""

    HOPPER, SMALL_HOPPER, BLACKWELL, SMALL_BLACKWELL, BLACKWELL_ULTRA = range(5)  # devices of driver_on_host.cpp
    LATE, EARLY, RANDOM = range(3)  # when asynchronous copies are carried out

    def __init__(self, arch: int = 90, kernels: list[tuple[str, Path]] | None = None):
        if kernels is None:
            sources = build.kernel_sources(arch)
            with ThreadPoolExecutor(2) as pool:  # the compiler's processes
                built = pool.map(lambda source: build.kernel_library(source, arch=arch), sources)
                kernels = list(zip([s.stem for s in sources], built, strict=True))
        self.runtime = ctypes.CDLL(str(build.runtime()))
        self.host = ctypes.CDLL(str(build.host_library(kernels)))
        self.runtime.emu_last_error.restype = ctypes.c_char_p
        self.runtime.emu_register.argtypes = (POINTER, ctypes.c_size_t, ctypes.c_char_p)
        self.runtime.emu_set_option.argtypes = (ctypes.c_char_p, ctypes.c_uint64)
        for name in ("emu_counter", "emu_num_launches"):
            getattr(self.runtime, name).restype = ctypes.c_uint64
        self.backends = {name: Backend.in_dll(self.host, f"mx_backend_{name}") for name in ("cpu", "cuda")}
        self.device = self.HOPPER

    @contextlib.contextmanager
    def session(self, device: int = 0, *, options: dict[str, int] | None = None, **arrays: np.ndarray):
        """Launches inside may touch these arrays; `options` as emu_set_option names them ("delivery", "seed", ...)."""
        self.runtime.emu_reset()
        self.device = device
        for name, array in arrays.items():
            if array.size:
                low, high = byte_bounds(array)
                self.runtime.emu_register(low, high - low, name.encode())
        for name, value in (options or {}).items():
            if self.runtime.emu_set_option(name.encode(), value):
                raise ValueError(f"the emulator has no option {name}")
        try:
            yield self
        finally:
            self.runtime.emu_reset()

    def call(self, backend: str, function: str, args: ctypes.Structure, *, flags: int = 0) -> None:
        """Calls one function of a backend of kernels.h."""
        pointer = getattr(self.backends[backend], function)
        entry = ctypes.CFUNCTYPE(ctypes.c_int, POINTER, POINTER)(pointer)
        self.call_entry(entry, args, device=self.device if backend == "cuda" else -1, flags=flags)

    @contextlib.contextmanager
    def entered(self, device: int):
        """The device's context is current, as mx_cuda_enter makes it."""
        context = ctypes.c_void_p()
        self.runtime.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        self.runtime.cuCtxPushCurrent_v2(context)
        try:
            yield
        finally:
            self.runtime.cuCtxPopCurrent_v2(ctypes.byref(context))

    def call_entry(self, entry, *args: ctypes.Structure, device: int, flags: int = 0) -> None:
        """Calls a C function whose last argument is a struct mx_exec; one behind the backend wants the device `entered`."""
        text = ctypes.create_string_buffer(1024)
        where = Exec(flags, device, None, None, ctypes.cast(text, ctypes.c_char_p), len(text))
        code = entry(*[POINTER(ctypes.addressof(a)) for a in (*args, where)])
        if code:
            message = self.runtime.emu_last_error().decode() or text.value.decode()
            raise (Unsupported if code == 1 else EmulatorError)(message)

    def tensor_map(self, array, size, strides, box, swizzle_bytes: int) -> np.ndarray:
        """A CUtensorMap of bytes, dimension 0 first; `strides` in bytes from dimension 1 on."""
        encoded = aligned(128, np.uint8)
        rank, numbers = len(size), (ctypes.c_uint64 * 5, ctypes.c_uint32 * 5)
        with self.entered(0):
            code = self.runtime.cuTensorMapEncodeTiled(
                POINTER(encoded.ctypes.data),
                0,
                rank,
                POINTER(array.ctypes.data),
                numbers[0](*size),
                numbers[0](*strides),
                numbers[1](*box),
                numbers[1](*[1] * rank),
                0,
                {0: 0, 32: 1, 64: 2, 128: 3}[swizzle_bytes],
                0,
                0,
            )
        if code:
            raise EmulatorError(f"cuTensorMapEncodeTiled: {code}")
        return encoded

    def launch(self, library, kernel: str, *params, grid, block, cluster=1, shared_bytes=0, overlaps=False, device=0):
        """Launches one kernel of a library: arrays are passed as pointers, tensor maps (128 bytes) and scalars by value."""
        values = [
            p if p.ndim == 0 or p.nbytes == 128 else np.array(p.ctypes.data, np.uint64)
            for p in map(np.asarray, params)
        ]
        pointers = (POINTER * len(values))(*[v.ctypes.data for v in values])
        sizes = (ctypes.c_uint * 3)(grid, 1, 1)
        code = self.runtime.emu_launch(
            str(library).encode(),
            kernel.encode(),
            sizes,
            block,
            cluster,
            shared_bytes,
            int(overlaps),
            device,
            pointers,
        )
        if code:
            raise EmulatorError(self.runtime.emu_last_error().decode())

    def step(self, acc, a, b, a_scale=None, b_scale=None, *, fraction: int, output: int) -> np.ndarray:
        """model.step, by the emulator's tensor core arithmetic."""
        d = np.array(acc, np.float32, order="C")
        operands = [None if v is None else np.ascontiguousarray(v) for v in (a, a_scale, b, b_scale)]
        pointers = [POINTER(v.ctypes.data if v is not None else None) for v in operands]
        self.runtime.emu_multiply_step(
            int(fraction == 25),
            pointers[0],
            pointers[1],
            len(a),
            pointers[2],
            pointers[3],
            len(b),
            POINTER(d.ctypes.data),
        )
        return d

    def counter(self, name: str) -> int:
        """How often something happened in the latest launch."""
        return self.runtime.emu_counter(name.encode())

    @property
    def num_launches(self) -> int:
        return self.runtime.emu_num_launches()
