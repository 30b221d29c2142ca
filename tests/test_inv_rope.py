"""inv_rope_mxfp8_quantize: byte for byte against the reference, in both orders, with strides and padded heads."""

from __future__ import annotations

import numpy as np
import pytest
import reference as ref
import torch
from helpers import E4M3, POISON, bf16, codes, poisoned, strided
from hypothesis import given
from hypothesis import strategies as st

import vllm_megaattn

ORDERS = ("standard", "chunk_interleaved")
CACHES = ("halves", "interleaved")


def make_cache(rng: np.random.Generator, positions: int, rope: int, layout: str) -> np.ndarray:
    angle = rng.uniform(-np.pi, np.pi, (positions, rope // 2))
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    if layout == "halves":
        return np.concatenate([cos, sin], axis=1)
    return np.stack([cos, sin], axis=2).reshape(positions, rope)


def make_attn(rng: np.random.Generator, tokens: int, heads: int, dim: int) -> np.ndarray:
    """BF16 codes: ordinary values with a few outlier columns, as attention outputs have."""
    value = rng.standard_normal((tokens, heads, dim)) * np.exp2(
        rng.integers(-4, 4, (tokens, heads, dim // 32)).repeat(32, 2)
    )
    value[..., rng.integers(0, dim, 3)] *= 30
    return ref.bf16_encode(value)


def check(
    attn: np.ndarray,
    positions: np.ndarray,
    cos_sin: np.ndarray,
    groups: int,
    *,
    order: str = "standard",
    layout: str = "halves",
    span: int = 32,
    device: str = "cpu",
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Codes and bytes must equal the reference's; `tensors` overrides the operands with equal ones."""
    if tensors is None:
        tensors = (bf16(attn, device), torch.from_numpy(positions).to(device), torch.from_numpy(cos_sin).to(device))
    x, x_scale = vllm_megaattn.inv_rope_mxfp8_quantize(
        *tensors, groups=groups, order=order, cos_sin_layout=layout, scale_span=span
    )
    tokens, heads, dim = attn.shape
    k = heads // groups * dim
    assert x.shape == (tokens, groups, k)
    assert x.dtype == E4M3
    assert x.is_contiguous()
    assert x_scale.shape == (tokens, groups, k // 128)
    assert x_scale.dtype == torch.int32
    data, scale = ref.inv_rope_quantize(
        attn,
        positions,
        cos_sin,
        groups,
        chunk_interleaved=order == "chunk_interleaved",
        interleaved_cache=layout == "interleaved",
        span=span,
    )
    np.testing.assert_array_equal(ref.unpack_words(codes(x_scale)), scale)
    np.testing.assert_array_equal(codes(x), data)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("layout", CACHES)
@pytest.mark.parametrize("span", [32, 128, 256])
@pytest.mark.parametrize("tokens", [1, 5, 130])
def test_deepseek_heads(order, layout, span, tokens, device, rng):
    """16 heads of 512 with 64 rotated columns in two groups, as on one of four ranks."""
    attn = make_attn(rng, tokens, 16, 512)
    cos_sin = make_cache(rng, 97, 64, layout)
    check(attn, rng.integers(0, 97, tokens), cos_sin, 2, order=order, layout=layout, span=span, device=device)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("heads", "groups"), [(8, 1), (8, 2), (32, 4), (64, 8), (16, 16)])
def test_group_counts(order, heads, groups, device, rng):
    attn = make_attn(rng, 3, heads, 512)
    check(attn, rng.integers(0, 11, 3), make_cache(rng, 11, 64, "halves"), groups, order=order, device=device)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("heads", "dim", "rope"), [(4, 32, 2), (4, 32, 32), (2, 64, 64), (8, 96, 6), (4, 128, 40), (2, 192, 64)]
)
def test_other_head_shapes(order, heads, dim, rope, device, rng):
    """Rotated columns that start inside a scale block, cover one, or cover the whole head."""
    attn = make_attn(rng, 7, heads, dim)
    check(attn, rng.integers(0, 5, 7), make_cache(rng, 5, rope, "halves"), 1, order=order, device=device)


@given(
    tokens=st.integers(0, 9),
    groups=st.integers(1, 3),
    per_group=st.integers(1, 4),
    chunks=st.sampled_from([4, 8, 12]),
    half_rope=st.integers(1, 32),
    order=st.sampled_from(ORDERS),
    layout=st.sampled_from(CACHES),
    span=st.sampled_from([32, 128]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape(tokens, groups, per_group, chunks, half_rope, order, layout, span, seed):
    rng = np.random.default_rng(seed)
    attn = make_attn(rng, tokens, groups * per_group, 32 * chunks)
    cos_sin = make_cache(rng, 13, 2 * half_rope, layout)
    check(attn, rng.integers(0, 13, tokens), cos_sin, groups, order=order, layout=layout, span=span)


def telling_attention() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(attn [T, 4, 512], positions, cos_sin) where the order of operations shows, found by search.

    The two products of a sum are not rounded alike: even * cos is rounded to FP32, odd * sin is not, and likewise for
    the other column. One pair in about 10^5 gives another BF16 number when the other product is the fused one, or none.
    """
    rng = np.random.default_rng(20)
    count = 400_000
    even, odd = (ref.bf16_decode(rng.integers(0x3E00, 0x4100, count).astype(np.uint16)) for _ in range(2))
    odd[: count // 2] *= -1
    angle = rng.uniform(-np.pi, np.pi, count)
    cos, sin = (f(angle).astype(np.float32).astype(np.float64) for f in (np.cos, np.sin))

    def f32(v):
        return v.astype(np.float32).astype(np.float64)

    def telling(a, c, b, s):
        """Where fma(b, s, a * c) is none of the other ways to compute a * c + b * s."""
        fused = ref.bf16_encode(ref.fma_f32(b, s, f32(a * c)))
        other = ref.bf16_encode(ref.fma_f32(a, c, f32(b * s)))
        neither = ref.bf16_encode(f32(f32(a * c) + f32(b * s)))
        return (fused != other) & (fused != neither)

    first, second = telling(even, cos, odd, sin), telling(odd, cos, -even, sin)
    assert first.any()
    assert second.any()
    chosen = np.flatnonzero(first | second)
    cos_sin = np.zeros((len(chosen), 64), np.float32)
    cos_sin[:, 0], cos_sin[:, 32] = cos[chosen], sin[chosen]
    attn = np.zeros((len(chosen), 4, 512), np.uint16)
    attn[:, 0, 448:450] = ref.bf16_encode(np.stack([even, odd], axis=1)[chosen])
    return attn, np.arange(len(chosen)), cos_sin


def test_order_of_operations(device):
    check(*telling_attention(), 1, device=device)


def test_columns_before_the_rotation_keep_their_bits(device, rng):
    """Signed zeros, subnormals, NaN and infinity in columns that are only quantised, and in rotated ones."""
    attn = make_attn(rng, 6, 8, 512)
    attn[0, :, :32] = 0x8000
    attn[1, 3, 40] = 0x7FC0
    attn[2, 5, 500] = 0xFF80
    attn[3, :, 448:] = 0
    attn[4] = rng.integers(0, 0x80, (8, 512))
    attn[5, 0, 448:480] = 0x7F7F
    check(attn, rng.integers(0, 9, 6), make_cache(rng, 9, 64, "halves"), 1, device=device)


# ---- padded heads and strides ----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_padded_heads(order, groups, device, rng):
    """vLLM's [T, 64, 512] with fewer live groups: heads behind them are garbage (here NaN) and never read."""
    tokens, live = 5, groups * 8
    attn = np.full((tokens, 64, 512), 0x7FC0, np.uint16)
    attn[:, :live] = make_attn(rng, tokens, live, 512)
    positions, cos_sin = rng.integers(0, 9, tokens), make_cache(rng, 9, 64, "halves")
    padded = bf16(attn, device)
    operands = torch.from_numpy(positions).to(device), torch.from_numpy(cos_sin).to(device)
    check(
        attn[:, :live], positions, cos_sin, groups, order=order, device=device, tensors=(padded[:, :live], *operands)
    )

    x = poisoned((tokens, groups, 4096), E4M3, device)
    x_scale = poisoned((tokens, groups, 32), torch.int32, device)
    options = {"groups": groups, "order": order, "out": (x, x_scale)}
    with pytest.raises(
        ValueError, match=rf"attn must have {live} heads \(groups = {groups} of K/D = 8\), got 64; .*padd"
    ):
        vllm_megaattn.inv_rope_mxfp8_quantize(padded, *operands, **options)
    result = vllm_megaattn.inv_rope_mxfp8_quantize(padded, *operands, padded_heads=True, **options)
    assert result[0] is x
    assert result[1] is x_scale
    data, scale = ref.inv_rope_quantize(
        attn[:, :live], positions, cos_sin, groups, chunk_interleaved=order == "chunk_interleaved"
    )
    np.testing.assert_array_equal(codes(x), data)
    np.testing.assert_array_equal(ref.unpack_words(codes(x_scale)), scale)


def test_padded_heads_need_a_result_that_says_how_many_are_live(rng):
    attn, cache = bf16(make_attn(rng, 2, 16, 512)), torch.from_numpy(make_cache(rng, 9, 64, "halves"))
    with pytest.raises(
        ValueError, match="padded_heads needs out, whose K says how many heads are live; got out=None"
    ):
        vllm_megaattn.inv_rope_mxfp8_quantize(attn, torch.zeros(2).long(), cache, groups=2, padded_heads=True)


def test_strided_operands(device, rng):
    """B82: every operand with its own strides, expanded positions and cache rows included."""
    tokens, heads, dim = 9, 8, 512
    attn, cos_sin = make_attn(rng, tokens, heads, dim), make_cache(rng, 17, 64, "halves")
    positions = rng.integers(0, 17, tokens)
    dense = bf16(attn, device)
    every_second = torch.from_numpy(np.repeat(positions, 2)).to(device)[::2]
    wide_cache = torch.from_numpy(np.concatenate([cos_sin, np.full((17, 32), np.nan, np.float32)], axis=1)).to(device)
    head_major = dense.transpose(0, 1).contiguous().transpose(0, 1)
    for view in (strided(dense, heads * dim + 64, dim), strided(dense, heads * (dim + 8), dim + 8), head_major):
        check(attn, positions, cos_sin, 2, device=device, tensors=(view, every_second, wide_cache[:, :64]))

    same = np.full(tokens, 3)
    one_row = (dense[:1].expand(tokens, -1, -1), torch.tensor([3], device=device).expand(tokens), wide_cache[:, :64])
    check(np.repeat(attn[:1], tokens, axis=0), same, cos_sin, 2, device=device, tensors=one_row)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 33])
def test_scales_are_mn_major(tokens, device, rng):
    """Stride 1 over T and a pitch of ceil4(T) words, what DeepGEMM and this package's einsum take without a copy."""
    attn = bf16(make_attn(rng, tokens, 16, 512), device)
    positions = torch.zeros(tokens, dtype=torch.int64, device=device)
    cache = torch.from_numpy(make_cache(rng, 1, 64, "halves")).to(device)
    _, x_scale = vllm_megaattn.inv_rope_mxfp8_quantize(attn, positions, cache, groups=2)
    pitch = -(-tokens // 4) * 4
    assert x_scale.shape == (tokens, 2, 32)
    assert x_scale.stride() == (1, 32 * pitch, pitch)


def test_outputs_with_strides_of_a_wider_buffer(device, rng):
    """The first 2 of 8 groups of vLLM's buffers; the other groups stay as they were."""
    tokens = 6
    attn, cos_sin = make_attn(rng, tokens, 16, 512), make_cache(rng, 9, 64, "halves")
    positions = rng.integers(0, 9, tokens)
    wide_x = poisoned((tokens, 8, 4096), E4M3, device)
    wide_scale = poisoned((8, 32, 8), torch.int32, device)
    x, x_scale = wide_x[:, :2], wide_scale.permute(2, 0, 1)[:tokens, :2]
    operands = bf16(attn, device), torch.from_numpy(positions).to(device), torch.from_numpy(cos_sin).to(device)
    vllm_megaattn.inv_rope_mxfp8_quantize(*operands, groups=2, out=(x, x_scale))
    data, scale = ref.inv_rope_quantize(attn, positions, cos_sin, 2)
    np.testing.assert_array_equal(codes(x), data)
    np.testing.assert_array_equal(ref.unpack_words(codes(x_scale)), scale)
    assert (codes(wide_x[:, 2:]) == POISON).all()
    assert (codes(wide_scale[2:]).view(np.uint8) == POISON).all()


def test_no_tokens(device):
    x, x_scale = vllm_megaattn.inv_rope_mxfp8_quantize(
        torch.empty((0, 16, 512), dtype=torch.bfloat16, device=device),
        torch.empty(0, dtype=torch.int64, device=device),
        torch.ones((4, 64), device=device),
        groups=2,
    )
    assert x.shape == (0, 2, 4096)
    assert x.dtype == E4M3
    assert x_scale.shape == (0, 2, 32)
    assert x_scale.dtype == torch.int32


# ---- positions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [-1, 9, 10**6, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("span", [32, 256])
def test_a_position_outside_the_cache_poisons_its_token_only(bad, span, device, rng):
    attn, cos_sin = make_attn(rng, 5, 16, 512), make_cache(rng, 9, 64, "halves")
    positions = rng.integers(0, 9, 5)
    positions[3] = bad
    check(attn, positions, cos_sin, 2, span=span, device=device)
    _, x_scale = vllm_megaattn.inv_rope_mxfp8_quantize(
        bf16(attn, device),
        torch.from_numpy(positions).to(device),
        torch.from_numpy(cos_sin).to(device),
        groups=2,
        scale_span=span,
    )
    assert ((ref.unpack_words(codes(x_scale)) == 255).all(axis=(1, 2)) == (np.arange(5) == 3)).all()


def test_nan_in_the_cache_poisons_the_blocks_it_rotates(device, rng):
    attn, cos_sin = make_attn(rng, 3, 8, 512), make_cache(rng, 4, 64, "halves")
    cos_sin[2, 5] = np.nan
    check(attn, np.array([0, 2, 3]), cos_sin, 1, device=device)


# ---- reproducibility -------------------------------------------------------------------------------------------


def test_rows_do_not_depend_on_the_batch_or_the_threads(rng):
    attn, cos_sin = bf16(make_attn(rng, 130, 16, 512)), torch.from_numpy(make_cache(rng, 9, 64, "halves"))
    positions = torch.from_numpy(rng.integers(0, 9, 130))
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(vllm_megaattn.inv_rope_mxfp8_quantize(attn, positions, cos_sin, groups=2))
    finally:
        torch.set_num_threads(before)
    for a, b in zip(*results, strict=True):
        assert (codes(a) == codes(b)).all()
    for tokens in (1, 2, 7, 64, 129):
        part = vllm_megaattn.inv_rope_mxfp8_quantize(attn[:tokens], positions[:tokens], cos_sin, groups=2)
        assert all((codes(a) == codes(b[:tokens])).all() for a, b in zip(part, results[0], strict=True))


def test_a_swapped_cache_layout_or_order_would_be_noticed(rng):
    """Every argument has an effect (B35): the other value of each gives other bytes."""
    attn, cos_sin = make_attn(rng, 3, 16, 512), make_cache(rng, 9, 64, "halves")
    operands = bf16(attn), torch.tensor([1, 5, 8]), torch.from_numpy(cos_sin)
    base = codes(vllm_megaattn.inv_rope_mxfp8_quantize(*operands, groups=2)[0])
    for change in ({"order": "chunk_interleaved"}, {"cos_sin_layout": "interleaved"}, {"scale_span": 256}):
        other = codes(vllm_megaattn.inv_rope_mxfp8_quantize(*operands, groups=2, **change)[0])
        assert (other != base).any(), change


def test_inputs_are_not_changed(device, rng):
    operands = (
        bf16(make_attn(rng, 5, 8, 512), device),
        torch.from_numpy(rng.integers(-2, 12, 5)).to(device),
        torch.from_numpy(make_cache(rng, 9, 64, "halves")).to(device),
    )
    before = [codes(t).copy() for t in operands]
    vllm_megaattn.inv_rope_mxfp8_quantize(*operands, groups=1)
    assert all((codes(t) == saved).all() for t, saved in zip(operands, before, strict=True))
