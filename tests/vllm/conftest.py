"""Tests of the engine plugins. Those that need vLLM are skipped, with the reason, where it is not installed.

vLLM reads the GPU's compute capability once per process, so a process simulates one: MEGAATTN_TEST_CAPABILITY, "9.0" by
default. scripts/test_vllm.sh runs the folder once for each.
"""

from __future__ import annotations

import pytest
from vllm_here import CAPABILITY, is_older, vllm_version


def pytest_collection_modifyitems(items):
    for item in items:
        if not item.get_closest_marker("vllm"):  # test_engine_*.py
            continue
        if not vllm_version():
            item.add_marker(
                pytest.mark.skip(reason="vLLM is not installed (scripts/vllm_env.sh makes an environment)")
            )
            continue
        for mark in item.iter_markers("vllm_from"):
            if is_older(mark.args[0]):
                item.add_marker(pytest.mark.skip(reason=f"needs vLLM {mark.args[0]} or later"))
        wanted = [mark.args for mark in item.iter_markers("capability")]
        if wanted and CAPABILITY not in wanted[0]:
            names = ", ".join(f"{major}.{minor}" for major, minor in wanted[0])
            item.add_marker(pytest.mark.skip(reason=f"simulates capability {names}: set MEGAATTN_TEST_CAPABILITY"))


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "capability(*pairs): compute capabilities that a test of the vLLM plugin simulates"
    )
    config.addinivalue_line("markers", "vllm_from(version): the first vLLM release that has what the test needs")


@pytest.fixture(scope="session")
def world():
    """vLLM with stand-ins for the GPU and one process that can claim to be any rank; see vllm_layers.World."""
    import vllm_layers
    import vllm_standins

    vllm_standins.install(CAPABILITY)
    with vllm_layers.World(CAPABILITY) as world:
        from vllm_megaattn.engines.vllm import unregister

        unregister()  # vLLM's first EngineArgs has loaded the plugins that are installed, this one among them
        yield world


@pytest.fixture(autouse=True)
def plugin_removed_afterwards():
    """A test that registers the plugin leaves the next one without it."""
    yield
    if vllm_version():
        from vllm_megaattn.engines.vllm import patch, unregister

        unregister()
        patch.reporter.__init__(patch.reporter.logger)


@pytest.fixture
def messages():
    """What the plugin logged during the test, as text, from DEBUG on."""
    import logging

    from vllm_megaattn.engines.vllm import patch

    texts: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record):
            texts.append(record.getMessage())

    handler = Keep()
    logger = patch.reporter.logger
    level = logger.level
    patch.reporter.__init__(logger)
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield texts
    logger.removeHandler(handler)
    logger.setLevel(level)


# ---- loaded V4.1 layers, made once per module ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(world):
    """A V4.1 checkpoint's wo_a and wo_b."""
    from vllm_layers import Checkpoint

    return Checkpoint.random("v41")


@pytest.fixture(scope="module")
def layers(world, checkpoint):
    """get(served=True, tp=1, rank=0, cls=None) -> a loaded V4.1 layer, served by the plugin or not, and its configuration.
    cls: the attention class; None takes the one that vLLM selects."""
    from vllm_megaattn.engines.vllm import register, unregister

    made = {}

    def get(served: bool = True, tp: int = 1, rank: int = 0, cls: type | None = None):
        key = (served, tp, rank, cls)
        if key not in made:
            register() if served else unregister()  # vLLM itself loads an installed plugin
            made[key] = world.make("v41", checkpoint, tp=tp, rank=rank, cls=cls)
            unregister()
        return made[key]

    return get
