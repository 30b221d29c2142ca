"""The package in its process: import without torch or GPU, fork, threads, memory over many calls."""

from __future__ import annotations

import os
import textwrap
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import reference as ref
import torch
from helpers import make_matmul, run_python, same_bits
from test_errors import OPS, make

import vllm_megaattn
from vllm_megaattn._registration import call

# ---- import (B72, B87) -----------------------------------------------------------------------------------------


def test_import_without_torch_names_torch():
    output = run_python(
        """
        import sys
        sys.modules["torch"] = None  # what the import system does for a package that is not there
        try:
            import vllm_megaattn
        except ImportError as error:
            print("ImportError:", error)
        """
    )
    assert output.startswith("ImportError:")
    assert "torch" in output


def test_core_before_torch_explains_itself():
    """The C core alone, without `import torch` before it, has no libtorch to find in the process."""
    output = run_python(
        f"""
        import importlib.util
        spec = importlib.util.spec_from_file_location("vllm_megaattn._C", {vllm_megaattn._registration._C.__file__!r})
        try:
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
        except ImportError as error:
            print("ImportError:", error)
        """
    )
    assert "ImportError:" in output
    assert "import torch" in output


def test_import_touches_no_gpu():
    output = run_python(
        """
        import torch, vllm_megaattn
        from vllm_megaattn import _C
        print(torch.cuda.is_initialized(), _C.build_info()["version"] == vllm_megaattn.__version__)
        """,
        CUDA_VISIBLE_DEVICES="",
    )
    assert output.split() == ["False", "True"]


def test_import_is_quiet_and_repeatable():
    """No output, no warning, no second registration on reload or in a subinterpreter-like second import."""
    output = run_python(
        """
        import sys, warnings
        warnings.simplefilter("error")
        import torch, vllm_megaattn
        for name in [n for n in sys.modules if n.startswith("vllm_megaattn")]:
            if name != "vllm_megaattn._registration":  # fakes can be registered once
                del sys.modules[name]
        import vllm_megaattn
        """
    )
    assert output == ""


def test_cuda_tensors_without_kernels_get_a_clear_error():
    """The status of a device that cannot be used is a sentence; asking for it creates nothing."""
    output = run_python(
        """
        import torch
        from vllm_megaattn import _C
        usable, reason = _C.cuda_status(0)
        print(usable, torch.cuda.is_initialized(), reason)
        """,
        CUDA_VISIBLE_DEVICES="",
    )
    usable, initialized, reason = output.strip().split(" ", 2)
    assert (usable, initialized) == ("False", "False")
    assert len(reason) > 10


def test_ops_need_no_front_end():
    """Importing the package is all that vLLM's worker needs: torch.ops.vllm_megaattn.* is there."""
    output = run_python(
        """
        import torch, vllm_megaattn
        z = torch.ones(2, 32, dtype=torch.bfloat16)
        q, s = torch.empty(2, 32, dtype=torch.float8_e4m3fn), torch.empty(512, dtype=torch.uint8)
        torch.ops.vllm_megaattn.mxfp8_quantize_sfd128x4(z, q, s, 32)
        print(q.view(torch.uint8).unique().tolist(), s[0].item())
        """
    )
    assert output.split() == ["[120]", "119"]


# ---- fork ------------------------------------------------------------------------------------------------------

FORK = """
    import os, signal, sys
    import numpy as np, torch, vllm_megaattn
    from helpers import make_matmul, same_bits
    from test_o_proj import make_activation, make_weights

    rng = np.random.default_rng(0)
    weights, _, _ = make_weights(rng, 2, 256, 512, 512)
    activation, _, _ = make_activation(rng, 300, 2, 512)
    torch.set_num_threads(2)
    {before}
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)  # a child that hangs dies, and the parent sees it
        y = vllm_megaattn.o_proj(*activation, *weights)
        torch.save(y, sys.argv[0] + {path!r})
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert status == 0, status
    expected = vllm_megaattn.o_proj(*activation, *weights)  # the parent's threads still work
    assert same_bits(torch.load(sys.argv[0] + {path!r}), expected)
"""


