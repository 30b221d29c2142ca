"""Does this device compute what the CPU backend computes? Asked once on first use, and at length by `check`.

A kernel is trusted only where it has been seen to work. The first call of an op on a CUDA device (outside graph capture)
runs a small adversarial problem through every kernel family and compares:

    bytes   quantiser and inverse RoPE against the CPU backend; the fused einsum against quantising its own BF16 z;
            the fused against the unfused projection; padding bytes against 0x00
    values  BF16 results against the CPU backend, whose accumulation is FP32: the tensor core's own rounding is allowed

The scale bytes of neighbouring rows, columns and tiles all differ, so that a scale read from the wrong place cannot hide.
A family that fails is disabled on that device: its calls raise RuntimeError, and the caller's engine can fall back.
VLLM_MEGAATTN_SELF_CHECK=0 turns the first-use check off.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

ENV = "VLLM_MEGAATTN_SELF_CHECK"
E4M3 = torch.float8_e4m3fn
# Relative Frobenius distance of BF16 results from the CPU backend's. Two BF16 roundings of nearly the same value differ
# by 1e-3 at most on average; the tensor cores' accumulation adds 3.5e-4 (span 256).
VALUE_LIMIT = 3e-3

# Which front ends a family disables when it fails.
FAMILIES = {
    "inv_rope": ("inv_rope_mxfp8_quantize", "o_proj_from_attn"),
    "quantize": ("mxfp8_quantize_sfd128x4",),
    "einsum": ("einsum_fp8_sfd128x4", "einsum_fp8_bf16", "o_proj", "o_proj_from_attn"),
    "gemm": ("mxfp8_gemm_wo_b", "o_proj", "o_proj_from_attn"),
    "o_proj": ("o_proj", "o_proj_from_attn"),
}


@dataclass(frozen=True)
class Case:
    """One problem: T tokens, G groups of `heads` heads of 512, N rows a group, `hidden` rows of wo_b, one span."""

    tokens: int
    groups: int = 2
    heads: int = 1
    rows: int = 256
    hidden: int = 160
    span: int = 32

    def __str__(self) -> str:
        return f"T={self.tokens} G={self.groups} K={self.heads * 512} N={self.rows}/{self.hidden} span={self.span}"


# Small T and large T take different kernels, and so do wide and per-32 scales.
QUICK = (Case(5), Case(130), Case(5, span=256), Case(130, span=256))
FULL = tuple(
    Case(tokens, groups, heads, rows, hidden, span)
    for tokens in (1, 7, 8, 33, 64, 65, 128, 129, 300)
    for groups, heads, rows, hidden in ((1, 8, 1024, 5120), (2, 1, 256, 160), (3, 2, 384, 96))
    for span in (32, 128, 256)
    if rows % span == 0
)


@dataclass
class Finding:
    """One comparison. `detail` says how far apart the two sides are when they differ."""

    family: str
    what: str
    case: Case
    ok: bool
    detail: str = ""


@dataclass
class _State:
    disabled: dict[str, str] = field(default_factory=dict)  # op -> why


_states: dict[int, _State] = {}


# ---- comparing -----------------------------------------------------------------------------------------------------


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().view(torch.uint8).flatten()


def _same_bytes(mine: torch.Tensor, other: torch.Tensor) -> tuple[bool, str]:
    differ = _bytes_of(mine) != _bytes_of(other)
    count = int(differ.sum())
    return (
        count == 0,
        "" if count == 0 else f"{count} of {differ.numel()} bytes differ, first at {int(differ.nonzero()[0])}",
    )


def _near(mine: torch.Tensor, other: torch.Tensor) -> tuple[bool, str]:
    mine, other = mine.cpu().double(), other.cpu().double()
    if not torch.equal(mine.isnan(), other.isnan()):
        return False, "NaN in different places"
    distance = ((mine - other).nan_to_num().norm() / other.nan_to_num().norm().clamp_min(1e-30)).item()
    return distance <= VALUE_LIMIT, f"relative distance {distance:.1e}"


def _uneven_scales(rows: int, cols: int, first: int) -> torch.Tensor:
    """uint8 [rows, cols]: neighbours in row, column and 128x4 tile all differ."""
    row, col = torch.arange(rows)[:, None], torch.arange(cols)[None, :]
    return (first + (3 * row + 5 * col) % 11).to(torch.uint8)


def _problem(case: Case, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    k, columns = case.heads * 512, case.groups * case.rows
    attn = randn(case.tokens, case.groups * case.heads, 512)
    attn[:, :, ::97] *= 64  # outlier channels
    angle = torch.rand((512, 32), generator=generator) * 6.2831853
    return {
        "attn": attn.bfloat16(),
        "positions": torch.randint(0, 512, (case.tokens,), generator=generator),
        "cos_sin": torch.cat([angle.cos(), angle.sin()], 1).contiguous(),
        "wo_a": (randn(case.groups, case.rows, k) * 60).clamp_(-448, 448).to(E4M3),
        "wo_a_scale": _uneven_scales(case.groups * case.rows // 32, k // 32, 112).view(case.groups, -1, k // 32),
        "wo_b": (randn(case.hidden, columns) * 60).clamp_(-448, 448).to(E4M3),
        "wo_b_scale": _uneven_scales(case.hidden // 32, columns // 32, 112),
    }


def compare(case: Case, device: torch.device, seed: int = 0) -> Iterator[Finding]:
    """Every comparison of one case, device against CPU."""
    from vllm_megaattn import layouts, ops

    host = _problem(case, seed)
    if case.span > 32:  # the wide kernels read weights with one scale for 32 rows and all of K
        for name in ("wo_a", "wo_b"):
            scale = host[f"{name}_scale"]
            host[f"{name}_scale"] = scale[..., :1].contiguous()
    there = {name: tensor.to(device) for name, tensor in host.items()}
    span = case.span

    def finding(family: str, what: str, outcome: tuple[bool, str]) -> Finding:
        return Finding(family, what, case, *outcome)

    def rope(side: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return ops.inv_rope_mxfp8_quantize(
            side["attn"], side["positions"], side["cos_sin"], groups=case.groups, scale_span=span
        )

    x, x_scale = rope(host)
    x_there, x_scale_there = rope(there)
    yield finding("inv_rope", "data = CPU", _same_bytes(x_there, x))
    yield finding("inv_rope", "scales = CPU", _same_bytes(x_scale_there, x_scale))

    x_there, x_scale_there = x.to(device), x_scale.to(device)
    a_host = (x, x_scale, host["wo_a"], host["wo_a_scale"])
    a_there = (x_there, x_scale_there, there["wo_a"], there["wo_a_scale"])
    z_bf16 = ops.einsum_fp8_bf16(*a_there, x_span=span)
    yield finding("einsum", "BF16 z ~ CPU", _near(z_bf16, ops.einsum_fp8_bf16(*a_host, x_span=span)))

    q, q_scale = ops.mxfp8_quantize_sfd128x4(z_bf16, scale_span=span)
    expected = ops.mxfp8_quantize_sfd128x4(z_bf16.cpu(), scale_span=span)
    yield finding("quantize", "data = CPU", _same_bytes(q, expected[0]))
    yield finding("quantize", "scales = CPU", _same_bytes(q_scale, expected[1]))

    poisoned = torch.full_like(q_scale, 0xA5)
    z, z_scale = ops.einsum_fp8_sfd128x4(*a_there, scale_span=span, x_span=span, out=(torch.empty_like(q), poisoned))
    yield finding("einsum", "fused data = quantised BF16 z", _same_bytes(z, q))
    yield finding("einsum", "fused scales = quantised BF16 z", _same_bytes(z_scale, q_scale))
    clean = layouts.f8_128x4_padding_is_zero(z_scale.cpu(), case.tokens, q.shape[1] // 32)
    yield finding("einsum", "padding is 0x00", (clean, "" if clean else "padding bytes written"))

    b_there = (there["wo_b"], there["wo_b_scale"])
    y = ops.mxfp8_gemm_wo_b(q, q_scale, *b_there, z_span=span)
    y_host = ops.mxfp8_gemm_wo_b(q.cpu(), q_scale.cpu(), host["wo_b"], host["wo_b_scale"], z_span=span)
    yield finding("gemm", "y ~ CPU", _near(y, y_host))

    whole = {
        path: ops.o_proj(*a_there, *b_there, path=path, scale_span=span, x_span=span) for path in ("fused", "unfused")
    }
    yield finding("o_proj", "fused = unfused", _same_bytes(whole["fused"], whole["unfused"]))
    yield finding("o_proj", "fused ~ einsum, GEMM", _near(whole["fused"], y))
    from_attn = ops.o_proj_from_attn(
        there["attn"], there["positions"], there["cos_sin"], there["wo_a"], there["wo_a_scale"], *b_there,
        groups=case.groups, scale_span=span,
    )  # fmt: skip
    yield finding("o_proj", "from attention = from x", _same_bytes(from_attn, whole["fused"]))


def run(cases: tuple[Case, ...], device: torch.device) -> list[Finding]:
    """All comparisons; a kernel that raises counts as a failed finding of its family."""
    findings: list[Finding] = []
    for seed, case in enumerate(cases):
        try:
            findings += compare(case, device, seed)
        except (RuntimeError, ValueError) as error:
            findings.append(Finding("o_proj", "runs", case, False, str(error)))
    return findings


# ---- first use -----------------------------------------------------------------------------------------------------


def before_call(op: str, tensor: torch.Tensor) -> None:
    """Called by every front end with a CUDA tensor: checks the device on first use, refuses a disabled kernel."""
    index = tensor.device.index
    state = _states.get(index)
    if state is None:
        if torch.cuda.is_current_stream_capturing():
            return  # cannot compare inside a capture; the next call outside one will
        state = _states[index] = _State()  # set first: the check itself calls the front ends
        if os.environ.get(ENV, "1") != "0":
            _first_use(index, state)
    if op in state.disabled:
        raise RuntimeError(f"{op}: disabled on cuda:{index} after a failed self-check: {state.disabled[op]}")


def disabled_ops(index: int) -> dict[str, str]:
    """Ops disabled on a CUDA device, with the reason."""
    return dict(_states[index].disabled) if index in _states else {}


def _first_use(index: int, state: _State) -> None:
    device = torch.device("cuda", index)
    failed = [f for f in run(QUICK, device) if not f.ok]
    if not failed:
        return
    for finding in failed:
        for op in FAMILIES[finding.family]:
            state.disabled.setdefault(op, f"{finding.what} ({finding.case}): {finding.detail}")
    path = write_report(failed, device)
    warnings.warn(
        f"vllm_megaattn: {torch.cuda.get_device_name(index)} gave wrong results for "
        f"{', '.join(sorted({f.family for f in failed}))}; disabled: {', '.join(sorted(state.disabled))}. Please report "
        f"it and attach {path} and the output of `python -m vllm_megaattn check`.",
        RuntimeWarning,
        stacklevel=4,
    )


def write_report(findings: list[Finding], device: torch.device) -> Path:
    """A text file with the findings and versions, for a bug report."""
    from vllm_megaattn import _C

    lines = [f"device {torch.cuda.get_device_name(device)}", f"torch {torch.__version__}", f"build {_C.build_info()}"]
    lines += [f"{'ok  ' if f.ok else 'FAIL'} {f.family:9} {f.what:34} {f.case} {f.detail}" for f in findings]
    handle, name = tempfile.mkstemp(prefix="vllm_megaattn_check_", suffix=".txt")
    with os.fdopen(handle, "w") as file:
        file.write("\n".join(lines) + "\n")
    return Path(name)
