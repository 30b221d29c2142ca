"""The tensor cores' arithmetic: the emulator's vector code against an exact one in fractions and one in numpy."""

from __future__ import annotations

import ctypes
from fractions import Fraction

import host_build
import model
import numpy as np
import pytest
import reference as ref


@pytest.fixture(scope="module")
def library():
    return ctypes.CDLL(str(host_build.runtime()))


def emulated(library, blackwell, acc, a, b, a_scale=None, b_scale=None):
    d = np.ascontiguousarray(acc, np.float32).copy()
    pointers = [
        None if s is None else np.ascontiguousarray(s).ctypes.data_as(ctypes.c_void_p) for s in (a_scale, b_scale)
    ]
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    library.emu_multiply_step(
        int(blackwell),
        a.ctypes.data_as(ctypes.c_void_p),
        pointers[0],
        len(a),
        b.ctypes.data_as(ctypes.c_void_p),
        pointers[1],
        len(b),
        d.ctypes.data_as(ctypes.c_void_p),
    )
    return d


def floor_log2(v: Fraction) -> int:
    e = v.numerator.bit_length() - v.denominator.bit_length()
    return e if Fraction(2) ** e <= v else e - 1


def exponent_and_value(code: int) -> tuple[int, Fraction]:
    value = ref.e4m3_value(code)
    return (max((code >> 3 & 15) - 7, -6), value)


def exact_step(acc: float, a, b, scale: int, fraction: int, output: int) -> float:
    """The rules of arithmetic.h, word by word, on Fractions."""
    terms = []
    for ca, cb in zip(a, b, strict=True):
        (ea, va), (eb, vb) = exponent_and_value(int(ca)), exponent_and_value(int(cb))
        if va * vb != 0:
            terms.append((ea + eb + scale, va * vb * Fraction(2) ** scale))
    if acc != 0:
        terms.append((max(floor_log2(abs(Fraction(acc))), -126), Fraction(acc)))
    if not terms:
        return 0.0
    unit = Fraction(2) ** (max(e for e, _ in terms) - fraction)
    total = sum(int(v / unit) for _, v in terms) * unit  # int() cuts toward zero
    if total == 0:
        return 0.0
    last = Fraction(2) ** (max(floor_log2(abs(total)), -126) - output)
    return float(int(total / last) * last)


@pytest.mark.parametrize("blackwell", [False, True])
def test_step_equals_fractions(library, rng, blackwell):
    machine = model.BLACKWELL if blackwell else model.HOPPER
    codes = rng.integers(0, 0x7F, (2, 40, 32)) | rng.integers(0, 2, (2, 40, 32)) << 7
    codes[0, :8] &= 0x87  # subnormals and zeros
    a, b = codes.astype(np.uint8)
    acc = (rng.standard_normal((40, 40)) * 2.0 ** rng.integers(-20, 20, (40, 40))).astype(np.float32)
    acc[::5] = 0
    scale_a, scale_b = rng.integers(110, 140, (2, 40)).astype(np.uint8)
    scales = (scale_a, scale_b) if blackwell else (None, None)
    got = emulated(library, blackwell, acc, a, b, *scales)
    assert np.array_equal(got.view(np.uint32), model.step(acc, a, b, *scales, **machine).view(np.uint32))
    for i, j in zip(rng.integers(0, 40, 150), rng.integers(0, 40, 150), strict=True):
        shift = int(scale_a[i]) + int(scale_b[j]) - 254 if blackwell else 0
        want = exact_step(float(acc[i, j]), a[i], b[j], shift, machine["fraction"], machine["output"])
        assert got[i, j] == np.float32(want), (i, j)


@pytest.mark.parametrize("blackwell", [False, True])
def test_chains_equal_the_model(library, rng, blackwell):
    machine = model.BLACKWELL if blackwell else model.HOPPER
    a, b = (rng.integers(0, 0x7F, (2, 70, 256)) | rng.integers(0, 2, (2, 70, 256)) << 7).astype(np.uint8)
    acc = np.zeros((70, 70), np.float32)
    for k in range(0, 256, 32):
        acc = emulated(library, blackwell, acc, a[:, k : k + 32], b[:, k : k + 32])
    assert np.array_equal(acc.view(np.uint32), model.chain(np.zeros((70, 70)), a, b, **machine).view(np.uint32))


def test_hopper_keeps_13_bits(library):
    """2^13 fits beside 1 * 448, 2^-1 of it is lost: the published figure, as a single vector."""
    a = np.zeros((1, 32), np.uint8)
    b = np.zeros((1, 32), np.uint8)
    a[0, :2], b[0, :2] = (0x78, 0x38), (0x60, 0x38)  # 256 * 32 = 2^13, 1 * 1
    assert emulated(library, False, np.zeros((1, 1)), a, b)[0, 0] == 8193
    a[0, 1] = 0x30  # 0.5: below 2^(13 - 13)
    assert emulated(library, False, np.zeros((1, 1)), a, b)[0, 0] == 8192
    assert emulated(library, True, np.zeros((1, 1)), a, b)[0, 0] == 8192.5


@pytest.mark.parametrize("blackwell", [False, True])
def test_special_values(library, blackwell):
    one = np.full((1, 32), 0x38, np.uint8)
    nan = one.copy()
    nan[0, 31] = 0xFF
    zero = np.zeros((1, 32), np.uint8)
    assert emulated(library, blackwell, np.zeros((1, 1)), nan, one).view(np.uint32)[0, 0] == 0x7FFFFFFF
    assert emulated(library, blackwell, [[-np.inf]], one, one)[0, 0] == -np.inf
    assert emulated(library, blackwell, [[np.nan]], zero, zero).view(np.uint32)[0, 0] == 0x7FFFFFFF
    assert emulated(library, blackwell, [[-0.0]], zero, zero).view(np.uint32)[0, 0] == 0
    if blackwell:
        poisoned, unit = np.array([255], np.uint8), np.array([127], np.uint8)
        assert np.isnan(emulated(library, True, [[1.0]], zero, one, poisoned, unit)[0, 0])
        small = np.array([0], np.uint8)
        assert emulated(library, True, [[0.0]], one, one, small, unit)[0, 0] == np.float32(32 * 2.0**-127)
        assert emulated(library, True, [[3e38]], one * 0 + 0x7E, one * 0 + 0x7E, poisoned - 1, unit)[0, 0] == np.inf
