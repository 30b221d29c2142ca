"""The switch, the naming of devices, the log, and the import watcher: without an engine."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys

import pytest
import torch

from vllm_megaattn.engines import common
from vllm_megaattn.engines.report import Reporter, Served


@pytest.mark.parametrize(
    ("value", "on"), [(None, True), ("", True), ("1", True), ("0", False), ("off", False), ("False", False)]
)
def test_switch(monkeypatch, value, on):
    monkeypatch.delenv("VLLM_MEGAATTN", raising=False)
    if value is not None:
        monkeypatch.setenv("VLLM_MEGAATTN", value)
    assert common.enabled() is on


@pytest.mark.parametrize(
    ("capability", "device", "gpu_here", "key"),
    [
        ((9, 0), "cuda:0", True, "sm90"),
        ((10, 3), "cuda:1", True, "sm103"),
        ((9, 0), "meta", True, "sm90"),  # built without storage, materialised on the GPU later
        ((9, 0), "cpu", True, "sm90"),  # built on the host of a GPU
        ((9, 0), "cpu", False, "cpu"),
        (None, "cpu", False, "cpu"),
        (None, "meta", False, "meta"),
    ],
)
def test_device_key(monkeypatch, capability, device, gpu_here, key):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu_here)
    assert common.device_key_for(capability, torch.device(device)) == key


def test_a_cpu_has_no_fault():
    assert common.device_fault(torch.device("cpu")) == ""


def test_device_fault_runs_the_self_check_under_torchs_own_defaults(monkeypatch):
    """Engines build layers with bfloat16 and the GPU as torch's defaults; the comparison must see neither."""
    from vllm_megaattn import self_check

    seen = []

    def before_call(op, tensor):
        seen.append((op, torch.get_default_dtype(), torch.empty(1).device.type))

    monkeypatch.setattr(common, "prepare_device", lambda device: None)
    monkeypatch.setattr(self_check, "before_call", before_call)
    monkeypatch.setattr(self_check, "disabled_ops", lambda index: {"o_proj": "data = CPU: 3 bytes differ"})
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, device=None: empty(*size))
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            fault = common.device_fault(torch.device("cuda", 0))
        assert torch.get_default_dtype() is torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    assert fault == "o_proj failed the self-check: data = CPU: 3 bytes differ"
    assert seen == [("o_proj_from_attn", torch.float32, "cpu")]

    def refuse(device):
        raise RuntimeError("no driver")

    monkeypatch.setattr(common, "prepare_device", refuse)
    assert common.device_fault(torch.device("cuda", 0)) == "no driver"


@pytest.fixture
def reporter(caplog):
    logger = logging.getLogger("megaattn_test")
    caplog.set_level(logging.DEBUG, logger="megaattn_test")
    return Reporter(logger)


def test_a_reason_is_logged_once(reporter, caplog):
    for index in range(3):
        reporter.add_left(index, f"layers.{index}", "no kernel")
    reporter.add_left(3, "layers.3", "another reason")
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2
    assert texts[0] == "vllm_megaattn: left layers.0 and layers like it to the engine: no kernel"


def test_summary_counts_layers_kernels_memory_and_reasons(reporter, caplog):
    for index in range(3):
        record = Served(f"layers.{index}", "fused on sm90", "detail", saved_bytes=1 << 20, elements=1000)
        record.changed_elements, record.relative_error = 2, 1e-6 * (index + 1)
        reporter.add_served(index, record)
    reporter.add_left(9, "draft", "the output projection is not quantised")
    reporter.summarise()
    reporter.summarise()
    summaries = [text for text in (r.getMessage() for r in caplog.records) if "output projection of" in text]
    assert summaries == [
        "vllm_megaattn: output projection of 3 of 4 attention layers: 3 fused on sm90; "
        "3.0 MiB of weights less than with the engine's own path on this GPU; "
        "re-blocking the scales rounded 6 of 3000 weight elements (relative error of a matrix at most 3.0e-06); "
        "1 left to the engine: the output projection is not quantised"
    ]
    reporter.add_served(4, Served("draft.layers.0", "fused on sm90", "detail"))
    reporter.summarise()
    assert "4 of 5 attention layers" in caplog.records[-1].getMessage()


def test_nothing_served_means_no_summary(reporter, caplog):
    reporter.add_left(0, "layers.0", "no kernel")
    reporter.summarise()
    assert len(caplog.records) == 1


# ---- the import watcher --------------------------------------------------------------------------------------------


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module that is not imported yet; its name."""
    (tmp_path / "watched_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "watched_module"
    sys.modules.pop("watched_module", None)
    from vllm_megaattn.engines import imports

    imports.forget("watched_module")


def test_callback_runs_after_the_module(module):
    from vllm_megaattn.engines import imports

    seen = []
    imports.after_import(module, lambda m: seen.append(m.value))
    assert seen == []
    imported = importlib.import_module(module)
    assert seen == [1]
    assert imported.__spec__.loader.__class__.__name__ == "SourceFileLoader"
    assert importlib.reload(imported).value == 1
    assert seen == [1, 1]


def test_callback_runs_at_once_for_a_loaded_module(module):
    from vllm_megaattn.engines import imports

    imported = importlib.import_module(module)
    seen = []
    imports.after_import(module, seen.append)
    assert seen == [imported]


def test_forgotten_names_leave_no_finder(module):
    from vllm_megaattn.engines import imports

    finders = len(sys.meta_path)
    imports.after_import(module, lambda m: None)
    imports.after_import(module, lambda m: None)
    imports.forget(module)
    assert len(sys.meta_path) <= finders
    importlib.import_module(module)


def test_missing_module_stays_missing():
    from vllm_megaattn.engines import imports

    imports.after_import("no_such_module_at_all", lambda m: None)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_module_at_all")
    imports.forget("no_such_module_at_all")


def test_entry_point_is_cheap():
    """No model, no engine, no CUDA; milliseconds once torch is there."""
    code = (
        "import sys, time, torch\n"
        "start = time.perf_counter()\n"
        "from vllm_megaattn.engines.vllm import register\n"
        "register(); register()\n"
        "took = time.perf_counter() - start\n"
        "assert not any(name.split('.')[0] in ('vllm', 'sglang', 'triton') for name in sys.modules), sys.modules\n"
        "assert not torch.cuda.is_initialized()\n"
        "print(took)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(result.stdout) < 2.0
