"""Shapes, weights and activations of one benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from vllm_megaattn.weights import prepare_weight

HEAD_DIM, ROPE_DIM, MAX_POSITIONS = 512, 64, 4096
COLD_BYTES = 240_000_000  # weight copies together: four times the 60 MB L2 of an H200
E4M3 = torch.float8_e4m3fn
PART = 4096  # tokens that are computed in float64 at a time


@dataclass(frozen=True)
class Model:
    """The projection's dimensions at TP1."""

    heads: int
    groups: int
    rank: int
    hidden: int


MODELS = {
    "v4.1-flash": Model(heads=64, groups=8, rank=1024, hidden=5120),
    "v4-flash": Model(heads=64, groups=8, rank=1024, hidden=4096),
    "v4-pro": Model(heads=128, groups=16, rank=1024, hidden=7168),
}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192, 16384, 24576, 32768)


class Weights:
    """`copies` of e4m3 weights [G, N, K] whose UE8M0 scale is shared by 128x128 blocks.

    Such weights are valid for every contender at once: as per-32 MXFP8, as 128x128 FP32 block scales, and as BF16.
    All copies hold the same values at different addresses.
    """

    def __init__(self, groups: int, rows: int, k: int, device: torch.device, copies: int) -> None:
        self.shape = (groups, rows, k)
        self.copies = copies
        self.q = (torch.randn(self.shape, device=device) * 90).clamp_(-448, 448).to(E4M3)
        self.bytes128 = torch.randint(113, 117, (groups, rows // 128, k // 128), device=device, dtype=torch.uint8)

    @cached_property
    def bytes32(self) -> torch.Tensor:
        """uint8 [G, N/32, K/32]: the blocks of a V4.1 checkpoint."""
        return self.bytes128.repeat_interleave(4, 1).repeat_interleave(4, 2).contiguous()

    @cached_property
    def float128(self) -> torch.Tensor:
        """float32 [G, N/128, K/128]"""
        return torch.exp2(self.bytes128.float() - 127)

    @cached_property
    def exact(self) -> torch.Tensor:
        """float64 [G, N, K]"""
        scale = self.float128.double().repeat_interleave(128, 1).repeat_interleave(128, 2)
        return self.q.float().double() * scale

    def spread(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """One clone per copy."""
        return [tensor.clone() for _ in range(self.copies)]

    @cached_property
    def data(self) -> list[torch.Tensor]:
        return self.spread(self.q)

    @cached_property
    def bf16(self) -> list[torch.Tensor]:
        return self.spread(self.exact.to(torch.bfloat16))

    @cached_property
    def prepared(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What prepare_weight makes for this device."""
        w, scale, _ = prepare_weight(self.q.cpu(), self.bytes32.cpu(), device=self.q.device)
        return [(w.clone(), scale.clone()) for _ in range(self.copies)]


class Workload:
    """One (model, tp, tokens): activations, and weights that may be shared between token counts."""

    def __init__(self, model: Model, tp: int, device: torch.device) -> None:
        self.model, self.tp, self.device = model, tp, device
        self.groups = model.groups // tp
        self.heads = model.heads // tp
        self.k_a = model.heads // model.groups * HEAD_DIM
        self.k_b = self.groups * model.rank
        self.bytes_a = self.groups * model.rank * self.k_a
        self.bytes_b = model.hidden * self.k_b
        copies = max(4, -(-COLD_BYTES // (self.bytes_a + self.bytes_b)))
        self.copies = copies
        self.wo_a = Weights(self.groups, model.rank, self.k_a, device, copies)
        self.wo_b = Weights(1, model.hidden, self.k_b, device, copies)
        angle = torch.rand(MAX_POSITIONS, ROPE_DIM // 2, device=device) * 6.2831853
        self.cos_sin = torch.cat([angle.cos(), angle.sin()], 1).contiguous()
        self.set_tokens(1)

    def set_tokens(self, tokens: int) -> None:
        self.tokens = tokens
        # The serving engines hand over the live heads of a buffer that is padded to 64 heads.
        padded = max(64, self.heads)
        self.attn = torch.randn(tokens, padded, HEAD_DIM, device=self.device, dtype=torch.bfloat16)[:, : self.heads]
        self.positions = torch.randint(0, MAX_POSITIONS, (tokens,), device=self.device)
        self.__dict__.pop("exact_z", None)

    def rotated(self, first: int, tokens: int) -> torch.Tensor:
        """float64 [tokens, G, K] from token `first` on: the exact input of wo_a. A part at a time: all of 32768 tokens
        would take 9 GB."""
        x = self.attn[first : first + tokens].double()
        cos, sin = (c.double()[:, None, :] for c in self.cos_sin[self.positions[first : first + tokens]].chunk(2, 1))
        even, odd = x[..., HEAD_DIM - ROPE_DIM :: 2].clone(), x[..., HEAD_DIM - ROPE_DIM + 1 :: 2].clone()
        x[..., HEAD_DIM - ROPE_DIM :: 2] = even * cos + odd * sin
        x[..., HEAD_DIM - ROPE_DIM + 1 :: 2] = odd * cos - even * sin
        return x.reshape(-1, self.groups, self.k_a)

    def parts(self) -> range:
        return range(0, self.tokens, PART)

    @property
    def rotated_bf16(self) -> torch.Tensor:
        """BF16 [T, G, K]"""
        return torch.cat([self.rotated(first, PART).to(torch.bfloat16) for first in self.parts()])

    @cached_property
    def exact_z(self) -> torch.Tensor:
        """float64 [T, G * N]"""
        weights = self.wo_a.exact.transpose(1, 2)
        parts = [torch.bmm(self.rotated(first, PART).transpose(0, 1), weights) for first in self.parts()]
        return torch.cat(parts, 1).transpose(0, 1).reshape(self.tokens, self.k_b)

    def flops(self, op: str) -> float:
        a = 2.0 * self.tokens * self.bytes_a
        b = 2.0 * self.tokens * self.bytes_b
        return {"wo_a": a, "wo_b": b, "chain": a + b, "o_proj": a + b}.get(op, 0.0)

    def weight_bytes(self, op: str) -> int:
        both = self.bytes_a + self.bytes_b
        return {"wo_a": self.bytes_a, "wo_b": self.bytes_b, "chain": both, "o_proj": both}.get(op, 0)


def relative_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    return ((result.double() - exact).norm() / exact.norm()).item()
