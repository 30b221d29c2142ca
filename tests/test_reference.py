"""The reference itself: against definitions, published golden values and exact rational arithmetic."""

from __future__ import annotations

import struct
from fractions import Fraction

import numpy as np
import pytest
import reference as ref


def bf16(value: float) -> int:
    return int(ref.bf16_encode(np.array([value]))[0])


# ---- decode tables (B05, B06, B12) -----------------------------------------------------------------------------


def test_e4m3_table_matches_the_format():
    values = ref.E4M3_TABLE
    assert np.isnan(values[[0x7F, 0xFF]]).all()
    assert np.isfinite(np.delete(values, [0x7F, 0xFF])).all()
    assert values[0x7E] == 448
    assert values[0x08] == 2**-6
    assert values[0x01] == 2**-9
    assert values[0x38] == 1
    assert np.signbit(values[0x80])
    assert values[0x80] == 0
    assert (np.diff(values[:0x7F]) > 0).all()
    assert (values[0x80:0xFF] == -values[:0x7F]).all()


def test_ue8m0_table_has_no_zero_and_no_infinity():
    values = ref.UE8M0_TABLE
    assert values[0] == 2.0**-127
    assert values[127] == 1
    assert values[253] == 2.0**126
    assert values[254] == 2.0**127
    assert np.isnan(values[255])
    assert np.isfinite(values[:255]).all()
    assert (values[:255] > 0).all()


# ---- rounding --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (1.0625, 0x38),  # ties go to the even code
        (1.1875, 0x3A),
        (17, 0x58),
        (19, 0x5A),
        (15.5, 0x58),
        (248, 0x78),
        (432, 0x7E),
        (464, 0x7E),  # beyond 448: saturates (B10)
        (465, 0x7E),
        (500, 0x7E),
        (-1e30, 0xFE),
        (np.inf, 0x7E),
        (2**-10, 0x00),
        (2**-10 * (1 + 2**-20), 0x01),
        (3 * 2**-10, 0x02),
        (-0.0, 0x80),
        (np.nan, 0x7F),
    ],
)
def test_e4m3_encode(value, code):
    assert ref.e4m3_encode(np.array([float(value)]))[0] == code


def test_e4m3_encode_is_the_inverse_of_the_table():
    codes = np.delete(np.arange(256, dtype=np.uint8), 0xFF)
    assert (ref.e4m3_encode(ref.E4M3_TABLE[codes]) == codes).all()


def test_bf16_encode_is_the_inverse_of_decode():
    bits = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    finite = (bits & 0x7FFF) <= 0x7F80
    assert (ref.bf16_encode(ref.bf16_decode(bits[finite])) == bits[finite]).all()
    assert np.isnan(ref.bf16_decode(ref.bf16_encode(ref.bf16_decode(bits[~finite])))).all()


def test_bf16_encode_rounds_once_to_nearest_even(rng):
    bits = rng.integers(0, 0x7F80, 3000).astype(np.uint16)
    low, high = ref.bf16_decode(bits), ref.bf16_decode(bits + np.uint16(1))
    high = np.where(np.isinf(high), 2.0**128, high)
    middle = (low + high) / 2
    even = np.where(bits % 2 == 0, bits, bits + 1)
    assert (ref.bf16_encode(middle) == even).all()
    assert (ref.bf16_encode(np.nextafter(middle, 0)) == bits).all()
    assert (ref.bf16_encode(np.nextafter(middle, np.inf)) == bits + 1).all()


def test_bf16_overflow_starts_at_the_midpoint():
    limit = 2.0**128 * (1 - 2.0**-9)
    assert bf16(limit) == 0x7F80
    assert bf16(np.nextafter(limit, 0)) == 0x7F7F
    assert bf16(-limit) == 0xFF80


def test_fma_rounds_once(rng):
    a = ref.bf16_decode(rng.integers(0x3000, 0x5000, 4000).astype(np.uint16))
    b = rng.uniform(-1, 1, 4000).astype(np.float32).astype(np.float64)
    c = np.ldexp(rng.uniform(-1, 1, 4000), rng.integers(-40, 40, 4000)).astype(np.float32).astype(np.float64)
    # Products that fall a hair beside a float32 midpoint of c: rounding twice would go the wrong way.
    c[:500] = rng.integers(2**23, 2**24, 500).astype(np.float64)
    a[:500], b[:500] = 0.5 + 2.0**-8, (1.0 - 2.0**-7 + np.ldexp(1.0, -20))
    a[500:600], b[500:600], c[500:600] = 1.0, 2.0**-1 + 2.0**-24, 2.0**23 + np.arange(100)
    a[600:700], b[600:700], c[600:700] = 2.0**-60, 1.0, 1 + 2.0**-23 * np.arange(100) + 0.0
    exact = [Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) for x, y, z in zip(a, b, c, strict=True)]
    expected = np.array([float(_round_fraction_to_float32(value)) for value in exact])
    assert (ref.fma_f32(a, b, c) == expected).all()


