"""The Hopper kernels for few tokens as csrc/cuda/sm90_decode_plan.c chooses them: bits, and every way through a projection.

Cuts of K by the weights alone (`CUTS`), against the model; then whole projections, whose routes (rotary embedding and
quantisation inside the products, or between them) must give the bits of the separate steps.
"""

from __future__ import annotations

import ctypes

import host
import numpy as np
import pytest
import reference as ref
from host import Emulator, aligned, device_copy
from problems import POISON, Matmul, bf16_of, make_matmul, random_e4m3
from vllm_megaattn._C import FLAG_BATCH_INVARIANT as BATCH_INVARIANT

# weights [groups, rows, k] -> parts of K and chains in each
CUTS = {
    "a tile per SM": (1, 5120, 1024, 1, 4),
    "a tile per SM, more spans": (1, 4608, 1280, 1, 2),
    "whole tiles": (2, 2304, 512, 1, 2),
    "two blocks per tile": (2, 768, 1024, 2, 2),
    "four blocks per tile": (1, 256, 2048, 4, 2),
    "odd number of spans": (1, 256, 768, 1, 2),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("tokens", "span"), [(1, 0), (3, 256), (9, 32), (17, 128), (33, 256)])
def test_cuts(hopper, rng, cut, tokens, span):
    groups, rows, k, splits, chains = CUTS[cut]
    if rows > 1000 and tokens > 9:
        rows, tokens = rows - 256, 10  # other tiles; more tokens take too long here
    problem = make_matmul(rng, tokens, groups, rows, k)
    out, out_scale = problem.run(hopper, span)
    want, want_scale = problem.expected(hopper, span, splits, chains)
    assert np.array_equal(out_scale, want_scale)
    assert np.array_equal(out, want), f"{(out != want).sum()} of {out.size} differ"


@pytest.mark.parametrize("options", [{"delivery": 1}, *({"delivery": 2, "seed": s} for s in (1, 2)), {"seed": 9}])
@pytest.mark.parametrize("span", [0, 256])
@pytest.mark.parametrize(("cut", "tokens"), [("four blocks per tile", 5), ("four blocks per tile", 33)])
def test_any_order_of_events(hopper, rng, options, cut, tokens, span):
    groups, rows, k, splits, chains = CUTS[cut]
    problem = make_matmul(rng, tokens, groups, rows, k)
    out, out_scale = problem.run(hopper, span, **options)
    want, want_scale = problem.expected(hopper, span, splits, chains)
    assert np.array_equal(out, want)
    assert np.array_equal(out_scale, want_scale)


@pytest.mark.parametrize("cut", ["two blocks per tile", "four blocks per tile"])
def test_bits_do_not_depend_on_the_number_of_tokens(hopper, rng, cut):
    groups, rows, k, _, _ = CUTS[cut]
    whole = make_matmul(rng, 64, groups, rows, k)
    want, _ = whole.run(hopper, 0)
    for tokens in (1, 8, 12, 31):
        part = Matmul(whole.x[:tokens], whole.x_scale[:tokens], whole.w, whole.w_scale, 256, "prepared")
        out, _ = part.run(hopper, 0)
        assert np.array_equal(out, want[:tokens])


def test_strides(hopper, rng):
    """Group-major x with padded rows, token-major scale words, output rows that lie apart."""
    problem = make_matmul(rng, 6, 2, 96, 1024, x_order=(1, 0, 2), pad=48, mn_major=False)
    problem.run(hopper, 0)
    args = problem.args(0)
    out = aligned((6, 2 * 96 + 32), np.uint16, POISON)
    args.out_bf16, args.out_stride_token, args.out_stride_group = out.ctypes.data, out.shape[1], 112
    problem.out = out
    with hopper.session(**problem.buffers()):
        hopper.call("cuda", "matmul", args)
    want = problem.sums(hopper, 2, 2)
    assert np.array_equal(out[:, :96], want[:, 0])
    assert np.array_equal(out[:, 112:208], want[:, 1])
    assert (out[:, 96:112] == POISON * 257).all()
    assert (out[:, 208:] == POISON * 257).all()


