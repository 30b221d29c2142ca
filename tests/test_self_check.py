"""The first-use check and `check`, with the CPU backend in the device's place: nothing is found where nothing is wrong,
every planted fault is, and what fails is taken out of use."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import vllm_megaattn
from vllm_megaattn import _C, selector, self_check, self_check_cases
from vllm_megaattn.cli import check, main
from vllm_megaattn.self_check import NO_DECODE, NO_PAIRS, WO_B_CUBLASLT, WO_B_OWN

CPU = torch.device("cpu")
QUICK = {"sm90": self_check.QUICK_HOPPER, "sm100": self_check.QUICK_BLACKWELL}


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No state of devices, no forced route; flags as before afterwards."""
    monkeypatch.setattr(self_check, "_states", {})
    monkeypatch.setattr(selector, "_routes", {})
    monkeypatch.setattr(selector, "_disabled_routes", {})
    monkeypatch.delenv(selector.ENV_WO_B, raising=False)
    flags = _C.get_flags()
    yield
    _C.set_flags(flags)


@pytest.fixture
def launched(monkeypatch):
    """(unit, flags) of every case that is launched."""
    seen = []
    launch = self_check_cases.launch

    def note(p, base):
        seen.append((p.case.unit, _C.get_flags()))
        launch(p, base)

    monkeypatch.setattr(self_check_cases, "launch", note)
    return seen


def plant(monkeypatch, unit, change):
    """`change(slots)` is done to the results of a unit's cases after their kernels have run."""
    launch = self_check_cases.launch

    def faulty(p, base):
        launch(p, base)
        if p.case.unit == unit:
            change({name: slot.of(base) for name, slot in p.slots.items()})

    monkeypatch.setattr(self_check_cases, "launch", faulty)


@pytest.mark.parametrize("key", QUICK)
def test_nothing_is_found_where_nothing_is_wrong(key, launched):
    findings = self_check.run(QUICK[key], CPU)
    assert [f for f in findings if not f.ok] == []
    assert {f.family for f in findings} == set(self_check.FAMILIES)
    assert launched == [(case.unit, case.flags) for case in QUICK[key]]
    assert _C.get_flags() == 0


@pytest.mark.parametrize("key", ["sm90", "sm100"])
def test_the_full_matrix_holds_every_unit_and_no_wide_span_on_blackwell(key, monkeypatch):
    monkeypatch.setattr(_C, "cublaslt_status", lambda: (True, "cuBLASLt 130100"))
    cases = self_check.cases_for(key, quick=False)
    assert {case.unit for case in cases} == {case.unit for case in QUICK[key]}
    assert len(set(cases)) == len(cases)
    if key == "sm100":
        quick = self_check.cases_for(key, quick=True)
        assert {case.unit for case in quick} == {"stream", "split", "pairs", "single", "cuBLASLt"}
        assert {case.span for case in cases if case.unit != "stream"} == {32}
        assert all(case.span == 32 for case in quick)
        for case in cases:  # no kernel of ours and no library without being asked for
            assert case.unit == "stream" or bool(case.flags & WO_B_OWN) != bool(case.flags & WO_B_CUBLASLT)
        monkeypatch.setattr(_C, "cublaslt_status", lambda: (False, "not there"))
        assert {case.unit for case in self_check.cases_for(key, quick=True)} == {"stream", "split", "pairs", "single"}
    else:
        assert {"decode", "tiled", "per 32", "per row", "stream"} == {case.unit for case in cases}


@pytest.mark.parametrize("index", range(0, 140, 9))
@pytest.mark.parametrize("key", ["sm90", "sm100"])
def test_the_full_matrix_passes_on_the_cpu(key, index, monkeypatch):
    monkeypatch.setattr(_C, "cublaslt_status", lambda: (True, "cuBLASLt 130100"))
    small = [case for case in self_check.cases_for(key, quick=False) if case.groups * case.k < 4096]
    if index >= len(small):
        pytest.skip("no such case")
    findings = self_check.run([small[index]], CPU)
    assert findings
    assert [(f.what, f.detail) for f in findings if not f.ok] == []


# ---- planted faults --------------------------------------------------------------------------------------------------

