"""What happens to an attention layer when vLLM has built it: it is described, the gates are asked, and it is given our
kernel objects and a `LayerState`, or left exactly as it is."""

from __future__ import annotations

import logging
import weakref

import torch

from vllm_megaattn.engines import common
from vllm_megaattn.engines.gates import LayerFacts, choice_for, first_refusal
from vllm_megaattn.engines.report import Reporter, Served, kernels_text
from vllm_megaattn.engines.vllm import gates, upstream
from vllm_megaattn.engines.vllm.state import ATTRIBUTE, BLACKWELL, HOPPER, MEGA, SM12X, LayerState, Plan
from vllm_megaattn.engines.weights import KeptWeight

# Quantisation methods of vLLM that we know, and the attribute that holds a linear layer's kernel object.
KERNEL_ATTRIBUTES = {"ModelOptLinearMethod": "kernel", "Fp8LinearMethod": "fp8_linear"}

# Bytes that vLLM's own path holds per weight element: on devices without an MXFP8 grouped GEMM of its own it expands wo_a
# of V4.1 to BF16 (post-load of its emulation kernel); V4's stays FP8, and so does every wo_b.
BF16_BYTES, FP8_BYTES = 2, 1


def attach(
    attention: torch.nn.Module,
    target: upstream.Target,
    vllm_config: object,
    device_keys: common.DeviceKeys,
    reporter: Reporter,
    foreign: str,
) -> None:
    """Serve this layer, or log why not and change nothing.

    target:  the class whose constructor has just finished
    foreign: the module of another plugin whose `_o_proj` this layer would run, or ""
    """
    key = id(attention)
    weakref.finalize(attention, _forget, reporter, key)
    facts = facts_of(attention, target, vllm_config, device_keys, foreign)
    refusal = first_refusal(facts, gates.BUILD_GATES)
    if refusal is not None:
        level = logging.WARNING if refusal.gate in ("engine-names", "own-class", "self-check") else logging.INFO
        reporter.add_left(key, facts.layer, refusal.reason, level)
        return
    plan = plan_for(target, facts)
    choice = choice_for(facts)
    record = Served(facts.layer, kernels_text(choice, facts.device_key), plan.detail)
    state = LayerState(plan, choice, record, reporter)
    if facts.batch_invariant:
        common.request_batch_invariance()

    from vllm_megaattn.engines.vllm import forward  # imports vLLM's kernel classes

    keep = [name for name, wanted in (("wo_a", plan.keep_wo_a), ("wo_b", plan.keep_wo_b)) if wanted]
    kernels = {name: _make_kernel(attention, name, state, facts) for name in keep}  # first all that could fail
    for name, kernel in kernels.items():
        _install_kernel(getattr(attention, name), kernel)
    if not plan.keep_wo_b:
        forward.take_over_wo_b(attention.wo_b)
    setattr(attention, ATTRIBUTE, state)
    reporter.add_served(key, record)


def plan_for(target: upstream.Target, facts: LayerFacts) -> Plan:
    """By what the attention kernel hands over and what vLLM itself does with the weights on this GPU."""
    if target.takes == "mxfp8":
        return MEGA
    major = (facts.extra["capability"] or (0, 0))[0]
    mxfp8 = facts.methods[0] == "ModelOptLinearMethod"
    if mxfp8 and major == 10:
        return BLACKWELL
    if mxfp8 and major == 12:
        return SM12X
    return HOPPER


def _make_kernel(attention: torch.nn.Module, name: str, state: LayerState, facts: LayerFacts) -> object:
    """The kernel object that keeps one linear layer's bytes."""
    from vllm_megaattn.engines.vllm import kernels

    linear = getattr(attention, name)
    kind = type(linear.quant_method).__name__
    mxfp8 = kind == "ModelOptLinearMethod"
    kept = state.kept[name] = KeptWeight(f"{facts.layer}.{name}", dummy=facts.extra["load_format"] == "dummy")
    engine_bytes = BF16_BYTES if mxfp8 and name == "wo_a" else FP8_BYTES
    cls = kernels.MegaAttnMxfp8LinearKernel if mxfp8 else kernels.MegaAttnFp8BlockLinearKernel
    config = getattr(linear.quant_method, KERNEL_ATTRIBUTES[kind]).config
    return cls(config, state, kept, linear, engine_bytes)


def _install_kernel(linear: torch.nn.Module, kernel: object) -> None:
    method = linear.quant_method
    kind = type(method).__name__
    setattr(method, KERNEL_ATTRIBUTES[kind], kernel)
    if kind == "ModelOptLinearMethod":
        linear.is_bmm = False  # else post-load chooses another kernel object for wo_a; nothing else on CUDA reads it
    else:
        method.use_marlin = False  # post-load would take Marlin's turn first


