"""The gates, on SGLang's own model and settings: what one refuses is left untouched, with one warning that says
why."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytestmark = pytest.mark.capability((9, 0), (10, 0), (10, 3), (12, 0))

hopper = pytest.mark.capability((9, 0))


@pytest.fixture(scope="module")
def checkpoint(world):
    from sglang_layers import Checkpoint

    return Checkpoint.random("v41")


def untouched(attention, reference) -> None:
    """The same attributes, parameters and values as a layer that was built without the plugin."""
    assert sorted(attention.__dict__) == sorted(reference.__dict__)
    assert attention.use_fused_wo_a == reference.use_fused_wo_a
    for name in ("wo_a", "wo_b"):
        ours, theirs = getattr(attention, name), getattr(reference, name)
        assert sorted(ours.__dict__) == sorted(theirs.__dict__)
        assert sorted(ours.quant_method.__dict__) == sorted(theirs.quant_method.__dict__)
        mine, others = dict(ours.named_parameters()), dict(theirs.named_parameters())
        assert mine.keys() == others.keys()
        for key in mine:
            assert (mine[key].dtype, mine[key].shape) == (others[key].dtype, others[key].shape)


def assert_left(built, reference, messages, reason) -> None:
    untouched(built.attention, reference.attention)
    warnings = [text for level, text in messages if level == "WARNING"]
    assert len(warnings) == 1
    assert warnings[0].startswith("vllm_megaattn: left ")
    assert reason in warnings[0]


@pytest.mark.parametrize("model", ["v41", "v4"])
def test_plain_model_is_served(world, plugin, messages, model):
    plugin()
    built = world.make(model, layers=2, tp=2)
    assert [hasattr(attention, "_megaattn") for attention in built.attentions] == [True, True]
    assert messages == []


# ---- the device ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["sm80", "sm89", "sm100", "sm120", "rocm", "cuda"])
def test_device_without_a_kernel(world, plugin, messages, limit_as_imported, key):
    """The selector's own reason, whatever it says for this build and this device."""
    from vllm_megaattn import selector

    reference = world.make("v41", tp=4)
    plugin(lambda capability, device: key)
    built = world.make("v41", tp=4)
    gap = selector.backend_gap(key)
    if not gap:
        assert hasattr(built.attention, "_megaattn")
        return
    assert_left(built, reference, messages, f"{gap} ({key})")


def test_device_that_gains_a_kernel_is_served(world, plugin, limit_as_imported, monkeypatch):
    """When the selector's table gets a row for this GPU, layers attach, and nothing else has to change."""
    from vllm_megaattn import selector

    key = "sm{}{}".format(*world.capability)
    cpu = next(row for row in selector.TABLE if row.backend == "cpu")
    rows = tuple(row for row in selector.TABLE if key not in row.devices)
    plugin(lambda capability, device: f"sm{capability[0]}{capability[1]}")
    monkeypatch.setattr(selector, "_cache", {})
    monkeypatch.setattr(selector, "TABLE", rows)
    assert not hasattr(world.make("v41", tp=4).attention, "_megaattn")
    monkeypatch.setattr(selector, "_cache", {})
    monkeypatch.setattr(selector, "TABLE", (*rows, cpu._replace(devices=(key,))))
    assert hasattr(world.make("v41", tp=4).attention, "_megaattn")


def test_name_of_the_device_by_default(world, plugin):
    """From SGLang's own platform; asking it does not initialise CUDA."""
    from sglang_layers import model_config, quantization

    from vllm_megaattn.engines import common
    from vllm_megaattn.engines.sglang import attach, hooks

    with world.context(tp=4):
        facts = attach.facts_of(
            model_config("v41"), quantization("v41"), "x", common.device_key_for, hooks.broken_hooks
        )  # fmt: skip
    assert facts.device_key == "sm{}{}".format(*world.capability)
    assert not torch.cuda.is_initialized()


@hopper
def test_platform(world, plugin, messages):
    from sglang.srt.runtime_context import override_platform

    reference = world.make("v41", tp=4)
    plugin()
    with override_platform(is_cuda=False):
        built = world.make("v41", tp=4)
    assert_left(built, reference, messages, "does not run on an NVIDIA GPU")


# ---- the checkpoint ------------------------------------------------------------------------------------------------


