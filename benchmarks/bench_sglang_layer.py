#!/usr/bin/env python3
"""The SGLang plugin's layer on a GPU, under graph capture, beside the chain that SGLang runs there today.

    python benchmarks/bench_sglang_layer.py [--tp 1 4 8] [--tokens 1 8 64 512 4096] [--deep-gemm DIR] [--out FILE.json]
    python benchmarks/bench_sglang_layer.py --check [--device cpu]      correctness and reload only, no timing

SGLang need not be installed: `sglang_stand_in` has layer objects with the shapes, strides and the call sequence of its
layers, and the plugin is installed on them as SGLang does it. Measured is a layer's forward from the attention kernel's
output on (a buffer padded to 64 heads), over rotating layers whose weights together exceed the L2 cache.

The row "SGLang 0.5.23" is the chain of `sglang_chain`, with SGLang's fork of DeepGEMM from --deep-gemm, a folder made by
`pip install --no-deps --target DIR sgl-deep-gemm==0.2.3.post2`; it compiles its kernels on first use, with CUDA_HOME's
nvcc. "our wo_a + SGLang's wo_b" tells whether wo_b is better left to it. A row that does not load or gives a wrong result
is reported and left out.

Before it is timed, a layer is checked: against float64, for equality with the op called directly, and for weights that are
updated in place under a captured graph, in pieces and in any order.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

import sglang_stand_in
import torch

from vllm_megaattn import ops
from vllm_megaattn.bench import report, timing
from vllm_megaattn.bench.timing import Contender
from vllm_megaattn.bench.workload import MODELS, Workload, relative_error

Payload = tuple[torch.Tensor, torch.Tensor]  # e4m3 of wo_a and of wo_b, for the workload's scales


def make_layer(model, work: Workload, payload: Payload) -> torch.nn.Module:
    """One attention layer, built and loaded in SGLang's order."""
    config = sglang_stand_in.config(work.tp, work.model, work.cos_sin)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(work.device):
            layer = model.MQALayer(config, 0, model.Fp8Config(), "model.layers.0.self_attn")
    finally:
        torch.set_default_dtype(default)
    if hasattr(layer, "_megaattn"):
        load(layer, work, payload, order=("weight", "weight_scale_inv"))
    return layer


def load(layer: torch.nn.Module, work: Workload, payload: Payload, order: tuple[str, str]) -> None:
    """Weight loaders one by one, then post-load."""
    for linear, q, weights in zip((layer.wo_a, layer.wo_b), payload, (work.wo_a, work.wo_b), strict=True):
        tensors = {
            "weight": q.flatten(0, -2),
            "weight_scale_inv": torch.exp2(weights.bytes32.flatten(0, -2).float() - 127),
        }
        for name in order:
            parameter = getattr(linear, name)
            parameter._weight_loader(parameter, tensors[name])
        linear.quant_method.process_weights_after_loading(linear)


def padded(work: Workload) -> torch.Tensor:
    """The whole attention buffer; heads past the live ones hold NaN, since nobody may read them."""
    out = torch.full((work.tokens, max(64, work.heads), 512), float("nan"), dtype=torch.bfloat16, device=work.device)
    out[:, : work.heads] = work.attn
    return out


