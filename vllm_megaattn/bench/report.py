"""Table, JSON and plots of a benchmark run."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
from pathlib import Path

import torch

from vllm_megaattn._version import __version__

FLOOR = "read floor"


def environment() -> dict[str, object]:
    """What a figure depends on: date, GPU, driver, versions, commit."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    ).stdout.strip()
    properties = torch.cuda.get_device_properties(0)
    return {
        "date": datetime.date.today().isoformat(),
        "gpu": properties.name,
        "sms": properties.multi_processor_count,
        "l2_mb": properties.L2_cache_size >> 20,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "vllm_megaattn": __version__,
        "commit": commit or "unknown",
    }


def select(rows: list[dict], **where: object) -> list[dict]:
    return [row for row in rows if all(row[key] == value for key, value in where.items())]


def ordered(values) -> list:
    return list(dict.fromkeys(values))


def table(rows: list[dict]) -> str:
    """One block per (model, op, tp): a column per token count, a row per contender, best of ours against best peer."""
    blocks = []
    for model, op, tp in ordered((r["model"], r["op"], r["tp"]) for r in rows):
        part = select(rows, model=model, op=op, tp=tp)
        tokens = sorted({r["tokens"] for r in part})
        names = ordered(r["name"] for r in part)
        width = max(len(n) for n in [*names, "best ours / best peer"]) + 2
        lines = [f"{model} {op} TP{tp}, us per call", "T".ljust(width) + "".join(f"{t:>10}" for t in tokens)]
        for name in names:
            cells = []
            for t in tokens:
                hit = select(part, name=name, tokens=t)
                cells.append(f"{hit[0]['us']:>10.1f}" if hit else f"{'-':>10}")
            lines.append(name.ljust(width) + "".join(cells))
        lines.append("best ours / best peer".ljust(width) + "".join(f"{ratio(part, t):>10}" for t in tokens))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def ratio(part: list[dict], tokens: int) -> str:
    ours = [r["us"] for r in part if r["tokens"] == tokens and r["ours"]]
    peers = [r["us"] for r in part if r["tokens"] == tokens and not r["ours"] and r["name"] != FLOOR]
    return f"{min(ours) / min(peers):.2f}" if ours and peers else "-"


def write_json(path: Path, rows: list[dict], notes: list[str], settings: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"environment": environment(), "settings": settings, "notes": notes, "rows": rows}
    path.write_text(json.dumps(document, indent=1) + "\n")


def plot(folder: Path, rows: list[dict]) -> list[Path]:
    """Per (model, op, tp): time against T with the floor drawn, and our best against each peer. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    written = []
    for model, op, tp in ordered((r["model"], r["op"], r["tp"]) for r in rows):
        part = select(rows, model=model, op=op, tp=tp)
        tokens = sorted({r["tokens"] for r in part})
        if len(tokens) < 2:
            continue
        figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5))
        best_ours = {t: min((r["us"] for r in part if r["ours"] and r["tokens"] == t), default=None) for t in tokens}
        for name in ordered(r["name"] for r in part):
            line = {r["tokens"]: r["us"] for r in select(part, name=name)}
            mine = any(r["ours"] for r in select(part, name=name))
            style = {"color": "black", "linestyle": ":"} if name == FLOOR else {"linewidth": 2.5 if mine else 1.2}
            left.plot(list(line), list(line.values()), marker="o", markersize=3, label=name, **style)
            if not mine and name != FLOOR:
                both = [t for t in line if best_ours[t]]
                right.plot(both, [line[t] / best_ours[t] for t in both], marker="o", markersize=3, label=name)
        left.set(xscale="log", yscale="log", xlabel="tokens", ylabel="us per call", title=f"{model} {op} TP{tp}")
        right.set(xscale="log", xlabel="tokens", ylabel="peer time / ours", title="how many times slower than ours")
        right.axhline(1.0, color="black", linewidth=0.8)
        for axis in (left, right):
            axis.grid(True, which="both", alpha=0.25)
            axis.legend(fontsize=7)
        figure.tight_layout()
        path = folder / f"{model}_{op}_tp{tp}.png"
        figure.savefig(path, dpi=120)
        plt.close(figure)
        written.append(path)
    return written
