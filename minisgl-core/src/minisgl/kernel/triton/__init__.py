"""Triton kernels for entries of the op table; the one package of the core that imports Triton.

What a kernel is compiled for are the dtypes and the model's own sizes (widths, heads, strides of a
row, page size), never the number of tokens or rows: one call of an op with a model's tensors, with
any number of tokens, compiles all that later calls with that model need. So a start-up that runs
the model once and samples once, plain and filtered, leaves nothing to compile. The exception are
products, which have kernels of their own for 1, up to 16, 64 and 128 rows.
"""

from minisgl.kernel.triton.activations import gelu_and_mul, silu_and_mul
from minisgl.kernel.triton.controls import penalize
from minisgl.kernel.triton.filters import sample_filtered
from minisgl.kernel.triton.linear import add_norm_gated, add_norm_linear, linear, linear_parts
from minisgl.kernel.triton.masks import mask_tokens
from minisgl.kernel.triton.norms import add_rms_norm, rms_norm
from minisgl.kernel.triton.paging import page_indices
from minisgl.kernel.triton.rope_store import rope, rope_store, store_kv
from minisgl.kernel.triton.rows import advance_rows, apply_plan
from minisgl.kernel.triton.sampling import sample_gumbel

__all__ = [
    "add_norm_gated",
    "add_norm_linear",
    "add_rms_norm",
    "advance_rows",
    "apply_plan",
    "gelu_and_mul",
    "linear",
    "linear_parts",
    "mask_tokens",
    "page_indices",
    "penalize",
    "rms_norm",
    "rope",
    "rope_store",
    "sample_filtered",
    "sample_gumbel",
    "silu_and_mul",
    "store_kv",
]
