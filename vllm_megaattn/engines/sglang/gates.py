"""SGLang's own rows of the gate table: what only this engine has or does. Explained to users in docs/sglang.md.

SGLang decides how to load wo_a before it builds the first layer, so these gates are asked about a model, and their
answer is the same for all its layers.
"""

from __future__ import annotations

from vllm_megaattn.engines.gates import GATES, Gate, LayerFacts

# Loaders that run a checkpoint through the weight loaders and then the post-load step. The others restore weights in
# the form that an earlier process gave them, or stream them layer by layer.
PLAIN_LOAD_FORMATS = (
    "auto", "pt", "safetensors", "npcache", "mistral", "fastsafetensors", "instanttensor", "runai_streamer", "dummy",
)  # fmt: skip


def _platform(facts: LayerFacts) -> str:
    return "" if facts.extra["is_cuda"] else "the model does not run on an NVIDIA GPU"


def _hooks(facts: LayerFacts) -> str:
    broken = facts.extra["broken_hooks"]
    return f"SGLang did not place the hooks on {', '.join(broken)}" if broken else ""


def _checkpoint(facts: LayerFacts) -> str:
    if not facts.extra["serialized"]:
        return "the checkpoint is not FP8: SGLang quantises it while loading"
    if facts.extra["ignored"]:
        return f"the checkpoint does not quantise {facts.extra['ignored']}"
    return ""


def _loading(facts: LayerFacts) -> str:
    if facts.extra["load_format"] not in PLAIN_LOAD_FORMATS:
        return f"the load format {facts.extra['load_format']} does not run the weight loaders and the post-load step"
    if facts.extra["weight_cache"] != "off":
        return f"weights are shared with other processes (--weight-cache-mode {facts.extra['weight_cache']})"
    if facts.extra["offloads"]:
        return "weights are offloaded to the host"
    return ""


def _modes(facts: LayerFacts) -> str:
    if facts.extra["decode_context_tp"]:
        return "context parallelism re-shards wo_a and wo_b for decoding (--enable-cp-decode-attn-tp)"
    if facts.extra["megakernel"]:
        return "whole decode steps are replaced by a megakernel (--enable-nvidia-megakernel)"
    if facts.extra["marlin"]:
        return "Marlin is forced (SGLANG_FORCE_FP8_MARLIN)"
    return ""


BUILD_GATES: tuple[Gate, ...] = (
    Gate("platform", "build", _platform),
    *GATES,
    Gate("hooks", "build", _hooks),
    Gate("checkpoint", "build", _checkpoint),
    Gate("loading", "build", _loading),
    Gate("modes", "build", _modes),
)
