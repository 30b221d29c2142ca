"""`vllm_megaattn.selector`: one table for the op, `info` and `OProj`; forced paths; refusals instead of fallbacks."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from vllm_megaattn import _C, ops, selector


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No forced path from outside, and no answers remembered from or for other tests."""
    monkeypatch.delenv(selector.ENV_PATH, raising=False)
    monkeypatch.delenv(selector.ENV_WO_B, raising=False)
    monkeypatch.setattr(selector, "_cache", {})
    monkeypatch.setattr(selector, "_routes", {})
    monkeypatch.setattr(selector, "_disabled_routes", {})
    monkeypatch.setattr(selector, "_cuda_keys", {})


@pytest.fixture
def hopper_build(monkeypatch):
    monkeypatch.setattr(_C, "build_info", lambda: {"images": ["sm90_gemm"], "cuda": "13.0"})


@pytest.fixture
def blackwell_build(monkeypatch):
    monkeypatch.setattr(_C, "build_info", lambda: {"images": ["simt_quantize", "sm100_gemm"], "cuda": "13.0"})
    flags = [0]
    monkeypatch.setattr(_C, "get_flags", lambda: flags[0])
    monkeypatch.setattr(_C, "set_flags", lambda value: flags.__setitem__(0, value))
    monkeypatch.setattr(_C, "cublaslt_status", lambda: (True, "cuBLASLt 130100"))
    return flags


@pytest.fixture
def cpu_only_build(monkeypatch):
    monkeypatch.setattr(_C, "build_info", lambda: {"images": [], "cuda": None})


# ---- the table ------------------------------------------------------------------------------------------------


def test_cpu_takes_the_fused_path_and_says_why():
    choice = selector.select_path("cpu", rank=1024, requested="auto")
    assert (choice.path, choice.backend) == ("fused", "cpu")
    assert "MXFP8 z" in choice.reason
    assert selector.select_path("cpu", rank=1024, requested="unfused").path == "unfused"


@pytest.mark.usefixtures("hopper_build")
def test_hopper_takes_the_fused_path():
    assert selector.select_path("sm90", rank=1024)[:2] == ("fused", "sm90")


@pytest.mark.usefixtures("hopper_build")
@pytest.mark.parametrize(
    ("key", "word"),
    [
        ("sm80", "Ampere"),
        ("sm86", "Ampere"),
        ("sm89", "Ada"),
        ("sm70", "unknown device 'sm70'"),
        ("sm110", "unknown device 'sm110'"),
        ("rocm", "unknown device 'rocm'"),
        ("xpu", "unknown device 'xpu'"),
    ],
)
def test_devices_without_a_kernel_are_refused(key, word):  # B42, B45, B47
    for requested in selector.PATHS:
        with pytest.raises(
            ValueError, match=rf"path='{requested}' refused on {key}: .*{word}.*cpu, sm90, sm100, sm103"
        ):
            selector.select_path(key, rank=1024, requested=requested)
    assert word in selector.backend_gap(key)
    assert {row["path"] for row in selector.explain(key)} == {None}


@pytest.mark.usefixtures("hopper_build")
@pytest.mark.parametrize("key", ["sm120", "sm121"])
def test_sm12x_dequantises_and_says_so(key):
    for requested in ("auto", "dequantised"):
        assert selector.select_path(key, rank=1024, requested=requested)[:2] == ("dequantised", "torch")
    assert "no kernel yet for SM12x" in selector.select_path(key, rank=1024).reason
    for requested in ("fused", "unfused"):
        with pytest.raises(ValueError, match=f"path='{requested}' refused on {key}: no kernel yet for SM12x"):
            selector.select_path(key, rank=1024, requested=requested)
    assert "no kernel yet for SM12x" in selector.backend_gap(key)  # so an engine keeps its own path
    paths = {(row["requested"], row["path"]) for row in selector.explain(key)}
    assert ("auto", "dequantised") in paths
    assert ("fused", None) in paths
    assert selector.explain_wo_b(key)["route"] == "torch"


