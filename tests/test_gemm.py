"""mxfp8_gemm_wo_b (wo_b): against exact sums, for every scale form, with padding that must not matter."""

from __future__ import annotations

import numpy as np
import pytest
import reference as ref
import torch
from helpers import (
    E4M3,
    E8M0,
    POISON,
    WEIGHT_FORMS,
    Matmul,
    check_product,
    codes,
    e4m3,
    f8_128x4,
    make_all_terms_visible,
    make_matmul,
    poisoned,
    same_bits,
    strided,
    u8,
)
from hypothesis import given
from hypothesis import strategies as st

import vllm_megaattn


def gemm_args(problem: Matmul, device: str = "cpu", padding: int = 0) -> tuple[torch.Tensor, ...]:
    """(z, z_scale, w, w_scale) of a one-group problem; weight scales as blocks."""
    return (
        e4m3(problem.x[:, 0], device),
        f8_128x4(problem.x_scale[:, 0], device, padding),
        e4m3(problem.w[0], device),
        u8(problem.w_blocks[0], device),
    )


def check(problem: Matmul, args: tuple[torch.Tensor, ...], device: str = "cpu") -> torch.Tensor:
    tokens, _, n, _ = problem.shape
    y = vllm_megaattn.mxfp8_gemm_wo_b(*args)
    assert y.shape == (tokens, n)
    assert y.dtype == torch.bfloat16
    exact, magnitude = problem.exact()
    check_product(y, exact, magnitude, device)
    return y


# ---- shapes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 5, 8, 31, 32, 33, 64, 127, 128, 129, 300])
def test_token_counts(tokens, device, rng):
    problem = make_matmul(rng, tokens, 1, n=160, k=512)
    check(problem, gemm_args(problem, device), device)


@pytest.mark.parametrize("k", [32, 64, 96, 128, 288, 576, 1056, 3072])
@pytest.mark.parametrize("n", [32, 96, 160, 768])
def test_row_and_column_counts(n, k, device, rng):
    """Column counts that end inside a scale tile (B21, B23, B26) and shapes on record (B28, B56, B57, B58)."""
    problem = make_matmul(rng, 9, 1, n=n, k=k)
    check(problem, gemm_args(problem, device), device)


@pytest.mark.parametrize(("n", "k"), [(5120, 1024), (5152, 128), (33, 256), (1, 32)])
def test_wide_narrow_and_odd_weights(n, k, device, rng):
    problem = make_matmul(rng, 3, 1, n=n, k=k)
    if device == "cuda" and n % 8:  # rows of y are stored 16 bytes at a time
        with pytest.raises(ValueError, match=f"N must be a multiple of 8, got {n}"):
            vllm_megaattn.mxfp8_gemm_wo_b(*gemm_args(problem, device))
        return
    check(problem, gemm_args(problem, device), device)


