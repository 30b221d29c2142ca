"""o_proj and o_proj_from_attn: the whole projection equals its parts bit for bit, on either path."""

from __future__ import annotations

import numpy as np
import pytest
import reference as ref
import torch
from helpers import E4M3, bf16, check_product, codes, e4m3, f8_128x4, make_matmul, poisoned, same_bits, u8, words
from test_inv_rope import make_attn, make_cache

import vllm_megaattn


def make_weights(rng, groups, rank, k, hidden, device="cpu", form="32x32"):
    """(wo_a, wo_a_scale, wo_b, wo_b_scale) and the two problems they come from (their activations unused)."""
    a = make_matmul(rng, 1, groups, rank, k, form)
    b = make_matmul(rng, 1, 1, hidden, groups * rank, form)
    tensors = e4m3(a.w, device), u8(a.w_blocks, device), e4m3(b.w[0], device), u8(b.w_blocks[0], device)
    return tensors, a, b


def make_activation(rng, tokens, groups, k, device="cpu"):
    data, scale = ref.quantize(ref.bf16_encode(rng.standard_normal((tokens, groups, k))))
    return (e4m3(data, device), words(scale, device)), data, scale


@pytest.mark.parametrize("span", [32, 128, 256])
@pytest.mark.parametrize(
    ("tokens", "groups", "rank"), [(1, 2, 256), (5, 1, 512), (33, 4, 256), (130, 2, 256), (3, 8, 256)]
)
def test_both_paths_equal_the_parts(tokens, groups, rank, span, device, rng):
    weights, a, b = make_weights(rng, groups, rank, 512, 160, device)
    activation, data, scale = make_activation(rng, tokens, groups, 512, device)
    fused = vllm_megaattn.o_proj(*activation, *weights, path="fused", scale_span=span)
    unfused = vllm_megaattn.o_proj(*activation, *weights, path="unfused", scale_span=span)
    assert fused.shape == (tokens, 160)
    assert fused.dtype == torch.bfloat16
    assert same_bits(fused, unfused)

    z = vllm_megaattn.einsum_fp8_sfd128x4(*activation, *weights[:2], scale_span=span)
    assert same_bits(vllm_megaattn.mxfp8_gemm_wo_b(*z, *weights[2:]), fused)
    z_bf16 = vllm_megaattn.einsum_fp8_bf16(*activation, *weights[:2])
    q = vllm_megaattn.mxfp8_quantize_sfd128x4(z_bf16, scale_span=span)
    assert same_bits(q[0], z[0])
    assert same_bits(q[1], z[1])

    # and the reference, from the activation to y: z exactly, then wo_b on those bytes
    check_product(z_bf16, *ref.matmul(data, scale, a.w, a.w_scale), device)
    z_data, z_scale = ref.quantize(codes(z_bf16).reshape(tokens, -1), span)
    exact, magnitude = ref.matmul(z_data[:, None], z_scale[:, None], b.w, b.w_scale)
    check_product(fused, exact, magnitude, device)


@pytest.mark.parametrize("tokens", [0, 1, 4, 127, 128, 129])
def test_token_counts_and_batch_independence(tokens, device, rng):
    weights, _, _ = make_weights(rng, 2, 128, 256, 96, device)
    activation, data, scale = make_activation(rng, 140, 2, 256, device)
    whole = vllm_megaattn.o_proj(*activation, *weights)
    part = vllm_megaattn.o_proj(e4m3(data[:tokens], device), words(scale[:tokens], device), *weights)
    assert part.shape == (tokens, 96)
    assert same_bits(part, whole[:tokens])


