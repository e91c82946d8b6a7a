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
                (64, 5): 98,
                (64, 8): 99,
                (128, 2): 100,
                (128, 4): 100,
                (128, 5): 100,
                (128, 8): 100,
            },
            decode={
                (16, 2): 57,
                (16, 4): 58,
                (16, 5): 57,
                (16, 8): 49,
                (64, 2): 59,
                (64, 4): 59,
                (64, 5): 60,
                (64, 8): 51,
                (128, 2): 63,
                (128, 4): 64,
                (128, 5): 65,
                (128, 8): 55,
            },
        ),
    }
)
