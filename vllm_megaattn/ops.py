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

_ops = torch.ops.vllm_megaattn
_einsum_fp8_sfd128x4 = _ops.einsum_fp8_sfd128x4.default
_einsum_fp8_bf16 = _ops.einsum_fp8_bf16.default
_mxfp8_quantize_sfd128x4 = _ops.mxfp8_quantize_sfd128x4.default
_mxfp8_gemm_wo_b = _ops.mxfp8_gemm_wo_b.default
_inv_rope_mxfp8_quantize = _ops.inv_rope_mxfp8_quantize.default
_o_proj = _ops.o_proj.default
_o_proj_from_attn = _ops.o_proj_from_attn.default
_reblock_weight = _ops.reblock_weight.default

ORDERS = {"standard": 0, "chunk_interleaved": 1}
COS_SIN_LAYOUTS = {"halves": 0, "interleaved": 1}

E4M3 = torch.float8_e4m3fn

# The widest span the kernels of a backend like best for scales that only they read (z, and x of o_proj_from_attn).
# 32 writes what any other quantiser would; a wider span is still valid MXFP8 and lets Hopper promote less often.
_PREFERRED_SPAN = {"sm90": 256}

# Backends whose kernels read scales per row and 32 columns fastest: packed words for wo_a, F8_128x4 for wo_b, which is
# also what vLLM holds there and the only form cuBLASLt takes.
ROW_SCALES = ("sm100", "sm103")

# Up to so many tokens the fused path on a GPU may want room for a BF16 z (csrc/cuda/cuda_backend.c).
_MAX_BF16_Z_TOKENS = 128


# ---- argument handling ---------------------------------------------------------------------------------------------


def _require_tensors(op: str, **tensors: object) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(tensor).__name__}")
        if not torch.compiler.is_compiling() and (tensor.layout is not torch.strided or tensor.is_neg()):
            kind = "a negated view" if tensor.is_neg() else str(tensor.layout)
            raise ValueError(f"{op}: {name} must be an ordinary strided tensor, got {kind}")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{op}: {name} requires grad, but this op has no backward; call it under torch.no_grad() or "
                "torch.inference_mode()"
            )


def _require_int(op: str, **values: object) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
            raise TypeError(f"{op}: {name} must be an int, got {type(value).__name__}")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError(f"{op}: {name} must fit 64 bits, got {value}")


def _require_bool(op: str, **values: object) -> None:
    for name, value in values.items():
        if not isinstance(value, bool):
            raise TypeError(f"{op}: {name} must be a bool, got {value!r}")


def _require_dims(op: str, name: str, tensor: torch.Tensor, dims: tuple[int, ...], shape: str) -> None:
    if tensor.dim() not in dims:
        raise ValueError(f"{op}: {name} must have shape {shape}, got {list(tensor.shape)}")


def _rows_of(op: str, name: str, w: torch.Tensor, groups: int) -> int:
    """N of weights [G, N, K] or [G*N, K]."""
    _require_dims(op, name, w, (2, 3), "[G, N, K] or [G*N, K]")
    if w.dim() == 2 and (groups == 0 or w.shape[0] % groups):
        raise ValueError(f"{op}: {name} must have a multiple of G = {groups} rows, got {w.shape[0]}")
    rows = w.shape[1] if w.dim() == 3 else w.shape[0] // groups
    if rows == 0:
        raise ValueError(f"{op}: {name} must have a positive number of rows, got shape {list(w.shape)}")
    return rows


