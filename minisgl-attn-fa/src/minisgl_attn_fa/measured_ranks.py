"""Measured ranks of attention backends, written by ``benchmarks/attention_ranks.py``."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from minisgl.plugins import RankTable

RANKS: Final[Mapping[str, RankTable]] = MappingProxyType(
    {
        "fa": RankTable(
            source="measured on NVIDIA H200, benchmarks/results/attention-h200.json, 2026-12-01",
            prefill={
                (16, 2): 100,
                (16, 4): 100,
                (16, 5): 99,
                (16, 8): 100,
                (64, 2): 100,
                (64, 4): 99,
                (64, 5): 99,
                (64, 8): 100,
                (128, 2): 100,
                (128, 4): 100,
                (128, 5): 100,
                (128, 8): 100,
            },
            decode={
                (16, 2): 53,
                (16, 4): 53,
                (16, 5): 53,
                (16, 8): 44,
                (64, 2): 55,
                (64, 4): 55,
                (64, 5): 56,
                (64, 8): 46,
                (128, 2): 60,
                (128, 4): 61,
                (128, 5): 62,
                (128, 8): 50,
            },
        ),
    }
)
