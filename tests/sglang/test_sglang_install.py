"""Being a plugin: how SGLang finds it, what registering costs and changes, hooks that do not take, and other
plugins."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.capability((9, 0))

ENTRY = "[sglang.srt.plugins]\nmegaattn = vllm_megaattn.engines.sglang:register\n"
VLLM_ENTRY = "[vllm.general_plugins]\nmegaattn = vllm_megaattn.engines.vllm:register\n"
OTHER = "[sglang.srt.plugins]\nother = other_plugin:register\n"


@pytest.fixture
def site(tmp_path):
    """A folder for sys.path with this package's entry points, where it is not installed in the environment."""
    names = {entry.name for entry in importlib.metadata.entry_points(group="sglang.srt.plugins")}
    if "megaattn" not in names:
        add_distribution(tmp_path, "vllm_megaattn_entry", ENTRY + VLLM_ENTRY)
    return tmp_path


def add_distribution(folder, name, entry_points):
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)


PRELUDE = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import sglang_standins
sglang_standins.install((9, 0))
import torch
import sglang.srt.plugins as plugins
"""


def run(site, code, **environment):
    """A fresh interpreter with the stand-ins; the last line it prints and everything it logged."""
    settings = {**os.environ, "PYTHONPATH": str(site), **environment}
    result = subprocess.run([sys.executable, "-c", PRELUDE + code], capture_output=True, text=True, env=settings)
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout.splitlines()[-1], result.stderr


LOAD = """
import os
from vllm_megaattn.engines import imports
from vllm_megaattn.engines.sglang import unregister

for shared, own, names in SETTINGS:
    for name, value in (("VLLM_MEGAATTN", shared), ("SGLANG_MEGAATTN", own), ("SGLANG_PLUGINS", names)):
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    plugins._plugins_loaded = False
    plugins.load_plugins()
    print(sum(name.startswith("sglang.") for name in imports._watcher.callbacks), end=" ")
    unregister()
assert not any(name.startswith("sglang.srt.models") for name in sys.modules)
assert not torch.cuda.is_initialized()
import builtins
print(getattr(builtins, "other_plugin_loads", 0))
"""


def test_entry_point_switches_and_allow_list(site):
    """Found by SGLang's own loader, beside another plugin; registers without importing a model or touching CUDA;
    honours our switches and SGLang's allow-list."""
    add_distribution(site, "other_plugin", OTHER)
    (site / "other_plugin.py").write_text(
        "import builtins\nbuiltins.other_plugin_loads = 0\ndef register():\n    builtins.other_plugin_loads += 1\n"
    )
    settings = [
        (None, None, None), ("0", None, None), (None, "0", None), ("1", "1", None), (None, None, "other"),
        (None, None, "megaattn"), (None, None, "other,megaattn"),
    ]  # fmt: skip
    assert run(site, f"SETTINGS = {settings!r}\n" + LOAD)[0] == "4 0 0 4 0 4 4 6"


SERVE = """
import logging
logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message)s")
import vllm_megaattn.engines.sglang as ours
ours.register.__kwdefaults__["device_keys"] = lambda capability, device: "cpu"
plugins.load_plugins()
import sglang_layers
world = sglang_layers.World((9, 0))
checkpoint = sglang_layers.Checkpoint.random("v41")

def serve():
    built = world.make("v41", checkpoint, tp=4, layers=2)
    for layer in (0, 1):
        y = built.run(sglang_layers.Tokens.random(3), layer=layer)[1]
    return hasattr(built.attention, "_megaattn"), str(built.attention.wo_a.weight.dtype), tuple(y.shape)
print(serve())
"""
SERVED = str((True, "torch.float8_e4m3fn", (3, 1280)))
LEFT = str((False, "torch.bfloat16", (3, 1280)))

BOTH = """
import importlib.metadata
(entry,) = [e for e in importlib.metadata.entry_points(group="vllm.general_plugins") if e.name == "megaattn"]
entry.load()()
"""


def test_through_sglangs_own_loader_with_both_engines_plugins(site):
    """Entry point, hooks placed when the model is imported, a model, one line in the log. The package registers with
    vLLM too: in a process of SGLang that does nothing, before and after."""
    last, log = run(site, BOTH + SERVE + BOTH + "assert not any(name.startswith('vllm.') for name in sys.modules)")
    assert last == SERVED
    lines = [line for line in log.splitlines() if "vllm_megaattn:" in line]
    assert len(lines) == 1
    start = "sglang.megaattn INFO vllm_megaattn: output projection of 2 of 2 attention layers: 2 fused on"
    assert lines[0].startswith(start)
    assert "Failed" not in log


