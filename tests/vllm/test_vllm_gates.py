"""The gates of the build, on vLLM's own layers and configurations: what each refuses is left untouched, with its reason."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.capability((9, 0))

UNTOUCHED = "MegaAttnMxfp8LinearKernel"


def build(world, **options):
    from vllm_megaattn.engines.vllm import register

    register()
    return world.build(world.config("v41", tp=8, **options))


def assert_left(attention, messages, reason):
    assert not hasattr(attention, "_megaattn")
    assert attention.wo_a.is_bmm
    for linear in (attention.wo_a, attention.wo_b):
        assert type(getattr(linear.quant_method, "kernel", None)).__name__ != UNTOUCHED
        assert "apply" not in linear.quant_method.__dict__
    found = [text for text in messages if "to the engine:" in text]
    assert len(found) == 1
    assert reason in found[0]


def test_plain_layer_is_served(world, messages):
    attention = build(world)
    assert attention._megaattn.plan.name == "hopper"
    assert not any("to the engine" in text for text in messages)


def test_own_class(world, messages):
    """A subclass of another plugin that overrides `_o_proj` expects vLLM's weight layout."""
    from vllm.models.deepseek_v41.nvidia.flashmla import DeepseekV4FlashMLAAttention

    from vllm_megaattn.engines.vllm import register

    def _o_proj(self, attn_out, positions):
        return attn_out

    foreign = type("OtherPluginAttention", (DeepseekV4FlashMLAAttention,), {"_o_proj": _o_proj})
    silent = type("QuietPluginAttention", (DeepseekV4FlashMLAAttention,), {})
    register()
    config = world.config("v41", tp=8)
    assert_left(world.build(config, cls=foreign), messages, "OtherPluginAttention._o_proj belongs to test_vllm_gates")
    assert hasattr(world.build(config, cls=silent), "_megaattn")


@pytest.mark.parametrize("ignored", [("wo_a", "wo_b"), ("wo_b",), ("wo_a",)])
def test_quantisation(world, messages, ignored):
    """A checkpoint whose configuration names one or both as not quantised."""
    attention = build(world, ignored=tuple(f"model.layers.0.attn.{name}" for name in ignored))
    assert_left(attention, messages, "quantised by UnquantizedLinearMethod")


def test_activations(world, messages):
    attention = build(world, dtype="float16")
    assert_left(attention, messages, "the model runs in float16")


@pytest.mark.parametrize("load_format", ["sharded_state", "tensorizer", "runai_streamer_sharded"])
def test_load_format(world, messages, load_format):
    from vllm_megaattn.engines.vllm import register

    register()
    config = world.config("v41", tp=8)
    before = config.load_config.load_format
    config.load_config.load_format = load_format
    try:
        attention = world.build(config)
    finally:
        config.load_config.load_format = before
    assert_left(attention, messages, f"the load format {load_format} restores weights")


def test_kernels(world, messages):
    """The device as the selector knows it, in the words of the selector."""
    from vllm_megaattn import selector
    from vllm_megaattn.engines.vllm import register

    register(device_keys=lambda capability, device: "sm80")
    attention = world.build(world.config("v41", tp=8))
    assert_left(attention, messages, f"{selector.backend_gap('sm80')} (sm80)")


def test_forced_path(world, messages, monkeypatch):
    """A path that the user forces and that cannot be taken is refused, never replaced by another of ours."""
    monkeypatch.setenv("VLLM_MEGAATTN_PATH", "sideways")
    attention = build(world)
    assert_left(
        attention, messages, "VLLM_MEGAATTN_PATH must be one of auto, fused, unfused, dequantised, got 'sideways'"
    )


