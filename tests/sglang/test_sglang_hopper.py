"""DeepSeek-V4.1 and V4 on Hopper: SGLang's own model, loader and forward with our projection, on the CPU backend."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.capability((9, 0))

COUNTS = (1, 5, 128, 130)


@pytest.fixture(scope="module")
def checkpoints(world):
    from sglang_layers import Checkpoint

    return {model: Checkpoint.random(model) for model in ("v41", "v4")}


@pytest.fixture(scope="module")
def served(world, checkpoints):
    """(model, tp, rank) -> a loaded model that the plugin serves."""
    from vllm_megaattn.engines.sglang import register, unregister

    models = {}

    def get(model: str = "v41", tp: int = 1, rank: int = 0):
        if (model, tp, rank) not in models:
            register(device_keys=lambda capability, device: "cpu")
            models[model, tp, rank] = world.make(model, checkpoints[model], tp=tp, rank=rank)
            unregister()
        return models[model, tp, rank]

    return get


def test_layer_is_sglangs_own_class(world, served):
    attention = served().attention
    assert type(attention) is world.model.MQALayer
    assert attention._megaattn.plan.name == "hopper"
    for linear in (attention.wo_a, attention.wo_b):
        assert type(linear.quant_method).__name__ == "Fp8LinearMethod"
    assert "apply" not in attention.wq_b.quant_method.__dict__


@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (4, 3)])
def test_bytes_are_those_of_the_checkpoint_and_no_wide_copy_is_made(world, checkpoints, plugin, tp, rank):
    """wo_a is not expanded at any moment of loading; its e4m3 bytes and scale exponents are the checkpoint's."""
    from sglang_layers import OpLog

    plugin()
    with OpLog() as log:
        built = world.make("v41", checkpoints["v41"], tp=tp, rank=rank)
    attention = built.attention
    for name in ("wo_a", "wo_b"):
        linear = getattr(attention, name)
        weight, scale = checkpoints["v41"].rows(name, rank, tp)
        assert linear.weight.dtype is torch.float8_e4m3fn
        assert torch.equal(linear.weight.view(torch.uint8), weight.view(torch.uint8))
        assert torch.equal(linear.megaattn_scale, scale)
    # the only BF16 tensors are those that SGLang builds for the rest of the layer
    assert log.largest.get(torch.bfloat16, 0) < attention.wo_a.weight.numel() // 2


def test_sglang_alone_expands_wo_a(world, checkpoints):
    """What the plugin saves: without it the same model holds wo_a in BF16."""
    from sglang_layers import OpLog

    with OpLog() as log:
        attention = world.make("v41", checkpoints["v41"]).attention
    assert attention.wo_a.weight.dtype is torch.bfloat16
    assert log.largest[torch.bfloat16] >= attention.wo_a.weight.numel()


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("count", COUNTS)
def test_values(world, checkpoints, served, tp, count):
    """Each rank's partial sum, against a float computation with the same rounding of activations."""
    from sglang_layers import HIDDEN, Tokens, expected, relative_error

    for rank in {0, tp - 1}:
        built = served("v41", tp, rank)
        tokens = Tokens.random(count)
        out, y = built.run(tokens)
        assert (y.shape, y.dtype) == ((count, HIDDEN), torch.bfloat16)
        assert hasattr(out, "partial") == (tp > 1 and world.model._is_cuda and defers())
        assert relative_error(y, expected(tokens, checkpoints["v41"], built.attention)) < 4e-3


def defers() -> bool:
    """0.5.22 defers the all-reduce only where wo_b itself would reduce."""
    from vllm_megaattn.engines.sglang import upstream

    return not upstream.version().startswith("0.5.22")


@pytest.mark.parametrize("mode", ["decode", "extend", "target_verify"])
def test_forward_modes(world, checkpoints, served, mode):
    from sglang_layers import Tokens, expected, relative_error

    built = served("v41", 4, 1)
    tokens = Tokens.random(7)
    y = built.run(tokens, mode=mode)[1]
    assert relative_error(y, expected(tokens, checkpoints["v41"], built.attention)) < 4e-3


def test_prefill_graph_with_padded_rows(world, checkpoints, served):
    """In a breakable prefill graph the projection is captured on padded rows: they hold anything and touch
    nothing."""
    from sglang_layers import Tokens, expected, relative_error

    built = served("v41", 4, 0)
    tokens = Tokens.random(9)
    tokens.attn[6:] = float("nan")
    y = built.run(tokens, mode="extend", breakable=True)[1]
    live = Tokens(tokens.positions[:6], tokens.attn[:6])
    assert relative_error(y[:6], expected(live, checkpoints["v41"], built.attention)) < 4e-3
    assert bool(y[6:].isnan().all())


def test_rows_do_not_depend_on_the_batch(world, served):
    from sglang_layers import Tokens

    built = served("v41", 2, 0)
    tokens = Tokens.random(130)
    whole = built.run(tokens)[1]
    for count in (1, 5, 33):
        part = built.run(Tokens(tokens.positions[:count], tokens.attn[:count]))[1]
        assert torch.equal(part, whole[:count])