# ---- what registering changes --------------------------------------------------------------------------------------


def test_without_the_plugin_everything_is_sglangs(world, plugin):
    """After unregister(): the same attributes, the same bits."""
    from sglang_layers import Checkpoint, Tokens

    from vllm_megaattn.engines.sglang import unregister

    checkpoint, tokens = Checkpoint.random("v41"), Tokens.random(5)
    plain = world.make("v41", checkpoint, tp=8)
    plugin()
    served = world.make("v41", checkpoint, tp=8)
    unregister()
    gone = world.make("v41", checkpoint, tp=8)
    assert sorted(gone.attention.__dict__) == sorted(plain.attention.__dict__)
    want = plain.run(tokens)[1]
    assert torch.equal(gone.run(tokens)[1], want)
    # a layer that was served before keeps being served: its weights are no longer in SGLang's layout
    assert hasattr(served.attention, "_megaattn")
    assert not torch.equal(served.run(tokens)[1], want)


@pytest.mark.parametrize("switch", ["SGLANG_MEGAATTN", "VLLM_MEGAATTN"])
def test_switched_off(world, plugin, messages, monkeypatch, switch):
    """Bit for bit SGLang's own, and a line that says so."""
    from sglang_layers import Checkpoint, Tokens

    checkpoint, tokens = Checkpoint.random("v41"), Tokens.random(5)
    plain = world.make("v41", checkpoint, tp=8)
    monkeypatch.setenv(switch, "0")
    plugin()
    off = world.make("v41", checkpoint, tp=8)
    assert sorted(off.attention.__dict__) == sorted(plain.attention.__dict__)
    assert torch.equal(off.run(tokens)[1], plain.run(tokens)[1])
    assert messages == [
        (
            "INFO",
            "vllm_megaattn: switched off by the environment; SGLang's own output projection is used "
            "(SGLANG_MEGAATTN or VLLM_MEGAATTN=0)",
        )
    ]


def test_registering_twice_places_a_hook_once(world, plugin):
    from sglang.srt.plugins.hook_registry import HookRegistry

    from vllm_megaattn.engines.sglang import hooks

    plugin()
    plugin()
    for path, hook in hooks._placed.items():
        assert [entry[1] for entry in HookRegistry._hooks[path]] == [hook]
    assert hooks.broken_hooks(mega=hasattr(world.model.MQALayer, "_forward_mega")) == ()


UNKNOWN = """
from vllm_megaattn.engines.sglang import upstream
upstream.version = lambda: "0.7.1"
"""
ANYWAY = """
import os
os.environ["VLLM_MEGAATTN_ANY_VERSION"] = "1"
ours.register()
print(serve())
"""


def test_unknown_version_leaves_sglang_alone(site):
    """No hook is placed, one warning; unless the user insists."""
    code = (
        UNKNOWN
        + SERVE
        + ("from sglang.srt.plugins.hook_registry import HookRegistry\nassert not HookRegistry._hooks\n")
        + ANYWAY
    )
    last, log = run(site, code)
    assert last == SERVED
    lines = [line for line in log.splitlines() if "vllm_megaattn:" in line]
    assert lines[0] == (
        "sglang.megaattn WARNING vllm_megaattn: SGLang 0.7.1 was not tested with this release, which knows 0.5.22 to "
        "0.5.23; its output projection is left alone (VLLM_MEGAATTN_ANY_VERSION=1 tries nevertheless)"
    )
    assert len(lines) == 2
    assert "output projection of 2 of 2" in lines[1]


@pytest.mark.parametrize(
    ("text", "known"),
    [("0.5.22", 1), ("0.5.23", 1), ("0.5.23.post1", 1), ("0.5.23+cu130", 1), ("0.5.21", 0), ("0.5.24", 0),
     ("0.6.22", 0), ("main", 0), ("0.5", 0)],
)  # fmt: skip
def test_version_range(text, known):
    from vllm_megaattn.engines.sglang import upstream

    assert (upstream.version_gap(text) == "") == bool(known)


def test_this_version_is_in_the_range():
    from vllm_megaattn.engines.sglang import upstream

    assert upstream.version_gap(upstream.version()) == ""


# ---- hooks that do not take ----------------------------------------------------------------------------------------


