"""mxfp8_quantize_sfd128x4: the numeric rules, exhaustively where that is possible, and the scale layout."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import reference as ref
import torch
from helpers import E4M3, POISON, bf16, codes, poisoned
from hypothesis import given
from hypothesis import strategies as st
from test_reference import GOLDEN_BLOCKS, GOLDEN_CODES

import vllm_megaattn

SPANS = (32, 128, 256)


def run(bits: np.ndarray, span: int = 32, device: str = "cpu") -> tuple[np.ndarray, np.ndarray]:
    """Codes [T, C] through the op: (e4m3 codes [T, C], scale bytes [T, C / 32])."""
    q, q_scale = vllm_megaattn.mxfp8_quantize_sfd128x4(bf16(bits, device), scale_span=span)
    tokens, cols = bits.shape
    assert q.shape == (tokens, cols)
    assert q.dtype == E4M3
    assert q_scale.shape == (ref.f8_128x4_bytes(tokens, cols // 32),)
    assert q_scale.dtype == torch.uint8
    return codes(q), ref.f8_128x4_unpack(codes(q_scale), tokens, cols // 32)


def check(bits: np.ndarray, span: int = 32, device: str = "cpu") -> None:
    data, scale = run(bits, span, device)
    expected_data, expected_scale = ref.quantize(bits, span)
    np.testing.assert_array_equal(scale, expected_scale)
    np.testing.assert_array_equal(data, expected_data)


# ---- golden vectors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("block", "byte", "leading"), GOLDEN_BLOCKS)
def test_golden_blocks(block, byte, leading, device):
    data, scale = run(ref.bf16_encode(np.array([block])), device=device)
    assert scale.tolist() == [[byte]]
    assert data[0, : len(leading)].tolist() == leading


@pytest.mark.parametrize(("code", "byte", "element"), GOLDEN_CODES)
def test_golden_codes(code, byte, element, device):
    data, scale = run(np.full((1, 32), code, np.uint16), device=device)
    assert (scale == byte).all()
    assert (data == element).all()


# ---- exponent rule, exhaustive (B01, B03, B08) -----------------------------------------------------------------


def op_scale_bytes(device: str = "cpu") -> tuple[np.ndarray, np.ndarray]:
    """All positive finite BF16 magnitudes, each as the amax of its own block, and the bytes the op gives them."""
    amax = np.arange(1, 0x7F80, dtype=np.uint16)
    blocks = np.zeros((len(amax), 32), np.uint16)
    place = np.arange(len(amax)) % 32  # the maximum may sit anywhere in its block, with either sign
    blocks[np.arange(len(amax)), place] = amax | (np.arange(len(amax)) // 32 % 2 << 15).astype(np.uint16)
    blocks[np.arange(len(amax)), (place + 7) % 32] = amax - 1
    padded = np.zeros((-(-len(amax) // 128) * 128, 32), np.uint16)
    padded[: len(amax)] = blocks
    _, scale = run(padded.reshape(-1, 128 * 32), device=device)
    return ref.bf16_decode(amax), scale.reshape(-1)[: len(amax)]


def test_exponent_rule_for_every_bf16_amax(device):
    amax, byte = op_scale_bytes(device)
    assert len(amax) == 32639
    exact = [min(max(127 + ref.exponent_by_fractions(Fraction(float(v))), 0), 254) for v in amax]
    np.testing.assert_array_equal(byte, exact)


def test_exponent_test_has_teeth():
    """A reciprocal one unit above RN(1/448) gives 247 magnitudes the wrong byte: the check above would notice."""
    amax, byte = op_scale_bytes()

    def by_reciprocal(bits: int) -> np.ndarray:
        constant = np.array([bits], np.uint32).view(np.float32)
        with np.errstate(under="ignore"):
            quotient = amax.astype(np.float32) * constant
        mantissa, exponent = np.frexp(quotient.astype(np.float64))
        e = exponent - (mantissa == 0.5)  # ceil(log2)
        return np.clip(127 + e, 0, 254)

    assert (by_reciprocal(0x3B124925) == byte).all()  # RN(1/448)
    assert int((by_reciprocal(0x3B124926) != byte).sum()) == 247


@pytest.mark.parametrize("span", SPANS)
def test_every_bf16_value_under_every_scale_byte(span, device):
    """Element rounding: all values up to the largest a byte admits, for each of the 247 live bytes."""
    bits = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    magnitude = bits & 0x7FFF
    value = ref.bf16_decode(magnitude)
    rows, row_cols = [], 256 * 8
    # Every byte once with the smallest span; a sample of them for the others, where only the maximum's reach differs.
    for byte in range(1, 248) if span == 32 else (1, 2, 105, 127, 246, 247):
        limit = 448 * 2.0 ** (byte - 127)
        smallest = limit * 2.0**-19  # below half the smallest subnormal by far: what is smaller rounds to zero too
        inside = bits[(value <= limit) & (value >= smallest) & (magnitude < 0x7F80)]
        top = inside[np.argmax(ref.bf16_decode(inside))]
        inside = np.concatenate([inside, np.zeros(-len(inside) % (span - 1), np.uint16)]).reshape(-1, span - 1)
        rows.append(np.concatenate([np.full((len(inside), 1), top, np.uint16), inside], axis=1))
    blocks = np.concatenate(rows).reshape(-1)
    blocks = np.concatenate([blocks, np.zeros(-len(blocks) % row_cols, np.uint16)]).reshape(-1, row_cols)
    check(blocks, span, device)


# ---- special blocks (B01, B02, B04, B07) -----------------------------------------------------------------------


SPECIAL = {
    "zero": np.zeros(32, np.uint16),
    "negative zero": np.full(32, 0x8000, np.uint16),
    "one NaN": np.where(np.arange(32) == 5, 0x7FC0, 0x3F80).astype(np.uint16),
    "one negative NaN": np.where(np.arange(32) == 31, 0xFFFF, 0x3F80).astype(np.uint16),
    "one +Inf": np.where(np.arange(32) == 0, 0x7F80, 0x3F80).astype(np.uint16),
    "one -Inf": np.where(np.arange(32) == 17, 0xFF80, 0x3F80).astype(np.uint16),
    "both Inf": np.where(np.arange(32) % 2, 0xFF80, 0x7F80).astype(np.uint16),
    "all NaN": np.full(32, 0x7FFF, np.uint16),
    "tiny: 9.18e-40 among 1e-36": ref.bf16_encode(np.where(np.arange(32) == 3, 9.18e-40, 1e-36)),
    "tiny: all 1e-40": ref.bf16_encode(np.full(32, 1e-40)),
    "smallest subnormal": np.full(32, 0x8001, np.uint16),
    "448 * 2^-127": np.full(32, 0x0460, np.uint16),
    "just above it": np.where(np.arange(32) == 9, 0x0461, 0x8460).astype(np.uint16),
    "largest finite": np.full(32, 0x7F7F, np.uint16),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_special_blocks_do_not_touch_their_neighbours(name, device, rng):
    bits = ref.bf16_encode(rng.standard_normal((3, 96)))
    clean = run(bits, device=device)
    bits[1, 32:64] = SPECIAL[name]
    data, scale = run(bits, device=device)
    expected_data, expected_scale = ref.quantize(bits)
    np.testing.assert_array_equal(data, expected_data)
    np.testing.assert_array_equal(scale, expected_scale)
    others = np.ones((3, 3), bool)
    others[1, 1] = False
    assert (scale[others] == clean[1][others]).all()
    assert (data[np.repeat(others, 32, axis=1)] == clean[0][np.repeat(others, 32, axis=1)]).all()


def test_poisoned_block_is_255_and_0x7f_throughout(device):
    for name in ("one NaN", "one negative NaN", "one +Inf", "one -Inf", "both Inf", "all NaN"):
        data, scale = run(SPECIAL[name][None], device=device)
        assert (scale == 0xFF).all(), name
        assert (data == 0x7F).all(), name


@pytest.mark.parametrize("span", [128, 256])
def test_poison_covers_its_whole_span_and_no_other(span, device, rng):
    bits = ref.bf16_encode(rng.standard_normal((2, 3 * span)))
    bits[1, span + 40] = 0x7FC0
    data, scale = run(bits, span, device)
    poisoned_blocks = np.zeros(scale.shape, bool)
    poisoned_blocks[1, span // 32 : 2 * span // 32] = True
    assert ((scale == 0xFF) == poisoned_blocks).all()
    assert ((data == 0x7F).reshape(2, -1, 32).all(axis=-1) == poisoned_blocks).all()
    check(bits, span, device)


# ---- shapes, spans, strides ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 31, 32, 33, 64, 97, 127, 128, 129, 200, 255, 256, 257, 300])
@pytest.mark.parametrize("cols", [32, 96, 128, 288, 576])
def test_every_byte_is_written_and_padding_is_zero(tokens, cols, device, rng):
    """Poisoned outputs: B20, B21, B26 (column counts that are not multiples of 4, rows that are not of 128)."""
    bits = ref.bf16_encode(rng.standard_normal((tokens, cols)) + 3)
    q = poisoned((tokens, cols), E4M3, device)
    q_scale = poisoned((ref.f8_128x4_bytes(tokens, cols // 32),), torch.uint8, device, 0xFF)
    result = vllm_megaattn.mxfp8_quantize_sfd128x4(bf16(bits, device), out=(q, q_scale))
    assert result[0] is q
    assert result[1] is q_scale
    data, scale = ref.quantize(bits)
    np.testing.assert_array_equal(codes(q), data)
    np.testing.assert_array_equal(codes(q_scale), ref.f8_128x4_pack(scale, padding=0))


@pytest.mark.parametrize("span", SPANS)
def test_guard_bytes_around_the_outputs_stay(span, device, rng):
    """B25, B32: nothing is written past either end of an output."""
    tokens, cols, guard = 129, 1280, 4096
    bits = ref.bf16_encode(rng.standard_normal((tokens, cols)))
    size = ref.f8_128x4_bytes(tokens, cols // 32)
    raw_q = poisoned((tokens * cols + 2 * guard,), torch.uint8, device)
    raw_scale = poisoned((size + 2 * guard,), torch.uint8, device)
    q = raw_q[guard:-guard].view(E4M3).view(tokens, cols)
    vllm_megaattn.mxfp8_quantize_sfd128x4(bf16(bits, device), scale_span=span, out=(q, raw_scale[guard:-guard]))
    for raw in (raw_q, raw_scale):
        assert (codes(raw[:guard]) == POISON).all()
        assert (codes(raw[-guard:]) == POISON).all()
    data, scale = ref.quantize(bits, span)
    np.testing.assert_array_equal(codes(q), data)
    np.testing.assert_array_equal(codes(raw_scale[guard:-guard]), ref.f8_128x4_pack(scale))


@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("layout", ["contiguous", "token pitch", "group pitch", "group major", "every second token"])
def test_strided_groups(layout, span, device, rng):
    """z [T, G, N] with any token and group stride (B82)."""
    tokens, groups, n = 37, 3, 512
    bits = ref.bf16_encode(rng.standard_normal((tokens, groups, n)))
    z = bf16(bits, device)
    if layout == "token pitch":
        z = torch.cat([z, torch.full_like(z, torch.nan)[:, :1]], dim=1)[:, :groups]
    elif layout == "group pitch":
        z = torch.cat([z, torch.full_like(z, torch.nan)[..., :40]], dim=2)[..., :n]
    elif layout == "group major":
        z = z.transpose(0, 1).contiguous().transpose(0, 1)
    elif layout == "every second token":
        z = torch.stack([z, torch.full_like(z, torch.nan)], dim=1).flatten(0, 1)[::2]
    assert z.shape == (tokens, groups, n)
    assert z.is_contiguous() == (layout == "contiguous")
    q, q_scale = vllm_megaattn.mxfp8_quantize_sfd128x4(z, scale_span=span)
    data, scale = ref.quantize(bits.reshape(tokens, -1), span)
    assert q.shape == (tokens, groups * n)
    np.testing.assert_array_equal(codes(q), data)
    np.testing.assert_array_equal(codes(q_scale), ref.f8_128x4_pack(scale))


def test_expanded_input_repeats_its_row(device, rng):
    bits = ref.bf16_encode(rng.standard_normal((1, 256)))
    q, q_scale = vllm_megaattn.mxfp8_quantize_sfd128x4(bf16(bits, device).expand(130, 256))
    data, scale = ref.quantize(np.repeat(bits, 130, axis=0))
    np.testing.assert_array_equal(codes(q), data)
    np.testing.assert_array_equal(codes(q_scale), ref.f8_128x4_pack(scale))


def test_output_with_a_row_pitch(device, rng):
    bits = ref.bf16_encode(rng.standard_normal((33, 256)))
    wide = poisoned((33, 320), E4M3, device)
    q_scale = poisoned((ref.f8_128x4_bytes(33, 8),), torch.uint8, device)
    vllm_megaattn.mxfp8_quantize_sfd128x4(bf16(bits, device), out=(wide[:, :256], q_scale))
    data, scale = ref.quantize(bits)
    np.testing.assert_array_equal(codes(wide[:, :256]), data)
    np.testing.assert_array_equal(codes(q_scale), ref.f8_128x4_pack(scale))
    assert (codes(wide[:, 256:]) == POISON).all()


def test_scales_as_int32_tiles(device, rng):
    """vLLM's int32 [ceil(T/128), C/128, 128] is the same memory as the 1-D buffer."""
    bits = ref.bf16_encode(rng.standard_normal((130, 384)))
    q = poisoned((130, 384), E4M3, device)
    tiles = poisoned((2, 3, 128), torch.int32, device)
    vllm_megaattn.mxfp8_quantize_sfd128x4(bf16(bits, device), out=(q, tiles))
    data, scale = ref.quantize(bits)
    np.testing.assert_array_equal(codes(q), data)
    np.testing.assert_array_equal(codes(tiles.view(-1).view(torch.uint8)), ref.f8_128x4_pack(scale))


