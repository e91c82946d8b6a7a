"""Plugins that fail in a server: at import, in ``create``, ``plan``, ``attend``, in an observer."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.plugin_site import PluginSite
from support.server_process import ServerProcess, get, post, running_server
from support.tiny_models import write_tiny_model

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.slow,
]
IN_PLAN, IN_ATTEND = 41, 42
"""Lengths of prompts for which the backend below fails."""

BACKEND = """
from minisgl.plugins import (
    AttentionBackendRecord, Capabilities, NoSettings, Supported, hookimpl,
)


def create(context, settings):
    from minisgl.attention.torch_backend import TorchAttentionBackend

    if {create_fails}:
        raise RuntimeError("a fault in create")

    class Faulty(TorchAttentionBackend):
        lengths = ()

        def plan(self, batch, slot):
            self.lengths = batch.query_lens.tolist()
            if {in_plan} in self.lengths:
                raise RuntimeError("a fault in plan")
            return super().plan(batch, slot)

        def attend(self, *args, **kwargs):
            if {in_attend} in self.lengths:
                raise RuntimeError("a fault in attend")
            return super().attend(*args, **kwargs)

    return Faulty(context)


@hookimpl
def minisgl_attention_backends():
    yield AttentionBackendRecord(
        name="faulty", summary="fails when it is told to", settings_type=NoSettings,
        probe=lambda query: Supported(1, 1), create=create,
        capabilities=Capabilities(mixed_batches=True),
    )


@hookimpl
def minisgl_step_finished(stats):
    raise RuntimeError("a fault in an observer of steps")


@hookimpl
def minisgl_request_finished(stats):
    raise RuntimeError("a fault in an observer of requests")
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "qwen3", "Qwen3ForCausalLM")


def faulty(*, create_fails: bool = False) -> str:
    return BACKEND.format(create_fails=create_fails, in_plan=IN_PLAN, in_attend=IN_ATTEND)


def options(site: Path, backend: str = "auto") -> dict[str, Any]:
    return {
        "real_engine": True,
        "environment": {"PYTHONPATH": _path(site)},
        "attention": {"backend": backend},
    }


def _path(site: Path) -> str:
    return os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)


@pytest.fixture
def site(tmp_path: Path) -> PluginSite:
    return PluginSite(tmp_path / "site")


@pytest.fixture(scope="module")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    PluginSite(folder / "site").add("minisgl-faulty", faulty())
    with running_server(tiny, folder, **options(folder / "site", "faulty")) as server:
        yield server.wait_ready()
        server.kill(signal.SIGTERM)
        assert server.wait() == 0


def ask(server: ServerProcess, length: int, *, stream: bool) -> httpx.Response:
    body = {"prompt": [5] * length, "max_tokens": 3, "stream": stream, "ignore_eos": True}
    return post(f"{server.url}/v1/completions", json=body)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("length", "fault"), [(IN_PLAN, "a fault in plan"), (IN_ATTEND, "a fault in attend")]
)
def test_a_step_that_fails_ends_its_requests_and_no_other(
    server: ServerProcess, length: int, fault: str, stream: bool
) -> None:
    failed = ask(server, length, stream=stream)
    assert failed.status_code == 500
    assert fault in failed.json()["error"]["message"]
    fine = ask(server, 7, stream=stream)
    assert fine.status_code == 200
    assert fault in server.stderr, "the log has the traceback"
    health = get(f"{server.url}/health").json()
    assert health["status"] == "ok"


def test_an_observer_that_raises_is_logged_and_the_answer_is_given(server: ServerProcess) -> None:
    assert ask(server, 9, stream=False).status_code == 200
    assert "a fault in an observer of requests" in server.stderr


def test_a_backend_whose_create_raises_is_exit_code_3_and_named(
    tiny: Path, site: PluginSite, tmp_path: Path
) -> None:
    site.add("minisgl-faulty", faulty(create_fails=True))
    with running_server(tiny, tmp_path, **options(site.root, "faulty")) as server:
        assert server.wait() == 3
        [line] = [line for line in server.stderr.splitlines() if "minisgl: error:" in line]
        assert "faulty" in line
        assert "a fault in create" in line


def test_a_plugin_whose_import_raises_is_named_and_ends_the_start_if_it_is_chosen(
    tiny: Path, site: PluginSite, tmp_path: Path
) -> None:
    site.add("minisgl-broken", "raise RuntimeError('a fault at import')")
    with running_server(tiny, tmp_path, **options(site.root, "broken")) as server:
        assert server.wait() == 3
        [line] = [line for line in server.stderr.splitlines() if "minisgl: error:" in line]
        assert "broken" in line
        assert "a fault at import" in server.stderr
