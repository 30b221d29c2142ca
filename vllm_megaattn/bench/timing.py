"""Timing that can be compared: every contender captured in a CUDA graph, weights cold, rounds interleaved.

A graph runs one contender over all copies of its weights, back to back; the copies together exceed the L2 cache several
times, so each launch reads its weights from memory as it would in a model. Contenders take turns within a round, and
what is reported is the median of the rounds with their spread: clocks and temperature drift, ratios of one run do not.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

MAX_KEPT_BYTES = 1 << 30


@dataclass
class Contender:
    """One way to do the work. `run(i)` does it with weight copy i and returns the result tensor."""

    name: str
    run: Callable[[int], torch.Tensor]
    error: float = float("nan")  # relative Frobenius error of run(0) against float64
    note: str = ""


@dataclass
class Timing:
    """Microseconds per call: the median over rounds, and (max - min) / median of the rounds in percent."""

    us: float
    spread: float
    rounds: list[float] = field(default_factory=list)


class GraphTimer:
    """`copies` calls captured as one graph, repeated until the graph is long against a launch."""

    def __init__(self, contender: Contender, copies: int, min_calls: int) -> None:
        self.calls = copies * max(1, -(-min_calls // copies))
        for i in range(min(2, copies)):
            contender.run(i)
        torch.cuda.synchronize()
        # Results get addresses of their own, as in a model with many layers, as long as they are small; 26 results of
        # 32768 tokens would fill the card.
        keep: list[torch.Tensor] = []
        kept_bytes = 0
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for call in range(self.calls):
                result = contender.run(call % copies)
                if kept_bytes < MAX_KEPT_BYTES:
                    keep.append(result)
                    kept_bytes += result.nbytes
        self._graph.replay()
        torch.cuda.synchronize()

    def once(self) -> float:
        """Microseconds per call of one replay."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        self._graph.replay()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e3 / self.calls

    def sustained(self, seconds: float) -> float:
        """Microseconds per call after the card has settled: the second half of `seconds` without a pause."""
        calls = max(1, int(2e4 / (self.once() * self.calls)))
        tail: list[float] = []
        spent = 0.0
        while spent < seconds * 1e3:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(calls):
                self._graph.replay()
            end.record()
            torch.cuda.synchronize()
            elapsed = begin.elapsed_time(end)
            spent += elapsed
            if spent > seconds * 500:
                tail.append(elapsed * 1e3 / (calls * self.calls))
        return statistics.median(tail)


def measure(timers: dict[str, GraphTimer], *, rounds: int, repeats: int = 3) -> dict[str, Timing]:
    """Interleaved rounds over all timers; a round's figure is the median of `repeats` replays."""
    figures: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(rounds):
        for name, timer in timers.items():
            figures[name].append(statistics.median(timer.once() for _ in range(repeats)))
    result = {}
    for name, values in figures.items():
        middle = statistics.median(values)
        result[name] = Timing(middle, 100 * (max(values) - min(values)) / middle, values)
    return result