@pytest.mark.parametrize("key", ["cpu", "sm90"])
@pytest.mark.usefixtures("hopper_build")
def test_dequantised_can_be_asked_for_where_there_are_kernels(key):
    assert selector.select_path(key, rank=40, requested="dequantised")[:2] == ("dequantised", "torch")
    assert selector.select_path(key, rank=1024).path == "fused"


@pytest.mark.usefixtures("blackwell_build")
@pytest.mark.parametrize("key", ["sm100", "sm103"])
def test_blackwell_says_that_it_has_not_run(key):
    for rank in (1024, 96):
        choice = selector.select_path(key, rank=rank)
        assert choice[:2] == ("fused", "sm100")
        assert "not on hardware" in choice.reason
    for recipe in selector.RECIPES:
        assert selector.select_path(key, rank=1024, recipe=recipe).path == "fused"
    assert "never on this hardware" in selector.unproven(key)
    assert selector.unproven("cpu") == selector.unproven("sm120") == ""


@pytest.mark.usefixtures("hopper_build")
def test_a_build_without_blackwell_kernels_is_refused():
    with pytest.raises(ValueError, match="refused on sm103: this build has no sm100 kernels"):
        selector.select_path("sm103", rank=1024)
    assert selector.unproven("sm103") == ""


@pytest.mark.usefixtures("cpu_only_build")
def test_a_build_without_kernels_is_refused():
    with pytest.raises(
        ValueError, match="refused on sm90: this build has no sm90 kernels; rebuild with nvcc on PATH"
    ):
        selector.select_path("sm90", rank=1024)
    assert selector.select_path("cpu", rank=1024).path == "fused"


@pytest.mark.usefixtures("hopper_build")
def test_rank_decides_where_the_fused_epilogue_can_run():
    for rank in (128, 1024, 384):
        assert selector.select_path("sm90", rank=rank).path == "fused"
    choice = selector.select_path("sm90", rank=96)
    assert choice.path == "unfused"
    assert "rank must be a multiple of 128 for the fused epilogue, got 96" in choice.reason
    with pytest.raises(ValueError, match=r"path='fused' refused on sm90: rank must be a multiple of 128 .* got 96"):
        selector.select_path("sm90", rank=96, requested="fused")
    assert selector.select_path("cpu", rank=96, requested="fused").path == "fused"
    for requested in ("auto", "unfused"):
        with pytest.raises(ValueError, match=r"rank must be a multiple of 32 \(one scale block\), got 40"):
            selector.select_path("cpu", rank=40, requested=requested)


def test_a_reader_of_bf16_gets_the_unfused_path():
    choice = selector.select_path("cpu", rank=1024, consumer="bf16")
    assert choice.path == "unfused"
    assert "takes bf16, the fused epilogue writes f8_128x4" in choice.reason
    for consumer in ("bf16", "8x4", "packed"):
        with pytest.raises(ValueError, match=f"path='fused' refused on cpu: the consumer of z takes {consumer}"):
            selector.select_path("cpu", rank=1024, consumer=consumer, requested="fused")


@pytest.mark.parametrize("recipe", selector.RECIPES)
@pytest.mark.usefixtures("hopper_build")
def test_every_weight_form_has_a_kernel(recipe):
    for key in ("cpu", "sm90"):
        assert selector.select_path(key, rank=1024, recipe=recipe).path == "fused"


