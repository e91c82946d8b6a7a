"""A tiny model, loaded once for the tests of the offline front door."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from minisgl import LLM
from support.clean_process import clean_process
from support.tiny_models import write_tiny_model

__all__ = ["clean_process"]


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "llama", "LlamaForCausalLM")


@pytest.fixture(scope="module")
def llm(tiny_path: Path) -> Iterator[LLM]:
    with LLM(str(tiny_path), progress=False, page_size=4, num_pages=100) as opened:
        yield opened
