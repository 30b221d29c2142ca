"""What the GPU tests share: problems made on the device, graph capture, switches, guarded buffers.

Everything is computed where DEVICE says and compared there, so that hundreds of sizes take seconds. Two kinds of operand
reach different kernels of a Hopper device:

    wide    x has one scale per 256 columns, weights one per 32 rows over all of K: decode (T <= 64), pair, split and
            256-wide tiled kernels
    blocks  scales per 32 columns (x) and per 32x32 block (w), "rows": per row of w: the per-32 kernels

In all of them the scale bytes of neighbouring tokens, rows, groups and column blocks differ, so that a scale read from
the wrong place cannot hit an equal byte by luck (B96).
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

import vllm_megaattn
from vllm_megaattn import _C, layouts

DEVICE = "cuda"
E4M3 = torch.float8_e4m3fn
GUARD = 0xA5
HEAD_DIM, ROPE_DIM, POSITIONS = 512, 64, 128

# The 20 sizes of the benchmark. The rest of the tests of whole shapes stops at 8192.
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192, 16384, 24576, 32768)
LARGE = 8192
EVERY_TOKEN_COUNT = tuple(range(1, 301))
ODD_TOKEN_COUNTS = (1, 5, 33, 64, 65, 127, 129, 300)
# wo_a of DeepSeek-V4.1 shards by groups: N rows, K columns a group.
RANK, K_A, HIDDEN = 1024, 4096, 5120
ACCURACY_SHAPE = (2, 1024, 4096)  # G, N, K
GEMM_SHAPE = (5120, 8192)  # N, K of wo_b at TP1
RUNS = 1000
HUGE = 66000  # tokens: with G = 8 and K = 4096 more than 2^31 elements

# (G, N, K) that make the decode kernels cut K differently, by the rows there are for 132 SMs: over 2 or 4 blocks of a
# cluster, over 2 or 4 chains of a block, evenly or not. The last one's K is no multiple of the span, so only the per-32
# kernels take it.
SMALL_SHAPES = {
    "split 2": (2, 256, 512),
    "split 4": (1, 512, 1024),
    "chains 4": (1, 4352, 512),
    "5 spans": (1, 4352, 1280),
    "chains 2": (8, 1024, 512),
    "odd K": (2, 256, 640),
}


# ---- data ------------------------------------------------------------------------------------------------------


def generator(seed: int) -> torch.Generator:
    return torch.Generator(device=DEVICE).manual_seed(seed)


def random_e4m3(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Finite codes, half of them near one in magnitude, half over the whole range."""
    source = generator(seed)
    near = torch.randint(0x28, 0x48, shape, generator=source, device=DEVICE, dtype=torch.uint8)
    anything = torch.randint(0, 0x7F, shape, generator=source, device=DEVICE, dtype=torch.uint8)
    choice = torch.randint(0, 4, shape, generator=source, device=DEVICE, dtype=torch.uint8)
    return (torch.where(choice % 2 == 0, near, anything) | (choice >= 2).to(torch.uint8) << 7).view(E4M3)


def uneven(rows: int, groups: int, cols: int, first: int = 120, spread: int = 11) -> torch.Tensor:
    """uint8 [rows, groups, cols] in first .. first + spread - 1: neighbours along every dimension differ."""
    row, group, col = (torch.arange(n, device=DEVICE) for n in (rows, groups, cols))
    steps = (3 * row[:, None, None] + 7 * group[None, :, None] + 5 * col[None, None, :]) % spread
    return (first + steps).to(torch.uint8)


