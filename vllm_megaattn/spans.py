"""What wide scale spans cost: elements that a scale shared by more columns flushes to zero.

An MXFP8 element becomes zero when it is at most half of 2^-9 times its block's scale. With one scale for 128 or 256
columns an outlier sets the scale of more neighbours than with one for 32, so more of the small ones vanish.
"""

from __future__ import annotations

import torch


def count_flushed(z: torch.Tensor, q: torch.Tensor) -> int:
    """How many elements of z are not zero while their quantised ones in q are.

    z: floating point [...], what was quantised (for `inv_rope_mxfp8_quantize` the rotated values)
    q: e4m3 of the same number of elements in the same order, from `mxfp8_quantize_sfd128x4` with any scale_span

    Waits for the device. Raises ValueError if the sizes differ, TypeError if q is not e4m3.
    """
    if q.dtype is not torch.float8_e4m3fn:
        raise TypeError(f"count_flushed: q must be torch.float8_e4m3fn, got {q.dtype}")
    if z.numel() != q.numel():
        raise ValueError(f"count_flushed: q must have as many elements as z, {z.numel()}, got {q.numel()}")
    magnitude = q.reshape(-1).view(torch.uint8) & 0x7F
    return int(((z.reshape(-1) != 0) & (magnitude == 0)).sum())
