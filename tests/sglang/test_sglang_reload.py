"""Weight updates: SGLang writes into the parameters that captured graphs hold, through its own functions for each way
to do it."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.capability((9, 0), (10, 0))

WAYS = ("disk", "tensors in one call", "tensors one by one", "scales first", "direct", "checkpoint engine")


@pytest.fixture(scope="module")
def checkpoints(world):
    from sglang_layers import Checkpoint

    return [Checkpoint.random("v41", seed) for seed in (0, 1)]


@pytest.fixture
def wide(monkeypatch):
    """Re-blocks weights as `prepare_weight` does for Hopper, however much that changes random ones."""
    from vllm_megaattn.engines import weights

    def prepare(weight, scale, *, device=None):
        new, new_scale = weights.widen(weight, scale)
        return new, new_scale, {"changed": 1, "elements": weight.numel(), "relative_error": 0.0}

    monkeypatch.setattr(weights.KeptWeight.__init__, "__kwdefaults__", {"dummy": False, "prepare": prepare})


def update(built, checkpoint, way):
    """What SGLang's WeightUpdater and its checkpoint-engine worker do, on our model."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import _model_load_weights_direct
    from sglang.srt.model_loader.loader import DefaultModelLoader

    device = torch.device("cpu")
    named = checkpoint.named("layers.0")
    with built.inside():
        if way == "checkpoint engine":  # no session: post-load step, then the model's own
            built.model.load_weights(named)
            built.postprocess()
            built.model.post_load_weights()
            return
        DefaultModelLoader.restore_weights_before_loading(built.model, device)
        if way == "disk":
            DefaultModelLoader.load_weights_and_postprocess(built.model, iter(named), device)
            return
        if way == "direct":  # shards in the parameters' own shapes and dtypes, past every weight loader
            tp, rank = built.attention.attn_tp_size, built.attention.attn_tp_rank
            for name in ("wo_a", "wo_b"):
                weight, scale = checkpoint.rows(name, rank, tp)
                prefix = f"model.layers.0.self_attn.{name}"
                scale = torch.exp2(scale.float() - 127)
                _model_load_weights_direct(built.model, [(f"{prefix}.weight", weight)])
                _model_load_weights_direct(built.model, [(f"{prefix}.weight_scale_inv", scale)])
        elif way == "tensors in one call":
            built.model.load_weights(named)
        else:
            order = sorted(named, key=lambda pair: pair[0].endswith(".weight")) if way == "scales first" else named
            for pair in order:
                built.model.load_weights([pair])
        DefaultModelLoader.postprocess_weights(built.model, device)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mega", [False, True])
def test_new_values_at_the_old_addresses(world, checkpoints, plugin, way, mega):
    from sglang_layers import Tokens, expected, relative_error

    if mega and (world.capability[0] != 10 or not hasattr(world.model.MQALayer, "_forward_mega")):
        pytest.skip("mega attention is for datacenter Blackwell, since SGLang 0.5.23")
    plugin()
    built = world.make("v41", checkpoints[0], tp=2, rank=1, mega=mega)
    attention = built.attention
    before = built.addresses()
    operands = [t.data_ptr() for t in attention.mega_wo_a] if mega else []
    update(built, checkpoints[1], way)
    assert built.addresses() == before
    assert [t.data_ptr() for t in attention.mega_wo_a or ()] == operands if mega else True
    tokens = Tokens.random(5)
    assert relative_error(built.run(tokens)[1], expected(tokens, checkpoints[1], attention)) < 4e-3
    update(built, checkpoints[0], way)
    assert relative_error(built.run(tokens)[1], expected(tokens, checkpoints[0], attention)) < 4e-3


@pytest.mark.capability((9, 0))
@pytest.mark.parametrize("way", WAYS)
def test_reblocked_weights(world, checkpoints, plugin, wide, way):
    """The form of Hopper's kernels rewrites bytes. After an update they are those of a fresh load, to the bit."""
    from sglang_layers import Tokens

    plugin()
    built, fresh = (world.make("v41", checkpoints[i], tp=4, rank=1) for i in (0, 1))
    assert built.attention.wo_a.megaattn_scale.shape == (64, 1)
    assert built.attention.wo_b.megaattn_scale.shape == (40, 1)
    before = built.addresses()
    update(built, checkpoints[1], way)
    assert built.addresses() == before
    for name in ("wo_a", "wo_b"):
        ours, theirs = (getattr(model.attention, name) for model in (built, fresh))
        assert torch.equal(ours.weight.view(torch.uint8), theirs.weight.view(torch.uint8))
        assert torch.equal(ours.megaattn_scale, theirs.megaattn_scale)
    tokens = Tokens.random(5)
    assert torch.equal(built.run(tokens)[1], fresh.run(tokens)[1])