def _round_fraction_to_float32(value: Fraction) -> Fraction:
    """Nearest float32 of a normal-range rational, ties to even."""
    if value == 0:
        return value
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= magnitude < Fraction(2) ** exponent
    quantum = Fraction(2) ** (max(exponent, -126) - 23)
    return round(value / quantum) * quantum  # Fraction rounds ties to even


# ---- exponent rule ---------------------------------------------------------------------------------------------


def test_scale_from_amax_equals_the_definition_for_every_bf16_amax():
    bits = np.arange(1, 0x7F80, dtype=np.uint16)
    values = ref.bf16_decode(bits)
    expected = [min(max(127 + ref.exponent_by_fractions(Fraction(float(v))), 0), 254) for v in values]
    assert (ref.scale_from_amax(values) == expected).all()


def test_exponent_by_fractions_is_minimal():
    for value in (
        Fraction(448),
        Fraction(449),
        Fraction(1, 3),
        Fraction(19, 10),
        Fraction(7, 2**130),
        Fraction(2) ** 127,
    ):
        e = ref.exponent_by_fractions(value)
        assert 448 * Fraction(2) ** (e - 1) < value <= 448 * Fraction(2) ** e


# ---- golden blocks ---------------------------------------------------------------------------------------------

GOLDEN_BLOCKS = [
    pytest.param([1.0] * 32, 119, [0x78] * 32, id="ones"),
    pytest.param([448.0] + [1.0] * 31, 127, [0x7E] + [0x38] * 31, id="448"),
    pytest.param([450.0] + [1.0] * 31, 128, [0x76] + [0x30] * 31, id="450"),
    pytest.param([1.9] * 32, 120, [0x77] * 32, id="1.9: FLOOR would give 119 (B09, B11)"),
    pytest.param(
        [float(i) for i in range(32)], 124, [0x00, 0x50, 0x58, 0x5C, 0x60, 0x62, 0x64, 0x66, 0x68], id="ramp"
    ),
    pytest.param([-float(i) / 8 for i in range(32)], 121, [0x80, 0xD0, 0xD8, 0xDC], id="negative ramp"),
    pytest.param([0.0] * 32, 0, [0x00] * 32, id="zeros"),
    pytest.param([-0.0] * 32, 0, [0x80] * 32, id="negative zeros"),
]
# 32 equal elements given as BF16 codes, with the byte and the element.
GOLDEN_CODES = [
    (0x7F7F, 247, 0x78),  # largest finite: dequantises to 2^128, infinity in FP32
    (0x38D2, 105, 0x7D),
    (0x3861, 105, 0x76),
    (0x3860, 104, 0x7E),
    (0x3728, 102, 0x7A),
    (0x04E1, 2, 0x76),
    (0x04E0, 1, 0x7E),  # 448 * 2^-126
    (0x0490, 1, 0x79),
    (0x0461, 1, 0x76),  # the smallest magnitude that is not flushed: 225 * 2^-126, and 225 rounds to 224
    (0x0460, 0, 0x00),  # 448 * 2^-127
    (0x8460, 0, 0x80),
    (0x0001, 0, 0x00),
    (0x7F80, 255, 0x7F),
    (0xFF80, 255, 0x7F),
    (0x7FC0, 255, 0x7F),
    (0xFFC1, 255, 0x7F),
]


@pytest.mark.parametrize(("values", "byte", "leading"), GOLDEN_BLOCKS)
def test_golden_blocks(values, byte, leading):
    data, scale = ref.quantize(ref.bf16_encode(np.array([values])))
    assert scale.tolist() == [[byte]]
    assert data[0, : len(leading)].tolist() == leading


def test_golden_ramp_ends_in_a_tie():
    data, _ = ref.quantize(ref.bf16_encode(np.array([np.arange(32.0), -np.arange(32.0) / 8])))
    assert data[0, -1] == 0x78
    assert data[1, -1] == 0xF8


