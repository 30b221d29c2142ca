"""Versions, CPU features, devices, and which path the output projection takes on each of them, and why."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import sys

import torch

from vllm_megaattn import _C, ops, selector, self_check
from vllm_megaattn._version import __version__
from vllm_megaattn.cli.common import cuda_gap, format_table, yes

ENV_CPU = "VLLM_MEGAATTN_CPU"  # read by csrc/cpu/cpu_features.c
ENVIRONMENT = (selector.ENV_PATH, selector.ENV_WO_B, ENV_CPU, self_check.ENV)

HELP = "versions, devices, usable backends and the selector's table"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rank", type=int, default=1024, help="rows of wo_a per group that the table is shown for")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    if args.rank < 1:
        args.parser.error(f"--rank must be positive, got {args.rank}")
    devices = _devices()
    keys = dict.fromkeys(device["key"] for device in devices)
    result = {
        "versions": _versions(),
        "build": _C.build_info(),
        "cpu": {**_C.cpu_info(), "model": _cpu_model(), "threads": torch.get_num_threads()},
        "devices": devices,
        "backends": _backends(keys),
        "environment": {name: os.environ.get(name) for name in ENVIRONMENT},
        "wo_b": {key: selector.explain_wo_b(key) for key in keys},
        "scale_span": {key: ops.PREFERRED_SPAN.get(key, 32) for key in keys},
        "unproven": {key: text for key in keys if (text := selector.unproven(key))},
        "selector": {key: selector.explain(key, ranks=(args.rank,)) for key in keys},
    }
    print(json.dumps(result, indent=1) if args.json else _report(result))
    return 0


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {
        "vllm_megaattn": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "torch CUDA": torch.version.cuda,
    }
    for name in ("safetensors", "numpy", "matplotlib", "vllm", "sglang"):
        versions[name] = None
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _cpu_model() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _devices() -> list[dict[str, object]]:
    """Every device torch sees: name, selector key, whether a kernel of this package runs there, and if not, why."""
    no_kernels = _C.cpu_info()["variant"] == "none"  # VLLM_MEGAATTN_CPU asks for what is not there
    cpu_gap = f"{ENV_CPU}={os.environ.get(ENV_CPU)!r} names no kernels of this CPU" if no_kernels else ""
    devices: list[dict[str, object]] = [
        {"device": "cpu", "name": _cpu_model(), "key": "cpu", "usable": not cpu_gap, "reason": cpu_gap}
    ]
    if not torch.cuda.is_available():
        return devices
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        key = selector.device_key(device)
        gap = selector.backend_gap(key)
        if not gap:
            usable, status = _C.cuda_status(index)
            gap = "" if usable else status
        if selector.dequantises(key):
            gap = f"{gap}; {selector.DEQUANTISES}"
        name = torch.cuda.get_device_name(index)
        devices.append({"device": f"cuda:{index}", "name": name, "key": key, "usable": not gap, "reason": gap})
    return devices


def _backends(present: dict[str, None]) -> list[dict[str, object]]:
    """Every row of the selector's table: usable here, and if not, what is missing."""
    rows = []
    for row in selector.TABLE:
        if row.devices == ("meta",):
            continue
        gap = selector.backend_gap(row.devices[0])
        if not gap and not any(key in present for key in row.devices):
            gap = cuda_gap() or "no such device here"
        if row.dequantises:
            gap = f"{gap}; {selector.DEQUANTISES}"
        rows.append({"devices": list(row.devices), "usable": not gap, "reason": gap or row.note})
    return rows


def _report(result: dict[str, object]) -> str:
    build, cpu = result["build"], result["cpu"]
    versions = [(name, value or "-") for name, value in result["versions"].items()]
    forced = result["environment"][selector.ENV_PATH]
    lines = [
        "Versions",
        format_table(("package", "version"), versions),
        "",
        "Build of the C core",
        format_table(
            ("what", "value"),
            [
                ("compiler", build["compiler"]),
                ("nvcc", build["cuda"] or "none: a CPU-only build"),
                ("GPU kernels", ", ".join(build["images"]) or "none"),
                ("torch ABI in use", build["torch_abi"]),
            ],
        ),
        "",
        "CPU",
        format_table(
            ("what", "value"),
            [
                ("model", cpu["model"]),
                ("kernels in use", cpu["variant"]),
                ("features found", cpu["features"]),
                ("torch threads", cpu["threads"]),
            ],
        ),
        "",
        "Environment",
        format_table(
            ("variable", "value"), [(name, value or "not set") for name, value in result["environment"].items()]
        ),
        "",
        "Devices",
        format_table(
            ("device", "name", "key", "usable", "reason"),
            [(d["device"], d["name"], d["key"], yes(d["usable"]), d["reason"]) for d in result["devices"]],
        ),
        "",
        "Backends",
        format_table(
            ("for", "usable", "reason"),
            [(", ".join(b["devices"]), yes(b["usable"]), b["reason"]) for b in result["backends"]],
        ),
    ]
    for key, text in result["unproven"].items():
        lines += [
            "",
            f"NOT RUN ON HARDWARE: the kernels for {key} {text}.",
            "Please run `python -m vllm_megaattn check` first; its output is the report we need (docs/blackwell.md).",
        ]
    for key, rows in result["selector"].items():
        lines += [
            "",
            f"Path of o_proj on {key}",
            format_table(
                ("rank", "reader of z", "path=", "takes", "reason"),
                [
                    (row["rank"], row["consumer"], row["requested"], row["path"] or "refused", row["reason"])
                    for row in rows
                ],
            ),
        ]
        route = result["wo_b"][key]
        lines.append(f"  wo_b: {route['route'] or 'refused'} ({route['reason']})")
        span = result["scale_span"][key]
        wide = " with prepared weights, else for 32" if span > 32 else ""
        lines.append(f"  scales of x and z between the kernels: one for {span} columns{wide} (scale_span= chooses)")
    if forced in selector.PATHS:
        lines += ["", f"{selector.ENV_PATH}={forced} replaces path=auto in this environment."]
    elif forced:
        text = f"{selector.ENV_PATH}={forced!r} is an error: it must be one of {', '.join(selector.PATHS)}"
        lines += ["", f"{text}. Calls that leave the path open are refused."]
        print(f"error: {text}", file=sys.stderr)
    return "\n".join(lines)