FAULTS = [  # unit, result, place of the wrong byte, family, a word of the finding
    ("stream", "x", 5, "inv_rope", "x = CPU: data"),
    ("stream", "q", -1, "quantize", "equal tokens are equal"),
    ("decode", "z", 3, "einsum", "fused z = quantised BF16 z: data"),
    ("decode", "q_scale", 2, "quantize", "q = CPU: scales"),
    ("tiled", "z_scale", -1, "einsum", "padding is 0x00"),
    ("tiled", "fused_y", 1, "o_proj", "fused = unfused"),
    ("tiled", "attn_y", 1, "o_proj", "from attention = from x"),
    ("per 32", "x_scale", 0, "inv_rope", "x = CPU: scales"),
]


@pytest.mark.parametrize(("unit", "result", "place", "family", "words"), FAULTS)
def test_one_wrong_byte_is_found(monkeypatch, unit, result, place, family, words):
    def change(slots):
        if result in slots:
            tensor = slots[result]
            flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            start = tensor.storage_offset() * tensor.element_size()
            size = tensor.numel() * tensor.element_size()
            flat[start + place % size] ^= 1

    plant(monkeypatch, unit, change)
    failed = [f for f in self_check.run(QUICK["sm90"], CPU) if not f.ok]
    assert {f.case.unit for f in failed} == {unit}
    assert any(f.family == family and words in f.what for f in failed), failed


@pytest.mark.parametrize(("unit", "name"), [("decode", "z_bf16"), ("tiled", "y")])
def test_values_far_from_the_cpus_are_found(monkeypatch, unit, name):
    plant(monkeypatch, unit, lambda slots: slots[name].mul_(1.01) if name in slots else None)
    failed = [f for f in self_check.run(QUICK["sm90"], CPU) if not f.ok]
    assert any(f.what.endswith("~ CPU") and "relative distance" in f.detail for f in failed)


def test_a_scale_of_a_neighbour_is_found(monkeypatch):
    """What a kernel that reads the scale of the next row, or of the next block, would write."""
    for step in (1, 4, 16):  # block column, row + 32, row + 1 of F8_128x4
        with monkeypatch.context() as patch:
            plant(patch, "per 32", lambda slots, step=step: slots["z_scale"].copy_(slots["z_scale"].roll(step)))
            failed = [f for f in self_check.run(QUICK["sm90"], CPU) if not f.ok]
            assert any(f.family == "einsum" and "scales" in f.what for f in failed)


def test_a_kernel_that_raises_is_a_finding(monkeypatch):
    def broken(slots):
        raise RuntimeError("launch failed")

    plant(monkeypatch, "per row", broken)
    failed = [f for f in self_check.run(QUICK["sm90"], CPU) if not f.ok]
    assert [(f.case.unit, f.what, f.detail) for f in failed] == [("per row", "runs", "launch failed")]
    assert _C.get_flags() == 0


def test_a_library_without_an_algorithm_is_no_fault(monkeypatch):
    """cuBLASLt says MX_UNSUPPORTED: the route is not taken for such problems, and not given up for others."""

    def refuse(slots):
        raise RuntimeError("cuBLASLt has no MXFP8 algorithm")

    for unit, ok in (("cuBLASLt", True), ("split", False)):
        with monkeypatch.context() as patch:
            patch.setattr(_C, "take_error_kind", lambda: 1)
            plant(patch, unit, refuse)
            findings = self_check.run(QUICK["sm100"], CPU)
            refused = [f for f in findings if f.case.unit == unit]
            assert {f.ok for f in refused} == {ok}
            assert {f.what for f in refused} == {"not offered" if ok else "runs"}


# ---- first use -------------------------------------------------------------------------------------------------------


def first_use(key, monkeypatch):
    monkeypatch.setattr(selector, "device_key", lambda device: key)
    monkeypatch.setattr(_C, "cublaslt_status", lambda: (True, "cuBLASLt 130100"))
    state = self_check._State()
    self_check._first_use(CPU, state)
    return state


def test_first_use_disables_nothing_without_a_fault(monkeypatch, recwarn):
    state = first_use("sm90", monkeypatch)
    assert (state.disabled, state.replaced) == ({}, {})
    assert state.milliseconds > 0
    assert not recwarn.list


def corrupt(name):
    return lambda slots: slots[name].view(torch.uint8).flatten()[:1].bitwise_xor_(1) if name in slots else None


