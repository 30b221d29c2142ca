"""DeepSeek-V4.1 on SM12x, on the CPU backend in place of kernels that do not exist yet: wo_a keeps its bytes through our
kernel object, wo_b stays with FlashInfer's CUTLASS kernel and its layout."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.capability((12, 0), (12, 1))


@pytest.fixture(scope="module")
def served(layers):
    return lambda tp=1, rank=0: layers(tp=tp, rank=rank)


def test_layer(served):
    attention, _ = served()
    assert type(attention).__name__ == "DeepseekV4FlashInferSM120Attention"
    assert type(attention.wo_a.quant_method.kernel).__name__ == "MegaAttnMxfp8LinearKernel"
    assert attention.wo_a.weight.dtype is torch.float8_e4m3fn
    assert type(attention.wo_b.quant_method.kernel).__name__ == "FlashInferCutlassMxfp8LinearKernel"
    assert attention.wo_b.weight_scale.dim() == 1


@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize("count", [0, 1, 5, 130])
def test_values(world, checkpoint, served, tp, count):
    import vllm_standins
    from vllm_layers import OpLog, Tokens, expected, local_heads, relative_error

    rank = tp - 1
    attention, config = served(tp, rank)
    tokens, heads = Tokens.random(count), local_heads(rank, tp)
    vllm_standins.CALLS.clear()
    with OpLog() as log:
        y = world.run(attention, tokens.for_layer(attention, heads), tokens.positions, config)
    assert log.names() == ["o_proj_from_attn"]
    assert not vllm_standins.CALLS
    want = expected(tokens, checkpoint, attention.rotary_emb.cos_sin_cache, heads)
    assert relative_error(y, want) < 4e-3


def test_wo_b_with_an_adapter_gets_bf16_z(world, checkpoint, served, monkeypatch, messages):
    """wo_a's bytes are ours, so vLLM's function is not an option: our wo_a in BF16, vLLM's own wo_b."""
    import vllm_standins
    from vllm_layers import OpLog, Tokens, expected, local_heads, relative_error

    attention, config = served(8)
    monkeypatch.setattr(attention.wo_b, "requires_unquantized_input", True, raising=False)
    tokens, heads = Tokens.random(5), local_heads(0, 8)
    vllm_standins.CALLS.clear()
    with OpLog() as log:
        y = world.run(attention, tokens.for_layer(attention, heads), tokens.positions, config)
    assert log.names() == ["inv_rope_mxfp8_quantize", "einsum_fp8_bf16"]
    assert [name for name, _ in vllm_standins.CALLS] == ["mm_mxfp8"]
    assert relative_error(y, expected(tokens, checkpoint, attention.rotary_emb.cos_sin_cache, heads)) < 4e-3
    assert any("LoRA" in text for text in messages)


def test_without_kernels_a_layer_is_left_as_it_is(world, checkpoint, messages):
    from vllm_layers import Tokens, key_without_kernels, local_heads

    from vllm_megaattn.engines.vllm import register

    key, gap = key_without_kernels(world.capability)
    plain = world.make("v41", checkpoint, tp=8)
    register(device_keys=lambda capability, device: key)
    left = world.make("v41", checkpoint, tp=8)
    assert sorted(left[0].__dict__) == sorted(plain[0].__dict__)
    assert left[0].wo_a.weight.dtype is torch.bfloat16
    assert left[0].wo_a.is_bmm
    tokens = Tokens.random(5)
    attn_out = tokens.for_layer(plain[0], local_heads(0, 8))
    results = [world.run(layer, attn_out, tokens.positions, config) for layer, config in (plain, left)]
    assert torch.equal(*results)
    assert any(gap in text for text in messages)