def _choose(op: str, name: str, value: object, choices: dict[str, int]) -> int:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{op}: {name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
    return choices[value]


def _pair(op: str, out: object, names: str) -> tuple[torch.Tensor, torch.Tensor]:
    if not (isinstance(out, (tuple, list)) and len(out) == 2):
        raise TypeError(f"{op}: out must be a pair of tensors ({names}), got {type(out).__name__}")
    first, second = names.split(", ")
    _require_tensors(op, **{f"out[0] ({first})": out[0], f"out[1] ({second})": out[1]})
    return out[0], out[1]


def _names_of_pair(out: object, names: str) -> dict[str, str] | None:
    """What messages call the two results, if the caller gave them."""
    return None if out is None else {name: f"out[{i}] ({name})" for i, name in enumerate(names.split(", "))}


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
    _require_tensors(op, x=x, x_scale=x_scale, w=w, w_scale=w_scale)
    _require_int(op, scale_span=scale_span, x_span=x_span)
    _require_dims(op, "x", x, (3,), "[T, G, K]")
    if out is None:
        z, z_scale = _empty_mxfp8(x.shape[0], x.shape[1] * _rows_of(op, "w", w, x.shape[1]), x.device)
    else:
        z, z_scale = _pair(op, out, "z, z_scale")
    names = _names_of_pair(out, "z, z_scale")
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
    _require_tensors(op, x=x, x_scale=x_scale, w=w, w_scale=w_scale)
    _require_int(op, x_span=x_span)
    _require_dims(op, "x", x, (3,), "[T, G, K]")
    if out is None:
        shape = (x.shape[0], x.shape[1], _rows_of(op, "w", w, x.shape[1]))
        out = torch.empty(shape, dtype=torch.bfloat16, device=x.device)
    else:
        _require_tensors(op, out=out)
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
    _require_tensors(op, z=z)
    _require_int(op, scale_span=scale_span)
    _require_dims(op, "z", z, (2, 3), "[T, C] or [T, G, N]")
    if out is None:
        q, q_scale = _empty_mxfp8(z.shape[0], z.shape[1] * (z.shape[2] if z.dim() == 3 else 1), z.device)
    else:
        q, q_scale = _pair(op, out, "q, q_scale")
    names = _names_of_pair(out, "q, q_scale")
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
    _require_tensors(op, z=z, z_scale=z_scale, w=w, w_scale=w_scale)
    _require_int(op, z_span=z_span)
    _require_dims(op, "z", z, (2,), "[T, K]")
    _require_dims(op, "w", w, (2,), "[N, K]")
    _choose_wo_b(z.device)
    if out is None:
        out = torch.empty((z.shape[0], w.shape[0]), dtype=torch.bfloat16, device=z.device)
    else:
        _require_tensors(op, out=out)
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
    _require_tensors(op, attn=attn, positions=positions, cos_sin=cos_sin)
    _require_int(op, groups=groups, scale_span=scale_span)
    _require_bool(op, padded_heads=padded_heads)
    _require_dims(op, "attn", attn, (3,), "[T, heads, D]")
    codes = _choose(op, "order", order, ORDERS), _choose(op, "cos_sin_layout", cos_sin_layout, COS_SIN_LAYOUTS)
    if out is None:
        if padded_heads:
            raise ValueError(f"{op}: padded_heads needs out, whose K says how many heads are live; got out=None")
        x, x_scale = _empty_activation(attn.shape[0], groups, _group_columns(op, attn, groups), attn.device)
    else:
        x, x_scale = _pair(op, out, "x, x_scale")
        if x.dim() == 3:
            if x.shape[1] != groups:
                raise ValueError(f"{op}: out[0] (x) must have groups = {groups} as size 1, got {x.shape[1]}")
            _check_heads(op, attn, groups, x.shape[2], padded_heads)
    names = _names_of_pair(out, "x, x_scale")
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
    span = _PREFERRED_SPAN.get(selector.device_key(device), 32)
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
    _require_tensors(op, x=x, wo_a=wo_a)  # the others: run_o_proj
    _require_dims(op, "x", x, (3,), "[T, G, K]")
    chosen = _choose_path(op, x.device, _rows_of(op, "wo_a", wo_a, x.shape[1]), path)
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
    _require_tensors(op, x=x, x_scale=x_scale, wo_a=wo_a, wo_a_scale=wo_a_scale, wo_b=wo_b, wo_b_scale=wo_b_scale)
    _require_int(op, x_span=x_span)
    _require_dims(op, "x", x, (3,), "[T, G, K]")
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
    _require_tensors(op, attn=attn, wo_a=wo_a)  # the others: run_o_proj_from_attn
    _require_int(op, groups=groups)
    if groups <= 0:
        raise ValueError(f"{op}: groups must be positive, got {groups}")
    chosen = _choose_path(op, attn.device, _rows_of(op, "wo_a", wo_a, groups), path)
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
    _require_tensors(
        op,
        attn=attn,
        positions=positions,
        cos_sin=cos_sin,
        wo_a=wo_a,
        wo_a_scale=wo_a_scale,
        wo_b=wo_b,
        wo_b_scale=wo_b_scale,
    )
    _require_int(op, groups=groups)
    _require_bool(op, padded_heads=padded_heads)
    _require_dims(op, "attn", attn, (3,), "[T, heads, D]")
    if groups <= 0:
        raise ValueError(f"{op}: groups must be positive, got {groups}")
    _require_dims(op, "wo_a", wo_a, (2, 3), "[G, N, K] or [G*N, K]")
    if wo_a.dim() == 3 and wo_a.shape[0] != groups:
        raise ValueError(f"{op}: wo_a must have G = {groups} groups like groups says, got {wo_a.shape[0]}")
    k, head_dim = wo_a.shape[-1], attn.shape[2]
    if head_dim and head_dim % 32 == 0 and k % head_dim:  # the op would speak of x, which is made here
        raise ValueError(f"{op}: wo_a must have K a multiple of attn's head size {head_dim}, got {k}")
    _check_heads(op, attn, groups, k, padded_heads)
    codes = _choose(op, "order", order, ORDERS), _choose(op, "cos_sin_layout", cos_sin_layout, COS_SIN_LAYOUTS)
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
    rows = _rows_of(op, "wo_a", wo_a, groups)
    _require_dims(op, "wo_b", wo_b, (2,), "[N, K]")
    _require_dims(op, "wo_a_scale", wo_a_scale, (1, 2, 3), "[G, N/r, K/c] or [G*N/r, K/c]")
    fused = chosen != "unfused"
    if scale_span is None:
        scale_span = default_scale_span(device, wo_a, wo_a_scale)
    else:
        _require_int(op, scale_span=scale_span)
    z, z_scale = _empty_mxfp8(tokens, groups * rows, device)
    has_bf16 = not fused or (chosen == "fused" and device.type == "cuda" and tokens <= _MAX_BF16_Z_TOKENS)
    z_bf16 = torch.empty((tokens, groups, rows) if has_bf16 else (0,), dtype=torch.bfloat16, device=device)
    if out is None:
        out = torch.empty((tokens, wo_b.shape[0]), dtype=torch.bfloat16, device=device)
    else:
        _require_tensors(op, out=out)
    return z, z_scale, z_bf16, out, fused, scale_span


# ---- weights, once at load -----------------------------------------------------------------------------------------

# A weight whose re-blocking changes it by more than this (relative Frobenius norm) keeps its own scales: the e4m3
# rounding of the weights themselves is 2.7e-2, so 1e-4 is invisible, and ordinary weights stay below 1e-6.
MAX_REBLOCK_ERROR = 1e-4


def prepare_weight(
    w: torch.Tensor,
    w_scale: torch.Tensor,
    *,
    groups: int | None = None,
    device: torch.device | str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, object]]:
    """Brings weights into the form the device's kernels like best; idempotent, run once at load.

    w:       e4m3 [G, N, K], [G*N, K] or [N, K].
    w_scale: any form that the ops take, or float32 blocks of positive powers of two (others are refused: rounding a
             scale without re-quantising the data would change the weights).
    groups:  G of a 2-D w whose groups lie one below the other, 2-D scales likewise. None: as a third dimension of w or of
             w_scale says, else 1; refused where [G*rows, cols] scales fit one matrix and G stacked ones, with other blocks.
    device:  where the result shall live; default: where w lives.

    Returns (w, w_scale, report), w of the same shape as before. On the CPU the values are kept as they are, contiguous,
    scales as uint8 where they were float32. On Hopper each 32 rows share one scale over all of K (uint8 [.., N/32, 1],
    2-D where both arguments were): exact but for elements pushed into e4m3's subnormal range; weights that would change by
    more than MAX_REBLOCK_ERROR keep their scales.
    On datacenter Blackwell the data stay as they are and scales are laid out as the tensor cores read them: wo_a (3-D, or
    `groups` or scales that say so) gets int32 words [G, N, K/128] with stride 1 over N, w [N, K] gets 1-D F8_128x4.
    report: {"form", "changed" (elements whose value changed), "elements", "relative_error", "nan_elements", "nan_scales"
    (how many 0x7F or 0xFF, and 0xFF)}, and where those are not 0 "first_nan_element", "first_nan_scale" (indices into w
    and into the scales as bytes). NaN is kept, never laundered: a caller that wants none asks the report.
    """
    op = "prepare_weight"
    _require_tensors(op, w=w, w_scale=w_scale)
    selector.requested_wo_b()
    if groups is not None:
        _require_int(op, groups=groups)
    if w.dtype is not E4M3:
        raise TypeError(f"{op}: w must have dtype float8_e4m3fn, got {str(w.dtype).removeprefix('torch.')}")
    _require_dims(op, "w", w, (2, 3), "[G, N, K] or [G*N, K]")
    target = torch.device(device) if device is not None else w.device
    if w_scale.dtype is torch.float32:
        w_scale = layouts.scale_bytes_from_float32(w_scale, name=f"{op}: w_scale")
    groups = _groups_of_weight(op, w, w_scale, groups)
    _check_weight(op, w, w_scale, groups)
    report: dict[str, object] = {"form": "as given", "changed": 0, "elements": w.numel(), "relative_error": 0.0}
    report.update(_count_nan(w, w_scale))
    key = selector.device_key(target)
    already = w_scale.dtype is not torch.int32 and w_scale.dim() > 1 and w_scale.shape[-1] == 1
    if _PREFERRED_SPAN.get(key, 32) > 32 and not already and w.numel() // (groups * w.shape[-1]) % 32 == 0:
        wide_w, wide_scale, stats = _reblock(w, w_scale, groups, 32, w.shape[-1])
        if stats["relative_error"] <= MAX_REBLOCK_ERROR:
            w, w_scale = wide_w, wide_scale
            report.update(stats, form="32 rows x K")
        else:
            report.update(form="as given", refused_relative_error=stats["relative_error"])
    if key in ROW_SCALES:
        grouped = w.dim() == 3 or w_scale.dim() == 3 or groups > 1
        w_scale, report["form"] = _row_scales(w, w_scale, groups if grouped else None)
    return w.to(target).contiguous(), w_scale.to(target), report


