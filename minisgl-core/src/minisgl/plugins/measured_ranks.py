"""Measured ranks of attention backends, written by ``benchmarks/attention_ranks.py``."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from minisgl.plugins.rank_table import RankTable

RANKS: Final[Mapping[str, RankTable]] = MappingProxyType(
    {
        "triton": RankTable(
            source="by hand, from single figures on an NVIDIA H200",
            prefill={
                (16, 2): 10,
            },
            decode={
                (16, 2): 10,
            },
        ),
    }
)