# ---- whole projections -----------------------------------------------------------------------------------------


class Projection:
    """attn [T, G * heads, D] -> y [T, hidden] with scale spans of 256, and the scratch between."""

    def __init__(self, rng, tokens, groups, rows, heads, hidden, *, order=0, cache=0):
        head_dim, rope_dim = 128, 64
        k = heads * head_dim
        self.tokens, self.groups, self.rows, self.k, self.hidden = tokens, groups, rows, k, hidden
        self.heads, self.head_dim, self.rope_dim, self.order, self.cache = heads, head_dim, rope_dim, order, cache
        values = rng.standard_normal((tokens, groups * heads, head_dim)).astype(np.float32)
        self.attn = device_copy(bf16_of(values))
        self.positions = device_copy(rng.integers(0, 40, tokens))
        self.cos_sin = device_copy(rng.standard_normal((40, rope_dim)).astype(np.float32))
        self.wo_a = device_copy(random_e4m3(rng, (groups, rows, k)))
        self.wo_a_scale = device_copy(rng.integers(118, 132, (groups, -(-rows // 32), 1)).astype(np.uint8))
        self.wo_b = device_copy(random_e4m3(rng, (1, hidden, groups * rows)))
        self.wo_b_scale = device_copy(rng.integers(118, 132, (1, -(-hidden // 32), 1)).astype(np.uint8))

    def run(self, emulator, *, steps=False, fused=True, spare=False, flags=0, **options):
        """y; `steps`: by one call each; `spare`: BF16 z is at hand although wo_a shall write e4m3."""
        tokens, groups, rows, k = self.tokens, self.groups, self.rows, self.k
        buffers = {name: v for name, v in vars(self).items() if isinstance(v, np.ndarray)}
        buffers["x"] = x = aligned((tokens, groups, k), np.uint8, POISON)
        buffers["x_scale"] = x_scale = aligned((tokens, groups, k // 128), np.int32, 0xFF)
        buffers["z"] = z = aligned((tokens, groups * rows), np.uint8, POISON)
        buffers["z_scale"] = z_scale = aligned(ref.f8_128x4_bytes(tokens, groups * rows // 32), np.uint8, POISON)
        buffers["z_bf16"] = z_bf16 = aligned((tokens, groups, rows), np.uint16, POISON)
        buffers["y"] = y = aligned((tokens, self.hidden), np.uint16, POISON)

        rope = host.InvRope(tokens, groups, self.heads, self.head_dim, self.rope_dim)
        rope.attn, rope.attn_stride_token = self.attn.ctypes.data, groups * k
        rope.attn_stride_head = self.head_dim
        rope.positions, rope.positions_stride = self.positions.ctypes.data, 1
        rope.cos_sin, rope.cos_sin_stride, rope.num_positions = self.cos_sin.ctypes.data, self.rope_dim, 40
        rope.order, rope.cache, rope.scale_span = self.order, self.cache, 256
        rope.x, rope.x_stride_token, rope.x_stride_group = x.ctypes.data, groups * k, k
        rope.x_scale = x_scale.ctypes.data
        rope.xs_stride_token, rope.xs_stride_group, rope.xs_stride_word = x_scale.strides

        a = host.Matmul(tokens, groups, rows, k, x.ctypes.data, groups * k, k, host.packed_scales(x_scale), 256)
        a.w, a.w_stride_group, a.w_stride_row = self.wo_a.ctypes.data, rows * k, k
        a.w_scale = host.block_scales(self.wo_a_scale, 32, k)
        if fused:
            a.out_e4m3, a.out_scale, a.out_stride_token = z.ctypes.data, z_scale.ctypes.data, groups * rows
            a.scale_span = 256
        else:
            a.out_bf16, a.out_stride_token, a.out_stride_group = z_bf16.ctypes.data, groups * rows, rows
        quantize = host.Quantize(
            tokens, groups * rows, z_bf16.ctypes.data, groups, groups * rows, rows, z.ctypes.data, groups * rows,
            z_scale.ctypes.data, 256,
        )  # fmt: skip
        b = host.Matmul(tokens, 1, self.hidden, groups * rows, z.ctypes.data, groups * rows, 0)
        b.x_scale, b.x_span = host.tiled_scales(z_scale, groups * rows // 32), 256
        b.w, b.w_stride_row = self.wo_b.ctypes.data, groups * rows
        b.w_scale = host.block_scales(self.wo_b_scale, 32, groups * rows)
        b.out_bf16, b.out_stride_token = y.ctypes.data, self.hidden

        with emulator.session(options=options, **buffers):
            launches = emulator.num_launches
            if steps:
                emulator.call("cuda", "inv_rope", rope, flags=flags)
                emulator.call("cuda", "matmul", a, flags=flags)
                if not fused:
                    emulator.call("cuda", "quantize", quantize, flags=flags)
                emulator.call("cuda", "matmul", b, flags=flags)
            else:
                chain = host.OProj(
                    ctypes.pointer(rope),
                    ctypes.pointer(a),
                    ctypes.pointer(quantize) if spare or not fused else None,
                    ctypes.pointer(b),
                )
                emulator.call("cuda", "o_proj", chain, flags=flags)
            self.launches = emulator.num_launches - launches
        return y


# tokens, groups, rows of wo_a, heads of 128, hidden -> launches fused, fused with BF16 z at hand, unfused
ROUTES = [
    ((2, 1, 512, 16, 4480), (3, 2, 3)),  # wo_a's blocks share K by four: everything inside
    ((9, 1, 512, 16, 4480), (3, 4, 4)),  # more tokens than there are kernels for
    ((4, 1, 1280, 4, 4480), (3, 3, 4)),  # by two: wo_b quantises
    ((2, 9, 512, 4, 4256), (3, 3, 4)),  # not at all
    ((3, 9, 512, 4, 256), (3, 4, 4)),
]


@pytest.mark.parametrize(("shape", "launches"), ROUTES)
def test_all_routes_equal_the_steps(hopper, rng, shape, launches):
    problem = Projection(rng, *shape, order=shape[0] % 2)
    want = problem.run(hopper, steps=True)
    assert np.array_equal(problem.run(hopper, steps=True, fused=False), want)
    counts = []
    for options in ({}, {"spare": True}, {"fused": False}):
        y = problem.run(hopper, **options)
        assert np.array_equal(y, want), f"{options}: {(y != want).sum()} of {y.size} differ"
        counts.append(problem.launches)
    assert tuple(counts) == launches


@pytest.mark.parametrize("cache", [0, 1])
@pytest.mark.parametrize("order", [0, 1])
def test_rope_inside(hopper, rng, order, cache):
    """All tokens of the widest tile, a position outside the cache, values that are not finite."""
    problem = Projection(rng, 4, 1, 512, 16, 4480, order=order, cache=cache)
    problem.positions[1] = 40
    problem.attn[2, 3, 7], problem.attn[3, 15, 127] = 0x7FC0, 0xFF80
    want = problem.run(hopper, steps=True)
    for options in ({}, {"delivery": 1}, {"delivery": 2, "seed": 3}):
        assert np.array_equal(problem.run(hopper, spare=True, **options), want)
        assert problem.launches == 2
    assert (ref.bf16_decode(want[[1, 2, 3]]) != ref.bf16_decode(want[[1, 2, 3]])).all()
    assert np.isfinite(ref.bf16_decode(want[0])).all()


def test_batch_invariant_routes(hopper, rng):
    problem = Projection(rng, 3, 1, 512, 16, 256)
    want = problem.run(hopper, steps=True, flags=BATCH_INVARIANT)
    for options in ({}, {"spare": True}, {"fused": False}):
        assert np.array_equal(problem.run(hopper, flags=BATCH_INVARIANT, **options), want)


def test_small_device(hopper, rng):
    """Clusters take turns on 4 SMs."""
    groups, rows, k, splits, chains = CUTS["two blocks per tile"]
    problem = make_matmul(rng, 8, groups, rows, k)
    out, _ = problem.run(hopper, 256, device=Emulator.SMALL_HOPPER)
    want, _ = problem.expected(hopper, 256, splits, chains)
    assert np.array_equal(out, want)
