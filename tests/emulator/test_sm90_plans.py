"""What csrc/cuda/plan.c chooses for the tiled Hopper kernels: properties of its plans. Nothing is run."""

from __future__ import annotations

import ctypes

import pytest
from gemm_plans import Config, Plan, Problem

SMEM_BYTES = 232448


@pytest.fixture(scope="module")
def table(hopper):
    """Index of each kernel by name, and the table itself."""
    lib = hopper.host
    count = ctypes.c_int.in_dll(lib, "mx_num_gemm_configs").value
    configs = (Config * count).in_dll(lib, "mx_gemm_configs")
    lib.mx_plan_gemm_with.restype = lib.mx_plan_gemm.restype = ctypes.c_bool
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
