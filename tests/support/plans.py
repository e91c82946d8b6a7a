"""A busy schedule and the digest of every plan that it leads to."""

import hashlib
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from support.scheduling import Harness


def digest() -> tuple[str, int, int]:
    """Return the hash of all plans, their number, and how many retractions there were."""
    random = np.random.default_rng(3)
    harness = Harness(num_pages=24, page_size=2, rows=6, budget=9, max_seq_len=40, mixed=False)
    for now in range(120):
        if now < 60 and now % 2 == 0:
            prompt = [2, 3, 4, 5] * int(random.integers(0, 5)) + [int(random.integers(2, 9))]
            harness.submit(now, prompt, int(random.integers(0, 2)), max_tokens=16, ignore_eos=True)
        if now % 7 == 6:
            harness.abort(now - 6)
        harness.step()
    harness.finish()
    seen = hashlib.sha256()
    for plan in harness.engine.plans:
        for part in _parts(plan):
            seen.update(part)
    return seen.hexdigest(), len(harness.engine.plans), harness.scheduler.num_retractions


def _parts(value: Any) -> list[bytes]:
    """Spell out a plan: every field in order, arrays with their dtype and shape."""
    if isinstance(value, np.ndarray):
        return [str((value.dtype, value.shape)).encode(), value.tobytes()]
    if is_dataclass(value):
        return [part for field in fields(value) for part in _parts(getattr(value, field.name))]
    if isinstance(value, tuple):
        return [b"(", *(part for item in value for part in _parts(item)), b")"]
    return [repr(value).encode()]
