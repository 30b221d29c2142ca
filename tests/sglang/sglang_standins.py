"""What makes SGLang believe in a GPU on a machine without one, so that its own classes can be built, loaded and
called.

Real stay: the model class, its loader, linear layers, quantisation methods, weight loaders, backend selection,
post-load steps, `MQALayer.forward` and the plugin framework. Replaced is what links against the GPU driver:
torch.cuda's questions, the kernel packages (empty modules), and the kernels themselves (float references below), as
well as the attention in front.

Importing this module changes nothing; `install` does, for good. It must run before anything imports SGLang; one
capability a process.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch

# Set before SGLang is imported: Triton keeps its interpreter although no driver is active.
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}

# Packages that are not installed and whose kernels nothing here runs. `cuda` is left out: tvm_ffi breaks on a
# stand-in.
PACKAGES = {
    "sgl_kernel", "flashinfer", "deep_gemm", "flash_attn", "pynvml", "cutlass", "tilelang", "sgl_flash_mla",
    "triton_kernels", "deep_ep", "humming", "quack", "torch_memory_saver", "flash_mla",
}  # fmt: skip

# (kernel, its tensors by name) in call order; cleared by the tests.
CALLS: list[tuple[str, dict[str, object]]] = []


def called() -> list[str]:
    return [name for name, _ in CALLS]


def _log(kernel: str, **operands: object) -> None:
    CALLS.append((kernel, operands))


# ---- number formats and layouts, written out once more -------------------------------------------------------------


def quantize(x: torch.Tensor, group: int, power_of_two: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 data and one float32 scale for `group` columns."""
    blocks = x.float().unflatten(-1, (-1, group))
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448.0
    if power_of_two:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    data = (blocks / scale).clamp(-448, 448).flatten(-2).to(torch.float8_e4m3fn)
    return data, scale.squeeze(-1)


