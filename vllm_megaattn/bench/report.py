"""Table, JSON and plots of a benchmark run."""

from __future__ import annotations

import datetime
import itertools
import json
import os
import platform
import re
import subprocess
from pathlib import Path

import torch

from vllm_megaattn._version import __version__
from vllm_megaattn.bench import marks

ENV_COMMIT = "VLLM_MEGAATTN_COMMIT"


def commit_of(given: str | None) -> str:
    """The commit a figure belongs to: the argument, VLLM_MEGAATTN_COMMIT, or what git says about this file's folder."""
    found = given or os.environ.get(ENV_COMMIT, "")
    if not found:
        try:
            found = subprocess.run(
                ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=Path(__file__).parent
            ).stdout.strip()
        except OSError:  # no git on this machine
            found = ""
    return found or "unknown"


def driver_version() -> str:
    """Version of the NVIDIA driver, e.g. "580.95.05"."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        try:
            command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            text = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout
        except (OSError, subprocess.TimeoutExpired):
            text = ""
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return found.group() if found else "unknown"


def environment(commit: str | None = None) -> dict[str, object]:
    """What a figure depends on: date, GPU, driver, versions, commit."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "date": datetime.date.today().isoformat(),
        "gpu": properties.name,
        "sms": properties.multi_processor_count,
        "l2_mb": properties.L2_cache_size >> 20,
        "driver": driver_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "vllm_megaattn": __version__,
        "commit": commit_of(commit),
    }


def environment_line(commit: str | None = None) -> str:
    """The same for the foot of a picture."""
    e = environment(commit)
    machine = f"{e['gpu']}, driver {e['driver']}, torch {e['torch']}"
    return f"{machine}, commit {e['commit']}, {e['date']}; cold weights, CUDA graph"


def select(rows: list[dict], **where: object) -> list[dict]:
    return [row for row in rows if all(row[key] == value for key, value in where.items())]


def ordered(values) -> list:
    return list(dict.fromkeys(values))


# ---- table ---------------------------------------------------------------------------------------------------------


def table(rows: list[dict], key: str = "us") -> str:
    """One block per (model, op, tp): a column per token count, a row per contender; below them our best against the best
    peer and against each mark, and the fused against the unfused form. key: "us" or "sustained_us"."""
    blocks = []
    for model, op, tp in ordered((r["model"], r["op"], r["tp"]) for r in rows):
        part = select(rows, model=model, op=op, tp=tp)
        tokens = sorted({r["tokens"] for r in part})
        names = ordered(r["name"] for r in part)
        ratios = {"best ours / best peer": [ratio(part, t, key) for t in tokens]}
        for mark in (n for n in names if n in marks.MARKS):
            ratios[f"best ours / {mark}"] = [ratio(part, t, key, mark) for t in tokens]
        for name in (n for n in names if n.replace("fused", "unfused") in names and "unfused" not in n):
            other = name.replace("fused", "unfused")
            if other != name:
                ratios["fused / unfused"] = [quotient(part, t, key, name, other) for t in tokens]
        if any(" per-32" in n and n.startswith("ours") for n in names):
            ratios["ours per-32 / best per-32 peer"] = [per_32_ratio(part, t, key) for t in tokens]
        speeds = {"TFLOP/s of our best": [speed(part, t, key) for t in tokens]}
        if any(cell != "-" for cell in speeds["TFLOP/s of our best"]):
            speeds["TFLOP/s of ours per-32"] = [speed(part, t, key, "per-32") for t in tokens]
            ratios |= {label: cells for label, cells in speeds.items() if any(cell != "-" for cell in cells)}
        width = max(len(n) for n in [*names, *ratios]) + 2
        lines = [f"{model} {op} TP{tp}, us per call", "T".ljust(width) + "".join(f"{t:>10}" for t in tokens)]
        for name in names:
            hits = [select(part, name=name, tokens=t) for t in tokens]
            lines.append(
                name.ljust(width) + "".join(f"{hit[0][key]:>10.1f}" if hit else f"{'-':>10}" for hit in hits)
            )
        lines += [label.ljust(width) + "".join(f"{cell:>10}" for cell in cells) for label, cells in ratios.items()]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def ratio(part: list[dict], tokens: int, key: str = "us", mark: str = "") -> str:
    """Time of our best over that of the best peer, or over a mark; "-" where there is none."""
    here = select(part, tokens=tokens)
    ours = [r[key] for r in here if r["ours"]]
    others = [r[key] for r in here if (r["name"] == mark if mark else not r["ours"] and not r["mark"])]
    return f"{min(ours) / min(others):.2f}" if ours and others else "-"


def quotient(part: list[dict], tokens: int, key: str, name: str, other: str) -> str:
    mine, theirs = (select(part, tokens=tokens, name=n) for n in (name, other))
    return f"{mine[0][key] / theirs[0][key]:.3f}" if mine and theirs else "-"


def per_32_ratio(part: list[dict], tokens: int, key: str) -> str:
    """Our best with scales per 32 columns over the best peer that takes such scales on both sides."""
    here = select(part, tokens=tokens)
    ours = [r[key] for r in here if r["ours"] and "per-32" in r["name"]]
    others = [r[key] for r in here if not r["ours"] and ("1x32" in r["name"] or "per-32" in r["name"])]
    return f"{min(ours) / min(others):.2f}" if ours and others else "-"


