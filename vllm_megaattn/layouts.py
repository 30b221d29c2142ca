"""Where scale bytes live, in every form that the package reads or writes, and conversions between them.

The plain form, from which and to which everything converts, is `linear`: uint8 [rows, nK] or [G, rows, nK], the UE8M0
byte of (row, k-block of 32) at [row, block]. nK = K / 32.

    form       tensor                                   who uses it
    F8_128x4   uint8, 1-D, whole 128 x 4 tiles          cuBLASLt, FlashInfer, torch (SWIZZLE_32_4_4), our z
    8x4        uint8, 1-D, whole 8 x 4 tiles            TensorRT-LLM for few tokens
    packed     int32 [.., rows, ceil(nK / 4)],          DeepGEMM on SM100, vLLM's attention output
               strides (.., 1, ceil4(rows))
    blocks     uint8 [ceil(rows / b0), ceil(K / b1)]    checkpoints: 32x32 (V4.1), 128x128 (V4), 1x32

Inside an F8_128x4 tile (512 bytes, tiles row-major) byte 16 * i + 4 * j + c holds row 32 * j + i, block c:

    byte   0..3        4..7         8..11        12..15       16..19      ...  508..511
    row    0           32           64           96           1           ...  127          (4 blocks each)

Padding rows and columns are 0x00. Conversions are exact, vectorised, run on the device of their input and take any
number of rows and any nK. The offsets and golden values are those of cuBLASLt's "1D Block Scaling Factors Layout".

Scales are accepted as uint8, float8_e8m0fnu, packed int32 and power-of-two float32; any other dtype is refused, and
so is a float32 scale that is not a power of two: rounding it without re-quantising the data would change the weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

BLOCK = 32  # elements along K that share a UE8M0 byte
TILE_ROWS, TILE_COLS, TILE_BYTES = 128, 4, 512  # F8_128x4
SMALL_TILE_ROWS = 8  # 8x4: same columns, 32-byte tiles
SCALE_NAN = 0xFF
E4M3_MAX = 448.0

_BYTE_DTYPES = (torch.uint8, torch.float8_e8m0fnu)


def ceil_div(a: int, b: int) -> int:
    return (a + b - 1) // b


def round_up(a: int, b: int) -> int:
    return ceil_div(a, b) * b


# ---- offsets and sizes -----------------------------------------------------------------------------------------


def _check_range(name: str, value, end: int | None, why: str) -> None:
    """`value`, an int or an integer tensor, must lie in [0, end); end None: no upper end."""
    if isinstance(value, torch.Tensor):
        if value.numel() == 0:
            return
        low, high = int(value.min()), int(value.max())
    else:
        low = high = value
    if low < 0 or (end is not None and high >= end):
        upper = "" if end is None else f" and below {why} = {end}"
        raise ValueError(f"{name} must be at least 0{upper}, got {low if low < 0 else high}")


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if isinstance(count, int) and count < 0:  # a symbolic size of torch.compile is never negative
            raise ValueError(f"{name} must be at least 0, got {count}")


def f8_128x4_offset(row, block, num_blocks: int):
    """Byte offset of the scale of (row, block of 32) in an F8_128x4 buffer with `num_blocks` = K / 32 blocks a row.

    Works on ints and, elementwise with broadcasting, on integer tensors, for padding too. Raises ValueError for a negative
    row and for a block outside [0, ceil4(num_blocks)): the formula would give the place of another one.
    """
    _check_range("row", row, None, "")
    _check_range("block", block, round_up(num_blocks, TILE_COLS), "ceil4(num_blocks)")
    tile = (row // TILE_ROWS) * ceil_div(num_blocks, TILE_COLS) + block // TILE_COLS
    return tile * TILE_BYTES + (row % 32) * 16 + ((row % TILE_ROWS) // 32) * 4 + block % TILE_COLS


def f8_8x4_offset(row, block, num_blocks: int):
    """Byte offset of the scale of (row, block) in an 8x4 buffer. Ints or integer tensors; errors as above."""
    _check_range("row", row, None, "")
    _check_range("block", block, round_up(num_blocks, TILE_COLS), "ceil4(num_blocks)")
    tile = (row // SMALL_TILE_ROWS) * ceil_div(num_blocks, TILE_COLS) + block // TILE_COLS
    return tile * 32 + (row % SMALL_TILE_ROWS) * 4 + block % TILE_COLS


def packed_offset(row, block, pitch: int):
    """Byte offset of the scale of (row, block) in packed MN-major words; `pitch` = words from one word column to the
    next, at least ceil4(rows). Ints or integer tensors. Little-endian, as every machine this runs on. Raises ValueError
    for a row outside [0, pitch) and for a negative block."""
    _check_range("row", row, pitch, "pitch")
    _check_range("block", block, None, "")
    return ((block // 4) * pitch + row) * 4 + block % 4


def f8_128x4_bytes(rows: int, num_blocks: int) -> int:
    """Bytes of an F8_128x4 buffer: whole tiles, so ceil128(rows) * ceil4(num_blocks)."""
    _check_counts(rows=rows, num_blocks=num_blocks)
    return round_up(rows, TILE_ROWS) * round_up(num_blocks, TILE_COLS)


def f8_8x4_bytes(rows: int, num_blocks: int) -> int:
    """Bytes of an 8x4 buffer: ceil8(rows) * ceil4(num_blocks)."""
    _check_counts(rows=rows, num_blocks=num_blocks)
    return round_up(rows, SMALL_TILE_ROWS) * round_up(num_blocks, TILE_COLS)


def f8_128x4_grouped_bytes(groups: int, rows: int, num_blocks: int, *, padding: str) -> int:
    """Bytes for `groups` matrices of `rows` rows. padding "per_group": each group starts on a tile; "flattened": the
    groups' rows follow each other without gaps, tiles may straddle groups."""
    _check_counts(groups=groups, rows=rows, num_blocks=num_blocks)
    if padding == "per_group":
        return groups * f8_128x4_bytes(rows, num_blocks)
    if padding == "flattened":
        return f8_128x4_bytes(groups * rows, num_blocks)
    raise ValueError(f"padding must be 'per_group' or 'flattened', got {padding!r}")


