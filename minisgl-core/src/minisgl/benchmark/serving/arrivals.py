"""When requests are sent."""

import math

import numpy as np


def arrival_times(num: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Return the seconds after the start at which each of ``num`` requests is due, ascending.

    The intervals are drawn from a gamma distribution with the mean ``1 / rate`` and the shape
    ``burstiness``: 1 is a Poisson process, less comes in bursts, more is more even.

    Args:
        num: of requests.
        rate: requests a second; ``inf`` sends all at once.
        burstiness: the shape, greater than 0.
        seed: of the draws.
    """
    if math.isinf(rate):
        return [0.0] * num
    draw = np.random.default_rng((seed, 2))
    intervals = draw.gamma(burstiness, 1 / (rate * burstiness), num)
    return [float(time) for time in np.cumsum(intervals) - intervals[:1].sum()]
