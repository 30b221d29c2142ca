"""GPU: the fused path's bytes are the unfused path's, padding included, for every span, size, group count and kernel.

Each comparison runs the einsum with BF16 result, quantises that with the separate kernel, and runs the einsum that
writes MXFP8 itself into poisoned buffers. Counts of differing bytes stay on the device until the end of a test.
"""

from __future__ import annotations

import gpu_helpers as gpu
import pytest
import torch
from gpu_helpers import Problem, Tally, count_differences, make_chain, make_problem

import vllm_megaattn
from vllm_megaattn import layouts

pytestmark = pytest.mark.gpu

SPANS = (32, 128, 256)


def spans_of(problem: Problem) -> list[int]:
    return [span for span in SPANS if problem.w.shape[1] % span == 0]


def compare_einsum(problem: Problem, label: object, tally: Tally) -> None:
    """Data, scale bytes (padding included) and the bytes around them."""
    tokens, cols = problem.x.shape[0], problem.num_cols
    z = problem.bf16()
    for span in spans_of(problem):
        q, q_scale = vllm_megaattn.mxfp8_quantize_sfd128x4(z, scale_span=span)
        data, scale = gpu.mxfp8_buffers(tokens, cols)
        problem.mxfp8(span, out=(data.tensor, scale.tensor))
        tally.add(
            (label, span),
            count_differences(data.tensor, q),
            count_differences(scale.tensor, q_scale),
            data.disturbed(),
            scale.disturbed(),
        )


@pytest.mark.parametrize("shape", gpu.SMALL_SHAPES)
def test_every_token_count(shape):
    """T = 1 .. 300 with wide scales: decode, pair, split and tiled kernels, every tile tail (B55)."""
    groups, n, k = gpu.SMALL_SHAPES[shape]
    problem, tally = make_problem(max(gpu.EVERY_TOKEN_COUNT), groups, n, k, seed=1), Tally()
    for tokens in gpu.EVERY_TOKEN_COUNT:
        compare_einsum(problem.head(tokens), tokens, tally)
    tally.check()


@pytest.mark.parametrize("form", ["blocks", "rows"])
def test_every_token_count_per_32(form):
    """The same with scales that differ every 32 columns, and weights with a scale per row."""
    problem, tally = make_problem(max(gpu.EVERY_TOKEN_COUNT), 2, 256, 512, form, seed=2), Tally()
    for tokens in gpu.EVERY_TOKEN_COUNT:
        compare_einsum(problem.head(tokens), tokens, tally)
    tally.check()


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_all_sizes_of_the_real_shape(groups):
    """DeepSeek-V4.1's wo_a at TP 8, 4, 2 and 1 (B51); one group up to 32768 tokens, the others up to 8192."""
    sizes = [t for t in gpu.SIZES if groups == 1 or t <= gpu.LARGE]
    problem, tally = make_problem(max(sizes), groups, gpu.RANK, gpu.K_A, seed=3), Tally()
    for tokens in sizes:
        compare_einsum(problem.head(tokens), tokens, tally)
    tally.check()


def test_real_shape_per_32():
    problem, tally = (
        make_problem(max(t for t in gpu.SIZES if t <= 2048), 2, gpu.RANK, gpu.K_A, "blocks", seed=4),
        Tally(),
    )
    for tokens in (t for t in gpu.SIZES if t <= 2048):
        compare_einsum(problem.head(tokens), tokens, tally)
    tally.check()


@pytest.mark.parametrize("n", [32, 96, 160, 224, 288, 416])
def test_group_widths_that_end_inside_a_tile(n):
    """N that is no multiple of a tile, in several groups: scales of neighbouring groups share a word of the tile."""
    tally = Tally()
    for form in ("wide", "blocks"):
        problem = make_problem(max(gpu.ODD_TOKEN_COUNTS), 3, n, 512, form, seed=5)
        for tokens in gpu.ODD_TOKEN_COUNTS:
            compare_einsum(problem.head(tokens), (form, tokens), tally)
    tally.check()


def test_padding_is_zero():
    """Not only equal on both paths, but 0x00 (B20)."""
    problem = make_problem(129, 2, 96, 512, seed=6)
    for tokens in (1, 33, 64, 65, 127, 128, 129):
        _, scale = problem.head(tokens).mxfp8(32)
        assert layouts.f8_128x4_padding_is_zero(scale.cpu(), tokens, problem.num_cols // 32), tokens


# ---- the whole projection --------------------------------------------------------------------------------------


def compare_chain(chain: gpu.Chain, label: object, tally: Tally) -> None:
    """y of both paths, from the attention output, from x, and from the single ops."""
    x, x_scale = chain.quantized()
    fused = gpu.Guarded((chain.attn.shape[0], chain.wo_b.shape[0]), torch.bfloat16)
    chain.from_x(x, x_scale, "fused", out=fused.tensor)
    unfused = chain.from_x(x, x_scale, "unfused")
    tally.add((label, "o_proj"), count_differences(fused.tensor, unfused), fused.disturbed())
    z, z_scale = vllm_megaattn.einsum_fp8_sfd128x4(
        x, x_scale, chain.wo_a, chain.wo_a_scale, scale_span=chain.span, x_span=chain.span
    )
    parts = vllm_megaattn.mxfp8_gemm_wo_b(z, z_scale, chain.wo_b, chain.wo_b_scale, z_span=chain.span)
    tally.add((label, "parts"), count_differences(parts, unfused))
    for path in ("fused", "unfused"):
        tally.add((label, f"o_proj_from_attn {path}"), count_differences(chain.from_attn(path), unfused))


CHAINS = {  # G, rank, heads a group, hidden
    "one group": (1, 512, 2, 320),
    "two groups": (2, 256, 1, 4352),
    "four groups": (4, 256, 2, 160),
    "eight groups": (8, 1024, 1, 320),
}


@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("shape", CHAINS)
def test_projection_at_every_token_count(shape, span):
    chain = make_chain(max(gpu.EVERY_TOKEN_COUNT), *CHAINS[shape], span=span, seed=7)
    tally = Tally()
    for tokens in gpu.EVERY_TOKEN_COUNT:
        if span == 256 or tokens % 3 == 1 or tokens in (64, 65, 128, 129):
            compare_chain(chain.head(tokens), tokens, tally)
    tally.check()


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_projection_of_the_real_shape(groups):
    sizes = [t for t in gpu.SIZES if t <= gpu.LARGE]
    chain, tally = make_chain(max(sizes), groups, gpu.RANK, gpu.K_A // 512, gpu.HIDDEN, seed=8), Tally()
    for tokens in sizes:
        compare_chain(chain.head(tokens), tokens, tally)
    tally.check()


def test_the_default_span_of_this_device_is_used_by_both_paths():
    """scale_span=None: whatever it is, both paths must use it."""
    chain = make_chain(70, 2, 256, 2, 320, seed=9)
    tally = Tally()
    for tokens in (1, 64, 70):
        head = chain.head(tokens)
        span = vllm_megaattn.ops.default_scale_span(head.attn.device, head.wo_a, head.wo_a_scale)
        x, x_scale = vllm_megaattn.inv_rope_mxfp8_quantize(
            head.attn, head.positions, head.cos_sin, groups=head.groups, scale_span=span
        )
        results = [
            vllm_megaattn.o_proj(x, x_scale, *head.weights, path=path, x_span=span, scale_span=scale_span)
            for path in ("fused", "unfused")
            for scale_span in (None, span)
        ]
        for other in results[1:]:
            tally.add(tokens, count_differences(results[0], other))
    tally.check()
