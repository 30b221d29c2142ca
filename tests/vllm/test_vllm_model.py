"""The whole language model as vLLM constructs it, two layers: every attention layer is attached, a draft layer too, and a
checkpoint in the names of a released file arrives in the kernels' form."""

from __future__ import annotations

import pytest
import torch
import vllm_standins

pytestmark = pytest.mark.capability((9, 0), (10, 0))


@pytest.fixture
def model(world, monkeypatch):
    """(model, configuration) from vLLM's `initialize_model`, with the plugin registered."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.models.deepseek_v41.nvidia.model import DeepseekV41LLMForCausalLM
    from vllm_layers import default_dtype

    from vllm_megaattn.engines.vllm import register

    monkeypatch.setattr(torch.cuda, "Stream", type("Stream", (), {"__init__": lambda self, *args, **kwargs: None}))
    if not hasattr(torch.ops._C, "silu_and_mul_with_clamp"):
        vllm_standins.define_op("_C", "silu_and_mul_with_clamp(Tensor(a!) out, Tensor x, float limit) -> ()")
    hopper = world.capability[0] == 9
    config = world.config(
        "v41", backend="emulation" if hopper else "auto", moe_backend="marlin" if hopper else "auto"
    )
    world.group.world_size, world.group.rank_in_group = 1, 0
    config.compilation_config.static_forward_context.clear()
    config.cache_config.cache_dtype = "auto"
    register()
    with torch.no_grad(), default_dtype(torch.bfloat16), set_current_vllm_config(config):
        yield initialize_model(config, model_class=DeepseekV41LLMForCausalLM), config


def checkpoint_file(checkpoints):
    """Names and tensors as in a released shard: layers.N.attn.wo_a.weight, .scale, ..."""
    for index, checkpoint in enumerate(checkpoints):
        for name, tensor in checkpoint.tensors.items():
            yield f"layers.{index}.attn.{name}", tensor


@pytest.mark.vllm_from("0.31")  # the decoder layer of 0.30 imports TileLang, which is not installed here
def test_every_layer_is_attached_loaded_and_right(world, model):
    from vllm_layers import Checkpoint, Tokens, expected, local_heads, relative_error

    model, config = model
    checkpoints = [Checkpoint.random("v41", seed) for seed in (3, 4)]
    loaded = model.load_weights(checkpoint_file(checkpoints))
    kinds = {f"{linear}.{kind}" for linear in ("wo_a", "wo_b") for kind in ("weight", "weight_scale")}
    assert loaded == {f"model.layers.{index}.attn.{kind}" for index in (0, 1) for kind in kinds}
    heads = local_heads(0, 1)
    for layer, checkpoint in zip(model.model.layers, checkpoints, strict=True):
        attention = layer.attn
        world.post_load(attention, config)
        tokens = Tokens.random(3, mega=hasattr(attention, "n_wv_group"))
        y = world.run(attention, tokens.for_layer(attention, heads), tokens.positions, config)
        want = expected(tokens, checkpoint, attention.rotary_emb.cos_sin_cache, heads)
        assert relative_error(y, want) < 4e-3, attention.prefix
    assert attention._megaattn.reporter.summary().startswith("output projection of 2 of 2 attention layers: 2 fused")


@pytest.mark.vllm_from("0.31")
def test_draft_layers_are_attached_too(model):
    """DSpark's draft model builds the target's decoder layer, with an index past the target's."""
    from vllm.models.deepseek_v41.nvidia.model import DeepseekV4DecoderLayer

    _, config = model
    topk = torch.zeros(config.scheduler_config.max_num_batched_tokens, 512, dtype=torch.int32)
    draft = DeepseekV4DecoderLayer(config, prefix="model.layers.2", topk_indices_buffer=topk)
    assert draft.attn.compress_ratio == 0
    assert hasattr(draft.attn, "_megaattn")


@pytest.mark.capability((9, 0))
def test_full_size(world):
    """DeepSeek-V4.1-Flash's own shapes at TP1: wo_a [8192, 4096], wo_b [5120, 8192]."""
    from vllm_layers import FULL_HIDDEN, Checkpoint, Tokens, expected, local_heads, relative_error

    from vllm_megaattn.engines.vllm import register

    register()
    checkpoint = Checkpoint.random("v41", 6, hidden=FULL_HIDDEN)
    attention, config = world.make("v41", checkpoint)
    tokens, heads = Tokens.random(5), local_heads(0, 1)
    y = world.run(attention, tokens.for_layer(attention, heads), tokens.positions, config)
    assert y.shape == (5, FULL_HIDDEN)
    assert relative_error(y, expected(tokens, checkpoint, attention.rotary_emb.cos_sin_cache, heads)) < 4e-3