@pytest.mark.parametrize("order", ["standard", "chunk_interleaved"])
@pytest.mark.parametrize("path", ["fused", "unfused"])
@pytest.mark.parametrize("layout", ["halves", "interleaved"])
def test_from_attn_is_the_composition(order, path, layout, device, rng):
    weights, _, _ = make_weights(rng, 2, 128, 4096, 64, device)
    attn = bf16(make_attn(rng, 5, 16, 512), device)
    positions = torch.from_numpy(rng.integers(0, 9, 5)).to(device)
    cache = torch.from_numpy(make_cache(rng, 9, 64, layout)).to(device)
    options = {"groups": 2, "order": order, "cos_sin_layout": layout}
    for span in (32, 128):
        y = vllm_megaattn.o_proj_from_attn(attn, positions, cache, *weights, path=path, scale_span=span, **options)
        x = vllm_megaattn.inv_rope_mxfp8_quantize(attn, positions, cache, scale_span=span, **options)
        assert same_bits(y, vllm_megaattn.o_proj(*x, *weights, path=path, scale_span=span))


@pytest.mark.parametrize("tokens", [0, 1, 33])
def test_from_attn_with_padded_heads(tokens, device, rng):
    """attn [T, 64, 512] of which wo_a's K and `groups` say that 16 heads are live; the caller must say that it knows."""
    weights, _, _ = make_weights(rng, 2, 128, 4096, 64, device)
    attn = np.full((tokens, 64, 512), 0x7FC0, np.uint16)
    attn[:, :16] = make_attn(rng, tokens, 16, 512)
    positions = torch.from_numpy(rng.integers(0, 9, tokens)).to(device)
    cache = torch.from_numpy(make_cache(rng, 9, 64, "halves")).to(device)
    attn = bf16(attn, device)
    with pytest.raises(
        ValueError, match=r"attn must have 16 heads \(groups = 2 of K/D = 8\), got 64; .*padded_heads=True"
    ):
        vllm_megaattn.o_proj_from_attn(attn, positions, cache, *weights, groups=2)
    y = vllm_megaattn.o_proj_from_attn(attn, positions, cache, *weights, groups=2, padded_heads=True)
    assert y.shape == (tokens, 64)
    assert same_bits(y, vllm_megaattn.o_proj_from_attn(attn[:, :16], positions, cache, *weights, groups=2))
    assert not torch.isnan(y).any()


@pytest.mark.parametrize("value", [64, None, "yes"])
def test_padded_heads_is_no_count(value, rng):
    weights, _, _ = make_weights(rng, 2, 128, 512, 64)
    attn, cache = bf16(make_attn(rng, 1, 2, 512)), torch.from_numpy(make_cache(rng, 9, 64, "halves"))
    rope = attn, torch.zeros(1).long(), cache
    for call in (
        lambda: vllm_megaattn.o_proj_from_attn(*rope, *weights, groups=2, padded_heads=value),
        lambda: vllm_megaattn.inv_rope_mxfp8_quantize(*rope, groups=2, padded_heads=value),
    ):
        with pytest.raises(TypeError, match=rf"padded_heads must be a bool, got {value!r}"):
            call()


def test_heads_that_do_not_fill_a_group_are_refused(rng):
    """K of a group must be whole heads, padded or not."""
    weights, _, _ = make_weights(rng, 2, 128, 384, 64)
    attn, cache = bf16(make_attn(rng, 2, 16, 512)), torch.from_numpy(make_cache(rng, 9, 64, "halves"))
    with pytest.raises(ValueError, match="wo_a must have K a multiple of attn's head size 512, got 384"):
        vllm_megaattn.o_proj_from_attn(attn, torch.zeros(2).long(), cache, *weights, groups=2, padded_heads=True)


def test_weights_stacked_in_two_dimensions(device, rng):
    """wo_a [G * N, K] and its scales [G * N / 32, K / 32]; G comes from x, or from the argument."""
    weights, _, _ = make_weights(rng, 4, 128, 4096, 64, device)
    flat = weights[0].flatten(0, 1), weights[1].flatten(0, 1), *weights[2:]
    activation, _, _ = make_activation(rng, 3, 4, 4096, device)
    assert same_bits(vllm_megaattn.o_proj(*activation, *flat), vllm_megaattn.o_proj(*activation, *weights))
    attn = bf16(make_attn(rng, 3, 32, 512), device), torch.tensor([0, 1, 2], device=device)
    cache = torch.from_numpy(make_cache(rng, 3, 64, "halves")).to(device)
    assert same_bits(
        vllm_megaattn.o_proj_from_attn(*attn, cache, *flat, groups=4),
        vllm_megaattn.o_proj_from_attn(*attn, cache, *weights, groups=4),
    )


