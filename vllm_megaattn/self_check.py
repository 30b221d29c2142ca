"""Does this device compute what the CPU backend computes? Asked once on first use, and at length by `check`.

A kernel is trusted only where it has been seen to work. The first call of an op on a CUDA device (outside graph capture)
runs small adversarial problems through every family of kernels (`self_check_cases`) and compares:

    bytes   quantiser and inverse RoPE against the CPU backend; the fused einsum against quantising its own BF16 z;
            the fused against the unfused projection; padding bytes against 0x00
    values  BF16 results against the CPU backend, whose accumulation is FP32: the tensor core's own rounding is allowed

The scale bytes of neighbouring rows, columns and tiles all differ, so that a scale read from the wrong place cannot hide.

What fails is not used again in this process: where other kernels can do the same (decode kernels, pairs of blocks, a
route of wo_b) those take over, else the ops raise RuntimeError and the caller's engine can fall back. A warning says so.
`prepare_device` runs the check ahead, before a capture or a server's first request. VLLM_MEGAATTN_SELF_CHECK=0 turns the
first-use check off.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch

from vllm_megaattn import _C, selector
from vllm_megaattn.self_check_cases import Case, Finding
from vllm_megaattn.self_check_cases import run as run_cases

ENV = "VLLM_MEGAATTN_SELF_CHECK"
BATCH_INVARIANT, NO_PAIRS, NO_DECODE = _C.FLAG_BATCH_INVARIANT, _C.FLAG_NO_PAIRS, _C.FLAG_NO_DECODE
WO_B_OWN, WO_B_CUBLASLT = _C.FLAG_WO_B_OWN, _C.FLAG_WO_B_CUBLASLT
logger = logging.getLogger("vllm_megaattn")

# Which front ends a family disables when it fails.
FAMILIES = {
    "inv_rope": ("inv_rope_mxfp8_quantize", "o_proj_from_attn"),
    "quantize": ("mxfp8_quantize_sfd128x4",),
    "einsum": ("einsum_fp8_sfd128x4", "einsum_fp8_bf16", "o_proj", "o_proj_from_attn"),
    "gemm": ("mxfp8_gemm_wo_b", "o_proj", "o_proj_from_attn"),
    "o_proj": ("o_proj", "o_proj_from_attn"),
}
# Units that others replace, by a switch of the C core.
REPLACEABLE = {"decode": NO_DECODE, "pairs": NO_PAIRS}

STREAM_TOKENS = 600  # enough for the kernels that move four pieces a warp, on up to 150 SMs
_WIDE = {"span": 256, "weights": "wide"}

QUICK_HOPPER = (
    Case("stream", STREAM_TOKENS, part="stream", groups=1, span=256),
    Case("decode", 7, **_WIDE),
    Case("decode", 2, groups=1, heads=4, rows=512, hidden=4480, windows=True, **_WIDE),  # all inside two kernels
    Case("tiled", 133, **_WIDE),
    Case("tiled", 133, part="einsum", rows=5120, windows=True, **_WIDE),
    Case("tiled", 70, part="gemm", groups=1, rows=8192, hidden=5120, windows=True, **_WIDE),  # split in two along K
    Case("per 32", 133),
    Case("per row", 7, weights="rows"),
)
QUICK_BLACKWELL = (
    Case("stream", STREAM_TOKENS, part="stream", groups=1),
    Case("split", 7, weights="tiled", flags=WO_B_OWN),
    Case("split", 7, flags=WO_B_OWN),
    Case("pairs", 133, weights="tiled", flags=WO_B_OWN),
    Case("single", 133, weights="tiled", flags=WO_B_OWN | NO_PAIRS),
    Case("cuBLASLt", 133, weights="tiled", part="gemm", flags=WO_B_CUBLASLT),
    Case("cuBLASLt", 7, weights="tiled", part="gemm", flags=WO_B_CUBLASLT),
)

STREAMS = tuple(Case("stream", STREAM_TOKENS, span, part="stream", groups=1, heads=8) for span in (32, 128, 256))
TOKENS = (1, 7, 8, 33, 64, 65, 128, 129, 300)
SHAPES = (
    {"groups": 1, "heads": 8, "rows": 1024, "hidden": 5120},  # TP8 of DeepSeek-V4.1
    {"groups": 2, "heads": 1, "rows": 256, "hidden": 160},
    {"groups": 3, "heads": 2, "rows": 384, "hidden": 96},
)


def _full_hopper() -> list[Case]:
    cases = [*QUICK_HOPPER, *STREAMS]
    for tokens in TOKENS:
        for shape in SHAPES:
            few = "decode" if tokens <= 64 else "tiled"
            for span in (128, 256):
                if shape["rows"] % span == 0:
                    cases.append(Case(few, tokens, span, "wide", distinct=37, **shape))
            cases.append(Case("per 32", tokens, distinct=37, **shape))
            cases.append(Case("per row", tokens, weights="rows", distinct=37, **shape))
    return cases


def _full_blackwell() -> list[Case]:
    cases = [*QUICK_BLACKWELL, *STREAMS]
    for tokens in TOKENS:
        for shape in SHAPES:
            many = tokens > 64
            for weights in ("tiled", "blocks"):
                unit = "pairs" if many else "split"
                cases.append(Case(unit, tokens, weights=weights, flags=WO_B_OWN, distinct=37, **shape))
            own = WO_B_OWN | (NO_PAIRS if many else BATCH_INVARIANT)
            cases.append(
                Case("single" if many else "split", tokens, weights="tiled", flags=own, distinct=37, **shape)
            )
            lt = Case("cuBLASLt", tokens, weights="tiled", part="gemm", flags=WO_B_CUBLASLT, distinct=37, **shape)
            cases.append(lt)
    return cases


def cases_for(device_key: str, *, quick: bool) -> list[Case]:
    """The problems of a device; those of cuBLASLt only where it can be opened."""
    if device_key in ("sm100", "sm103"):
        cases = list(QUICK_BLACKWELL) if quick else _full_blackwell()
        return cases if _C.cublaslt_status()[0] else [case for case in cases if case.unit != "cuBLASLt"]
    return list(QUICK_HOPPER) if quick else _full_hopper()


def run(cases: list[Case] | tuple[Case, ...], device: torch.device) -> list[Finding]:
    """All comparisons; kernels that raise count as a failed finding. Torch's default device and dtype do not matter."""
    flags = _C.get_flags() & ~(NO_PAIRS | WO_B_OWN | WO_B_CUBLASLT | NO_DECODE | BATCH_INVARIANT)
    before = _C.get_flags()
    default, threads = torch.get_default_dtype(), torch.get_num_threads()
    try:
        torch.set_default_dtype(torch.float32)
        if len(cases) < 20:  # too little work for threads, which on a busy host wait for each other
            torch.set_num_threads(1)
        with torch.device("cpu"), torch.no_grad():
            return run_cases(list(enumerate(cases)), device, lambda wanted: _C.set_flags(flags | wanted))
    finally:
        torch.set_default_dtype(default)
        torch.set_num_threads(threads)
        _C.set_flags(before)