@pytest.mark.parametrize(
    ("key", "unit", "result", "flags", "disabled"),
    [
        ("sm90", "decode", "z", NO_DECODE, set()),
        ("sm90", "tiled", "z", 0, {"einsum_fp8_sfd128x4", "einsum_fp8_bf16", "o_proj", "o_proj_from_attn"}),
        ("sm90", "stream", "q", 0, {"mxfp8_quantize_sfd128x4"}),
        ("sm90", "stream", "x", 0, {"inv_rope_mxfp8_quantize", "o_proj_from_attn"}),
        ("sm100", "pairs", "z", NO_PAIRS, set()),
        ("sm100", "split", "z", 0, {"einsum_fp8_sfd128x4", "einsum_fp8_bf16", "o_proj", "o_proj_from_attn"}),
    ],
)
def test_what_fails_is_taken_out_of_use(monkeypatch, key, unit, result, flags, disabled):
    plant(monkeypatch, unit, corrupt(result))
    with pytest.warns(
        RuntimeWarning, match=f"{unit}.*Please report it and attach .*vllm_megaattn_check_.*txt"
    ) as caught:
        state = first_use(key, monkeypatch)
    assert set(state.disabled) == disabled
    assert _C.get_flags() == flags
    assert (unit in state.replaced) == bool(flags)
    path = str(caught[0].message).split("attach ")[1].split(" ")[0]
    report = Path(path).read_text()
    assert "FAIL" in report
    assert "torch" in report


@pytest.mark.parametrize(("unit", "lost", "kept"), [("cuBLASLt", "cublaslt", "own"), ("single", "own", "cublaslt")])
def test_a_route_of_wo_b_that_fails_gives_way_to_the_other(monkeypatch, unit, lost, kept):
    plant(monkeypatch, unit, lambda slots: slots["y"].mul_(2) if "y" in slots else None)
    with pytest.warns(RuntimeWarning, match="no longer used"):
        state = first_use("sm100", monkeypatch)
    assert state.disabled == {}
    assert selector.select_wo_b("sm100").route == kept
    selector.request_wo_b("sm100")
    assert _C.get_flags() == {"own": WO_B_OWN, "cublaslt": WO_B_CUBLASLT}[kept]
    monkeypatch.setenv(selector.ENV_WO_B, lost)
    with pytest.raises(ValueError, match=f"'{lost}' refused on sm100: .*failed the self-check"):
        selector.select_wo_b("sm100")


