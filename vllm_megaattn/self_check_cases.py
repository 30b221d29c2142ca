"""The problems of `self_check`: what is run on a device, and what it is compared with on the CPU.

A case is prepared, launched and compared in three steps, so that any number of cases share one copy to the device and one
copy back, with nothing but kernel launches in between. All inputs and results lie in one buffer of bytes (`Arena`),
filled with 0xA5 where results are to come.

A batch repeats a few distinct tokens, all weights lie in one pool of bytes, and large ones are overlapping windows into
it: the device runs the kernels of large problems while the CPU computes the few distinct tokens and the first and last
rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from vllm_megaattn import _C, layouts

E4M3 = torch.float8_e4m3fn
POISON = 0xA5
POOL_BYTES = 1 << 18  # weights up to this size are cut from the pool
WINDOW_STEP = 16  # bytes between the rows of weights that are windows: what the copy engine needs
CHECKED_ROWS = 128  # first and last rows of large weights that the CPU computes
# Relative Frobenius distance of BF16 results from the CPU backend's. Two BF16 roundings of nearly the same value differ
# by 1e-3 at most on average; the tensor cores' accumulation adds 3.5e-4 (span 256).
VALUE_LIMIT = 3e-3


@dataclass(frozen=True)
class Case:
    """T tokens, G groups of `heads` heads of 512, N rows a group, `hidden` rows of wo_b, one scale span.

    unit:    the kernels that are meant to run: what a failure is blamed on
    weights: "wide" one scale for 32 rows and all of K, "blocks" 32x32, "rows" packed words for both products,
             "tiled" packed words for wo_a and F8_128x4 for wo_b (what vLLM holds on Blackwell)
    part:    "chain" everything, "einsum" wo_a alone, "gemm" wo_b alone (K = G * N), "stream" inverse RoPE and quantiser
    flags:   switches of the C core (enum mx_flag)
    """

    unit: str
    tokens: int
    span: int = 32
    weights: str = "blocks"
    part: str = "chain"
    flags: int = 0
    groups: int = 2
    heads: int = 1
    rows: int = 256
    hidden: int = 160
    distinct: int = 7
    windows: bool = False

    @property
    def k(self) -> int:
        return self.heads * 512

    def __str__(self) -> str:
        shape = f"T={self.tokens} G={self.groups} K={self.k} N={self.rows}/{self.hidden}"
        return f"{self.unit}: {shape} span={self.span} {self.weights} {self.part} flags={self.flags}"


@dataclass
class Finding:
    """One comparison. `detail` says how far apart the two sides are when they differ."""

    family: str
    what: str
    case: Case
    ok: bool
    detail: str = ""


# ---- one buffer for everything -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slot:
    """A tensor's place in the arena."""

    offset: int
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None  # None: contiguous

    def of(self, base: torch.Tensor) -> torch.Tensor:
        flat = base[self.offset : self.offset + self.num_bytes].view(self.dtype)
        return flat.view(self.shape) if self.stride is None else flat.as_strided(self.shape, self.stride)


