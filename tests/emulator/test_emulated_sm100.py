"""The Blackwell kernel's own source, through the package's own host code, against the bit-level model.

Plans are made by the package for each of its forms (split, pairs, singles) and for devices of 148 and of 4 SMs.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from host import Emulator, EmulatorError
from problems import make_matmul

SPLIT, PAIR, SINGLE = 0, 1, 2  # enum mx_sm100_form
FORMS = {"split": SPLIT, "pair": PAIR, "single": SINGLE}
TOKENS = (1, 7, 32, 127, 128, 129, 300)


class Plan(ctypes.Structure):
    """The head of struct mx_sm100_plan; the rest is the package's business."""

    _fields_ = (
        ("form", ctypes.c_int32),
        ("ctas", ctypes.c_int32),
        ("split", ctypes.c_int32),
        ("rest", ctypes.c_uint8 * 500),
    )


def make_plan(emulator, problem, form: str, num_sms: int) -> Plan:
    """A plan in that form; skips what the form does not take."""
    tokens, groups, rows, k = problem.shape
    sizes = (ctypes.c_int64 * 4)(tokens, groups, rows, k)
    plan, text = Plan(), ctypes.create_string_buffer(512)
    make = emulator.host.mx_sm100_make_plan_form
    make.argtypes = [ctypes.c_void_p, *[ctypes.c_int] * 4, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]
    if make(sizes, num_sms, 227 * 1024, FORMS[form], 0, ctypes.addressof(plan), text, len(text)):
        pytest.skip(f"no {form} plan: {text.value.decode()}")
    return plan


def run(emulator, problem, span, plan, device, **options):
    args = problem.args(span)
    with emulator.session(device, options=options, **problem.buffers()):
        with emulator.entered(device):
            emulator.call_entry(emulator.host.mx_sm100_matmul_planned, args, plan, device=device)
        assert emulator.counter("tcgen05.mma") > 0
    return problem.out, problem.out_scale


def check(emulator, problem, span, form, *, device=Emulator.BLACKWELL, **options):
    plan = make_plan(emulator, problem, form, {Emulator.BLACKWELL: 148, Emulator.SMALL_BLACKWELL: 4}[device])
    out, out_scale = run(emulator, problem, span, plan, device, **options)
    want, want_scale = problem.written(problem.blackwell_sums(emulator, plan.split), span)
    assert np.array_equal(out_scale, want_scale)
    assert np.array_equal(out, want), f"{(out != want).sum()} of {out.size} differ"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("tokens", TOKENS)
def test_einsum(blackwell, rng, tokens, groups, form):
    """BF16 and MXFP8 output in turn; packed row scales, as vLLM holds them."""
    span = 32 * ((TOKENS.index(tokens) + groups) % 2)
    problem = make_matmul(rng, tokens, groups, 256, 256 if groups == 8 else 512, x_span=32, weights="rows")
    check(blackwell, problem, span, form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("weights", ["rows", "32x32", "prepared"])
@pytest.mark.parametrize(("tokens", "rows", "k"), [(33, 160, 384), (200, 416, 256)])
def test_odd_sizes_and_weight_forms(blackwell, rng, tokens, rows, k, weights, form):
    check(blackwell, make_matmul(rng, tokens, 2, rows, k, x_span=32, weights=weights), 32, form)


@pytest.mark.parametrize("form", FORMS)
def test_gemm_reads_f8_128x4(blackwell, rng, form):
    check(blackwell, make_matmul(rng, 140, 1, 384, 512, x_span=32, weights="32x32", tiled=True), 0, form)


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("tokens", TOKENS)
def test_gemm(blackwell, rng, tokens, groups):
    """wo_b behind that many groups, the forms in turn; a hidden size that no tile divides."""
    form = list(FORMS)[(TOKENS.index(tokens) + groups) % 3]
    check(blackwell, make_matmul(rng, tokens, 1, 160, 128 * groups, x_span=32, weights="32x32", tiled=True), 0, form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [5, 140])
def test_strided_inputs(blackwell, rng, tokens, form):
    problem = make_matmul(
        rng, tokens, 2, 128, 384, x_span=32, weights="rows", x_order=(1, 0, 2), pad=48, mn_major=tokens == 5
    )
    check(blackwell, problem, 32, form)


@pytest.mark.parametrize("form", ["pair", "single"])
@pytest.mark.parametrize("tokens", [300, 700])
def test_persistent_blocks(blackwell, rng, tokens, form):
    """4 SMs: each block (pair) walks several tiles; with 700 tokens the two accumulators share columns."""
    check(blackwell, make_matmul(rng, tokens, 1, 1024, 256, x_span=32, weights="rows"), 32, form, device=3)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "options", [{"delivery": 1}, {"delivery": 2, "seed": 1}, {"delivery": 2, "seed": 2}, {"seed": 3}]
)
def test_any_order_of_events(blackwell, rng, options, form):
    problem = make_matmul(rng, 130, 1, 512, 512, x_span=32, weights="rows")
    check(blackwell, problem, 32, form, device=Emulator.SMALL_BLACKWELL if form != "split" else 2, **options)


@pytest.mark.parametrize("form", FORMS)
def test_full_k(blackwell, rng, form):
    check(blackwell, make_matmul(rng, 48, 1, 256, 4096, x_span=32, weights="rows"), 32, form)


# ---- descriptors -----------------------------------------------------------------------------------------------

# "Strides": a K-major operand whose swizzle row holds all 32 columns, and a scale tile of one 16-byte column, have no
# leading dimension; its offset 0 and 1 mean the same.
IGNORED = {"a": {16}, "b": {16}, "cp": {16}, "idesc": set(), "d": set(), "sfa": set(), "sfb": set()}


@pytest.fixture(scope="module")
def clean(blackwell):
    """One tile of 128 x 16, its plan and its bytes."""
    problem = make_matmul(np.random.default_rng(6), 16, 1, 128, 256, x_span=32, weights="rows")
    plan = make_plan(blackwell, problem, "single", 148)
    out, scale = (a.copy() for a in run(blackwell, problem, 32, plan, Emulator.BLACKWELL))
    return problem, plan, out, scale


@pytest.mark.parametrize(
    ("operand", "bit"),
    [
        *((name, bit) for name in ("a", "b", "cp") for bit in range(64)),
        *((name, bit) for name in ("idesc", "d", "sfa", "sfb") for bit in range(32)),
    ],
)
def test_descriptor_bits(blackwell, clean, operand, bit):
    """Every bit matters: flipped in the operand that reaches the tensor core, the result changes or is refused."""
    problem, plan, out, scale = clean
    try:
        changed, changed_scale = run(
            blackwell, problem, 32, plan, Emulator.BLACKWELL, **{f"flip.tcgen05.{operand}": 1 << bit}
        )
        result = "same" if np.array_equal(changed, out) and np.array_equal(changed_scale, scale) else "changed"
    except EmulatorError:
        result = "refused"
    assert (result == "same") == (bit in IGNORED[operand]), f"bit {bit} of {operand}: {result}"


def test_accumulate_matters(blackwell, clean):
    problem, plan, _, _ = clean
    with pytest.raises(EmulatorError, match="which nobody has written"):
        run(blackwell, problem, 32, plan, Emulator.BLACKWELL, **{"flip.tcgen05.accumulate": 1})
