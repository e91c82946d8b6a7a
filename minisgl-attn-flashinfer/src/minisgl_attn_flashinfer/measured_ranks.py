"""Measured ranks of attention backends, written by ``benchmarks/attention_ranks.py``."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from minisgl.plugins import RankTable

RANKS: Final[Mapping[str, RankTable]] = MappingProxyType(
    {
        "flashinfer": RankTable(
            source="measured on NVIDIA H200, benchmarks/results/attention-h200.json, 2026-12-01",
            prefill={
                (16, 2): 87,
                (16, 4): 94,
                (16, 5): 90,
                (16, 8): 89,
                (64, 2): 89,
                (64, 4): 93,
                (64, 5): 91,
                (64, 8): 92,
                (128, 2): 81,
                (128, 4): 86,
                (128, 5): 85,
                (128, 8): 86,
            },
            decode={
                (16, 2): 90,
                (16, 4): 89,
                (16, 5): 89,
                (16, 8): 90,
                (64, 2): 89,
                (64, 4): 89,
                (64, 5): 88,
                (64, 8): 89,
                (128, 2): 90,
                (128, 4): 90,
                (128, 5): 89,
                (128, 8): 90,
            },
        ),
        "trtllm": RankTable(
            source="measured on NVIDIA H200, benchmarks/results/attention-h200.json, 2026-12-01",
            prefill={},
            decode={
                (16, 2): 84,
                (16, 4): 86,
                (16, 5): 86,
                (16, 8): 87,
                (64, 2): 94,
                (64, 4): 95,
                (64, 5): 95,
                (64, 8): 95,
                (128, 2): 94,
                (128, 4): 95,
                (128, 5): 95,
                (128, 8): 94,
            },
        ),
    }
)
