"""The gate table, row by row and in both directions, without an engine; and that docs/gates.md explains every row."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from vllm_megaattn.engines import gates
from vllm_megaattn.engines.vllm import gates as vllm_gates

GOOD = gates.LayerFacts(
    engine="vLLM 0.33.0",
    layer="model.layers.0.attn",
    attention_class="DeepseekV4FlashMLAAttention",
    device_key="cpu",
    recipe="32x32",
    scale_dtype="uint8",
    weight_dtype="float8_e4m3fn",
    activation_dtype="bfloat16",
    groups=8,
    heads=64,
    head_dim=512,
    rope_dim=64,
    rank=1024,
    wo_a_shape=(8192, 4096),
    wo_b_shape=(5120, 8192),
    methods=("ModelOptLinearMethod", "ModelOptLinearMethod"),
    expected_methods=("ModelOptLinearMethod",),
    extra={"load_format": "auto", "foreign_o_proj": "", "rope_quant": False},
)


def refusal(**changes):
    extra = {**GOOD.extra, **changes.pop("extra", {})}
    return gates.first_refusal(dataclasses.replace(GOOD, extra=extra, **changes), vllm_gates.BUILD_GATES)


def test_a_good_layer_passes():
    assert refusal() is None


@pytest.mark.parametrize(
    "changes",
    [
        {"groups": 1, "heads": 8, "wo_a_shape": (1024, 4096), "wo_b_shape": (5120, 1024)},  # TP8
        {"groups": 16, "heads": 128, "wo_a_shape": (16384, 4096), "wo_b_shape": (7168, 16384)},  # V4-Pro
        {"wo_a_shape": (8, 1024, 4096)},
        {"rank": 96, "wo_a_shape": (768, 4096), "wo_b_shape": (5120, 768)},
        {"recipe": "128x128", "scale_dtype": "float8_e8m0fnu"},
        {"scale_dtype": "int32"},
        {"batch_invariant": True},
        {"extra": {"load_format": "dummy"}},
        {"extra": {"load_format": "safetensors"}},
    ],
)
def test_other_good_layers_pass(changes):
    assert refusal(**changes) is None


REFUSALS = [
    ({"extra": {"foreign_o_proj": "other.plugin"}}, "own-class", "_o_proj belongs to other.plugin"),
    ({"missing": ("quant_utils.kMxfp8Dynamic",)}, "engine-names", "lacks quant_utils.kMxfp8Dynamic"),
    ({"methods": ()}, "quantisation", "not quantised"),
    ({"methods": ("ModelOptLinearMethod", "Fp8LinearMethod")}, "quantisation", "by Fp8LinearMethod; known"),
    ({"recipe": "1x128"}, "recipe", "scaled per 1x128"),
    ({"recipe": None}, "recipe", "scaled per unknown block"),
    ({"weight_dtype": "bfloat16"}, "weight-bytes", "are bfloat16, not float8_e4m3fn"),
    ({"scale_dtype": "float32"}, "weight-bytes", "scales are float32"),
    ({"activation_dtype": "float16"}, "activations", "runs in float16"),
    ({"head_dim": 576}, "geometry", "heads of 576 with 64"),
    ({"rope_dim": 32}, "geometry", "heads of 512 with 32"),
    ({"groups": 0}, "geometry", "64 heads do not divide into 0 groups"),
    ({"groups": 3}, "geometry", "64 heads do not divide into 3 groups"),
    ({"heads": None}, "geometry", "None heads"),
    ({"rank": 0}, "geometry", "a rank of 0"),
    ({"wo_a_shape": (8192, 2048)}, "geometry", "wo_a is [8192, 2048], expected [8192, 4096]"),
    ({"wo_b_shape": (5120, 4096)}, "geometry", "wo_b is [5120, 4096], expected [hidden, 8192]"),
    ({"device_key": "rocm"}, "kernels", "unknown device 'rocm'"),
    ({"device_key": "sm80"}, "kernels", "no kernel yet for Ampere"),
    ({"device_key": "sm89"}, "kernels", "no kernel yet for Ada"),
    ({"device_key": "sm120"}, "kernels", "sm120"),
    ({"device_key": "sm130"}, "kernels", "unknown device 'sm130'"),
    ({"rank": 80, "wo_a_shape": (640, 4096), "wo_b_shape": (5120, 640)}, "kernels", "rank must be a multiple of 32"),
    ({"extra": {"load_format": "ipc_cache"}}, "load-format", "the load format ipc_cache"),
    ({"extra": {"rope_quant": True}}, "attention-output", "already rotated and quantised per 128"),
]


@pytest.mark.parametrize(
    ("changes", "gate", "reason"), REFUSALS, ids=[f"{gate}-{i}" for i, (_, gate, _) in enumerate(REFUSALS)]
)
def test_every_refusal_names_its_gate_and_what_was_found(changes, gate, reason):
    if changes.get("device_key") == "sm120":
        from vllm_megaattn import selector

        if not selector.backend_gap(changes["device_key"]):
            pytest.skip(f"{changes['device_key']} has kernels by now")
    found = refusal(**changes)
    assert found.gate == gate
    assert reason in found.reason
    assert "model.layers.0" not in found.reason  # one message for all layers


@pytest.mark.parametrize("key", ["sm100", "sm103"])
def test_blackwell_is_served_and_called_unproven(key, monkeypatch):
    """The gates follow the selector; what the log calls the kernels follows it too."""
    from vllm_megaattn import _C, selector
    from vllm_megaattn.engines.report import kernels_text

    monkeypatch.setattr(_C, "build_info", lambda: {"images": ["sm100_gemm"]})
    monkeypatch.setattr(selector, "_cache", {})
    assert refusal(device_key=key) is None
    assert refusal(device_key=key, batch_invariant=True).gate == "batch-invariance"
    text = kernels_text(gates.choice_for(dataclasses.replace(GOOD, device_key=key)), key)
    assert text == f"fused on {key}, kernels that have never run on this hardware"
    assert kernels_text(gates.choice_for(GOOD), "cpu") == "fused on cpu"


def test_batch_invariance_refuses_kernels_that_are_not_proved(monkeypatch):
    monkeypatch.setattr(gates, "BATCH_INVARIANT_BACKENDS", frozenset())
    assert refusal() is None
    found = refusal(batch_invariant=True)
    assert (found.gate, found.reason.count("cpu kernels")) == ("batch-invariance", 1)


def test_self_check_is_asked_last_and_only_of_a_known_device(monkeypatch):
    """It loads kernels and runs them, so a layer that anything else refuses must not reach it."""
    asked = []

    def fault(device):
        asked.append(device)
        return "einsum failed the self-check"

    monkeypatch.setattr(gates.common, "device_fault", fault)
    assert refusal(device=torch.device("cuda", 1)) == ("self-check", "einsum failed the self-check")
    assert refusal() is None  # device None
    assert refusal(device=torch.device("cuda", 1), recipe="1x128").gate == "recipe"
    assert asked == [torch.device("cuda", 1)]
    assert vllm_gates.BUILD_GATES[-1].name == "self-check"


def test_forced_path(monkeypatch):
    monkeypatch.setenv("VLLM_MEGAATTN_PATH", "unfused")
    assert refusal() is None
    assert gates.choice_for(GOOD).path == "unfused"
    monkeypatch.setenv("VLLM_MEGAATTN_PATH", "sideways")
    assert refusal().gate == "kernels"


def test_gate_names_are_unique_and_all_are_refused_somewhere():
    names = [gate.name for gate in vllm_gates.BUILD_GATES]
    assert len(set(names)) == len(names)
    assert {gate for _, gate, _ in REFUSALS} | {"batch-invariance", "self-check"} == set(names)


def test_every_gate_is_explained():
    page = (Path(__file__).parents[2] / "docs/gates.md").read_text()
    for gate in vllm_gates.BUILD_GATES:
        assert re.search(rf"^#+ .*`{gate.name}`", page, re.MULTILINE), gate.name