def _row_scales(w: torch.Tensor, w_scale: torch.Tensor, groups: int | None) -> tuple[torch.Tensor, str]:
    """Scales as Blackwell's kernels read them, and the name of the form; what has the form already is returned as is.
    groups None: one matrix of two dimensions, wo_b."""
    if groups is not None and w_scale.dtype is torch.int32 and w_scale.dim() == 3:
        return w_scale, "packed words"
    if groups is None and w_scale.dim() == 1:
        return w_scale, "F8_128x4"
    rows = w.numel() // w.shape[-1] // (groups or 1)
    linear = layouts.linear_weight_scale(w_scale, groups or 1, rows, w.shape[-1])
    if groups is not None:
        return layouts.to_packed(linear), "packed words"
    return layouts.to_f8_128x4(linear[0]), "F8_128x4"


def _groups_of_weight(op: str, w: torch.Tensor, w_scale: torch.Tensor, groups: int | None) -> int:
    """G of a weight and its scales; refuses what contradicts itself or can be read in two ways."""
    rows = w.shape[0]
    if w.dim() == 3:
        if groups not in (None, w.shape[0]):
            raise ValueError(f"{op}: groups must be {w.shape[0]} as in w {list(w.shape)}, got {groups}")
        return w.shape[0]
    if groups is None:
        groups = w_scale.shape[0] if w_scale.dim() == 3 else 1
        if w_scale.dim() == 2 and w_scale.dtype is not torch.int32:
            other = _stacked_reading(rows, w_scale.shape[0])
            if other:
                raise ValueError(
                    f"{op}: w_scale {list(w_scale.shape)} fits w {list(w.shape)} as one matrix (groups=1) and as "
                    f"{other} stacked ones (groups={other}), in different blocks: say which"
                )
    if groups < 1 or rows % groups:
        raise ValueError(f"{op}: groups must be a positive divisor of the {rows} rows of w, got {groups}")
    return groups


