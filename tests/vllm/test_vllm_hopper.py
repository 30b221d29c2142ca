"""DeepSeek-V4.1 on Hopper: vLLM's FlashMLA attention class with our kernel objects, loaded and run on the CPU backend."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.capability((9, 0))

COUNTS = (0, 1, 5, 128, 130)


@pytest.fixture(scope="module")
def served(layers):
    """(tp, rank) -> a loaded layer that the plugin serves, and its configuration."""
    return lambda tp=1, rank=0: layers(tp=tp, rank=rank)


def cos_sin(attention):
    return attention.rotary_emb.cos_sin_cache


def test_layer_is_vllms_own_class_with_our_kernels(world, served):
    attention, _ = served()
    from vllm.models.deepseek_v41.nvidia.flashmla import DeepseekV4FlashMLAAttention

    assert type(attention) is DeepseekV4FlashMLAAttention
    for linear in (attention.wo_a, attention.wo_b):
        assert type(linear.quant_method).__name__ == "ModelOptLinearMethod"
        assert type(linear.quant_method.kernel).__name__ == "MegaAttnMxfp8LinearKernel"
    assert type(attention.wq_b.quant_method.kernel).__name__ != "MegaAttnMxfp8LinearKernel"


def test_bytes_are_those_of_the_checkpoint_and_no_wide_copy_is_made(world, checkpoint):
    """Neither weight is expanded, at any moment of loading, and the scales shrink to the checkpoint's own blocks."""
    from vllm_layers import OpLog

    from vllm_megaattn.engines.vllm import register

    register()
    config = world.config("v41", hidden=checkpoint.hidden)
    attention = world.build(config)
    world.fill(attention, checkpoint)
    with OpLog() as log:
        world.post_load(attention, config)
    wide = [n for dtype, n in log.largest.items() if dtype.itemsize > 1]
    assert max(wide, default=0) < attention.wo_b.weight.numel() // 64
    for name in ("wo_a", "wo_b"):
        linear = getattr(attention, name)
        assert linear.weight.dtype is torch.float8_e4m3fn
        assert torch.equal(linear.weight.view(torch.uint8), checkpoint.tensors[f"{name}.weight"].view(torch.uint8))
        assert torch.equal(linear.weight_scale, checkpoint.tensors[f"{name}.scale"].view(torch.uint8))


@pytest.mark.parametrize("tp", [1, 4, 8])
@pytest.mark.parametrize("count", COUNTS)
def test_values(world, checkpoint, served, tp, count):
    """Each rank's partial sum, against a float computation with the same rounding of activations."""
    from vllm_layers import Tokens, expected, local_heads, relative_error

    for rank in {0, tp - 1}:
        attention, config = served(tp, rank)
        tokens, heads = Tokens.random(count), local_heads(rank, tp)
        y = world.run(attention, tokens.for_layer(attention, heads), tokens.positions, config)
        assert (y.shape, y.dtype) == ((count, checkpoint.hidden), torch.bfloat16)
        want = expected(tokens, checkpoint, cos_sin(attention), heads)
        assert relative_error(y, want) < 4e-3  # BF16 rounding of z's accumulator and of y


def test_ranks_sum_to_the_whole(world, checkpoint, served):
    from vllm_layers import Tokens, local_heads, relative_error

    tokens = Tokens.random(5)
    total = torch.zeros(5, checkpoint.hidden)
    for rank in range(4):
        attention, config = served(4, rank)
        attn_out = tokens.for_layer(attention, local_heads(rank, 4))
        total += world.run(attention, attn_out, tokens.positions, config).float()
    attention, config = served()
    whole = world.run(attention, tokens.for_layer(attention, local_heads(0, 1)), tokens.positions, config)
    assert relative_error(total, whole) < 4e-3


def test_agrees_with_vllms_own_path_within_the_rounding_of_activations(world, checkpoint, served):
    """vLLM on Hopper rounds no activation; we round attention output and z to MXFP8 as Blackwell does. Each costs at most
    2^-4 of an element and about 2.7e-2 in the norm of random data, so both together stay below 5e-2."""
    from vllm_layers import Tokens, expected, local_heads, relative_error

    tokens, heads = Tokens.random(5), local_heads(0, 1)
    upstream, upstream_config = world.make("v41", checkpoint, backend="emulation")
    assert upstream.wo_a.weight.dtype is torch.bfloat16
    theirs = world.run(upstream, tokens.for_layer(upstream, heads), tokens.positions, upstream_config)
    unrounded = expected(tokens, checkpoint, cos_sin(upstream), heads, rounding=False)
    assert relative_error(theirs, unrounded) < 4e-3
    attention, config = served()
    ours = world.run(attention, tokens.for_layer(attention, heads), tokens.positions, config)
    assert 1e-3 < relative_error(ours, theirs) < 5e-2


