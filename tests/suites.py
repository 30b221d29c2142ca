"""The test suites that run only when -m asks for them, and which files belong to which.

Files of such a suite replace parts of torch, or of an engine, for the whole process, so they are not even imported unless
the expression after -m can select their mark: `pytest -m gpu` must find the GPU as it is.
"""

from __future__ import annotations

from pathlib import Path

from _pytest.mark.expression import Expression

TESTS = Path(__file__).parent

# mark -> files of the tests directory; every test in them carries the mark
SUITES = {
    "emulator": ("emulator", "test_*.py"),
    "vllm": ("vllm", "test_vllm_*.py"),
    "sglang": ("sglang", "test_sglang_*.py"),
}


def suite_of(path: Path) -> str | None:
    """The suite's mark, or None for a file whose tests need nothing special."""
    for mark, (folder, pattern) in SUITES.items():
        if path.parent == TESTS / folder and path.match(pattern):
            return mark
    return None


def can_select(expression: str, mark: str) -> bool:
    """Whether -m `expression` may choose a test that carries `mark`. No test is in two suites, and none in a suite needs
    a GPU; other marks may be there or not."""
    absent = {"gpu", *SUITES} - {mark}
    return not expression or any(
        Expression.compile(expression).evaluate(
            lambda name, others=others, **_: name == mark or (others and name not in absent)
        )
        for others in (False, True)
    )
