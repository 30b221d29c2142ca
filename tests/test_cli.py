"""The command line: exit status, JSON, tables and pictures, and that `demo` notices what it claims to check."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from vllm_megaattn import checkpoint, layouts, ops, selector
from vllm_megaattn.cli import COMMANDS, demo, info, main

TINY_HEADS = 16


@pytest.fixture(autouse=True)
def no_forced_path(monkeypatch):
    monkeypatch.delenv(selector.ENV_PATH, raising=False)


@pytest.fixture
def quick(monkeypatch):
    """One timed call instead of a second's worth."""
    monkeypatch.setattr(demo, "_measure", lambda call, device: (1e-3, 1))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return checkpoint.write_synthetic_checkpoint(tmp_path_factory.mktemp("cli") / "model.safetensors", tiny=True)


def run_python(*arguments):
    """A process that sees no GPU: these tests are about the command, and run the same everywhere."""
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )


def command(*arguments):
    return run_python("-m", "vllm_megaattn", *arguments)


def run_json(capsys, *arguments):
    if arguments[0] == "demo" and "--device" not in arguments:
        arguments += ("--device", "cpu")
    status = main(arguments)
    return status, json.loads(capsys.readouterr().out)


# ---- as a process ---------------------------------------------------------------------------------------------


def test_demo_process():
    done = command("demo", "--tiny", "--tokens", "7")
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("OK")
    assert "NO" not in done.stdout.split()
    for step in ("writing a synthetic V4.1 checkpoint", "reading layer 0", "computing the float64 reference"):
        assert step in done.stderr  # progress does not mix with the result
        assert step not in done.stdout


def test_a_corrupted_run_exits_with_1():
    code = (
        "import sys, torch\n"
        "from vllm_megaattn import ops\n"
        "from vllm_megaattn.cli import main\n"
        "quantize = ops.mxfp8_quantize_sfd128x4\n"
        "def corrupt(z, **options):\n"
        "    q, scale = quantize(z, **options)\n"
        "    q.view(torch.uint8)[3, 77] ^= 1\n"
        "    return q, scale\n"
        "ops.mxfp8_quantize_sfd128x4 = corrupt\n"
        "sys.exit(main(['demo', '--tiny', '--json']))\n"
    )
    done = run_python("-c", code)
    assert done.returncode == 1, done.stderr
    result = json.loads(done.stdout)
    assert result["ok"] is False
    assert result["identical"] == {"z_data": False, "z_scale": True, "z_scale_padding_zero": True, "y": True}


def test_usage_errors_are_status_2():
    done = command()
    assert done.returncode == 2
    assert "COMMAND" in done.stderr
    done = command("demo", "--checkpoint", "/nowhere/model.safetensors")
    assert (done.returncode, done.stdout) == (2, "")
    assert "vllm_megaattn demo: error: checkpoint /nowhere/model.safetensors does not exist" in done.stderr
    assert "Traceback" not in done.stderr


