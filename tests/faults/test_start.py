"""A start that cannot succeed: its exit code, its one line, and nothing left behind."""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from minisgl import LLM
from minisgl.cli import main
from minisgl.errors import DoesNotFitError, ModelLoadError
from support.patience import FOR_EVER
from support.server_process import can_bind, running_server, session_members, wait_for
from support.tiny_models import write_tiny_model

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def cut_weights(folder: Path) -> None:
    [file] = folder.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1000])


def no_weights(folder: Path) -> None:
    [file] = folder.glob("*.safetensors")
    file.unlink()


def garbled_weights(folder: Path) -> None:
    [file] = folder.glob("*.safetensors")
    file.write_bytes(b"\xff" * 1000)


def pickled_weights(folder: Path) -> None:
    [file] = folder.glob("*.safetensors")
    file.unlink()
    torch.save({}, folder / "pytorch_model.bin")


def weights_elsewhere(folder: Path) -> None:
    [file] = folder.glob("*.safetensors")
    file.rename(folder.parent / file.name)
    index = {"weight_map": {"model.embed_tokens.weight": f"../{file.name}"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def garbled_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ["a"]}')


def garbled_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": 5}')


def garbled_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"architectures": ["Qwen3')


def strange_shape(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 4096}))


SPOILED: dict[Callable[[Path], None], list[str]] = {
    cut_weights: [".safetensors"],
    no_weights: ["weights"],
    garbled_weights: [".safetensors"],
    pickled_weights: ["pickled weights", "convert"],
    weights_elsewhere: ["index.json", "files beside it"],
    garbled_index: ["index.json", "files beside it"],
    garbled_tokenizer: ["tokenizer"],
    garbled_config: ["config.json"],
    strange_shape: ["shape"],
}
"""Ways to spoil a folder, and the words that the message has then."""


@pytest.mark.parametrize("spoil", SPOILED)
def test_what_is_wrong_with_a_model_is_said_in_one_line(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    """Public case R118: the message names the folder, and the file where it is one."""
    folder = write_tiny_model(tmp_path / "tiny", "Qwen3ForCausalLM")
    spoil(folder)
    with pytest.raises(ModelLoadError) as caught:
        LLM(str(folder), progress=False)
    [line] = str(caught.value).splitlines()
    assert str(folder) in line
    assert all(word in line for word in SPOILED[spoil]), line


@pytest.mark.slow
@pytest.mark.parametrize("spoil", [cut_weights, garbled_tokenizer])
def test_a_model_that_cannot_be_loaded(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    """Public case R118, in the scheduler's process and in those of text."""
    folder = write_tiny_model(tmp_path / "tiny", "Qwen3ForCausalLM")
    spoil(folder)
    with running_server(folder, tmp_path, real_engine=True, real_text=True) as server:
        assert server.wait() == ModelLoadError.exit_code == 4
        [line] = [line for line in server.stderr.splitlines() if "minisgl: error:" in line]
        assert str(folder) in line
        assert all(word in line for word in SPOILED[spoil]), line
        assert "Traceback" not in server.stderr
        wait_for(lambda: not server.left_over(), f"the end of {server.left_over()}")
        assert can_bind(server.port)


def test_weights_that_do_not_fit_are_exit_code_5_and_name_the_model(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny", "Qwen3ForCausalLM")
    config = json.loads((folder / "config.json").read_text())
    # More than an address space has: no system lets a process take that.
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 10**12}))
    with pytest.raises(DoesNotFitError) as caught:
        LLM(str(folder), progress=False)
    assert caught.value.exit_code == 5
    assert "the weights of Qwen3ForCausalLM" in str(caught.value)
    assert "smaller model" in str(caught.value)


@pytest.mark.slow
def test_a_pool_that_does_not_fit_is_exit_code_5_and_names_the_setting(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny", "Qwen3ForCausalLM")
    cache = {"num_pages": 2**40}
    with running_server(folder, tmp_path, real_engine=True, real_text=True, cache=cache) as server:
        assert server.wait() == 5
        [line] = [line for line in server.stderr.splitlines() if "minisgl: error:" in line]
        assert "cache.num_pages" in line
        wait_for(lambda: not server.left_over(), f"the end of {server.left_over()}")


@pytest.mark.parametrize("way", ["flag", "variable", "file"])
def test_a_backend_that_does_not_exist_is_refused_wherever_its_name_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], way: str
) -> None:
    """Public cases R131 and R137: from a flag, the environment and a file."""
    folder = write_tiny_model(tmp_path / "tiny", "Qwen3ForCausalLM")
    flags: list[str] = []
    if way == "flag":
        flags = ["--attention-backend", "no-such-backend"]
    elif way == "variable":
        monkeypatch.setenv("MINISGL_ATTENTION__BACKEND", "no-such-backend")
    else:
        config = tmp_path / "server.toml"
        config.write_text('[attention]\nbackend = "no-such-backend"\n')
        flags = ["--config", str(config)]
    assert main(["generate", "--model", str(folder), "--prompt", "x", *flags]) == 3
    told = capsys.readouterr().err
    assert "no-such-backend" in told
    assert "torch" in told, "the known names are listed"


@pytest.mark.slow
def test_a_server_refuses_it_too(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny", "Qwen3ForCausalLM")
    backend = {"backend": "no-such-backend"}
    with running_server(folder, tmp_path, real_engine=True, attention=backend) as server:
        assert server.wait() == 3
        [line] = [line for line in server.stderr.splitlines() if "minisgl: error:" in line]
        assert "no-such-backend" in line
        assert "Traceback" not in server.stderr
        wait_for(lambda: not server.left_over(), f"the end of {server.left_over()}")


@pytest.mark.parametrize("victim", ["scheduler", "detokenizer", "tokenizer"])
def test_a_worker_that_is_killed_while_it_starts_ends_the_start(
    tmp_path: Path, victim: str
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    # No worker serves yet: the scheduler takes for ever, and the start waits for all of them.
    with running_server(model, tmp_path, fake={"startup": FOR_EVER}) as server:
        # The server, its workers, and the tracker of multiprocessing's resources.
        wait_for(lambda: len(session_members(server.process.pid)) == 5, "the workers")
        pid = server.children()[victim]
        os.kill(pid, signal.SIGKILL)
        assert server.wait() == 7
        [line] = [line for line in server.stderr.splitlines() if "minisgl: error:" in line]
        assert f"the {victim} process" in line
        assert "was killed by SIGKILL" in line
        wait_for(lambda: not server.left_over(), f"the end of {server.left_over()}")


def test_a_server_that_is_killed_while_it_starts_takes_its_workers_along(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    with running_server(model, tmp_path, fake={"startup": FOR_EVER}) as server:
        wait_for(lambda: len(session_members(server.process.pid)) == 5, "the workers")
        server.kill(signal.SIGKILL)
        server.process.wait()
        wait_for(lambda: not session_members(server.process.pid), "the end of the workers")
        assert can_bind(server.port)
