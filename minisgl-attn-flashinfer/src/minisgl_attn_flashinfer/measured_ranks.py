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
                (16, 2): 90,
                (16, 4): 93,
                (16, 5): 90,
                (16, 8): 92,
                (64, 2): 89,
                (64, 4): 93,
                (64, 5): 90,
                (64, 8): 92,
                (128, 2): 81,
                (128, 4): 86,
                (128, 5): 85,
                (128, 8): 86,
            },
            decode={
                (16, 2): 89,
                (16, 4): 88,
                (16, 5): 88,
                (16, 8): 87,
                (64, 2): 88,
                (64, 4): 87,
                (64, 5): 87,
                (64, 8): 86,
                (128, 2): 87,
                (128, 4): 87,
                (128, 5): 87,
                (128, 8): 86,
            },
        ),
        "trtllm": RankTable(
            source="measured on NVIDIA H200, benchmarks/results/attention-h200.json, 2026-12-01",
            prefill={},
            decode={
                (16, 2): 88,
                (16, 4): 89,
                (16, 5): 90,
                (16, 8): 91,
                (64, 2): 96,
                (64, 4): 97,
                (64, 5): 97,
                (64, 8): 97,
                (128, 2): 95,
                (128, 4): 97,
                (128, 5): 96,
                (128, 8): 97,
            },
        ),
    }
)
