"""What is known about a running engine; plain data, without torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What scheduler, server and users need to know about a running engine.

    Attributes:
        architecture: of the model.
        device, dtype: where and in what it runs.
        vocab_size: ids of prompts and outputs lie below it.
        eos_token_ids: tokens that end a text, all of the model's.
        max_seq_len: most tokens of a request, prompt and output together.
        max_running_requests: rows.
        page_size: tokens a page.
        num_pages: pages in the pool, without the dummy page.
        mixed_launches: decode and prefill rows of a step share one forward pass, as
            ``scheduler.launch`` says or, if that is ``auto``, as suits the device.
        shared_prefix_min_tokens: decode launches attend to prefixes that rows share once, if that
            saves reading so many tokens; ``None``: the engine cannot, or shall not.
        asynchronous: launches return before they are computed, so overlapping host work pays.
    """

    architecture: str
    device: str
    dtype: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_seq_len: int
    max_running_requests: int
    page_size: int
    num_pages: int
    mixed_launches: bool
    asynchronous: bool
    shared_prefix_min_tokens: int | None = None
