"""engines.sglang.weights without SGLang: parameters that are converted in place and taken back to the byte."""

from __future__ import annotations

import threading

import pytest
import torch

from vllm_megaattn import layouts
from vllm_megaattn.engines.sglang.weights import SCALE_NAME, LiveWeight, watch_loaders
from vllm_megaattn.engines.weights import KeptWeight, dequantize, widen

N, K = 128, 1024


class Parameter(torch.nn.Parameter):
    """With the loader that SGLang's parameters carry."""

    def __new__(cls, data, loader=None):
        made = super().__new__(cls, data, requires_grad=False)
        made._weight_loader = loader or (lambda parameter, loaded: parameter.data.copy_(loaded))
        return made

    @property
    def weight_loader(self):
        return self._weight_loader


def pair(seed=0, low=118, high=121, dtype=torch.float32):
    """e4m3 weights, subnormal and special bytes among them, and 32x32 scales."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(0, 256, (N, K), dtype=torch.uint8, generator=generator)
    weight[weight & 0x7F == 0x7F] = 0x7E
    scale = torch.randint(low, high + 1, (N // 32, K // 32), dtype=torch.uint8, generator=generator)
    return weight.view(torch.float8_e4m3fn), layouts.scale_to_float32(scale) if dtype is torch.float32 else scale


def make(seed=0, **scales):
    linear = torch.nn.Module()
    weight, scale = pair(seed, **scales)
    linear.register_parameter("weight", Parameter(weight))
    linear.register_parameter("weight_scale_inv", Parameter(scale))
    return linear


def accept(weight, scale, *, device=None):
    """`prepare_weight` of a Hopper device, without its limit on how much the values may change."""
    wide, wide_scale = widen(weight, scale)
    return wide, wide_scale, {"changed": 3, "elements": weight.numel(), "relative_error": 1e-7}


def refuse(weight, scale, *, device=None):
    return weight, scale, {"refused_relative_error": 0.5}


def live(prepare=accept, **options):
    return LiveWeight(KeptWeight("layers.0.wo_a", prepare=prepare), **{"reblock": True, **options})


def bits(tensor):
    return tensor.detach().view(torch.uint8).clone()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("prepare", [accept, refuse])
def test_converted_and_back_to_the_byte(prepare, interleaved):
    linear = make()
    weight, scale = bits(linear.weight), linear.weight_scale_inv.clone()
    address = linear.weight.data_ptr()
    matrix = live(prepare, interleaved=interleaved)
    matrix.convert(linear)
    assert bits(linear.weight).ne(weight).any() == (interleaved or prepare is accept)
    assert getattr(linear, SCALE_NAME).shape == ((N // 32, 1) if prepare is accept else (N // 32, K // 32))
    matrix.restore(linear)
    assert torch.equal(bits(linear.weight), weight)
    assert torch.equal(linear.weight_scale_inv, scale)
    assert linear.weight.data_ptr() == address


def test_converting_keeps_the_values():
    """But for what re-blocking rounds in e4m3's subnormal range."""
    linear = make()
    before = dequantize(linear.weight.data, layouts.scale_bytes(linear.weight_scale_inv.data), torch.float32)
    live().convert(linear)
    after = dequantize(linear.weight.data, getattr(linear, SCALE_NAME).data, torch.float32)
    changed = before != after
    assert 0 < changed.sum() < before.numel() // 4
    assert (before - after).abs().max() <= 2.0**-10 * 2.0 ** (121 - 127)  # half a subnormal step of the widest scale


def test_mega_order_of_columns_and_scales():
    """Chunk c of head h goes to chunk c * heads + h, data and scale alike."""
    linear = make()
    weight, scale = bits(linear.weight), layouts.scale_bytes(linear.weight_scale_inv.data)
    live(refuse, interleaved=True).convert(linear)
    heads, chunks = K // 512, 16
    for head in range(heads):
        for chunk in range(chunks):
            source, target = head * chunks + chunk, chunk * heads + head
            got, want = bits(linear.weight)[:, target * 32 :][:, :32], weight[:, source * 32 :][:, :32]
            assert torch.equal(got, want)
            assert torch.equal(getattr(linear, SCALE_NAME)[:, target], scale[:, source])


