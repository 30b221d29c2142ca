"""What the commands share: progress on stderr, tables, the choice of a device."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence

import torch

from vllm_megaattn import selector


@contextlib.contextmanager
def step(label: str) -> Iterator[None]:
    """Announce a step on stderr and, when it is done, how long it took."""
    print(f"  {label} ...", end="", file=sys.stderr, flush=True)
    begin = time.perf_counter()
    try:
        yield
    except BaseException:
        print(" failed", file=sys.stderr, flush=True)
        raise
    print(f" {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)


def format_table(header: Sequence[str], rows: Sequence[Sequence[object]], indent: str = "  ") -> str:
    """Left-aligned columns, two spaces apart; the last column is not padded."""
    lines = [list(map(str, row)) for row in (header, *rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        (indent + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))).rstrip()
        for line in lines
    )


def yes(value: bool) -> str:
    return "yes" if value else "NO"


def pick_device(requested: str) -> tuple[torch.device, str]:
    """The device to run on and why. "auto" takes the current CUDA device if a kernel of this package runs there, else
    the CPU; "cuda" raises ValueError with the reason when none does."""
    if requested == "cpu":
        return torch.device("cpu"), "requested"
    gap = cuda_gap()
    if not gap:
        return torch.device("cuda", torch.cuda.current_device()), "a supported GPU"
    if requested == "cuda":
        raise ValueError(f"--device cuda: {gap}")
    return torch.device("cpu"), gap


def cuda_gap() -> str:
    """Why the current CUDA device cannot be used, or ""."""
    if not torch.cuda.is_available():
        if torch.version.cuda is None and torch.version.hip is None:
            return "this torch is built without CUDA"
        return "no CUDA device is visible to torch"
    device = torch.device("cuda", torch.cuda.current_device())
    return selector.backend_gap(selector.device_key(device))
