"""Being a plugin: how vLLM finds it, what registering costs and changes, and how it gets along with others."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import types

import pytest
import torch

ENTRY = "[vllm.general_plugins]\nmegaattn = vllm_megaattn.engines.vllm:register\n"
OTHER = "[vllm.general_plugins]\nother = other_plugin:register\n"


@pytest.fixture
def site(tmp_path):
    """A folder for sys.path with this package's entry point, where it is not installed in the environment."""
    names = {entry.name for entry in importlib.metadata.entry_points(group="vllm.general_plugins")}
    if "megaattn" not in names:
        add_distribution(tmp_path, "vllm_megaattn_entry", ENTRY)
    return tmp_path


def add_distribution(folder, name, entry_points):
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)


def run(site, code, **environment):
    """A fresh interpreter; the last line it prints."""
    settings = {
        **os.environ, "PYTHONPATH": str(site), "CUDA_VISIBLE_DEVICES": "", "VLLM_LOGGING_LEVEL": "INFO", **environment
    }  # fmt: skip
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=settings)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()[-1]


LOAD = """
import os, sys, torch
import vllm.plugins
from vllm_megaattn.engines import imports
from vllm_megaattn.engines.vllm import unregister

watched = []
for switch, names in SETTINGS:
    for name, value in (("VLLM_MEGAATTN", switch), ("VLLM_PLUGINS", names)):
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    for _ in range(2):  # vLLM documents that a process may load plugins more than once
        vllm.plugins.plugins_loaded = False
        vllm.plugins.load_general_plugins()
    watched.append(len(imports._watcher.callbacks))
    unregister()
assert not any(name.startswith("vllm.models") for name in sys.modules)
assert not torch.cuda.is_initialized()
import builtins
print(watched, getattr(builtins, "other_plugin_loads", 0))
"""


@pytest.mark.capability((9, 0))
def test_entry_point_switch_and_allow_list(site):
    """Found by vLLM's own loader, beside another plugin; registers without importing a model or touching CUDA; honours our
    own switch and vLLM's allow-list."""
    add_distribution(site, "other_plugin", OTHER)
    (site / "other_plugin.py").write_text(
        "import builtins\nbuiltins.other_plugin_loads = 0\ndef register():\n    builtins.other_plugin_loads += 1\n"
    )
    settings = [(None, None), ("0", None), ("1", None), (None, "other"), (None, "megaattn"), (None, "other,megaattn")]
    assert run(site, f"SETTINGS = {settings!r}\n" + LOAD) == "[5, 0, 5, 0, 5, 5] 10"


INSPECT = """
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.model_executor.models.registry import ModelRegistry
info = ModelRegistry.models["DeepseekV41ForCausalLM"].inspect_model_cls()
entry = ModelRegistry.models["DeepseekV41ForCausalLM"]
print(info.is_text_generation_model, entry.module_name)
"""


@pytest.mark.capability((9, 0))
def test_model_inspection_subprocess(site, tmp_path):
    """vLLM imports a model in a subprocess without a GPU, with the plugins loaded; the registry's entry is vLLM's own."""
    last = run(site, INSPECT, VLLM_CACHE_ROOT=str(tmp_path / "cache"))
    assert last == "True vllm.models.deepseek_v41"


# ---- what registering changes --------------------------------------------------------------------------------------


def classes():
    import vllm.models.deepseek_v4.nvidia.flashmla as v4
    import vllm.models.deepseek_v41.nvidia.flashinfer_sparse as flashinfer
    import vllm.models.deepseek_v41.nvidia.flashmla as v41

    return [
        v4.DeepseekV4FlashMLAAttention,
        v41.DeepseekV4FlashMLAAttention,
        flashinfer.DeepseekV4FlashInferMLAAttention,
    ]


def test_registering_wraps_two_methods_and_nothing_else(world):
    from vllm_megaattn.engines.vllm import patch, register, unregister

    for cls in classes():
        before = dict(cls.__dict__)
        register()
        register()
        changed = {name for name in cls.__dict__ if cls.__dict__[name] is not before.get(name)}
        assert changed <= {"__init__", "_o_proj"}
        assert cls in patch._patched
        unregister()
        assert "__init__" not in before or cls.__init__ is before["__init__"]
        assert cls not in patch._patched


