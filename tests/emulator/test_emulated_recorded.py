"""The emulated Hopper kernels against what an H200 computed (record_hopper.py), byte for byte."""

from __future__ import annotations

import numpy as np
import pytest
import record_hopper
from host import device_copy
from problems import Matmul


@pytest.fixture(scope="module")
def recording():
    with np.load(record_hopper.FILE) as file:
        return dict(file)


def problem_of(name: str, arrays: dict[str, np.ndarray]) -> Matmul:
    _, _, _, _, x_span, weights, _ = record_hopper.CASES[name]
    return Matmul(
        device_copy(arrays["x"]), arrays["x_scale"], device_copy(arrays["w"]), arrays["w_scale"], x_span, weights
    )


@pytest.mark.parametrize("name", record_hopper.CASES)
def test_equals_the_device(hopper, recording, name):
    arrays = {key.split(".")[1]: value for key, value in recording.items() if key.startswith(f"{name}.")}
    span = record_hopper.CASES[name][-1]
    problem = problem_of(name, arrays)
    out, out_scale = problem.run(hopper, span)
    different = int((out != arrays["out"]).sum())
    assert different == 0, f"{different} of {out.size} results differ from the {recording['device']}"
    if span:
        assert np.array_equal(out_scale, arrays["out_scale"])


def test_the_recording_is_a_hopper_gpus(recording):
    assert str(recording["device"]).startswith("NVIDIA H")


@pytest.mark.parametrize("name", record_hopper.CASES)
def test_recording_is_of_these_inputs(recording, name):
    for key, value in record_hopper.inputs(name).items():
        assert np.array_equal(recording[f"{name}.{key}"], value)
