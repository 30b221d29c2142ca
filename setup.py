"""Build of the C core, vllm_megaattn._C: plain setuptools, no torch needed.

CUDA kernels are compiled when nvcc is found: on PATH, under CUDA_HOME, or installed from PyPI into the building
interpreter (extra ``cuda-build``). ``VLLM_MEGAATTN_CUDA`` decides otherwise:

    0      never, even if nvcc is there
    1      always: a missing compiler is an error
    pypi   always, with nvcc fetched from PyPI into pip's isolated build environment

``VLLM_MEGAATTN_WERROR=1`` makes warnings errors (CI). ``VLLM_MEGAATTN_SANITIZE=1`` builds with AddressSanitizer and
UBSan. ``VLLM_MEGAATTN_ARCHS`` replaces the list of GPU architectures, for example "90a".
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
ARCHS = ("90a", "100a", "103a")
CUDA_MODE = os.environ.get("VLLM_MEGAATTN_CUDA", "")
NVCC_PACKAGES = re.findall(r'"(nvidia-[^"]+)"', (ROOT / "pyproject.toml").read_text())
VERSION = re.search(r'__version__ = "([^"]+)"', (ROOT / "vllm_megaattn/_version.py").read_text())[1]

C_FLAGS = [
    "-std=c11",
    "-O3",
    "-g1",
    "-Wall",
    "-Wextra",
    "-Wshadow",
    "-Wstrict-prototypes",
    "-fvisibility=hidden",
    "-fexceptions",  # torch's C++ exceptions unwind through our frames
    "-ffp-contract=off",  # the order of FMAs is part of the numeric contract
    "-fno-fast-math",
]


def find_nvcc() -> Path | None:
    """nvcc on PATH, under CUDA_HOME / CUDA_PATH, or from PyPI's nvidia-cuda-nvcc; None if there is none."""
    candidates = [shutil.which("nvcc")]
    candidates += [Path(os.environ[key]) / "bin/nvcc" for key in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(key)]
    for entry in [sysconfig.get_path("purelib"), *sys.path]:
        candidates += sorted(Path(entry).glob("nvidia/*/bin/nvcc")) if entry else []
    candidates.append("/usr/local/cuda/bin/nvcc")
    for candidate in candidates:
        if candidate and os.access(candidate, os.X_OK):
            return Path(candidate)
    return None


def cuda_compiler() -> Path | None:
    """The compiler to use, None for a CPU-only module; explains itself either way."""
    if CUDA_MODE not in ("", "0", "1", "pypi"):
        raise SystemExit(f"VLLM_MEGAATTN_CUDA must be 0, 1 or pypi, got {CUDA_MODE!r}")
    if CUDA_MODE == "0":
        return None
    nvcc = find_nvcc()
    if nvcc is None and CUDA_MODE:
        raise SystemExit(
            f"VLLM_MEGAATTN_CUDA={CUDA_MODE}, but nvcc was not found on PATH, under CUDA_HOME or from PyPI; "
            "VLLM_MEGAATTN_CUDA=pypi fetches one"
        )
    return nvcc


class BuildExt(build_ext):
    """build_ext that also turns csrc/cuda/*.cu into fat binaries embedded in the module."""

    def build_extension(self, ext: Extension) -> None:
        nvcc = cuda_compiler()
        temp = Path(self.build_temp)
        temp.mkdir(parents=True, exist_ok=True)
        if nvcc:
            print(f"vllm_megaattn: CUDA kernels with {nvcc}", flush=True)
            ext.sources += sorted(str(p) for p in Path("csrc/cuda").glob("*.c"))
            ext.sources.append(str(self.embed_images(nvcc, temp)))
            ext.define_macros += [("MX_WITH_CUDA", None), ("MX_NVCC_VERSION", f'"{nvcc_version(nvcc)}"')]
            ext.extra_compile_args += [f"-I{directory}" for directory in include_dirs(nvcc)]
        else:
            print("vllm_megaattn: no nvcc found or wanted: building the CPU-only module", flush=True)
        # Some Pythons link with a search path of their own build machine; the module needs libc alone.
        self.compiler.linker_so = [flag for flag in self.compiler.linker_so if not flag.startswith("-Wl,-rpath")]
        if os.environ.get("VLLM_MEGAATTN_WERROR") == "1":
            ext.extra_compile_args.append("-Werror")
        if os.environ.get("VLLM_MEGAATTN_SANITIZE") == "1":
            flags = ["-fsanitize=address,undefined", "-fno-omit-frame-pointer"]
            ext.extra_compile_args += flags
            ext.extra_link_args += flags
        super().build_extension(ext)
        # Beside the sources too: `python -m vllm_megaattn` in a checkout finds this folder before the installed one.
        built, beside = Path(self.get_ext_fullpath(ext.name)), Path("vllm_megaattn") / self.get_ext_filename("_C")
        if built.resolve() != beside.resolve():
            shutil.copy2(built, beside)

    def embed_images(self, nvcc: Path, temp: Path) -> Path:
        """Compiles every .cu to a fat binary and writes a C file that holds them all."""
        archs = os.environ.get("VLLM_MEGAATTN_ARCHS", "").replace(",", " ").split() or list(ARCHS)
        stanzas, rows, jobs = [], [], []
        for source in sorted(Path("csrc/cuda").glob("*.cu")):
            # sm90_*.cu and sm100_*.cu are for one family of GPUs, other files (simt_*.cu) for all of them.
            family = re.match(r"sm(90|10)", source.stem)
            wanted = [arch for arch in archs if not family or arch.startswith(family[1])]
            if wanted:
                jobs.append((nvcc, source, (temp / f"{source.stem}.fatbin").resolve(), wanted))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda job: compile_cuda(*job), jobs))
        for index, (_, source, image, _) in enumerate(jobs):
            stanzas.append(
                f'__asm__(".section .rodata\\n.balign 64\\nmx_image_{index}: .incbin \\"{image}\\"\\n'
                f'mx_image_{index}_end: .byte 0\\n.previous");\n'
                f"extern const unsigned char mx_image_{index}[], mx_image_{index}_end[];\n"
            )
            rows.append((source.stem, index, image.stat().st_size))
        table = temp / "images.c"
        table.write_text(
            "/* Generated by setup.py: the fat binaries of csrc/cuda. */\n"
            '#include "cuda/driver.h"\n\n'
            + "".join(stanzas)
            + "\nconst struct mx_cuda_image mx_cuda_images[] = {\n"
            + "".join(f'    {{"{name}", mx_image_{index}, {size}}},\n' for name, index, size in rows)
            + f"}};\nconst int mx_cuda_num_images = {len(rows)};\n"
        )
        return table