@hopper
@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ({"weight_block_size": [64, 64]}, "scaled per 64x64, not per 32x32 or 128x128 block"),
        ({"scale_fmt": None}, "the weight scales are float32; only power-of-two bytes"),
        ({"ignored_layers": ["model.layers.0.self_attn.wo_b"]}, "does not quantise model.layers.0.self_attn.wo_b"),
    ],
)
def test_quantisation(world, plugin, messages, entries, reason):
    from sglang_layers import quantization

    def quant():
        ignored = entries.get("ignored_layers")
        made = quantization("v41", **{k: v for k, v in entries.items() if k != "ignored_layers"})
        made.ignored_layers = ignored or []
        return made

    reference = world.make("v41", tp=4, quant=quant())
    plugin()
    assert_left(world.make("v41", tp=4, quant=quant()), reference, messages, reason)


@hopper
def test_checkpoint_that_is_not_quantised(world, plugin, messages):
    reference = world.make("v41", tp=4, quant=None)
    plugin()
    assert_left(world.make("v41", tp=4, quant=None), reference, messages, "the output projection is not quantised")


@hopper
@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"head_dim": 256}, "heads of 256 with 64 rotated columns"),
        ({"o_lora_rank": 1040}, "a multiple of 32"),
        ({"o_groups": 2}, "do not divide into"),
    ],
)
def test_geometry(world, plugin, messages, config, reason):
    """Of the model's configuration, before any layer is built."""
    from sglang_layers import model_config, quantization

    from vllm_megaattn.engines.gates import first_refusal
    from vllm_megaattn.engines.sglang import attach, gates, hooks

    with world.context(tp=4):
        facts = attach.facts_of(
            model_config("v41", **config), quantization("v41"), "x", lambda *_: "cpu", hooks.broken_hooks
        )  # fmt: skip
    facts = dataclasses.replace(facts, activation_dtype="bfloat16")
    refusal = first_refusal(facts, gates.BUILD_GATES)
    assert refusal is not None
    assert reason in refusal.reason


@hopper
def test_activations(world, plugin, messages):
    import sglang_layers

    def build():
        with world.context(tp=4), sglang_layers._default_dtype(torch.float16):
            return world.model.DeepseekV4ForCausalLM(
                config=sglang_layers.model_config("v41"), quant_config=sglang_layers.quantization("v41")
            )

    plugin()
    assert not any(hasattr(module, "_megaattn") for module in build().modules())
    assert any("runs in float16" in text for _, text in messages)


# ---- the server's settings -----------------------------------------------------------------------------------------


SETTINGS = [
    ({"load_format": "sharded_state"}, "the load format sharded_state"),
    ({"load_format": "remote_instance"}, "the load format remote_instance"),
    ({"load_format": "flash_rl"}, "the load format flash_rl"),
    ({"cpu_offload_gb": 4}, "offloaded to the host"),
    ({"offload_group_size": 2}, "offloaded to the host"),
]


@hopper
@pytest.mark.parametrize(("settings", "reason"), SETTINGS)
def test_settings(world, plugin, messages, settings, reason):
    reference = world.make("v41", tp=4, settings=settings)
    plugin()
    assert_left(world.make("v41", tp=4, settings=settings), reference, messages, reason)


@hopper
@pytest.mark.parametrize("load_format", ["auto", "safetensors", "fastsafetensors", "runai_streamer", "dummy", "pt"])
def test_load_formats_that_are_served(world, plugin, messages, load_format):
    plugin()
    assert hasattr(world.make("v41", tp=8, settings={"load_format": load_format}).attention, "_megaattn")
    assert messages == []


@hopper
@pytest.mark.parametrize(
    ("fact", "value", "reason"),
    [
        ("weight_cache_mode", "client", "shared with other processes"),
        ("decode_context_tp", True, "context parallelism re-shards"),
        ("megakernel", True, "replaced by a megakernel"),
        ("forced_marlin", True, "Marlin is forced"),
    ],
)
def test_modes(world, plugin, messages, monkeypatch, fact, value, reason):
    from vllm_megaattn.engines.sglang import upstream

    reference = world.make("v41", tp=4)
    plugin()
    monkeypatch.setattr(upstream, fact, lambda: value)
    assert_left(world.make("v41", tp=4), reference, messages, reason)


