"""Linear layers, tensor-parallel by construction (Shoeybi et al., 2019: Megatron-LM).

Weights are ``[out, in]`` as in checkpoints. Column-parallel layers shard their outputs and
row-parallel ones their inputs; sizes that the number of ranks does not divide are padded with
zeros, which change no result.
"""

from collections.abc import Sequence

import torch

from minisgl.layers.base import Layer, Piece, shard_heads, shard_range, shard_size
from minisgl.layers.context import BuildContext
from minisgl.layers.norm import RMSNorm

Hidden = torch.Tensor
"""Hidden states on their way to the next norm: ``[T, n]``, or parts ``[S, T, n]`` of their sum."""


class ReplicatedLinear(Layer):
    """``x @ W.T + b`` with all of ``W`` on every rank."""

    def __init__(
        self, in_size: int, out_size: int, context: BuildContext, prefix: str, *, bias: bool = False
    ) -> None:
        super().__init__()
        self._linear = context.ops.linear
        shape = (out_size, in_size)
        whole = (slice(0, out_size),)
        self.weight = self.declare(
            "weight", shape, [Piece(f"{prefix}.weight", shape, whole, whole)], context, matrix=True
        )
        self.bias: torch.Tensor | None = None
        if bias:
            piece = Piece(f"{prefix}.bias", shape[:1], whole, whole)
            self.bias = self.declare("bias", shape[:1], [piece], context, dummy="zeros")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, in]`` to ``[T, out]``."""
        return self._linear(x, self.weight, self.bias)

    def rename(self, prefix: str) -> None:
        """Read the weight by another name of the same tensor; without a bias only."""
        assert self.bias is None, "only routers have two names, and no bias"
        whole = (slice(0, self.weight.shape[0]),)
        piece = Piece(f"{prefix}.weight", tuple(self.weight.shape), whole, whole)
        self.replace_pieces("weight", [piece])


class MergedColumnLinear(Layer):
    """Several projections of one input, such as gate and up, as one matrix product.

    The output is ``[T, sum of local sizes]``: each projection's part for this rank, in order.
    """

    def __init__(
        self,
        in_size: int,
        out_sizes: Sequence[int],
        context: BuildContext,
        prefixes: Sequence[str],
        *,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self._linear = context.ops.linear
        self._add_norm_gated = context.ops.add_norm_gated
        rank, ranks = context.communicator.rank, context.communicator.size
        ranges = [shard_range(size, rank, ranks) for size in out_sizes]
        local_sizes = [shard_size(size, ranks) for size in out_sizes]
        parts = list(zip(prefixes, out_sizes, ranges, local_sizes, strict=True))
        self.weight, self.bias = _declare_columns(self, in_size, parts, context, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, in]`` to ``[T, sum of local sizes]``."""
        return self._linear(x, self.weight, self.bias)

    def gated_after_norm(
        self, x: Hidden, residual: torch.Tensor | None, norm: RMSNorm, *, gelu: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``act(gate) * up`` of ``norm(x + residual)`` and the sum; see ``AddNormGated``."""
        return self._add_norm_gated(
            x, residual, norm.weight, norm.eps, self.weight, self.bias, gelu=gelu
        )


class QKVLinear(Layer):
    """The q, k and v projections as one matrix product; ``prefix`` is the attention's.

    A rank holds whole heads. With more ranks than KV heads, KV heads are replicated. The output
    is ``[T, (q_heads + 2 * kv_heads) * head_dim]`` of this rank: q, then k, then v.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        context: BuildContext,
        prefix: str,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self._linear = context.ops.linear
        self._add_norm_linear = context.ops.add_norm_linear
        communicator = context.communicator
        q, kv = shard_heads(num_q_heads, num_kv_heads, communicator.rank, communicator.size)
        self.num_q_heads, self.num_kv_heads = len(q), len(kv)
        parts = [
            (
                f"{prefix}.{name}",
                total * head_dim,
                (heads.start * head_dim, heads.stop * head_dim),
                len(heads) * head_dim,
            )
            for name, total, heads in (
                ("q_proj", num_q_heads, q),
                ("k_proj", num_kv_heads, kv),
                ("v_proj", num_kv_heads, kv),
            )
        ]
        self.weight, self.bias = _declare_columns(self, hidden_size, parts, context, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, hidden]`` to ``[T, (q_heads + 2 * kv_heads) * head_dim]``."""
        return self._linear(x, self.weight, self.bias)

    def after_norm(
        self, x: Hidden, residual: torch.Tensor | None, norm: RMSNorm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``forward(norm(x + residual))`` and the sum; see ``AddNormLinear``."""
        return self._add_norm_linear(x, residual, norm.weight, norm.eps, self.weight, self.bias)


class RowLinear(Layer):
    """A projection whose input is sharded: partial products are summed over the ranks.

    The bias is whole on every rank and added once, after the sum.
    """

    def __init__(
        self, in_size: int, out_size: int, context: BuildContext, prefix: str, *, bias: bool = False
    ) -> None:
        super().__init__()
        self._linear = context.ops.linear
        self._linear_parts = context.ops.linear_parts
        self._communicator = context.communicator
        rank, ranks = context.communicator.rank, context.communicator.size
        start, stop = shard_range(in_size, rank, ranks)
        rows = slice(0, out_size)
        piece = Piece(
            f"{prefix}.weight",
            (out_size, in_size),
            (rows, slice(start, stop)),
            (rows, slice(0, stop - start)),
        )
        self.weight = self.declare(
            "weight", (out_size, shard_size(in_size, ranks)), [piece], context, matrix=True
        )
        self.bias: torch.Tensor | None = None
        if bias:
            piece = Piece(f"{prefix}.bias", (out_size,), (rows,), (rows,))
            self.bias = self.declare("bias", (out_size,), [piece], context, dummy="zeros")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, local in]`` to ``[T, out]``, summed over the ranks."""
        if self._communicator.size == 1:
            return self._linear(x, self.weight, self.bias)
        out = self._communicator.all_reduce(self._linear(x, self.weight, None))
        return out if self.bias is None else out + self.bias

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """Return what this rank adds to ``forward``'s sum over the ranks; without a bias only."""
        assert self.bias is None, "a bias is added once, after the sum"
        return self._linear(x, self.weight, None)

    def parts(self, x: torch.Tensor) -> Hidden:
        """Return the same, for a norm that adds parts up."""
        if self._communicator.size == 1:
            return self._linear_parts(x, self.weight, self.bias)
        return self.forward(x)


def _declare_columns(
    layer: Layer,
    in_size: int,
    parts: Sequence[tuple[str, int, tuple[int, int], int]],
    context: BuildContext,
    *,
    bias: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Declare a merged weight; a part is (prefix, size, (start, stop) taken, size stored)."""
    weights, biases = [], []
    offset = 0
    for prefix, size, (start, stop), stored in parts:
        source = (slice(start, stop),)
        target = (slice(offset, offset + stop - start),)
        weights.append(Piece(f"{prefix}.weight", (size, in_size), source, target))
        biases.append(Piece(f"{prefix}.bias", (size,), source, target))
        offset += stored
    weight = layer.declare("weight", (offset, in_size), weights, context, matrix=True)
    if not bias:
        return weight, None
    return weight, layer.declare("bias", (offset,), biases, context, dummy="zeros")
