"""GPU: a token's bits against the number of tokens beside it, against repetition, and against overlapped launches.

What csrc/cuda/plan.h and sm90_decode.h promise, and these tests assert:

    switch BATCH_INVARIANT   all token counts give a token the same bits
    default, scales per 32   the same
    default, wide scales     T <= 64: the same bits for all of them. Above: the bits of one chain of sums, or, where
                             plan.h picks a kernel that splits K, those of two chains; large T is always one chain.

With the switch on, the bits are those that large T gives without it.
"""

from __future__ import annotations

from collections.abc import Callable

import gpu_helpers as gpu
import pytest
import torch
from gpu_helpers import Tally, count_differences, make_chain, make_problem

import vllm_megaattn

pytestmark = pytest.mark.gpu

TOKENS = (1, 2, 7, 8, 64, 127, 128, 129, 1024, 8192)
DECODE = 64  # tokens up to which csrc/cuda/sm90_decode.h's kernels run


def token_counts() -> list[int]:
    return [t for t in TOKENS if t <= gpu.LARGE]


# What is called: result(first, tokens) is the result of that many tokens from `first` on, token by token.
Result = Callable[[int, int], torch.Tensor]


def einsum(form: str, groups: int) -> Result:
    problem = make_problem(gpu.LARGE + 8, groups, gpu.RANK, gpu.K_A, form, seed=21)
    return lambda first, tokens: problem.tokens(slice(first, first + tokens)).bf16()


def fused_einsum(form: str, groups: int) -> Result:
    problem = make_problem(gpu.LARGE + 8, groups, gpu.RANK, gpu.K_A, form, seed=22)
    return lambda first, tokens: problem.tokens(slice(first, first + tokens)).mxfp8(256)[0]


def gemm(form: str, groups: int) -> Result:
    """z with the scales of each cut tiled anew, as the einsum of that many tokens would have written them."""
    k = groups * gpu.RANK
    problem = make_problem(gpu.LARGE + 8, 1, gpu.HIDDEN, k, form, seed=23)
    scales = problem.x_bytes[:, 0].cpu()

    def result(first: int, tokens: int) -> torch.Tensor:
        cut = slice(first, first + tokens)
        z_scale = vllm_megaattn.layouts.to_f8_128x4(scales[cut]).to(gpu.DEVICE)
        return vllm_megaattn.mxfp8_gemm_wo_b(
            problem.x[cut, 0], z_scale, problem.w[0], problem.w_scale[0], z_span=problem.x_span
        )

    return result


