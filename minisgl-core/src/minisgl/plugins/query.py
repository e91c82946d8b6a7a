"""Makes the query of backend selection: from a model's configuration, or for a created backend."""

from typing import TYPE_CHECKING

from minisgl.models.config import ModelConfig, ModelFacts
from minisgl.plugins.records import BackendQuery

if TYPE_CHECKING:
    from minisgl.attention.interface import AttentionContext


def build_query(
    config: ModelFacts,
    *,
    device: str,
    compute_capability: tuple[int, int] | None,
    dtype: str,
    kv_dtype: str,
    page_size: int,
    tensor_parallel_size: int = 1,
    expert_parallel_size: int = 1,
    moe_weights_dtype: str | None = None,
) -> BackendQuery:
    """Return what one rank's backends must run on; arguments as ``BackendQuery`` describes them.

    Raises:
        SettingsError: the heads cannot be shared out over so many ranks.
    """
    from minisgl.layers.base import shard_heads

    q_heads, kv_heads = shard_heads(
        config.num_q_heads, config.num_kv_heads, rank=0, size=tensor_parallel_size
    )
    moe = config.moe if isinstance(config, ModelConfig) else None
    return BackendQuery(
        device=device,
        compute_capability=compute_capability,
        dtype=dtype,
        kv_dtype=kv_dtype,
        page_size=page_size,
        num_q_heads=len(q_heads),
        num_kv_heads=len(kv_heads),
        head_dim=config.head_dim,
        sliding_window=any(window is not None for window in config.sliding_windows),
        logit_soft_cap=config.logit_soft_cap,
        num_experts=moe.num_experts if moe is not None else 0,
        tensor_parallel_size=tensor_parallel_size,
        expert_parallel_size=expert_parallel_size,
        moe_weights_dtype=moe_weights_dtype,
    )


def query_of_context(
    context: "AttentionContext", compute_capability: tuple[int, int] | None
) -> BackendQuery:
    """Return what a probe would be asked about the attention layers that ``create`` is given.

    A backend that decides there what its probe has decided, such as which kernel, asks it again.
    """
    return BackendQuery(
        device=context.device.type,
        compute_capability=compute_capability,
        dtype=str(context.dtype).removeprefix("torch."),
        kv_dtype=str(context.kv_pool.spec.dtype).removeprefix("torch."),
        page_size=context.page_size,
        num_q_heads=context.num_q_heads,
        num_kv_heads=context.num_kv_heads,
        head_dim=context.head_dim,
        sliding_window=context.sliding_window,
        logit_soft_cap=context.logit_soft_cap,
    )
