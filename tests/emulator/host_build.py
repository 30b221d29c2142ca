"""Compiles the emulator, the kernels' own sources and the package's host code into libraries that host.py loads.

    runtime   tests/emulator/*.cpp                     -> libemulator.so, which also plays libcuda
    kernels   csrc/cuda/<name>.cu, one library each    -> lib<name>.so
    host      csrc/cuda/*.c and csrc/cpu/*.c           -> libhost.so, which embeds the kernel libraries' paths

A .cu file is preprocessed, the marks that cuda_on_host.h left for CUDA's keywords are read and removed, and a table of
its kernels is appended. Memory accesses are instrumented by -fsanitize=thread and friends, whose callbacks are the
emulator's (memory.cpp). Results are kept in a cache folder under the hash of everything that went in.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CSRC = ROOT / "csrc"
WARNINGS = ["-Wall", "-Wextra"]
RUNTIME_FLAGS = ["-std=c++17", "-O3", "-march=native", "-g1", "-fPIC", *WARNINGS]
KERNEL_FLAGS = [
    "-std=c++17",
    "-O2",
    "-g1",
    "-fPIC",
    *WARNINGS,
    "-Wno-unknown-pragmas",  # unroll
    "-Wno-psabi",
    "-Wno-sign-compare",  # of built-in variables, which are unsigned
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-fno-exceptions",
    "-fno-optimize-sibling-calls",  # so that a return address names the line of the instruction
    "-fsanitize=thread,alignment,bounds,shift-exponent,signed-integer-overflow",
    "--param=tsan-instrument-func-entry-exit=0",
]
HOST_FLAGS = ["-std=c11", "-O2", "-g1", "-fPIC", *WARNINGS, "-ffp-contract=off", "-DMX_WITH_CUDA"]


class BuildError(Exception):
    """A compiler's complaint."""


