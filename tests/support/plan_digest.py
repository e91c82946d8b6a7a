"""Runs a fixed schedule and hashes every byte of its plans; prints it as a script."""

from hashlib import sha256

import numpy as np

from minisgl.engine.plan_codec import encode_plan, plan_words
from minisgl.message import GenerateRequest
from minisgl.request import SamplingParams
from support.scheduling import Client, Harness


def digest() -> str:
    """Run a schedule with sharing, pressure, aborts and seeds; hash every byte of its plans."""
    harness = Harness(page_size=2, num_pages=30, max_seq_len=40, rows=6, budget=24)
    for uid in range(14):
        prompt = [2, 3, 4, 5] * (uid % 4 + 1) + [uid % 8 + 2]
        params = SamplingParams(temperature=0.5, max_tokens=10, min_tokens=uid % 5)
        token_ids = np.array(prompt, dtype="<i4").tobytes()
        harness.submit(100 + uid, prompt, priority=uid % 3, max_tokens=12)
        harness.transport.inbox.append(GenerateRequest(500 + uid, token_ids, params))
        harness.clients[500 + uid] = Client()
        if uid % 5 == 4:
            harness.abort(100 + uid - 2)
        harness.step()
    harness.finish()
    assert harness.scheduler.num_retractions > 0
    hashed = sha256()
    for plan in harness.engine.plans:
        words = np.zeros(plan_words(plan), dtype=np.int32)
        encode_plan(plan, words)
        hashed.update(words.tobytes())
    return hashed.hexdigest()


if __name__ == "__main__":
    print(digest())  # noqa: T201
