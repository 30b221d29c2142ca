"""Which vLLM is installed, and which GPU this process simulates. Imports no vLLM."""

from __future__ import annotations

import importlib.metadata
import os

# vLLM reads the capability once per process; scripts/test_vllm.sh runs the folder once for each.
CAPABILITY = tuple(int(part) for part in os.environ.get("MEGAATTN_TEST_CAPABILITY", "9.0").split("."))


def vllm_version() -> str:
    """As installed; "" without vLLM. (This folder's name alone makes `import vllm` succeed.)"""
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return ""


def is_older(version: str) -> bool:
    """Whether the installed vLLM is of an earlier minor version."""

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split(".")[:2])

    return numbers(vllm_version()) < numbers(version)