def words(scale: torch.Tensor) -> torch.Tensor:
    """Bytes [T, G, K/32] as int32 words [T, G, K/128] with stride 1 over tokens; NaN bytes in the padding."""
    scale = torch.nn.functional.pad(scale, (0, -scale.shape[2] % 4))  # K / 32 = 18 and the like: for wo_b only
    tokens, groups, blocks = scale.shape
    buffer = torch.full((groups, blocks // 4, max(-(-tokens // 4) * 4, 4)), -1, dtype=torch.int32, device=DEVICE)
    view = buffer.permute(2, 0, 1)[:tokens]
    view.copy_(scale.contiguous().view(torch.int32))
    return view


def power(scale: torch.Tensor) -> torch.Tensor:
    """2^(byte - 127) as float64; byte 255 is NaN."""
    value = torch.exp2(scale.double() - 127)
    return torch.where(scale == 255, torch.nan, value)


@dataclass(frozen=True)
class Problem:
    """Operands of the einsum, x [T, G, K] and w [G, N, K], and their scale bytes for the exact product."""

    x: torch.Tensor
    x_scale: torch.Tensor
    w: torch.Tensor
    w_scale: torch.Tensor
    x_span: int
    x_bytes: torch.Tensor  # uint8 [T, G, K/32]
    w_bytes: torch.Tensor  # uint8 [G, N or N/32, 1 or K/32]

    @property
    def args(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.x, self.x_scale, self.w, self.w_scale

    @property
    def num_cols(self) -> int:
        return self.w.shape[0] * self.w.shape[1]

    def tokens(self, cut: slice) -> Problem:
        return replace(self, x=self.x[cut], x_scale=self.x_scale[cut], x_bytes=self.x_bytes[cut])

    def head(self, tokens: int) -> Problem:
        return self.tokens(slice(0, tokens))

    def bf16(self, **kwargs) -> torch.Tensor:
        return vllm_megaattn.einsum_fp8_bf16(*self.args, x_span=self.x_span, **kwargs)

    def mxfp8(self, span: int, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        return vllm_megaattn.einsum_fp8_sfd128x4(*self.args, x_span=self.x_span, scale_span=span, **kwargs)

    def operands(self) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 x [G, T, K] and w [G, N, K]."""
        x = self.x.float().double() * power(self.x_bytes).repeat_interleave(32, 2)
        rows, cols = self.w.shape[1] // self.w_bytes.shape[1], self.w.shape[2] // self.w_bytes.shape[2]
        w = self.w.float().double() * power(self.w_bytes).repeat_interleave(rows, 1).repeat_interleave(cols, 2)
        return x.transpose(0, 1), w

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 [T, G, N]: the product, and for each element the root of the sum of its squared terms."""
        x, w = self.operands()
        product = torch.bmm(x, w.transpose(1, 2)).transpose(0, 1)
        return product, torch.bmm(x * x, (w * w).transpose(1, 2)).sqrt().transpose(0, 1)


def make_problem(
    tokens: int, groups: int, n: int, k: int, form: str = "wide", seed: int = 0, data: str = "codes", spread: int = 11
) -> Problem:
    """form: "wide", "blocks" or "rows" (see above). data: "codes" (random_e4m3), "normal", or "outliers" (1 % of the
    channels of x 30 times larger)."""
    if data == "codes":
        x, w = random_e4m3((tokens, groups, k), seed), random_e4m3((groups, n, k), seed + 1)
    else:
        source = generator(seed)
        x = torch.randn((tokens, groups, k), generator=source, device=DEVICE) * (60 if data == "normal" else 6)
        if data == "outliers":
            x[..., ::97] *= 30
        w = torch.randn((groups, n, k), generator=source, device=DEVICE) * 60
        x, w = (t.clamp_(-448, 448).to(E4M3) for t in (x, w))
    blocks = k // 32
    if form == "wide":
        x_bytes = (
            uneven(tokens, groups, -(-k // 256), spread=spread).repeat_interleave(8, 2)[..., :blocks].contiguous()
        )
        w_scale = w_bytes = uneven(n // 32, groups, 1, spread=spread).transpose(0, 1).contiguous()
    else:
        x_bytes = uneven(tokens, groups, blocks, spread=spread)
        rows = n // 32 if form == "blocks" else n
        w_scale = w_bytes = uneven(rows, groups, blocks, spread=spread).transpose(0, 1).contiguous()
        if form == "rows":
            w_scale = w_bytes.view(torch.int32)
    return Problem(x, words(x_bytes), w, w_scale, 256 if form == "wide" else 32, x_bytes, w_bytes)


@dataclass(frozen=True)
class Chain:
    """A whole projection: attn BF16 [T, heads, 512], prepared weights."""

    attn: torch.Tensor
    positions: torch.Tensor
    cos_sin: torch.Tensor
    wo_a: torch.Tensor
    wo_a_scale: torch.Tensor
    wo_b: torch.Tensor
    wo_b_scale: torch.Tensor
    span: int

    @property
    def groups(self) -> int:
        return self.wo_a.shape[0]

    @property
    def weights(self) -> tuple[torch.Tensor, ...]:
        return self.wo_a, self.wo_a_scale, self.wo_b, self.wo_b_scale

    def tokens(self, cut: slice) -> Chain:
        return replace(self, attn=self.attn[cut], positions=self.positions[cut])

    def head(self, tokens: int) -> Chain:
        return self.tokens(slice(0, tokens))

    def from_attn(self, path: str = "fused", **kwargs) -> torch.Tensor:
        return vllm_megaattn.o_proj_from_attn(
            self.attn, self.positions, self.cos_sin, *self.weights,
            groups=self.groups, path=path, scale_span=self.span, **kwargs,
        )  # fmt: skip

    def quantized(self, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        return vllm_megaattn.inv_rope_mxfp8_quantize(
            self.attn, self.positions, self.cos_sin, groups=self.groups, scale_span=self.span, **kwargs
        )

    def from_x(self, x: torch.Tensor, x_scale: torch.Tensor, path: str = "fused", **kwargs) -> torch.Tensor:
        return vllm_megaattn.o_proj(
            x, x_scale, *self.weights, path=path, x_span=self.span, scale_span=self.span, **kwargs
        )


def make_chain(
    tokens: int, groups: int, rank: int, heads_per_group: int, hidden: int, span: int = 256, seed: int = 0
) -> Chain:
    source = generator(seed)
    attn = torch.randn((tokens, groups * heads_per_group, HEAD_DIM), generator=source, device=DEVICE)
    attn[:, :, ::97] *= 32
    angle = torch.rand((POSITIONS, ROPE_DIM // 2), generator=source, device=DEVICE) * 6.2831853
    return Chain(
        attn=attn.bfloat16(),
        positions=torch.randint(0, POSITIONS, (tokens,), generator=source, device=DEVICE),
        cos_sin=torch.cat([angle.cos(), angle.sin()], 1).contiguous(),
        wo_a=random_e4m3((groups, rank, heads_per_group * HEAD_DIM), seed + 1),
        wo_a_scale=uneven(rank // 32, groups, 1, 112).transpose(0, 1).contiguous(),
        wo_b=random_e4m3((hidden, groups * rank), seed + 2),
        wo_b_scale=uneven(hidden // 32, 1, 1, 112).view(-1, 1),
        span=span,
    )


# ---- comparing on the device -----------------------------------------------------------------------------------


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bit patterns as integers of the same width."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def count_differences(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Number of elements whose bits differ, as a 0-d tensor on the device: no synchronisation."""
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    return (bits(a) != bits(b)).sum()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return int(count_differences(a, b)) == 0


class Tally:
    """Collects counts that must be zero, on the device, under labels; one synchronisation at the end."""

    def __init__(self) -> None:
        self.labels: list[object] = []
        self.counts: list[torch.Tensor] = []

    def add(self, label: object, *counts: torch.Tensor) -> None:
        self.labels.append(label)
        self.counts.append(sum(counts[1:], counts[0]))

    def check(self) -> None:
        assert self.counts, "nothing was compared"
        counts = torch.stack(self.counts).tolist()
        wrong = [(label, count) for label, count in zip(self.labels, counts, strict=True) if count]
        assert not wrong, f"{len(wrong)} of {len(counts)} comparisons differ; label, elements: {wrong[:12]}"


# ---- buffers ---------------------------------------------------------------------------------------------------


class Guarded:
    """A contiguous tensor in the middle of a buffer of 0xA5, `offset` bytes past a 256-byte boundary."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> None:
        numel = int(torch.Size(shape).numel()) * dtype.itemsize
        self.begin, self.end = 1024 + offset, 1024 + offset + numel
        self.buffer = torch.full((self.end + 1024,), GUARD, dtype=torch.uint8, device=DEVICE)
        self.tensor = self.buffer[self.begin : self.end].view(dtype).view(shape)

    def disturbed(self) -> torch.Tensor:
        """Guard bytes that changed, as a 0-d tensor on the device."""
        return (self.buffer[: self.begin] != GUARD).sum() + (self.buffer[self.end :] != GUARD).sum()


def misplaced(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """A contiguous copy whose first byte lies `offset` bytes past a 256-byte boundary; 1-byte dtypes take any offset."""
    guarded = Guarded(tuple(tensor.shape), tensor.dtype, offset)
    guarded.tensor.copy_(tensor)
    return guarded.tensor


def mxfp8_buffers(tokens: int, cols: int) -> tuple[Guarded, Guarded]:
    return (
        Guarded((tokens, cols), E4M3),
        Guarded((layouts.f8_128x4_bytes(tokens, cols // 32),), torch.uint8),
    )


def activation_buffers(tokens: int, groups: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x e4m3 [T, G, K] and int32 scales [T, G, K/128] with stride 1 over T, as the inverse RoPE op writes them."""
    scale = torch.empty((groups, k // 128, -(-tokens // 4) * 4), dtype=torch.int32, device=DEVICE)
    return torch.empty((tokens, groups, k), dtype=E4M3, device=DEVICE), scale.permute(2, 0, 1)[:tokens]


# ---- graphs and switches ---------------------------------------------------------------------------------------


def capture(body: Callable[[], object], mode: str = "global") -> tuple[torch.cuda.CUDAGraph, object]:
    """The graph of body(), and what body returned: tensors that each replay overwrites."""
    if not gc.get_freeze_count():
        gc.freeze()  # torch.cuda.graph collects garbage first: not over all modules again each time
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        result = body()
    return graph, result


@contextlib.contextmanager
def flags(value: int) -> Iterator[None]:
    """Process-wide switches of the C core: FLAG_BATCH_INVARIANT, FLAG_NO_PDL."""
    before = _C.get_flags()
    _C.set_flags(before | value)
    try:
        yield
    finally:
        _C.set_flags(before)


INVARIANT, NO_PDL = _C.FLAG_BATCH_INVARIANT, _C.FLAG_NO_PDL
