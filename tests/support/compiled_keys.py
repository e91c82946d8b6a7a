"""What Triton would compile while requests run, found without a card; a script, no interpreter.

An engine on the CPU, whose operations are the references, calls Triton's too, on the same tensors:
a launch ends where it has named the kernel that it needs. Prints as JSON how many the start has
named, and those that only the requests have.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from triton import knobs
from triton.runtime import driver, jit

from minisgl import LLM, SamplingParams
from minisgl.bootstrap import engine as bootstrap_engine
from minisgl.engine import logits
from minisgl.kernel import OpTable
from minisgl.request import GrammarSpec
from support.compile_kernels import AbsentCard

Key = tuple[str, str]


def note_keys() -> set[Key]:
    """Let launches name their kernel and end; returns where they do."""
    named: set[Key] = set()
    driver.set_active(AbsentCard(90))

    def name_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        assert grid is not None
        assert not warmup
        options["debug"] = knobs.runtime.debug
        options["instrumentation_mode"] = knobs.compilation.instrumentation_mode
        _, keys, _, _, binder = self.device_caches[0]
        _, specialization, parsed = binder(*args, **options)
        named.add((self.__name__, jit.compute_cache_key(keys, specialization, parsed)))

    jit.JITFunction.run = name_only
    return named


def doubled(reference: OpTable) -> OpTable:
    """Return the table of operations that call Triton's and leave the reference's results."""
    from minisgl.kernel import triton

    def both(fast: Callable[..., Any], right: Callable[..., Any]) -> Callable[..., Any]:
        def op(*args: Any, **keywords: Any) -> Any:
            # Nothing has run: neither inputs nor outputs are written to.
            out = fast(*args, **keywords)
            result = right(*args, **keywords)
            if isinstance(out, tuple):
                for place, value in zip(out, result, strict=True):
                    fill(place, value)
            elif out is not None:
                fill(out, result)
            return out

        return op

    return OpTable(
        **{
            entry.name: both(getattr(triton, entry.name), getattr(reference, entry.name))
            if entry.name in triton.__all__
            else getattr(reference, entry.name)
            for entry in fields(OpTable)
        }
    )


def fill(place: torch.Tensor, value: torch.Tensor) -> None:
    """Write a result to where Triton's operation would have; of parts to the first one."""
    if place.shape != value.shape:
        place.zero_()
        place, value = place[0], value[0]
    place.copy_(value)


def serve(path: Path, rows: int, named: set[Key]) -> dict[str, Any]:
    warm_up = bootstrap_engine._warm_up

    def as_on_a_card(
        engine: Any, settings: Any, model: Any, context: Any, *rest: Any, **keywords: Any
    ) -> None:
        on_card = replace(context, device=torch.device("cuda"))
        warm_up(engine, settings, model, on_card, *rest, **keywords)

    bootstrap_engine._warm_up = as_on_a_card  # type: ignore[assignment]
    bootstrap_engine.select_ops = lambda *_: doubled(OpTable())
    random = torch.Generator().manual_seed(1)

    def prompt(length: int) -> list[int]:
        found: list[int] = torch.randint(3, 259, (length,), generator=random).tolist()
        return found

    asks: list[dict[str, Any]] = [
        {"temperature": 0},
        {"seed": 1},
        {"seed": 2, "top_k": 7},
        {"seed": 3, "top_p": 0.5, "logprobs": 2},
        {"temperature": 0, "repetition_penalty": 1.3, "logprobs": 0},
        {"seed": 4, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": 0.1},
        {"temperature": 0, "logit_bias": {9: 4.0, 8: -100}, "prompt_logprobs": 2},
        {"seed": 5, "allowed_token_ids": list(range(3, 90)), "bad_token_ids": [(5,), (6, 7)]},
        {"temperature": 0, "grammar": GrammarSpec("choice", '["red", "green"]')},
        {"seed": 6, "top_k": 9, "repetition_penalty": 2, "grammar": GrammarSpec("regex", "[a-f]+")},
    ]
    with LLM(
        str(path), device="cpu", dtype="bfloat16", max_running_requests=rows, page_size=4,
        num_pages=400, max_prefill_tokens=300, cuda_graph_max_rows=0, progress=False,
        scheduler={"launch": "split"},
    ) as llm:  # fmt: skip
        at_start = set(named)
        params = [SamplingParams(max_tokens=5, ignore_eos=True, **one) for one in asks]
        for some in (params, params[::-1], *([one] for one in params)):
            prompts = [prompt(length) for length in (3, 40, 1, 17, 290, 64, 2, 130, 9, 33)]
            llm.generate(prompts[: len(some)], some, progress=False)
        many = [one for one in params if one.grammar is None] * 5
        llm.generate([prompt(3 + place) for place in range(len(many))], many, progress=False)
    return {"at_start": len(at_start), "later": sorted(named - at_start)}


if __name__ == "__main__":
    # Odd pieces, if they are not kept from it: what lies at their beginning is seldom aligned.
    setattr(logits, "_PIECE", 263 * 17)  # noqa: B010
    sys.stdout.write(json.dumps(serve(Path(sys.argv[1]), int(sys.argv[2]), note_keys())))
