"""Every PTX wrapper of csrc/cuda has a stand-in with the same signature, and no PTX hides outside the wrappers."""

from __future__ import annotations

import re
from pathlib import Path

import host_build
import pytest

HERE = Path(__file__).parent
CUDA = host_build.CSRC / "cuda"
WRAPPERS = {f"ptx_sm{arch}_on_host.h": names for arch, names in host_build.WRAPPER_HEADERS.items()}
DECLARATION = re.compile(
    r"^(?:template\s*<(?P<template>[^>]*)>\s*)?MX_DEVICE\s+(?P<result>[\w ]+?)\s+(?P<name>\w+)\s*\((?P<args>[^{;]*)\)\s*\{",
    re.M,
)


def signatures(text: str) -> set[tuple[str, str, str, str]]:
    """(template parameters, result, name, parameter types) of every MX_DEVICE function; array lengths that a template
    of the stand-in covers are written as one."""
    found = set()
    for match in DECLARATION.finditer(text):
        if match["name"].startswith("emu_"):
            continue  # the stand-ins' own helpers
        args = re.sub(r"\s+", " ", match["args"]).strip()
        types = [re.sub(r"\b\w+(?=\)?(\[|$))", "", a.strip(), count=1) if a else "" for a in args.split(",")]
        template = match["template"] or ""
        name = match["name"]
        if name == "wgmma_m64k32":
            template, types = "", [re.sub(r"\[(\d+|COUNT)\]", "[N]", t, count=1) for t in types[:1]] + types[1:]
        found.add((template, match["result"].strip(), name, ", ".join(re.sub(r"\s+", " ", t).strip() for t in types)))
    return found


@pytest.mark.parametrize("stand_in", WRAPPERS)
def test_stand_ins_are_complete(stand_in):
    ours = signatures((HERE / stand_in).read_text())
    theirs = set()
    for name in WRAPPERS[stand_in]:
        theirs |= signatures(host_build.split_wrappers((CUDA / name).read_text())[1])
    assert len(theirs) > 10
    assert theirs == ours, f"missing: {sorted(theirs - ours)}; not in csrc/cuda: {sorted(ours - theirs)}"


def test_parser_sees_differences():
    ours = "MX_DEVICE void f(uint32_t a, const void *b) { }\ntemplate <int N> MX_DEVICE int g() {\n}\n"
    assert len(signatures(ours)) == 2
    assert len(signatures(ours) & signatures(ours.replace("const ", ""))) == 1
    assert len(signatures(ours) & signatures(ours.replace("int g", "long g"))) == 1
    assert len(signatures(ours) & signatures(ours.replace("int N", "bool N"))) == 1


def test_only_assembly_is_replaced():
    text = 'MX_DEVICE int f(int a) { return a; }\nMX_DEVICE void g() { asm("{ }"); }\nMX_DEVICE void h() { f(1); }\n'
    plain, assembly = host_build.split_wrappers(text)
    assert [s[2] for s in sorted(signatures(plain))] == ["f", "h"]
    assert [s[2] for s in signatures(assembly)] == ["g"]
    assert "asm" not in plain


def test_shapes_of_wgmma():
    """The stand-in takes any N; the real header has these shapes in both forms of A."""
    text = (CUDA / "wgmma_sm90.cuh").read_text()
    shapes = sorted({2 * int(n) for n in re.findall(r"wgmma_m64k32\(float \(&d\)\[(\d+)\]", text)})
    used = sorted(int(n) for n in re.findall(r"m64n(\d+)k32", text))
    assert sorted(set(used)) == shapes
    assert all(n % 8 == 0 and n <= 256 for n in shapes)


@pytest.mark.parametrize("source", host_build.kernel_sources(), ids=lambda p: p.name)
def test_ptx_only_in_wrappers(source):
    wrappers = {name for names in WRAPPERS.values() for name in names}
    headers = [
        CUDA / name for name in re.findall(r'#include "(\w+\.cuh)"', source.read_text()) if name not in wrappers
    ]
    for path in [source, *headers]:
        text = re.sub(r'\basm volatile\(""', "", path.read_text())  # no instruction: holds the compiler back only
        assert not re.search(r"\basm\b", text), f"{path.name} holds inline assembly"


@pytest.mark.parametrize("source", host_build.kernel_sources(), ids=lambda p: p.name)
def test_no_compiler_warnings(source):
    assert host_build.warnings(host_build.kernel_library(source)) == ""


@pytest.mark.parametrize("unit", sorted(p.name for p in HERE.glob("*.cpp")))
def test_no_compiler_warnings_in_the_emulator(unit):
    stem = unit.rsplit(".", 1)[0]
    objects = [o for o in host_build.runtime_objects() if o.name.rsplit("-", 1)[0] == stem]
    assert len(objects) == 1
    assert host_build.warnings(objects[0]) == ""