def projection(path: str, groups: int) -> Result:
    chain = make_chain(gpu.LARGE + 8, groups, gpu.RANK, gpu.K_A // 512, gpu.HIDDEN, seed=24)
    return lambda first, tokens: chain.tokens(slice(first, first + tokens)).from_attn(path)


CASES = {
    "einsum wide TP8": (einsum, "wide", 1),
    "einsum wide TP4": (einsum, "wide", 2),
    "einsum wide TP1": (einsum, "wide", 8),
    "einsum blocks TP4": (einsum, "blocks", 2),
    "einsum rows TP8": (einsum, "rows", 1),
    "fused einsum wide TP4": (fused_einsum, "wide", 2),
    "fused einsum blocks TP8": (fused_einsum, "blocks", 1),
    "gemm wide TP8": (gemm, "wide", 1),
    "gemm wide TP4": (gemm, "wide", 2),
    "gemm wide TP1": (gemm, "wide", 8),
    "gemm blocks TP8": (gemm, "blocks", 1),
    "projection fused TP8": (projection, "fused", 1),
    "projection fused TP1": (projection, "fused", 8),
    "projection unfused TP4": (projection, "unfused", 2),
}


def make_result(name: str) -> tuple[Result, bool]:
    """The result, and whether its default is one chain for every token count."""
    make, form, groups = CASES[name]
    return make(form, groups), form in ("blocks", "rows")


@pytest.mark.parametrize("name", CASES)
def test_invariant_with_the_switch(name):
    """Tokens from the start and from the middle of the batch (B85)."""
    result, _ = make_result(name)
    tally = Tally()
    with gpu.flags(gpu.INVARIANT):
        expected = result(0, gpu.LARGE + 8)
        for tokens in token_counts():
            tally.add(tokens, count_differences(result(0, tokens), expected[:tokens]))
            tally.add((tokens, "from 5"), count_differences(result(5, tokens), expected[5 : 5 + tokens]))
    tally.add("large T without the switch", count_differences(result(0, gpu.LARGE + 8), expected))
    tally.check()


@pytest.mark.parametrize("name", CASES)
def test_default_is_as_documented(name, record_property):
    result, always_one_chain = make_result(name)
    counts = token_counts()
    one_chain = result(0, gpu.LARGE + 8)
    decode = result(0, DECODE)
    others = {tokens: result(0, tokens) for tokens in counts}
    unlike = {t: int(count_differences(y, one_chain[:t])) for t, y in others.items()}
    differing = [t for t, count in unlike.items() if count]
    record_property(name, differing)
    print(f"{name}: token counts whose bits differ from one chain of sums: {differing or 'none'}")

    tally = Tally()
    for tokens in (t for t in counts if t <= DECODE):
        tally.add(tokens, count_differences(others[tokens], decode[:tokens]))
        shifted = result(5, tokens)[: DECODE - 5]
        tally.add((tokens, "from 5"), count_differences(shifted, decode[5 : 5 + tokens]))
    tally.check()
    assert gpu.LARGE not in differing, "large T must sum in one chain"
    if always_one_chain:
        assert not differing
    elif not name.startswith("projection"):  # those combine two products, each with one or two chains
        split = [t for t in differing if t > DECODE]
        for tokens in split[:-1]:
            assert gpu.same(others[tokens], others[split[-1]][:tokens]), f"T = {tokens}, {split[-1]}: a third result"


# ---- repetition ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("launches", ["overlapped", "one after the other"])
@pytest.mark.parametrize("tokens", [1, 8, 64, 128, 512])
def test_the_same_bits_a_thousand_times(tokens, launches):
    """A graph of ten projections back to back, replayed a hundred times: no kernel may read what the one before it has
    not finished, or overwrite what it still reads (B74, B76). Mismatches are counted inside the graph."""
    with gpu.flags(gpu.NO_PDL if launches != "overlapped" else 0):
        chains = [make_chain(tokens, 1, gpu.RANK, gpu.K_A // 512, gpu.HIDDEN, seed=31 + i) for i in range(2)]
        expected = [chain.from_attn() for chain in chains]
        assert not gpu.same(*expected)
        mismatches = torch.zeros((), dtype=torch.int64, device=gpu.DEVICE)

        def body() -> None:
            results = [chains[i % 2].from_attn(("fused", "unfused")[i // 5]) for i in range(10)]
            for i, y in enumerate(results):
                mismatches.add_(count_differences(y, expected[i % 2]))

        graph, _ = gpu.capture(body)
        for _ in range(gpu.RUNS // 10):
            graph.replay()
    assert int(mismatches) == 0


@pytest.mark.parametrize("launches", ["overlapped", "one after the other"])
def test_every_op_the_same_bits_a_thousand_times(launches):
    """Each op alone, eagerly, both kinds of scales, few tokens and many."""
    tally = Tally()
    with gpu.flags(gpu.NO_PDL if launches != "overlapped" else 0):
        for tokens in (8, 130):
            chain = make_chain(tokens, 2, 256, 2, 320, seed=33)
            wide, blocks = (make_problem(tokens, 2, 256, 1024, form, seed=34) for form in ("wide", "blocks"))
            z = wide.bf16()
            bodies = {
                "inv_rope": lambda chain=chain: chain.quantized()[0],
                "quantize": lambda z=z: vllm_megaattn.mxfp8_quantize_sfd128x4(z, scale_span=128)[0],
                "wide": lambda wide=wide: wide.bf16(),
                "wide, fused": lambda wide=wide: wide.mxfp8(256)[0],
                "blocks": lambda blocks=blocks: blocks.bf16(),
                "blocks, fused": lambda blocks=blocks: blocks.mxfp8(32)[0],
                "projection": chain.from_attn,
            }
            for name, body in bodies.items():
                expected, count = body(), torch.zeros((), dtype=torch.int64, device=gpu.DEVICE)
                for _ in range(gpu.RUNS):
                    count += count_differences(body(), expected)
                tally.add((name, tokens), count)
    tally.check()


@pytest.mark.parametrize("groups", [1, 8])
def test_overlapped_launches_change_no_bits(groups):
    sizes = [t for t in gpu.SIZES if t <= gpu.LARGE]
    chain = make_chain(max(sizes), groups, gpu.RANK, gpu.K_A // 512, gpu.HIDDEN, seed=35)
    tally = Tally()
    for tokens in sizes:
        for path in ("fused", "unfused"):
            overlapped = chain.head(tokens).from_attn(path)
            with gpu.flags(gpu.NO_PDL):
                tally.add((tokens, path), count_differences(chain.head(tokens).from_attn(path), overlapped))
    tally.check()


def test_late_inputs_are_waited_for():
    """The producer of the input spins before it stores, many times over: the projection behind it must see each new
    value (B76). What is read early by mistake is the value before."""
    for tokens in (8, 130):
        chain = make_chain(tokens, 1, gpu.RANK, gpu.K_A // 512, gpu.HIDDEN, seed=36)
        other = make_chain(tokens, 1, gpu.RANK, gpu.K_A // 512, gpu.HIDDEN, seed=37).attn
        inputs = (chain.attn.clone(), other)
        expected = []
        for value in inputs:
            chain.attn.copy_(value)
            expected.append(chain.from_attn())
        tally = Tally()
        for i in range(gpu.RUNS // 10):
            torch.cuda._sleep(20_000)
            chain.attn.copy_(inputs[i % 2])
            tally.add((tokens, i), count_differences(chain.from_attn(), expected[i % 2]))
        tally.check()


def test_weights_replaced_in_place_are_seen_by_the_next_call():
    """B95, eagerly: the kernels load weights before they wait for the launch in front of them, so whatever wrote the
    weights must have finished by then. Both weights change between calls, wo_b last, with nothing in between."""
    for tokens in (1, 64, 130, 512):
        variants = [make_chain(tokens, 1, gpu.RANK, gpu.K_A // 512, gpu.HIDDEN, seed=38 + i) for i in range(2)]
        live = make_chain(tokens, 1, gpu.RANK, gpu.K_A // 512, gpu.HIDDEN, seed=38)
        expected = []
        for variant in variants:
            live.wo_a.copy_(variant.wo_a)
            live.wo_b.copy_(variant.wo_b)
            torch.cuda.synchronize()
            expected.append(live.from_attn())
        torch.cuda.synchronize()
        assert not gpu.same(*expected)
        tally = Tally()
        for i in range(gpu.RUNS // 10):
            live.wo_a.copy_(variants[i % 2].wo_a)
            live.wo_b.copy_(variants[i % 2].wo_b)
            tally.add(
                (tokens, i), count_differences(live.from_attn(("fused", "unfused")[i // 2 % 2]), expected[i % 2])
            )
        tally.check()