def check(model, work: Workload) -> list[str]:
    """Problems found, by name; empty when everything holds."""
    problems = []
    payload = work.wo_a.q, work.wo_b.q
    layer = make_layer(model, work, payload)
    if not hasattr(layer, "_megaattn"):
        return ["the plugin did not attach: see its log"]
    attn_out, positions = padded(work), work.positions
    y = layer(attn_out, positions)
    error = relative_error(y, work.exact_z @ work.wo_b.exact[0].t())
    if not error < 5e-2:
        problems.append(f"relative error {error:.1e} against float64 is more than two roundings to MXFP8")
    direct = ops.o_proj_from_attn(
        attn_out[:, : work.heads], positions, torch.view_as_real(layer.freqs_cis).flatten(1), layer.wo_a.weight,
        layer.wo_a.megaattn_scale, layer.wo_b.weight, layer.wo_b.megaattn_scale, groups=work.groups,
        cos_sin_layout="interleaved",
    )  # fmt: skip
    if not torch.equal(y, direct):
        problems.append("the layer and the op called directly differ")
    result = torch.empty_like(y)

    def step() -> None:
        result.copy_(layer(attn_out, positions))

    replay = step
    if work.device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        replay = graph.replay
    replay()
    if not torch.equal(result, y):
        problems.append("replaying the captured layer differs from running it")
    addresses = [parameter.data_ptr() for parameter in layer.parameters()]
    other = work.wo_a.q.view(torch.uint8).flip(1).view(torch.float8_e4m3fn), work.wo_b.q
    load(layer, work, other, order=("weight_scale_inv", "weight"))
    if [parameter.data_ptr() for parameter in layer.parameters()] != addresses:
        problems.append("updating moved a parameter")
    replay()
    fresh = make_layer(model, work, other)(attn_out, positions)
    if not torch.equal(result, fresh):
        problems.append("the captured layer does not see updated weights")
    if torch.equal(fresh, y):
        problems.append("the updated weights made no difference: the check checks nothing")
    return problems


def measure(model, work: Workload, rounds: int, deep_gemm: Path | None, notes: list[str]) -> list[dict]:
    import sglang_chain

    from vllm_megaattn.bench import ours

    layers = [make_layer(model, work, (work.wo_a.q, work.wo_b.q)) for _ in range(work.copies)]
    attn_out, positions = padded(work), work.positions
    plugin = Contender("plugin layer", lambda i: layers[i](attn_out, positions))
    plugin.error = relative_error(plugin.run(0), work.exact_z @ work.wo_b.exact[0].t())
    mine = [plugin, *ours.contenders(work, "chain")]
    contenders = [*mine, *sglang_chain.contenders(work, deep_gemm, notes.append)]
    timers = {c.name: timing.GraphTimer(c, work.copies, 64 if work.tokens <= 128 else 1) for c in contenders}
    found = timing.measure(timers, rounds=rounds)
    return [
        report.row(
            "v4.1-flash", "layer", work.tp, work.tokens, c.name, found[c.name].us, found[c.name].spread,
            ours=c in mine, flops=work.flops("chain"), error=c.error,
        )
        for c in contenders
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tp", type=int, nargs="*", default=[1, 4, 8])
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 8, 32, 128, 512, 2048, 8192])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--deep-gemm", type=Path, help="folder with SGLang's fork of DeepGEMM")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    parser.add_argument("--check", action="store_true", help="correctness and reload only")
    parser.add_argument("--device", default="cuda", help="with --check: cpu runs the CPU backend")
    args = parser.parse_args()
    if min(args.tokens) < 1:
        parser.error("--tokens must be positive")
    if args.device != "cuda" and not args.check:
        parser.error("timing needs a CUDA device; --check runs on others")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device(args.device)
    os.environ["VLLM_MEGAATTN_ANY_VERSION"] = "1"  # the stand-in has no version

    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    model = sglang_stand_in.install(capability)
    from vllm_megaattn.engines.sglang import register

    register()
    rows: list[dict] = []
    notes: list[str] = []
    failed = False
    torch.manual_seed(0)
    for tp in args.tp:
        work = Workload(MODELS["v4.1-flash"], tp, device)
        for tokens in args.tokens:
            work.set_tokens(tokens)
            problems = check(model, work)
            failed |= bool(problems)
            print(f"TP{tp} T={tokens}: {'; '.join(problems) or 'layer ok, update ok'}", flush=True)
            if not args.check and not problems:
                rows += measure(model, work, args.rounds, args.deep_gemm, notes)
    if args.out and rows:
        report.write_json(args.out, rows, notes, {"rounds": args.rounds, "device": str(device)})
    if rows:
        print(report.table(rows))
    for note in dict.fromkeys(notes):
        print(f"note: {note}")
    return 1 if failed else 0


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
