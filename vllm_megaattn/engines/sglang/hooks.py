"""Placing hooks through SGLang's HookRegistry, verifying that they took, and deciding about a model while it is
built.

SGLang imports the module of a hook's target when it applies hooks, in every process. The DeepSeek model costs seconds
there, so ours are registered when the model is imported anyway. A hook does nothing but call SGLang's own function
until a model is decided to be served.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import NamedTuple

import torch

from vllm_megaattn.engines import common, imports
from vllm_megaattn.engines.report import Reporter
from vllm_megaattn.engines.sglang import attach, forward, upstream
from vllm_megaattn.engines.sglang.state import ATTRIBUTE

# A child of SGLang's own logger, so that it has SGLang's format, level and stream.
reporter = Reporter(logging.getLogger("sglang.megaattn"))

_installed = False
_device_keys: common.DeviceKeys = common.device_key_for
_placed: dict[str, Callable] = {}  # path of a target: our hook
_deciding: list[_Building] = []  # the models and layers that are being built, the innermost last


class _Building(NamedTuple):
    config: object
    quant_config: object
    decision: attach.Decision | None


class Target(NamedTuple):
    module: str  # whose import places the hook
    name: str
    hook: Callable  # (original, *args, **kwargs)
    mega: bool = False  # needed by mega attention only; absent before 0.5.23


# ---- installing ----------------------------------------------------------------------------------------------------


def install(device_keys: common.DeviceKeys) -> None:
    """Watch for SGLang's DeepSeek modules; those that are loaded already are hooked now."""
    global _installed, _device_keys
    _installed, _device_keys = True, device_keys
    for module in dict.fromkeys(target.module for target in TARGETS):
        imports.after_import(module, _hook_module)


def uninstall() -> None:
    """Models built from now on are SGLang's own; hooks that are placed stay and only call what they wrap."""
    global _installed
    _installed = False
    for module in dict.fromkeys(target.module for target in TARGETS):
        imports.forget(module)


def log_switched_off() -> None:
    reporter.once(f"switched off by the environment; SGLang's own output projection is used ({_switches()}=0)")


def _switches() -> str:
    from vllm_megaattn.engines.sglang import ENV_SWITCH

    return f"{ENV_SWITCH} or {common.ENV_SWITCH}"


def _hook_module(module: ModuleType) -> None:
    """Called when one of the target modules has been imported. Must not raise: SGLang is in the middle of an
    import."""
    try:
        gap = upstream.version_gap(upstream.version())
        if gap and not common.any_version():
            reporter.once(
                f"{gap}; its output projection is left alone ({common.ENV_ANY_VERSION}=1 tries nevertheless)",
                logging.WARNING,
            )
            return
        _place([target for target in TARGETS if target.module == module.__name__])
    except Exception:
        reporter.logger.exception("vllm_megaattn: could not be installed; SGLang's own output projection is used")