def missing_tools() -> str | None:
    """Why nothing can be built here, or None."""
    for tool in ("g++", "gcc"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    if cuda_include() is None:
        return "cuda.h was not found (CUDA toolkit, or nvidia-cuda-runtime from PyPI)"
    return None


@functools.cache
def cuda_include() -> Path | None:
    """Folder of cuda.h; only its declarations are used."""
    candidates = [Path(os.environ[key]) / "include" for key in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(key)]
    nvcc = shutil.which("nvcc")
    if nvcc:
        home = Path(nvcc).resolve().parent.parent
        candidates += [home / "include", home / "targets/x86_64-linux/include"]
    candidates.append(Path("/usr/local/cuda/include"))
    for entry in map(Path, sys.path):
        candidates += sorted(entry.glob("nvidia/*/include")) if entry.is_dir() else []
    return next((c for c in candidates if (c / "cuda.h").exists()), None)


@functools.cache
def cache_folder() -> Path:
    default = Path(tempfile.gettempdir()) / f"vllm_megaattn_emulator_{os.getuid()}"
    folder = Path(os.environ.get("VLLM_MEGAATTN_EMULATOR_CACHE", default))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def run(command: list[object]) -> str:
    result = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    if result.returncode != 0:
        raise BuildError(f"{command[0]} failed:\n{result.stderr[:8000]}")
    return result.stdout + result.stderr


def cached(name: str, inputs: list[bytes], make) -> Path:
    """The file `name` for these inputs; `make(path)` writes it and returns the compiler's messages.

    Messages are kept beside the file: `warnings(path)`.
    """
    digest = hashlib.sha256(b"\0".join([(HERE / "host_build.py").read_bytes(), *inputs])).hexdigest()[:20]
    stem, suffix = name.rsplit(".", 1)
    path = cache_folder() / f"{stem}-{digest}.{suffix}"
    if not path.exists():
        temporary = path.with_name(f"{path.stem}.{os.getpid()}.{threading.get_ident()}.{suffix}")
        messages = make(temporary)
        path.with_suffix(".log").write_text(messages)
        temporary.replace(path)
    return path


def warnings(path: Path) -> str:
    """What the compiler said while it made `path`."""
    return path.with_suffix(".log").read_text()


def sources(*patterns: str) -> list[bytes]:
    return [p.read_bytes() for pattern in patterns for p in sorted(ROOT.glob(pattern))]


# ---- runtime ---------------------------------------------------------------------------------------------------


@functools.cache
def runtime_objects() -> tuple[Path, ...]:
    headers = sources("tests/emulator/*.h")
    objects = []
    for source in sorted(HERE.glob("*.cpp")):
        command = ["g++", *RUNTIME_FLAGS, f"-I{HERE}", f"-isystem{cuda_include()}", "-c", source, "-o"]
        objects.append(
            cached(f"{source.stem}.o", [source.read_bytes(), *headers], lambda out, c=command: run([*c, out]))
        )
    return tuple(objects)


@functools.cache
def runtime() -> Path:
    objects = runtime_objects()
    link = ["g++", "-shared", *objects, "-ldl", "-o"]
    return cached("libemulator.so", [o.read_bytes() for o in objects], lambda out: run([*link, out]))


# ---- kernels ---------------------------------------------------------------------------------------------------

NESTED = r"\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)"  # parentheses, two more levels inside
KERNEL = re.compile(rf'extern\s+"C"\s+emu_kernel_mark\s+void\s+(?:emu_bounds_mark{NESTED}\s*)?(\w+)\s*\(')
SHARED = re.compile(r"extern\s+emu_shared_mark\s+(?:__attribute__\(\(aligned\(\d+\)\)\)\s+)?[\w:]+\s+(\w+)\s*\[\s*\]")
MARKS = re.compile(rf"\bemu_(?:kernel|grid_constant|shared)_mark\b|\bemu_bounds_mark{NESTED}")

EPILOGUE = """
namespace {{
template <class T> using emu_plain = std::remove_cv_t<std::remove_reference_t<T>>;
constexpr uint32_t emu_bound(uint32_t threads = 0, uint32_t = 0, uint32_t = 0) {{ return threads; }}
template <auto FUNCTION> struct emu_entry;
template <class... A, void (*FUNCTION)(A...)> struct emu_entry<FUNCTION> {{
    template <size_t... I> static void emu_spread(void **params, std::index_sequence<I...>) {{
        FUNCTION(*(emu_plain<A> *)params[I]...);
    }}
    static void emu_call(void **params) {{ emu_spread(params, std::index_sequence_for<A...>()); }}
    static constexpr uint32_t bytes[] = {{sizeof(emu_plain<A>)...}};
    static constexpr uint32_t count = sizeof...(A);
}};
}}
extern "C" __attribute__((visibility("hidden"))) unsigned char emu_window[];
__asm__(".pushsection .bss.emu_window,\\"aw\\",@nobits\\n.balign 4096\\n.hidden emu_window\\nemu_window:\\n{labels}"
        ".zero 262144\\n.popsection\\n");
extern "C" const emu_kernel emu_kernels[];
const emu_kernel emu_kernels[] = {{
{rows}}};
extern "C" const int emu_num_kernels = {count};
extern "C" const int emu_arch = {arch};
"""


def split_parameters(text: str) -> list[str]:
    """The parameters of a list that starts behind its '(' and ends with the matching ')'."""
    depth, start, parts = 1, 0, []
    for i, c in enumerate(text):
        depth += (c in "(<[{") - (c in ")>]}")
        if depth == 0 or (depth == 1 and c == ","):
            parts.append(text[start:i].strip())
            start = i + 1
        if depth == 0:
            break
    return [p for p in parts if p]


def kernel_table(text: str) -> list[tuple[str, str, str]]:
    """(name, arguments of __launch_bounds__, kinds of its parameters) of every kernel in a preprocessed source."""
    table = []
    for match in KERNEL.finditer(text):
        parameters = split_parameters(re.sub(r"^#.*$", "", text[match.end() : match.end() + 4000], flags=re.M))
        maps = "".join(
            ("g" if "emu_grid_constant_mark" in p else "m") if re.search(r"\bCUtensorMap\b(?!\s*\*)", p) else "."
            for p in parameters
        )
        table.append((match[2], match[1] or "", maps))
    return table


def arch_of(source: Path) -> int:
    """The architecture of a source that is for one only; those for all (simt_*.cu) count as Hopper's."""
    return 100 if "sm100" in source.stem else 90


WRAPPER_HEADERS = {90: ("ptx_sm90.cuh", "wgmma_sm90.cuh"), 100: ("ptx_sm100.cuh", "tcgen05_sm100.cuh")}
FUNCTION = re.compile(r"^(?:template\s*<[^>]*>\s*)?MX_DEVICE\s[^;{]*\{", re.M)


def split_wrappers(text: str) -> tuple[str, str]:
    """A wrapper header without its functions that hold inline assembly, and those functions."""
    plain, assembly, at = [], [], 0
    for match in FUNCTION.finditer(text):
        if match.start() < at:
            continue
        depth, end = 1, match.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if text[end] == '"':  # PTX has braces of its own
                end = text.index('"', end + 1)
            end += 1
        if re.search(r"\basm\b", text[match.start() : end]):
            plain.append(text[at : match.start()])
            assembly.append(text[match.start() : end])
            at = end
    return "".join(plain) + text[at:], "\n".join(assembly)


def stand_in_includes(arch: int) -> list[object]:
    """Compiler arguments that put the emulator's wrappers, and what is plain C++ of the real headers, in front."""
    parts: list[object] = []
    for level in sorted(a for a in WRAPPER_HEADERS if a <= arch):
        parts += ["-include", HERE / f"ptx_sm{level}_on_host.h"]
        for name in WRAPPER_HEADERS[level]:
            text = (CSRC / "cuda" / name).read_text()

            def make(out: Path, text=text, name=name) -> str:
                out.write_text(f'#line 1 "{name}"\n{split_wrappers(text)[0]}')
                return ""

            parts += ["-include", cached(f"plain_{name.split('.')[0]}.h", [text.encode()], make)]
    return parts


def preprocess(source: Path, text: str | None = None, arch: int | None = None) -> str:
    """The source with all its headers, CUDA's keywords as marks. `text` replaces the file's own content."""
    arch = arch or arch_of(source)
    command = ["g++", "-std=c++17", "-E", "-x", "c++", f"-D__CUDA_ARCH__={arch * 10}", f"-I{HERE}"]
    command += [
        f"-I{CSRC}",
        f"-iquote{source.parent}",
        f"-isystem{cuda_include()}",
        *stand_in_includes(arch),
    ]
    command += [f"-iquote{CSRC / 'cuda'}"]
    if text is None:
        return run([*command, source])
    with tempfile.NamedTemporaryFile("w", suffix=".cu") as file:
        file.write(text)
        file.flush()
        return run([*command, file.name])


def kernel_library(source: Path, text: str | None = None, arch: int | None = None) -> Path:
    """Compiles one .cu file (or a changed `text` of it); `arch` for a source that is for all architectures."""
    arch = arch or arch_of(source)
    original = preprocess(source, text, arch)
    table = kernel_table(original)
    if not table:
        raise BuildError(f"{source}: no kernels found")
    labels = {f".hidden {name}\\n{name}:\\n" for name in SHARED.findall(original)}
    stripped = re.sub(r"\bemu_shared_mark\b", "", SHARED.sub(lambda m: m[0].replace("emu_shared_mark", ""), original))
    if re.search(r"\bemu_shared_mark\b", re.sub(SHARED, "", original)):
        raise BuildError(f"{source}: only `extern __shared__ T name[]` is emulated")
    rows = ""
    for name, bounds, maps in table:
        entry = f"emu_entry<{name}>"
        facts = f"{entry}::emu_call, {entry}::count, {entry}::bytes, emu_bound({bounds})"
        rows += f'    {{"{name}", {facts}, "{maps}", emu_window}},\n'
    body = MARKS.sub("", stripped) + EPILOGUE.format(
        labels="".join(sorted(labels)), rows=rows, count=len(table), arch=arch
    )
    library = runtime()

    def make(out: Path) -> str:
        unit = out.with_suffix(".cpp")
        unit.write_text(body)
        try:
            link = ["-shared", "-Wl,-z,lazy", library, f"-Wl,-rpath,{library.parent}"]
            messages = run(["g++", *KERNEL_FLAGS, "-c", unit, "-o", out.with_suffix(".o")])
            return messages + run(["g++", out.with_suffix(".o"), *link, "-o", out])
        finally:
            unit.unlink(missing_ok=True)
            out.with_suffix(".o").unlink(missing_ok=True)

    return cached(f"{source.stem}.so", [body.encode(), library.name.encode()], make)


def kernel_sources(arch: int | None = None) -> list[Path]:
    """The kernels of an architecture (None: of all), those that are for every one included."""
    found = sorted((CSRC / "cuda").glob("*.cu"))
    return [s for s in found if arch is None or arch_of(s) == arch or s.stem.startswith("simt_")]


# ---- host code -------------------------------------------------------------------------------------------------


def host_library(kernels: list[tuple[str, Path]]) -> Path:
    """csrc's host code with these kernel libraries as its images."""
    headers = sources("csrc/*.h", "csrc/cpu/*.h", "csrc/cuda/*.h")
    objects = []
    for source in sorted([*(CSRC / "cuda").glob("*.c"), *(CSRC / "cpu").glob("*.c")]):
        command = ["gcc", *HOST_FLAGS, f"-I{CSRC}", f"-isystem{cuda_include()}", "-c", source, "-o"]
        objects.append(
            cached(f"{source.stem}.o", [source.read_bytes(), *headers], lambda out, c=command: run([*c, out]))
        )
    table = "".join(f'    {{"{name}", "{path}", sizeof "{path}"}},\n' for name, path in kernels)
    images = (
        '#include "cuda/driver.h"\n'
        f"const struct mx_cuda_image mx_cuda_images[] = {{\n{table}}};\n"
        f"const int mx_cuda_num_images = {len(kernels)};\n"
    )
    library = runtime()

    def make(out: Path) -> str:
        unit = out.with_suffix(".c")
        unit.write_text(images)
        try:
            command = [
                "gcc",
                *HOST_FLAGS,
                f"-I{CSRC}",
                f"-isystem{cuda_include()}",
                "-shared",
                unit,
                *objects,
                library,
            ]
            command += [f"-Wl,-rpath,{library.parent}", "-Wl,--wrap=dlopen", "-lm", "-lpthread", "-ldl", "-o", out]
            return run(command)
        finally:
            unit.unlink(missing_ok=True)

    return cached("libhost.so", [o.read_bytes() for o in objects] + [images.encode(), library.name.encode()], make)
