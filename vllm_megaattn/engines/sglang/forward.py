"""The projection of a layer that we serve.

SGLang writes the projection out at the end of MQALayer.forward. Of its branches a served layer takes the one that
calls `fused_rope_wo_a_bf16`, with the attention output as it came from the kernel: there we only note the operands.
The last step, `_project_wo_b`, hands them to wo_b in place of z, so that one op computes everything, and deferred
all-reduces, DP attention and reduce-scatter stay SGLang's. Mega attention has a method for the first half, and there
wo_a is computed on the spot.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch

from vllm_megaattn import layouts, ops
from vllm_megaattn.engines import projection
from vllm_megaattn.engines.gates import HEAD_DIM
from vllm_megaattn.engines.projection import Pending
from vllm_megaattn.engines.sglang import upstream
from vllm_megaattn.engines.sglang.state import ATTRIBUTE, LayerState

_MARK = "_megaattn_apply"
SWIZZLED_NAME = "weight_scale_inv_swizzled"  # F8_128x4, made by SGLang where FlashInfer serves the layer


@functools.cache
def _model() -> ModuleType:
    return importlib.import_module(upstream.MODEL)


# ---- BF16 attention output -----------------------------------------------------------------------------------------


class Unprojected(NamedTuple):
    """What SGLang's forward carries from its wo_a step to its wo_b step for a served layer."""

    attn: torch.Tensor  # BF16 [T, G, K], the attention kernel's buffer: token stride of all padded heads
    positions: torch.Tensor  # int32 or int64 [T]
    cos_sin: torch.Tensor  # float32 [positions, 64]: cos, sin, cos, ...


def around_fused_wo_a(
    original: Callable, x: torch.Tensor, weight: torch.Tensor, freqs_cis: torch.Tensor, positions: torch.Tensor,
    *args: object, **kwargs: object,
) -> object:  # fmt: skip
    """SGLang makes an Mxfp8SwizzledInput of two results, or takes the first one."""
    if weight.dtype is not torch.float8_e4m3fn:
        return original(x, weight, freqs_cis, positions, *args, **kwargs)
    return Unprojected(x, positions, freqs_cis), None


def around_project_wo_b(
    original: Callable, self: torch.nn.Module, o: object, defer_all_reduce: bool = False
) -> object:
    state = self.__dict__.get(ATTRIBUTE)
    if state is None:
        return original(self, o, defer_all_reduce)
    if not torch.compiler.is_compiling():
        state.reporter.summarise()
    if isinstance(o, _model().Mxfp8SwizzledInput) and isinstance(o.data, Unprojected):
        o = o.data
    if isinstance(o, Unprojected):
        pending = _pending(self, state, o)
        if _is_ours(self.wo_b):
            o = pending
        else:
            state.reporter.once("wo_b was wrapped or replaced after loading: z is handed over in BF16")
            o = projection.project_wo_a(pending)
    return original(self, o, defer_all_reduce)


def _pending(attention: torch.nn.Module, state: LayerState, o: Unprojected) -> Pending:
    if not state.loaded:
        raise RuntimeError(
            f"vllm_megaattn: {state.record.layer} runs before SGLang's post-load step, which its loader must have left out"
        )
    attn = o.attn.view(o.attn.shape[0], -1, HEAD_DIM)
    wo_a, scale = state.wo_a.operand(attention.wo_a)
    return Pending(
        attn=attn if attn.dtype is torch.bfloat16 else attn.to(torch.bfloat16),
        positions=o.positions if o.positions.dtype is torch.int64 else o.positions.to(torch.int64),
        cos_sin=o.cos_sin,
        wo_a=wo_a,
        wo_a_scale=scale,
        groups=state.groups,
        cos_sin_layout="interleaved",
    )


# ---- wo_b ----------------------------------------------------------------------------------------------------------


def take_over_wo_b(wo_b: torch.nn.Module, state: LayerState) -> None:
    """Our product for what we hand to wo_b. Only the bound `apply` of this layer's method object is replaced.

    Plain activations (SGLang's warm-up and autotuning, an idle rank of mega attention) go SGLang's way, except where
    the bytes are ours: its product would take them for the checkpoint's.
    """
    method = wo_b.quant_method
    original = method.apply
    swizzled_input = _model().Mxfp8SwizzledInput

    def apply(layer: torch.nn.Module, x: object, bias: torch.Tensor | None = None) -> torch.Tensor:
        if isinstance(x, Pending):
            y = projection.project(x, *wo_b_operand(layer, state))
        elif isinstance(x, swizzled_input):
            y = ops.mxfp8_gemm_wo_b(x.data, x.scales, *wo_b_operand(layer, state))
        elif not state.plan.own_wo_b:
            return original(layer, x, bias)
        elif isinstance(x, torch.Tensor):
            y = projection.multiply(x, *wo_b_operand(layer, state))
        else:
            raise TypeError(f"vllm_megaattn: wo_b takes a tensor or MXFP8 in F8_128x4, got {type(x).__name__}")
        return y if bias is None else y + bias

    setattr(apply, _MARK, True)
    method.apply = apply


