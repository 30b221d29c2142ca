"""GPU: CUDA graphs, streams and threads. No call may allocate, wait, load lazily or share state with another."""

from __future__ import annotations

import threading

import gpu_helpers as gpu
import helpers
import pytest
import torch
from gpu_helpers import Tally, count_differences, make_chain, make_problem, same

import vllm_megaattn

pytestmark = pytest.mark.gpu

TOKENS = (1, 8, 64, 130, 512)


def small_chain(tokens: int, seed: int, groups: int = 2) -> gpu.Chain:
    return make_chain(tokens, groups, 512, 2, 320, seed=seed)


def copy_inputs(chain: gpu.Chain, source: gpu.Chain) -> None:
    """Everything a layer may change in place between replays; weights too (B95)."""
    for name in ("attn", "positions", "cos_sin", "wo_a", "wo_a_scale", "wo_b", "wo_b_scale"):
        getattr(chain, name).copy_(getattr(source, name))


# ---- capture ---------------------------------------------------------------------------------------------------

FIRST_CALL = """
    import torch
    import gpu_helpers as gpu
    from gpu_helpers import make_chain, make_problem, same

    chain, problem = make_chain(9, 1, 512, 2, 320), make_problem(130, 2, 256, 512, "blocks")
    torch.cuda.synchronize()
    graph, (y, z) = gpu.capture(lambda: (chain.from_attn({path!r}), problem.mxfp8(32)), {mode!r})
    for tensor in (y, *z):
        gpu.bits(tensor).fill_(77)
    graph.replay()
    torch.cuda.synchronize()
    captured = [t.clone() for t in (y, *z)]
    eager = [chain.from_attn({path!r}), *problem.mxfp8(32)]
    assert all(same(a, b) for a, b in zip(captured, eager)), "replay and eager call differ"
    assert y.double().abs().sum() > 0
    print("captured first, modules loaded:", torch.cuda.current_device())
"""


@pytest.mark.parametrize(("mode", "path"), [("global", "fused"), ("thread_local", "unfused")])
def test_the_first_call_of_a_process_is_inside_a_capture(mode, path):
    """B48, B66, B67: nothing was called before, kernels are not loaded, and the driver is told to load lazily."""
    code = FIRST_CALL.format(mode=mode, path=path)
    output = helpers.run_python(code, CUDA_MODULE_LOADING="LAZY", VLLM_MEGAATTN_SELF_CHECK="1")
    assert "captured first" in output


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("tokens", TOKENS)
def test_replay_reads_changed_inputs_and_weights(tokens, overlap):
    chain, others = small_chain(tokens, 41), [small_chain(tokens, seed) for seed in (42, 43)]
    expected = [other.from_attn() for other in others]
    assert not same(*expected)
    with gpu.flags(0 if overlap else gpu.NO_PDL):
        graph, y = gpu.capture(chain.from_attn)
    for i in (0, 1, 0, 1):
        copy_inputs(chain, others[i])
        graph.replay()
        assert same(y, expected[i]), i


def test_capture_then_larger_eager_call_then_replay():
    """B64: nothing the graph points to may move or be freed because a later call is larger."""
    small, large = small_chain(8, 44), small_chain(4096, 45)
    expected = small.from_attn()
    graph, y = gpu.capture(small.from_attn)
    for _ in range(3):
        large.from_attn("unfused")
        torch.cuda.empty_cache()
        graph.replay()
        assert same(y, expected)


def test_every_op_is_captured():
    """The front ends with `out` given, all in one graph; and T = 0, which must launch nothing."""
    for tokens in (0, 5, 130):
        problem, z = make_problem(tokens, 2, 256, 512, seed=46), gpu.random_e4m3((tokens, 512), 47)
        chain = small_chain(tokens, 48)

        def body(problem=problem, chain=chain, z=z):
            data, scale = problem.mxfp8(128)
            bf16 = problem.bf16()
            q, q_scale = vllm_megaattn.mxfp8_quantize_sfd128x4(bf16, scale_span=128)
            y = vllm_megaattn.mxfp8_gemm_wo_b(z, q_scale, problem.w[0], problem.w_scale[0], z_span=128)
            x, x_scale = chain.quantized()
            return data, scale, bf16, q, q_scale, y, x, x_scale, chain.from_x(x, x_scale), chain.from_attn("unfused")

        eager = body()
        graph, captured = gpu.capture(body)
        graph.replay()
        assert all(same(a, b) for a, b in zip(captured, eager, strict=True)), tokens