@pytest.mark.parametrize("shape", [(0, 256), (0, 2, 128)])
def test_no_tokens(shape, device):
    q, q_scale = vllm_megaattn.mxfp8_quantize_sfd128x4(torch.empty(shape, dtype=torch.bfloat16, device=device))
    assert q.shape == (0, 256)
    assert q.dtype == E4M3
    assert q_scale.shape == (0,)


@given(
    tokens=st.integers(1, 70),
    blocks=st.integers(1, 20),
    span=st.sampled_from(SPANS),
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0, 3, 40, 120]),
)
def test_any_shape_and_any_bits(tokens, blocks, span, seed, spread):
    """Random shapes; values of any magnitude, or (spread 0) any 16 bits at all, NaN and infinity among them."""
    rng = np.random.default_rng(seed)
    shape = (tokens, blocks * span)
    if spread:
        bits = ref.bf16_encode(rng.standard_normal(shape) * np.exp2(rng.integers(-spread, spread, shape)))
    else:
        bits = rng.integers(0, 65536, shape).astype(np.uint16)
    check(bits, span)


def test_rows_do_not_depend_on_the_batch(device, rng):
    """B85, B19: a token's bytes are the same alone and among others, poisoned ones included."""
    bits = ref.bf16_encode(rng.standard_normal((129, 256)))
    bits[7, 100] = 0x7FC0
    whole = run(bits, device=device)
    for rows in (slice(0, 1), slice(0, 2), slice(6, 13), slice(8, 72), slice(1, 129)):
        part = run(bits[rows], device=device)
        assert (part[0] == whole[0][rows]).all()
        assert (part[1] == whole[1][rows]).all()


