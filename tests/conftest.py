"""Fixtures and options shared by all tests.

`device` runs a test on the CPU always and, marked `gpu`, on CUDA when a supported GPU is there. Random data come from
`rng`, seeded from the test's own name, so a failure repeats and no two tests share data.
"""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from suites import can_select, suite_of

settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    max_examples=40,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("repeatable")

SUPPORTED_CAPABILITIES = {(9, 0)}


def missing_gpu_reason() -> str | None:
    """Why GPU tests cannot run here, or None if they can."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if not torch.cuda.is_available():
        return "no CUDA device is visible to torch"
    capability = torch.cuda.get_device_capability()
    if capability not in SUPPORTED_CAPABILITIES:
        return f"CUDA device has capability {capability}, kernels exist for {sorted(SUPPORTED_CAPABILITIES)}"
    return None


def pytest_ignore_collect(collection_path, config):
    suite = suite_of(collection_path)
    return True if suite and not can_select(config.option.markexpr, suite) else None


def pytest_itemcollected(item):
    suite = suite_of(item.path)
    if suite:
        item.add_marker(suite)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: suite_of(item.path) is not None)  # what changes the process comes last
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    reason = missing_gpu_reason()
    if reason is not None:
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=f"GPU test: {reason}"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    return request.param


@pytest.fixture
def rng(request) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))