def dequantize(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 of e4m3 data with scales as packed int32, float32 per row and columns, or float32 blocks."""
    if scale.dtype == torch.int32:
        code = scale.contiguous().view(torch.uint8).reshape(*scale.shape[:-1], scale.shape[-1] * 4)
        factor = torch.exp2(code.float() - 127)
    else:
        factor = scale.float()
    factor = factor.repeat_interleave(data.shape[-1] // factor.shape[-1], -1)
    if factor.shape[-2] != data.shape[-2]:
        factor = factor.repeat_interleave(data.shape[-2] // factor.shape[-2], -2)
    return data.float() * factor


def exponent_bytes(scale: torch.Tensor) -> torch.Tensor:
    return (scale.contiguous().view(torch.int32) >> 23).to(torch.uint8)


def pack(scale: torch.Tensor) -> torch.Tensor:
    """float32 powers of two [.., M, K/32] -> DeepGEMM's packed int32, stride 1 over M."""
    words = exponent_bytes(scale)
    words = torch.nn.functional.pad(words, (0, -words.shape[-1] % 4)).contiguous().view(torch.int32)
    rows = words.shape[-2]
    out = torch.empty(*words.shape[:-2], words.shape[-1], -(-rows // 4) * 4, dtype=torch.int32)
    out = out.transpose(-1, -2)[..., :rows, :]
    out.copy_(words)
    return out


def swizzle(code: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, blocks] -> flat F8_128x4."""
    rows, cols = code.shape
    padded = torch.zeros(-(-rows // 128) * 128, -(-cols // 4) * 4, dtype=torch.uint8)
    padded[:rows, :cols] = code
    tiles = padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).contiguous().flatten()


def unswizzle(flat: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    row_tiles, col_tiles = -(-rows // 128), -(-cols // 4)
    tiles = flat.flatten().view(row_tiles, col_tiles, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(row_tiles * 128, col_tiles * 4)[:rows, :cols]


def rotate_back(x: torch.Tensor, freqs_cis: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The last 64 columns of a head, [.., heads, 64], rotated back; float32."""
    pairs = torch.view_as_complex(x.float().contiguous().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * freqs_cis[positions][:, None].conj()).flatten(-2)


# ---- float references of the GPU kernels ---------------------------------------------------------------------------


def fp8_einsum(expr, a, b, d, c=None, recipe=None, **_):
    """deep_gemm.fp8_einsum("bhr,hdr->bhd"); d is BF16 or a pair of e4m3 and packed scales."""
    out = d[0] if isinstance(d, tuple) else d
    _log("fp8_einsum", a=a[0], sfa=a[1], b=b[0], sfb=b[1], d=out, recipe=recipe)
    z = torch.einsum("tgk,gnk->tgn", dequantize(*a), dequantize(*b))
    if not isinstance(d, tuple):
        d.copy_(z)
        return
    data, scale = quantize(z.bfloat16().flatten(1), 32)
    d[0].copy_(data.view_as(d[0]))
    d[1].copy_(pack(scale))


def gemm_nt(a, b, d, **_):
    _log("gemm_nt", a=a[0], sfa=a[1], b=b[0], sfb=b[1], d=d)
    d.copy_(dequantize(*a) @ dequantize(*b).t())


class MmMxfp8:
    """flashinfer.mm_mxfp8."""

    def __init__(self, major: int) -> None:
        self.major = major

    def __call__(self, q, weight_t, q_scale, w_scale, out_dtype=None, use_8x4_sf_layout=False, backend=None, **_):
        _log("mm_mxfp8", q=q, weight_t=weight_t, q_scale=q_scale, w_scale=w_scale)
        k, n = weight_t.shape

        def factors(flat, rows):
            return torch.exp2(unswizzle(flat, rows, k // 32).float() - 127).repeat_interleave(32, 1)

        x = q.float() * factors(q_scale, q.shape[0])
        return (x @ (weight_t.t().float() * factors(w_scale, n)).t()).to(out_dtype)

    def is_backend_supported(self, backend, sm=None):
        return backend != "cute-dsl" or self.major == 10


def mxfp8_quantize(x, **_):
    _log("mxfp8_quantize", x=x)
    data, scale = quantize(x, 32)
    return data, swizzle(exponent_bytes(scale))


def group_quantize(x, group_size, eps=1e-10, column_major_scales=False, scale_ue8m0=False, **_):
    _log("group_quantize", x=x, group=group_size)
    data, scale = quantize(x, group_size, scale_ue8m0)
    return data, (pack(scale) if scale_ue8m0 and column_major_scales else scale)


def w8a8_block_matmul(a, b, a_scale, b_scale, block_size, output_dtype=None):
    _log("w8a8_block_matmul", a=a, a_scale=a_scale, b=b, b_scale=b_scale)
    return (dequantize(a, a_scale) @ dequantize(b, b_scale).t()).to(output_dtype)


def rope_inplace(q, k, freqs_cis, positions, inverse=False):
    _log("rope_inplace", q=q)
    assert inverse
    q.copy_(rotate_back(q, freqs_cis, positions))


def fused_rope_wo_a(x, weight, freqs_cis, positions, *, out_mxfp8=True):
    """SGLang's own fused kernel for small batches, on BF16 weights only."""
    _log("fused_rope_wo_a", x=x, weight=weight)
    assert weight.dtype == torch.bfloat16
    assert x.shape[0] <= 32
    heads = x.clone().view(x.shape[0], -1, 512)
    freqs = torch.view_as_complex(freqs_cis.unflatten(-1, (-1, 2)).contiguous())
    heads[..., 448:] = rotate_back(heads[..., 448:], freqs, positions).to(heads.dtype)
    z = torch.einsum("tgk,gnk->tgn", heads.view(x.shape).float(), weight.float()).flatten(1).bfloat16()
    if not out_mxfp8:
        return (z,)
    data, scale = quantize(z, 32)
    return data, swizzle(exponent_bytes(scale))


def wo_a_bf16(x, weight):
    _log("wo_a_bf16", x=x, weight=weight)
    return torch.einsum("tgk,gnk->tgn", x, weight).contiguous()


def wo_a_bf16_mxfp8(x, weight):
    return mxfp8_quantize(wo_a_bf16(x, weight).flatten(1))


class _LoggingTorch:
    """`torch` as SGLang's model module sees it: its plain BF16 products are logged."""

    def __getattr__(self, name: str) -> object:
        function = getattr(torch, name)
        if name not in ("einsum", "bmm"):
            return function

        def logged(*args, **kwargs):
            result = function(*args, **kwargs)
            operands = [arg for arg in args if isinstance(arg, torch.Tensor)]
            _log(name, a=operands[0], b=operands[1], out=kwargs.get("out", result))
            return result

        return logged


# ---- the stand-ins -------------------------------------------------------------------------------------------------


class _Package(types.ModuleType):
    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Packages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in PACKAGES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = _Package(spec.name)
        module.__path__ = []
        module.__version__ = "99.0.0"
        return module

    def exec_module(self, module):
        pass


def install(capability: tuple[int, int]) -> None:
    """The GPU and the packages; call once, before SGLang is imported."""
    major, minor = capability
    os.environ.update(ENVIRONMENT)
    # torchvision's compiled library may be of a CUDA build beside a CPU torch
    sys.modules["torchvision._meta_registrations"] = types.ModuleType("torchvision._meta_registrations")
    torch.version.cuda = "13.0"
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    torch.cuda.set_device = lambda *_: None
    torch.cuda.get_device_capability = lambda *_, **__: capability
    torch.cuda.get_device_name = lambda *_: "stand-in"
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(
        multi_processor_count=132, major=major, minor=minor, total_memory=80 << 30, name="stand-in",
        shared_memory_per_block_optin=232448, warp_size=32,
    )  # fmt: skip
    torch.cuda.is_current_stream_capturing = lambda: False
    for name in ("Stream", "Event"):
        setattr(torch.cuda, name, type(name, (), {"__init__": lambda self, *_, **__: None}))
    sys.meta_path.insert(0, _Packages())

    import deep_gemm
    import deep_gemm.utils.layout as layout
    import flashinfer
    import flashinfer.autotuner as autotuner

    deep_gemm.fp8_einsum = fp8_einsum
    deep_gemm.fp8_gemm_nt = deep_gemm.fp8_fp4_gemm_nt = gemm_nt
    deep_gemm.transform_sf_into_required_layout = lambda sf, mn, k, recipe, num_groups=None, is_sfa=None, **_: pack(
        sf.repeat_interleave(recipe[1], -2)[..., :mn, :]
    )
    layout.get_mn_major_tma_aligned_packed_ue8m0_tensor = pack
    deep_gemm.utils.layout = layout
    flashinfer.block_scale_interleave = swizzle
    flashinfer.mm_mxfp8 = MmMxfp8(major)
    flashinfer.mxfp8_quantize = mxfp8_quantize
    autotuner.autotune = lambda *_, **__: contextlib.nullcontext()

    from sglang.srt.runtime_context import override_platform
    from sglang.srt.utils import common

    getattr(common.is_flashinfer_available, "cache_clear", lambda: None)()
    override_platform(is_cuda=True, has_flashinfer=True).install()


def patch_kernels(major: int) -> types.ModuleType:
    """The kernels behind SGLang's names, once its model is imported. Returns the model's module."""
    import sglang.kernels.ops.gemm.fp8_kernel as fp8_kernel
    import sglang.srt.layers.quantization.fp8_utils as fp8_utils
    import sglang.srt.models.deepseek_v4 as model

    modules = [model, fp8_utils]
    with contextlib.suppress(ImportError):
        modules.append(importlib.import_module("sglang.srt.layers.attention.deepseek_v4_mega_backend"))
    for module in modules:
        if hasattr(module, "sglang_per_token_group_quant_fp8"):
            module.sglang_per_token_group_quant_fp8 = group_quantize

    def quantize_wo_a_input(o):
        data, scale = quantize(o, 128)
        return data, pack(scale.transpose(0, 1)).transpose(0, 1)

    model.sglang_per_token_group_quant_fp8_dsv4_wo_a = quantize_wo_a_input
    model.fused_rope_inplace = rope_inplace
    _put_below(model, "fused_rope_wo_a_bf16", fused_rope_wo_a)
    model.wo_a_bf16_gemv = model.wo_a_bf16_small_batch = wo_a_bf16
    model.wo_a_bf16_small_batch_mxfp8 = wo_a_bf16_mxfp8
    model.torch = _LoggingTorch()
    model.get_rope_wrapper = lambda **_: None  # wants the AMX library; only NPU and HIP read it
    if major >= 10:  # custom ops that are registered for CUDA only
        fp8_utils.flashinfer_mxfp8_quantize, fp8_utils.flashinfer_mm_mxfp8 = mxfp8_quantize, MmMxfp8(major)
    fp8_kernel.deep_gemm_mxfp8_fp8_bf16_nt = lambda a, sfa, b, sfb, d: gemm_nt((a, sfa), (b, sfb), d)
    fp8_utils.w8a8_block_fp8_matmul_triton = fp8_utils.w8a8_block_fp8_matmul_deepgemm = w8a8_block_matmul
    return model


def _put_below(module: types.ModuleType, name: str, kernel: object) -> None:
    """Replace a kernel under whatever hooks are placed on its name already."""
    function = getattr(module, name)
    cells = [cell for cell in (getattr(function, "__closure__", None) or ()) if cell.cell_contents is
             getattr(function, "__wrapped__", None)]  # fmt: skip
    if cells:
        cells[0].cell_contents = kernel
    else:
        setattr(module, name, kernel)
