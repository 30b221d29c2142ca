"""Which path a layer takes on each GPU, as the plugin itself decides it: the rows of docs/compatibility.md.

Layers are vLLM's own, and their device is named as on the real GPU, so that the answers are those of this build: where it
has kernels a layer is served, elsewhere vLLM keeps it. MEGAATTN_COMPAT_DIR=FOLDER writes the rows found for
scripts/compatibility_table.py.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import vllm_here

MODELS = {"v41": "DeepSeek-V4.1", "v4": "DeepSeek-V4"}
BF16_CLASSES = {
    "v41": ("vllm.models.deepseek_v41.nvidia.flashmla", "DeepseekV4FlashMLAAttention"),
    "v4": ("vllm.models.deepseek_v4.nvidia.flashmla", "DeepseekV4FlashMLAAttention"),
}


def real_key(capability, device):
    return f"sm{capability[0]}{capability[1]}"


def decide(world, model, cls=None):
    """(attention class, path, reason) of one layer."""
    from vllm_megaattn.engines.vllm import patch, register

    register(device_keys=real_key)
    attention = world.build(world.config(model, tp=8), cls=cls)
    state = getattr(attention, "_megaattn", None)
    if state is not None:
        return type(attention).__name__, f"ours: {state.record.kernels} ({state.plan.name})", state.plan.detail
    return type(attention).__name__, "vLLM's own", patch.reporter.left[id(attention)][1]


def record(rows):
    folder = os.environ.get("MEGAATTN_COMPAT_DIR")
    if folder:
        name = f"vllm-{vllm_here.vllm_version()}-{vllm_here.CAPABILITY[0]}.{vllm_here.CAPABILITY[1]}.json"
        path = Path(folder) / name
        found = json.loads(path.read_text()) if path.exists() else []
        path.write_text(json.dumps([row for row in found if row not in rows] + rows, indent=1))


@pytest.mark.parametrize("model", MODELS)
def test_row(world, model):
    """The class that vLLM selects, and on datacenter Blackwell FlashMLA with BF16 output too."""
    import importlib

    from vllm_megaattn import selector

    key = f"sm{vllm_here.CAPABILITY[0]}{vllm_here.CAPABILITY[1]}"
    gap = selector.backend_gap(key)
    found = [decide(world, model)]
    module, name = BF16_CLASSES[model]
    if vllm_here.CAPABILITY[0] == 10 and found[0][0] != name:
        found.append(decide(world, model, getattr(importlib.import_module(module), name)))
    rows = []
    for attention, path, reason in found:
        rows.append(
            {
                "vllm": vllm_here.vllm_version(),
                "capability": ".".join(map(str, vllm_here.CAPABILITY)),
                "model": MODELS[model],
                "attention": attention,
                "path": path,
                "reason": reason,
            }
        )
        assert path.startswith("vLLM's own" if gap else f"ours: fused on {key}")
        if gap:
            assert gap in reason
    record(rows)
