"""vLLM's attention layers for the tests: built from real configurations, loaded from synthetic checkpoints, run.

One process stands for any rank: the tensor-parallel group is a real one-process group whose `world_size` and
`rank_in_group` are overwritten and whose `all_reduce` counts its calls and returns its input. Results of several ranks are
partial sums for the test to add up.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import tempfile
from dataclasses import dataclass, field

import torch
import vllm_standins
from torch.utils._python_dispatch import TorchDispatchMode
from vllm_standins import dequantize

HEADS, GROUPS, HEAD_DIM, ROPE_DIM, RANK = 64, 8, 512, 64, 1024
HEADS_PER_GROUP = HEADS // GROUPS
GROUP_COLS = HEADS_PER_GROUP * HEAD_DIM
HIDDEN = 1280  # a quarter of V4.1-Flash's: wo_b's rows do not matter to what is tested here
FULL_HIDDEN = 5120

# fmt: off
V41_TEXT = dict(
    model_type="deepseek_v41_text", vocab_size=1024, num_hidden_layers=2, num_attention_heads=HEADS,
    num_key_value_heads=1, head_dim=HEAD_DIM, qk_rope_head_dim=ROPE_DIM, q_lora_rank=512, o_lora_rank=RANK,
    o_groups=GROUPS, moe_intermediate_size=256, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
    norm_topk_prob=True, scoring_func="sqrtsoftplus", topk_method="noaux_tc", hidden_act="silu", swiglu_limit=10.0,
    max_position_embeddings=8192, rope_theta=10000.0, compress_rope_theta=160000.0,
    rope_scaling=dict(rope_type="yarn", factor=2, original_max_position_embeddings=4096, beta_fast=32, beta_slow=1),
    # layer 0 is a sliding-window layer: no compressor, no indexer, the same output projection
    compress_ratios=[0, 1], kv_source_layer_ids=[1], index_source_layer_ids=[1], sliding_window=128,
    hc_mult=4, hc_eps=1e-6, hc_sinkhorn_iters=20, hc_post_alpha=2.0, index_head_dim=128, index_n_heads=32,
    index_topk=512, num_nextn_predict_layers=0, rms_norm_eps=1e-6, tie_word_embeddings=False,
)
V4 = dict(
    architectures=["DeepseekV4ForCausalLM"], model_type="deepseek_v4", vocab_size=1024, num_hidden_layers=2,
    num_attention_heads=HEADS, num_key_value_heads=1, head_dim=HEAD_DIM, qk_rope_head_dim=ROPE_DIM, q_lora_rank=512,
    o_lora_rank=RANK, o_groups=GROUPS, moe_intermediate_size=256, n_routed_experts=4, n_shared_experts=1,
    num_experts_per_tok=2, norm_topk_prob=True, scoring_func="sqrtsoftplus", swiglu_limit=10.0,
    max_position_embeddings=8192, rope_theta=10000.0, compress_rope_theta=160000.0,
    rope_scaling=dict(rope_type="yarn", factor=2, original_max_position_embeddings=4096, beta_fast=32, beta_slow=1,
                      attention_factor=1.0),
    compress_ratios=[0, 0], num_hash_layers=0, sliding_window=128, hc_mult=4, hc_eps=1e-6, hc_sinkhorn_iters=20,
    index_head_dim=128, index_n_heads=64, index_topk=512, num_nextn_predict_layers=0, rms_norm_eps=1e-6,
    tie_word_embeddings=False, torch_dtype="bfloat16",
)
# fmt: on
QUANTIZATION = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}


def model_config(
    model: str, hidden: int = HIDDEN, ignored: tuple[str, ...] = (), **text: object
) -> dict[str, object]:
    """config.json of a two-layer "v41" or "v4" model; `text` overrides entries of the language model, `ignored` names
    modules that are not quantised."""
    ignore = {"ignored_layers": list(ignored)} if ignored else {}
    if model == "v4":
        quantization = {**QUANTIZATION, **ignore, "weight_block_size": [128, 128]}
        return copy.deepcopy({**V4, "hidden_size": hidden, "quantization_config": quantization, **text})
    quantization = {**QUANTIZATION, **ignore, "weight_block_size": [32, 32]}
    return copy.deepcopy(
        {
            "architectures": ["DeepseekV41ForCausalLM"],
            "model_type": "deepseek_v41",
            "torch_dtype": "bfloat16",
            "quantization_config": quantization,
            "text_config": {**V41_TEXT, "hidden_size": hidden, **text},
        }
    )


# ---- checkpoints ---------------------------------------------------------------------------------------------------


@dataclass
class Checkpoint:
    """wo_a and wo_b of one layer as a checkpoint stores them: e4m3, and e8m0 scales per block x block."""

    block: int
    hidden: int
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    _floats: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def random(cls, model: str, seed: int = 0, hidden: int = HIDDEN, groups: int = GROUPS) -> Checkpoint:
        block = 128 if model == "v4" else 32
        generator = torch.Generator().manual_seed(seed)
        made = cls(block, hidden)
        for name, rows, cols in (("wo_a", groups * RANK, GROUP_COLS), ("wo_b", hidden, groups * RANK)):
            weight = torch.randn(rows, cols, generator=generator).to(torch.float8_e4m3fn)
            shape = (rows // block, cols // block)
            scale = torch.randint(115, 125, shape, dtype=torch.uint8, generator=generator)
            made.tensors[f"{name}.weight"] = weight
            made.tensors[f"{name}.scale"] = scale.view(torch.float8_e8m0fnu)
        return made

    def floats(self, name: str) -> torch.Tensor:
        if name not in self._floats:
            scale = self.tensors[f"{name}.scale"].view(torch.uint8).repeat_interleave(self.block, 0)
            scale = scale.repeat_interleave(self.block // 32, 1)
            self._floats[name] = dequantize(self.tensors[f"{name}.weight"], scale)
        return self._floats[name]


# ---- the world -----------------------------------------------------------------------------------------------------


class World:
    """Configurations, the parallel state, and layers built in it."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.capability = capability
        self.all_reduces = 0
        self._configs: dict[tuple, object] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> World:
        from vllm.distributed import init_distributed_environment, initialize_model_parallel
        from vllm.distributed.parallel_state import get_tp_group

        config = self.config("v41")
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(config):
            rendezvous = self._stack.enter_context(tempfile.TemporaryDirectory())
            init_distributed_environment(1, 0, f"file://{rendezvous}/world", 0, "gloo")
            initialize_model_parallel(1)
        self.group = get_tp_group()

        def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
            self.all_reduces += 1
            return tensor

        self.group.all_reduce = all_reduce
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def config(self, model: str, *, backend: str = "auto", tp: int = 1, hidden: int = HIDDEN, **options: object):
        """A real VllmConfig. options: `text` and `ignored` of `model_config`, and arguments of vLLM's EngineArgs."""
        key = (model, backend, tp, hidden, repr(sorted(options.items())))
        if key not in self._configs:
            from vllm.engine.arg_utils import EngineArgs

            text = {**options.pop("text", {}), "ignored": options.pop("ignored", ())}
            arguments = {"load_format": "auto", **options}
            with tempfile.TemporaryDirectory() as folder:
                with open(os.path.join(folder, "config.json"), "w") as file:
                    json.dump(model_config(model, hidden, **text), file)
                config = EngineArgs(
                    model=folder, skip_tokenizer_init=True, enforce_eager=True, max_model_len=4096, block_size=128,
                    linear_backend=backend, **arguments,
                ).create_engine_config()  # fmt: skip
            config.parallel_config.tensor_parallel_size = tp
            self._configs[key] = config
        return self._configs[key]

    def build(self, config: object, rank: int = 0, cls: type | None = None) -> torch.nn.Module:
        """One attention layer, as vLLM's decoder layer builds it: the class that vLLM selects, or `cls`."""
        from vllm.config import set_current_vllm_config

        self.group.world_size = config.parallel_config.tensor_parallel_size
        self.group.rank_in_group = rank
        config.compilation_config.static_forward_context.clear()
        config.cache_config.cache_dtype = "auto"  # a layer writes its own format back
        topk = torch.zeros(config.scheduler_config.max_num_batched_tokens, 512, dtype=torch.int32)
        with set_current_vllm_config(config), torch.no_grad(), default_dtype(torch.bfloat16):
            cls = cls or _select(config)
            return cls(config, prefix="model.layers.0.attn", topk_indices_buffer=topk, aux_stream_list=None)

    def load(self, attention: torch.nn.Module, checkpoint: Checkpoint, config: object) -> None:
        """Through the parameters' weight loaders, then post-load."""
        self.fill(attention, checkpoint)
        self.post_load(attention, config)

    def fill(self, attention: torch.nn.Module, checkpoint: Checkpoint) -> None:
        parameters = dict(attention.named_parameters())
        for name, tensor in checkpoint.tensors.items():
            linear, kind = name.split(".")
            if kind == "scale":
                kind = "weight_scale" if f"{linear}.weight_scale" in parameters else "weight_scale_inv"
            parameter = parameters[f"{linear}.{kind}"]
            parameter.weight_loader(parameter, tensor)
        getattr(attention, "finalize_loaded_weights", lambda: None)()  # vLLM 0.31 permutes here

    def post_load(self, attention: torch.nn.Module, config: object) -> None:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(config), torch.no_grad(), default_dtype(torch.bfloat16):
            for name in ("wo_a", "wo_b"):
                linear = getattr(attention, name)
                linear.quant_method.process_weights_after_loading(linear)

    def run(
        self, attention: torch.nn.Module, attn_out: object, positions: torch.Tensor, config: object
    ) -> torch.Tensor:
        """`_o_proj`, on a new tensor."""
        from vllm.config import set_current_vllm_config

        self.group.world_size = config.parallel_config.tensor_parallel_size
        with set_current_vllm_config(config), torch.inference_mode():
            return attention._o_proj(attn_out, positions).clone()

    def make(
        self, model: str, checkpoint: Checkpoint, *, rank: int = 0, cls: type | None = None, **options: object
    ) -> tuple[torch.nn.Module, object]:
        """A loaded layer and its configuration."""
        config = self.config(model, hidden=checkpoint.hidden, **options)
        attention = self.build(config, rank, cls)
        self.load(attention, checkpoint, config)
        return attention, config


