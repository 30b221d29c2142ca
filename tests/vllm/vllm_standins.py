"""What makes vLLM believe in a GPU on a machine without one, so that its own classes can be built, loaded and called.

Real stay: VllmConfig, the quantisation configuration, linear layers, weight loaders, kernel selection, post-load steps and
`_o_proj`. Replaced is what links against the GPU driver: vLLM's compiled extensions (empty modules), the platform (a
subclass of vLLM's CUDA platform that reports the wanted capability), torch.cuda.Event, the two GEMM libraries (float
references below) and Triton's GPU backend (its interpreter).

Importing this module changes nothing; `install` does, for good. It must run before anything imports a vLLM module that
looks at the platform; one capability a process.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from importlib.machinery import ModuleSpec

import numpy as np
import torch

# Set before vLLM is imported: an empty device list makes vLLM keep Triton although no driver is active.
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}

EXTENSIONS = (
    "_C_stable_libtorch",
    "_moe_C_stable_libtorch",
    "_C",
    "_moe_C",
    "_qutlass_C",
    "_flashmla_C",
    "_flashmla_extension_C",
    "vllm_flash_attn._vllm_fa2_C",
    "vllm_flash_attn._vllm_fa3_C",
)

# ("fp8_einsum" or "mm_mxfp8", its tensors by name), in call order; cleared by the tests.
CALLS: list[tuple[str, dict[str, torch.Tensor]]] = []

_CAPABILITY: tuple[int, int] = (0, 0)
_LIBRARIES = []  # torch.library objects deregister their ops when they are collected


# ---- float references of the GPU libraries -------------------------------------------------------------------------


def dequantize(data: torch.Tensor, scale_bytes: torch.Tensor) -> torch.Tensor:
    """e4m3 [.., K] times one scale byte per 32 columns [.., K/32]: float32."""
    factors = torch.exp2(scale_bytes.float() - 127)
    return (data.float().unflatten(-1, (-1, 32)) * factors[..., None]).flatten(-2)


def packed_to_bytes(scale: torch.Tensor) -> torch.Tensor:
    """int32 words [.., K/128], lowest byte = lowest block of 32 -> bytes [.., K/32]."""
    return scale.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def unswizzle(flat: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """F8_128x4 bytes -> [rows, blocks]."""
    row_tiles, col_tiles = -(-rows // 128), -(-blocks // 4)
    tiles = flat.view(torch.uint8).view(row_tiles, col_tiles, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(row_tiles * 128, col_tiles * 4)[:rows, :blocks]


def quantize(x: torch.Tensor, swizzled: bool = False, alignment: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's PyTorch version of the MXFP8 quantiser, which itself fails on zero rows."""
    from vllm.model_executor.layers.quantization.utils.mxfp8_utils import _mxfp8_e4m3_quantize_torch

    if x.shape[0]:
        return _mxfp8_e4m3_quantize_torch(x, swizzled)
    shape = (0,) if swizzled else (0, x.shape[1] // 32)
    return x.to(torch.float8_e4m3fn), torch.empty(shape, dtype=torch.uint8)


def fp8_einsum(expr, a, b, d, c=None, recipe=None, epilogue=None, use_128x4_sfd_layout=False):
    """deep_gemm.fp8_einsum("bhr,hdr->bhd") with the recipes of V4.1 on Blackwell (1, 1, 32) and V4 on Hopper (1, 128, 128);
    for the first optionally with the FP8 output pair of vLLM 0.33."""
    assert expr == "bhr,hdr->bhd"
    assert c is None
    out, out_scale = d if isinstance(d, tuple) else (d, None)
    CALLS.append(("fp8_einsum", {"a": a[0], "sfa": a[1], "b": b[0], "sfb": b[1], "d": out}))
    if recipe == (1, 128, 128):
        x = a[0].float() * a[1].repeat_interleave(128, -1)
        w = b[0].float() * b[1].float().repeat_interleave(128, -2).repeat_interleave(128, -1)
    else:
        assert recipe == (1, 1, 32)
        x = dequantize(a[0], packed_to_bytes(a[1]))
        w = dequantize(b[0], packed_to_bytes(b[1]))
    z = torch.einsum("bhr,hdr->bhd", x, w).to(torch.bfloat16)
    if out_scale is None:
        out.copy_(z)
        return
    assert use_128x4_sfd_layout
    assert out_scale.dtype == torch.int32
    assert out_scale.is_contiguous()
    out_scale.fill_(-1)  # the real epilogue leaves the scale rows past the last token unwritten
    data, flat = quantize(z.flatten(1), swizzled=True)
    out.copy_(data.view_as(out))
    rows = torch.arange(out_scale.shape[0] * 128).view(-1, 4, 32).transpose(1, 2)  # the token of each word
    live = (rows < z.shape[0])[:, None].expand(-1, out_scale.shape[1], -1, -1).reshape(out_scale.shape)
    out_scale[live] = flat.view(torch.int32).view_as(out_scale)[live]


def transform_sf_into_required_layout(sf, mn, k, recipe=None, num_groups=None, is_sfa=None, **_):
    """What DeepGEMM makes of weight scales: on Hopper float32 blocks as they are; on Blackwell packed int32 words
    [G, mn, k/g/4], MN-major, for g = 32 or 128 columns a scale."""
    assert not is_sfa
    if _CAPABILITY[0] == 9:
        return sf.contiguous()
    rows, cols = recipe[-2], recipe[-1]
    assert mn % 4 == 0
    scale_bytes = (sf.contiguous().view(torch.int32) >> 23).to(torch.uint8).repeat_interleave(rows, dim=-2)
    words = scale_bytes.contiguous().view(torch.int32)
    assert words.shape[-1] == k // cols // 4
    if num_groups is None or words.dim() == 2:
        return torch.empty(words.shape[-1], mn, dtype=torch.int32).t().copy_(words)
    return torch.empty(num_groups, words.shape[-1], mn, dtype=torch.int32).transpose(1, 2).copy_(words)


def mm_mxfp8(A, B, A_scale, B_scale, out_dtype, backend="cutlass", use_8x4_sf_layout=False):
    """FlashInfer's mm_mxfp8: A [M, K], B [K, N], both scales F8_128x4."""
    CALLS.append(("mm_mxfp8", {"a": A, "b": B, "sfa": A_scale, "sfb": B_scale}))
    (m, k), n = A.shape, B.shape[1]
    x = dequantize(A, unswizzle(A_scale, m, k // 32))
    w = dequantize(B.t(), unswizzle(B_scale, n, k // 32))
    return (x @ w.t()).to(out_dtype)


# ---- the stand-ins -------------------------------------------------------------------------------------------------


def _stub_module(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    sys.modules[name] = module
    return module


def define_op(namespace: str, schema: str, function=None) -> None:
    library = torch.library.Library(namespace, "FRAGMENT")
    _LIBRARIES.append(library)
    library.define(schema)
    if function is not None:
        library.impl(schema.split("(")[0], function, "CompositeExplicitAutograd")


def install(capability: tuple[int, int]) -> None:
    """Call once, before any vLLM module reads `current_platform`."""
    global _CAPABILITY
    _CAPABILITY = capability
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import vllm

    for name in EXTENSIONS:
        _stub_module("vllm." + name)
    define_op("_C", "cutlass_scaled_mm_supports_fp8(int cc) -> bool", lambda cc: True)
    define_op("_C", "cutlass_scaled_mm_supports_block_fp8(int cc) -> bool", lambda cc: True)
    define_op("_flashmla_C", "fused_norm_rope_attn_rope_cast_decode() -> ()")  # only their presence is tested
    define_op("_flashmla_C", "permute_q_b_proj() -> ()")
    torch.cuda.Event = type("Event", (), {"__init__": lambda self, *args, **kwargs: None})

    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class StandInPlatform(NonNvmlCudaPlatform):
        get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(*capability))
        get_device_name = classmethod(lambda cls, device_id=0: "stand-in GPU")
        get_device_total_memory = classmethod(lambda cls, device_id=0: 140 << 30)
        num_compute_units = classmethod(lambda cls, device_id=0: 132)
        is_pin_memory_available = classmethod(lambda cls: False)

    vllm.platforms._current_platform = StandInPlatform()

    # vLLM prefers an installed `deep_gemm` package to its vendored copy, so this module is what it uses
    deep_gemm = _stub_module("deep_gemm")
    deep_gemm.fp8_einsum = fp8_einsum
    deep_gemm.fp8_gemm_nt = None
    deep_gemm.transform_sf_into_required_layout = transform_sf_into_required_layout

    import vllm.model_executor.kernels.linear.mxfp8.flashinfer as mxfp8_kernels
    import vllm.utils.flashinfer as flashinfer_utils

    mxfp8_kernels.has_flashinfer = mxfp8_kernels.has_flashinfer_cutedsl = lambda: True
    flashinfer_utils.mm_mxfp8 = mm_mxfp8
    flashinfer_utils.has_flashinfer_sparse_mla_sm120_config = lambda *args, **kwargs: True

    import vllm.models.deepseek_v41.nvidia.flashinfer_sparse as flashinfer_sparse
    import vllm.models.deepseek_v41.nvidia.flashmla as flashmla

    for module in (flashmla, flashinfer_sparse):  # would import the CuTe-DSL kernel; registers a JIT warm-up only
        if hasattr(module, "register_dsv41_o_proj_warmup"):
            module.register_dsv41_o_proj_warmup = lambda layer: None

    # CPU implementations of two vLLM ops: its Triton kernel for inverse RoPE + quantisation, on Triton's interpreter,
    # and its activation quantiser.
    kernel = "vllm.models.deepseek_v4.common.ops.fused_inv_rope_fp8_quant"
    importlib.import_module(kernel)  # the package exports a function of the same name
    library = torch.library.Library("vllm", "FRAGMENT")
    _LIBRARIES.append(library)
    library.impl("fused_inv_rope_fp8_quant_kernel", sys.modules[kernel]._fused_inv_rope_fp8_quant_kernel_impl, "CPU")
    library.impl("mxfp8_quantize", quantize, "CPU")
    _fix_triton_interpreter_casts()


def _fix_triton_interpreter_casts() -> None:
    """Triton's interpreter rounds ties away from zero and loses the carry into the exponent when it narrows float32 to
    e4m3 or BF16 (-125.5 becomes -64, not -128). PyTorch's conversions round to nearest even."""
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    targets = {
        tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8, np.uint8),
        tl.bfloat16: (torch.bfloat16, torch.int16, np.uint16),
    }
    original = interpreter._convert_float

    def convert(values, source, target, rounding):
        if source != tl.float32 or target not in targets:
            return original(values, source, target, rounding)
        dtype, bits, np_bits = targets[target]
        floats = torch.from_numpy(np.ascontiguousarray(values).view(np.float32).copy())
        return floats.to(dtype).view(bits).numpy().view(np_bits).reshape(values.shape)

    interpreter._convert_float = convert