@pytest.mark.capability((9, 0))
def test_update_of_one_matrix(world, checkpoints, plugin, wide):
    """A bucket with wo_b's tensors alone leaves wo_a as it was."""
    plugin()
    built = world.make("v41", checkpoints[0])
    wo_a = built.attention.wo_a
    weight, scale = wo_a.weight.view(torch.uint8).clone(), wo_a.megaattn_scale.clone()
    with built.inside():
        built.model.load_weights(checkpoints[1].named("layers.0", only="wo_b"))
        built.postprocess()
    assert torch.equal(wo_a.weight.view(torch.uint8), weight)
    assert torch.equal(wo_a.megaattn_scale, scale)
    fresh = world.make("v41", checkpoints[1]).attention.wo_b
    assert torch.equal(built.attention.wo_b.weight.view(torch.uint8), fresh.weight.view(torch.uint8))


@pytest.mark.capability((9, 0))
def test_update_before_the_end_of_a_session_is_what_the_checkpoint_has(world, checkpoints, plugin, wide):
    """Between SGLang's begin and end the parameters hold exactly what was loaded: a trainer may read and compare
    them."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    plugin()
    built = world.make("v41", checkpoints[0], tp=2)
    wo_a = built.attention.wo_a
    loaded, _ = checkpoints[0].rows("wo_a", 0, 2)
    assert not torch.equal(wo_a.weight.view(torch.uint8), loaded.view(torch.uint8))
    with built.inside():
        DefaultModelLoader.restore_weights_before_loading(built.model, torch.device("cpu"))
    assert torch.equal(wo_a.weight.view(torch.uint8), loaded.view(torch.uint8))
    with built.inside():
        built.postprocess()
    assert not torch.equal(wo_a.weight.view(torch.uint8), loaded.view(torch.uint8))


@pytest.mark.capability((9, 0))
def test_post_load_twice_changes_nothing(world, checkpoints, plugin, wide):
    from sglang_layers import Tokens

    plugin()
    built, tokens = world.make("v41", checkpoints[0], tp=4), Tokens.random(3)
    once = built.run(tokens)[1]
    with built.inside():
        built.postprocess()
        built.model.post_load_weights()
        built.postprocess()
    assert torch.equal(built.run(tokens)[1], once)


@pytest.mark.capability((9, 0))
def test_dummy_load_then_real_weights(world, checkpoints, plugin, wide):
    """A server for reinforcement learning starts with load format "dummy"; the form is chosen as for real weights."""
    from sglang.srt.model_loader.weight_utils import initialize_dummy_weights
    from sglang_layers import Tokens

    plugin()
    built = world.make("v41", tp=4, rank=1, settings={"load_format": "dummy"})
    with built.inside():
        initialize_dummy_weights(built.model)
        built.model.post_load_weights()
        built.postprocess()
    assert built.attention.wo_a.megaattn_scale.shape == (64, 1)
    before = built.addresses()
    built.run(Tokens.random(3))
    update(built, checkpoints[1], "tensors in one call")
    assert built.addresses() == before
    fresh, tokens = world.make("v41", checkpoints[1], tp=4, rank=1), Tokens.random(3)
    assert torch.equal(built.run(tokens)[1], fresh.run(tokens)[1])


@pytest.mark.capability((9, 0))
def test_running_before_the_weights_are_loaded_is_an_error(world, plugin):
    from sglang_layers import Tokens

    plugin()
    built = world.make("v41", tp=8)
    with pytest.raises(RuntimeError, match=r"model\.layers\.0\.self_attn runs before SGLang's post-load step"):
        built.run(Tokens.random(2))


@pytest.mark.capability((9, 0))
def test_updates_are_not_declared_impossible(world, checkpoints, plugin):
    """SGLang refuses updates where a module carries this text; ours can be updated."""
    plugin()
    built = world.make("v41", checkpoints[0], tp=8)
    assert all(getattr(module, "_derived_weight_cache_error", None) is None for module in built.model.modules())