def speed(part: list[dict], tokens: int, key: str, which: str = "") -> str:
    """TFLOP/s of the quickest of ours whose name holds `which`; "-" for operations that do not multiply."""
    ours = [r for r in select(part, tokens=tokens) if r["ours"] and which in r["name"]]
    best = min(ours, key=lambda r: r[key], default=None)
    return f"{best['tflops'] * best['us'] / best[key]:.0f}" if best and best["tflops"] else "-"


def row(
    model: str,
    op: str,
    tp: int,
    tokens: int,
    name: str,
    us: float,
    spread: float,
    *,
    ours: bool,
    flops: int,
    error: float,
) -> dict:
    """One figure as `table`, `plot` and `write_json` want it. us: per call; spread: percent; flops: of one call."""
    return {
        "model": model, "op": op, "tp": tp, "tokens": tokens, "name": name, "ours": ours, "mark": name in marks.MARKS,
        "us": round(us, 3), "spread": round(spread, 2), "error": error if error == error else None,
        "tflops": round(flops / us / 1e6, 1),
    }  # fmt: skip


def write_json(
    path: Path, rows: list[dict], notes: list[str], settings: dict[str, object], commit: str | None = None
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"environment": environment(commit), "settings": settings, "notes": notes, "rows": rows}
    path.write_text(json.dumps(document, indent=1) + "\n")


# ---- plots ---------------------------------------------------------------------------------------------------------

_MARK_STYLES = {marks.READ: ":", marks.COPY: ":", marks.MATRIX: "--", marks.COPY_MATRIX: "--"}
_OURS = ("#c1121f", "#f4845f", "#7f1d1d", "#fb923c")
_PEERS = (
    "#1d4ed8",
    "#0e7490",
    "#15803d",
    "#7c3aed",
    "#0891b2",
    "#65a30d",
    "#a21caf",
    "#475569",
    "#92400e",
    "#64748b",
)


def plot(folder: Path, rows: list[dict], environment_line: str = "") -> list[Path]:
    """Per (model, op, tp): time against T with floors and ceilings drawn, and each peer's time over our best. Needs
    matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    written = []
    for model, op, tp in ordered((r["model"], r["op"], r["tp"]) for r in rows):
        part = select(rows, model=model, op=op, tp=tp)
        tokens = sorted({r["tokens"] for r in part})
        if len(tokens) < 2:
            continue
        figure, (left, right) = plt.subplots(1, 2, figsize=(14, 6))
        _plot_times(left, part)
        _plot_ratios(right, part, tokens)
        left.set_title(f"{model} {op}, TP{tp}: time per call")
        right.set_title("time of the others over our best; above 1 we are faster")
        for axis in (left, right):
            _token_axis(axis, tokens)
            axis.grid(True, which="major", alpha=0.3)
            axis.grid(True, which="minor", alpha=0.1)
            axis.legend(fontsize=8, framealpha=0.85)
        if environment_line:
            figure.text(0.01, 0.005, environment_line, fontsize=7, color="#555555")
        figure.tight_layout(rect=(0, 0.02, 1, 1))
        path = folder / f"{model}_{op}_tp{tp}.png"
        figure.savefig(path, dpi=130)
        plt.close(figure)
        written.append(path)
    return written


def _colours(part: list[dict]) -> dict[str, str]:
    """A colour a contender, the same in both pictures."""
    ours, peers = itertools.cycle(_OURS), itertools.cycle(_PEERS)
    chosen = {}
    for row in part:
        if row["name"] not in chosen:
            chosen[row["name"]] = "black" if row["mark"] else next(ours if row["ours"] else peers)
    return chosen


def _plot_times(axis, part: list[dict]) -> None:
    colours = _colours(part)
    for name, colour in colours.items():
        line = sorted((r["tokens"], r["us"]) for r in select(part, name=name))
        row = select(part, name=name)[0]
        style = {"linewidth": 1.3, "marker": "o", "markersize": 3}
        if row["ours"]:
            style = {"linewidth": 2.6, "marker": "o", "markersize": 4, "zorder": 3}
        if row["mark"]:
            style = {"linewidth": 1.4, "linestyle": _MARK_STYLES[name]}
        axis.plot(*zip(*line, strict=True), label=name, color=colour, **style)
    axis.set_yscale("log")
    axis.set_ylabel("us")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _plot_ratios(axis, part: list[dict], tokens: list[int]) -> None:
    best = {t: min((r["us"] for r in part if r["ours"] and r["tokens"] == t), default=None) for t in tokens}
    largest = 1.0
    for name, colour in _colours(part).items():
        row = select(part, name=name)[0]
        if row["ours"] and "unfused" not in name:
            continue
        line = sorted(
            (r["tokens"], r["us"] / best[r["tokens"]]) for r in select(part, name=name) if best[r["tokens"]]
        )
        if not line:
            continue
        style = {"linestyle": _MARK_STYLES[name], "marker": None} if row["mark"] else {"marker": "o", "markersize": 3}
        axis.plot(*zip(*line, strict=True), label=name, color=colour, linewidth=1.3, **style)
        largest = max(largest, *(value for _, value in line))
    axis.axhline(1.0, color="#c1121f", linewidth=2.2, label="our best")
    if largest > 6:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:g}"[0] in "235" else "")
    else:
        axis.set_ylim(bottom=0)
    axis.set_ylabel("times our best")


def _token_axis(axis, tokens: list[int]) -> None:
    axis.set_xscale("log", base=2)
    shown = tokens if len(tokens) <= 12 else [t for t in tokens if t & (t - 1) == 0]
    axis.set_xticks(shown, [str(t) for t in shown], rotation=45 if len(shown) > 9 else 0, fontsize=8)
    axis.minorticks_off()
    axis.set_xlabel("tokens")
