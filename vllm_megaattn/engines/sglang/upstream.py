"""Every name of SGLang that the plugin relies on, and the probes that tell whether it still is what it was.

SGLang releases every two weeks and calls none of this public. A release within TESTED whose probes all pass is used;
any other is left alone with one warning.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from types import ModuleType

import torch

TESTED = ((0, 5, 22), (0, 5, 23))  # first and last version that tests/sglang passes on

MODEL = "sglang.srt.models.deepseek_v4"
DRAFT_NEXTN = "sglang.srt.models.deepseek_v4_nextn"
DRAFT_DSPARK = "sglang.srt.models.deepseek_v4_dspark"
MEGA_BACKEND = "sglang.srt.layers.attention.deepseek_v4_mega_backend"  # since 0.5.23

V41, V4 = "deepseek_v41", "deepseek_v4"

# Names that MQALayer.forward must use, since the projection is written out in it: a layer takes our path because
# `use_fused_wo_a` is set and the token limit raised, and what `fused_rope_wo_a_bf16` returns must reach
# `_project_wo_b`.
FORWARD_NAMES = (
    "use_fused_wo_a",
    "_FUSED_WO_A_MAX_TOKENS",
    "fused_rope_wo_a_bf16",
    "Mxfp8SwizzledInput",
    "_project_wo_b",
    "freqs_cis",
)
MEGA_CORE_NAMES = ("_fp8_wo_a_einsum", "mega_wo_a")

# Parameters by name, of what we hook and of what we call.
SIGNATURES = {
    "wo_a_fp8_gemm_enabled": ("quant_config",),
    "fused_rope_wo_a_bf16": ("x", "weight", "freqs_cis", "positions", "out_mxfp8"),
    "MQALayer.__init__": ("self", "config", "layer_id", "quant_config", "prefix"),
    "MQALayer._project_wo_b": ("self", "o", "defer_all_reduce"),
    "DeepseekV4ForCausalLM.__init__": ("self", "config", "quant_config"),
    "DeepseekV4ForCausalLM._setup_fp8_wo_a_scales": ("self", "is_nextn"),
}
MEGA_SIGNATURES = {
    "_fp8_wo_a_einsum": ("o_fp8", "o_s", "weight", "weight_scale", "recipe", "out"),
    "MQALayer.setup_mega_attention": ("self",),
    "MQALayer._forward_mega": ("self", "q", "kernel_num_heads", "attn_sink", "forward_batch", "attn_backend"),
}

# What the plugin reads from a built attention layer.
LAYER_ATTRIBUTES = (
    "wo_a", "wo_b", "n_local_groups", "n_local_heads", "head_dim", "rope_head_dim", "o_lora_rank", "freqs_cis",
    "use_fused_wo_a", "wo_a_fp8",
)  # fmt: skip


def version() -> str:
    """SGLang's version as installed, "unknown" for a source tree without metadata."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def version_gap(text: str) -> str:
    """Why a version is outside of what was tested, or ""."""
    try:
        release = tuple(int(part) for part in text.split(".post")[0].split("+")[0].split(".")[:3])
    except ValueError:
        release = ()
    if len(release) != 3:
        return f"SGLang {text} is not a version that can be compared"
    if TESTED[0] <= release <= TESTED[1]:
        return ""
    tested = " to ".join(".".join(map(str, bound)) for bound in TESTED)
    return f"SGLang {text} was not tested with this release, which knows {tested}"


def resolve(path: str) -> object | None:
    """What a dotted name stands for, None if it does not exist. Imports the modules on the way."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            found = getattr(found, part, None)
            if found is None:
                return None
        return found
    return None


def missing_names(model: ModuleType) -> tuple[str, ...]:
    """Names of the model's module that are not there, or changed."""
    missing = [f"{name}{text}" for name, text in _changed(model, SIGNATURES)]
    missing += _unused(model, "MQALayer.forward", FORWARD_NAMES)
    missing += [name for name in ("Mxfp8SwizzledInput", "Fp8Config") if not hasattr(model, name)]
    return tuple(missing)


