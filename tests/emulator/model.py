"""What the tensor cores compute, in numpy: written from the same public models as arithmetic.h, but on its own.

Arrays hold raw codes (e4m3 and UE8M0 as uint8); accumulators are float32. One step multiplies 32 columns of K.
"""

from __future__ import annotations

import numpy as np

NAN_BITS = np.uint32(0x7FFFFFFF)
HOPPER = {"fraction": 13, "output": 13}  # bits kept of the addends, and of the sum
BLACKWELL = {"fraction": 25, "output": 23}
ZERO_EXPONENT = -10000  # below anything: a zero does not raise the largest exponent


def take_apart(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(signed significand times 8, exponent) of e4m3 codes; NaN must be handled by the caller."""
    codes = codes.astype(np.int64)
    field, fraction = codes >> 3 & 15, codes & 7
    significand = np.where(field > 0, fraction + 8, fraction)
    exponent = np.where(significand == 0, ZERO_EXPONENT, np.where(field > 0, field - 7, -6))
    return np.where(codes & 0x80, -significand, significand), exponent


def truncated(value: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """value * 2^-shift toward zero; negative shifts are exact."""
    magnitude = np.abs(value)
    down = magnitude >> np.clip(shift, 0, 62)
    up = magnitude << np.clip(-shift, 0, 40)
    return np.sign(value) * np.where(shift >= 0, down, up)


def step(acc, a, b, a_scale=None, b_scale=None, *, fraction=13, output=13) -> np.ndarray:
    """acc [T, N] + a [T, 32] @ b [N, 32]^T; scales are UE8M0 bytes [T] and [N]."""
    acc = np.asarray(acc, np.float32)
    pa, ea = take_apart(a)
    pb, eb = take_apart(b)
    if a_scale is not None:
        ea = ea + (a_scale.astype(np.int64) - 127)[:, None]
        eb = eb + (b_scale.astype(np.int64) - 127)[:, None]
    product = pa[:, None, :] * pb[None, :, :]  # times 64
    exponent = np.where(product == 0, ZERO_EXPONENT, ea[:, None, :] + eb[None, :, :])
    bits = acc.view(np.uint32).astype(np.int64)
    field = bits >> 23 & 255
    significand = (bits & 0x7FFFFF) | np.where(field > 0, 1 << 23, 0)
    c_exponent = np.where(significand == 0, ZERO_EXPONENT, np.where(field > 0, field - 127, -126))
    top = np.maximum(exponent.max(axis=2), c_exponent)
    terms = truncated(product << (fraction - 6), top[:, :, None] - exponent)
    c_term = truncated(np.where(bits >> 31, -significand, significand), 23 - fraction + top - c_exponent)
    total = terms.sum(axis=2) + c_term
    result = rounded(total, top - fraction, output)
    nan = ((a & 0x7F) == 0x7F).any(axis=1)[:, None] | ((b & 0x7F) == 0x7F).any(axis=1)[None, :] | np.isnan(acc)
    if a_scale is not None:
        nan |= (a_scale == 255)[:, None] | (b_scale == 255)[None, :]
    result = np.where(np.isinf(acc), acc, result)
    return np.where(nan, NAN_BITS.view(np.float32), result).astype(np.float32)


def rounded(total: np.ndarray, exponent: np.ndarray, bits: int) -> np.ndarray:
    """total * 2^exponent as float32, cut toward zero to `bits` below the leading bit."""
    magnitude = np.abs(total)
    length = np.frexp(magnitude.astype(np.float64))[1]  # exact: below 2^53
    lowest = np.maximum(exponent + length - 1, -126) - bits  # weight of the last bit kept
    drop = np.clip(lowest - exponent, 0, 62)
    magnitude = magnitude >> drop << drop
    with np.errstate(over="ignore"):
        value = np.ldexp(magnitude.astype(np.float64), np.clip(exponent, -1000, 1000)).astype(np.float32)
    return np.where(total < 0, -value, value).astype(np.float32)


def chain(acc: np.ndarray, a: np.ndarray, b: np.ndarray, a_scale=None, b_scale=None, *, step=step, **machine):
    """Steps over all of K in increasing order; scales [T, K / 32] and [N, K / 32].

    `step` may be the emulator's own (host.Emulator.step), which is equal by test and faster.
    """
    for k in range(0, a.shape[1], 32):
        scales = () if a_scale is None else (a_scale[:, k // 32], b_scale[:, k // 32])
        acc = step(acc, a[:, k : k + 32], b[:, k : k + 32], *scales, **machine)
    return acc


def power(byte: np.ndarray) -> np.ndarray:
    """UE8M0 as float64; NaN for 0xFF."""
    return np.where(byte == 255, np.nan, np.ldexp(1.0, byte.astype(np.int64) - 127))


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c rounded once; b is a power of two, so the product is exact in float64 and so is nearly every sum."""
    with np.errstate(over="ignore", invalid="ignore"):
        return (a.astype(np.float64) * b + c.astype(np.float64)).astype(np.float32)


def added(sums: list[np.ndarray]) -> np.ndarray:
    """The sum of float32 arrays, in order."""
    acc = sums[0]
    for other in sums[1:]:
        acc = (acc + other).astype(np.float32)
    return acc


def hopper_wide(x, x_scale, w, w_scale, splits: int = 1, chains: int = 1, step=step) -> np.ndarray:
    """The wide form of csrc/cuda/plan.h: x [T, K], x_scale [T, K / 256], w [N, K], w_scale [N] -> float32 [T, N].

    `splits`: that many equal parts of K, added in order; a part's spans go to `chains` chains in turn, added in order.
    """
    spans = np.arange(x.shape[1] // 256)

    def one_chain(spans: np.ndarray) -> np.ndarray:
        acc = np.zeros((x.shape[0], w.shape[0]), np.float32)
        for span in spans:
            k = slice(span * 256, span * 256 + 256)
            partial = chain(np.zeros_like(acc), x[:, k], w[:, k], step=step, **HOPPER)
            acc = fma(partial, power(x_scale[:, span])[:, None], acc)
        return acc

    parts = np.array_split(spans, splits)
    acc = added([added([one_chain(part[c::chains]) for c in range(chains)]) for part in parts])
    return (acc * power(w_scale)[None, :]).astype(np.float32)


def hopper_per32(x, x_scale, w, w_scale, step=step) -> np.ndarray:
    """The per-32 form: scales [T, K / 32] and [N, K / 32]."""
    acc = np.zeros((x.shape[0], w.shape[0]), np.float32)
    for j in range(x.shape[1] // 32):
        k = slice(j * 32, j * 32 + 32)
        partial = step(np.zeros_like(acc), x[:, k], w[:, k], **HOPPER)
        acc = fma(partial, power(x_scale[:, j])[:, None] * power(w_scale[:, j])[None, :], acc)
    return acc
