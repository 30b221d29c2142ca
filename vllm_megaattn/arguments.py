"""Checks of arguments that the front ends make themselves, to know the shape of a result; each names what it refuses."""

from __future__ import annotations

import torch


def require_tensors(op: str, **tensors: object) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(tensor).__name__}")
        if not torch.compiler.is_compiling() and (tensor.layout is not torch.strided or tensor.is_neg()):
            kind = "a negated view" if tensor.is_neg() else str(tensor.layout)
            raise ValueError(f"{op}: {name} must be an ordinary strided tensor, got {kind}")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{op}: {name} requires grad, but this op has no backward; call it under torch.no_grad() or "
                "torch.inference_mode()"
            )


def require_int(op: str, **values: object) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
            raise TypeError(f"{op}: {name} must be an int, got {type(value).__name__}")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError(f"{op}: {name} must fit 64 bits, got {value}")


def require_bool(op: str, **values: object) -> None:
    for name, value in values.items():
        if not isinstance(value, bool):
            raise TypeError(f"{op}: {name} must be a bool, got {value!r}")


def require_dims(op: str, name: str, tensor: torch.Tensor, dims: tuple[int, ...], shape: str) -> None:
    if tensor.dim() not in dims:
        raise ValueError(f"{op}: {name} must have shape {shape}, got {list(tensor.shape)}")


def rows_of(op: str, name: str, w: torch.Tensor, groups: int) -> int:
    """N of weights [G, N, K] or [G*N, K]."""
    require_dims(op, name, w, (2, 3), "[G, N, K] or [G*N, K]")
    if w.dim() == 2 and (groups == 0 or w.shape[0] % groups):
        raise ValueError(f"{op}: {name} must have a multiple of G = {groups} rows, got {w.shape[0]}")
    rows = w.shape[1] if w.dim() == 3 else w.shape[0] // groups
    if rows == 0:
        raise ValueError(f"{op}: {name} must have a positive number of rows, got shape {list(w.shape)}")
    return rows


def choose(op: str, name: str, value: object, choices: dict[str, int]) -> int:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{op}: {name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
    return choices[value]


def pair_of(op: str, out: object, names: str) -> tuple[torch.Tensor, torch.Tensor]:
    if not (isinstance(out, (tuple, list)) and len(out) == 2):
        raise TypeError(f"{op}: out must be a pair of tensors ({names}), got {type(out).__name__}")
    first, second = names.split(", ")
    require_tensors(op, **{f"out[0] ({first})": out[0], f"out[1] ({second})": out[1]})
    return out[0], out[1]


def names_of_pair(out: object, names: str) -> dict[str, str] | None:
    """What messages call the two results, if the caller gave them."""
    return None if out is None else {name: f"out[{i}] ({name})" for i, name in enumerate(names.split(", "))}
