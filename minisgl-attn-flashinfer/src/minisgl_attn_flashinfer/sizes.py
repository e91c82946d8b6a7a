"""How much scratch memory FlashInfer's planners ask for. Pure functions: no torch.

FlashInfer recommends 128 MiB for partial results, and fails at run time where that is too little.
The bounds here come from its planner (``include/flashinfer/attention/scheduler.cuh`` of 0.6.12).
"""

from dataclasses import dataclass

INT_WORKSPACE_BYTES = 8 * 2**20
"""What FlashInfer's wrappers give a prefill plan."""

_CTAS_PER_SM = 2
"""Of the tensor-core template: it splits rows until so many CTAs run on each multiprocessor."""

_MAX_DECODE_CTAS_PER_SM = 16
"""Of the CUDA-core kernels: 128 threads a CTA, at most 2048 threads a multiprocessor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What is fixed about every launch of one backend, on this rank.

    Attributes:
        num_q_heads, num_kv_heads, head_dim: of the model.
        page_size: tokens a page.
        num_sms: multiprocessors of the device.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    num_sms: int

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def unsplit_rows(self) -> int:
        """From so many decode rows on, the tensor-core template splits none, whatever its length.

        The planner lets a split launch have at most ``2 * num_sms / num_kv_heads`` pieces of rows
        (``max_batch_size_if_split``), and a row is a piece by itself.
        """
        return max(1, _CTAS_PER_SM * self.num_sms // self.num_kv_heads)


def decode_int_workspace_bytes(shape: Shape, rows: int) -> int:
    """Return a bound on the index lists of a decode plan of ``rows`` rows.

    Three int32 and a bool a piece, two int32 a row, and padding between the lists.
    """
    pieces = max(_decode_pieces(shape), _tensor_pieces(shape, rows))
    return _round_up(16 * pieces + 16 * rows + 4096, 4096)


def float_workspace_bytes(shape: Shape, *, prefill_fa2: bool) -> int:
    """Return a bound on the partial results of split rows, of any launch.

    A piece keeps, in float32, an output vector and a log-sum for each query head and query row of
    its tile. The fa3 template of prefill does not split.

    Args:
        shape: of the launches.
        prefill_fa2: whether prefill runs the fa2 template.
    """
    per_query = shape.num_q_heads * (shape.head_dim + 1) * 4
    tile = _tile(shape.group, shape.head_dim)
    wanted = [
        _tensor_pieces(shape, shape.unsplit_rows) * tile * per_query,
        _decode_pieces(shape) * per_query,
    ]
    if prefill_fa2:
        wanted.append(shape.unsplit_rows * _tile(128, shape.head_dim) * per_query)
    return _round_up(max(wanted) + 4096, 2**20)


def _tile(packed_queries: int, head_dim: int) -> int:
    """Query rows of a tile, heads of a group counted (``FA2DetermineCtaTileQ``)."""
    if packed_queries > 64 and head_dim < 256:
        return 128
    return 64 if packed_queries > 16 else 16


def _tensor_pieces(shape: Shape, rows: int) -> int:
    """Pieces of a decode plan on tensor cores: ``padded_batch_size`` in the planner."""
    tiles = -(-rows * shape.group // _tile(shape.group, shape.head_dim)) + rows
    return max(shape.unsplit_rows, tiles)


def _decode_pieces(shape: Shape) -> int:
    """Pieces of a split decode plan on CUDA cores."""
    return max(1, _MAX_DECODE_CTAS_PER_SM * shape.num_sms // shape.num_kv_heads)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
