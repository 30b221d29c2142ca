"""Run the whole output projection on real input and check it.

Takes a layer of a DeepSeek-V4 / V4.1 checkpoint, or writes a synthetic one with the real names, dtypes and shapes,
and sends BF16 attention outputs through inverse RoPE + quantise -> wo_a -> wo_b, once by the fused path (wo_a writes
MXFP8 z itself) and once by the unfused one (BF16 z, then a quantiser). Both must give the same bytes, and every stage
must equal float64 arithmetic on its own inputs within the rounding of its output. Exit status 1 if anything differs, 2
for an input that cannot be used or whose values are too large or too small for that comparison.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from vllm_megaattn import _C, checkpoint, layouts, ops, selector
from vllm_megaattn.cli.common import format_table, pick_device, step, yes
from vllm_megaattn.o_proj_module import rope_cache
from vllm_megaattn.weights import prepare_weight

HELP = "run and check the projection, on a checkpoint or a synthetic one"

HEAD_DIM = checkpoint.HEAD_DIM
MAX_POSITIONS = 4096
ROPE_THETA = 10000.0

# Rounding to BF16 changes a value by at most 2^-9 of itself, so no more than that in the norm either; a quarter of it
# is left for the FP32 summation. Rounding to e4m3 under a block's scale: at most 2^-4 likewise (subnormal elements
# add next to nothing), and a little for the BF16 rounding that comes first. The end-to-end error has no such bound:
# how it adds up depends on the data.
BF16_LIMIT = 1.25 * 2.0**-9
E4M3_LIMIT = 1.05 * 2.0**-4
# They hold where neither BF16 nor the scales reach the end of their range: below 2^-100 values become subnormal stage by
# stage, above 2^120 a sum of finite values may be an Inf. Beyond it the demo says so instead of a verdict.
COMPARABLE = 2.0**-100, 2.0**120
LIMITS = {"x": E4M3_LIMIT, "wo_a": BF16_LIMIT, "z": E4M3_LIMIT, "wo_b": BF16_LIMIT}
CONTENTS = {
    "x": "rounding of the rotated input to BF16, then e4m3",
    "wo_a": "FP32 summation, rounding of z to BF16",
    "z": "the same, and rounding to e4m3",
    "wo_b": "FP32 summation, rounding of y to BF16",
    "all": "y against the unrounded input: all of the above",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_argument_group("weights")
    source.add_argument(
        "--checkpoint", metavar="PATH", help="a .safetensors shard, a checkpoint directory or its index"
    )
    source.add_argument("--layer", type=int, default=0)
    source.add_argument("--tp-rank", type=int, default=0)
    source.add_argument("--tp-size", type=int, default=1, help="a shard holds groups / tp-size whole groups")
    source.add_argument("--groups", type=int, help="groups of the model, where the checkpoint does not tell")
    source.add_argument("--tiny", action="store_true", help="small synthetic weights instead of the real shapes")
    source.add_argument("--model", choices=("v4.1", "v4"), help="synthetic scales: v4.1 32x32 (default), v4 128x128")
    source.add_argument("--write", metavar="PATH", help="keep the synthetic checkpoint at PATH")
    run_group = parser.add_argument_group("input and run")
    run_group.add_argument("--tokens", type=int, help="tokens of the random input (default 33)")
    run_group.add_argument(
        "--input",
        metavar="FILE",
        help="safetensors file with 'attn' BF16 [T, heads, 512] and, if wanted, 'positions' int64 [T] and 'cos_sin' "
        "float32 [positions, 64]",
    )
    run_group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    run_group.add_argument("--seed", type=int, default=0)
    run_group.add_argument("--json", action="store_true", help="one JSON object instead of the table")


@dataclass
class Problem:
    """One shard's operands, on the device they run on."""

    attn: torch.Tensor
    positions: torch.Tensor
    cos_sin: torch.Tensor
    wo_a: torch.Tensor
    wo_a_scale: torch.Tensor
    wo_b: torch.Tensor
    wo_b_scale: torch.Tensor
    span: int  # columns that share a scale in x and z: what the device's kernels like best

    @property
    def groups(self) -> int:
        return self.wo_a.shape[0]

    def run(self, path: str) -> torch.Tensor:
        weights = self.wo_a, self.wo_a_scale, self.wo_b, self.wo_b_scale
        inputs = self.attn, self.positions, self.cos_sin
        return ops.o_proj_from_attn(*inputs, *weights, groups=self.groups, path=path, scale_span=self.span)


