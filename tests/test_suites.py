"""`pytest -m ...` leaves the process as it is for the tests it chooses: suites that replace parts of it stay out."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import run_python
from suites import SUITES, TESTS, can_select, suite_of

DEFAULT = "not emulator and not vllm and not sglang"


@pytest.mark.parametrize(
    ("expression", "chosen"),
    [
        (DEFAULT, []),
        ("gpu", []),
        ("gpu and not vllm", []),
        ("not gpu", ["emulator", "vllm", "sglang"]),
        ("", ["emulator", "vllm", "sglang"]),
        ("vllm", ["vllm"]),
        ("vllm or not vllm", ["emulator", "vllm", "sglang"]),
        ("emulator or gpu", ["emulator"]),
        ("sglang and capability", ["sglang"]),
        ("sglang and not capability", ["sglang"]),
        ("sglang and vllm", []),
    ],
)
def test_what_an_expression_can_select(expression, chosen):
    assert [mark for mark in SUITES if can_select(expression, mark)] == chosen


def test_every_folder_of_a_suite_has_files_of_it():
    """A renamed file would silently become an ordinary one. Beside a suite's files only those listed here may lie."""
    for mark, (folder, _) in SUITES.items():
        files = {path.name: suite_of(path) for path in (TESTS / folder).glob("test_*.py")}
        others = {name for name, suite in files.items() if suite != mark}
        assert mark in files.values()
        assert all(name.startswith("test_engine_") or name == "test_live_weight.py" for name in others), others
    assert suite_of(Path(__file__)) is None


def test_no_package_shadows_an_engine():
    """tests/vllm/__init__.py would make `import vllm` find this folder where vLLM is installed."""
    assert not [path for path in TESTS.rglob("__init__.py")]


@pytest.mark.parametrize("expression", ["gpu", DEFAULT])
def test_files_of_a_suite_are_not_imported_unless_asked_for(expression):
    """Deselecting their tests is not enough: what an import changes, say CUDA_VISIBLE_DEVICES, is changed for all."""
    code = f"""
        import os, sys
        import pytest
        before = dict(os.environ)
        assert pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "-m", {expression!r}, {str(TESTS)!r}]) == 0
        after = {{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}}
        before = {{name: value for name, value in before.items() if not name.startswith("PYTEST_")}}
        assert after == before, set(after.items()) ^ set(before.items())
        print("IMPORTED", *sorted(sys.modules))
        """
    imported = run_python(code).rsplit("IMPORTED", 1)[1].split()
    assert "test_gemm" in imported
    assert "test_engine_common" in imported
    names = ("test_vllm_", "test_sglang_", "test_emulated_", "vllm_standins", "sglang_standins")
    assert not [name for name in imported if name.startswith(names)]


def test_importing_the_stand_ins_leaves_the_environment_alone():
    """A GPU that CUDA_VISIBLE_DEVICES hides is hidden from every test of the process."""
    folders = [str(TESTS / folder) for folder in ("vllm", "sglang")]
    code = f"""
        import os, sys
        sys.path += {folders}
        before = dict(os.environ)
        import vllm_standins, sglang_standins
        assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())
        """
    run_python(code)