# ---- demo -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("arguments", "groups", "blocks"),
    [
        ((), 8, "32x32"),
        (("--model", "v4", "--tp-size", "4", "--tp-rank", "3"), 2, "128x128"),
        (("--tp-size", "8", "--tokens", "1", "--layer", "6"), 1, "32x32"),
        (("--tokens", "129", "--seed", "5", "--device", "cpu"), 8, "32x32"),
    ],
)
def test_demo_json(capsys, arguments, groups, blocks):
    status, result = run_json(capsys, "demo", "--tiny", "--json", *arguments)
    assert status == 0
    assert result["ok"] is True
    assert (result["groups"], result["weight_blocks"]) == (groups, [blocks, blocks])
    assert set(result["identical"].values()) == {True}
    assert [row["path"] for row in result["paths"]] == ["fused", "unfused"]
    assert result["chosen"]["path"] == "fused"
    for name, limit in result["error_limits"].items():
        assert 0 < result["errors"][name] <= limit
    assert result["errors"]["wo_a"] > 1e-3  # a BF16 rounding really is in it: 1.6e-3
    assert 2e-2 < result["errors"]["all"] < 6e-2
    tokens, columns = result["attn"][0], groups * checkpoint.TINY_DIMS.rank
    assert result["z_bytes"] == [tokens * columns, layouts.f8_128x4_bytes(tokens, columns // 32)]


@pytest.mark.usefixtures("quick")
def test_demo_reads_a_checkpoint_and_an_input(capsys, tmp_path, tiny):
    generator = torch.Generator().manual_seed(3)
    attn = torch.randn(6, TINY_HEADS, 512, generator=generator).to(torch.bfloat16)
    file = tmp_path / "input.safetensors"
    arguments = ("demo", "--json", "--checkpoint", str(tiny), "--input", str(file))

    safetensors.torch.save_file({"attn": attn}, file)
    status, result = run_json(capsys, *arguments)
    assert (status, result["attn"], result["weights"]) == (0, [6, TINY_HEADS, 512], str(tiny))
    status, shard = run_json(capsys, *arguments, "--tp-size", "4", "--tp-rank", "1")  # takes its heads of all
    assert (status, shard["attn"]) == (0, [6, 4, 512])

    cos_sin = torch.zeros(3, 64)
    cos_sin[:, :32] = 1.0  # no rotation at all
    positions = torch.tensor([0, 1, 2, 2, 1, 0], dtype=torch.int32)
    safetensors.torch.save_file({"attn": attn, "positions": positions, "cos_sin": cos_sin}, file)
    status, turned = run_json(capsys, *arguments)
    assert status == 0
    assert turned["errors"]["wo_b"] != result["errors"]["wo_b"]


@pytest.mark.usefixtures("quick")
def test_the_demo_of_the_readme_on_a_checkpoint(capsys, monkeypatch, tmp_path):
    """Its command as written, on a small file of that name."""
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (arguments,) = re.findall(r"^python -m vllm_megaattn (demo --checkpoint .*)$", readme, re.MULTILINE)
    (file,) = re.findall(r"[\w-]+\.safetensors", arguments)
    checkpoint.write_synthetic_checkpoint(tmp_path / file, tiny=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(arguments.split()) == 0
    shown = capsys.readouterr().out
    assert "TP rank 0 of 4" in shown
    assert shown.endswith("OK\n")


@pytest.mark.usefixtures("quick")
def test_nan_in_the_input_must_come_out_again(capsys, monkeypatch, tmp_path, tiny):
    attn = torch.ones(5, TINY_HEADS, 512, dtype=torch.bfloat16)
    attn[2, 3, 40] = float("nan")
    attn[4, 0, 0] = float("inf")
    file = tmp_path / "input.safetensors"
    safetensors.torch.save_file({"attn": attn}, file)
    arguments = "demo", "--json", "--checkpoint", str(tiny), "--input", str(file)
    status, result = run_json(capsys, *arguments)
    assert (status, result["ok"]) == (0, True)

    # A stage that launders the NaN: finite where the reference is not, an infinite error, null in JSON.
    gemm = ops.mxfp8_gemm_wo_b
    monkeypatch.setattr(ops, "mxfp8_gemm_wo_b", lambda *args, **options: gemm(*args, **options).nan_to_num_())
    status, result = run_json(capsys, *arguments)
    assert (status, result["errors"]["wo_b"]) == (1, None)

    # An Inf in its place is no better.
    inf = torch.tensor(float("inf"), dtype=torch.bfloat16)

    def inf_for_nan(*args, **options):
        y = gemm(*args, **options)
        return torch.where(y.isnan(), inf, y)

    monkeypatch.setattr(ops, "mxfp8_gemm_wo_b", inf_for_nan)
    status, result = run_json(capsys, *arguments)
    assert (status, result["errors"]["wo_b"]) == (1, None)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "the attention output holds no finite value, so there is nothing to compare"),
        (1e-40, "the attention output has a largest magnitude of"),
        (3e38, "means something from 7.89e-31 to 1.33e+36 only"),
        (1e36, "has a largest magnitude of"),
        (0.0, None),
        (1e-28, None),
        (1e30, None),
    ],
)
def test_demo_gives_no_verdict_on_what_it_cannot_compare(capsys, monkeypatch, tmp_path, tiny, value, message):
    file = tmp_path / "input.safetensors"
    safetensors.torch.save_file({"attn": torch.full((3, TINY_HEADS, 512), value).bfloat16()}, file)
    status = main(["demo", "--device", "cpu", "--checkpoint", str(tiny), "--input", str(file)])
    shown = capsys.readouterr()
    if message is None:
        assert status == 0
        assert shown.out.endswith("OK\n")
        return
    assert status == 2
    assert message in shown.err
    assert "OK" not in shown.out
    assert "MISMATCH" not in shown.out
    originals = ops.mxfp8_quantize_sfd128x4  # paths that differ are a mismatch on any input

    def flipped(*args, **options):
        q, q_scale = originals(*args, **options)
        q_scale[0] ^= 1
        return q, q_scale

    monkeypatch.setattr(ops, "mxfp8_quantize_sfd128x4", flipped)
    assert main(["demo", "--device", "cpu", "--checkpoint", str(tiny), "--input", str(file)]) == 1
    assert "MISMATCH" in capsys.readouterr().out


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("where", ["z data", "scale", "padding", "y", "gemm", "einsum", "rule", "rope"])
def test_demo_notices_every_kind_of_mistake(capsys, monkeypatch, where):
    """Each stage in turn gets a small mistake; the demo must fail, and blame that stage."""
    originals = {name: getattr(ops, name) for name in (
        "einsum_fp8_sfd128x4", "einsum_fp8_bf16", "mxfp8_quantize_sfd128x4", "mxfp8_gemm_wo_b",
        "inv_rope_mxfp8_quantize", "o_proj_from_attn",
    )}  # fmt: skip

    def after(name, change):
        monkeypatch.setattr(ops, name, lambda *args, **options: change(originals[name](*args, **options)))

    def flip(offset):
        def change(pair):
            pair[1][offset] ^= 1
            return pair

        return change

    def flip_data(pair):
        pair[0].view(torch.uint8)[32, 1023] ^= 0x80
        return pair

    def half_up(pair):  # FLOOR's mistake: one scale byte less, data saturated
        q, scale = pair
        scale[: scale.numel() // 2] -= 1
        return q, scale

    def bf16_bits_off(y):
        y.view(torch.int16)[:, :64] ^= 2
        return y

    if where == "z data":
        after("einsum_fp8_sfd128x4", flip_data)
        blamed = "z_data"
    elif where == "scale":
        after("einsum_fp8_sfd128x4", flip(layouts.f8_128x4_offset(32, 31, 32)))
        blamed = "z_scale"
    elif where == "padding":
        for name in ("einsum_fp8_sfd128x4", "mxfp8_quantize_sfd128x4"):  # both alike: only the padding check sees it
            after(name, flip(layouts.f8_128x4_offset(33, 0, 32)))
        blamed = "z_scale_padding_zero"
    elif where == "y":
        after("o_proj_from_attn", lambda y: y.index_fill_(0, torch.tensor([32]), 0.0))
        blamed = "y"
    elif where == "gemm":
        for name in ("mxfp8_gemm_wo_b", "o_proj_from_attn"):
            after(name, bf16_bits_off)
        blamed = "wo_b"
    elif where == "einsum":
        after("einsum_fp8_bf16", lambda z: z.mul_(1.00390625))
        blamed = "wo_a"
    elif where == "rule":
        for name in ("einsum_fp8_sfd128x4", "mxfp8_quantize_sfd128x4"):
            after(name, half_up)
        blamed = "z"
    else:
        inverse = originals["inv_rope_mxfp8_quantize"]
        monkeypatch.setattr(
            ops, "inv_rope_mxfp8_quantize", lambda attn, at, cache, **o: inverse(attn, at * 0, cache, **o)
        )
        blamed = "x"
    status, result = run_json(capsys, "demo", "--tiny", "--json")
    assert status == 1
    wrong = {name for name, same in result["identical"].items() if not same}
    limits = result["error_limits"]
    wrong |= {name for name, limit in limits.items() if result["errors"][name] > limit}
    assert blamed in wrong, wrong


@pytest.mark.usefixtures("quick")
def test_demo_keeps_what_it_writes(capsys, tmp_path):
    path = tmp_path / "sub" / "kept.safetensors"
    assert main(["demo", "--tiny", "--write", str(path), "--layer", "2"]) == 0
    out = capsys.readouterr().out
    assert "synthetic V4.1, tiny, seed 0; layer 2" in out
    assert main(["demo", "--checkpoint", str(path), "--layer", "2", "--tokens", "2"]) == 0


@pytest.mark.usefixtures("quick")
def test_demo_with_a_hidden_size_that_fits_no_block(capsys, tmp_path):
    path = tmp_path / "m.safetensors"
    dims = checkpoint.Dims(groups=2, rank=128, group_cols=512, hidden=704)  # 5.5 blocks of 128, 1.4 chunks of 512
    checkpoint.write_synthetic_checkpoint(path, dims=dims, version="v4")
    status, result = run_json(capsys, "demo", "--json", "--checkpoint", str(path))
    assert (status, result["wo_b"], result["weight_blocks"]) == (0, [704, 256], ["128x128", "128x128"])


@pytest.mark.gpu
@pytest.mark.parametrize("options", [("--tiny",), (), ("--tp-size", "8", "--tokens", "129")])
def test_demo_on_the_gpu(capsys, options):
    status, result = run_json(capsys, "demo", "--device", "cuda", "--json", *options)
    assert (status, result["ok"]) == (0, True)
    assert {row["kernel"] for row in result["paths"]} == {selector.device_key(torch.device("cuda"))}


@pytest.mark.usefixtures("quick")
def test_demo_says_what_the_environment_forces(capsys, monkeypatch):
    monkeypatch.setenv(selector.ENV_PATH, "unfused")
    status, result = run_json(capsys, "demo", "--tiny", "--json", "--tokens", "2")
    assert (status, result["chosen"]["path"]) == (0, "unfused")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--checkpoint", "x", "--tiny"), "--checkpoint brings its own weights: it excludes --tiny"),
        (("--checkpoint", "x", "--model", "v4"), "--checkpoint brings its own weights"),
        (("--input", "x", "--tokens", "3"), "--input brings its own tokens: it excludes --tokens"),
        (("--tokens", "0"), "--tokens must be positive, got 0"),
        (("--model", "v3"), "invalid choice: 'v3'"),
    ],
)
def test_demo_usage(capsys, arguments, message):
    with pytest.raises(SystemExit) as caught:
        main(["demo", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("quick")
def test_demo_refuses_unusable_input(capsys, tmp_path, tiny):
    file = tmp_path / "input.safetensors"
    good = torch.zeros(2, TINY_HEADS, 512, dtype=torch.bfloat16)
    for tensors, message in (
        ({"other": good}, "must hold a tensor 'attn' BF16 [T, heads, 512], it holds: other"),
        ({"attn": good.float()}, "attn must be BF16 [T, heads, 512], got torch.float32"),
        ({"attn": good[:, :, :64].contiguous()}, "attn must be BF16 [T, heads, 512], got torch.bfloat16 [2, 16, 64]"),
        ({"attn": good[:, :5].contiguous()}, "attn must have 16 heads (this shard's) or 16 (all), got 5"),
        (
            {"attn": good, "positions": torch.zeros(3, dtype=torch.int64)},
            "positions must be int64 [2], got torch.int64",
        ),
        ({"attn": good, "positions": torch.tensor([0, 4096])}, "positions must lie in [0, 4096), got 0..4096"),
        ({"attn": good, "positions": torch.tensor([0, -1])}, "positions must lie in [0, 4096), got -1..0"),
        (
            {"attn": good, "cos_sin": torch.zeros(8, 64).double()},
            "cos_sin must be float32 [positions, 64], got torch",
        ),
    ):
        safetensors.torch.save_file(tensors, file)
        assert main(["demo", "--checkpoint", str(tiny), "--input", str(file)]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert message in captured.err
    file.write_bytes(b"nothing")
    assert main(["demo", "--checkpoint", str(tiny), "--input", str(file)]) == 2
    assert "is not a readable safetensors file" in capsys.readouterr().err
    assert main(["demo", "--checkpoint", str(tiny), "--layer", "9"]) == 2
    assert "layers with wo_a here: 0" in capsys.readouterr().err
    assert main(["demo", "--tiny", "--tp-size", "3"]) == 2
    assert "tp_size must divide the 8 groups of the model, got 3" in capsys.readouterr().err


def test_demo_refuses_a_device_without_kernels(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["demo", "--tiny", "--device", "cuda"]) == 2
    assert "--device cuda: " in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(selector, "device_key", lambda device: "sm120" if device.type == "cuda" else device.type)
    assert main(["demo", "--tiny", "--device", "cuda"]) == 2
    assert "--device cuda: no kernel yet for SM12x" in capsys.readouterr().err


# ---- info -----------------------------------------------------------------------------------------------------


def test_info_json_and_text(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, result = run_json(capsys, "info", "--json")
    assert status == 0
    assert result["versions"]["torch"] == torch.__version__
    assert result["devices"][0]["usable"] is True
    assert [row["path"] for row in result["selector"]["cpu"]][:3] == ["fused", "fused", "unfused"]
    usable = {tuple(row["devices"]): (row["usable"], row["reason"]) for row in result["backends"]}
    assert usable[("cpu",)][0] is True
    assert usable[("sm90",)][0] is False
    assert "no kernel yet for SM12x; o_proj dequantises" in usable[("sm120", "sm121")][1]
    assert all(reason for _, reason in usable.values())

    monkeypatch.setenv(selector.ENV_PATH, "unfused")
    assert main(["info", "--rank", "96"]) == 0
    out = capsys.readouterr().out
    for part in ("Versions", "Build of the C core", "CPU", "Devices", "Backends", "Path of o_proj on cpu", "refused"):
        assert part in out
    assert "VLLM_MEGAATTN_PATH=unfused replaces path=auto" in out
    monkeypatch.setenv(selector.ENV_PATH, "wrong")
    main(["info"])
    shown = capsys.readouterr()
    for text in (shown.out, shown.err):
        assert "VLLM_MEGAATTN_PATH='wrong' is an error: it must be one of auto, fused" in text
    assert "replaces path=auto" not in shown.out
    with pytest.raises(SystemExit):
        main(["info", "--rank", "0"])


def test_info_shows_the_environment(capsys, monkeypatch):
    values = {"VLLM_MEGAATTN_CPU": "scalar", "VLLM_MEGAATTN_SELF_CHECK": "0", "VLLM_MEGAATTN_WO_B": "own"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    _, result = run_json(capsys, "info", "--json")
    assert result["environment"] == {**values, "VLLM_MEGAATTN_PATH": None}
    main(["info"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for pair in (*map(list, values.items()), ["VLLM_MEGAATTN_PATH", "not", "set"]):
        assert pair in lines


def test_info_explains_gpus(monkeypatch):
    names = {0: "Hopper", 1: "Blackwell", 2: "Hopper with an old driver"}
    capabilities = {0: (9, 0), 1: (10, 0), 2: (9, 0)}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: names[index])
    monkeypatch.setattr(selector, "_cuda_keys", {})
    monkeypatch.setattr(info._C, "build_info", lambda: {"images": ["sm90_gemm"]})
    monkeypatch.setattr(info._C, "cuda_status", lambda index: (index != 2, "the driver is too old"))
    devices = {row["device"]: row for row in info._devices()}
    assert [row["usable"] for row in devices.values()] == [True, True, False, False]
    assert devices["cuda:1"]["reason"] == selector.backend_gap("sm100")
    assert devices["cuda:2"]["reason"] == "the driver is too old"
    backends = {row["devices"][0]: row for row in info._backends({"cpu": None, "sm90": None})}
    assert backends["sm90"]["usable"] is True


# ---- layout ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "rows", "k", "where", "byte"),
    [
        ("f8_128x4", 301, 4096, (129, 2), 16402),
        ("f8_8x4", 301, 4096, (129, 2), 16390),
        ("packed", 5, 256, (3, 5), (1 * 8 + 3) * 4 + 1),
    ],
)
def test_layout_finds_a_byte(capsys, layout, rows, k, where, byte):
    arguments = [
        "layout",
        layout,
        "--rows",
        str(rows),
        "--k",
        str(k),
        "--row",
        str(where[0]),
        "--block",
        str(where[1]),
    ]
    status, result = run_json(capsys, *arguments, "--json")
    assert (status, result["offset"]) == (0, byte)
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert f"row {where[0]}, block {where[1]} (elements {32 * where[1]}..{32 * where[1] + 31}): byte {byte} = " in out
    assert f"{byte}*" in out  # marked in the grid
    assert f"{where[0]},{where[1]}" in out  # and found in memory


def test_layout_grid_holds_the_offsets(capsys):
    assert main(["layout", "--rows", "34", "--k", "96"]) == 0
    out = capsys.readouterr().out
    assert "512 bytes, 410 of them padding" in out
    grid, memory = out.split("Memory from the start")
    lines = [line.replace("|", " ").split() for line in grid.splitlines()]
    for row in (0, 1, 31, 32, 33):
        assert [str(row), *(str(layouts.f8_128x4_offset(row, block, 3)) for block in range(3))] in lines
    lines = [" ".join(line.replace("|", " ").split()) for line in memory.splitlines()]
    assert "0 0,0 0,1 0,2 pad 32,0 32,1 32,2 pad pad pad pad pad pad pad pad pad" in lines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rows", "0"), "--rows must be positive and --k a positive multiple of 32, got 0 and 256"),
        (("--k", "40"), "--k a positive multiple of 32, got 160 and 40"),
        (("--row", "3"), "--row and --block go together"),
        (("--row", "160", "--block", "0"), "--row must be in [0, 160) and --block in [0, 8), got 160 and 0"),
        (("linear",), "invalid choice: 'linear'"),
    ],
)
def test_layout_usage(capsys, arguments, message):
    with pytest.raises(SystemExit) as caught:
        main(["layout", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [("f8_128x4", "--row", "70", "--block", "5"), ("f8_8x4", "--rows", "20", "--k", "96"), ("packed", "--k", "512")],
)
def test_layout_draws(capsys, tmp_path, arguments):
    pytest.importorskip("matplotlib")
    file = tmp_path / "layout.png"
    assert main(["layout", *arguments, "--png", str(file)]) == 0
    assert f"drew {file}" in capsys.readouterr().out
    data = file.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width > 1500
    assert height > 1000


def test_layout_without_matplotlib(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "vllm_megaattn.cli.layout_picture", raising=False)
    assert main(["layout", "--png", str(tmp_path / "x.png")]) == 2
    assert "--png needs matplotlib: pip install 'vllm-megaattn[plot]'" in capsys.readouterr().err
    assert not os.listdir(tmp_path)


# ---- the commands themselves --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(capsys, name):
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    assert f"python -m vllm_megaattn {name}" in capsys.readouterr().out


def test_version(capsys):
    from vllm_megaattn import __version__

    with pytest.raises(SystemExit):
        main(["--version"])
    assert __version__ in capsys.readouterr().out
