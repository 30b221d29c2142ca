"""Calls every op in every family of Hopper kernels once, on small shapes: what scripts/gpu_sanitize.sh instruments.

The data are made on the CPU, so that hardly any kernel but this package's runs on the device. Each result is compared
with the CPU backend's or between the two paths, so a run under a tool that slows kernels down also shows that they
still compute the right thing.

    python scripts/gpu_sanitize_driver.py [--list]        --list names the cases and runs none
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import gpu_helpers as gpu

import vllm_megaattn

HERE = "cuda" if torch.cuda.is_available() else "cpu"
# Relative Frobenius distance of BF16 results from the CPU backend's: the tensor cores' own rounding makes a few per cent
# of the elements the next BF16 number, 2^-8 to 2^-7 away, which shows in full where few elements dominate.
VALUE_LIMIT, VALUE_LIMIT_OF_FEW = 3e-3, 8e-3

# Tokens that select each family for wide scales: decode padded to 8, 16, 32, 64, then pair, split and tiled kernels.
TOKENS = (1, 8, 12, 33, 64, 65, 100, 300)
# (G, N, K): the decode kernels' cuts of K: over 2 blocks, over 4 chains, over 2 chains, 4 blocks of a cluster.
SHAPES = {
    "split": (2, 256, 512),
    "4 chains": (1, 4352, 512),
    "2 chains": (8, 1024, 512),
    "split 4": (1, 256, 1024),
}


def there(record):
    """A dataclass of tensors, moved to the device with the strides they have."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        flat = tensor.as_strided((extent,), (1,)).to(HERE) if tensor.numel() else tensor.to(HERE)
        return flat.as_strided(tensor.shape, tensor.stride()) if tensor.numel() else flat

    values = {f.name: getattr(record, f.name) for f in fields(record)}
    return type(record)(**{k: move(v) if isinstance(v, torch.Tensor) else v for k, v in values.items()})


def same(mine: torch.Tensor, other: torch.Tensor, what: str) -> None:
    differ = int((gpu.bits(mine.cpu()) != gpu.bits(other.cpu())).sum())
    assert differ == 0, f"{what}: {differ} of {mine.numel()} elements differ"


def near(mine: torch.Tensor, other: torch.Tensor, what: str) -> None:
    mine, other = mine.cpu().double(), other.double()
    distance = ((mine - other).norm() / other.norm()).item()
    limit = VALUE_LIMIT if mine.numel() >= 1 << 16 else VALUE_LIMIT_OF_FEW
    assert distance <= limit, f"{what}: relative distance {distance:.1e} from the CPU backend"


def einsum(shape: tuple[int, int, int], tokens: int, form: str) -> None:
    """BF16 z, z as MXFP8 in all spans, the separate quantiser."""
    host = gpu.make_problem(tokens, *shape, form=form, seed=tokens)
    device = there(host)
    z = device.bf16()
    near(z, host.bf16(), "BF16 z")
    for span in (32, 128, 256):
        data, scale = device.mxfp8(span)
        q, q_scale = vllm_megaattn.mxfp8_quantize_sfd128x4(z, scale_span=span)
        same(data, q, f"z, span {span}")
        same(scale, q_scale, f"scales of z, span {span}")


def gemm(n: int, k: int, tokens: int, form: str) -> None:
    host = gpu.make_problem(tokens, 1, n, k, form, seed=tokens + 1)
    device = there(host)
    scale = vllm_megaattn.layouts.to_f8_128x4(host.x_bytes[:, 0])
    y = vllm_megaattn.mxfp8_gemm_wo_b(
        device.x[:, 0], scale.to(HERE), device.w[0], device.w_scale[0], z_span=device.x_span
    )
    near(y, vllm_megaattn.mxfp8_gemm_wo_b(host.x[:, 0], scale, host.w[0], host.w_scale[0], z_span=host.x_span), "y")


def projection(tokens: int, span: int, groups: int, heads: int, rank: int, hidden: int) -> None:
    """inverse RoPE + quantise, both paths from x and from the attention output."""
    host = gpu.make_chain(tokens, groups, rank, heads, hidden, span=span, seed=tokens + 2)
    device = there(host)
    x, x_scale = device.quantized()
    for mine, other in zip((x, x_scale), host.quantized(), strict=True):
        same(mine, other.contiguous(), "inverse RoPE")
    expected = device.from_x(x, x_scale, "unfused")
    same(device.from_x(x, x_scale, "fused"), expected, "o_proj")
    for path in ("fused", "unfused"):
        same(device.from_attn(path), expected, f"o_proj_from_attn {path}")
    near(expected, host.from_attn("unfused"), "y")


def rope_orders(tokens: int) -> None:
    host = gpu.make_chain(tokens, 2, 32, 2, 32, seed=3)
    device = there(host)
    for order in ("standard", "chunk_interleaved"):
        for layout in ("halves", "interleaved"):
            results = [
                vllm_megaattn.inv_rope_mxfp8_quantize(
                    c.attn, c.positions, c.cos_sin, groups=2, order=order, cos_sin_layout=layout, scale_span=32
                )
                for c in (device, host)
            ]
            for mine, other in zip(*results, strict=True):
                same(mine, other.contiguous(), f"inverse RoPE {order} {layout}")


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    for name, shape in SHAPES.items():
        big = shape[0] * shape[1] > 1024  # many blocks: only what they are there for
        for tokens in (8, 64) if big else TOKENS:
            yield f"einsum wide {name} T={tokens}", lambda s=shape, t=tokens: einsum(s, t, "wide")
    for form in ("blocks", "rows"):
        for tokens in (5, 300):
            yield f"einsum {form} T={tokens}", lambda f=form, t=tokens: einsum((2, 256, 512), t, f)
    yield "einsum wide N=160, groups share a word", lambda: einsum_narrow("wide")
    yield "einsum blocks N=160", lambda: einsum_narrow("blocks")
    for tokens in TOKENS:
        yield f"gemm wide T={tokens}", lambda t=tokens: gemm(320, 512, t, "wide")
    yield "gemm blocks T=33 N=160", lambda: gemm(160, 512, 33, "blocks")
    yield "gemm blocks K=96", lambda: gemm(96, 96, 9, "blocks")
    for tokens in (1, 4, 8, 64, 130):
        yield f"projection T={tokens}", lambda t=tokens: projection(t, 256, 2, 1, 256, 320)
    yield "projection of one group T=2", lambda: projection(2, 256, 1, 2, 512, 320)
    yield "projection span 32 T=5", lambda: projection(5, 32, 2, 1, 256, 160)
    for tokens in (3, 1100):
        yield f"inverse RoPE T={tokens}", lambda t=tokens: rope_orders(t)


def einsum_narrow(form: str) -> None:
    host = gpu.make_problem(33, 3, 160, 512, form, seed=9)
    device = there(host)
    data, scale = device.mxfp8(32)
    q, q_scale = vllm_megaattn.mxfp8_quantize_sfd128x4(device.bf16(), scale_span=32)
    same(data, q, "z")
    same(scale, q_scale, "scales of z")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further case after this long")
    args = parser.parse_args()
    gpu.DEVICE = "cpu"
    begin, done, left = time.monotonic(), 0, []
    for name, case in cases():
        if args.list:
            print(name)
        elif time.monotonic() - begin > args.seconds:
            left.append(name)
        else:
            case()
            done += 1
            print(f"{time.monotonic() - begin:6.1f} s  {name}", flush=True)
    if HERE == "cuda":
        torch.cuda.synchronize()
    if not args.list:
        print(
            f"driver: {done} cases right on {HERE}, {len(left)} not started for lack of time {left or ''}", flush=True
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
