"""`check`: compares every kernel of a GPU with the CPU backend, over shapes, token counts, scale forms and routes.

Prints a verdict that can be pasted into an issue. Exit status 0: all equal, 1: something differs, 2: no usable GPU.

Kernels that have not run on a device's hardware yet (`info` says so) are run unit by unit in processes of their own, so
that one that hangs or faults is named and the others are still checked; --isolate asks for that anywhere.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

import torch

from vllm_megaattn import _C, selector, self_check
from vllm_megaattn.cli import common
from vllm_megaattn.self_check_cases import Case, Finding

HELP = "compare this GPU's kernels with the CPU backend"
UNIT_SECONDS = 300  # after which an isolated unit counts as hung
CASES_AT_ONCE = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", type=int, help="CUDA device index; the current one by default")
    parser.add_argument("--quick", action="store_true", help="only what the first use of a device checks")
    parser.add_argument("--isolate", action="store_true", help="a process for each unit")
    parser.add_argument("--unit", help="only one unit, findings as JSON lines; what --isolate starts")


def run(args: argparse.Namespace) -> int:
    gap = common.cuda_gap()
    if gap:
        print(f"check: {gap}; the CPU backend is what others are compared with")
        return 2
    index = torch.cuda.current_device() if args.device is None else args.device
    device = torch.device("cuda", index)
    key = selector.device_key(device)
    cases = self_check.cases_for(key, quick=args.quick)
    if args.unit is not None:
        return _run_unit([case for case in cases if case.unit == args.unit], device)
    begin = time.perf_counter()
    unproven = selector.unproven(key)
    findings: list[Finding] = []
    units = list(dict.fromkeys(case.unit for case in cases))
    for unit in units:
        mine = [case for case in cases if case.unit == unit]
        with common.step(f"{unit}: {len(mine)} problems"):
            isolated = args.isolate or unproven
            findings += _isolated(unit, mine, index, args.quick) if isolated else _in_pieces(mine, device)
    seconds = time.perf_counter() - begin
    print(f"{torch.cuda.get_device_name(device)} ({key}), torch {torch.__version__} CUDA {torch.version.cuda}, "
          f"vllm_megaattn {_C.build_info()['version']}, {len(cases)} problems, {seconds:.1f} s")  # fmt: skip
    print(f"wo_b: {selector.explain_wo_b(key)}")
    return _verdict(findings, units, device, unproven)


def _verdict(findings: list[Finding], units: list[str], device: torch.device, unproven: str) -> int:
    rows = []
    for unit in units:
        for family in self_check.FAMILIES:
            mine = [f for f in findings if (f.case.unit, f.family) == (unit, family)]
            bad = sum(not f.ok for f in mine)
            if mine:
                rows.append((unit, family, len(mine), "ok" if not bad else f"{bad} FAILED"))
    print(common.format_table(("kernels", "op", "comparisons", "verdict"), rows))
    failed = [f for f in findings if not f.ok]
    for finding in failed[:20]:
        print(f"  {finding.family}: {finding.what} ({finding.case}): {finding.detail}")
    print(f"verdict: {'FAILED' if failed else 'ok'}, {len(failed)} of {len(findings)} comparisons differ")
    if failed:
        print(f"Please open an issue with this output and attach {self_check.write_report(findings, device)}")
    elif unproven:
        print("These kernels had never run on this hardware: please post this output in an issue, also a good one.")
    return 1 if failed else 0


def _in_pieces(cases: list[Case], device: torch.device) -> list[Finding]:
    """A few problems at a time: what they take on the device stays small."""
    pieces = [cases[i : i + CASES_AT_ONCE] for i in range(0, len(cases), CASES_AT_ONCE)]
    return [finding for piece in pieces for finding in self_check.run(piece, device)]


def _run_unit(cases: list[Case], device: torch.device) -> int:
    """One unit in this process: a line of JSON before each problem and one for each finding."""
    for number, case in enumerate(cases):
        print(json.dumps({"begins": number}), flush=True)
        for f in self_check.run((case,), device):
            print(json.dumps({"case": number, "family": f.family, "what": f.what, "ok": f.ok, "detail": f.detail}))
    print(json.dumps({"done": len(cases)}), flush=True)
    return 0


def _isolated(unit: str, cases: list[Case], index: int, quick: bool) -> list[Finding]:
    """One unit in a process of its own; a process that hangs or dies is a finding of the problem that it was at."""
    command = [sys.executable, "-m", "vllm_megaattn", "check", "--device", str(index), "--unit", unit]
    command += ["--quick"] if quick else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=UNIT_SECONDS)
        text, errors, ending = done.stdout, done.stderr, f"the process ended with status {done.returncode}"
    except subprocess.TimeoutExpired as hung:
        text, errors = ((part or b"").decode(errors="replace") for part in (hung.stdout, hung.stderr))
        ending = f"no end after {UNIT_SECONDS} s"
    return parse_unit(text, cases, f"{ending}: {' '.join(errors.split()[-40:])}")


def parse_unit(text: str, cases: list[Case], ending: str) -> list[Finding]:
    """The findings in what `check --unit` printed; `ending`: how it ended, for a problem that was not finished."""
    findings, at, finished = [], 0, False
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # cut off, or another library's
        if not isinstance(record, dict):
            continue
        if "begins" in record:
            at = record["begins"]
        elif "case" in record:
            case = cases[record["case"]]
            findings.append(Finding(record["family"], record["what"], case, record["ok"], record["detail"]))
        finished = finished or "done" in record
    if not finished:
        findings.append(Finding("o_proj", "runs to its end", cases[at], False, ending))
    return findings
