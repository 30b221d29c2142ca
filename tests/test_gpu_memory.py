"""GPU: what lies around operands and results, strides and addresses that TMA cannot take, no tokens and very many.

A call is either right or refused by name; nothing in between. Buffers around results hold 0xA5, rows behind the last
token NaN.
"""

from __future__ import annotations

from collections.abc import Callable

import gpu_helpers as gpu
import pytest
import torch
from gpu_helpers import E4M3, Guarded, Tally, count_differences, make_chain, make_problem, misplaced, same

import vllm_megaattn
from vllm_megaattn import layouts

pytestmark = pytest.mark.gpu

FORMS = ("wide", "blocks", "rows")
TOKEN_TAILS = (1, 7, 8, 9, 31, 33, 63, 64, 65, 96, 127, 128, 129, 200)


# ---- poisoned surroundings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_rows_behind_the_last_token_do_not_matter(form):
    """T = 1 .. 130: data and scales behind the last token are NaN, results lie in 0xA5 (B19, B20, B22, B55)."""
    problem = make_problem(max(gpu.EVERY_TOKEN_COUNT), 2, 160 if form == "rows" else 256, 512, form, seed=81)
    n, cols, tally = problem.w.shape[1], problem.num_cols, Tally()
    x, scale = torch.empty_like(problem.x), torch.empty_like(problem.x_scale)
    span = 32 if form == "rows" else 256
    for tokens in (t for t in gpu.EVERY_TOKEN_COUNT if t <= 131):
        clean = problem.head(tokens)
        bf16, fused = clean.bf16(), clean.mxfp8(span)
        gpu.bits(x).fill_(0x7F)
        scale.fill_(-1)
        x[:tokens] = clean.x
        scale[:tokens] = clean.x_scale
        args = (x[:tokens], scale[:tokens], problem.w, problem.w_scale)
        z = Guarded((tokens, 2, n), torch.bfloat16)
        data, scales = gpu.mxfp8_buffers(tokens, cols)
        vllm_megaattn.einsum_fp8_bf16(*args, x_span=problem.x_span, out=z.tensor)
        vllm_megaattn.einsum_fp8_sfd128x4(
            *args, x_span=problem.x_span, scale_span=span, out=(data.tensor, scales.tensor)
        )
        tally.add((tokens, "BF16"), count_differences(z.tensor, bf16), z.disturbed())
        tally.add((tokens, "data"), count_differences(data.tensor, fused[0]), data.disturbed())
        tally.add((tokens, "scales"), count_differences(scales.tensor, fused[1]), scales.disturbed())
    tally.check()


@pytest.mark.parametrize("form", ["wide", "blocks"])
def test_padding_of_the_scales_of_z_does_not_matter(form):
    """wo_b with NaN in all padding bytes of z's scales, and z a slice of a NaN-filled buffer (B22, B33)."""
    for n, k in ((160, 512), (320, 1024), (96, 576)):
        problem, tally = make_problem(200, 1, n, k, form if k % 256 == 0 else "blocks", seed=82), Tally()
        for tokens in TOKEN_TAILS:
            linear = problem.x_bytes[:tokens, 0].cpu()
            clean, dirty = (layouts.to_f8_128x4(linear).to(gpu.DEVICE) for _ in range(2))
            live = layouts.to_f8_128x4(torch.ones_like(linear)).to(gpu.DEVICE)
            dirty[live == 0] = 255
            buffer = torch.full((tokens + 130, k), 0x7F, dtype=torch.uint8, device=gpu.DEVICE).view(E4M3)
            buffer[:tokens] = problem.x[:tokens, 0]
            y = Guarded((tokens, n), torch.bfloat16)
            weights = (problem.w[0], problem.w_scale[0])
            expected = vllm_megaattn.mxfp8_gemm_wo_b(problem.x[:tokens, 0], clean, *weights, z_span=problem.x_span)
            vllm_megaattn.mxfp8_gemm_wo_b(buffer[:tokens], dirty, *weights, z_span=problem.x_span, out=y.tensor)
            tally.add((n, k, tokens), count_differences(y.tensor, expected), y.disturbed())
        tally.check()


