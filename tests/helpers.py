"""What the op tests share: torch tensors from raw codes, problems with distinguishable data, comparisons.

A "problem" is the raw codes of one call, as numpy arrays, so that the reference and the op read the same bytes.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import reference as ref
import torch

E4M3 = torch.float8_e4m3fn
E8M0 = torch.float8_e8m0fnu

# FP32 summation error allowed beside the exact sum, relative to the sum of the magnitudes of the products. The CPU sums
# in FP32: 2e-6 is 32 units in the last place. Hopper's FP8 tensor cores align the 32 products of a step and the running
# sum to the largest of them and cut each at 13 fractional bits: at most 33 * 2^-13 of that largest term a step. Single
# elements of random data were seen to use more than 2^-12 of the sum of magnitudes; the Frobenius bound below is what
# keeps the whole result close.
SUM_TOLERANCE = {"cpu": 2e-6, "cuda": 33 * 2.0**-13}
# Relative Frobenius error of a BF16 result: rounding gives 1.7e-3 over many elements of like size, up to 2^-8 where few
# dominate; summation in the tensor cores adds 3.5e-4.
NORM_TOLERANCE = 3e-3

POISON = 0xA5  # fills buffers before a call, so that bytes that were not written show


# ---- numpy codes <-> torch tensors -----------------------------------------------------------------------------


def e4m3(codes: np.ndarray, device: str = "cpu") -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(codes)).view(E4M3).to(device)


def u8(codes: np.ndarray, device: str = "cpu") -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(codes)).to(device)


def bf16(bits: np.ndarray, device: str = "cpu") -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(bits).view(np.int16)).view(torch.bfloat16).to(device)


def codes(tensor: torch.Tensor) -> np.ndarray:
    """Raw codes of a tensor of 1-byte, BF16 or int32 elements."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    if tensor.dtype in (E4M3, E8M0):
        return tensor.view(torch.uint8).numpy()
    return tensor.numpy()


def values(tensor: torch.Tensor) -> np.ndarray:
    """BF16 tensor as float64."""
    return ref.bf16_decode(codes(tensor))


