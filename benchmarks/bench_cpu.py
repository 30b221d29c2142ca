"""The whole output projection on the CPU against torch's BF16 `bmm` + `mm`, on the same threads.

    python benchmarks/bench_cpu.py            # the shapes of DeepSeek-V4.1-Flash, TP1: about three minutes on 2 cores
    python benchmarks/bench_cpu.py --quick    # fewer tokens and rounds: about twenty seconds

Per token count T it times, in interleaved rounds (one call of each contender a round, in rotating order, so that a
disturbance of the machine meets all of them alike):

    torch     BF16 x [T, G, 4096] -> torch.bmm with wo_a [G, 1024, 4096] -> BF16 z [T, G*1024] -> torch.mm with wo_b
    fused     vllm_megaattn.o_proj(path="fused"): MXFP8 x, wo_a, wo_b with 32x32 scale blocks; z in MXFP8
    unfused   the same with path="unfused": z in BF16, then quantised; same bits

The times are wall-clock medians; p10 and p90 show the spread. `ratio` is torch / fused, `asked` what it should reach.
Weights are the same numbers for all contenders: the BF16 ones are the dequantised MXFP8 ones, which is exact.
`rel. diff` is the relative difference of fused and torch: what quantising z costs, besides roundings to BF16.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch

import vllm_megaattn
from vllm_megaattn import _C

E4M3 = torch.float8_e4m3fn
GROUPS, K, RANK, HIDDEN = 8, 4096, 1024, 5120  # TP1; a rank of TP n holds GROUPS / n groups
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
QUICK_TOKENS = (1, 8, 32, 128)
REQUIRED = {1: 1.5, 2: 1.5, 4: 1.5, 8: 1.5, 32: 1.0, 64: 1.0, 128: 1.0, 256: 1.0, 512: 1.0}


def make_weight(rows: int, cols: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """e4m3 [rows, cols], its scale bytes [rows/32, cols/32], and the BF16 numbers that both stand for."""
    data = (torch.randn(rows, cols, generator=generator) * 128).clamp_(-448, 448).to(E4M3)
    scale = torch.randint(109, 113, (rows // 32, cols // 32), generator=generator, dtype=torch.uint8)
    factor = torch.exp2(scale.float() - 127).repeat_interleave(32, 0).repeat_interleave(32, 1)
    return data, scale, (data.float() * factor).bfloat16()


def make_activation(tokens: int, groups: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """e4m3 x [T, G, K], its packed scale words [T, G, K/128], and the BF16 numbers that both stand for."""
    data = (torch.randn(tokens, groups, K, generator=generator) * 128).clamp_(-448, 448).to(E4M3)
    scale = torch.randint(117, 121, (tokens, groups, K // 32), generator=generator, dtype=torch.uint8)
    exact = data.float() * torch.exp2(scale.float() - 127).repeat_interleave(32, 2)
    return data, scale.view(torch.int32), exact.bfloat16()


def interleave(contenders: dict[str, Callable[[], torch.Tensor]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of every call: `rounds` rounds, each contender once a round, the first one changing."""
    names = list(contenders)
    for name in names:
        contenders[name]()
    times: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            start = time.perf_counter()
            contenders[name]()
            times[name].append((time.perf_counter() - start) * 1e3)
    return times


