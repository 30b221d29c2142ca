"""engines.weights without an engine: the form of kept weights is decided once and holds for every later loading."""

from __future__ import annotations

import pytest
import torch

from vllm_megaattn.engines.weights import BLOCKS, WIDE, KeptWeight, dequantize, widen

N, K = 128, 512


def make(seed=0, low=120, high=121, block=(32, 32)):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(N, K, generator=generator).to(torch.float8_e4m3fn)
    shape = (N // block[0], K // block[1])
    return weight, torch.randint(low, high + 1, shape, dtype=torch.uint8, generator=generator)


def refuse(weight, scale, *, device=None):
    return weight, scale, {"refused_relative_error": 0.5}


def accept(weight, scale, *, device=None):
    wide, wide_scale = widen(weight, scale)
    return wide, wide_scale, {"changed": 2, "elements": weight.numel(), "relative_error": 1e-7}


def repeated(scale):
    return scale.repeat_interleave(32, 0)


def test_rows_repeated_by_the_engine_are_put_together():
    weight, scale = make()
    kept, kept_scale = KeptWeight("w").convert(weight, repeated(scale))
    assert kept.data_ptr() == weight.data_ptr()
    assert torch.equal(kept_scale, scale)


def test_rows_that_differ_stay_rows():
    weight, scale = make()
    rows = repeated(scale)
    rows[5, 3] += 1
    kept = KeptWeight("w")
    assert torch.equal(kept.convert(weight, rows)[1], rows)
    assert (kept.form, kept.block_rows) == (BLOCKS, 1)
    assert torch.equal(kept.convert(weight, repeated(scale))[1], repeated(scale))  # and so at every later loading


def test_block_scales_pass_through():
    weight, scale = make(block=(128, 128))
    scale = scale.view(torch.float8_e8m0fnu)
    kept_scale = KeptWeight("w").convert(weight, scale)[1]
    assert kept_scale.dtype is torch.float8_e8m0fnu
    assert kept_scale.data_ptr() == scale.data_ptr()


def test_wide_form_holds_for_later_weights():
    kept = KeptWeight("w", prepare=accept)
    for seed in range(3):
        assert kept.convert(*make(seed))[1].shape == (N // 32, 1)
    assert kept.form == WIDE
    assert kept.report == {"changed": 2, "elements": N * K, "relative_error": 1e-7}


def test_later_weights_that_do_not_fit_the_wide_form_are_refused():
    kept = KeptWeight("layers.0.wo_a", prepare=accept)
    kept.convert(*make())
    kept._prepare = refuse
    with pytest.raises(
        RuntimeError, match=r"layers\.0\.wo_a: the new weights cannot take the scale form .* 5\.0e-01"
    ):
        kept.convert(*make(1))


def test_later_weights_with_scales_that_differ_within_blocks_are_refused():
    kept = KeptWeight("layers.0.wo_a")
    weight, scale = make()
    kept.convert(weight, repeated(scale))
    rows = repeated(scale)
    rows[5, 3] += 1
    with pytest.raises(RuntimeError, match=r"layers\.0\.wo_a: .* different scales within blocks of 32 rows"):
        kept.convert(weight, rows)


def test_first_weights_that_do_not_fit_keep_their_blocks_for_good():
    kept = KeptWeight("w", prepare=refuse)
    weight, scale = make()
    assert torch.equal(kept.convert(weight, scale)[1], scale)
    kept._prepare = accept
    assert torch.equal(kept.convert(weight, scale)[1], scale)
    assert kept.form == BLOCKS


def test_dummy_weights_take_the_form_of_real_ones():
    kept = KeptWeight("w", dummy=True, prepare=refuse)
    weight = make()[0]
    garbage = torch.randint(0, 255, (N, K // 32), dtype=torch.uint8)
    assert kept.convert(weight, garbage)[1].shape == (N // 32, 1)
    kept._prepare = accept
    assert kept.convert(weight, repeated(make()[1]))[1].shape == (N // 32, 1)


def test_dequantize_is_exact_in_every_form():
    weight, scale = make(low=110, high=130)
    want = weight.float() * torch.exp2(repeated(scale).repeat_interleave(32, 1).float() - 127)
    for form in (scale, repeated(scale), scale.view(torch.float8_e8m0fnu)):
        assert torch.equal(dequantize(weight, form).float(), want)
    same = torch.full((N // 32, 1), 121, dtype=torch.uint8)
    assert torch.equal(dequantize(weight, same).float(), weight.float() / 64)
    assert dequantize(weight, scale, torch.float32).dtype is torch.float32