@pytest.mark.capability((9, 0))
def test_without_the_plugin_everything_is_vllms(world):
    """VLLM_MEGAATTN=0 and after unregister(): the same objects, the same bits."""
    from vllm_layers import Checkpoint, Tokens, local_heads

    from vllm_megaattn.engines.vllm import register, unregister

    checkpoint = Checkpoint.random("v41")
    plain = world.make("v41", checkpoint, tp=8, backend="emulation")
    os.environ["VLLM_MEGAATTN"] = "0"
    try:
        register()
        off = world.make("v41", checkpoint, tp=8, backend="emulation")
    finally:
        del os.environ["VLLM_MEGAATTN"]
    register()
    served = world.make("v41", checkpoint, tp=8, backend="emulation")
    unregister()
    gone = world.make("v41", checkpoint, tp=8, backend="emulation")
    for attention, _ in (off, gone):
        assert sorted(attention.__dict__) == sorted(plain[0].__dict__)
    tokens = Tokens.random(5)
    attn_out = tokens.for_layer(plain[0], local_heads(0, 8))
    want = world.run(plain[0], attn_out, tokens.positions, plain[1])
    for attention, config in (off, gone):
        assert torch.equal(world.run(attention, attn_out, tokens.positions, config), want)
    # a layer that was served before keeps being served: its weights are no longer in vLLM's layout
    assert not torch.equal(world.run(served[0], attn_out, tokens.positions, served[1]), want)


@pytest.mark.capability((9, 0))
def test_unknown_version_leaves_vllm_alone(world, messages, monkeypatch):
    from vllm_megaattn.engines.vllm import patch, register, unregister, upstream

    monkeypatch.setattr(upstream, "version", lambda: "0.47.1")
    register()
    assert not patch._patched
    attention = world.build(world.config("v41", tp=8))
    assert not hasattr(attention, "_megaattn")
    assert [text for text in messages if "0.47.1" in text] == [
        "vllm_megaattn: vLLM 0.47.1 was not tested with this release, which knows 0.30 to 0.33; its output projection "
        "is left alone (VLLM_MEGAATTN_ANY_VERSION=1 tries nevertheless)"
    ]
    unregister()
    monkeypatch.setenv("VLLM_MEGAATTN_ANY_VERSION", "1")
    register()
    assert hasattr(world.build(world.config("v41", tp=8)), "_megaattn")


@pytest.mark.parametrize(
    ("text", "known"),
    [("0.30.0", 1), ("0.33.0", 1), ("0.33.1.dev3+gabc", 1), ("0.29.0", 0), ("0.34.0", 0), ("1.31.0", 0), ("main", 0)],
)
def test_version_range(text, known):
    from vllm_megaattn.engines.vllm import upstream

    assert (upstream.version_gap(text) == "") == bool(known)


def test_this_version_is_in_the_range():
    from vllm_megaattn.engines.vllm import upstream

    assert upstream.version_gap(upstream.version()) == ""


def test_log_lines_are_vllms(world):
    """Our logger is a child of vLLM's, once vLLM has configured logging: its format, level and stream."""
    import logging

    from vllm_megaattn.engines.vllm import patch

    assert patch.reporter.logger.parent is logging.getLogger("vllm")
    assert patch.reporter.logger.propagate
    assert logging.getLogger("vllm").handlers


# ---- two plugins at once -------------------------------------------------------------------------------------------


@pytest.mark.capability((9, 0))
@pytest.mark.parametrize("order", ["other first", "other second"])
def test_other_plugin_that_selects_its_own_subclass(world, messages, order):
    """As vllm-sail does: a subclass with its own `_o_proj`, returned by vLLM's class selector. It keeps its layers."""
    import vllm.models.deepseek_v41.nvidia.model as model
    from vllm.models.deepseek_v41.nvidia.flashmla import DeepseekV4FlashMLAAttention

    from vllm_megaattn.engines.vllm import register

    class OtherAttention(DeepseekV4FlashMLAAttention):
        def _o_proj(self, attn_out, positions):
            return super()._o_proj(attn_out, positions) * 2

    original = model._select_dsv4_attn_cls
    steps = [register, lambda: setattr(model, "_select_dsv4_attn_cls", lambda config: OtherAttention)]
    try:
        for step in steps if order == "other second" else reversed(steps):
            step()
        attention = world.build(world.config("v41", tp=8))
    finally:
        model._select_dsv4_attn_cls = original
    assert type(attention) is OtherAttention
    assert not hasattr(attention, "_megaattn")
    assert any("OtherAttention._o_proj belongs to test_vllm_install" in text for text in messages)


@pytest.mark.capability((9, 0))
def test_other_plugin_that_replaced_the_method_before_us(world, messages):
    """It is there first: the class is left to it, with a warning."""
    from vllm.models.deepseek_v41.nvidia.flashmla import DeepseekV4FlashMLAAttention

    from vllm_megaattn.engines.vllm import patch, register

    original = DeepseekV4FlashMLAAttention._o_proj
    DeepseekV4FlashMLAAttention._o_proj = lambda self, attn_out, positions: attn_out
    try:
        register()
        assert DeepseekV4FlashMLAAttention not in patch._patched
        assert not hasattr(world.build(world.config("v41", tp=8)), "_megaattn")
    finally:
        DeepseekV4FlashMLAAttention._o_proj = original
    assert any("_o_proj was replaced by test_vllm_install" in text for text in messages)