# ---- describing a layer --------------------------------------------------------------------------------------------


def facts_of(
    attention: torch.nn.Module,
    target: upstream.Target,
    vllm_config: object,
    device_keys: common.DeviceKeys,
    foreign: str = "",
) -> LayerFacts:
    """What the gates are asked about. Nothing here may raise for a layer that vLLM could build."""
    missing = upstream.missing_names() + tuple(
        f"{target.name}.{name}" for name in upstream.LAYER_ATTRIBUTES if not hasattr(attention, name)
    )
    wo_a, wo_b = getattr(attention, "wo_a", None), getattr(attention, "wo_b", None)
    if vllm_config is None:
        missing += (f"{target.name}(vllm_config, ...)",)
    capability = upstream.capability()
    weight = getattr(wo_a, "weight", None)
    heads = getattr(attention, "n_local_heads", None)
    return LayerFacts(
        engine=f"vLLM {upstream.version()}",
        layer=getattr(attention, "prefix", target.name),
        attention_class=type(attention).__name__,
        device_key=device_keys(capability, weight.device if weight is not None else torch.device("meta")),
        recipe=_recipe(wo_a) if _recipe(wo_a) == _recipe(wo_b) else f"{_recipe(wo_a)} and {_recipe(wo_b)}",
        scale_dtype=_common_dtype(_scale(wo_a), _scale(wo_b)),
        weight_dtype=_common_dtype(weight, getattr(wo_b, "weight", None)),
        activation_dtype=_dtype_name(getattr(getattr(vllm_config, "model_config", None), "dtype", None)),
        groups=getattr(attention, "n_local_groups", None),
        heads=heads,
        head_dim=getattr(attention, "head_dim", None),
        rope_dim=getattr(attention, "rope_head_dim", None),
        rank=getattr(attention, "o_lora_rank", None),
        wo_a_shape=_shape(weight),
        wo_b_shape=_shape(getattr(wo_b, "weight", None)),
        batch_invariant=upstream.batch_invariant(),
        methods=tuple(_method(linear) for linear in (wo_a, wo_b)),
        expected_methods=_expected_methods(wo_a),
        missing=missing,
        device=weight.device if weight is not None else None,
        extra={
            "capability": capability,
            "foreign_o_proj": foreign,
            "load_format": str(getattr(getattr(vllm_config, "load_config", None), "load_format", "auto")),
            "rope_quant": bool(getattr(attention, "_fuse_rope_quant", False)),
        },
    )


def _method(linear: object) -> str:
    """Name of a linear layer's quantisation method; with its formats when they are not the ones we know."""
    method = getattr(linear, "quant_method", None)
    name = type(method).__name__
    if not hasattr(method, KERNEL_ATTRIBUTES.get(name, "?")):
        return name
    spec = getattr(method, "spec", None)
    if name == "ModelOptLinearMethod":
        formats = (getattr(spec, "weight", None), getattr(spec, "activation", None))
        if formats != (upstream.load("kMxfp8Static"), upstream.load("kMxfp8Dynamic")):
            return f"{name} {formats}"
    return name


def _expected_methods(linear: object) -> tuple[str, ...]:
    """The method of wo_a if we know it (wo_b must have the same), else all that we know."""
    name = _method(linear)
    return (name,) if name in KERNEL_ATTRIBUTES else tuple(KERNEL_ATTRIBUTES)


def _recipe(linear: object) -> str | None:
    """Rows x columns of a checkpoint block that share a scale."""
    method = getattr(linear, "quant_method", None)
    ctx = getattr(method, "ctx", None)
    if ctx is not None:  # ModelOptLinearMethod
        if getattr(linear, "weight_block_size", None) != [1, 32]:
            return None
        block = getattr(ctx, "scale_block_size", None) or (1, 32)
    else:
        block = getattr(method, "weight_block_size", None)
    return "x".join(map(str, block)) if block else None


def _scale(linear: object) -> torch.Tensor | None:
    return getattr(linear, "weight_scale", getattr(linear, "weight_scale_inv", None))


def _common_dtype(first: torch.Tensor | None, second: torch.Tensor | None) -> str | None:
    names = [_dtype_name(getattr(tensor, "dtype", None)) for tensor in (first, second)]
    return names[0] if names[0] == names[1] else f"{names[0]} and {names[1]}"


def _dtype_name(dtype: torch.dtype | None) -> str | None:
    return str(dtype).removeprefix("torch.") if dtype is not None else None


def _shape(tensor: torch.Tensor | None) -> tuple[int, ...] | None:
    return tuple(tensor.shape) if tensor is not None else None


def _forget(reporter: Reporter, key: int) -> None:
    reporter.served.pop(key, None)
    reporter.left.pop(key, None)
