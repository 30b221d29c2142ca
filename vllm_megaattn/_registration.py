"""Loads the C core and completes what a C registration cannot: fake kernels for torch.compile and meta tensors.

Every op writes into arguments that the caller allocated and returns (), so its fake has nothing to compute; shapes
are inferred by the front ends in `ops`.
"""

from __future__ import annotations

import os
import re

import torch  # must be loaded before the C core, which finds libtorch in the process

from vllm_megaattn import _C, _meta_checks, self_check
from vllm_megaattn.selector import ENV_WO_B, wo_b_flags

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

# For callers of torch.ops, who pass no front end: a route of wo_b that was asked for by name holds from the start. The
# front ends also refuse what the device has not got (selector.request_wo_b).
_C.set_flags(_C.get_flags() | wo_b_flags().get(os.environ.get(ENV_WO_B), 0))

_ERROR_TYPES = {_C.VALUE_ERROR: ValueError, _C.TYPE_ERROR: TypeError}


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


def call(op: torch._ops.OpOverload, name: str, *args: object, names: dict[str, str] | None = None) -> None:
    """Run an op; turn the RuntimeError that torch makes of a C error into ValueError or TypeError where it is one.

    names: what the caller calls arguments that have another name in the op's schema, for the messages.
    """
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
    except (RuntimeError, ValueError, TypeError) as error:  # a fake raises the last two itself
        raise _python_error(error, name, names) from None


def check(op: torch._ops.OpOverload, name: str, *args: object, names: dict[str, str] | None = None) -> None:
    """Refuses what `call` would refuse on account of the arguments, on any device; runs nothing."""
    if torch.compiler.is_compiling():
        return
    _C.set_check_only(True)
    try:
        op(*args)
    except (RuntimeError, ValueError, TypeError) as error:  # a fake raises the last two itself
        raise _python_error(error, name, names) from None
    finally:
        _C.set_check_only(False)


def _python_error(error: Exception, name: str, names: dict[str, str] | None) -> Exception:
    """The ValueError or TypeError that an op's error is, in the caller's words; `error` itself where it is neither."""
    kind = type(error) if isinstance(error, (ValueError, TypeError)) else _ERROR_TYPES.get(_C.take_error_kind())
    if kind is None or not str(error).startswith(f"{name}: "):
        return error
    text = str(error).removeprefix(f"{name}: ")
    if names:
        # Arguments stand where a message begins, and behind "like" and "with" where it compares two.
        text = re.sub(rf"(^|\b(?:like|with) )({'|'.join(names)})\b", lambda m: m[1] + names[m[2]], text)
    return kind(f"{name}: {text}")
