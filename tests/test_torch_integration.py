"""What torch asks of an op: schemas, fakes, meta tensors, symbolic sizes, torch.compile, inference mode."""

from __future__ import annotations

import numpy as np
import pytest
import reference as ref
import torch
from helpers import E4M3, bf16, codes, make_matmul, same_bits
from test_errors import OPS, make, raw_arguments
from test_o_proj import make_activation, make_weights, op_arguments
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import vllm_megaattn
from vllm_megaattn._registration import NAMESPACE
from vllm_megaattn._registration import OPS as REGISTERED


def reblock_arguments() -> list[torch.Tensor]:
    problem = make_matmul(np.random.default_rng(0), 1, 2, 64, 256)
    _, _, w, w_scale = problem.args()
    out = torch.empty((2, 64, 256), dtype=E4M3), torch.empty((2, 2, 1), dtype=torch.uint8)
    return [w, w_scale, *out, torch.empty(3, dtype=torch.float64)]


def arguments(name: str) -> list[object]:
    return reblock_arguments() if name == "reblock_weight" else raw_arguments(make(name))


def random_operands(name: str, tokens: int, rng) -> tuple[list[torch.Tensor], dict[str, object]]:
    """Random operands of a front end, and its options."""
    if name == "mxfp8_quantize_sfd128x4":
        return [bf16(ref.bf16_encode(rng.standard_normal((tokens, 2, 96))))], {}
    if name == "mxfp8_gemm_wo_b":
        problem = make_matmul(rng, tokens, 1, 96, 288)
        x, _, w, w_scale = problem.x[:, 0], None, problem.w[0], problem.w_blocks[0]
        tensors = [torch.from_numpy(a.copy()) for a in (x, ref.f8_128x4_pack(problem.x_scale[:, 0]), w, w_scale)]
        return [tensors[0].view(E4M3), tensors[1], tensors[2].view(E4M3), tensors[3]], {}
    if name.startswith("einsum"):
        return list(make_matmul(rng, tokens, 2, 96, 256).args()), {}
    attention = [
        bf16(ref.bf16_encode(rng.standard_normal((tokens, 4, 128)))),
        torch.from_numpy(rng.integers(0, 9, tokens)),
        torch.from_numpy(rng.uniform(-1, 1, (9, 64)).astype("float32")),
    ]
    if name == "inv_rope_mxfp8_quantize":
        return attention, {"groups": 2}
    weights, _, _ = make_weights(rng, 2, 96, 256, 64)
    if name == "o_proj_from_attn":
        return [*attention, *weights], {"groups": 2}
    activation, _, _ = make_activation(rng, tokens, 2, 256)
    return [*activation, *weights], {}


def flat(result) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


# ---- registration ----------------------------------------------------------------------------------------------