FAILING = """
from sglang.srt.plugins.hook_registry import HookRegistry
original = HookRegistry._apply_target.__func__
def failing(cls, target, hooks):
    if target.endswith("MQALayer._project_wo_b"):
        raise RuntimeError("no")
    original(cls, target, hooks)
HookRegistry._apply_target = classmethod(failing)
"""


def test_hook_that_sglang_failed_to_place(site):
    """SGLang logs the failure and goes on. Nothing may then rely on the other hooks: the model is left, with one
    warning."""
    last, log = run(site, FAILING + SERVE)
    assert last == LEFT
    assert "Failed to apply hooks to sglang.srt.models.deepseek_v4.MQALayer._project_wo_b" in log
    warnings = [line for line in log.splitlines() if "vllm_megaattn: left" in line]
    assert len(warnings) == 1
    assert "WARNING" in warnings[0]
    assert "SGLang did not place the hooks on MQALayer._project_wo_b" in warnings[0]


@pytest.mark.parametrize(
    "name",
    [
        "MQALayer._project_wo_b",
        "fused_rope_wo_a_bf16",
        "wo_a_fp8_gemm_enabled",
        "DeepseekV4ForCausalLMNextN.__init__",
    ],
)
def test_hook_that_was_overwritten_later(world, plugin, messages, monkeypatch, name):
    """Another plugin put a function of its own there: SGLang's loader and forward would no longer fit together."""
    import sglang.srt.models.deepseek_v4_nextn as draft

    plugin()
    owner = draft if "NextN" in name else world.model
    for part in name.split(".")[:-1]:
        owner = getattr(owner, part)
    monkeypatch.setattr(owner, name.rpartition(".")[2], lambda *args, **kwargs: False)
    built = world.make("v41", tp=8)
    assert not hasattr(built.attention, "_megaattn")
    assert any(f"did not place the hooks on {name}" in text for _, text in messages)


def test_changed_names_are_told(world, monkeypatch):
    from vllm_megaattn.engines.sglang import upstream

    assert upstream.missing_names(world.model) == ()
    if hasattr(world.model.MQALayer, "_forward_mega"):
        assert upstream.missing_mega_names(world.model) == ()
    else:
        assert "MQALayer._forward_mega" in " ".join(upstream.missing_mega_names(world.model))
    wanted = {**upstream.SIGNATURES, "no_such_function": ("x",), "wo_a_fp8_gemm_enabled": ("quant_config", "layer")}
    monkeypatch.setattr(upstream, "SIGNATURES", wanted)
    monkeypatch.setattr(upstream, "FORWARD_NAMES", (*upstream.FORWARD_NAMES, "no_such_name"))
    assert upstream.missing_names(world.model) == (
        "wo_a_fp8_gemm_enabled(quant_config, layer)",
        "no_such_function",
        "MQALayer.forward using no_such_name",
    )


# ---- other plugins' hooks on the same names ------------------------------------------------------------------------


OTHER_HOOK = """
import builtins
builtins.other_calls = []
def traced(original, *args, **kwargs):
    builtins.other_calls.append(args[0].__class__.__name__)
    return original(*args, **kwargs)
def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    for target in TARGETS:
        HookRegistry.register(f"sglang.srt.models.deepseek_v4.{target}", traced, HookType.AROUND)
"""


DEPTH = """
import builtins
def depth(function):
    return 0 if function is None else 1 + depth(getattr(function, "__wrapped__", None))
print(len(builtins.other_calls), depth(world.model.MQALayer._project_wo_b), depth(world.model.MQALayer.forward))
"""


@pytest.mark.parametrize(
    ("name", "targets", "counts"),
    [("aaa", ("MQALayer._project_wo_b", "MQALayer.forward"), "4 3 2"), ("zzz", ("MQALayer._project_wo_b",), "2 3 1")],
)
def test_plugin_with_hooks_on_the_same_model(site, name, targets, counts):
    """Its hooks import the model while SGLang applies them: ours are placed in the middle of that, and every hook
    once.

    counts: calls of the other's hooks by two layers; functions on top of each other in _project_wo_b and in forward.
    """
    add_distribution(site, "other_plugin", OTHER.replace("other =", f"{name} ="))
    (site / "other_plugin.py").write_text(OTHER_HOOK.replace("TARGETS", repr(targets)))
    last, log = run(site, SERVE + DEPTH)
    assert last == counts
    assert "2 of 2 attention layers" in log