@pytest.mark.parametrize("threads_used_before", [False, True])
def test_ops_work_in_a_forked_child(threads_used_before, tmp_path):
    """A child inherits the bookkeeping of the parent's thread pool, not its threads: it must not wait for them."""
    before = "vllm_megaattn.o_proj(*activation, *weights)" if threads_used_before else "pass"
    path = str(tmp_path / "y.pt")
    code = textwrap.dedent(FORK).replace("sys.argv[0] + ", "").format(before=before, path=path)
    run_python(code)


def test_ops_work_in_a_spawned_process():
    run_python(
        """
        import multiprocessing as mp
        from test_process import child

        if __name__ == "__main__":
            with mp.get_context("spawn").Pool(2) as pool:
                assert pool.map(child, range(4)) == [child(i) for i in range(4)]
        """
    )


def child(seed: int) -> int:
    problem = make_matmul(np.random.default_rng(seed), 33, 2, 128, 256)
    return zlib.crc32(vllm_megaattn.einsum_fp8_bf16(*problem.args()).view(torch.int16).numpy().tobytes())


# ---- threads ---------------------------------------------------------------------------------------------------


def test_concurrent_calls_from_python_threads(rng):
    """Calls run without the GIL; nothing of one call may be seen by another, errors included."""
    problems = [make_matmul(rng, tokens, 2, 128, 256) for tokens in (1, 5, 33, 130)]
    arguments = [problem.args() for problem in problems]
    expected = [vllm_megaattn.einsum_fp8_sfd128x4(*args) for args in arguments]
    wrong = make("einsum_fp8_bf16")
    wrong.tensors["x"] = wrong.tensors["x"].to(torch.float32)
    faults: list[object] = []
    start = threading.Barrier(6)

    def work(index: int) -> None:
        start.wait()
        for _ in range(150):
            result = vllm_megaattn.einsum_fp8_sfd128x4(*arguments[index])
            if not all(map(same_bits, result, expected[index])):
                faults.append(index)

    def fail(kind: type[Exception]) -> None:
        bad = make("einsum_fp8_bf16")
        bad.tensors["x"] = bad.tensors["x"].to(torch.float32) if kind is TypeError else bad.tensors["x"][:, :, :128]
        start.wait()
        for _ in range(150):
            try:
                bad.front()
                faults.append("no error")
            except (TypeError, ValueError) as error:
                if type(error) is not kind:
                    faults.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    threads += [threading.Thread(target=fail, args=(kind,)) for kind in (TypeError, ValueError)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


def test_calls_release_the_gil(rng):
    """While one thread is inside a long call, another runs Python code."""
    args = make_matmul(rng, 512, 2, 1024, 2048, adversarial=False).args()
    begun, done = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        for _ in range(5):
            vllm_megaattn.einsum_fp8_bf16(*args)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    ticks = 0
    while not done.is_set():
        ticks += 1
        time.sleep(0.0005)
    thread.join()
    assert ticks >= 10, f"Python ran {ticks} times during five calls"


# ---- memory ----------------------------------------------------------------------------------------------------


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def use_counts(tensors) -> list[int]:
    return [tensor._use_count() for tensor in tensors]


@pytest.mark.parametrize("name", OPS)
def test_handles_are_balanced(name):
    """Each call, successful or not, gives back every handle: the tensors' own reference counts say so exactly."""
    good, bad = make(name), make(name)
    last = list(bad.tensors)[-1]
    bad.tensors[last] = bad.tensors[last].to(torch.float64)
    tensors = [*good.tensors.values(), *good.outs.values(), *bad.tensors.values(), *bad.outs.values()]
    before = use_counts(tensors)
    for _ in range(10):
        good.front()
        with pytest.raises((TypeError, ValueError)):
            bad.front()
    assert use_counts(tensors) == before


def test_memory_stays_flat_over_many_calls():
    """10^5 calls of all ops, a third of them errors of both kinds: resident memory does not grow.

    A tensor handle that is not given back costs at least 32 bytes, so one leak per call would show as 3 MB.
    """
    calls = [make(name) for name in OPS]
    wrong_dtype, wrong_size = [make(name) for name in OPS], [make(name) for name in OPS]
    for bad in wrong_dtype:
        arg = list(bad.tensors)[-1]
        bad.tensors[arg] = bad.tensors[arg].to(torch.float64)
    for bad in wrong_size:
        arg = next(iter(bad.tensors))
        bad.tensors[arg] = bad.tensors[arg][..., :7]

    def some_calls(count: int) -> None:
        for i in range(count):
            index = i // 3 % len(OPS)
            if i % 3 == 0:
                calls[index].front(with_out=i % 2 == 0)
                continue
            try:
                (wrong_dtype if i % 3 == 1 else wrong_size)[index].front(with_out=i % 2 == 0)
            except (TypeError, ValueError):
                continue
            raise AssertionError("a wrong call succeeded")

    before_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the op's own bookkeeping is what is measured
    try:
        some_calls(5000)
        before = resident_bytes()
        some_calls(100_000)
        grown = resident_bytes() - before
    finally:
        torch.set_num_threads(before_threads)
    assert grown < 1_500_000, f"{grown} bytes more after 100000 calls"


def test_the_memory_check_has_teeth():
    """The same measurement sees a leak of 32 bytes a call."""
    hoard = []
    before = resident_bytes()
    for _ in range(100_000):
        hoard.append(bytearray(1))
    assert resident_bytes() - before > 1_500_000


def test_error_text_stays_within_its_buffer():
    """The longest message: many dimensions of many digits. Cut, not overflowing, and still naming the argument."""
    x = torch.empty(1, dtype=torch.uint8).as_strided((2**20 - 1,) * 3, (0, 0, 0))
    with pytest.raises(TypeError, match="einsum_fp8_bf16: x must have dtype"):
        vllm_megaattn.einsum_fp8_bf16(x, x, x, x, out=torch.empty((1, 1, 1), dtype=torch.bfloat16))
    many = torch.empty(0).expand(*[2**5] * 11, 0)
    with pytest.raises((ValueError, TypeError), match="mxfp8_quantize_sfd128x4: z must"):
        vllm_megaattn.mxfp8_quantize_sfd128x4(many)
    with pytest.raises(RuntimeError, match="mxfp8_quantize_sfd128x4: "):
        torch.ops.vllm_megaattn.mxfp8_quantize_sfd128x4(many, many, many, 32)


def test_call_translates_only_errors_of_its_own_op():
    """An error that another op left on this thread must not change the type of a foreign RuntimeError."""
    bad = make("einsum_fp8_bf16")
    bad.tensors["x"] = bad.tensors["x"].to(torch.float32)
    arguments = [*bad.tensors.values(), *bad.outs.values(), 32]
    with pytest.raises(RuntimeError):
        torch.ops.vllm_megaattn.einsum_fp8_bf16.default(*arguments)  # leaves its kind behind

    def foreign(*_):
        raise RuntimeError("somebody else's trouble")

    with pytest.raises(RuntimeError, match="somebody else") as caught:
        call(foreign, "einsum_fp8_bf16", *arguments)
    assert type(caught.value) is RuntimeError


def test_quantiser_agrees_between_fresh_processes(rng):
    """Nothing depends on addresses, hash seeds or the CPU variant's warm-up."""
    code = """
        import numpy as np, torch, zlib, vllm_megaattn
        from helpers import bf16
        bits = np.random.default_rng(1).integers(0, 65536, (130, 256)).astype(np.uint16)
        q, s = vllm_megaattn.mxfp8_quantize_sfd128x4(bf16(bits))
        print(zlib.crc32(q.view(torch.uint8).numpy().tobytes()), zlib.crc32(s.numpy().tobytes()))
    """
    first, second = run_python(code, PYTHONHASHSEED="1"), run_python(code, PYTHONHASHSEED="2", OMP_NUM_THREADS="1")
    assert first == second
    bits = np.random.default_rng(1).integers(0, 65536, (130, 256)).astype(np.uint16)
    data, scale = ref.quantize(bits)
    expected = f"{zlib.crc32(data.tobytes())} {zlib.crc32(ref.f8_128x4_pack(scale).tobytes())}"
    assert first.strip() == expected
