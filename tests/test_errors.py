"""Every argument of every op, wrong in every way: the error's type, the argument it names, the values it gives.

A wrong call raises TypeError for a wrong type or dtype and ValueError for the rest, before anything is written. The
same tensors through torch.ops give a RuntimeError with the same text (a C kernel cannot raise another type).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from helpers import E4M3, E8M0, POISON, poisoned

import vllm_megaattn

T, G, N, K, HIDDEN, HEADS, DIM, ROPE, POSITIONS = 5, 2, 96, 256, 160, 4, 128, 64, 9


def e4m3(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=E4M3)


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def u8(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


def i32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


@dataclass
class Call:
    """A valid call: tensors by name, keyword options, and the tensors it writes to."""

    tensors: dict[str, torch.Tensor]
    options: dict[str, object]
    outs: dict[str, torch.Tensor]
    name: str

    def front(self, with_out: bool = True):
        options = dict(self.options)
        if with_out:
            options["out"] = tuple(self.outs.values()) if len(self.outs) > 1 else next(iter(self.outs.values()))
        return getattr(vllm_megaattn, self.name)(**self.tensors, **options)

    def out_bytes(self) -> list[bytes]:
        return [bytes(out.untyped_storage()) for out in self.outs.values() if out.device.type == "cpu"]


EINSUM = {
    "x": lambda: e4m3(T, G, K),
    "x_scale": lambda: i32(T, G, K // 128),
    "w": lambda: e4m3(G, N, K),
    "w_scale": lambda: u8(G, N // 32, K // 32),
}
ROPE_IN = {
    "attn": lambda: bf16(T, HEADS, DIM),
    "positions": lambda: torch.zeros(T, dtype=torch.int64),
    "cos_sin": lambda: torch.ones(POSITIONS, ROPE),
}
WO = {
    "wo_a": EINSUM["w"],
    "wo_a_scale": EINSUM["w_scale"],
    "wo_b": lambda: e4m3(HIDDEN, G * N),
    "wo_b_scale": lambda: u8(HIDDEN // 32, G * N // 32),
}
PAIR = {
    "z": lambda: poisoned((T, G * N), E4M3),
    "z_scale": lambda: poisoned((1024,), torch.uint8),
}
SPECS: dict[str, tuple[dict, dict, dict]] = {
    "einsum_fp8_sfd128x4": (EINSUM, {"scale_span": 32, "x_span": 32}, PAIR),
    "einsum_fp8_bf16": (EINSUM, {"x_span": 32}, {"z": lambda: poisoned((T, G, N), torch.bfloat16)}),
    "mxfp8_quantize_sfd128x4": (
        {"z": lambda: bf16(T, G, N)},
        {"scale_span": 32},
        {"q": PAIR["z"], "q_scale": PAIR["z_scale"]},
    ),
    "mxfp8_gemm_wo_b": (
        {
            "z": lambda: e4m3(T, G * N),
            "z_scale": lambda: u8(1024),
            "w": WO["wo_b"],
            "w_scale": WO["wo_b_scale"],
        },
        {"z_span": 32},
        {"y": lambda: poisoned((T, HIDDEN), torch.bfloat16)},
    ),
    "inv_rope_mxfp8_quantize": (
        ROPE_IN,
        {"groups": G, "order": "standard", "cos_sin_layout": "halves", "scale_span": 32},
        {"x": lambda: poisoned((T, G, K), E4M3), "x_scale": lambda: poisoned((T, G, K // 128), torch.int32)},
    ),
    "o_proj": (
        {"x": EINSUM["x"], "x_scale": EINSUM["x_scale"], **WO},
        {"path": "fused", "scale_span": 32, "x_span": 32},
        {"y": lambda: poisoned((T, HIDDEN), torch.bfloat16)},
    ),
    "o_proj_from_attn": (
        {**ROPE_IN, **WO},
        {"groups": G, "order": "standard", "cos_sin_layout": "halves", "path": "unfused", "scale_span": 32},
        {"y": lambda: poisoned((T, HIDDEN), torch.bfloat16)},
    ),
}
OPS = tuple(SPECS)


def make(name: str) -> Call:
    tensors, options, outs = SPECS[name]
    return Call({k: f() for k, f in tensors.items()}, dict(options), {k: f() for k, f in outs.items()}, name)


def refuse(call: Call, kind: type[Exception], *patterns: str, with_out: bool = True) -> str:
    """The call must raise exactly `kind`, name the op, match every pattern, and leave the outputs as they were."""
    before = call.out_bytes()
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        call.front(with_out)
    text = str(caught.value)
    assert type(caught.value) is kind, f"{type(caught.value).__name__}: {text}"
    assert text.startswith(f"{call.name}: "), text
    plain = in_names_of_the_schema(call, text) if with_out else text
    for pattern in patterns:
        assert re.search(pattern, plain), f"{pattern!r} not in {text!r}"
    assert call.out_bytes() == before, "something was written"
    if call.options.get("path") in ("fused", "unfused") and ": path=" not in text:
        call.options["path"] = "dequantised"  # no kernels, the same rules
        with pytest.raises(kind) as caught:
            call.front(with_out)
        assert str(caught.value) == text
        assert call.out_bytes() == before, "something was written"
    return text


def in_names_of_the_schema(call: Call, text: str) -> str:
    """The caller gave `out`, so that is what the message must speak of; the tables here have the op's own names."""
    for i, arg in enumerate(call.outs):
        assert not re.search(rf"(^[^:]*: |like |with ){arg}\b", text) or arg in call.tensors, text
        shown = f"out[{i}] ({arg})" if len(call.outs) > 1 else "out"
        text = re.sub(rf"(?<!\w){re.escape(shown)}(?!\w)", arg, text)
    return text


