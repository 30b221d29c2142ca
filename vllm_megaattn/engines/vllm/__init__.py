"""The vLLM plugin: DeepSeek-V4.1 and V4 attention layers project through this package's kernels.

Entry point of the group "vllm.general_plugins": vLLM calls `register` in every process, workers and the model inspection
subprocess included, before any model is built. It costs microseconds, imports no model and initialises no GPU: it leaves a
note with Python's import system, and when vLLM imports one of the attention modules named in `upstream.TARGETS`, their
classes get two wrapped methods (see `patch`). Nothing else of vLLM is touched. The registry of model classes, which vLLM
offers to plugins, is left alone on purpose: an entry of ours would change a model's module, and that keys vLLM's on-disk
cache of model properties, which would then outlive an upgrade of vLLM.

    upstream.py   every name of vLLM that the plugin relies on, and how it is told that they still mean the same
    patch.py      wrapping the classes, and undoing it
    gates.py      vLLM's own rows of the gate table
    attach.py     what a layer is given when it is built
    kernels.py    the kernel object that keeps MXFP8 bytes in vLLM's linear layers
    forward.py    the projection itself

VLLM_MEGAATTN=0 switches the plugin off, as does leaving "megaattn" out of VLLM_PLUGINS.
"""

from __future__ import annotations

from vllm_megaattn.engines import common


def register(*, device_keys: common.DeviceKeys = common.device_key_for) -> None:
    """Install the plugin in this process. May be called any number of times.

    device_keys: names the device of a layer; tests on a machine without a GPU pass their own.
    """
    from vllm_megaattn.engines.vllm import patch

    if not common.enabled():
        patch.log_switched_off()
        return
    patch.install(device_keys)


def unregister() -> None:
    """Undo `register` for layers built from now on. Layers that are already built keep what they have."""
    from vllm_megaattn.engines.vllm import patch

    patch.uninstall()
