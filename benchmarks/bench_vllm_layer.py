#!/usr/bin/env python3
"""The vLLM plugin's layer on a GPU, under graph capture, beside the kernels that vLLM runs there today.

    python benchmarks/bench_vllm_layer.py [--tp 1 4 8] [--tokens 1 8 64 512 4096] [--peers DIR] [--out FILE.json]
    python benchmarks/bench_vllm_layer.py --check [--device cpu]        correctness and reload only, no timing

vLLM need not be installed: `vllm_stand_in` has layer objects with the shapes, strides and the call sequence of its layers,
and the plugin is installed on them through its own entry point. Measured is `attention._o_proj(attn_out, positions)` as
vLLM calls it, with the attention buffer padded to 64 heads, over rotating layers whose weights together exceed the L2
cache.

The rows "vLLM 0.33" and "vLLM 0.31" are the chains that vLLM runs for DeepSeek-V4.1 on Hopper (its inverse RoPE in Triton,
a BF16 batched product for wo_a, Humming or Marlin W8A16 for wo_b); they appear when --peers names a folder with those
kernels (see `python -m vllm_megaattn bench --help`). A row that does not load or gives a wrong result is reported and left
out.

Before it is timed, a layer is checked: against float64, for equality with the op called directly, and for weights that are
reloaded into a captured graph.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

import torch
import vllm_stand_in

from vllm_megaattn import ops
from vllm_megaattn.bench import report, timing
from vllm_megaattn.bench.timing import Contender
from vllm_megaattn.bench.workload import MODELS, Workload, relative_error


def make_layer(flashmla, work: Workload, wo_a: torch.Tensor, wo_b: torch.Tensor) -> torch.nn.Module:
    """One attention layer, built and loaded in vLLM's order; wo_a, wo_b: e4m3 payloads for the workload's scales."""
    config = vllm_stand_in.Config(
        groups=work.groups, heads=work.heads, rank=work.model.rank, hidden=work.model.hidden,
        device=work.device, cos_sin=work.cos_sin,
    )  # fmt: skip
    layer = flashmla.DeepseekV4FlashMLAAttention(config, prefix="model.layers.0.attn")
    load(layer, work, wo_a, wo_b)
    return layer


def load(layer: torch.nn.Module, work: Workload, wo_a: torch.Tensor, wo_b: torch.Tensor) -> None:
    """Weight loaders, then post-load."""
    for linear, payload, scales in ((layer.wo_a, wo_a, work.wo_a.bytes32), (layer.wo_b, wo_b, work.wo_b.bytes32)):
        linear.weight.data.copy_(payload.flatten(0, -2))
        linear.weight_scale.data.copy_(scales.flatten(0, -2).repeat_interleave(32, 0))
        linear.quant_method.process_weights_after_loading(linear)


def reload(layer: torch.nn.Module, work: Workload, wo_a: torch.Tensor, wo_b: torch.Tensor) -> None:
    """As vLLM's layerwise reload: fresh tensors of the loaded shapes, post-load, contents copied into the old storages."""
    for linear, payload, scales in ((layer.wo_a, wo_a, work.wo_a.bytes32), (layer.wo_b, wo_b, work.wo_b.bytes32)):
        old = dict(linear.named_parameters())
        fresh = {
            "weight": payload.flatten(0, -2).clone(),
            "weight_scale": scales.flatten(0, -2).repeat_interleave(32, 0),
        }
        for name, tensor in fresh.items():
            setattr(linear, name, torch.nn.Parameter(tensor, requires_grad=False))
        linear.quant_method.process_weights_after_loading(linear)
        for name, parameter in old.items():
            parameter.data.copy_(getattr(linear, name))
            setattr(linear, name, parameter)


def padded(work: Workload) -> torch.Tensor:
    """The whole attention buffer; heads past the live ones hold NaN, since nobody may read them."""
    out = torch.full((work.tokens, max(64, work.heads), 512), float("nan"), dtype=torch.bfloat16, device=work.device)
    out[:, : work.heads] = work.attn
    return out