@given(
    tokens=st.integers(0, 40),
    n=st.integers(1, 100),
    blocks=st.integers(1, 14),
    form=st.sampled_from(list(WEIGHT_FORMS)),
    adversarial=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape(tokens, n, blocks, form, adversarial, seed):
    rng = np.random.default_rng(seed)
    problem = make_matmul(rng, tokens, 1, n, 32 * blocks, form, adversarial)
    check(problem, gemm_args(problem, padding=0xFF))


# ---- scale operands --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", WEIGHT_FORMS)
@pytest.mark.parametrize(("n", "k"), [(128, 256), (160, 1152), (96, 288)])
def test_weight_scale_forms(form, n, k, device, rng):
    problem = make_matmul(rng, 11, 1, n=n, k=k, form=form)
    args = gemm_args(problem, device)
    expected = check(problem, args, device)
    blocks = args[3]
    forms = {
        "3-D": blocks[None],
        "e8m0": blocks.view(E8M0),
        "column major": blocks.t().contiguous().t(),
        "slice": torch.nn.functional.pad(blocks, (1, 2, 1, 1), value=255)[1:-1, 1:-2],
        "F8_128x4": f8_128x4(problem.w_scale[0], device),
        "F8_128x4 e8m0": f8_128x4(problem.w_scale[0], device).view(E8M0),
        "F8_128x4, padding 0xFF": f8_128x4(problem.w_scale[0], device, 0xFF),
    }
    if k % 128 == 0:
        packed = torch.from_numpy(ref.pack_words(problem.w_scale[0])).to(device)
        forms["packed"] = packed
        forms["packed, MN-major"] = packed.t().contiguous().t()
    for name, w_scale in forms.items():
        assert same_bits(vllm_megaattn.mxfp8_gemm_wo_b(*args[:3], w_scale), expected), name


def test_z_scale_as_int32_tiles_and_e8m0(device, rng):
    problem = make_matmul(rng, 130, 1, n=64, k=384)
    z, z_scale, w, w_scale = gemm_args(problem, device)
    expected = check(problem, (z, z_scale, w, w_scale), device)
    for view in (z_scale.view(torch.int32).view(2, 3, 128), z_scale.view(E8M0)):
        assert same_bits(vllm_megaattn.mxfp8_gemm_wo_b(z, view, w, w_scale), expected)


@pytest.mark.parametrize(("tokens", "k"), [(1, 32), (33, 96), (127, 288), (129, 576), (200, 1056)])
def test_padding_of_the_scales_does_not_matter(tokens, k, device, rng):
    """B22: 0xFF (NaN) in every padding row and column of z's and w's scales changes nothing."""
    problem = make_matmul(rng, tokens, 1, n=160, k=k)
    y = check(problem, gemm_args(problem, device, padding=0), device)
    for padding in (0xFF, 0x7F):
        z, z_scale, w, _ = gemm_args(problem, device, padding)
        w_scale = f8_128x4(problem.w_scale[0], device, padding)
        assert same_bits(vllm_megaattn.mxfp8_gemm_wo_b(z, z_scale, w, w_scale), y)


def test_rows_behind_the_last_token_do_not_matter(device, rng):
    """B19: z is the top of a buffer whose other rows are NaN."""
    problem = make_matmul(rng, 129, 1, n=64, k=256)
    z, z_scale, w, w_scale = gemm_args(problem, device, padding=0xFF)
    buffer = poisoned((256, 256), E4M3, device, 0x7F)
    buffer[:129].copy_(z)
    expected = check(problem, (z, z_scale, w, w_scale), device)
    assert same_bits(vllm_megaattn.mxfp8_gemm_wo_b(buffer[:129], z_scale, w, w_scale), expected)


def test_each_scale_byte_changes_exactly_its_own_results(device, rng):
    """B96: mutate one byte of the tiled layout; the row (of z) or the column (of w) it scales changes, nothing else."""
    tokens, n, k = 140, 136, 288
    problem = make_matmul(rng, tokens, 1, n, k, form="1x32")
    make_all_terms_visible(problem, rng)
    z, z_scale, w, _ = gemm_args(problem, device)
    w_scale = f8_128x4(problem.w_scale[0], device)
    base = codes(vllm_megaattn.mxfp8_gemm_wo_b(z, z_scale, w, w_scale))
    for row, col in [(0, 0), (1, 0), (32, 1), (65, 3), (127, 4), (128, 8), (131, 7)]:
        offset = ref.f8_128x4_offset(row, col, k // 32)
        for target, axis in ((z_scale, 0), (w_scale, 1)):
            mutated = target.clone()
            mutated[offset] += 6
            scales = (mutated, w, w_scale) if axis == 0 else (z_scale, w, mutated)
            changed = codes(vllm_megaattn.mxfp8_gemm_wo_b(z, *scales)) != base
            expected = np.zeros_like(changed)
            expected[(row, slice(None)) if axis == 0 else (slice(None), row)] = True
            assert (changed == expected).all(), (row, col, axis)


def test_a_padding_byte_changes_nothing_where_a_live_byte_does(device, rng):
    """The mutation test above from the other side: no padding byte of the tile has an effect, one by one."""
    tokens, n, k = 3, 32, 96
    problem = make_matmul(rng, tokens, 1, n, k, form="1x32")
    z, z_scale, w, _ = gemm_args(problem, device)
    w_scale = f8_128x4(problem.w_scale[0], device)
    base = codes(vllm_megaattn.mxfp8_gemm_wo_b(z, z_scale, w, w_scale))
    live = set(ref.f8_128x4_index(tokens, 3).ravel().tolist())
    effects = set()
    for offset in range(512):
        mutated = z_scale.clone()
        mutated[offset] = 255
        if not (codes(vllm_megaattn.mxfp8_gemm_wo_b(z, mutated, w, w_scale)) == base).all():
            effects.add(offset)
    assert effects == live


def test_scale_operands_are_not_exchanged(device, rng):
    """B34."""
    problem = make_matmul(rng, 4, 1, n=64, k=256)
    problem.x_scale[:] = 130 + np.arange(4)[:, None, None]
    problem.w_blocks[:] = 122 - np.arange(2)[None, :, None]
    problem.w_scale = ref.expand_blocks(problem.w_blocks, 64, 256, 32, 32)
    check(problem, gemm_args(problem, device), device)


def test_batched_sizes_are_not_confused(device, rng):
    """B24: two buffers of 129 rows padded one by one hold 65536 bytes, 258 rows together 49152. Only the second is
    this op's layout, and the first is refused by its size."""
    problem = make_matmul(rng, 258, 1, n=32, k=4096)
    z, z_scale, w, w_scale = gemm_args(problem, device)
    assert z_scale.numel() == 49152
    check(problem, (z, z_scale, w, w_scale), device)
    with pytest.raises(ValueError, match=r"z_scale.*49152.*65536"):
        vllm_megaattn.mxfp8_gemm_wo_b(z, torch.zeros(65536, dtype=torch.uint8, device=device), w, w_scale)


# ---- isolation and reproducibility -----------------------------------------------------------------------------


@pytest.mark.parametrize("poison", ["scale", "element"])
def test_nan_in_one_token_stays_there(poison, device, rng):
    problem = make_matmul(rng, 130, 1, n=64, k=288)
    clean = codes(vllm_megaattn.mxfp8_gemm_wo_b(*gemm_args(problem, device)))
    if poison == "scale":
        problem.x_scale[7, 0, 8] = 255
    else:
        problem.x[7, 0, 200] = 0x7F
    y = codes(vllm_megaattn.mxfp8_gemm_wo_b(*gemm_args(problem, device)))
    bad = np.arange(130) == 7
    assert np.isnan(ref.bf16_decode(y[bad])).all()
    assert (y[~bad] == clean[~bad]).all()


def test_nan_weight_scale_stays_in_its_rows(device, rng):
    problem = make_matmul(rng, 9, 1, n=96, k=288)
    clean = codes(vllm_megaattn.mxfp8_gemm_wo_b(*gemm_args(problem, device)))
    problem.w_blocks[0, 1, 8] = 255
    y = codes(vllm_megaattn.mxfp8_gemm_wo_b(*gemm_args(problem, device)))
    bad = np.arange(96) // 32 == 1
    assert np.isnan(ref.bf16_decode(y[:, bad])).all()
    assert (y[:, ~bad] == clean[:, ~bad]).all()


def test_poisoned_z_of_the_quantiser_reaches_only_its_token(device, rng):
    """What rule 4 writes (0xFF with 0x7F) makes the whole row of y NaN, so a poisoned row cannot look healthy."""
    bits = ref.bf16_encode(rng.standard_normal((5, 256)))
    bits[3, 77] = 0x7F80
    z = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).to(device)
    problem = make_matmul(rng, 5, 1, n=64, k=256)
    y = vllm_megaattn.mxfp8_gemm_wo_b(
        *vllm_megaattn.mxfp8_quantize_sfd128x4(z), e4m3(problem.w[0], device), u8(problem.w_blocks[0], device)
    )
    assert (np.isnan(ref.bf16_decode(codes(y))).all(axis=1) == (np.arange(5) == 3)).all()
    assert (np.isnan(ref.bf16_decode(codes(y))).any(axis=1) == (np.arange(5) == 3)).all()


def test_rows_do_not_depend_on_the_batch(device, rng):
    """B85."""
    problem = make_matmul(rng, 300, 1, n=160, k=1056)
    whole = vllm_megaattn.mxfp8_gemm_wo_b(*gemm_args(problem, device))
    for tokens in (1, 2, 7, 8, 64, 127, 128, 129):
        part = vllm_megaattn.mxfp8_gemm_wo_b(*gemm_args(problem.tokens(slice(0, tokens)), device))
        assert same_bits(part, whole[:tokens]), tokens
        rows = rng.permutation(300)[:tokens]
        part = vllm_megaattn.mxfp8_gemm_wo_b(*gemm_args(problem.tokens(rows), device))
        assert same_bits(part, whole[torch.from_numpy(rows).to(device)]), tokens


def test_threads_do_not_change_the_bits(rng):
    args = gemm_args(make_matmul(rng, 70, 1, n=768, k=1056))
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(vllm_megaattn.mxfp8_gemm_wo_b(*args))
    finally:
        torch.set_num_threads(before)
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])


