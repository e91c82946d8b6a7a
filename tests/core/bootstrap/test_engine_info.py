"""What an engine says about itself before it has run."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minisgl.bootstrap import load_host
from minisgl.bootstrap.engine import _engine_info
from minisgl.bootstrap.survey import survey
from minisgl.settings import Settings
from support.tiny_models import write_tiny_model


@pytest.mark.parametrize(
    ("device", "launch", "takes_mixed", "mixed"),
    [
        ("cpu", "auto", True, True),
        ("cpu", "auto", False, False),
        ("cpu", "split", True, False),
        ("cpu", "mixed", True, True),
        ("cuda", "auto", True, False),
        ("cuda", "split", True, False),
        ("cuda", "mixed", True, True),
    ],
)
def test_launches_are_mixed_as_the_setting_says_or_as_suits_the_device(
    tmp_path: Path, device: str, launch: str, takes_mixed: bool, mixed: bool
) -> None:
    path = write_tiny_model(tmp_path / "model", "Qwen3ForCausalLM")
    settings = Settings(
        model={"path": str(path)}, engine={"device": "cpu"}, scheduler={"launch": launch}
    )
    site = replace(survey(settings, load_host(settings)), device=torch.device(device))
    assert _engine_info(site, mixed=takes_mixed, shares=False).mixed_launches is mixed