def _stacked_reading(rows: int, scale_rows: int) -> int:
    """The smallest G >= 2 for which `scale_rows` rows of scales also fit G stacked matrices, in other places than one
    matrix of `rows` rows; 0 if there is none. Blocks that divide the rows lie in the same places either way."""
    heights = {block_rows for block_rows, _ in layouts.WEIGHT_BLOCKS}
    fitting = [height for height in heights if layouts.ceil_div(rows, height) == scale_rows]
    if not fitting or any(rows % height == 0 for height in fitting):
        return 0
    for groups in range(2, scale_rows + 1):
        if rows % groups == 0 and scale_rows % groups == 0:
            per_group = rows // groups
            if any(layouts.ceil_div(per_group, height) == scale_rows // groups for height in heights):
                return groups
    return 0


def _check_weight(op: str, w: torch.Tensor, w_scale: torch.Tensor, groups: int) -> None:
    """Refuses what the ops would refuse, by asking one: zero tokens, tensors of the same shapes on the CPU, no work. The
    op itself, not its front end, which would ask for a route of wo_b that the CPU may not have."""
    k, grouped = w.shape[-1], w.dim() == 3 or groups > 1
    multiple = 128 if grouped else layouts.BLOCK
    if k == 0 or k % multiple:  # the op would speak of the activation that is made here
        what = "groups of weights" if grouped else "weights"
        raise ValueError(f"{op}: w must have K a positive multiple of {multiple} for {what}, got {k}")

    def cpu(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cpu")

    w_like, scale_like = cpu(w.shape, w.dtype), cpu(w_scale.shape, w_scale.dtype)
    rows = w.numel() // k // groups
    asked = "einsum_fp8_bf16" if grouped else "mxfp8_gemm_wo_b"
    try:
        if grouped:
            x, x_scale = cpu((0, groups, k), E4M3), cpu((0, groups, k // 128), torch.int32)
            call(_einsum_fp8_bf16, asked, x, x_scale, w_like, scale_like, cpu((0, groups, rows), torch.bfloat16), 32)
        else:
            z, z_scale = cpu((0, k), E4M3), cpu((0,), torch.uint8)
            call(_mxfp8_gemm_wo_b, asked, z, z_scale, w_like, scale_like, cpu((0, rows), torch.bfloat16), 32)
    except (TypeError, ValueError) as error:
        text = str(error).removeprefix(f"{asked}: ")
        stacked = w.dim() == 2 and groups == 1 and text.startswith("w_scale must hold")
        hint = "; groups= splits a w of stacked groups" if stacked else ""
        raise type(error)(f"{op}: {text}{hint}") from None


def _count_nan(w: torch.Tensor, w_scale: torch.Tensor) -> dict[str, object]:
    """prepare_weight's report on NaN codes."""
    if w.is_meta or w_scale.is_meta:
        return {"nan_elements": 0, "nan_scales": 0}
    report: dict[str, object] = {}
    for kind, data in (("element", w), ("scale", layouts.weight_scale_bytes(w_scale, *w.shape[-2:], name="w_scale"))):
        count, first = layouts.find_nan(data)
        report[f"nan_{kind}s"] = count
        if count:
            report[f"first_nan_{kind}"] = first
    return report


def _reblock(
    w: torch.Tensor, w_scale: torch.Tensor, groups: int, block_rows: int, block_cols: int
) -> tuple[torch.Tensor, torch.Tensor, dict[str, object]]:
    """One scale per block_rows x block_cols block of each group, on the CPU. w keeps its shape; the scales have 3
    dimensions unless both arguments had 2 (or fewer)."""
    source, scale = w.cpu(), w_scale.cpu()
    if w.dim() == 2:
        source = source.unflatten(0, (groups, -1))
    _, rows, k = source.shape
    out_w = torch.empty_like(source, memory_format=torch.contiguous_format)
    scale_shape = groups, -(-rows // block_rows), -(-k // block_cols)
    out_scale = torch.empty(scale_shape, dtype=torch.uint8, device="cpu")
    stats = torch.empty(3, dtype=torch.float64, device="cpu")
    call(_reblock_weight, "reblock_weight", source, scale, out_w, out_scale, stats)
    changed, error, norm = stats.tolist()
    if w.dim() == 2 and w_scale.dim() < 3:
        out_scale = out_scale.flatten(0, 1)
    report = {"changed": int(changed), "relative_error": (error / norm) ** 0.5 if norm else 0.0}
    return out_w.view(w.shape), out_scale, report
