"""Mutation tests: every bit of every descriptor that the kernels build is flipped, one at a time, in the operand that
reaches the tensor core. The result must change, or the emulator must refuse the operand.

Bits that the hardware ignores in the form used are named here with the sentence of the PTX ISA that says so.
"""

from __future__ import annotations

import numpy as np
import pytest
from host import EmulatorError
from problems import make_matmul
from vllm_megaattn._C import FLAG_BATCH_INVARIANT as BATCH_INVARIANT

# wgmma, "Matrix Descriptor Format" and "Strides": with a swizzle the leading-dimension offset of a K-major operand is not
# used and assumed to be 1; the kernels write 1, and 0 means the same.
WGMMA_IGNORED = {16}


@pytest.fixture(scope="module")
def clean(hopper):
    """One tile of the tiled kernel and its bytes; A is the tokens' descriptor, B the weights'."""
    problem = make_matmul(np.random.default_rng(5), 70, 1, 64, 512)
    out, scale = (a.copy() for a in problem.run(hopper, 32, flags=BATCH_INVARIANT))
    return problem, out, scale


@pytest.mark.parametrize("operand", ["a", "b"])
@pytest.mark.parametrize("bit", range(64))
def test_wgmma_descriptor(hopper, clean, operand, bit):
    problem, out, scale = clean
    try:
        changed, changed_scale = problem.run(hopper, 32, flags=BATCH_INVARIANT, **{f"flip.wgmma.{operand}": 1 << bit})
        result = "same" if np.array_equal(changed, out) and np.array_equal(changed_scale, scale) else "changed"
    except EmulatorError:
        result = "refused"
    assert (result == "same") == (bit in WGMMA_IGNORED), f"bit {bit}: {result}"
