"""The built module itself: what it imports and exports, and for which machines it holds code (B89, B90, B91, B93)."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import sysconfig
from pathlib import Path

import pytest

from vllm_megaattn import _C

BINARY = Path(_C.__file__)


def tool(name: str, *arguments: str) -> str:
    """Output of a binary tool, from PATH, a CUDA toolkit or PyPI's nvidia-* packages."""
    pypi = [str(p) for p in Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin")]
    path = shutil.which(name) or shutil.which(name, path=":".join(["/usr/local/cuda/bin", *pypi]))
    if path is None:
        pytest.skip(f"{name} is not installed")
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


def undefined_symbols() -> list[str]:
    """Names without their version suffix."""
    output = tool("nm", "-D", "--undefined-only", str(BINARY))
    return [line.split()[-1].split("@")[0] for line in output.splitlines() if line.strip()]


def is_sanitized() -> bool:
    return any(name.startswith(("__asan", "__ubsan")) for name in undefined_symbols())


def test_no_torch_and_no_cplusplus_symbol_is_imported():
    """B89: torch is found with dlsym; a mangled name or a C++ runtime symbol would tie the file to one build."""
    names = undefined_symbols()
    assert len(names) > 20
    assert "dlsym" in names
    torch_names = [name for name in names if "torch" in name or name.startswith("_ZN2at") or "c10" in name]
    cplusplus = [name for name in names if name.startswith(("_Z", "__cxa_", "__gxx_")) and name != "__cxa_finalize"]
    cuda = [name for name in names if re.match(r"cu[A-Z]|cuda[A-Z]|__cuda", name)]
    assert torch_names == []
    assert cplusplus == []
    assert cuda == []


def test_only_the_c_library_is_needed():
    output = tool("readelf", "-d", str(BINARY))
    needed = set(re.findall(r"NEEDED.*\[(.+?)\]", output))
    allowed = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "ld-linux-x86-64.so.2"}
    if is_sanitized():
        allowed |= {name for name in needed if name.startswith(("libasan", "libubsan"))}
    assert "libc.so.6" in needed
    assert needed <= allowed
    # Some interpreters (pyenv's) link everything with a path to their own folder: a wheel must not name such a folder.
    assert not re.search(r"RPATH|RUNPATH", output)


def test_only_the_init_function_is_exported():
    output = tool("nm", "-D", "--defined-only", str(BINARY))
    names = {line.split()[-1] for line in output.splitlines() if line.strip()}
    linker = {"_init", "_fini", "_edata", "_end", "__bss_start"}
    assert names - linker - {n for n in names if is_sanitized() and n.startswith("__")} == {"PyInit__C"}


def test_the_file_is_an_abi3_module():
    assert BINARY.name == "_C.abi3.so"


# Names that are in the limited API since 3.10 at the latest (the stable-ABI list of the CPython manual). The module may
# grow; then a name is added here after it was looked up there.
LIMITED_API_3_10 = {
    "PyBool_FromLong", "PyBytes_AsStringAndSize", "PyDict_New", "PyDict_SetItemString", "PyErr_Clear", "PyErr_Format",
    "PyErr_NoMemory", "PyErr_Occurred", "PyErr_SetString", "PyEval_RestoreThread", "PyEval_SaveThread",
    "PyExc_ImportError", "PyExc_MemoryError", "PyExc_OverflowError", "PyExc_RuntimeError", "PyExc_TypeError",
    "PyExc_ValueError", "PyList_Append", "PyList_New", "PyLong_AsLong", "PyLong_AsLongLong", "PyLong_AsUnsignedLong",
    "PyLong_AsUnsignedLongLong", "PyLong_AsVoidPtr", "PyLong_FromLong", "PyLong_FromLongLong", "PyLong_FromUnsignedLong",
    "PyLong_FromUnsignedLongLong", "PyModuleDef_Init", "PyModule_AddIntConstant", "PyModule_AddObjectRef",
    "PyModule_AddStringConstant", "PyOS_snprintf", "PyObject_IsTrue", "PyTuple_New", "PyTuple_Pack",
    "PyUnicode_AsUTF8AndSize", "PyUnicode_FromFormat", "PyUnicode_FromString", "PyUnicode_FromStringAndSize",
    "Py_BuildValue", "_Py_BuildValue_SizeT", "PyArg_ParseTuple", "_PyArg_ParseTuple_SizeT", "Py_DecRef", "Py_IncRef",
    "_Py_Dealloc", "_Py_NoneStruct", "_Py_TrueStruct", "_Py_FalseStruct",
}  # fmt: skip


def test_only_the_limited_api_is_used():
    """B90."""
    names = {name for name in undefined_symbols() if re.match(r"_?Py", name)}
    assert names
    assert names <= LIMITED_API_3_10, sorted(names - LIMITED_API_3_10)


def test_stack_is_not_executable_and_relocations_are_read_only():
    headers = tool("readelf", "-lW", str(BINARY))
    stack = re.search(r"GNU_STACK.*", headers)
    assert stack
    assert " RWE" not in stack.group(0)
    assert "GNU_RELRO" in headers


FATBIN_MAGIC = b"\x50\xed\x55\xba"


def test_kernel_images_are_for_their_architecture(tmp_path):
    """B93: built for 9.0a and 10.0a; without the a there is no wgmma and no tcgen05. The images are whole fat binaries
    in the read-only data."""
    names = _C.build_info()["images"]
    if not names:
        pytest.skip("this build has no CUDA kernels")
    data = BINARY.read_bytes()
    starts = [match.start() for match in re.finditer(re.escape(FATBIN_MAGIC), data)]
    assert len(starts) >= len(names)
    for start in starts:
        # struct fatBinaryHeader: magic u32, version u16, header bytes u16, bytes behind the header u64
        header_bytes, body_bytes = struct.unpack_from("<HQ", data, start + 6)
        image = tmp_path / f"{start}.fatbin"
        image.write_bytes(data[start : start + header_bytes + body_bytes])
        listing = tool("cuobjdump", "--list-elf", str(image))
        assert ("sm_100a" if "sm100_" in listing else "sm_90a") in listing
        assert not re.search(r"sm_\d+\b(?!a)", listing)


def test_switches_are_those_of_the_header():
    """The C core tells Python the numbers; every name of the enum is there, each a bit of its own."""
    header = (Path(__file__).parents[1] / "csrc" / "kernels.h").read_text()
    listed = {f"FLAG_{name}": int(value) for name, value in re.findall(r"\bMX_FLAG_(\w+) = (\d+),", header)}
    exported = {name: getattr(_C, name) for name in dir(_C) if name.startswith("FLAG_")}
    assert exported == listed
    assert sum(exported.values()) == 2 ** len(exported) - 1
