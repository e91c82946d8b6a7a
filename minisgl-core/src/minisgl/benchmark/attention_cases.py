"""Attention at given shapes: what a case is, how it is written, and what it moves and computes."""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
import torch

from minisgl.errors import SettingsError
from minisgl.plugins.records import BackendQuery, Phase

_SYNTAX: Final = re.compile(
    r"(?P<phase>decode|prefill):(?P<rows>\d+)x(?P<low>\d+)(-(?P<high>\d+))?(\+(?P<prefix>\d+))?"
    r":(?P<q>\d+)/(?P<kv>\d+)x(?P<dim>\d+):p(?P<page>\d+)"
)
_EXAMPLE: Final = "decode:256x450-1350:16/8x128:p16"

_MOST_ROWS: Final = 2**16
_MOST_TOKENS: Final = 2**31 - 1
"""Of a row: lengths are int32."""

_MOST: Final = 2**16
"""Heads, elements of a head, tokens of a page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase:
    """One launch.

    Attributes:
        phase: ``decode``: one token a row; ``prefill``: all tokens of a row.
        num_rows: sequences.
        lengths: shortest and longest of them, in tokens, without ``prefix``.
        num_q_heads, num_kv_heads, head_dim: as usual.
        page_size: tokens a page.
        prefix: tokens before those of ``lengths``. Prefill rows have each their own and compute
            none of them; decode rows share one prefix, in whole pages, which are the same ones.
    """

    phase: Phase
    num_rows: int
    lengths: tuple[int, int]
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    prefix: int = 0

    def __str__(self) -> str:
        low, high = self.lengths
        length = str(low) if low == high else f"{low}-{high}"
        length += f"+{self.prefix}" if self.prefix else ""
        return (
            f"{self.phase}:{self.num_rows}x{length}:{self.num_q_heads}/{self.num_kv_heads}"
            f"x{self.head_dim}:p{self.page_size}"
        )

    def own_lens(self) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """Return the tokens of each row behind the prefix, int32 ``[rows]``, always the same."""
        draw = random.Random(0).randint  # noqa: S311
        return np.array([draw(*self.lengths) for _ in range(self.num_rows)], dtype=np.int32)

    def kv_lens(self) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """Return the tokens that each row attends to, int32 ``[rows]``."""
        return self.own_lens() + np.int32(self.prefix)

    def stored_tokens(self) -> int:
        """Return the tokens whose K and V a layer stores: a shared prefix counts once."""
        prefixes = 1 if self.phase == "decode" else self.num_rows
        return int(self.own_lens().sum()) + prefixes * self.prefix

    def kv_bytes(self, itemsize: int) -> int:
        """Return the bytes of K and V that one layer must read."""
        return 2 * self.stored_tokens() * self.num_kv_heads * self.head_dim * itemsize

    def flops(self) -> int:
        """Return the operations of both products of one layer; what the mask hides not counted."""
        own = self.own_lens().astype(np.int64)
        pairs = own + self.prefix
        if self.phase == "prefill":
            pairs = own * self.prefix + own * (own + 1) // 2
        return 4 * int(pairs.sum()) * self.num_q_heads * self.head_dim


def parse_case(text: str) -> AttentionCase:
    """Return the case that a preset or ``PHASE:ROWSxMIN-MAX+PREFIX:Q/KVxDIM:pPAGE`` is.

    ``-MAX`` and ``+PREFIX`` may be left out.

    Raises:
        SettingsError: it is neither.
    """
    match = _SYNTAX.fullmatch(PRESETS.get(text, text))
    if match is None:
        raise SettingsError(
            f"{text!r} is no case; known: {', '.join(PRESETS)}, or one of your own, such as "
            f"{_EXAMPLE}"
        )
    low = int(match["low"])
    case = AttentionCase(
        phase="decode" if match["phase"] == "decode" else "prefill",
        num_rows=int(match["rows"]),
        lengths=(low, int(match["high"] or low)),
        num_q_heads=int(match["q"]),
        num_kv_heads=int(match["kv"]),
        head_dim=int(match["dim"]),
        page_size=int(match["page"]),
        prefix=int(match["prefix"] or 0),
    )
    sizes = (case.num_rows, low, case.num_kv_heads, case.head_dim, case.page_size)
    if min(sizes) < 1 or low > case.lengths[1] or case.num_q_heads % case.num_kv_heads:
        raise SettingsError(
            f"{text!r}: all numbers are at least 1, MIN is at most MAX, and KV heads divide Q heads"
        )
    others = (case.num_q_heads, case.head_dim, case.page_size)
    tokens = case.prefix + case.lengths[1]
    if case.num_rows > _MOST_ROWS or tokens > _MOST_TOKENS or max(others) > _MOST:
        raise SettingsError(
            f"{text!r}: at most {_MOST_ROWS} rows of {_MOST_TOKENS} tokens with the prefix; heads, "
            f"head dim and page size are at most {_MOST}"
        )
    if case.phase == "decode" and case.prefix % case.page_size:
        raise SettingsError(
            f"{text!r}: rows share whole pages; {case.prefix} tokens are no multiple of "
            f"{case.page_size}"
        )
    return case


PRESETS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "decode-256-p1": "decode:256x450-1350:16/8x128:p1",
        "decode-256": "decode:256x450-1350:16/8x128:p16",
        "decode-256-p64": "decode:256x450-1350:16/8x128:p64",
        "decode-64": "decode:64x450-1350:16/8x128:p16",
        "decode-1": "decode:1x4096:16/8x128:p16",
        "decode-256-40": "decode:256x450-1350:40/8x128:p16",
        "decode-long": "decode:64x4096-12288:32/4x128:p64",
        "prefill-8k": "prefill:1x8192:32/8x128:p16",
        "prefill-16x1k": "prefill:16x1024:16/8x128:p16",
        "small-decode": "decode:16x200-600:16/8x128:p16",
        "small-prefill": "prefill:2x256:16/8x128:p16",
    }
)
"""The small ones are for a CPU."""


def default_cases(device: torch.device) -> tuple[str, ...]:
    """Return the presets that a device can run in seconds."""
    small = tuple(name for name in PRESETS if name.startswith("small"))
    return small if device.type == "cpu" else tuple(name for name in PRESETS if name not in small)


def query_of(case: AttentionCase, device: torch.device, dtype: torch.dtype) -> BackendQuery:
    """Return what backends are asked about a case."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    name = str(dtype).removeprefix("torch.")
    return BackendQuery(
        device=device.type,
        compute_capability=capability,
        dtype=name,
        kv_dtype=name,
        page_size=case.page_size,
        num_q_heads=case.num_q_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
    )
