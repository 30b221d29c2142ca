"""GPU: distance from the exact product, and from the CPU backend.

Only the BF16 rounding of a sum can be seen. The error of the sum before it follows from a pair of distances:

    error^2 = |z - exact|^2 - |round(exact) - exact|^2          (Frobenius norms)

If a sum is off by e and its place between two BF16 numbers u apart is uniformly distributed, rounding it gives a mean
squared distance of u^2 / 12 + e^2 from the exact value, rounding the exact value u^2 / 12. Both terms use the same
elements, and elements that round alike cancel exactly, so the difference is sharp: what is left is what crossed a
rounding boundary.

Element by element: where z is not the correctly rounded product, a rounding boundary must lie within ELEMENT_LIMIT of
the exact value, in units of the root of the sum of its squared terms (the standard deviation of that sum under random
signs, so that rows and blocks of different scale are judged alike).
"""

from __future__ import annotations

import gpu_helpers as gpu
import pytest
import torch
from gpu_helpers import make_problem, power

import vllm_megaattn

pytestmark = pytest.mark.gpu

# Relative Frobenius error before the BF16 rounding. wgmma aligns the products of a step to the largest term and cuts at
# 13 fractional bits; measured on an H200 over K = 4096 and 8192 with a promotion to FP32 every 32 / 128 / 256 columns:
# 4.5e-5, 1.3e-4, 2.1e-4, with 1 % outlier channels up to 2.0e-4 (128) and 3.0e-4 (256).
FROBENIUS_LIMIT = {"wide": 3.5e-4, "blocks": 2.5e-4, "rows": 2.5e-4}
# The largest single error over 65536 sums was 1.3e-3 of their standard deviation at span 256; outliers add to it.
ELEMENT_LIMIT = {"normal": 2.5e-3, "outliers": 5e-3}

TOKENS = (1, 8, 32, 64, 128, 512, 2048)  # every family of kernels


def rounded(exact: torch.Tensor) -> torch.Tensor:
    return exact.to(torch.bfloat16)


