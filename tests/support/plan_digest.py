"""Hashes every byte of the plans of a schedule, in a process of its own with its own hash seed.

As a script it reads one schedule a line and answers each with a digest. A rank's memory looks
different from another's, so requests are hashed by the seed as well, instead of by their place in
memory: sets of them have orders that certainly differ.
"""

import json
import subprocess
import sys
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from minisgl.engine.plan_codec import encode_plan, plan_words
from minisgl.message import GenerateRequest
from minisgl.request import SamplingParams
from minisgl.scheduler.request_state import RequestState
from support.schedules import Ask
from support.scheduling import Client, Harness


def digest(set_up: dict[str, Any], schedule: list[Ask]) -> str:
    """Run a schedule of greedy and of sampled requests; hash every byte of its plans."""
    harness = Harness(**set_up)
    last = max(ask.arrival + (ask.abort_after or 0) for ask in schedule)
    for now in range(last + 1):
        for uid, ask in enumerate(schedule):
            if ask.arrival == now:
                _submit(harness, uid, ask)
            if ask.abort_after is not None and ask.arrival + ask.abort_after == now:
                harness.abort(uid)
        harness.step()
    harness.finish()
    hashed = sha256()
    for plan in harness.engine.plans:
        words = np.zeros(plan_words(plan), dtype=np.int32)
        encode_plan(plan, words)
        hashed.update(words.tobytes())
    return hashed.hexdigest()


def _submit(harness: Harness, uid: int, ask: Ask) -> None:
    """Send one request now; every other one draws its noise from the scheduler."""
    params = SamplingParams(
        temperature=0.5 * (uid % 2),
        max_tokens=ask.max_tokens,
        min_tokens=ask.min_tokens,
        ignore_eos=ask.ignore_eos,
        stop_token_ids=ask.stop_token_ids,
    )
    token_ids = np.array(ask.prompt, dtype="<i4").tobytes()
    harness.clients[uid] = Client()
    harness.transport.inbox.append(GenerateRequest(uid, token_ids, params, ask.priority))


class Rank:
    """A process that hashes plans, with a hash seed and a use of memory of its own."""

    def __init__(self, hash_seed: int, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.plan_digest", str(hash_seed)],
            cwd=Path(__file__).parents[1],
            env={**environment, "PYTHONHASHSEED": str(hash_seed)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def digest(self, set_up: dict[str, Any], schedule: list[Ask]) -> str:
        """Return the digest of a schedule's plans."""
        asks = [asdict(ask) for ask in schedule]
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"set_up": set_up, "schedule": asks}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        assert answer, "the rank died"
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def _ask(fields: dict[str, Any]) -> Ask:
    tuples = {name: tuple(fields[name]) for name in ("prompt", "stop_token_ids")}
    return Ask(**{**fields, **tuples})


def _serve(seed: int) -> None:
    RequestState.__hash__ = lambda self: hash(f"{seed} {self.uid}")  # type: ignore[method-assign]
    for line in sys.stdin:
        message = json.loads(line)
        schedule = [_ask(fields) for fields in message["schedule"]]
        print(digest(message["set_up"], schedule), flush=True)  # noqa: T201


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