def test_batch_invariance(world, messages, monkeypatch):
    """On the CPU backend the mode is honoured, and the kernels are told."""
    from vllm_megaattn import _C

    flags = _C.get_flags()
    monkeypatch.setattr("vllm.envs.VLLM_BATCH_INVARIANT", True, raising=False)
    try:
        attention = build(world)
        assert hasattr(attention, "_megaattn")
        assert _C.get_flags() & _C.FLAG_BATCH_INVARIANT
    finally:
        _C.set_flags(flags)


def test_geometry(world, messages):
    """Rows of wo_a that do not fit the groups."""
    from vllm_megaattn.engines.gates import first_refusal
    from vllm_megaattn.engines.vllm import gates, patch, upstream
    from vllm_megaattn.engines.vllm.attach import facts_of

    attention = build(world)
    target, config = upstream.TARGETS[0], world.config("v41", tp=8)
    assert first_refusal(facts_of(attention, target, config, patch._device_keys), gates.BUILD_GATES) is None
    attention.n_local_groups = 3
    refusal = first_refusal(facts_of(attention, target, config, patch._device_keys), gates.BUILD_GATES)
    assert refusal.gate == "geometry"
    assert "8 heads do not divide into 3 groups" in refusal.reason


def test_attention_output(world, messages):
    """FlashInfer's fused epilogue for V4 with 128 heads writes another format."""
    from vllm_megaattn.engines.gates import first_refusal
    from vllm_megaattn.engines.vllm import gates, patch, upstream
    from vllm_megaattn.engines.vllm.attach import facts_of

    attention = build(world)
    attention._fuse_rope_quant = True
    facts = facts_of(attention, upstream.TARGETS[0], world.config("v41", tp=8), patch._device_keys)
    refusal = first_refusal(facts, gates.BUILD_GATES)
    assert refusal.gate == "attention-output"


def test_engine_names(world, messages, monkeypatch):
    """A vLLM that renamed something we rely on: layers stay as they are, with one warning that names it."""
    from vllm_megaattn.engines.vllm import register, upstream

    names = (*upstream.MODULE_NAMES, ("vllm.model_executor.layers.fusion.quant_activation", "RenamedThing"))
    monkeypatch.setattr(upstream, "MODULE_NAMES", names)
    register()
    config = world.config("v41", tp=8)
    world.build(config)
    assert_left(world.build(config), messages, "quant_activation.RenamedThing, which this release was written for")


def test_failure_while_attaching_leaves_the_layer_alone(world, messages, monkeypatch):
    """Whatever goes wrong in our code must not stop a server that would run without us."""
    from vllm_megaattn.engines.vllm import attach, register

    def broken(*args):
        raise KeyError("broken")

    monkeypatch.setattr(attach, "_make_kernel", broken)
    register()
    attention = world.build(world.config("v41", tp=8))
    assert not hasattr(attention, "_megaattn")
    assert attention.wo_a.is_bmm
    assert any("is left to vLLM" in text for text in messages)


def test_both_linear_layers_or_none(world):
    """Facts of a layer as the gates see it, so that a change of vLLM shows here and not in a server."""
    from vllm_megaattn.engines.vllm import patch, upstream
    from vllm_megaattn.engines.vllm.attach import facts_of

    attention = build(world)
    facts = facts_of(attention, upstream.TARGETS[0], world.config("v41", tp=8), patch._device_keys)
    assert facts.layer == "model.layers.0.attn"
    assert (facts.recipe, facts.scale_dtype, facts.weight_dtype) == ("32x32", "uint8", "float8_e4m3fn")
    assert (facts.groups, facts.heads, facts.head_dim, facts.rope_dim, facts.rank) == (1, 8, 512, 64, 1024)
    assert (facts.wo_a_shape, facts.wo_b_shape) == ((1024, 4096), (1280, 1024))
    assert facts.methods == ("ModelOptLinearMethod", "ModelOptLinearMethod")
    assert (facts.missing, facts.activation_dtype, facts.device_key) == ((), "bfloat16", "cpu")
    assert facts.extra["capability"] == (9, 0)
    assert torch.device("cpu") == attention.wo_a.weight.device