def nvcc_version(nvcc: Path) -> str:
    text = subprocess.run([nvcc, "--version"], check=True, capture_output=True, text=True).stdout
    return re.search(r"V(\d+\.\d+\.\d+)", text)[1]


def include_dirs(nvcc: Path) -> list[Path]:
    """Where cuda.h is. nvcc is asked, since what is on PATH may be a script that starts a toolkit elsewhere."""
    dry = subprocess.run([nvcc, "-dryrun", "-E", "-x", "cu", os.devnull], capture_output=True, text=True).stderr
    top = re.search(r"#\$ TOP=(.+)", dry)
    home = Path(top[1].strip()) if top else nvcc.resolve().parent.parent
    found = [p for p in (home / "include", home / "targets/x86_64-linux/include") if (p / "cuda.h").exists()]
    if not found:
        raise SystemExit(f"cuda.h not found beside {nvcc}; nvidia-cuda-runtime from PyPI holds it")
    return found


def compile_cuda(nvcc: Path, source: Path, image: Path, archs: list[str]) -> None:
    """One fat binary of machine code, no PTX; skipped when newer than everything it could depend on."""
    inputs = [
        source,
        Path("setup.py"),
        *Path("csrc").glob("*.h"),
        *Path("csrc/cuda").glob("*.cuh"),
        *Path("csrc/cuda").glob("*.h"),
    ]
    if image.exists() and image.stat().st_mtime > max(p.stat().st_mtime for p in inputs):
        return
    command = [str(nvcc), "-fatbin", "-std=c++17", "-O3", "-lineinfo", "-Icsrc", "-o", str(image), str(source)]
    command += [part for arch in archs for part in ("-gencode", f"arch=compute_{arch},code=sm_{arch}")]
    if os.environ.get("VLLM_MEGAATTN_WERROR") == "1":
        command += ["-Werror", "all-warnings", "-Xptxas", "-v"]
    print(" ".join(command), flush=True)
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(result.stdout, end="", flush=True)
    if result.returncode != 0:
        raise SystemExit(f"nvcc failed on {source}")
    if re.search(r"wgmma.*serializ|setmaxnreg ignored", result.stdout):  # ptxas only calls it a performance loss
        raise SystemExit(f"{source}: ptxas serialised wgmma or ignored setmaxnreg; see its messages above")


def core_extension() -> Extension:
    sources = sorted(str(p) for p in [*Path("csrc").glob("*.c"), *Path("csrc/cpu").glob("*.c")])
    headers = sorted(str(p) for p in Path("csrc").rglob("*.h"))
    return Extension(
        "vllm_megaattn._C",
        sources,
        depends=headers,
        include_dirs=["csrc"],
        define_macros=[("Py_LIMITED_API", "0x030A0000"), ("MX_VERSION", f'"{VERSION}"')],
        extra_compile_args=list(C_FLAGS),
        libraries=["dl", "pthread", "m"],
        py_limited_api=True,
    )


os.chdir(ROOT)
setup(
    ext_modules=[core_extension()],
    cmdclass={"build_ext": BuildExt},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
    setup_requires=NVCC_PACKAGES if CUDA_MODE == "pypi" else [],
)