def run(args: argparse.Namespace) -> int:
    _check_arguments(args)
    device, device_reason = pick_device(args.device)
    with tempfile.TemporaryDirectory(prefix="vllm_megaattn_demo_") as scratch:
        path, source = _find_checkpoint(args, Path(scratch))
        with step(f"reading layer {args.layer}, shard {args.tp_rank} of {args.tp_size}"):
            weights = checkpoint.load_o_proj(
                path, args.layer, tp_rank=args.tp_rank, tp_size=args.tp_size, groups=args.groups
            )
    with step("preparing input and weights"):
        attn, positions, cos_sin, input_text = _make_input(args, weights)
        wo_a, wo_a_scale, report_a = prepare_weight(weights.wo_a, weights.wo_a_scale, device=device)
        wo_b, wo_b_scale, report_b = prepare_weight(weights.wo_b, weights.wo_b_scale, groups=1, device=device)
        moved = (tensor.to(device) for tensor in (attn, positions, cos_sin))
        span = ops.default_scale_span(device, wo_a, wo_a_scale)
        problem = Problem(*moved, wo_a, wo_a_scale, wo_b, wo_b_scale, span)

    result: dict[str, object] = {
        "weights": source,
        "layer": args.layer,
        "tp_rank": args.tp_rank,
        "tp_size": args.tp_size,
        "groups": weights.groups,
        "wo_a": list(wo_a.shape),
        "wo_b": list(wo_b.shape),
        "weight_blocks": ["x".join(map(str, weights.wo_a_block)), "x".join(map(str, weights.wo_b_block))],
        "prepared": {"wo_a": report_a, "wo_b": report_b},
        "input": input_text,
        "attn": list(attn.shape),
        "device": _device_name(device),
        "device_reason": device_reason,
        "scale_span": span,
    }
    result["paths"], timed_y = _time_paths(problem, weights.rank)
    chosen = selector.select_path(selector.device_key(device), rank=weights.rank, requested="auto")
    result["chosen"] = {"path": chosen.path, "reason": chosen.reason}
    result.update(_compare(problem, timed_y))
    within = all(result["errors"][name] <= limit for name, limit in LIMITS.items())
    result["ok"] = within and all(result["identical"].values())
    print(json.dumps(_finite_or_null(result), indent=1) if args.json else _report(result))
    return 0 if result["ok"] else 1


def _check_arguments(args: argparse.Namespace) -> None:
    if args.checkpoint and (args.tiny or args.write or args.model):
        args.parser.error("--checkpoint brings its own weights: it excludes --tiny, --write and --model")
    if args.input and args.tokens is not None:
        args.parser.error("--input brings its own tokens: it excludes --tokens")
    if args.tokens is not None and args.tokens < 1:
        args.parser.error(f"--tokens must be positive, got {args.tokens}")


# ---- weights and input -----------------------------------------------------------------------------------------


def _find_checkpoint(args: argparse.Namespace, scratch: Path) -> tuple[Path, str]:
    if args.checkpoint:
        return Path(args.checkpoint), str(args.checkpoint)
    model = args.model or "v4.1"
    path = Path(args.write) if args.write else scratch / "synthetic.safetensors"
    with step(f"writing a synthetic {model.upper()} checkpoint{f' to {path}' if args.write else ''}"):
        checkpoint.write_synthetic_checkpoint(
            path, tiny=args.tiny, version=model, seed=args.seed, layers=[args.layer]
        )
    return path, f"synthetic {model.upper()}{', tiny' if args.tiny else ''}, seed {args.seed}"


def _make_input(
    args: argparse.Namespace, weights: checkpoint.OProjWeights
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, str]:
    """attn BF16 [T, heads of the shard, 512], positions int64 [T], cos_sin, and one line about them."""
    if weights.wo_a.shape[2] % HEAD_DIM:
        raise ValueError(f"wo_a has {weights.wo_a.shape[2]} columns a group, which are no whole heads of {HEAD_DIM}")
    heads = weights.groups * weights.heads_per_group
    if args.input:
        return _read_input(args.input, heads, weights)
    tokens = 33 if args.tokens is None else args.tokens  # 33 fits no tile: not of 4, 32 or 128 tokens
    generator = torch.Generator().manual_seed(args.seed)
    attn = torch.randn(tokens, heads, HEAD_DIM, generator=generator, device="cpu")
    outliers = torch.randperm(HEAD_DIM, generator=generator, device="cpu")[:8]
    attn[:, :, outliers] *= 32.0
    positions = torch.randint(0, MAX_POSITIONS, (tokens,), generator=generator, device="cpu")
    text = f"random BF16, 8 of {HEAD_DIM} channels 32 times larger, seed {args.seed}"
    return attn.to(torch.bfloat16), positions, rope_cache(MAX_POSITIONS, ROPE_THETA), text


