"""What observers are told."""

import time

from minisgl.engine.plan import BatchPlan
from minisgl.request import RequestStats, StepStats
from minisgl.scheduler.cache import CacheManager
from minisgl.scheduler.prefill import PrefillManager
from minisgl.scheduler.request_state import RequestState


def step_stats(
    plan: BatchPlan,
    cache: CacheManager,
    prefill: PrefillManager,
    *,
    num_running: int,
    num_retracted: int,
    host_s: float,
) -> StepStats:
    """Return the statistics of a processed step; ``host_s`` is the host's time in seconds."""
    return StepStats(
        step=plan.number,
        num_decode_rows=plan.num_decode_rows,
        num_prefill_rows=len(plan.chunks),
        num_prefill_tokens=len(plan.token_ids),
        num_running=num_running,
        num_waiting=prefill.num_waiting,
        num_free_pages=cache.num_free,
        num_cached_pages=cache.prefix_cache.num_pages,
        num_pages=cache.num_pages,
        num_evictable_pages=cache.prefix_cache.num_evictable_pages,
        num_queried_tokens=prefill.num_queried_tokens,
        num_cached_tokens=prefill.num_cached_tokens,
        num_retracted=num_retracted,
        host_us=host_s * 1e6,
    )


def request_stats(request: RequestState, inter_token_times: tuple[float, ...] = ()) -> RequestStats:
    """Return the statistics of a request that has just ended; times in seconds."""
    arrival, launch, token = request.arrival, request.first_launch, request.first_token
    return RequestStats(
        uid=request.uid,
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_completion_tokens=request.num_output_tokens,
        finish_reason=str(request.terminal),
        queue_time=None if launch is None else launch - arrival,
        prefill_time=None if launch is None or token is None else token - launch,
        time_to_first_token=None if token is None else token - arrival,
        inter_token_times=inter_token_times,
        total_time=time.monotonic() - arrival,
        num_retractions=request.num_retractions,
    )
