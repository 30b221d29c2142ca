"""`OProj`: equal to the ops it calls, weights replaced in place, dtypes that no `.to` can change, the rotary cache."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path

import pytest
import safetensors.torch
import torch

import vllm_megaattn
from vllm_megaattn import OProj, checkpoint, layouts, ops, selector
from vllm_megaattn.o_proj_module import YarnScaling, rope_cache

TINY = checkpoint.TINY_DIMS
WEIGHT_NAMES = ("wo_a", "wo_a_scale", "wo_b", "wo_b_scale")


@pytest.fixture(autouse=True)
def no_forced_path(monkeypatch):
    monkeypatch.delenv(selector.ENV_PATH, raising=False)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return checkpoint.write_synthetic_checkpoint(tmp_path_factory.mktemp("m") / "model.safetensors", tiny=True)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    path = tmp_path_factory.mktemp("m") / "other.safetensors"
    return checkpoint.write_synthetic_checkpoint(path, tiny=True, seed=1)


@pytest.fixture(scope="module")
def weights(tiny):
    return checkpoint.load_o_proj(tiny, 0)


def tensors(weights):
    return [getattr(weights, name) for name in WEIGHT_NAMES]


def attention(tokens=5, heads=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    attn = torch.randn(tokens, heads, 512, generator=generator).to(torch.bfloat16)
    return attn, torch.randint(0, 1000, (tokens,), generator=generator)


def bits(y):
    return y.view(torch.int16)


def relative(y, wanted):
    return ((y.double() - wanted).norm() / wanted.norm()).item()


def float64_projection(attn, positions, cos_sin, weights):
    """The projection without any rounding of activations."""
    values = attn.double()
    cos, sin = (part[:, None] for part in cos_sin[positions].double().chunk(2, dim=-1))
    even, odd = values[..., 448::2].clone(), values[..., 449::2].clone()
    values[..., 448::2], values[..., 449::2] = even * cos + odd * sin, odd * cos - even * sin
    wo_a = layouts.dequantize(
        weights.wo_a, layouts.expand_blocks(weights.wo_a_scale, weights.rank, TINY.group_cols, weights.wo_a_block)
    )
    wo_b = layouts.dequantize(
        weights.wo_b, layouts.expand_blocks(weights.wo_b_scale, *weights.wo_b.shape, weights.wo_b_block)
    )
    x = values.view(len(attn), weights.groups, -1)
    return torch.einsum("tgk,gnk->tgn", x, wo_a).flatten(1) @ wo_b.t()


# ---- forward --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["fused", "unfused"])
def test_forward_is_the_ops_in_a_row(tiny, weights, path):
    module = OProj.from_checkpoint(tiny, 0, path=path)
    attn, positions = attention(tokens=33)
    y = module(attn, positions)
    assert (y.dtype, list(y.shape)) == (torch.bfloat16, [33, TINY.hidden])
    x, x_scale = ops.inv_rope_mxfp8_quantize(attn, positions, rope_cache(8192), groups=8)
    z, z_scale = ops.einsum_fp8_sfd128x4(x, x_scale, weights.wo_a, weights.wo_a_scale)
    wanted = ops.mxfp8_gemm_wo_b(z, z_scale, weights.wo_b, weights.wo_b_scale)
    assert torch.equal(bits(y), bits(wanted))
    assert torch.equal(bits(module.forward_quantized(x, x_scale)), bits(wanted))


def test_forward_against_float64(tiny, weights):
    attn, positions = attention(tokens=40)
    y = OProj.from_checkpoint(tiny, 0)(attn, positions)
    wanted = float64_projection(attn, positions, rope_cache(8192), weights)
    # Two e4m3 roundings of about 2.6e-2 in quadrature: measured 3.6e-2; without the rotation back, 3.6e-1.
    assert relative(y, wanted) < 4.5e-2
    assert relative(y, float64_projection(attn, 0 * positions, rope_cache(8192), weights)) > 0.2


@pytest.mark.parametrize("version", ["v4.1", "v4"])
def test_column_orders_give_the_same_projection(tmp_path, version):
    """The orders permute the same 32-element blocks, so only the order of summation differs."""
    path = checkpoint.write_synthetic_checkpoint(tmp_path / "m.safetensors", tiny=True, version=version)
    attn, positions = attention()
    standard = OProj.from_checkpoint(path, 0)
    interleaved = OProj.from_checkpoint(path, 0, order="chunk_interleaved")
    assert not torch.equal(standard.wo_a.view(torch.uint8), interleaved.wo_a.view(torch.uint8))
    y = standard(attn, positions)
    assert relative(interleaved(attn, positions), y.double()) < 2.0**-8


def test_other_scale_forms_give_the_same_bits(weights):
    """Power-of-two float32 blocks and packed words per row hold the same scales as the UE8M0 blocks."""
    attn, positions = attention()
    cache = rope_cache(1000)
    wanted = OProj(*tensors(weights), cos_sin=cache)(attn, positions)
    floats = [layouts.scale_to_float32(scale) for scale in (weights.wo_a_scale, weights.wo_b_scale)]
    by_float = OProj(weights.wo_a, floats[0], weights.wo_b, floats[1], cos_sin=cache)
    assert torch.equal(bits(by_float(attn, positions)), bits(wanted))
    linear = layouts.expand_blocks(weights.wo_a_scale, TINY.rank, TINY.group_cols, (32, 32))
    packed = layouts.to_packed(linear)
    for order in ("standard", "chunk_interleaved"):
        by_words = OProj(weights.wo_a, packed, weights.wo_b, weights.wo_b_scale, cos_sin=cache, order=order)
        blocks = OProj(*tensors(weights), cos_sin=cache, order=order)
        assert torch.equal(bits(by_words(attn, positions)), bits(blocks(attn, positions)))


def test_interleaved_rope_cache(tiny):
    attn, positions = attention()
    halves = OProj.from_checkpoint(tiny, 0)
    interleaved = OProj.from_checkpoint(tiny, 0, cos_sin_layout="interleaved")
    assert torch.equal(bits(halves(attn, positions)), bits(interleaved(attn, positions)))


def test_padding_heads_and_empty_batches(tiny):
    module = OProj.from_checkpoint(tiny, 0, tp_rank=1, tp_size=4, padded_heads=True)  # 4 heads
    attn, positions = attention(heads=4)
    padded = torch.full((5, 64, 512), math.nan, dtype=torch.bfloat16)
    padded[:, :4] = attn
    strict = OProj.from_checkpoint(tiny, 0, tp_rank=1, tp_size=4)
    with pytest.raises(ValueError, match=r"attn must have 4 heads \(groups = 2 of K/D = 2\), got 64"):
        strict(padded, positions)
    assert torch.equal(bits(module(padded, positions)), bits(strict(attn, positions)))
    assert torch.equal(bits(module(padded, positions)), bits(module(attn, positions)))
    assert list(module(attn[:0], positions[:0]).shape) == [0, TINY.hidden]


def test_a_position_outside_the_cache_poisons_its_token_only(tiny):
    module = OProj.from_checkpoint(tiny, 0, max_positions=100)
    attn, positions = attention()
    positions = positions % 100
    clean = module(attn, positions)
    positions[2] = 100
    y = module(attn, positions)
    assert y[2].isnan().all()
    keep = [0, 1, 3, 4]
    assert torch.equal(bits(y[keep]), bits(clean[keep]))


# ---- weights in place: B94, B95 -------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["standard", "chunk_interleaved"])
def test_load_weights_keeps_addresses_and_equals_a_new_module(tiny, other, order):
    module = OProj.from_checkpoint(tiny, 0, order=order)
    pointers = {name: getattr(module, name).data_ptr() for name in WEIGHT_NAMES}
    attn, positions = attention()
    before = module(attn, positions)
    module.load_weights(*tensors(checkpoint.load_o_proj(other, 0)))
    assert {name: getattr(module, name).data_ptr() for name in WEIGHT_NAMES} == pointers
    after = module(attn, positions)
    fresh = OProj.from_checkpoint(other, 0, order=order)(attn, positions)
    assert torch.equal(bits(after), bits(fresh))
    assert not torch.equal(bits(after), bits(before))


def test_a_refused_reload_leaves_the_old_weights(tiny, other):
    module = OProj.from_checkpoint(tiny, 0)
    old = {name: getattr(module, name).clone().view(torch.uint8) for name in WEIGHT_NAMES}
    new = checkpoint.load_o_proj(other, 0)
    rows = layouts.expand_blocks(new.wo_b_scale, *new.wo_b.shape, (32, 32))
    third = torch.full(new.wo_b_scale.shape, 0.3)
    for arguments, message in (
        ((new.wo_a, new.wo_a_scale, new.wo_b, rows), r"wo_b_scale must keep its form torch.uint8 \[8, 32\] .*\[256"),
        ((new.wo_a, new.wo_a_scale, new.wo_b, third), "wo_b_scale must hold positive powers of two"),
        (
            (new.wo_a[:4], new.wo_a_scale[:4], new.wo_b[:, :512], rows),
            r"wo_a must have shape \[8, 128, 1024\] as bef",
        ),
        ((new.wo_a, new.wo_a_scale, new.wo_b[:64], rows), r"wo_b must have shape \[256, 1024\] as before, got \[64"),
    ):
        with pytest.raises(ValueError, match=message):
            module.load_weights(*arguments)
    assert all(torch.equal(getattr(module, name).view(torch.uint8), old[name]) for name in WEIGHT_NAMES)
    assert module.reports["wo_a"]["elements"] == new.wo_a.numel()


def test_preparing_twice_changes_nothing(weights):
    once = vllm_megaattn.prepare_weight(weights.wo_a, weights.wo_a_scale)
    twice = vllm_megaattn.prepare_weight(*once[:2])
    for first, second in zip(once[:2], twice[:2], strict=True):
        assert torch.equal(first.view(torch.uint8), second.view(torch.uint8))


# ---- a module among modules -----------------------------------------------------------------------------------


@pytest.mark.parametrize("convert", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.double()])
def test_conversions_leave_the_byte_formats_alone(tiny, convert):
    module = OProj.from_checkpoint(tiny, 0)
    attn, positions = attention()
    wanted = module(attn, positions)
    convert(torch.nn.Sequential(module))
    assert module.wo_a.dtype == module.wo_b.dtype == torch.float8_e4m3fn
    assert module.cos_sin.dtype == torch.float32
    assert torch.equal(bits(module(attn, positions)), bits(wanted))


def test_state_dict_and_copies(tiny, other):
    module, target = OProj.from_checkpoint(tiny, 0), OProj.from_checkpoint(other, 0)
    assert sorted(module.state_dict()) == sorted([*WEIGHT_NAMES, "_extra_state"])
    attn, positions = attention()
    wanted = module(attn, positions)
    twin = copy.deepcopy(target)
    target.load_state_dict(module.state_dict())
    assert torch.equal(bits(target(attn, positions)), bits(wanted))
    assert not torch.equal(bits(twin(attn, positions)), bits(wanted))
    assert not list(module.parameters())


def test_a_state_dict_of_another_order_or_with_nan_is_refused(tiny, other, tmp_path):
    """Each refusal names the tensor and leaves the old weights, strict or not."""
    module = OProj.from_checkpoint(tiny, 0, order="chunk_interleaved")
    old = {name: getattr(module, name).clone().view(torch.uint8) for name in WEIGHT_NAMES}
    path = tmp_path / "state.safetensors"
    safetensors.torch.save_file(OProj.from_checkpoint(other, 0).state_dict(), path)
    standard = safetensors.torch.load_file(path)  # the order survives a file that holds nothing but tensors
    good = OProj.from_checkpoint(other, 0, order="chunk_interleaved").state_dict()
    element, scale = good["wo_b"].clone(), good["wo_a_scale"].clone()
    element.view(torch.uint8)[3, 5], scale[1, 0, 2] = 0x7F, 0xFF
    unnamed = {name: good[name] for name in WEIGHT_NAMES}
    for state, message in (
        (standard, "wo_a has its columns in order 'standard', this module needs 'chunk_interleaved'"),
        ({**good, "wo_b": element}, r"wo_b holds NaN elements \(0x7F or 0xFF\): 1 of 262144, the first at \[3, 5\]"),
        ({**good, "wo_a_scale": scale}, r"wo_a_scale holds NaN scales .*the first at \[1, 0, 2\]"),
        ({**good, "wo_a": good["wo_a"].float()}, "wo_a must have dtype torch.float8_e4m3fn, got torch.float32"),
    ):
        for strict in (True, False):
            with pytest.raises(RuntimeError, match=message):
                module.load_state_dict(state, strict=strict)
        with pytest.raises(RuntimeError, match=message.replace("wo_", "proj.wo_", 1)):
            torch.nn.ModuleDict({"proj": module}).load_state_dict({f"proj.{k}": v for k, v in state.items()})
    assert all(torch.equal(getattr(module, name).view(torch.uint8), old[name]) for name in WEIGHT_NAMES)
    with pytest.raises(RuntimeError, match=r'Missing key.*"_extra_state"'):
        module.load_state_dict(unnamed)
    module.load_state_dict(unnamed, strict=False)
    assert torch.equal(module.wo_a.view(torch.uint8), good["wo_a"].view(torch.uint8))
    module.load_state_dict(good)
    attn, positions = attention()
    fresh = OProj.from_checkpoint(other, 0, order="chunk_interleaved")
    assert torch.equal(bits(module(attn, positions)), bits(fresh(attn, positions)))


def test_what_the_caller_gave_is_never_written(weights, other):
    given = [tensor.clone() for tensor in tensors(weights)]
    module = OProj(*given)
    before = [tensor.view(torch.uint8).clone() for tensor in given]
    new = tensors(checkpoint.load_o_proj(other, 0))
    module.load_weights(*new)
    module.load_state_dict(OProj(*new).state_dict())
    assert all(torch.equal(tensor.view(torch.uint8), old) for tensor, old in zip(given, before, strict=True))
    assert torch.equal(module.wo_a.view(torch.uint8), new[0].view(torch.uint8))


@pytest.mark.parametrize("rows", [1, 32, 128])
@pytest.mark.parametrize("cols", [32, 128, 256, TINY.group_cols])
def test_every_form_of_scales_can_be_reordered(weights, rows, cols):
    """The same scales block by block, whatever their blocks: the projection does not depend on the order."""
    shape = (weights.groups, TINY.rank // rows, TINY.group_cols // cols)
    scale = torch.randint(116, 124, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    attn, positions = attention()
    for given in (scale, scale.flatten(0, 1), scale.view(torch.float8_e8m0fnu)):
        y, reordered = (
            OProj(weights.wo_a, given, weights.wo_b, weights.wo_b_scale, cos_sin=rope_cache(1000), order=order)(
                attn, positions
            )
            for order in ("standard", "chunk_interleaved")
        )
        assert relative(reordered, y.double()) < 2.0**-8


def test_scales_that_cannot_be_reordered_are_refused(weights):
    for shape, message in (
        ((8, 4, 5), r"one scale for 32, 128, 256 or all of the 1024 columns to be reordered, got \[8, 4, 5\]"),
        ((7, 4, 32), r"wo_a_scale must have shape \[8, rank/r, K/c\].*got \[7, 4, 32\]"),
        ((30, 32), r"wo_a_scale must have shape .*got \[30, 32\]"),
    ):
        scale = torch.full(shape, 120, dtype=torch.uint8)
        with pytest.raises(ValueError, match=message):
            OProj(weights.wo_a, scale, weights.wo_b, weights.wo_b_scale, order="chunk_interleaved")


def test_one_group_may_have_tiled_scales(weights):
    """1-D F8_128x4 of a single group, as the ops take it."""
    linear = layouts.expand_blocks(weights.wo_a_scale[:1], TINY.rank, TINY.group_cols, (32, 32))
    wo_b = weights.wo_b[:, : TINY.rank].contiguous(), weights.wo_b_scale[:, : TINY.rank // 32].contiguous()
    attn, positions = attention(heads=2)
    for order in ("standard", "chunk_interleaved"):
        tiled, blocks = (
            OProj(weights.wo_a[:1], scale, *wo_b, cos_sin=rope_cache(1000), order=order)(attn, positions)
            for scale in (layouts.to_f8_128x4(linear[0]), weights.wo_a_scale[:1])
        )
        assert torch.equal(bits(tiled), bits(blocks))


def test_move_to_meta(tiny):
    module = OProj.from_checkpoint(tiny, 0).to("meta")
    attn, positions = attention()
    y = module(attn.to("meta"), positions.to("meta"))
    assert (y.device.type, list(y.shape), y.dtype) == ("meta", [5, TINY.hidden], torch.bfloat16)


def test_compiles_as_one_graph(tiny):
    module = OProj.from_checkpoint(tiny, 0)
    attn, positions = attention()
    with torch.no_grad():
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
        for tokens in (5, 3):
            y, wanted = (run(attn[:tokens], positions[:tokens]) for run in (compiled, module))
            assert torch.equal(bits(y), bits(wanted))


def test_repr_says_shapes_path_and_reason(tiny, monkeypatch):
    module = OProj.from_checkpoint(tiny, 0, tp_rank=1, tp_size=2)
    text = repr(module)
    for part in (
        "wo_a [4, 128, 1024] with torch.uint8 scales [4, 4, 32]",
        "wo_b [256, 512] with torch.uint8 scales [8, 16]",
        "rope cache: 8192 positions, halves",
        "device=cpu, partial sum",
        "path=fused on cpu (wo_a writes MXFP8 z itself",
    ):
        assert part in text
    assert "rope cache: none" in repr(OProj(module.wo_a, module.wo_a_scale, module.wo_b, module.wo_b_scale))
    monkeypatch.setenv(selector.ENV_PATH, "unfused")
    assert "path=unfused on cpu (requested" in repr(module)
    monkeypatch.setenv(selector.ENV_PATH, "neither")
    assert "VLLM_MEGAATTN_PATH must be one of" in repr(module)


def test_exported():
    assert vllm_megaattn.OProj is OProj


# ---- refusals -------------------------------------------------------------------------------------------------


def test_constructor_refusals(weights):
    a, a_scale, b, b_scale = tensors(weights)
    cache = rope_cache(8)
    for arguments, options, kind, message in (
        (
            (a.float(), a_scale, b, b_scale),
            {},
            TypeError,
            r"wo_a must be float8_e4m3fn \[G, rank, K\], got torch.float32",
        ),
        ((a, a_scale, b.view(torch.int32), b_scale), {}, TypeError, r"wo_b must be float8_e4m3fn .* got torch.int32"),
        ((a[0], a_scale, b, b_scale), {}, ValueError, r"wo_a must have shape \[G, rank, K\], got \[128, 1024\]"),
        (
            (a, a_scale, b[:, :-32], b_scale),
            {},
            ValueError,
            r"wo_b must have G \* rank = 1024 columns .* \[256, 992\]",
        ),
        ((a, a_scale * 0 + 0.3, b, b_scale), {}, ValueError, "wo_a_scale must hold positive powers of two"),
        (
            (a, a_scale, b, b_scale),
            {"order": "x"},
            ValueError,
            "order must be one of standard, chunk_interleaved, got",
        ),
        (
            (a, a_scale, b, b_scale),
            {"cos_sin_layout": "x"},
            ValueError,
            "cos_sin_layout must be one of halves, interl",
        ),
        (
            (a, a_scale, b, b_scale),
            {"cos_sin": cache.half()},
            TypeError,
            "cos_sin must be float32 .* got torch.float16",
        ),
        ((a, a_scale, b, b_scale), {"cos_sin": cache[0]}, ValueError, r"cos_sin must be float32 .* got \[64\]"),
        ((a, a_scale, b, b_scale), {"cos_sin": [1.0]}, TypeError, "cos_sin must be a torch.Tensor, got list"),
        (
            (a, a_scale, b, b_scale),
            {"cos_sin": torch.zeros(8, 63)},
            ValueError,
            r"cos_sin must be .* R even, from 2 to 512, got \[8, 63\]",
        ),
        ((a, a_scale, b, b_scale), {"cos_sin": torch.zeros(8, 514)}, ValueError, r"from 2 to 512, got \[8, 514\]"),
        ((a, a_scale, b, b_scale), {"cos_sin": cache[:0]}, ValueError, r"at least one position .* got \[0, 64\]"),
        ((a, a_scale, b, b_scale), {"cos_sin": cache[:, :0]}, ValueError, r"cos_sin must be .* got \[8, 0\]"),
        (
            (a, a_scale, b, b_scale),
            {"cos_sin": cache.clone().requires_grad_()},
            ValueError,
            "cos_sin must not require grad",
        ),
        ((a, a_scale, b, b_scale), {"scale_span": 64}, ValueError, "scale_span must be None, 32, 128 or 256, got 64"),
        ((a, a_scale, b, b_scale), {"scale_span": 256}, ValueError, "scale_span must divide rank = 128 and K = 1024"),
        ((a, a_scale, b, b_scale), {"scale_span": "32"}, TypeError, "scale_span must be an int or None, got '32'"),
        ((a, a_scale, b, b_scale), {"scale_span": True}, TypeError, "scale_span must be an int or None, got True"),
        ((a, a_scale, b, b_scale), {"padded_heads": 64}, TypeError, "padded_heads must be a bool, got 64"),
        ((a, None, b, b_scale), {}, TypeError, "wo_a_scale must be a torch.Tensor, got NoneType"),
        ((a, a_scale, b, b_scale), {"path": "quick"}, ValueError, "path must be one of auto, fused, unfused"),
    ):
        with pytest.raises(kind, match=message):
            OProj(*arguments, **options)


@pytest.mark.parametrize("order", ["standard", "chunk_interleaved"])
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_weights_and_scales_are_refused(weights, other, order, code):
    """By name, count and place in the caller's tensors, not in the module's order of columns; a reload changes nothing."""
    module = OProj.from_checkpoint(other, 0, order=order)
    old = {name: getattr(module, name).clone().view(torch.uint8) for name in WEIGHT_NAMES}
    for name, where, count in (("wo_a", [3, 5, 700], 2), ("wo_b", [17, 1000], 1)):
        damaged = [tensor.clone() for tensor in tensors(weights)]
        data = damaged[WEIGHT_NAMES.index(name)].view(torch.uint8)
        data[tuple(where)] = code
        data[tuple(where[:-1])][-1] = code if count == 2 else 0
        message = re.escape(
            f"{name} holds NaN elements (0x7F or 0xFF): {count} of {data.numel()}, the first at {where}"
        )
        with pytest.raises(ValueError, match=message):
            OProj(*damaged, order=order)
        with pytest.raises(ValueError, match=message):
            module.load_weights(*damaged)
    for name, where in (("wo_a_scale", [2, 3, 31]), ("wo_b_scale", [7, 0])):
        damaged = [tensor.clone() for tensor in tensors(weights)]
        scale = damaged[WEIGHT_NAMES.index(name)].view(torch.uint8)
        scale[tuple(where)] = 0xFF
        message = re.escape(f"{name} holds NaN scales (0xFF): 1 of {scale.numel()}, the first at {where}")
        with pytest.raises(ValueError, match=message):
            OProj(*damaged, order=order)
    assert all(torch.equal(getattr(module, name).view(torch.uint8), old[name]) for name in WEIGHT_NAMES)


def test_a_path_that_cannot_be_taken_is_refused_at_construction(weights):
    a = weights.wo_a[:1, :40].contiguous()
    with pytest.raises(ValueError, match=r"o_proj: path='fused' refused on cpu: rank must be a multiple of 32"):
        OProj(a, weights.wo_a_scale[:1, :2], weights.wo_b[:, :40], weights.wo_b_scale[:, :2], path="fused")


def test_columns_that_are_no_whole_heads_cannot_be_reordered(weights):
    a = weights.wo_a[:, :, :256].contiguous()
    with pytest.raises(ValueError, match="wo_a must have a multiple of 512 columns to be reordered, got 256"):
        OProj(a, weights.wo_a_scale[..., :8], weights.wo_b, weights.wo_b_scale, order="chunk_interleaved")


def test_forward_needs_a_rope_cache(weights):
    module = OProj(*tensors(weights))
    with pytest.raises(ValueError, match="OProj was built without cos_sin: give it one, or call forward_quantized"):
        module(*attention())


def test_wrong_input_is_refused_by_the_op(tiny):
    module = OProj.from_checkpoint(tiny, 0)
    attn, positions = attention()
    with pytest.raises(TypeError, match="attn must have dtype bfloat16, got float32"):
        module(attn.float(), positions)
    with pytest.raises(TypeError, match="positions must have dtype int64, got int32"):
        module(attn, positions.int())
    with pytest.raises(ValueError, match="attn"):
        module(attn[:, :15], positions)


def test_the_python_of_the_readme_runs_as_written(tmp_path, monkeypatch):
    """Its names and its calls, on small sizes: the result of each line is what the lines before it say it is."""
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(r"^```python\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE)
    (file,) = set(re.findall(r"[\w-]+\.safetensors", snippet))
    checkpoint.write_synthetic_checkpoint(tmp_path / file, tiny=True)
    monkeypatch.chdir(tmp_path)
    attn, positions = attention()
    stored = safetensors.torch.load_file(file)
    names = {
        "attn": attn,
        "positions": positions,
        "cos_sin": rope_cache(8192),
        "wo_a": stored["layers.0.attn.wo_a.weight"],
        "wo_a_scale": stored["layers.0.attn.wo_a.scale"],
        "wo_b": stored["layers.0.attn.wo_b.weight"],
        "wo_b_scale": stored["layers.0.attn.wo_b.scale"],
    }
    lines, results = [], []
    for line in snippet.splitlines():
        lines.append(line)
        if line.startswith("y = "):
            exec("\n".join(lines), names)
            results.append(names["y"])
            lines = []
    assert lines == []
    assert len(results) == 4
    for other in results[1:3]:
        assert torch.equal(bits(results[0]), bits(other))
    parts = results[3].float()
    for rank in range(1, 4):
        part = OProj.from_checkpoint(file, 0, rank, 4)
        parts += part(attn[:, 4 * rank : 4 * rank + 4], positions).float()
    assert relative(parts, results[0].double()) < 0.02


# ---- the rotary cache -----------------------------------------------------------------------------------------


def test_rope_cache_rows_are_cos_then_sin():
    cache = rope_cache(50, 500.0)
    assert (cache.dtype, list(cache.shape)) == (torch.float32, [50, 64])
    for position in (0, 1, 49):
        for pair in (0, 7, 31):
            angle = position * 500.0 ** (-pair / 32)
            assert cache[position, pair].item() == pytest.approx(math.cos(angle), abs=6e-8)
            assert cache[position, 32 + pair].item() == pytest.approx(math.sin(angle), abs=6e-8)
    interleaved = rope_cache(50, 500.0, layout="interleaved")
    assert torch.equal(interleaved[:, 0::2], cache[:, :32])
    assert torch.equal(interleaved[:, 1::2], cache[:, 32:])
    table = torch.complex(cache[:, :32], cache[:, 32:])  # SGLang's freqs_cis
    assert torch.equal(torch.view_as_real(table).flatten(1), interleaved)


def test_yarn_stretches_long_wavelengths_only():
    yarn = YarnScaling(factor=4.0, original_max_positions=4096)
    plain, stretched = (rope_cache(2, 10000.0, yarn=scaling).double() for scaling in (None, yarn))
    ratio = plain[1, 32:].asin() / stretched[1, 32:].asin()  # angles of position 1; pair 0 has the angle 1
    assert torch.allclose(ratio[:6], torch.ones(6, dtype=torch.float64), rtol=1e-6)  # more than 32 turns
    assert torch.allclose(ratio[-8:], torch.full((8,), 4.0, dtype=torch.float64), rtol=1e-3)  # less than one turn
    assert bool((ratio.diff() > -1e-3).all())


V4_ROPE = {
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "compress_ratios": [0, 128],
    "max_position_embeddings": 300,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 30},
}
V4_YARN = YarnScaling(16, 65536, beta_fast=30)
PLAIN, COMPRESSED = rope_cache(300), rope_cache(300, 160000.0, yarn=V4_YARN)


def two_layers(directory, config):
    path = checkpoint.write_synthetic_checkpoint(directory / "m.safetensors", tiny=True, layers=2)
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    "config",
    [
        V4_ROPE,
        {"text_config": V4_ROPE},
        {**V4_ROPE, "compress_ratios": None, "layer_types": ["sliding_attention", "heavily_compressed_attention"]},
        {
            "layer_types": ["sliding_attention", "compressed_sparse_attention"],
            "max_position_embeddings": 300,
            "rope_parameters": {
                "main": {"rope_type": "default", "rope_theta": 10000.0},
                "compress": {"rope_type": "yarn", "rope_theta": 160000.0, "attention_factor": 1.0, "factor": 16}
                | {"original_max_position_embeddings": 65536, "beta_fast": 30},
            },
        },
    ],
)
def test_rope_comes_from_the_config(tmp_path, config):
    path = two_layers(tmp_path, config)
    for place in (path, tmp_path):
        assert torch.equal(OProj.from_checkpoint(place, 0).cos_sin, PLAIN)
        assert torch.equal(OProj.from_checkpoint(place, 1).cos_sin, COMPRESSED)


def test_rope_of_a_model_with_one_kind_of_layer(tmp_path):
    plain = {"rope_theta": 500, "max_position_embeddings": 300}
    assert torch.equal(OProj.from_checkpoint(two_layers(tmp_path, plain), 1).cos_sin, rope_cache(300, 500.0))
    path = two_layers(tmp_path, {**plain, "rope_scaling": V4_ROPE["rope_scaling"]})
    assert torch.equal(OProj.from_checkpoint(path, 1).cos_sin, rope_cache(300, 500.0, yarn=V4_YARN))


def test_rope_arguments_come_before_the_config(tmp_path):
    path = two_layers(tmp_path, V4_ROPE)

    def cache(**given):
        return OProj.from_checkpoint(path, 1, **given).cos_sin

    assert torch.equal(cache(max_positions=20), COMPRESSED[:20])
    assert torch.equal(cache(rope_theta=500.0), rope_cache(300, 500.0, yarn=V4_YARN))
    assert torch.equal(cache(yarn=False), rope_cache(300, 160000.0))
    assert torch.equal(cache(yarn=YarnScaling(4, 4096)), rope_cache(300, 160000.0, yarn=YarnScaling(4, 4096)))
    assert torch.equal(cache(cos_sin=PLAIN), PLAIN)


def test_rope_without_a_config(tmp_path):
    assert torch.equal(OProj.from_checkpoint(two_layers(tmp_path, None), 1).cos_sin, rope_cache(8192, 10000.0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"rope_scaling": {"type": "longrope"}},
            "rope_scaling in .*config.json is of type 'longrope'; only yarn and",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "must have original_max_position_embeddings"),
        ({"rope_scaling": {**V4_ROPE["rope_scaling"], "factor": 0}}, "factor of rope_scaling in .* got 0"),
        ({"rope_scaling": 3}, "rope_scaling in .* must be an object, got 3"),
        ({"compress_ratios": None}, "neither compress_ratios nor layer_types.*which of the two layer 1 uses"),
        ({"compress_ratios": [0]}, "compress_ratios in .* must be a list with an entry for layer 1.*got 1"),
        ({"compress_ratios": [0, -1]}, r"compress_ratios\[1\] in .* must be an integer from 0 on, got -1"),
        ({"compress_rope_theta": None}, "compresses layer 1 but has no compress_rope_theta"),
        ({"compress_rope_theta": -1}, "compress_rope_theta in .* must be positive and finite, got -1"),
        ({"max_position_embeddings": 0}, "max_position_embeddings in .* must be a positive integer, got 0"),
    ],
)
def test_configs_that_leave_rope_open_are_refused(tmp_path, change, message):
    path = two_layers(tmp_path, {**V4_ROPE, **change})
    with pytest.raises(ValueError, match=message):
        OProj.from_checkpoint(path, 1)
    given = {"rope_theta": 160000.0, "yarn": V4_YARN, "max_positions": 300}
    assert torch.equal(OProj.from_checkpoint(path, 1, **given).cos_sin, COMPRESSED)


def test_yarn_refusals(tiny):
    for name in ("factor", "original_max_positions", "beta_fast", "beta_slow"):
        for value in (0, -1, math.nan, math.inf):
            with pytest.raises(ValueError, match=f"{name} of YarnScaling must be positive and finite, got {value}"):
                YarnScaling(**{"factor": 4, "original_max_positions": 4096, name: value})
    with pytest.raises(TypeError, match="factor of YarnScaling must be a number, got '4'"):
        YarnScaling("4", 4096)
    with pytest.raises(ValueError, match="theta must be above 1 with yarn"):
        rope_cache(4, 1.0, yarn=YarnScaling(4, 4096))
    with pytest.raises(TypeError, match="theta must be a number, got 'a'"):
        rope_cache(4, "a")
    with pytest.raises(TypeError, match=r"yarn must be a YarnScaling or None, got \(4, 4096\)"):
        rope_cache(4, yarn=(4, 4096))
    with pytest.raises(TypeError, match=r"yarn must be a YarnScaling, False or None, got \(4, 4096\)"):
        OProj.from_checkpoint(tiny, 0, yarn=(4, 4096))


def test_names_that_are_no_strings_are_refused(tiny):
    for name in ("order", "cos_sin_layout"):
        with pytest.raises(ValueError, match=rf"{name} must be one of .*, got \['a'\]"):
            OProj.from_checkpoint(tiny, 0, **{name: ["a"], "cos_sin": PLAIN})


def test_rope_cache_refusals():
    for arguments, message in (
        ({"max_positions": 0}, "max_positions must be positive, rope_dim even, got 0 and 64"),
        ({"max_positions": 4, "rope_dim": 63}, "max_positions must be positive, rope_dim even, got 4 and 63"),
        ({"max_positions": 4, "layout": "neox"}, "layout must be one of halves, interleaved, got 'neox'"),
    ):
        with pytest.raises(ValueError, match=message):
            rope_cache(**arguments)


# ---- the surroundings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["standard", "chunk_interleaved"])
def test_default_device_does_not_matter(tiny, order):
    attn, positions = attention()
    wanted = OProj.from_checkpoint(tiny, 0, order=order)(attn, positions)
    with torch.device("meta"):
        module = OProj.from_checkpoint(tiny, 0, order=order)
        y = module(attn, positions)
    assert torch.equal(bits(y), bits(wanted))


def test_a_checkpoint_is_written_on_any_default_device(tiny, tmp_path):
    with torch.device("meta"):
        path = checkpoint.write_synthetic_checkpoint(tmp_path / "model.safetensors", tiny=True)
    assert path.read_bytes() == tiny.read_bytes()
