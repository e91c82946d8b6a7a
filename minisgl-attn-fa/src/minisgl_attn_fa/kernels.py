"""FlashAttention behind one method, attend one layer of a launch; versions 3 and 2 of it.

Version 4 is in ``fa4.py``.

Each takes pages through a block table, rows of different lengths, and any number of query heads per
KV head. They differ in how that is spelled:

| version | decode rows, queries ``[R, 1, heads, dim]`` | other launches, ``[T, heads, dim]`` |
|---------|---------------------------------------------|-------------------------------------|
| 4       | ``flash_attn_varlen_func``                  | the same, with ``cu_seqlens_q``     |
| 3       | ``flash_attn_with_kvcache``                 | the same, with ``cu_seqlens_q``     |
| 2       | ``flash_attn_with_kvcache``                 | ``flash_attn_varlen_func``          |

None of them reads a length on the host from the device, so none waits for it. How many pieces a row
is split into (3 and 2) depends on the block table's width, the number of rows and the device: for a
recorded launch that is fixed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from minisgl.attention import AttentionLayerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Where a launch's rows find their queries and pages; tensors are int32, on the device.

    Attributes:
        num_tokens: ``T``.
        page_table: ``[R, columns]``, pages of each row; what lies behind its last is not read.
        kv_lens: ``[R]``, tokens that each row sees.
        query_ends: ``[R + 1]``, 0 and the end of each row's queries; ``None``: one query a row.
        kv_ends: ``[R + 1]``, 0 and the running sum of ``kv_lens``; ``None`` with ``query_ends``.
        most_queries, most_keys: of one row.
    """

    num_tokens: int
    page_table: torch.Tensor
    kv_lens: torch.Tensor
    query_ends: torch.Tensor | None = None
    kv_ends: torch.Tensor | None = None
    most_queries: int = 1
    most_keys: int = 0


class Kernel(Protocol):
    """One FlashAttention."""

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        launch: Launch,
        layer: AttentionLayerSpec,
    ) -> torch.Tensor:
        """Return the output ``[T, q_heads, head_dim]``; asynchronous.

        Args:
            q: ``[T, q_heads, head_dim]``, contiguous in the last dimension.
            k: of the pool, ``[pages, page_size, kv_heads, head_dim]``.
            v: the same.
            launch: the rows.
            layer: scale, window and cap.
        """
        ...


class FlashAttention3:
    """``flash_attn_interface``, from the folder ``hopper`` of FlashAttention's sources."""

    def __init__(self, with_kvcache: Callable[..., Any]) -> None:
        self._with_kvcache = with_kvcache

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        launch: Launch,
        layer: AttentionLayerSpec,
    ) -> torch.Tensor:
        """Attend; see ``Kernel``."""
        decode = launch.query_ends is None
        out = self._with_kvcache(
            q.unsqueeze(1) if decode else q,
            k,
            v,
            cache_seqlens=launch.kv_lens,
            page_table=launch.page_table,
            cu_seqlens_q=launch.query_ends,
            max_seqlen_q=None if decode else launch.most_queries,
            softmax_scale=layer.scale,
            causal=True,
            window_size=_window(layer),
            softcap=layer.logit_soft_cap or 0.0,
        )
        return flat(out, q)


class FlashAttention2:
    """``flash_attn``."""

    def __init__(self, with_kvcache: Callable[..., Any], varlen: Callable[..., Any]) -> None:
        self._with_kvcache = with_kvcache
        self._varlen = varlen

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        launch: Launch,
        layer: AttentionLayerSpec,
    ) -> torch.Tensor:
        """Attend; see ``Kernel``."""
        common = {
            "block_table": launch.page_table,
            "softmax_scale": layer.scale,
            "causal": True,
            "window_size": _window(layer),
            "softcap": layer.logit_soft_cap or 0.0,
        }
        if launch.query_ends is None:
            cached = self._with_kvcache(
                q.unsqueeze(1), k, v, cache_seqlens=launch.kv_lens, **common
            )
            return flat(cached, q)
        out: torch.Tensor = self._varlen(
            q,
            k,
            v,
            cu_seqlens_q=launch.query_ends,
            cu_seqlens_k=launch.kv_ends,
            max_seqlen_q=launch.most_queries,
            max_seqlen_k=launch.most_keys,
            **common,
        )
        return out


def _window(layer: AttentionLayerSpec) -> tuple[int, int]:
    """Write a window as versions 3 and 2 do: keys before and behind the query's own, -1 for all."""
    return (-1, -1) if layer.sliding_window is None else (layer.sliding_window - 1, 0)


def flat(out: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return an output in the shape that the queries had."""
    return out.view(q.shape)
