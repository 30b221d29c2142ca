"""Loads the C core and completes what a C registration cannot: fake kernels for torch.compile and meta tensors.

Every op writes into arguments that the caller allocated and returns (), so its fake has nothing to compute; shapes
are inferred by the front ends in `ops`.
"""

from __future__ import annotations

import os

import torch  # must be loaded before the C core, which finds libtorch in the process

from vllm_megaattn import _C, _meta_checks, self_check
from vllm_megaattn.selector import ENV_WO_B

NAMESPACE = "vllm_megaattn"
OPS = (
    "einsum_fp8_sfd128x4",
    "einsum_fp8_bf16",
    "mxfp8_quantize_sfd128x4",
    "mxfp8_gemm_wo_b",
    "inv_rope_mxfp8_quantize",
    "o_proj",
    "o_proj_from_attn",
    "reblock_weight",
)

# Switches of the C core: enum mx_flag in csrc/kernels.h.
FLAG_BATCH_INVARIANT = 1
FLAG_NO_PDL = 2
FLAG_NO_PAIRS = 4
FLAG_WO_B_OWN = 8
FLAG_WO_B_CUBLASLT = 16
FLAG_NO_DECODE = 32

# For callers of torch.ops, who pass no front end: a route of wo_b that was asked for by name holds from the start. The
# front ends also refuse what the device has not got (selector.request_wo_b).
_C.set_flags(_C.get_flags() | {"own": FLAG_WO_B_OWN, "cublaslt": FLAG_WO_B_CUBLASLT}.get(os.environ.get(ENV_WO_B), 0))

_ERROR_TYPES = {1: ValueError, 2: TypeError, 3: RuntimeError}


def _make_fake(op: str):
    """The op returns () and its results are arguments, so there is nothing to infer, only to refuse. One tensor on the
    meta device among real ones sends the whole call here too, and doing nothing would leave real results unwritten."""
    names = [argument.name for argument in getattr(torch.ops.vllm_megaattn, op).default._schema.arguments]

    def fake(*args: object) -> None:
        tensors = [(name, arg) for name, arg in zip(names, args, strict=True) if isinstance(arg, torch.Tensor)]
        first_name, first = tensors[0]
        for name, tensor in tensors:
            if tensor.device != first.device:
                raise ValueError(f"{op}: {name} must be on {first.device} like {first_name}, got {tensor.device}")
        _meta_checks.check(op, dict(tensors))

    return fake


# Places of the arguments that each op writes.
_WRITTEN: dict[str, tuple[int, ...]] = {}

for _op in OPS:
    torch.library.register_fake(f"{NAMESPACE}::{_op}", _make_fake(_op))
    _arguments = getattr(torch.ops.vllm_megaattn, _op).default._schema.arguments
    _WRITTEN[_op] = tuple(i for i, a in enumerate(_arguments) if a.alias_info is not None and a.alias_info.is_write)


def call(op: torch._ops.OpOverload, name: str, *args: object) -> None:
    """Run an op; turn the RuntimeError that torch makes of a C error into ValueError or TypeError where it is one."""
    if torch.compiler.is_compiling():
        op(*args)
        return
    if args[0].is_cuda:
        self_check.before_call(name, args[0])
    try:
        op(*args)
        if not torch.is_inference_mode_enabled():
            # A kernel registered from C bumps no version counter; autograd must learn that a tensor it saved changed.
            for place in _WRITTEN[name]:
                if not args[place].is_inference():
                    torch.autograd.graph.increment_version(args[place])
    except RuntimeError as error:
        kind = _ERROR_TYPES.get(_C.take_error_kind())
        if kind is None or kind is RuntimeError or not str(error).startswith(f"{name}: "):
            raise
        raise kind(str(error)) from None
