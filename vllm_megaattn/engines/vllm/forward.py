"""The projection of a layer that we serve: what replaces `_o_proj`.

Every way ends in the layer's own wo_b, so that the reduction over ranks, sequence parallelism and LoRA stay vLLM's. A call
that a gate refuses goes vLLM's way, with one exception: where we keep wo_a's FP8 bytes, vLLM's function must not see them
(on Hopper it would take them for 128x128 blocks), so it gets a BF16 copy made for that call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace

import torch

from vllm_megaattn import ops
from vllm_megaattn.engines import projection
from vllm_megaattn.engines.projection import Pending
from vllm_megaattn.engines.vllm import gates, upstream
from vllm_megaattn.engines.vllm.kernels import QuantizedActivation, kMxfp8Dynamic, multiply
from vllm_megaattn.engines.vllm.state import HOPPER, MEGA, LayerState
from vllm_megaattn.engines.weights import dequantize

Original = Callable[[torch.nn.Module, object, torch.Tensor], torch.Tensor]


def project(
    state: LayerState, attention: torch.nn.Module, attn_out: object, positions: torch.Tensor, original: Original
) -> torch.Tensor:
    """`attention._o_proj(attn_out, positions)`, served as the layer's plan says. `original` is the class's own method."""
    state.reporter.summarise()
    if state.plan is MEGA:
        return _project_mega(state, attention, attn_out, positions, original)
    if state.plan.keep_wo_a:
        return _project_kept(state, attention, attn_out, positions, original)
    return _project_bf16(state, attention, attn_out, positions, original)


def project_wo_b(attention: torch.nn.Module, z: object) -> torch.Tensor:
    """wo_b and whatever reduction follows it; vLLM 0.30 and DeepSeek-V4 have no `_wo_b_proj`."""
    return getattr(attention, "_wo_b_proj", attention.wo_b)(z)


# ---- mega attention: the attention kernel has rotated and quantised ------------------------------------------------


def _project_mega(
    state: LayerState, attention: torch.nn.Module, attn_out: object, positions: torch.Tensor, original: Original
) -> torch.Tensor:
    reason = gates.mega_refusal(attention, attn_out)
    if reason:
        _refuse_call(state, reason)
        return original(attention, attn_out, positions)
    groups = attention.n_local_groups
    # The buffer is as wide as the kernel's 64 or 128 heads: slices keep its strides, whatever the tensor parallelism.
    x, x_scale = attn_out.data[:, :groups], attn_out.scale[:, :groups]
    wo_a = attention.wo_a
    if state.choice.path == "fused":
        z, z_scale = ops.einsum_fp8_sfd128x4(x, x_scale, wo_a.weight, wo_a.weight_scale)
    else:
        z, z_scale = ops.mxfp8_quantize_sfd128x4(ops.einsum_fp8_bf16(x, x_scale, wo_a.weight, wo_a.weight_scale))
    return project_wo_b(attention, QuantizedActivation(z, z_scale, torch.bfloat16, z.shape, kMxfp8Dynamic))


# ---- BF16 attention output -----------------------------------------------------------------------------------------


def _project_bf16(
    state: LayerState, attention: torch.nn.Module, attn_out: object, positions: torch.Tensor, original: Original
) -> torch.Tensor:
    """vLLM keeps wo_a in FP8 by itself (datacenter Blackwell): only the computation is replaced."""
    reason = _bf16_refusal(attn_out) or gates.consumer_refusal(attention)
    if reason:
        _refuse_call(state, reason)
        return original(attention, attn_out, positions)
    if upstream.upstream_fuses(attention, attn_out.shape[0]):
        return original(attention, attn_out, positions)
    return project_wo_b(attention, _pending(attention, attn_out, positions))


def _project_kept(
    state: LayerState, attention: torch.nn.Module, attn_out: object, positions: torch.Tensor, original: Original
) -> torch.Tensor:
    """We keep wo_a's bytes, and on Hopper wo_b's."""
    reason = _bf16_refusal(attn_out)
    if not state.loaded:
        reason = reason or "vLLM has not run its post-load step over wo_a and wo_b"
    if reason:
        _refuse_call(state, reason, logging.WARNING)
        return _project_with_bf16_wo_a(attention, attn_out, positions, original)
    pending = _pending(attention, attn_out, positions)
    reason = _whole_refusal(state, attention)
    if not reason:
        return project_wo_b(attention, pending)
    _refuse_call(state, f"{reason}; z is handed over in BF16")
    return project_wo_b(attention, projection.project_wo_a(pending))


def _whole_refusal(state: LayerState, attention: torch.nn.Module) -> str:
    """Why wo_b cannot be handed the whole projection, only BF16 z, or ""."""
    if state.plan is not HOPPER:
        return gates.consumer_refusal(attention)
    if getattr(attention, "gemm_rs", None) is not None:
        return "GEMM-RS, which takes BF16 only, is bound to wo_b"
    if getattr(attention.wo_b, "requires_unquantized_input", False):
        return "wo_b carries a LoRA adapter, which needs BF16 input"
    return ""


def _pending(attention: torch.nn.Module, attn_out: torch.Tensor, positions: torch.Tensor) -> Pending:
    wo_a = attention.wo_a
    return Pending(
        attn=attn_out,
        positions=positions if positions.dtype is torch.int64 else positions.to(torch.int64),
        cos_sin=attention.rotary_emb.cos_sin_cache,
        wo_a=wo_a.weight,
        wo_a_scale=wo_a.weight_scale if hasattr(wo_a, "weight_scale") else wo_a.weight_scale_inv,
        groups=attention.n_local_groups,
    )


def _bf16_refusal(attn_out: object) -> str:
    if not isinstance(attn_out, torch.Tensor):
        return f"the attention output is a {type(attn_out).__name__}, not a tensor"
    if attn_out.dtype is not torch.bfloat16 or attn_out.dim() != 3 or attn_out.stride(-1) != 1:
        return f"the attention output is {attn_out.dtype} {attn_out.dim()}-D, last stride {attn_out.stride(-1)}"
    return ""


# ---- refusals ------------------------------------------------------------------------------------------------------


def _refuse_call(state: LayerState, reason: str, level: int = logging.INFO) -> None:
    state.reporter.once(f"calls left to the engine's own path: {reason}", level)


class _WithBf16WoA:
    """Stands for an attention layer towards vLLM's function; all but wo_a is the layer's own."""

    def __init__(self, attention: torch.nn.Module, wo_a: SimpleNamespace) -> None:
        self.__dict__.update(_attention=attention, wo_a=wo_a)

    def __getattr__(self, name: str) -> object:
        return getattr(self._attention, name)


def _project_with_bf16_wo_a(
    attention: torch.nn.Module, attn_out: object, positions: torch.Tensor, original: Original
) -> torch.Tensor:
    wo_a = attention.wo_a
    weight = wo_a.weight
    if weight.dtype is torch.float8_e4m3fn:
        scale = wo_a.weight_scale if hasattr(wo_a, "weight_scale") else wo_a.weight_scale_inv
        dtype = attn_out.dtype if isinstance(attn_out, torch.Tensor) else torch.bfloat16
        weight = dequantize(weight.flatten(0, -2), scale.flatten(0, -2), dtype)
    return original(_WithBf16WoA(attention, SimpleNamespace(weight=weight)), attn_out, positions)


# ---- vLLM's own wo_b kernels, with our product ---------------------------------------------------------------------


def take_over_wo_b(wo_b: torch.nn.Module) -> None:
    """Our product for what we hand to a wo_b that FlashInfer's kernel class serves; everything else stays its own.

    Only the bound `apply` of this layer's method object is replaced: kernel class, weights, LoRA, GEMM-RS and every test
    that vLLM makes of them see what they saw before.
    """
    method = wo_b.quant_method
    original = method.apply

    def apply(layer: torch.nn.Module, x: object, bias: torch.Tensor | None = None) -> torch.Tensor:
        layout = gates.flashinfer_layout(layer) if isinstance(x, (Pending, QuantizedActivation)) else None
        if layout is None or bias is not None:
            return original(layer, x, bias)
        return multiply(x, layer.weight.t() if layout == "KN" else layer.weight, layer.weight_scale)

    method.apply = apply
