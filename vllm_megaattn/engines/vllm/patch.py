"""Wrapping two methods of vLLM's attention classes, and undoing it.

`__init__`: once the outermost constructor of a layer is done, the layer is attached (attach.py). `_o_proj`: a layer that
was attached goes through forward.py, every other straight into vLLM's own method.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import ModuleType

import torch

from vllm_megaattn._version import __version__
from vllm_megaattn.engines import common, imports
from vllm_megaattn.engines.report import Reporter
from vllm_megaattn.engines.vllm import upstream
from vllm_megaattn.engines.vllm.state import ATTRIBUTE

# A child of vLLM's own logger, so that it has vLLM's format, level and stream.
reporter = Reporter(logging.getLogger("vllm.megaattn"))

_MARK = "_megaattn_wraps"  # on our functions: vLLM's function underneath
_patched: dict[type, upstream.Target] = {}
_device_keys: common.DeviceKeys = common.device_key_for


def install(device_keys: common.DeviceKeys) -> None:
    """Watch for vLLM's attention modules; those that are loaded already are patched now."""
    global _device_keys
    _device_keys = device_keys
    for module in dict.fromkeys(target.module for target in upstream.TARGETS):
        imports.after_import(module, patch_module)


def uninstall() -> None:
    """Layers built from now on are vLLM's own. The wrapped `_o_proj` stays, for layers that were attached before; for any
    other layer it calls vLLM's method and nothing else."""
    for module in dict.fromkeys(target.module for target in upstream.TARGETS):
        imports.forget(module)
    for cls in list(_patched):
        init = cls.__dict__["__init__"]
        if is_ours(init):
            cls.__init__ = getattr(init, _MARK)
        del _patched[cls]


def log_switched_off() -> None:
    reporter.once(f"switched off by {common.ENV_SWITCH}=0; vLLM's own output projection is used")


def patch_module(module: ModuleType) -> None:
    """Called when one of the target modules has been imported. Must not raise: vLLM is in the middle of an import."""
    try:
        gap = upstream.version_gap(upstream.version())
        if gap and not common.any_version():
            reporter.once(
                f"{gap}; its output projection is left alone ({common.ENV_ANY_VERSION}=1 tries nevertheless)",
                logging.WARNING,
            )
            return
        for target in upstream.TARGETS:
            cls = getattr(module, target.name, None)
            if target.module == module.__name__ and cls is not None and cls not in _patched:
                _patch_class(cls, target)
    except Exception:
        reporter.logger.exception("vllm_megaattn: could not be installed; vLLM's own output projection is used")


def _patch_class(cls: type, target: upstream.Target) -> None:
    projection = cls.__dict__.get("_o_proj", cls._o_proj)
    if not is_ours(projection):
        gap = upstream.class_gap(cls)
        if gap:
            reporter.once(f"{gap}; layers of this class are left to vLLM", logging.WARNING)
            return
        cls._o_proj = _wrap_projection(projection)
    _patched[cls] = target
    cls.__init__ = _wrap_init(cls, cls.__init__)


def _wrap_init(cls: type, original: Callable) -> Callable:
    @functools.wraps(original)
    def __init__(self: torch.nn.Module, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)
        # A mega layer runs FlashMLA's constructor inside its own: only the outermost one attaches.
        if cls in _patched and next(base for base in type(self).__mro__ if base in _patched) is cls:
            _attach(self, _patched[cls], args, kwargs)

    setattr(__init__, _MARK, original)
    return __init__


def _wrap_projection(original: Callable) -> Callable:
    @functools.wraps(original)
    def _o_proj(self: torch.nn.Module, attn_out: object, positions: torch.Tensor) -> torch.Tensor:
        state = self.__dict__.get(ATTRIBUTE)
        if state is None:
            return original(self, attn_out, positions)
        from vllm_megaattn.engines.vllm import forward

        return forward.project(state, self, attn_out, positions, original)

    setattr(_o_proj, _MARK, original)
    return _o_proj


def is_ours(function: Callable) -> bool:
    """Whether a function is one of our wrappers itself: functools.wraps copies our mark to whoever wraps it."""
    return hasattr(function, _MARK) and upstream.defining_module(function) == __name__


def foreign_owner(function: Callable) -> str:
    """The module of another plugin whose function stands where ours should, or "".

    One that wraps ours (as functools.wraps records) calls it and may stay; one that replaced ours would find FP8 bytes
    where it expects vLLM's layout.
    """
    link: Callable | None = function
    while link is not None:
        if is_ours(link):
            return ""
        link = getattr(link, "__wrapped__", None)
    return upstream.defining_module(function)


def _attach(layer: torch.nn.Module, target: upstream.Target, args: tuple, kwargs: dict) -> None:
    from vllm_megaattn.engines.vllm.attach import attach

    vllm_config = kwargs.get("vllm_config", args[0] if args else None)
    try:
        attach(layer, target, vllm_config, _device_keys, reporter, foreign_owner(type(layer)._o_proj))
    except Exception:
        reporter.logger.exception("vllm_megaattn %s: %s is left to vLLM", __version__, target.name)
