"""The structs of csrc/cuda/plan.h, for tests that ask for plans or run one of their own."""

from __future__ import annotations

import ctypes


class Problem(ctypes.Structure):
    """struct mx_gemm_problem."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_groups", "num_rows", "k")),
        ("form", ctypes.c_int32),
        ("output", ctypes.c_int32),
        ("batch_invariant", ctypes.c_bool),
    )


class Config(ctypes.Structure):
    """struct mx_gemm_config."""

    _fields_ = (
        ("kernel", ctypes.c_char_p),
        *(
            (name, ctypes.c_int32)
            for name in (
                "form",
                "output",
                "block_m",
                "block_n",
                "stages",
                "threads",
                "cluster_m",
                "cluster_n",
                "split",
                "stage_ns",
            )
        ),
    )


class Plan(ctypes.Structure):
    """struct mx_gemm_plan."""

    _fields_ = (
        ("config", ctypes.POINTER(Config)),
        *((name, ctypes.c_int32) for name in ("num_m", "num_n", "num_tiles", "band")),
        *((name, ctypes.c_uint32) for name in ("grid", "block", "cluster", "smem_bytes")),
        ("estimated_ns", ctypes.c_int32),
    )
