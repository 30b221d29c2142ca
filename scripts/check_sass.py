"""Checks the machine code of every kernel: no spills, registers within the design's limits, the instructions that the
design rests on, and code for every architecture that the source is for.

    python scripts/check_sass.py [FATBIN ...]

Without arguments it reads the fat binaries of the last build (build/temp*/**/*.fatbin). Needs cuobjdump and nvdisasm,
from a CUDA toolkit or from PyPI (nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm). Exit status 1 names each kernel and what
failed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

# What the SASS of a kernel must contain, by a pattern on its name. ACQBULK is griddepcontrol.wait, without which a
# programmatic dependent launch would read its predecessor's output too early (it compiles to nothing below sm_90).
REQUIRED = (
    (r"sm100_gemm", ("UTCQMMA", "UTCCP", "UTMALDG", "LDTM", "ACQBULK", "PREEXIT")),
    (r"gemm|einsum|matmul|decode_[ab]", ("QGMMA", "UTMALDG", "ACQBULK")),
    (r".", ("ACQBULK", "PREEXIT")),
)
# Registers a thread may use, by a pattern on the name: two blocks of 256 threads must fit on a Blackwell SM.
REGISTERS = ((r"sm100_gemm", 128), (r".", 255))
STATIC_SHARED = 48 * 1024
ARCHS = os.environ.get("VLLM_MEGAATTN_ARCHS", "90a 100a 103a").replace(",", " ").split()  # as in setup.py


def find_tool(name: str) -> str:
    candidates = [shutil.which(name)]
    for entry in [sysconfig.get_path("purelib"), *sys.path]:
        candidates += [str(p) for p in Path(entry).glob(f"nvidia/*/bin/{name}")] if entry else []
    for candidate in candidates:
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    raise SystemExit(f"{name} not found; install nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm")


def run_cuobjdump(*args: str) -> str:
    tool = find_tool("cuobjdump")
    path = os.pathsep.join([str(Path(find_tool("nvdisasm")).parent), os.environ.get("PATH", "")])
    return subprocess.run(
        [tool, *args], check=True, capture_output=True, text=True, env={**os.environ, "PATH": path}
    ).stdout


def resource_usage(fatbin: str) -> dict[tuple[str, str], dict[str, int]]:
    """Registers, stack, shared and local bytes per (architecture, kernel)."""
    usage, arch, name = {}, "", ""
    for line in run_cuobjdump("--dump-resource-usage", fatbin).splitlines():
        if match := re.match(r"arch = sm_(\w+)", line):
            arch = match[1]
        elif match := re.match(r"\s*Function (\S+):", line):
            name = match[1]
        elif name and "REG:" in line:
            usage[arch, name] = {key: int(value) for key, value in re.findall(r"([A-Z]+)(?:\[\d+\])?:(\d+)", line)}
    return usage


def instructions(fatbin: str) -> dict[tuple[str, str], set[str]]:
    """Opcodes (without modifiers) that each (architecture, kernel) contains."""
    found: dict[tuple[str, str], set[str]] = {}
    arch, opcodes = "", set()
    for line in run_cuobjdump("--dump-sass", fatbin).splitlines():
        if match := re.match(r"arch = sm_(\w+)", line):
            arch = match[1]
        elif match := re.match(r"\s*Function : (\S+)", line):
            opcodes = found[arch, match[1]] = set()
        elif match := re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+\s+)?([A-Z0-9]+)", line):
            opcodes.add(match[1])
    return found


def wanted_archs(stem: str) -> set[str]:
    """The architectures that a source is compiled for: as setup.py has it."""
    family = re.match(r"sm(90|10)", stem)
    return {arch for arch in ARCHS if not family or arch.startswith(family[1])}


def first_match(table: tuple, name: str):
    return next(value for pattern, value in table if re.search(pattern, name))


def check(fatbin: str) -> list[str]:
    faults = []
    opcodes = instructions(fatbin)
    for (arch, name), usage in sorted(resource_usage(fatbin).items()):
        registers, shared = usage.get("REG", 0), usage.get("SHARED", 0)
        problems = [f"{usage[key]} bytes of {key.lower()}" for key in ("STACK", "LOCAL") if usage.get(key)]
        problems += [f"no {op}" for op in first_match(REQUIRED, name) if op not in opcodes.get((arch, name), set())]
        if registers > first_match(REGISTERS, name):
            problems.append(f"{registers} registers, allowed are {first_match(REGISTERS, name)}")
        if shared > STATIC_SHARED:
            problems.append(f"{shared} bytes of static shared memory")
        line = f"{Path(fatbin).name:24} {arch:5} {name:52} {registers:4} registers {shared:6} B shared"
        print(line + (f"   FAILED: {', '.join(problems)}" if problems else ""))
        faults += [f"{arch} {name}: {problem}" for problem in problems]
    missing = wanted_archs(Path(fatbin).stem) - {arch for arch, _ in opcodes}
    faults += [f"{fatbin} holds no machine code for {arch}" for arch in sorted(missing)]
    return faults


def main() -> int:
    fatbins = sys.argv[1:] or [str(p) for p in sorted(Path("build").glob("temp*/**/*.fatbin"))]
    if not fatbins:
        print("no fat binaries under build/; build the package with nvcc first", file=sys.stderr)
        return 1
    faults = [fault for fatbin in fatbins for fault in check(fatbin)]
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