def _read_input(
    path: str, heads: int, weights: checkpoint.OProjWeights
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, str]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys() if key in ("attn", "positions", "cos_sin")}  # noqa: SIM118
            found = ", ".join(file.keys())
    except SafetensorError as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from error
    attn = tensors.get("attn")
    if attn is None:
        raise ValueError(
            f"{path} must hold a tensor 'attn' BF16 [T, heads, {HEAD_DIM}], it holds: {found or 'nothing'}"
        )
    all_heads = heads * weights.tp_size
    if attn.dtype != torch.bfloat16 or attn.dim() != 3 or attn.shape[2] != HEAD_DIM or attn.shape[0] < 1:
        raise ValueError(f"attn must be BF16 [T, heads, {HEAD_DIM}], got {attn.dtype} {list(attn.shape)}")
    if attn.shape[1] == all_heads:
        attn = attn[:, weights.tp_rank * heads : (weights.tp_rank + 1) * heads]
    elif attn.shape[1] != heads:
        raise ValueError(f"attn must have {heads} heads (this shard's) or {all_heads} (all), got {attn.shape[1]}")
    cos_sin = tensors.get("cos_sin")
    if cos_sin is None:
        cos_sin = rope_cache(MAX_POSITIONS, ROPE_THETA)
    elif cos_sin.dtype != torch.float32 or cos_sin.dim() != 2:
        raise ValueError(f"cos_sin must be float32 [positions, 64], got {cos_sin.dtype} {list(cos_sin.shape)}")
    positions = tensors.get("positions", torch.arange(attn.shape[0], device="cpu"))
    if positions.dtype not in (torch.int32, torch.int64) or list(positions.shape) != [attn.shape[0]]:
        raise ValueError(f"positions must be int64 [{attn.shape[0]}], got {positions.dtype} {list(positions.shape)}")
    positions = positions.to(torch.int64)
    if int(positions.min()) < 0 or int(positions.max()) >= cos_sin.shape[0]:
        raise ValueError(
            f"positions must lie in [0, {cos_sin.shape[0]}), got {int(positions.min())}..{int(positions.max())}; "
            "the file may bring its own 'cos_sin'"
        )
    return attn, positions, cos_sin, path


# ---- running ---------------------------------------------------------------------------------------------------


def _time_paths(problem: Problem, rank: int) -> tuple[list[dict[str, object]], dict[str, torch.Tensor]]:
    """Time both paths, each as one call; also what each returned."""
    rows, results = [], {}
    key = selector.device_key(problem.wo_a.device)
    for path in ("fused", "unfused"):
        choice = selector.select_path(key, rank=rank, requested=path)
        with step(f"timing the {path} path on {choice.backend}"):
            results[path] = problem.run(path)
            seconds, repeats = _measure(lambda path=path: problem.run(path), problem.wo_a.device)
        kernel = _kernel_name(choice.backend)
        rows.append({"path": choice.path, "kernel": kernel, "seconds": seconds, "repeats": repeats})
    return rows, results


