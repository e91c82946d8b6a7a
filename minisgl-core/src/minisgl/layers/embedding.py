"""The embedding and the head, sharded over the vocabulary."""

import logging
from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812

from minisgl.layers.base import Layer, Piece, shard_range, shard_size
from minisgl.layers.context import BuildContext

logger = logging.getLogger(__name__)


class VocabEmbedding(Layer):
    """Token ids to hidden states; each rank holds a slice of the vocabulary.

    With ``tied`` a head multiplies with the same weight.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        context: BuildContext,
        prefix: str,
        *,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self._communicator = context.communicator
        self.name = f"{prefix}.weight"
        self.start, stop = shard_range(
            vocab_size, context.communicator.rank, context.communicator.size
        )
        self._num_rows = stop - self.start
        shape = (vocab_size, hidden_size)
        self.weight = _declare_vocabulary(self, self.name, shape, context, matrix=tied)

    def fill_from(self, name: str) -> None:
        """Fill the weight from the checkpoint tensor ``name`` instead of one's own."""
        self.name = name
        weight = self._weights["weight"]
        pieces = tuple(replace(piece, name=name) for piece in weight.pieces)
        self._weights["weight"] = replace(weight, pieces=pieces)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Ids ``[T]`` to hidden states ``[T, hidden]``."""
        if self._communicator.size == 1:
            return F.embedding(input_ids, self.weight)
        local = input_ids - self.start
        elsewhere = (local < 0) | (local >= self._num_rows)
        hidden = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        hidden.masked_fill_(elsewhere.unsqueeze(-1), 0)
        return self._communicator.all_reduce(hidden)


class LMHead(Layer):
    """Hidden states to logits over the whole vocabulary, on every rank.

    With ``tied_to`` the head has no weight of its own. A checkpoint whose configuration ties the
    two and which holds both is taken at its tensors' word, as transformers does: if they differ,
    they are not tied.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        context: BuildContext,
        prefix: str,
        *,
        tied_to: VocabEmbedding | None = None,
    ) -> None:
        super().__init__()
        self._context = context
        self._linear = context.ops.linear
        self._name = f"{prefix}.weight"
        self._vocab_size = vocab_size
        self._hidden_size = hidden_size
        self._communicator = context.communicator
        self._tied_to = tied_to
        self.weight = self._own_weight() if tied_to is None else tied_to.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[S, hidden]`` to ``[S, vocab_size]``."""
        logits = self._linear(hidden, self.weight, None)
        if self._communicator.size == 1:
            return logits
        # Shards are whole but for the last ones, so that all padding lies at the very end.
        return self._communicator.all_gather(logits, dim=-1)[:, : self._vocab_size]

    def prepare_loading(self, names: frozenset[str]) -> None:
        """Take a weight of one's own if a tied checkpoint holds one, or lend it if it is alone."""
        if self._tied_to is None or self._name not in names:
            return
        if self._tied_to.name in names:
            self.weight = self._own_weight()
        else:
            self._tied_to.fill_from(self._name)

    def finish_loading(self) -> None:
        """Give up one's own weight if it equals the embedding that it should be tied to."""
        if self._tied_to is None or self.weight is self._tied_to.weight:
            return
        if torch.equal(self.weight, self._tied_to.weight):
            self._weights.clear()
            self.weight = self._tied_to.weight
        else:
            logger.warning(
                "tie_word_embeddings is set, but %s and %s differ in the checkpoint: not tied",
                self._name,
                self._tied_to.name,
            )

    def _own_weight(self) -> torch.Tensor:
        shape = (self._vocab_size, self._hidden_size)
        return _declare_vocabulary(self, self._name, shape, self._context, matrix=True)


def _declare_vocabulary(
    layer: Layer, name: str, whole: tuple[int, int], context: BuildContext, *, matrix: bool
) -> torch.Tensor:
    rank, ranks = context.communicator.rank, context.communicator.size
    start, stop = shard_range(whole[0], rank, ranks)
    piece = Piece(name, whole, (slice(start, stop),), (slice(0, stop - start),))
    shape = (shard_size(whole[0], ranks), whole[1])
    return layer.declare("weight", shape, [piece], context, matrix=matrix)
