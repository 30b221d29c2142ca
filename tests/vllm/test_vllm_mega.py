"""DeepSeek-V4.1's mega attention on datacenter Blackwell (vLLM 0.31 and later), on the CPU backend in place of kernels
of its own: what the attention kernel leaves is consumed as it lies, and wo_b gets MXFP8 whether vLLM fuses or not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import vllm_here

pytestmark = [pytest.mark.capability((10, 0), (10, 3)), pytest.mark.vllm_from("0.31")]


def cos_sin(attention):
    return attention.rotary_emb.cos_sin_cache


# ---- mega attention ------------------------------------------------------------------------------------------------


def test_vllm_selects_mega_attention(layers):
    attention, _ = layers()
    assert type(attention).__name__ == "DeepseekV4MegaAttnAttention"
    assert type(attention.wo_b.quant_method.kernel).__name__ == "FlashInferCutedslMxfp8LinearKernel"


@pytest.mark.parametrize("tp", [1, 4, 8])
@pytest.mark.parametrize("count", [0, 1, 5, 128, 130])
def test_mega_values(world, checkpoint, layers, tp, count):
    from vllm_layers import Tokens, expected, local_heads, project, relative_error

    rank = tp - 1
    attention, _ = layers(tp=tp, rank=rank)
    tokens, heads = Tokens.random(count, mega=True), local_heads(rank, tp)
    y, calls, log = project(world, layers(tp=tp, rank=rank), tokens, heads)
    assert calls == []
    assert log.names() == ["einsum_fp8_sfd128x4", "mxfp8_gemm_wo_b"]
    assert (y.shape, y.dtype) == ((count, checkpoint.hidden), torch.bfloat16)
    assert relative_error(y, expected(tokens, checkpoint, cos_sin(attention), heads)) < 4e-3


@pytest.mark.parametrize("tp", [1, 4])
def test_mega_output_is_consumed_as_it_lies(world, layers, tp):
    """Strides of the padded buffer, packed scales with stride 1 over tokens, vLLM's permuted wo_a, no copy of any."""
    from vllm_layers import GROUP_COLS, Tokens, local_heads, project

    attention, _ = layers(tp=tp)
    groups = 8 // tp
    _, _, log = project(world, layers(tp=tp), Tokens.random(5, mega=True), local_heads(0, tp))
    x, x_scale, w, w_scale, z, z_scale = log.ops[0][1][:6]
    assert (x.shape, x.stride()) == ((5, groups, GROUP_COLS), (8 * GROUP_COLS, GROUP_COLS, 1))
    assert (x_scale.shape, x_scale.stride(), x_scale.dtype) == ((5, groups, 32), (1, 32 * 8, 8), torch.int32)
    assert w.data_ptr() == attention.wo_a.weight.data_ptr()
    assert w_scale.data_ptr() == attention.wo_a.weight_scale.data_ptr()
    assert (w_scale.stride(), w_scale.dtype) == ((32768, 1, 1024), torch.int32)
    assert (z.shape, z_scale.shape) == ((5, groups * 1024), (128 * groups * 32,))
    z_read, z_scale_read, wo_b, wo_b_scale = log.ops[1][1][:4]
    assert (z_read.data_ptr(), z_scale_read.data_ptr()) == (z.data_ptr(), z_scale.data_ptr())
    assert wo_b.data_ptr() == attention.wo_b.weight.data_ptr()
    assert (wo_b.shape, wo_b.stride()) == ((1280, groups * 1024), (groups * 1024, 1))
    assert wo_b_scale.data_ptr() == attention.wo_b.weight_scale.data_ptr()


