"""Makes the backend ``trtllm``: loads its module, compiles it if it must, and runs it once."""

import logging
from collections.abc import Callable
from typing import Any

import torch

from minisgl.attention import AttentionContext
from minisgl.errors import UnsupportedBackendError
from minisgl.plugins import BackendQuery, Unsupported
from minisgl.plugins.query import query_of_context
from minisgl_attn_flashinfer.create import load_module
from minisgl_attn_flashinfer.modules import TRTLLM_GEN_MODULE
from minisgl_attn_flashinfer.settings import TrtllmSettings
from minisgl_attn_flashinfer.trtllm import (
    DecodeLaunch,
    DecodeRun,
    TrtllmBackend,
    TrtllmGen,
    Xqa,
)
from minisgl_attn_flashinfer.trtllm_probe import kernel_for, module_for, probe_trtllm

logger = logging.getLogger(__name__)


def create_trtllm(context: AttentionContext, settings: TrtllmSettings) -> TrtllmBackend:
    """Return the backend, with the kernel that it will need loaded.

    Raises:
        UnsupportedBackendError: there is none for this device and shape.
    """
    query = query_of_context(context, torch.cuda.get_device_capability(context.device))
    answer = probe_trtllm(query)
    if isinstance(answer, Unsupported):
        raise UnsupportedBackendError(f"backend 'trtllm' {answer.reason}")
    kernel = kernel_for(query.compute_capability)
    assert kernel is not None
    module = module_for(kernel, query)
    num_sms = torch.cuda.get_device_properties(context.device).multi_processor_count
    run: DecodeRun
    if kernel == "xqa":
        run = Xqa(_load_xqa(module, query), context, num_sms, pdl=settings.pdl)
    else:
        run = TrtllmGen(_load_trtllm_gen(), context, num_sms, pdl=settings.pdl)
    warm_up(run, context)
    torch.cuda.synchronize(context.device)
    logger.info("FlashInfer's %s decodes, module %s", kernel, module)
    return TrtllmBackend(context, run)


def warm_up(run: DecodeRun, context: AttentionContext) -> None:
    """Run launches of few and of many rows, on pages of zeros: kernels are read from disk then."""
    shape = (2, context.page_size, context.num_kv_heads, context.head_dim)
    with torch.inference_mode():
        page = torch.zeros(shape, dtype=context.dtype, device=context.device)
        for rows in (1, context.max_running_requests):
            heads = (rows, context.num_q_heads, context.head_dim)
            q = torch.zeros(heads, dtype=context.dtype, device=context.device)
            ones = torch.ones(rows, dtype=torch.int32, device=context.device)
            launch = DecodeLaunch(ones[:, None], ones, context.page_size)
            run(q, (page, page.clone()), torch.empty_like(q), launch, 1.0)


def _load_xqa(module: str, query: BackendQuery) -> Callable[..., Any]:
    from flashinfer.jit.xqa import gen_xqa_module

    dtype = getattr(torch, query.dtype)
    group = query.num_q_heads // query.num_kv_heads
    # q, K and V; page size and shape; no window; output; one query a row.
    arguments = (dtype, dtype, query.page_size, query.head_dim, group, False, dtype, 1)
    loaded = load_module(module, lambda: gen_xqa_module(*arguments).build_and_load())
    run: Callable[..., Any] = loaded.xqa_wrapper
    return run


def _load_trtllm_gen() -> Callable[..., Any]:
    from flashinfer.decode import get_trtllm_gen_fmha_module

    loaded = load_module(TRTLLM_GEN_MODULE, get_trtllm_gen_fmha_module)
    run: Callable[..., Any] = loaded.trtllm_paged_attention_decode
    return run
