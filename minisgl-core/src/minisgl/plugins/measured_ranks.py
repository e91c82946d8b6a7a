"""Measured ranks of attention backends, written by ``benchmarks/attention_ranks.py``."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from minisgl.plugins.rank_table import RankTable

RANKS: Final[Mapping[str, RankTable]] = MappingProxyType(
    {
        "triton": RankTable(
            source="measured on NVIDIA H200, benchmarks/results/attention-h200.json, 2026-12-01",
            prefill={
                (16, 2): 59,
                (16, 4): 63,
                (16, 5): 62,
                (16, 8): 63,
                (64, 2): 61,
                (64, 4): 67,
                (64, 5): 68,
                (64, 8): 60,
                (128, 2): 56,
                (128, 4): 61,
                (128, 5): 65,
                (128, 8): 60,
            },
            decode={
                (16, 2): 96,
                (16, 4): 95,
                (16, 5): 95,
                (16, 8): 92,
                (64, 2): 94,
                (64, 4): 93,
                (64, 5): 93,
                (64, 8): 90,
                (128, 2): 93,
                (128, 4): 92,
                (128, 5): 92,
                (128, 8): 90,
            },
        ),
    }
)
