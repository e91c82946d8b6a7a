"""The grid of attention cases that ranks follow from, and the cases that are known by figure.

A case more is a line more in ``PUBLISHED``, or a flag of ``minisgl bench kernels --attention``.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

import torch

from minisgl.benchmark.attention_cases import AttentionCase, parse_case
from minisgl.benchmark.op_cases import model_shape
from minisgl.errors import SettingsError
from minisgl.plugins.records import Phase

Part = Literal["grid", "published"]
"""Ranks follow from the grid; published cases are beside it."""

PUBLISHED: Final = (
    "decode:256x450-1350:16/8x128",
    "decode:64x450-1350:16/8x128",
    "decode:1x32768:16/8x128",
    "prefill:1x8192:32/8x128",
    "prefill:16x1024:16/8x128",
    "decode:64x8448:16/8x128",
    "decode:64x256+8192:16/8x128",
)
"""Cases of every page size that is measured: those of ``benchmarks/RESULTS.md``."""

MODELS: Final = ("Qwen3-0.6B", "Qwen3-14B", "Qwen3-30B-A3B", "Llama-3.1-8B")
"""Their heads, all of size 128: 16/8, 40/8, 32/4 and 32/8."""

_PROMPTS: Final = (
    "1x512", "1x2048", "1x8192", "1x32768", "4x2048", "16x1024", "1x512+8192",
)  # fmt: skip
_PROMPT: Final = re.compile(r"(?P<rows>\d+)x(?P<length>\d+)(\+(?P<prefix>\d+))?")


@dataclass(frozen=True, slots=True)
class Heads:
    """Query heads, KV heads and the size of each."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.num_q_heads}/{self.num_kv_heads}x{self.head_dim}"


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts of one prefill launch, all of one length, each behind cached tokens of its own."""

    rows: int
    length: int
    prefix: int = 0

    def __str__(self) -> str:
        return f"{self.rows}x{self.length}" + (f"+{self.prefix}" if self.prefix else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What is measured: decode rows times contexts, and prompts; all page sizes and heads.

    Attributes:
        phases: of a launch.
        rows, contexts: of decode: sequences, and tokens of each on average: from half to one and a
            half times as many, as rows of a server are of all lengths.
        prompts: of prefill.
        page_sizes: tokens a page.
        models: heads by the model's name.
        published: whether ``PUBLISHED`` cases of these phases come first.
    """

    phases: tuple[Phase, ...]
    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    prompts: tuple[Prompts, ...]
    page_sizes: tuple[int, ...]
    models: Mapping[str, Heads]
    published: bool

    def cases(self) -> list[tuple[Part, AttentionCase]]:
        """Return all cases, those of one phase, page size and heads together.

        Of the published ones those that share a prefix need page sizes that divide it.
        """
        found: list[tuple[Part, AttentionCase]] = []
        for text in PUBLISHED if self.published else ():
            sizes = [size for size in self.page_sizes if _fits(text, size)]
            cases = [parse_case(f"{text}:p{size}") for size in sizes]
            found += [("published", case) for case in cases if case.phase in self.phases]
        shapes = [
            *(_decode(rows, context) for rows in self.rows for context in self.contexts),
            *(f"prefill:{prompts}" for prompts in self.prompts),
        ]
        for heads in dict.fromkeys(map(str, self.models.values())):
            for size in self.page_sizes:
                cases = [parse_case(f"{shape}:{heads}:p{size}") for shape in shapes]
                found += [("grid", case) for case in cases if case.phase in self.phases]
        return found


def _decode(rows: int, context: int) -> str:
    """Return the beginning of a decode case; a single row has exactly ``context`` tokens."""
    spread = context // 2 if rows > 1 else 0
    return f"decode:{rows}x{context - spread}" + (f"-{context + spread}" if spread else "")


def _fits(text: str, page_size: int) -> bool:
    """Return whether the prefix that a published case shares is of whole pages."""
    phase, shape, _ = text.split(":")
    return phase == "prefill" or int(shape.partition("+")[2] or 0) % page_size == 0


def default_grid(device: torch.device) -> Grid:
    """Return what a device measures unless flags say otherwise; a CPU, little."""
    if device.type == "cpu":
        return Grid(
            phases=("decode", "prefill"), rows=(1, 4), contexts=(128, 512),
            prompts=(Prompts(1, 128), Prompts(2, 64), Prompts(1, 32, 128)), page_sizes=(16,),
            models=heads_of(MODELS[:1]), published=False,
        )  # fmt: skip
    return Grid(
        phases=("decode", "prefill"), rows=(1, 4, 16, 64, 256), contexts=(512, 2048, 8192, 32768),
        prompts=tuple(map(parse_prompts, _PROMPTS)), page_sizes=(16, 64, 128),
        models=heads_of(MODELS), published=True,
    )  # fmt: skip


def heads_of(models: Sequence[str]) -> Mapping[str, Heads]:
    """Return the heads of published models, or of folders with a ``config.json``.

    Raises:
        SettingsError: one is neither.
    """
    shapes = [model_shape(name) for name in models]
    return MappingProxyType(
        {one.name: Heads(one.num_q_heads, one.num_kv_heads, one.head_dim) for one in shapes}
    )


def parse_prompts(text: str) -> Prompts:
    """Read ``ROWSxTOKENS`` or ``ROWSxTOKENS+CACHED``.

    Raises:
        SettingsError: it is neither.
    """
    match = _PROMPT.fullmatch(text)
    if match is None or not int(match["rows"]) or not int(match["length"]):
        raise SettingsError(
            f"{text!r} is no prefill; write ROWSxTOKENS, such as 4x2048, or ROWSxTOKENS+CACHED, "
            "such as 1x512+8192"
        )
    return Prompts(int(match["rows"]), int(match["length"]), int(match["prefix"] or 0))
