"""Whether the backend can run a model here. Imports neither torch nor Triton."""

from importlib.util import find_spec

from minisgl.plugins import BackendQuery, Supported, Unsupported

_RANK = 50


def probe(query: BackendQuery) -> Supported | Unsupported:  # noqa: ARG001
    """Answer from what is installed; core has compared the capabilities before."""
    if find_spec("triton") is None:
        return Unsupported("needs Triton, which torch for CUDA brings: pip install triton")
    return Supported(prefill_rank=_RANK, decode_rank=_RANK)