# ---- memory and waiting ----------------------------------------------------------------------------------------


def given_out_calls(tokens: int) -> list:
    """Thunks of every op whose results are all given, so that a call has nothing to allocate."""
    problem, chain = make_problem(tokens, 2, 256, 512, seed=49), small_chain(tokens, 50)
    bf16 = problem.bf16()
    data, scale = problem.mxfp8(256)
    q, q_scale = torch.empty_like(data), torch.empty_like(scale)
    y = torch.empty((tokens, 256), dtype=torch.bfloat16, device=gpu.DEVICE)
    x = gpu.activation_buffers(tokens, 2, 1024)
    return [
        lambda: problem.bf16(out=bf16),
        lambda: problem.mxfp8(256, out=(data, scale)),
        lambda: vllm_megaattn.mxfp8_quantize_sfd128x4(bf16, scale_span=256, out=(q, q_scale)),
        lambda: vllm_megaattn.mxfp8_gemm_wo_b(q, q_scale, problem.w[0], problem.w_scale[0], z_span=256, out=y),
        lambda: chain.quantized(out=x),
    ]


def allocations() -> int:
    return torch.cuda.memory_stats()["allocation.all.allocated"]


@pytest.mark.parametrize("tokens", [8, 130, 1024])
def test_ops_allocate_nothing_and_never_synchronise(tokens):
    """torch's allocator sees no request, the driver's free memory stays, and torch's own check finds no sync."""
    calls, chain = given_out_calls(tokens), small_chain(tokens, 51)
    for call in (*calls, chain.from_attn):
        call()
    torch.cuda.synchronize()
    free, before = torch.cuda.mem_get_info()[0], allocations()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in calls * 5:
            call()
        unchanged = allocations() == before
        for _ in range(5):
            chain.from_attn()  # its front end allocates through torch; the op itself must not
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert unchanged, "an op with all results given made torch allocate"
    assert free - torch.cuda.mem_get_info()[0] < 64 << 20


def test_calls_return_while_the_device_is_busy():
    """A wait inside a call would outlast the spin kernel in front of it."""
    chain = small_chain(8, 52)
    calls = [*given_out_calls(8), *given_out_calls(130), chain.from_attn]
    for call in calls:
        call()
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)  # about 0.2 s
    spinning = torch.cuda.Event()
    spinning.record()
    for call in calls:
        call()
    assert not spinning.query(), "a call waited for the stream"
    torch.cuda.synchronize()


def test_many_graphs_do_not_pile_up_memory():
    """B65: no workspace a call, a graph or a shape."""
    calls = given_out_calls(8)
    for call in calls:
        call()
    torch.cuda.synchronize()
    graphs = [gpu.capture(calls[0])[0]]
    graphs[0].replay()
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    for i in range(25):
        graphs.append(gpu.capture(calls[i % len(calls)])[0])
        graphs[-1].replay()
    torch.cuda.synchronize()
    assert free - torch.cuda.mem_get_info()[0] < 128 << 20


# ---- streams and threads ---------------------------------------------------------------------------------------


def test_a_side_stream_with_late_inputs():
    """B77, B78: current stream, not the default one nor one of the package's own. Inputs arrive behind a spin kernel on
    the same stream; the default stream is idle and would run ahead."""
    for tokens in TOKENS:
        chain, source = small_chain(tokens, 53), small_chain(tokens, 54)
        expected = {path: source.from_attn(path) for path in ("fused", "unfused")}
        torch.cuda.synchronize()
        for path, y in expected.items():
            copy_inputs(chain, source)
            chain.attn.zero_()
            torch.cuda.synchronize()
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(4_000_000)
                chain.attn.copy_(source.attn)
                result = chain.from_attn(path)
            stream.synchronize()
            assert same(result, y), (tokens, path)