def test_every_op_is_listed_and_has_all_kernels():
    """B69: nothing is registered that the package does not list; each op has CPU, CUDA and fake kernels."""
    registered = {
        schema.name.split("::")[1]
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith(f"{NAMESPACE}::")
    }
    assert registered == set(REGISTERED)
    assert set(OPS) <= registered
    for name in registered:
        for key in ("CPU", "CUDA", "Meta"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{name}", key), (name, key)


@pytest.mark.parametrize("name", REGISTERED)
def test_schema_declares_every_output_as_mutable(name):
    """Tensor, int and bool only; results through mutable arguments, each its own alias set; nothing returned."""
    schema = getattr(torch.ops.vllm_megaattn, name).default._schema
    assert len(schema.returns) == 0
    aliases = [argument.alias_info for argument in schema.arguments if argument.alias_info is not None]
    assert aliases
    assert all(info.is_write for info in aliases)
    sets = [name for info in aliases for name in info.before_set]
    assert len(sets) == len(set(sets)) == len(aliases)
    assert {str(argument.type) for argument in schema.arguments} <= {"Tensor", "int", "bool"}
    assert not any(argument.has_default_value() for argument in schema.arguments)


@pytest.fixture
def allclose_of_float8(monkeypatch):
    """opcheck's schema test compares inputs before and after with torch.allclose, which has no float8 kernel on the
    CPU; the bytes say the same."""
    original = torch.allclose

    def allclose(a, b, **options):
        if a.dtype.itemsize == 1:
            a, b = a.view(torch.uint8), b.view(torch.uint8)
        return original(a, b, **options)

    monkeypatch.setattr(torch, "allclose", allclose)


@pytest.mark.usefixtures("allclose_of_float8")
@pytest.mark.parametrize("name", REGISTERED)
def test_opcheck(name):
    """Schema, autograd registration, fake tensor and AOT dispatch tests of torch itself (B71)."""
    torch.library.opcheck(getattr(torch.ops.vllm_megaattn, name).default, tuple(arguments(name)))


@pytest.mark.usefixtures("allclose_of_float8")
@pytest.mark.parametrize("tokens", [1, 129])
@pytest.mark.parametrize("name", OPS)
def test_opcheck_on_random_data(name, tokens, device, monkeypatch, rng):
    """The same on data of other sizes, for writes that only appear behind the first tile."""
    operands, options = random_operands(name, tokens, rng)
    operands = [operand.to(device) for operand in operands]
    calls = op_arguments(monkeypatch)
    getattr(vllm_megaattn, name)(*operands, **options)
    op = getattr(torch.ops.vllm_megaattn, name).default
    torch.library.opcheck(op, calls[0], test_utils=("test_schema", "test_faketensor"))


@pytest.mark.usefixtures("allclose_of_float8")
def test_opcheck_would_notice_an_undeclared_write(rng):
    """The check above has teeth: the same kernel under a schema that hides one of its outputs fails."""
    library = torch.library.Library("vllm_megaattn_tests", "FRAGMENT")
    try:
        library.define("hidden_write(Tensor z, Tensor(a!) q, Tensor q_scale, int scale_span) -> ()")
        library.impl("hidden_write", torch.ops.vllm_megaattn.mxfp8_quantize_sfd128x4.default, "CPU")
        z = bf16(ref.bf16_encode(rng.standard_normal((5, 96))))
        outs = torch.zeros((5, 96), dtype=E4M3), torch.zeros(512, dtype=torch.uint8)
        with pytest.raises(Exception, match="q_scale is not defined as mutable but was mutated"):
            torch.library.opcheck(
                torch.ops.vllm_megaattn_tests.hidden_write.default, (z, *outs, 32), test_utils="test_schema"
            )
    finally:
        library._destroy()


# ---- meta and fake tensors (B68, B70) --------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 1, 129])
@pytest.mark.parametrize("name", OPS)
def test_meta_results_look_like_real_ones(name, tokens, rng):
    operands, options = random_operands(name, tokens, rng)
    real = flat(getattr(vllm_megaattn, name)(*operands, **options))
    meta = flat(getattr(vllm_megaattn, name)(*(t.to("meta") for t in operands), **options))
    with FakeTensorMode() as mode:
        fake = flat(getattr(vllm_megaattn, name)(*(mode.from_tensor(t) for t in operands), **options))
    for r, m, f in zip(real, meta, fake, strict=True):
        for other in (m, f):
            assert other.shape == r.shape
            assert other.dtype == r.dtype
            assert other.stride() == r.stride()
        assert m.device.type == "meta"
        assert f.device == r.device


def spoiled(name, rng):
    """Valid operands of `name`, each with a wrong dtype, with one dimension more, and with half its columns."""
    operands, options = random_operands(name, 5, rng)
    for place, operand in enumerate(operands):
        wrong = {"dtype": operand.to(torch.complex64), "dims": operand[None, None]}
        if operand.dtype == E4M3 and operand.shape[-1] % 256 == 0:
            wrong["columns"] = operand[..., : operand.shape[-1] // 2]
        for what, tensor in wrong.items():
            yield (place, what), [*operands[:place], tensor, *operands[place + 1 :]], options


@pytest.mark.parametrize("name", OPS)
def test_meta_tensors_are_refused_like_real_ones(name, rng):
    """The type of the error, and the argument that it names first."""
    op = getattr(vllm_megaattn, name)
    for where, operands, options in spoiled(name, rng):
        with pytest.raises((TypeError, ValueError)) as real:
            op(*operands, **options)
        with pytest.raises((TypeError, ValueError)) as meta:
            op(*(t.to("meta") for t in operands), **options)
        assert type(meta.value) is type(real.value), (where, real.value, meta.value)
        named = [str(error.value).split(" must ")[0] for error in (real, meta)]
        assert named[0] == named[1], (where, real.value, meta.value)


def symbolic(mode: FakeTensorMode, tensor: torch.Tensor, tokens: int) -> torch.Tensor:
    """A fake of `tensor` whose sizes equal to `tokens` are symbols."""
    dynamic = [DimDynamic.DYNAMIC if size == tokens else DimDynamic.STATIC for size in tensor.shape]
    context = StatelessSymbolicContext(dynamic_sizes=dynamic)
    return mode.from_tensor(tensor, symbolic_context=context, static_shapes=False)


@pytest.mark.parametrize("name", OPS)
def test_symbolic_token_count_is_not_guarded(name, rng):
    """B73: T stays a symbol through the front end; sizes come out as formulas in it, and no guard fixes it."""
    tokens = 131  # no other size of the operands
    operands, options = random_operands(name, tokens, rng)
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env) as mode:
        fakes = [symbolic(mode, tensor, tokens) for tensor in operands if tensor.dim() > 0]
        if name == "mxfp8_gemm_wo_b":  # its scale buffer's size is a formula of T, a second symbol here
            fakes[1] = mode.from_tensor(operands[1])
        results = flat(getattr(vllm_megaattn, name)(*fakes, **options))
    first = results[0].shape[0]
    assert isinstance(first, torch.SymInt)
    assert first.node.expr.is_symbol
    if len(results) == 2 and results[1].dim() == 1:
        hint = results[1].shape[0]
        assert isinstance(hint, torch.SymInt)
        assert hint.node.expr.free_symbols == {first.node.expr}
    guards = [str(guard.expr) for guard in env.guards]
    fixed = [text for text in guards if text.startswith("Eq(") and "131" in text]
    assert not fixed, guards
    (symbol,) = {first.node.expr}
    low_high = env.var_to_range[symbol]
    assert low_high.upper > 10**6, f"T is bounded by {low_high}: {guards}"


@pytest.mark.parametrize("name", OPS)
def test_results_do_not_alias_inputs(name, rng):
    operands, options = random_operands(name, 33, rng)
    results = flat(getattr(vllm_megaattn, name)(*operands, **options))
    storages = [tensor.untyped_storage().data_ptr() for tensor in (*operands, *results)]
    assert len(storages) == len(set(storages))


@pytest.mark.parametrize("name", OPS)
def test_inputs_are_not_changed_and_versions_not_bumped(name, rng):
    operands, options = random_operands(name, 33, rng)
    before = [(codes(tensor).copy(), tensor._version) for tensor in operands]
    getattr(vllm_megaattn, name)(*operands, **options)
    for tensor, (saved, version) in zip(operands, before, strict=True):
        assert (codes(tensor) == saved).all()
        assert tensor._version == version


# ---- torch.compile ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", OPS)
def test_compiled_calls_equal_eager_ones(name, backend, rng):
    torch._dynamo.reset()
    operands, options = random_operands(name, 33, rng)
    function = getattr(vllm_megaattn, name)
    compiled = torch.compile(lambda *tensors: function(*tensors, **options), backend=backend, fullgraph=True)
    for expected, got in zip(flat(function(*operands, **options)), flat(compiled(*operands)), strict=True):
        assert same_bits(expected, got)
        assert expected.stride() == got.stride()


@pytest.mark.parametrize("name", ["einsum_fp8_sfd128x4", "o_proj", "o_proj_from_attn"])
def test_one_graph_serves_all_token_counts(name, rng):
    """dynamic=True: after the second size nothing is compiled again."""
    torch._dynamo.reset()
    function = getattr(vllm_megaattn, name)
    _, options = random_operands(name, 1, rng)
    compilations = []

    def backend(graph, _):
        compilations.append(graph)
        return graph.forward

    compiled = torch.compile(
        lambda *tensors: function(*tensors, **options), backend=backend, fullgraph=True, dynamic=True
    )
    for tokens in (33, 5, 127, 128, 129, 260):
        operands, _ = random_operands(name, tokens, rng)
        operands = [t.contiguous() if t.dtype == torch.int32 else t for t in operands]
        for expected, got in zip(flat(function(*operands, **options)), flat(compiled(*operands)), strict=True):
            assert same_bits(expected, got), tokens
    assert len(compilations) == 1


def test_a_chain_with_ordinary_torch_code_compiles(rng):
    """Views before, arithmetic behind, an output given: functionalisation must keep every write (B70)."""
    torch._dynamo.reset()
    operands, _ = random_operands("o_proj", 33, rng)

    def chain(x, x_scale, wo_a, wo_a_scale, wo_b, wo_b_scale):
        z = torch.zeros((x.shape[0], 2, 96), dtype=torch.bfloat16)
        vllm_megaattn.einsum_fp8_bf16(x, x_scale, wo_a, wo_a_scale, out=z)
        q, q_scale = vllm_megaattn.mxfp8_quantize_sfd128x4(z.view(x.shape[0], -1))
        y = vllm_megaattn.mxfp8_gemm_wo_b(q, q_scale, wo_b, wo_b_scale)
        return y.float() * 2 + 1, z

    expected = chain(*operands)
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        got = torch.compile(chain, backend=backend, fullgraph=True)(*operands)
        assert torch.equal(got[0], expected[0])
        assert same_bits(got[1], expected[1])


def test_errors_inside_a_compiled_call_still_name_the_argument(rng):
    torch._dynamo.reset()
    operands, _ = random_operands("einsum_fp8_bf16", 5, rng)
    operands[3] = operands[3][:, :, :7]
    compiled = torch.compile(vllm_megaattn.einsum_fp8_bf16, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"einsum_fp8_bf16: w_scale must hold"):
        compiled(*operands)


# ---- grad modes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPS)
def test_grad_modes(name, rng):
    """The same bits in every mode; no result pretends to have a gradient."""
    operands, options = random_operands(name, 5, rng)
    function = getattr(vllm_megaattn, name)
    expected = flat(function(*operands, **options))
    assert not any(result.requires_grad for result in expected)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            results = flat(function(*operands, **options))
            assert all(map(same_bits, results, expected))
    with torch.inference_mode():
        inference = [tensor.clone() for tensor in operands]
    results = flat(function(*inference, **options))  # inference tensors used outside the mode
    assert all(map(same_bits, results, expected))


def test_default_dtype_and_device_do_not_matter(rng):
    operands, _ = random_operands("o_proj_from_attn", 5, rng)
    expected = vllm_megaattn.o_proj_from_attn(*operands, groups=2)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            got = vllm_megaattn.o_proj_from_attn(*operands, groups=2)
    finally:
        torch.set_default_dtype(before)
    assert same_bits(got, expected)


def test_flush_denormal_mode_does_not_change_results(rng):
    """torch.set_flush_denormal(True) makes the calling thread flush FP32 subnormals. Only subnormal BF16 inputs may be
    taken for zero then, as the caller asked; scale bytes 0 and 254 and normal inputs under byte 1 must not suffer."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no flush-to-zero mode")
    torch.set_flush_denormal(False)
    problem = make_matmul(rng, 3, 1, 64, 128)
    problem.x_scale[:], problem.w_blocks[:], problem.w_scale[:] = 0, 254, 254
    small = bf16(rng.integers(0x0080, 0x0500, (5, 256)).astype("uint16"))
    expected = vllm_megaattn.einsum_fp8_bf16(*problem.args()), *vllm_megaattn.mxfp8_quantize_sfd128x4(small)
    try:
        torch.set_flush_denormal(True)
        got = vllm_megaattn.einsum_fp8_bf16(*problem.args()), *vllm_megaattn.mxfp8_quantize_sfd128x4(small)
    finally:
        torch.set_flush_denormal(False)
    assert all(map(same_bits, got, expected))


def test_raw_ops_detach():
    """What `ops` says of callers of torch.ops: no autograd kernel, so a result does not require grad."""
    z = torch.zeros((4, 64), dtype=torch.bfloat16, requires_grad=True)
    q, q_scale = torch.empty((4, 64), dtype=torch.float8_e4m3fn), torch.empty(512, dtype=torch.uint8)
    torch.ops.vllm_megaattn.mxfp8_quantize_sfd128x4(z, q, q_scale, 32)
    assert not q.requires_grad
    with pytest.raises(ValueError, match="z requires grad, but this op has no backward"):
        vllm_megaattn.mxfp8_quantize_sfd128x4(z)