class Cuda:
    """A CUDA tensor as far as before_call looks."""

    device = torch.device("cuda", 3)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of key sm100 that cannot run anything; what its first use ran."""
    ran = []
    monkeypatch.setattr(selector, "device_key", lambda device: "sm100")
    monkeypatch.setattr(selector, "backend_gap", lambda key: "")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GB200")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(self_check, "_first_use", lambda device, state: ran.append(device))
    return ran


def test_the_check_runs_once_and_unproven_kernels_are_named_in_the_log(gpu, caplog, monkeypatch):
    with caplog.at_level(logging.WARNING, logger="vllm_megaattn"):
        for _ in range(3):
            self_check.before_call("o_proj", Cuda)
    assert gpu == [torch.device("cuda", 3)]
    (record,) = caplog.records
    assert (
        "cuda:3 (GB200): its kernels have run in an emulator (tests/emulator), never on this hardware"
        in record.message
    )
    assert "python -m vllm_megaattn check" in record.message
    self_check._states[3].disabled["o_proj"] = "3 bytes differ"
    with pytest.raises(RuntimeError, match="o_proj: disabled on cuda:3 after a failed self-check: 3 bytes differ"):
        self_check.before_call("o_proj", Cuda)
    self_check.before_call("mxfp8_gemm_wo_b", Cuda)


def test_a_capture_postpones_the_check(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    self_check.before_call("o_proj", Cuda)
    assert gpu == []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    self_check.before_call("o_proj", Cuda)
    assert len(gpu) == 1


def test_the_check_can_be_turned_off_but_the_warning_stays(gpu, caplog, monkeypatch):
    monkeypatch.setenv(self_check.ENV, "0")
    self_check.before_call("o_proj", Cuda)
    assert gpu == []
    assert len(caplog.records) == 1


def test_prepare_device_runs_it_ahead(gpu, monkeypatch):
    import contextlib

    prepared = []
    monkeypatch.setattr(_C, "cuda_prepare", prepared.append)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    vllm_megaattn.prepare_device("cpu")
    assert prepared == []
    for _ in range(2):
        vllm_megaattn.prepare_device(3)
        vllm_megaattn.prepare_device("cuda:3")
    assert prepared == [3] * 4
    assert gpu == [torch.device("cuda", 3)]
    self_check.before_call("o_proj", Cuda)
    assert len(gpu) == 1


def test_the_checks_own_work_on_the_host_is_small():
    """Below 50 ms in all on a GPU's host; here without the kernels, by the processor's clock of one quiet thread."""
    arena = self_check_cases.Arena()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times = []
        for _ in range(3):
            begin = time.thread_time()
            arena = self_check_cases.Arena()
            prepared = [self_check_cases.prepare(case, arena, i) for i, case in enumerate(QUICK["sm90"])]
            base = arena.host()
            middle = time.thread_time()
            for p in prepared:
                self_check_cases.launch(p, base)
            after = time.thread_time()
            for p in prepared:
                self_check_cases.compare(p, base)
            times.append(middle - begin + time.thread_time() - after)
    finally:
        torch.set_num_threads(threads)
    assert min(times) < 0.1  # about 0.025; processors differ
    assert arena.size < 16 << 20


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def cpu_as_gpu(monkeypatch):
    monkeypatch.setattr(check.common, "cuda_gap", lambda: "")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a stand-in")
    monkeypatch.setattr(selector, "device_key", lambda device: "sm90")
    run = self_check.run
    monkeypatch.setattr(self_check, "run", lambda cases, device: run(cases, CPU))


@pytest.mark.usefixtures("cpu_as_gpu")
def test_the_verdict(capsys, monkeypatch):
    assert main(["check", "--quick"]) == 0
    out = capsys.readouterr().out
    assert "a stand-in (sm90)" in out
    assert "verdict: ok, 0 of" in out
    assert "FAILED" not in out
    plant(monkeypatch, "decode", corrupt("z"))
    assert main(["check", "--quick"]) == 1
    out = capsys.readouterr().out
    assert "Please open an issue with this output and attach" in out
    assert "einsum: fused z = quantised BF16 z: data (decode: T=7" in out


@pytest.mark.usefixtures("cpu_as_gpu")
def test_an_isolated_unit(capsys, monkeypatch):
    """What the child prints is what the parent reads; a child that hangs or dies is named with its problem."""
    cases = [case for case in QUICK["sm90"] if case.unit == "tiled"]
    assert main(["check", "--quick", "--unit", "tiled"]) == 0
    text = capsys.readouterr().out
    findings = check.parse_unit(text, cases, "died")
    assert len(findings) > 20
    assert all(f.ok for f in findings)
    assert {f.case for f in findings} == set(cases)
    cut = text[: text.index(json.dumps({"begins": 2})) + 14]
    last = check.parse_unit(cut + "\n{broken", cases, "no end after 300 s")[-1]
    assert (last.ok, last.what, last.case, last.detail) == (False, "runs to its end", cases[2], "no end after 300 s")

    def hang(command, **options):
        assert command[1:6] == ["-m", "vllm_megaattn", "check", "--device", "0"]
        raise subprocess.TimeoutExpired(
            command, options["timeout"], output=b'{"begins": 0}\n{"cut o', stderr=b"some noise"
        )

    monkeypatch.setattr(subprocess, "run", hang)
    assert main(["check", "--quick", "--isolate"]) == 1
    out = capsys.readouterr().out
    assert "runs to its end" in out
    assert "no end after 300 s: some noise" in out


def test_without_a_gpu_the_command_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["check"]) == 2
    assert "check: " in capsys.readouterr().out


@pytest.mark.gpu
def test_on_the_device():
    """In a fresh process: the check passes, and its time is what the README says."""
    code = (
        "import torch, vllm_megaattn\n"
        "from vllm_megaattn import _C, self_check\n"
        "torch.ones(1, device='cuda')\n"
        "_C.cuda_prepare(0)\n"
        "vllm_megaattn.prepare_device(0)\n"
        "state = self_check._states[0]\n"
        "assert not state.disabled and not state.replaced, state\n"
        "print(state.milliseconds)\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 200  # meant: 50


def test_default_device_does_not_matter():
    """An engine's torch.set_default_device must not move the data that the check compares with."""
    with torch.device("meta"):
        findings = self_check.run(QUICK["sm100"], CPU)
    assert findings
    assert [f for f in findings if not f.ok] == []