def test_messages_name_out():
    call = make("mxfp8_gemm_wo_b")
    call.outs["y"] = bf16(T, HIDDEN + 1)
    with pytest.raises(ValueError, match=r"^mxfp8_gemm_wo_b: out must have shape"):
        call.front()
    call = make("mxfp8_quantize_sfd128x4")
    call.outs["q_scale"] = call.outs["q"].view(torch.uint8).flatten()[:1]
    with pytest.raises(ValueError, match=r"^mxfp8_quantize_sfd128x4: out\[0\] \(q\) .* with out\[1\] \(q_scale\): "):
        call.front()


def test_the_valid_calls_are_valid():
    for name in OPS:
        call = make(name)
        call.front()
        assert all(bytes([POISON] * len(b)) != b for b in call.out_bytes())
        make(name).front(with_out=False)


# ---- one tensor, every op --------------------------------------------------------------------------------------

TENSORS = [(name, arg) for name in OPS for arg in SPECS[name][0]]
OUTS = [(name, arg) for name in OPS for arg in SPECS[name][2]]

# dtypes that an argument takes beside its own; int32 for scales means packed words or tiles, so a shape error
ALSO_ACCEPTED = {
    "w_scale": {torch.uint8, E8M0, torch.int32},
    "wo_a_scale": {torch.uint8, E8M0, torch.int32},
    "wo_b_scale": {torch.uint8, E8M0, torch.int32},
    "z_scale": {torch.uint8, E8M0},
    "q_scale": {torch.uint8, E8M0},
}
DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, E4M3, E8M0, torch.float8_e5m2, torch.complex64,
]  # fmt: skip


@pytest.mark.parametrize(("name", "arg"), TENSORS)
@pytest.mark.parametrize(
    "value", [None, np.zeros((5, 2, 256), np.uint8), [1.0], 3, "x"], ids=lambda v: type(v).__name__
)
def test_not_a_tensor(name, arg, value):
    call = make(name)
    call.tensors[arg] = value
    for with_out in (True, False):
        refuse(call, TypeError, rf"\b{arg} must be a torch.Tensor", f"got {type(value).__name__}", with_out=with_out)


@pytest.mark.parametrize(("name", "arg"), TENSORS)
def test_missing_tensor(name, arg):
    """B86: python's own error names it."""
    call = make(name)
    del call.tensors[arg]
    with pytest.raises(TypeError, match=rf"{name}.*missing.*'{arg}'"):
        call.front()


