"""examples/attention_block.py decodes, and the module it puts in agrees with the projection written out in BF16."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def test_attention_block(capsys):
    path = Path(__file__).parents[2] / "examples/attention_block.py"
    spec = importlib.util.spec_from_file_location("attention_block", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    worst = module.main(["--steps", "2", "--prompt", "5"])
    assert 1e-3 < worst < 6e-2  # two roundings to MXFP8
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "OProj: fused on cpu"
    assert [line.split()[0] for line in lines[2:]] == ["0..4", "5", "6"]
