"""Weights that come again: reinforcement learning, waking from sleep. Captured graphs hold addresses, shapes and the kernel
that fits the scale form; new weights must arrive in all three (B94, B95)."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.capability((9, 0))


@pytest.fixture(scope="module")
def checkpoints(world):
    from vllm_layers import Checkpoint

    return [Checkpoint.random("v41", seed) for seed in (0, 1)]


class Model(torch.nn.Module):
    """As much of a model as vLLM's loading and reloading functions look at."""

    def __init__(self, attention):
        super().__init__()
        self.attn = attention


def first_load(world, checkpoint, tp=8, prepare=None, **options):
    """A served layer in a model that vLLM has loaded; the other linear layers run vLLM's emulation."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    from vllm_megaattn.engines.vllm import register

    register()
    config = world.config("v41", backend="emulation", tp=tp, hidden=checkpoint.hidden, **options)
    attention = world.build(config)
    if prepare is not None:
        for kept in attention._megaattn.kept.values():
            kept._prepare = prepare
    model = Model(attention)
    with set_current_vllm_config(config), torch.no_grad():
        record_metadata_for_reloading(model)
        world.fill(attention, checkpoint)
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    return model, config


def reload(world, model, config, checkpoint):
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload.layerwise import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    with set_current_vllm_config(config), torch.no_grad():
        initialize_layerwise_reload(model)
        world.fill(model.attn, checkpoint)
        finalize_layerwise_reload(model, config.model_config)


def operands(attention):
    return {
        (name, kind): getattr(getattr(attention, name), kind)
        for name in ("wo_a", "wo_b")
        for kind in ("weight", "weight_scale")
    }


def run(world, attention, config):
    from vllm_layers import Tokens, local_heads

    tokens = Tokens.random(5)
    return world.run(attention, tokens.for_layer(attention, local_heads(0, 8)), tokens.positions, config)


def widen_always(weight, scale, *, device=None):
    """What prepare_weight does for Hopper, on any machine: 32 rows x K, with its report."""
    from vllm_megaattn.engines.weights import widen

    wide, wide_scale = widen(weight, scale)
    return wide, wide_scale, {"changed": 1, "elements": weight.numel(), "relative_error": 1e-9}


@pytest.mark.parametrize("prepare", [None, widen_always], ids=["blocks", "wide"])
def test_reload_keeps_addresses_and_brings_new_values(world, checkpoints, prepare):
    model, config = first_load(world, checkpoints[0], prepare=prepare)
    before = {key: tensor.data_ptr() for key, tensor in operands(model.attn).items()}
    first = run(world, model.attn, config)
    for checkpoint in (checkpoints[1], checkpoints[0], checkpoints[1]):
        reload(world, model, config, checkpoint)
    assert {key: tensor.data_ptr() for key, tensor in operands(model.attn).items()} == before
    second = run(world, model.attn, config)
    assert not torch.equal(first, second)
    fresh, fresh_config = first_load(world, checkpoints[1], prepare=prepare)
    for key, tensor in operands(model.attn).items():
        assert torch.equal(tensor.view(torch.uint8), operands(fresh.attn)[key].view(torch.uint8)), key
    assert torch.equal(second, run(world, fresh.attn, fresh_config))


def test_wide_form_is_what_reaches_the_op(world, checkpoints):
    """The form for Hopper: one scale byte for 32 rows and all of K, in the same parameter."""
    from vllm_layers import OpLog, Tokens, expected, local_heads, relative_error

    model, config = first_load(world, checkpoints[0], prepare=widen_always)
    assert model.attn.wo_a.weight_scale.shape == (1024 // 32, 1)
    assert model.attn.wo_b.weight_scale.shape == (1280 // 32, 1)
    with OpLog() as log:
        y = run(world, model.attn, config)
    assert log.names() == ["o_proj_from_attn"]
    tokens = Tokens.random(5)
    want = expected(tokens, checkpoints[0], model.attn.rotary_emb.cos_sin_cache, local_heads(0, 8))
    # The random scales of the test span 2^10 within a row of blocks, so re-blocking rounds many small elements.
    assert relative_error(y, want) < 2e-2


def test_post_load_keeps_parameters_and_fp8_storage(world, checkpoints):
    """Parameter objects, their loaders and, where shapes allow, their storage: also when re-blocking made new bytes."""
    from vllm_megaattn.engines.vllm import register

    register()
    config = world.config("v41", backend="emulation", tp=8, hidden=checkpoints[0].hidden)
    attention = world.build(config)
    for kept in attention._megaattn.kept.values():
        kept._prepare = widen_always
    world.fill(attention, checkpoints[0])
    before = operands(attention)
    pointers = {key: tensor.data_ptr() for key, tensor in before.items()}
    world.post_load(attention, config)
    for key, tensor in operands(attention).items():
        assert tensor is before[key]
        assert callable(tensor.weight_loader)
        assert (tensor.data_ptr() == pointers[key]) == (key[1] == "weight")


@pytest.mark.parametrize("prepare", [None, widen_always], ids=["blocks", "wide"])
def test_post_load_twice_changes_nothing(world, checkpoints, prepare):
    model, config = first_load(world, checkpoints[0], prepare=prepare)
    saved = model.attn._megaattn.record.saved_bytes
    assert saved > 0
    before = {key: (tensor.data_ptr(), tensor.clone()) for key, tensor in operands(model.attn).items()}
    world.post_load(model.attn, config)
    for key, tensor in operands(model.attn).items():
        assert tensor.data_ptr() == before[key][0]
        assert torch.equal(tensor.view(torch.uint8), before[key][1].view(torch.uint8))
    assert model.attn._megaattn.record.saved_bytes == saved


def test_dummy_weights_then_real_ones(world, checkpoints):
    """RL frameworks start a server with load format "dummy" and send weights later. Random scales differ within a block;
    the form is chosen as for a checkpoint all the same."""
    from vllm_layers import Checkpoint

    dummy = Checkpoint.random("v41", 5)
    model, config = first_load(world, dummy, load_format="dummy")
    before = {key: tensor.data_ptr() for key, tensor in operands(model.attn).items()}
    reload(world, model, config, checkpoints[0])
    assert {key: tensor.data_ptr() for key, tensor in operands(model.attn).items()} == before
    fresh, _ = first_load(world, checkpoints[0])
    for key, tensor in operands(model.attn).items():
        assert torch.equal(tensor.view(torch.uint8), operands(fresh.attn)[key].view(torch.uint8)), key


def test_real_dummy_loader(world):
    """vLLM's own DummyModelLoader over the layer, whatever it writes into the scales."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    from vllm_megaattn.engines.vllm import register

    register()
    config = world.config("v41", backend="emulation", tp=8, load_format="dummy")
    attention = world.build(config)
    with set_current_vllm_config(config), torch.no_grad():
        DummyModelLoader(config.load_config).load_weights(Model(attention), config.model_config)
        world.post_load(attention, config)
    assert attention.wo_a.weight_scale.shape == (1024 // 32, 4096 // 32)
    assert attention._megaattn.loaded


def test_layer_is_freed_with_its_model(world, checkpoints):
    """Nothing of ours keeps a model alive: a server that swaps models needs the memory back."""
    import gc
    import weakref

    from vllm_megaattn.engines.vllm import patch

    model, config = first_load(world, checkpoints[0])
    run(world, model.attn, config)
    config.compilation_config.static_forward_context.clear()
    gone = weakref.ref(model.attn)
    key = id(model.attn)
    assert key in patch.reporter.served
    del model
    gc.collect()
    assert gone() is None
    assert key not in patch.reporter.served
