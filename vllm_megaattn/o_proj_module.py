"""The whole output projection as a module: weights in the device's preferred form, a rotary cache, one call.

    proj = OProj.from_checkpoint("model-00003-of-00048.safetensors", layer=0, tp_rank=0, tp_size=4)
    y = proj(attn_out, positions)      # BF16 [T, heads, 512], int64 [T] -> BF16 [T, 5120], this rank's partial sum

Tensor parallelism: a rank holds whole groups (rows of wo_a, the same columns of wo_b), so y is a partial sum over the
groups and the caller adds it up over the ranks, usually in the all-reduce that follows anyway. With `process_group`
the module does that itself, in BF16.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Literal

import torch

from vllm_megaattn import checkpoint, layouts, ops, selector
from vllm_megaattn.rope_config import YarnScaling, rope_settings
from vllm_megaattn.weights import prepare_weight

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


WEIGHTS = ("wo_a", "wo_a_scale", "wo_b", "wo_b_scale")


def rope_cache(
    max_positions: int,
    theta: float = 10000.0,
    *,
    rope_dim: int = 64,
    layout: str = "halves",
    yarn: YarnScaling | None = None,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """float32 [max_positions, rope_dim]: a row is cos of the rope_dim / 2 angles, then their sin ("halves", vLLM), or
    cos, sin, cos, sin, ... ("interleaved", SGLang's complex64 table).

    Angle i of position p is p * theta^(-2 i / rope_dim). Computed in float64 and rounded once.
    """
    if max_positions < 1 or rope_dim < 2 or rope_dim % 2:
        raise ValueError(f"max_positions must be positive, rope_dim even, got {max_positions} and {rope_dim}")
    if isinstance(theta, bool) or not isinstance(theta, (int, float)):
        raise TypeError(f"theta must be a number, got {theta!r}")
    if not (math.isfinite(theta) and theta > 0):
        raise ValueError(f"theta must be positive and finite, got {theta}")
    if yarn is not None and not isinstance(yarn, YarnScaling):
        raise TypeError(f"yarn must be a YarnScaling or None, got {yarn!r}")
    if yarn is not None and theta <= 1:
        raise ValueError(f"theta must be above 1 with yarn (wavelengths must grow), got {theta}")
    if not isinstance(layout, str) or layout not in ops.COS_SIN_LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(ops.COS_SIN_LAYOUTS)}, got {layout!r}")
    half = rope_dim // 2
    index = torch.arange(half, dtype=torch.float64, device="cpu")
    frequency = theta ** (-2.0 * index / rope_dim)
    if yarn is not None:
        low = _rotations_index(yarn.beta_fast, yarn.original_max_positions, theta, rope_dim)
        high = _rotations_index(yarn.beta_slow, yarn.original_max_positions, theta, rope_dim)
        low, high = max(math.floor(low), 0), min(math.ceil(high), rope_dim - 1)
        stretched = ((index - low) / max(high - low, 1e-3)).clamp(0.0, 1.0)  # 0: keep, 1: divide by factor
        frequency = frequency * (1.0 - stretched) + frequency / yarn.factor * stretched
    angle = torch.arange(max_positions, dtype=torch.float64, device="cpu")[:, None] * frequency
    pair = torch.stack([angle.cos(), angle.sin()], dim=1 if layout == "halves" else 2)
    return pair.reshape(max_positions, rope_dim).to(torch.float32).to(device)


def _rotations_index(rotations: float, max_positions: int, theta: float, rope_dim: int) -> float:
    """The (fractional) pair index whose angle makes `rotations` turns over `max_positions`."""
    return rope_dim * math.log(max_positions / (rotations * 2 * math.pi)) / (2 * math.log(theta))


class OProj(torch.nn.Module):
    """y = wo_b( MXFP8( wo_a( MXFP8( inverse RoPE( attention output ))))).

    wo_a       float8_e4m3fn [G, rank, K]; wo_a_scale any form that the ops take, or power-of-two float32 blocks
    wo_b       float8_e4m3fn [N, G * rank]; wo_b_scale likewise
    cos_sin    float32 [max_positions, R], R even (DeepSeek: 64), see `rope_cache`; needed by `forward`, not by
               `forward_quantized`
    order      order of a group's columns that the attention output is quantised in: "standard" (column = head * 512
               + d) or "chunk_interleaved" (vLLM's mega attention; K a multiple of 512). wo_a is always given in standard
               order, as checkpoints hold it, and permuted here together with its scales, in any form above: where one
               covers all of K nothing moves, those of 128 or 256 columns are first repeated for each 32
    path       "auto", "fused" or "unfused", see `selector`
    scale_span columns of an activation that share one scale, 32, 128 or 256; None lets the op choose
    padded_heads  True: `forward` takes an attention output with more heads than wo_a reads, those behind are padding (the
               buffers of 64 heads that vLLM and SGLang hand over). False: such a one is refused
    process_group  all-reduces y over this group; None returns the partial sum of this rank's groups
    device     where to put everything; None: where wo_a is

    The weights are buffers in the form that `prepare_weight` gives for the device; `reports` says what it changed. Weights
    or scales that hold NaN are refused. The buffers are the module's own, copied where a tensor has that form already:
    `load_weights` replaces their contents in place, so addresses, and captured CUDA graphs, stay valid, and what the caller
    gave (a read-only memory map, say) is never written. `Module.to` and friends move the buffers but never change their
    dtypes: they are byte formats, not precisions. A `state_dict` names the order of its columns; `load_state_dict` refuses
    another order, another dtype and NaN, and then loads nothing.
    """

    def __init__(
        self,
        wo_a: torch.Tensor,
        wo_a_scale: torch.Tensor,
        wo_b: torch.Tensor,
        wo_b_scale: torch.Tensor,
        *,
        cos_sin: torch.Tensor | None = None,
        cos_sin_layout: str = "halves",
        order: str = "standard",
        path: str = "auto",
        scale_span: int | None = None,
        padded_heads: bool = False,
        process_group: ProcessGroup | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        for name, tensor in zip(WEIGHTS, (wo_a, wo_a_scale, wo_b, wo_b_scale), strict=True):
            _require_tensor(name, tensor)
        if not isinstance(order, str) or order not in ops.ORDERS:
            raise ValueError(f"order must be one of {', '.join(ops.ORDERS)}, got {order!r}")
        if not isinstance(cos_sin_layout, str) or cos_sin_layout not in ops.COS_SIN_LAYOUTS:
            raise ValueError(
                f"cos_sin_layout must be one of {', '.join(ops.COS_SIN_LAYOUTS)}, got {cos_sin_layout!r}"
            )
        _check_weights(wo_a, wo_b)
        if cos_sin is not None:
            _check_cos_sin(cos_sin, wo_a.shape[2])
        if scale_span is not None:
            _check_scale_span(scale_span, *wo_a.shape[1:])
        if not isinstance(padded_heads, bool):
            raise TypeError(f"padded_heads must be a bool, got {padded_heads!r}")
        target = torch.device(device) if device is not None else wo_a.device
        self.order = order
        self.cos_sin_layout = cos_sin_layout
        self.path = path
        self.scale_span = scale_span
        self.padded_heads = padded_heads
        self.process_group = process_group
        self.groups, self.rank, self.group_cols = wo_a.shape
        self.out_features = wo_b.shape[0]
        selector.select_path(
            selector.device_key(target), rank=self.rank, requested=path
        )  # refuse now, not in forward
        prepared, self.reports = self._prepare(wo_a, wo_a_scale, wo_b, wo_b_scale, target)
        given = {tensor.untyped_storage()._cdata for tensor in (wo_a, wo_a_scale, wo_b, wo_b_scale)}
        for name, tensor in prepared.items():
            shared = tensor.untyped_storage()._cdata in given
            self.register_buffer(name, _copy(tensor) if shared else tensor)
        cache = cos_sin.to(target).contiguous() if cos_sin is not None else None
        self.register_buffer("cos_sin", cache, persistent=False)

    @classmethod
    def from_checkpoint(
        cls,
        path_or_dir: str | os.PathLike[str],
        layer: int,
        tp_rank: int = 0,
        tp_size: int = 1,
        device: torch.device | str = "cpu",
        *,
        groups: int | None = None,
        cos_sin: torch.Tensor | None = None,
        max_positions: int | None = None,
        rope_theta: float | None = None,
        yarn: YarnScaling | Literal[False] | None = None,
        **options: object,
    ) -> OProj:
        """Build the module from a checkpoint, this rank's whole groups only (`checkpoint.load_o_proj`).

        cos_sin None makes a cache of `max_positions` rows (256 bytes each: 256 MiB for a context of 2^20) with
        `rope_theta` and `yarn`. What is None of the three comes from the config.json beside the weights, by the rules in
        `rope_config`: layers with a compressed cache have a theta of their own, and YaRN. yarn=False asks for none.
        Without a config.json a layer without compression is assumed: theta 10000, no YaRN, 8192 positions. Layers that
        share a cache pass it as cos_sin. Other options are those of the constructor.
        """
        process_group = options.get("process_group")
        if process_group is not None:
            world = torch.distributed.get_world_size(process_group)
            if world != tp_size:
                raise ValueError(f"process_group must have tp_size={tp_size} members, got {world}")
        weights = checkpoint.load_o_proj(path_or_dir, layer, tp_rank=tp_rank, tp_size=tp_size, groups=groups)
        if cos_sin is None:
            layout = str(options.get("cos_sin_layout", "halves"))
            rope = rope_settings(path_or_dir, layer, theta=rope_theta, yarn=yarn, max_positions=max_positions)
            cos_sin = rope_cache(rope.max_positions, rope.theta, layout=layout, yarn=rope.yarn)
        return cls(
            weights.wo_a,
            weights.wo_a_scale,
            weights.wo_b,
            weights.wo_b_scale,
            cos_sin=cos_sin,
            device=device,
            **options,
        )

    def forward(self, attn_out: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """BF16 [T, G * heads per group, 512] and int64 [T] -> BF16 [T, N].

        More heads only with padded_heads: they are not read. A position outside the cache gives NaN for its token.
        """
        if self.cos_sin is None:
            raise ValueError("OProj was built without cos_sin: give it one, or call forward_quantized")
        y = ops.o_proj_from_attn(
            attn_out,
            positions,
            self.cos_sin,
            self.wo_a,
            self.wo_a_scale,
            self.wo_b,
            self.wo_b_scale,
            groups=self.groups,
            order=self.order,
            cos_sin_layout=self.cos_sin_layout,
            path=self.path,
            scale_span=self.scale_span,
            padded_heads=self.padded_heads,
        )
        return self._reduce(y)

    def forward_quantized(self, x: torch.Tensor, x_scale: torch.Tensor, *, x_span: int = 32) -> torch.Tensor:
        """e4m3 [T, G, K] in the module's column order and packed int32 scales [T, G, K / 128] -> BF16 [T, N].

        x_span: columns over which the scale bytes of x are known to be equal; 32 promises nothing.
        """
        y = ops.o_proj(
            x,
            x_scale,
            self.wo_a,
            self.wo_a_scale,
            self.wo_b,
            self.wo_b_scale,
            path=self.path,
            scale_span=self.scale_span,
            x_span=x_span,
        )
        return self._reduce(y)

    @torch.no_grad()
    def load_weights(
        self, wo_a: torch.Tensor, wo_a_scale: torch.Tensor, wo_b: torch.Tensor, wo_b_scale: torch.Tensor
    ) -> None:
        """Replace all four tensors in place, through the same preparation as in the constructor.

        Nothing is written unless everything fits: wrong shapes or dtypes and NaN raise ValueError and leave the old
        weights.
        """
        for name, tensor in zip(WEIGHTS, (wo_a, wo_a_scale, wo_b, wo_b_scale), strict=True):
            _require_tensor(name, tensor)
        _check_weights(wo_a, wo_b)
        expected = [self.groups, self.rank, self.group_cols], [self.out_features, self.groups * self.rank]
        for name, tensor, shape in zip(("wo_a", "wo_b"), (wo_a, wo_b), expected, strict=True):
            if list(tensor.shape) != shape:
                raise ValueError(f"{name} must have shape {shape} as before, got {list(tensor.shape)}")
        prepared, reports = self._prepare(wo_a, wo_a_scale, wo_b, wo_b_scale, self.wo_a.device)
        for name, tensor in prepared.items():
            old = getattr(self, name)
            if tensor.shape != old.shape or tensor.dtype != old.dtype:
                raise ValueError(
                    f"{name} must keep its form {old.dtype} {list(old.shape)} (scales in the same blocks as before), "
                    f"got {tensor.dtype} {list(tensor.shape)}"
                )
        for name, tensor in prepared.items():
            getattr(self, name).copy_(tensor)
        self.reports = reports

    def get_extra_state(self) -> torch.Tensor:
        """The order of wo_a's columns, as a tensor so that files of tensors hold it: uint8, a value of `ops.ORDERS`."""
        return torch.tensor([ops.ORDERS[self.order]], dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Nothing is set: `_load_from_state_dict` has compared the order with the module's own."""

    def _load_from_state_dict(
        self,
        state_dict: dict[str, object],
        prefix: str,
        local_metadata: dict[str, object],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        refusals = self._refuse_state(state_dict, prefix)
        error_msgs.extend(refusals)
        if not refusals:
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )

    def _refuse_state(self, state_dict: dict[str, object], prefix: str) -> list[str]:
        """Why the tensors of a state_dict cannot be this module's."""
        refusals = []
        code = state_dict.get(f"{prefix}_extra_state")
        if code is not None:  # torch itself reports a missing one
            names = {number: name for name, number in ops.ORDERS.items()}
            order = names.get(int(code), f"code {int(code)}")
            if order != self.order:
                refusals.append(
                    f"{prefix}wo_a has its columns in order {order!r}, this module needs {self.order!r}: build it with "
                    f"order={order!r}, or give load_weights a wo_a in standard order"
                )
        given = {name: state_dict.get(f"{prefix}{name}") for name in WEIGHTS}
        for name, tensor in given.items():
            if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
                continue
            if tensor.dtype != getattr(self, name).dtype:
                refusals.append(f"{prefix}{name} must have dtype {getattr(self, name).dtype}, got {tensor.dtype}")
                continue
            if tensor.shape != getattr(self, name).shape:
                continue  # torch says so itself
            if name.endswith("_scale"):
                shape = getattr(self, name.removesuffix("_scale")).shape
                tensor = layouts.weight_scale_bytes(tensor, *shape[-2:], name=name)
            try:
                layouts.refuse_nan(tensor, name=f"{prefix}{name}")
            except ValueError as error:
                refusals.append(str(error))
        return refusals

    def choice(self) -> selector.Choice:
        """Path, backend and reason for the device the weights are on now."""
        return selector.select_path(selector.device_key(self.wo_a.device), rank=self.rank, requested=self.path)

    def extra_repr(self) -> str:
        try:
            choice = self.choice()
            chosen = f"path={choice.path} on {choice.backend} ({choice.reason})"
        except ValueError as error:
            chosen = str(error)
        cache = "none" if self.cos_sin is None else f"{self.cos_sin.shape[0]} positions, {self.cos_sin_layout}"
        return (
            f"wo_a {list(self.wo_a.shape)} with {self.wo_a_scale.dtype} scales {list(self.wo_a_scale.shape)}, "
            f"wo_b {list(self.wo_b.shape)} with {self.wo_b_scale.dtype} scales {list(self.wo_b_scale.shape)},\n"
            f"order={self.order}, rope cache: {cache}, device={self.wo_a.device}, "
            f"{'partial sum' if self.process_group is None else 'all-reduced'},\n{chosen}"
        )

    def _prepare(
        self,
        wo_a: torch.Tensor,
        wo_a_scale: torch.Tensor,
        wo_b: torch.Tensor,
        wo_b_scale: torch.Tensor,
        device: torch.device,
    ) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
        """The four tensors in the device's favourite form, and prepare_weight's report on each weight."""
        wo_a_scale = _bytes_if_float32(wo_a_scale, "wo_a_scale")
        wo_b_scale = _bytes_if_float32(wo_b_scale, "wo_b_scale")
        prepared: dict[str, torch.Tensor] = {}
        reports: dict[str, object] = {}
        for name, weight, scale in (("wo_a", wo_a, wo_a_scale), ("wo_b", wo_b, wo_b_scale)):
            ordered = weight, scale
            if name == "wo_a" and self.order == "chunk_interleaved":
                ordered = _interleave(weight, scale)
            groups = self.groups if name == "wo_a" else 1
            prepared[name], prepared[f"{name}_scale"], report = prepare_weight(*ordered, groups=groups, device=device)
            if report["nan_elements"] or report["nan_scales"]:  # found again in the caller's order of columns
                layouts.refuse_nan(weight, name=name)
                codes = layouts.weight_scale_bytes(scale, *weight.shape[-2:], name=f"{name}_scale")
                layouts.refuse_nan(codes, name=f"{name}_scale")
            reports[name] = report
        return prepared, reports

    def _reduce(self, y: torch.Tensor) -> torch.Tensor:
        if self.process_group is not None:
            torch.distributed.all_reduce(y, group=self.process_group)
        return y

    def _apply(self, fn, recurse: bool = True):
        def move_only(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(move_only, recurse)


def _require_tensor(name: str, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")


def _check_cos_sin(cos_sin: torch.Tensor, group_cols: int) -> None:
    """float32 [positions, R]: what the op would refuse at the first call, refused before there is one."""
    _require_tensor("cos_sin", cos_sin)
    if cos_sin.dtype != torch.float32:
        raise TypeError(f"cos_sin must be float32 [max_positions, 64], got {cos_sin.dtype}")
    head_dim = min(group_cols, checkpoint.HEAD_DIM)
    if cos_sin.dim() != 2 or cos_sin.shape[0] < 1 or not 2 <= cos_sin.shape[1] <= head_dim or cos_sin.shape[1] % 2:
        raise ValueError(
            f"cos_sin must be float32 [max_positions, R] with at least one position and R even, from 2 to {head_dim}, got "
            f"{list(cos_sin.shape)}"
        )
    if cos_sin.requires_grad:
        raise ValueError("cos_sin must not require grad: the projection has no backward; got requires_grad=True")


def _check_scale_span(scale_span: object, rank: int, group_cols: int) -> None:
    if isinstance(scale_span, bool) or not isinstance(scale_span, int):
        raise TypeError(f"scale_span must be an int or None, got {scale_span!r}")
    if scale_span not in (32, 128, 256):
        raise ValueError(f"scale_span must be None, 32, 128 or 256, got {scale_span}")
    if rank % scale_span or group_cols % scale_span:
        raise ValueError(f"scale_span must divide rank = {rank} and K = {group_cols} of wo_a, got {scale_span}")


def _check_weights(wo_a: torch.Tensor, wo_b: torch.Tensor) -> None:
    for name, tensor, dims in (("wo_a", wo_a, "[G, rank, K]"), ("wo_b", wo_b, "[N, G * rank]")):
        if tensor.dtype != torch.float8_e4m3fn:
            raise TypeError(f"{name} must be float8_e4m3fn {dims}, got {tensor.dtype} {list(tensor.shape)}")
        if tensor.dim() != dims.count(",") + 1:
            raise ValueError(f"{name} must have shape {dims}, got {list(tensor.shape)}")
    if wo_b.shape[1] != wo_a.shape[0] * wo_a.shape[1]:
        raise ValueError(
            f"wo_b must have G * rank = {wo_a.shape[0] * wo_a.shape[1]} columns to follow wo_a {list(wo_a.shape)}, "
            f"got {list(wo_b.shape)}"
        )


def _bytes_if_float32(scale: torch.Tensor, name: str) -> torch.Tensor:
    return layouts.scale_bytes_from_float32(scale, name=name) if scale.dtype == torch.float32 else scale


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in memory of their own; packed words keep their strides, which a kernel may want."""
    if tensor.dtype != torch.int32 or 0 in tensor.stride():
        return tensor.clone(memory_format=torch.contiguous_format)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _interleave(wo_a: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """wo_a and its scales with a group's columns in chunk-interleaved order. Scales of more than 32 columns are repeated
    for each 32, since the permutation tears wider blocks apart; one that covers all of K holds in any order."""
    groups, rank, cols = wo_a.shape
    if cols % checkpoint.HEAD_DIM:
        raise ValueError(f"wo_a must have a multiple of {checkpoint.HEAD_DIM} columns to be reordered, got {cols}")
    heads, num_blocks, shape = cols // checkpoint.HEAD_DIM, cols // layouts.BLOCK, list(scale.shape)
    if scale.dim() == 1 or scale.dtype == torch.int32:
        scale = layouts.linear_weight_scale(scale, groups, rank, cols, name="wo_a_scale")
    scale = layouts.scale_bytes(scale, name="wo_a_scale")
    if scale.dim() not in (2, 3) or (scale.shape[0] != groups if scale.dim() == 3 else scale.shape[0] % groups):
        raise ValueError(
            f"wo_a_scale must have shape [{groups}, rank/r, K/c] or [{groups} * rank/r, K/c], got {shape}"
        )
    widths = {layouts.ceil_div(cols, width): width for width in (256, 128, 32)}
    if scale.shape[-1] != 1 and scale.shape[-1] not in widths:
        raise ValueError(
            f"wo_a_scale must hold one scale for 32, 128, 256 or all of the {cols} columns to be reordered, got {shape}"
        )
    scale = scale.reshape(groups, scale.shape[-2] if scale.dim() == 3 else scale.shape[0] // groups, scale.shape[-1])
    if scale.shape[-1] > 1:
        repeats = widths[scale.shape[-1]] // layouts.BLOCK
        wide = scale.repeat_interleave(repeats, dim=-1)[..., :num_blocks]
        scale = layouts.to_chunk_interleaved(wide, heads, checkpoint.HEAD_DIM)
    return layouts.to_chunk_interleaved(wo_a, heads, checkpoint.HEAD_DIM), scale
