"""benchmarks/bench_vllm_layer.py drives the plugin on stand-ins of vLLM's layers; its checks, on the CPU backend."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import vllm_here


@pytest.mark.skipif(
    bool(vllm_here.vllm_version()), reason="vLLM itself is installed; the benchmark refuses stand-ins then"
)
def test_checks_pass():
    script = Path(__file__).parents[2] / "benchmarks/bench_vllm_layer.py"
    command = [sys.executable, str(script), "--check", "--device", "cpu", "--tp", "8", "--tokens", "1", "5"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # beside a GPU the layer would be made for that
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["TP8 T=1: layer ok, reload ok", "TP8 T=5: layer ok, reload ok"]
    assert "serving model.layers.0.attn and layers like it: fused on cpu" in result.stderr