@pytest.mark.parametrize("tp", [1, 8])
def test_what_reaches_the_op(world, served, tp):
    """One op for the whole projection: the attention buffer as it lies, vLLM's own rotary cache, our weights."""
    from vllm_layers import HEAD_DIM, OpLog, Tokens, local_heads

    attention, config = served(tp)
    tokens = Tokens.random(5)
    attn_out = tokens.for_layer(attention, local_heads(0, tp))
    with OpLog() as log:
        world.run(attention, attn_out, tokens.positions, config)
    assert log.names() == ["o_proj_from_attn"]
    attn, positions, cache, wo_a, wo_a_scale, wo_b, wo_b_scale = log.ops[0][1][:7]
    assert attn.data_ptr() == attn_out.data_ptr()
    assert (attn.shape, attn.stride()) == (attn_out.shape, (64 * HEAD_DIM, HEAD_DIM, 1))
    assert positions.data_ptr() == tokens.positions.data_ptr()
    assert cache.data_ptr() == cos_sin(attention).data_ptr()
    for operand, linear, name in (
        (wo_a, attention.wo_a, "weight"),
        (wo_a_scale, attention.wo_a, "weight_scale"),
        (wo_b, attention.wo_b, "weight"),
        (wo_b_scale, attention.wo_b, "weight_scale"),
    ):
        assert operand.data_ptr() == getattr(linear, name).data_ptr()
    assert list(wo_a.shape) == [8 // tp * 1024, 4096]


def test_rows_are_independent(world, served):
    """Rows past the real tokens of a padded CUDA graph hold anything; they change nothing for the others (B07, B19)."""
    from vllm_layers import Tokens, local_heads

    attention, config = served(8)
    tokens = Tokens.random(5)
    attn_out = tokens.for_layer(attention, local_heads(0, 8))
    clean = world.run(attention, attn_out, tokens.positions, config)
    attn_out[3] = float("nan")
    dirty = world.run(attention, attn_out, tokens.positions, config)
    keep = torch.tensor([0, 1, 2, 4])
    assert torch.equal(clean[keep], dirty[keep])
    assert dirty[3].isnan().all()


def test_dummy_run(world, served):
    """vLLM's warm-up projects zeros."""
    attention, config = served(4)
    y = world.run(attention, torch.zeros(3, 64, 512, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int64), config)
    assert torch.equal(y, torch.zeros_like(y))


def test_positions_may_be_int32(world, served):
    from vllm_layers import Tokens, local_heads

    attention, config = served(8)
    tokens = Tokens.random(5)
    attn_out = tokens.for_layer(attention, local_heads(0, 8))
    wide = world.run(attention, attn_out, tokens.positions, config)
    assert torch.equal(world.run(attention, attn_out, tokens.positions.int(), config), wide)


@pytest.mark.parametrize("count", [0, 5])
@pytest.mark.parametrize("reduce", [True, False])
def test_reduction_stays_with_vllm(world, served, monkeypatch, count, reduce):
    """One all-reduce, for zero tokens too; none when the decoder layer took it over (sequence parallelism, fused mHC)."""
    from vllm_layers import Tokens, local_heads

    attention, config = served(4)
    monkeypatch.setattr(attention.wo_b, "reduce_results", reduce)
    tokens = Tokens.random(count)
    before = world.all_reduces
    world.run(attention, tokens.for_layer(attention, local_heads(0, 4)), tokens.positions, config)
    assert world.all_reduces - before == int(reduce)


def test_lora_on_wo_b_gets_bf16_z(world, checkpoint, served, messages):
    """vLLM's LoRA wrapper around wo_b: base layer through our kernel, adapter on BF16 z."""
    from vllm.lora.layers import RowParallelLinearWithLoRA
    from vllm_layers import RANK, OpLog, Tokens, expected, local_heads, relative_error

    attention, config = served(8)
    tokens, heads = Tokens.random(5), local_heads(0, 8)
    seen = []

    def add_lora_linear(output, x, *args, **kwargs):
        seen.append((x.dtype, tuple(x.shape)))
        output += 1
        return output

    base = attention.wo_b
    wrapper = RowParallelLinearWithLoRA(base)
    wrapper.punica_wrapper = SimpleNamespace(add_lora_linear=add_lora_linear)
    wrapper.lora_a_stacked = wrapper.lora_b_stacked = ()
    wrapper.output_slices = (checkpoint.hidden,)
    attention.wo_b = wrapper
    try:
        with OpLog() as log:
            y = world.run(attention, tokens.for_layer(attention, heads), tokens.positions, config)
    finally:
        attention.wo_b = base
    assert log.names() == [
        "inv_rope_mxfp8_quantize", "einsum_fp8_bf16", "mxfp8_quantize_sfd128x4", "mxfp8_gemm_wo_b",
    ]  # fmt: skip
    assert seen == [(torch.bfloat16, (5, RANK))]
    assert relative_error(y, expected(tokens, checkpoint, cos_sin(attention), heads) + 1) < 4e-3
    assert any("LoRA" in text for text in messages)
    with OpLog() as log:  # and without the adapter, the whole projection again
        world.run(attention, tokens.for_layer(attention, heads), tokens.positions, config)
    assert log.names() == ["o_proj_from_attn"]


def test_wo_a_adapter_is_ignored_as_by_vllm(world, served):
    """Every `_o_proj` of vLLM reads the base weight of a wrapped wo_a; so do we."""
    from vllm.lora.layers import ColumnParallelLinearWithLoRA
    from vllm_layers import Tokens, local_heads

    attention, config = served(8)
    tokens = Tokens.random(5)
    attn_out = tokens.for_layer(attention, local_heads(0, 8))
    plain = world.run(attention, attn_out, tokens.positions, config)
    base = attention.wo_a
    attention.wo_a = ColumnParallelLinearWithLoRA(base)
    try:
        assert torch.equal(world.run(attention, attn_out, tokens.positions, config), plain)
    finally:
        attention.wo_a = base


# ---- calls that the plugin cannot take -----------------------------------------------------------------------------


def test_refused_call_gives_vllm_a_bf16_wo_a(world, checkpoint, served, messages, monkeypatch):
    """vLLM's function would read FP8 bytes of wo_a as 128x128 blocks; it gets the dequantised weight, and its z is bit for
    bit the one it computes from its own BF16 copy."""
    import vllm_standins
    from vllm_layers import OpLog, Tokens, local_heads

    tokens, heads = Tokens.random(5), local_heads(0, 8)
    attention, config = served(8)
    upstream, upstream_config = world.make("v41", checkpoint, tp=8, backend="emulation")
    attn_out = tokens.for_layer(attention, heads)
    monkeypatch.setattr(attention._megaattn, "scale_shapes", {})  # as if post-load had not run
    z = {}
    for name, layer, settings in (("ours", attention, config), ("theirs", upstream, upstream_config)):
        original = layer.wo_b.quant_method.apply

        def keep(linear, x, bias=None, name=name, original=original):
            z[name] = x.clone()
            return original(linear, x, bias)

        layer.wo_b.quant_method.apply = keep
        vllm_standins.CALLS.clear()
        with OpLog() as log:
            world.run(layer, attn_out, tokens.positions, settings)
        layer.wo_b.quant_method.apply = original
        assert not vllm_standins.CALLS  # no fp8_einsum
        assert "o_proj_from_attn" not in log.names()
    assert z["ours"].dtype is torch.bfloat16
    assert torch.equal(z["ours"], z["theirs"])
    assert not z["ours"].isnan().any()
    assert any("post-load" in text for text in messages)


def test_call_before_post_load(world, checkpoint, messages):
    """Without post-load the scales are still per row; vLLM's own function with a BF16 copy is right all the same."""
    from vllm_layers import Tokens, expected, local_heads, relative_error

    from vllm_megaattn.engines.vllm import register

    register()
    config = world.config("v41", hidden=checkpoint.hidden, tp=8)
    attention = world.build(config)
    world.fill(attention, checkpoint)
    tokens, heads = Tokens.random(5), local_heads(0, 8)
    y = world.run(attention, tokens.for_layer(attention, heads), tokens.positions, config)
    want = expected(tokens, checkpoint, cos_sin(attention), heads, rounding=False)
    assert relative_error(y, want) < 4e-2  # z alone is rounded to MXFP8, by our wo_b kernel
    assert any("post-load" in text for text in messages)


# ---- the log -------------------------------------------------------------------------------------------------------


def test_log_says_what_is_served_and_what_it_saves(world, checkpoint, messages):
    from vllm_layers import Tokens, local_heads

    from vllm_megaattn.engines.vllm import register

    register()
    layers = [world.make("v41", checkpoint, tp=8) for _ in range(3)]
    attention, config = layers[0]
    tokens = Tokens.random(1)
    for _ in range(2):
        world.run(attention, tokens.for_layer(attention, local_heads(0, 8)), tokens.positions, config)
    serving = [text for text in messages if "serving" in text]
    assert len(serving) == 1
    assert "fused on cpu" in serving[0]
    summaries = [text for text in messages if "output projection of" in text]
    assert len(summaries) == 1
    assert "output projection of 3 of 3 attention layers: 3 fused on cpu" in summaries[0]
    # wo_a: 1024 x 4096 in BF16 with 1024 x 128 scale bytes against FP8 with 32 x 128;
    # wo_b: 1280 x 32 scale bytes against 40 x 32
    saved = (2 - 1) * 1024 * 4096 + (1024 - 32) * 128 + (1280 - 40) * 32
    assert f"{3 * saved / 2**20:.1f} MiB of weights less" in summaries[0]
