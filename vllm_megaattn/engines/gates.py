"""When a layer may be served by this package: one table, one reason for every refusal.

A plugin describes a layer of its engine in `LayerFacts`, and `first_refusal` says why it must stay with the engine, or
nothing. Gates are pure functions of the facts, so they are tested without an engine; an engine adds rows of its own for
what only it knows. docs/gates.md explains every row to users.

A gate refuses by returning the reason, a phrase that reads well after "left to the engine: " and names what was found.
It must not name the layer: the same reason is logged once for all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from vllm_megaattn import selector
from vllm_megaattn.engines import common

HEAD_DIM, ROPE_DIM = (
    512,
    64,
)  # DeepSeek-V4 and V4.1; the kernels read them from the tensors, the engines' layouts are fixed

# Backends whose kernels keep a token's bits independent of the batch when they are asked to (MX_FLAG_BATCH_INVARIANT);
# for sm90 tests/test_gpu_invariance.py has shown it on an H200.
BATCH_INVARIANT_BACKENDS = frozenset({"cpu", "sm90"})


@dataclass(frozen=True)
class LayerFacts:
    """What is known of one attention layer when it is built; shapes are those of this rank.

    A fact that could not be found out is None, and the gate that needs it refuses.
    """

    engine: str  # "vLLM 0.33.0"
    layer: str  # "model.layers.0.attn"
    attention_class: str
    device_key: str
    recipe: str | None  # how the weights are scaled: "32x32", "128x128"
    scale_dtype: str | None  # of the checkpoint's scales as loaded: "uint8", "float8_e8m0fnu", "float32", "int32"
    weight_dtype: str | None
    activation_dtype: str | None  # of the model: "bfloat16"
    groups: int | None
    heads: int | None  # live heads
    head_dim: int | None
    rope_dim: int | None
    rank: int | None  # rows of wo_a per group
    wo_a_shape: tuple[int, ...] | None  # [G * rank, heads / G * head_dim]
    wo_b_shape: tuple[int, ...] | None  # [hidden, G * rank]
    consumer: str = "f8_128x4"  # what reads z, see selector.CONSUMERS
    batch_invariant: bool = False
    methods: tuple[str, ...] = ()  # class names of the quantisation methods of wo_a and wo_b
    expected_methods: tuple[str, ...] = ()  # those that the plugin knows for this recipe
    missing: tuple[str, ...] = ()  # names of the engine that were not found
    device: torch.device | None = None  # where the weights are; None: not known yet, the self-check waits for a call
    extra: dict[str, object] = field(default_factory=dict, compare=False)  # an engine's own facts, for its own gates


class Gate(NamedTuple):
    """`name` is the anchor in docs/gates.md; `when` is "build" or "call"; `check` returns a reason or ""."""

    name: str
    when: str
    check: Callable[[LayerFacts], str]


def choice_for(facts: LayerFacts) -> selector.Choice:
    """The path of this layer by the package's own table; ValueError says why there is none."""
    return selector.select_path(
        facts.device_key, rank=facts.rank or 0, recipe=facts.recipe or "", consumer=facts.consumer
    )


def _names(facts: LayerFacts) -> str:
    if facts.missing:
        return f"{facts.engine} lacks {', '.join(facts.missing)}, which this release was written for"
    return ""


def _quantisation(facts: LayerFacts) -> str:
    if not facts.methods:
        return "the output projection is not quantised"
    unknown = sorted(set(facts.methods) - set(facts.expected_methods))
    if unknown:
        wanted = ", ".join(facts.expected_methods)
        return f"wo_a or wo_b is quantised by {', '.join(unknown)}; known for this checkpoint: {wanted}"
    return ""


def _recipe(facts: LayerFacts) -> str:
    if facts.recipe not in selector.RECIPES:
        return f"the weights are scaled per {facts.recipe or 'unknown block'}, not per 32x32 or 128x128 block"
    return ""


def _bytes(facts: LayerFacts) -> str:
    if facts.weight_dtype != "float8_e4m3fn":
        return f"wo_a and wo_b are {facts.weight_dtype}, not float8_e4m3fn"
    if facts.scale_dtype not in ("uint8", "float8_e8m0fnu", "int32"):
        return f"the weight scales are {facts.scale_dtype}; only power-of-two bytes (UE8M0) are kept as they are"
    return ""


def _activations(facts: LayerFacts) -> str:
    if facts.activation_dtype != "bfloat16":
        return f"the model runs in {facts.activation_dtype}, the kernels in bfloat16"
    return ""


def _geometry(facts: LayerFacts) -> str:
    if (facts.head_dim, facts.rope_dim) != (HEAD_DIM, ROPE_DIM):
        return f"heads of {facts.head_dim} with {facts.rope_dim} rotated columns, not {HEAD_DIM} with {ROPE_DIM}"
    if not facts.groups or not facts.heads or facts.heads % facts.groups:
        return f"{facts.heads} heads do not divide into {facts.groups} groups on this rank"
    if not facts.rank:
        return f"a rank of {facts.rank}"
    cols = facts.heads // facts.groups * HEAD_DIM
    rows = facts.groups * facts.rank
    if facts.wo_a_shape not in ((rows, cols), (facts.groups, facts.rank, cols)):
        return f"wo_a is {list(facts.wo_a_shape or ())}, expected [{rows}, {cols}] on this rank"
    if facts.wo_b_shape is None or len(facts.wo_b_shape) != 2 or facts.wo_b_shape[1] != rows:
        return f"wo_b is {list(facts.wo_b_shape or ())}, expected [hidden, {rows}] on this rank"
    return ""


def _kernels(facts: LayerFacts) -> str:
    gap = selector.backend_gap(facts.device_key)
    if gap:
        return f"{gap} ({facts.device_key})"
    try:
        choice_for(facts)
    except ValueError as error:
        return str(error).removeprefix("o_proj: ")
    return ""


def _batch_invariance(facts: LayerFacts) -> str:
    if not facts.batch_invariant or selector.backend_gap(facts.device_key):
        return ""
    backend = choice_for(facts).backend
    if backend not in BATCH_INVARIANT_BACKENDS:
        return f"batch-invariant mode is on and the {backend} kernels are not proved to be batch-invariant"
    return ""


def _self_check(facts: LayerFacts) -> str:
    return common.device_fault(facts.device) if facts.device is not None else ""


# In the order in which they are asked; the first refusal is the reason that is logged.
GATES: tuple[Gate, ...] = (
    Gate("engine-names", "build", _names),
    Gate("quantisation", "build", _quantisation),
    Gate("recipe", "build", _recipe),
    Gate("weight-bytes", "build", _bytes),
    Gate("activations", "build", _activations),
    Gate("geometry", "build", _geometry),
    Gate("kernels", "build", _kernels),
    Gate("batch-invariance", "build", _batch_invariance),
    Gate("self-check", "build", _self_check),
)


class Refusal(NamedTuple):
    gate: str
    reason: str


def first_refusal(facts: LayerFacts, gates: Iterable[Gate]) -> Refusal | None:
    """The first gate that refuses, in table order, or None: the layer may be served.

    Later gates are not asked, since they may rely on what earlier ones established.
    """
    for gate in gates:
        reason = gate.check(facts)
        if reason:
            return Refusal(gate.name, reason)
    return None
