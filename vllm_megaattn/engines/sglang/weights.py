"""Keeping MXFP8 bytes in parameters that SGLang loads in place.

SGLang never builds a parameter anew: a weight update writes into the tensors that captured graphs hold, often a few
tensors at a time, weight and scale in any order. So a matrix is always in one of two states:

    loaded      `weight` and `weight_scale_inv` as a checkpoint has them: what SGLang may write to
    converted   `weight` as the kernels like it (re-blocked, columns permuted), and UE8M0 bytes `megaattn_scale`
                beside it; `weight_scale_inv` is never touched

Whatever announces a write (SGLang's restore step, or a weight loader of one of the two parameters) takes the matrix
back to `loaded`, exactly; SGLang's post-load step converts it again, into the same storage. Re-blocking rounds the
few elements that fall into e4m3's subnormal range: those are remembered, on the host.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from vllm_megaattn import layouts
from vllm_megaattn.engines import common
from vllm_megaattn.engines.weights import KeptWeight

SCALE_NAME = "megaattn_scale"
_ROWS = 1024  # matrices are expanded to float32 in pieces of this many rows

Patch = tuple[torch.Tensor, torch.Tensor]  # flat indices, original bytes


class LiveWeight:
    """One matrix of one linear layer.

    kept:        decides the form of the scales and brings weights into it
    reblock:     False leaves the bytes to SGLang, which reads them too: the scales are those of the checkpoint
    interleaved: columns are converted to the order that mega attention writes
    dummy:       the first loading brings random values, whose scales may be anything
    """

    def __init__(self, kept: KeptWeight, *, reblock: bool, interleaved: bool = False, dummy: bool = False) -> None:
        self.kept = kept
        self.converted = False
        self._reblock = reblock
        self._interleaved = interleaved
        self._dummy = dummy
        self._patch: Patch | None = None
        self._lock = threading.Lock()  # SGLang loads tensors of a layer from several threads

    def convert(self, linear: torch.nn.Module) -> None:
        """loaded -> converted; nothing if it is. Raises where the weights cannot be served."""
        with self._lock:
            if self.converted:
                return
            weight = linear.weight.data
            common.prepare_device(weight.device)
            try:
                scale = self._convert(weight, self._scale_bytes(linear.weight_scale_inv.data))
            except (RuntimeError, ValueError):
                self._poison(linear)
                raise
            set_parameter(linear, SCALE_NAME, scale)
            self.converted, self._dummy = True, False

    def _convert(self, weight: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """Changes `weight` in place, returns its scales."""
        scale = blocks
        if self._reblock:
            new, scale = self.kept.convert(weight, blocks, device=weight.device)
            if new.data_ptr() != weight.data_ptr():
                self._patch = None if self._dummy else _differences(weight, new, scale, blocks)
                weight.copy_(new)
        if self._interleaved:
            weight.copy_(_reorder(weight, weight.shape[1]))
            scale = _reorder(scale, weight.shape[1])
        return scale

    def restore(self, linear: torch.nn.Module) -> None:
        """converted -> loaded, the very bytes that were loaded."""
        with self._lock:
            if not self.converted:
                return
            weight, scale = linear.weight.data, getattr(linear, SCALE_NAME).data
            if self._interleaved:
                weight.copy_(_reorder(weight, weight.shape[1], inverse=True))
                scale = _reorder(scale, weight.shape[1], inverse=True)
            if self._patch is not None:
                blocks = self._scale_bytes(linear.weight_scale_inv.data)
                for rows in _pieces(weight):
                    weight[rows] = _unwiden(weight[rows], scale, blocks, rows)
                index, original = self._patch
                flat = weight.view(torch.uint8).view(-1)
                flat[index.to(weight.device, torch.int64)] = original.to(weight.device)
                self._patch = None
            self.converted = False

    def operand(self, linear: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        """What the kernels read: e4m3 [N, K] and its scales."""
        return linear.weight, getattr(linear, SCALE_NAME)

    def _scale_bytes(self, scale: torch.Tensor) -> torch.Tensor:
        """SGLang copies the checkpoint's UE8M0 bytes into float32."""
        if self._dummy and scale.dtype is torch.float32:
            exponent = (scale.contiguous().view(torch.int32) >> 23) & 0xFF
            return exponent.clamp(1, 254).to(torch.uint8)
        try:
            return layouts.scale_bytes(scale, name="weight_scale_inv")
        except ValueError as error:
            raise ValueError(f"{self.kept.name}: {error}; start the server with SGLANG_MEGAATTN=0") from None

    def _poison(self, linear: torch.nn.Module) -> None:
        """SGLang reports a failed update in some flows by a log line only: what the layer then computes must be NaN,
        not the product of new weights with old scales."""
        if isinstance(getattr(linear, SCALE_NAME, None), torch.nn.Parameter):
            getattr(linear, SCALE_NAME).data.fill_(layouts.SCALE_NAN)


