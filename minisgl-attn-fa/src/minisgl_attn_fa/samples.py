"""Launches of every kind that an engine may ask for, on random numbers, and what they must give.

They are run before the port opens: so that whatever they need is compiled, and to see that kernels
compute what they should.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from minisgl.attention import AttentionContext, AttentionLayerSpec
from minisgl_attn_fa.fa4 import MOST_ROWS
from minisgl_attn_fa.kernels import Kernel, Launch

_MANY_TOKENS = 256
"""Of one row; on Blackwell, version 4 has other kernels for less than two tiles of 128 queries."""

_CACHED = 40
"""Tokens of a prompt that were there before; more than a window of ``_WINDOW`` and its queries."""

_PAGES, _WINDOW = 4, 16


@dataclass(frozen=True, slots=True)
class Sample:
    """One launch.

    Attributes:
        q: ``[T, q_heads, head_dim]``.
        k, v: ``[pages, page_size, kv_heads, head_dim]``.
        launch: its rows, whose pages they share.
        layer: with a window or without.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    launch: Launch
    layer: AttentionLayerSpec


def samples(context: AttentionContext) -> Iterator[Sample]:
    """Yield a launch of every kind, few rows of it first."""
    random = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(context.device, context.dtype)

    page = (_PAGES, context.page_size, context.num_kv_heads, context.head_dim)
    k, v = numbers(*page), numbers(*page)
    for window in (None, _WINDOW) if context.sliding_window else (None,):
        layer = AttentionLayerSpec(
            index=0,
            num_q_heads=context.num_q_heads,
            num_kv_heads=context.num_kv_heads,
            head_dim=context.head_dim,
            scale=context.head_dim**-0.5,
            sliding_window=window,
        )
        for launch in _launches(context):
            q = numbers(launch.num_tokens, context.num_q_heads, context.head_dim)
            yield Sample(q, k, v, launch, layer)


def largest_error(kernel: Kernel, sample: Sample) -> float:
    """Run a launch, and return the largest error of a token's output, relative, by norm.

    NaN if any is.
    """
    with torch.inference_mode():
        out = kernel.attend(sample.q, sample.k, sample.v, sample.launch, sample.layer)
        expected = reference(sample)
        difference = torch.linalg.vector_norm(out.float().cpu() - expected, dim=(1, 2))
        return float((difference / torch.linalg.vector_norm(expected, dim=(1, 2))).max())


def most_error(dtype: torch.dtype) -> float:
    """Return how much of an error is one of rounding: that of probabilities and of outputs."""
    return max(3 * torch.finfo(dtype).eps, 1e-5)


def reference(sample: Sample) -> torch.Tensor:
    """Return exact attention of a launch: float32 ``[T, q_heads, head_dim]``, on the CPU."""
    q, k, v = (part.float().cpu() for part in (sample.q, sample.k, sample.v))
    launch, layer = sample.launch, sample.layer
    lengths, pages = launch.kv_lens.tolist(), launch.page_table.cpu()
    ends = [*range(len(lengths) + 1)]
    if launch.query_ends is not None:
        ends = launch.query_ends.tolist()
    out = torch.empty_like(q)
    for row, length in enumerate(lengths):
        tokens = slice(ends[row], ends[row + 1])
        needed = pages[row, : -(-length // k.shape[1])].long()
        keys, values = (part[needed].flatten(0, 1)[:length] for part in (k, v))
        out[tokens] = _attend(q[tokens], keys, values, layer)
    return out


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayerSpec
) -> torch.Tensor:
    """Attend one row, whose queries are its last tokens."""
    k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * layer.scale
    query = torch.arange(len(k) - len(q), len(k))[:, None]
    key = torch.arange(len(k))
    hidden = key > query
    if layer.sliding_window is not None:
        hidden |= key <= query - layer.sliding_window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def _launches(context: AttentionContext) -> list[Launch]:
    """Return decode rows, short and long prompts and, if they may come, many rows of one token."""

    def ints(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=context.device)

    def pages(kv_lens: Sequence[int]) -> torch.Tensor:
        columns = -(-max(kv_lens) // context.page_size)
        own = torch.arange(len(kv_lens))[:, None] + torch.arange(columns)
        return (1 + own % (_PAGES - 1)).to(context.device, torch.int32)

    def prompts(query_lens: Sequence[int], cached: int) -> Launch:
        kv_lens = [cached + length for length in query_lens]
        return Launch(
            num_tokens=sum(query_lens),
            page_table=pages(kv_lens),
            kv_lens=ints(kv_lens),
            query_ends=ints([0, *accumulate(query_lens)]),
            kv_ends=ints([0, *accumulate(kv_lens)]),
            most_queries=max(query_lens),
            most_keys=max(kv_lens),
        )

    decoding = [1, _MANY_TOKENS + _CACHED]
    decode = Launch(
        num_tokens=2,
        page_table=pages(decoding),
        kv_lens=ints(decoding),
        most_keys=max(decoding),
    )
    launches = [decode, prompts([1], 0), prompts([1, _MANY_TOKENS], _CACHED)]
    if context.max_running_requests > MOST_ROWS:
        launches.append(prompts([1] * (MOST_ROWS + 1), _CACHED))
    return launches