def test_no_tokens(world, served):
    """An idle rank's forward returns at once; what SGLang may hand to wo_b then is handled too."""
    from sglang_layers import HIDDEN, Tokens

    built = served("v41", 4, 0)
    assert built.run(Tokens.random(0))[1].shape == (0, HIDDEN)
    attention = built.attention
    with built.inside():
        y = attention._project_wo_b(torch.zeros(0, attention.wo_b.weight.shape[1], dtype=torch.bfloat16), True)
    assert (y.partial if hasattr(y, "partial") else y).shape == (0, HIDDEN)


def test_int32_positions(world, served):
    from sglang_layers import Tokens

    built = served("v41", 4, 0)
    short, long = Tokens.random(5, dtype=torch.int32), Tokens.random(5)
    assert torch.equal(short.positions, long.positions)
    assert torch.equal(built.run(short)[1], built.run(long)[1])


def test_ranks_sum_to_the_whole(world, served):
    from sglang_layers import HIDDEN, Tokens, relative_error

    tokens = Tokens.random(5)
    total = torch.zeros(5, HIDDEN)
    for rank in range(4):
        total += served("v41", 4, rank).run(tokens)[1].float()
    assert relative_error(total, served().run(tokens)[1]) < 4e-3


def test_dp_attention_keeps_all_groups(world, checkpoints, plugin):
    """Four ranks with DP attention: each has the whole projection, no reduction is deferred."""
    from sglang_layers import Tokens, expected, relative_error

    plugin()
    built = world.make("v41", checkpoints["v41"], tp=4, rank=2, attn_tp=1, settings={"dp_size": 4})
    assert built.attention.n_local_groups == 8
    tokens = Tokens.random(6)
    before = world.all_reduces
    out, y = built.run(tokens)
    assert not hasattr(out, "partial")
    assert world.all_reduces == before
    assert relative_error(y, expected(tokens, checkpoints["v41"], built.attention)) < 4e-3


def test_agrees_with_sglangs_own_path_within_the_rounding_of_activations(world, checkpoints, served):
    """SGLang on Hopper rounds z to MXFP8 but not the attention output; we round both, as mega attention on Blackwell
    does. Each costs about 2.7e-2 in the norm of random data with outliers, so the difference stays below 5e-2."""
    from sglang_layers import Tokens, expected, relative_error

    upstream = world.make("v41", checkpoints["v41"], tp=4)
    tokens = Tokens.random(5)
    theirs = upstream.run(tokens)[1]
    want = expected(tokens, checkpoints["v41"], upstream.attention, round_attn=False)
    assert relative_error(theirs, want) < 2e-2  # they round the rotated output and z to BF16 in another order
    ours = served("v41", 4, 0).run(tokens)[1]
    assert 1e-3 < relative_error(ours, theirs) < 5e-2


@pytest.mark.parametrize("tp", [1, 8])
def test_what_reaches_the_op(world, served, tp):
    """One op for the whole projection: the attention buffer as it lies, SGLang's own rotary table, our weights. None
    of SGLang's kernels runs."""
    import sglang_standins as standins
    from sglang_layers import HEAD_DIM, OpLog, Tokens

    built = served("v41", tp)
    attention = built.attention
    with OpLog() as log:
        built.run(Tokens.random(5))
    assert log.names() == ["o_proj_from_attn"]
    assert standins.called() == []
    attn, positions, cache, wo_a, wo_a_scale, wo_b, wo_b_scale = log.ops[0][1][:7]
    order, layout = log.ops[0][1][13:15]
    heads = attention.n_local_heads
    assert (attn.shape, attn.stride()) == ((5, heads, HEAD_DIM), (64 * HEAD_DIM, HEAD_DIM, 1))
    assert positions.dtype is torch.int64
    assert cache.data_ptr() == attention.freqs_cis.data_ptr()
    assert (tuple(cache.shape), cache.stride()) == ((4096, 64), (64, 1))
    assert (order, layout) == (0, 1)  # standard order of columns, interleaved cos, sin
    for got, want in (
        (wo_a, attention.wo_a.weight),
        (wo_a_scale, attention.wo_a.megaattn_scale),
        (wo_b, attention.wo_b.weight),
        (wo_b_scale, attention.wo_b.megaattn_scale),
    ):
        assert got.data_ptr() == want.data_ptr()


def test_draft_layer(world, checkpoints, plugin):
    """NextN's layer (V4; V4.1 drafts with DSpark) lives in the same process and takes the same path."""
    from sglang_layers import Tokens, expected, relative_error

    plugin()
    built = world.make("v4", checkpoints["v4"], tp=2, layers=2, nextn=True)
    assert type(built.model).__name__ == "DeepseekV4ForCausalLMNextN"
    assert built.attention._megaattn.plan.name == "hopper"
    tokens = Tokens.random(4)
    y = built.run(tokens, mode="target_verify")[1]
    assert relative_error(y, expected(tokens, checkpoints["v4"], built.attention)) < 4e-3


