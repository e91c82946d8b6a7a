"""``minisgl generate``: text for one prompt, or for a file of prompts, without a server."""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minisgl.cli.flags import add_settings_arguments
from minisgl.cli.sampling import add_sampling_arguments, sampling_params
from minisgl.errors import SettingsError, nearest
from minisgl.request import SamplingParams
from minisgl.settings import ResolvedSettings

if TYPE_CHECKING:
    from minisgl.llm import LLM, GenerationResult, TokenLogprobs

DEFAULT_MAX_TOKENS = 256


@dataclass(frozen=True, slots=True)
class _Job:
    """One prompt: what the output names it by, what the model gets, and how to sample."""

    shown: dict[str, Any]
    prompt: Any
    params: SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add where prompts come from, how they are sampled, and all settings."""
    parser.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="a prompt; repeatable"
    )
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="prompts, a JSON object a line: prompt (text or token ids) or messages, and sampling "
        "parameters of its own if it likes; - reads standard input",
    )
    parser.add_argument(
        "--chat", action="store_true", help="send each --prompt through the chat template"
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON lines for a single --prompt too"
    )
    add_sampling_arguments(parser, max_tokens=DEFAULT_MAX_TOKENS)
    add_settings_arguments(parser, positional_model=True)


def run(args: argparse.Namespace, resolved: ResolvedSettings) -> int:
    """Generate and print: the text of a single prompt as it comes, or a JSON line a prompt."""
    jobs = _jobs(args)
    if resolved.settings.model.path is None:
        raise SettingsError("no model is given; type --model PATH_OR_ID")
    from minisgl.llm import LLM

    progress = sys.stderr.isatty()
    with LLM(settings=resolved.settings, progress=progress) as llm:
        if len(jobs) == 1 and args.prompts is None and not args.json:
            _print_stream(llm, jobs[0])
        else:
            _print_lines(llm, jobs, progress=progress)
    return 0


def _print_stream(llm: "LLM", job: _Job) -> None:
    for chunk in llm.stream(job.prompt, job.params):
        print(chunk.text, end="", flush=True)
    print()


def _print_lines(llm: "LLM", jobs: list[_Job], *, progress: bool) -> None:
    results = llm.generate(
        [job.prompt for job in jobs], [job.params for job in jobs], progress=progress
    )
    for index, (job, result) in enumerate(zip(jobs, results, strict=True)):
        line = {"index": index, **job.shown, **_result_fields(result)}
        print(json.dumps(line, ensure_ascii=False))


def _result_fields(result: "GenerationResult") -> dict[str, Any]:
    fields: dict[str, Any] = {
        "text": result.text,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.num_prompt_tokens,
        "completion_tokens": len(result.token_ids),
        "cached_tokens": result.num_cached_tokens,
    }
    # What only some prompts ask for is in their lines only.
    if result.logprobs is not None:
        fields["logprobs"] = [_logprob_fields(one) for one in result.logprobs]
    if result.prompt_token_ids is not None:
        fields["prompt_text"], fields["prompt_token_ids"] = result.prompt, result.prompt_token_ids
    if result.prompt_logprobs is not None:
        fields["prompt_logprobs"] = [
            None if one is None else _logprob_fields(one) for one in result.prompt_logprobs
        ]
    return fields


def _logprob_fields(one: "TokenLogprobs") -> dict[str, Any]:
    """Return log-probabilities in JSON's types."""
    token, *top = (
        {
            "token_id": token.token_id,
            "text": token.text,
            "bytes": list(token.data),
            "logprob": token.logprob,
            "rank": token.rank,
        }
        for token in (one.token, *one.top)
    )
    return {**token, "top": top}


def _jobs(args: argparse.Namespace) -> list[_Job]:
    """Return all prompts, those of the command line first.

    Raises:
        SettingsError: there is none, or a line of the file is malformed.
    """
    params = sampling_params(args)
    jobs = [
        _Job(
            {"prompt": text},
            [{"role": "user", "content": text}] if args.chat else text,
            params,
        )
        for text in args.prompt
    ]
    if args.prompts is not None:
        jobs.extend(_from_lines(_lines(args.prompts), args))
    if not jobs:
        raise SettingsError("no prompt is given; type --prompt TEXT or --prompts FILE")
    return jobs


def _lines(path: str) -> Iterator[str]:
    if path == "-":
        yield from sys.stdin
        return
    try:
        with Path(path).open(encoding="utf-8") as file:
            yield from file
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--prompts {path!r} cannot be read: {error}") from error


def _from_lines(lines: Iterable[str], args: argparse.Namespace) -> Iterator[_Job]:
    """Yield a job for each line that is not blank."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield _job(json.loads(line), args)
        except (ValueError, SettingsError) as error:
            raise SettingsError(f"--prompts {args.prompts!r}, line {number}: {error}") from error


def _job(fields: Any, args: argparse.Namespace) -> _Job:
    """Return the job of one line: its prompt, and the sampling parameters beside it."""
    if not isinstance(fields, dict):
        raise SettingsError(f"must be a JSON object, got {fields!r}")
    sources = [name for name in ("prompt", "messages") if name in fields]
    if len(sources) != 1:
        raise SettingsError("must hold 'prompt' or 'messages', and not both")
    overrides = {name: value for name, value in fields.items() if name != sources[0]}
    if isinstance(overrides.get("logit_bias"), dict):  # JSON's keys are strings
        overrides["logit_bias"] = {
            int(token) if token.isdecimal() else token: bias
            for token, bias in overrides["logit_bias"].items()
        }
    known = SamplingParams.__struct_fields__
    for name in overrides:
        if name not in known:
            raise SettingsError(f"unknown field {name!r}.{nearest(name, known)}")
    prompt = fields[sources[0]]
    if not prompt or not isinstance(prompt, str | list):
        raise SettingsError(f"{sources[0]!r} must hold text or a list, got {prompt!r}")
    if sources == ["messages"] and not (
        isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt)
    ):
        raise SettingsError(f"'messages' must hold a list of objects, got {prompt!r}")
    return _Job({sources[0]: prompt}, prompt, sampling_params(args, **overrides))
