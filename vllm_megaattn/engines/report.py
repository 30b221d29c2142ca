"""What a user reads in the log: every reason once, and one summary of the model.

A model has some sixty attention layers and a server several processes; a line per layer would be noise. So a reason is
logged for the first layer that gives it, and after loading one line counts the layers, names the kernels and tells the
memory. Lines start with "vllm_megaattn:" so that they can be searched for. Rank 0 speaks at INFO, the others at DEBUG;
warnings come from every rank.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

import torch

from vllm_megaattn import selector

PREFIX = "vllm_megaattn: "


def is_first_rank() -> bool:
    """True in a process without torch.distributed, else on rank 0."""
    dist = torch.distributed
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def kernels_text(choice: selector.Choice, device_key: str) -> str:
    """ "fused on sm90"; kernels that have not run on the hardware are called so, since this is what a user reads."""
    doubt = ", kernels that have never run on this hardware" if selector.unproven(device_key) else ""
    return f"{choice.path} on {device_key}{doubt}"


@dataclass
class Served:
    """One layer that we serve. Filled in as the layer is built and loaded."""

    layer: str
    kernels: str  # "fused on sm90"
    detail: str  # what replaces what, for people
    saved_bytes: int = 0  # device memory that the engine's own path would use on top
    changed_elements: int = 0  # by re-blocking, see prepare_weight
    elements: int = 0
    relative_error: float = 0.0


@dataclass
class Reporter:
    """Collects what happened to a process's layers and logs it. `logger` is the engine's own, set by the plugin."""

    logger: logging.Logger
    served: dict[int, Served] = field(default_factory=dict)
    left: dict[int, tuple[str, str]] = field(default_factory=dict)  # layer, reason
    _logged: set[str] = field(default_factory=set)
    _summarised: tuple[int, int] = (0, 0)

    def once(self, message: str, level: int = logging.INFO) -> None:
        """Log a message unless it was logged before."""
        if message in self._logged:
            return
        self._logged.add(message)
        if level < logging.WARNING and not is_first_rank():
            level = logging.DEBUG
        self.logger.log(level, PREFIX + message)

    def add_served(self, key: int, record: Served, level: int = logging.INFO) -> None:
        self.served[key] = record
        self.left.pop(key, None)
        self.once(f"serving {record.layer} and layers like it: {record.kernels}; {record.detail}", level)

    def add_left(self, key: int, layer: str, reason: str, level: int = logging.INFO) -> None:
        """A layer that stays with the engine. `reason` is the same text for every layer with that reason."""
        self.served.pop(key, None)
        self.left[key] = (layer, reason)
        if reason not in self._logged:
            self._logged.add(reason)
            self.once(f"left {layer} and layers like it to the engine: {reason}", level)

    def summarise(self) -> None:
        """One line about all layers so far; again only if layers were added since (a draft model)."""
        state = (len(self.served), len(self.left))
        if state != self._summarised and self.served:
            self._summarised = state
            self.once(self.summary())

    def summary(self) -> str:
        """Counts, kernels, memory and what re-blocking changed."""
        records = list(self.served.values())
        total = len(records) + len(self.left)
        kernels = ", ".join(f"{count} {name}" for name, count in Counter(r.kernels for r in records).items())
        parts = [f"output projection of {len(records)} of {total} attention layers: {kernels}"]
        saved = sum(r.saved_bytes for r in records)
        if saved:
            parts.append(f"{saved / 2**20:.1f} MiB of weights less than with the engine's own path on this GPU")
        elements = sum(r.elements for r in records)
        changed = sum(r.changed_elements for r in records)
        if changed:
            worst = max(r.relative_error for r in records)
            parts.append(
                f"re-blocking the scales rounded {changed} of {elements} weight elements "
                f"(relative error of a matrix at most {worst:.1e})"
            )
        reasons = Counter(reason for _, reason in self.left.values())
        parts += [f"{count} left to the engine: {reason}" for reason, count in reasons.items()]
        return "; ".join(parts)
