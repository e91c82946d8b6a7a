"""The KV pool, and from the chosen records to one attention backend for all launches."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from minisgl.attention.by_rows import DecodeByRows
from minisgl.attention.hybrid import HybridBackend
from minisgl.attention.interface import AttentionBackend, AttentionContext
from minisgl.bootstrap.measurements import load_measurements
from minisgl.bootstrap.site import Site
from minisgl.kernel.jit import JitLoader
from minisgl.kernel.ops import OpTable
from minisgl.kvcache.interface import KVCachePool, KVPoolSpec
from minisgl.plugins.failure import checked, creating
from minisgl.plugins.records import KVPoolRecord
from minisgl.plugins.selection import (
    AttentionSelection,
    OtherBackend,
    Selection,
    select_attention,
    select_kv_pool,
)

logger = logging.getLogger(__name__)

PoolSelection = Selection[KVPoolRecord[Any]]


def create_pool(site: Site) -> tuple[KVCachePool, PoolSelection]:
    """Create the KV pool that the settings choose, still without memory.

    Raises:
        MinisglError: it cannot be chosen, or not be created.
    """
    settings = site.settings
    spec = KVPoolSpec(
        num_layers=site.config.num_layers,
        num_kv_heads=site.query.num_kv_heads,
        head_dim=site.config.head_dim,
        page_size=site.query.page_size,
        dtype=site.dtype,
        device=site.device,
    )
    chosen = select_kv_pool(site.host, site.query, settings.cache.pool, settings.backend_options)
    with creating("cache.pool", chosen.choice):
        return chosen.record.create(spec, chosen.settings), chosen


def choose_attention(site: Site, pool: PoolSelection) -> AttentionSelection:
    """Choose attention backends that read pages as the pool has them.

    Raises:
        MinisglError: see ``select_attention``.
    """
    settings = site.settings
    return select_attention(
        site.host,
        replace(site.query, kv_layout=pool.record.capabilities.kv_layout),
        settings.attention.backend,
        settings.backend_options,
        load_measurements(settings, site.query.dtype, site.device),
    )


def create_attention(
    site: Site, pool: KVCachePool, chosen: AttentionSelection, ops: OpTable, jit: JitLoader
) -> AttentionBackend:
    """Create the backends of both phases, as one.

    Raises:
        MinisglError: one of them cannot be created.
    """
    context = AttentionContext(
        device=site.device,
        dtype=site.dtype,
        num_q_heads=site.query.num_q_heads,
        num_kv_heads=site.query.num_kv_heads,
        head_dim=site.config.head_dim,
        num_layers=site.config.num_layers,
        page_size=site.query.page_size,
        kv_pool=pool,
        max_running_requests=site.settings.scheduler.max_running_requests,
        max_seq_len=site.max_seq_len,
        sliding_window=site.query.sliding_window,
        logit_soft_cap=site.query.logit_soft_cap,
        ops=ops,
        jit=jit,
    )
    names = chosen.choice.split(",")
    with creating("attention", names[0]):
        made = chosen.prefill.create(context, chosen.prefill_settings)
        prefill = decode = checked(made, AttentionBackend)
    if chosen.decode is not chosen.prefill:
        with creating("attention", names[1]):
            made = chosen.decode.create(context, chosen.decode_settings)
            decode = checked(made, AttentionBackend)
    by_rows = _decode_by_rows(decode, names[1], context, chosen.others)
    if decode is prefill and by_rows is None:
        return prefill
    shares = by_rows is not None and by_rows.takes_shared_prefixes
    return HybridBackend(prefill, decode, by_rows, takes_shared_prefixes=shares)


def _decode_by_rows(
    decode: AttentionBackend, name: str, context: AttentionContext, others: Sequence[OtherBackend]
) -> DecodeByRows | None:
    """Return what measures the chosen backend and the others, if there is more than one to record.

    A backend that cannot be created is left out: nobody has asked for it.
    """
    if context.device.type != "cuda" or decode.cuda_graphs is None:
        return None
    backends = {name: decode}
    for other in others:
        try:
            backend = checked(other.record.create(context, other.settings), AttentionBackend)
        except Exception:
            logger.warning("attention backend %s cannot be created", other.name, exc_info=True)
            continue
        if backend.cuda_graphs is not None and backend.store_fusion == decode.store_fusion:
            backends[other.name] = backend
    return DecodeByRows(backends, context) if len(backends) > 1 else None
