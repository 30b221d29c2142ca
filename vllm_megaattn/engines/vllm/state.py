"""What the plugin knows of one attention layer that it serves. Lives on the layer; refers to no module, so that a model
can be freed as before."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_megaattn import selector
from vllm_megaattn.engines.report import Reporter, Served
from vllm_megaattn.engines.weights import KeptWeight

ATTRIBUTE = "_megaattn"  # of the attention layer; absent on layers that stay with vLLM


class Plan(NamedTuple):
    """How a layer is served. keep_wo_a / keep_wo_b: our kernel object keeps that linear layer's bytes; else vLLM's own
    layout is read as it is."""

    name: str
    keep_wo_a: bool
    keep_wo_b: bool
    detail: str


HOPPER = Plan(
    "hopper", True, True, "wo_a and wo_b keep the checkpoint's FP8 bytes; inverse RoPE, both products are ours"
)
MEGA = Plan("mega", False, False, "mega attention's output goes through our wo_a, which writes MXFP8 for our wo_b")
BLACKWELL = Plan(
    "bf16-attention", False, False, "beyond the small batches that vLLM fuses itself: inverse RoPE to wo_b"
)
SM12X = Plan("sm12x", True, False, "wo_a keeps the checkpoint's FP8 bytes; inverse RoPE and both products are ours")


@dataclass
class LayerState:
    plan: Plan
    choice: selector.Choice
    record: Served
    reporter: Reporter
    kept: dict[str, KeptWeight] = field(default_factory=dict)  # "wo_a", "wo_b": those that we keep
    scale_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # by KeptWeight.name, once loaded
    _saved: dict[str, int] = field(default_factory=dict)

    @property
    def loaded(self) -> bool:
        """Every weight that we keep has been through post-load."""
        return len(self.scale_shapes) == len(self.kept)

    def note_loaded(self, kept: KeptWeight, saved_bytes: int, scale_shape: tuple[int, ...]) -> None:
        """After each loading of one matrix: what the summary tells."""
        self.scale_shapes[kept.name] = scale_shape
        self._saved[kept.name] = saved_bytes
        reports = [other.report for other in self.kept.values()]
        self.record.saved_bytes = sum(self._saved.values())
        self.record.changed_elements = sum(int(report["changed"]) for report in reports)
        self.record.elements = sum(int(report["elements"]) for report in reports)
        self.record.relative_error = max(float(report["relative_error"]) for report in reports)