def test_wo_b_scale_forms(device, rng):
    weights, _, b = make_weights(rng, 2, 128, 256, 96, device)
    activation, _, _ = make_activation(rng, 5, 2, 256, device)
    expected = vllm_megaattn.o_proj(*activation, *weights)
    tiled = f8_128x4(b.w_scale[0], device, 0xFF)
    assert same_bits(vllm_megaattn.o_proj(*activation, *weights[:3], tiled), expected)


def test_given_output(device, rng):
    weights, _, _ = make_weights(rng, 2, 128, 256, 96, device)
    activation, _, _ = make_activation(rng, 5, 2, 256, device)
    expected = vllm_megaattn.o_proj(*activation, *weights)
    for path in ("fused", "unfused"):
        y = poisoned((5, 96), torch.bfloat16, device)
        assert vllm_megaattn.o_proj(*activation, *weights, path=path, out=y) is y
        assert same_bits(y, expected)
    attn = bf16(make_attn(rng, 5, 2, 256), device), torch.arange(5, device=device)
    cache = torch.from_numpy(make_cache(rng, 5, 64, "halves")).to(device)
    expected = vllm_megaattn.o_proj_from_attn(*attn, cache, *weights, groups=2)
    y = poisoned((5, 96), torch.bfloat16, device)
    assert vllm_megaattn.o_proj_from_attn(*attn, cache, *weights, groups=2, out=y) is y
    assert same_bits(y, expected)


def test_token_isolation_from_attention_to_y(device, rng):
    """A poisoned token (position outside the cache, NaN or infinite attention output) is NaN in y, others unchanged."""
    weights, _, _ = make_weights(rng, 2, 128, 1024, 64, device)
    attn = make_attn(rng, 8, 4, 512)
    positions = rng.integers(0, 9, 8)
    cache = torch.from_numpy(make_cache(rng, 9, 64, "halves")).to(device)

    def run(attn, positions, path):
        tensors = bf16(attn, device), torch.from_numpy(positions).to(device)
        return codes(vllm_megaattn.o_proj_from_attn(*tensors, cache, *weights, groups=2, path=path))

    clean = run(attn, positions, "fused")
    attn[2, 1, 3], attn[5, 3, 500], positions[6] = 0x7FC0, 0xFF80, 9
    bad = np.isin(np.arange(8), [2, 5, 6])
    for path in ("fused", "unfused"):
        y = run(attn, positions, path)
        assert (np.isnan(ref.bf16_decode(y)) == bad[:, None]).all()
        assert (y[~bad] == clean[~bad]).all()


def test_inputs_are_not_changed(device, rng):
    weights, _, _ = make_weights(rng, 2, 128, 256, 96, device)
    activation, _, _ = make_activation(rng, 5, 2, 256, device)
    before = [codes(t).copy() for t in (*activation, *weights)]
    for path in ("fused", "unfused"):
        vllm_megaattn.o_proj(*activation, *weights, path=path)
    assert all((codes(t) == saved).all() for t, saved in zip((*activation, *weights), before, strict=True))


# ---- the choice of the path ------------------------------------------------------------------------------------


def op_arguments(monkeypatch) -> list[tuple]:
    """Records the arguments of every op call from here on."""
    from vllm_megaattn import ops

    calls: list[tuple] = []
    original = ops.call

    def spy(op, name, *args, **options):
        calls.append(args)
        original(op, name, *args, **options)

    monkeypatch.setattr(ops, "call", spy)
    return calls


def test_path_argument_and_variable_reach_the_op(monkeypatch, rng):
    weights, _, _ = make_weights(rng, 2, 128, 256, 96)
    activation, _, _ = make_activation(rng, 2, 2, 256)
    calls = op_arguments(monkeypatch)
    monkeypatch.delenv("VLLM_MEGAATTN_PATH", raising=False)
    vllm_megaattn.o_proj(*activation, *weights)
    vllm_megaattn.o_proj(*activation, *weights, path="unfused")
    monkeypatch.setenv("VLLM_MEGAATTN_PATH", "unfused")
    vllm_megaattn.o_proj(*activation, *weights)
    vllm_megaattn.o_proj(*activation, *weights, path="fused")  # the argument wins over the variable
    monkeypatch.setenv("VLLM_MEGAATTN_PATH", "fused")
    vllm_megaattn.o_proj(*activation, *weights)
    taken = [next(arg for arg in args if isinstance(arg, bool)) for args in calls]
    assert taken == [True, False, False, True, True]