def check(flashmla, work: Workload) -> list[str]:
    """Problems found, by name; empty when everything holds."""
    problems = []
    layer = make_layer(flashmla, work, work.wo_a.q, work.wo_b.q)
    if not hasattr(layer, "_megaattn"):
        return ["the plugin did not attach: see its log"]
    attn_out, positions = padded(work), work.positions
    y = layer._o_proj(attn_out, positions)
    error = relative_error(y, work.exact_z @ work.wo_b.exact[0].t())
    if not error < 5e-2:
        problems.append(f"relative error {error:.1e} against float64 is more than two roundings to MXFP8")
    direct = ops.o_proj_from_attn(
        attn_out, positions, work.cos_sin, layer.wo_a.weight, layer.wo_a.weight_scale, layer.wo_b.weight,
        layer.wo_b.weight_scale, groups=work.groups, padded_heads=True,
    )  # fmt: skip
    if not torch.equal(y, direct):
        problems.append("the layer and the op called directly differ")
    if work.device.type == "cuda":
        result = torch.empty_like(y)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result.copy_(layer._o_proj(attn_out, positions))
        replay = graph.replay
    else:
        result = torch.empty_like(y)

        def replay() -> None:
            result.copy_(layer._o_proj(attn_out, positions))

    replay()
    if not torch.equal(result, y):
        problems.append("replaying the captured layer differs from running it")
    addresses = [parameter.data_ptr() for parameter in layer.parameters()]
    other = work.wo_a.q.view(torch.uint8).flip(1).view(torch.float8_e4m3fn), work.wo_b.q
    reload(layer, work, *other)
    if [parameter.data_ptr() for parameter in layer.parameters()] != addresses:
        problems.append("reloading moved a parameter")
    replay()
    fresh = make_layer(flashmla, work, *other)._o_proj(attn_out, positions)
    if not torch.equal(result, fresh):
        problems.append("the captured layer does not see reloaded weights")
    if torch.equal(fresh, y):
        problems.append("the reloaded weights made no difference: the check checks nothing")
    return problems


def measure(flashmla, work: Workload, rounds: int, notes: list[str]) -> list[dict]:
    from vllm_megaattn.bench import ours, peers

    layers = [make_layer(flashmla, work, work.wo_a.q, work.wo_b.q) for _ in range(work.copies)]
    attn_out, positions = padded(work), work.positions
    plugin = Contender("plugin layer", lambda i: layers[i]._o_proj(attn_out, positions))
    plugin.error = relative_error(plugin.run(0), work.exact_z @ work.wo_b.exact[0].t())
    contenders = [plugin, *ours.contenders(work, "chain"), *peers.contenders(work, "chain", notes.append)]
    timers = {c.name: timing.GraphTimer(c, work.copies, 64 if work.tokens <= 128 else 1) for c in contenders}
    found = timing.measure(timers, rounds=rounds)
    return [
        report.row(
            "v4.1-flash", "layer", work.tp, work.tokens, c.name, found[c.name].us, found[c.name].spread,
            ours=c.name == plugin.name or c.name.startswith("ours"), flops=work.flops("chain"), error=c.error,
        )
        for c in contenders
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tp", type=int, nargs="*", default=[1, 4, 8])
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 8, 32, 128, 512, 2048, 8192])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peers", type=Path, help="folder with public kernels")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    parser.add_argument("--check", action="store_true", help="correctness and reload only")
    parser.add_argument("--device", default="cuda", help="with --check: cpu runs the CPU backend")
    args = parser.parse_args()
    if min(args.tokens) < 1:
        parser.error("--tokens must be positive")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device(args.device)
    if args.peers:
        os.environ["PEERS"] = str(args.peers)
    os.environ["VLLM_MEGAATTN_ANY_VERSION"] = "1"  # the stand-in has no version

    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    flashmla = vllm_stand_in.install(capability)
    from vllm_megaattn.engines.vllm import register

    register()
    rows: list[dict] = []
    notes: list[str] = []
    failed = False
    torch.manual_seed(0)
    for tp in args.tp:
        work = Workload(MODELS["v4.1-flash"], tp, device)
        for tokens in args.tokens:
            work.set_tokens(tokens)
            problems = check(flashmla, work)
            failed |= bool(problems)
            print(f"TP{tp} T={tokens}: {'; '.join(problems) or 'layer ok, reload ok'}", flush=True)
            if not args.check and not problems:
                rows += measure(flashmla, work, args.rounds, notes)
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
