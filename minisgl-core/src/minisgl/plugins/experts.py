"""Core's own MoE backend, and its exchanges between ranks that hold different experts."""

from typing import TYPE_CHECKING

from minisgl.plugins.records import (
    BackendQuery,
    Capabilities,
    ExpertExchangeRecord,
    MoeBackendRecord,
    NoSettings,
    Supported,
    Unsupported,
)

if TYPE_CHECKING:
    from minisgl.moe.exchange import ExchangeContext, ExpertExchange
    from minisgl.moe.interface import MoeBackend, MoeContext


def _reference(query: BackendQuery) -> Supported | Unsupported:  # noqa: ARG001
    return Supported(prefill_rank=0, decode_rank=0)


def _probe_all_reduce(query: BackendQuery) -> Supported | Unsupported:  # noqa: ARG001
    """One collective, and those of few bytes are quick: before ``all-to-all``."""
    return Supported(prefill_rank=1, decode_rank=1)


def _create_torch(context: "MoeContext", settings: NoSettings) -> "MoeBackend":  # noqa: ARG001
    from minisgl.moe.torch_backend import TorchMoeBackend

    return TorchMoeBackend(context)


def _create_all_reduce(context: "ExchangeContext", settings: NoSettings) -> "ExpertExchange":  # noqa: ARG001
    from minisgl.moe.collective_exchanges import AllReduceExchange

    return AllReduceExchange(context)


def _create_all_to_all(context: "ExchangeContext", settings: NoSettings) -> "ExpertExchange":  # noqa: ARG001
    from minisgl.moe.collective_exchanges import AllToAllExchange

    return AllToAllExchange(context)


BACKENDS = (
    MoeBackendRecord(
        name="torch",
        summary="Reference in plain torch: a loop over experts",
        settings_type=NoSettings,
        probe=_reference,
        create=_create_torch,
        capabilities=Capabilities(mixed_batches=True, sliding_window=True, logit_soft_cap=True),
        weights_dtypes=("float8_e4m3fn",),
    ),
)

EXCHANGES = (
    ExpertExchangeRecord(
        name="all-reduce",
        summary="Each rank runs its experts on all tokens; an all-reduce adds up",
        settings_type=NoSettings,
        probe=_probe_all_reduce,
        create=_create_all_reduce,
    ),
    ExpertExchangeRecord(
        name="all-to-all",
        summary="Each rank runs the tokens of its experts; results go to one rank a token",
        settings_type=NoSettings,
        probe=_reference,
        create=_create_all_to_all,
    ),
)
