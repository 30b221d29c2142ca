"""What a call costs on the host: eager calls against a bare launch, and the first call of a fresh process.

    python benchmarks/bench_host.py [--out host.json] [--processes 2] [--calls 2000] [--repeats 7]

Two figures a row, both medians of --repeats batches of --calls calls enqueued without a wait in between:

    wall    microseconds between two calls while the device keeps up (its work per call is smaller than that)
    cpu     processor time of the calling thread per call

Rows: a kernel launched through the driver API with ready-made parameters, torch's own smallest launches, this package's
raw ops (torch.ops, results given), and its Python front ends (with results given, and allocating). "more" is what a row
costs beyond torch's smallest launch: the target for one op is 3 us.

First calls are measured in processes of their own: importing, preparing the device (loading the kernels), and the first
op of either path before and after that. Nothing is compiled. Without a usable GPU the same is measured on the CPU
backend, where "launch" is torch's smallest in-place op.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import vllm_megaattn
from vllm_megaattn.bench import report
from vllm_megaattn.cli.common import cuda_gap, format_table

E4M3 = torch.float8_e4m3fn
GAP = cuda_gap()
DEVICE = "cpu" if GAP else "cuda"
TOKENS, GROUPS, RANK, K, HIDDEN = (8, 1, 1024, 4096, 5120) if DEVICE == "cuda" else (1, 1, 128, 512, 128)

PTX = b"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry empty(.param .u64 pointer) { ret; }
\0"""


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


# ---- what is called ------------------------------------------------------------------------------------------------


def driver_launch() -> Callable[[], object] | None:
    """An empty kernel launched by cuLaunchKernel on torch's stream, from Python through ctypes; None without a driver.

    ctypes itself costs most of it: an upper bound on what a launch from C costs.
    """
    if DEVICE != "cuda":
        return None
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    torch.zeros(1, device=DEVICE)  # makes the primary context current
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    if cuda.cuModuleLoadData(ctypes.byref(module), PTX) != 0:
        return None
    if cuda.cuModuleGetFunction(ctypes.byref(function), module, b"empty") != 0:
        return None
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    value = ctypes.c_uint64(0)
    parameters = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(value), ctypes.c_void_p))
    launch, one, zero = cuda.cuLaunchKernel, ctypes.c_uint(1), ctypes.c_uint(0)
    launch.restype = ctypes.c_int

    def call() -> int:
        return launch(function, one, one, one, one, one, one, zero, stream, parameters, None)

    call.keep = (module, value)  # type: ignore[attr-defined]
    return call if call() == 0 else None


def torch_launches() -> dict[str, Callable[[], object]]:
    """Torch's own small ops, one kernel on one element each: through a method, and through the raw op."""
    one = torch.zeros(1, device=DEVICE)
    fill = torch.ops.aten.fill_.Scalar
    return {
        "torch: tensor.zero_() of one element": one.zero_,
        "torch: torch.ops.aten.fill_ of one element": lambda: fill(one, 0),
        "torch: tensor.neg_() of one element": one.neg_,
    }


