"""Describing a model to the gates, and what an attention layer is given when SGLang has built it.

The description is made from the model's configuration and the server's settings, before the first layer exists:
SGLang asks once, for layers and loader alike, whether wo_a stays FP8. So the answer is one for the model, and a layer
that then turns out not to be what was described is an error, not a fallback: SGLang could not serve it either.
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import ClassVar

import torch

from vllm_megaattn.engines import common
from vllm_megaattn.engines.gates import LayerFacts, Refusal, choice_for, first_refusal
from vllm_megaattn.engines.report import Reporter, Served, kernels_text
from vllm_megaattn.engines.sglang import forward, gates, upstream
from vllm_megaattn.engines.sglang.state import ATTRIBUTE, BLACKWELL, HOPPER, MEGA, LayerState, Plan
from vllm_megaattn.engines.sglang.weights import SCALE_NAME, LiveWeight, watch_loaders
from vllm_megaattn.engines.weights import KeptWeight

# Bytes that SGLang's own path holds per element of wo_a in V4.1: BF16, and with mega attention an FP8 copy with a
# scale byte for 32 elements beside it. V4's wo_a and every wo_b stay FP8 there too.
BF16_BYTES, MEGA_BYTES = 2.0, 2.0 + 1.0 + 1 / 32


@dataclass(frozen=True)
class Decision:
    """About one model, or one of its layers: the same answer for the same configuration."""

    facts: LayerFacts
    refusal: Refusal | None  # None: it is served

    @property
    def plan(self) -> Plan:
        return plan_for(self.facts)


def decide(
    config: object,
    quant_config: object,
    layer: str,
    device_keys: common.DeviceKeys,
    broken_hooks: Callable[..., tuple[str, ...]],
) -> Decision:
    """config: SGLang's model configuration; layer: a name for messages; broken_hooks: see hooks.py."""
    facts = facts_of(config, quant_config, layer, device_keys, broken_hooks)
    return Decision(facts, first_refusal(facts, gates.BUILD_GATES))


def rename(decision: Decision | None, layer: str) -> Decision | None:
    """The decision about a model as that about one of its layers."""
    return decision and replace(decision, facts=replace(decision.facts, layer=layer))


def plan_for(facts: LayerFacts) -> Plan:
    """By who hands over the attention output, and by what SGLang's own product for wo_b needs of the weights."""
    if facts.extra["mega"]:
        return MEGA
    # 128x128 blocks: SGLang lays the scales out for DeepGEMM in place, so the layer has to be ours altogether.
    capability = facts.extra["capability"] or (9, 0)
    return HOPPER if facts.recipe == "128x128" or capability[0] < 10 else BLACKWELL


# ---- describing ----------------------------------------------------------------------------------------------------