@pytest.mark.parametrize("span", [32, 256])
def test_quantisers_write_their_results_and_nothing_else(span):
    """B25, B32: quantiser at T = 1025 and K = 544 too; the inverse RoPE's x and its scales."""
    tally = Tally()
    for tokens, cols in ((1, 512), (33, 1024), (129, 256), (1025, 544)):
        if cols % span:
            continue
        z = torch.randn((tokens, cols), generator=gpu.generator(83), device=gpu.DEVICE).bfloat16()
        data, scale = gpu.mxfp8_buffers(tokens, cols)
        vllm_megaattn.mxfp8_quantize_sfd128x4(z, scale_span=span, out=(data.tensor, scale.tensor))
        q, q_scale = vllm_megaattn.mxfp8_quantize_sfd128x4(z, scale_span=span)
        tally.add((tokens, cols), count_differences(data.tensor, q), count_differences(scale.tensor, q_scale))
        tally.add((tokens, cols, "around"), data.disturbed(), scale.disturbed())
    for tokens in (1, 5, 64, 300):
        chain = make_chain(tokens, 2, 256, 2, 96, span=span, seed=84)
        x, words = Guarded((tokens, 2, 1024), E4M3), Guarded((2, 8, -(-tokens // 4) * 4), torch.int32)
        chain.quantized(out=(x.tensor, words.tensor.permute(2, 0, 1)[:tokens]))
        expected = chain.quantized()
        tally.add((tokens, "rope"), count_differences(x.tensor, expected[0]), x.disturbed(), words.disturbed())
        tally.add((tokens, "rope scales"), count_differences(words.tensor.permute(2, 0, 1)[:tokens], expected[1]))
        tally.add((tokens, "pitch"), (words.tensor[:, :, tokens:].contiguous().view(torch.uint8) != gpu.GUARD).sum())
    tally.check()


def test_projection_reads_nothing_it_should_not():
    """Padded heads and rows behind the last token are NaN; y lies in 0xA5."""
    tally = Tally()
    chain = make_chain(131, 2, 256, 2, 320, seed=85)
    for tokens in (t for t in gpu.EVERY_TOKEN_COUNT if t <= 131):
        head = chain.head(tokens)
        wide = torch.full((tokens + 3, 64, 512), torch.nan, dtype=torch.bfloat16, device=gpu.DEVICE)
        wide[:tokens, :4] = head.attn
        for path in ("fused", "unfused"):
            y = Guarded((tokens, 320), torch.bfloat16)
            vllm_megaattn.o_proj_from_attn(
                wide[:tokens], head.positions, head.cos_sin, *head.weights,
                groups=2, path=path, scale_span=256, padded_heads=True, out=y.tensor,
            )  # fmt: skip
            tally.add((tokens, path), count_differences(y.tensor, head.from_attn(path)), y.disturbed())
    tally.check()


# ---- isolation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["wide", "blocks"])
@pytest.mark.parametrize("tokens", [5, 130, 700])
def test_groups_and_tokens_are_isolated(form, tokens):
    """Each group equals its own single-group run, though group g is scaled by 2^g (B24, B41); NaN in one group, or in
    one token, touches nothing else (B07, B19). The switch makes single and joint runs sum alike."""
    problem = make_problem(tokens, 8, 256, 512, form, seed=86)
    with gpu.flags(gpu.INVARIANT):
        z = problem.bf16()
        for g in range(8):
            cut = slice(g, g + 1)
            alone = vllm_megaattn.einsum_fp8_bf16(
                problem.x[:, cut],
                problem.x_scale[:, cut],
                problem.w[cut],
                problem.w_scale[cut],
                x_span=problem.x_span,
            )
            assert same(alone, z[:, cut].contiguous()), g
        poisons = {"x_scale": problem.x_scale.clone(), "x": problem.x.clone()}
        poisons["x_scale"][:, 3] = -1
        gpu.bits(poisons["x"])[4, 6] = 0x7F
        for which, value in poisons.items():
            args = dict(zip(("x", "x_scale", "w", "w_scale"), problem.args, strict=True)) | {which: value}
            poisoned = vllm_megaattn.einsum_fp8_bf16(*args.values(), x_span=problem.x_span)
            expected = torch.zeros((tokens, 8), dtype=torch.bool, device=gpu.DEVICE)
            if which == "x_scale":
                expected[:, 3] = True
            else:
                expected[4, 6] = True
            assert torch.equal(poisoned.isnan().all(2), expected), which
            clean = torch.where(expected[:, :, None], z, poisoned)
            assert same(clean, z), which


@pytest.mark.parametrize("tokens", [5, 130])
def test_each_wide_scale_changes_exactly_its_own_results(tokens):
    """B96 for the wide kernels: one scale at a time, 64 times larger; only what it scales may change, and must."""
    problem = make_problem(tokens, 2, 256, 768, seed=87, spread=3)
    gpu.bits(problem.x).bitwise_and_(0x0F).add_(0x30)  # positive, of like size: no block is lost in the others' sum
    gpu.bits(problem.w).bitwise_and_(0x0F).add_(0x30)
    base = problem.bf16()
    for t, g, span in ((0, 0, 0), (tokens - 1, 1, 2), (2, 0, 1), (4, 1, 0)):
        x_bytes = problem.x_bytes.clone()
        x_bytes[t, g, 8 * span : 8 * span + 8] += 6
        changed = gpu.bits(vllm_megaattn.einsum_fp8_bf16(
            problem.x, gpu.words(x_bytes), problem.w, problem.w_scale, x_span=256)) != gpu.bits(base)  # fmt: skip
        expected = torch.zeros_like(changed)
        expected[t, g] = True
        assert torch.equal(changed, expected), (t, g, span)
    for g, block in ((0, 0), (1, 7), (0, 3)):
        w_scale = problem.w_scale.clone()
        w_scale[g, block] += 6
        changed = gpu.bits(vllm_megaattn.einsum_fp8_bf16(
            problem.x, problem.x_scale, problem.w, w_scale, x_span=256)) != gpu.bits(base)  # fmt: skip
        expected = torch.zeros_like(changed)
        expected[:, g, 32 * block : 32 * block + 32] = True
        assert torch.equal(changed, expected), (g, block)


# ---- strides and addresses -------------------------------------------------------------------------------------


def right_or_refused(call: Callable[[], torch.Tensor], expected: torch.Tensor, name: str, allow_refusal: bool) -> str:
    """ "served" if the result has the expected bits, "refused" if a ValueError names the argument; else fails."""
    refusal = ""
    try:
        result = call()
    except ValueError as error:
        refusal = str(error)
    torch.cuda.synchronize()  # after a refusal too: nothing was launched, no error is pending
    if refusal:
        assert allow_refusal, f"refused what it must serve: {refusal}"
        assert name in refusal, f"the message names no {name!r}: {refusal}"
        assert any(c.isdigit() for c in refusal), f"the message holds no number: {refusal}"
        return "refused"
    assert result.shape == expected.shape
    assert int(count_differences(result, expected)) == 0, f"{name}: silently wrong"
    return "served"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [6, 130])
def test_addresses_of_einsum_operands(tokens, form, record_property):
    """B38, B39: x, w and their scales 1, 2, 4, 8 and 16 bytes past a 256-byte boundary."""
    problem = make_problem(tokens, 2, 256, 512, form, seed=88)
    expected = problem.bf16()
    answers = {}
    for place, name in enumerate(("x", "x_scale", "w", "w_scale")):
        for offset in (1, 2, 4, 8, 16):
            args = list(problem.args)
            if args[place].element_size() > offset:
                continue  # torch makes no such view
            if name == "x_scale":
                tokens_first = misplaced(args[place].permute(1, 2, 0).contiguous(), offset)
                args[place] = tokens_first.permute(2, 0, 1)
            else:
                args[place] = misplaced(args[place], offset)
            answers[f"{name}+{offset}"] = right_or_refused(
                lambda args=args: vllm_megaattn.einsum_fp8_bf16(*args, x_span=problem.x_span),
                expected,
                {"x_scale": "scale", "w_scale": "scale"}.get(name, name),
                allow_refusal=offset < 16,
            )
    record_property(f"{form} T={tokens}", str(answers))
    print(form, tokens, answers)
    assert "served" in answers.values()


@pytest.mark.parametrize("form", ["wide", "blocks"])
@pytest.mark.parametrize("tokens", [6, 130])
def test_addresses_of_gemm_operands_and_results(tokens, form):
    problem = make_problem(tokens, 1, 256, 512, form, seed=89)
    scale = layouts.to_f8_128x4(problem.x_bytes[:, 0].cpu()).to(gpu.DEVICE)
    args = {"z": problem.x[:, 0].contiguous(), "scale": scale, "w": problem.w[0], "w_scale": problem.w_scale[0]}
    expected = vllm_megaattn.mxfp8_gemm_wo_b(*args.values(), z_span=problem.x_span)
    for name in args:
        for offset in (1, 2, 4, 8, 16):
            moved = args | {name: misplaced(args[name], offset)}
            right_or_refused(
                lambda moved=moved: vllm_megaattn.mxfp8_gemm_wo_b(*moved.values(), z_span=problem.x_span),
                expected,
                "scale" if name == "w_scale" else name,
                allow_refusal=offset < 16,
            )
    for offset in (2, 4, 8, 16):
        y = Guarded((tokens, 256), torch.bfloat16, offset)
        right_or_refused(
            lambda y=y: vllm_megaattn.mxfp8_gemm_wo_b(*args.values(), z_span=problem.x_span, out=y.tensor),
            expected,
            "output",
            allow_refusal=offset < 16,
        )
        assert int(y.disturbed()) == 0


@pytest.mark.parametrize("span", [32, 256])
@pytest.mark.parametrize("tokens", [6, 130])
def test_addresses_of_fused_results_and_of_quantiser_and_rope(tokens, span):
    problem, chain = make_problem(tokens, 2, 256, 512, seed=90), make_chain(tokens, 2, 256, 2, 96, span=span, seed=91)
    fused, z = problem.mxfp8(span), problem.bf16()
    quantized, rotated = vllm_megaattn.mxfp8_quantize_sfd128x4(z, scale_span=span), chain.quantized()
    for offset in (1, 2, 4, 8, 16):
        data, scale = (Guarded(tuple(t.shape), t.dtype, offset) for t in fused)
        for which, out in enumerate(((data.tensor, fused[1].clone()), (fused[0].clone(), scale.tensor))):
            right_or_refused(
                lambda out=out: problem.mxfp8(span, out=out)[which],  # noqa: B023
                fused[which], "output", allow_refusal=offset < 16,
            )  # fmt: skip
            right_or_refused(
                lambda out=out: vllm_megaattn.mxfp8_quantize_sfd128x4(z, scale_span=span, out=out)[which],  # noqa: B023
                quantized[which], "q", allow_refusal=offset < 16,
            )  # fmt: skip
        assert int(data.disturbed()) == 0
        assert int(scale.disturbed()) == 0
        if offset >= 2:
            right_or_refused(
                lambda offset=offset: vllm_megaattn.mxfp8_quantize_sfd128x4(misplaced(z, offset), scale_span=span)[0],
                quantized[0], "z", allow_refusal=offset < 16,
            )  # fmt: skip
            attn = misplaced(chain.attn, offset)
            right_or_refused(
                lambda attn=attn: vllm_megaattn.inv_rope_mxfp8_quantize(
                    attn, chain.positions, chain.cos_sin, groups=2, scale_span=span)[0],
                rotated[0], "attn", allow_refusal=offset < 16,
            )  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [6, 130])
def test_strides_of_einsum_operands(tokens, form):
    """B59, B82: token pitches of x, every second token, column slices, group-major x, sliced weights."""
    problem = make_problem(tokens, 2, 256, 512, form, seed=92)
    expected = problem.bf16()
    x, x_scale, w, w_scale = problem.args

    def check(name: str, x: torch.Tensor = x, w: torch.Tensor = w, allow_refusal: bool = False) -> None:
        assert x.shape == problem.x.shape
        right_or_refused(
            lambda: vllm_megaattn.einsum_fp8_bf16(x, x_scale, w, w_scale, x_span=problem.x_span),
            expected, name, allow_refusal,
        )  # fmt: skip

    def pitched(source: torch.Tensor, extra: int, dim: int) -> torch.Tensor:
        """`source` inside a NaN-filled buffer that is `extra` wider in its last (dim 2) or middle (dim 1) dimension."""
        shape = list(source.shape)
        shape[dim] += extra
        buffer = torch.full(shape, 0x7F, dtype=torch.uint8, device=gpu.DEVICE).view(E4M3)
        view = buffer[:, : source.shape[1], : source.shape[2]]
        view.copy_(source)
        return view

    for extra in (16, 32, 512):
        check("x", x=pitched(x, extra, 2))
        check("w", w=pitched(w, extra, 2))
    for extra in (1, 2, 4, 8, 12):
        check("x", x=pitched(x, extra, 2), allow_refusal=True)
        check("w", w=pitched(w, extra, 2), allow_refusal=True)
    check("x", x=pitched(x, 1, 1))
    check("w", w=pitched(w, 32, 1))
    check("x", x=x.transpose(0, 1).contiguous().transpose(0, 1))
    both = torch.stack([gpu.bits(x), torch.full_like(gpu.bits(x), 0x7F)], dim=1).flatten(0, 1)
    check("x", x=both.view(E4M3)[::2])
    column = torch.full((tokens, 2, 512 + 64), 0x7F, dtype=torch.uint8, device=gpu.DEVICE).view(E4M3)
    for first in (16, 48, 8, 5):
        column[:, :, first : first + 512] = x
        check("x", x=column[:, :, first : first + 512], allow_refusal=first % 16 != 0)


@pytest.mark.parametrize("tokens", [6, 130])
def test_strides_of_results(tokens):
    """BF16 and MXFP8 results with a pitch; what lies between the rows stays."""
    for form in ("wide", "blocks"):
        problem = make_problem(tokens, 2, 256, 512, form, seed=93)
        z, fused = problem.bf16(), problem.mxfp8(128)
        for extra in (8, 64, 1, 2, 4):
            wide = torch.full((tokens, 2, 256 + extra), -7.0, dtype=torch.bfloat16, device=gpu.DEVICE)
            out = wide[:, :, :256]
            answer = right_or_refused(
                lambda out=out, problem=problem: problem.bf16(out=out), z, "output", allow_refusal=extra % 8 != 0
            )
            assert (wide[:, :, 256:] == -7).all()
            assert answer == "served" or extra % 8
        for extra in (16, 8, 1, 4):
            wide = torch.full((tokens, 512 + extra), gpu.GUARD, dtype=torch.uint8, device=gpu.DEVICE)
            out = (wide[:, :512].view(E4M3), fused[1].clone())
            right_or_refused(
                lambda out=out, problem=problem: problem.mxfp8(128, out=out)[0],
                fused[0],
                "output",
                allow_refusal=extra % 16 != 0,
            )
            assert (wide[:, 512:] == gpu.GUARD).all()


# ---- no tokens, very many tokens, other devices ----------------------------------------------------------------


def test_no_tokens():
    """B52, B53: empty results of the right shape, no launch, no pending error."""
    problem, chain = make_problem(0, 2, 256, 512, seed=94), make_chain(0, 2, 256, 2, 320, seed=95)
    assert problem.bf16().shape == (0, 2, 256)
    data, scale = problem.mxfp8(32)
    assert (data.shape, scale.shape) == ((0, 512), (0,))
    x, x_scale = chain.quantized()
    assert (x.shape, x_scale.shape) == ((0, 2, 1024), (0, 2, 8))
    for path in ("fused", "unfused"):
        assert chain.from_attn(path).shape == (0, 320)
        assert chain.from_x(x, x_scale, path).shape == (0, 320)
    torch.cuda.synchronize()
    torch.zeros(1, device=gpu.DEVICE).add_(1)


def test_more_than_2_31_elements():
    """B60, B83: T = 66000, G = 8, K = 4096; the last tokens equal their own small call. Data that is not looked at is
    zero. About 15 GB."""
    if torch.cuda.mem_get_info()[0] < 32 << 30:
        pytest.skip("needs 32 GB of free GPU memory")
    tokens, groups, k, last = gpu.HUGE, 8, gpu.K_A, 128
    with gpu.flags(gpu.INVARIANT):
        for form in ("wide", "blocks"):
            tail = make_problem(last, groups, 256, k, form, seed=96)
            x = torch.zeros((tokens, groups, k), dtype=torch.uint8, device=gpu.DEVICE).view(E4M3)
            x_bytes = torch.full((tokens, groups, k // 32), 127, dtype=torch.uint8, device=gpu.DEVICE)
            x[-last:], x_bytes[-last:] = tail.x, tail.x_bytes
            args = (x, gpu.words(x_bytes), tail.w, tail.w_scale)
            z = vllm_megaattn.einsum_fp8_bf16(*args, x_span=tail.x_span)
            assert same(z[-last:], tail.bf16())
            data, _ = vllm_megaattn.einsum_fp8_sfd128x4(*args, x_span=tail.x_span, scale_span=32)
            assert same(data[-last:], tail.mxfp8(32)[0])
            assert not z[:-last].any()
            del x, x_bytes, args, z, data
        # wo_b over 32768 columns, and the quantiser that makes its input: 4.3 GB of BF16
        cols = groups * k
        z = torch.zeros((tokens, cols), dtype=torch.bfloat16, device=gpu.DEVICE)
        z[-last:] = torch.randn((last, cols), generator=gpu.generator(97), device=gpu.DEVICE).bfloat16()
        q, q_scale = vllm_megaattn.mxfp8_quantize_sfd128x4(z, scale_span=256)
        q_last, q_scale_last = vllm_megaattn.mxfp8_quantize_sfd128x4(z[-last:].clone(), scale_span=256)
        assert same(q[-last:], q_last)
        w = make_problem(1, 1, 256, cols, seed=98)
        y = vllm_megaattn.mxfp8_gemm_wo_b(q, q_scale, w.w[0], w.w_scale[0], z_span=256)
        expected = vllm_megaattn.mxfp8_gemm_wo_b(q_last, q_scale_last, w.w[0], w.w_scale[0], z_span=256)
        assert same(y[-last:], expected)
        del z, q, q_scale, y
        chain = make_chain(last, groups, 32, k // 512, 32, seed=99)
        attn = torch.zeros((tokens, groups * k // 512, 512), dtype=torch.bfloat16, device=gpu.DEVICE)
        attn[-last:] = chain.attn
        positions = torch.zeros(tokens, dtype=torch.int64, device=gpu.DEVICE)
        positions[-last:] = chain.positions
        x, x_scale = vllm_megaattn.inv_rope_mxfp8_quantize(
            attn, positions, chain.cos_sin, groups=groups, scale_span=256
        )
        x_last, x_scale_last = chain.quantized()
        assert same(x[-last:], x_last)
        assert torch.equal(x_scale[-last:], x_scale_last)


def test_operands_on_another_device_are_refused():
    """B61: each operand on the CPU, one at a time, by name and before anything is launched."""
    if gpu.DEVICE == "cpu":
        pytest.skip("there is no other device")
    problem, chain = make_problem(3, 2, 256, 512, seed=100), make_chain(3, 2, 256, 2, 320, seed=101)
    calls = {
        vllm_megaattn.einsum_fp8_bf16: dict(zip(("x", "x_scale", "w", "w_scale"), problem.args, strict=True)),
        vllm_megaattn.o_proj_from_attn: {
            "attn": chain.attn, "positions": chain.positions, "cos_sin": chain.cos_sin, "wo_a": chain.wo_a,
            "wo_a_scale": chain.wo_a_scale, "wo_b": chain.wo_b, "wo_b_scale": chain.wo_b_scale,
        },
    }  # fmt: skip
    for op, operands in calls.items():
        options = {"groups": 2} if op is vllm_megaattn.o_proj_from_attn else {}
        for name, tensor in operands.items():
            with pytest.raises(ValueError, match=r"must be on (cuda|cpu)"):
                op(**(operands | {name: tensor.cpu()}), **options)
    torch.cuda.synchronize()


def test_two_devices():
    """B80, B81: tensors on the second device while the first is current; one operand on the other is refused."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    chain = make_chain(9, 2, 256, 2, 320, seed=102)
    expected = chain.from_attn()
    there = [t.to("cuda:1") for t in (chain.attn, chain.positions, chain.cos_sin, *chain.weights)]
    with torch.cuda.device(0):
        y = vllm_megaattn.o_proj_from_attn(*there, groups=2, path="fused", scale_span=256)
    assert same(y.to("cuda:0"), expected)
    with pytest.raises(ValueError, match="cuda:0"):
        vllm_megaattn.o_proj_from_attn(*there[:3], chain.wo_a, *there[4:], groups=2)
