"""The path without kernels (`vllm_megaattn.dequantised`): right by itself, near the kernels' results, and taken where the
selector says so."""

from __future__ import annotations

import pytest
import torch
from helpers import E4M3

import vllm_megaattn
from vllm_megaattn import dequantised, layouts, ops, prepare_weight, selector

GROUPS, HEADS, ROWS, HIDDEN = 2, 2, 96, 160
COLS = HEADS * 512


@pytest.fixture
def problem(rng):
    """attn, positions, cos_sin, wo_a with 32x32 scales, wo_b with 32x32 scales; on the CPU."""
    generator = torch.Generator().manual_seed(int(rng.integers(1 << 31)))
    tokens = 7
    attn = torch.randn((tokens, GROUPS * HEADS, 512), generator=generator).bfloat16()
    angle = torch.rand((40, 32), generator=generator) * 6.28
    cos_sin = torch.cat([angle.cos(), angle.sin()], 1).contiguous()
    positions = torch.randint(0, 40, (tokens,), generator=generator)

    def weight(*shape):
        return (torch.randn(shape, generator=generator) * 60).clamp(-448, 448).to(E4M3)

    def scales(*shape):
        return torch.randint(110, 118, shape, generator=generator, dtype=torch.uint8)

    return {
        "attn": attn,
        "positions": positions,
        "cos_sin": cos_sin,
        "wo_a": weight(GROUPS, ROWS, COLS),
        "wo_a_scale": scales(GROUPS, ROWS // 32, COLS // 32),
        "wo_b": weight(HIDDEN, GROUPS * ROWS),
        "wo_b_scale": scales(HIDDEN // 32, GROUPS * ROWS // 32),
    }


def distance(y: torch.Tensor, want: torch.Tensor) -> float:
    y, want = y.double().cpu(), want.double().cpu()
    return float((y - want).norm() / want.norm())


def exact(p: dict[str, torch.Tensor]) -> torch.Tensor:
    """float64 result without any rounding of activations."""
    first = 512 - 64
    cos, sin = p["cos_sin"][p["positions"]].double()[:, None].chunk(2, dim=-1)
    even, odd = p["attn"][..., first::2].double(), p["attn"][..., first + 1 :: 2].double()
    attn = p["attn"].double().clone()
    attn[..., first::2], attn[..., first + 1 :: 2] = even * cos + odd * sin, odd * cos - even * sin
    x = attn.reshape(len(attn), GROUPS, COLS)
    wo_a = layouts.dequantize(p["wo_a"], layouts.expand_blocks(p["wo_a_scale"], ROWS, COLS, (32, 32)))
    wo_b = layouts.dequantize(p["wo_b"], layouts.expand_blocks(p["wo_b_scale"], HIDDEN, GROUPS * ROWS, (32, 32)))
    z = torch.einsum("tgk,gnk->tgn", x, wo_a).reshape(len(attn), -1)
    return z @ wo_b.t()


def test_result(problem, device):
    there = {name: tensor.to(device) for name, tensor in problem.items()}
    y = dequantised.o_proj_from_attn(**there, groups=GROUPS)
    assert y.dtype is torch.bfloat16
    assert y.device.type == device
    assert distance(y, exact(problem)) < 6e-3  # three roundings to BF16


def test_near_the_kernels(problem, device):
    """They round x and z to MXFP8: 2.7e-2 each at most."""
    there = {name: tensor.to(device) for name, tensor in problem.items()}
    kernels = ops.o_proj_from_attn(**there, groups=GROUPS, scale_span=32)
    y = ops.o_proj_from_attn(**there, groups=GROUPS, path="dequantised")
    assert 1e-3 < distance(y, kernels) < 5e-2
    x, x_scale = ops.inv_rope_mxfp8_quantize(there["attn"], there["positions"], there["cos_sin"], groups=GROUPS)
    weights = [there[name] for name in ("wo_a", "wo_a_scale", "wo_b", "wo_b_scale")]
    kernels = ops.o_proj(x, x_scale, *weights, scale_span=32)
    assert distance(ops.o_proj(x, x_scale, *weights, path="dequantised"), kernels) < 3e-2


def test_weight_forms(problem):
    w, blocks = problem["wo_a"], problem["wo_a_scale"]
    linear = layouts.expand_blocks(blocks, ROWS, COLS, (32, 32))
    want = layouts.dequantize(w, linear).bfloat16()
    forms = {
        "blocks": (w, blocks),
        "blocks, 2-D": (w, blocks.view(-1, COLS // 32)),
        "e8m0": (w, blocks.view(torch.float8_e8m0fnu)),
        "rows": (w, linear),
        "packed": (w, layouts.to_packed(linear)),
    }
    for name, (weight, scale) in forms.items():
        assert torch.equal(dequantised.dequantize_weight(weight, scale), want), name
    flat = dequantised.dequantize_weight(w.view(-1, COLS), blocks, groups=GROUPS)
    assert torch.equal(flat, want.view(-1, COLS))
    tiled = layouts.to_f8_128x4(linear[0])
    assert torch.equal(dequantised.dequantize_weight(w[0], tiled), want[0])
    wide = blocks[..., :1].contiguous()  # one scale for 32 rows and all columns
    spread = layouts.expand_blocks(wide, ROWS, COLS, (32, COLS))
    assert torch.equal(dequantised.dequantize_weight(w, wide), layouts.dequantize(w, spread).bfloat16())
    with pytest.raises(ValueError, match="1-D F8_128x4, which holds one group; the weights have 2"):
        dequantised.dequantize_weight(w, tiled)
    with pytest.raises(ValueError, match="w_scale has shape"):
        dequantised.dequantize_weight(w, blocks[:, :2])
    with pytest.raises(TypeError, match="w must have dtype float8_e4m3fn, got bfloat16"):
        dequantised.dequantize_weight(want, blocks)


def test_weights_may_be_expanded_once(problem):
    y = dequantised.o_proj_from_attn(**problem, groups=GROUPS)
    for name in ("wo_a", "wo_b"):
        problem[name] = dequantised.dequantize_weight(problem[name], problem[f"{name}_scale"])
        problem[f"{name}_scale"] = None
    assert torch.equal(dequantised.o_proj_from_attn(**problem, groups=GROUPS), y)


@pytest.mark.parametrize("layout", ["halves", "interleaved"])
@pytest.mark.parametrize("order", ["standard", "chunk_interleaved"])
def test_orders_and_cache_layouts(problem, order, layout):
    if layout == "interleaved":
        problem["cos_sin"] = problem["cos_sin"].view(-1, 2, 32).transpose(1, 2).reshape(-1, 64).contiguous()
    kernels = ops.o_proj_from_attn(**problem, groups=GROUPS, order=order, cos_sin_layout=layout)
    y = dequantised.o_proj_from_attn(**problem, groups=GROUPS, order=order, cos_sin_layout=layout)
    assert distance(y, kernels) < 5e-2


def test_positions_outside_the_cache_poison_their_token(problem):
    problem["positions"][2], problem["positions"][5] = 40, -1
    y = dequantised.o_proj_from_attn(**problem, groups=GROUPS)
    assert y.isnan().all(dim=1).tolist() == [False, False, True, False, False, True, False]


def test_padded_heads_and_no_tokens(problem):
    y = dequantised.o_proj_from_attn(**problem, groups=GROUPS)
    padded = {**problem, "attn": torch.cat([problem["attn"], torch.full_like(problem["attn"], torch.nan)], dim=1)}
    assert torch.equal(dequantised.o_proj_from_attn(**padded, groups=GROUPS, padded_heads=True), y)
    with pytest.raises(
        ValueError, match=r"attn must have 4 heads .*got 8; a tensor-parallel rank takes the slice of its"
    ):
        dequantised.o_proj_from_attn(**padded, groups=GROUPS)
    out = torch.empty_like(y)
    assert dequantised.o_proj_from_attn(**problem, groups=GROUPS, out=out) is out
    assert torch.equal(out, y)
    empty = {**problem, "attn": problem["attn"][:0], "positions": problem["positions"][:0]}
    assert ops.o_proj_from_attn(**empty, groups=GROUPS, path="dequantised").shape == (0, HIDDEN)
    with pytest.raises(ValueError, match=r"at least 4 heads \(2 groups of 2\), got 3"):
        dequantised.o_proj_from_attn(**{**problem, "attn": problem["attn"][:, :3]}, groups=GROUPS)


def test_a_device_without_kernels_takes_it(problem, monkeypatch):
    """SM12x, played by the CPU: the op and the module say which path it is."""
    want = dequantised.o_proj_from_attn(**problem, groups=GROUPS)
    monkeypatch.setattr(selector, "device_key", lambda device: "sm120")
    assert torch.equal(ops.o_proj_from_attn(**problem, groups=GROUPS), want)
    module = vllm_megaattn.OProj(
        problem["wo_a"], problem["wo_a_scale"], problem["wo_b"], problem["wo_b_scale"], cos_sin=problem["cos_sin"]
    )
    assert module.choice()[:2] == ("dequantised", "torch")
    assert torch.equal(module(problem["attn"], problem["positions"]), want)
    with pytest.raises(ValueError, match="path='fused' refused on sm120: no kernel yet for SM12x"):
        ops.o_proj_from_attn(**problem, groups=GROUPS, path="fused")


def test_blackwell_weights(problem, monkeypatch):
    """What prepare_weight makes for datacenter Blackwell is what the CPU computes the same from."""
    want = ops.o_proj_from_attn(**problem, groups=GROUPS)
    key = selector.device_key
    monkeypatch.setattr(selector, "device_key", lambda device: "sm103")
    wo_a, wo_a_scale, report_a = prepare_weight(problem["wo_a"], problem["wo_a_scale"])
    wo_b, wo_b_scale, report_b = prepare_weight(problem["wo_b"], problem["wo_b_scale"])
    assert (report_a["form"], report_b["form"]) == ("packed words", "F8_128x4")
    assert wo_a_scale.dtype is torch.int32
    assert wo_a_scale.shape == (GROUPS, ROWS, COLS // 128)
    assert wo_a_scale.stride()[1:] == (1, ROWS)
    assert wo_b_scale.shape == (layouts.f8_128x4_bytes(HIDDEN, GROUPS * ROWS // 32),)
    for name, w, scale in (("wo_a", wo_a, wo_a_scale), ("wo_b", wo_b, wo_b_scale)):
        assert torch.equal(w.view(torch.uint8), problem[name].view(torch.uint8))
        again = prepare_weight(w, scale)
        assert again[1] is scale or torch.equal(again[1], scale)
        assert again[1].stride() == scale.stride()
    flat = prepare_weight(problem["wo_a"].view(-1, COLS), problem["wo_a_scale"])
    assert torch.equal(flat[1], wo_a_scale)
    monkeypatch.setattr(selector, "device_key", key)
    problem.update(wo_a_scale=wo_a_scale, wo_b_scale=wo_b_scale)
    assert torch.equal(ops.o_proj_from_attn(**problem, groups=GROUPS), want)


def test_bf16_weights_are_checked_too(problem):
    for name in ("wo_a", "wo_b"):
        problem[name] = dequantised.dequantize_weight(problem[name], problem[f"{name}_scale"])
        problem[f"{name}_scale"] = None
    for change, message in (
        ({"wo_a": problem["wo_a"].view(2 * GROUPS, -1, COLS)}, "wo_a must have G = 2 groups"),
        ({"wo_a": problem["wo_a"].view(GROUPS, -1, COLS // 2)}, "attn must have 2 heads"),
        ({"wo_b": problem["wo_b"][:, :160]}, "wo_b must have K = 192 columns like wo_a has rows, got 160"),
        ({"wo_a_scale": torch.zeros(1)}, "wo_a_scale must be None for a BF16 wo_a, got Tensor"),
        ({"positions": problem["positions"][:3]}, r"positions must have shape \[T\] = \[7\], got \[3\]"),
        ({"out": torch.empty(7, HIDDEN + 1, dtype=torch.bfloat16)}, "out must have shape"),
    ):
        with pytest.raises(ValueError, match=message):
            dequantised.o_proj_from_attn(**{**problem, **change}, groups=GROUPS)
    change = {"wo_b": problem["wo_b"].float(), "wo_b_scale": torch.zeros((5, 6), dtype=torch.uint8)}
    with pytest.raises(TypeError, match="wo_b must have dtype float8_e4m3fn, got float32"):
        dequantised.o_proj_from_attn(**{**problem, **change}, groups=GROUPS)


def test_nothing_is_reshaped_to_fit(problem):
    """Where the op's own checks cannot run (a graph of torch.compile), shapes are still compared."""
    x = torch.zeros((7, GROUPS, COLS), dtype=torch.bfloat16)
    rest = problem["wo_a_scale"], problem["wo_b"], problem["wo_b_scale"]
    for wo_a in (problem["wo_a"].view(2 * GROUPS, -1, COLS), problem["wo_a"].view(GROUPS, -1, COLS // 2)):
        with pytest.raises(ValueError, match="wo_a must have 2 groups of 1024 columns like x"):
            dequantised.project(x, wo_a, *rest)
    with pytest.raises(ValueError, match=r"wo_b must have shape \[N, G\*N = 192\], got \[80, 384\]"):
        dequantised.project(x, problem["wo_a"], rest[0], problem["wo_b"].view(80, -1), rest[2])
    for out in (torch.empty(7, HIDDEN), torch.empty(2, 7, HIDDEN, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=r"out must be bfloat16 \[7, 160\], got torch"):
            dequantised.project(x, problem["wo_a"], *rest, out=out)


def test_kernels_run_after_a_check(problem):
    """The check tells the C core to run nothing; a refused call must not leave it so."""
    want = ops.o_proj_from_attn(**problem, groups=GROUPS)
    ops.o_proj_from_attn(**problem, groups=GROUPS, path="dequantised")
    with pytest.raises(TypeError, match="positions must have dtype int64"):
        ops.o_proj_from_attn(
            **{**problem, "positions": problem["positions"].int()}, groups=GROUPS, path="dequantised"
        )
    assert torch.equal(ops.o_proj_from_attn(**problem, groups=GROUPS), want)
