"""As much of SGLang as the plugin touches, for a GPU machine where SGLang is not installed.

The plugin is driven exactly as in SGLang: it watches for `sglang.srt.models.deepseek_v4`, places its hooks through the
HookRegistry on the names found there, and takes over the linear layers of each layer that is built. The layers have the
shapes, dtypes, strides and the call sequence of SGLang 0.5.22 and 0.5.23 on Hopper; everything else of SGLang is missing.
"""

from __future__ import annotations

import importlib.util
import sys
import types

import torch

MODEL = "sglang.srt.models.deepseek_v4"

HOOKS = """
import functools
import importlib
from enum import Enum
from typing import NamedTuple


class HookSource(NamedTuple):
    plugin_name: str
    dist_name: str


class HookType(Enum):
    AROUND = "around"


class HookRegistry:
    _hooks, _patched = {}, set()

    @classmethod
    def register(cls, target, hook, hook_type, *, source=None):
        cls._hooks.setdefault(target, []).append(hook)

    @classmethod
    def apply_hooks(cls):
        for target in sorted(cls._hooks):
            if target in cls._patched:
                continue
            owner, name = cls._resolve(target)
            for hook in cls._hooks[target]:
                setattr(owner, name, _wrap(getattr(owner, name), hook))
            cls._patched.add(target)

    @staticmethod
    def _resolve(target):
        parts = target.split(".")
        for count in range(len(parts) - 1, 0, -1):
            try:
                owner = importlib.import_module(".".join(parts[:count]))
            except ImportError:
                continue
            for part in parts[count:-1]:
                owner = getattr(owner, part)
            return owner, parts[-1]


def _wrap(original_fn, hook):
    @functools.wraps(original_fn)
    def wrapper(*args, **kwargs):
        return hook(original_fn, *args, **kwargs)

    return wrapper
"""

CONTEXT = """
from types import SimpleNamespace

parallel = SimpleNamespace(attn_tp_rank=0, attn_tp_size=1)


def get_platform():
    return SimpleNamespace(is_cuda=True, is_hip=False, device_capability=CAPABILITY)


def get_parallel():
    return parallel
"""

LAYERS = '''
from typing import NamedTuple

import torch

_FUSED_WO_A_MAX_TOKENS = 32


class Mxfp8SwizzledInput(NamedTuple):
    data: object
    scales: object


class Fp8Config:
    weight_block_size, scale_fmt, is_checkpoint_fp8_serialized = [32, 32], "ue8m0", True


class Fp8LinearMethod:
    """SGLang leaves V4.1's wo_b as loaded on Hopper, and its product is not part of this stand-in."""

    def process_weights_after_loading(self, layer):
        pass

    def restore_weights_before_loading(self, layer):
        pass

    def apply(self, layer, x, bias=None):
        raise RuntimeError("SGLang's own product is not part of this stand-in")


def copy_loader(parameter, loaded):
    parameter.data.copy_(loaded)


class Linear(torch.nn.Module):
    """weight e4m3 [N, K], weight_scale_inv float32 [N/32, K/32]."""

    def __init__(self, rows, cols):
        super().__init__()
        for name, shape, dtype in (
            ("weight", (rows, cols), torch.float8_e4m3fn),
            ("weight_scale_inv", (rows // 32, cols // 32), torch.float32),
        ):
            parameter = torch.nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
            parameter._weight_loader = copy_loader
            self.register_parameter(name, parameter)
        self.quant_method = Fp8LinearMethod()

    def forward(self, x, skip_all_reduce=False):
        return self.quant_method.apply(self, x, bias=None), None


def wo_a_fp8_gemm_enabled(quant_config):
    return False


def fused_rope_wo_a_bf16(x, weight, freqs_cis, positions, *, out_mxfp8=True):
    raise RuntimeError("SGLang's own projection is not part of this stand-in")


class MQALayer(torch.nn.Module):
    use_flashinfer_mxfp8_wo_b = False

    def __init__(self, config, layer_id, quant_config=None, prefix=""):
        super().__init__()
        tp = config.attn_tp_size
        self.n_local_groups, self.n_local_heads = config.o_groups // tp, config.num_attention_heads // tp
        self.head_dim, self.rope_head_dim, self.o_lora_rank = 512, 64, config.o_lora_rank
        self.wo_a_fp8 = wo_a_fp8_gemm_enabled(quant_config)
        assert self.wo_a_fp8, "the plugin was expected to keep wo_a in FP8"
        cols = self.n_local_heads // self.n_local_groups * 512
        self.wo_a = Linear(self.n_local_groups * self.o_lora_rank, cols)
        self.wo_b = Linear(config.hidden_size, self.n_local_groups * self.o_lora_rank)
        self.freqs_cis = config.freqs_cis
        self.use_fused_wo_a = False

    def forward(self, o, positions):
        """The end of SGLang's forward, from the attention kernel's padded buffer on."""
        o = o[:, : self.n_local_heads, :]
        fuse_mxfp8_quant = self.use_flashinfer_mxfp8_wo_b
        fuse_rope_wo_a = self.use_fused_wo_a and 0 < o.shape[0] <= _FUSED_WO_A_MAX_TOKENS
        assert fuse_rope_wo_a
        o = o.view(o.shape[0], self.n_local_groups, -1)
        wo_a = self.wo_a.weight.view(self.n_local_groups, self.o_lora_rank, -1)
        out = fused_rope_wo_a_bf16(
            o, wo_a, torch.view_as_real(self.freqs_cis).flatten(1), positions, out_mxfp8=fuse_mxfp8_quant
        )
        o = Mxfp8SwizzledInput(*out) if fuse_mxfp8_quant else out[0]
        return self._project_wo_b(o, True)

    def _project_wo_b(self, o, defer_all_reduce=False):
        o, _ = self.wo_b(o.flatten(1) if isinstance(o, torch.Tensor) else o, skip_all_reduce=defer_all_reduce)
        return o


class DeepseekV4ForCausalLM(torch.nn.Module):
    def __init__(self, config, quant_config=None):
        super().__init__()

    def _setup_fp8_wo_a_scales(self, is_nextn):
        pass
'''


def install(capability: tuple[int, int]) -> types.ModuleType:
    """Puts the stand-in modules in place of SGLang's; returns the one with the attention class. Refuses where SGLang is."""
    if importlib.util.find_spec("sglang") is not None:
        raise RuntimeError("SGLang is installed here: its own layers should be measured, not stand-ins")
    _module("sglang.srt.plugins.hook_registry", HOOKS)
    _module("sglang.srt.runtime_context", CONTEXT, CAPABILITY=capability)
    _module("sglang.srt.utils", "def get_bool_env_var(name):\n    return False\n")
    return _module(MODEL, LAYERS)


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


def config(tp: int, model, cos_sin: torch.Tensor) -> types.SimpleNamespace:
    """SGLang's model configuration of `model` (bench.workload.Model) and what a rank of `tp` makes of it.

    cos_sin: float32 [positions, 64], cos then sin.
    """
    sys.modules["sglang.srt.runtime_context"].parallel.attn_tp_size = tp
    cos, sin = cos_sin.chunk(2, 1)
    return types.SimpleNamespace(
        model_type="deepseek_v41", num_attention_heads=model.heads, o_groups=model.groups, o_lora_rank=model.rank,
        hidden_size=model.hidden, head_dim=512, qk_rope_head_dim=64, num_hidden_layers=1, attn_tp_size=tp,
        freqs_cis=torch.complex(cos.contiguous(), sin.contiguous()),
    )  # fmt: skip
