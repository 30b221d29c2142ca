"""einsum_fp8_bf16 and einsum_fp8_sfd128x4 (wo_a): against exact sums, and against each other bit for bit."""

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
    make_all_terms_visible,
    make_matmul,
    poisoned,
    same_bits,
    strided,
    u8,
    words,
)
from hypothesis import given
from hypothesis import strategies as st

import vllm_megaattn

SPANS = (32, 128, 256)


def check(problem: Matmul, args: tuple[torch.Tensor, ...], device: str = "cpu", spans=SPANS) -> torch.Tensor:
    """BF16 result against the exact sums; fused results against the reference quantiser on that BF16 result."""
    tokens, groups, n, _ = problem.shape
    z = vllm_megaattn.einsum_fp8_bf16(*args)
    assert z.shape == (tokens, groups, n)
    assert z.dtype == torch.bfloat16
    check_product(z, *problem.exact(), device)
    for span in spans:
        if n % span == 0:
            check_fused(codes(z).reshape(tokens, groups * n), args, span)
    return z


def check_fused(z_bits: np.ndarray, args: tuple[torch.Tensor, ...], span: int) -> None:
    tokens, cols = z_bits.shape
    q, q_scale = vllm_megaattn.einsum_fp8_sfd128x4(*args, scale_span=span)
    assert q.shape == (tokens, cols)
    assert q.dtype == E4M3
    assert q_scale.dtype == torch.uint8
    assert q_scale.shape == (ref.f8_128x4_bytes(tokens, cols // 32),)
    data, scale = ref.quantize(z_bits, span)
    np.testing.assert_array_equal(codes(q_scale), ref.f8_128x4_pack(scale))
    np.testing.assert_array_equal(codes(q), data)


# ---- shapes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 5, 8, 31, 32, 33, 64, 127, 128, 129, 300])
def test_token_counts(tokens, device, rng):
    problem = make_matmul(rng, tokens, groups=2, n=256, k=512)
    check(problem, problem.args(device), device)


def test_every_token_count_up_to_130(device, rng):
    """B55: tile tails. Small matrices, each result a prefix of the largest one."""
    problem = make_matmul(rng, 130, groups=2, n=64, k=256)
    z = check(problem, problem.args(device), device, spans=(32,))
    for tokens in range(1, 130):
        args = problem.tokens(slice(0, tokens)).args(device)
        part = vllm_megaattn.einsum_fp8_bf16(*args)
        assert same_bits(part, z[:tokens]), tokens
        check_fused(codes(part).reshape(tokens, -1), args, 32)


@pytest.mark.parametrize("groups", [1, 2, 4, 8, 16])
def test_group_counts(groups, device, rng):
    problem = make_matmul(rng, 37, groups, n=128, k=256)
    check(problem, problem.args(device), device)


@pytest.mark.parametrize("k", [128, 256, 384, 640, 1152, 4096])
@pytest.mark.parametrize("n", [32, 96, 128, 160, 384, 768])
def test_row_and_column_counts(n, k, device, rng):
    """N and K with odd numbers of 128-wide tiles, and N that ends inside a tile (B28, B54, B56, B57, B58)."""
    problem = make_matmul(rng, 9, groups=2, n=n, k=k)
    check(problem, problem.args(device), device)


def test_rows_that_are_no_multiple_of_32(device, rng):
    problem = make_matmul(rng, 5, groups=2, n=40, k=128, form="1x32")
    check(problem, problem.args(device), device)
    with pytest.raises(ValueError, match=r"\bw\b.*32.*40"):
        vllm_megaattn.einsum_fp8_sfd128x4(*problem.args(device))


@given(
    tokens=st.integers(0, 20),
    groups=st.integers(1, 5),
    rows=st.integers(1, 9),
    words_of_k=st.integers(1, 5),
    form=st.sampled_from(list(WEIGHT_FORMS)),
    adversarial=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape(tokens, groups, rows, words_of_k, form, adversarial, seed):
    rng = np.random.default_rng(seed)
    problem = make_matmul(rng, tokens, groups, 32 * rows, 128 * words_of_k, form, adversarial)
    check(problem, problem.args())


# ---- scale operands --------------------------------------------------------------------------------------------


def weight_scale_tensors(problem: Matmul, form: str, device: str) -> dict[str, torch.Tensor]:
    """The same scales as every kind of tensor the einsum takes."""
    blocks = u8(problem.w_blocks, device)
    groups, rows, cols = blocks.shape
    wide = torch.full((groups, rows + 1, cols + 3), 255, dtype=torch.uint8, device=device)
    wide[:, :rows, :cols] = blocks
    tensors = {
        "3-D": blocks,
        "3-D e8m0": blocks.view(E8M0),
        "2-D": blocks.view(groups * rows, cols),
        "2-D e8m0": blocks.view(groups * rows, cols).view(E8M0),
        "column major": blocks.transpose(1, 2).contiguous().transpose(1, 2),
        "slice of a wider tensor": wide[:, :rows, :cols],
    }
    if form == "1x32":
        packed = torch.from_numpy(ref.pack_words(problem.w_scale)).to(device)
        tensors["packed"] = packed
        tensors["packed 2-D"] = packed.view(-1, packed.shape[2])
        tensors["packed, MN-major"] = packed.transpose(1, 2).contiguous().transpose(1, 2)
        tensors["packed, every second"] = packed.repeat_interleave(2, dim=1)[:, ::2]
    return tensors


@pytest.mark.parametrize("form", WEIGHT_FORMS)
@pytest.mark.parametrize(("n", "k"), [(128, 256), (256, 1152), (384, 640)])
def test_weight_scale_forms(form, n, k, device, rng):
    problem = make_matmul(rng, 11, groups=3, n=n, k=k, form=form)
    x, x_scale, w, _ = problem.args(device)
    expected = None
    for name, w_scale in weight_scale_tensors(problem, form, device).items():
        args = (x, x_scale, w, w_scale)
        if expected is None:
            expected = check(problem, args, device)
        else:
            assert same_bits(vllm_megaattn.einsum_fp8_bf16(*args), expected), name
            check_fused(codes(expected).reshape(11, -1), args, 32)


@pytest.mark.parametrize("form", ["32x32", "128x128", "prepared"])
def test_partial_last_block(form, device, rng):
    """N = 160 and 96: the last block of rows is cut (128-row blocks) or the count is odd."""
    for n in (96, 160):
        problem = make_matmul(rng, 4, groups=2, n=n, k=384, form=form)
        check(problem, problem.args(device), device)


def test_expanded_weight_scale(device, rng):
    """Views of stride 0: one block of scales for all groups, one byte for a whole row."""
    problem = make_matmul(rng, 6, groups=1, n=64, k=256, form="32x32")
    x = np.repeat(problem.x, 4, axis=1)
    x_scale = np.repeat(problem.x_scale, 4, axis=1)
    w = np.repeat(problem.w, 4, axis=0)
    one = u8(problem.w_blocks, device)
    args = (e4m3(x, device), words(x_scale, device), e4m3(problem.w, device).expand(4, -1, -1), one.expand(4, -1, -1))
    check(Matmul(x, x_scale, w, np.repeat(problem.w_scale, 4, axis=0), one.cpu().numpy()), args, device)

    per_row = np.repeat(problem.w_blocks[:, :, :1], 8, axis=2)
    flat = Matmul(
        problem.x, problem.x_scale, problem.w, ref.expand_blocks(per_row, 64, 256, 32, 32), problem.w_blocks[:, :, :1]
    )
    x, x_scale, w, _ = problem.args(device)
    check(flat, (x, x_scale, w, u8(per_row[:, :, :1].copy(), device).expand(-1, -1, 8)), device)


def test_each_scale_byte_changes_exactly_its_own_results(device, rng):
    """B96: mutate one scale byte at a time; only what it scales may change, and it must change."""
    tokens, groups, n, k = 5, 2, 96, 256
    problem = make_matmul(rng, tokens, groups, n, k)
    make_all_terms_visible(problem, rng)
    args = problem.args(device)
    base = codes(vllm_megaattn.einsum_fp8_bf16(*args))
    for t, g, block in [(0, 0, 0), (0, 1, 7), (4, 0, 3), (2, 1, 4), (3, 0, 6)]:
        scale = problem.x_scale.copy()
        scale[t, g, block] += 6
        changed = codes(vllm_megaattn.einsum_fp8_bf16(args[0], words(scale, device), *args[2:])) != base
        expected = np.zeros_like(changed)
        expected[t, g] = True
        assert (changed == expected).all(), (t, g, block)
    for g, row_block, block in [(0, 0, 0), (1, 2, 7), (0, 1, 5), (1, 0, 2)]:
        scale = problem.w_blocks.copy()
        scale[g, row_block, block] += 6
        changed = codes(vllm_megaattn.einsum_fp8_bf16(*args[:3], u8(scale, device))) != base
        expected = np.zeros_like(changed)
        expected[:, g, row_block * 32 : row_block * 32 + 32] = True
        assert (changed == expected).all(), (g, row_block, block)


def test_operand_scales_are_not_exchanged(device, rng):
    """B34: x scales and w scales with values that tell them apart."""
    problem = make_matmul(rng, 4, groups=2, n=64, k=256)
    problem.x_scale[:] = 130 + np.arange(4)[:, None, None]
    problem.w_blocks[:] = 122 - np.arange(2)[None, :, None]
    problem.w_scale = ref.expand_blocks(problem.w_blocks, 64, 256, 32, 32)
    check(problem, problem.args(device), device)


@pytest.mark.parametrize(("x_byte", "w_byte"), [(0, 254), (1, 253), (254, 0), (253, 2), (20, 234), (240, 14)])
def test_scales_at_the_ends_of_their_range(x_byte, w_byte, device, rng):
    """Byte 0 is 2^-127 and 254 is 2^127; neither may be flushed, nor their product leave FP32 (B02, B05)."""
    problem = make_matmul(rng, 3, groups=1, n=64, k=128)
    problem.x_scale[:], problem.w_blocks[:], problem.w_scale[:] = x_byte, w_byte, w_byte
    exact, _ = problem.exact()
    assert np.isfinite(exact).all()
    assert (exact != 0).all()
    check(problem, problem.args(device), device)


def test_underflow_of_both_scales_gives_zero(device, rng):
    """Zero-filled buffers, as in a dummy run: scale byte 0 on zero data is 0, not NaN."""
    problem = make_matmul(rng, 3, groups=2, n=64, k=256)
    problem.x[:], problem.x_scale[:] = 0, 0
    z = check(problem, problem.args(device), device)
    assert (codes(z) & 0x7FFF == 0).all()


def test_overflow_becomes_a_poisoned_block(device, rng):
    """A sum past the largest BF16 number rounds to infinity; the fused op marks that block and no other."""
    problem = make_matmul(rng, 3, groups=2, n=64, k=128)
    problem.x[:], problem.w[:] = 0x7E, 0x38
    problem.x_scale[1, 0] = (
        245  # 128 * 448 * 2^118 is past 2^128 in rows 0..31 of group 0, and far below in the others
    )
    problem.w_blocks[0, 0], problem.w_blocks[0, 1] = 127, 100
    args = problem.args(device)
    z = codes(vllm_megaattn.einsum_fp8_bf16(*args))
    assert (z[1, 0, :32] == 0x7F80).all()
    assert (np.delete(z.reshape(-1, 32), 4, axis=0) & 0x7FFF < 0x7F80).all()
    check_fused(z.reshape(3, -1), args, 32)


# ---- activations as the attention kernels hand them over -----------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 3, 4, 33])
def test_group_slices_of_a_wider_buffer(tokens, device, rng):
    """x and x_scale are the first G of Gp = 8 groups, strides those of the wide buffer; what lies beyond is NaN."""
    problem = make_matmul(rng, tokens, groups=2, n=128, k=512)
    wide = poisoned((tokens, 8, 512), E4M3, device, 0x7F)
    x = wide[:, :2]
    x.copy_(e4m3(problem.x, device))
    wide_scale = np.full((tokens, 8, 16), 255, np.uint8)
    wide_scale[:, :2] = problem.x_scale
    x_scale = words(wide_scale, device)[:, :2]
    assert x.stride() == (8 * 512, 512, 1)
    assert x_scale.stride()[0] == 1
    check(problem, (x, x_scale, *problem.args(device)[2:]), device)


@pytest.mark.parametrize("layout", ["token pitch", "group major", "odd pitch", "every second token"])
def test_strided_activations(layout, device, rng):
    """B82: any token and group stride of x."""
    if layout == "odd pitch" and device == "cuda":
        pytest.skip("CUDA kernels need 16-byte rows; test_errors.py checks the refusal")
    tokens, groups, n, k = 9, 2, 64, 256
    problem = make_matmul(rng, tokens, groups, n, k)
    x, x_scale, w, w_scale = problem.args(device)
    if layout == "token pitch":
        x = strided(x, groups * k + 512, k)
    elif layout == "group major":
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    elif layout == "odd pitch":
        x = strided(x, groups * (k + 3) + 5, k + 3)
    else:
        x = torch.stack([x.view(torch.uint8), torch.full_like(x.view(torch.uint8), 0x7F)], dim=1).flatten(0, 1)[::2]
        x = x.view(E4M3)
    assert x.shape == (tokens, groups, k)
    assert not x.is_contiguous()
    check(problem, (x, x_scale, w, w_scale), device)


@pytest.mark.parametrize("layout", ["K-major", "wide pitch", "token major pitch"])
def test_strided_activation_scales(layout, device, rng):
    tokens, groups, k = 7, 3, 384
    problem = make_matmul(rng, tokens, groups, n=64, k=k)
    x, _, w, w_scale = problem.args(device)
    packed = torch.from_numpy(ref.pack_words(problem.x_scale)).to(device)
    if layout == "K-major":
        x_scale = packed
    elif layout == "wide pitch":
        buffer = torch.full((groups, k // 128, 40), -1, dtype=torch.int32, device=device)
        x_scale = buffer.permute(2, 0, 1)[16 : 16 + tokens]
        x_scale.copy_(packed)
    else:
        x_scale = strided(packed, 64, 8)
    check(problem, (x, x_scale, w, w_scale), device)


def test_expanded_activations(device, rng):
    """Stride 0 over tokens: every token is the same row."""
    problem = make_matmul(rng, 1, groups=2, n=64, k=256)
    x, x_scale, w, w_scale = problem.args(device)
    many = problem.tokens([0] * 40)
    check(many, (x.expand(40, -1, -1), x_scale.expand(40, -1, -1), w, w_scale), device)


def test_offsets_beyond_32_bits(device, rng):
    """B83: two tokens more than 2^31 elements apart, in x and in both results. Only the touched pages are real."""
    problem = make_matmul(rng, 2, groups=1, n=128, k=256)
    pitch = 2**31 + 4096
    try:
        raw = torch.empty(pitch + 4096, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        pytest.skip(f"no address space for 2 GiB: {error}")
    far = raw.as_strided((2, 256), (pitch, 1))
    x = far.view(E4M3).unflatten(1, (1, 256))
    x.copy_(e4m3(problem.x, device))
    args = (x, *problem.args(device)[1:])
    expected = check(problem, args, device)

    behind = raw[2048:].as_strided((2, 128), (pitch, 1)).view(E4M3)
    z_scale = poisoned((512,), torch.uint8, device)
    dense = x.clone()  # x itself lies between the output's first and last byte, which all count as the output's
    vllm_megaattn.einsum_fp8_sfd128x4(dense, *args[1:], out=(behind, z_scale))
    data, scale = ref.quantize(codes(expected).reshape(2, -1))
    np.testing.assert_array_equal(codes(behind), data)
    np.testing.assert_array_equal(codes(z_scale), ref.f8_128x4_pack(scale))


def test_strided_and_flat_weights(device, rng):
    problem = make_matmul(rng, 5, groups=3, n=64, k=256)
    x, x_scale, w, w_scale = problem.args(device)
    expected = check(problem, (x, x_scale, w, w_scale), device)
    for view in (w.view(3 * 64, 256), strided(w, 64 * 320 + 64, 320), strided(w.view(3 * 64, 256), 272)):
        assert same_bits(vllm_megaattn.einsum_fp8_bf16(x, x_scale, view, w_scale), expected)


# ---- isolation and reproducibility -----------------------------------------------------------------------------


def test_groups_are_independent(device, rng):
    """B41, B24: each group equals its own single-group run, with magnitudes 2^(4g) apart."""
    problem = make_matmul(rng, 5, groups=8, n=64, k=256)
    problem.x_scale[:] = 100 + 4 * np.arange(8)[None, :, None] + problem.x_scale % 3
    z = check(problem, problem.args(device), device)
    for g in range(8):
        alone = vllm_megaattn.einsum_fp8_bf16(*problem.group(g).args(device))
        assert same_bits(alone, z[:, g : g + 1].contiguous())


def test_nan_scale_in_one_group_stays_there(device, rng):
    problem = make_matmul(rng, 5, groups=8, n=64, k=256)
    clean = codes(vllm_megaattn.einsum_fp8_bf16(*problem.args(device)))
    problem.w_blocks[3, 1, 2] = 255
    problem.w_scale = ref.expand_blocks(problem.w_blocks, 64, 256, 32, 32)
    z = vllm_megaattn.einsum_fp8_bf16(*problem.args(device))
    bad = np.zeros(clean.shape, bool)
    bad[:, 3, 32:64] = True
    assert (np.isnan(ref.bf16_decode(codes(z))) == bad).all()
    assert (codes(z)[~bad] == clean[~bad]).all()
    check_fused(codes(z).reshape(5, -1), problem.args(device), 32)


@pytest.mark.parametrize("poison", ["scale", "element"])
def test_nan_in_one_token_stays_there(poison, device, rng):
    """B07, B19, and vLLM's padding rows, whose scales may hold 255."""
    problem = make_matmul(rng, 130, groups=2, n=64, k=256)
    clean = codes(vllm_megaattn.einsum_fp8_bf16(*problem.args(device)))
    if poison == "scale":
        problem.x_scale[7, 1, 5] = 255
    else:
        problem.x[7, 1, 200] = 0xFF
    args = problem.args(device)
    z = codes(vllm_megaattn.einsum_fp8_bf16(*args))
    bad = np.zeros(clean.shape, bool)
    bad[7, 1] = True
    assert (np.isnan(ref.bf16_decode(z)) == bad).all()
    assert (z[~bad] == clean[~bad]).all()
    check_fused(z.reshape(130, -1), args, 32)


def test_nan_scale_poisons_zero_data_too(device, rng):
    """0 * NaN is NaN: a block is NaN as a whole, whatever its elements are."""
    problem = make_matmul(rng, 2, groups=1, n=32, k=128)
    problem.x[0], problem.x_scale[0, 0, 3] = 0, 255
    z = ref.bf16_decode(codes(vllm_megaattn.einsum_fp8_bf16(*problem.args(device))))
    assert np.isnan(z[0]).all()
    assert np.isfinite(z[1]).all()


def test_rows_do_not_depend_on_the_batch(device, rng):
    """B85: bit-identical rows for every T, wherever the token stands."""
    problem = make_matmul(rng, 300, groups=2, n=160, k=1152)
    whole = vllm_megaattn.einsum_fp8_bf16(*problem.args(device))
    for tokens in (1, 2, 7, 8, 64, 127, 128, 129):
        part = vllm_megaattn.einsum_fp8_bf16(*problem.tokens(slice(0, tokens)).args(device))
        assert same_bits(part, whole[:tokens]), tokens
        rows = rng.permutation(300)[:tokens]
        part = vllm_megaattn.einsum_fp8_bf16(*problem.tokens(rows).args(device))
        assert same_bits(part, whole[torch.from_numpy(rows).to(device)]), tokens


def test_threads_do_not_change_the_bits(rng):
    problem = make_matmul(rng, 70, groups=2, n=256, k=1152)
    args = problem.args()
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append((vllm_megaattn.einsum_fp8_bf16(*args), *vllm_megaattn.einsum_fp8_sfd128x4(*args)))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0], other, strict=True))


def test_repeated_calls_agree(device, rng):
    args = make_matmul(rng, 33, groups=2, n=256, k=512).args(device)
    first = vllm_megaattn.einsum_fp8_bf16(*args)
    assert all(same_bits(vllm_megaattn.einsum_fp8_bf16(*args), first) for _ in range(5))


# ---- quantisation of the accumulators --------------------------------------------------------------------------


def test_amax_is_taken_after_rounding_to_bf16(device):
    """B08: sums one FP32 unit above 448 * 2^k round to 448 * 2^k in BF16, so the byte is 127 + k and not one more."""
    x = np.zeros((1, 1, 128), np.uint8)
    x[0, 0, :2] = 0x7E, 0x01  # 448 and 2^-9
    w = np.zeros((1, 32, 128), np.uint8)
    w[0, :, 0], w[0, :, 1] = 0x38, 0x08  # 1 and 2^-6: 448 + 2^-15, one unit of FP32
    args = (e4m3(x, device), words(np.full((1, 1, 4), 127, np.uint8), device), e4m3(w, device))
    for k in range(-100, 101):
        w_scale = u8(np.full((1, 1, 4), 127 + k, np.uint8), device)
        exact, _ = ref.matmul(x, np.full((1, 1, 4), 127, np.uint8), w, np.full((1, 32, 4), 127 + k, np.uint8))
        assert (exact == (448 + 2.0**-15) * 2.0**k).all()
        z, z_scale = vllm_megaattn.einsum_fp8_sfd128x4(*args, w_scale)
        assert codes(z_scale)[0] == 127 + k, k
        assert (codes(z) == 0x7E).all(), k


def test_fused_equals_unfused_on_special_sums(device, rng):
    """Zero rows, tiny sums that flush, NaN rows and large ones, side by side in one call."""
    problem = make_matmul(rng, 8, groups=2, n=256, k=256)
    problem.x[0] = 0
    problem.x[1] |= 0x80  # all negative or -0
    problem.x_scale[2] = 0
    problem.w_blocks[:, :2] = 1
    problem.x_scale[3, 0] = 255
    problem.x_scale[4] = 240
    problem.x_scale[5] = 12
    problem.w_scale = ref.expand_blocks(problem.w_blocks, 256, 256, 32, 32)
    args = problem.args(device)
    z = codes(vllm_megaattn.einsum_fp8_bf16(*args))
    _, scale = ref.quantize(z.reshape(8, -1))
    assert {0, 255} <= set(scale.ravel().tolist())
    assert len(np.unique(scale)) > 10
    for span in SPANS:
        check_fused(z.reshape(8, -1), args, span)


@pytest.mark.parametrize("span", [128, 256])
def test_span_scale_is_the_largest_of_its_blocks(span, device, rng):
    args = make_matmul(rng, 5, groups=2, n=512, k=256).args(device)
    _, minimal = vllm_megaattn.einsum_fp8_sfd128x4(*args)
    _, shared = vllm_megaattn.einsum_fp8_sfd128x4(*args, scale_span=span)
    per_block = ref.f8_128x4_unpack(codes(minimal), 5, 32)
    largest = per_block.reshape(5, -1, span // 32).max(axis=-1).repeat(span // 32, axis=-1)
    np.testing.assert_array_equal(ref.f8_128x4_unpack(codes(shared), 5, 32), largest)
    assert not same_bits(minimal, shared)  # the argument has an effect (B35)


def test_promised_x_span_does_not_change_the_result(device, rng):
    """x_span is a promise about equal scale bytes; where it is kept, the result is that of the unpromised call."""
    problem = make_matmul(rng, 17, groups=2, n=256, k=512, form="prepared")
    problem.x_scale[:] = np.repeat(problem.x_scale[:, :, ::8], 8, axis=2)
    args = problem.args(device)
    for x_span in (32, 64, 128, 256, 512):
        z = vllm_megaattn.einsum_fp8_bf16(*args, x_span=x_span)
        check_product(z, *problem.exact(), device)
        q, q_scale = vllm_megaattn.einsum_fp8_sfd128x4(*args, x_span=x_span)
        data, scale = ref.quantize(codes(z).reshape(17, -1))
        np.testing.assert_array_equal(codes(q), data)
        np.testing.assert_array_equal(codes(q_scale), ref.f8_128x4_pack(scale))


# ---- outputs ---------------------------------------------------------------------------------------------------


def test_given_outputs_are_filled_and_returned(device, rng):
    problem = make_matmul(rng, 33, groups=2, n=96, k=256)
    args = problem.args(device)
    z = poisoned((33, 2, 96), torch.bfloat16, device, 0xFF)
    assert vllm_megaattn.einsum_fp8_bf16(*args, out=z) is z
    assert same_bits(z, vllm_megaattn.einsum_fp8_bf16(*args))

    q = poisoned((33, 192), E4M3, device, 0xFF)
    q_scale = poisoned((1024,), torch.uint8, device, 0xFF)
    result = vllm_megaattn.einsum_fp8_sfd128x4(*args, out=(q, q_scale))
    assert result[0] is q
    assert result[1] is q_scale
    data, scale = ref.quantize(codes(z).reshape(33, -1))
    np.testing.assert_array_equal(codes(q), data)
    np.testing.assert_array_equal(codes(q_scale), ref.f8_128x4_pack(scale))  # padding written as 0x00 (B20, B21)


def test_outputs_with_pitches_and_int32_scale_tiles(device, rng):
    problem = make_matmul(rng, 130, groups=2, n=192, k=256)
    args = problem.args(device)
    expected = vllm_megaattn.einsum_fp8_bf16(*args)
    wide = poisoned((130, 3, 256), torch.bfloat16, device)
    vllm_megaattn.einsum_fp8_bf16(*args, out=wide[:, :2, :192])
    assert same_bits(wide[:, :2, :192].contiguous(), expected)
    untouched = codes(wide).view(np.uint8).reshape(130, 3, 512)
    assert (untouched[:, 2] == POISON).all()
    assert (untouched[:, :2, 384:] == POISON).all()

    wide_q = poisoned((130, 448), E4M3, device)
    tiles = poisoned((2, 3, 128), torch.int32, device)
    vllm_megaattn.einsum_fp8_sfd128x4(*args, out=(wide_q[:, :384], tiles))
    data, scale = ref.quantize(codes(expected).reshape(130, -1))
    np.testing.assert_array_equal(codes(wide_q[:, :384]), data)
    np.testing.assert_array_equal(codes(tiles.view(-1).view(torch.uint8)), ref.f8_128x4_pack(scale))
    assert (codes(wide_q[:, 384:]) == POISON).all()


@pytest.mark.parametrize("span", SPANS)
def test_guard_bytes_around_the_outputs_stay(span, device, rng):
    """B25, B32, B33: odd shapes, guarded on both sides."""
    tokens, groups, n, guard = 33, 2, 768, 4096
    problem = make_matmul(rng, tokens, groups, n, k=640)
    size = ref.f8_128x4_bytes(tokens, groups * n // 32)
    raw_z = poisoned((2 * tokens * groups * n + 2 * guard,), torch.uint8, device)
    raw_q = poisoned((tokens * groups * n + 2 * guard,), torch.uint8, device)
    raw_scale = poisoned((size + 2 * guard,), torch.uint8, device)
    z = raw_z[guard:-guard].view(torch.bfloat16).view(tokens, groups, n)
    q = raw_q[guard:-guard].view(E4M3).view(tokens, groups * n)
    args = problem.args(device)
    vllm_megaattn.einsum_fp8_bf16(*args, out=z)
    vllm_megaattn.einsum_fp8_sfd128x4(*args, scale_span=span, out=(q, raw_scale[guard:-guard]))
    check_product(z, *problem.exact(), device)
    for raw in (raw_z, raw_q, raw_scale):
        assert (codes(raw[:guard]) == POISON).all()
        assert (codes(raw[-guard:]) == POISON).all()


def test_inputs_are_not_changed(device, rng):
    args = make_matmul(rng, 33, groups=2, n=128, k=256).args(device)
    before = [codes(t).copy() for t in args]
    vllm_megaattn.einsum_fp8_bf16(*args)
    vllm_megaattn.einsum_fp8_sfd128x4(*args)
    assert all((codes(t) == saved).all() for t, saved in zip(args, before, strict=True))


# ---- the checks above have teeth -------------------------------------------------------------------------------


@pytest.mark.parametrize("mutation", ["neighbour row", "neighbour block", "neighbour group", "byte 0 as zero"])
def test_a_misread_scale_would_be_noticed(mutation, rng):
    """The reference with one reading error must fail `check_product` against the op's own result."""
    problem = make_matmul(rng, 5, groups=2, n=128, k=256)
    if mutation == "byte 0 as zero":
        problem.x_scale[2, 1] = 0
        problem.w_blocks[:], problem.w_scale[:] = 220, 220
    z = vllm_megaattn.einsum_fp8_bf16(*problem.args())
    check_product(z, *problem.exact())
    wrong = problem.w_scale
    if mutation == "neighbour row":
        wrong = np.roll(wrong, 32, axis=1)
    elif mutation == "neighbour block":
        wrong = np.roll(wrong, 1, axis=2)
    elif mutation == "neighbour group":
        wrong = np.roll(wrong, 1, axis=0)
    else:
        problem.x[2, 1] = 0
    with pytest.raises(AssertionError, match="are not the rounded sum"):
        check_product(z, *ref.matmul(problem.x, problem.x_scale, problem.w, wrong))
