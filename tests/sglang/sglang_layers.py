"""SGLang's DeepSeek model for the tests: built with a few attention layers, loaded from synthetic checkpoints, run.

One process stands for any rank: SGLang's parallel context is told the rank and a group whose `all_reduce` counts its
calls and returns its input. Results of several ranks are partial sums for the test to add up.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from types import SimpleNamespace

import sglang_standins as standins
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

HEADS, GROUPS, HEAD_DIM, ROPE_DIM, RANK = 64, 8, 512, 64, 1024
HEADS_PER_GROUP = HEADS // GROUPS
GROUP_COLS = HEADS_PER_GROUP * HEAD_DIM
HIDDEN = 1280  # a quarter of V4.1-Flash's: wo_b's rows do not matter to what is tested here
Q_RANK = 512


def model_config(model: str, layers: int = 1, **entries: object) -> SimpleNamespace:
    """SGLang's configuration object of a "v41" or "v4" model."""
    made = SimpleNamespace(
        model_type="deepseek_v41" if model == "v41" else "deepseek_v4", hidden_size=HIDDEN, qk_rope_head_dim=ROPE_DIM,
        head_dim=HEAD_DIM, num_attention_heads=HEADS, o_groups=GROUPS, q_lora_rank=Q_RANK, o_lora_rank=RANK,
        rms_norm_eps=1e-6, q_head_norm=False, compress_ratios=[0] * layers, num_key_value_heads=1,
        compress_rope_theta=40000.0, rope_theta=10000.0, rope_scaling=None, rope_parameters=None,
        max_position_embeddings=4096, kv_source_layer_ids=(), index_source_layer_ids=(), sliding_window=128,
        num_hidden_layers=layers, num_nextn_predict_layers=1, n_routed_experts=4, vocab_size=64, vision_n_layers=0,
        tie_word_embeddings=False, n_shared_experts=0,
    )  # fmt: skip
    vars(made).update(entries)
    return made


def quantization(model: str, **entries: object):
    """SGLang's Fp8Config as it reads it from config.json."""
    from sglang.srt.layers.quantization.fp8 import Fp8Config

    block = 32 if model == "v41" else 128
    made = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [block, block],
            "scale_fmt": "ue8m0"}  # fmt: skip
    return Fp8Config.from_config({**made, **entries})


# ---- checkpoints ---------------------------------------------------------------------------------------------------


