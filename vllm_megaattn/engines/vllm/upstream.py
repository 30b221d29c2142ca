"""Every name of vLLM that the plugin relies on, and the probes that tell whether it still is what it was.

vLLM releases every two weeks and calls none of this public. A release within TESTED whose probes all pass is used; any
other is left alone with one warning.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import inspect
from typing import NamedTuple

import torch

TESTED = ((0, 30), (0, 33))  # first and last minor version that tests/vllm passes on

V41, V4 = "DeepSeek-V4.1", "DeepSeek-V4"


class Target(NamedTuple):
    """An attention class: where it is, whose it is, and what its _o_proj is handed ("bf16" or "mxfp8")."""

    module: str
    name: str
    model: str
    takes: str


_V41, _V4 = "vllm.models.deepseek_v41.nvidia.", "vllm.models.deepseek_v4.nvidia."

TARGETS = (
    Target(_V41 + "flashmla", "DeepseekV4FlashMLAAttention", V41, "bf16"),
    Target(_V41 + "flash_mla_mega_attn", "DeepseekV4MegaAttnAttention", V41, "mxfp8"),  # since 0.31
    Target(_V41 + "flashinfer_sparse", "DeepseekV4FlashInferMLAAttention", V41, "bf16"),
    Target(_V41 + "flashinfer_sparse", "DeepseekV4FlashInferSM120Attention", V41, "bf16"),
    Target(_V4 + "flashmla", "DeepseekV4FlashMLAAttention", V4, "bf16"),
    Target(_V4 + "flashinfer_sparse", "DeepseekV4FlashInferMLAAttention", V4, "bf16"),
    Target(_V4 + "flashinfer_sparse", "DeepseekV4FlashInferSM120Attention", V4, "bf16"),
)

# What the plugin reads from a built attention layer.
LAYER_ATTRIBUTES = (
    "prefix", "wo_a", "wo_b", "n_local_groups", "n_local_heads", "head_dim", "rope_head_dim", "o_lora_rank", "rotary_emb",
)  # fmt: skip

_QUANT_ACTIVATION = "vllm.model_executor.layers.fusion.quant_activation"
_QUANT_KEYS = "vllm.model_executor.layers.quantization.utils.quant_utils"
_MXFP8_KERNEL = "vllm.model_executor.kernels.linear.mxfp8.Mxfp8LinearKernel"
_FLASHINFER_KERNELS = "vllm.model_executor.kernels.linear.mxfp8.flashinfer"

MODULE_NAMES = (
    (_QUANT_ACTIVATION, "QuantizedActivation"),
    (_QUANT_ACTIVATION, "get_input_quant_key"),
    (_QUANT_KEYS, "kMxfp8Dynamic"),
    (_QUANT_KEYS, "kMxfp8Static"),
    (_MXFP8_KERNEL, "Mxfp8LinearKernel"),
    (_FLASHINFER_KERNELS, "FlashInferCutedslMxfp8LinearKernel"),
    (_FLASHINFER_KERNELS, "FlashInferCutlassMxfp8LinearKernel"),
)

QUANTIZED_ACTIVATION_FIELDS = ("data", "scale", "orig_dtype", "orig_shape", "quant_key")


def version() -> str:
    """vLLM's version as installed, "unknown" for a source tree without metadata."""
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def version_gap(text: str) -> str:
    """Why a version is outside of what was tested, or ""."""
    parts = text.split(".")
    try:
        minor = int(parts[0]), int(parts[1])
    except (IndexError, ValueError):
        return f"vLLM {text} is not a version that can be compared"
    if TESTED[0] <= minor <= TESTED[1]:
        return ""
    tested = " to ".join(".".join(map(str, bound)) for bound in TESTED)
    return f"vLLM {text} was not tested with this release, which knows {tested}"


def missing_names() -> tuple[str, ...]:
    """Names of MODULE_NAMES that this vLLM does not have, or that changed."""
    missing = []
    for module, name in MODULE_NAMES:
        try:
            value = getattr(importlib.import_module(module), name, None)
        except ImportError:
            value = None
        if value is None:
            missing.append(f"{module}.{name}")
    activation = load("QuantizedActivation") if not missing else None
    if activation is not None:
        fields = tuple(f.name for f in dataclasses.fields(activation))
        if fields != QUANTIZED_ACTIVATION_FIELDS:
            missing.append(f"QuantizedActivation with the fields {', '.join(QUANTIZED_ACTIVATION_FIELDS)}")
    return tuple(missing)


def class_gap(cls: type) -> str:
    """Why the methods of an attention class cannot be wrapped, or ""."""
    projection = getattr(cls, "_o_proj", None)
    if projection is None:
        return f"{cls.__name__} has no _o_proj"
    if len(inspect.signature(projection).parameters) != 3:
        return (
            f"{cls.__name__}._o_proj takes {inspect.signature(projection)}, not (self, attention output, positions)"
        )
    if not defining_module(projection).startswith("vllm."):
        return f"{cls.__name__}._o_proj was replaced by {defining_module(projection)}"
    return ""


def defining_module(function: object) -> str:
    """The module whose code a function is; functools.wraps changes __module__, not this."""
    return getattr(function, "__globals__", {}).get("__name__", "unknown")


@functools.cache
def load(name: str) -> object:
    """One of MODULE_NAMES by its last part."""
    module = next(module for module, known in MODULE_NAMES if known == name)
    return getattr(importlib.import_module(module), name)


def capability() -> tuple[int, int] | None:
    """Compute capability of the GPU as vLLM's platform reports it; None without a GPU."""
    from vllm.platforms import current_platform

    found = current_platform.get_device_capability()
    return (found.major, found.minor) if found is not None else None


def batch_invariant() -> bool:
    import vllm.envs as envs

    return bool(getattr(envs, "VLLM_BATCH_INVARIANT", False))


def input_quant_key(linear: torch.nn.Module) -> object:
    """The kind of quantised activation that a linear layer takes; None for none, and for every LoRA wrapper."""
    return load("get_input_quant_key")(linear)


def upstream_fuses(attention: torch.nn.Module, tokens: int) -> bool:
    """Whether vLLM's own fused inverse-RoPE + wo_a kernel serves this many tokens of a V4.1 layer (Blackwell, since 0.31).

    It was tuned for small batches, where we have no measurement that says ours is faster: it keeps them.
    """
    try:
        module = importlib.import_module(_V41 + "ops.o_proj")
        return 1 <= tokens <= module._fused_wo_a_max_tokens(attention) and bool(module._can_fuse_wo_a(attention))
    except (ImportError, AttributeError):
        return False
