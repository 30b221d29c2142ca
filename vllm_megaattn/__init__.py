"""MXFP8 output projection (o_proj) for DeepSeek-V4 / V4.1 attention.

    import vllm_megaattn
    y = vllm_megaattn.o_proj(x, x_scale, wo_a, wo_a_scale, wo_b, wo_b_scale)

Importing the package loads the C core and registers torch.ops.vllm_megaattn; it initialises no GPU.
"""

from vllm_megaattn import _registration as _registration
from vllm_megaattn._version import __version__
from vllm_megaattn.o_proj_module import OProj
from vllm_megaattn.ops import (
    einsum_fp8_bf16,
    einsum_fp8_sfd128x4,
    inv_rope_mxfp8_quantize,
    mxfp8_gemm_wo_b,
    mxfp8_quantize_sfd128x4,
    o_proj,
    o_proj_from_attn,
)
from vllm_megaattn.self_check import prepare_device
from vllm_megaattn.spans import count_flushed
from vllm_megaattn.weights import prepare_weight

__all__ = [
    "OProj",
    "__version__",
    "count_flushed",
    "einsum_fp8_bf16",
    "einsum_fp8_sfd128x4",
    "inv_rope_mxfp8_quantize",
    "mxfp8_gemm_wo_b",
    "mxfp8_quantize_sfd128x4",
    "o_proj",
    "o_proj_from_attn",
    "prepare_device",
    "prepare_weight",
]
