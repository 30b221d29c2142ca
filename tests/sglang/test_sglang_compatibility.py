"""Which path a layer takes on each GPU, as the plugin itself decides it: the SGLang rows of docs/compatibility.md.

Layers are SGLang's own, and their device is named as on the real GPU, so that the answers are those of this build:
where it has kernels a layer is served, elsewhere SGLang keeps it. MEGAATTN_COMPAT_DIR=FOLDER keeps the rows for
scripts/compatibility_table.py.
"""

from __future__ import annotations

import pytest

datacenter = pytest.mark.capability((10, 0), (10, 3))

MODELS = {"v41": "DeepSeek-V4.1", "v4": "DeepSeek-V4"}


@pytest.mark.parametrize(
    ("model", "attention"),
    [("v41", "flashmla"), ("v4", "flashmla"), pytest.param("v41", "flashmla_mega", marks=datacenter)],
)
def test_row(world, plugin, compatibility, model, attention):
    from vllm_megaattn import selector
    from vllm_megaattn.engines.sglang import hooks

    mega = attention == "flashmla_mega"
    if mega and not hasattr(world.model.MQALayer, "_forward_mega"):
        pytest.skip("this SGLang has no mega attention")
    key = "sm{}{}".format(*world.capability)
    plugin(lambda capability, device: f"sm{capability[0]}{capability[1]}")
    layer = world.make(model, tp=2, mega=mega).attention
    state = layer.__dict__.get("_megaattn")
    gap = selector.backend_gap(key)
    assert (state is None) == bool(gap)
    if state is None:
        path, reason = "SGLang's own", hooks.reporter.left[id(layer)][1]
        assert gap in reason
    else:
        path, reason = f"ours: {state.record.kernels} ({state.plan.name})", state.plan.detail
        assert path.startswith(f"ours: fused on {key}")
    compatibility(MODELS[model], attention, path, reason)