def check_f8_128x4_size(
    num_bytes: int, rows: int, num_blocks: int, *, groups: int = 1, padding: str = "per_group", name: str = "scale"
) -> None:
    """Raise ValueError unless a buffer of `num_bytes` is exactly an F8_128x4 buffer of that shape.

    With several groups a buffer padded the other way is the usual mistake (the two differ when rows % 128 != 0); the
    message says so.
    """
    expected = f8_128x4_grouped_bytes(groups, rows, num_blocks, padding=padding)
    if num_bytes == expected:
        return
    what = (
        f"{rows} rows x {num_blocks} blocks"
        if groups == 1
        else f"{groups} groups of {rows} rows x {num_blocks} blocks"
    )
    hint = ""
    if groups > 1:
        other = "flattened" if padding == "per_group" else "per_group"
        if num_bytes == f8_128x4_grouped_bytes(groups, rows, num_blocks, padding=other):
            hint = f"; that is the size with {other} padding, this consumer reads {padding} padding"
    if num_bytes == groups * rows * num_blocks:
        hint += "; that is the size of unswizzled scales"
    raise ValueError(f"{name} must have {expected} bytes (F8_128x4, {what}), got {num_bytes}{hint}")


# ---- dtypes: what counts as a scale ----------------------------------------------------------------------------


def scale_bytes_from_float32(scale: torch.Tensor, *, name: str = "scale") -> torch.Tensor:
    """UE8M0 bytes (uint8, same shape) of float32 scales, which must be powers of two from 2^-127 to 2^127.

    Exact by construction: the byte is read from the bits, nothing is rounded. Anything else (0.3, 0.75, 0, negative,
    Inf, NaN) raises ValueError naming the first offender: a scale cannot be rounded without re-quantising its data.
    """
    if scale.dtype != torch.float32:
        raise TypeError(f"{name} must be float32, got {scale.dtype}")
    bits = scale.contiguous().view(torch.int32)
    # Normal powers of two have a zero mantissa; 2^-127 is the one subnormal that UE8M0 can hold.
    subnormal = bits == 0x00400000
    exponent = bits >> 23
    good = subnormal | ((bits > 0) & ((bits & 0x007FFFFF) == 0) & (exponent < 255))
    if not bool(good.all()):
        bad = (~good).nonzero()[0].tolist()
        raise ValueError(
            f"{name} must hold positive powers of two from 2^-127 to 2^127, got {scale[tuple(bad)].item()!r} "
            f"at {bad} ({int((~good).sum())} such values); rounding it would change the weights"
        )
    return torch.where(subnormal, torch.zeros_like(exponent), exponent).to(torch.uint8)