def words(scale: np.ndarray, device: str = "cpu", mn_major: bool = True, pad_byte: int = 0xFF) -> torch.Tensor:
    """Scale bytes [T, G, K / 32] as int32 words [T, G, K / 128].

    MN-major, as the attention kernels write them: stride 1 over T, columns ceil4(T) words apart; the padding holds
    `pad_byte`, which no kernel may let through.
    """
    packed = torch.from_numpy(ref.pack_words(scale))
    if not mn_major:
        return packed.to(device)
    tokens, groups, cols = packed.shape
    pitch = max(-(-tokens // 4) * 4, 1)
    pad = int(np.array([pad_byte * 0x01010101], np.uint32).view(np.int32)[0])
    buffer = torch.full((groups, cols, pitch), pad, dtype=torch.int32)
    view = buffer.permute(2, 0, 1)[:tokens]
    view.copy_(packed)
    return buffer.to(device).permute(2, 0, 1)[:tokens]


def f8_128x4(scale: np.ndarray, device: str = "cpu", padding: int = 0) -> torch.Tensor:
    return torch.from_numpy(ref.f8_128x4_pack(scale, padding)).to(device)


def strided(tensor: torch.Tensor, *pitches: int, fill: int = 0xFF) -> torch.Tensor:
    """A copy whose leading strides are the given ones, in elements; the gaps hold bytes `fill`."""
    strides = (*pitches, 1)
    extent = (
        1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
        if tensor.numel()
        else 0
    )
    raw = torch.full((extent * tensor.element_size(),), fill, dtype=torch.uint8, device=tensor.device)
    view = raw.view(tensor.dtype).as_strided(tensor.shape, strides)
    view.copy_(tensor)
    return view


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu", byte: int = POISON) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype, device=device)
    tensor.view(torch.uint8).fill_(byte)
    return tensor


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool((codes(a) == codes(b)).all())


# ---- problems --------------------------------------------------------------------------------------------------


def random_e4m3(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Finite codes, half of them near one in magnitude, half over the whole range (subnormals, zeros of both signs)."""
    near = rng.integers(0x28, 0x48, shape) | (rng.integers(0, 2, shape) << 7)
    anything = rng.integers(0, 0x7F, shape) | (rng.integers(0, 2, shape) << 7)
    return np.where(rng.random(shape) < 0.5, near, anything).astype(np.uint8)


def adversarial_scale(groups: int, rows: int, cols: int) -> np.ndarray:
    """Bytes [groups, rows, cols] whose neighbours in row, column and tile all differ, so that no misplaced read of a
    scale can hit an equal byte by luck (B96)."""
    g, r, c = np.ogrid[:groups, :rows, :cols]
    return (120 + (3 * r + 5 * c + 7 * g) % 11).astype(np.uint8)


def random_scale(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.integers(116, 131, shape).astype(np.uint8)


WEIGHT_FORMS = {  # name: (rows, columns) that share a byte; columns 0: all of K
    "1x32": (1, 32),
    "32x32": (32, 32),
    "128x128": (128, 128),
    "prepared": (32, 0),
}


def weight_blocks(form: str, n: int, k: int) -> tuple[int, int, int, int]:
    """(block rows, block columns, number of block rows, number of block columns) of a form."""
    block_rows, block_cols = WEIGHT_FORMS[form]
    block_cols = block_cols or k
    return block_rows, block_cols, -(-n // block_rows), -(-k // block_cols)


@dataclass
class Matmul:
    """Codes of a grouped product: x [T, G, K], x_scale [T, G, K / 32], w [G, N, K], w_scale [G, N, K / 32]; the same
    weight scales as blocks in `w_blocks`."""

    x: np.ndarray
    x_scale: np.ndarray
    w: np.ndarray
    w_scale: np.ndarray
    w_blocks: np.ndarray

    @property
    def shape(self) -> tuple[int, int, int, int]:
        tokens, groups, k = self.x.shape
        return tokens, groups, self.w.shape[1], k

    def exact(self) -> tuple[np.ndarray, np.ndarray]:
        return ref.matmul(self.x, self.x_scale, self.w, self.w_scale)

    def tokens(self, rows) -> Matmul:
        return Matmul(self.x[rows], self.x_scale[rows], self.w, self.w_scale, self.w_blocks)

    def group(self, g: int) -> Matmul:
        cut = slice(g, g + 1)
        return Matmul(self.x[:, cut], self.x_scale[:, cut], self.w[cut], self.w_scale[cut], self.w_blocks[cut])

    def args(self, device: str = "cpu", *, packed: bool = False) -> tuple[torch.Tensor, ...]:
        """(x, x_scale, w, w_scale) as the einsum takes them; weight scales as blocks, or as int32 words per row."""
        w_scale = torch.from_numpy(ref.pack_words(self.w_scale)).to(device) if packed else u8(self.w_blocks, device)
        return e4m3(self.x, device), words(self.x_scale, device), e4m3(self.w, device), w_scale


def make_matmul(
    rng: np.random.Generator, tokens: int, groups: int, n: int, k: int, form: str = "32x32", adversarial: bool = True
) -> Matmul:
    block_rows, block_cols, num_rows, num_cols = weight_blocks(form, n, k)
    if adversarial:
        w_blocks = adversarial_scale(groups, num_rows, num_cols)
        x_scale = adversarial_scale(groups, tokens, k // 32).transpose(1, 0, 2).copy()
    else:
        w_blocks = random_scale(rng, (groups, num_rows, num_cols))
        x_scale = random_scale(rng, (tokens, groups, k // 32))
    return Matmul(
        x=random_e4m3(rng, (tokens, groups, k)),
        x_scale=x_scale,
        w=random_e4m3(rng, (groups, n, k)),
        w_scale=ref.expand_blocks(w_blocks, n, k, block_rows, block_cols),
        w_blocks=w_blocks,
    )


def make_all_terms_visible(problem: Matmul, rng: np.random.Generator) -> None:
    """Positive elements and scales within a factor of four, so that any one block, made 64 times larger, shows in the
    BF16 sum. Neighbouring scales still differ."""
    problem.x[:], problem.w[:] = rng.integers(0x30, 0x40, problem.x.shape), rng.integers(0x30, 0x40, problem.w.shape)
    for scale in (problem.x_scale, problem.w_blocks, problem.w_scale):
        scale[:] = 126 + scale % 3


# ---- comparisons -----------------------------------------------------------------------------------------------


def check_product(out: torch.Tensor, exact: np.ndarray, magnitude: np.ndarray, device: str = "cpu") -> None:
    """`out` BF16 must be the BF16 rounding of a number within SUM_TOLERANCE of the exact sum.

    Where no rounding boundary lies that close, this demands the correctly rounded result, bit for bit; the elements
    where one does are counted and must be few, or the check would have lost its teeth.
    """
    got = values(out).reshape(exact.shape)
    slack = SUM_TOLERANCE[device] * magnitude
    low = ref.bf16_decode(ref.bf16_encode(exact - slack))
    high = ref.bf16_decode(ref.bf16_encode(exact + slack))
    wrong = ~((got >= low) & (got <= high))
    if wrong.any():
        where = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{int(wrong.sum())} of {wrong.size} elements are not the rounded sum; first at {where}: "
            f"got {got[where]!r}, exact {exact[where]!r}, allowed [{low[where]!r}, {high[where]!r}]"
        )
    if device == "cpu" and exact.size >= 1000:
        ambiguous = float((low != high).mean())
        assert ambiguous < 0.05, f"{ambiguous:.1%} of the elements lie at a rounding boundary"
    norm = np.linalg.norm(exact)
    if norm > 0:
        error = np.linalg.norm(got - exact) / norm
        allowed = NORM_TOLERANCE if exact.size >= 1000 else 2.0**-8
        assert error <= allowed, f"relative Frobenius error {error:.3e}, allowed {allowed}"


# ---- other processes -------------------------------------------------------------------------------------------


def run_python(code: str, *, timeout: float = 120, **environment: str) -> str:
    """Output of a fresh interpreter that sees this package and these tests; asserts that it exits with 0."""
    tests, package = Path(__file__).parent, Path(importlib.util.find_spec("vllm_megaattn").origin).parent.parent
    path = os.pathsep.join([str(package), str(tests), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": path, **environment},
        cwd=tests,
    )
    assert result.returncode == 0, f"exit {result.returncode}\n{result.stdout}\n{result.stderr}"
    return result.stdout
