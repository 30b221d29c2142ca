"""The CPU kernels' instruction-set variants: all give the same bits, those of the documented order of summation."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import reference as ref
import torch
from helpers import Matmul, bf16, codes, e4m3, make_matmul, run_python, u8, words
from test_inv_rope import make_attn, make_cache, telling_attention

import vllm_megaattn
from vllm_megaattn import _C

VARIANTS = ("scalar", "avx2", "avx512", "avx512bf16")
CHUNK, LANES = 1024, 16


def supported(variant: str) -> bool:
    needs = {
        "scalar": set(),
        "avx2": {"avx2", "fma", "f16c"},
        "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
        "avx512bf16": {"avx512f", "avx512bf16"},
    }
    return needs[variant] <= set(_C.cpu_info()["features"].split())


def summed_in_order(problem: Matmul) -> np.ndarray:
    """FP32 sums in the order of csrc/cpu/cpu_internal.h, then BF16 codes [T, G, N]; every NaN is 0x7FC0."""
    tokens, groups, n, k = problem.shape
    x = ref.dequantize(problem.x, problem.x_scale)[:, :, None, :]
    w = ref.dequantize(problem.w, problem.w_scale)[None, :, :, :]
    total = np.zeros((tokens, groups, n))
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, k, CHUNK):
            lanes = np.zeros((tokens, groups, n, LANES))
            for block in range(start, min(start + CHUNK, k), 32):
                for half in (block + 16, block):  # the upper half of a block first
                    cut = slice(half, half + LANES)
                    lanes = ref.fma_f32(*np.broadcast_arrays(x[..., cut], w[..., cut]), lanes)
            while lanes.shape[-1] > 1:
                middle = lanes.shape[-1] // 2
                lanes = (lanes[..., :middle] + lanes[..., middle:]).astype(np.float32).astype(np.float64)
            total = (total + lanes[..., 0]).astype(np.float32).astype(np.float64)
    bits = ref.bf16_encode(total)
    return np.where(np.isnan(total), np.uint16(0x7FC0), bits)


def cancelling_problem(seed: int, k: int, irregular: bool) -> Matmul:
    """Sums whose exact value is zero: the second half of the columns repeats the first, shuffled and negated. What
    remains in FP32 is rounding alone, so any other order of summation gives other bits, in every bit of the BF16."""
    rng = np.random.default_rng(seed)
    problem = make_matmul(rng, 7, 2, 64, k)
    if irregular:  # bytes that take a variant's slow path: far from one, zero and NaN
        problem.x_scale[1] = 20
        problem.x_scale[2, 0] = 250
        problem.x_scale[3, 1, 1] = 255
        problem.w_blocks[0, 1, 2] = 50
        problem.w_scale = ref.expand_blocks(problem.w_blocks, 64, k, 32, 32)
    half = k // 2
    blocks = rng.permutation(half // 32)
    columns = (blocks[:, None] * 32 + np.arange(32)).ravel()
    for data, negate in ((problem.x, 0), (problem.w, 0x80)):
        data[..., half:] = data[..., columns] ^ negate
    for scale in (problem.x_scale, problem.w_scale, problem.w_blocks):
        scale[..., half // 32 :] = scale[..., blocks]
    return problem


PROBLEMS = [(1, 256, False), (2, 1536, False), (3, 4096, False), (4, 2304, False), (5, 512, True), (6, 2560, True)]


def einsum_bits(seed: int, k: int, irregular: bool) -> np.ndarray:
    return codes(vllm_megaattn.einsum_fp8_bf16(*cancelling_problem(seed, k, irregular).args()))


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_sums_are_formed_in_the_documented_order(problem):
    expected = summed_in_order(cancelling_problem(*problem))
    assert (expected & 0x7FFF != 0).mean() > 0.4, "nothing would be tested: the sums cancel exactly"
    np.testing.assert_array_equal(einsum_bits(*problem), expected)


def test_another_order_would_be_noticed():
    """The same sums with the halves of each block exchanged differ in most elements."""
    problem = cancelling_problem(*PROBLEMS[2])
    swap = np.arange(problem.x.shape[-1]).reshape(-1, 2, 16)[:, ::-1].ravel()
    swapped = Matmul(problem.x[..., swap], problem.x_scale, problem.w[..., swap], problem.w_scale, problem.w_blocks)
    different = summed_in_order(problem) != summed_in_order(swapped)
    assert different.mean() > 0.3


def digest() -> list[int]:
    """Checksums of every kernel's results over odd sizes, special values and irregular scales."""
    rng = np.random.default_rng(11)
    results: list[torch.Tensor] = []
    for problem in PROBLEMS:
        args = cancelling_problem(*problem).args()
        results += [vllm_megaattn.einsum_fp8_bf16(*args), *vllm_megaattn.einsum_fp8_sfd128x4(*args)]
    for tokens, n, k in [(1, 96, 128), (2, 33, 288), (5, 160, 1056), (33, 70, 576), (130, 32, 96)]:
        problem = make_matmul(rng, tokens, 1, n, k)
        problem.x_scale[0, 0, 0], problem.x[-1, 0, -1] = 255, 0x7F
        z_scale = torch.from_numpy(ref.f8_128x4_pack(problem.x_scale[:, 0]))
        operands = e4m3(problem.x[:, 0]), z_scale, e4m3(problem.w[0]), u8(problem.w_blocks[0])
        results.append(vllm_megaattn.mxfp8_gemm_wo_b(*operands))
    every = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    for bits in (every.reshape(64, 1024), rng.permutation(every).reshape(64, 1024)):
        for span in (32, 128, 256):
            results += vllm_megaattn.mxfp8_quantize_sfd128x4(bf16(bits), scale_span=span)
    attn, positions, cache = telling_attention()
    operands = bf16(attn), torch.from_numpy(positions), torch.from_numpy(cache)
    results += vllm_megaattn.inv_rope_mxfp8_quantize(*operands, groups=1)
    attn, cache = bf16(make_attn(rng, 9, 16, 512)), torch.from_numpy(make_cache(rng, 5, 64, "halves"))
    for order in ("standard", "chunk_interleaved"):
        for layout in ("halves", "interleaved"):
            positions = torch.from_numpy(rng.integers(0, 6, 9))
            results += vllm_megaattn.inv_rope_mxfp8_quantize(
                attn, positions, cache, groups=2, order=order, cos_sin_layout=layout
            )
    return [zlib.crc32(np.ascontiguousarray(codes(result)).tobytes()) for result in results]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_gives_the_same_bits(variant):
    if not supported(variant):
        pytest.skip(f"this processor does not run {variant}; it has: {_C.cpu_info()['features']}")
    output = run_python(
        "from test_cpu_variants import _C, digest; print(digest()); print(_C.cpu_info()['variant'])",
        VLLM_MEGAATTN_CPU=variant,
    ).splitlines()
    assert output[-1] == variant
    assert output[0] == str(digest())