def wo_b_operand(wo_b: torch.nn.Module, state: LayerState) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 [hidden, G * N] and its scales: SGLang's F8_128x4 copy where it has one."""
    weight, scale = state.wo_b.operand(wo_b)
    swizzled = None if state.plan.own_wo_b else getattr(wo_b, SWIZZLED_NAME, None)
    return weight, scale if swizzled is None else swizzled


def _is_ours(wo_b: torch.nn.Module) -> bool:
    """Whether wo_b will reach our `apply`: not behind a LoRA wrapper, not with another plugin's product. One that
    wraps ours, as functools.wraps records, calls it."""
    if getattr(wo_b, "base_layer", None) is not None:
        return False
    link = wo_b.quant_method.apply
    while link is not None:
        if _MARK in getattr(link, "__dict__", ()):
            return True
        link = getattr(link, "__wrapped__", None)
    return False


# ---- mega attention: the attention kernel has rotated and quantised ------------------------------------------------


def mega_operand(attention: torch.nn.Module, state: LayerState) -> tuple[torch.Tensor, torch.Tensor] | None:
    """wo_a as `_mega_core` passes it on: e4m3 [G, N, K] and uint8 scales [G, N/r, ..], views of the parameters. None
    before the weights are loaded."""
    if not state.wo_a.converted:
        return None
    weight, scale = state.wo_a.operand(attention.wo_a)
    return weight.view(state.groups, -1, weight.shape[1]), scale.view(state.groups, -1, scale.shape[1])


def around_einsum(
    original: Callable, o_fp8: torch.Tensor, o_s: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor,
    recipe: tuple[int, int, int], out: object = None,
) -> object:  # fmt: skip
    """The first half for mega attention. o_fp8, o_s: slices of a buffer for all padded heads, so any strides.

    out None: z as MXFP8 for wo_b. A BF16 tensor [T, G, N] is filled, as is a pair of z [T, G, N] and F8_128x4 bytes.
    """
    if getattr(weight_scale, "dtype", None) is not torch.uint8:  # SGLang's own are int32 or float32
        return original(o_fp8, o_s, weight, weight_scale, recipe=recipe, out=out)
    if out is None:
        return _model().Mxfp8SwizzledInput(*ops.einsum_fp8_sfd128x4(o_fp8, o_s, weight, weight_scale))
    if isinstance(out, torch.Tensor):
        return ops.einsum_fp8_bf16(o_fp8, o_s, weight, weight_scale, out=out)
    z, z_scale = out
    ops.einsum_fp8_sfd128x4(o_fp8, o_s, weight, weight_scale, out=(z.flatten(1), z_scale))
    return out


def around_forward_mega(
    original: Callable, self: torch.nn.Module, q: torch.Tensor, kernel_num_heads: int, attn_sink: torch.Tensor,
    forward_batch: object, attn_backend: object,
) -> object:  # fmt: skip
    """In a prefill graph attention and wo_a run between captured segments, on the live rows only, into buffers that
    the captured wo_b reads. SGLang's buffers are BF16, or scales for DeepGEMM whose stride depends on the number of
    rows; ours hold MXFP8 with F8_128x4 scales, where the live rows' bytes are simply the first ones."""
    state = self.__dict__.get(ATTRIBUTE)
    model = _model()
    mode = forward_batch.forward_mode
    if state is None or mode.is_idle() or not (mode.is_extend() and model.is_in_breakable_cuda_graph()):
        return original(self, q, kernel_num_heads, attn_sink, forward_batch, attn_backend)
    if not self.mega_wq_b_permuted:
        q = importlib.import_module(upstream.MEGA_BACKEND).pack_query(q, kernel_num_heads)
    rows, cols = q.shape[0], state.groups * self.o_lora_rank
    z = torch.empty((rows, cols), dtype=torch.float8_e4m3fn, device=q.device)
    z_scale = torch.empty(layouts.f8_128x4_bytes(rows, cols // 32), dtype=torch.uint8, device=q.device)
    _break_graph()(self, q, z, z_scale, attn_sink)
    return model.Mxfp8SwizzledInput(z, z_scale)


@functools.cache
def _break_graph() -> Callable[..., None]:
    return _model().eager_on_graph(True)(_mega_attention_into)


def _mega_attention_into(
    layer: torch.nn.Module, query: torch.Tensor, z: torch.Tensor, z_scale: torch.Tensor, attn_sink: torch.Tensor
) -> None:
    """Runs at each replay: attention and wo_a on the batch's live rows, zeros after them."""
    model = _model()
    forward_batch = model.get_tc_piecewise_forward_context().forward_batch
    live = forward_batch.global_num_token_non_padded_cpu
    live_bytes = layouts.f8_128x4_bytes(live, z.shape[1] // 32)
    if live:
        out = z[:live], z_scale[:live_bytes]
        layer._mega_core(query[:live], attn_sink, forward_batch, model.get_attn_backend(), out=out)
    z[live:].zero_()
    z_scale[live_bytes:].zero_()
