"""Public kernels a user could pick instead, where they can be imported.

torch (cuBLAS BF16, cuBLASLt FP8) is always there. DeepGEMM (`deep_gemm`), Humming (`humming`), FlashInfer's block-scaled
SM90 GEMM and vLLM's CUDA ops are looked for as installed packages and in the folder PEERS names (see benchmarks/README.md
for its layout). SGLang's fork of DeepGEMM (PEERS/sgl), the one with scales per 32 on both sides, has the same module name:
a run takes one of the two (`use_deep_gemm`). Every contender gets the same weights (workload.Weights) and is checked
against float64 before it is timed; one that cannot be loaded or gives a wrong result is reported, not silently left out.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import torch

from vllm_megaattn.bench.timing import Contender
from vllm_megaattn.bench.workload import E4M3, HEAD_DIM, Workload, relative_error

BF16 = torch.bfloat16
# Identifies e4m3 among the scalar types of vLLM's Marlin kernels.
MARLIN_E4M3 = 2814749767172868
# A result further from float64 than this is wrong, not rounded: two FP8 activation quantisations give 3.8e-2.
WRONG = 0.08

Maker = Callable[[Workload], Callable[[int], torch.Tensor]]


def contenders(work: Workload, op: str, report: Callable[[str], None]) -> list[Contender]:
    """Every peer of one operation that loads and computes the right thing."""
    exact = {
        "chain": lambda: work.exact_z @ work.wo_b.exact[0].t(),
        "o_proj": lambda: work.exact_z @ work.wo_b.exact[0].t(),
        "wo_a": lambda: work.exact_z,
        "wo_b": lambda: work.exact_z.to(BF16).double() @ work.wo_b.exact[0].t(),
    }.get(op)
    found = []
    for name, maker in _PEERS.get(op, {}).items():
        try:
            contender = Contender(name, maker(work))
            result = contender.run(0)
            torch.cuda.synchronize()
        except Exception as error:  # a peer may fail in any way; the run must go on
            report(f"{op}: {name} left out: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
            continue
        if exact is not None:
            contender.error = relative_error(result.reshape(work.tokens, -1), exact())
            if not contender.error < WRONG:
                report(f"{op}: {name} left out: relative error {contender.error:.1e} against float64")
                continue
        found.append(contender)
    return found


# ---- loading -------------------------------------------------------------------------------------------------------


def _folder() -> Path | None:
    return Path(os.environ["PEERS"]) if os.environ.get("PEERS") else None


def _import_from(sub: str, name: str) -> types.ModuleType:
    """An installed package, or the one under PEERS/sub."""
    folder = _folder()
    if folder and (folder / sub).is_dir() and str(folder / sub) not in sys.path:
        sys.path.insert(0, str(folder / sub))
    return importlib.import_module(name)


DEEP_GEMMS = {"vllm": "pk", "sglang": "sgl"}  # whose DeepGEMM, and its folder under PEERS
_deep_gemm_of = "vllm"


def use_deep_gemm(whose: str) -> None:
    """Chooses which of the two packages named `deep_gemm` this process loads; before the first contender is made."""
    global _deep_gemm_of
    if "deep_gemm" in sys.modules and whose != _deep_gemm_of:
        raise RuntimeError(f"deep_gemm of {_deep_gemm_of} is loaded already")
    _deep_gemm_of = whose


def _deep_gemm_from(whose: str) -> types.ModuleType:
    if whose != _deep_gemm_of:
        raise ImportError(f"this run takes the deep_gemm of {_deep_gemm_of} (--deep-gemm)")
    return _import_from(DEEP_GEMMS[whose], "deep_gemm")


def _deep_gemm() -> types.ModuleType:
    return _deep_gemm_from("vllm")


@cache
def _humming() -> types.ModuleType:
    _import_from("hm", "humming")
    importlib.import_module("humming.layer")
    importlib.import_module("humming.forward")
    return sys.modules["humming"]


@cache
def _vllm_ops():
    """torch.ops._C of vLLM: Marlin, CUTLASS FP8, group quantiser."""
    folder = _folder()
    if folder and (folder / "_C_stable_libtorch.abi3.so").exists():
        torch.ops.load_library(str(folder / "_C_stable_libtorch.abi3.so"))
    else:
        importlib.import_module("vllm._custom_ops")
    return torch.ops._C


@cache
def _flashinfer_gemm():
    """FlashInfer's fp8_blockscale_gemm_sm90 module: configure(workspace), run(x, w, out, x_scale, w_scale)."""
    folder = _folder()
    if folder is None:
        raise ImportError("PEERS names no folder with fi/fp8_blockscale_gemm_90.so")
    os.environ.setdefault("TVM_FFI_DISABLE_TORCH_C_DLPACK", "1")
    tvm_ffi = _import_from("tvm", "tvm_ffi")
    ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)  # the module calls the driver without naming it
    module = tvm_ffi.load_module(str(folder / "fi/fp8_blockscale_gemm_90.so"))
    module["set_deepgemm_jit_include_dirs"]([str(folder / "fi/tensorrt_llm")])
    return module["init"]()


