"""Ranks as processes: how they start, what becomes of them, and what people are told."""

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch

from minisgl.distributed.gloo import GlooCommunicator
from minisgl.distributed.rank_group import RankGroup
from minisgl.errors import EngineLostError
from support.patience import FOR_EVER, PATIENCE
from support.server_process import wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def start(job: dict[str, Any], *, size: int = 2, **timeouts: float) -> RankGroup:
    timeouts = {"timeout": FOR_EVER, "start_timeout": FOR_EVER, **timeouts}
    group = RankGroup(size, "support.rank_targets", "act", **timeouts)
    group.begin(json.dumps(job).encode())
    return group


@contextlib.contextmanager
def serving(job: dict[str, Any], **options: Any) -> Iterator[tuple[RankGroup, GlooCommunicator]]:
    group = start(job, **options)
    try:
        communicator = group.connect()
        group.serve()
        yield group, communicator
    finally:
        pids = pids_of(group)
        group.close()
        assert not any(map(is_alive, pids))


def pids_of(group: RankGroup) -> list[int]:
    return [rank.process.pid for rank in group._resources.ranks]


def is_alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def step(group: RankGroup, communicator: GlooCommunicator, number: int) -> torch.Tensor:
    """Do what an engine does on rank 0."""
    group.board.ranks[0].begin(number)
    group.send(memoryview(bytes([number])))
    try:
        return communicator.all_reduce(torch.ones(1))
    except EngineLostError as error:
        raise group.explain(error, f"step {number}") from error


def steps(group: RankGroup, communicator: GlooCommunicator, numbers: range) -> None:
    for number in numbers:
        step(group, communicator, number)


def test_ranks_get_every_plan_and_sum_with_rank_0() -> None:
    with serving({}) as (group, communicator):
        for number in range(5):
            assert step(group, communicator, number).item() == 2
        wait_for(lambda: all(p.finished == 4 for p in group.board.ranks[1:]), "the last plan")
        assert {p.digests(4).plans for p in group.board.ranks[1:]} == {crc32(b"\x04")}
        group.check_alive()
        lost = group.explain(ValueError("out of luck"), "step 3")
        assert str(lost) == "rank 0 failed in step 3: ValueError: out of luck"


def test_an_idle_rank_that_stops_or_dies_is_noticed() -> None:
    with serving({}, timeout=1.0) as (group, _):
        [pid] = pids_of(group)

        def look() -> bool:
            group.check_alive()
            return False

        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(EngineLostError, match=rf"rank 1 \(pid {pid}\) has shown no sign of"):
            wait_for(look, "the notice of a stopped rank")
        silent_at = group.board.ranks[1].beats
        os.kill(pid, signal.SIGCONT)
        wait_for(lambda: group.board.ranks[1].beats > silent_at, "a sign of life")
        group.check_alive()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineLostError, match=rf"rank 1 \(pid {pid}\) was killed by SIGKILL"):
            wait_for(look, "the notice of a dead rank")


def test_silence_counts_only_while_rank_0_listens() -> None:
    """Catches: ranks killed because rank 0 itself was stopped, or slept without looking."""
    with serving({}, timeout=0.5) as (group, _):
        [pid] = pids_of(group)
        group.check_alive()
        os.kill(pid, signal.SIGSTOP)
        time.sleep(1)  # both were stopped, as a laptop's lid does it
        group.check_alive()
        os.kill(pid, signal.SIGCONT)


def test_a_rank_that_is_killed_in_a_step_ends_it_at_once_and_is_named() -> None:
    with serving({}, size=3) as (group, communicator):
        step(group, communicator, 0)
        victim = pids_of(group)[1]
        os.kill(victim, signal.SIGKILL)
        expected = rf"rank 2 \(pid {victim}\) was killed by SIGKILL"
        with pytest.raises(EngineLostError, match=expected):
            steps(group, communicator, range(1, 4))


def test_a_rank_that_stops_in_a_step_is_named_with_the_step() -> None:
    with serving({}) as (group, communicator):
        step(group, communicator, 0)
        [pid] = pids_of(group)
        os.kill(pid, signal.SIGSTOP)
        group._timeout = 1.0  # not before: a busy machine may take longer for a step
        group.serve()
        expected = rf"rank 1 \(pid {pid}\) has not begun step 1 for 1 s \(parallel\.timeout\)"
        with pytest.raises(EngineLostError, match=expected):
            step(group, communicator, 1)


def test_a_rank_that_waited_in_vain_for_rank_0_says_so() -> None:
    with serving({}, timeout=0.3) as (group, _):
        group.board.ranks[0].begin(0)
        group.send(memoryview(b"\x00"))
        group._resources.ranks[0].process.wait(PATIENCE)
        expected = r"^rank 1 waited 0\.3 s \(parallel\.timeout\) for the other ranks in step 0$"
        with pytest.raises(EngineLostError, match=expected):
            group.check_alive()


