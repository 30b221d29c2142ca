"""What every engine plugin needs before it looks at a layer: the switch, the device's name, and warming a device up."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from vllm_megaattn import _C, self_check

ENV_SWITCH = "VLLM_MEGAATTN"
ENV_ANY_VERSION = "VLLM_MEGAATTN_ANY_VERSION"

_OFF = ("0", "false", "off", "no")

# How a plugin names the device of a layer for `selector`: (compute capability the engine reports or None, a tensor's
# device) -> device key. A plugin takes it as an option, so that tests on a machine without a GPU can stand for one.
DeviceKeys = Callable[["tuple[int, int] | None", torch.device], str]


def enabled(*switches: str) -> bool:
    """False when the user switched the plugins off with VLLM_MEGAATTN=0 (or false, off, no), or one of them with one of
    `switches`, the engine's own variables."""
    return all(os.environ.get(name, "").strip().lower() not in _OFF for name in (ENV_SWITCH, *switches))


def any_version() -> bool:
    """True when the user wants engine versions that this release was not tested with (VLLM_MEGAATTN_ANY_VERSION=1)."""
    return os.environ.get(ENV_ANY_VERSION, "").strip().lower() not in ("", *_OFF)


def device_key_for(capability: tuple[int, int] | None, device: torch.device) -> str:
    """`selector`'s name of the device that will run a layer.

    capability: what the engine's platform reports for its GPU, None without one.
    device:     where the layer's weights are while it is built. The meta device means "the GPU later"; so does the CPU
                on a machine with a GPU, where engines build layers on the host before they move them.

    Asks no driver for the capability: it must not initialise CUDA in a process that will fork.
    """
    on_gpu = device.type in ("cuda", "meta") or (device.type == "cpu" and torch.cuda.is_available())
    if on_gpu and capability is not None:
        return f"sm{capability[0]}{capability[1]}"
    return device.type


def prepare_device(device: torch.device) -> None:
    """Loads the kernels for a CUDA device now rather than at the first call, which may lie inside a graph capture.

    Does nothing for other devices. Raises RuntimeError with the driver's reason.
    """
    if device.type == "cuda":
        _C.cuda_prepare(device.index if device.index is not None else torch.cuda.current_device())


def device_fault(device: torch.device) -> str:
    """Why the kernels cannot be trusted on this device, or "". On a CUDA device it loads them and, once per process, runs
    the first-use comparison with the CPU backend (`self_check`): here, while nothing depends on it yet."""
    if device.type != "cuda":
        return ""
    default = torch.get_default_dtype()
    try:
        # An engine builds layers with the model's dtype and device as torch's defaults; the comparison has its own.
        torch.set_default_dtype(torch.float32)
        with torch.device("cpu"):
            prepare_device(device)
            probe = torch.empty(1, device=device)
            self_check.before_call("o_proj_from_attn", probe)
            disabled = self_check.disabled_ops(probe.device.index)
    except RuntimeError as error:
        return str(error)
    finally:
        torch.set_default_dtype(default)
    return "; ".join(f"{op} failed the self-check: {why}" for op, why in disabled.items())


def request_batch_invariance() -> None:
    """From now on a token's result must not depend on how many others are in the batch (process-wide)."""
    _C.set_flags(_C.get_flags() | _C.FLAG_BATCH_INVARIANT)
