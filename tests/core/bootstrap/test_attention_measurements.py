"""An engine that is told what was measured on its device."""

import logging

import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.bootstrap.measurements import device_name
from minisgl.errors import SettingsError
from support.measured_cells import cell, write_measurements
from support.tiny_models import write_tiny_model

CASES = ("decode:1x64:4/2x16:p16", "prefill:1x64:4/2x16:p16")


@pytest.fixture
def model(tmp_path):
    return str(write_tiny_model(tmp_path / "model", "Qwen3ForCausalLM"))


def measurements(tmp_path, **changes):
    here = {"dtype": "float32", "device": {"name": device_name(torch.device("cpu"))}, **changes}
    cells = [cell(case, "minisgl-core:torch", 10.0) for case in CASES]
    return str(write_measurements(tmp_path / "here.json", cells, **here))


def test_an_engine_chooses_by_the_measurements_of_its_device(model, tmp_path, caplog):
    path = measurements(tmp_path)
    with (
        caplog.at_level(logging.INFO, "minisgl"),
        LLM(
            model, progress=False, device="cpu", num_pages=20, skip_tokenizer_init=True,
            attention_measurements=path,
        ) as llm,
    ):  # fmt: skip
        (answer,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(answer.token_ids) == 4
    assert f"torch (decode) 100: measured on {device_name(torch.device('cpu'))}, {path}" in (
        caplog.text
    )


def test_an_engine_refuses_the_measurements_of_another_device(model, tmp_path):
    path = measurements(tmp_path, device={"name": "NVIDIA H200"})
    with pytest.raises(SettingsError, match="is of device NVIDIA H200, this is ") as caught:
        LLM(model, progress=False, device="cpu", num_pages=20, skip_tokenizer_init=True,
            attention_measurements=path)  # fmt: skip
    assert str(caught.value).startswith(f"attention.measurements={path!r}")