def _measure(call: Callable[[], object], device: torch.device, budget: float = 1.0) -> tuple[float, int]:
    """Median seconds of up to 20 calls within about `budget` seconds, at least one; warm caches."""
    samples: list[float] = []
    while not samples or (len(samples) < 20 and sum(samples) < budget):
        _synchronize(device)
        begin = time.perf_counter()
        call()
        _synchronize(device)
        samples.append(time.perf_counter() - begin)
    return statistics.median(samples), len(samples)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _compare(problem: Problem, timed_y: dict[str, torch.Tensor]) -> dict[str, object]:
    """Both paths kernel by kernel, bytes against bytes, and every product against float64."""
    p, span = problem, problem.span
    with step("comparing bytes"):
        x, x_scale = ops.inv_rope_mxfp8_quantize(p.attn, p.positions, p.cos_sin, groups=p.groups, scale_span=span)
        operands = x, x_scale, p.wo_a, p.wo_a_scale
        z, z_scale = ops.einsum_fp8_sfd128x4(*operands, scale_span=span, x_span=span)
        z_bf16 = ops.einsum_fp8_bf16(*operands, x_span=span)
        q, q_scale = ops.mxfp8_quantize_sfd128x4(z_bf16, scale_span=span)
        y = ops.mxfp8_gemm_wo_b(z, z_scale, p.wo_b, p.wo_b_scale, z_span=span)
        tokens, columns = z.shape
        identical = {
            "z_data": _same_bytes(z, q),
            "z_scale": _same_bytes(z_scale, q_scale),
            "z_scale_padding_zero": layouts.f8_128x4_padding_is_zero(z_scale, tokens, columns // layouts.BLOCK),
            "y": all(_same_bytes(y, other) for other in timed_y.values()),
        }
    with step("computing the float64 reference"):
        host = {name: value.cpu() for name, value in vars(p).items() if isinstance(value, torch.Tensor)}
        x_exact = layouts.dequantize(x.cpu(), layouts.from_packed(x_scale.cpu()))
        linear = layouts.from_f8_128x4(z_scale.cpu(), tokens, columns // layouts.BLOCK)
        z_exact = layouts.dequantize(z.cpu(), linear)
        rotated = _rotate_back(host["attn"], host["positions"], host["cos_sin"]).view(x_exact.shape)
        rotated = _poison_blocks(rotated, span)
        z_wanted, z_from_attn = _wo_a_float64((x_exact, rotated), host["wo_a"], host["wo_a_scale"])
        y_wanted, y_from_attn = _wo_b_float64((z_exact, z_from_attn), host["wo_b"], host["wo_b_scale"])
        if all(identical.values()):
            stages = {"the attention output": rotated, "z": z_wanted, "y": y_wanted}
            for name, values in stages.items():
                _refuse_out_of_range(name, values)
        errors = {
            "x": _relative_error(x_exact, rotated),
            "wo_a": _relative_error(z_bf16.cpu().double().flatten(1), z_wanted),
            "z": _relative_error(z_exact, z_wanted),
            "wo_b": _relative_error(y.cpu().double(), y_wanted),
            "all": _relative_error(y.cpu().double(), y_from_attn),
        }
    return {
        "identical": identical,
        "z_bytes": [z.numel(), z_scale.numel()],
        "errors": errors,
        "error_limits": LIMITS,
        "error_contents": CONTENTS,
    }


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


# ---- the float64 reference -------------------------------------------------------------------------------------


def _rotate_back(attn: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Inverse RoPE of each head's last columns (interleaved pairs; a row of cos_sin is cos then sin), in float64."""
    values = attn.double()
    cos, sin = cos_sin[positions].double()[:, None].chunk(2, dim=-1)
    rope = values[..., -cos_sin.shape[1] :]
    even, odd = rope[..., 0::2].clone(), rope[..., 1::2].clone()
    rope[..., 0::2] = even * cos + odd * sin
    rope[..., 1::2] = odd * cos - even * sin
    return values


def _poison_blocks(values: torch.Tensor, span: int) -> torch.Tensor:
    """NaN for every block of `span` columns that holds a NaN, an Inf or what rounds to one in BF16: the OCP rule."""
    blocks = values.view(*values.shape[:-1], -1, span)
    healthy = (blocks.abs() < 2.0**128 * (1 - 2.0**-9)).all(dim=-1, keepdim=True)
    return torch.where(healthy, blocks, math.nan).view(values.shape)


def _weight_block(w: torch.Tensor, scale: torch.Tensor) -> tuple[int, int]:
    """Rows and columns that share a scale: blocks as in checkpoints, or prepared ones, which cover all of K."""
    rows, cols = w.shape
    return layouts.find_block_shape(rows, cols, scale.shape, candidates=(*layouts.WEIGHT_BLOCKS, (32, cols)))


def _decode_weight(w: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """float64 [N, K] of e4m3 [N, K] under block scales."""
    return layouts.dequantize(w, layouts.expand_blocks(scale, *w.shape, block))


def _wo_a_float64(inputs: tuple[torch.Tensor, ...], w: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """float64 [T, G * N] of each input [T, G, K]; one group's weight is decoded at a time."""
    block = _weight_block(w[0], scale[0])
    decoded = (_decode_weight(w[g], scale[g], block) for g in range(w.shape[0]))
    parts = [torch.cat([x[:, g] for x in inputs]) @ weight.t() for g, weight in enumerate(decoded)]
    return torch.cat(parts, dim=1).chunk(len(inputs))


def _wo_b_float64(inputs: tuple[torch.Tensor, ...], w: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """float64 [T, N] of each input [T, K]; 512 rows of the weight are decoded at a time."""
    block, stacked, parts = _weight_block(w, scale), torch.cat(inputs), []
    for begin in range(0, w.shape[0], 512):
        end = min(begin + 512, w.shape[0])
        part = scale[begin // block[0] : layouts.ceil_div(end, block[0])]
        parts.append(stacked @ _decode_weight(w[begin:end], part, block).t())
    return torch.cat(parts, dim=1).chunk(len(inputs))


def _relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of the reference. Where the reference is NaN (a NaN or an Inf came in),
    the result must be NaN; if it is not, or if it is elsewhere, the error is infinite, and so it is for an Inf."""
    finite = torch.isfinite(wanted)
    if not (torch.equal(torch.isnan(wanted), torch.isnan(got)) and torch.equal(finite, torch.isfinite(got))):
        return math.inf
    difference = torch.where(finite, got - wanted, 0.0).norm().item()
    norm = torch.where(finite, wanted, 0.0).norm().item()
    return difference / norm if norm else difference


def _refuse_out_of_range(name: str, values: torch.Tensor) -> None:
    """ValueError where LIMITS say nothing: no number at all, or the largest one outside COMPARABLE. Zeros are fine: every
    stage must keep them exactly."""
    finite = values[torch.isfinite(values)]
    if finite.numel() == 0:
        raise ValueError(f"{name} holds no finite value, so there is nothing to compare with float64 arithmetic")
    largest = finite.abs().max().item()
    if largest and not COMPARABLE[0] <= largest <= COMPARABLE[1]:
        raise ValueError(
            f"{name} has a largest magnitude of {largest:.3g}; the comparison with float64 arithmetic means something "
            f"from {COMPARABLE[0]:.3g} to {COMPARABLE[1]:.3g} only, clear of the ends of BF16 and of the scales"
        )


# ---- reporting -------------------------------------------------------------------------------------------------


def _kernel_name(backend: str) -> str:
    return f"cpu, {_C.cpu_info()['variant']}" if backend == "cpu" else backend


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return f"cpu, {torch.get_num_threads()} threads"
    return f"{device}, {torch.cuda.get_device_name(device)}"


def _finite_or_null(result: dict[str, object]) -> dict[str, object]:
    """JSON knows no Infinity."""
    errors = {name: value if math.isfinite(value) else None for name, value in result["errors"].items()}
    return {**result, "errors": errors}


def _report(result: dict[str, object]) -> str:
    identical, errors = result["identical"], result["errors"]
    shapes = f"G = {result['groups']}, wo_a {result['wo_a']}, wo_b {result['wo_b']}"
    lines = [
        f"weights  {result['weights']}; layer {result['layer']}, TP rank {result['tp_rank']} of {result['tp_size']}",
        f"         {shapes}, scale blocks {' and '.join(result['weight_blocks'])}",
        f"input    attention output {result['attn']}: {result['input']}",
        f"device   {result['device']} ({result['device_reason']})",
        "",
        format_table(
            ("path", "kernel", "time"),
            [(row["path"], row["kernel"], f"{row['seconds'] * 1e3:.3f} ms") for row in result["paths"]],
        ),
        f"  o_proj chooses {result['chosen']['path']}: {result['chosen']['reason']}",
        "",
        "Bytes identical, fused against unfused:",
        format_table(
            ("what", "same", "bytes"),
            [
                ("z data, e4m3", yes(identical["z_data"]), result["z_bytes"][0]),
                ("z scales, F8_128x4", yes(identical["z_scale"]), result["z_bytes"][1]),
                ("scale padding is 0x00", yes(identical["z_scale_padding_zero"]), ""),
                ("y, BF16", yes(identical["y"]), result["attn"][0] * result["wo_b"][0] * 2),
            ],
        ),
        "",
        "Relative error of each stage against float64 arithmetic on its inputs (Frobenius norm):",
        format_table(
            ("of", "error", "limit", "contains"),
            [
                (name, f"{errors[name]:.2e}", f"{LIMITS[name]:.2e}" if name in LIMITS else "", contents)
                for name, contents in CONTENTS.items()
            ],
        ),
        "",
        "OK" if result["ok"] else "MISMATCH: a line above says NO or exceeds its limit",
    ]
    return "\n".join(lines)
