"""Blackwell: SGLang's tensor-parallel path, mega attention, SM12x and V4 there, on the CPU backend in place of
kernels that do not exist yet. What the plugin does with SGLang's tensors is the same; that it waits for the kernels
is tested with the gates."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.capability((10, 0), (10, 3), (12, 0))

datacenter = pytest.mark.capability((10, 0), (10, 3))


@pytest.fixture(scope="module")
def checkpoints(world):
    from sglang_layers import Checkpoint

    return {model: Checkpoint.random(model) for model in ("v41", "v4")}


@pytest.fixture
def make(world, checkpoints, plugin):
    """A loaded model that the plugin serves."""

    def build(model: str = "v41", **options):
        plugin()
        return world.make(model, checkpoints[model], **options)

    return build


@pytest.fixture
def mega(world):
    if not hasattr(world.model.MQALayer, "_forward_mega"):
        pytest.skip("this SGLang has no mega attention")


# ---- tensor parallel, BF16 attention output ------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_values(world, checkpoints, make, tp):
    """At every number of tokens, also where SGLang alone takes its fused kernel (32 and fewer) and where it does
    not."""
    import sglang_standins as standins
    from sglang_layers import OpLog, Tokens, expected, relative_error

    built = make(tp=tp, rank=tp - 1)
    attention = built.attention
    assert attention._megaattn.plan.name == "blackwell"
    for count, mode in ((1, "decode"), (32, "target_verify"), (33, "decode"), (130, "extend")):
        tokens = Tokens.random(count)
        with OpLog() as log:
            y = built.run(tokens, mode=mode)[1]
        assert log.names() == ["o_proj_from_attn"]
        assert standins.called() == []
        assert relative_error(y, expected(tokens, checkpoints["v41"], attention)) < 4e-3


def test_bytes_are_those_of_the_checkpoint(world, checkpoints, make):
    attention = make(tp=4, rank=1).attention
    for name in ("wo_a", "wo_b"):
        linear = getattr(attention, name)
        weight, scale = checkpoints["v41"].rows(name, 1, 4)
        assert torch.equal(linear.weight.view(torch.uint8), weight.view(torch.uint8))
        assert torch.equal(linear.megaattn_scale, scale)


@datacenter
def test_wo_b_is_shared_with_sglang(world, checkpoints, make):
    """Our product reads SGLang's own F8_128x4 scales; plain activations, and with them its autotuning, go SGLang's
    way."""
    import sglang_standins as standins
    from sglang_layers import OpLog, Tokens, relative_error, round_to_mxfp8

    built = make(tp=4)
    wo_b = built.attention.wo_b
    with OpLog() as log:
        built.run(Tokens.random(5))
    operands = log.ops[0][1][5:7]
    assert [t.data_ptr() for t in operands] == [wo_b.weight.data_ptr(), wo_b.weight_scale_inv_swizzled.data_ptr()]
    standins.CALLS.clear()
    x = torch.randn(3, 2048, dtype=torch.bfloat16)
    y = wo_b.quant_method.apply(wo_b, x)
    assert standins.called() == ["mxfp8_quantize", "mm_mxfp8"]
    assert relative_error(y, round_to_mxfp8(x.float()) @ checkpoints["v41"].floats("wo_b")[:, :2048].t()) < 4e-3
    if hasattr(built.model, "autotune_prefill_kernels"):
        with built.inside():
            assert built.model.autotune_prefill_kernels(16, dtype=torch.bfloat16) > 0


@datacenter
@pytest.mark.parametrize("backend", ["triton", "deep_gemm", "flashinfer_cutlass"])
def test_backends_of_wo_b(world, checkpoints, make, backend):
    """Whatever serves wo_b in SGLang, the same bytes and scales are there for us."""
    from sglang_layers import Tokens, expected, relative_error

    built = make(tp=2, rank=1, settings={"fp8_gemm_runner_backend": backend})
    tokens = Tokens.random(5)
    y = built.run(tokens)[1]
    assert relative_error(y, expected(tokens, checkpoints["v41"], built.attention)) < 4e-3


@datacenter
def test_agrees_with_sglangs_own_path_within_the_rounding_of_activations(world, checkpoints, make):
    """Its BF16 wo_a rounds only z; see the Hopper test for the bound."""
    from sglang_layers import Tokens, relative_error

    tokens = Tokens.random(5)
    theirs = world.make("v41", checkpoints["v41"], tp=4).run(tokens)[1]
    assert 1e-3 < relative_error(make(tp=4).run(tokens)[1], theirs) < 5e-2


@datacenter
def test_layers_left_to_sglang_lose_its_fused_kernel_only_beside_served_ones(
    world, checkpoints, plugin, messages, limit_as_imported
):
    """The limit on its tokens is one constant of the module. A draft that we refuse must not take that path for more."""
    import sglang_standins as standins
    from sglang_layers import Tokens, expected, relative_error

    plugin(lambda capability, device: "sm80")
    left = world.make("v41", checkpoints["v41"], tp=4)
    assert left.attention.use_fused_wo_a
    left.run(Tokens.random(5))
    assert standins.called()[0] == "fused_rope_wo_a"
    plugin()
    served = world.make("v41", checkpoints["v41"], tp=4)
    after = world.make("v41", checkpoints["v41"], tp=4, settings={"load_format": "sharded_state"})
    assert hasattr(served.attention, "_megaattn")
    assert world.model._FUSED_WO_A_MAX_TOKENS > 2**31
    for built in (left, after):
        tokens = Tokens.random(40)
        y = built.run(tokens)[1]
        assert "fused_rope_wo_a" not in standins.called()
        want = expected(tokens, checkpoints["v41"], built.attention, round_attn=False)
        assert relative_error(y, want) < 2e-2
    assert any("lose its fused kernel" in text for _, text in messages)


# ---- mega attention ------------------------------------------------------------------------------------------------


@datacenter
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_mega_values(world, checkpoints, make, mega, tp):
    """e4m3 and packed scales as the attention kernel writes them, as slices of a buffer for all heads; z as MXFP8 to
    wo_b."""
    import sglang_standins as standins
    from sglang_layers import OpLog, Tokens, expected, relative_error

    built = make(tp=tp, rank=tp - 1, mega=True)
    attention = built.attention
    assert attention._megaattn.plan.name == "mega"
    for count, mode in ((1, "decode"), (5, "target_verify"), (130, "extend")):
        tokens = Tokens.random(count)
        with OpLog() as log:
            y = built.run(tokens, mode=mode)[1]
        assert log.names() == ["einsum_fp8_sfd128x4", "mxfp8_gemm_wo_b"]
        assert standins.called() == []
        assert relative_error(y, expected(tokens, checkpoints["v41"], attention)) < 4e-3
    x, x_scale = log.ops[0][1][:2]
    assert x.stride() == (8 * 4096, 4096, 1)
    assert x_scale.stride() == (1, 32 * 132, 132)


@datacenter
def test_mega_holds_wo_a_once(world, checkpoints, make, mega):
    """Neither a BF16 copy nor a second FP8 one: what `_mega_core` passes on is wo_a itself, columns in the kernel's
    order."""
    from sglang_layers import OpLog

    with OpLog() as log:
        attention = make(mega=True).attention
    weight, scale = attention.mega_wo_a
    assert weight.data_ptr() == attention.wo_a.weight.data_ptr()
    assert scale.data_ptr() == attention.wo_a.megaattn_scale.data_ptr()
    assert (tuple(weight.shape), tuple(scale.shape)) == ((8, 1024, 4096), (8, 32, 128))
    assert log.largest.get(torch.bfloat16, 0) < weight.numel() // 2
    assert not hasattr(attention.wo_b, "weight_scale_inv_deepgemm")
    loaded, blocks = checkpoints["v41"].rows("wo_a", 0, 1)
    for head, chunk in ((0, 0), (3, 7), (7, 15)):
        source, target = head * 512 + chunk * 32, (chunk * 8 + head) * 32
        want = loaded.view(torch.uint8)[:, source : source + 32]
        assert torch.equal(attention.wo_a.weight.view(torch.uint8)[:, target : target + 32], want)
        assert torch.equal(attention.wo_a.megaattn_scale[:, target // 32], blocks[:, source // 32])


@datacenter
def test_mega_agrees_with_sglang(world, checkpoints, make, mega):
    """Same rounding of the attention output and of z: what differs is the order of sums before BF16."""
    import sglang_standins as standins
    from sglang_layers import Tokens, relative_error

    tokens = Tokens.random(5)
    upstream = world.make("v41", checkpoints["v41"], tp=2, mega=True)
    assert upstream.attention.wo_a.weight.dtype is torch.bfloat16
    theirs = upstream.run(tokens)[1]
    assert standins.called() == ["fp8_einsum", "gemm_nt"]
    assert relative_error(make(tp=2, mega=True).run(tokens)[1], theirs) < 1e-2


@datacenter
@pytest.mark.parametrize(("rows", "live"), [(9, 6), (130, 1), (260, 129), (8, 8), (5, 0)])
def test_mega_prefill_graph(world, checkpoints, make, mega, monkeypatch, rows, live):
    """Attention and wo_a on the live rows between captured segments, wo_b on all rows: zeros after the live ones."""
    from sglang_layers import OpLog, Tokens, expected, relative_error

    from vllm_megaattn.engines.sglang import forward

    built = make(tp=2, mega=True)
    tokens = Tokens.random(rows)

    def poisoned(*args, **kwargs):
        made = empty(*args, **kwargs)
        made.view(torch.uint8).fill_(0xFF)
        return made

    empty = torch.empty
    monkeypatch.setattr(forward, "torch", SimpleNamespace(**{**vars(torch), "empty": poisoned}))
    with OpLog() as log:
        y = built.run(tokens, mode="extend", breakable=True, live=live)[1]
    assert log.names() == ["einsum_fp8_sfd128x4"] * bool(live) + ["mxfp8_gemm_wo_b"]
    only = Tokens(tokens.positions[:live], tokens.attn[:live])
    if live:
        assert relative_error(y[:live], expected(only, checkpoints["v41"], built.attention)) < 4e-3
    assert not bool(y[live:].any())


@datacenter
def test_mega_idle_rank(world, make, mega, monkeypatch):
    """SGLang returns BF16 zeros of z there, which wo_b takes as plain activations."""
    from sglang_layers import HIDDEN, Tokens

    built = make(mega=True)
    monkeypatch.setattr(world.model.get_attn_tp_context(), "input_scattered", True)
    assert built.run(Tokens.random(0), mode="idle")[1].shape == (0, HIDDEN)


@datacenter
def test_mega_bf16_buffer(world, checkpoints, make, mega):
    """`_mega_core` may be handed a BF16 buffer for z, as SGLang's own prefill graph does."""
    from sglang_layers import Tokens, relative_error

    from vllm_megaattn.engines.sglang import forward

    built = make(tp=4, mega=True)
    attention, tokens = built.attention, Tokens.random(7)
    data, scale = tokens.mega_buffer(attention, 7)
    out = torch.empty(7, 2, 1024, dtype=torch.bfloat16)
    got = world.model._fp8_wo_a_einsum(data[:, :2], scale[:, :2], *attention.mega_wo_a, recipe=(1, 1, 32), out=out)
    assert got is out
    fused = world.model._fp8_wo_a_einsum(data[:, :2], scale[:, :2], *attention.mega_wo_a, recipe=(1, 1, 32))
    import sglang_standins as standins

    codes = standins.unswizzle(fused.scales, 7, 64)
    z = fused.data.float() * torch.exp2(codes.float() - 127).repeat_interleave(32, 1)
    assert relative_error(z, out.flatten(1)) < 4e-2
    assert forward.mega_operand(attention, attention._megaattn) is not None


# ---- DeepSeek-V4 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (4, 3)])
def test_v4_values(world, checkpoints, make, tp, rank):
    """128x128 blocks: wo_b is ours altogether, since SGLang would lay its scales out for DeepGEMM in place."""
    import sglang_standins as standins
    from sglang_layers import OpLog, Tokens, expected, relative_error

    built = make("v4", tp=tp, rank=rank)
    assert built.attention._megaattn.plan.own_wo_b
    for count in (1, 130):
        tokens = Tokens.random(count)
        with OpLog() as log:
            y = built.run(tokens)[1]
        assert log.names() == ["o_proj_from_attn"]
        assert standins.called() == []
        assert relative_error(y, expected(tokens, checkpoints["v4"], built.attention)) < 4e-3
