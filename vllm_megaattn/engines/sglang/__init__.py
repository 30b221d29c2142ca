"""The SGLang plugin: DeepSeek-V4.1 and V4 attention layers project through this package's kernels.

Entry point of the group "sglang.srt.plugins": SGLang calls `register` in every process of a server (HTTP front,
schedulers, detokenizer) before anything else runs there. It costs microseconds, imports no model and initialises no
GPU: it leaves a note with Python's import system, and when SGLang imports the DeepSeek model, which only schedulers
do, hooks are placed through SGLang's own HookRegistry. SGLang swallows what goes wrong there, so the plugin looks at
every hook itself before it relies on one, and a model is either served in all its layers or left exactly as it is.

    upstream.py   every name of SGLang that the plugin relies on, and how it is told that they still mean the same
    hooks.py      placing the hooks, verifying that they took, deciding about a model while it is built
    gates.py      SGLang's own rows of the gate table
    attach.py     describing a model to the gates; what a layer is given when it is built
    weights.py    keeping MXFP8 bytes in parameters that SGLang loads in place, again and again
    forward.py    the projection itself
    state.py      what is known of one served layer

SGLANG_MEGAATTN=0 (or VLLM_MEGAATTN=0) switches the plugin off, as does leaving "megaattn" out of SGLANG_PLUGINS.
"""

from __future__ import annotations

from vllm_megaattn.engines import common

ENV_SWITCH = "SGLANG_MEGAATTN"


def register(*, device_keys: common.DeviceKeys = common.device_key_for) -> None:
    """Install the plugin in this process. May be called any number of times.

    device_keys: names the device of a layer; tests on a machine without a GPU pass their own.
    """
    from vllm_megaattn.engines.sglang import hooks

    if not common.enabled(ENV_SWITCH):
        hooks.log_switched_off()
        return
    hooks.install(device_keys)


def unregister() -> None:
    """Undo `register` for models built from now on. Layers that are already built keep what they have."""
    from vllm_megaattn.engines.sglang import hooks

    hooks.uninstall()
