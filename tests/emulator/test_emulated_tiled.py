"""Every tiled Hopper kernel of plan.c's table by itself, whatever a plan would choose, against the bit-level model."""

from __future__ import annotations

import ctypes

import host
import numpy as np
import pytest
from host import Emulator
from problems import make_matmul

SMEM_BYTES = 232448
TOKENS, ROWS, K = 135, 384, 1280  # a second tile of tokens, weight rows that end inside a tile, five spans
WEIGHTS = ("prepared", "32x32", "rows")  # by form


class Problem(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_groups", "num_rows", "k")),
        ("form", ctypes.c_int32),
        ("output", ctypes.c_int32),
        ("batch_invariant", ctypes.c_bool),
    )


class Config(ctypes.Structure):
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
    _fields_ = (
        ("config", ctypes.POINTER(Config)),
        *((name, ctypes.c_int32) for name in ("num_m", "num_n", "num_tiles", "band")),
        *((name, ctypes.c_uint32) for name in ("grid", "block", "cluster", "smem_bytes")),
        ("estimated_ns", ctypes.c_int32),
    )


@pytest.fixture(scope="module")
def table(hopper):
    """Index of each kernel by name, and the table itself."""
    lib = hopper.host
    count = ctypes.c_int.in_dll(lib, "mx_num_gemm_configs").value
    configs = (Config * count).in_dll(lib, "mx_gemm_configs")
    lib.mx_plan_gemm_with.restype = lib.mx_plan_gemm.restype = ctypes.c_bool
    lib.mx_cuda_device.restype = ctypes.c_void_p
    lib.mx_sm90_gemm_planned.argtypes = [ctypes.c_void_p] * 4
    return lib, configs


def plan_of(lib, problem, config=None, num_sms=132) -> Plan | None:
    plan = Plan()
    if config is None:
        found = lib.mx_plan_gemm(ctypes.byref(problem), num_sms, SMEM_BYTES, ctypes.byref(plan))
    else:
        found = lib.mx_plan_gemm_with(
            ctypes.byref(problem), ctypes.byref(config), num_sms, SMEM_BYTES, ctypes.byref(plan)
        )
    return plan if found else None


@pytest.mark.parametrize("output", [0, 32, 128, 256])
@pytest.mark.parametrize("form", [0, 1, 2])
def test_every_kernel(hopper, rng, table, form, output):
    """All kernels of one form and output, on the same data; those that cut K alike give the same bits."""
    lib, configs = table
    problem = make_matmul(
        rng, TOKENS, 1, 512 if output == 256 else ROWS, K, weights=WEIGHTS[form], x_span=256 if form == 0 else 32
    )
    tokens, groups, rows, k = problem.shape
    expected, ran = {}, 0
    for config in configs:
        if config.form != form or config.output != output:
            continue
        clustered = config.split > 1 or config.cluster_n > 1
        # Persistent blocks walk several tiles on a small device
        device, num_sms = (0, 132) if clustered else (Emulator.SMALL_HOPPER, 4)
        plan = plan_of(lib, Problem(tokens, groups, rows, k, form, output), config, num_sms)
        assert plan is not None, config.kernel
        args, text = problem.args(output), ctypes.create_string_buffer(1000)
        where = host.Exec(0, device, None, None, ctypes.cast(text, ctypes.c_char_p), 1000)
        with hopper.session(device, options={"delivery": 2, "seed": 5}, **problem.buffers()):
            opened = lib.mx_cuda_device(device, text, 1000)
            code = lib.mx_sm90_gemm_planned(
                opened, ctypes.addressof(args), ctypes.addressof(plan), ctypes.addressof(where)
            )
        assert code == 0, (config.kernel, text.value)
        if config.split not in expected:
            expected[config.split] = problem.expected(hopper, output, config.split)
        want, want_scale = expected[config.split]
        assert np.array_equal(problem.out, want), config.kernel
        assert np.array_equal(problem.out_scale, want_scale), config.kernel
        ran += 1
    assert ran > 0


SHAPES = [(8 // tp, 1024, 4096) for tp in (1, 2, 4, 8)] + [(1, 5120, 8192 // tp) for tp in (1, 2, 4, 8)]


@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_cut_k_alike(table, shape):
    """What a token's result is quantised from must not depend on the output that was asked for."""
    lib, _ = table
    for tokens in [*range(65, 1100, 7), 2048, 8192, 32768]:
        splits = set()
        for output in (0, 32, 128, 256):
            plan = plan_of(lib, Problem(tokens, *shape, 0, output))
            assert plan is not None
            splits.add(plan.config.contents.split)
        assert len(splits) == 1, (tokens, splits)


@pytest.mark.parametrize("shape", SHAPES)
def test_batch_invariant_plans_have_one_chain(table, shape):
    lib, _ = table
    cut = 0
    for tokens in (1, 64, 65, 96, 128, 200, 256, 512, 4096):
        plan = plan_of(lib, Problem(tokens, *shape, 0, 0, True))
        assert plan.config.contents.split == 1
        cut += plan_of(lib, Problem(tokens, *shape, 0, 0, False)).config.contents.split > 1
    assert cut > 0 or shape not in ((1, 1024, 4096), (2, 1024, 4096), (1, 5120, 8192)), "nothing to forbid"


def test_plans_fit_the_device(table):
    """Shared memory, threads, clusters and grids of all kernels and sizes stay within what a block may have."""
    lib, configs = table
    for config in configs:
        for tokens in (1, 128, 300, 8192):
            for shape in ((8, 1024, 4096), (1, 5120, 1024)):
                plan = plan_of(lib, Problem(tokens, *shape, config.form, config.output), config)
                assert plan is not None, config.kernel
                assert plan.smem_bytes <= SMEM_BYTES
                assert plan.block <= 1024
                assert plan.cluster in (1, 2, 4, 8)
                assert plan.grid % plan.cluster == 0
                assert plan.num_m * config.cluster_m * config.block_m >= tokens
    assert plan_of(lib, Problem(128, 8, 1024, 4096, 0, 0), configs[0], 0) is None
