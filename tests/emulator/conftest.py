"""The emulator's tests: marked `emulator`, skipped with the reason where it cannot be built."""

from __future__ import annotations

import host_build
import pytest


def pytest_collection_modifyitems(items):
    reason = host_build.missing_tools()
    for item in items:
        if reason is not None and item.get_closest_marker("emulator"):
            item.add_marker(pytest.mark.skip(reason=f"emulator: {reason}"))


@pytest.fixture(scope="session")
def blackwell():
    """The package's Blackwell kernels; skipped while its host code does not take such a device."""
    import ctypes

    from host import Emulator

    emulator = Emulator(100)
    reason = ctypes.create_string_buffer(512)
    if emulator.host.mx_cuda_status(Emulator.BLACKWELL, reason, len(reason)):
        pytest.skip(f"csrc/cuda/driver.c: {reason.value.decode()}")
    return emulator


@pytest.fixture(scope="session")
def hopper():
    """The package's Hopper kernels, compiled for the emulator."""
    from host import Emulator

    return Emulator(90)