def test_plain_activations_into_wo_b(world, checkpoints, served):
    """What a warm-up calls: the bytes are ours, so the product is ours too."""
    from sglang_layers import HIDDEN, relative_error, round_to_mxfp8

    wo_b = served().attention.wo_b
    x = torch.randn(2, 3, 8192, dtype=torch.bfloat16)
    y = wo_b.quant_method.apply(wo_b, x)
    assert (y.shape, y.dtype) == ((2, 3, HIDDEN), torch.bfloat16)
    want = round_to_mxfp8(x.float()) @ checkpoints["v41"].floats("wo_b").t()
    assert relative_error(y, want) < 4e-3
    assert torch.equal(wo_b.quant_method.apply(wo_b, x, torch.ones(HIDDEN, dtype=torch.bfloat16)), y + 1)
    with pytest.raises(TypeError, match="takes a tensor or MXFP8 in F8_128x4, got tuple"):
        wo_b.quant_method.apply(wo_b, (x, x))


def test_wo_b_that_is_no_longer_ours_gets_bf16(world, checkpoints, plugin, messages):
    """Another plugin's product, or a LoRA wrapper: it is handed z as SGLang would."""
    from sglang_layers import OpLog, Tokens, expected, relative_error

    plugin()
    built = world.make("v41", checkpoints["v41"], tp=4)
    method = built.attention.wo_b.quant_method
    ours, handed = method.apply, []

    def other(layer, x, bias=None):
        handed.append(x)
        return ours(layer, x, bias)

    method.apply = other
    tokens = Tokens.random(5)
    with OpLog() as log:
        y = built.run(tokens)[1]
    assert log.names()[:2] == ["inv_rope_mxfp8_quantize", "einsum_fp8_bf16"]
    assert [(x.dtype, tuple(x.shape)) for x in handed] == [(torch.bfloat16, (5, 2048))]
    assert relative_error(y, expected(tokens, checkpoints["v41"], built.attention)) < 4e-3
    assert any("z is handed over in BF16" in text for _, text in messages)


def test_one_that_wraps_our_product_still_gets_everything(world, checkpoints, plugin):
    import functools

    from sglang_layers import OpLog, Tokens

    plugin()
    built = world.make("v41", checkpoints["v41"], tp=8)
    method, calls = built.attention.wo_b.quant_method, []
    ours = method.apply

    @functools.wraps(ours)
    def traced(layer, x, bias=None):
        calls.append(x)
        return ours(layer, x, bias)

    method.apply = traced
    with OpLog() as log:
        built.run(Tokens.random(3))
    assert log.names() == ["o_proj_from_attn"]
    assert len(calls) == 1


# ---- DeepSeek-V4: 128x128 blocks -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (4, 2)])
@pytest.mark.parametrize("count", [1, 5, 130])
def test_v4_values(world, checkpoints, served, tp, rank, count):
    from sglang_layers import OpLog, Tokens, expected, relative_error

    built = served("v4", tp, rank)
    tokens = Tokens.random(count)
    with OpLog() as log:
        y = built.run(tokens)[1]
    assert log.names() == ["o_proj_from_attn"]
    assert relative_error(y, expected(tokens, checkpoints["v4"], built.attention)) < 4e-3


def test_v4_keeps_block_scales(world, checkpoints, served):
    attention = served("v4").attention
    for name in ("wo_a", "wo_b"):
        linear = getattr(attention, name)
        weight, scale = checkpoints["v4"].rows(name, 0, 1)
        assert torch.equal(linear.weight.view(torch.uint8), weight.view(torch.uint8))
        assert torch.equal(linear.megaattn_scale, scale)
        assert linear.weight_scale_inv.shape == scale.shape  # SGLang would view wo_a's as [G, 8, 32]


# ---- what users see ------------------------------------------------------------------------------------------------


def test_one_line_for_the_process(world, checkpoints, plugin, messages):
    """Three layers, TP4: count, kernels and memory, once, when the first of them runs."""
    from sglang_layers import Tokens

    plugin()
    built = world.make("v41", checkpoints["v41"], tp=4, layers=3)
    assert messages == []
    for layer in range(3):
        built.run(Tokens.random(2), layer=layer)
    # a layer: BF16 [2048, 4096] against e4m3 of it, float32 and uint8 scales of 64 x 128 blocks; and wo_b's 40 x 64
    # bytes
    saved = 3 * (2048 * 4096 - 5 * 64 * 128 - 40 * 64) / 2**20
    assert messages == [
        (
            "INFO",
            "vllm_megaattn: output projection of 3 of 3 attention layers: 3 fused on cpu; "
            f"{saved:.1f} MiB of weights less than with the engine's own path on this GPU",
        )
    ]
