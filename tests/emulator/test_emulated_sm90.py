"""The Hopper kernels' own source, through the package's own host code, against the bit-level model.

`whole` products: the tiled kernels and, up to 64 tokens, the decode kernels. Every case also passes all of the
emulator's checks: races, unwritten or foreign memory, barriers, order after griddepcontrol.wait.
"""

from __future__ import annotations

import host
import numpy as np
import pytest
import reference as ref
from host import Emulator, aligned, device_copy
from problems import POISON, bf16_of, make_matmul
from vllm_megaattn._C import FLAG_BATCH_INVARIANT as BATCH_INVARIANT

TOKENS = (1, 7, 32, 127, 128, 129, 300)
SPANS = (0, 32, 128, 256)


def check(emulator, problem, span, *, splits=1, **run):
    out, out_scale = problem.run(emulator, span, **run)
    want, want_scale = problem.expected(emulator, span, splits)
    assert np.array_equal(out_scale, want_scale)
    assert np.array_equal(out, want), f"{(out != want).sum()} of {out.size} differ"


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("tokens", TOKENS)
def test_wide(hopper, rng, tokens, groups):
    """x with one scale per 256 columns, prepared weights: every output form in turn."""
    span = SPANS[(TOKENS.index(tokens) + groups) % 4]
    problem = make_matmul(rng, tokens, groups, 256, 512)
    check(hopper, problem, span, flags=BATCH_INVARIANT)


@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("tokens", [5, 129])
def test_wide_outputs(hopper, rng, tokens, span):
    """All outputs, on a device of 4 SMs: persistent blocks walk several tiles."""
    problem = make_matmul(rng, tokens, 2, 512, 512)
    check(hopper, problem, span, device=Emulator.SMALL_HOPPER, flags=BATCH_INVARIANT)


@pytest.mark.parametrize("weights", ["32x32", "rows"])
@pytest.mark.parametrize(
    ("tokens", "groups", "span"), [(1, 1, 0), (7, 2, 32), (129, 2, 128), (300, 1, 256), (130, 8, 0)]
)
def test_per32(hopper, rng, tokens, groups, span, weights):
    """Scales that differ every 32 columns, and N and K that are odd multiples."""
    rows = 256 if span == 256 else 384 if span == 128 else 160
    problem = make_matmul(rng, tokens, groups, rows, 384, x_span=32, weights=weights)
    check(hopper, problem, span)


@pytest.mark.parametrize("tokens", [3, 140])
@pytest.mark.parametrize("weights", ["prepared", "32x32"])
def test_strided_inputs(hopper, rng, tokens, weights):
    """Group-major x, padded rows, token-major scale words: nothing between the rows is touched."""
    problem = make_matmul(
        rng, tokens, 2, 96, 768, weights=weights, x_span=256, x_order=(1, 0, 2), pad=48, mn_major=tokens == 3
    )
    check(hopper, problem, 32, flags=BATCH_INVARIANT)


@pytest.mark.parametrize("options", [{"delivery": 1}, *({"delivery": 2, "seed": s} for s in (1, 2, 3)), {"seed": 9}])
@pytest.mark.parametrize(("tokens", "rows", "span"), [(4, 128, 32), (100, 320, 0), (260, 512, 256)])
def test_any_order_of_events(hopper, rng, options, tokens, rows, span):
    """Copies at once, late or at random, threads in another order: the same bits, and no check complains."""
    problem = make_matmul(rng, tokens, 1, rows, 512)
    check(hopper, problem, span, flags=BATCH_INVARIANT, device=Emulator.SMALL_HOPPER, **options)


def test_full_k(hopper, rng):
    check(hopper, make_matmul(rng, 130, 1, 256, 4096), 256, flags=BATCH_INVARIANT)


@pytest.mark.parametrize("tokens", [1, 8, 33])
def test_decode_of_a_tp8_shard(hopper, rng, tokens):
    """One group of [512, 4096]: K is split over clusters."""
    problem = make_matmul(rng, tokens, 1, 512, 4096)
    check(hopper, problem, 32, flags=BATCH_INVARIANT)


@pytest.mark.parametrize("span", [32, 128, 256])
@pytest.mark.parametrize("tokens", [1, 33, 128, 130])
def test_quantize(hopper, rng, tokens, span):
    cols = 512
    values = rng.standard_normal((tokens, cols)) * 2.0 ** rng.integers(-140, 100, (tokens, cols // 32)).repeat(32, 1)
    z = device_copy(bf16_of(values.astype(np.float32)))
    z[0, :3] = (0x7F80, 0x8000, 0x0001)
    results = {}
    for backend in ("cpu", "cuda"):
        q = aligned((tokens, cols), np.uint8, POISON)
        scale = aligned(ref.f8_128x4_bytes(tokens, cols // 32), np.uint8, POISON)
        args = host.Quantize(
            tokens, cols, z.ctypes.data, 2, cols, cols // 2, q.ctypes.data, cols, scale.ctypes.data, span
        )
        with hopper.session(z=z, q=q, q_scale=scale):
            hopper.call(backend, "quantize", args)
        results[backend] = (q, scale)
    data, want = ref.quantize(z, span)
    for q, scale in results.values():
        assert np.array_equal(q, data)
        assert np.array_equal(scale, ref.f8_128x4_pack(want))


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("tokens", [1, 40])
def test_inv_rope(hopper, rng, tokens, order):
    groups, heads, head_dim, rope_dim = 2, 8, 64, 32
    attn = device_copy(bf16_of(rng.standard_normal((tokens, groups * heads + 1, head_dim)).astype(np.float32)))
    positions = device_copy(rng.integers(0, 50, tokens))
    positions[-1] = 50  # poisons its token
    cos_sin = device_copy(rng.standard_normal((50, rope_dim)).astype(np.float32))
    k = heads * head_dim
    results = []
    for backend in ("cpu", "cuda"):
        x = aligned((tokens, groups, k), np.uint8, POISON)
        scale = aligned((groups, k // 128, 40), np.int32, 0xFF)
        args = host.InvRope(tokens, groups, heads, head_dim, rope_dim)
        args.attn, args.attn_stride_token, args.attn_stride_head = (
            attn.ctypes.data,
            attn.shape[1] * head_dim,
            head_dim,
        )
        args.positions, args.positions_stride = positions.ctypes.data, 1
        args.cos_sin, args.cos_sin_stride, args.num_positions = cos_sin.ctypes.data, rope_dim, 50
        args.order, args.cache, args.scale_span = order, 0, 128
        args.x, args.x_stride_token, args.x_stride_group = x.ctypes.data, groups * k, k
        args.x_scale = scale.ctypes.data
        args.xs_stride_token, args.xs_stride_group, args.xs_stride_word = 4, 160 * k // 128, 160
        with hopper.session(attn=attn, positions=positions, cos_sin=cos_sin, x=x, x_scale=scale):
            hopper.call(backend, "inv_rope", args)
        results.append((x, scale))
    assert np.array_equal(results[0][0], results[1][0])
    assert np.array_equal(results[0][1], results[1][1])