def test_settings_are_read_where_sglang_keeps_them(world, monkeypatch):
    """Every path into SGLang's runtime context exists there: an unknown one would read as "off"."""
    import inspect
    import re

    from vllm_megaattn.engines.sglang import upstream

    paths = set(re.findall(r'_setting\("([a-z0-9_.]+)"', inspect.getsource(upstream)))
    assert len(paths) > 10
    unset = object()
    absent = {"exec.kernel.enable_nvidia_megakernel"} if upstream.version().startswith("0.5.22") else set()
    with world.context(tp=4):
        assert {path for path in paths if upstream._setting(path, unset) is unset} <= absent
    with world.context(tp=4, load_format="dummy", cpu_offload_gb=3):
        assert upstream.load_format() == "dummy"
        assert upstream.offloads()
    monkeypatch.setenv("SGLANG_FORCE_FP8_MARLIN", "1")
    assert upstream.forced_marlin()


@hopper
def test_deterministic_inference(world, plugin):
    """The CPU kernels are batch-invariant; a backend that is not proved to be is refused."""
    import sglang_layers

    from vllm_megaattn import _C, selector
    from vllm_megaattn.engines import gates as shared

    flags = _C.get_flags()
    plugin()
    settings = {"enable_deterministic_inference": True}
    try:
        assert hasattr(world.make("v41", tp=4, settings=settings).attention, "_megaattn")
        assert _C.get_flags() != flags
    finally:
        _C.set_flags(flags)
    backend = selector.select_path("cpu", rank=sglang_layers.RANK).backend
    before, shared.BATCH_INVARIANT_BACKENDS = shared.BATCH_INVARIANT_BACKENDS, frozenset()
    try:
        assert not hasattr(world.make("v41", tp=4, settings=settings).attention, "_megaattn")
        assert hasattr(world.make("v41", tp=4).attention, "_megaattn")
    finally:
        shared.BATCH_INVARIANT_BACKENDS = before
    assert backend in before


# ---- layers that are not the plugin's ------------------------------------------------------------------------------


@hopper
def test_dspark_draft_is_left_with_its_reason(world, plugin, messages):
    """Its class has a forward of its own and always loads wo_a as BF16."""
    import sglang.srt.models.deepseek_v4_dspark as dspark
    from sglang_layers import model_config, quantization

    def build():
        with world.context(tp=4):
            return dspark.DSparkAttention(model_config("v41"), 0, quantization("v41"), "model.layers.0.self_attn")

    reference = build()
    plugin()
    attention = build()
    assert sorted(attention.__dict__) == sorted(reference.__dict__)
    assert attention.wo_a.weight.dtype is reference.wo_a.weight.dtype is not torch.float8_e4m3fn
    assert [text for _, text in messages] == [
        "vllm_megaattn: left layer 0 and layers like it to the engine: DSpark's draft layers rotate and project "
        "their attention output in a method of their own"
    ]


@hopper
def test_served_and_left_models_in_one_process(world, checkpoint, plugin):
    """A draft model that is not quantised, beside a served target: each loads and computes in its own way."""
    import sglang_standins as standins
    from sglang_layers import OpLog, Tokens

    plugin()
    served = world.make("v41", checkpoint, tp=4)
    left = world.make("v41", checkpoint, tp=4, settings={"load_format": "sharded_state"})
    assert left.attention.wo_a.weight.dtype is torch.bfloat16
    for built, ours in ((served, True), (left, False)):
        with OpLog() as log:
            built.run(Tokens.random(3))
        assert bool(log.names()) == ours
        assert bool(standins.called()) == (not ours)


@hopper
def test_layer_that_is_not_what_was_described_is_an_error(world, plugin, monkeypatch):
    """Once wo_a is kept as FP8, SGLang could not serve the layer either: fail while starting, by name."""
    from vllm_megaattn.engines.sglang import upstream

    plugin()
    monkeypatch.setattr(upstream, "LAYER_ATTRIBUTES", (*upstream.LAYER_ATTRIBUTES, "no_such_attribute"))
    with pytest.raises(RuntimeError, match=r"layers\.0\.self_attn cannot be served.*no_such_attribute is missing"):
        world.make("v41", tp=4)
