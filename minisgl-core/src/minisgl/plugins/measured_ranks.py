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
                (16, 2): 57,
                (16, 4): 64,
                (16, 5): 67,
                (16, 8): 59,
                (64, 2): 59,
                (64, 4): 62,
                (64, 5): 68,
                (64, 8): 64,
                (128, 2): 50,
                (128, 4): 60,
                (128, 5): 65,
                (128, 8): 60,
            },
            decode={
                (16, 2): 97,
                (16, 4): 96,
                (16, 5): 96,
                (16, 8): 95,
                (64, 2): 95,
                (64, 4): 95,
                (64, 5): 95,
                (64, 8): 94,
                (128, 2): 96,
                (128, 4): 95,
                (128, 5): 95,
                (128, 8): 94,
            },
        ),
    }
)
