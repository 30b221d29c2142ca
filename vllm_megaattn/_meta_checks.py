"""What a call on meta or fake tensors is refused for: dtypes, numbers of dimensions and sizes that must agree.

The C core (csrc/op_check.c, csrc/ops_*.c) checks real tensors, and more of them: strides, overlap, spans, forms of scales.
It needs addresses, which these have not, so the part that decides about shapes stands here again, as one table, with
the same messages. Sizes that are symbols are not compared: that would fix them.
"""

from __future__ import annotations

import torch

_DTYPES = {
    "e4m3": (torch.float8_e4m3fn,),
    "bf16": (torch.bfloat16,),
    "f32": (torch.float32,),
    "f64": (torch.float64,),
    "i32": (torch.int32,),
    "i64": (torch.int64,),
    "u8": (torch.uint8,),
    "bytes": (torch.uint8, torch.float8_e8m0fnu),
}

# dtype, then the shapes that are allowed, for each dtype. One letter is a size that must be the same wherever the letter
# stands; K/128 is that part of K; anything longer is free.
_WEIGHT_SCALE = "bytes any any,any any,any,any | i32 any,any any,any,any"
_F8_128X4 = "bytes any | i32 any,any,any"
_X = {"x": "e4m3 T,G,K", "x_scale": "i32 T,G,K/128"}
_WO_A = "e4m3 G,N,K G*N,K"
_EINSUM = {**_X, "w": _WO_A, "w_scale": _WEIGHT_SCALE}
_ROPE = {"attn": "bf16 T,heads,D", "positions": "i64 T", "cos_sin": "f32 positions,rope_dim"}
_WO = {
    "wo_a": _WO_A,
    "wo_a_scale": _WEIGHT_SCALE,
    "wo_b": "e4m3 M,C",
    "wo_b_scale": _WEIGHT_SCALE,
    "z": "e4m3 T,C",
    "z_scale": _F8_128X4,
    "y": "bf16 T,M",
}
_ARGUMENTS: dict[str, dict[str, str]] = {
    "einsum_fp8_sfd128x4": {**_EINSUM, "z": "e4m3 T,C", "z_scale": _F8_128X4},
    "einsum_fp8_bf16": {**_EINSUM, "z": "bf16 T,G,N"},
    "mxfp8_quantize_sfd128x4": {"z": "bf16 T,C T,G,N", "q": "e4m3 T,C", "q_scale": _F8_128X4},
    "mxfp8_gemm_wo_b": {
        "z": "e4m3 T,K",
        "z_scale": _F8_128X4,
        "w": "e4m3 N,K",
        "w_scale": _WEIGHT_SCALE,
        "y": "bf16 T,N",
    },
    "inv_rope_mxfp8_quantize": {**_ROPE, **_X},
    "o_proj": {**_X, **_WO},
    "o_proj_from_attn": {**_ROPE, **_X, **_WO},
    "reblock_weight": {
        "w": "e4m3 G,N,K",
        "w_scale": _WEIGHT_SCALE,
        "out_w": "e4m3 G,N,K",
        "out_scale": "u8 any,any,any",
        "stats": "f64 three",
    },
}
_WORDS = {"T": "tokens", "G": "groups", "K": "columns", "C": "columns", "N": "rows", "M": "columns"}


def check(op: str, tensors: dict[str, torch.Tensor]) -> None:
    """TypeError or ValueError for what the C core would refuse; data before scales, like there."""
    known: dict[str, tuple[int, str]] = {}  # letter -> size, and the argument that has it
    specs = _ARGUMENTS[op]
    for name in sorted(specs, key=lambda name: name.endswith("scale")):
        tensor = tensors[name]
        allowed = {
            dtype: shapes for kind, *shapes in map(str.split, specs[name].split("|")) for dtype in _DTYPES[kind]
        }
        if tensor.dtype not in allowed:
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
            raise TypeError(f"{op}: {name} must have dtype {wanted}, got {str(tensor.dtype).removeprefix('torch.')}")
        shapes = allowed[tensor.dtype]
        letters = next((s.split(",") for s in shapes if s.count(",") + 1 == tensor.dim()), None)
        if letters is None:
            wanted = " or ".join(f"[{shape.replace(',', ', ')}]" for shape in shapes)
            raise ValueError(f"{op}: {name} must have shape {wanted}, got {list(tensor.shape)}")
        for letter, size in zip(letters, tensor.shape, strict=True):
            if not isinstance(size, int):
                continue
            if letter == "K/128" and "K" in known:
                wanted, like = known["K"][0] // 128, known["K"][1]
            elif len(letter) == 1:
                wanted, like = known.setdefault(letter, (size, name))
            else:
                continue
            if size != wanted:
                what = _WORDS.get(letter, "as a size")
                raise ValueError(f"{op}: {name} must have {letter} = {wanted} {what} like {like}, got {size}")
