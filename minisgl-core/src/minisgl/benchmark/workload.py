"""What ``minisgl bench offline`` sends: random prompts of random lengths, from a seed. No torch."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from minisgl.request import SamplingParams

Range = tuple[int, int]
"""Smallest and largest value, both included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests that are sent all at once.

    Attributes:
        num_prompts: of a round.
        input_len, output_len: tokens of a prompt and of its answer.
        max_token_id: prompts hold ids from 0 to this one.
        temperature: of every request.
        ignore_eos: every answer has the length that was drawn for it.
        shared_prefix_len: tokens that all prompts of a round begin with, before those of
            ``input_len``.
    """

    num_prompts: int
    input_len: Range
    output_len: Range
    max_token_id: int = 10000
    temperature: float = 0.6
    ignore_eos: bool = True
    shared_prefix_len: int = 0

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest request, answer included."""
        return self.shared_prefix_len + self.input_len[1] + self.output_len[1]

    def requests(self, seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
        """Return the prompts of a round and how each is answered.

        The order of the draws is part of the published benchmark: Python's ``random`` gives first
        every prompt, its length and then its ids, and after that the lengths of all answers. What
        prompts share is drawn last.
        """
        draw = random.Random(seed).randint  # noqa: S311
        prompts = [
            [draw(0, self.max_token_id) for _ in range(draw(*self.input_len))]
            for _ in range(self.num_prompts)
        ]
        params = [
            SamplingParams(
                max_tokens=draw(*self.output_len),
                temperature=self.temperature,
                ignore_eos=self.ignore_eos,
            )
            for _ in range(self.num_prompts)
        ]
        shared = [draw(0, self.max_token_id) for _ in range(self.shared_prefix_len)]
        return [shared + prompt for prompt in prompts], params


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A workload with a name, and the settings that belong to it.

    Attributes:
        workload: what is sent.
        settings: by dotted name; they stand where the user has given nothing.
    """

    workload: Workload
    settings: Mapping[str, Any]


_LIMITS: Final = MappingProxyType(
    {"model.max_seq_len": 4096, "scheduler.max_running_requests": 256}
)

PRESETS: Final[Mapping[str, Preset]] = MappingProxyType(
    {
        "minisgl-offline": Preset(
            workload=Workload(num_prompts=256, input_len=(100, 1024), output_len=(100, 1024)),
            settings=_LIMITS | {"scheduler.policy": "prefill-first", "cache.page_size": 64},
        ),
        "one-request": Preset(
            workload=Workload(num_prompts=1, input_len=(512, 512), output_len=(512, 512)),
            settings=_LIMITS,
        ),
        "shared-prefix": Preset(
            workload=Workload(
                num_prompts=64,
                shared_prefix_len=8192,
                input_len=(128, 128),
                output_len=(256, 256),
            ),
            settings={"model.max_seq_len": 10240, "scheduler.max_running_requests": 64},
        ),
    }
)
"""``minisgl-offline`` is the published offline benchmark of mini-sglang."""
