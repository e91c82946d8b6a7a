"""Log-probabilities out of thin air, for engines that compute none.

Token ``t`` has the log-probability ``-(t % 8) / 8``; its alternatives are the tokens before it, the
nearer the less likely, each likelier than ``t``.
"""

from collections.abc import Sequence

import numpy as np

from minisgl.message import LogprobBatch


def made_up(places: Sequence[int], tokens: Sequence[int], num_top: Sequence[int]) -> LogprobBatch:
    """Log-probabilities of ``tokens`` at ``places``, with so many alternatives each."""
    own = [-(token % 8) / 8 for token in tokens]
    backs = [range(number, 0, -1) for number in num_top]
    top_ids = [
        max(token - back, 0) for token, each in zip(tokens, backs, strict=True) for back in each
    ]
    top_values = [value + back for value, each in zip(own, backs, strict=True) for back in each]
    return LogprobBatch(
        _packed(places, "<i4"),
        _packed(num_top, "<i4"),
        _packed(own, "<f4"),
        _packed([number + 1 for number in num_top], "<i4"),
        _packed(top_ids, "<i4"),
        _packed(top_values, "<f4"),
    )


def _packed(values: Sequence[float], dtype: str) -> bytes:
    return np.asarray(values, dtype=dtype).tobytes()