def summary(times: list[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile and minimum in milliseconds."""
    ordered = sorted(times)
    return {
        "median_ms": round(statistics.median(ordered), 3),
        "p10_ms": round(ordered[len(ordered) // 10], 3),
        "p90_ms": round(ordered[-1 - len(ordered) // 10], 3),
        "min_ms": round(ordered[0], 3),
        "rounds": len(ordered),
    }


def cpu_name() -> str:
    """The processor's name as the kernel tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def git_commit() -> str | None:
    """Commit of the checkout this file lies in, with "+" behind it if tracked files differ; None outside of one."""
    root = Path(__file__).resolve().parent
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(["git", "diff", "--quiet", "HEAD"], cwd=root, capture_output=True).returncode != 0
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+" if changed else "")


def measure(groups: int, tokens: tuple[int, ...], seconds: float) -> list[dict]:
    """One row per token count; each gets about `seconds`, but 5 to 60 rounds."""
    generator = torch.Generator().manual_seed(0)
    wo_a, wo_a_scale, wo_a_bf16 = make_weight(groups * RANK, K, generator)
    wo_b, wo_b_scale, wo_b_bf16 = make_weight(HIDDEN, groups * RANK, generator)
    wo_a = wo_a.view(groups, RANK, K)
    wo_a_scale = wo_a_scale.view(groups, RANK // 32, K // 32)
    wo_a_bf16_t = wo_a_bf16.view(groups, RANK, K).transpose(1, 2)
    wo_b_bf16_t = wo_b_bf16.t()

    print(f"{'T':>4}  {'torch ms':>9} {'p10':>8} {'p90':>8}  {'fused ms':>9} {'p10':>8} {'p90':>8}  ", end="")
    print(f"{'unfused ms':>10}  {'ratio':>6}  {'asked':>5}  {'rel. diff':>9}", flush=True)
    rows = []
    for num_tokens in tokens:
        x, x_scale, x_bf16 = make_activation(num_tokens, groups, generator)

        def run_torch(x_bf16: torch.Tensor = x_bf16, num_tokens: int = num_tokens) -> torch.Tensor:
            z = torch.bmm(x_bf16.transpose(0, 1), wo_a_bf16_t)
            return torch.mm(z.transpose(0, 1).reshape(num_tokens, groups * RANK), wo_b_bf16_t)

        def run_ours(path: str, x: torch.Tensor = x, x_scale: torch.Tensor = x_scale) -> torch.Tensor:
            return vllm_megaattn.o_proj(x, x_scale, wo_a, wo_a_scale, wo_b, wo_b_scale, path=path)

        contenders = {
            "torch": run_torch,
            "fused": lambda: run_ours("fused"),
            "unfused": lambda: run_ours("unfused"),
        }
        fused, expected = contenders["fused"](), contenders["torch"]()
        if not torch.equal(fused, contenders["unfused"]()):
            raise SystemExit(f"T = {num_tokens}: the fused and the unfused path differ")
        difference = float((fused.double() - expected.double()).norm() / expected.double().norm())
        start = time.perf_counter()
        for run in contenders.values():
            run()
        rounds = max(5, min(60, int(seconds / (time.perf_counter() - start))))

        result = {name: summary(times) for name, times in interleave(contenders, rounds).items()}
        ratio = result["torch"]["median_ms"] / result["fused"]["median_ms"]
        asked = REQUIRED.get(num_tokens)
        rows.append({"tokens": num_tokens, **result, "ratio": round(ratio, 2), "relative_difference": difference})
        columns = [f"{num_tokens:4d} "]
        for name in ("torch", "fused"):
            columns.append("{median_ms:9.2f} {p10_ms:8.2f} {p90_ms:8.2f} ".format(**result[name]))
        columns.append(f"{result['unfused']['median_ms']:10.2f}  {ratio:6.2f}  {asked or '':>5}  {difference:9.1e}")
        print(" ".join(columns), flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"T = {QUICK_TOKENS} and short rounds")
    parser.add_argument("--tokens", type=int, nargs="+", metavar="T", help="token counts instead of the usual ones")
    parser.add_argument("--tp", type=int, default=1, choices=(1, 2, 4, 8), help="tensor-parallel size (default 1)")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own choice)")
    parser.add_argument("--seconds", type=float, help="time per token count (default 15, quick 4)")
    parser.add_argument("--json", type=Path, help="output (default benchmarks/results/cpu.json; quick: none)")
    args = parser.parse_args()
    if args.tokens and min(args.tokens) < 1:
        parser.error(f"--tokens must be positive, got {min(args.tokens)}")
    if args.threads:
        torch.set_num_threads(args.threads)
    groups = GROUPS // args.tp
    tokens = tuple(args.tokens) if args.tokens else QUICK_TOKENS if args.quick else TOKENS
    seconds = args.seconds if args.seconds else 4.0 if args.quick else 15.0

    facts = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": cpu_name(),
        "variant": _C.cpu_info()["variant"],
        "features": _C.cpu_info()["features"],
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "vllm_megaattn": vllm_megaattn.__version__,
        "commit": git_commit(),
        "shapes": {"groups": groups, "k": K, "rank": RANK, "hidden": HIDDEN, "scale_blocks": "32x32"},
    }
    print(f"{facts['cpu']}, {facts['threads']} threads, variant {facts['variant']}, torch {facts['torch']}")
    print(f"wo_a [{groups}, {RANK}, {K}], wo_b [{HIDDEN}, {groups * RANK}], 32x32 scale blocks\n")
    with torch.inference_mode():
        rows = measure(groups, tokens, seconds)

    default = None if args.quick else Path(__file__).resolve().parent / "results" / "cpu.json"
    path = args.json or default
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**facts, "rows": rows}, indent=2) + "\n")
        print(f"\nwritten: {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
