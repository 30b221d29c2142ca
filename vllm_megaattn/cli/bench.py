"""`bench`: this package beside public kernels on one GPU, in one interleaved run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from vllm_megaattn.cli import common

HELP = "time this package beside public kernels on a GPU"
OPS = ("chain", "o_proj", "wo_a", "wo_b", "inv_rope", "quantize")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from vllm_megaattn.bench.workload import MODELS

    parser.add_argument("--ops", default="chain", help=f"comma list of {', '.join(OPS)} (default: chain)")
    parser.add_argument("--model", default="v4.1-flash", choices=sorted(MODELS))
    parser.add_argument("--tp", default="1,4,8", help="comma list of tensor-parallel sizes (default: 1,4,8)")
    parser.add_argument("--tokens", default="1,8,32,64,128,512,2048,8192", help='comma list, or "all" for 20 sizes')
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default: 5)")
    parser.add_argument("--no-peers", action="store_true", help="only this package, floors and ceilings")
    parser.add_argument(
        "--sustained", type=float, default=0.0, metavar="SECONDS", help="also time each without a pause"
    )
    parser.add_argument(
        "--deep-gemm", choices=("vllm", "sglang"), default="vllm",
        help="whose DeepGEMM to load (they share a module name): vLLM's, with scales per 128, or SGLang's, per 32",
    )  # fmt: skip
    parser.add_argument("--commit", help="commit of this build, where there is no git (or VLLM_MEGAATTN_COMMIT)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write bench.json and PNG plots there")


def run(args: argparse.Namespace) -> int:
    ops = args.ops.split(",")
    unknown = sorted(set(ops) - set(OPS))
    if unknown:
        print(f"bench: --ops must be of {', '.join(OPS)}, got {', '.join(unknown)}", file=sys.stderr)
        return 2
    gap = common.cuda_gap()
    if gap:
        print(
            f"bench: needs a GPU with kernels of this package: {gap}. benchmarks/bench_cpu.py times the CPU backend."
        )
        return 2
    from vllm_megaattn.bench import peers, report
    from vllm_megaattn.bench.workload import MODELS, TOKENS, Workload

    try:
        tokens = TOKENS if args.tokens == "all" else tuple(int(t) for t in args.tokens.split(","))
        shards = tuple(int(t) for t in args.tp.split(","))
    except ValueError as error:
        print(f"bench: --tokens and --tp take comma lists of numbers: {error}", file=sys.stderr)
        return 2
    groups = MODELS[args.model].groups
    if min(tokens) < 1 or any(tp < 1 or groups % tp for tp in shards):
        print(f"bench: --tokens must be positive and --tp divide {groups} groups", file=sys.stderr)
        return 2
    rows: list[dict] = []
    notes: list[str] = []

    def note(text: str) -> None:
        if text not in notes:
            notes.append(text)
            print(f"  {text}", file=sys.stderr, flush=True)

    peers.use_deep_gemm(args.deep_gemm)
    torch.manual_seed(0)
    for tp in shards:
        work = Workload(MODELS[args.model], tp, torch.device("cuda"))
        for count in tokens:
            work.set_tokens(count)
            for op in ops:
                with common.step(f"{op} TP{tp} T={count}"):
                    rows += _measure(work, args, op, note)
        del work
        torch.cuda.empty_cache()

    print(report.table(rows))
    if args.sustained:
        print("\nwithout a pause (power-limited clocks):\n" + report.table(rows, "sustained_us"))
    spread = [r for r in rows if r["spread"] > 3]
    print(f"\n{len(rows)} figures, medians of {args.rounds} interleaved rounds; spread over 3 %: {len(spread)}")
    if args.out:
        left_out = ("run", "command", "parser", "out")  # no matter of the figures
        settings = {key: str(value) for key, value in vars(args).items() if key not in left_out}
        report.write_json(args.out / "bench.json", rows, notes, settings, args.commit)
        for path in report.plot(args.out, rows, report.environment_line(args.commit)):
            print(path)
    return 0


def _measure(work, args: argparse.Namespace, op: str, note) -> list[dict]:
    """Rows of one (tp, tokens, op)."""
    from vllm_megaattn.bench import marks, ours, peers, report, timing

    mine = ours.contenders(work, op)
    others = [] if args.no_peers else peers.contenders(work, op, note)
    others += marks.contenders(work, op, note)
    min_calls = 64 if work.tokens <= 128 else 1
    # From here on a call's own activations push the weights out of L2; more copies only make graphs of seconds.
    copies = work.copies if work.tokens < 4096 else min(work.copies, 8)
    timers: dict[str, timing.GraphTimer] = {}
    for contender in [*mine, *others]:
        try:
            timers[contender.name] = timing.GraphTimer(contender, copies, min_calls)
        except Exception as error:  # a peer that cannot be captured must not end the run; ours may not fail
            if contender in mine:
                raise
            note(f"{op}: {contender.name} left out: not capturable: {str(error).splitlines()[0][:200]}")
            torch.cuda.synchronize()
    figures = timing.measure(timers, rounds=args.rounds)
    errors = {c.name: c.error for c in [*mine, *others]}
    rows = []
    for name, figure in figures.items():
        row = report.row(
            args.model, op, work.tp, work.tokens, name, figure.us, figure.spread,
            ours=any(c.name == name for c in mine), flops=work.flops(op), error=errors[name],
        )  # fmt: skip
        if args.sustained:
            row["sustained_us"] = round(timers[name].sustained(args.sustained), 3)
        rows.append(row)
    del timers
    torch.cuda.empty_cache()
    return rows
