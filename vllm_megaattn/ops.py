"""Python front ends of torch.ops.vllm_megaattn.*: same names, allocate the results, raise ValueError / TypeError.

Shapes use these letters: T tokens, G groups, K columns contracted, N rows of a group's weight, C = G * N columns of
z. Strides are in elements. Data is float8_e4m3fn; scales are UE8M0 bytes, one for 32 elements along K; the rules of
both are stated in csrc/mxfp8.h. `out` takes tensors of the documented shapes; results never alias inputs. Inference
only: these functions refuse tensors that require grad while grad mode is on. The ops below them, called through
torch.ops, have no autograd kernel: their results are plain data, detached from inputs that require grad.

The checks themselves live in C (csrc/op_check.c), so that `torch.ops` callers get them too; the functions here check
just what they need to know the shape of a result.
"""

from __future__ import annotations

import torch

from vllm_megaattn import dequantised, layouts, selector
from vllm_megaattn._registration import call, check
from vllm_megaattn.arguments import (
    choose,
    names_of_pair,
    pair_of,
    require_bool,
    require_dims,
    require_int,
    require_tensors,
    rows_of,
)

_ops = torch.ops.vllm_megaattn
_einsum_fp8_sfd128x4 = _ops.einsum_fp8_sfd128x4.default
_einsum_fp8_bf16 = _ops.einsum_fp8_bf16.default
_mxfp8_quantize_sfd128x4 = _ops.mxfp8_quantize_sfd128x4.default
_mxfp8_gemm_wo_b = _ops.mxfp8_gemm_wo_b.default
_inv_rope_mxfp8_quantize = _ops.inv_rope_mxfp8_quantize.default
_o_proj = _ops.o_proj.default
_o_proj_from_attn = _ops.o_proj_from_attn.default

ORDERS = {"standard": 0, "chunk_interleaved": 1}
COS_SIN_LAYOUTS = {"halves": 0, "interleaved": 1}

E4M3 = torch.float8_e4m3fn

# The widest span the kernels of a backend like best for scales that only they read (z, and x of o_proj_from_attn).
# 32 writes what any other quantiser would; a wider span is still valid MXFP8 and lets Hopper promote less often.
PREFERRED_SPAN = {"sm90": 256}

# Up to so many tokens the fused path on a GPU may want room for a BF16 z (csrc/cuda/cuda_backend.c).
_MAX_BF16_Z_TOKENS = 128