@cache
def _inv_rope_kernel():
    """The Triton kernel of vLLM's fused_inv_rope_fp8_quant.py, loaded without the engine around it."""
    folder = _folder()
    path = folder / "src/fused_inv_rope_fp8_quant.py" if folder else None
    if path is None or not path.exists():
        raise ImportError("PEERS names no folder with src/fused_inv_rope_fp8_quant.py")
    import triton
    import triton.language as tl

    class Anything:
        def __class_getitem__(cls, _):
            return cls

        def __init__(self, *args, **kwargs) -> None:
            pass

    parts = {
        "vllm": {},
        "vllm.model_executor": {},
        "vllm.model_executor.warmup": {},
        "vllm.model_executor.warmup.jit_warmup": {"kernel_launcher": lambda f: f},
        "vllm.model_executor.warmup.jit_warmup_triton_helper": dict.fromkeys(
            ("LaunchSpec", "TritonWarmupTensor", "VllmTritonJitKernel"), Anything
        ),
        "vllm.platforms": {"current_platform": Anything()},
        "vllm.triton_utils": {"tl": tl, "triton": triton},
        "vllm.utils": {},
        "vllm.utils.torch_utils": {"direct_register_custom_op": lambda **_: None},
    }
    for name, attributes in parts.items():
        if name not in sys.modules:
            module = types.ModuleType(name)
            module.__path__ = []
            module.__dict__.update(attributes)
            sys.modules[name] = module
    spec = importlib.util.spec_from_file_location("peer_inv_rope", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["peer_inv_rope"] = module
    spec.loader.exec_module(module)
    return module.FusedInvRopeFP8QuantKernel.kernel


# ---- pieces --------------------------------------------------------------------------------------------------------


def _pitch(tokens: int) -> int:
    return (tokens + 3) // 4 * 4


def _quantize_128(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[.., K] -> e4m3 and power-of-two float32 scales [.., K/128]."""
    blocks = x.float().unflatten(-1, (-1, 128))
    scale = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax(-1).clamp_min(1e-10) / 448)))
    return (blocks / scale[..., None]).clamp(-448, 448).to(E4M3).flatten(-2), scale


def _quantize_32(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[.., K] -> e4m3 and power-of-two float32 scales [.., K/32]."""
    blocks = x.float().unflatten(-1, (-1, 32))
    scale = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax(-1).clamp_min(1e-10) / 448)))
    return (blocks / scale[..., None]).clamp(-448, 448).to(E4M3).flatten(-2), scale


def _mn_major(scale: torch.Tensor) -> torch.Tensor:
    """[T, n] with stride 1 over tokens and a pitch that is a multiple of 4, as TMA reads it."""
    tokens, columns = scale.shape
    storage = torch.zeros(columns, _pitch(tokens), device=scale.device)
    storage[:, :tokens] = scale.t()
    return storage[:, :tokens].t()