@pytest.mark.parametrize("path", ["Fused", "", "fastest", "auto,fused"])
def test_unknown_path_is_refused(path, rng):
    weights, _, _ = make_weights(rng, 2, 128, 256, 96)
    activation, _, _ = make_activation(rng, 2, 2, 256)
    with pytest.raises(ValueError, match=rf"path.*auto.*fused.*unfused.*{path}"):
        vllm_megaattn.o_proj(*activation, *weights, path=path)


def test_unknown_variable_value_is_refused_by_name(monkeypatch, rng):
    weights, _, _ = make_weights(rng, 2, 128, 256, 96)
    activation, _, _ = make_activation(rng, 2, 2, 256)
    monkeypatch.setenv("VLLM_MEGAATTN_PATH", "quickest")
    with pytest.raises(ValueError, match=r"VLLM_MEGAATTN_PATH.*quickest"):
        vllm_megaattn.o_proj(*activation, *weights)
    vllm_megaattn.o_proj(*activation, *weights, path="fused")  # not read when the argument decides


@pytest.mark.parametrize("path", ["auto", "fused", "unfused"])
def test_a_rank_that_cannot_be_quantised_is_refused(path, rng):
    """N = 40: a 32-wide scale block would straddle two groups. Neither path may fall back silently."""
    weights, _, _ = make_weights(rng, 2, 40, 256, 96, form="1x32")
    b = make_matmul(rng, 1, 1, 96, 96)
    weights = *weights[:2], e4m3(b.w[0])[:, :80], u8(b.w_blocks[0])
    activation, _, _ = make_activation(rng, 2, 2, 256)
    with pytest.raises(ValueError, match=r"32.*40"):
        vllm_megaattn.o_proj(*activation, *weights, path=path)


def test_span_must_divide_the_rank(rng):
    weights, _, _ = make_weights(rng, 2, 96, 256, 64)
    activation, _, _ = make_activation(rng, 2, 2, 256)
    for path in ("fused", "unfused"):
        assert vllm_megaattn.o_proj(*activation, *weights, path=path).shape == (2, 64)
        with pytest.raises(ValueError, match=r"scale_span.*96.*128"):
            vllm_megaattn.o_proj(*activation, *weights, path=path, scale_span=128)


def test_default_span_on_the_cpu_is_32(monkeypatch, rng):
    weights, _, _ = make_weights(rng, 2, 256, 256, 64)
    activation, _, _ = make_activation(rng, 5, 2, 256)
    spans = []
    for scale_span in (None, 32, 256):
        args = op_arguments(monkeypatch)
        vllm_megaattn.o_proj(*activation, *weights, scale_span=scale_span)
        spans.append(args[0][-1])
    assert spans == [32, 32, 256]


def test_z_of_the_fused_path_is_never_bf16(rng):
    """The BF16 intermediate is an empty tensor when fused, a full one when not: the op refuses them exchanged."""
    weights, _, _ = make_weights(rng, 2, 128, 256, 96)
    activation, _, _ = make_activation(rng, 2, 2, 256)
    z, z_scale = torch.empty((2, 256), dtype=E4M3), torch.empty(1024, dtype=torch.uint8)
    y = torch.empty((2, 96), dtype=torch.bfloat16)
    op = torch.ops.vllm_megaattn.o_proj
    op(*activation, *weights, z, z_scale, torch.empty(0, dtype=torch.bfloat16), y, True, 32, 32)
    with pytest.raises(RuntimeError, match="z_bf16"):
        op(*activation, *weights, z, z_scale, torch.empty(0, dtype=torch.bfloat16), y, False, 32, 32)