def operands() -> dict[str, torch.Tensor]:
    """Tensors of one V4.1 shard at TP8, prepared weights."""
    torch.manual_seed(0)
    w_a = (torch.randn(GROUPS, RANK, K) * 60).clamp_(-448, 448).to(E4M3)
    w_b = (torch.randn(HIDDEN, GROUPS * RANK) * 60).clamp_(-448, 448).to(E4M3)
    angle = torch.rand(64, 32) * 6.2831853
    host = {
        "attn": torch.randn(TOKENS, GROUPS * K // 512, 512).bfloat16(),
        "positions": torch.arange(TOKENS) % 64,
        "cos_sin": torch.cat([angle.cos(), angle.sin()], 1).contiguous(),
        "wo_a": w_a,
        "wo_a_scale": torch.full((GROUPS, RANK // 32, 1), 115, dtype=torch.uint8),
        "wo_b": w_b,
        "wo_b_scale": torch.full((HIDDEN // 32, 1), 115, dtype=torch.uint8),
    }
    return {name: tensor.to(DEVICE) for name, tensor in host.items()}


def package_calls(t: dict[str, torch.Tensor]) -> dict[str, Callable[[], object]]:
    """Raw ops and front ends of every op, by name."""
    span = vllm_megaattn.ops.default_scale_span(t["attn"].device, t["wo_a"], t["wo_a_scale"])
    rope = (t["attn"], t["positions"], t["cos_sin"])
    x, x_scale = vllm_megaattn.inv_rope_mxfp8_quantize(*rope, groups=GROUPS, scale_span=span)
    a, b = (x, x_scale, t["wo_a"], t["wo_a_scale"]), (t["wo_b"], t["wo_b_scale"])
    bf16 = vllm_megaattn.einsum_fp8_bf16(*a, x_span=span)
    z, z_scale = vllm_megaattn.einsum_fp8_sfd128x4(*a, x_span=span, scale_span=span)
    y = vllm_megaattn.mxfp8_gemm_wo_b(z, z_scale, *b, z_span=span)
    ops = torch.ops.vllm_megaattn
    einsum, einsum_bf16 = ops.einsum_fp8_sfd128x4.default, ops.einsum_fp8_bf16.default
    quantize, gemm = ops.mxfp8_quantize_sfd128x4.default, ops.mxfp8_gemm_wo_b.default
    inv_rope = ops.inv_rope_mxfp8_quantize.default
    m = vllm_megaattn
    return {
        "raw op: inv_rope_mxfp8_quantize": lambda: inv_rope(*rope, x, x_scale, 0, 0, span),
        "raw op: einsum_fp8_sfd128x4": lambda: einsum(*a, z, z_scale, span, span),
        "raw op: einsum_fp8_bf16": lambda: einsum_bf16(*a, bf16, span),
        "raw op: mxfp8_quantize_sfd128x4": lambda: quantize(bf16, z, z_scale, span),
        "raw op: mxfp8_gemm_wo_b": lambda: gemm(z, z_scale, *b, y, span),
        "given out: inv_rope_mxfp8_quantize": lambda: m.inv_rope_mxfp8_quantize(
            *rope, groups=GROUPS, scale_span=span, out=(x, x_scale)
        ),
        "given out: einsum_fp8_sfd128x4": lambda: m.einsum_fp8_sfd128x4(
            *a, x_span=span, scale_span=span, out=(z, z_scale)
        ),
        "given out: mxfp8_quantize_sfd128x4": lambda: m.mxfp8_quantize_sfd128x4(
            bf16, scale_span=span, out=(z, z_scale)
        ),
        "given out: mxfp8_gemm_wo_b": lambda: m.mxfp8_gemm_wo_b(z, z_scale, *b, z_span=span, out=y),
        "allocating: einsum_fp8_sfd128x4": lambda: m.einsum_fp8_sfd128x4(*a, x_span=span, scale_span=span),
        "allocating: mxfp8_gemm_wo_b": lambda: m.mxfp8_gemm_wo_b(z, z_scale, *b, z_span=span),
        "allocating: o_proj": lambda: m.o_proj(*a, *b, x_span=span),
        "allocating: o_proj_from_attn": lambda: m.o_proj_from_attn(*rope, *a[2:], *b, groups=GROUPS),
    }


# ---- measuring -----------------------------------------------------------------------------------------------------


def measure(call: Callable[[], object], calls: int, repeats: int) -> dict[str, float]:
    """Microseconds a call, wall and processor time of this thread, and the device's own time a call.

    A batch is enqueued behind nothing and then waited for. Where the device is the slower one, the queue fills up and
    the host waits inside a launch: batches are kept below the queue's thousand launches.
    """
    for _ in range(20):
        call()
    synchronize()
    walls, cpus, waits = [], [], []
    batch = min(calls, 200)
    for _ in range(repeats):
        wall = cpu = wait = 0.0
        for _ in range(max(1, calls // batch)):
            begin, begin_cpu = time.perf_counter(), time.thread_time()
            for _ in range(batch):
                call()
            end, end_cpu = time.perf_counter(), time.thread_time()
            synchronize()
            wall, cpu, wait = wall + end - begin, cpu + end_cpu - begin_cpu, wait + time.perf_counter() - begin
        total = batch * max(1, calls // batch)
        walls.append(wall / total * 1e6)
        cpus.append(cpu / total * 1e6)
        waits.append(wait / total * 1e6)
    middle = statistics.median(walls)
    return {
        "wall_us": round(middle, 3),
        "cpu_us": round(statistics.median(cpus), 3),
        "until_done_us": round(statistics.median(waits), 3),
        "spread_percent": round(100 * (max(walls) - min(walls)) / middle, 1),
    }


FIRST = """
import json, sys, time
begin = time.perf_counter()
import torch
torch_ms = time.perf_counter() - begin
cuda = {device!r} == "cuda"
sync = torch.cuda.synchronize if cuda else (lambda: None)
begin = time.perf_counter()
torch.zeros(1, device={device!r}); sync()
context_ms = time.perf_counter() - begin
begin = time.perf_counter()
import vllm_megaattn
from vllm_megaattn import _C
import_ms = time.perf_counter() - begin
sys.path.insert(0, {folder!r})
import bench_host
t = bench_host.operands(); sync()
prepare_ms = 0.0
if cuda and {prepare}:
    begin = time.perf_counter()
    _C.cuda_prepare(torch.cuda.current_device())
    prepare_ms = time.perf_counter() - begin
def call():
    return vllm_megaattn.o_proj_from_attn(
        t["attn"], t["positions"], t["cos_sin"], t["wo_a"], t["wo_a_scale"], t["wo_b"], t["wo_b_scale"],
        groups=bench_host.GROUPS)
times = []
for _ in range(3):
    begin = time.perf_counter(); call(); returned = time.perf_counter(); sync()
    times.append((returned - begin, time.perf_counter() - begin))
print(json.dumps(dict(
    import_torch_ms=torch_ms * 1e3, context_ms=context_ms * 1e3, import_package_ms=import_ms * 1e3,
    prepare_ms=prepare_ms * 1e3, first_call_ms=times[0][0] * 1e3, first_result_ms=times[0][1] * 1e3,
    second_call_ms=times[1][0] * 1e3, third_result_ms=times[2][1] * 1e3)))
"""


def first_calls(processes: int) -> dict[str, list[dict[str, float]]]:
    """Milliseconds of the steps up to the first result, in fresh processes: with the self-check of a device's first use
    and without it, and with the kernels loaded beforehand. torch's own context is up in all of them."""
    modes = {
        "first call loads the kernels": (False, "0"),
        "kernels loaded beforehand": (True, "0"),
        "first call with the self-check": (False, "1"),
    }
    found: dict[str, list[dict[str, float]]] = {}
    for name, (prepare, self_check) in modes.items():
        code = FIRST.format(device=DEVICE, folder=str(Path(__file__).resolve().parent), prepare=prepare)
        for _ in range(processes if self_check == "0" else 1):
            result = subprocess.run(
                [sys.executable, "-c", code],
                capture_output=True,
                text=True,
                timeout=120,
                env={**os.environ, "VLLM_MEGAATTN_SELF_CHECK": self_check},
            )
            if result.returncode != 0:
                raise RuntimeError(f"{name}: {result.stderr}")
            steps = json.loads(result.stdout.splitlines()[-1])
            found.setdefault(name, []).append({key: round(value, 3) for key, value in steps.items()})
    return found


# ---- the program ---------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--processes", type=int, default=2, help="fresh processes per kind of first call (default: 2)"
    )
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--commit", help="commit of this build, where there is no git")
    args = parser.parse_args()
    if GAP:
        print(f"no GPU with kernels of this package ({GAP}): measuring the CPU backend", file=sys.stderr)

    first = first_calls(args.processes)
    calls: dict[str, Callable[[], object]] = {}
    launch = driver_launch()
    if launch is not None:
        calls["driver: cuLaunchKernel of an empty kernel (ctypes)"] = launch
    calls |= torch_launches() | package_calls(operands())
    rows = {name: measure(call, args.calls, args.repeats) for name, call in calls.items()}
    bar = min(row["wall_us"] for name, row in rows.items() if name.startswith("torch: "))
    for row in rows.values():
        row["more_us"] = round(row["wall_us"] - bar, 3)

    header = ("call", "wall us", "cpu us", "until done us", "more than torch's smallest launch", "spread %")
    table = [
        (name, r["wall_us"], r["cpu_us"], r["until_done_us"], r["more_us"], r["spread_percent"])
        for name, r in rows.items()
    ]
    print(format_table(header, table))
    steps = list(next(iter(first.values()))[0])
    table = [(name, *(statistics.median(p[s] for p in found) for s in steps)) for name, found in first.items()]
    print(format_table(("fresh process", *steps), table))
    if args.out:
        environment = (
            report.environment(args.commit) if DEVICE == "cuda" else {"commit": report.commit_of(args.commit)}
        )
        document = {
            "environment": environment,
            "shape": {"tokens": TOKENS, "groups": GROUPS, "rank": RANK, "k": K, "hidden": HIDDEN},
            "calls": rows,
            "first_calls": first,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