def _vllm_inv_rope(work: Workload, mode: str) -> tuple[Callable[[], None], torch.Tensor, torch.Tensor]:
    """A thunk that runs vLLM's kernel, and its outputs [G, T, K] and [G, T, K/128]. mode: "bf16" or "q128"."""
    kernel = _inv_rope_kernel()
    tokens, groups, k = work.tokens, work.groups, work.k_a
    quantize = mode == "q128"
    pitch = _pitch(tokens)
    data = torch.empty(groups, tokens, k, device=work.device, dtype=E4M3 if quantize else BF16)
    blocks = k // 128
    scale = torch.empty(groups * blocks * pitch, device=work.device).as_strided(
        (groups, tokens, blocks), (blocks * pitch, 1, pitch)
    )

    def run() -> None:
        kernel[(pitch if quantize else tokens, work.heads)](
            work.attn, work.positions, work.cos_sin, data, scale, tokens,
            heads_per_group=work.heads // groups, o_stride_token=work.attn.stride(0), o_stride_head=work.attn.stride(1),
            cache_stride_pos=work.cos_sin.stride(0), out_stride_group=data.stride(0), out_stride_token=data.stride(1),
            scale_stride_group=scale.stride(0) if quantize else 0, scale_stride_k=scale.stride(2) if quantize else 0,
            fp8_max=448.0, eps=1e-10, QUANT_GROUP_SIZE=128, CHUNKS_PER_HEAD=HEAD_DIM // 128, NOPE_DIM=448, HALF_ROPE=32,
            QUANTIZE=quantize, TMA_ALIGNED_SCALES=False, launch_pdl=True, num_stages=1, num_warps=1,
        )  # fmt: skip

    return run, data, scale


def _rotated(work: Workload) -> torch.Tensor:
    """BF16 [G, T, K], group-major as vLLM's inverse RoPE writes it."""
    return work.rotated_bf16.transpose(0, 1).contiguous()


