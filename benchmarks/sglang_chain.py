"""What SGLang runs on Hopper for DeepSeek-V4.1's output projection, as a contender of the layer benchmark.

    rotate      the last 64 columns of each head back, in place, BF16            1 launch
    wo_a        torch.einsum in BF16, result in group-major order                1 launch
    flatten     z [T, G, N] -> [T, G * N], which copies for G > 1                1 launch
    quantise    per 32 columns, power-of-two scales kept as float32              1 launch
    wo_b        DeepGEMM's FP8 product with scales per 32 on both sides          1 launch, and DeepGEMM's own of the scales

The first and the fourth are SGLang's JIT kernels there; here they are Triton kernels of the same traffic. DeepGEMM is
SGLang's fork (package sgl-deep-gemm), looked for in the folder that is passed on the command line.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import triton
import triton.language as tl

from vllm_megaattn import ops
from vllm_megaattn.bench.timing import Contender
from vllm_megaattn.bench.workload import E4M3, HEAD_DIM, ROPE_DIM, Workload, relative_error

BF16 = torch.bfloat16
WRONG = 0.08  # see bench.peers


@triton.jit
def rotate_kernel(x, positions, freqs, stride_token, stride_head, HEAD: tl.constexpr, HALF: tl.constexpr):
    token, head = tl.program_id(0), tl.program_id(1)
    pair = tl.arange(0, HALF)
    position = tl.load(positions + token)
    cos = tl.load(freqs + position * 2 * HALF + 2 * pair)
    sin = tl.load(freqs + position * 2 * HALF + 2 * pair + 1)
    base = x + token * stride_token + head * stride_head + HEAD - 2 * HALF
    even = tl.load(base + 2 * pair).to(tl.float32)
    odd = tl.load(base + 2 * pair + 1).to(tl.float32)
    tl.store(base + 2 * pair, (even * cos + odd * sin).to(tl.bfloat16))
    tl.store(base + 2 * pair + 1, (odd * cos - even * sin).to(tl.bfloat16))


@triton.jit
def quantize_kernel(z, q, scale, COLS: tl.constexpr, ROWS: tl.constexpr):
    block = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # blocks of 32 columns, all rows after each other
    offset = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    value = tl.load(z + offset).to(tl.float32)
    amax = tl.maximum(tl.max(tl.abs(value), 1), 1e-10)
    factor = tl.exp2(tl.ceil(tl.log2(amax / 448.0)))
    scaled = tl.minimum(tl.maximum(value / factor[:, None], -448.0), 448.0)
    tl.store(q + offset, scaled.to(tl.float8e4nv))
    tl.store(scale + block, factor)


class Chain:
    """SGLang's tensors for one workload."""

    def __init__(self, work: Workload) -> None:
        self.work = work
        cos, sin = work.cos_sin.chunk(2, 1)
        self.freqs = torch.stack([cos, sin], 2).flatten(1).contiguous()
        # A buffer of its own with the engine's strides, rotated in place again and again: what it holds does not
        # matter to the time.
        buffer = torch.empty((work.tokens, max(64, work.heads), HEAD_DIM), dtype=BF16, device=work.device)
        self.attn = buffer[:, : work.heads]
        self.attn.copy_(work.attn)
        self.wo_a = work.wo_a.bf16
        self.q = torch.empty(work.tokens, work.k_b, device=work.device, dtype=E4M3)
        self.scale = torch.empty(work.tokens, work.k_b // 32, device=work.device)

    def rotate(self) -> None:
        x = self.attn
        rotate_kernel[(x.shape[0], x.shape[1])](
            x,
            self.work.positions,
            self.freqs,
            x.stride(0),
            x.stride(1),
            HEAD=HEAD_DIM,
            HALF=ROPE_DIM // 2,
            num_warps=1,
        )

    def project(self, i: int) -> torch.Tensor:
        o = self.attn.unflatten(1, (self.work.groups, -1)).flatten(2)
        return torch.einsum("tgd,grd->tgr", o, self.wo_a[i]).flatten(1)

    def quantize(self, z: torch.Tensor) -> None:
        blocks = z.numel() // 32
        rows = 8
        quantize_kernel[(blocks // rows,)](z, self.q, self.scale, COLS=z.shape[1], ROWS=rows, num_warps=4)


def deep_gemm(folder: Path | None) -> object:
    if folder is not None and str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return importlib.import_module("deep_gemm")


def contenders(work: Workload, folder: Path | None, report: Callable[[str], None]) -> list[Contender]:
    """SGLang's chain, and our first half before SGLang's second one; those that load and compute the right thing."""
    try:
        library = deep_gemm(folder)
    except Exception as error:  # it may fail in any way; the run must go on
        report(f"SGLang's wo_b left out: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
        return []
    weights = work.wo_b.data
    w_scale = torch.exp2(work.wo_b.bytes32[0].float() - 127)
    out = torch.empty(work.tokens, work.model.hidden, device=work.device, dtype=BF16)

    def second(chain: Chain, z: torch.Tensor, i: int) -> torch.Tensor:
        chain.quantize(z)
        library.fp8_gemm_nt((chain.q, chain.scale), (weights[i][0], w_scale), out, recipe=(1, 32, 32))
        return out

    def sglang(chain: Chain) -> Callable[[int], torch.Tensor]:
        def run(i: int) -> torch.Tensor:
            chain.rotate()
            return second(chain, chain.project(i), i)

        return run

    def ours_then_sglang(chain: Chain) -> Callable[[int], torch.Tensor]:
        prepared = work.wo_a.prepared
        span = ops.default_scale_span(work.device, *prepared[0])

        def run(i: int) -> torch.Tensor:
            x, x_scale = ops.inv_rope_mxfp8_quantize(
                work.attn, work.positions, work.cos_sin, groups=work.groups, scale_span=span
            )
            z = ops.einsum_fp8_bf16(x, x_scale, *prepared[i], x_span=span)
            return second(chain, z.flatten(1), i)

        return run

    exact = work.exact_z @ work.wo_b.exact[0].t()
    found = []
    makers = {"SGLang 0.5.23: einsum + DeepGEMM": sglang, "our wo_a + SGLang's wo_b": ours_then_sglang}
    for name, make in makers.items():
        try:
            chain = Chain(work)
            contender = Contender(name, make(chain))
            contender.error = relative_error(contender.run(0), exact)
            if not contender.error < WRONG:
                report(f"{name} left out: relative error {contender.error:.1e} against float64")
                continue
        except Exception as error:
            report(f"{name} left out: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
            continue
        found.append(contender)
    return found