def _place(targets: list[Target]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    source = HookSource(plugin_name="megaattn", dist_name="vllm-megaattn")
    for target in targets:
        path = f"{target.module}.{target.name}"
        if path in _placed or upstream.resolve(path) is None:  # a missing one is named by upstream.missing_names
            continue
        HookRegistry.register(path, target.hook, HookType.AROUND, source=source)
        _placed[path] = target.hook
    # Another plugin's hook may have imported the module: then hooks are being applied right now, and the target that
    # is in work would be wrapped twice, once here and once there.
    in_work = _target_in_work(HookRegistry)
    if in_work is not None:
        HookRegistry._patched.add(in_work)
    try:
        HookRegistry.apply_hooks()
    finally:
        if in_work is not None:
            HookRegistry._patched.discard(in_work)


def _target_in_work(registry: type) -> str | None:
    """The target of the call of `apply_hooks` that is on the stack, if one is."""
    code = registry.apply_hooks.__func__.__code__
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is code:
            return frame.f_locals.get("target")
        frame = frame.f_back
    return None


def broken_hooks(*, mega: bool) -> tuple[str, ...]:
    """Targets that do not run our hook, whatever SGLang says; those of mega attention and of a draft model's module
    only where they matter."""
    broken = []
    for target in TARGETS:
        loaded = target.module in sys.modules and target.module != upstream.DRAFT_DSPARK  # that one only takes notes
        if mega if target.mega else loaded:
            function = upstream.resolve(f"{target.module}.{target.name}")
            if function is None or not _runs(function, target.hook):
                broken.append(target.name)
    return tuple(broken)


def _runs(function: object, hook: Callable) -> bool:
    """Whether a function is SGLang's wrapper around our hook, or wraps it in turn."""
    while function is not None:
        cells = getattr(function, "__closure__", None) or ()
        if any(_content(cell) is hook for cell in cells):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _content(cell: object) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


# ---- deciding ------------------------------------------------------------------------------------------------------


def _decide(config: object, quant_config: object, layer: str) -> attach.Decision | None:
    """About a model by its configuration; None where the plugin has no say. A failure leaves the model to SGLang."""
    if not _installed:
        return None
    try:
        return attach.decide(config, quant_config, layer, _device_keys, broken_hooks)
    except Exception:
        reporter.logger.exception("vllm_megaattn: %s is left to SGLang", layer)
        return None


@contextlib.contextmanager
def _building(config: object, quant_config: object, layer: str) -> Iterator[attach.Decision | None]:
    """Decides, unless the model around it has been decided about: layers and loader must not disagree."""
    outer = _deciding[-1] if _deciding else None
    if outer is not None and outer.config is config and outer.quant_config is quant_config:
        decision = attach.rename(outer.decision, layer)
    else:
        decision = _decide(config, quant_config, layer)
    _deciding.append(_Building(config, quant_config, decision))
    try:
        yield decision
    finally:
        _deciding.pop()


def around_model_init(
    original: Callable,
    self: torch.nn.Module,
    config: object,
    quant_config: object = None,
    *args: object,
    **kwargs: object,
) -> None:
    """The model asks `wo_a_fp8_gemm_enabled` too: whether its loader expands wo_a to BF16."""
    with _building(config, quant_config, type(self).__name__):
        original(self, config, quant_config, *args, **kwargs)


def around_layer_init(
    original: Callable,
    self: torch.nn.Module,
    config: object,
    layer_id: int,
    quant_config: object = None,
    prefix: str = "",
    *args: object,
    **kwargs: object,
) -> None:
    with _building(config, quant_config, prefix or f"layer {layer_id}") as decision:
        original(self, config, layer_id, quant_config, prefix, *args, **kwargs)
    if decision is not None:
        attach.attach(self, decision, sys.modules[upstream.MODEL], reporter)


def around_wo_a_fp8_gemm_enabled(original: Callable, quant_config: object) -> bool:
    building = _deciding[-1] if _deciding else None
    if building is None or building.decision is None or building.quant_config is not quant_config:
        return original(quant_config)
    return building.decision.refusal is None or original(quant_config)


def around_setup_fp8_wo_a_scales(original: Callable, self: torch.nn.Module, is_nextn: bool) -> None:
    """SGLang's takes every layer's scales for 128x128 blocks and lays them out for DeepGEMM."""
    if not any(ATTRIBUTE in module.__dict__ for module in self.modules()):
        original(self, is_nextn)


def around_dspark_init(original: Callable, self: torch.nn.Module, *args: object, **kwargs: object) -> None:
    original(self, *args, **kwargs)
    if _installed:
        attach.leave(
            self, "DSpark's draft layers rotate and project their attention output in a method of their own", reporter
        )


TARGETS = (
    Target(upstream.MODEL, "wo_a_fp8_gemm_enabled", around_wo_a_fp8_gemm_enabled),
    Target(upstream.MODEL, "DeepseekV4ForCausalLM.__init__", around_model_init),
    Target(upstream.MODEL, "DeepseekV4ForCausalLM._setup_fp8_wo_a_scales", around_setup_fp8_wo_a_scales),
    Target(upstream.MODEL, "MQALayer.__init__", around_layer_init),
    Target(upstream.MODEL, "fused_rope_wo_a_bf16", forward.around_fused_wo_a),
    Target(upstream.MODEL, "MQALayer._project_wo_b", forward.around_project_wo_b),
    Target(upstream.MODEL, "_fp8_wo_a_einsum", forward.around_einsum, mega=True),
    Target(upstream.MODEL, "MQALayer.setup_mega_attention", attach.around_setup_mega, mega=True),
    Target(upstream.MODEL, "MQALayer._forward_mega", forward.around_forward_mega, mega=True),
    Target(upstream.MEGA_BACKEND, "quantize_wo_a", attach.around_quantize_wo_a, mega=True),
    Target(upstream.DRAFT_NEXTN, "DeepseekV4ForCausalLMNextN.__init__", around_model_init),
    Target(upstream.DRAFT_DSPARK, "DSparkAttention.__init__", around_dspark_init),
)
