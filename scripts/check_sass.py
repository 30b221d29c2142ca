"""Checks the machine code of every kernel: no spills, and the instructions the design rests on are really there.

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
    (r".", ("ACQBULK",)),
)


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


def resource_usage(fatbin: str) -> dict[str, dict[str, int]]:
    """Registers, stack, shared and local bytes per kernel."""
    usage, name = {}, ""
    for line in run_cuobjdump("--dump-resource-usage", fatbin).splitlines():
        if match := re.match(r"\s*Function (\S+):", line):
            name = match[1]
        elif name and "REG:" in line:
            usage[name] = {key: int(value) for key, value in re.findall(r"([A-Z]+)(?:\[\d+\])?:(\d+)", line)}
    return usage


def instructions(fatbin: str) -> dict[str, set[str]]:
    """Opcodes (without modifiers) that each kernel contains."""
    found: dict[str, set[str]] = {}
    name = ""
    for line in run_cuobjdump("--dump-sass", fatbin).splitlines():
        if match := re.match(r"\s*Function : (\S+)", line):
            name = match[1]
            found[name] = set()
        elif name and (match := re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+\s+)?([A-Z0-9]+)", line)):
            found[name].add(match[1])
    return found


def check(fatbin: str) -> list[str]:
    faults = []
    opcodes = instructions(fatbin)
    for name, usage in sorted(resource_usage(fatbin).items()):
        line = (
            f"{Path(fatbin).name:28} {name:56} {usage.get('REG', 0):4} registers {usage.get('SHARED', 0):6} B shared"
        )
        problems = [f"{usage[key]} bytes of {key.lower()}" for key in ("STACK", "LOCAL") if usage.get(key)]
        for pattern, wanted in REQUIRED:
            if re.search(pattern, name):
                problems += [f"no {opcode}" for opcode in wanted if opcode not in opcodes.get(name, set())]
                break
        print(line + (f"   FAILED: {', '.join(problems)}" if problems else ""))
        faults += [f"{name}: {problem}" for problem in problems]
    if not opcodes:
        faults.append(f"{fatbin} holds no machine code")
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
