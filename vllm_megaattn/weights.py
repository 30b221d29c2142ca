"""`prepare_weight`: weights in the form that the device's kernels like best, once at load."""

from __future__ import annotations

import torch

from vllm_megaattn import layouts, selector
from vllm_megaattn._registration import call
from vllm_megaattn.arguments import require_dims, require_int, require_tensors
from vllm_megaattn.ops import PREFERRED_SPAN

E4M3 = torch.float8_e4m3fn
_einsum_fp8_bf16 = torch.ops.vllm_megaattn.einsum_fp8_bf16.default
_mxfp8_gemm_wo_b = torch.ops.vllm_megaattn.mxfp8_gemm_wo_b.default
_reblock_weight = torch.ops.vllm_megaattn.reblock_weight.default

# Backends whose kernels read scales per row and 32 columns fastest: packed words for wo_a, F8_128x4 for wo_b, which is
# also what vLLM holds there and the only form cuBLASLt takes.
ROW_SCALES = ("sm100", "sm103")

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
    require_tensors(op, w=w, w_scale=w_scale)
    selector.requested_wo_b()
    if groups is not None:
        require_int(op, groups=groups)
    if w.dtype is not E4M3:
        raise TypeError(f"{op}: w must have dtype float8_e4m3fn, got {str(w.dtype).removeprefix('torch.')}")
    require_dims(op, "w", w, (2, 3), "[G, N, K] or [G*N, K]")
    target = torch.device(device) if device is not None else w.device
    if w_scale.dtype is torch.float32:
        w_scale = layouts.scale_bytes_from_float32(w_scale, name=f"{op}: w_scale")
    groups = _groups_of_weight(op, w, w_scale, groups)
    _check_weight(op, w, w_scale, groups)
    report: dict[str, object] = {"form": "as given", "changed": 0, "elements": w.numel(), "relative_error": 0.0}
    report.update(_count_nan(w, w_scale))
    key = selector.device_key(target)
    already = w_scale.dtype is not torch.int32 and w_scale.dim() > 1 and w_scale.shape[-1] == 1
    if PREFERRED_SPAN.get(key, 32) > 32 and not already and w.numel() // (groups * w.shape[-1]) % 32 == 0:
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