def test_threads_do_not_change_the_bytes(rng):
    bits = ref.bf16_encode(rng.standard_normal((300, 1024)))
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(run(bits))
    finally:
        torch.set_num_threads(before)
    assert (results[0][0] == results[1][0]).all()
    assert (results[0][1] == results[1][1]).all()


def test_axis_of_the_blocks(device):
    """B17: blocks run along the columns. Input constant down a column: scales vary along a row, not along T."""
    bits = ref.bf16_encode(np.tile(np.exp2(np.arange(256) // 32 * 3.0), (40, 1)))
    _, scale = run(bits, device=device)
    assert (scale == scale[0]).all()
    assert (np.diff(scale[0].astype(int)) == 3).all()


def test_input_is_not_changed(device, rng):
    z = bf16(rng.integers(0, 65536, (33, 256)).astype(np.uint16), device)
    before = codes(z).copy()
    vllm_megaattn.mxfp8_quantize_sfd128x4(z)
    assert (codes(z) == before).all()


def test_no_source_casts_floats_to_e8m0():
    """B09: torch rounds such a cast to nearest even, not up; bytes are formed from bits and viewed."""
    package = Path(vllm_megaattn.__file__).parent
    sources = sorted(package.rglob("*.py"))
    assert len(sources) > 5
    for path in sources:
        assert not re.search(r"\.(to|type)\([^)]*(e8m0|E8M0)", path.read_text()), path
    assert re.search(r"\.(to|type)\([^)]*(e8m0|E8M0)", "scale.to(torch.float8_e8m0fnu)")


def test_flushed_elements_are_counted(rng, device):
    """Wider spans flush more; the count is the reference's."""
    bits = ref.bf16_encode(
        (rng.standard_normal((5, 512)) * np.exp2(rng.integers(-20, 4, (5, 512)))).astype(np.float32)
    )
    bits[0, :7] = 0x8000  # zeros flush nothing
    counts = []
    for span in SPANS:
        z = bf16(bits, device)
        q, _ = vllm_megaattn.mxfp8_quantize_sfd128x4(z, scale_span=span)
        counts.append(vllm_megaattn.count_flushed(z, q))
        want, _ = ref.quantize(bits, span)
        assert counts[-1] == int((((want & 0x7F) == 0) & ((bits & 0x7FFF) != 0)).sum())
    assert 0 < counts[0] < counts[1] < counts[2]


def test_count_flushed_refuses():
    z = torch.zeros(4, 32, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"q must be torch\.float8_e4m3fn, got torch\.bfloat16"):
        vllm_megaattn.count_flushed(z, z)
    with pytest.raises(ValueError, match="as many elements as z, 128, got 32"):
        vllm_megaattn.count_flushed(z, torch.zeros(32, dtype=E4M3))
