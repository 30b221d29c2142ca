"""prepare_weight and the op behind it: value-exact where it says so, idempotent, and refusing what it cannot keep."""

from __future__ import annotations

import numpy as np
import pytest
import reference as ref
import torch
from helpers import E4M3, E8M0, WEIGHT_FORMS, codes, e4m3, make_matmul, same_bits, u8

import vllm_megaattn
from vllm_megaattn import ops
from vllm_megaattn.weights import MAX_REBLOCK_ERROR


@pytest.fixture
def as_hopper(monkeypatch):
    """Prepares for Hopper on the CPU: the preparation itself is a CPU op, only the choice looks at the device."""
    monkeypatch.setattr(ops.selector, "device_key", lambda device: "sm90")


def reblocked(w: np.ndarray, scale: np.ndarray, block_rows: int, block_cols: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes [G, N, K] and bytes per row [G, N, K / 32] -> codes under the largest byte of each block, and the bytes.

    Blocks of zeros and NaN blocks (byte 255) have no say in the byte; the elements of the latter become NaN.
    """
    groups, n, k = w.shape
    rows, cols = -(-n // block_rows), -(-k // block_cols)
    live = (w.reshape(groups, n, k // 32, 32) & 0x7F).any(axis=-1) & (scale != 255)
    out_scale = np.zeros((groups, rows, cols), np.uint8)
    for r in range(rows):
        for c in range(cols):
            cut = slice(r * block_rows, (r + 1) * block_rows), slice(c * block_cols // 32, (c + 1) * block_cols // 32)
            out_scale[:, r, c] = np.where(live[(slice(None), *cut)], scale[(slice(None), *cut)], 0).max(axis=(1, 2))
    per_row = ref.expand_blocks(out_scale, n, k, block_rows, block_cols)
    shift = np.ldexp(1.0, scale.astype(np.int64) - per_row.astype(np.int64))
    shift[scale == 255] = np.nan
    with np.errstate(invalid="ignore"):
        values = ref.E4M3_TABLE[w] * np.repeat(shift, 32, axis=-1)
    return ref.e4m3_encode(values), out_scale


# ---- the op ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", WEIGHT_FORMS)
@pytest.mark.parametrize("block", [(32, 0), (32, 32), (128, 128), (1, 32), (32, 128), (128, 0)])
def test_reblock_against_the_reference(form, block, rng):
    groups, n, k = 2, 256, 512
    problem = make_matmul(rng, 1, groups, n, k, form)
    block_rows, block_cols = block[0], block[1] or k
    expected_w, expected_scale = reblocked(problem.w, problem.w_scale, block_rows, block_cols)
    out_w = torch.empty((groups, n, k), dtype=E4M3)
    out_scale = torch.empty(expected_scale.shape, dtype=torch.uint8)
    stats = torch.full((3,), torch.nan, dtype=torch.float64)
    torch.ops.vllm_megaattn.reblock_weight(e4m3(problem.w), u8(problem.w_blocks), out_w, out_scale, stats)
    np.testing.assert_array_equal(codes(out_scale), expected_scale)
    np.testing.assert_array_equal(codes(out_w), expected_w)

    before = ref.dequantize(problem.w, problem.w_scale)
    after = ref.dequantize(expected_w, ref.expand_blocks(expected_scale, n, k, block_rows, block_cols))
    assert stats[0] == (before != after).sum()
    assert stats[1].item() == pytest.approx(((before - after) ** 2).sum(), rel=1e-9)
    assert stats[2].item() == pytest.approx((before**2).sum(), rel=1e-9)
    coarser = block_rows > WEIGHT_FORMS[form][0] or block_cols > (WEIGHT_FORMS[form][1] or k)
    assert (stats[0] > 0) == coarser, "only a coarser block can change a value"


def test_reblock_statistics_at_the_ends_of_the_scale_range():
    """Byte 0 counts as 2^-127, not as zero, and byte 254 as 2^127."""
    w = np.full((1, 32, 64), 0x38, np.uint8)
    for byte in (0, 254):
        stats = torch.empty(3, dtype=torch.float64)
        out = torch.empty((1, 32, 64), dtype=E4M3), torch.empty((1, 1, 1), dtype=torch.uint8)
        torch.ops.vllm_megaattn.reblock_weight(e4m3(w), u8(np.full((1, 1, 2), byte, np.uint8)), *out, stats)
        assert stats.tolist() == [0.0, 0.0, 2048 * 2.0 ** (2 * (byte - 127))]
        assert out[1].item() == byte


def test_reblock_rounds_subnormals_to_even(rng):
    """Every element code under every shift, against exact arithmetic; NaN stays NaN."""
    shifts = np.arange(32)
    w = np.tile(np.arange(256, dtype=np.uint8), 4).reshape(1, 1, 1024).repeat(32, axis=1)
    scale = np.tile(127 - shifts.astype(np.uint8), (1, 32, 1))
    w = np.stack([np.roll(w[0, 0], 32 * r) for r in range(32)])[None]  # each code meets each shift
    out_w, out_scale = torch.empty((1, 32, 1024), dtype=E4M3), torch.empty((1, 1, 1), dtype=torch.uint8)
    stats = torch.empty(3, dtype=torch.float64)
    torch.ops.vllm_megaattn.reblock_weight(e4m3(w), u8(scale), out_w, out_scale, stats)
    expected_w, expected_scale = reblocked(w, scale, 32, 1024)
    np.testing.assert_array_equal(codes(out_scale), expected_scale)
    nan = (w & 0x7F) == 0x7F
    np.testing.assert_array_equal(codes(out_w)[~nan], expected_w[~nan])
    assert ((codes(out_w)[nan] & 0x7F) == 0x7F).all()


# ---- the front end on the CPU ----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", WEIGHT_FORMS)
@pytest.mark.parametrize("dims", [2, 3])
def test_cpu_keeps_values_and_form(form, dims, rng):
    problem = make_matmul(rng, 1, 2, 128, 256, form)
    w, scale = e4m3(problem.w), u8(problem.w_blocks)
    if dims == 2:
        w, scale = w.flatten(0, 1), scale.flatten(0, 1)
    for given in (scale, scale.view(E8M0)):
        new_w, new_scale, report = vllm_megaattn.prepare_weight(w, given)
        assert same_bits(new_w, w)
        assert new_w.is_contiguous()
        assert same_bits(new_scale, given)
        assert report["changed"] == 0
        assert report["elements"] == w.numel()
        assert report["relative_error"] == 0.0
        again_w, again_scale, _ = vllm_megaattn.prepare_weight(new_w, new_scale)
        assert same_bits(again_w, new_w)
        assert same_bits(again_scale, new_scale)


def test_strided_weights_become_contiguous(rng):
    problem = make_matmul(rng, 1, 2, 128, 256)
    wide = torch.zeros((2, 128, 320), dtype=E4M3)
    wide[:, :, :256] = e4m3(problem.w)
    new_w, _, _ = vllm_megaattn.prepare_weight(wide[:, :, :256], u8(problem.w_blocks))
    assert new_w.is_contiguous()
    assert same_bits(new_w, e4m3(problem.w))


def test_float32_scales_that_are_powers_of_two(rng):
    """0.25 is byte 125; the ends of the range are 2^-127 and 2^127."""
    problem = make_matmul(rng, 1, 1, 64, 256)
    exact = torch.from_numpy(ref.UE8M0_TABLE[problem.w_blocks].astype(np.float32))
    exact[0, 0, :3] = torch.tensor([0.25, 2.0**-127, 2.0**127])
    _, scale, report = vllm_megaattn.prepare_weight(e4m3(problem.w), exact)
    assert scale.dtype == torch.uint8
    assert report["changed"] == 0
    assert scale[0, 0, :3].tolist() == [125, 0, 254]
    assert (codes(scale)[0, 1] == problem.w_blocks[0, 1]).all()


@pytest.mark.parametrize("bad", [0.3, 0.75, -1.0, 0.0, -0.0, np.inf, np.nan, 2.0**-128, 1 + 2.0**-23])
def test_other_float32_scales_are_refused(bad, rng):
    """B13, B14, B15: rounding a scale without quantising the data anew changes the weights."""
    problem = make_matmul(rng, 1, 1, 64, 256)
    scale = torch.ones((1, 2, 8))
    scale[0, 1, 5] = bad
    with pytest.raises(ValueError, match=r"w_scale must hold.*powers of two.*at \[0, 1, 5\]"):
        vllm_megaattn.prepare_weight(e4m3(problem.w), scale)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, E4M3, torch.int64, torch.int8])
def test_scale_dtypes_that_mean_something_else_are_refused(dtype, rng):
    """B16: the dtype selects the decode, and these have none; e4m3 scales must not be read as UE8M0."""
    problem = make_matmul(rng, 1, 1, 64, 256)
    with pytest.raises(TypeError, match=rf"w_scale must .*{str(dtype)[6:]}"):
        vllm_megaattn.prepare_weight(e4m3(problem.w), torch.ones((1, 2, 8)).to(dtype))


@pytest.mark.parametrize("shape", [(1, 3, 8), (1, 2, 7), (2, 2, 8), (16,), (1, 1, 2, 8)])
def test_scales_of_the_wrong_shape_are_refused(shape, rng):
    problem = make_matmul(rng, 1, 1, 64, 256)
    with pytest.raises(ValueError, match=r"w_scale must"):
        vllm_megaattn.prepare_weight(e4m3(problem.w), torch.full(shape, 127, dtype=torch.uint8))


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bfloat16, torch.float8_e5m2])
def test_weights_of_another_dtype_are_refused(dtype):
    """B46: weights that a loader repacked."""
    w = torch.zeros((1, 64, 256), dtype=torch.uint8).to(dtype)
    with pytest.raises(TypeError, match=rf"w must have dtype float8_e4m3fn, got {str(dtype)[6:]}"):
        vllm_megaattn.prepare_weight(w, torch.full((1, 2, 8), 127, dtype=torch.uint8))


@pytest.mark.parametrize("shape", [(64,), (1, 1, 64, 256)])
def test_weights_of_the_wrong_rank_are_refused(shape):
    with pytest.raises(ValueError, match=r"w must have shape"):
        vllm_megaattn.prepare_weight(torch.zeros(shape, dtype=E4M3), torch.full((1, 2, 8), 127, dtype=torch.uint8))


@pytest.mark.parametrize("argument", ["w", "w_scale"])
def test_what_is_no_tensor_is_refused(argument):
    arguments = {"w": torch.zeros((1, 64, 256), dtype=E4M3), "w_scale": torch.ones((1, 2, 8)), argument: None}
    with pytest.raises(TypeError, match=rf"prepare_weight: {argument} must be a torch.Tensor, got NoneType"):
        vllm_megaattn.prepare_weight(**arguments)


def test_new_weights_give_new_scales(rng):
    """B94: nothing is remembered between calls."""
    first, second = make_matmul(rng, 1, 1, 64, 256), make_matmul(rng, 1, 1, 64, 256, adversarial=False)
    w, blocks = e4m3(first.w), torch.from_numpy(ref.UE8M0_TABLE[first.w_blocks].astype(np.float32))
    _, before, _ = vllm_megaattn.prepare_weight(w, blocks)
    w.copy_(e4m3(second.w))
    blocks.copy_(torch.from_numpy(ref.UE8M0_TABLE[second.w_blocks].astype(np.float32)))
    new_w, after, _ = vllm_megaattn.prepare_weight(w, blocks)
    assert (codes(after) == second.w_blocks).all()
    assert not same_bits(before, after)
    assert same_bits(new_w, e4m3(second.w))


# ---- several groups in two dimensions ----------------------------------------------------------------------------


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize(
    ("groups", "n", "form"), [(3, 96, "128x128"), (2, 48, "32x32"), (4, 128, "32x32"), (2, 64, "1x32")]
)
def test_stacked_groups_equal_those_of_three_dimensions(groups, n, form, hopper, rng, monkeypatch):
    """[G*N, K] with [G*rows, cols]: blocks end with their group, also where N is no multiple of their rows."""
    if hopper:
        monkeypatch.setattr(ops.selector, "device_key", lambda device: "sm90")
    problem = gentle_problem(rng, groups, n, 256, form)
    w, scale = e4m3(problem.w), u8(problem.w_blocks)
    expected_w, expected_scale, expected = vllm_megaattn.prepare_weight(w, scale)
    for flat_scale in (scale.flatten(0, 1), scale):
        for given in (groups, None) if flat_scale.dim() == 3 else (groups,):
            new_w, new_scale, report = vllm_megaattn.prepare_weight(w.flatten(0, 1), flat_scale, groups=given)
            assert same_bits(new_w, expected_w.flatten(0, 1))
            assert new_scale.dim() == flat_scale.dim()
            assert same_bits(new_scale.view(expected_scale.shape), expected_scale)
            assert report == expected
    if hopper and n % 32 == 0:
        assert expected["form"] == "32 rows x K"
    new_w, new_scale, report = vllm_megaattn.prepare_weight(w, scale.flatten(0, 1))
    assert same_bits(new_w, expected_w)
    assert same_bits(new_scale.view(expected_scale.shape), expected_scale)
    x = problem.args()[:2]
    by_op = vllm_megaattn.einsum_fp8_bf16(*x, expected_w, expected_scale)
    assert same_bits(vllm_megaattn.einsum_fp8_bf16(*x, new_w.flatten(0, 1), new_scale), by_op)


def test_scales_that_can_be_read_in_two_ways_are_refused():
    """288 rows with 3 rows of scales: one matrix in blocks of 128 rows, or three of 96 with a block each."""
    w = torch.zeros((288, 256), dtype=E4M3)
    scale = torch.full((3, 2), 127, dtype=torch.uint8)
    message = r"w_scale \[3, 2\] fits w \[288, 256\] as one matrix \(groups=1\) and as 3 stacked ones \(groups=3\)"
    with pytest.raises(ValueError, match=message):
        vllm_megaattn.prepare_weight(w, scale)
    for groups in (1, 3):
        assert same_bits(vllm_megaattn.prepare_weight(w, scale, groups=groups)[1], scale)


@pytest.mark.parametrize(
    ("w_shape", "scale_shape", "groups", "message"),
    [
        (
            (96, 256),
            (4, 8),
            None,
            r"w_scale must hold the scales of 1 x \[96, 256\].*got \[4, 8\]; groups= splits a w",
        ),
        ((96, 256), (3, 8), 2, r"w_scale must hold the scales of 2 x \[48, 256\].*got \[3, 8\]$"),
        ((96, 256), (2, 8), 5, "groups must be a positive divisor of the 96 rows of w, got 5"),
        ((96, 256), (2, 8), 0, "groups must be a positive divisor of the 96 rows of w, got 0"),
        ((2, 48, 256), (2, 2, 8), 4, r"groups must be 2 as in w \[2, 48, 256\], got 4"),
        ((96, 256), (5, 2, 8), None, "groups must be a positive divisor of the 96 rows of w, got 5"),
        ((64, 96), (2, 3), 2, "w must have K a positive multiple of 128 for groups of weights, got 96"),
    ],
)
def test_groups_that_do_not_fit_are_refused(w_shape, scale_shape, groups, message):
    w, scale = torch.zeros(w_shape, dtype=E4M3), torch.full(scale_shape, 127, dtype=torch.uint8)
    with pytest.raises(ValueError, match=rf"prepare_weight: {message}"):
        vllm_megaattn.prepare_weight(w, scale, groups=groups)


# ---- NaN ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hopper", [False, True])
def test_nan_is_reported(hopper, rng, monkeypatch):
    if hopper:
        monkeypatch.setattr(ops.selector, "device_key", lambda device: "sm90")
    problem = gentle_problem(rng, 2, 64, 256, "32x32")
    report = vllm_megaattn.prepare_weight(e4m3(problem.w), u8(problem.w_blocks))[2]
    assert (report["nan_elements"], report["nan_scales"]) == (0, 0)
    assert not [key for key in report if key.startswith("first_nan")]
    problem.w[1, 2, 3], problem.w[1, 63, 255] = 0x7F, 0xFF
    problem.w_blocks[1, 0, 7] = 0xFF
    new_w, _, report = vllm_megaattn.prepare_weight(e4m3(problem.w), u8(problem.w_blocks))
    assert (report["nan_elements"], report["first_nan_element"]) == (2, [1, 2, 3])
    assert (report["nan_scales"], report["first_nan_scale"]) == (1, [1, 0, 7])
    assert (codes(new_w)[1, 2, 3] & 0x7F) == 0x7F  # kept, not laundered


def test_nan_scales_are_found_in_every_form(rng):
    """In packed words and in tiles, whose padding may hold anything."""
    problem = gentle_problem(rng, 1, 96, 256, "1x32")
    problem.w_scale[0, 40, 5] = 0xFF
    packed = torch.from_numpy(ref.pack_words(problem.w_scale))
    report = vllm_megaattn.prepare_weight(e4m3(problem.w), packed)[2]
    assert (report["nan_scales"], report["first_nan_scale"]) == (1, [0, 40, 5])
    tiles = torch.from_numpy(ref.f8_128x4_pack(problem.w_scale[0]).copy())
    tiles[ref.f8_128x4_offset(100, 3, 8)] = 0xFF  # row 100 of 96
    report = vllm_megaattn.prepare_weight(e4m3(problem.w[0]), tiles)[2]
    assert (report["nan_scales"], report["first_nan_scale"]) == (1, [40, 5])


# ---- the form for Hopper ---------------------------------------------------------------------------------------


def gentle_problem(rng, groups: int, n: int, k: int, form: str = "32x32"):
    """Scales within two binades of each other and elements far above the subnormals: re-blocking is exact."""
    problem = make_matmul(rng, 1, groups, n, k, form)
    problem.w[:] = (rng.integers(0x28, 0x7E, problem.w.shape) | rng.integers(0, 2, problem.w.shape) << 7).astype(
        np.uint8
    )
    problem.w_blocks[:] = 120 + problem.w_blocks % 3
    block_rows, block_cols = WEIGHT_FORMS[form]
    problem.w_scale = ref.expand_blocks(problem.w_blocks, n, k, block_rows, block_cols or k)
    return problem


@pytest.mark.usefixtures("as_hopper")
@pytest.mark.parametrize("form", WEIGHT_FORMS)
@pytest.mark.parametrize("dims", [2, 3])
def test_hopper_form_is_exact_and_idempotent(form, dims, rng):
    groups = 2 if dims == 3 else 1
    problem = gentle_problem(rng, groups, 128, 512, form)
    w, scale = e4m3(problem.w), u8(problem.w_blocks)
    if dims == 2:
        w, scale = w[0], scale[0]
    new_w, new_scale, report = vllm_megaattn.prepare_weight(w, scale)
    lead = (groups,) if dims == 3 else ()
    assert new_w.shape == w.shape
    assert new_scale.shape == (*lead, 4, 1)
    assert new_scale.dtype == torch.uint8
    assert report["changed"] == 0
    assert report["relative_error"] == 0.0
    assert report["elements"] == w.numel()
    per_row = ref.expand_blocks(codes(new_scale).reshape(groups, 4, 1), 128, 512, 32, 512)
    after = ref.dequantize(codes(new_w).reshape(problem.w.shape), per_row)
    assert (after == ref.dequantize(problem.w, problem.w_scale)).all()

    again_w, again_scale, _ = vllm_megaattn.prepare_weight(new_w, new_scale)  # B94
    assert same_bits(again_w, new_w)
    assert same_bits(again_scale, new_scale)


@pytest.mark.usefixtures("as_hopper")
def test_hopper_form_reports_what_it_changed(rng):
    """A few elements deep in the subnormals: changed, counted, and below the limit."""
    problem = gentle_problem(rng, 1, 64, 256)
    problem.w[0, 0, :5] = 0x01  # 2^-9: a block scale that doubles loses it (ties to even: 2^-10 -> 0)
    problem.w_blocks[0, 0] = 120
    problem.w_blocks[0, 0, 7] = 121
    problem.w_scale = ref.expand_blocks(problem.w_blocks, 64, 256, 32, 32)
    _, scale, report = vllm_megaattn.prepare_weight(e4m3(problem.w), u8(problem.w_blocks))
    assert scale.shape == (1, 2, 1)
    assert report["changed"] == 5
    before = ref.dequantize(problem.w, problem.w_scale)
    expected = np.sqrt(5) * 2.0 ** (-9 + 120 - 127) / np.linalg.norm(before)
    assert report["relative_error"] == pytest.approx(expected, rel=1e-9)
    assert 0 < expected < MAX_REBLOCK_ERROR


@pytest.mark.usefixtures("as_hopper")
def test_weights_that_would_change_keep_their_scales(rng):
    """One live element under a scale 13 binades above those of its neighbours, all of which would be lost."""
    problem = gentle_problem(rng, 1, 32, 256)
    problem.w[:] = 0x38
    problem.w[0, :, 32:64] = 0
    problem.w[0, 5, 40] = 0x01
    problem.w_blocks[:] = 127
    problem.w_blocks[0, 0, 1] = 140
    w, scale = e4m3(problem.w), u8(problem.w_blocks)
    new_w, new_scale, report = vllm_megaattn.prepare_weight(w, scale)
    assert same_bits(new_w, w)
    assert same_bits(new_scale, scale)
    assert report["form"] == "as given"
    assert report["changed"] == 0
    lost = 7 * 32 * 32  # ones
    assert report["refused_relative_error"] == pytest.approx(np.sqrt(lost / (lost + 16.0**2)))


@pytest.mark.usefixtures("as_hopper")
def test_zero_and_nan_blocks_do_not_touch_their_neighbours(rng):
    """A NaN scale poisons 32 x 32 weights and no more, and a block of zeros under a huge scale costs no precision."""
    problem = gentle_problem(rng, 1, 64, 256)
    problem.w_blocks[0, 1, 3] = 255
    problem.w_blocks[0, 0, 5] = 250
    problem.w[0, :32, 160:192] = 0
    problem.w_scale = ref.expand_blocks(problem.w_blocks, 64, 256, 32, 32)
    new_w, new_scale, report = vllm_megaattn.prepare_weight(e4m3(problem.w), u8(problem.w_blocks))
    assert new_scale.shape == (1, 2, 1)
    assert report["relative_error"] == 0.0
    after = ref.dequantize(codes(new_w), ref.expand_blocks(codes(new_scale), 64, 256, 32, 256))
    np.testing.assert_array_equal(
        after, ref.dequantize(problem.w, problem.w_scale)
    )  # NaN where it was, and only there


@pytest.mark.usefixtures("as_hopper")
def test_packed_and_tiled_scales_are_understood(rng):
    problem = gentle_problem(rng, 1, 128, 512, "1x32")
    expected = vllm_megaattn.prepare_weight(e4m3(problem.w), u8(problem.w_blocks))[:2]
    packed = torch.from_numpy(ref.pack_words(problem.w_scale))
    assert all(map(same_bits, vllm_megaattn.prepare_weight(e4m3(problem.w), packed)[:2], expected))
    tiled = torch.from_numpy(ref.f8_128x4_pack(problem.w_scale[0]))
    flat = vllm_megaattn.prepare_weight(e4m3(problem.w[0]), tiled)[:2]
    assert all(same_bits(a, b[0]) for a, b in zip(flat, expected, strict=True))


@pytest.mark.usefixtures("as_hopper")
def test_prepared_weights_give_the_same_results(rng):
    """On the CPU the einsum of prepared weights equals that of the original ones bit for bit where nothing changed."""
    problem = gentle_problem(rng, 2, 128, 512)
    activations = problem.args()[:2]
    new_w, new_scale, _ = vllm_megaattn.prepare_weight(e4m3(problem.w), u8(problem.w_blocks))
    expected = vllm_megaattn.einsum_fp8_bf16(*problem.args())
    got = vllm_megaattn.einsum_fp8_bf16(*activations, new_w, new_scale)
    error = (got.double() - expected.double()).norm() / expected.double().norm()
    assert error < 1e-3  # the FP32 sums are formed in another order of magnitudes, not from other values


# ---- the surroundings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", [2, 3])
def test_the_route_of_wo_b_has_no_say(dims, rng, monkeypatch):
    """Weights are prepared on machines without the device that VLLM_MEGAATTN_WO_B speaks of; nonsense is refused."""
    w, scale = rng.integers(0, 120, (2, 64, 256), np.uint8), rng.integers(118, 130, (2, 2, 8), np.uint8)
    w, scale = (e4m3(w), u8(scale)) if dims == 3 else (e4m3(w[0]), u8(scale[0]))
    monkeypatch.setenv("VLLM_MEGAATTN_WO_B", "cublaslt")
    got_w, got_scale, _ = vllm_megaattn.prepare_weight(w, scale)
    assert same_bits(got_w, w)
    assert same_bits(got_scale, scale)
    with pytest.raises(ValueError, match=r"^prepare_weight: w_scale must hold the scales of"):
        vllm_megaattn.prepare_weight(w, scale[..., :3])
    monkeypatch.setenv("VLLM_MEGAATTN_WO_B", "x")
    with pytest.raises(ValueError, match="VLLM_MEGAATTN_WO_B must be one of auto, own, cublaslt, got 'x'"):
        vllm_megaattn.prepare_weight(w, scale)


def test_columns_that_are_no_blocks_are_refused():
    for cols in (0, 40):
        w, scale = torch.zeros((32, cols), dtype=E4M3), torch.zeros((1, 1), dtype=torch.uint8)
        with pytest.raises(
            ValueError, match=rf"^prepare_weight: w must have K a positive multiple of 32 .*got {cols}$"
        ):
            vllm_megaattn.prepare_weight(w, scale)


@pytest.mark.parametrize("key", ["cpu", "sm90", "sm100"])
def test_default_device_does_not_matter(key, rng, monkeypatch):
    """torch.set_default_device is for what the caller allocates; a meta tensor of ours would lose the data."""
    monkeypatch.setattr(ops.selector, "device_key", lambda device: key)
    w = e4m3(rng.integers(0, 120, (2, 64, 256), np.uint8))
    scale = u8(rng.integers(118, 130, (2, 2, 8), np.uint8))
    expected = vllm_megaattn.prepare_weight(w, scale)
    with torch.device("meta"):
        got = vllm_megaattn.prepare_weight(w, scale)
    assert same_bits(got[0], expected[0])
    assert same_bits(got[1], expected[1])
    assert got[2] == expected[2]