def test_several_graphs_on_several_streams_at_once():
    """Graphs of different sizes replayed concurrently, each on its own stream, results checked after each round."""
    chains = [
        make_chain(t, 1, gpu.RANK, gpu.K_A // 512, gpu.HIDDEN, seed=60 + i) for i, t in enumerate((1, 8, 64, 512))
    ]
    expected = [chain.from_attn() for chain in chains]
    captured = [gpu.capture(chain.from_attn) for chain in chains]
    streams = [torch.cuda.Stream() for _ in chains]
    tally = Tally()
    torch.cuda.synchronize()
    for i in range(50):
        for stream, (graph, y) in zip(streams, captured, strict=True):
            with torch.cuda.stream(stream):
                y.zero_()
                graph.replay()
        torch.cuda.synchronize()
        for chain, (_, y), right in zip(chains, captured, expected, strict=True):
            tally.add((i, chain.attn.shape[0]), count_differences(y, right))
    tally.check()


def test_eager_calls_on_several_streams_at_once():
    """Weights are shared, everything else is each stream's own."""
    chains = [make_chain(t, 1, gpu.RANK, gpu.K_A // 512, gpu.HIDDEN, seed=65) for t in (4, 60, 100, 300)]
    expected = [chain.from_attn() for chain in chains]
    streams = [torch.cuda.Stream() for _ in chains]
    counts = [torch.zeros((), dtype=torch.int64, device=gpu.DEVICE) for _ in chains]
    torch.cuda.synchronize()
    for i in range(50):
        for chain, stream, right, count in zip(chains, streams, expected, counts, strict=True):
            with torch.cuda.stream(stream):
                count += count_differences(chain.from_attn(("fused", "unfused")[i % 2]), right)
    torch.cuda.synchronize()
    assert [int(count) for count in counts] == [0, 0, 0, 0]


def test_two_threads_on_two_streams():
    chains = [small_chain(tokens, 70 + tokens) for tokens in (8, 200)]
    expected = [chain.from_attn() for chain in chains]
    torch.cuda.synchronize()
    counts: list[int | None] = [None, None]
    errors: list[BaseException] = []

    def work(which: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                count = torch.zeros((), dtype=torch.int64, device=gpu.DEVICE)
                for _ in range(200):
                    count += count_differences(chains[which].from_attn(), expected[which])
                counts[which] = int(count)
        except BaseException as error:  # a failure of a thread must fail the test
            errors.append(error)

    threads = [threading.Thread(target=work, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not errors, errors
    assert counts == [0, 0]


def test_a_thread_that_never_touched_cuda():
    """Its first CUDA call is ours: the driver's current context must be set for it."""
    chain = small_chain(8, 75)
    expected = chain.from_attn()
    torch.cuda.synchronize()
    results: list[torch.Tensor] = []
    out = torch.zeros_like(expected)
    thread = threading.Thread(target=lambda: results.append(chain.from_attn(out=out)))
    thread.start()
    thread.join(timeout=60)
    torch.cuda.synchronize()
    assert results
    assert same(out, expected)


# ---- which kernels ran -----------------------------------------------------------------------------------------


def kernels_of(body) -> list[str]:
    """Names of this package's kernels that body() launched, in order; skips where the profiler sees no kernels."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        body()
        torch.cuda.synchronize()
    events = [e for e in profile.events() if "mx_sm90" in e.name]
    if not events:
        pytest.skip("torch.profiler reports no kernels of this package here")
    return [e.name for e in sorted(events, key=lambda e: e.time_range.start)]


@pytest.mark.parametrize("tokens", [8, 512])
@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_captured_kernels_are_the_eager_ones_and_the_fast_ones(groups, tokens):
    """B49: no fallback is baked into a graph. B51: every group count reaches the wide kernels."""
    chain = make_chain(tokens, groups, gpu.RANK, gpu.K_A // 512, gpu.HIDDEN, seed=80)
    chain.from_attn()
    eager = kernels_of(chain.from_attn)
    graph, _ = gpu.capture(chain.from_attn)
    graph.replay()
    assert kernels_of(graph.replay) == eager
    products = [name for name in eager if "rope" not in name and "quantize" not in name]
    assert products, eager
    family = "mx_sm90_decode" if tokens <= 64 else "mx_sm90_gemm"
    assert all(family in name and "per32" not in name for name in products), eager
