"""The contenders of this package."""

from __future__ import annotations

import torch

from vllm_megaattn import ops
from vllm_megaattn.bench.timing import Contender
from vllm_megaattn.bench.workload import Workload, relative_error


def contenders(work: Workload, op: str) -> list[Contender]:
    """Fused and unfused form of one operation: chain, o_proj, wo_a, wo_b, inv_rope or quantize."""
    return _MAKERS[op](work)


def _finish(contender: Contender, exact: torch.Tensor) -> Contender:
    contender.error = relative_error(contender.run(0), exact)
    return contender


def _span(work: Workload) -> int:
    return ops.default_scale_span(work.device, *work.wo_a.prepared[0])


def _chain(work: Workload) -> list[Contender]:
    exact = work.exact_z @ work.wo_b.exact[0].t()
    wb = [(w[0], s[0]) for w, s in work.wo_b.prepared]

    def make(path: str):
        def run(i: int) -> torch.Tensor:
            return ops.o_proj_from_attn(
                work.attn, work.positions, work.cos_sin, *work.wo_a.prepared[i], *wb[i], groups=work.groups, path=path
            )

        return run

    return [_finish(Contender(f"ours {path}", make(path)), exact) for path in ("fused", "unfused")]


def _activation(work: Workload, span: int) -> tuple[torch.Tensor, torch.Tensor]:
    return ops.inv_rope_mxfp8_quantize(work.attn, work.positions, work.cos_sin, groups=work.groups, scale_span=span)


def _o_proj(work: Workload) -> list[Contender]:
    exact = work.exact_z @ work.wo_b.exact[0].t()
    span = _span(work)
    x, x_scale = _activation(work, span)
    wb = [(w[0], s[0]) for w, s in work.wo_b.prepared]

    def make(path: str):
        def run(i: int) -> torch.Tensor:
            return ops.o_proj(x, x_scale, *work.wo_a.prepared[i], *wb[i], path=path, x_span=span)

        return run

    return [_finish(Contender(f"ours {path}", make(path)), exact) for path in ("fused", "unfused")]


def _wo_a(work: Workload) -> list[Contender]:
    span = _span(work)
    found = []
    for label, x_span, weights in (
        (f"span {span}", span, work.wo_a.prepared),
        ("per-32", 32, [(w, work.wo_a.bytes32) for w in work.wo_a.data]),
    ):
        x, x_scale = _activation(work, x_span)

        def fused(i: int, x=x, x_scale=x_scale, x_span=x_span, weights=weights) -> torch.Tensor:
            return ops.einsum_fp8_sfd128x4(x, x_scale, *weights[i], scale_span=x_span, x_span=x_span)[0]

        def unfused(i: int, x=x, x_scale=x_scale, x_span=x_span, weights=weights) -> torch.Tensor:
            return ops.einsum_fp8_bf16(x, x_scale, *weights[i], x_span=x_span)

        error = relative_error(unfused(0).reshape(work.tokens, -1), work.exact_z)
        found += [
            Contender(f"ours {label} MXFP8 out", fused, error),
            Contender(f"ours {label} BF16 out", unfused, error),
        ]
    return found


def _wo_b(work: Workload) -> list[Contender]:
    z = work.exact_z.to(torch.bfloat16)
    exact = z.double() @ work.wo_b.exact[0].t()
    span = _span(work)
    found = []
    for label, z_span, weights in (
        (f"span {span}", span, [(w[0], s[0]) for w, s in work.wo_b.prepared]),
        ("per-32", 32, [(w[0], work.wo_b.bytes32[0]) for w in work.wo_b.data]),
    ):
        q, q_scale = ops.mxfp8_quantize_sfd128x4(z, scale_span=z_span)

        def run(i: int, q=q, q_scale=q_scale, z_span=z_span, weights=weights) -> torch.Tensor:
            return ops.mxfp8_gemm_wo_b(q, q_scale, *weights[i], z_span=z_span)

        found.append(_finish(Contender(f"ours {label}", run), exact))
    return found


def _inv_rope(work: Workload) -> list[Contender]:
    def make(span: int):
        def run(_: int) -> torch.Tensor:
            return _activation(work, span)[0]

        return run

    return [Contender(f"ours inverse RoPE + quantise, span {span}", make(span)) for span in (32, 256)]


def _quantize(work: Workload) -> list[Contender]:
    z = work.exact_z.to(torch.bfloat16)

    def make(span: int):
        def run(_: int) -> torch.Tensor:
            return ops.mxfp8_quantize_sfd128x4(z, scale_span=span)[0]

        return run

    return [Contender(f"ours quantise z, span {span}", make(span)) for span in (32, 256)]


_MAKERS = {
    "chain": _chain,
    "o_proj": _o_proj,
    "wo_a": _wo_a,
    "wo_b": _wo_b,
    "inv_rope": _inv_rope,
    "quantize": _quantize,
}