# ---- first use -----------------------------------------------------------------------------------------------------


@dataclass
class _State:
    disabled: dict[str, str] = field(default_factory=dict)  # op -> why
    replaced: dict[str, str] = field(default_factory=dict)  # unit -> why
    milliseconds: float | None = None  # what the check took; None: it was turned off


_states: dict[int, _State] = {}


def prepare_device(device: torch.device | str | int | None = None) -> None:
    """Loads the kernels for a CUDA device and runs the first-use check now: before a capture, or before a server takes
    requests. Later calls return at once. Does nothing for other devices; RuntimeError says why kernels cannot run."""
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
    if device.type != "cuda":
        return
    index = device.index if device.index is not None else torch.cuda.current_device()
    _C.cuda_prepare(index)
    if index not in _states:
        with torch.cuda.device(index):
            _ensure_checked(index)


def before_call(op: str, tensor: torch.Tensor) -> None:
    """Called by every front end with a CUDA tensor: checks the device on first use, refuses a disabled kernel."""
    index = tensor.device.index
    state = _states.get(index)
    if state is None:
        state = _ensure_checked(index)
        if state is None:
            return
    if op in state.disabled:
        raise RuntimeError(f"{op}: disabled on cuda:{index} after a failed self-check: {state.disabled[op]}")


