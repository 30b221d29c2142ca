"""Keeping a checkpoint's MXFP8 bytes through an engine's loading, and through every later loading.

An engine calls a post-load step once after the first loading and again after each weight update (reinforcement
learning, waking from sleep). Captured CUDA graphs hold the addresses, shapes and the kernel that fits the scale form, so
the form is decided once, at the first loading, and every later one must produce the same:

    "32 rows x K"   what Hopper's kernels like best: one scale for 32 rows and all of K
    "blocks"        the checkpoint's own 32x32 or 128x128 blocks (or rows x 32, where rows of a block differ)

One `KeptWeight` remembers that decision for one matrix.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from vllm_megaattn import layouts, selector
from vllm_megaattn.weights import MAX_REBLOCK_ERROR, ROW_SCALES, prepare_weight

BLOCKS = "blocks"
WIDE = "32 rows x K"

Prepare = Callable[..., "tuple[torch.Tensor, torch.Tensor, dict[str, object]]"]


class KeptWeight:
    """The form of one matrix's scales, and the way from what the engine loaded to what the kernels read.

    name:     for messages, e.g. "model.layers.0.attn.wo_a"
    dummy:    the first loading brings random values (load format "dummy"): the form is chosen as for real weights
    prepare:  `vllm_megaattn.prepare_weight`, or a function like it
    """

    def __init__(self, name: str, *, dummy: bool = False, prepare: Prepare = prepare_weight) -> None:
        self.name = name
        self.form: str | None = None
        self.block_rows: int | None = None  # rows that share a scale in the loaded tensor, once collapsed
        self.report: dict[str, object] = {"changed": 0, "elements": 0, "relative_error": 0.0}
        self._dummy = dummy
        self._prepare = prepare

    def convert(
        self, weight: torch.Tensor, scale: torch.Tensor, *, device: torch.device | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """weight e4m3 [N, K] and its scales as loaded -> the pair in this matrix's form.

        scale: uint8 or float8_e8m0fnu [N/r, K/c], or power-of-two float32. Rows that an engine has repeated from 32x32
        blocks are put together again.

        Raises RuntimeError when a later loading does not fit the form chosen at the first one.
        """
        first = self.form is None
        scale = self._collapse(weight, scale, first)
        if self.form == BLOCKS or (first and not _takes_wide_scales(weight, device)):
            self.form = BLOCKS
            return weight, scale
        kept, kept_scale, report = self._prepare(weight, scale, device=device)
        wide = kept_scale.dim() == 2 and kept_scale.shape[-1] == 1
        if not wide and "refused_relative_error" in report:
            if first and self._dummy:  # random values say nothing about the checkpoint that will follow
                kept, kept_scale = widen(weight, scale)
                wide = True
            elif not first:
                raise RuntimeError(
                    f"{self.name}: the new weights cannot take the scale form of the first ones ({WIDE}): it would change "
                    f"them by {report['refused_relative_error']:.1e} (relative), more than {MAX_REBLOCK_ERROR:.0e}; "
                    "start the server anew with these weights"
                )
        if first:
            self.form = WIDE if wide else BLOCKS
        nan = {key: count for key, count in report.items() if key in ("nan_elements", "nan_scales") and count}
        if nan and not self._dummy:
            counts = ", ".join(f"{key} = {count}" for key, count in nan.items())
            warnings.warn(f"{self.name}: the loaded weights hold NaN ({counts})", RuntimeWarning, stacklevel=2)
        self.report = {key: report.get(key, 0) for key in ("changed", "elements", "relative_error")}
        return kept, kept_scale

    def _collapse(self, weight: torch.Tensor, scale: torch.Tensor, first: bool) -> torch.Tensor:
        """[N, K/32] rows repeated from 32x32 blocks -> the blocks; other shapes are returned as they are."""
        rows, cols = weight.shape
        if tuple(scale.shape) != (rows, cols // layouts.BLOCK) or scale.dtype is not torch.uint8 or rows % 32:
            return scale
        if self.block_rows == 1:
            return scale
        blocks = scale[::32].contiguous()
        same = bool((scale.view(-1, 32, scale.shape[1]) == blocks[:, None]).all()) or (first and self._dummy)
        if first:
            self.block_rows = 32 if same else 1
        elif not same:
            raise RuntimeError(
                f"{self.name}: the new weights have different scales within blocks of 32 rows, the first ones had not; "
                "start the server anew with these weights"
            )
        return blocks if same else scale


def _takes_wide_scales(weight: torch.Tensor, device: torch.device | None) -> bool:
    """False where the kernels multiply by a scale per 32 columns anyway (Blackwell): blocks stay as they are loaded."""
    return selector.device_key(device if device is not None else weight.device) not in ROW_SCALES


def widen(weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 [N, K] and its block scales -> the form "32 rows x K", however much that changes the values."""
    rows, cols = weight.shape
    wide = torch.empty((1, rows, cols), dtype=weight.dtype, device="cpu")
    wide_scale = torch.empty((1, rows // 32, 1), dtype=torch.uint8, device="cpu")
    stats = torch.empty(3, dtype=torch.float64, device="cpu")
    torch.ops.vllm_megaattn.reblock_weight(weight.cpu()[None], scale.cpu()[None], wide, wide_scale, stats)
    return wide[0].to(weight.device), wide_scale[0].to(weight.device)


def dequantize(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """e4m3 [N, K] with scales in any of our block forms -> the values, exact where `dtype` holds them.

    BF16 holds every e4m3 value times a scale of 2^-124 to 2^119; it is rounded once from float32.
    """
    rows, cols = weight.shape
    row_block, col_block = rows // scale.shape[-2], cols // scale.shape[-1]
    factors = layouts.scale_to_float32(layouts.scale_bytes(scale, name="scale"))
    out = torch.empty((rows, cols), dtype=dtype, device=weight.device)
    for start in range(
        0, rows, 1024
    ):  # in pieces: the float32 values of a whole matrix would be four times its bytes
        piece = torch.arange(start, min(start + 1024, rows), device=weight.device)
        out[piece] = (weight[piece].float() * factors[piece // row_block].repeat_interleave(col_block, dim=1)).to(
            dtype
        )
    return out