@dataclass
class Arena:
    size: int = 0
    parts: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    pool: torch.Tensor | None = None  # e4m3
    pool_slot: Slot | None = None

    def _reserve(self, num_bytes: int) -> int:
        offset = self.size
        self.size += -(-num_bytes // 256) * 256
        return offset

    def put(
        self, tensor: torch.Tensor, shape: tuple[int, ...] | None = None, stride: tuple[int, ...] | None = None
    ) -> Slot:
        """An input; `shape` and `stride` (elements) where the kernels see it otherwise than contiguous."""
        flat = tensor.contiguous().reshape(-1).view(torch.uint8)
        offset = self._reserve(flat.numel())
        self.parts.append((offset, flat))
        return Slot(offset, flat.numel(), tensor.dtype, shape or tuple(tensor.shape), stride)

    def out(self, shape: tuple[int, ...], dtype: torch.dtype, stride: tuple[int, ...] | None = None) -> Slot:
        """A result, poisoned; `stride` in elements."""
        if stride is None:
            count = math.prod(shape)
        else:
            count = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        num_bytes = count * dtype.itemsize
        return Slot(self._reserve(num_bytes), num_bytes, dtype, shape, stride)

    def weights(self, count: int, seed: int) -> tuple[torch.Tensor, Slot]:
        """e4m3 [count]: a piece of the pool, another one for each seed, or of its own if the pool is too small."""
        if self.pool is None:
            generator = torch.Generator().manual_seed(0)
            self.pool = (torch.randn(POOL_BYTES, generator=generator, device="cpu") * 60).clamp_(-448, 448).to(E4M3)
            self.pool_slot = self.put(self.pool)
        if count > POOL_BYTES:
            pieces = range(-(-count // POOL_BYTES))  # no two rows of the same bytes
            own = torch.cat([self.pool.view(torch.uint8).roll(4099 * i) for i in pieces])[:count].view(E4M3)
            return own, self.put(own)
        start = seed * 4112 % (POOL_BYTES - count + 16) // 16 * 16
        slot = Slot(self.pool_slot.offset + start, count, E4M3, (count,))
        return self.pool[start : start + count], slot

    def host(self) -> torch.Tensor:
        base = torch.full((self.size,), POISON, dtype=torch.uint8, device="cpu")
        for offset, flat in self.parts:
            base[offset : offset + flat.numel()] = flat
        return base


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes as the widest integers that its rows hold: torch moves and compares elements, not bytes."""
    tensor = tensor.contiguous().view(torch.uint8)
    aligned = tensor.shape[-1] % 8 == 0 and tensor.storage_offset() % 8 == 0
    return tensor.view(torch.int64) if aligned else tensor


# ---- preparing -----------------------------------------------------------------------------------------------------


def uneven_scales(rows: int, cols: int, first: int) -> torch.Tensor:
    """uint8 [rows, cols]: neighbours in row, column and 128x4 tile all differ."""
    row, col = torch.arange(rows, device="cpu")[:, None], torch.arange(cols, device="cpu")[None, :]
    return (first + (3 * row + 5 * col) % 11).to(torch.uint8)


@dataclass
class Weight:
    """Weights [G, N, K] (e4m3) with their bytes per row and 32 columns, on the host, and where the device finds them."""

    data: torch.Tensor
    linear: torch.Tensor  # uint8 [G, N, K / 32]
    slot: Slot
    scale: Slot


def _weight(case: Case, arena: Arena, seed: int, groups: int | None, rows: int, cols: int) -> Weight:
    """wo_a [G, N, K]; groups None: wo_b, two dimensions on the device."""
    dims = slice(0 if groups else 1, 3)
    groups = groups or 1
    form = case.weights
    shape = (groups, rows, cols)
    stride = (rows * cols, cols, 1)
    if case.windows:
        stride = (rows * WINDOW_STEP, WINDOW_STEP, 1)
    count = sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1
    buffer, place = arena.weights(count, seed)
    data = buffer.as_strided(shape, stride, buffer.storage_offset())
    per_row = 1 if form in ("rows", "tiled") else 32
    num_cols = 1 if form == "wide" else cols // 32
    blocks = uneven_scales(groups * -(-rows // per_row), num_cols, 112).view(groups, -1, num_cols)
    linear = layouts.expand_blocks(blocks, rows, cols, (per_row, cols // num_cols))
    slot = Slot(place.offset, count, E4M3, shape[dims], stride[dims])
    if form == "rows" or (form == "tiled" and dims.start == 0):
        words = layouts.to_packed(linear)
        scale = arena.put(words.transpose(1, 2), tuple(words.shape[dims]), tuple(words.stride()[dims]))
    elif form == "tiled":
        scale = arena.put(layouts.to_f8_128x4(linear[0]))
    else:
        scale = arena.put(blocks if dims.start == 0 else blocks[0])
    return Weight(data, linear, slot, scale)


@dataclass
class Prepared:
    case: Case
    host: dict[str, torch.Tensor]  # distinct tokens
    weights: dict[str, Weight]
    slots: dict[str, Slot]


def prepare(case: Case, arena: Arena, seed: int) -> Prepared:
    """Reserves the case's inputs and results; draws its data."""
    generator = torch.Generator().manual_seed(seed)
    tokens, groups, k, columns = case.tokens, case.groups, case.k, case.groups * case.rows
    distinct = min(case.distinct, tokens)
    p = Prepared(case, {}, {}, {})
    repeat = torch.arange(tokens, device="cpu") % distinct

    def token_input(name: str, tensor: torch.Tensor) -> None:
        p.host[name] = tensor
        repeated = _words(tensor.flatten(1) if tensor.dim() > 1 else tensor)[repeat].view(tensor.dtype)
        p.slots[name] = arena.put(repeated.view(tokens, *tensor.shape[1:]))

    def scaled(name: str, cols: int) -> None:
        p.slots[name] = arena.out((tokens, cols), E4M3)
        p.slots[f"{name}_scale"] = arena.out((layouts.f8_128x4_bytes(tokens, cols // 32),), torch.uint8)

    def activation(name: str) -> None:
        pitch, words = -(-tokens // 4) * 4, k // 128
        p.slots[name] = arena.out((tokens, groups, k), E4M3)
        p.slots[f"{name}_scale"] = arena.out((tokens, groups, words), torch.int32, (1, words * pitch, pitch))

    if case.part != "gemm":
        attn = torch.randn((distinct, groups * case.heads, 512), generator=generator, device="cpu")
        attn[:, :, ::97] *= 64  # outlier channels
        token_input("attn", attn.bfloat16())
        token_input("positions", torch.randint(0, 64, (distinct,), generator=generator, device="cpu"))
        angle = torch.rand((64, 32), generator=generator, device="cpu") * 6.2831853
        p.host["cos_sin"] = torch.cat([angle.cos(), angle.sin()], 1).contiguous()
        p.slots["cos_sin"] = arena.put(p.host["cos_sin"])
        activation("x")
    if case.part in ("chain", "einsum"):
        p.weights["wo_a"] = _weight(case, arena, 2 * seed, groups, case.rows, k)
        p.slots["z_bf16"] = arena.out((tokens, groups, case.rows), torch.bfloat16)
        scaled("q", columns)
        scaled("z", columns)
    if case.part == "stream":
        scaled("q", groups * k)
    if case.part == "gemm":
        z = (torch.randn((distinct, columns), generator=generator, device="cpu") * 60).clamp_(-448, 448).to(E4M3)
        token_input("q", z)
        p.host["q_linear"] = uneven_scales(distinct, columns // case.span, 118).repeat_interleave(case.span // 32, 1)
        p.slots["q_scale"] = arena.put(layouts.to_f8_128x4(p.host["q_linear"][repeat]))
    if case.part in ("chain", "gemm"):
        p.weights["wo_b"] = _weight(case, arena, 2 * seed + 1, None, case.hidden, columns)
        p.slots["y"] = arena.out((tokens, case.hidden), torch.bfloat16)
    if case.part == "chain":
        for way in ("fused", "unfused", "attn"):
            scaled(f"{way}_z", columns)
            p.slots[f"{way}_y"] = arena.out((tokens, case.hidden), torch.bfloat16)
        for way in ("unfused", "attn"):
            p.slots[f"{way}_z_bf16"] = arena.out((tokens, groups, case.rows), torch.bfloat16)
        activation("attn_x")
    return p


# ---- launching -----------------------------------------------------------------------------------------------------


def launch(p: Prepared, base: torch.Tensor) -> None:
    """Runs the case on the device of `base`, by the ops themselves: no front end may choose another path."""
    case, ops = p.case, torch.ops.vllm_megaattn
    t = {name: slot.of(base) for name, slot in p.slots.items()}
    for name, weight in p.weights.items():
        t[name], t[f"{name}_scale"] = weight.slot.of(base), weight.scale.of(base)
    span = case.span
    if case.part != "gemm":
        ops.inv_rope_mxfp8_quantize(t["attn"], t["positions"], t["cos_sin"], t["x"], t["x_scale"], 0, 0, span)
    if case.part == "stream":
        ops.mxfp8_quantize_sfd128x4(t["attn"], t["q"], t["q_scale"], span)
        return
    if case.part in ("chain", "einsum"):
        a = (t["x"], t["x_scale"], t["wo_a"], t["wo_a_scale"])
        ops.einsum_fp8_bf16(*a, t["z_bf16"], span)
        ops.mxfp8_quantize_sfd128x4(t["z_bf16"], t["q"], t["q_scale"], span)
        ops.einsum_fp8_sfd128x4(*a, t["z"], t["z_scale"], span, span)
    if case.part in ("chain", "gemm"):
        b = (t["wo_b"], t["wo_b_scale"])
        ops.mxfp8_gemm_wo_b(t["q"], t["q_scale"], *b, t["y"], span)
    if case.part == "chain":
        none = t["z_bf16"].new_empty(0)
        ops.o_proj(*a, *b, t["fused_z"], t["fused_z_scale"], none, t["fused_y"], True, span, span)
        ops.o_proj(
            *a, *b, t["unfused_z"], t["unfused_z_scale"], t["unfused_z_bf16"], t["unfused_y"], False, span, span
        )
        ops.o_proj_from_attn(
            t["attn"], t["positions"], t["cos_sin"], *a[2:], *b, t["attn_x"], t["attn_x_scale"],
            t["attn_z"], t["attn_z_scale"], t["attn_z_bf16"], t["attn_y"], 0, 0, True, span,
        )  # fmt: skip


# ---- comparing -----------------------------------------------------------------------------------------------------


def same(mine: torch.Tensor, other: torch.Tensor) -> tuple[bool, str]:
    """Byte for byte."""
    mine, other = _words(mine.reshape(-1)), _words(other.reshape(-1))
    if mine.dtype != other.dtype:  # one of them is not aligned
        mine, other = mine.view(torch.uint8), other.view(torch.uint8)
    if torch.equal(mine, other):
        return True, ""
    differ = mine.view(torch.uint8) != other.view(torch.uint8)
    return False, f"{int(differ.sum())} of {differ.numel()} bytes differ, first at {int(differ.nonzero()[0])}"


def near(mine: torch.Tensor, other: torch.Tensor) -> tuple[bool, str]:
    mine, other = mine.float(), other.float()
    if not torch.equal(mine.isnan(), other.isnan()):
        return False, "NaN in different places"
    mine, other = mine.nan_to_num(), other.nan_to_num()
    distance = ((mine - other).norm() / other.norm().clamp_min(1e-30)).item()
    return distance <= VALUE_LIMIT, f"relative distance {distance:.1e}"


def _checked_rows(rows: int) -> torch.Tensor:
    if rows <= 2 * CHECKED_ROWS:
        return torch.arange(rows, device="cpu")
    last = torch.arange(rows - CHECKED_ROWS, rows, device="cpu")
    return torch.cat([torch.arange(CHECKED_ROWS, device="cpu"), last])


def _rows_of(weight: Weight, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    data = weight.data.view(torch.uint8)[:, rows].contiguous().view(E4M3)
    return data, weight.linear[:, rows].contiguous()


def compare(p: Prepared, back: torch.Tensor) -> list[Finding]:
    """Every comparison of one case; `back`: the arena as it came back."""
    from vllm_megaattn import ops

    case, findings = p.case, []
    t = {name: slot.of(back) for name, slot in p.slots.items()}
    distinct = min(case.distinct, case.tokens)

    def note(family: str, what: str, outcome: tuple[bool, str]) -> None:
        findings.append(Finding(family, what, case, *outcome))

    def first(tensor: torch.Tensor, family: str, what: str) -> torch.Tensor:
        """The distinct tokens, after checking that all others repeat them."""
        outcome = same(tensor[distinct:], tensor[:-distinct]) if case.tokens > distinct else (True, "")
        if not outcome[0]:
            note(family, f"{what}: equal tokens are equal", outcome)
        return tensor[:distinct]

    def linear(name: str, cols: int, family: str) -> torch.Tensor:
        """Scale bytes [distinct, cols / 32] out of F8_128x4."""
        padding = layouts.f8_128x4_padding_is_zero(t[name], case.tokens, cols // 32)
        note(family, f"{name}: padding is 0x00", (padding, "" if padding else "padding bytes written"))
        return first(layouts.from_f8_128x4(t[name], case.tokens, cols // 32), family, name)

    def quantised(value: torch.Tensor, name: str, family: str, what: str) -> None:
        """t[name] and its scales against the CPU's quantisation of the distinct tokens."""
        cols = t[name].shape[1]
        data, scale = ops.mxfp8_quantize_sfd128x4(value, scale_span=case.span)
        note(family, f"{what}: data", same(first(t[name], family, name), data))
        want = layouts.from_f8_128x4(scale, len(value), cols // 32)
        note(family, f"{what}: scales", same(linear(f"{name}_scale", cols, family), want))

    if case.part != "gemm":
        host = p.host
        x, x_scale = ops.inv_rope_mxfp8_quantize(
            host["attn"], host["positions"], host["cos_sin"], groups=case.groups, scale_span=case.span
        )
        note("inv_rope", "x = CPU: data", same(first(t["x"], "inv_rope", "x"), x))
        note("inv_rope", "x = CPU: scales", same(first(t["x_scale"], "inv_rope", "x_scale"), x_scale))
    if case.part == "stream":
        quantised(p.host["attn"].flatten(1), "q", "quantize", "q = CPU")
        return findings
    if case.part in ("chain", "einsum"):
        rows = _checked_rows(case.rows)
        z = first(t["z_bf16"], "einsum", "BF16 z")
        note(
            "einsum",
            "BF16 z ~ CPU",
            near(z[:, :, rows], ops.einsum_fp8_bf16(x, x_scale, *_rows_of(p.weights["wo_a"], rows))),
        )
        quantised(z.flatten(1), "q", "quantize", "q = CPU")
        quantised(z.flatten(1), "z", "einsum", "fused z = quantised BF16 z")
    if case.part in ("chain", "gemm"):
        rows = _checked_rows(case.hidden)
        cols = t["q"].shape[1]
        q_linear = p.host.get("q_linear")
        if q_linear is None:
            q_linear = layouts.from_f8_128x4(t["q_scale"], case.tokens, cols // 32)[:distinct]
        weight, scale = _rows_of(p.weights["wo_b"], rows)
        want = ops.mxfp8_gemm_wo_b(
            t["q"][:distinct].contiguous(), layouts.to_f8_128x4(q_linear.contiguous()), weight[0], scale[0]
        )
        y = first(t["y"], "gemm", "y")
        note("gemm", "y ~ CPU", near(y[:, rows], want))
    if case.part == "chain":
        note("o_proj", "fused = unfused", same(t["fused_y"], t["unfused_y"]))
        note("o_proj", "from attention = from x", same(t["attn_y"], t["fused_y"]))
        note("o_proj", "fused ~ einsum, GEMM", near(first(t["fused_y"], "o_proj", "y"), y))
    return findings


def run(cases: list[tuple[int, Case]], device: torch.device, set_flags: Callable[[int], object]) -> list[Finding]:
    """All comparisons of numbered cases (the number is the seed), with one copy to the device and one back.

    set_flags: adds a case's switches to those of the process; called with 0 afterwards.
    """
    arena = Arena()
    prepared = [prepare(case, arena, seed) for seed, case in cases]
    base = arena.host()
    there = base.clone() if device.type == "cpu" else base.to(device)
    failed: dict[int, str] = {}
    not_offered: set[int] = set()  # a library has no algorithm for the problem: the route is not taken then
    try:
        for index, p in enumerate(prepared):
            set_flags(p.case.flags)
            try:
                launch(p, there)
            except (RuntimeError, ValueError) as error:
                failed[index] = str(error)
                if p.case.flags & _C.FLAG_WO_B_CUBLASLT and _C.take_error_kind() == _C.VALUE_ERROR:
                    not_offered.add(index)
    finally:
        set_flags(0)
    back = there.cpu()
    findings: list[Finding] = []
    for index, p in enumerate(prepared):
        if index in failed:
            family, ok = "gemm" if p.case.part == "gemm" else "o_proj", index in not_offered
            findings.append(Finding(family, "not offered" if ok else "runs", p.case, ok, failed[index]))
        else:
            findings += compare(p, back)
    return findings