@pytest.mark.capability((9, 0))
def test_other_plugin_that_wraps_the_method_after_us(world):
    """A tracer, say: its wrapper calls ours, and both do their work."""
    import functools

    from vllm.models.deepseek_v41.nvidia.flashmla import DeepseekV4FlashMLAAttention
    from vllm_layers import Checkpoint, OpLog, Tokens, local_heads

    from vllm_megaattn.engines.vllm import register

    register()
    ours, calls = DeepseekV4FlashMLAAttention._o_proj, []

    @functools.wraps(ours)
    def traced(self, attn_out, positions):
        calls.append(attn_out.shape[0])
        return ours(self, attn_out, positions)

    DeepseekV4FlashMLAAttention._o_proj = traced
    try:
        attention, config = world.make("v41", Checkpoint.random("v41"), tp=8)
        tokens = Tokens.random(3)
        with OpLog() as log:
            world.run(attention, tokens.for_layer(attention, local_heads(0, 8)), tokens.positions, config)
    finally:
        DeepseekV4FlashMLAAttention._o_proj = ours
    assert calls == [3]
    assert log.names() == ["o_proj_from_attn"]


@pytest.mark.capability((9, 0))
def test_other_plugin_that_replaced_the_method_after_us(world, messages):
    """Its function expects vLLM's weight layout: layers built from now on are left to it."""
    from vllm.models.deepseek_v41.nvidia.flashmla import DeepseekV4FlashMLAAttention

    from vllm_megaattn.engines.vllm import register

    register()
    ours = DeepseekV4FlashMLAAttention._o_proj
    DeepseekV4FlashMLAAttention._o_proj = lambda self, attn_out, positions: attn_out
    try:
        attention = world.build(world.config("v41", tp=8))
    finally:
        DeepseekV4FlashMLAAttention._o_proj = ours
    assert not hasattr(attention, "_megaattn")
    assert any("_o_proj belongs to test_vllm_install" in text for text in messages)


# ---- every name of vLLM that we touch ------------------------------------------------------------------------------


def test_names_and_classes(world):
    import importlib

    from vllm_megaattn.engines.vllm import upstream

    assert upstream.missing_names() == ()
    for target in upstream.TARGETS:
        if "mega" in target.module and upstream.version().startswith("0.30."):
            continue
        cls = getattr(importlib.import_module(target.module), target.name)
        own = getattr(cls._o_proj, "_megaattn_wraps", cls._o_proj)  # an earlier test may have left our wrapper
        assert isinstance(own, types.FunctionType)
        assert upstream.class_gap(type(cls.__name__, (cls,), {"_o_proj": own})) == ""


def test_missing_names_are_told(monkeypatch):
    from vllm_megaattn.engines.vllm import upstream

    monkeypatch.setattr(upstream, "MODULE_NAMES", (*upstream.MODULE_NAMES, ("vllm.no_such_module", "Thing")))
    assert upstream.missing_names() == ("vllm.no_such_module.Thing",)


def test_class_gaps_are_told():
    from vllm_megaattn.engines.vllm import upstream

    class Nothing:
        pass

    class Changed:
        def _o_proj(self, attn_out, positions, extra):
            return attn_out

    class Foreign:
        def _o_proj(self, attn_out, positions):
            return attn_out

    assert "has no _o_proj" in upstream.class_gap(Nothing)
    assert "not (self, attention output, positions)" in upstream.class_gap(Changed)
    assert "was replaced by test_vllm_install" in upstream.class_gap(Foreign)


@pytest.mark.capability((9, 0))
def test_kernel_object_is_called_as_vllm_calls_kernels(world):
    """Post-load and forward go through the method's kernel object, and only through it."""
    from vllm_layers import Checkpoint

    from vllm_megaattn.engines.vllm import register

    register()
    attention, _ = world.make("v41", Checkpoint.random("v41"), tp=8)
    for linear in (attention.wo_a, attention.wo_b):
        assert "process_weights_after_loading" not in linear.quant_method.__dict__
        assert "apply" not in linear.quant_method.__dict__
        kernel = linear.quant_method.kernel
        assert not getattr(kernel, "supports_pre_processed_weights", False)  # the weight cache (0.31) must refuse us
        y = linear.quant_method.apply(linear, torch.randn(3, linear.weight.shape[1], dtype=torch.bfloat16))
        assert y.shape == (3, linear.weight.shape[0])
        bias = torch.ones(linear.weight.shape[0], dtype=torch.bfloat16)
        x = torch.zeros(2, 3, linear.weight.shape[1], dtype=torch.bfloat16)
        assert torch.equal(linear.quant_method.apply(linear, x, bias), bias.expand(2, 3, -1))