def test_unknown_variant_is_refused_by_name():
    """Not a silent fallback: the error names the variable and its values. The first valid choice holds for the process."""
    output = run_python(
        """
        import os
        import torch, vllm_megaattn
        from vllm_megaattn import _C
        for value in ("sse2", "AVX2", " ", "scalar", "avx2", "sse2"):
            os.environ["VLLM_MEGAATTN_CPU"] = value
            try:
                vllm_megaattn.mxfp8_quantize_sfd128x4(torch.ones(1, 32, dtype=torch.bfloat16))
            except ValueError as error:
                print(error)
        print(_C.cpu_info()["variant"])
        """
    ).splitlines()
    assert len(output) == 4
    for line, value in zip(output, ("sse2", "AVX2", " "), strict=False):
        assert "VLLM_MEGAATTN_CPU must be scalar, avx2, avx512 or avx512bf16" in line
        assert repr(value) in line
    assert output[3] == "scalar"


def test_x_scale_words_of_the_problems_are_finite_where_meant():
    """The irregular problems really reach the slow path and its neighbours: bytes below 73, above 246 and 255."""
    bytes_seen = ref.unpack_words(codes(words(cancelling_problem(*PROBLEMS[4]).x_scale)))
    assert {20, 250, 255} <= set(bytes_seen.ravel().tolist())
    assert ((bytes_seen > 73) & (bytes_seen < 246)).any()