def test_promised_z_span_does_not_change_the_result(device, rng):
    problem = make_matmul(rng, 17, 1, n=256, k=512, form="prepared")
    problem.x_scale[:] = np.repeat(problem.x_scale[:, :, ::8], 8, axis=2)
    for z_span in (32, 128, 256, 512):
        y = vllm_megaattn.mxfp8_gemm_wo_b(*gemm_args(problem, device), z_span=z_span)
        check_product(y, *problem.exact(), device)


# ---- operands and outputs --------------------------------------------------------------------------------------


def test_strided_operands(device, rng):
    """B82: row pitches of z and w."""
    problem = make_matmul(rng, 9, 1, n=64, k=256)
    z, z_scale, w, w_scale = gemm_args(problem, device)
    expected = check(problem, (z, z_scale, w, w_scale), device)
    every_second = torch.stack([z.view(torch.uint8), torch.full_like(z.view(torch.uint8), 0x7F)], 1).flatten(0, 1)[
        ::2
    ]
    for zv in (strided(z, 272), every_second.view(E4M3)):
        for wv in (w, strided(w, 320)):
            assert same_bits(vllm_megaattn.mxfp8_gemm_wo_b(zv, z_scale, wv, w_scale), expected)


def test_given_output_is_filled_and_guarded(device, rng):
    tokens, n, guard = 33, 160, 4096
    problem = make_matmul(rng, tokens, 1, n=n, k=544)
    args = gemm_args(problem, device)
    expected = check(problem, args, device)
    raw = poisoned((2 * tokens * n + 2 * guard,), torch.uint8, device)
    y = raw[guard:-guard].view(torch.bfloat16).view(tokens, n)
    assert vllm_megaattn.mxfp8_gemm_wo_b(*args, out=y) is y
    assert same_bits(y, expected)
    assert (codes(raw[:guard]) == POISON).all()
    assert (codes(raw[-guard:]) == POISON).all()
    wide = poisoned((tokens, n + 32), torch.bfloat16, device)
    vllm_megaattn.mxfp8_gemm_wo_b(*args, out=wide[:, :n])
    assert same_bits(wide[:, :n].contiguous(), expected)
    assert (codes(wide[:, n:].contiguous()).view(np.uint8) == POISON).all()


def test_inputs_are_not_changed(device, rng):
    args = gemm_args(make_matmul(rng, 33, 1, n=128, k=256), device)
    before = [codes(t).copy() for t in args]
    vllm_megaattn.mxfp8_gemm_wo_b(*args)
    assert all((codes(t) == saved).all() for t, saved in zip(args, before, strict=True))
