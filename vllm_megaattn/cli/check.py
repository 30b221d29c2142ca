"""`check`: compares every kernel of a GPU with the CPU backend, over shapes, token counts and scale spans.

Prints a verdict that can be pasted into an issue. Exit status 0: all equal, 1: something differs, 2: no usable GPU.
"""

from __future__ import annotations

import argparse
import time

import torch

from vllm_megaattn import self_check
from vllm_megaattn.cli import common

HELP = "compare this GPU's kernels with the CPU backend"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", type=int, help="CUDA device index; the current one by default")
    parser.add_argument("--quick", action="store_true", help="only what the first use of a device checks")


def run(args: argparse.Namespace) -> int:
    gap = common.cuda_gap()
    if gap:
        print(f"check: {gap}; the CPU backend is what others are compared with")
        return 2
    index = torch.cuda.current_device() if args.device is None else args.device
    device = torch.device("cuda", index)
    cases = self_check.QUICK if args.quick else self_check.FULL
    findings: list[self_check.Finding] = []
    begin = time.perf_counter()
    for case in cases:
        with common.step(str(case)):
            findings += self_check.run((case,), device)
    failed = [f for f in findings if not f.ok]
    families = list(self_check.FAMILIES)
    rows = []
    for family in families:
        mine = [f for f in findings if f.family == family]
        bad = sum(not f.ok for f in mine)
        rows.append((family, len(mine), "ok" if not bad else f"{bad} FAILED"))
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, {len(cases)} problems, "
          f"{time.perf_counter() - begin:.1f} s")  # fmt: skip
    print(common.format_table(("kernels", "comparisons", "verdict"), rows))
    for finding in failed[:20]:
        print(f"  {finding.family}: {finding.what} ({finding.case}): {finding.detail}")
    if failed:
        print(f"Please open an issue and attach {self_check.write_report(findings, device)}")
    return 1 if failed else 0
