"""Counts evictions and retractions of an ``LLM``: a test of page pressure must see some."""

import numpy as np
import numpy.typing as npt

from minisgl import LLM


class Pressure:
    """Watches the prefix cache and the scheduler of an open ``LLM``."""

    def __init__(self, llm: LLM) -> None:
        self.num_evicted = 0
        self._scheduler = llm._session._scheduler
        cache = self._scheduler.cache.prefix_cache
        evict = cache.evict

        def counted(num_pages: int) -> npt.NDArray[np.int32]:
            pages = evict(num_pages)
            self.num_evicted += len(pages)
            return pages

        cache.evict = counted  # type: ignore[method-assign]

    @property
    def num_retracted(self) -> int:
        return self._scheduler.num_retractions