@dataclass
class Checkpoint:
    """The projections of one layer as a checkpoint stores them: e4m3, and e8m0 scales per block x block."""

    block: int
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    _floats: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def random(cls, model: str, seed: int = 0, spread: int = 5) -> Checkpoint:
        """spread: how many exponents the scales take."""
        made = cls(32 if model == "v41" else 128)
        generator = torch.Generator().manual_seed(seed)
        shapes = {
            "wo_a": (GROUPS * RANK, GROUP_COLS),
            "wo_b": (HIDDEN, GROUPS * RANK),
            "wq_b": (HEADS * HEAD_DIM, Q_RANK),
        }
        for name, (rows, cols) in shapes.items():
            values = torch.randn(rows, cols, generator=generator) * 64
            made.tensors[f"{name}.weight"] = values.to(torch.float8_e4m3fn)
            scale = torch.randint(114, 114 + spread, (rows // made.block, cols // made.block), dtype=torch.uint8,
                                  generator=generator)  # fmt: skip
            made.tensors[f"{name}.scale"] = scale.view(torch.float8_e8m0fnu)
        return made

    def floats(self, name: str) -> torch.Tensor:
        if name not in self._floats:
            scale = torch.exp2(self.tensors[f"{name}.scale"].view(torch.uint8).float() - 127)
            self._floats[name] = standins.dequantize(self.tensors[f"{name}.weight"], scale)
        return self._floats[name]

    def named(self, layer: str, only: str = "") -> list[tuple[str, torch.Tensor]]:
        return [(f"{layer}.attn.{name}", t) for name, t in self.tensors.items() if name.startswith(only)]

    def rows(self, name: str, rank: int, tp: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's weight and scale bytes."""
        weight, scale = self.tensors[f"{name}.weight"], self.tensors[f"{name}.scale"].view(torch.uint8)
        dim = 1 if name == "wo_b" else 0
        return weight.chunk(tp, dim)[rank].contiguous(), scale.chunk(tp, dim)[rank].contiguous()


# ---- the world -----------------------------------------------------------------------------------------------------


class World:
    """SGLang's context for a rank and its settings, and models built in it."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.capability = capability
        self.all_reduces = 0
        self.model = standins.patch_kernels(capability[0])
        self.model.get_num_fused_shared_experts = lambda: 0
        scatter = SimpleNamespace(input_scattered=False, init_context=lambda *_, **__: None)
        self.model.get_attn_tp_context = lambda: scatter
        self.model.is_cp_active = lambda forward_batch: False
        self.model.DeepseekV4Model = _Backbone
        self.model.ParallelLMHead = lambda *_, **__: nn.Module()
        self.model.LogitsProcessor = lambda *_, **__: nn.Module()

    @contextlib.contextmanager
    def context(self, *, tp: int = 1, rank: int = 0, attn_tp: int | None = None, **settings: object):
        """The process is this rank of a server with these arguments. attn_tp: 1 for DP attention."""
        from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
        from sglang.srt.runtime_context import get_context, get_parallel

        attn_tp = attn_tp or tp
        group = SimpleNamespace(rank_in_group=rank, world_size=tp, all_reduce=self._all_reduce)
        heads = SimpleNamespace(
            rank_in_group=rank if attn_tp > 1 else 0, world_size=attn_tp, all_reduce=self._all_reduce
        )
        alone = SimpleNamespace(rank_in_group=0, world_size=1, is_first_rank=True, is_last_rank=True)
        arguments = {"device": "cpu", **settings}
        parallel = {
            "tp_size": tp, "tp_rank": rank, "attn_tp_size": attn_tp, "attn_tp_rank": rank if attn_tp > 1 else 0,
            "tp_group": group, "attn_tp_group": heads, "attn_dp_size": tp // attn_tp, "attn_cp_size": 1,
            "moe_tp_size": tp, "moe_ep_size": 1, "moe_dp_size": 1, "pp_group": alone,
        }  # fmt: skip
        with get_context().override_server_args(**arguments), get_parallel().override(**parallel):
            initialize_fp8_gemm_config()
            yield

    def _all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.all_reduces += 1
        return tensor

    def settings(self, model: str, mega: bool = False, **settings: object) -> dict[str, object]:
        """What SGLang's argument resolution sets for the model on this GPU; a dummy model does not get it."""
        backend = "flashinfer_cutedsl" if self.capability[0] == 10 and model == "v41" else "auto"
        attention = "flashmla_mega" if mega else "flashmla"
        return {"fp8_gemm_runner_backend": backend, "dsv4_attn_backend": attention, **settings}

    def make(
        self, model: str, checkpoint: Checkpoint | None = None, *, tp: int = 1, rank: int = 0, layers: int = 1,
        mega: bool = False, attn_tp: int | None = None, nextn: bool = False, quant: object = "from checkpoint",
        config: dict | None = None, settings: dict | None = None,
    ) -> Built:  # fmt: skip
        """A model, loaded if there is a checkpoint."""
        place = {"tp": tp, "rank": rank, "attn_tp": attn_tp, **self.settings(model, mega), **(settings or {})}
        built = Built(self, place, model)
        quant_config = quantization(model) if quant == "from checkpoint" else quant
        with self.context(**place), _default_dtype(torch.bfloat16):
            # model_hook.py switches V4's FP8 wo_a off there before the model is imported
            fp8_gemm = self.model._FP8_WO_A_GEMM
            self.model._FP8_WO_A_GEMM = fp8_gemm and not (self.capability[0] == 12 and model == "v4")
            try:
                made = model_config(model, layers, **(config or {}))
                built.model = self._class(nextn)(config=made, quant_config=quant_config)
            finally:
                self.model._FP8_WO_A_GEMM = fp8_gemm
        if checkpoint is not None:
            built.load(checkpoint)
        return built

    def _class(self, nextn: bool) -> type:
        if not nextn:
            return self.model.DeepseekV4ForCausalLM
        import sglang.srt.models.deepseek_v4_nextn as draft

        draft.DeepseekV4ModelNextN = _Draft
        draft.ParallelLMHead = draft.LogitsProcessor = lambda *_, **__: nn.Module()
        draft.get_num_fused_shared_experts = lambda: 0
        return draft.DeepseekV4ForCausalLMNextN


class _Layer(nn.Module):
    """A decoder layer of which only the attention is there."""

    def __init__(self, config: object, index: int, quant_config: object, prefix: str) -> None:
        import sglang.srt.models.deepseek_v4 as model

        super().__init__()
        self.self_attn = model.MQALayer(config, index, quant_config, f"{prefix}.self_attn", compress_ratio_override=0)
        self.self_attn.wo_b.reduce_results = False  # as DeepseekV4CudaDecoderLayer does
        self.mlp = None

    def refresh_mhc_norm_weight_cache(self) -> None:
        pass


class _Backbone(nn.Module):
    def __init__(self, config: object, quant_config: object = None, prefix: str = "") -> None:
        super().__init__()
        count = config.num_hidden_layers
        self.layers = nn.ModuleList(_Layer(config, i, quant_config, f"{prefix}.layers.{i}") for i in range(count))
        self.start_layer, self.end_layer = 0, count


class _Draft(nn.Module):
    def __init__(self, config: object, quant_config: object = None, prefix: str = "") -> None:
        super().__init__()
        self.decoder = _Layer(config, 0, quant_config, f"{prefix}.decoder")


@dataclass
class Built:
    world: World
    place: dict[str, object]
    kind: str
    model: nn.Module = None

    @property
    def attention(self) -> nn.Module:
        return self.attentions[0]

    @property
    def attentions(self) -> list[nn.Module]:
        return [module for module in self.model.modules() if type(module).__name__ == "MQALayer"]

    def load(self, checkpoint: Checkpoint) -> None:
        """As SGLang's DefaultModelLoader does, every layer from the same checkpoint."""
        named = [pair for name in self._names() for pair in checkpoint.named(name)]
        with self.inside():
            self.model.load_weights(named)
            self.postprocess()

    def _names(self) -> list[str]:
        if hasattr(self.model.model, "decoder"):
            return ["mtp.0"]
        return [f"layers.{i}" for i in range(len(self.model.model.layers))]

    def postprocess(self) -> None:
        from sglang.srt.model_loader.loader import DefaultModelLoader

        DefaultModelLoader.postprocess_weights(self.model, torch.device("cpu"))

    @contextlib.contextmanager
    def inside(self):
        with self.world.context(**self.place), _default_dtype(torch.bfloat16), torch.no_grad():
            yield

    def addresses(self) -> dict[str, int]:
        return {name: parameter.data_ptr() for name, parameter in self.model.named_parameters()}

    def run(
        self, tokens: Tokens, *, mode: str = "decode", layer: int = 0, breakable: bool = False, live: int | None = None
    ):  # fmt: skip
        """`MQALayer.forward` with a stand-in attention, on a new tensor. Returns what the decoder layer gets, and the
        tensor in it."""
        attention = self.attentions[layer]
        with self.inside(), _forward_context(self.world.model, attention, tokens, mode, breakable, live):
            standins.CALLS.clear()
            count = tokens.positions.shape[0]
            out = attention(
                torch.zeros(count, HIDDEN), tokens.positions, _Batch(mode, count if live is None else live),
                defer_all_reduce=True,
            )  # fmt: skip
            y = out.partial if hasattr(out, "partial") else out
            return out, y.clone()


class _Mode:
    def __init__(self, mode: str) -> None:
        self._true = {
            "decode": {"is_decode", "is_decode_or_idle"},
            "extend": {"is_extend", "is_extend_without_speculative"},
            "target_verify": {"is_extend", "is_target_verify"},
            "idle": {"is_idle", "is_decode_or_idle"},
        }[mode]

    def __getattr__(self, name: str) -> object:
        return lambda *_, **__: name in self._true


class _Batch:
    seq_lens_cpu = None

    def __init__(self, mode: str, live: int) -> None:
        self.forward_mode = _Mode(mode)
        self.global_num_token_non_padded_cpu = live


class _Attention:
    """The attention kernel: returns the tokens' output in this layer's buffer; what it does not write is NaN or
    0xFF."""

    forward_metadata = None

    def __init__(self, attention: nn.Module, tokens: Tokens) -> None:
        self.attention, self.tokens = attention, tokens

    def forward(self, q=None, **_):
        if getattr(self.attention, "use_mega_attention", False):
            return self.tokens.mega_buffer(self.attention, q.shape[0])
        return self.tokens.buffer(self.attention, q.shape[1])


@contextlib.contextmanager
def _forward_context(model, attention: nn.Module, tokens: Tokens, mode: str, breakable: bool, live: int | None):
    backend = _Attention(attention, tokens)
    count = tokens.positions.shape[0]
    replaced = {
        "get_attn_backend": lambda: backend,
        "get_token_to_kv_pool": lambda: SimpleNamespace(uniform_fp8=False),
        "is_in_breakable_cuda_graph": lambda: breakable,
        "bcg_deepseek_v4_attention_with_output": lambda q, k, o, *_: o.copy_(backend.forward(q=q)),
        "get_tc_piecewise_forward_context": lambda: SimpleNamespace(
            forward_batch=_Batch(mode, count if live is None else live)
        ),
    }
    before = {name: getattr(model, name) for name in replaced if hasattr(model, name)}
    for name in before:
        setattr(model, name, replaced[name])
    heads = attention.n_local_heads
    attention._forward_prepare = lambda x, *_, **__: (torch.zeros(x.shape[0], heads, HEAD_DIM), None)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(model, name, value)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype):
    """SGLang's model loader sets the model's dtype as the default; layers and kernels read it."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


# ---- inputs and the independent result -----------------------------------------------------------------------------


@dataclass
class Tokens:
    """One batch: what the attention of all heads produced, before the inverse rotation."""

    positions: torch.Tensor
    attn: torch.Tensor  # BF16 [T, 64, 512]

    @classmethod
    def random(cls, count: int, seed: int = 1, dtype: torch.dtype = torch.int64) -> Tokens:
        generator = torch.Generator().manual_seed(seed)
        positions = torch.randint(0, 4096, (count,), generator=generator, dtype=dtype)
        values = torch.randn(count, HEADS, HEAD_DIM, generator=generator)
        values[..., ::37] *= 16  # outlier columns, so that blocks differ in scale
        return cls(positions, values.to(torch.bfloat16))

    def local(self, attention: nn.Module) -> torch.Tensor:
        heads = attention.n_local_heads
        first = attention.attn_tp_rank * heads
        return self.attn[:, first : first + heads]

    def rotated(self, attention: nn.Module) -> torch.Tensor:
        """float32 [T, local heads, 512] of this rank, rotated back and rounded to BF16."""
        y = self.local(attention).float()
        y[..., -ROPE_DIM:] = standins.rotate_back(y[..., -ROPE_DIM:], attention.freqs_cis, self.positions.long())
        return y.bfloat16().float()

    def buffer(self, attention: nn.Module, padded_heads: int) -> torch.Tensor:
        out = torch.full((self.positions.shape[0], padded_heads, HEAD_DIM), float("nan"), dtype=torch.bfloat16)
        out[:, : attention.n_local_heads] = self.local(attention)
        return out

    def mega_buffer(self, attention: nn.Module, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the first `count` tokens: rotated back, columns in chunks, MXFP8 with packed scales, all 64 heads
        wide."""
        groups = attention.n_local_groups
        y = self.rotated(attention)[:count].view(count, groups, HEADS_PER_GROUP, HEAD_DIM // 32, 32)
        data, scale = standins.quantize(y.transpose(2, 3).reshape(count, groups, GROUP_COLS), 32)
        wide = torch.full((count, 8, GROUP_COLS), 0xFF, dtype=torch.uint8)
        words = torch.full((8, GROUP_COLS // 128, -(-count // 4) * 4), -1, dtype=torch.int32)
        wide[:, :groups] = data.view(torch.uint8)
        words[:groups, :, :count] = standins.exponent_bytes(scale).view(torch.int32).permute(1, 2, 0)
        return wide.view(torch.float8_e4m3fn), words.permute(2, 0, 1)[:count]


def round_to_mxfp8(x: torch.Tensor, span: int = 32) -> torch.Tensor:
    """The values after MXFP8 rounding per 32 columns: the smallest power of two with amax <= 448 * scale."""
    blocks = x.unflatten(-1, (-1, span))
    amax = blocks.abs().amax(-1, keepdim=True)
    scale = torch.exp2(torch.ceil(torch.log2(amax.double() / 448))).float()
    scale = torch.where(amax == 0, torch.ones_like(scale), scale)
    return ((blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


def expected(
    tokens: Tokens, checkpoint: Checkpoint, attention: nn.Module, *, round_attn: bool = True, round_z: bool = True
) -> torch.Tensor:
    """float32 [T, hidden], this rank's partial sum. round_*: whether the attention output and z go through MXFP8."""
    count, groups, rank = tokens.positions.shape[0], attention.n_local_groups, attention.attn_tp_rank
    x = tokens.rotated(attention).view(count, groups, GROUP_COLS)
    x = round_to_mxfp8(x) if round_attn else x
    mine = slice(rank * groups, (rank + 1) * groups)
    w_a = checkpoint.floats("wo_a").view(GROUPS, RANK, GROUP_COLS)[mine]
    z = torch.einsum("tgk,gnk->tgn", x, w_a).bfloat16().float().flatten(1)
    z = round_to_mxfp8(z) if round_z else z
    return z @ checkpoint.floats("wo_b")[:, mine.start * RANK : mine.stop * RANK].t()


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.float() - want.float()).norm() / want.float().norm().clamp(min=1e-30)).item()


# ---- watching ------------------------------------------------------------------------------------------------------


class OpLog(TorchDispatchMode):
    """Records this package's ops with their arguments, and the largest new tensor of each dtype that any op
    returns."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[str, tuple]] = []
        self.largest: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "vllm_megaattn":
            self.ops.append((func._schema.name.split("::")[1], args))
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.largest[tensor.dtype] = max(self.largest.get(tensor.dtype, 0), tensor.numel())
        return result

    def names(self) -> list[str]:
        return [name for name, _ in self.ops]