def test_an_error_of_one_rank_ends_the_step_at_once_with_that_error() -> None:
    with serving({"crash_in": 1}) as (group, communicator):
        step(group, communicator, 0)
        with pytest.raises(EngineLostError) as caught:
            step(group, communicator, 1)
    assert "failed: ZeroDivisionError: one rank divides by zero" in str(caught.value)
    assert "and says more" not in str(caught.value)


def test_a_rank_that_cannot_start_gives_its_message_and_exit_code() -> None:
    group = start({"fail_at_start": True})
    try:
        with pytest.raises(EngineLostError, match="no room for anything") as caught:
            group.connect()
        assert caught.value.exit_code == 5
    finally:
        group.close()


def test_a_rank_that_never_comes_is_given_up() -> None:
    group = start({"never_connect": True}, start_timeout=0.5)
    try:
        with pytest.raises(EngineLostError, match=r"rank 1 .* within 0\.5 s \(parallel\.start_ti"):
            group.connect()
    finally:
        group.close()


def test_ranks_end_with_the_object_that_nobody_closed() -> None:
    group = start({})
    pids = pids_of(group)
    del group
    gc.collect()
    assert not any(map(is_alive, pids))


def run_program(program: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run a program that imports the ``act`` of these tests, with ``folder`` to work in."""
    head = "import contextlib, os, signal, subprocess, sys, threading, time, torch\n"
    head += "from minisgl.distributed.rank_group import RankGroup\n"
    (folder / "scripts").mkdir()
    script = folder / "scripts" / "program.py"
    script.write_text(head + program)
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return subprocess.run(
        [sys.executable, str(script)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )


def test_a_rank_imports_nothing_from_the_working_directory(tmp_path: Path) -> None:
    """Catches: a json.py beside the user's data that is run, or that breaks the start."""
    for name in ("json", "logging", "torch", "importlib"):
        (tmp_path / f"{name}.py").write_text(f"open('ran-{name}', 'w').close(); 1 / 0")
    done = run_program(
        """
group = RankGroup(2, "support.rank_targets", "act", timeout=60, start_timeout=60)
group.begin(b"{}")
group.connect()
group.close()
""",
        tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.glob("ran-*")) == []


def test_entries_of_sys_path_that_imports_ignore_are_no_obstacle(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "json.py").write_text("1 / 0")
    monkeypatch.setattr(sys, "path", [tmp_path, bytes(tmp_path), 3, *sys.path])
    with serving({}) as (group, communicator):
        assert step(group, communicator, 0).item() == 2


def test_a_suspended_program_is_told_that_it_was(tmp_path: Path) -> None:
    """Catches: a rank blamed for having waited in vain while everything else was stopped."""
    done = run_program(
        """
group = RankGroup(2, "support.rank_targets", "act", timeout=2, start_timeout=60)
group.begin(b"{}")
communicator = group.connect()
group.serve()
group.board.ranks[0].begin(0)
group.send(memoryview(b"0"))
# Until rank 1 has ended, which nobody has taken note of yet.
[rank] = [rank.process.pid for rank in group._resources.ranks]
wake = f"until grep -q '^State:.Z' /proc/{rank}/status; do sleep 0.1; done; kill -CONT $PPID"
subprocess.Popen(["sh", "-c", wake])
os.kill(os.getpid(), signal.SIGSTOP)
try:
    communicator.all_reduce(torch.ones(1))
except Exception as error:
    print(group.explain(error, "step 0"))
group.close()
""",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    before, after = done.stdout.strip().split(" s; ")
    assert before.startswith("this process was suspended for ")
    assert after == "rank 1 waited 2 s (parallel.timeout) for the other ranks in step 0"


def test_a_fork_does_not_keep_the_ranks_of_a_killed_program_alive(tmp_path: Path) -> None:
    done = run_program(
        """
group = None

def start():  # not by the main thread, so the kernel does not watch for it
    global group
    group = RankGroup(2, "support.rank_targets", "act", timeout=60, start_timeout=60)
    group.begin(b"{}")
    group.connect()
    group.serve()

thread = threading.Thread(target=start)
thread.start()
thread.join()
if (fork := os.fork()) == 0:
    with contextlib.suppress(BaseException):
        os.close(1)
        os.close(2)
        time.sleep(600)
    os._exit(0)
print(fork, group._resources.ranks[0].process.pid, flush=True)
time.sleep(1)
os.kill(os.getpid(), signal.SIGKILL)
""",
        tmp_path,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    fork, rank = map(int, done.stdout.split())
    try:
        wait_for(lambda: not is_alive(rank), "the end of the rank")
        assert is_alive(fork)
    finally:
        os.kill(fork, signal.SIGKILL)


def test_a_fork_cannot_use_the_ranks_and_leaves_them_to_their_owner() -> None:
    with serving({}) as (group, communicator):
        read, write = os.pipe()
        if (fork := os.fork()) == 0:
            try:
                group.send(memoryview(b"\x00"))
            except EngineLostError as error:
                os.write(write, str(error).encode())
            finally:
                os._exit(0)
        os.close(write)
        os.waitpid(fork, 0)
        with os.fdopen(read, "rb") as told:
            assert b"a fork needs an engine of its own" in told.read()
        assert step(group, communicator, 0).item() == 2
