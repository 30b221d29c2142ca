"""As much of vLLM as the plugin touches, for a GPU machine where vLLM is not installed.

The plugin is driven exactly as in vLLM: its entry point watches for `vllm.models.deepseek_v41.nvidia.flashmla`, wraps the
attention class found there, and gives the linear layers of each new layer its kernel objects. The layers have the shapes,
dtypes, strides and the call sequence of vLLM 0.30 to 0.33 on Hopper; everything else of vLLM is missing.
"""

from __future__ import annotations

import importlib.util
import sys
import types

import torch

LAYERS = '''
import torch


class CkptCtx:
    scale_block_size = (32, 32)


class QuantSpec:
    weight, activation = "kMxfp8Static", "kMxfp8Dynamic"


class ProvisionalKernel:
    """What vLLM selects for the layer at construction; the plugin puts its own object in its place."""

    config = None


class ModelOptLinearMethod:
    def __init__(self):
        self.spec, self.ctx, self.kernel = QuantSpec(), CkptCtx(), ProvisionalKernel()

    def process_weights_after_loading(self, layer):
        self.kernel.process_weights_after_loading(layer)

    def apply(self, layer, x, bias=None):
        return self.kernel.apply_weights(layer=layer, x=x, bias=bias)


class Linear(torch.nn.Module):
    """weight e4m3 [N, K], weight_scale uint8 [N, K/32], rows repeated from the checkpoint's 32x32 blocks."""

    weight_block_size = [1, 32]

    def __init__(self, rows, cols, device):
        super().__init__()
        for name, shape, dtype in (
            ("weight", (rows, cols), torch.float8_e4m3fn), ("weight_scale", (rows, cols // 32), torch.uint8)
        ):
            tensor = torch.empty(shape, dtype=dtype, device=device)
            self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
        self.quant_method = ModelOptLinearMethod()

    def forward(self, x):
        return self.quant_method.apply(self, x, None)  # RowParallelLinear would all-reduce here


class RotaryEmbedding:
    def __init__(self, cos_sin_cache):
        self.cos_sin_cache = cos_sin_cache


class DeepseekV4FlashMLAAttention(torch.nn.Module):
    def __init__(self, vllm_config, prefix):
        super().__init__()
        shape = vllm_config.shape
        self.prefix = prefix
        self.n_local_groups, self.n_local_heads = shape["groups"], shape["heads"]
        self.head_dim, self.rope_head_dim, self.o_lora_rank = 512, 64, shape["rank"]
        cols = shape["heads"] // shape["groups"] * 512
        self.wo_a = Linear(shape["groups"] * shape["rank"], cols, shape["device"])
        self.wo_a.is_bmm, self.wo_a.bmm_batch_size = True, shape["groups"]
        self.wo_b = Linear(shape["hidden"], shape["groups"] * shape["rank"], shape["device"])
        self.rotary_emb = RotaryEmbedding(shape["cos_sin"])
        self.gemm_rs = None

    def _wo_b_proj(self, z):
        return self.wo_b(z)

    def _o_proj(self, attn_out, positions):
        raise RuntimeError("vLLM's own projection is not part of this stand-in")
'''

QUANT_ACTIVATION = """
import dataclasses


@dataclasses.dataclass
class QuantizedActivation:
    data: object
    scale: object
    orig_dtype: object
    orig_shape: object
    quant_key: object


def get_input_quant_key(layer):
    return getattr(layer, "_input_quant_key", None)
"""

KERNEL_BASE = """
class Mxfp8LinearKernel:
    def __init__(self, config):
        self.config = config
"""

FLASHINFER = """
class FlashInferCutedslMxfp8LinearKernel:
    pass


class FlashInferCutlassMxfp8LinearKernel:
    pass
"""

PLATFORM = """
import collections

Capability = collections.namedtuple("Capability", "major minor")


class Platform:
    def get_device_capability(self):
        return Capability(*CAPABILITY)


current_platform = Platform()
"""

FLASHMLA = "vllm.models.deepseek_v41.nvidia.flashmla"


def install(capability: tuple[int, int]) -> types.ModuleType:
    """Puts the stand-in modules in place of vLLM's; returns the one with the attention class. Refuses where vLLM is."""
    if importlib.util.find_spec("vllm") is not None:
        raise RuntimeError("vLLM is installed here: its own layers should be measured, not stand-ins")
    linear = "vllm.model_executor.kernels.linear"
    _module("vllm.platforms", PLATFORM, CAPABILITY=capability)
    _module("vllm.envs", "VLLM_BATCH_INVARIANT = False")
    _module("vllm.model_executor.layers.fusion.quant_activation", QUANT_ACTIVATION)
    keys = 'kMxfp8Dynamic, kMxfp8Static = "kMxfp8Dynamic", "kMxfp8Static"'
    _module("vllm.model_executor.layers.quantization.utils.quant_utils", keys)
    _module(f"{linear}.mxfp8.Mxfp8LinearKernel", KERNEL_BASE)
    _module(f"{linear}.mxfp8.flashinfer", FLASHINFER)
    return _module(FLASHMLA, LAYERS)


def _module(name: str, source: str, **names: object) -> types.ModuleType:
    """A module made from source, with the packages above it."""
    parent = None
    for end in range(1, name.count(".") + 2):
        part = ".".join(name.split(".")[:end])
        if part not in sys.modules:
            sys.modules[part] = types.ModuleType(part)
            sys.modules[part].__path__ = []
            if parent is not None:
                setattr(parent, part.rpartition(".")[2], sys.modules[part])
        parent = sys.modules[part]
    parent.__dict__.update(names)
    exec(compile(source, f"<{name}>", "exec"), parent.__dict__)
    return parent


class Config:
    """What stands for VllmConfig: the dtype of the model, the load format, and the shapes of the layer."""

    def __init__(self, **shape: object) -> None:
        self.shape = shape
        self.model_config = types.SimpleNamespace(dtype=torch.bfloat16)
        self.load_config = types.SimpleNamespace(load_format="auto")
