#!/usr/bin/env python3
"""Put OProj into a model of your own: a small DeepSeek-V4.1-shaped attention block that decodes on the CPU.

    python examples/attention_block.py [--steps 8] [--prompt 12]

The block has the shapes of DeepSeek-V4.1's attention in small: queries through a low-rank bottleneck, one key-value head
of 512 shared by all query heads, rotary embedding on the last 64 columns of keys, values and queries alike, a sliding
window, and the grouped output projection in MXFP8 (two groups of eight heads, rank 1024). Since the values are rotated
too, the projection begins by rotating the attention output back.

It runs twice over the same prompt and weights: with the projection written out in BF16, and with `vllm_megaattn.OProj` in
its place. The outputs differ by the rounding of activations to MXFP8, about 4 %, which is printed at every step.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

from vllm_megaattn import OProj
from vllm_megaattn.o_proj_module import rope_cache

HIDDEN, HEADS, HEAD_DIM, ROPE_DIM = 1024, 16, 512, 64
GROUPS, RANK, Q_RANK, WINDOW = 2, 1024, 256, 128
GROUP_COLS = HEADS // GROUPS * HEAD_DIM
BLOCK = 32


# ---- weights as a checkpoint holds them --------------------------------------------------------------------------------


def quantize_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [N, K] -> e4m3 [N, K] and one UE8M0 byte for each 32x32 block, uint8 [N/32, K/32]."""
    rows, cols = weight.shape
    blocks = weight.view(rows // BLOCK, BLOCK, cols // BLOCK, BLOCK)
    exponent = torch.ceil(torch.log2(blocks.abs().amax(dim=(1, 3)).clamp(min=1e-30) / 448))
    data = (blocks / torch.exp2(exponent)[:, None, :, None]).view(rows, cols).to(torch.float8_e4m3fn)
    return data, (exponent + 127).to(torch.uint8)


def dequantize_weight(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The same weights in BF16, which holds them exactly."""
    factor = torch.exp2(scale.float() - 127).repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return (data.float() * factor).to(torch.bfloat16)


# ---- rotary embedding --------------------------------------------------------------------------------------------------


def rotate(x: torch.Tensor, cos_sin: torch.Tensor, *, back: bool = False) -> torch.Tensor:
    """Rotates the pairs (even, odd) in the last 64 columns of [T, heads, 512]; cos_sin float32 [T, 64] = cos, then sin."""
    half = ROPE_DIM // 2
    cos, sin = cos_sin[:, None, :half], cos_sin[:, None, half:] * (-1 if back else 1)
    even, odd = x[..., -ROPE_DIM::2].float(), x[..., -ROPE_DIM + 1 :: 2].float()
    out = x.float().clone()
    out[..., -ROPE_DIM::2] = even * cos - odd * sin
    out[..., -ROPE_DIM + 1 :: 2] = odd * cos + even * sin
    return out.to(x.dtype)


# ---- two projections with the same weights -----------------------------------------------------------------------------


class PlainOutputProjection(nn.Module):
    """What OProj replaces, written out in BF16: rotate back, one product per group, one over all of them."""

    def __init__(self, weights: dict[str, torch.Tensor], cos_sin: torch.Tensor) -> None:
        super().__init__()
        self.wo_a = dequantize_weight(weights["wo_a"], weights["wo_a_scale"]).view(GROUPS, RANK, GROUP_COLS)
        self.wo_b = dequantize_weight(weights["wo_b"], weights["wo_b_scale"])
        self.cos_sin = cos_sin

    def forward(self, attn_out: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = rotate(attn_out, self.cos_sin[positions], back=True).view(-1, GROUPS, GROUP_COLS)
        z = torch.einsum("tgk,gnk->tgn", x, self.wo_a)
        return z.flatten(1) @ self.wo_b.t()


def our_output_projection(weights: dict[str, torch.Tensor], cos_sin: torch.Tensor) -> OProj:
    """The same interface, `forward(attn_out, positions)`; `OProj.from_checkpoint` reads the weights from a file instead."""
    return OProj(
        weights["wo_a"].view(GROUPS, RANK, GROUP_COLS),
        weights["wo_a_scale"].view(GROUPS, RANK // BLOCK, GROUP_COLS // BLOCK),
        weights["wo_b"],
        weights["wo_b_scale"],
        cos_sin=cos_sin,
    )


# ---- the block ---------------------------------------------------------------------------------------------------------


class AttentionBlock(nn.Module):
    """x + o_proj(attention(norm(x))), with a key-value cache of one 512-wide row per token."""

    def __init__(self, o_proj: nn.Module, cos_sin: torch.Tensor, generator: torch.Generator) -> None:
        super().__init__()

        def weight(rows: int, cols: int) -> torch.Tensor:
            return (torch.randn(rows, cols, generator=generator) / cols**0.5).to(torch.bfloat16)

        self.wq_a, self.wq_b = weight(Q_RANK, HIDDEN), weight(HEADS * HEAD_DIM, Q_RANK)
        self.wkv = weight(HEAD_DIM, HIDDEN)
        self.sink = torch.zeros(HEADS)
        self.o_proj = o_proj
        self.cos_sin = cos_sin
        self.cache = torch.empty(0, HEAD_DIM, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x BF16 [T, HIDDEN] at `positions` [T], which follow the tokens seen so far."""
        h = nn.functional.rms_norm(x, (HIDDEN,))
        cos_sin = self.cos_sin[positions]
        q_low = nn.functional.rms_norm(h @ self.wq_a.t(), (Q_RANK,))
        q = rotate((q_low @ self.wq_b.t()).view(-1, HEADS, HEAD_DIM), cos_sin)
        kv = rotate(nn.functional.rms_norm(h @ self.wkv.t(), (HEAD_DIM,))[:, None], cos_sin)[:, 0]
        self.cache = torch.cat([self.cache, kv])
        return x + self.o_proj(self.attend(q, positions), positions)

    def attend(self, q: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """BF16 [T, HEADS, 512]: causal, within the window, with a sink that takes part of the weight."""
        scores = torch.einsum("thd,sd->ths", q.float(), self.cache.float()) / HEAD_DIM**0.5
        distance = positions[:, None] - torch.arange(self.cache.shape[0])
        hidden = (distance < 0) | (distance >= WINDOW)
        scores = scores.masked_fill(hidden[:, None], float("-inf"))
        sink = self.sink.view(1, HEADS, 1).expand(q.shape[0], -1, 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
        return torch.einsum("ths,sd->thd", weights, self.cache.float()).to(torch.bfloat16)


def make_weights(generator: torch.Generator) -> dict[str, torch.Tensor]:
    wo_a = torch.randn(GROUPS * RANK, GROUP_COLS, generator=generator) / GROUP_COLS**0.5
    wo_b = torch.randn(HIDDEN, GROUPS * RANK, generator=generator) / (GROUPS * RANK) ** 0.5
    weights = {}
    for name, weight in (("wo_a", wo_a), ("wo_b", wo_b)):
        weights[name], weights[f"{name}_scale"] = quantize_weight(weight)
    return weights


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> float:
    """Decodes, prints a table, returns the largest relative difference of a step."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=8, help="tokens to decode after the prompt")
    parser.add_argument("--prompt", type=int, default=12, help="tokens of the prompt")
    args = parser.parse_args(arguments)

    generator = torch.Generator().manual_seed(0)
    weights, cos_sin = make_weights(generator), rope_cache(args.prompt + args.steps + 1)
    projections = PlainOutputProjection(weights, cos_sin), our_output_projection(weights, cos_sin)
    plain, ours = (AttentionBlock(p, cos_sin, torch.Generator().manual_seed(1)) for p in projections)
    print(f"OProj: {ours.o_proj.choice().path} on {ours.o_proj.choice().backend}")
    print(f"{'tokens':>10} {'relative difference':>24}")

    x = torch.randn(args.prompt, HIDDEN, generator=generator).to(torch.bfloat16)
    position, worst = 0, 0.0
    for _ in range(args.steps + 1):
        positions = torch.arange(position, position + x.shape[0])
        expected, got = plain(x, positions), ours(x, positions)
        added = (expected - x).float()
        difference = ((got - x).float() - added).norm().item() / added.norm().item()
        worst = max(worst, difference)
        span = f"{position}..{position + x.shape[0] - 1}" if x.shape[0] > 1 else str(position)
        print(f"{span:>10} {difference:24.3f}")
        position += x.shape[0]
        x = torch.tanh(got[-1:])  # stands for the rest of the model: the next token's hidden state
    return worst


if __name__ == "__main__":
    main()
