"""`vllm_megaattn.layouts`: golden offsets, conversions against formulas written out here, every refusal."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_megaattn import layouts

# K, (row, block), byte in F8_128x4, byte in 8x4: the published values, computed without this package.
GOLDEN_OFFSETS = [
    (96, (0, 2), 2, 2),
    (96, (1, 0), 16, 4),
    (96, (32, 0), 4, 128),
    (96, (33, 1), 21, 133),
    (96, (96, 0), 12, 384),
    (96, (127, 2), 510, 510),
    (96, (128, 0), 512, 512),
    (96, (300, 2), 1222, 1202),
    (4096, (0, 4), 512, 32),
    (4096, (31, 0), 496, 3100),
    (4096, (127, 3), 511, 15391),
    (4096, (129, 2), 16402, 16390),
    (4096, (300, 2), 32966, 37906),
    (8192, (128, 0), 32768, 32768),
    (8192, (300, 2), 65734, 75794),
]

SHAPES = st.tuples(st.integers(0, 270), st.integers(1, 11))  # rows, blocks


def distinct(rows: int, blocks: int, groups: int | None = None) -> torch.Tensor:
    """Scale bytes that differ from their neighbours in row, column, tile and group, none of them 0 (B96)."""
    row, block = np.ogrid[:rows, :blocks]
    if groups is None:
        return torch.from_numpy((1 + (31 * row + 57 * block) % 251).astype(np.uint8))
    group = np.arange(groups)[:, None, None]
    return torch.from_numpy((1 + (31 * row + 57 * block + 101 * group) % 251).astype(np.uint8))


# ---- offsets and sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "where", "byte_128x4", "byte_8x4"), GOLDEN_OFFSETS)
def test_golden_offsets(k, where, byte_128x4, byte_8x4):
    assert layouts.f8_128x4_offset(*where, k // 32) == byte_128x4
    assert layouts.f8_8x4_offset(*where, k // 32) == byte_8x4
    row, block = torch.tensor([where[0]]), torch.tensor([where[1]])
    assert layouts.f8_128x4_offset(row, block, k // 32).tolist() == [byte_128x4]
    assert layouts.f8_8x4_offset(row, block, k // 32).tolist() == [byte_8x4]


@pytest.mark.parametrize("offset", [layouts.f8_128x4_offset, layouts.f8_8x4_offset])
@pytest.mark.parametrize(
    ("row", "block", "message"),
    [
        (-1, 0, "row must be at least 0, got -1"),
        (0, -1, r"block must be at least 0 and below ceil4\(num_blocks\) = 8, got -1"),
        (0, 8, r"block must be at least 0 and below ceil4\(num_blocks\) = 8, got 8"),
    ],
)
def test_offsets_outside_the_buffer_are_refused(offset, row, block, message):
    """(row, 8) of 7 blocks a row would be the place of another row tile's block."""
    for convert in (int, lambda value: torch.tensor([0, value])):
        with pytest.raises(ValueError, match=message):
            offset(convert(row), convert(block), 7)
    nothing = torch.zeros(0, dtype=torch.int64)
    assert offset(nothing, nothing, 7).shape == (0,)


def test_packed_offsets_outside_the_words_are_refused():
    for row, block, message in (
        (8, 0, "row must be at least 0 and below pitch = 8, got 8"),
        (0, -4, "block must be at"),
    ):
        for convert in (int, lambda value: torch.tensor([value, 0])):
            with pytest.raises(ValueError, match=message):
                layouts.packed_offset(convert(row), convert(block), 8)


def test_negative_sizes_are_refused():
    """ceil128(-1) is 0: without the check a wrong count would look like an empty buffer."""
    for size in (layouts.f8_128x4_bytes, layouts.f8_8x4_bytes):
        with pytest.raises(ValueError, match="rows must be at least 0, got -1"):
            size(-1, 4)
        with pytest.raises(ValueError, match="num_blocks must be at least 0, got -2"):
            size(4, -2)
    with pytest.raises(ValueError, match="groups must be at least 0, got -3"):
        layouts.f8_128x4_grouped_bytes(-3, 4, 4, padding="per_group")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.float8_e8m0fnu])
