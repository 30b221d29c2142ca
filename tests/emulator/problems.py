"""Matrix products and chains on emulated device memory: data, the call through the real host code, and what must come
out bit for bit (model.py)."""

from __future__ import annotations

from dataclasses import dataclass, field

import host
import model
import numpy as np
import reference as ref
from host import Emulator, aligned, device_copy

POISON = 0xA5


def random_e4m3(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Half near one in magnitude, half anything finite."""
    near = rng.integers(0x28, 0x48, shape)
    anything = rng.integers(0, 0x7F, shape)
    return (np.where(rng.random(shape) < 0.5, near, anything) | rng.integers(0, 2, shape) << 7).astype(np.uint8)


def strided(array: np.ndarray, order: tuple[int, ...], pad: int) -> np.ndarray:
    """A device copy whose axes lie in memory in `order` (slowest first), each row followed by `pad` foreign bytes."""
    shape = [array.shape[axis] for axis in order]
    buffer = aligned((*shape[:-1], shape[-1] + pad), array.dtype, POISON)
    view = buffer[..., : shape[-1]].transpose(np.argsort(order))
    view[...] = array
    return view


def words(scale: np.ndarray, mn_major: bool = True) -> np.ndarray:
    """Scale bytes [T, G, K / 32] as int32 words [T, G, K / 128], with stride 1 over T like the attention kernels'."""
    packed = np.ascontiguousarray(scale).view(np.int32)
    if not mn_major:
        return device_copy(packed)
    tokens, groups, cols = packed.shape
    buffer = aligned((groups, cols, -(-tokens // 4) * 4), np.int32, 0xFF)
    view = buffer.transpose(2, 0, 1)[:tokens]
    view[...] = packed
    return view


@dataclass
class Matmul:
    """x [T, G, K], w [G, N, K], their scale bytes per 32 columns, and the forms in which the kernels get them."""

    x: np.ndarray
    x_scale: np.ndarray  # [T, G, K / 32]
    w: np.ndarray
    w_scale: np.ndarray  # [G, N, K / 32]
    x_span: int
    weights: str  # "prepared", "32x32" or "rows"
    x_words: np.ndarray = field(init=False)
    w_form: np.ndarray = field(init=False)
    out: np.ndarray = field(init=False)
    out_scale: np.ndarray = field(init=False)
    mn_major: bool = True
    tiled: bool = False  # x_scale as F8_128x4, one group

    def __post_init__(self):
        if self.tiled:
            self.x_words = device_copy(ref.f8_128x4_pack(self.x_scale[:, 0]))
        else:
            self.x_words = words(self.x_scale, self.mn_major)
        if self.weights == "rows":
            self.w_form = device_copy(np.ascontiguousarray(self.w_scale).view(np.int32))
        else:
            self.w_form = device_copy(self.w_scale[:, ::32, : 1 if self.weights == "prepared" else None])

    @property
    def shape(self) -> tuple[int, int, int, int]:
        tokens, groups, k = self.x.shape
        return tokens, groups, self.w.shape[1], k

    def weight_scales(self) -> host.Scales:
        if self.weights == "rows":
            group, row, word = self.w_form.strides
            return host.Scales(self.w_form.ctypes.data, host.PACKED, 1, 32, group, row, word, 0)
        return host.block_scales(self.w_form, 32, self.w.shape[2] if self.weights == "prepared" else 32)

    def args(self, span: int) -> host.Matmul:
        """Arguments; `span`: 0 for a BF16 result, else columns per scale. Allocates the outputs, poisoned."""
        tokens, groups, rows, k = self.shape
        args = host.Matmul(tokens, groups, rows, k)
        args.x, (args.x_stride_token, args.x_stride_group, _) = self.x.ctypes.data, self.x.strides
        cols = self.x_scale.shape[2]
        args.x_scale = host.tiled_scales(self.x_words, cols) if self.tiled else host.packed_scales(self.x_words)
        args.x_span = self.x_span
        args.w, (args.w_stride_group, args.w_stride_row, _) = self.w.ctypes.data, self.w.strides
        args.w_scale = self.weight_scales()
        if span == 0:
            self.out = aligned((tokens, groups, rows), np.uint16, POISON)
            self.out_scale = aligned(0, np.uint8)
            args.out_bf16 = self.out.ctypes.data
            args.out_stride_token, args.out_stride_group = groups * rows, rows
        else:
            self.out = aligned((tokens, groups * rows), np.uint8, POISON)
            self.out_scale = aligned(ref.f8_128x4_bytes(tokens, groups * rows // 32), np.uint8, POISON)
            args.out_e4m3, args.out_scale = self.out.ctypes.data, self.out_scale.ctypes.data
            args.out_stride_token, args.scale_span = groups * rows, span
        return args

    def buffers(self) -> dict[str, np.ndarray]:
        return {
            "x": self.x,
            "x_scale": self.x_words,
            "w": self.w,
            "w_scale": self.w_form,
            "out": self.out,
            "out_scale": self.out_scale,
        }

    def run(
        self, emulator: Emulator, span: int, *, device: int = 0, flags: int = 0, backend: str = "cuda", **options
    ):
        """(out, out_scale) of one call."""
        args = self.args(span)
        with emulator.session(device, options=options, **self.buffers()):
            emulator.call(backend, "matmul", args, flags=flags)
        return self.out, self.out_scale

    def sums(self, emulator: Emulator, splits: int = 1, chains: int = 1) -> np.ndarray:
        """BF16 codes [T, G, N] of what Hopper's kernels must compute."""
        tokens, groups, rows, _ = self.shape
        out = np.empty((tokens, groups, rows), np.uint16)
        for g in range(groups):
            x, w = np.ascontiguousarray(self.x[:, g]), np.ascontiguousarray(self.w[g])
            if self.weights == "prepared" and self.x_span >= 256:
                acc = model.hopper_wide(
                    x, self.x_scale[:, g, ::8], w, self.w_scale[g, :, 0], splits, chains, step=emulator.step
                )
            else:
                acc = model.hopper_per32(x, self.x_scale[:, g], w, self.w_scale[g], step=emulator.step)
            out[:, g] = bf16_of(acc)
        return out

    def blackwell_sums(self, emulator: Emulator, splits: int) -> np.ndarray:
        """BF16 codes [T, G, N] of csrc/cuda/sm100_plan.h: one chain per part of K, parts added in order."""
        tokens, groups, rows, k = self.shape
        out = np.empty((tokens, groups, rows), np.uint16)
        blocks = -(-k // 128)
        for g in range(groups):
            acc = None
            for part in range(splits):
                first, end = blocks * part // splits * 128, min(k, blocks * (part + 1) // splits * 128)
                part_sum = model.chain(
                    np.zeros((tokens, rows), np.float32),
                    self.x[:, g, first:end],
                    self.w[g, :, first:end],
                    self.x_scale[:, g, first // 32 : end // 32],
                    self.w_scale[g, :, first // 32 : end // 32],
                    step=emulator.step,
                    **model.BLACKWELL,
                )
                acc = part_sum if acc is None else (acc + part_sum).astype(np.float32)
            out[:, g] = bf16_of(acc)
        return out

    def expected(
        self, emulator: Emulator, span: int, splits: int = 1, chains: int = 1
    ) -> tuple[np.ndarray, np.ndarray]:
        """(out, out_scale) by the model, as `run` returns them."""
        return self.written(self.sums(emulator, splits, chains), span)

    def written(self, sums: np.ndarray, span: int) -> tuple[np.ndarray, np.ndarray]:
        """What a kernel writes of BF16 codes [T, G, N]."""
        if span == 0:
            return sums, np.empty(0, np.uint8)
        data, scale = ref.quantize(sums.reshape(len(sums), -1), span)
        return data, ref.f8_128x4_pack(scale)


def bf16_of(values: np.ndarray) -> np.ndarray:
    """float32 to BF16, nearest even; every NaN is the canonical one."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FFF, rounded).astype(np.uint16)


def make_matmul(
    rng: np.random.Generator,
    tokens: int,
    groups: int,
    rows: int,
    k: int,
    *,
    x_span: int = 256,
    weights: str = "prepared",
    x_order: tuple[int, ...] = (0, 1, 2),
    pad: int = 0,
    mn_major: bool = True,
    tiled: bool = False,
) -> Matmul:
    """Random data whose scales differ between neighbours; a scale's bytes are equal over what the form shares."""
    x = strided(random_e4m3(rng, (tokens, groups, k)), x_order, pad)
    w = strided(random_e4m3(rng, (groups, rows, k)), (0, 1, 2), pad)
    x_scale = rng.integers(118, 132, (tokens, groups, -(-k // x_span))).astype(np.uint8)
    x_scale = x_scale.repeat(x_span // 32, axis=2)[:, :, : k // 32]
    shared_rows = 1 if weights == "rows" else 32
    cols = 1 if weights == "prepared" else k // 32
    w_scale = rng.integers(118, 132, (groups, -(-rows // shared_rows), cols)).astype(np.uint8)
    w_scale = w_scale.repeat(shared_rows, axis=1)[:, :rows].repeat(k // 32 // cols, axis=2)
    return Matmul(x, x_scale, w, np.ascontiguousarray(w_scale), x_span, weights, mn_major=mn_major, tiled=tiled)
