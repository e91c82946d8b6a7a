"""Starts, watches and stops a server with a fake engine, as a user's shell would."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from support.patience import PATIENCE

SCRIPT = Path(__file__).with_name("run_fake_server.py")


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    """Return the first true value of ``condition``."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if value := condition():
                return value
        time.sleep(0.02)
    raise AssertionError(f"waited {PATIENCE:g} s for {what}")


def get(url: str, **options: Any) -> httpx.Response:
    """Ask, and wait longer for the answer than httpx does of itself."""
    return httpx.get(url, timeout=PATIENCE, verify=False, **options)  # reads no certificates


def post(url: str, **options: Any) -> httpx.Response:
    """Post, and wait longer for the answer than httpx does of itself."""
    return httpx.post(url, timeout=PATIENCE, verify=False, **options)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def can_bind(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return True
        return False


class ServerProcess:
    """A running server; its output goes to files, its sockets to a folder of its own."""

    def __init__(self, model: Path, workspace: Path, **options: Any) -> None:
        self.port = options.pop("port", None) or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = workspace / "events.log"
        # Short: a Unix socket's path must fit into 107 bytes, and pytest's folders are long.
        self.temporary = Path(tempfile.mkdtemp(prefix="fake"))
        self._num_tokenizers = options.get("server", {}).get("num_tokenizers", 1)
        options["fake"] = {"log": str(self.log), **options.get("fake", {})}
        environment = options.pop("environment", {})
        self._out = (workspace / "out").open("w+")
        self._err = (workspace / "err").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(model), str(self.port), json.dumps(options)],
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            start_new_session=True,
            env={
                **os.environ,
                "TMPDIR": str(self.temporary),
                "OMP_NUM_THREADS": "1",
                **environment,
            },
        )

    @property
    def stdout(self) -> str:
        return Path(self._out.name).read_text()

    @property
    def stderr(self) -> str:
        return Path(self._err.name).read_text()

    @property
    def events(self) -> list[str]:
        """What the fake scheduler saw."""
        return self.log.read_text().splitlines() if self.log.exists() else []

    def wait_ready(self) -> "ServerProcess":
        """Wait until it serves."""

        def ready() -> bool:
            assert self.process.poll() is None, self.stderr
            return get(f"{self.url}/health").status_code == 200

        wait_for(ready, "the server")
        return self

    def children(self) -> dict[str, int]:
        """Pids of the worker processes, by name, as the server's own messages name them."""
        # They start in this order, and this machine's pids only grow. One that is just being
        # started still runs its parent's command.
        more = [f"tokenizer-{index}" for index in range(1, self._num_tokenizers)]
        names = ("scheduler", "detokenizer", "tokenizer", *more)
        wait_for(lambda: len(self._workers()) == len(names), "the workers")
        return dict(zip(names, self._workers(), strict=True))

    def _workers(self) -> list[int]:
        found = []
        for pid in descendants(self.process.pid):
            with contextlib.suppress(OSError):
                if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return sorted(found)

    def kill(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """Wait for its end; returns its exit code."""
        return self.process.wait(PATIENCE)

    def clean_up(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._out.close()
        self._err.close()
        with contextlib.suppress(OSError):
            self.temporary.rmdir()

    def left_over(self) -> list[str]:
        """Processes of the server's session and files of its sockets that still exist."""
        pids = [str(pid) for pid in session_members(self.process.pid)]
        return [*pids, *map(str, self.temporary.iterdir())]


@contextlib.contextmanager
def running_server(model: Path, workspace: Path, **options: Any) -> Iterator[ServerProcess]:
    server = ServerProcess(model, workspace, **options)
    try:
        yield server
    finally:
        server.clean_up()


def descendants(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [int(child) for child in children]


def session_members(session: int) -> list[int]:
    """Pids of living processes in a session."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session and fields[0] != "Z":
                    members.append(int(entry.name))
    return members


@contextlib.contextmanager
def serving(model: str, log: Path, *flags: str) -> Iterator[str]:
    """Run ``minisgl serve`` and yield its address; it must stop cleanly."""
    port = free_port()
    command = [sys.executable, "-m", "minisgl", "serve", "--model", model, "--port", str(port)]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, *flags],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        url = f"http://127.0.0.1:{port}"
        try:

            def ready() -> bool:
                assert process.poll() is None, log.read_text()
                return get(f"{url}/health").status_code == 200

            wait_for(ready, "the server")
            yield url
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0, log.read_text()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
