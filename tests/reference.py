"""Independent reference for every op, in numpy and exact arithmetic.

Nothing here is shared with the package: decode tables come from the definition of the formats, exponents from
exact comparisons of float64 numbers, layouts from their own formulas, sums are float64. Where the package tests a
bit pattern, this file compares numbers, so that the two can only agree by both being right.

Arrays hold raw codes: e4m3 and UE8M0 as uint8, BF16 as uint16. Every e4m3, UE8M0 and BF16 value is a float64 number.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

BLOCK = 32
E4M3_NAN = 0x7F
SCALE_NAN = 0xFF


# ---- the formats, from their definitions ----------------------------------------------------------------------


def e4m3_value(code: int) -> Fraction | None:
    """Exact value of an e4m3 code (sign, 4 exponent bits of bias 7, 3 mantissa bits); None for NaN."""
    sign = -1 if code & 0x80 else 1
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return None
    if exponent == 0:
        return sign * Fraction(mantissa, 8) * Fraction(1, 2**6)
    return sign * (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)


def ue8m0_value(code: int) -> Fraction | None:
    """Exact value of a UE8M0 code; None for NaN."""
    return None if code == SCALE_NAN else Fraction(2) ** (code - 127)


def _table(value_of) -> np.ndarray:
    values = (value_of(code) for code in range(256))
    return np.array([np.nan if value is None else float(value) for value in values])


E4M3_TABLE = _table(e4m3_value)
E4M3_TABLE[0x80] = -0.0
UE8M0_TABLE = _table(ue8m0_value)
_E4M3_MAGNITUDES = E4M3_TABLE[:0x7F]  # 0 .. 448, rising with the code
_E4M3_MIDPOINTS = (_E4M3_MAGNITUDES[:-1] + _E4M3_MAGNITUDES[1:]) / 2


def e4m3_encode(values: np.ndarray) -> np.ndarray:
    """Nearest e4m3 code, ties to the even code, saturating at 448 (infinity too); NaN becomes 0x7F."""
    magnitude = np.abs(values)
    low = np.searchsorted(_E4M3_MIDPOINTS, magnitude, side="left")  # a value on a midpoint takes the lower code
    high = np.searchsorted(_E4M3_MIDPOINTS, magnitude, side="right")  # ... or the upper one
    code = np.where(low % 2 == 0, low, high).astype(np.uint8)
    code |= np.where(np.signbit(values), 0x80, 0).astype(np.uint8)
    return np.where(np.isnan(values), np.uint8(E4M3_NAN), code)


def bf16_decode(bits: np.ndarray) -> np.ndarray:
    """BF16 codes as float64."""
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def bf16_encode(values: np.ndarray) -> np.ndarray:
    """float64 rounded once to BF16, ties to even; from 2^128 * (1 - 2^-9) on it is infinity."""
    values = np.asarray(values, dtype=np.float64)
    _, exponent = np.frexp(values)
    quantum = np.ldexp(1.0, np.maximum(exponent - 1, -126) - 7)
    with np.errstate(invalid="ignore", over="ignore"):
        rounded = np.where(np.isfinite(values), np.rint(values / quantum) * quantum, values)
        as_float32 = rounded.astype(np.float32)  # exact, or past the largest finite FP32 number: infinity
    return (as_float32.view(np.uint32) >> 16).astype(np.uint16)


# ---- quantisation ----------------------------------------------------------------------------------------------


def exponent_by_fractions(amax: Fraction) -> int:
    """The smallest integer e with amax <= 448 * 2^e, by definition (slow)."""
    exponent = amax.numerator.bit_length() - amax.denominator.bit_length() - 10
    while amax > 448 * Fraction(2) ** exponent:
        exponent += 1
    return exponent


def scale_from_amax(amax: np.ndarray) -> np.ndarray:
    """UE8M0 byte of blocks with the given largest magnitudes (float64, NaN and infinity allowed)."""
    amax = np.asarray(amax, dtype=np.float64)
    mantissa, exponent = np.frexp(np.where(np.isfinite(amax), amax, 0.0))  # amax = mantissa * 2^exponent, in [1/2, 1)
    e = exponent - 9 + (mantissa > 0.875)  # 448 = 0.875 * 2^9
    byte = np.clip(127 + e, 0, 254)
    byte = np.where(amax == 0, 0, byte)
    return np.where(np.isfinite(amax), byte, SCALE_NAN).astype(np.uint8)


def quantize(bits: np.ndarray, span: int = BLOCK) -> tuple[np.ndarray, np.ndarray]:
    """BF16 codes [..., C] -> e4m3 codes [..., C] and scale bytes [..., C / 32], `span` columns sharing one scale."""
    lead, cols = bits.shape[:-1], bits.shape[-1]
    values = bf16_decode(bits).reshape(*lead, cols // span, span)
    finite = np.isfinite(values).all(axis=-1)
    amax = np.where(finite, np.abs(np.where(np.isfinite(values), values, 0.0)).max(axis=-1), np.inf)
    scale = scale_from_amax(amax)
    live = (scale != 0) & (scale != SCALE_NAN)
    inverse = np.ldexp(1.0, 127 - np.where(live, scale, 127).astype(np.int64))
    with np.errstate(invalid="ignore"):
        data = e4m3_encode(values * inverse[..., None])
    signs = np.where(np.signbit(values), 0x80, 0).astype(np.uint8)
    data = np.where((scale == 0)[..., None], signs, data)
    data = np.where((scale == SCALE_NAN)[..., None], np.uint8(E4M3_NAN), data)
    return data.reshape(bits.shape), np.repeat(scale, span // BLOCK, axis=-1)


def dequantize(data: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """e4m3 codes [..., K] and bytes [..., K / 32] as float64."""
    return E4M3_TABLE[data] * np.repeat(UE8M0_TABLE[scale], BLOCK, axis=-1)


# ---- scale layouts ---------------------------------------------------------------------------------------------


def f8_128x4_offset(row: int, col: int, num_cols: int) -> int:
    """Byte offset of the scale of (row, block column) in the F8_128x4 layout."""
    tiles_per_row = -(-num_cols // 4)
    tile = (row // 128) * tiles_per_row + col // 4
    return tile * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + col % 4


def f8_128x4_bytes(rows: int, num_cols: int) -> int:
    return -(-rows // 128) * 128 * -(-num_cols // 4) * 4


def f8_128x4_index(rows: int, num_cols: int) -> np.ndarray:
    """Offsets of all (row, column) pairs, int64 [rows, num_cols]."""
    row, col = np.arange(rows)[:, None], np.arange(num_cols)[None, :]
    tile = (row // 128) * -(-num_cols // 4) + col // 4
    return tile * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + col % 4


def f8_128x4_pack(scale: np.ndarray, padding: int = 0) -> np.ndarray:
    """Bytes [rows, cols] -> the 1-D F8_128x4 buffer, padding filled with `padding`."""
    rows, cols = scale.shape
    buffer = np.full(f8_128x4_bytes(rows, cols), padding, np.uint8)
    buffer[f8_128x4_index(rows, cols)] = scale
    return buffer


def f8_128x4_unpack(buffer: np.ndarray, rows: int, cols: int) -> np.ndarray:
    return buffer[f8_128x4_index(rows, cols)]


def pack_words(scale: np.ndarray) -> np.ndarray:
    """Bytes [..., K / 32] -> int32 words [..., K / 128], the lowest K block in the lowest byte."""
    bytes4 = scale.reshape(*scale.shape[:-1], scale.shape[-1] // 4, 4).astype(np.uint32)
    words = bytes4[..., 0] | bytes4[..., 1] << 8 | bytes4[..., 2] << 16 | bytes4[..., 3] << 24
    return words.view(np.int32)


def unpack_words(words: np.ndarray) -> np.ndarray:
    words = words.view(np.uint32)
    bytes4 = np.stack([words >> shift & 255 for shift in (0, 8, 16, 24)], axis=-1).astype(np.uint8)
    return bytes4.reshape(*words.shape[:-1], words.shape[-1] * 4)


def expand_blocks(scale: np.ndarray, rows: int, k: int, block_rows: int, block_cols: int) -> np.ndarray:
    """Block scales [..., ceil(rows / block_rows), ceil(k / block_cols)] -> one byte per row and 32 columns."""
    per_row = np.repeat(scale, block_rows, axis=-2)[..., :rows, :]
    return np.repeat(per_row, block_cols // BLOCK, axis=-1)[..., : k // BLOCK]


# ---- matrix products -------------------------------------------------------------------------------------------


def matmul(x: np.ndarray, x_scale: np.ndarray, w: np.ndarray, w_scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """out[t, g, n] = sum over k of x[t, g, k] * w[g, n, k], and the sum of the magnitudes of the same products.

    x [T, G, K] with bytes [T, G, K / 32], w [G, N, K] with bytes [G, N, K / 32]; both results float64 [T, G, N].
    The second bounds the rounding error of any FP32 summation order.
    """
    xv = dequantize(x, x_scale).transpose(1, 0, 2)  # [G, T, K]
    wv = dequantize(w, w_scale).transpose(0, 2, 1)  # [G, K, N]
    with np.errstate(invalid="ignore", over="ignore"):
        total, magnitude = xv @ wv, np.abs(xv) @ np.abs(wv)
    return total.transpose(1, 0, 2), magnitude.transpose(1, 0, 2)


# ---- inverse RoPE ----------------------------------------------------------------------------------------------


def fma_f32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """float32(a * b + c) with one rounding, for BF16 a and FP32 b, c given as float64.

    a * b has at most 8 + 24 significant bits, so the float64 product is exact. Their float64 sum may round, and
    rounding that again to FP32 could differ from one rounding; so the sum is rounded to odd first: where the exact
    error of the sum (2Sum) is not zero, the last bit of the sum is forced to one on the side of the error.
    53 >= 24 + 2 bits make the second rounding correct.
    """
    product = a * b
    total = product + c
    shadow = total - product
    error = (product - (total - shadow)) + (c - shadow)
    even = total.view(np.int64) % 2 == 0
    toward = np.where(error > 0, np.inf, -np.inf)
    odd = np.where(np.isfinite(total) & (error != 0) & even, np.nextafter(total, toward), total)
    return odd.astype(np.float32).astype(np.float64)


def inverse_rope(attn: np.ndarray, positions: np.ndarray, cos_sin: np.ndarray, interleaved_cache: bool) -> np.ndarray:
    """BF16 codes [T, H, D] rotated back; the last R columns of a head are pairs (even, odd). Returns BF16 codes.

    even' = fma(odd, sin, even * cos), odd' = fma(-even, sin, odd * cos), every operation in FP32, then one rounding to
    BF16. Tokens whose position lies outside the cache come back as NaN.
    """
    rope = cos_sin.shape[1]
    inside = (positions >= 0) & (positions < len(cos_sin))
    row = cos_sin[np.where(inside, positions, 0)].astype(np.float64)
    cos, sin = (row[:, 0::2], row[:, 1::2]) if interleaved_cache else (row[:, : rope // 2], row[:, rope // 2 :])
    cos, sin = cos[:, None, :], sin[:, None, :]
    values = bf16_decode(attn)
    even, odd = values[..., -rope::2], values[..., -rope + 1 :: 2]

    def product(a, b):
        return (a * b).astype(np.float32).astype(np.float64)

    with np.errstate(invalid="ignore", over="ignore"):
        new_even = fma_f32(odd, sin, product(even, cos))
        new_odd = fma_f32(-even, sin, product(odd, cos))
        values[..., -rope::2], values[..., -rope + 1 :: 2] = new_even, new_odd
        values[~inside] = np.nan
        bits = bf16_encode(values)
    bits[..., :-rope] = np.where(inside[:, None, None], attn[..., :-rope], bits[..., :-rope])
    return bits


def group_columns(bits: np.ndarray, groups: int, chunk_interleaved: bool) -> np.ndarray:
    """Heads [T, groups * H, D] -> group rows [T, groups, H * D] in one of the two in-group orders."""
    tokens, heads, dim = bits.shape
    per_group = heads // groups
    out = np.empty((tokens, groups, per_group * dim), bits.dtype)
    for head in range(heads):
        group, h = divmod(head, per_group)
        for chunk in range(dim // BLOCK):
            source = bits[:, head, chunk * BLOCK : (chunk + 1) * BLOCK]
            start = (chunk * per_group + h) * BLOCK if chunk_interleaved else h * dim + chunk * BLOCK
            out[:, group, start : start + BLOCK] = source
    return out


def inv_rope_quantize(
    attn: np.ndarray,
    positions: np.ndarray,
    cos_sin: np.ndarray,
    groups: int,
    *,
    chunk_interleaved: bool = False,
    interleaved_cache: bool = False,
    span: int = BLOCK,
) -> tuple[np.ndarray, np.ndarray]:
    """attn [T, groups * H, D] -> e4m3 codes [T, groups, K] and bytes [T, groups, K / 32]."""
    rotated = inverse_rope(attn, positions, cos_sin, interleaved_cache)
    return quantize(group_columns(rotated, groups, chunk_interleaved), span)
