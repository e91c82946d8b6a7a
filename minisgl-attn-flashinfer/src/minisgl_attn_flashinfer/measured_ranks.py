"""Measured ranks of attention backends, written by ``benchmarks/attention_ranks.py``."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from minisgl.plugins import RankTable

SOURCE: Final = "by hand, from figures on an NVIDIA H200, before backends went through one grid"

RANKS: Final[Mapping[str, RankTable]] = MappingProxyType(
    {
        "flashinfer": RankTable(source=SOURCE, prefill={(16, 2): 100}, decode={(16, 2): 100}),
        "trtllm": RankTable(source=SOURCE, prefill={}, decode={(16, 2): 8}),
    }
)