def _marlin_weights(work: Workload) -> list[tuple[torch.Tensor, torch.Tensor]]:
    op, (_, rows, k) = _vllm_ops(), work.wo_b.shape
    packed = op.gptq_marlin_repack(work.wo_b.q[0].view(torch.int32).t().contiguous(), k, rows, 8, False)
    order = torch.tensor([i + 8 * j for i in range(8) for j in range(8)], device=work.device)
    order = order.view(-1, 4)[:, [0, 2, 1, 3]].reshape(-1)
    per_row = work.wo_b.bytes32[0].repeat_interleave(32, 0)
    scale = per_row.t().contiguous().reshape(-1, 64)[:, order].reshape(k // 32, rows).contiguous()
    scale = scale.view(torch.float8_e8m0fnu)
    return [(packed.clone(), scale.clone()) for _ in range(work.copies)]


def _marlin_run(work: Workload):
    op, weights = _vllm_ops(), _marlin_weights(work)
    sms = torch.cuda.get_device_properties(work.device).multi_processor_count
    locks = torch.zeros(sms * 4, device=work.device, dtype=torch.int32)

    def run(z: torch.Tensor, i: int) -> torch.Tensor:
        w, s = weights[i]
        return op.marlin_gemm(
            z, None, w, None, s, None, None, None, locks, MARLIN_E4M3, z.shape[0], work.model.hidden, z.shape[1],
            False, True, False,
        )  # fmt: skip

    return run


_HUMMING_CONFIG = '{"use_batch_invariant": false, "use_f16_accum": false, "gemm_type": "%s"}'


def _humming_layers(work: Workload, activations: str) -> list:
    """wo_b as Humming layers: "a16" (BF16 activations) or "g32" (e4m3 activations, a scale per 32 on both sides)."""
    _humming()
    from humming.layer import HummingLayer

    _, rows, k = work.wo_b.shape
    weight_config = {"dtype": "float8e4m3", "scale_dtype": "float8e8m0", "group_size": 32, "scale_type": "group"}
    input_config = {"a16": None, "g32": {"dtype": "float8e4m3", "group_size": 32}}[activations]
    per_row = work.wo_b.bytes32[0].repeat_interleave(32, 0).view(torch.float8_e8m0fnu)
    layers = []
    for _ in range(work.copies):
        layer = HummingLayer(
            shape_n=rows, shape_k=k, weight_config=weight_config, input_config=input_config, torch_dtype=BF16
        ).to(work.device)
        layer.load_from_tensors({"weight": work.wo_b.q[0].contiguous().view(torch.int32), "weight_scale": per_row})
        layer.transform()
        layers.append(layer)
    return layers


# ---- wo_a ----------------------------------------------------------------------------------------------------------


def _torch_bmm(work: Workload):
    x, out = _rotated(work), torch.empty(work.tokens, work.groups, work.model.rank, device=work.device, dtype=BF16)
    weights = work.wo_a.bf16

    def run(i: int) -> torch.Tensor:
        torch.bmm(x, weights[i].transpose(1, 2), out=out.transpose(0, 1))
        return out

    return run


def _deep_gemm_einsum(work: Workload):
    deep_gemm = _deep_gemm()
    q, scale = _quantize_128(_rotated(work))
    pitch, blocks = _pitch(work.tokens), work.k_a // 128
    storage = torch.zeros(work.groups * blocks * pitch, device=work.device)
    strided = storage.as_strided((work.groups, work.tokens, blocks), (blocks * pitch, 1, pitch))
    strided.copy_(scale)
    x, x_scale = q.transpose(0, 1), strided.transpose(0, 1)
    out = torch.empty(work.tokens, work.groups, work.model.rank, device=work.device, dtype=BF16)
    weights, w_scale = work.wo_a.data, work.wo_a.float128

    def run(i: int) -> torch.Tensor:
        deep_gemm.fp8_einsum("bhr,hdr->bhd", (x, x_scale), (weights[i], w_scale), out, recipe=(1, 128, 128))
        return out

    return run


def _sglang_deep_gemm_groups(work: Workload):
    """A product a group: the fork's einsum takes no scales per 32 on SM90."""
    deep_gemm = _deep_gemm_from("sglang")
    q, scale = _quantize_32(_rotated(work))
    scales = [_mn_major(scale[g]) for g in range(work.groups)]
    out = torch.empty(work.groups, work.tokens, work.model.rank, device=work.device, dtype=BF16)
    weights, w_scale = work.wo_a.data, torch.exp2(work.wo_a.bytes32.float() - 127)

    def run(i: int) -> torch.Tensor:
        for g in range(work.groups):
            deep_gemm.fp8_gemm_nt((q[g], scales[g]), (weights[i][g], w_scale[g]), out[g], recipe=(1, 32, 32))
        return out.transpose(0, 1)

    return run


# ---- wo_b ----------------------------------------------------------------------------------------------------------


def _cublaslt_block(work: Workload):
    q, scale = _quantize_128(work.exact_z.to(BF16))
    scale, w_scale = scale.t().contiguous().t(), work.wo_b.float128[0].contiguous().t()
    weights = work.wo_b.data
    return lambda i: torch._scaled_mm(q, weights[i][0].t(), scale_a=scale, scale_b=w_scale, out_dtype=BF16)


def _deep_gemm_nt(work: Workload):
    deep_gemm = _deep_gemm()
    q, scale = _quantize_128(work.exact_z.to(BF16))
    scale = _mn_major(scale)
    out = torch.empty(work.tokens, work.model.hidden, device=work.device, dtype=BF16)
    weights, w_scale = work.wo_b.data, work.wo_b.float128[0]

    def run(i: int) -> torch.Tensor:
        deep_gemm.fp8_gemm_nt((q, scale), (weights[i][0], w_scale), out)
        return out

    return run


def _sglang_deep_gemm_nt(work: Workload):
    deep_gemm = _deep_gemm_from("sglang")
    q, scale = _quantize_32(work.exact_z.to(BF16))
    scale = _mn_major(scale)
    out = torch.empty(work.tokens, work.model.hidden, device=work.device, dtype=BF16)
    weights, w_scale = work.wo_b.data, torch.exp2(work.wo_b.bytes32[0].float() - 127)

    def run(i: int) -> torch.Tensor:
        deep_gemm.fp8_gemm_nt((q, scale), (weights[i][0], w_scale), out, recipe=(1, 32, 32))
        return out

    return run


def _cutlass(work: Workload):
    op = _vllm_ops()
    q, scale = _quantize_128(work.exact_z.to(BF16))
    scale, w_scale = scale.t().contiguous().t(), work.wo_b.float128[0].t()
    out = torch.empty(work.tokens, work.model.hidden, device=work.device, dtype=BF16)
    weights = work.wo_b.data

    def run(i: int) -> torch.Tensor:
        op.cutlass_scaled_mm(out, q, weights[i][0].t(), scale, w_scale, None)
        return out

    return run


def _humming_g32(work: Workload):
    layers, z, config = _humming_layers(work, "g32"), work.exact_z.to(BF16), _HUMMING_CONFIG % "dense"
    from humming.forward import may_process_input

    q, group_scale, token_scale = may_process_input(layers[0].humming_config, inputs=z)
    scale = group_scale if group_scale is not None else token_scale
    return lambda i: layers[i](q, input_scale=scale, compute_config=config)


# ---- wo_b on BF16 z, alone or as the end of a chain ------------------------------------------------------------------

Second = Callable[[Workload], Callable[[torch.Tensor, int], torch.Tensor]]


def _alone(second: Second) -> Maker:
    def make(work: Workload):
        run, z = second(work), work.exact_z.to(BF16)
        return lambda i: run(z, i)

    return make


# ---- inverse RoPE and the whole chain --------------------------------------------------------------------------------


def _vllm_rope_quantize(work: Workload):
    run, data, _ = _vllm_inv_rope(work, "q128")

    def call(_: int) -> torch.Tensor:
        run()
        return data

    return call


def _chain_bf16(second: Second) -> Maker:
    """vLLM's chain on Hopper: inverse RoPE in BF16, BF16 bmm, then `second` on BF16 z."""

    def make(work: Workload):
        rope, x, _ = _vllm_inv_rope(work, "bf16")
        z = torch.empty(work.tokens, work.groups, work.model.rank, device=work.device, dtype=BF16)
        weights, finish = work.wo_a.bf16, second(work)

        def run(i: int) -> torch.Tensor:
            rope()
            torch.bmm(x, weights[i].transpose(1, 2), out=z.transpose(0, 1))
            return finish(z.view(work.tokens, work.k_b), i)

        return run

    return make


def _chain_deep_gemm(second: Second) -> Maker:
    """Inverse RoPE + 1x128 quantisation, DeepGEMM's FP8 einsum, then `second` on BF16 z."""

    def make(work: Workload):
        rope, data, scale = _vllm_inv_rope(work, "q128")
        x, x_scale = data.transpose(0, 1), scale.transpose(0, 1)
        z = torch.empty(work.tokens, work.groups, work.model.rank, device=work.device, dtype=BF16)
        deep_gemm, weights, w_scale, finish = _deep_gemm(), work.wo_a.data, work.wo_a.float128, second(work)

        def run(i: int) -> torch.Tensor:
            rope()
            deep_gemm.fp8_einsum("bhr,hdr->bhd", (x, x_scale), (weights[i], w_scale), z, recipe=(1, 128, 128))
            return finish(z.view(work.tokens, work.k_b), i)

        return run

    return make


def _o_proj_deep_gemm(second: Second) -> Maker:
    """The same from an activation that is quantised already: DeepGEMM's FP8 einsum, then `second` on BF16 z."""

    def make(work: Workload):
        einsum, finish = _deep_gemm_einsum(work), second(work)
        return lambda i: finish(einsum(i).view(work.tokens, work.k_b), i)

    return make


def _o_proj_bf16(second: Second) -> Maker:
    """From a BF16 activation that is rotated already: BF16 bmm, then `second` on BF16 z."""

    def make(work: Workload):
        bmm, finish = _torch_bmm(work), second(work)
        return lambda i: finish(bmm(i).view(work.tokens, work.k_b), i)

    return make


def _quantize_of_vllm(work: Workload):
    quantize, z = _vllm_quantize(work), work.exact_z.to(BF16)
    return lambda _: quantize(z)[0]


def _then_mm(work: Workload):
    weights = work.wo_b.bf16
    return lambda z, i: torch.mm(z, weights[i][0].t())


def _then_humming(work: Workload):
    layers, config = _humming_layers(work, "a16"), _HUMMING_CONFIG % "dense"
    return lambda z, i: layers[i](z, compute_config=config)


def _vllm_quantize(work: Workload):
    """vLLM's 1x128 quantiser of z, scales with stride 1 over tokens."""
    op = _vllm_ops()
    q = torch.empty(work.tokens, work.k_b, device=work.device, dtype=E4M3)
    scale = torch.empty_strided((work.tokens, work.k_b // 128), (1, _pitch(work.tokens)), device=work.device)

    def run(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        op.per_token_group_fp8_quant(z, q, scale, 128, 1e-10, -448.0, 448.0, True, True, True)
        return q, scale

    return run


def _then_quantize_deep_gemm(work: Workload):
    deep_gemm, quantize = _deep_gemm(), _vllm_quantize(work)
    out = torch.empty(work.tokens, work.model.hidden, device=work.device, dtype=BF16)
    weights, w_scale = work.wo_b.data, work.wo_b.float128[0]

    def run(z: torch.Tensor, i: int) -> torch.Tensor:
        deep_gemm.fp8_gemm_nt(quantize(z), (weights[i][0], w_scale), out)
        return out

    return run


def _then_quantize_cublaslt(work: Workload):
    if work.tokens % 4:
        raise ValueError("needs a multiple of 4 tokens")
    quantize, weights, w_scale = _vllm_quantize(work), work.wo_b.data, work.wo_b.float128[0].contiguous().t()

    def run(z: torch.Tensor, i: int) -> torch.Tensor:
        q, scale = quantize(z)
        return torch._scaled_mm(q, weights[i][0].t(), scale_a=scale, scale_b=w_scale, out_dtype=BF16)

    return run


def _then_flashinfer(work: Workload):
    """Quantises its BF16 input inside the call."""
    module = _flashinfer_gemm()
    out = torch.empty(work.tokens, work.model.hidden, device=work.device, dtype=BF16)
    weights, w_scale = work.wo_b.data, work.wo_b.float128[0]
    workspace = torch.empty(1 << 28, device=work.device, dtype=torch.uint8)

    def run(z: torch.Tensor, i: int) -> torch.Tensor:
        if module["get_workspace_size"](z.shape[0], *weights[i][0].shape) > workspace.numel():
            raise ValueError("FlashInfer wants a larger workspace")
        module["configure_workspace"](workspace)
        module["run_gemm"](z, weights[i][0], out, None, w_scale)
        return out

    return run


_PEERS: dict[str, dict[str, Maker]] = {
    "wo_a": {
        "torch BF16 bmm": _torch_bmm,
        "DeepGEMM 1x128": _deep_gemm_einsum,
        "SGLang DeepGEMM 1x32": _sglang_deep_gemm_groups,
    },
    "wo_b": {
        "torch BF16 mm": _alone(_then_mm),
        "cuBLASLt 1x128": _cublaslt_block,
        "DeepGEMM 1x128": _deep_gemm_nt,
        "SGLang DeepGEMM 1x32": _sglang_deep_gemm_nt,
        "CUTLASS 1x128 (vLLM)": _cutlass,
        "FlashInfer 1x128": _alone(_then_flashinfer),
        "Marlin W8A16 (vLLM)": _alone(_marlin_run),
        "Humming W8A16": _alone(_then_humming),
        "Humming per-32": _humming_g32,
    },
    "inv_rope": {"vLLM inverse RoPE + 1x128": _vllm_rope_quantize},
    "quantize": {"vLLM quantise 1x128": _quantize_of_vllm},
    "o_proj": {
        "BF16 bmm + mm": _o_proj_bf16(_then_mm),
        "BF16 bmm + Humming": _o_proj_bf16(_then_humming),
        "DeepGEMM + quantise + DeepGEMM": _o_proj_deep_gemm(_then_quantize_deep_gemm),
        "DeepGEMM + quantise + cuBLASLt": _o_proj_deep_gemm(_then_quantize_cublaslt),
        "DeepGEMM + FlashInfer": _o_proj_deep_gemm(_then_flashinfer),
    },
    "chain": {
        "vLLM 0.33: bmm + Humming": _chain_bf16(_then_humming),
        "vLLM 0.31: bmm + Marlin": _chain_bf16(_marlin_run),
        "BF16 bmm + mm": _chain_bf16(_then_mm),
        "DeepGEMM + quantise + DeepGEMM": _chain_deep_gemm(_then_quantize_deep_gemm),
        "DeepGEMM + quantise + cuBLASLt": _chain_deep_gemm(_then_quantize_cublaslt),
        "DeepGEMM + FlashInfer": _chain_deep_gemm(_then_flashinfer),
        "DeepGEMM + Humming": _chain_deep_gemm(_then_humming),
    },
}


def names(op: str) -> Iterator[str]:
    yield from _PEERS.get(op, {})