def test_a_row_without_a_recipe_refuses_it(monkeypatch):
    row = selector.TABLE[0]._replace(recipes=("1x32",))
    monkeypatch.setattr(selector, "TABLE", (row,))
    with pytest.raises(ValueError, match="weight scales of 32x32 are not supported there; supported: 1x32"):
        selector.select_path("cpu", rank=1024)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"requested": "fast"}, "path must be one of auto, fused, unfused, dequantised, got 'fast'"),
        ({"recipe": "16x16"}, "recipe must be one of 1x32, 32x32, 128x128, prepared, got '16x16'"),
        ({"consumer": "fp16"}, "consumer must be one of f8_128x4, 8x4, packed, bf16, got 'fp16'"),
        ({"rank": 0}, "rank must be positive, got 0"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        selector.select_path("cpu", **{"rank": 1024, **arguments})


@pytest.mark.parametrize("key", ["cpu", "sm90", "sm100", "sm120"])
@pytest.mark.usefixtures("hopper_build")
def test_info_shows_what_the_op_does(key):
    for row in selector.explain(key, ranks=(1024, 96, 40)):
        arguments = {"rank": row["rank"], "consumer": row["consumer"], "requested": row["requested"]}
        if row["path"] is None:
            with pytest.raises(ValueError, match="refused") as caught:
                selector.select_path(key, **arguments)
            assert str(caught.value).endswith(row["reason"])
        else:
            assert selector.select_path(key, **arguments) == (row["path"], row["backend"], row["reason"])


# ---- forced paths ---------------------------------------------------------------------------------------------


def test_environment_forces_what_the_argument_leaves_open(monkeypatch):
    monkeypatch.setenv(selector.ENV_PATH, "unfused")
    assert selector.select_path("cpu", rank=1024, requested="auto").path == "unfused"
    assert selector.select_path("cpu", rank=1024, requested="fused").path == "fused"  # the argument wins
    monkeypatch.setenv(selector.ENV_PATH, "fused")  # read per call
    assert selector.select_path("cpu", rank=1024, requested="auto").path == "fused"
    monkeypatch.setenv(selector.ENV_PATH, "")
    assert selector.select_path("cpu", rank=1024, requested="auto").path == "fused"


@pytest.mark.usefixtures("hopper_build")
def test_a_path_forced_by_the_environment_is_not_softened(monkeypatch):
    monkeypatch.setenv(selector.ENV_PATH, "fused")
    with pytest.raises(
        ValueError, match="VLLM_MEGAATTN_PATH='fused' refused on sm90: rank must be a multiple of 128"
    ):
        selector.select_path("sm90", rank=96, requested="auto")
    monkeypatch.setenv(selector.ENV_PATH, "quick")
    with pytest.raises(
        ValueError, match="VLLM_MEGAATTN_PATH must be one of auto, fused, unfused, dequantised, got 'quick'"
    ):
        selector.select_path("cpu", rank=1024, requested="auto")


def test_answers_are_remembered(monkeypatch):
    first = selector.select_path("cpu", rank=1024)
    monkeypatch.setattr(selector, "_decide", None)  # a second decision would fail
    assert selector.select_path("cpu", rank=1024) is first


def test_the_op_follows_the_environment(monkeypatch):
    seen = []
    monkeypatch.setattr(ops, "call", lambda op, name, *args, names: seen.append(args[10]))  # the `fused` argument
    x, x_scale = torch.zeros(2, 1, 128).to(ops.E4M3), torch.zeros(2, 1, 1, dtype=torch.int32)
    wo_a, wo_b = torch.zeros(1, 32, 128).to(ops.E4M3), torch.zeros(32, 32).to(ops.E4M3)
    scales = torch.zeros(1, 1, 4, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.uint8)
    for value, path in (("unfused", "auto"), ("fused", "auto"), ("fused", "unfused")):
        monkeypatch.setenv(selector.ENV_PATH, value)
        ops.o_proj(x, x_scale, wo_a, scales[0], wo_b, scales[1], path=path)
    assert seen == [False, True, False]
    with pytest.raises(ValueError, match="path must be one of auto, fused, unfused, dequantised, got 'both'"):
        ops.o_proj(x, x_scale, wo_a, scales[0], wo_b, scales[1], path="both")


# ---- the route of wo_b ----------------------------------------------------------------------------------------


def test_wo_b_prefers_cublaslt_until_the_own_kernel_is_checked(blackwell_build, monkeypatch):
    route = selector.select_wo_b("sm100")
    assert route.route == "cublaslt"
    assert "cuBLASLt 130100, until the package's own kernel has been checked" in route.reason
    selector.request_wo_b("sm100")
    assert blackwell_build == [0]  # open: the C core decides by the operands
    monkeypatch.setattr(selector, "_routes", {})
    monkeypatch.setattr(_C, "cublaslt_status", lambda: (False, "cuBLASLt cannot be opened"))
    assert selector.select_wo_b("sm100") == ("own", "cuBLASLt cannot be opened")


def test_a_forced_route_reaches_the_c_core(blackwell_build, monkeypatch):
    blackwell_build[0] = 3  # others' flags stay
    for value, flags in (("own", 8), ("cublaslt", 16), ("auto", 0), ("", 0)):
        monkeypatch.setenv(selector.ENV_WO_B, value)
        selector.request_wo_b("sm103")
        assert blackwell_build == [3 | flags]


def test_a_route_that_cannot_be_had_is_an_error(blackwell_build, monkeypatch):
    monkeypatch.setenv(selector.ENV_WO_B, "cublaslt")
    monkeypatch.setattr(_C, "cublaslt_status", lambda: (False, "cuBLASLt cannot be opened"))
    with pytest.raises(ValueError, match="VLLM_MEGAATTN_WO_B='cublaslt' refused on sm100: cuBLASLt cannot be opened"):
        selector.request_wo_b("sm100")
    with pytest.raises(ValueError, match="refused on cpu: only datacenter Blackwell has that route"):
        ops.mxfp8_gemm_wo_b(torch.zeros(0, 32).to(ops.E4M3), torch.zeros(0, dtype=torch.uint8),
                            torch.zeros(32, 32).to(ops.E4M3), torch.zeros(1, 1, dtype=torch.uint8))  # fmt: skip
    monkeypatch.setenv(selector.ENV_WO_B, "quick")
    with pytest.raises(ValueError, match="VLLM_MEGAATTN_WO_B must be one of auto, own, cublaslt, got 'quick'"):
        selector.select_wo_b("sm100")
    assert selector.explain_wo_b("sm100")["route"] is None
    assert blackwell_build == [0]


def test_a_route_that_failed_its_check_is_not_taken(blackwell_build, monkeypatch):
    selector.disable_wo_b("cublaslt", "cuBLASLt failed the self-check")
    assert selector.select_wo_b("sm100") == ("own", "cuBLASLt failed the self-check")
    selector.request_wo_b("sm100")
    assert blackwell_build == [8]
    monkeypatch.setenv(selector.ENV_WO_B, "cublaslt")
    with pytest.raises(ValueError, match="refused on sm100: cuBLASLt failed the self-check"):
        selector.select_wo_b("sm100")
    monkeypatch.delenv(selector.ENV_WO_B)
    selector.disable_wo_b("own", "the own kernel failed too")
    with pytest.raises(ValueError, match="failed the self-check; the own kernel failed too"):
        selector.select_wo_b("sm100")


# ---- devices --------------------------------------------------------------------------------------------------


def test_device_keys(monkeypatch):
    asked = []

    def capability(index):
        asked.append(index)
        return {0: (9, 0), 1: (10, 3)}[index]

    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert selector.device_key(torch.device("cpu")) == "cpu"
    assert selector.device_key(torch.device("meta")) == "meta"
    assert asked == []
    for _ in range(2):
        assert selector.device_key(torch.device("cuda:0")) == "sm90"
        assert selector.device_key(torch.device("cuda")) == "sm103"
    assert asked == [0, 1]  # once per index: B81


def test_rocm_capabilities_are_not_taken_for_nvidia_ones(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))  # gfx90a says so
    assert selector.device_key(torch.device("cuda:0")) == "rocm"


def test_choosing_initialises_no_cuda_and_traces_whole():
    code = (
        "import torch\n"
        "from vllm_megaattn import selector\n"
        "def f(x):\n"
        "    key = selector.device_key(x.device)\n"
        "    return x + 1 if selector.select_path(key, rank=x.shape[1], requested='auto').path == 'fused' else x\n"
        "assert f(torch.zeros(2, 1024)).sum() == 2048\n"
        "assert not torch.cuda.is_initialized()\n"  # torch.compile itself does where it finds a GPU
        "compiled = torch.compile(f, fullgraph=True, backend='eager')\n"
        "assert compiled(torch.zeros(2, 1024)).sum() == 2048\n"
    )
    done = subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