def facts_of(
    config: object,
    quant_config: object,
    layer: str,
    device_keys: common.DeviceKeys,
    broken_hooks: Callable[..., tuple[str, ...]],
) -> LayerFacts:
    """What the gates are asked about."""
    model = sys.modules[upstream.MODEL]
    is_v41 = getattr(config, "model_type", None) == upstream.V41
    mega = is_v41 and upstream.mega_attention()
    missing = _missing_names(model) + (_missing_mega_names(model) if mega else ())
    capability = upstream.capability()
    size = upstream.attention_tp()[1]
    heads, groups = _local(config, "num_attention_heads", size), _local(config, "o_groups", size)
    rank, head_dim = getattr(config, "o_lora_rank", None), getattr(config, "head_dim", None)
    shapes = (None, None)
    if groups and heads and rank and head_dim:
        shapes = (groups * rank, heads // groups * head_dim), (getattr(config, "hidden_size", 0), groups * rank)
    quantised = () if quant_config is None else (type(quant_config).__name__,)
    block = getattr(quant_config, "weight_block_size", None)
    power_of_two = getattr(quant_config, "scale_fmt", None) == "ue8m0"
    return LayerFacts(
        engine=f"SGLang {upstream.version()}",
        layer=layer,
        attention_class="MQALayer",
        device_key=device_keys(capability, upstream.default_device()),
        recipe="x".join(map(str, block)) if block else None,
        scale_dtype="float8_e8m0fnu" if power_of_two else "float32",
        weight_dtype="float8_e4m3fn",
        activation_dtype=str(torch.get_default_dtype()).removeprefix("torch."),
        groups=groups,
        heads=heads,
        head_dim=head_dim,
        rope_dim=getattr(config, "qk_rope_head_dim", None),
        rank=rank,
        wo_a_shape=shapes[0],
        wo_b_shape=shapes[1],
        batch_invariant=upstream.deterministic(),
        methods=quantised,
        expected_methods=("Fp8Config",),
        missing=missing,
        device=upstream.default_device(),
        extra={
            "is_v41": is_v41,
            "mega": mega,
            "capability": capability,
            "is_cuda": upstream.is_cuda(),
            "broken_hooks": broken_hooks(mega=mega),
            "serialized": bool(getattr(quant_config, "is_checkpoint_fp8_serialized", False)),
            "ignored": upstream.ignored_projection(config, quant_config),
            "load_format": upstream.load_format(),
            "weight_cache": upstream.weight_cache_mode(),
            "offloads": upstream.offloads(),
            "decode_context_tp": upstream.decode_context_tp(),
            "megakernel": upstream.megakernel(),
            "marlin": upstream.forced_marlin(),
        },
    )


_missing_names = functools.cache(upstream.missing_names)
_missing_mega_names = functools.cache(upstream.missing_mega_names)


def _local(config: object, name: str, size: int) -> int | None:
    """This rank's share; None where it does not divide."""
    total = getattr(config, name, None)
    return total // size if total and total % size == 0 else None


# ---- attaching -----------------------------------------------------------------------------------------------------


def attach(attention: torch.nn.Module, decision: Decision, model: ModuleType, reporter: Reporter) -> None:
    """Serve this layer, or note why not and change nothing.

    Raises RuntimeError for a layer that was built as described but is not.
    """
    facts = decision.facts
    weakref.finalize(attention, _forget, reporter, id(attention))
    if decision.refusal is not None:
        reporter.add_left(id(attention), facts.layer, decision.refusal.reason, logging.WARNING)
        _Limit.note_left(attention)
        return
    _check(attention, facts, model)
    plan, choice = decision.plan, choice_for(facts)
    dummy = facts.extra["load_format"] == "dummy"
    if facts.batch_invariant:
        common.request_batch_invariance()

    def weight(name: str, *, reblock: bool, interleaved: bool = False) -> LiveWeight:
        kept = KeptWeight(f"{facts.layer}.{name}", dummy=dummy)
        return LiveWeight(kept, reblock=reblock, interleaved=interleaved, dummy=dummy)

    expanded = MEGA_BYTES if plan.mega else BF16_BYTES
    state = LayerState(
        plan=plan,
        choice=choice,
        record=Served(facts.layer, kernels_text(choice, facts.device_key), plan.detail),
        reporter=reporter,
        groups=facts.groups or 0,
        wo_a=weight("wo_a", reblock=True, interleaved=plan.mega),
        wo_b=weight("wo_b", reblock=plan.own_wo_b),
        engine_bytes_wo_a=expanded if facts.extra["is_v41"] else None,
    )
    _take_loading(attention, "wo_a", state, with_upstream=False)
    _take_loading(attention, "wo_b", state, with_upstream=not plan.own_wo_b)
    forward.take_over_wo_b(attention.wo_b, state)
    setattr(attention, ATTRIBUTE, state)
    if plan.mega:
        attention.wo_b.deepgemm_mxfp8_input = False  # z's and wo_b's scales are not to be packed for DeepGEMM
    else:
        attention.use_fused_wo_a = True
        _Limit.lift(model, reporter)
    # At DEBUG: the summary that follows says it for all layers in one line.
    reporter.add_served(id(attention), state.record, logging.DEBUG)


def leave(attention: torch.nn.Module, reason: str, reporter: Reporter) -> None:
    """A layer of a class that the plugin does not serve."""
    weakref.finalize(attention, _forget, reporter, id(attention))
    reporter.add_left(id(attention), f"layer {getattr(attention, 'layer_id', '?')}", reason)


def _check(attention: torch.nn.Module, facts: LayerFacts, model: ModuleType) -> None:
    """That the layer is what the gates said yes to."""
    missing = [name for name in upstream.LAYER_ATTRIBUTES if not hasattr(attention, name)]
    found: dict[str, tuple[object, object]] = {}
    if not missing:
        found["groups"] = attention.n_local_groups, facts.groups
        found["heads"] = attention.n_local_heads, facts.heads
        found["mega attention"] = getattr(attention, "use_mega_attention", False), facts.extra["mega"]
        found["rotary table"] = attention.freqs_cis.dtype, torch.complex64
        for method in ("forward", "_project_wo_b"):  # a subclass with its own would not come by our hooks
            own = getattr(type(attention), method) is getattr(model.MQALayer, method)
            found[method] = ("MQALayer's" if own else f"{type(attention).__name__}'s"), "MQALayer's"
        for name, shape in (("wo_a", facts.wo_a_shape), ("wo_b", facts.wo_b_shape)):
            linear = getattr(attention, name)
            found[f"{name}'s method"] = type(linear.quant_method).__name__, "Fp8LinearMethod"
            found[f"{name}"] = tuple(linear.weight.shape), shape
            found[f"{name}'s dtype"] = linear.weight.dtype, torch.float8_e4m3fn
            loader = getattr(getattr(linear, "weight_scale_inv", None), "_weight_loader", None)
            found[f"{name}'s scale loader"] = loader is not None, True
    wrong = [f"{name} is {got}, expected {want}" for name, (got, want) in found.items() if got != want]
    wrong += [f"{name} is missing" for name in missing]
    if wrong:
        raise RuntimeError(
            f"vllm_megaattn: {facts.layer} cannot be served as {facts.engine} was understood: {'; '.join(wrong)}. "
            "Start the server with SGLANG_MEGAATTN=0 and report this."
        )


def _take_loading(attention: torch.nn.Module, name: str, state: LayerState, *, with_upstream: bool) -> None:
    """Our steps before and after SGLang loads one matrix. with_upstream: its own post-load step runs first."""
    linear = getattr(attention, name)
    live: LiveWeight = getattr(state, name)
    method = linear.quant_method
    post_load, before_load = method.process_weights_after_loading, method.restore_weights_before_loading
    layer, module = weakref.ref(attention), weakref.ref(linear)

    def process_weights_after_loading(loaded: torch.nn.Module) -> None:
        if with_upstream:
            post_load(loaded)
        live.convert(loaded)
        state.note_loaded(name, _saved_bytes(loaded, state.engine_bytes_wo_a if name == "wo_a" else None))
        if name == "wo_a" and state.plan.mega and layer() is not None:
            layer().mega_wo_a = forward.mega_operand(layer(), state)

    def restore_weights_before_loading(loaded: torch.nn.Module) -> None:
        live.restore(loaded)
        before_load(loaded)

    method.process_weights_after_loading = process_weights_after_loading
    method.restore_weights_before_loading = restore_weights_before_loading
    watch_loaders(linear, lambda: live.restore(module()))


def _saved_bytes(linear: torch.nn.Module, engine_bytes: float | None) -> int:
    """Device memory that SGLang's own path would hold on top. engine_bytes: per element where it expands; None where
    it keeps weight and scale as we do."""
    ours = getattr(linear, SCALE_NAME).nbytes
    if engine_bytes is None:
        return -ours
    return int(engine_bytes * linear.weight.numel()) - linear.weight.nbytes - linear.weight_scale_inv.nbytes - ours


def _forget(reporter: Reporter, key: int) -> None:
    reporter.served.pop(key, None)
    reporter.left.pop(key, None)


class _Limit:
    """SGLang's forward takes the path that we hook for a limited number of tokens, by a constant of the module.
    Served layers need it lifted. Layers that stay with SGLang (a draft model of another kind in the same process)
    then must not take that path, whose kernel has the limit: they go the way SGLang has for more tokens."""

    lifted = False
    left: ClassVar[weakref.WeakSet[torch.nn.Module]] = weakref.WeakSet()

    @classmethod
    def lift(cls, model: ModuleType, reporter: Reporter) -> None:
        if not cls.lifted:
            model._FUSED_WO_A_MAX_TOKENS = sys.maxsize
            cls.lifted = True
            for attention in cls.left:
                attention.use_fused_wo_a = False
            if cls.left:
                reporter.once("layers left to SGLang lose its fused kernel for small batches beside served ones")

    @classmethod
    def note_left(cls, attention: torch.nn.Module) -> None:
        if getattr(attention, "use_fused_wo_a", False):
            cls.left.add(attention)
            if cls.lifted:
                attention.use_fused_wo_a = False


# ---- mega attention's setup ----------------------------------------------------------------------------------------


def around_setup_mega(original: Callable, self: torch.nn.Module) -> None:
    """SGLang permutes wq_b and makes a permuted MXFP8 copy of a BF16 wo_a; ours is wo_a itself."""
    original(self)
    state = self.__dict__.get(ATTRIBUTE)
    if state is not None and state.plan.mega:
        self.mega_wo_a = forward.mega_operand(self, state)


def around_quantize_wo_a(original: Callable, weight: torch.Tensor) -> object:
    """Called by SGLang's setup: nothing to quantise in an FP8 wo_a."""
    return None if weight.dtype is torch.float8_e4m3fn else original(weight)
