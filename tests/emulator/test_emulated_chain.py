"""Whole projections (o_proj, o_proj_from_attn) on emulated devices, by the cases and comparisons of the self-check: fused
against unfused, from attention against from x, every part against the CPU backend."""

from __future__ import annotations

import chains
import pytest
from chains import BLACKWELL, HOPPER
from host import Emulator

from vllm_megaattn import self_check
from vllm_megaattn.self_check import BATCH_INVARIANT, NO_DECODE, NO_PAIRS, WO_B_OWN
from vllm_megaattn.self_check_cases import Case

SMALL = {"distinct": 300}  # every token another one


@pytest.mark.parametrize(
    ("tokens", "groups"), [(1, 8), (7, 1), (32, 2), (127, 2), (128, 1), (129, 2), (300, 1), (1, 1), (65, 8)]
)
def test_blackwell(blackwell, tokens, groups):
    """Packed words and F8_128x4 weight scales, as vLLM holds them; rank and hidden size no multiple of 128."""
    hidden = 160 if tokens < 300 else 96
    case = Case("chain", tokens, weights="tiled", flags=WO_B_OWN, groups=groups, rows=96, hidden=hidden, **SMALL)
    assert chains.faults(blackwell, case, BLACKWELL, seed=tokens) == []


@pytest.mark.parametrize(
    ("weights", "tokens", "flags"),
    [
        *((weights, tokens, 0) for weights in ("blocks", "rows", "wide") for tokens in (5, 70)),
        ("blocks", 70, NO_PAIRS),
        ("tiled", 70, BATCH_INVARIANT),
    ],
)
def test_blackwell_weight_forms_and_plans(blackwell, weights, tokens, flags):
    case = Case("chain", tokens, weights=weights, flags=WO_B_OWN | flags, rows=128)
    assert chains.faults(blackwell, case, BLACKWELL, seed=3) == []


@pytest.mark.parametrize("options", [{"delivery": 1}, {"delivery": 2, "seed": 1}, {"delivery": 2, "seed": 2}])
@pytest.mark.parametrize("tokens", [3, 70])
def test_blackwell_any_order_of_events(blackwell, tokens, options):
    case = Case("chain", tokens, weights="tiled", flags=WO_B_OWN, groups=1, rows=128, hidden=256)
    assert chains.faults(blackwell, case, Emulator.BLACKWELL_ULTRA, **options) == []


def test_without_cublaslt_wo_b_goes_to_the_own_kernel(blackwell):
    """Neither route is asked for, and the library is not there (or has no device)."""
    case = Case("chain", 7, weights="tiled")
    assert chains.faults(blackwell, case, BLACKWELL) == []


@pytest.mark.parametrize(
    "case", [c for c in self_check.QUICK_BLACKWELL if c.unit != "cuBLASLt"], ids=lambda c: f"{c.unit}-{c.weights}"
)
def test_blackwell_passes_its_first_use_check(blackwell, case):
    case_on_few = case if case.part != "stream" else Case("stream", 300, part="stream", groups=1)
    assert chains.faults(blackwell, case_on_few, BLACKWELL, seed=1) == []


def test_more_rows_a_warp_on_blackwell(blackwell):
    """The form of the quantiser and of the inverse RoPE for many tokens, on a device of 4 SMs."""
    for span in (32, 128, 256):
        case = Case("stream", 40, span, part="stream", groups=1, heads=8)
        assert chains.faults(blackwell, case, Emulator.SMALL_BLACKWELL) == []


@pytest.mark.parametrize(
    "case",
    [c for c in self_check.QUICK_HOPPER if not c.windows or c.tokens < 64],
    ids=lambda c: f"{c.unit}-{c.tokens}-{c.weights}",
)
def test_hopper_passes_its_first_use_check(hopper, case):
    case_on_few = case if case.part != "stream" else Case("stream", 300, part="stream", groups=1, span=256)
    assert chains.faults(hopper, case_on_few, HOPPER, seed=1) == []


@pytest.mark.parametrize("weights", ["blocks", "rows", "wide"])
@pytest.mark.parametrize(("tokens", "flags"), [(3, 0), (3, NO_DECODE), (130, 0)])
def test_hopper_spans(hopper, weights, tokens, flags):
    """Scales over 128 columns with weights of every form."""
    case = Case("chain", tokens, 128, weights, flags=flags)
    assert chains.faults(hopper, case, HOPPER, seed=2) == []


def test_windows_into_a_pool_are_weights_like_others(hopper):
    """What the check of large problems rests on: rows that overlap in memory, 16 bytes apart."""
    case = Case("tiled", 66, 256, "wide", "einsum", rows=512, groups=1, windows=True)
    assert chains.faults(hopper, case, HOPPER, seed=4) == []
    case = Case("tiled", 66, 256, "wide", "gemm", groups=1, rows=1024, hidden=320, windows=True, flags=NO_DECODE)
    assert chains.faults(hopper, case, HOPPER, seed=5) == []