def set_parameter(linear: torch.nn.Module, name: str, value: torch.Tensor) -> None:
    """A parameter of that name with this value; an existing one of the same shape keeps its storage."""
    parameter = getattr(linear, name, None)
    if not isinstance(parameter, torch.nn.Parameter):
        linear.register_parameter(name, torch.nn.Parameter(value.contiguous(), requires_grad=False))
    elif parameter.shape == value.shape and parameter.dtype == value.dtype:
        parameter.data.copy_(value)
    else:
        parameter.data = value.contiguous()


def watch_loaders(linear: torch.nn.Module, before: Callable[[], None]) -> None:
    """Call `before()` before a weight loader writes to one of the two parameters."""
    for parameter in (linear.weight, linear.weight_scale_inv):
        original = parameter._weight_loader

        def load(*args: object, _original: Callable = original, **kwargs: object) -> object:
            before()
            return _original(*args, **kwargs)

        parameter._weight_loader = load


# ---- undoing "32 rows x K" -----------------------------------------------------------------------------------------


def _pieces(weight: torch.Tensor) -> list[slice]:
    return [slice(start, min(start + _ROWS, weight.shape[0])) for start in range(0, weight.shape[0], _ROWS)]


def _unwiden(weight: torch.Tensor, wide: torch.Tensor, blocks: torch.Tensor, rows: slice) -> torch.Tensor:
    """Rows `rows` of re-blocked weights -> with the scales of `blocks` [N/r, K/c]; exact but for what re-blocking
    rounded.

    wide: uint8 [N/32, 1].
    """
    total = wide.shape[0] * 32
    index = torch.arange(rows.start, rows.stop, device=weight.device)
    steps = wide.view(torch.uint8)[index // 32].int() - blocks[index // (total // blocks.shape[0])].int()
    factors = torch.exp2(steps.float()).repeat_interleave(weight.shape[1] // blocks.shape[1], dim=1)
    return (weight.float() * factors).to(weight.dtype)


def _differences(loaded: torch.Tensor, new: torch.Tensor, wide: torch.Tensor, blocks: torch.Tensor) -> Patch:
    """Where `_unwiden(new)` is not `loaded`, and what it must be."""
    found: list[torch.Tensor] = []
    for rows in _pieces(loaded):
        back = _unwiden(new[rows], wide, blocks, rows)
        bad = (back.view(torch.uint8) != loaded[rows].view(torch.uint8)).view(-1).nonzero().view(-1)
        found.append(bad + rows.start * loaded.shape[1])
    index = torch.cat(found)
    original = loaded.view(torch.uint8).view(-1)[index]
    return index.to("cpu", torch.int32), original.cpu()


# ---- the column order of mega attention ----------------------------------------------------------------------------

_HEAD_DIM = 512


def _reorder(x: torch.Tensor, columns: int, *, inverse: bool = False) -> torch.Tensor:
    """Weights [N, K] or scales [N/r, K/32] of K = `columns` columns, from standard to chunk-interleaved order or
    back."""
    if x.shape[1] == 1:  # one scale for all of K
        return x
    move = layouts.from_chunk_interleaved if inverse else layouts.to_chunk_interleaved
    return move(x, columns // _HEAD_DIM, _HEAD_DIM)
