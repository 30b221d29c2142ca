"""What the plugin knows of one attention layer that it serves. Lives on the layer; refers to no module, so that a
model can be freed as before."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_megaattn import selector
from vllm_megaattn.engines.report import Reporter, Served
from vllm_megaattn.engines.sglang.weights import LiveWeight

ATTRIBUTE = "_megaattn"  # of the attention layer; absent on layers that stay with SGLang


class Plan(NamedTuple):
    """How a layer is served. wo_a's bytes are always ours to keep.

    own_wo_b:   wo_b's bytes too: they may be re-blocked, and SGLang's own product never sees them. Otherwise SGLang's
                post-load step runs as ever, plain activations go its way, and our product reads the same tensors.
    mega:       the attention kernel has rotated and quantised, and orders the columns of a group by chunks of 32
    """

    name: str
    own_wo_b: bool
    mega: bool
    detail: str


HOPPER = Plan(
    "hopper", True, False, "wo_a and wo_b keep the checkpoint's FP8 bytes; inverse RoPE, both products are ours"
)
BLACKWELL = Plan(
    "blackwell", False, False, "wo_a keeps the checkpoint's FP8 bytes; inverse RoPE, both products are ours"
)
MEGA = Plan(
    "mega", False, True, "mega attention's output goes through our wo_a, whose BF16 copy is gone, to our wo_b"
)


@dataclass
class LayerState:
    plan: Plan
    choice: selector.Choice
    record: Served
    reporter: Reporter
    groups: int
    wo_a: LiveWeight
    wo_b: LiveWeight
    engine_bytes_wo_a: float | None  # per element, where SGLang's own path expands wo_a; None where it keeps FP8
    saved: dict[str, int] = field(default_factory=dict)

    @property
    def loaded(self) -> bool:
        """Both weights have been through post-load."""
        return len(self.saved) == 2

    def note_loaded(self, name: str, saved_bytes: int) -> None:
        """After each loading of one matrix: what the summary tells."""
        self.saved[name] = saved_bytes
        reports = [weight.kept.report for weight in (self.wo_a, self.wo_b)]
        self.record.saved_bytes = max(0, sum(self.saved.values()))  # the scales of a layer that saves nothing are KiB
        self.record.changed_elements = sum(int(report["changed"]) for report in reports)
        self.record.elements = sum(int(report["elements"]) for report in reports)
        self.record.relative_error = max(float(report["relative_error"]) for report in reports)