def error_before_rounding(z: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative Frobenius error of the sums that z was rounded from (see above)."""
    seen, least = (z.double() - exact).square(), (rounded(exact).double() - exact).square()
    return (seen - least).sum().clamp_min(0).sqrt().item() / exact.norm().item()


def unexplained(z: torch.Tensor, exact: torch.Tensor, slack: torch.Tensor) -> torch.Tensor:
    """Elements that no number within `slack` of the exact value rounds to: wherever no rounding boundary lies that close,
    everything but the correctly rounded product."""
    return (z < rounded(exact - slack)) | (z > rounded(exact + slack)) | z.isnan()


@pytest.mark.parametrize("data", ["normal", "outliers"])
@pytest.mark.parametrize("form", ["wide", "blocks", "rows"])
def test_einsum_against_float64(form, data, record_property):
    problem = make_problem(max(TOKENS), *gpu.ACCURACY_SHAPE, form=form, seed=11, data=data, spread=3)
    exact, deviation = problem.exact()
    for tokens in TOKENS:
        z = problem.head(tokens).bf16()
        check(z, exact[:tokens], deviation[:tokens], form, data, f"T={tokens}", record_property)


@pytest.mark.parametrize("data", ["normal", "outliers"])
@pytest.mark.parametrize("form", ["wide", "blocks"])
def test_gemm_against_float64(form, data, record_property):
    """wo_b: the same product with one group and tiled scales; K = 8192 is the longest chain of sums there is."""
    n, k = gpu.GEMM_SHAPE
    problem = make_problem(max(TOKENS), 1, n, k, form, seed=12, data=data, spread=3)
    exact, deviation = problem.exact()
    for tokens in TOKENS:
        scale = vllm_megaattn.layouts.to_f8_128x4(problem.x_bytes[:tokens, 0].cpu()).to(problem.x.device)
        y = vllm_megaattn.mxfp8_gemm_wo_b(
            problem.x[:tokens, 0], scale, problem.w[0], problem.w_scale[0], z_span=problem.x_span
        )
        check(y[:, None], exact[:tokens], deviation[:tokens], form, data, f"T={tokens}", record_property)


def check(z, exact, deviation, form: str, data: str, label: str, record_property) -> None:
    """Both limits, for one result."""
    if exact.numel() >= 65536:  # with fewer elements the pair of distances is not an average yet
        error = error_before_rounding(z, exact)
        record_property(f"{form} {data} {label}", f"{error:.2e}")
        print(f"{form} {data} {label}: relative error before rounding {error:.2e}")
        assert error <= FROBENIUS_LIMIT[form], label
    differ = int((z != rounded(exact)).sum())
    wrong = int(unexplained(z, exact, ELEMENT_LIMIT[data] * deviation).sum())
    assert wrong == 0, f"{label}: {wrong} of {differ} elements that differ lie at no rounding boundary"
    assert differ <= 0.15 * z.numel() + 8, f"{label}: {differ} of {z.numel()} elements are not correctly rounded"


def test_the_error_estimate_has_teeth():
    """Sums that are off by a known amount: the estimate finds it, and the limits refuse it."""
    problem = make_problem(256, 1, 512, 512, seed=13, data="normal", spread=3)
    exact, deviation = problem.exact()
    noise = torch.randn(exact.shape, generator=gpu.generator(14), device=gpu.DEVICE, dtype=torch.float64)
    for size in (3e-4, 1e-3):
        off = exact + size * noise * exact.norm() / noise.norm()
        found = error_before_rounding(rounded(off), exact)
        assert 0.85 * size < found < 1.15 * size
    assert error_before_rounding(rounded(exact), exact) == 0
    neighbour = rounded(exact) + rounded(exact).abs() * 2.0**-7  # one or two units in the last place too large
    slack = ELEMENT_LIMIT["normal"] * deviation
    assert not unexplained(rounded(exact), exact, slack).any()
    assert unexplained(neighbour, exact, slack).double().mean() > 0.25


# ---- against the CPU backend -----------------------------------------------------------------------------------


@pytest.mark.parametrize("span", [32, 128, 256])
@pytest.mark.parametrize("form", ["wide", "blocks"])
@pytest.mark.parametrize("tokens", [64, 100])
def test_z_bytes_differ_from_the_cpus_only_at_rounding_boundaries(form, span, tokens, record_property):
    """A byte of z follows from BF16 sums: where the sums of both backends have equal bits, so have the bytes; where a
    sum differs, a rounding boundary is near. Differing bytes are counted and must be few."""
    problem = make_problem(tokens, 2, 512, gpu.K_A, form, seed=15, data="normal", spread=3)
    exact, deviation = problem.exact()
    host = [t.cpu() for t in problem.args]
    z = problem.bf16()
    z_host = vllm_megaattn.einsum_fp8_bf16(*host, x_span=problem.x_span)
    there = z_host.to(z.device)
    for name, sums in (("this device", z), ("the CPU", there)):
        wrong = int(unexplained(sums, exact, ELEMENT_LIMIT["normal"] * deviation).sum())
        assert wrong == 0, f"{name}: {wrong} BF16 sums are not rounded from a number close to the exact one"

    data, scale = problem.mxfp8(span)
    data_host, scale_host = vllm_megaattn.einsum_fp8_sfd128x4(*host, x_span=problem.x_span, scale_span=span)
    blocks = problem.num_cols // 32
    bytes_of = [vllm_megaattn.layouts.from_f8_128x4(s.cpu(), tokens, blocks) for s in (scale, scale_host)]
    sums_differ = (gpu.bits(z) != gpu.bits(there)).reshape(tokens, -1).cpu()
    data_differ = (data.cpu().view(torch.uint8) != data_host.view(torch.uint8)).reshape(tokens, -1)
    scale_differ = bytes_of[0] != bytes_of[1]
    span_differs = sums_differ.reshape(tokens, -1, span).any(2)
    assert not (scale_differ & ~span_differs.repeat_interleave(span // 32, 1)).any(), (
        "a scale differs, its sums do not"
    )
    elements = scale_differ.repeat_interleave(32, 1) | sums_differ
    assert not (data_differ & ~elements).any(), "a data byte differs, its sum and scale do not"
    counts = [int(t.sum()) for t in (sums_differ, scale_differ, data_differ)]
    record_property(f"{form} span {span}", counts)
    print(f"{form} span {span} T={tokens}: of {data_differ.numel()} elements {counts[0]} sums and {counts[2]} bytes "
          f"differ from the CPU's; of {scale_differ.numel()} scales {counts[1]}")  # fmt: skip
    assert counts[0] <= 0.15 * sums_differ.numel()
    assert counts[1] + counts[2] <= 0.02 * data_differ.numel()


@pytest.mark.parametrize("tokens", [7, 130])
@pytest.mark.parametrize("form", ["wide", "blocks"])
def test_special_values_equal_the_cpus(form, tokens):
    """One term per sum, so that nothing is rounded and both backends must agree exactly: scale bytes at the ends of
    their range, NaN scales and elements, infinities, zeros, blocks whose scale underflows (B01, B02, B04, B07)."""
    groups, n, k = 2, 256, 512
    problem = make_problem(tokens, groups, n, k, form, seed=16)
    x_bytes, w_bytes = problem.x_bytes.clone(), problem.w_bytes.clone()
    x = torch.zeros((tokens, groups, k), dtype=torch.uint8, device=gpu.DEVICE)
    # Powers of two whose products stay within what both kernels' order of multiplication keeps exact (csrc/cuda/plan.h):
    # 2^-126 .. 2^120, which still overflows with the largest elements and underflows with the smallest.
    for t in range(tokens):
        x[t, :, (37 * t) % k] = 0x38 if t % 2 else 0xB8  # 1 or -1
        x_bytes[t] = (200, 60, 100, 127, 150)[t % 5]
    x_bytes[3], x[4, 0] = 255, 0  # NaN scale; a token of zeros
    x[5, 1, 9] = 0x7F  # NaN element
    rows = torch.tensor([68, 90, 110, 120, 127, 134, 150, 174], device=gpu.DEVICE, dtype=torch.uint8)
    w_bytes[0] = rows.repeat_interleave(w_bytes.shape[1] // 8)[:, None]
    w_bytes[1, -1] = 255
    w = gpu.random_e4m3((groups, n, k), 17)
    w.view(torch.uint8)[0, 100, 37] = 0x7F
    w.view(torch.uint8)[0, ::3] |= 0x70  # large elements, so that some sums overflow
    w.view(torch.uint8)[0, ::3, :][w.view(torch.uint8)[0, ::3, :] & 0x7F == 0x7F] = 0x7E
    args = [x.view(gpu.E4M3), gpu.words(x_bytes), w, w_bytes]
    host = [t.cpu() for t in args]
    z = vllm_megaattn.einsum_fp8_bf16(*args, x_span=problem.x_span).cpu()
    expected = vllm_megaattn.einsum_fp8_bf16(*host, x_span=problem.x_span)
    assert expected.isnan().any()
    assert (expected == 0).any()
    assert expected.isinf().any()
    assert torch.equal(z.isnan(), expected.isnan())
    assert gpu.same(z.nan_to_num(0, torch.inf, -torch.inf), expected.nan_to_num(0, torch.inf, -torch.inf))
    for span in (32, 128, 256):
        data, scale = vllm_megaattn.einsum_fp8_sfd128x4(*args, x_span=problem.x_span, scale_span=span)
        data_host, scale_host = vllm_megaattn.einsum_fp8_sfd128x4(*host, x_span=problem.x_span, scale_span=span)
        assert gpu.same(scale.cpu(), scale_host), span
        assert gpu.same(data.cpu(), data_host), span


@pytest.mark.parametrize("span", [32, 128, 256])
def test_special_blocks_quantise_as_on_the_cpu(span):
    """Any BF16 bit pattern, and blocks of zeros, of infinities, of one NaN, of values whose scale underflows; both
    forms of the quantiser (few and many tokens), and through the inverse RoPE."""
    for tokens in (3, 1200):
        z = torch.randint(-(2**15), 2**15, (tokens, 2, 1024), generator=gpu.generator(18), device=gpu.DEVICE)
        z = z.to(torch.int16).view(torch.bfloat16)
        z[0, 0, :256], z[0, 0, 256:512], z[0, 1, :256] = 0, -0.0, 1e-39
        z[1, 0, :256], z[1, 1, :256] = 1e-36, torch.finfo(torch.bfloat16).max
        z[1, 0, 5], z[2, 0, :256], z[2, 1, :256] = 9e-40, 1.0, torch.inf
        z[2, 0, 40] = torch.nan
        finite = z.float().abs() < 1e30
        z[:, :, 512:] = torch.where(finite, z, 1.5)[:, :, 512:]
        mine = vllm_megaattn.mxfp8_quantize_sfd128x4(z, scale_span=span)
        theirs = vllm_megaattn.mxfp8_quantize_sfd128x4(z.cpu(), scale_span=span)
        assert all(gpu.same(a.cpu(), b) for a, b in zip(mine, theirs, strict=True)), tokens
        assert (theirs[1] == 255).any()

        cos_sin = torch.cat([torch.ones(4, 32), torch.zeros(4, 32)], 1).to(gpu.DEVICE)
        positions = torch.arange(tokens, device=gpu.DEVICE) % 5  # 4 is outside the cache: that token is poisoned
        attn = z.view(tokens, 4, 512)
        mine = vllm_megaattn.inv_rope_mxfp8_quantize(attn, positions, cos_sin, groups=2, scale_span=span)
        theirs = vllm_megaattn.inv_rope_mxfp8_quantize(
            attn.cpu(), positions.cpu(), cos_sin.cpu(), groups=2, scale_span=span
        )
        assert all(gpu.same(a.cpu(), b) for a, b in zip(mine, theirs, strict=True)), tokens


def test_power_of_the_scale_bytes():
    """The reference's own decoding: 0 is 2^-127, 254 is 2^127, 255 is NaN (B05)."""
    found = power(torch.tensor([0, 1, 127, 254, 255], dtype=torch.uint8)).tolist()
    assert found[:4] == [2.0**-127, 2.0**-126, 1.0, 2.0**127]
    assert found[4] != found[4]
