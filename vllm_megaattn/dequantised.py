"""The output projection on devices without a kernel: dequantise, then torch's BF16 products.

The selector takes it by itself where its table says so (SM12x), with path="dequantised" it runs on any device. It is
plain torch: correct wherever torch has BF16 products, several times the memory traffic of the kernels, and nothing of z
or x is rounded to MXFP8. So its results are not the kernels' bits: they are nearer to those of a BF16 model.

Weights are expanded at every call unless the caller has done it once (`dequantize_weight`): BF16 weights are taken as
they are, their scale is then None.
"""

from __future__ import annotations

import torch

from vllm_megaattn import layouts

BF16 = torch.bfloat16
ROWS_AT_ONCE = 1024  # the float32 values of a whole matrix would be four times its bytes


def dequantize_weight(w: torch.Tensor, w_scale: torch.Tensor, *, groups: int | None = None) -> torch.Tensor:
    """e4m3 [G, N, K], [G*N, K] or [N, K] and scales in any form that the ops take -> BF16 of w's shape.

    BF16 holds every e4m3 value times a scale of 2^-124 to 2^119; others are rounded once from float32.
    groups: G where w is [G*N, K] and its scales are 3-D or differ from those of one matrix.
    """
    if w.dtype is not torch.float8_e4m3fn:
        raise TypeError(f"w must have dtype float8_e4m3fn, got {str(w.dtype).removeprefix('torch.')}")
    if w.dim() not in (2, 3):
        raise ValueError(f"w must have shape [G, N, K] or [G*N, K], got {list(w.shape)}")
    cols = w.shape[-1]
    count = w.shape[0] if w.dim() == 3 else groups or 1
    flat = w.reshape(-1, cols)
    rows = flat.shape[0] // count
    scale = layouts.linear_weight_scale(w_scale, count, rows, cols, name="w_scale").reshape(-1, cols // layouts.BLOCK)
    out = torch.empty(flat.shape, dtype=BF16, device=w.device)
    for start in range(0, flat.shape[0], ROWS_AT_ONCE):
        piece = slice(start, start + ROWS_AT_ONCE)
        out[piece] = layouts.dequantize(flat[piece], scale[piece], dtype=torch.float32).to(BF16)
    return out.view(w.shape)


def dequantize_activation(x: torch.Tensor, x_scale: torch.Tensor) -> torch.Tensor:
    """e4m3 [T, G, K] and packed int32 scales [T, G, K/128] -> BF16 [T, G, K]."""
    if x.dtype is not torch.float8_e4m3fn or x.dim() != 3:
        raise ValueError(f"x must be float8_e4m3fn [T, G, K], got {x.dtype} {list(x.shape)}")
    return layouts.dequantize(x, layouts.from_packed(x_scale, name="x_scale"), dtype=torch.float32).to(BF16)


def inverse_rope(
    attn: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, *, cos_sin_layout: str = "halves"
) -> torch.Tensor:
    """BF16 [T, heads, D] -> the same, the last R columns of each head rotated back (csrc/kernels.h, in FP32 but without
    its fused multiply-adds). A position outside the cache makes its token NaN."""
    tokens, heads, head_dim = attn.shape
    rope_dim = cos_sin.shape[1]
    inside = (positions >= 0) & (positions < cos_sin.shape[0])
    row = cos_sin[torch.where(inside, positions, torch.zeros_like(positions))]
    row = torch.where(inside[:, None], row, torch.full_like(row, float("nan")))
    if cos_sin_layout == "halves":
        cos, sin = row[:, None, : rope_dim // 2], row[:, None, rope_dim // 2 :]
    else:
        cos, sin = row[:, None, 0::2], row[:, None, 1::2]
    pairs = attn[..., head_dim - rope_dim :].float().unflatten(-1, (rope_dim // 2, 2))
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = torch.stack((odd * sin + even * cos, odd * cos - even * sin), dim=-1).flatten(-2).to(attn.dtype)
    kept = torch.where(inside[:, None, None], attn[..., : head_dim - rope_dim], torch.nan)
    return torch.cat((kept.to(attn.dtype), turned), dim=-1).view(tokens, heads, head_dim)


def group_columns(attn: torch.Tensor, groups: int, order: str = "standard") -> torch.Tensor:
    """[T, heads, D] -> [T, G, heads / G * D] in the order of wo_a's columns."""
    tokens, heads, head_dim = attn.shape
    each = heads // groups
    if order == "standard":
        return attn.reshape(tokens, groups, each * head_dim)
    chunks = attn.reshape(tokens, groups, each, head_dim // layouts.BLOCK, layouts.BLOCK)
    return chunks.transpose(2, 3).reshape(tokens, groups, each * head_dim)


def project(
    x: torch.Tensor,
    wo_a: torch.Tensor,
    wo_a_scale: torch.Tensor | None,
    wo_b: torch.Tensor,
    wo_b_scale: torch.Tensor | None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """BF16 x [T, G, K] -> BF16 [T, N_b]: wo_a group by group, z in BF16, wo_b. Weights: e4m3 with scales, or BF16 and
    None."""
    tokens, groups, cols = x.shape
    if wo_a.shape[-1] != cols or (wo_a.shape[0] != groups if wo_a.dim() == 3 else wo_a.shape[0] % groups):
        raise ValueError(f"wo_a must have {groups} groups of {cols} columns like x, got shape {list(wo_a.shape)}")
    rows = wo_a.shape[1] if wo_a.dim() == 3 else wo_a.shape[0] // groups
    if wo_b.dim() != 2 or wo_b.shape[1] != groups * rows:
        raise ValueError(f"wo_b must have shape [N, G*N = {groups * rows}], got {list(wo_b.shape)}")
    shape = [tokens, wo_b.shape[0]]
    if out is not None and (list(out.shape) != shape or out.dtype is not BF16):
        raise ValueError(f"out must be bfloat16 {shape}, got {out.dtype} {list(out.shape)}")
    if wo_a.dtype is not BF16:
        wo_a = dequantize_weight(wo_a, wo_a_scale, groups=groups)
    if wo_b.dtype is not BF16:
        wo_b = dequantize_weight(wo_b, wo_b_scale)
    wo_a = wo_a.reshape(groups, rows, cols)
    z = torch.bmm(x.transpose(0, 1), wo_a.transpose(1, 2)).transpose(0, 1).reshape(tokens, groups * rows)
    y = z @ wo_b.t()
    return y if out is None else out.copy_(y)


def project_quantized(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    wo_a: torch.Tensor,
    wo_a_scale: torch.Tensor | None,
    wo_b: torch.Tensor,
    wo_b_scale: torch.Tensor | None,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """`project` of e4m3 x [T, G, K] and its packed scales; the arguments have been checked."""
    return project(dequantize_activation(x, x_scale), wo_a, wo_a_scale, wo_b, wo_b_scale, out=out)


def project_attn(
    attn: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    wo_a: torch.Tensor,
    wo_a_scale: torch.Tensor | None,
    wo_b: torch.Tensor,
    wo_b_scale: torch.Tensor | None,
    *,
    groups: int,
    order: str,
    cos_sin_layout: str,
    out: torch.Tensor,
) -> torch.Tensor:
    """`project` of a BF16 attention output; the arguments have been checked, heads behind the live ones are padding."""
    live = groups * (wo_a.shape[-1] // attn.shape[2])
    rotated = inverse_rope(attn[:, :live], positions, cos_sin, cos_sin_layout=cos_sin_layout)
    return project(group_columns(rotated, groups, order), wo_a, wo_a_scale, wo_b, wo_b_scale, out=out)


# ---- the ops by themselves -----------------------------------------------------------------------------------------


def o_proj(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    wo_a: torch.Tensor,
    wo_a_scale: torch.Tensor | None,
    wo_b: torch.Tensor,
    wo_b_scale: torch.Tensor | None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`ops.o_proj` without kernels: x e4m3 [T, G, K] and its packed scales, weights as there or in BF16.

    Refuses what the kernels refuse, with the same messages.
    """
    from vllm_megaattn import ops  # which imports this module

    checked = *_as_e4m3("wo_a", wo_a, wo_a_scale), *_as_e4m3("wo_b", wo_b, wo_b_scale)
    y = ops.run_o_proj("dequantised", x, x_scale, *checked, out=out)
    return project_quantized(x, x_scale, wo_a, wo_a_scale, wo_b, wo_b_scale, out=y)


def o_proj_from_attn(
    attn: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    wo_a: torch.Tensor,
    wo_a_scale: torch.Tensor | None,
    wo_b: torch.Tensor,
    wo_b_scale: torch.Tensor | None,
    *,
    groups: int,
    order: str = "standard",
    cos_sin_layout: str = "halves",
    padded_heads: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`ops.o_proj_from_attn` without kernels, weights as there or in BF16; refuses what the kernels refuse."""
    from vllm_megaattn import ops  # which imports this module

    columns = {"groups": groups, "order": order, "cos_sin_layout": cos_sin_layout}
    checked = *_as_e4m3("wo_a", wo_a, wo_a_scale), *_as_e4m3("wo_b", wo_b, wo_b_scale)
    y = ops.run_o_proj_from_attn(
        "dequantised", attn, positions, cos_sin, *checked, **columns, padded_heads=padded_heads, out=out
    )
    return project_attn(attn, positions, cos_sin, wo_a, wo_a_scale, wo_b, wo_b_scale, **columns, out=y)


def _as_e4m3(name: str, w: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the checks of the ops look at: BF16 weights stand there as e4m3 of their shape, with one scale a row, which
    take no memory."""
    if not isinstance(w, torch.Tensor) or w.dtype is not BF16 or w.dim() not in (2, 3):
        return w, scale
    if scale is not None:
        raise ValueError(f"{name}_scale must be None for a BF16 {name}, got {type(scale).__name__}")
    codes = torch.empty(w.shape[-1:], dtype=torch.float8_e4m3fn, device=w.device).expand(w.shape)
    return codes, torch.empty(1, dtype=torch.uint8, device=w.device).expand(*w.shape[:-1], 1)
