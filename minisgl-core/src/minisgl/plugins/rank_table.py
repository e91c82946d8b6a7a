"""Ranks of an attention backend that follow from a measurement, for the records of plugins."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import log2

Key = tuple[int, int]
"""Tokens a page, and query heads for each KV head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTable:
    """Ranks by page size and heads.

    A rank that was measured is the percentage of the fastest backend's speed that a backend
    reaches: the geometric mean over rows and contexts, or over prompts. 100 is the fastest in each.

    Attributes:
        source: where the ranks come from, such as the file of a measurement and its device.
        prefill, decode: by page size and query heads for each KV head; empty: not served.
    """

    source: str
    prefill: Mapping[Key, int]
    decode: Mapping[Key, int]

    def prefill_rank(self, page_size: int, num_q_heads: int, num_kv_heads: int) -> int:
        """Return the rank of prefill that was measured nearest to this."""
        return self.prefill[nearest(self.prefill, page_size, num_q_heads / num_kv_heads)]

    def decode_rank(self, page_size: int, num_q_heads: int, num_kv_heads: int) -> int:
        """Return the rank of decode that was measured nearest to this."""
        return self.decode[nearest(self.decode, page_size, num_q_heads / num_kv_heads)]


def nearest(keys: Iterable[Key], page_size: int, group: float) -> Key:
    """Return the key from which page size and heads are the fewest doublings away.

    Args:
        keys: at least one.
        page_size: tokens a page.
        group: query heads for each KV head.
    """
    return min(
        keys, key=lambda key: (abs(log2(key[0] / page_size)) + abs(log2(key[1] / group)), key)
    )