@pytest.mark.parametrize(("name", "arg"), TENSORS + OUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def test_wrong_dtype(name, arg, dtype):
    """B16, B46, B86: e4m3 or float scales, int32 (repacked) weights, float32 activations and all others."""
    call = make(name)
    target = call.tensors if arg in call.tensors else call.outs
    if dtype in ALSO_ACCEPTED.get(arg, ()) or dtype == target[arg].dtype:
        return
    target[arg] = torch.zeros(target[arg].shape, dtype=torch.uint8).to(dtype)
    if target is call.outs:
        target[arg].view(torch.uint8).fill_(POISON)
    shown = str(dtype).removeprefix("torch.")
    got = rf"got ({shown}|dtype code \d+)\b"
    refuse(call, TypeError, rf"\b{arg} must have dtype", got)
    if target is call.tensors:
        refuse(call, TypeError, rf"\b{arg} must have dtype", got, with_out=False)


@pytest.mark.parametrize(("name", "arg"), TENSORS + OUTS)
@pytest.mark.parametrize("change", ["unsqueeze", "five dimensions", "scalar"])
def test_wrong_number_of_dimensions(name, arg, change):
    call = make(name)
    target = call.tensors if arg in call.tensors else call.outs
    tensor = target[arg]
    if change == "unsqueeze":
        if tensor.dim() == 1 or (name == "mxfp8_quantize_sfd128x4" and arg == "z"):
            tensor = tensor.unsqueeze(0).unsqueeze(0).unsqueeze(0)
        else:
            tensor = tensor.unsqueeze(0)
            if tensor.dim() == 3 and arg.endswith("scale"):
                tensor = tensor.unsqueeze(0)  # [1, N, K] is a valid way to give one group's scales
    elif change == "five dimensions":
        tensor = tensor.reshape(*[1] * (5 - tensor.dim()), *tensor.shape)
    else:
        tensor = tensor.flatten()[0]
    target[arg] = tensor
    shown = re.escape(str(list(tensor.shape))) if tensor.dim() < 5 else r"5|" + re.escape(str(list(tensor.shape)))
    refuse(call, ValueError, rf"\b{arg}\b.* must ", f"got .*({shown})")


@pytest.mark.parametrize(("name", "arg"), TENSORS)
def test_requires_grad(name, arg):
    """Inference only: a clear error instead of a silently missing gradient; fine where grad mode is off."""
    call = make(name)
    if not call.tensors[arg].dtype.is_floating_point or call.tensors[arg].dtype == E8M0:
        return
    call.tensors[arg].requires_grad_(True)
    refuse(call, ValueError, rf"\b{arg} requires grad", "no_grad")
    with torch.no_grad():
        call.front()
    with torch.inference_mode():
        call.front()


@pytest.mark.parametrize(("name", "arg"), TENSORS + OUTS)
def test_tensor_on_another_device(name, arg):
    """B61, B62: each operand in turn on another device. A meta tensor stands in for the second device."""
    call = make(name)
    target = call.tensors if arg in call.tensors else call.outs
    target[arg] = target[arg].to("meta")
    named = rf"\b({arg}|{next(iter(call.tensors))})\b"
    refuse(call, ValueError, named, "must be on", r"meta")
    if target is call.tensors and len(target) > 1:  # alone, a meta tensor is a valid call for shapes only
        refuse(call, ValueError, named, "must be on", r"meta", with_out=False)


@pytest.mark.parametrize(
    ("name", "arg"), [(n, a) for n, a in TENSORS + OUTS if "scale" not in a and a != "positions"]
)
def test_last_stride_must_be_one(name, arg):
    call = make(name)
    target = call.tensors if arg in call.tensors else call.outs
    tensor = target[arg]
    target[arg] = tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    refuse(call, ValueError, rf"\b{arg} must have stride 1", re.escape(str(list(target[arg].stride()))))


@pytest.mark.parametrize(("name", "arg"), [(n, a) for n, a in TENSORS + OUTS if a in ("z_scale", "q_scale")])
def test_tiled_scales_must_be_contiguous(name, arg):
    call = make(name)
    target = call.tensors if arg in call.tensors else call.outs
    wide = poisoned((2048,), torch.uint8)
    target[arg] = wide[::2]
    refuse(call, ValueError, rf"\b{arg} must be contiguous", r"\[2\]")


# ---- sizes -----------------------------------------------------------------------------------------------------

Mutation = Callable[[Call], None]


def replace(arg: str, tensor: Callable[[], torch.Tensor]) -> Mutation:
    def mutate(call: Call) -> None:
        (call.tensors if arg in call.tensors else call.outs)[arg] = tensor()

    return mutate


def replace_all(**tensors: Callable[[], torch.Tensor]) -> Mutation:
    def mutate(call: Call) -> None:
        for arg, tensor in tensors.items():
            replace(arg, tensor)(call)

    return mutate


EINSUM_SIZES = [
    (
        "x_scale: T",
        replace("x_scale", lambda: i32(T + 1, G, 2)),
        r"x_scale must have shape.*\[5, 2, 2\].*got \[6, 2, 2\]",
    ),
    ("x_scale: G", replace("x_scale", lambda: i32(T, G + 1, 2)), r"x_scale must have shape.*got \[5, 3, 2\]"),
    ("x_scale: K", replace("x_scale", lambda: i32(T, G, 8)), r"x_scale must have shape.*got \[5, 2, 8\]"),
    # B41: scales quantised as flat [T * G, K]
    ("x_scale: flat", replace("x_scale", lambda: i32(T * G, 2)), r"x_scale must have shape.*got \[10, 2\]"),
]


def weight_sizes(w: str, w_scale: str) -> list[tuple[str, Mutation, str]]:
    return [
        (f"{w}: G", replace(w, lambda: e4m3(G + 1, N, K)), rf"\b{w} must have.*2.*got.*3"),
        (f"{w}: K", replace(w, lambda: e4m3(G, N, K + 128)), rf"\b({w}|x) must have.*256.*got 384|\b{w}.*384"),
        (
            f"{w}: K % 32",
            replace(w, lambda: e4m3(G, N, K + 8)),
            rf"\b{w} must have.*multiple of 32.*got 264|\b{w}.*264",
        ),
        (f"{w}: no rows", replace(w, lambda: e4m3(G, 0, K)), rf"\b{w}\b.*positive.*got 0|\b{w}.* got .*0"),
        (f"{w}: 2-D", replace(w, lambda: e4m3(G * N + 1, K)), rf"\b{w} must have.*multiple of.*2.*got 193"),
        (f"{w_scale}: rows", replace(w_scale, lambda: u8(G, 4, 8)), rf"\b{w_scale} must hold.*got \[2, 4, 8\]"),
        (f"{w_scale}: columns", replace(w_scale, lambda: u8(G, 3, 7)), rf"\b{w_scale} must hold.*got \[2, 3, 7\]"),
        (f"{w_scale}: G", replace(w_scale, lambda: u8(G + 1, 3, 8)), rf"\b{w_scale} must hold.*got \[3, 3, 8\]"),
        (f"{w_scale}: 2-D", replace(w_scale, lambda: u8(7, 8)), rf"\b{w_scale} must hold.*got \[7, 8\]"),
        (
            f"{w_scale}: 1-D for two groups",
            replace(w_scale, lambda: u8(4096)),
            rf"\b{w_scale} must hold.*got \[4096\]",
        ),
        (f"{w_scale}: words", replace(w_scale, lambda: i32(G, N, 8)), rf"\b{w_scale} must hold.*got \[2, 96, 8\]"),
        (f"{w_scale}: empty", replace(w_scale, lambda: u8(0)), rf"\b{w_scale} must hold.*got \[0\]"),
    ]


ROPE_SIZES = [
    (
        "positions: T",
        replace("positions", lambda: torch.zeros(T + 1, dtype=torch.int64)),
        r"positions must have.*5.*got \[6\]",
    ),
    ("cos_sin: width", replace("cos_sin", lambda: torch.ones(9, 63)), r"cos_sin must have.*multiple of 2.*got 63"),
    ("cos_sin: wide", replace("cos_sin", lambda: torch.ones(9, DIM + 2)), r"cos_sin must have at most.*128.*got 130"),
    ("cos_sin: no rows", replace("cos_sin", lambda: torch.ones(0, 64)), r"cos_sin must have.*got 0"),
    ("cos_sin: no columns", replace("cos_sin", lambda: torch.ones(9, 0)), r"cos_sin must have.*got 0"),
    ("attn: D", replace("attn", lambda: bf16(T, HEADS, 100)), r"attn must have.*multiple of 32.*got 100|x must.*got"),
    ("attn: T", replace("attn", lambda: bf16(T + 1, HEADS, DIM)), r"positions must have.*6.*got \[5\]"),
]
WO_B_SIZES = [
    ("wo_b: K", replace("wo_b", lambda: e4m3(HIDDEN, 224)), r"\bwo_b must have.*192.*got 224"),
    ("wo_b: no rows", replace("wo_b", lambda: e4m3(0, 192)), r"\bwo_b must have.*got 0|\bwo_b.* got \[0, 192\]"),
    ("wo_b_scale: rows", replace("wo_b_scale", lambda: u8(4, 6)), r"\bwo_b_scale must hold.*got \[4, 6\]"),
    ("wo_b_scale: 1-D", replace("wo_b_scale", lambda: u8(1024)), r"\bwo_b_scale must have.*2048.*got \[1024\]"),
    ("y: N", replace("y", lambda: poisoned((T, HIDDEN + 1), torch.bfloat16)), r"\by must have.*got \[5, 161\]"),
    ("y: T", replace("y", lambda: poisoned((T + 1, HIDDEN), torch.bfloat16)), r"\by must have.*got \[6, 160\]"),
]
SIZES: dict[str, list[tuple[str, Mutation, str]]] = {
    "einsum_fp8_bf16": [
        *EINSUM_SIZES,
        *weight_sizes("w", "w_scale"),
        ("x: K % 128", replace_all(x=lambda: e4m3(T, G, 96), w=lambda: e4m3(G, N, 96)), r"\bx must.*multiple of 128.*96"),
        ("x: no groups", replace_all(x=lambda: e4m3(T, 0, K), w=lambda: e4m3(0, N, K)), r"\bx must.*got 0"),
        ("z: T", replace("z", lambda: poisoned((T + 1, G, N), torch.bfloat16)), r"\bz must have.*got \[6, 2, 96\]"),
        ("z: flat", replace("z", lambda: poisoned((T, G * N), torch.bfloat16)), r"\bz must have.*got \[5, 192\]"),
    ],
    "einsum_fp8_sfd128x4": [
        *EINSUM_SIZES,
        *weight_sizes("w", "w_scale"),
        ("w: N % 32", replace_all(w=lambda: e4m3(G, 40, K), w_scale=lambda: u8(G, 40, 8)), r"\bw must have.*32.*40"),
        ("z: shape", replace("z", lambda: poisoned((T, G, N), E4M3)), r"\bz must have.*\[5, 192\].*got \[5, 2, 96\]"),
        ("z_scale: short", replace("z_scale", lambda: poisoned((512,), torch.uint8)), r"z_scale must.*1024.*got \[512\]"),
        ("z_scale: long", replace("z_scale", lambda: poisoned((1025,), torch.uint8)), r"z_scale must.*1024.*got \[1025\]"),
        ("z_scale: linear", replace("z_scale", lambda: poisoned((T, 6), torch.uint8)), r"z_scale must.*got \[5, 6\]"),
    ],
    "mxfp8_quantize_sfd128x4": [
        ("z: C % 32", replace("z", lambda: bf16(T, 40)), r"\bz must have.*multiple of 32.*got 40"),
        ("z: N % 32", replace("z", lambda: bf16(T, G, 48)), r"\bz must have.*multiple of 32.*got 48"),
        ("z: no columns", replace("z", lambda: bf16(T, 0)), r"\bz must have.*got 0"),
        ("z: no groups", replace("z", lambda: bf16(T, 0, N)), r"\bz must have.*got 0"),
        ("q: C", replace("q", lambda: poisoned((T, 224), E4M3)), r"\bq must have.*\[5, 192\].*got \[5, 224\]"),
        ("q_scale: short", replace("q_scale", lambda: poisoned((30,), torch.uint8)), r"q_scale must.*1024.*got \[30\]"),
    ],
    "mxfp8_gemm_wo_b": [
        ("z: K % 32", replace("z", lambda: e4m3(T, 200)), r"\bz must have.*multiple of 32.*got 200"),
        ("z: K", replace_all(z=lambda: e4m3(T, 224)), r"\bz_scale must|\bw must have.*224.*got 192"),
        ("z_scale: rows", replace("z_scale", lambda: u8(2048)), r"z_scale must.*1024.*got \[2048\]"),
        ("z_scale: 2-D", replace("z_scale", lambda: u8(T, 6)), r"z_scale must.*got \[5, 6\]"),
        ("w: K", replace("w", lambda: e4m3(HIDDEN, 224)), r"\bw must have.*192.*got 224"),
        ("w: no rows", replace("w", lambda: e4m3(0, 192)), r"\bw must have.*got 0"),
        ("w_scale: rows", replace("w_scale", lambda: u8(4, 6)), r"\bw_scale must hold.*got \[4, 6\]"),
        ("w_scale: 1-D", replace("w_scale", lambda: u8(1024)), r"\bw_scale must have.*2048.*got \[1024\]"),
        ("y: N", replace("y", lambda: poisoned((T, HIDDEN + 1), torch.bfloat16)), r"\by must have.*got \[5, 161\]"),
    ],
    "inv_rope_mxfp8_quantize": [
        *ROPE_SIZES,
        ("x: T", replace("x", lambda: poisoned((T + 1, G, K), E4M3)), r"\bx must have.*5.*got 6"),
        ("x: K", replace("x", lambda: poisoned((T, G, K + 32), E4M3)), r"\bx must have.*multiple of 128.*got 288"),
        ("x: G", replace("x", lambda: poisoned((T, 3, K), E4M3)), r"\bx\b.* must have.*2.*got 3"),
        ("x: too many heads", replace("x", lambda: poisoned((T, G, 2 * K), E4M3)), r"attn must have.*8 heads.*got 4"),
        ("x_scale: K", replace("x_scale", lambda: poisoned((T, G, 8), torch.int32)), r"x_scale must have.*got \[5, 2, 8\]"),
    ],
    "o_proj": [*EINSUM_SIZES, *weight_sizes("wo_a", "wo_a_scale"), *WO_B_SIZES],
    "o_proj_from_attn": [
        *ROPE_SIZES,
        *(case for case in weight_sizes("wo_a", "wo_a_scale") if not case[0].startswith("wo_a: K")),
        *WO_B_SIZES,
        ("wo_a: K", replace("wo_a", lambda: e4m3(G, N, 2 * K)), r"attn must have at least 8 heads.*got 4"),
        ("wo_a: K % D", replace("wo_a", lambda: e4m3(G, N, K + 32)), r"\b(wo_a|x) must have.*multiple of.*got 288"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "mutate", "pattern"),
    [
        pytest.param(name, mutate, pattern, id=f"{name}-{label}")
        for name in OPS
        for label, mutate, pattern in SIZES[name]
    ],
)
def test_wrong_size(name, mutate, pattern):
    call = make(name)
    mutate(call)
    refuse(call, ValueError, pattern)


# ---- memory ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "arg"), OUTS)
def test_output_must_not_overlap_itself(name, arg):
    call = make(name)
    out = call.outs[arg]
    call.outs[arg] = out[:1].expand_as(out) if out.dim() > 1 else out[:1].expand(out.shape)
    refuse(call, ValueError, rf"\b{arg} is written and must not overlap itself", "got strides")


@pytest.mark.parametrize(
    ("name", "arg", "out"), [(n, a, o) for n in OPS for a in SPECS[n][0] for o in SPECS[n][2]]
)  # fmt: skip
def test_output_must_not_share_memory_with_an_input(name, arg, out):
    """B70: also where only one byte is shared, at either end."""
    for end in ("start", "end"):
        call = make(name)
        tensor, result = call.tensors[arg], call.outs[out]
        out_bytes, in_bytes = result.numel() * result.element_size(), tensor.numel() * tensor.element_size()
        align = 8
        out_size, in_size = -(-out_bytes // align) * align, -(-in_bytes // align) * align
        storage = poisoned((out_size + in_size,), torch.uint8)
        # the input begins one element before the output's end, or ends one element after its beginning
        out_at = 0 if end == "end" else in_size - align
        in_at = (
            (out_bytes - 1) // align * align if end == "end" else align - in_bytes % align if in_bytes % align else 0
        )
        in_at -= in_at % tensor.element_size()
        call.outs[out] = storage[out_at : out_at + out_bytes].view(result.dtype).view(result.shape)
        shared = storage[in_at : in_at + in_bytes].view(tensor.dtype).view(tensor.shape)
        call.tensors[arg] = shared
        refuse(call, ValueError, rf"\b{out} is written and may share memory with \b{arg}\b|{arg}.*{out}")


@pytest.mark.parametrize("name", [n for n in OPS if len(SPECS[n][2]) > 1])
def test_outputs_must_not_share_memory_with_each_other(name):
    call = make(name)
    first, second = call.outs
    storage = poisoned((8192,), torch.uint8)
    for arg in (first, second):
        out = call.outs[arg]
        call.outs[arg] = storage[: out.numel() * out.element_size()].view(out.dtype).view(out.shape)
    refuse(call, ValueError, rf"\b({first}|{second}) is written and may share memory with ({first}|{second})")


def test_columns_of_one_buffer_are_refused_for_their_byte_ranges():
    """Disjoint, but interleaved row by row: the check knows ranges only, and the message says no more than that."""
    buffer = torch.zeros(T, 3 * 192, dtype=torch.uint8)
    z, q = buffer[:, :384].view(torch.bfloat16), buffer[:, 384:].view(E4M3)
    with pytest.raises(ValueError, match=r"\(q\) is written and may share memory with z: their byte ranges overlap"):
        vllm_megaattn.mxfp8_quantize_sfd128x4(z, out=(q, torch.zeros(1024, dtype=torch.uint8)))


@pytest.mark.parametrize("groups", [1, 3, 2**62])
def test_groups_that_the_weight_does_not_have(groups):
    """2^62 of them: no buffer is asked for."""
    call = make("o_proj_from_attn")
    call.options["groups"] = groups
    call.tensors["attn"] = bf16(T, 2 * groups, DIM) if groups < 4 else call.tensors["attn"]
    refuse(call, ValueError, rf"wo_a must have G = {groups} groups.*, got 2")


def test_neighbours_in_one_storage_are_fine():
    """Adjacent, not overlapping: out directly behind the input."""
    storage = torch.zeros(T * 192 * 2 + T * 192 + 1024, dtype=torch.uint8)
    z = storage[: T * 384].view(torch.bfloat16).view(T, 192)
    q = storage[T * 384 : T * 576].view(E4M3).view(T, 192)
    vllm_megaattn.mxfp8_quantize_sfd128x4(z, out=(q, storage[T * 576 :]))


# ---- options ---------------------------------------------------------------------------------------------------

SPANS = [(name, option) for name in OPS for option in ("scale_span", "x_span", "z_span") if option in SPECS[name][1]]


@pytest.mark.parametrize(("name", "option"), SPANS)
@pytest.mark.parametrize("value", [0, -32, 31, 48, 64.0, "32", True, None], ids=repr)
def test_wrong_span(name, option, value):
    call = make(name)
    call.options[option] = value
    if value is None and option == "scale_span" and name.startswith("o_proj"):
        call.front()  # means "as the backend likes"
    elif isinstance(value, int) and not isinstance(value, bool):
        refuse(call, ValueError, rf"\b{option} must be", rf"got {value}\b")
    else:
        refuse(call, TypeError, rf"\b{option} must be an int", f"got {type(value).__name__}")


@pytest.mark.parametrize("name", [name for name, option in SPANS if option == "scale_span"])
def test_scale_span_must_be_known_and_divide(name):
    """32, 128 and 256 only; N = 96 per group (K = 256 for the inverse RoPE) does not hold a whole number of all."""
    call = make(name)
    for value in (64, 96, 512):
        call.options["scale_span"] = value
        refuse(call, ValueError, r"\bscale_span must be 32, 128 or 256", rf"got {value}\b")
    if name != "inv_rope_mxfp8_quantize":
        call.options["scale_span"] = 128
        refuse(call, ValueError, r"\bscale_span must divide the 96 columns", r"got 128\b")
    else:
        call.tensors["attn"], call.options["scale_span"] = bf16(T, HEADS, 192), 256
        call.outs["x"], call.outs["x_scale"] = poisoned((T, G, 384), E4M3), poisoned((T, G, 3), torch.int32)
        refuse(call, ValueError, r"\bscale_span must divide the 384 columns", r"got 256\b")


@pytest.mark.parametrize("name", ["inv_rope_mxfp8_quantize", "o_proj_from_attn"])
@pytest.mark.parametrize("option", ["order", "cos_sin_layout"])
@pytest.mark.parametrize("value", ["Standard", "", None, 0], ids=repr)
def test_wrong_choice(name, option, value):
    call = make(name)
    call.options[option] = value
    refuse(call, ValueError, rf"\b{option} must be one of", "'(standard|halves)'", re.escape(f"got {value!r}"))


@pytest.mark.parametrize("name", ["inv_rope_mxfp8_quantize", "o_proj_from_attn"])
@pytest.mark.parametrize("value", [0, -1, 3, 5, "2", 2.0, None], ids=repr)
def test_wrong_groups(name, value):
    call = make(name)
    call.options["groups"] = value
    kind = ValueError if isinstance(value, int) else TypeError
    shown = str(value) if kind is ValueError else type(value).__name__
    refuse(call, kind, r"\b(groups|attn|wo_a)\b", shown, with_out=False)


@pytest.mark.parametrize("name", ["o_proj", "o_proj_from_attn"])
@pytest.mark.parametrize("value", [None, 1, True], ids=repr)
def test_wrong_path_type(name, value):
    call = make(name)
    call.options["path"] = value
    refuse(call, TypeError, r"\bpath must be a str", f"got {type(value).__name__}")


@pytest.mark.parametrize("name", OPS)
def test_wrong_out(name):
    """Not a tensor, not a pair, too many; a missing keyword is python's own error."""
    call = make(name)
    pair = len(call.outs) > 1
    tensor = next(iter(call.outs.values()))
    bad_values = [3, "y", (tensor,), [tensor] * 3, {"z": tensor}] + (
        [tensor, (tensor, None)] if pair else [(tensor, tensor)]
    )
    for bad in bad_values:
        with pytest.raises(TypeError, match=rf"{name}: out.* must be"):
            getattr(vllm_megaattn, name)(**call.tensors, **call.options, out=bad)
    with pytest.raises(TypeError, match="nonsense"):
        getattr(vllm_megaattn, name)(**call.tensors, **call.options, nonsense=1)


# ---- torch.ops -------------------------------------------------------------------------------------------------


def raw_arguments(call: Call) -> list[object]:
    """The arguments of torch.ops.vllm_megaattn.<name> for a front-end call, in schema order."""
    z = {"z": poisoned((T, G * N), E4M3), "z_scale": poisoned((1024,), torch.uint8)}
    options = {
        **{k: v for k, v in call.options.items() if isinstance(v, int)},
        "order": 0,
        "cache": 0,
        "fused": call.options.get("path") == "fused",
    }
    x = {"x": poisoned((T, G, K), E4M3), "x_scale": poisoned((T, G, K // 128), torch.int32)}
    rows = 0 if options["fused"] else T
    extra = {"z_bf16": poisoned((rows, G, N) if rows else (0,), torch.bfloat16)}
    pool = {**x, **z, **extra, **options, **call.outs, **call.tensors}
    schema = getattr(torch.ops.vllm_megaattn, call.name).default._schema
    arguments = []
    for argument in schema.arguments:
        written = argument.alias_info is not None and argument.alias_info.is_write
        arguments.append(call.outs[argument.name] if written and argument.name in call.outs else pool[argument.name])
    return arguments


@pytest.mark.parametrize("name", OPS)
def test_raw_op_accepts_the_valid_call(name):
    getattr(torch.ops.vllm_megaattn, name)(*raw_arguments(make(name)))


@pytest.mark.parametrize(
    ("name", "mutate", "pattern"),
    [
        pytest.param(name, mutate, pattern, id=f"{name}-{label}")
        for name in OPS
        for label, mutate, pattern in SIZES[name]
    ],
)
def test_raw_op_repeats_the_size_checks(name, mutate, pattern):
    """The C side must refuse on its own what the front end refuses: torch.ops callers have no front end."""
    call = make(name)
    mutate(call)
    before = call.out_bytes()
    with pytest.raises(RuntimeError) as caught:
        getattr(torch.ops.vllm_megaattn, name)(*raw_arguments(call))
    text = str(caught.value)
    assert re.match(rf"{name}: .* must .*got", text), text
    assert call.out_bytes() == before
    assert not re.search(r"\n|Exception raised", text), text


@pytest.mark.parametrize(("name", "arg"), TENSORS + OUTS)
def test_raw_op_repeats_the_type_checks(name, arg):
    for dtype in (torch.float32, torch.int64, torch.float16):
        call = make(name)
        target = call.tensors if arg in call.tensors else call.outs
        if target[arg].dtype == dtype:
            continue
        target[arg] = torch.zeros(target[arg].shape, dtype=dtype)
        before = call.out_bytes()
        with pytest.raises(RuntimeError, match=rf"{name}: {arg} must have dtype.*got {str(dtype)[6:]}"):
            getattr(torch.ops.vllm_megaattn, name)(*raw_arguments(call))
        assert call.out_bytes() == before


@pytest.mark.parametrize(
    ("order", "cache", "pattern"),
    [(2, 0, "order must be 0 .* got 2"), (-1, 0, "order must be"), (0, 7, "cache must be 0 .* got 7")],
)
def test_raw_enums(order, cache, pattern):
    call = make("inv_rope_mxfp8_quantize")
    before = call.out_bytes()
    with pytest.raises(RuntimeError, match=pattern):
        torch.ops.vllm_megaattn.inv_rope_mxfp8_quantize(*call.tensors.values(), *call.outs.values(), order, cache, 32)
    assert call.out_bytes() == before


def test_an_error_leaves_no_trace():
    """The kind of an error belongs to its call: a torch error after one of ours keeps its own type."""
    call = make("einsum_fp8_bf16")
    call.tensors["x"] = call.tensors["x"].to(torch.float32)
    refuse(call, TypeError, "x must have dtype")
    good = make("einsum_fp8_bf16")
    good.front()
    with pytest.raises(RuntimeError) as caught:
        torch.ops.vllm_megaattn.einsum_fp8_bf16(*call.tensors.values(), *call.outs.values(), 32)
    assert type(caught.value) is RuntimeError
    good.front()
    call.tensors["x"] = e4m3(T, G, K + 128)
    refuse(call, ValueError, "must have")
