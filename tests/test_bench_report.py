"""The benchmark's table, ratios and pictures: what is a peer, what only a mark, and what a figure is labelled with."""

from __future__ import annotations

import pytest
import torch

from vllm_megaattn.bench import marks, ours, peers, report, workload


def row(op: str, name: str, tokens: int, us: float, tflops: float = 0.0) -> dict:
    made = report.row(
        "v4.1-flash", op, 1, tokens, name, us, 1.0, ours=name.startswith("ours"), flops=tflops * us * 1e6, error=0.0
    )
    return {**made, "sustained_us": 2 * us}


@pytest.fixture
def rows() -> list[dict]:
    figures = {
        "ours fused": (20, 200), "ours unfused": (25, 220), "BF16 bmm + mm": (40, 500),
        marks.READ: (10, 10), marks.COPY_MATRIX: (9, 160),
    }  # fmt: skip
    return [
        row("chain", name, t, us, 100.0)
        for name, pair in figures.items()
        for t, us in zip((1, 512), pair, strict=True)
    ]


def line(table: str, label: str) -> list[str]:
    return next(text for text in table.splitlines() if text.startswith(label + " "))[len(label) :].split()


def test_floors_and_ceilings_are_not_peers(rows):
    table = report.table(rows)
    assert line(table, "best ours / best peer") == ["0.50", "0.40"]
    assert line(table, f"best ours / {marks.READ}") == ["2.00", "20.00"]
    assert line(table, f"best ours / {marks.COPY_MATRIX}") == ["2.22", "1.25"]
    assert line(table, "fused / unfused") == ["0.800", "0.909"]
    assert line(report.table(rows, "sustained_us"), "ours fused") == ["40.0", "400.0"]


def test_scales_per_32_are_compared_with_scales_per_32():
    figures = {
        "ours span 256": 50,
        "ours per-32": 70,
        "DeepGEMM 1x128": 55,
        "SGLang DeepGEMM 1x32": 100,
        "Humming per-32": 120,
    }
    rows = [row("wo_b", name, 2048, us, 1e4 / us) for name, us in figures.items()]
    table = report.table(rows)
    assert line(table, "ours per-32 / best per-32 peer") == ["0.70"]
    assert line(table, "best ours / best peer") == ["0.91"]
    assert line(table, "TFLOP/s of our best") == ["200"]
    assert line(table, "TFLOP/s of ours per-32") == ["143"]


def test_missing_figures_are_dashes(rows):
    table = report.table([r for r in rows if not (r["name"] == "BF16 bmm + mm" and r["tokens"] == 512)])
    assert line(table, "best ours / best peer") == ["0.50", "-"]


def test_pictures_are_drawn(rows, tmp_path):
    pytest.importorskip("matplotlib")
    assert [path.name for path in report.plot(tmp_path, rows, "machine")] == ["v4.1-flash_chain_tp1.png"]
    assert (tmp_path / "v4.1-flash_chain_tp1.png").stat().st_size > 20_000
    assert report.plot(tmp_path, [r for r in rows if r["tokens"] == 1]) == []


def test_the_commit_comes_from_the_argument_the_environment_or_git(monkeypatch):
    monkeypatch.setenv(report.ENV_COMMIT, "from-environment")
    assert report.commit_of("given") == "given"
    assert report.commit_of(None) == "from-environment"
    monkeypatch.delenv(report.ENV_COMMIT)
    monkeypatch.setenv("PATH", "")
    assert report.commit_of(None) == "unknown"


def test_every_operation_has_contenders_and_marks():
    from vllm_megaattn.cli.bench import OPS

    assert set(OPS) == set(ours._MAKERS) == set(marks._MAKERS) == set(peers._PEERS)
    assert {name for made in marks._MAKERS.values() for name in made} == set(marks.MARKS)


def test_one_deep_gemm_a_process():
    with pytest.raises(ImportError, match="vllm"):
        peers._deep_gemm_from("sglang")


def test_the_exact_input_is_the_same_in_parts(monkeypatch):
    """A workload computes its float64 reference a few thousand tokens at a time."""
    monkeypatch.setattr(workload, "COLD_BYTES", 1)
    work = workload.Workload(workload.Model(heads=2, groups=2, rank=128, hidden=128), 1, torch.device("cpu"))
    work.set_tokens(7)
    whole = work.exact_z
    monkeypatch.setattr(workload, "PART", 3)
    work.__dict__.pop("exact_z")
    torch.testing.assert_close(work.exact_z, whole, rtol=1e-12, atol=1e-9)
    assert list(work.parts()) == [0, 3, 6]
    assert work.rotated_bf16.shape == (7, 2, 512)