def test_find_nan(dtype):
    """e4m3 has two NaN codes, scale bytes one; 0x7F is the scale 1.0."""
    data = torch.arange(256, dtype=torch.uint8).roll(5).view(2, 8, 16)
    count = 2 if dtype == torch.float8_e4m3fn else 1
    assert layouts.find_nan(data.view(dtype)) == (count, [0, 0, 4])
    assert layouts.find_nan(data.view(dtype)[:, 1:4]) == (0, [])
    assert layouts.find_nan(data.view(dtype)[:0]) == (0, [])
    strided = data.view(dtype).transpose(1, 2)
    assert layouts.find_nan(strided) == (count, [0, 4, 0])
    with pytest.raises(ValueError, match=rf"w holds NaN .*: {count} of 256, the first at \[10, 0, 24\]"):
        layouts.refuse_nan(data.view(dtype), name="w", offset=(10, 0, 20))


@pytest.mark.parametrize(("rows", "k", "size"), [(129, 96, 1024), (1, 32, 512), (300, 4096, 49152), (0, 4096, 0)])
def test_sizes_cover_whole_tiles(rows, k, size):  # B23
    assert layouts.f8_128x4_bytes(rows, k // 32) == size


@pytest.mark.parametrize(("rows", "k"), [(129, 96), (1, 32), (300, 4096)])
@pytest.mark.parametrize(
    ("offset", "size", "unit"),
    [
        (layouts.f8_128x4_offset, layouts.f8_128x4_bytes, 128),
        (layouts.f8_8x4_offset, layouts.f8_8x4_bytes, 8),
    ],
)
def test_offsets_are_a_bijection_of_the_padded_index_space(rows, k, offset, size, unit):
    blocks = k // 32
    padded_rows, padded_blocks = -(-rows // unit) * unit, -(-blocks // 4) * 4
    row, block = torch.meshgrid(torch.arange(padded_rows), torch.arange(padded_blocks), indexing="ij")
    assert torch.equal(offset(row, block, blocks).flatten().sort().values, torch.arange(size(rows, blocks)))


@pytest.mark.parametrize("k", [96, 288, 576, 1056, 3072])
def test_block_counts_that_are_not_multiples_of_four(k):  # B26
    linear = distinct(150, k // 32)
    buffer = layouts.to_f8_128x4(linear)
    assert buffer.numel() == layouts.f8_128x4_bytes(150, k // 32)
    for row in (0, 1, 31, 32, 33, 127, 128, 149):
        for block in (0, k // 32 // 2, k // 32 - 1):
            assert buffer[layouts.f8_128x4_offset(row, block, k // 32)] == linear[row, block]


# ---- F8_128x4 and 8x4 -----------------------------------------------------------------------------------------


@given(SHAPES)
def test_f8_128x4_round_trip_places_every_byte(shape):
    rows, blocks = shape
    linear = distinct(rows, blocks)
    buffer = layouts.to_f8_128x4(linear)
    expected = np.zeros(layouts.f8_128x4_bytes(rows, blocks), np.uint8)
    tiles = -(-blocks // 4)
    for row in range(rows):
        for block in range(blocks):
            tile = row // 128 * tiles + block // 4
            expected[512 * tile + 16 * (row % 32) + 4 * (row % 128 // 32) + block % 4] = linear[row, block]
    assert np.array_equal(buffer.numpy(), expected)  # padding 0x00 included
    assert layouts.f8_128x4_padding_is_zero(buffer, rows, blocks)
    assert torch.equal(layouts.from_f8_128x4(buffer, rows, blocks), linear)


@given(SHAPES)
def test_8x4_round_trip_places_every_byte(shape):
    rows, blocks = shape
    linear = distinct(rows, blocks)
    buffer = layouts.to_f8_8x4(linear)
    expected = np.zeros(-(-rows // 8) * 8 * -(-blocks // 4) * 4, np.uint8)
    for row in range(rows):
        for block in range(blocks):
            tile = row // 8 * -(-blocks // 4) + block // 4
            expected[32 * tile + 4 * (row % 8) + block % 4] = linear[row, block]
    assert np.array_equal(buffer.numpy(), expected)
    assert torch.equal(layouts.from_f8_8x4(buffer, rows, blocks), linear)


def test_padding_is_ignored_when_read_and_seen_when_asked():
    rows, blocks = 130, 3
    linear = distinct(rows, blocks)
    row, block = torch.meshgrid(torch.arange(256), torch.arange(4), indexing="ij")
    offsets = layouts.f8_128x4_offset(row, block, blocks)
    padding = offsets[(row >= rows) | (block >= blocks)]
    poisoned = layouts.to_f8_128x4(linear)
    poisoned[padding] = 0xFF
    assert torch.equal(layouts.from_f8_128x4(poisoned, rows, blocks), linear)
    for where in (int(padding[0]), int(padding[-1])):  # a padding column, a padding row
        buffer = layouts.to_f8_128x4(linear)
        buffer[where] = 1
        assert not layouts.f8_128x4_padding_is_zero(buffer, rows, blocks)


@pytest.mark.parametrize("convert", [layouts.to_f8_128x4, layouts.to_f8_8x4, layouts.to_packed])
def test_strided_and_e8m0_input_converts_like_its_contiguous_copy(convert):
    wide = distinct(70, 14)
    view = wide[::2, 1::3]
    assert torch.equal(convert(view), convert(view.contiguous()))
    assert torch.equal(convert(view.contiguous().view(torch.float8_e8m0fnu)), convert(view.contiguous()))


def test_vllm_int32_view_is_the_same_bytes():
    rows, blocks = 200, 8
    linear = distinct(rows, blocks)
    buffer = layouts.to_f8_128x4(linear)
    words = buffer.view(torch.int32).view(2, 2, 128)  # [ceil(T / 128), C / 128, 128]
    assert torch.equal(layouts.from_f8_128x4(words, rows, blocks), linear)
    assert torch.equal(layouts.from_f8_128x4(buffer.view(torch.float8_e8m0fnu), rows, blocks), linear)
    assert layouts.as_byte_buffer(words).data_ptr() == buffer.data_ptr()


# ---- several groups: B24 --------------------------------------------------------------------------------------


def test_grouped_padding_is_explicit_and_the_wrong_one_refused_by_size():
    groups, rows, blocks = 2, 129, 128
    linear = distinct(rows, blocks, groups)
    per_group = layouts.to_f8_128x4(linear, padding="per_group")
    flattened = layouts.to_f8_128x4(linear, padding="flattened")
    assert (per_group.numel(), flattened.numel()) == (65536, 49152)
    assert torch.equal(per_group[32768:], layouts.to_f8_128x4(linear[1]))
    assert torch.equal(flattened, layouts.to_f8_128x4(linear.reshape(groups * rows, blocks)))
    for buffer, padding in ((per_group, "per_group"), (flattened, "flattened")):
        again = layouts.from_f8_128x4(buffer, rows, blocks, groups=groups, padding=padding)
        assert torch.equal(again, linear)

    with pytest.raises(
        ValueError,
        match=r"x_scale must have 65536 bytes \(F8_128x4, 2 groups of 129 rows x 128 blocks\), got 49152; that is "
        r"the size with flattened padding, this consumer reads per_group padding",
    ):
        layouts.from_f8_128x4(flattened, rows, blocks, groups=groups, name="x_scale")
    with pytest.raises(ValueError, match="the size with per_group padding, this consumer reads flattened padding"):
        layouts.check_f8_128x4_size(65536, rows, blocks, groups=groups, padding="flattened")
    with pytest.raises(ValueError, match="padding must be 'per_group' or 'flattened' for grouped scales, got None"):
        layouts.to_f8_128x4(linear)
    with pytest.raises(ValueError, match="padding must be 'per_group' or 'flattened', got 'none'"):
        layouts.f8_128x4_grouped_bytes(2, 129, 4, padding="none")


@given(st.integers(0, 3), SHAPES, st.sampled_from(["per_group", "flattened"]))
def test_grouped_round_trip(groups, shape, padding):
    linear = distinct(*shape, groups)
    buffer = layouts.to_f8_128x4(linear, padding=padding)
    assert buffer.numel() == layouts.f8_128x4_grouped_bytes(groups, *shape, padding=padding)
    assert torch.equal(layouts.from_f8_128x4(buffer, *shape, groups=groups, padding=padding), linear)


def test_wrong_sizes_are_refused_by_name():
    with pytest.raises(ValueError, match=r"z_scale must have 1024 bytes \(F8_128x4, 129 rows x 3 blocks\), got 512$"):
        layouts.from_f8_128x4(torch.zeros(512, dtype=torch.uint8), 129, 3, name="z_scale")
    with pytest.raises(ValueError, match="got 387; that is the size of unswizzled scales"):
        layouts.check_f8_128x4_size(129 * 3, 129, 3)
    with pytest.raises(ValueError, match=r"scale must have 32 bytes \(8x4, 5 rows x 3 blocks\), got 20"):
        layouts.from_f8_8x4(torch.zeros(20, dtype=torch.uint8), 5, 3)
    with pytest.raises(ValueError, match=r"scale must be contiguous, got shape .* strides"):
        layouts.from_f8_128x4(torch.zeros(512, 2, dtype=torch.uint8)[:, 0], 128, 4)
    with pytest.raises(
        TypeError, match="scale must be uint8, float8_e8m0fnu or an int32 view of the bytes, got torch"
    ):
        layouts.from_f8_128x4(torch.zeros(128), 128, 4)
    with pytest.raises(ValueError, match=r"linear must have 2 dimensions, got shape \[2, 3, 4\]"):
        layouts.to_f8_8x4(torch.zeros(2, 3, 4, dtype=torch.uint8))
    with pytest.raises(TypeError, match=r"linear must be uint8 or float8_e8m0fnu bytes, got torch\.float32"):
        layouts.to_f8_128x4(torch.zeros(2, 3))


# ---- packed MN-major ------------------------------------------------------------------------------------------


def test_packed_golden_form():
    """DeepGEMM's example: mn = 5, K = 256: shape (5, 2), strides (1, 8), 16 words; lowest block in the low byte."""
    linear = distinct(5, 8)
    packed = layouts.to_packed(linear)
    assert (list(packed.shape), packed.stride(), packed.untyped_storage().nbytes()) == ([5, 2], (1, 8), 64)
    first = [int(byte) for byte in linear[3, 4:8]]
    assert int(packed[3, 1]) & 0xFFFFFFFF == sum(byte << 8 * index for index, byte in enumerate(first))
    raw = torch.empty(0, dtype=torch.int32).set_(packed.untyped_storage()).view(torch.uint8)
    for row in range(5):
        for block in range(8):
            assert raw[layouts.packed_offset(row, block, 8)] == linear[row, block]
    assert not raw.view(2, 8, 4)[:, 5:].any()  # rows 5..7 are padding


def test_packed_groups_have_the_strides_of_vllm():
    packed = layouts.to_packed(distinct(6, 128, 3))
    assert (list(packed.shape), packed.stride()) == ([3, 6, 32], (32 * 8, 1, 8))


@given(SHAPES, st.integers(0, 2))
def test_packed_round_trip(shape, groups):
    linear = distinct(*shape, groups or None)
    packed = layouts.to_packed(linear)
    assert torch.equal(layouts.from_packed(packed, shape[1]), linear)
    assert torch.equal(layouts.from_packed(packed.contiguous(), shape[1]), linear)  # any strides
    everything = layouts.from_packed(packed)
    assert not everything[..., shape[1] :].any()  # the missing blocks of the last word


def test_packed_refusals():
    words = torch.zeros(4, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="scale must have 3 words for 9 blocks, got 2"):
        layouts.from_packed(words, 9)
    with pytest.raises(TypeError, match=r"scale must be packed int32, got torch\.int64"):
        layouts.from_packed(words.long())
    with pytest.raises(ValueError, match=r"at least 2 dimensions \[rows, words\], got shape \[4\]"):
        layouts.from_packed(words[:, 0])


# ---- blocks ---------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 140),
    st.integers(1, 9),
    st.sampled_from([(1, 32), (32, 32), (128, 128), (32, 288)]),
    st.integers(1, 2),
)
def test_blocks_expand_to_every_row_and_collapse_again(rows, num_blocks, block, groups):
    cols = 32 * num_blocks
    blocks = distinct(*layouts.block_scale_shape(rows, cols, block), groups)
    linear = layouts.expand_blocks(blocks, rows, cols, block)
    assert linear.shape == (groups, rows, num_blocks)
    for row in {0, rows // 2, rows - 1}:
        for column in range(num_blocks):
            assert torch.equal(linear[:, row, column], blocks[:, row // block[0], 32 * column // block[1]])
    assert torch.equal(layouts.collapse_blocks(linear, cols, block), blocks)


def test_block_refusals():
    linear = torch.full((64, 4), 120, dtype=torch.uint8)
    linear[40, 3] = 121
    with pytest.raises(ValueError, match=r"must be constant over blocks of 32x32, it is not at \[40, 3\]"):
        layouts.collapse_blocks(linear, 128, (32, 32))
    with pytest.raises(ValueError, match=r"blocks must be \[.., 2, 4\] for \[64, 128\] in blocks of 32x32"):
        layouts.expand_blocks(torch.zeros(2, 3, dtype=torch.uint8), 64, 128, (32, 32))
    with pytest.raises(ValueError, match="columns a positive multiple of 32, got"):
        layouts.expand_blocks(torch.zeros(2, 3, dtype=torch.uint8), 64, 48, (32, 16))
    with pytest.raises(ValueError, match="cols must be a multiple of 32, got 48"):
        layouts.expand_blocks(torch.zeros(2, 2, dtype=torch.uint8), 64, 48, (32, 32))
    with pytest.raises(ValueError, match=r"linear must be \[.., rows, 4\] for 128 columns"):
        layouts.collapse_blocks(linear[:, :3], 128, (32, 32))


@pytest.mark.parametrize(
    ("shape", "block"),
    [((256, 128), (32, 32)), ((64, 32), (128, 128)), ((8192, 128), (1, 32))],
)
def test_block_shape_is_found_from_the_scale(shape, block):
    assert layouts.find_block_shape(8192, 4096, shape) == block
    with pytest.raises(ValueError, match=r"w_scale has shape \[64, 128\], which fits no block of a \[8192, 4096\]"):
        layouts.find_block_shape(8192, 4096, (64, 128), name="w_scale")


# ---- which scales are accepted: B13 to B16 ----------------------------------------------------------------------


def test_float32_powers_of_two_become_their_bytes():
    scales = torch.tensor([2.0**e for e in range(-127, 128)])
    assert layouts.scale_bytes_from_float32(scales).tolist() == list(range(255))
    assert layouts.scale_bytes_from_float32(torch.tensor(0.25)).item() == 125
    strided = scales.repeat(4, 1).t()[3:9]
    assert layouts.scale_bytes_from_float32(strided)[:, 2].tolist() == list(range(3, 9))


@pytest.mark.parametrize(
    "bad", [0.3, 0.75, -1.0, 0.0, -0.0, math.inf, -math.inf, math.nan, 2.0**-128, 2.0**-149, 1.5 * 2.0**-127, 448.0]
)
def test_other_float32_scales_are_refused(bad):
    scales = torch.ones(2, 3)
    scales[1, 2] = bad
    with pytest.raises(ValueError, match=r"w_scale must hold positive powers of two.*at \[1, 2\] \(1 such values\)"):
        layouts.scale_bytes_from_float32(scales, name="w_scale")


def test_the_dtype_decides_how_a_scale_is_read():
    byte = distinct(6, 8)
    assert layouts.scale_bytes(byte) is byte
    assert torch.equal(layouts.scale_bytes(byte.view(torch.float8_e8m0fnu)), byte)
    assert torch.equal(layouts.scale_bytes(layouts.scale_to_float32(byte)), byte)
    assert torch.equal(layouts.scale_bytes(layouts.to_packed(byte[:, :7]), num_blocks=7), byte[:, :7])
    for dtype in (torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float64, torch.int64):
        with pytest.raises(TypeError, match="w_scale must be uint8, float8_e8m0fnu, packed int32 or power-of-two"):
            layouts.scale_bytes(torch.zeros(2, 2).to(dtype), name="w_scale")
    with pytest.raises(TypeError, match=r"scale must be float32, got torch\.float64"):
        layouts.scale_bytes_from_float32(torch.ones(2, dtype=torch.float64))


# ---- decoding: B05, B06, B12 ----------------------------------------------------------------------------------


def test_every_scale_byte_decodes_exactly():
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    single, double = layouts.scale_to_float32(codes), layouts.scale_to_float64(codes)
    assert single.dtype == torch.float32
    assert double.dtype == torch.float64
    for code in range(255):
        assert single[code].item() == double[code].item() == math.ldexp(1.0, code - 127)
    assert math.isnan(single[255])
    assert math.isnan(double[255])
    assert single[:1].view(torch.int32).item() == 0x00400000  # 2^-127 is an FP32 subnormal, not 0
    assert torch.equal(layouts.scale_to_float32(codes.view(torch.float8_e8m0fnu))[:255], single[:255])


def test_scale_zero_survives_flush_to_zero():
    code = torch.zeros(64, dtype=torch.uint8)
    flushed = torch.set_flush_denormal(True)
    try:
        bits = layouts.scale_to_float32(code).view(torch.int32)
        double = layouts.scale_to_float64(code)
    finally:
        torch.set_flush_denormal(False)
    assert flushed, "this CPU has no flush-to-zero mode, the test shows nothing"
    assert bits.tolist() == [0x00400000] * 64
    assert double.tolist() == [2.0**-127] * 64


def test_every_e4m3_code_decodes_exactly():
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    values = layouts.e4m3_to_float32(codes)
    for code in range(256):
        sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
        if exponent == 15 and mantissa == 7:
            assert math.isnan(values[code])
            continue
        magnitude = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa * 2.0**-9
        assert values[code].item() == (-magnitude if sign else magnitude)
        assert math.copysign(1.0, values[code].item()) == (-1.0 if sign else 1.0)
    with pytest.raises(TypeError, match="data must be float8_e4m3fn or its bytes as uint8"):
        layouts.e4m3_to_float32(codes.float())


def test_dequantize_is_exact_and_a_nan_scale_takes_its_whole_block():
    data = torch.arange(128, dtype=torch.int32).to(torch.uint8).clamp(max=0x7E).view(torch.float8_e4m3fn)[None]
    scale = torch.tensor([[0, 255, 254, 120]], dtype=torch.uint8)
    values = layouts.dequantize(data, scale)
    element = layouts.e4m3_to_float32(data).double()
    assert torch.equal(values[:, :32], element[:, :32] * 2.0**-127)
    assert values[:, 32:64].isnan().all()
    assert torch.equal(values[:, 64:96], element[:, 64:96] * 2.0**127)
    zeros = torch.zeros(1, 128, dtype=torch.uint8)
    assert layouts.dequantize(zeros, scale)[:, 32:64].isnan().all()  # NaN * 0
    single = layouts.dequantize(data, scale, dtype=torch.float32)
    assert torch.equal(single[:, 96:].double(), values[:, 96:])
    with pytest.raises(
        ValueError, match=r"linear must be \[1, 4\] for data \[1, 128\] and blocks of 32, got \[1, 3\]"
    ):
        layouts.dequantize(data, scale[:, :3])
    with pytest.raises(TypeError, match="dtype must be float64 or float32"):
        layouts.dequantize(data, scale, dtype=torch.bfloat16)


# ---- column order of vLLM's mega attention ----------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "head_dim"), [(8, 512), (1, 512), (3, 64)])
def test_chunk_interleaved_order(heads, head_dim):
    order = layouts.chunk_interleaved_order(heads, head_dim)
    for c in range(head_dim // 32):
        for h in range(heads):
            for j in (0, 5, 31):
                assert order[(c * heads + h) * 32 + j] == h * head_dim + c * 32 + j
    assert torch.equal(order.sort().values, torch.arange(heads * head_dim))


def test_chunk_interleaving_moves_elements_and_scales_together():
    heads, head_dim, rows = 8, 512, 3
    x = torch.arange(rows * heads * head_dim, dtype=torch.int32).view(rows, -1)
    blocks = x[:, ::32] // 32  # the scale block an element belongs to
    moved, moved_blocks = (layouts.to_chunk_interleaved(t, heads, head_dim) for t in (x, blocks))
    assert torch.equal(moved[:, ::32] // 32, moved_blocks)
    word = moved_blocks[0].view(-1, 4)  # int32 word w: chunk w // 2, heads 4 * (w % 2) .. + 3
    for w in (0, 1, 6, 31):
        assert word[w].tolist() == [(4 * (w % 2) + i) * 16 + w // 2 for i in range(4)]
    assert torch.equal(layouts.from_chunk_interleaved(moved, heads, head_dim), x)
    assert torch.equal(layouts.from_chunk_interleaved(moved_blocks, heads, head_dim), blocks)
    along_rows = layouts.to_chunk_interleaved(x.t(), heads, head_dim, dim=0)
    assert torch.equal(along_rows.t(), moved)


def test_chunk_interleaving_keeps_8_bit_dtypes_and_refuses_other_widths():
    codes = torch.arange(1024, dtype=torch.int32).to(torch.uint8).view(1, -1)
    moved = layouts.to_chunk_interleaved(codes.view(torch.float8_e4m3fn), 2, 512)
    assert moved.dtype == torch.float8_e4m3fn
    assert torch.equal(moved.view(torch.uint8), layouts.to_chunk_interleaved(codes, 2, 512))
    with pytest.raises(ValueError, match="axis -1 must have 4096 columns or 128 scale blocks for 8 heads of 512"):
        layouts.to_chunk_interleaved(codes, 8, 512)
    with pytest.raises(ValueError, match="head_dim must be a multiple of 32 and heads positive, got heads=2"):
        layouts.chunk_interleaved_order(2, 40)
