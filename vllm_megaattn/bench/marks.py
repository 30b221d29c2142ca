"""What no kernel of an operation can beat, measured in the same rounds: drawn beside the contenders, not counted as peers.

read floor          reads the weights once and does nothing with them: few tokens
copy floor          moves as many bytes as inverse RoPE or quantisation reads and writes, by the device's own copy
FP8 matrix ceiling  the same multiplications by cuBLASLt with one scale per tensor and its fast accumulation: no scales in
                    the loop, and less exact. wo_a's groups as one product of G * T tokens and one group's weights
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from vllm_megaattn.bench.timing import Contender
from vllm_megaattn.bench.workload import E4M3, HEAD_DIM, Workload

READ, COPY, MATRIX, COPY_MATRIX = "read floor", "copy floor", "FP8 matrix ceiling", "copy floor + FP8 matrix ceiling"
MARKS = (READ, COPY, MATRIX, COPY_MATRIX)

Run = Callable[[int], torch.Tensor]


def contenders(work: Workload, op: str, report: Callable[[str], None]) -> list[Contender]:
    """The marks of one operation; one that this torch or GPU cannot run is reported and left out."""
    found = []
    for name, make in _MAKERS[op].items():
        try:
            run = make(work)
            run(0)
        except Exception as error:  # torch without Triton, or without FP8 matrix products
            report(f"{op}: {name} left out: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
            continue
        found.append(Contender(name, run))
    return found


# ---- reading weights -----------------------------------------------------------------------------------------------


def _read(which: str) -> Callable[[Workload], Run]:
    return lambda work: read_runner(work.weight_bytes(which), work.copies, work.device)


@cache
def _read_kernel():
    import triton
    import triton.language as tl

    @triton.jit
    def read_kernel(source, sink, num_words, WORDS: tl.constexpr):
        offset = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
        result = tl.sum(tl.load(source + offset, mask=offset < num_words, other=0), 0)
        if result == 0x5EED1E55:  # never, but the compiler cannot know: keeps the loads alive
            tl.store(sink, result)

    return read_kernel


def read_runner(num_bytes: int, copies: int, device: torch.device) -> Run:
    """run(i) that reads `num_bytes` of copy i once and writes nothing."""
    kernel, words = _read_kernel(), num_bytes // 4
    buffers = [torch.randint(-(2**31), 2**31 - 1, (words,), device=device, dtype=torch.int32) for _ in range(copies)]
    sink = torch.zeros(1, device=device, dtype=torch.int32)
    piece = 8192  # 32 KB a block, all of it in flight at once

    def run(i: int) -> torch.Tensor:
        kernel[(-(-words // piece),)](buffers[i], sink, words, WORDS=piece, num_warps=8)
        return sink

    return run


# ---- moving activations --------------------------------------------------------------------------------------------


def _copy_of(num_bytes: int, device: torch.device) -> Run:
    """Reads half of `num_bytes` and writes the other half."""
    source = torch.zeros(num_bytes // 2, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)

    def run(_: int) -> torch.Tensor:
        return target.copy_(source)

    return run


def _rope_copy(work: Workload) -> Run:
    """BF16 in, e4m3 and a byte per 32 columns out."""
    elements = work.tokens * work.heads * HEAD_DIM
    return _copy_of(3 * elements + elements // 32, work.device)


def _quantize_copy(work: Workload) -> Run:
    elements = work.tokens * work.k_b
    return _copy_of(3 * elements + elements // 32, work.device)


# ---- multiplying ---------------------------------------------------------------------------------------------------


def _per_tensor(tokens: int, k: int, weights: list[torch.Tensor], device: torch.device) -> Run:
    """x [tokens, k] of the same spread of values as the weights, so that the card draws the power it would."""
    x = (torch.randn(tokens, k, device=device) * 90).clamp_(-448, 448).to(E4M3)
    one = torch.ones((), device=device)

    def run(i: int) -> torch.Tensor:
        return torch._scaled_mm(
            x, weights[i].t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return run


def _matrix_a(work: Workload) -> Run:
    return _per_tensor(work.tokens * work.groups, work.k_a, [w[0] for w in work.wo_a.data], work.device)


def _matrix_b(work: Workload) -> Run:
    return _per_tensor(work.tokens, work.k_b, [w[0] for w in work.wo_b.data], work.device)


def _in_a_row(*makers: Callable[[Workload], Run]) -> Callable[[Workload], Run]:
    def make(work: Workload) -> Run:
        runs = [maker(work) for maker in makers]

        def run(i: int) -> torch.Tensor:
            result = runs[0](i)
            for next_run in runs[1:]:
                result = next_run(i)
            return result

        return run

    return make


_MAKERS: dict[str, dict[str, Callable[[Workload], Run]]] = {
    "chain": {READ: _read("chain"), COPY_MATRIX: _in_a_row(_rope_copy, _matrix_a, _matrix_b)},
    "o_proj": {READ: _read("o_proj"), MATRIX: _in_a_row(_matrix_a, _matrix_b)},
    "wo_a": {READ: _read("wo_a"), MATRIX: _matrix_a},
    "wo_b": {READ: _read("wo_b"), MATRIX: _matrix_b},
    "inv_rope": {COPY: _rope_copy},
    "quantize": {COPY: _quantize_copy},
}
