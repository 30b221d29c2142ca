"""DeepSeek-V4 (128x128 blocks, `weight_scale_inv`) on Hopper: the same interception through Fp8LinearMethod."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.capability((9, 0))


@pytest.fixture(scope="module")
def checkpoint(world):
    from vllm_layers import Checkpoint

    return Checkpoint.random("v4")


@pytest.fixture(scope="module")
def served(world, checkpoint):
    from vllm_megaattn.engines.vllm import register, unregister

    layers = {}

    def get(tp: int = 1, rank: int = 0):
        if (tp, rank) not in layers:
            register()
            layers[tp, rank] = world.make("v4", checkpoint, tp=tp, rank=rank)
            unregister()
        return layers[tp, rank]

    return get


def sliced(tokens, attention, heads):
    """V4's forward slices the padding heads off before it calls `_o_proj`."""
    return tokens.for_layer(attention, heads)[:, : attention.n_local_heads]


def test_layer_is_vllms_own_class_with_our_kernels(world, checkpoint, served):
    attention, _ = served()
    from vllm.models.deepseek_v4.nvidia.flashmla import DeepseekV4FlashMLAAttention

    assert type(attention) is DeepseekV4FlashMLAAttention
    for name in ("wo_a", "wo_b"):
        linear = getattr(attention, name)
        assert type(linear.quant_method).__name__ == "Fp8LinearMethod"
        assert type(linear.quant_method.fp8_linear).__name__ == "MegaAttnFp8BlockLinearKernel"
        assert torch.equal(linear.weight.view(torch.uint8), checkpoint.tensors[f"{name}.weight"].view(torch.uint8))
        scale = checkpoint.tensors[f"{name}.scale"]
        assert torch.equal(linear.weight_scale_inv.view(torch.uint8), scale.view(torch.uint8))


@pytest.mark.parametrize("tp", [1, 4, 8])
@pytest.mark.parametrize("count", [0, 1, 5, 130])
def test_values(world, checkpoint, served, tp, count):
    from vllm_layers import Tokens, expected, local_heads, relative_error

    rank = tp - 1
    attention, config = served(tp, rank)
    tokens, heads = Tokens.random(count), local_heads(rank, tp)
    y = world.run(attention, sliced(tokens, attention, heads), tokens.positions, config)
    want = expected(tokens, checkpoint, attention.rotary_emb.cos_sin_cache, heads)
    assert (y.shape, y.dtype) == ((count, checkpoint.hidden), torch.bfloat16)
    assert relative_error(y, want) < 4e-3


def test_agrees_with_vllms_own_path_within_the_rounding_of_activations(world, checkpoint, served):
    """vLLM rounds the attention output per 128 columns and z per 128; we round both per 32, which is finer."""
    import vllm_standins
    from vllm_layers import Tokens, local_heads, relative_error

    tokens, heads = Tokens.random(5), local_heads(0, 8)
    upstream, upstream_config = world.make("v4", checkpoint, tp=8)
    w_b = checkpoint.floats("wo_b")[:, : upstream.wo_b.weight.shape[1]]
    upstream.wo_b.quant_method.apply = lambda layer, z, bias=None: (z.float() @ w_b.t()).to(z.dtype)
    vllm_standins.CALLS.clear()
    attn_out = sliced(tokens, upstream, heads)
    theirs = world.run(upstream, attn_out, tokens.positions, upstream_config)
    assert [name for name, _ in vllm_standins.CALLS] == ["fp8_einsum"]
    attention, config = served(8)
    ours = world.run(attention, attn_out, tokens.positions, config)
    assert 1e-3 < relative_error(ours, theirs) < 6e-2


@pytest.mark.parametrize("reduce", [True, False])
def test_reduction_stays_with_vllm(world, served, monkeypatch, reduce):
    from vllm_layers import Tokens, local_heads

    attention, config = served(4)
    monkeypatch.setattr(attention.wo_b, "reduce_results", reduce)
    tokens = Tokens.random(3)
    before = world.all_reduces
    world.run(attention, sliced(tokens, attention, local_heads(0, 4)), tokens.positions, config)
    assert world.all_reduces - before == int(reduce)


def test_refused_call_gives_vllm_a_bf16_wo_a(world, checkpoint, served, monkeypatch):
    from vllm_layers import OpLog, Tokens, expected, local_heads, relative_error

    attention, config = served(8)
    monkeypatch.setattr(attention._megaattn, "scale_shapes", {})
    tokens, heads = Tokens.random(5), local_heads(0, 8)
    with OpLog() as log:
        y = world.run(attention, sliced(tokens, attention, heads), tokens.positions, config)
    assert "o_proj_from_attn" not in log.names()
    want = expected(tokens, checkpoint, attention.rotary_emb.cos_sin_cache, heads, rounding=False)
    assert relative_error(y, want) < 4e-2  # z alone is rounded


def test_reload_keeps_addresses_and_brings_new_values(world, checkpoint):
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload.layerwise import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
        record_metadata_for_reloading,
    )
    from vllm_layers import Checkpoint, Tokens, local_heads

    from vllm_megaattn.engines.vllm import register

    register()
    config = world.config("v4", tp=8, hidden=checkpoint.hidden)
    attention = world.build(config)
    model = torch.nn.Module()
    model.attn = attention
    record_metadata_for_reloading(model)
    world.load(attention, checkpoint, config)
    pointers = [p.data_ptr() for linear in (attention.wo_a, attention.wo_b) for p in linear.parameters()]
    other = Checkpoint.random("v4", 1)
    with set_current_vllm_config(config), torch.no_grad():
        initialize_layerwise_reload(model)
        world.fill(attention, other)
        finalize_layerwise_reload(model, config.model_config)
    assert [p.data_ptr() for linear in (attention.wo_a, attention.wo_b) for p in linear.parameters()] == pointers
    fresh, _ = world.make("v4", other, tp=8)
    tokens = Tokens.random(5)
    attn_out = sliced(tokens, attention, local_heads(0, 8))
    assert torch.equal(
        world.run(attention, attn_out, tokens.positions, config), world.run(fresh, attn_out, tokens.positions, config)
    )


def test_float32_scales_are_left_to_vllm(world, messages):
    """Flash-Base checkpoints (expert_dtype fp8) hold float32 scales that need not be powers of two."""
    from vllm_megaattn.engines.vllm import register

    register()
    config = world.config("v4", text={"expert_dtype": "fp8"})
    attention = world.build(config)
    assert attention.wo_a.weight_scale_inv.dtype is torch.float32
    assert not hasattr(attention, "_megaattn")
    assert type(attention.wo_a.quant_method.fp8_linear).__name__ != "MegaAttnFp8BlockLinearKernel"
    assert any("to the engine: the weight scales are float32" in text for text in messages)
