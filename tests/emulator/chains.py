"""Whole projections on emulated devices: the cases of the package's own self-check, launched through its host code.

`findings(emulator, case, device)` prepares a `vllm_megaattn.self_check_cases.Case`, runs every op of it on the emulator
and compares as the first use of a real device does.
"""

from __future__ import annotations

import ctypes

import host
import numpy as np
import torch
from host import Emulator

from vllm_megaattn import self_check_cases
from vllm_megaattn.self_check_cases import Case, Finding, Prepared

HOPPER, BLACKWELL = Emulator.HOPPER, Emulator.BLACKWELL


def address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr()


def scales(tensor: torch.Tensor, groups: int, rows: int, cols: int) -> host.Scales:
    """A weight's scales, the form told by dtype and shape as csrc/op_check.c does."""
    if tensor.dim() == 1:
        return host.Scales(address(tensor), host.F8_128X4, 1, 32, 0, 0, 0, -(-cols // 128))
    strides = tensor.stride() if tensor.dim() == 3 else (0, *tensor.stride())
    if tensor.dtype is torch.int32:
        return host.Scales(address(tensor), host.PACKED, 1, 32, *(4 * step for step in strides), 0)
    block_rows = 32 if tensor.shape[-2] < rows else 1
    block_cols = cols if tensor.shape[-1] == 1 else 32
    return host.Scales(address(tensor), host.BLOCKS, block_rows, block_cols, *strides, 0)


class Launcher:
    """What `self_check_cases.launch` does on a device, on an emulated one."""

    def __init__(self, emulator: Emulator, p: Prepared, base: torch.Tensor, flags: int = 0):
        self.emulator, self.case, self.flags = emulator, p.case, p.case.flags | flags
        self.t = {name: slot.of(base) for name, slot in p.slots.items()}
        for name, weight in p.weights.items():
            self.t[name], self.t[f"{name}_scale"] = weight.slot.of(base), weight.scale.of(base)

    def call(self, function: str, args: ctypes.Structure) -> None:
        self.emulator.call("cuda", function, args, flags=self.flags)

    def inv_rope(self, x: str) -> host.InvRope:
        case, t = self.case, self.t
        args = host.InvRope(case.tokens, case.groups, case.heads, 512, 64)
        args.attn, args.attn_stride_token, args.attn_stride_head = address(t["attn"]), *t["attn"].stride()[:2]
        args.positions, args.positions_stride = address(t["positions"]), 1
        args.cos_sin, args.cos_sin_stride, args.num_positions = address(t["cos_sin"]), 64, len(t["cos_sin"])
        args.scale_span = case.span
        args.x, args.x_stride_token, args.x_stride_group = address(t[x]), *t[x].stride()[:2]
        words = t[f"{x}_scale"]
        args.x_scale = address(words)
        args.xs_stride_token, args.xs_stride_group, args.xs_stride_word = (4 * step for step in words.stride())
        return args

    def quantize(self, z: str, q: str) -> host.Quantize:
        case, t = self.case, self.t
        source, cols = t[z], t[q].shape[1]
        return host.Quantize(
            case.tokens, cols, address(source), source.shape[1], *source.stride()[:2],
            address(t[q]), cols, address(t[f"{q}_scale"]), case.span,
        )  # fmt: skip

    def einsum(self, x: str, out: str) -> host.Matmul:
        case, t = self.case, self.t
        args = host.Matmul(case.tokens, case.groups, case.rows, case.k, address(t[x]), *t[x].stride()[:2])
        words = t[f"{x}_scale"]
        token, group, word = (4 * step for step in words.stride())
        args.x_scale = host.Scales(address(words), host.PACKED, 1, 32, group, token, word, 0)
        args.x_span = case.span
        args.w, args.w_stride_group, args.w_stride_row = address(t["wo_a"]), *t["wo_a"].stride()[:2]
        args.w_scale = scales(t["wo_a_scale"], case.groups, case.rows, case.k)
        if t[out].dtype is torch.bfloat16:
            args.out_bf16, args.out_stride_token, args.out_stride_group = address(t[out]), *t[out].stride()[:2]
        else:
            args.out_e4m3, args.out_scale = address(t[out]), address(t[f"{out}_scale"])
            args.out_stride_token, args.scale_span = t[out].shape[1], case.span
        return args

    def gemm(self, z: str, y: str) -> host.Matmul:
        case, t = self.case, self.t
        cols = t[z].shape[1]
        args = host.Matmul(case.tokens, 1, case.hidden, cols, address(t[z]), cols, 0)
        args.x_scale = host.Scales(address(t[f"{z}_scale"]), host.F8_128X4, 1, 32, 0, 0, 0, -(-cols // 128))
        args.x_span = case.span
        args.w, args.w_stride_row = address(t["wo_b"]), t["wo_b"].stride()[-2]
        args.w_scale = scales(t["wo_b_scale"], 1, case.hidden, cols)
        args.out_bf16, args.out_stride_token = address(t[y]), case.hidden
        return args

    def chain(self, way: str, x: str, *, fused: bool, rope: bool) -> host.OProj:
        """`way` "fused" has no room for BF16 z, the other two have."""
        z, bf16 = f"{way}_z", f"{way}_z_bf16"
        pointer = ctypes.pointer
        return host.OProj(
            pointer(self.inv_rope(x)) if rope else None,
            pointer(self.einsum(x, z if fused else bf16)),
            pointer(self.quantize(bf16, z)) if bf16 in self.t else None,
            pointer(self.gemm(z, f"{way}_y")),
        )

    def run(self) -> None:
        part = self.case.part
        if part != "gemm":
            self.call("inv_rope", self.inv_rope("x"))
        if part == "stream":
            self.call("quantize", self.quantize("attn", "q"))
            return
        if part in ("chain", "einsum"):
            self.call("matmul", self.einsum("x", "z_bf16"))
            self.call("quantize", self.quantize("z_bf16", "q"))
            self.call("matmul", self.einsum("x", "z"))
        if part in ("chain", "gemm"):
            self.call("matmul", self.gemm("q", "y"))
        if part == "chain":
            self.call("o_proj", self.chain("fused", "x", fused=True, rope=False))
            self.call("o_proj", self.chain("unfused", "x", fused=False, rope=False))
            self.call("o_proj", self.chain("attn", "attn_x", fused=True, rope=True))


def findings(emulator: Emulator, case: Case, device: int, seed: int = 0, flags: int = 0, **options) -> list[Finding]:
    """All comparisons of one case; `flags` on top of the case's own."""
    arena = self_check_cases.Arena()
    prepared = self_check_cases.prepare(case, arena, seed)
    host_base = arena.host()
    memory = host.device_copy(host_base.numpy())
    base = torch.from_numpy(memory)
    inputs = np.array([part[0] for part in arena.parts])
    with emulator.session(device, options=options, arena=memory):
        Launcher(emulator, prepared, base, flags).run()
    for offset, flat in arena.parts:  # no kernel may write to its inputs
        assert torch.equal(base[offset : offset + flat.numel()], flat), f"input at {offset} of {len(inputs)} changed"
    return self_check_cases.compare(prepared, base)


def faults(*args, **options) -> list[str]:
    return [f"{f.family}: {f.what}: {f.detail}" for f in findings(*args, **options) if not f.ok]