@pytest.mark.parametrize("order", ["weight first", "scale first", "weight only", "scale only"])
def test_update_in_pieces(order):
    """Each loader writes into what a checkpoint has; post-load may run in between. The end equals a fresh load."""
    linear, matrix = make(), live()
    watch_loaders(linear, lambda: matrix.restore(linear))
    matrix.convert(linear)
    addresses = [linear.weight.data_ptr(), getattr(linear, SCALE_NAME).data_ptr()]
    old, new = pair(0), pair(1)
    pieces = {"weight": (linear.weight, new[0]), "scale": (linear.weight_scale_inv, new[1])}
    steps = {
        "weight first": ["weight", "scale"],
        "scale first": ["scale", "weight"],
        "weight only": ["weight"],
        "scale only": ["scale"],
    }[order]
    for step in steps:
        parameter, loaded = pieces[step]
        parameter.weight_loader(parameter, loaded)
        matrix.convert(linear)
    fresh = torch.nn.Module()
    fresh.register_parameter("weight", Parameter((new if "weight" in steps else old)[0].clone()))
    fresh.register_parameter("weight_scale_inv", Parameter((new if "scale" in steps else old)[1].clone()))
    live().convert(fresh)
    assert torch.equal(bits(linear.weight), bits(fresh.weight))
    assert torch.equal(getattr(linear, SCALE_NAME), getattr(fresh, SCALE_NAME))
    assert [linear.weight.data_ptr(), getattr(linear, SCALE_NAME).data_ptr()] == addresses


def test_loaders_from_several_threads_restore_once():
    for _ in range(20):
        linear, matrix = make(), live()
        watch_loaders(linear, lambda linear=linear, matrix=matrix: matrix.restore(linear))
        matrix.convert(linear)
        new = pair(1)
        parts = [(linear.weight, new[0]), (linear.weight_scale_inv, new[1])]
        threads = [threading.Thread(target=p.weight_loader, args=(p, loaded)) for p, loaded in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert torch.equal(bits(linear.weight), bits(new[0]))
        assert torch.equal(linear.weight_scale_inv, new[1])


def test_converting_and_restoring_twice_changes_nothing():
    linear, matrix = make(), live()
    matrix.restore(linear)
    matrix.convert(linear)
    once = bits(linear.weight)
    matrix.convert(linear)
    assert torch.equal(bits(linear.weight), once)
    matrix.restore(linear)
    matrix.restore(linear)
    assert torch.equal(bits(linear.weight), bits(pair()[0]))


def test_without_reblocking_the_bytes_are_left_alone():
    linear = make()
    before = bits(linear.weight)
    matrix = live(accept, reblock=False)
    matrix.convert(linear)
    assert torch.equal(bits(linear.weight), before)
    assert torch.equal(getattr(linear, SCALE_NAME), layouts.scale_bytes(linear.weight_scale_inv.data))


def test_new_weights_that_do_not_fit_are_refused_and_poisoned():
    """Captured graphs hold the first form. A layer whose update failed must not give plausible numbers."""
    linear, matrix = make(), live()
    matrix.convert(linear)
    matrix.restore(linear)
    matrix.kept._prepare = refuse
    with pytest.raises(RuntimeError, match=r"layers\.0\.wo_a: the new weights cannot take the scale form"):
        matrix.convert(linear)
    assert bool((getattr(linear, SCALE_NAME) == 0xFF).all())
    assert torch.equal(bits(linear.weight), bits(pair()[0]))
    matrix.kept._prepare = accept  # SGLang rolls back to the old weights
    matrix.convert(linear)
    assert not bool((getattr(linear, SCALE_NAME) == 0xFF).any())


def test_scales_that_are_no_powers_of_two_are_refused():
    linear = make()
    linear.weight_scale_inv.data[1, 2] = 0.3
    with pytest.raises(ValueError, match=r"layers\.0\.wo_a: .*0\.3.* at \[1, 2\].*SGLANG_MEGAATTN=0"):
        live().convert(linear)
    assert not hasattr(linear, SCALE_NAME)


def test_dummy_weights_take_the_form_of_real_ones():
    """Load format "dummy" fills scales with any float; the first real weights follow as an update."""
    linear = make()
    linear.weight_scale_inv.data.uniform_(-1e-3, 1e-3)
    kept = KeptWeight("layers.0.wo_a", dummy=True, prepare=refuse)
    matrix = LiveWeight(kept, reblock=True, dummy=True)
    matrix.convert(linear)
    assert getattr(linear, SCALE_NAME).shape == (N // 32, 1)
    matrix.restore(linear)
    linear.weight.data.copy_(pair(3)[0])
    linear.weight_scale_inv.data.copy_(pair(3)[1])
    kept._prepare = accept
    matrix.convert(linear)
    want, want_scale = widen(*pair(3, dtype=torch.uint8))
    assert torch.equal(bits(linear.weight), bits(want))
    assert torch.equal(getattr(linear, SCALE_NAME), want_scale)