@pytest.mark.parametrize("count", [5, 130])
def test_z_is_what_vllms_own_quantiser_makes_of_it(world, layers, count):
    """Where vLLM fuses too (0.33) its z; before, its quantiser's bytes of BF16 z. Sums are rounded in another order, so a
    few elements in a thousand may fall on the other side of a rounding boundary; scale bytes then differ more rarely."""
    import vllm_standins
    from vllm_layers import Tokens, local_heads, project, relative_error
    from vllm_standins import unswizzle

    tokens, heads = Tokens.random(count, mega=True), local_heads(0, 1)
    theirs_y, calls, _ = project(world, layers(served=False), tokens, heads)
    assert calls == ["fp8_einsum", "mm_mxfp8"]
    theirs = dict(vllm_standins.CALLS)["mm_mxfp8"]
    ours_y, _, log = project(world, layers(), tokens, heads)
    z, z_scale = log.ops[1][1][:2]
    blocks = z.shape[1] // 32
    scale = unswizzle(z_scale, count, blocks), unswizzle(theirs["sfa"], count, blocks)
    assert (scale[0] == scale[1]).float().mean() > 0.999
    same = z.view(torch.uint8) == theirs["a"].view(torch.uint8)
    assert same.float().mean() > 0.99
    assert relative_error(ours_y, theirs_y) < 4e-3
    rows = unswizzle(z_scale, -(-count // 128) * 128, blocks)
    assert not rows[count:].any()  # padding is written, and 0x00


def test_mega_dummy_run(world, layers):
    """vLLM's warm-up zeroes data and scale bytes (2^-127); the result is zero, not NaN."""
    attention, config = layers(tp=4)
    out = attention._alloc_attn_out(3, torch.empty(3, 1, dtype=torch.bfloat16))
    out.data.zero_()
    out.scale.zero_()
    y = world.run(attention, out, torch.zeros(3, dtype=torch.int64), config)
    assert torch.equal(y, torch.zeros_like(y))


def test_mega_rows_are_independent(world, layers):
    """Padding rows of a graph hold stale bytes, scale 255 among them."""
    from vllm_layers import Tokens, local_heads

    attention, config = layers(tp=8)
    tokens = Tokens.random(5, mega=True)
    out = tokens.for_layer(attention, local_heads(0, 8))
    clean = world.run(attention, out, tokens.positions, config)
    out.scale[4] = -1
    dirty = world.run(attention, out, tokens.positions, config)
    assert torch.equal(clean[:4], dirty[:4])
    assert dirty[4].isnan().all()


@pytest.mark.parametrize("reduce", [True, False])
def test_mega_reduction_stays_with_vllm(world, layers, monkeypatch, reduce):
    from vllm_layers import Tokens, local_heads, project

    attention, _ = layers(tp=4)
    monkeypatch.setattr(attention.wo_b, "reduce_results", reduce)
    for count in (0, 3):
        before = world.all_reduces
        project(world, layers(tp=4), Tokens.random(count, mega=True), local_heads(0, 4))
        assert world.all_reduces - before == int(reduce)


def test_unfused_path_gives_the_same_bits(world, checkpoint, layers, monkeypatch):
    from vllm_layers import Tokens, local_heads, project

    from vllm_megaattn.engines.vllm import register

    tokens, heads = Tokens.random(5, mega=True), local_heads(0, 8)
    fused, _, _ = project(world, layers(tp=8), tokens, heads)
    monkeypatch.setenv("VLLM_MEGAATTN_PATH", "unfused")
    register()
    unfused = world.make("v41", checkpoint, tp=8)
    y, _, log = project(world, unfused, tokens, heads)
    assert log.names() == ["einsum_fp8_bf16", "mxfp8_quantize_sfd128x4", "mxfp8_gemm_wo_b"]
    assert torch.equal(y, fused)


# Every condition of a mega call, each broken alone: the call must go vLLM's way, with its own kernels and result.
def _gemm_rs(attention, patch):
    patch.setattr(attention, "gemm_rs", SimpleNamespace(should_run=lambda z: False))
    patch.setattr("vllm.models.deepseek_v41.attention.sp_reduce_scatter", lambda y: y)


def _recipe(attention, patch):
    patch.setattr(attention, "_einsum_recipe", (1, 1, 128))


def _lora(attention, patch):
    patch.setattr(attention.wo_b, "requires_unquantized_input", True, raising=False)


def _key(attention, patch):
    patch.delattr(attention.wo_b, "_input_quant_key")


def _subclass(attention, patch):
    kernel = attention.wo_b.quant_method.kernel
    other = object.__new__(type("Foreign", (type(kernel),), {}))
    other.__dict__.update(kernel.__dict__)
    patch.setattr(attention.wo_b.quant_method, "kernel", other)


MEGA_REFUSALS = {
    "GEMM-RS": _gemm_rs,
    "LoRA": _lora,
    "takes no quantised input": _key,
    "Foreign is not known to read F8_128x4": _subclass,
}


@pytest.mark.parametrize("reason", MEGA_REFUSALS)
def test_mega_call_that_a_gate_refuses_is_vllms(world, layers, messages, reason):
    from vllm_layers import Tokens, local_heads, project

    tokens, heads = Tokens.random(5, mega=True), local_heads(0, 8)
    results = []
    for served in (False, True):
        layer = layers(served=served, tp=8)
        layer[0].__dict__.pop("_can_quantize_o_proj", None)  # vLLM 0.33 evaluates its conditions once
        with pytest.MonkeyPatch.context() as patch:
            MEGA_REFUSALS[reason](layer[0], patch)
            y, calls, log = project(world, layer, tokens, heads)
        layer[0].__dict__.pop("_can_quantize_o_proj", None)
        results.append(y)
        assert calls == ["fp8_einsum", "mm_mxfp8"]
        assert log.names() == []
    assert torch.equal(*results)
    assert any("calls left to the engine" in text and reason in text for text in messages)
    _, calls, log = project(world, layers(tp=8), tokens, heads)  # and back, with the condition restored
    assert (calls, log.names()) == ([], ["einsum_fp8_sfd128x4", "mxfp8_gemm_wo_b"])


@pytest.mark.parametrize(
    ("attribute", "value", "reason"),
    [
        ("_einsum_recipe", (1, 1, 128), "recipe"),
        ("o_lora_rank", 1056, "no multiple of 128"),
        ("_fused_layouts_ready", False, "mega attention's order"),
    ],
)
def test_mega_conditions_that_vllm_cannot_run_without(layers, monkeypatch, attribute, value, reason):
    """These would break vLLM's own path in this environment, so the gate alone is asked."""
    from vllm_megaattn.engines.vllm import gates

    attention, _ = layers(tp=8)
    out = attention._alloc_attn_out(1, torch.empty(1, 1, dtype=torch.bfloat16))
    assert gates.mega_refusal(attention, out) == ""
    monkeypatch.setattr(attention, attribute, value, raising=False)
    assert reason in gates.mega_refusal(attention, out)


def test_mega_needs_deepgemm_layout_and_quantised_attention(layers, monkeypatch):
    from vllm_megaattn.engines.vllm import gates

    attention, _ = layers(tp=8)
    assert "not quantised" in gates.mega_refusal(attention, torch.empty(1))
    out = attention._alloc_attn_out(1, torch.empty(1, 1, dtype=torch.bfloat16))
    monkeypatch.setattr(attention.wo_a.weight, "data", torch.empty(1024, 4096, dtype=torch.bfloat16))
    assert "DeepGEMM's layout" in gates.mega_refusal(attention, out)


def test_mega_bf16_input_of_wo_b_is_vllms(world, layers):
    """Anybody else's call of wo_b with a tensor finds vLLM's own kernel."""
    import vllm_standins

    attention, config = layers(tp=8)
    vllm_standins.CALLS.clear()
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(config), torch.inference_mode():
        attention.wo_b(torch.randn(3, 1024, dtype=torch.bfloat16))
    assert [name for name, _ in vllm_standins.CALLS] == ["mm_mxfp8"]


# ---- weights that come again ---------------------------------------------------------------------------------------


def test_reload(world, checkpoint):
    """The weights are vLLM's own here; our state must not stand in its way. (In 0.31 vLLM itself does not permute wo_a
    again after a reload, so values are compared from 0.32 on.)"""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload.layerwise import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
        record_metadata_for_reloading,
    )
    from vllm_layers import Checkpoint, Tokens, expected, local_heads, project, relative_error

    from vllm_megaattn.engines.vllm import register

    register()
    config = world.config("v41", tp=8, hidden=checkpoint.hidden)
    attention = world.build(config)
    model = torch.nn.Module()
    model.attn = attention
    record_metadata_for_reloading(model)
    world.load(attention, checkpoint, config)
    pointers = [p.data_ptr() for linear in (attention.wo_a, attention.wo_b) for p in linear.parameters()]
    other = Checkpoint.random("v41", 1)
    with set_current_vllm_config(config), torch.no_grad():
        initialize_layerwise_reload(model)
        world.fill(attention, other)
        finalize_layerwise_reload(model, config.model_config)
    assert [p.data_ptr() for linear in (attention.wo_a, attention.wo_b) for p in linear.parameters()] == pointers
    tokens, heads = Tokens.random(5, mega=True), local_heads(0, 8)
    y, calls, log = project(world, (attention, config), tokens, heads)
    assert (calls, log.names()) == ([], ["einsum_fp8_sfd128x4", "mxfp8_gemm_wo_b"])
    if not vllm_here.is_older("0.32"):
        assert relative_error(y, expected(tokens, other, cos_sin(attention), heads)) < 4e-3