@pytest.mark.parametrize(("code", "byte", "element"), GOLDEN_CODES)
def test_golden_codes(code, byte, element):
    data, scale = ref.quantize(np.full((1, 32), code, np.uint16))
    assert (scale == byte).all()
    assert (data == element).all()


def test_span_takes_the_largest_of_its_blocks(rng):
    bits = ref.bf16_encode(rng.standard_normal((3, 256)) * np.exp2(rng.integers(-9, 9, (3, 256))))
    for span in (64, 128, 256):
        _, scale = ref.quantize(bits, span)
        _, minimal = ref.quantize(bits)
        largest = minimal.reshape(3, -1, span // 32).max(axis=-1)
        assert (scale == np.repeat(largest, span // 32, axis=-1)).all()


# ---- layouts (B23, B26) ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("k", "row", "col", "offset"),
    [
        (96, 0, 2, 2),
        (96, 1, 0, 16),
        (96, 32, 0, 4),
        (96, 33, 1, 21),
        (96, 96, 0, 12),
        (96, 127, 2, 510),
        (96, 128, 0, 512),
        (96, 300, 2, 1222),
        (4096, 0, 4, 512),
        (4096, 31, 0, 496),
        (4096, 127, 3, 511),
        (4096, 129, 2, 16402),
        (4096, 300, 2, 32966),
        (8192, 128, 0, 32768),
        (8192, 300, 2, 65734),
    ],
)
def test_f8_128x4_golden_offsets(k, row, col, offset):
    assert ref.f8_128x4_offset(row, col, k // 32) == offset
    assert ref.f8_128x4_index(row + 1, k // 32)[row, col] == offset


@pytest.mark.parametrize(
    ("m", "k", "size"), [(129, 96, 1024), (1, 32, 512), (300, 4096, 49152), (2 * 129, 4096, 49152)]
)
def test_f8_128x4_is_a_bijection_of_the_padded_tile(m, k, size):
    cols = k // 32
    assert ref.f8_128x4_bytes(m, cols) == size
    padded_rows, padded_cols = -(-m // 128) * 128, -(-cols // 4) * 4
    offsets = ref.f8_128x4_index(padded_rows, padded_cols)
    assert (np.sort(offsets.ravel()) == np.arange(size)).all()


def test_packed_words_are_little_endian_along_k():
    words = ref.pack_words(np.arange(8, dtype=np.uint8).reshape(1, 8))
    assert words.tolist() == [[0x03020100, 0x07060504]]
    assert struct.pack("<2i", *words[0]) == bytes(range(8))
    assert (ref.unpack_words(words) == np.arange(8)).all()


# ---- inverse RoPE ----------------------------------------------------------------------------------------------


def test_inverse_rope_undoes_the_rotation(rng):
    """Rotate forward in float64, rotate back: the input returns within BF16 rounding of input and output."""
    tokens, heads, dim, rope = 5, 3, 128, 64
    original = rng.standard_normal((tokens, heads, dim))
    angle = rng.uniform(-3, 3, (9, rope // 2))
    cos_sin = np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)
    positions = rng.integers(0, 9, tokens)
    rotated = original.copy()
    c, s = np.cos(angle)[positions][:, None], np.sin(angle)[positions][:, None]
    even, odd = original[..., -rope::2], original[..., -rope + 1 :: 2]
    rotated[..., -rope::2], rotated[..., -rope + 1 :: 2] = even * c - odd * s, odd * c + even * s
    back = ref.bf16_decode(ref.inverse_rope(ref.bf16_encode(rotated), positions, cos_sin, False))
    assert np.abs(back - original).max() < 0.05
    assert (back[..., :-rope] != 0).all()
    assert (back[..., :-rope] == ref.bf16_decode(ref.bf16_encode(original))[..., :-rope]).all()


def test_group_orders_match_their_formulas():
    tokens, heads, dim, groups = 1, 16, 512, 2
    bits = np.arange(heads * dim, dtype=np.uint16).reshape(tokens, heads, dim)
    standard = ref.group_columns(bits, groups, chunk_interleaved=False)
    chunked = ref.group_columns(bits, groups, chunk_interleaved=True)
    assert (standard == bits.reshape(1, groups, -1)).all()
    per_group = heads // groups
    for group, head, d in [(0, 0, 0), (0, 3, 77), (1, 7, 511), (1, 2, 33)]:
        source = bits[0, group * per_group + head, d]
        assert chunked[0, group, (d // 32 * per_group + head) * 32 + d % 32] == source
