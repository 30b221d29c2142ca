"""Tests of the SGLang plugin. Those that need SGLang are skipped, with the reason, where it is not installed.

SGLang reads the GPU's compute capability once per process, and the stand-ins for the GPU change torch.cuda for good,
so these tests want a process of their own for each capability: scripts/test_sglang.sh runs them, with
MEGAATTN_TEST_CAPABILITY set.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
from pathlib import Path

import pytest

ENV_CAPABILITY = "MEGAATTN_TEST_CAPABILITY"
ENV_COMPAT = "MEGAATTN_COMPAT_DIR"
CAPABILITY = tuple(int(part) for part in os.environ.get(ENV_CAPABILITY, "9.0").split("."))


def sglang_version() -> str:
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return ""


def missing() -> str:
    """Why the tests that need SGLang cannot run here, or ""."""
    if not sglang_version():
        return "SGLang is not installed (scripts/sglang_env.sh makes an environment)"
    if ENV_CAPABILITY not in os.environ:
        return "needs a process of its own: scripts/test_sglang.sh"
    return ""


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "capability(*pairs): compute capabilities that a test of an engine plugin simulates"
    )


def pytest_collection_modifyitems(items):
    reason = missing()
    for item in items:
        if not item.get_closest_marker("sglang"):
            continue
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
            continue
        wanted = [mark.args for mark in item.iter_markers("capability")]
        if wanted and CAPABILITY not in wanted[0]:
            names = ", ".join(f"{major}.{minor}" for major, minor in wanted[0])
            item.add_marker(pytest.mark.skip(reason=f"simulates capability {names}: set {ENV_CAPABILITY}"))


@pytest.fixture(scope="session")
def world():
    """SGLang with stand-ins for the GPU and one process that can claim to be any rank; see sglang_layers.World."""
    import sglang_standins

    sglang_standins.install(CAPABILITY)
    import sglang_layers

    return sglang_layers.World(CAPABILITY)


@pytest.fixture
def plugin(world):
    """Registers the plugin so that the CPU kernels stand for those of the simulated GPU."""
    from vllm_megaattn.engines.sglang import register

    def install(device_keys=lambda capability, device: "cpu"):
        register(device_keys=device_keys)

    return install


@pytest.fixture(autouse=True)
def plugin_removed_afterwards():
    """A test that registers the plugin leaves the next one without it."""
    yield
    if not missing():
        from vllm_megaattn.engines.sglang import hooks, unregister

        unregister()
        hooks.reporter.__init__(hooks.reporter.logger)


@pytest.fixture
def limit_as_imported(world):
    """SGLang's limit on the tokens of its fused kernel, as in a process that has not served a layer yet."""
    from vllm_megaattn.engines.sglang import attach

    before = world.model._FUSED_WO_A_MAX_TOKENS, attach._Limit.lifted
    world.model._FUSED_WO_A_MAX_TOKENS, attach._Limit.lifted = 32, False
    yield
    world.model._FUSED_WO_A_MAX_TOKENS, attach._Limit.lifted = before


@pytest.fixture
def messages(world):
    """What the plugin logged during the test, as (level, text), from INFO on."""
    from vllm_megaattn.engines.sglang import hooks

    texts: list[tuple[str, str]] = []

    class Keep(logging.Handler):
        def emit(self, record):
            texts.append((record.levelname, record.getMessage()))

    handler = Keep(logging.INFO)
    logger = hooks.reporter.logger
    level = logger.level
    hooks.reporter.__init__(logger)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield texts
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture
def compatibility():
    """Keeps a row of the compatibility table, which scripts/compatibility_table.py writes: what a test has just found
    out about this SGLang and this GPU."""

    def keep(model: str, attention: str, path: str, reason: str) -> None:
        folder = os.environ.get(ENV_COMPAT)
        if not folder:
            return
        capability = ".".join(map(str, CAPABILITY))
        file = Path(folder, f"sglang-{sglang_version()}-{capability}.json")
        row = {
            "sglang": sglang_version(), "capability": capability, "model": model, "attention": attention,
            "path": path, "reason": reason,
        }  # fmt: skip
        found = json.loads(file.read_text()) if file.exists() else []
        file.write_text(json.dumps([old for old in found if old != row] + [row], indent=1))

    return keep
