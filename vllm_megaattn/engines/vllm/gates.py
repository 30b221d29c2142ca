"""vLLM's own rows of the gate table: what only this engine has or does. Explained to users in docs/gates.md."""

from __future__ import annotations

import torch

from vllm_megaattn.engines.gates import GATES, Gate, LayerFacts
from vllm_megaattn.engines.vllm import upstream

# Loaders that restore weights in the form an earlier process gave them, instead of reading a checkpoint.
PROCESSED_LOAD_FORMATS = ("ipc_cache", "sharded_state", "runai_streamer_sharded", "tensorizer")


def _own_class(facts: LayerFacts) -> str:
    foreign = facts.extra.get("foreign_o_proj")
    return f"{facts.attention_class}._o_proj belongs to {foreign}" if foreign else ""


def _load_format(facts: LayerFacts) -> str:
    load_format = facts.extra.get("load_format")
    if load_format in PROCESSED_LOAD_FORMATS:
        return f"the load format {load_format} restores weights in the layout of vLLM's own kernels"
    return ""


def _attention_output(facts: LayerFacts) -> str:
    if facts.extra.get("rope_quant"):
        return "FlashInfer's attention writes its output already rotated and quantised per 128 columns"
    return ""


BUILD_GATES: tuple[Gate, ...] = (
    Gate("own-class", "build", _own_class),
    Gate("load-format", "build", _load_format),
    Gate("attention-output", "build", _attention_output),
    *GATES,
)


# ---- asked at every call: what may change after the layer was built ------------------------------------------------


def mega_refusal(attention: torch.nn.Module, attn_out: object) -> str:
    """Why this call of a mega-attention layer must go vLLM's way, or "". The conditions of `_can_quantize_o_proj` in vLLM
    0.33, which earlier releases lack, and what our kernels need of the weights."""
    reason = consumer_refusal(attention)
    if reason:
        return reason
    if getattr(attention, "_einsum_recipe", None) != (1, 1, 32):
        return f"the einsum recipe is {getattr(attention, '_einsum_recipe', None)}, not (1, 1, 32)"
    if attention.o_lora_rank % 128:
        return f"o_lora_rank {attention.o_lora_rank} is no multiple of 128"
    if not getattr(attention, "_fused_layouts_ready", True):
        return "vLLM has not brought the weights into mega attention's order"
    weight, scale = attention.wo_a.weight, getattr(attention.wo_a, "weight_scale", None)
    if (
        weight.dim() != 3
        or weight.dtype is not torch.float8_e4m3fn
        or getattr(scale, "dtype", None) is not torch.int32
    ):
        return "wo_a is not in DeepGEMM's layout (e4m3 [G, N, K] with packed int32 scales)"
    if not isinstance(attn_out, upstream.load("QuantizedActivation")):
        return "the attention output is not quantised"
    return ""


def consumer_refusal(attention: torch.nn.Module) -> str:
    """Why wo_b cannot be handed MXFP8 z in F8_128x4, or ""."""
    if getattr(attention, "gemm_rs", None) is not None:
        return "GEMM-RS, which takes BF16 only, is bound to wo_b"
    wo_b = attention.wo_b
    if getattr(wo_b, "requires_unquantized_input", False):
        return "wo_b carries a LoRA adapter, which needs BF16 input"
    if upstream.input_quant_key(wo_b) != upstream.load("kMxfp8Dynamic"):
        return "wo_b's kernel takes no quantised input"
    if flashinfer_layout(wo_b) is None:
        return (
            f"wo_b's kernel {type(getattr(wo_b.quant_method, 'kernel', None)).__name__} is not known to read F8_128x4"
        )
    return ""


def flashinfer_layout(wo_b: torch.nn.Module) -> str | None:
    """How a FlashInfer kernel keeps wo_b: "KN" ([K, N], column-major) or "NK"; None for any other class, subclasses too:
    only these two are known to read F8_128x4 scales, which the key of a quantised activation does not tell."""
    kind = type(getattr(wo_b.quant_method, "kernel", None))
    if kind is upstream.load("FlashInferCutedslMxfp8LinearKernel"):
        return "KN"
    if kind is upstream.load("FlashInferCutlassMxfp8LinearKernel"):
        return "NK"
    return None