def missing_mega_names(model: ModuleType) -> tuple[str, ...]:
    """The same for mega attention; asked for layers that use it."""
    missing = [f"{name}{text}" for name, text in _changed(model, MEGA_SIGNATURES)]
    missing += _unused(model, "MQALayer._mega_core", MEGA_CORE_NAMES)
    if resolve(f"{MEGA_BACKEND}.quantize_wo_a") is None:
        missing.append(f"{MEGA_BACKEND}.quantize_wo_a")
    return tuple(missing)


def _changed(model: ModuleType, signatures: dict[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    changed = []
    for name, wanted in signatures.items():
        function = resolve(f"{model.__name__}.{name}")
        if function is None:
            changed.append((name, ""))
        elif not set(wanted) <= set(inspect.signature(function).parameters):
            changed.append((name, f"({', '.join(wanted)})"))
    return changed


def _unused(model: ModuleType, name: str, wanted: tuple[str, ...]) -> list[str]:
    function = inspect.unwrap(resolve(f"{model.__name__}.{name}") or (lambda: None))
    used = function.__code__.co_names
    return [f"{name} using {word}" for word in wanted if word not in used]


# ---- facts of the process, readable once a model is built ----------------------------------------------------------


def _context() -> ModuleType:
    return importlib.import_module("sglang.srt.runtime_context")


def _setting(path: str, default: object) -> object:
    """A setting of the server by the accessor and name it has in the runtime context, e.g.
    "exec.offload.cpu_offload_gb"."""
    accessor, *names = path.split(".")
    try:
        value = getattr(_context(), f"get_{accessor}")()
        for name in names:
            value = getattr(value, name)
    except (AttributeError, RuntimeError, ValueError, KeyError):
        return default
    return value


def is_cuda() -> bool:
    return bool(_setting("platform.is_cuda", False)) and not _setting("platform.is_hip", False)


def capability() -> tuple[int, int] | None:
    """Compute capability of the GPU as SGLang's platform reports it; None without a GPU."""
    found = _setting("platform.device_capability", None)
    return (int(found[0]), int(found[1])) if found is not None and found[0] is not None else None


def attention_tp() -> tuple[int, int]:
    """Rank and size of the group that shards the heads."""
    return int(_setting("parallel.attn_tp_rank", 0)), int(_setting("parallel.attn_tp_size", 1))


def decode_context_tp() -> bool:
    return (
        bool(_setting("parallel.enable_cp_decode_attn_tp", False)) and int(_setting("parallel.attn_cp_size", 1)) > 1
    )


def deterministic() -> bool:
    return bool(_setting("exec.deterministic.enable_deterministic_inference", False))


def mega_attention() -> bool:
    return _setting("exec.kernel.dsv4_attn_backend", None) == "flashmla_mega"


def megakernel() -> bool:
    return bool(_setting("exec.kernel.enable_nvidia_megakernel", False))


def load_format() -> str:
    value = _setting("model.load_format", "auto")
    return str(getattr(value, "value", value))


def weight_cache_mode() -> str:
    return str(_setting("model.weight_cache_mode", "off"))


def offloads() -> bool:
    """Whether SGLang keeps weights on the host and brings them over layer by layer."""
    return (
        float(_setting("exec.offload.cpu_offload_gb", 0) or 0) > 0
        or int(_setting("exec.offload.offload_group_size", -1) or 0) > 0
    )


def forced_marlin() -> bool:
    """SGLang then keeps FP8 weights in Marlin's private layout."""
    from sglang.srt.utils import get_bool_env_var

    return get_bool_env_var("SGLANG_FORCE_FP8_MARLIN")


def ignored_projection(config: object, quant_config: object) -> str:
    """The name of a wo_a or wo_b that the checkpoint does not quantise, or ""."""
    ignored = getattr(quant_config, "ignored_layers", None)
    if not ignored:
        return ""
    from sglang.srt.layers.quantization.utils import is_layer_skipped

    mapping = getattr(quant_config, "packed_modules_mapping", None) or {}
    layers = [f"model.layers.{index}.self_attn" for index in range(int(getattr(config, "num_hidden_layers", 1)))]
    for layer in (*layers, "model.decoder.self_attn"):
        for name in ("wo_a", "wo_b"):
            if is_layer_skipped(f"{layer}.{name}", ignored, fused_mapping=mapping):
                return f"{layer}.{name}"
    return ""


def default_device() -> torch.device:
    """Where a model that is being built puts its tensors."""
    return torch.get_default_device()