def scale_bytes(scale: torch.Tensor, *, num_blocks: int | None = None, name: str = "scale") -> torch.Tensor:
    """Any accepted scale tensor as uint8 bytes: uint8 and float8_e8m0fnu are viewed, power-of-two float32 is
    converted, packed int32 [.., rows, words] is unpacked to [.., rows, num_blocks]. Other dtypes raise TypeError.

    The dtype decides how a scale is read, nothing else does.
    """
    if scale.dtype == torch.uint8:
        return scale
    if scale.dtype == torch.float8_e8m0fnu:
        return scale.view(torch.uint8)
    if scale.dtype == torch.float32:
        return scale_bytes_from_float32(scale, name=name)
    if scale.dtype == torch.int32:
        return from_packed(scale, num_blocks, name=name)
    raise TypeError(f"{name} must be uint8, float8_e8m0fnu, packed int32 or power-of-two float32, got {scale.dtype}")


def weight_scale_bytes(scale: torch.Tensor, rows: int, cols: int, *, name: str = "scale") -> torch.Tensor:
    """`scale_bytes` of the scales of [rows, cols] weights, where 1-D is F8_128x4: its padding is left out."""
    if scale.dim() == 1:
        return from_f8_128x4(scale, rows, cols // BLOCK, name=name)
    return scale_bytes(scale, name=name)


def as_byte_buffer(scale: torch.Tensor, *, name: str = "scale") -> torch.Tensor:
    """A tiled (F8_128x4 or 8x4) buffer as 1-D uint8, without a copy: uint8 or float8_e8m0fnu of any shape, or vLLM's
    int32 view [ceil(T / 128), C / 128, 128] of the same bytes. It must be contiguous."""
    if scale.dtype not in (*_BYTE_DTYPES, torch.int32):
        raise TypeError(f"{name} must be uint8, float8_e8m0fnu or an int32 view of the bytes, got {scale.dtype}")
    if not scale.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got shape {list(scale.shape)} strides {list(scale.stride())}")
    return scale.reshape(-1).view(torch.uint8)


# ---- NaN codes -------------------------------------------------------------------------------------------------


def find_nan(data: torch.Tensor) -> tuple[int, list[int]]:
    """How many NaN codes a tensor holds, and the index of the first of them ([] if there are none).

    data: e4m3 elements, of which 0x7F and 0xFF are NaN, or scale bytes (uint8 or float8_e8m0fnu), of which 0xFF is.
    """
    raw, nan_code = data.view(torch.uint8), SCALE_NAN
    if data.dtype == torch.float8_e4m3fn:
        raw, nan_code = raw & 0x7F, 0x7F
    if raw.numel() == 0 or int(raw.max()) < nan_code:  # the quickest question that one pass answers
        return 0, []
    places = (raw == nan_code).nonzero()
    return places.shape[0], places[0].tolist()


def refuse_nan(data: torch.Tensor, *, name: str, offset: Sequence[int] | None = None) -> None:
    """Raise ValueError if weights or scale bytes (as in `find_nan`) hold a NaN: how many, and where the first one is.

    offset: index of data's first element in the tensor that the message is about.
    """
    count, first = find_nan(data)
    if count:
        what = "elements (0x7F or 0xFF)" if data.dtype == torch.float8_e4m3fn else "scales (0xFF)"
        where = [i + o for i, o in zip(first, offset or [0] * len(first), strict=True)]
        raise ValueError(f"{name} holds NaN {what}: {count} of {data.numel()}, the first at {where}")


# ---- decoding --------------------------------------------------------------------------------------------------


def scale_to_float32(scale: torch.Tensor) -> torch.Tensor:
    """2^(byte - 127) as float32: byte 0 is the subnormal 2^-127, byte 254 is 2^127, byte 255 is NaN.

    Built from bits, so neither a flush-to-zero mode nor the dtype's own conversion can change it.
    """
    code = _require_bytes(scale, "scale").to(torch.int32)
    bits = code << 23
    bits = torch.where(code == 0, torch.full_like(bits, 0x00400000), bits)
    bits = torch.where(code == SCALE_NAN, torch.full_like(bits, 0x7FC00000), bits)
    return bits.view(torch.float32)


def scale_to_float64(scale: torch.Tensor) -> torch.Tensor:
    """2^(byte - 127) as float64, where no byte is subnormal; byte 255 is NaN."""
    code = _require_bytes(scale, "scale").to(torch.int64)
    bits = (code + (1023 - 127)) << 52
    bits = torch.where(code == SCALE_NAN, torch.full_like(bits, 0x7FF8000000000000), bits)
    return bits.view(torch.float64)


def e4m3_to_float32(data: torch.Tensor) -> torch.Tensor:
    """Exact values of e4m3 elements (float8_e4m3fn, or their bytes as uint8); 0x7F and 0xFF are NaN."""
    if data.dtype == torch.uint8:
        data = data.view(torch.float8_e4m3fn)
    if data.dtype != torch.float8_e4m3fn:
        raise TypeError(f"data must be float8_e4m3fn or its bytes as uint8, got {data.dtype}")
    return data.to(torch.float32)


def dequantize(
    data: torch.Tensor, linear: torch.Tensor, *, dtype: torch.dtype = torch.float64, scale_block: int = BLOCK
) -> torch.Tensor:
    """e4m3 [.., K] times the bytes of its blocks [.., K / scale_block]: exact in float64 (in float32 a large element
    under a byte of 247 or more overflows). A NaN scale makes its whole block NaN, zero elements too."""
    decode = {torch.float64: scale_to_float64, torch.float32: scale_to_float32}.get(dtype)
    if decode is None:
        raise TypeError(f"dtype must be float64 or float32, got {dtype}")
    num_cols = data.shape[-1]
    if linear.shape[-1] != ceil_div(num_cols, scale_block) or linear.shape[:-1] != data.shape[:-1]:
        raise ValueError(
            f"linear must be {[*data.shape[:-1], ceil_div(num_cols, scale_block)]} for data {list(data.shape)} and "
            f"blocks of {scale_block}, got {list(linear.shape)}"
        )
    scale = decode(linear).repeat_interleave(scale_block, dim=-1)[..., :num_cols]
    return e4m3_to_float32(data).to(dtype) * scale


def _require_bytes(scale: torch.Tensor, name: str) -> torch.Tensor:
    if scale.dtype not in _BYTE_DTYPES:
        raise TypeError(f"{name} must be uint8 or float8_e8m0fnu bytes, got {scale.dtype}")
    return scale.view(torch.uint8)


def _require_linear(linear: torch.Tensor, dims: Sequence[int] = (2,)) -> torch.Tensor:
    linear = _require_bytes(linear, "linear")
    if linear.dim() not in dims:
        raise ValueError(f"linear must have {' or '.join(map(str, dims))} dimensions, got shape {list(linear.shape)}")
    return linear


# ---- F8_128x4 and 8x4 ------------------------------------------------------------------------------------------


def _pad(linear: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    padded = linear.new_zeros((*linear.shape[:-2], rows, cols))
    padded[..., : linear.shape[-2], : linear.shape[-1]] = linear
    return padded


def _swizzle_128x4(linear: torch.Tensor) -> torch.Tensor:
    rows, cols = round_up(linear.shape[0], TILE_ROWS), round_up(linear.shape[1], TILE_COLS)
    # [row tile, j, i, column tile, c] -> [row tile, column tile, i, j, c]
    tiles = _pad(linear, rows, cols).view(rows // TILE_ROWS, 4, 32, cols // TILE_COLS, TILE_COLS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def _unswizzle_128x4(buffer: torch.Tensor, rows: int, num_blocks: int) -> torch.Tensor:
    row_tiles, col_tiles = ceil_div(rows, TILE_ROWS), ceil_div(num_blocks, TILE_COLS)
    tiles = buffer.view(row_tiles, col_tiles, 32, 4, TILE_COLS).permute(0, 3, 2, 1, 4)
    return tiles.reshape(row_tiles * TILE_ROWS, col_tiles * TILE_COLS)[:rows, :num_blocks]


def to_f8_128x4(linear: torch.Tensor, *, padding: str | None = None) -> torch.Tensor:
    """uint8 [rows, nK] -> 1-D uint8 F8_128x4, padding 0x00.

    [G, rows, nK] needs `padding`: "per_group" (G buffers one after the other, each in whole tiles) or "flattened"
    (tiles over the G * rows rows); leaving it out is an error, since the consumer decides.
    """
    linear = _require_linear(linear, (2, 3))
    if linear.dim() == 2:
        return _swizzle_128x4(linear)
    if padding == "flattened":
        return _swizzle_128x4(linear.reshape(-1, linear.shape[-1]))
    if padding == "per_group":
        parts = [_swizzle_128x4(group) for group in linear]
        return torch.cat(parts) if parts else linear.new_zeros(0)
    raise ValueError(f"padding must be 'per_group' or 'flattened' for grouped scales, got {padding!r}")


def from_f8_128x4(
    buffer: torch.Tensor,
    rows: int,
    num_blocks: int,
    *,
    groups: int | None = None,
    padding: str = "per_group",
    name: str = "scale",
) -> torch.Tensor:
    """F8_128x4 bytes (any form that `as_byte_buffer` takes) -> uint8 [rows, nK], or [groups, rows, nK] when `groups`
    is given. The size must be exact; padding bytes are not looked at."""
    flat = as_byte_buffer(buffer, name=name)
    count = 1 if groups is None else groups
    check_f8_128x4_size(flat.numel(), rows, num_blocks, groups=count, padding=padding, name=name)
    if padding == "flattened":
        linear = _unswizzle_128x4(flat, count * rows, num_blocks).reshape(count, rows, num_blocks)
    else:
        parts = [_unswizzle_128x4(part, rows, num_blocks) for part in flat.view(count, -1)] if count else []
        linear = torch.stack(parts) if parts else flat.new_zeros((0, rows, num_blocks))
    return linear[0].contiguous() if groups is None else linear.contiguous()


def f8_128x4_padding_is_zero(buffer: torch.Tensor, rows: int, num_blocks: int, *, name: str = "scale") -> bool:
    """Whether every byte that belongs to no (row, block) is 0x00, as every writer of this package leaves it."""
    flat = as_byte_buffer(buffer, name=name)
    check_f8_128x4_size(flat.numel(), rows, num_blocks, name=name)
    full = _unswizzle_128x4(flat, round_up(rows, TILE_ROWS), round_up(num_blocks, TILE_COLS))
    return not bool(full[rows:].any()) and not bool(full[:, num_blocks:].any())


def to_f8_8x4(linear: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, nK] -> 1-D uint8 in 8x4 tiles of 32 bytes, padding 0x00."""
    linear = _require_linear(linear)
    rows, cols = round_up(linear.shape[0], SMALL_TILE_ROWS), round_up(linear.shape[1], TILE_COLS)
    tiles = _pad(linear, rows, cols).view(rows // SMALL_TILE_ROWS, SMALL_TILE_ROWS, cols // TILE_COLS, TILE_COLS)
    return tiles.permute(0, 2, 1, 3).reshape(-1)


def from_f8_8x4(buffer: torch.Tensor, rows: int, num_blocks: int, *, name: str = "scale") -> torch.Tensor:
    """8x4 bytes -> uint8 [rows, nK]; the size must be exact."""
    flat = as_byte_buffer(buffer, name=name)
    expected = f8_8x4_bytes(rows, num_blocks)
    if flat.numel() != expected:
        raise ValueError(
            f"{name} must have {expected} bytes (8x4, {rows} rows x {num_blocks} blocks), got {flat.numel()}"
        )
    row_tiles, col_tiles = ceil_div(rows, SMALL_TILE_ROWS), ceil_div(num_blocks, TILE_COLS)
    tiles = flat.view(row_tiles, col_tiles, SMALL_TILE_ROWS, TILE_COLS).permute(0, 2, 1, 3)
    return tiles.reshape(row_tiles * SMALL_TILE_ROWS, col_tiles * TILE_COLS)[:rows, :num_blocks].contiguous()


# ---- packed MN-major -------------------------------------------------------------------------------------------


def to_packed(linear: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, nK] or [G, rows, nK] -> int32 words of four bytes along K, lowest block in the low byte.

    Result [.., rows, ceil(nK / 4)] with strides (.., 1, A), A = ceil4(rows): each word column is contiguous over the
    rows and 16-byte aligned. The rows up to A and the missing blocks of the last word are 0x00.
    """
    linear = _require_linear(linear, (2, 3))
    rows, num_blocks = linear.shape[-2:]
    pitch, words = round_up(rows, 4), ceil_div(num_blocks, 4)
    padded = _pad(linear, pitch, words * 4)
    packed = padded.view(*linear.shape[:-2], pitch, words, 4).transpose(-3, -2).contiguous().view(torch.int32)[..., 0]
    return packed.transpose(-1, -2)[..., :rows, :]


def from_packed(packed: torch.Tensor, num_blocks: int | None = None, *, name: str = "scale") -> torch.Tensor:
    """int32 [.., rows, words] of any strides -> uint8 [.., rows, num_blocks]; `num_blocks` None means 4 * words."""
    if packed.dtype != torch.int32:
        raise TypeError(f"{name} must be packed int32, got {packed.dtype}")
    if packed.dim() < 2:
        raise ValueError(f"{name} must have at least 2 dimensions [rows, words], got shape {list(packed.shape)}")
    words = packed.shape[-1]
    if num_blocks is None:
        num_blocks = 4 * words
    if ceil_div(num_blocks, 4) != words:
        raise ValueError(f"{name} must have {ceil_div(num_blocks, 4)} words for {num_blocks} blocks, got {words}")
    linear = packed.contiguous().view(torch.uint8)  # little-endian: byte i of a word is block 4 * w + i
    return linear[..., :num_blocks].contiguous()


# ---- blocks ----------------------------------------------------------------------------------------------------


# Rows x columns of the blocks that checkpoints have, in the order in which shapes are compared with them.
WEIGHT_BLOCKS = ((32, 32), (128, 128), (1, 32))


def block_scale_shape(rows: int, cols: int, block: tuple[int, int]) -> tuple[int, int]:
    """Shape of the block scales of a [rows, cols] matrix: partial blocks at the edges count."""
    return ceil_div(rows, block[0]), ceil_div(cols, block[1])


def find_block_shape(
    rows: int,
    cols: int,
    scale_shape: Sequence[int],
    *,
    candidates: Sequence[tuple[int, int]] = WEIGHT_BLOCKS,
    name: str = "scale",
) -> tuple[int, int]:
    """Which of the known block shapes the scales of a [rows, cols] matrix have; ValueError when none fits."""
    for block in candidates:
        if tuple(scale_shape) == block_scale_shape(rows, cols, block):
            return block
    known = ", ".join(f"{list(block_scale_shape(rows, cols, b))} for {b[0]}x{b[1]}" for b in candidates)
    raise ValueError(
        f"{name} has shape {list(scale_shape)}, which fits no block of a [{rows}, {cols}] matrix: {known}"
    )


def expand_blocks(blocks: torch.Tensor, rows: int, cols: int, block: tuple[int, int]) -> torch.Tensor:
    """Block scales uint8 [.., ceil(rows / b0), ceil(cols / b1)] -> uint8 [.., rows, cols / 32], each byte repeated.

    b1 and cols must be multiples of 32.
    """
    blocks = _require_bytes(blocks, "blocks")
    _check_block(cols, block)
    expected = block_scale_shape(rows, cols, block)
    if tuple(blocks.shape[-2:]) != expected:
        raise ValueError(
            f"blocks must be [.., {expected[0]}, {expected[1]}] for [{rows}, {cols}] in blocks of "
            f"{block[0]}x{block[1]}, got {list(blocks.shape)}"
        )
    wide = blocks.repeat_interleave(block[0], dim=-2)[..., :rows, :]
    return wide.repeat_interleave(block[1] // BLOCK, dim=-1)[..., : cols // BLOCK].contiguous()


def collapse_blocks(linear: torch.Tensor, cols: int, block: tuple[int, int]) -> torch.Tensor:
    """The inverse of `expand_blocks`: uint8 [.., rows, cols / 32] -> [.., ceil(rows / b0), ceil(cols / b1)].

    Raises ValueError when the bytes of a block differ: then no such block scales exist for this data.
    """
    linear = _require_bytes(linear, "linear")
    _check_block(cols, block)
    if linear.dim() < 2 or linear.shape[-1] != cols // BLOCK:
        raise ValueError(f"linear must be [.., rows, {cols // BLOCK}] for {cols} columns, got {list(linear.shape)}")
    blocks = linear[..., :: block[0], :: block[1] // BLOCK].contiguous()
    again = expand_blocks(blocks, linear.shape[-2], cols, block)
    if not torch.equal(again, linear):
        where = (again != linear).nonzero()[0].tolist()
        raise ValueError(f"linear must be constant over blocks of {block[0]}x{block[1]}, it is not at {where}")
    return blocks


def linear_weight_scale(
    scale: torch.Tensor, groups: int, rows: int, cols: int, *, name: str = "w_scale"
) -> torch.Tensor:
    """Scales of weights [groups, rows, cols] in any form that the ops take (csrc/op_check.c, mx_bind_weight_scale) ->
    uint8 [groups, rows, cols / 32]: int32 words per row, bytes per block of 1, 32 or 128 rows and all, 32, 128 or 256
    columns, or 1-D F8_128x4 of a single group."""
    if scale.dim() == 1:
        if groups != 1:
            raise ValueError(f"{name} is 1-D F8_128x4, which holds one group; the weights have {groups}")
        return from_f8_128x4(scale, rows, cols // BLOCK, name=name).unsqueeze(0)
    if scale.dtype == torch.int32:
        words = from_packed(scale, cols // BLOCK, name=name)
        if words.numel() != groups * rows * (cols // BLOCK):
            raise ValueError(
                f"{name} must be int32 [{groups}, {rows}, {ceil_div(cols, 128)}], got {list(scale.shape)}"
            )
        return words.reshape(groups, rows, cols // BLOCK)
    blocks = _require_bytes(scale, name)
    if blocks.shape[0] % groups:
        raise ValueError(f"{name} must hold a multiple of {groups} groups, got shape {list(scale.shape)}")
    blocks = blocks.reshape(groups, -1, blocks.shape[-1])
    candidates = [(r, c) for c in (cols, 32, 128, 256) for r in (1, 32, 128)]
    block = find_block_shape(rows, cols, blocks.shape[-2:], candidates=candidates, name=name)
    return expand_blocks(blocks, rows, cols, block)


def _check_block(cols: int, block: tuple[int, int]) -> None:
    if block[0] < 1 or block[1] < BLOCK or block[1] % BLOCK:
        raise ValueError(f"block must be rows >= 1 and columns a positive multiple of {BLOCK}, got {block}")
    if cols % BLOCK:
        raise ValueError(f"cols must be a multiple of {BLOCK}, got {cols}")


# ---- order of columns inside a group ---------------------------------------------------------------------------


def chunk_interleaved_order(
    heads: int, head_dim: int, *, chunk: int = BLOCK, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Index that puts a group's columns into the order of vLLM's mega attention: int64 [heads * head_dim] with

        interleaved = standard[order]        order[(c * heads + h) * chunk + j] = h * head_dim + c * chunk + j

    c counts chunks of a head, h heads of the group. All heads' first chunks come first, then their second ones.
    """
    if heads < 1 or head_dim < 1 or head_dim % chunk:
        raise ValueError(
            f"head_dim must be a multiple of {chunk} and heads positive, got heads={heads} head_dim={head_dim}"
        )
    columns = torch.arange(heads * head_dim, device=device)
    return columns.view(heads, head_dim // chunk, chunk).transpose(0, 1).reshape(-1)


def to_chunk_interleaved(x: torch.Tensor, heads: int, head_dim: int, *, dim: int = -1) -> torch.Tensor:
    """Reorder axis `dim` from standard (column = head * head_dim + d) to chunk-interleaved order.

    The axis may hold elements (heads * head_dim of them) or scale blocks (a 32nd of that): a chunk is one block.
    """
    return _permute_columns(x, heads, head_dim, dim, inverse=False)


def from_chunk_interleaved(x: torch.Tensor, heads: int, head_dim: int, *, dim: int = -1) -> torch.Tensor:
    """The inverse of `to_chunk_interleaved`."""
    return _permute_columns(x, heads, head_dim, dim, inverse=True)


def _permute_columns(x: torch.Tensor, heads: int, head_dim: int, dim: int, *, inverse: bool) -> torch.Tensor:
    columns = heads * head_dim
    if x.shape[dim] == columns:
        order = chunk_interleaved_order(heads, head_dim, device=x.device)
    elif x.shape[dim] * BLOCK == columns:
        order = chunk_interleaved_order(heads, head_dim // BLOCK, chunk=1, device=x.device)
    else:
        raise ValueError(
            f"axis {dim} must have {columns} columns or {columns // BLOCK} scale blocks for {heads} heads of "
            f"{head_dim}, got shape {list(x.shape)}"
        )
    if inverse:
        order = torch.argsort(order)
    if x.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu):  # not every torch indexes 8-bit floats
        return x.view(torch.uint8).index_select(dim, order).view(x.dtype)
    return x.index_select(dim, order)