def _select(config: object) -> type:
    architecture = config.model_config.hf_config.architectures[0]
    if "V41" in architecture:
        from vllm.models.deepseek_v41.nvidia.model import _select_dsv4_attn_cls
    else:
        from vllm.models.deepseek_v4.nvidia.model import _select_dsv4_attn_cls
    return _select_dsv4_attn_cls(config)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype):
    """vLLM's model loader sets the model's dtype as the default; layers and kernels read it."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


# ---- inputs and the independent result -----------------------------------------------------------------------------


@dataclass
class Tokens:
    """One batch: what the attention of all heads produced, before and after the inverse rotation."""

    positions: torch.Tensor
    attn: torch.Tensor | None  # BF16 [T, 64, 512] of BF16 attention
    x: torch.Tensor | None  # e4m3 [T, 64, 512] and
    scale: torch.Tensor | None  # uint8 [T, 64, 16] of mega attention, heads in standard order

    @classmethod
    def random(cls, count: int, mega: bool = False, seed: int = 1) -> Tokens:
        generator = torch.Generator().manual_seed(seed)
        positions = torch.randint(0, 4096, (count,), generator=generator)
        values = torch.randn(count, HEADS, HEAD_DIM, generator=generator)
        values[..., ::37] *= 16  # outlier columns, so that blocks differ in scale
        if not mega:
            return cls(positions, values.to(torch.bfloat16), None, None)
        scale = torch.randint(118, 126, (count, HEADS, HEAD_DIM // 32), dtype=torch.uint8, generator=generator)
        return cls(positions, None, values.to(torch.float8_e4m3fn), scale)

    def rotated(self, cos_sin: torch.Tensor) -> torch.Tensor:
        """float32 [T, 64, 512] that wo_a multiplies: rounded to MXFP8, per 32 columns of a head."""
        if self.attn is None:
            return dequantize(self.x, self.scale)
        return round_to_mxfp8(inverse_rope(self.attn, cos_sin[self.positions]))

    def for_layer(self, attention: torch.nn.Module, heads: slice) -> object:
        """What the attention kernel leaves in this layer's buffer; what it does not write is NaN or 0xFF."""
        count = self.positions.shape[0]
        if self.attn is not None:
            out = torch.full((count, attention.padded_heads, HEAD_DIM), float("nan"), dtype=torch.bfloat16)
            live = heads.stop - heads.start
            out[:, :live] = self.attn[:, heads]
            # vLLM 0.30's V4.1 slices the padding heads off before it calls `_o_proj`, later releases hand over the buffer
            return out if hasattr(attention, "_alloc_attn_out") else out[:, :live]
        from vllm.models.deepseek_v41.common.ops.fused_layout import o_fused_permutation

        groups = attention.n_local_groups
        order = o_fused_permutation(HEADS_PER_GROUP, HEAD_DIM)
        out = attention._alloc_attn_out(count, torch.empty(count, 1, dtype=torch.bfloat16))
        out.data.view(torch.uint8).fill_(0xFF)
        out.scale.as_strided((out.scale.untyped_storage().nbytes() // 4,), (1,)).fill_(-1)
        local = self.x[:, heads].reshape(-1, groups, GROUP_COLS).view(torch.uint8)
        out.data[:, :groups] = local[:, :, order].view(torch.float8_e4m3fn)
        scale = self.scale[:, heads].reshape(-1, groups, GROUP_COLS // 32)
        out.scale[:, :groups] = scale[:, :, order[::32] // 32].contiguous().view(torch.int32)
        return out


def local_heads(rank: int, tp: int) -> slice:
    width = HEADS // tp
    return slice(rank * width, (rank + 1) * width)


def inverse_rope(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Interleaved pairs in the last 64 of 512 columns, rotated back in float32, rounded to BF16; cos_sin [T, 64]."""
    y = x.float().clone()
    cos, sin = cos_sin[:, None, : ROPE_DIM // 2], cos_sin[:, None, ROPE_DIM // 2 :]
    even, odd = x[..., -ROPE_DIM::2].float(), x[..., -ROPE_DIM + 1 :: 2].float()
    y[..., -ROPE_DIM::2], y[..., -ROPE_DIM + 1 :: 2] = even * cos + odd * sin, odd * cos - even * sin
    return y.to(torch.bfloat16).float()


def round_to_mxfp8(x: torch.Tensor) -> torch.Tensor:
    """The values after MXFP8 rounding per 32 columns: the smallest power of two with amax <= 448 * scale."""
    blocks = x.unflatten(-1, (-1, 32))
    amax = blocks.abs().amax(-1, keepdim=True)
    scale = torch.exp2(torch.ceil(torch.log2(amax.double() / 448))).float()
    scale = torch.where(amax == 0, torch.ones_like(scale), scale)
    return ((blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


def expected(
    tokens: Tokens, checkpoint: Checkpoint, cos_sin: torch.Tensor, heads: slice, *, rounding: bool = True
) -> torch.Tensor:
    """float32 [T, hidden], this rank's partial sum. rounding: activations go through MXFP8 as on Blackwell; else they stay
    BF16, as vLLM computes on Hopper."""
    if rounding or tokens.attn is None:
        rotated = tokens.rotated(cos_sin)
    else:
        rotated = inverse_rope(tokens.attn, cos_sin[tokens.positions])
    groups = slice(heads.start // HEADS_PER_GROUP, heads.stop // HEADS_PER_GROUP)
    w_a = checkpoint.floats("wo_a").view(-1, RANK, GROUP_COLS)[groups]
    count = rotated.shape[0]
    z = torch.einsum("tgk,gnk->tgn", rotated[:, heads].reshape(count, w_a.shape[0], GROUP_COLS), w_a)
    z = z.to(torch.bfloat16).float().flatten(1)
    if rounding:
        z = round_to_mxfp8(z)
    w_b = checkpoint.floats("wo_b")[:, groups.start * RANK : groups.stop * RANK]
    return z @ w_b.t()


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.float() - want.float()).norm() / want.float().norm().clamp(min=1e-30)).item()


# ---- watching ------------------------------------------------------------------------------------------------------


class OpLog(TorchDispatchMode):
    """Records this package's ops with their arguments, and the largest new tensor of each dtype that any op returns."""

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


def key_without_kernels(capability: tuple[int, int]) -> tuple[str, str]:
    """The selector's name of that GPU, or of one that will stay without, and why it cannot be used."""
    from vllm_megaattn import selector

    for key in (f"sm{capability[0]}{capability[1]}", "sm80"):
        gap = selector.backend_gap(key)
        if gap:
            return key, gap
    raise AssertionError("every GPU has kernels")


def project(world: World, layer: tuple, tokens: Tokens, heads: slice) -> tuple[torch.Tensor, list[str], OpLog]:
    """`_o_proj` of a (layer, configuration): the result, the names of the calls of vLLM's GEMM libraries, and our ops."""
    attention, config = layer
    vllm_standins.CALLS.clear()
    with OpLog() as log:
        y = world.run(attention, tokens.for_layer(attention, heads), tokens.positions, config)
    return y, [name for name, _ in vllm_standins.CALLS], log