def disabled_ops(index: int) -> dict[str, str]:
    """Ops disabled on a CUDA device, with the reason."""
    return dict(_states[index].disabled) if index in _states else {}


def _ensure_checked(index: int) -> _State | None:
    """The device's state, after the check if this is its first use; None while a capture forbids comparing."""
    if torch.cuda.is_current_stream_capturing():
        return None  # the next call outside the capture will
    state = _states[index] = _State()
    device = torch.device("cuda", index)
    unproven = selector.unproven(selector.device_key(device))
    if unproven:
        logger.warning(
            "vllm_megaattn: cuda:%d (%s): its kernels %s. Please run `python -m vllm_megaattn check` and report the "
            "output, good or bad (docs/blackwell.md).",
            index, _name(device), unproven,
        )  # fmt: skip
    if os.environ.get(ENV, "1") != "0":
        _first_use(device, state)
    return state


def _first_use(device: torch.device, state: _State) -> None:
    key = selector.device_key(device)
    begin = time.perf_counter()
    try:
        findings = run(cases_for(key, quick=True), device)
    except torch.OutOfMemoryError as error:
        warnings.warn(f"vllm_megaattn: {device} is not checked: {error}", RuntimeWarning, stacklevel=5)
        return
    state.milliseconds = 1e3 * (time.perf_counter() - begin)
    failed = [f for f in findings if not f.ok]
    if not failed:
        return
    apply_findings(failed, key, state)
    path = write_report(findings, device)
    taken = [f"{unit} (others take over)" for unit in state.replaced] + sorted(state.disabled)
    warnings.warn(
        f"vllm_megaattn: {_name(device)} gave wrong results for "
        f"{', '.join(sorted({f'{f.case.unit} {f.family}' for f in failed}))}; no longer used: {', '.join(taken)}. "
        f"Please report it and attach {path} and the output of `python -m vllm_megaattn check`.",
        RuntimeWarning,
        stacklevel=5,
    )


def apply_findings(failed: list[Finding], key: str, state: _State) -> None:
    """Takes what failed out of use: by others that do the same where there are any, else by disabling ops."""
    for unit in dict.fromkeys(f.case.unit for f in failed):
        mine = [f for f in failed if f.case.unit == unit]
        why = "; ".join(f"{f.what} ({f.case}): {f.detail}" for f in mine[:3])
        families = {f.family for f in mine}
        if unit in REPLACEABLE:
            _C.set_flags(_C.get_flags() | REPLACEABLE[unit])
            state.replaced[unit] = why
            families &= {"inv_rope", "quantize"}  # the unit only carried these
        elif unit == "cuBLASLt":
            selector.disable_wo_b("cublaslt", f"cuBLASLt failed the self-check: {why}")
            state.replaced[unit] = why
            families = set()
        elif key in ("sm100", "sm103") and "gemm" in families and "einsum" not in families:
            selector.disable_wo_b("own", f"the package's own wo_b kernel failed the self-check: {why}")
            state.replaced["own wo_b"] = why
            families -= {"gemm", "o_proj"}
        for family in families:
            for op in FAMILIES[family]:
                state.disabled.setdefault(op, why)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def write_report(findings: list[Finding], device: torch.device) -> Path:
    """A text file with the findings and versions, for a bug report."""
    lines = [
        f"device {_name(device)}",
        f"torch {torch.__version__} CUDA {torch.version.cuda}",
        f"build {_C.build_info()}",
    ]
    lines += [f"{'ok  ' if f.ok else 'FAIL'} {f.family:9} {f.what:34} {f.case} {f.detail}" for f in findings]
    handle, path = tempfile.mkstemp(prefix="vllm_megaattn_check_", suffix=".txt")
    with os.fdopen(handle, "w") as file:
        file.write("\n".join(lines) + "\n")
    return Path(path)
