"""The whole projection handed through an engine's wo_b layer in place of z, so that one op computes everything while the
engine's linear layer keeps its say about the reduction over ranks. Imports no engine."""

from __future__ import annotations

from typing import NamedTuple

import torch

from vllm_megaattn import ops


class Pending(NamedTuple):
    """All operands of the projection but wo_b."""

    attn: torch.Tensor  # BF16 [T, heads, D]; heads past groups * K / D are padding
    positions: torch.Tensor  # int64 [T]
    cos_sin: torch.Tensor  # float32 [positions, R]
    wo_a: torch.Tensor  # e4m3 [G * N, K] or [G, N, K]
    wo_a_scale: torch.Tensor  # any form the ops take
    groups: int
    cos_sin_layout: str = "halves"


def project(pending: Pending, wo_b: torch.Tensor, wo_b_scale: torch.Tensor) -> torch.Tensor:
    """BF16 [T, hidden]. wo_b: e4m3 [hidden, G * N]."""
    return ops.o_proj_from_attn(
        pending.attn, pending.positions, pending.cos_sin, pending.wo_a, pending.wo_a_scale, wo_b, wo_b_scale,
        groups=pending.groups, cos_sin_layout=pending.cos_sin_layout, padded_heads=True,
    )  # fmt: skip


def project_wo_a(pending: Pending) -> torch.Tensor:
    """BF16 z [T, G * N], for a wo_b that is not ours."""
    wo_a, scale = pending.wo_a, pending.wo_a_scale
    span = ops.default_scale_span(pending.attn.device, wo_a, scale)
    heads = pending.groups * (wo_a.shape[-1] // pending.attn.shape[-1])
    x, x_scale = ops.inv_rope_mxfp8_quantize(
        pending.attn[:, :heads], pending.positions, pending.cos_sin,
        groups=pending.groups, cos_sin_layout=pending.cos_sin_layout, scale_span=span,
    )  # fmt: skip
    return ops.einsum_fp8_bf16(x, x_scale, wo_a, scale, x_span=span).flatten(1)


def multiply(x: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
    """x [.., K] times e4m3 w [N, K], for whoever hands such a layer plain activations: quantised here, result as x."""
    rows = x.reshape(-1, x.shape[-1])
    span = ops.default_scale_span(x.device, w, w_scale)
    z, z_scale = ops.mxfp8_quantize_sfd128x4(rows.to(torch.bfloat16), scale_span=span)
    y = ops.mxfp8_gemm_wo_b(z, z_scale, w, w_scale, z_span=span)
    return y.to(x.dtype).view(*x.shape[:-1], w.shape[0])
