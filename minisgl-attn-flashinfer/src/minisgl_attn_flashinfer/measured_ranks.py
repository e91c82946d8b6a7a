"""Measured ranks of attention backends, written by ``benchmarks/attention_ranks.py``."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from minisgl.plugins import RankTable

RANKS: Final[Mapping[str, RankTable]] = MappingProxyType(
    {
        "flashinfer": RankTable(
            source="by hand, from single figures on an NVIDIA H200",
            prefill={
                (16, 2): 100,
            },
            decode={
                (16, 2): 100,
            },
        ),
        "trtllm": RankTable(
            source="by hand, from single figures on an NVIDIA H200",
            prefill={},
            decode={
                (16, 2): 8,
            },
        ),
    }
)
