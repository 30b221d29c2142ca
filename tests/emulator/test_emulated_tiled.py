"""Every shipped kernel of Hopper's tiled products by name, whatever the planner would choose: pairs of blocks, kernels that
split K in two, tiles of every size, each against the bit-level model."""

from __future__ import annotations

import ctypes

import host
import numpy as np
import pytest
from gemm_plans import Config, Plan, Problem
from host import Emulator
from problems import make_matmul

WIDE, PER32, PER32_ROWS = range(3)  # enum mx_gemm_form
INT32 = ctypes.c_int32


# The table as the source has it, so that every kernel is a test of its own; checked against the library below.
def shipped() -> list[str]:
    import re

    import host_build

    text = (host_build.CSRC / "cuda/plan.c").read_text()
    return re.findall(r'^\s*\{"(mx_sm90_gemm_\w+)",', text, re.M)


def configs(emulator: Emulator) -> dict[str, Config]:
    count = ctypes.c_int.in_dll(emulator.host, "mx_num_gemm_configs").value
    table = (Config * count).in_dll(emulator.host, "mx_gemm_configs")
    return {config.kernel.decode(): config for config in table}


def run_planned(emulator, problem, config, span, *, device=Emulator.HOPPER, num_sms=132, **options):
    """The product by that kernel; None if the problem is too large for one tile per block, which some need."""
    args = problem.args(span)
    sizes = Problem(*problem.shape, config.form, config.output, False)
    plan = Plan()
    make = emulator.host.mx_plan_gemm_with
    make.restype = ctypes.c_bool
    if not make(ctypes.byref(sizes), ctypes.byref(config), num_sms, 227 * 1024, ctypes.byref(plan)):
        return None
    find = emulator.host.mx_cuda_device
    find.restype = ctypes.c_void_p
    with emulator.session(device, options=options, **problem.buffers()):
        text = ctypes.create_string_buffer(256)
        known = find(device, text, len(text))
        assert known, text.value.decode()
        entry = emulator.host.mx_sm90_gemm_planned
        text = ctypes.create_string_buffer(1024)
        where = host.Exec(0, device, None, None, ctypes.cast(text, ctypes.c_char_p), len(text))
        pointers = [ctypes.c_void_p(known), *(ctypes.c_void_p(ctypes.addressof(a)) for a in (args, plan, where))]
        with emulator.entered(device):
            code = entry(*pointers)
        assert code == 0, emulator.runtime.emu_last_error().decode() or text.value.decode()
    return problem.out, problem.out_scale


def problem_for(rng, config, tokens, rows=None, groups=1):
    form = {WIDE: "prepared", PER32: "32x32", PER32_ROWS: "rows"}[config.form]
    rows = rows or {0: 320, 32: 288, 128: 384, 256: 512}[config.output]
    k = 1280 if config.split > 1 else 512 if config.form == WIDE else 256
    return make_matmul(rng, tokens, groups, rows, k, x_span=256 if config.form == WIDE else 32, weights=form)


def test_the_tables_agree(hopper):
    found = configs(hopper)
    assert list(found) == shipped()
    assert {config.split for config in found.values()} == {1, 2, 4}
    assert {config.cluster_n for config in found.values()} == {1, 2}


@pytest.mark.parametrize("tokens", [5, 150])
@pytest.mark.parametrize("kernel", shipped())
def test_every_kernel(hopper, rng, kernel, tokens):
    """Tiles that tokens and rows do not fill, several tiles along both."""
    config = configs(hopper)[kernel]
    problem = problem_for(rng, config, tokens, groups=2)
    result = run_planned(hopper, problem, config, config.output)
    assert result is not None
    want = problem.written(problem.sums(hopper, config.split), config.output)
    assert np.array_equal(result[1], want[1])
    assert np.array_equal(result[0], want[0]), f"{(result[0] != want[0]).sum()} of {want[0].size} differ"


CLUSTERED = [name for name in shipped() if "x2_s" in name or "x1_s" in name]  # several blocks, or parts of K


@pytest.mark.parametrize("options", [{"delivery": 1}, {"delivery": 2, "seed": 1}, {"delivery": 2, "seed": 2}])
@pytest.mark.parametrize("kernel", CLUSTERED[::3])
def test_any_order_of_events(hopper, rng, kernel, options):
    config = configs(hopper)[kernel]
    problem = problem_for(rng, config, 100)
    result = run_planned(hopper, problem, config, config.output, **options)
    want = problem.written(problem.sums(hopper, config.split), config.output)
    assert np.array_equal(result[0], want[0])
    assert np.array_equal(result[1], want[1])


@pytest.mark.parametrize("kernel", CLUSTERED)
def test_more_tiles_than_blocks(hopper, rng, kernel):
    """Some kernels give each block one tile, however many blocks that takes; what cannot be planned is refused."""
    config = configs(hopper)[kernel]
    problem = problem_for(rng, config, 300, rows=512)
    result = run_planned(hopper, problem, config, config.output, num_sms=4)
    if result is not None:
        want = problem.written(problem.sums(hopper, config.split), config.output)
        assert np.array_equal(result[0], want[0])
        assert np.array_equal(result[1], want[1])
