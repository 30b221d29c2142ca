"""The C declarations of libtorch's functions equal those of the installed torch's own headers.

csrc/torch_symbols.h lists every libtorch function the C core calls. The compiler compares the list with the headers
here; the C core itself is built without any torch.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

CSRC = Path(__file__).resolve().parent.parent / "csrc"
INCLUDE = Path(torch.__file__).parent / "include"

PROGRAM = """
// The stream getter's declaration is hidden without this; nothing of CUDA is included by it.
#define USE_CUDA
#include <cstdint>
#include <type_traits>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>
#include <c10/core/ScalarType.h>
#include "torch_symbols.h"

#define SAME_TYPE(ret, name, args) \\
    static_assert(std::is_same<decltype(&::name), ret (*) args>::value, "prototype of " #name);
MX_TORCH_SYMBOLS(SAME_TYPE)
MX_TORCH_CUDA_SYMBOLS(SAME_TYPE)
static_assert(static_cast<int>(c10::ScalarType::Float8_e8m0fnu) == MX_TORCH_FLOAT8_E8M0FNU, "code of float8_e8m0fnu");
%s
"""


def compile_program(directory: Path, program: str, include: Path) -> subprocess.CompletedProcess:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    if not (INCLUDE / "torch/csrc/stable/c/shim.h").exists():
        pytest.skip(f"this torch installation has no C headers in {INCLUDE}")
    source = directory / "abi.cpp"
    source.write_text(program)
    command = [compiler, "-std=c++20", "-fsyntax-only", "-Wall", f"-I{include}", f"-isystem{INCLUDE}", str(source)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def symbols(macro: str) -> list[str]:
    """Function names of one of the X-macro lists."""
    text = (CSRC / "torch_symbols.h").read_text().replace("\\\n", " ")
    body = re.search(rf"#define {macro}\(X\)(.*)", text).group(1)
    return re.findall(r"X\(\w+, (\w+),", body)


def torch_version() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def test_prototypes_equal_torchs_own(tmp_path):
    optional = "MX_TORCH_OPTIONAL_SYMBOLS(SAME_TYPE)" if torch_version() >= (2, 11) else ""
    result = compile_program(tmp_path, PROGRAM % optional, CSRC)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("original", "mutant"),
    [
        ("aoti_torch_get_dim, (AtenTensorHandle, int64_t *)", "aoti_torch_get_dim, (AtenTensorHandle, int32_t *)"),
        ("aoti_torch_check, (bool, const char *", "aoti_torch_check, (int, const char *"),
        ("X(uint64_t, aoti_torch_abi_version", "X(int64_t, aoti_torch_abi_version"),
        ("FLOAT8_E8M0FNU 44", "FLOAT8_E8M0FNU 45"),
    ],
)
def test_a_wrong_prototype_or_code_would_be_noticed(tmp_path, original, mutant):
    text = (CSRC / "torch_symbols.h").read_text()
    assert original in text
    (tmp_path / "torch_symbols.h").write_text(text.replace(original, mutant))
    result = compile_program(tmp_path, PROGRAM % "", tmp_path)
    assert result.returncode != 0
    name = re.search(r"aoti_torch_\w+", original)
    what = f"prototype of {name.group(0)}" if name else "code of float8_e8m0fnu"
    assert what in result.stderr, result.stderr


def test_every_required_symbol_is_exported_by_the_installed_torch():
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    names = symbols("MX_TORCH_SYMBOLS")
    assert len(names) >= 20
    assert "aoti_torch_check" in names
    missing = [name for name in names if not hasattr(library, name)]
    assert not missing
    assert not hasattr(library, "aoti_torch_no_such_function")


def test_messages_spell_every_dtype_as_torch_does():
    """The op layer's names come from torch's own codes: none is a number written down here."""
    op = torch.ops.vllm_megaattn.mxfp8_quantize_sfd128x4.default
    q, q_scale = torch.empty((1, 32), dtype=torch.float8_e4m3fn), torch.empty(512, dtype=torch.uint8)
    names = re.findall(r"X\((\w+)\)", (CSRC / "torch_symbols.h").read_text().split("MX_TORCH_DTYPES(X)")[1])
    assert {"int8", "int16", "float16", "bool", "float8_e5m2", "int64"} <= set(names)
    for name in {*names, "float8_e8m0fnu"} - {"bfloat16"}:
        z = torch.empty((1, 32), dtype=getattr(torch, name))
        with pytest.raises(RuntimeError, match=rf"z must have dtype bfloat16, got {name}\b"):
            op(z, q, q_scale, 32)
    assert not re.search(r"\{\d+, \"", (CSRC / "op_check.c").read_text())


def test_torch_names_are_known_to_one_file_only():
    """Whatever calls libtorch does it through the table, by a name on the list."""
    listed = {
        name
        for macro in re.findall(r"#define (MX_TORCH_\w*SYMBOLS)\(X\)", (CSRC / "torch_symbols.h").read_text())
        for name in symbols(macro)
    }
    for path in sorted(CSRC.rglob("*.[ch]*")):
        if path.name == "torch_symbols.h":
            continue
        code = re.sub(r"/\*.*?\*/|//[^\n]*|\"(\\.|[^\"\\])*\"|\w*##\w*", "", path.read_text(), flags=re.DOTALL)
        used = set(re.findall(r"\b(aoti_torch_\w+|torch_[a-z]\w+)\s*\(", code))
        through_table = set(re.findall(r"mx_torch\.(\w+)", code))
        foreign = {name for name in used if name not in through_table and f"static void {name}" not in code}
        assert not foreign - {"torch_threads"}, f"{path.name} calls {foreign} without the table"
        functions = {name for name in through_table if name.startswith(("aoti_torch_", "torch_"))}
        assert functions <= listed, path.name
