"""DeepSeek-V4.1 on datacenter Blackwell: what happens where no kernel exists (nothing), and the attention classes that
write BF16, on the CPU backend in place of Blackwell kernels. Mega attention has test_vllm_mega.py."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.capability((10, 0), (10, 3))


def attention_class(name):
    if name == "flashmla":
        from vllm.models.deepseek_v41.nvidia.flashmla import DeepseekV4FlashMLAAttention as cls
    else:
        from vllm.models.deepseek_v41.nvidia.flashinfer_sparse import DeepseekV4FlashInferMLAAttention as cls
    return cls


def cos_sin(attention):
    return attention.rotary_emb.cos_sin_cache


# ---- without kernels nothing changes -----------------------------------------------------------------------------


def test_without_kernels_a_layer_is_left_as_it_is(world, checkpoint, layers, messages):
    import vllm_layers
    from vllm_layers import Tokens, local_heads, project

    from vllm_megaattn.engines.vllm import register

    key, gap = vllm_layers.key_without_kernels(world.capability)
    plain = layers(served=False)
    register(device_keys=lambda capability, device: key)
    left = world.make("v41", checkpoint)
    world.make("v41", checkpoint)
    assert sorted(left[0].__dict__) == sorted(plain[0].__dict__)
    for name in ("wo_a", "wo_b"):
        ours, theirs = getattr(left[0], name), getattr(plain[0], name)
        assert sorted(ours.quant_method.__dict__) == sorted(theirs.quant_method.__dict__)
        assert type(ours.quant_method.kernel) is type(theirs.quant_method.kernel)
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert (mine.shape, mine.stride(), mine.dtype) == (other.shape, other.stride(), other.dtype)
    for count in (0, 1, 130):
        tokens = Tokens.random(count, mega=hasattr(plain[0], "n_wv_group"))
        expected, calls, _ = project(world, plain, tokens, local_heads(0, 1))
        got, same_calls, log = project(world, left, tokens, local_heads(0, 1))
        assert torch.equal(got, expected)
        assert same_calls == calls
        assert log.names() == []
    reasons = [text for text in messages if "to the engine" in text]
    assert len(reasons) == 1  # for two layers
    assert gap in reasons[0]


# ---- attention that writes BF16 ------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", ["flashmla", "flashinfer"])
def test_bf16_attention_values(world, checkpoint, layers, cls):
    """Above the batches that vLLM fuses itself: one op for the whole projection, on vLLM's own weights."""
    from vllm_layers import Tokens, expected, local_heads, project, relative_error

    layer = layers(tp=4, rank=1, cls=attention_class(cls))
    tokens, heads = Tokens.random(130), local_heads(1, 4)
    y, calls, log = project(world, layer, tokens, heads)
    assert calls == []
    assert log.names() == ["o_proj_from_attn"]
    assert relative_error(y, expected(tokens, checkpoint, cos_sin(layer[0]), heads)) < 4e-3


@pytest.mark.vllm_from("0.31")
@pytest.mark.parametrize(("tp", "limit"), [(1, 32), (4, 96)])
def test_small_batches_stay_with_vllms_fused_kernel(world, layers, monkeypatch, tp, limit):
    """Its limit depends on the heads of a rank; zero tokens are not fused there."""
    import vllm.models.deepseek_v41.nvidia.flashmla as flashmla
    from vllm_layers import Tokens, local_heads

    attention, config = layers(tp=tp, cls=attention_class("flashmla"))
    monkeypatch.setattr(flashmla, "dsv41_o_proj", lambda layer, out, positions: torch.zeros(out.shape[0], 7))
    for count, theirs in ((0, False), (1, True), (limit, True), (limit + 1, False)):
        tokens = Tokens.random(count)
        y = world.run(attention, tokens.for_layer(attention, local_heads(0, tp)), tokens.positions, config)
        assert (y.shape[1] == 7) == theirs, count


def test_bf16_attention_without_consumer_is_vllms(world, layers, messages):
    """wo_b with an adapter: vLLM's unfused function, whose wo_a already is FP8 on this GPU."""
    from vllm_layers import Tokens, local_heads, project

    layer = layers(tp=4, cls=attention_class("flashmla"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer[0].wo_b, "requires_unquantized_input", True, raising=False)
        _, calls, log = project(world, layer, Tokens.random(130), local_heads(0, 4))
    assert calls == ["fp8_einsum", "mm_mxfp8"]
    assert log.names() == []
    assert any("LoRA" in text for text in messages)