def _empty_mxfp8(tokens: int, cols: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """z e4m3 [T, C] and its 1-D F8_128x4 scales; the op writes every byte of both."""
    z = torch.empty((tokens, cols), dtype=E4M3, device=device)
    return z, torch.empty(layouts.f8_128x4_bytes(tokens, cols // 32), dtype=torch.uint8, device=device)


def _empty_activation(tokens: int, groups: int, k: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """x e4m3 [T, G, K] and int32 scales [T, G, K/128] with stride 1 over T and a pitch of ceil4(T)."""
    x = torch.empty((tokens, groups, k), dtype=E4M3, device=device)
    pitch = (tokens + 3) // 4 * 4
    words = torch.empty((groups, k // 128, pitch), dtype=torch.int32, device=device)
    return x, words.permute(2, 0, 1)[:tokens]


# ---- the two halves ------------------------------------------------------------------------------------------------


def einsum_fp8_sfd128x4(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    *,
    scale_span: int = 32,
    x_span: int = 32,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """z[t, g, n] = sum over k of x[t, g, k] * w[g, n, k], written as MXFP8 by the epilogue.

    x:        e4m3 [T, G, K], any token and group stride (expanded views too), last stride 1; K % 128 == 0.
    x_scale:  int32 [T, G, K/128], four UE8M0 bytes a word, lowest K in the low byte; any strides.
    w:        e4m3 [G, N, K] (last stride 1) or [G*N, K].
    w_scale:  told apart by dtype and shape: int32 [G, N, K/128] per row, or uint8 / float8_e8m0fnu blocks
              [G, N/r, K/c] with r in {1, 32, 128}, c in {32, 128, 256, K}; 2-D forms stack the groups.
    scale_span: columns of z that share one scale: 32 (byte-equal to quantising the BF16 z), 128 or 256 (the byte is
              repeated: still valid MXFP8). N % scale_span == 0.
    x_span:   columns over which the caller vouches that x's scale bytes are equal, i.e. the scale_span it was
              quantised with. 32 promises nothing. Lets Hopper run its wide kernel, where a broken promise gives
              wrong results.
    out:      (z, z_scale) to write into.

    Returns z e4m3 [T, G*N] and z_scale uint8 1-D F8_128x4, ceil128(T) * ceil4(G*N/32) bytes, padding 0x00.
    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape, stride, device or span.
    """
    op = "einsum_fp8_sfd128x4"
    require_tensors(op, x=x, x_scale=x_scale, w=w, w_scale=w_scale)
    require_int(op, scale_span=scale_span, x_span=x_span)
    require_dims(op, "x", x, (3,), "[T, G, K]")
    if out is None:
        z, z_scale = _empty_mxfp8(x.shape[0], x.shape[1] * rows_of(op, "w", w, x.shape[1]), x.device)
    else:
        z, z_scale = pair_of(op, out, "z, z_scale")
    names = names_of_pair(out, "z, z_scale")
    call(_einsum_fp8_sfd128x4, op, x, x_scale, w, w_scale, z, z_scale, x_span, scale_span, names=names)
    return z, z_scale


def einsum_fp8_bf16(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    *,
    x_span: int = 32,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same product with BF16 result [T, G, N]: the first kernel of the unfused path.

    Arguments as in `einsum_fp8_sfd128x4`; out may have any token and group stride, last stride 1.
    """
    op = "einsum_fp8_bf16"
    require_tensors(op, x=x, x_scale=x_scale, w=w, w_scale=w_scale)
    require_int(op, x_span=x_span)
    require_dims(op, "x", x, (3,), "[T, G, K]")
    if out is None:
        shape = (x.shape[0], x.shape[1], rows_of(op, "w", w, x.shape[1]))
        out = torch.empty(shape, dtype=torch.bfloat16, device=x.device)
    else:
        require_tensors(op, out=out)
    call(_einsum_fp8_bf16, op, x, x_scale, w, w_scale, out, x_span, names={"z": "out"})
    return out


def mxfp8_quantize_sfd128x4(
    z: torch.Tensor,
    *,
    scale_span: int = 32,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """BF16 -> MXFP8 by the rules of csrc/mxfp8.h, rows flattened over groups: the second kernel of the unfused path.

    z: BF16 [T, C] or [T, G, N] (C = G*N), last stride 1, other strides free; columns of a group % scale_span == 0.

    Returns q e4m3 [T, C] and q_scale uint8 1-D F8_128x4, padding 0x00. The padding is that of the flattened [T, C]
    matrix, not per group.
    """
    op = "mxfp8_quantize_sfd128x4"
    require_tensors(op, z=z)
    require_int(op, scale_span=scale_span)
    require_dims(op, "z", z, (2, 3), "[T, C] or [T, G, N]")
    if out is None:
        q, q_scale = _empty_mxfp8(z.shape[0], z.shape[1] * (z.shape[2] if z.dim() == 3 else 1), z.device)
    else:
        q, q_scale = pair_of(op, out, "q, q_scale")
    names = names_of_pair(out, "q, q_scale")
    call(_mxfp8_quantize_sfd128x4, op, z, q, q_scale, scale_span, names=names)
    return q, q_scale


def mxfp8_gemm_wo_b(
    z: torch.Tensor,
    z_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    *,
    z_span: int = 32,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """y[t, n] = sum over k of z[t, k] * w[n, k], BF16 [T, N].

    z:        e4m3 [T, K], any row stride, last stride 1; K % 32 == 0.
    z_scale:  UE8M0 bytes in F8_128x4: 1-D uint8 / float8_e8m0fnu of ceil128(T) * ceil4(K/32) bytes, or the same
              memory as int32 [ceil(T/128), K/128, 128]. Padding bytes may hold anything.
    w:        e4m3 [N, K], last stride 1 (a [K, N] view with stride (1, K) is passed as .t()).
    w_scale:  1-D F8_128x4, int32 [N, K/128], or blocks [N/r, K/c] as in `einsum_fp8_sfd128x4`.
    z_span:   as x_span there: the scale_span z was written with.
    """
    op = "mxfp8_gemm_wo_b"
    require_tensors(op, z=z, z_scale=z_scale, w=w, w_scale=w_scale)
    require_int(op, z_span=z_span)
    require_dims(op, "z", z, (2,), "[T, K]")
    require_dims(op, "w", w, (2,), "[N, K]")
    _choose_wo_b(z.device)
    if out is None:
        out = torch.empty((z.shape[0], w.shape[0]), dtype=torch.bfloat16, device=z.device)
    else:
        require_tensors(op, out=out)
    call(_mxfp8_gemm_wo_b, op, z, z_scale, w, w_scale, out, z_span, names={"y": "out"})
    return out


def inv_rope_mxfp8_quantize(
    attn: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    groups: int,
    order: str = "standard",
    cos_sin_layout: str = "halves",
    scale_span: int = 32,
    padded_heads: bool = False,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates the attention output back by its positions and quantises it: what wo_a reads.

    attn:      BF16 [T, heads, D], token and head stride free, last stride 1. The last R columns of a head are R/2
               interleaved pairs (DeepSeek: D = 512, R = 64).
    positions: int64 [T]. One outside the cache poisons its token with NaN scales (0xFF); others are untouched.
    cos_sin:   float32 [positions, R]; "halves": cos[R/2] then sin[R/2] (vLLM), "interleaved": cos, sin, cos, ...
               (SGLang).
    groups:    G; a group has heads/G heads.
    order:     columns of a group: "standard" head * D + d, or "chunk_interleaved" (d/32 * heads + head) * 32 + d%32,
               the order vLLM's mega attention writes and its wo_a is permuted to.
    scale_span: columns that share one scale, 32, 128 or 256.
    padded_heads: True: attn may have more heads than G * K/D, those behind are padding and never read; K is then that of
               out[0], which must be given. False (default): so many heads are an error, since they usually mean wrong
               groups; a view attn[:, :live] leaves padding out too.

    Values are rotated in FP32 (order of operations: csrc/kernels.h), rounded to BF16, then quantised.
    Returns x e4m3 [T, G, K] contiguous, K = heads/G * D, and x_scale int32 [T, G, K/128] with stride 1 over T.
    """
    op = "inv_rope_mxfp8_quantize"
    require_tensors(op, attn=attn, positions=positions, cos_sin=cos_sin)
    require_int(op, groups=groups, scale_span=scale_span)
    require_bool(op, padded_heads=padded_heads)
    require_dims(op, "attn", attn, (3,), "[T, heads, D]")
    codes = choose(op, "order", order, ORDERS), choose(op, "cos_sin_layout", cos_sin_layout, COS_SIN_LAYOUTS)
    if out is None:
        if padded_heads:
            raise ValueError(f"{op}: padded_heads needs out, whose K says how many heads are live; got out=None")
        x, x_scale = _empty_activation(attn.shape[0], groups, _group_columns(op, attn, groups), attn.device)
    else:
        x, x_scale = pair_of(op, out, "x, x_scale")
        if x.dim() == 3:
            if x.shape[1] != groups:
                raise ValueError(f"{op}: out[0] (x) must have groups = {groups} as size 1, got {x.shape[1]}")
            _check_heads(op, attn, groups, x.shape[2], padded_heads)
    names = names_of_pair(out, "x, x_scale")
    call(_inv_rope_mxfp8_quantize, op, attn, positions, cos_sin, x, x_scale, *codes, scale_span, names=names)
    return x, x_scale


def _group_columns(op: str, attn: torch.Tensor, groups: int) -> int:
    """K of one group when all heads of attn are live."""
    if groups <= 0 or attn.shape[1] % groups:
        raise ValueError(f"{op}: groups must divide the {attn.shape[1]} heads of attn, got {groups}")
    k, head_dim = attn.shape[1] // groups * attn.shape[2], attn.shape[2]
    if k % 128 and head_dim % 32 == 0:  # the op would speak of x, which is made here
        raise ValueError(f"{op}: groups must leave each a multiple of 128 columns, got {groups}: K = {k} of attn")
    return k


def _check_heads(op: str, attn: torch.Tensor, groups: int, k: int, padded_heads: bool) -> None:
    """Refuses heads that `groups` groups of k columns do not read, unless the caller knows of them. Too few heads, and k
    that is no multiple of D, are refused by the op."""
    head_dim = attn.shape[2]
    if padded_heads or head_dim == 0 or k % head_dim:
        return
    live = groups * (k // head_dim)
    if attn.shape[1] > live:
        raise ValueError(
            f"{op}: attn must have {live} heads (groups = {groups} of K/D = {k // head_dim}), got {attn.shape[1]}; a "
            f"tensor-parallel rank takes the slice of its own heads, not all of them; only if those behind the first "
            f"{live} are padding, say padded_heads=True"
        )


# ---- the whole projection ------------------------------------------------------------------------------------------


def default_scale_span(device: torch.device, wo_a: torch.Tensor, wo_a_scale: torch.Tensor) -> int:
    """The span o_proj uses for scales that only its own kernels read: wide where backend and weights allow."""
    span = PREFERRED_SPAN.get(selector.device_key(device), 32)
    prepared = wo_a_scale.dtype is not torch.int32 and wo_a_scale.shape[-1] == 1
    return span if prepared and wo_a.shape[-1] % span == 0 and wo_a.shape[-2] % span == 0 else 32


def o_proj(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    wo_a: torch.Tensor,
    wo_a_scale: torch.Tensor,
    wo_b: torch.Tensor,
    wo_b_scale: torch.Tensor,
    *,
    path: str = "auto",
    scale_span: int | None = None,
    x_span: int = 32,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The output projection of quantised activations: y = wo_b(quantise(wo_a(x))), BF16 [T, N_b].

    x, x_scale, wo_a, wo_a_scale, x_span: as in `einsum_fp8_sfd128x4`. wo_b, wo_b_scale: as in `mxfp8_gemm_wo_b`, with
    wo_b e4m3 [N_b, G*N].
    path:       "auto", "fused" or "unfused"; both give the same bits. "dequantised" runs torch's BF16 products, which
                "auto" does too where there is no kernel yet (SM12x). A path that cannot be taken raises ValueError.
    scale_span: scale span of z inside; None takes the backend's favourite (32 on the CPU; see `default_scale_span`).
    """
    op = "o_proj"
    require_tensors(op, x=x, wo_a=wo_a)  # the others: run_o_proj
    require_dims(op, "x", x, (3,), "[T, G, K]")
    chosen = _choose_path(op, x.device, rows_of(op, "wo_a", wo_a, x.shape[1]), path)
    operands = x, x_scale, wo_a, wo_a_scale, wo_b, wo_b_scale
    y = run_o_proj(chosen, *operands, scale_span=scale_span, x_span=x_span, out=out)
    return dequantised.project_quantized(*operands, out=y) if chosen == "dequantised" else y


def run_o_proj(
    chosen: str,
    x: torch.Tensor,
    x_scale: torch.Tensor,
    wo_a: torch.Tensor,
    wo_a_scale: torch.Tensor,
    wo_b: torch.Tensor,
    wo_b_scale: torch.Tensor,
    *,
    scale_span: int | None = None,
    x_span: int = 32,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`o_proj` on a path that has been chosen. "dequantised": all arguments are checked as for the kernels, y is
    allocated and still to be computed."""
    op = "o_proj"
    require_tensors(op, x=x, x_scale=x_scale, wo_a=wo_a, wo_a_scale=wo_a_scale, wo_b=wo_b, wo_b_scale=wo_b_scale)
    require_int(op, x_span=x_span)
    require_dims(op, "x", x, (3,), "[T, G, K]")
    z, z_scale, z_bf16, y, fused, scale_span = _projection_buffers(
        op, x.shape[0], x.shape[1], x.device, wo_a, wo_a_scale, wo_b, chosen, scale_span, out
    )
    run = check if chosen == "dequantised" else call
    run(
        _o_proj, op, x, x_scale, wo_a, wo_a_scale, wo_b, wo_b_scale, z, z_scale, z_bf16, y, fused, x_span, scale_span,
        names={"y": "out", "z": "wo_a has rows"},
    )  # fmt: skip
    return y


def o_proj_from_attn(
    attn: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    wo_a: torch.Tensor,
    wo_a_scale: torch.Tensor,
    wo_b: torch.Tensor,
    wo_b_scale: torch.Tensor,
    *,
    groups: int,
    order: str = "standard",
    cos_sin_layout: str = "halves",
    path: str = "auto",
    scale_span: int | None = None,
    padded_heads: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The output projection of a BF16 attention output: inverse RoPE + quantise, then `o_proj`. BF16 [T, N_b].

    Arguments as in `inv_rope_mxfp8_quantize` and `o_proj`; K comes from wo_a, so attn has G * K/D heads, and more only
    with padded_heads=True, as vLLM's buffers of 64 heads have on a tensor-parallel rank. scale_span is used for x and for
    z.
    """
    op = "o_proj_from_attn"
    require_tensors(op, attn=attn, wo_a=wo_a)  # the others: run_o_proj_from_attn
    require_int(op, groups=groups)
    if groups <= 0:
        raise ValueError(f"{op}: groups must be positive, got {groups}")
    chosen = _choose_path(op, attn.device, rows_of(op, "wo_a", wo_a, groups), path)
    operands = attn, positions, cos_sin, wo_a, wo_a_scale, wo_b, wo_b_scale
    columns = {"groups": groups, "order": order, "cos_sin_layout": cos_sin_layout}
    y = run_o_proj_from_attn(chosen, *operands, **columns, scale_span=scale_span, padded_heads=padded_heads, out=out)
    return dequantised.project_attn(*operands, **columns, out=y) if chosen == "dequantised" else y


def run_o_proj_from_attn(
    chosen: str,
    attn: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    wo_a: torch.Tensor,
    wo_a_scale: torch.Tensor,
    wo_b: torch.Tensor,
    wo_b_scale: torch.Tensor,
    *,
    groups: int,
    order: str,
    cos_sin_layout: str,
    scale_span: int | None = None,
    padded_heads: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`o_proj_from_attn` on a path that has been chosen, as `run_o_proj`."""
    op = "o_proj_from_attn"
    require_tensors(
        op,
        attn=attn,
        positions=positions,
        cos_sin=cos_sin,
        wo_a=wo_a,
        wo_a_scale=wo_a_scale,
        wo_b=wo_b,
        wo_b_scale=wo_b_scale,
    )
    require_int(op, groups=groups)
    require_bool(op, padded_heads=padded_heads)
    require_dims(op, "attn", attn, (3,), "[T, heads, D]")
    if groups <= 0:
        raise ValueError(f"{op}: groups must be positive, got {groups}")
    require_dims(op, "wo_a", wo_a, (2, 3), "[G, N, K] or [G*N, K]")
    if wo_a.dim() == 3 and wo_a.shape[0] != groups:
        raise ValueError(f"{op}: wo_a must have G = {groups} groups like groups says, got {wo_a.shape[0]}")
    k, head_dim = wo_a.shape[-1], attn.shape[2]
    if head_dim and head_dim % 32 == 0 and k % head_dim:  # the op would speak of x, which is made here
        raise ValueError(f"{op}: wo_a must have K a multiple of attn's head size {head_dim}, got {k}")
    _check_heads(op, attn, groups, k, padded_heads)
    codes = choose(op, "order", order, ORDERS), choose(op, "cos_sin_layout", cos_sin_layout, COS_SIN_LAYOUTS)
    z, z_scale, z_bf16, y, fused, scale_span = _projection_buffers(
        op, attn.shape[0], groups, attn.device, wo_a, wo_a_scale, wo_b, chosen, scale_span, out
    )
    x, x_scale = _empty_activation(attn.shape[0], groups, k, attn.device)
    run = check if chosen == "dequantised" else call
    run(
        _o_proj_from_attn, op, attn, positions, cos_sin, wo_a, wo_a_scale, wo_b, wo_b_scale,
        x, x_scale, z, z_scale, z_bf16, y, *codes, fused, scale_span, names={"y": "out", "z": "wo_a has rows"},
    )  # fmt: skip
    return y


def _choose_path(op: str, device: torch.device, rank: int, path: str) -> str:
    """The path of this call: "fused", "unfused" or "dequantised"."""
    if not isinstance(path, str):
        raise TypeError(f"{op}: path must be a str, got {type(path).__name__}")
    chosen = selector.select_path(selector.device_key(device), rank=rank, requested=path, op=op).path
    if chosen != "dequantised":
        _choose_wo_b(device)
    return chosen


def _choose_wo_b(device: torch.device) -> None:
    """Tells the C core which route VLLM_MEGAATTN_WO_B wants; ValueError where the device has not got it."""
    if not torch.compiler.is_compiling():
        selector.request_wo_b(selector.device_key(device))


def _projection_buffers(
    op: str,
    tokens: int,
    groups: int,
    device: torch.device,
    wo_a: torch.Tensor,
    wo_a_scale: torch.Tensor,
    wo_b: torch.Tensor,
    chosen: str,
    scale_span: int | None,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, bool, int]:
    """Allocates what lies between the kernels of the chosen path (z, its scales, BF16 z) and y.

    BF16 z is what the unfused path is about. The fused path on a GPU gets room for it when tokens are few: kernels that
    read their weights once may quantise it in place of writing z quantised (csrc/cuda/sm90_decode.h).
    """
    rows = rows_of(op, "wo_a", wo_a, groups)
    require_dims(op, "wo_b", wo_b, (2,), "[N, K]")
    require_dims(op, "wo_a_scale", wo_a_scale, (1, 2, 3), "[G, N/r, K/c] or [G*N/r, K/c]")
    fused = chosen != "unfused"
    if scale_span is None:
        scale_span = default_scale_span(device, wo_a, wo_a_scale)
    else:
        require_int(op, scale_span=scale_span)
    z, z_scale = _empty_mxfp8(tokens, groups * rows, device)
    has_bf16 = not fused or (chosen == "fused" and device.type == "cuda" and tokens <= _MAX_BF16_Z_TOKENS)
    z_bf16 = torch.empty((tokens, groups, rows) if has_bf16 else (0,), dtype=torch.bfloat16, device=device)
    if out is None:
        out = torch.empty((tokens, wo_b.shape[0]), dtype=torch.bfloat16, device=device)
    else:
        require_tensors(op, out=out)
    return z, z_scale, z_bf16, out, fused, scale_span
