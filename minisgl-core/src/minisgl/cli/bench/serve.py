"""``minisgl bench serve``: load for any OpenAI-compatible server, and its figures."""

import argparse
import math
from typing import TYPE_CHECKING

from minisgl.cli.bench import serve_flags as flags
from minisgl.cli.bench.output import check_writable, write_json
from minisgl.errors import MinisglError, SettingsError
from minisgl.settings import ResolvedSettings

if TYPE_CHECKING:
    from minisgl.benchmark.serving.datasets import Dataset, PromptMaker, WorkItem
    from minisgl.benchmark.serving.load import Job, Target

SUMMARY = "load for any OpenAI-compatible server: throughput, TTFT, TPOT, ITL, E2E, goodput"

add_arguments = flags.add_arguments


def run(args: argparse.Namespace, resolved: ResolvedSettings) -> int:  # noqa: ARG001
    """Send everything, print the figures, write the record; 1 if no request succeeded."""
    check_writable("--json", args.json)
    check_writable("--plot", args.plot)
    flags.check(args)
    from minisgl.benchmark.environment import describe_code
    from minisgl.benchmark.serving.figures import summarize
    from minisgl.benchmark.serving.processes import generate_load
    from minisgl.cli.bench.serve_output import (
        Progress,
        describe_load,
        describe_requests,
        print_figures,
    )

    if args.plot is not None:
        from minisgl.benchmark.pictures import check_picture

        check_picture("--plot", args.plot)
    target, model = _target(args)
    jobs = _jobs(args, model)
    _warm_up(args, target, jobs[: args.warmup])
    print(f"{len(jobs)} requests to {args.base_url}, model {model}", flush=True)
    with Progress(len(jobs)) as progress:
        result = generate_load(
            target, jobs, max_concurrency=args.max_concurrency, num_processes=args.processes,
            on_end=progress,
        )  # fmt: skip
    figures = summarize(result, dict(args.goodput))
    print_figures(figures)
    record = {
        "benchmark": "serve",
        **describe_code(_without_key(args.command_line), args.commit),
        "model": model,
        "load": describe_load(args),
        **figures.as_dict(),
    }
    if args.json_requests:
        record["requests"] = describe_requests(result)
    write_json(args.json, record)
    if args.plot is not None and figures.successful:
        from minisgl.benchmark.serving.plot import plot_run

        plot_run(result.records, record["command"], args.plot)
    return 0 if figures.successful else 1


def _target(args: argparse.Namespace) -> "tuple[Target, str]":
    """Return the server, and the model's name on it.

    Raises:
        MinisglError: no name was given, and the server lists none.
    """
    from minisgl.benchmark.serving.load import Target, fetch
    from minisgl.benchmark.serving.processes import run as run_async

    headers = {} if args.api_key is None else {"Authorization": f"Bearer {args.api_key}"}
    target = Target(args.base_url, flags.ENDPOINTS[args.endpoint], headers, args.timeout)
    if args.model is not None:
        return target, args.model
    listed = run_async(fetch(target, "/models"))
    try:
        return target, str(listed["data"][0]["id"])
    except (TypeError, KeyError, IndexError) as error:
        raise MinisglError("the server lists no model; name one with --model") from error


def _jobs(args: argparse.Namespace, model: str) -> "list[Job]":
    from minisgl.benchmark.serving.arrivals import arrival_times
    from minisgl.benchmark.serving.load import Job, request_body

    items = _items(args)
    times = [item.at for item in items if item.at is not None]
    if args.request_rate is not None or not times:
        rate = math.inf if args.request_rate is None else args.request_rate
        times = arrival_times(len(items), rate, args.burstiness, args.seed)
    extra = {**({"ignore_eos": True} if args.ignore_eos else {}), **args.extra_body}
    chat = args.endpoint == "chat"
    if chat and any(not isinstance(item.prompt, str) for item in items):
        raise SettingsError("--endpoint chat takes text; the trace holds prompts of token ids")
    return [
        Job(
            number,
            due,
            request_body(item.prompt, item.output_len, model=model, chat=chat, extra=extra),
        )
        for number, (item, due) in enumerate(zip(items, times, strict=True))
    ]


def _items(args: argparse.Namespace) -> "list[WorkItem]":
    from minisgl.benchmark.serving import datasets

    maker: PromptMaker
    if args.prompt_form == "ids":
        maker = datasets.TokenIds(args.max_token_id or flags.DEFAULT_MAX_TOKEN_ID)
    elif args.tokenizer is not None:
        maker = datasets.Words(datasets.single_token_words(args.tokenizer))
    else:
        maker = datasets.Words()
    input_len, output_len = (
        args.input_len or flags.DEFAULT_INPUT_LEN,
        args.output_len or flags.DEFAULT_OUTPUT_LEN,
    )
    dataset: Dataset
    if args.dataset == "trace":
        dataset = datasets.Trace(
            path=args.trace_file, unit_s=0.001 if args.trace_unit == "ms" else 1.0,
            speedup=args.trace_speedup or 1.0, output_len=output_len,
        )  # fmt: skip
        return dataset.items(args.num_prompts, maker, args.seed)
    if args.dataset == "shared-prefix":
        dataset = datasets.SharedPrefixes(
            num_groups=args.num_groups or flags.DEFAULT_NUM_GROUPS,
            prefix_len=args.prefix_len or flags.DEFAULT_PREFIX_LEN,
            input_len=input_len, output_len=output_len,
        )  # fmt: skip
    else:
        dataset = datasets.RandomPrompts(input_len=input_len, output_len=output_len)
    return dataset.items(args.num_prompts or flags.DEFAULT_NUM_PROMPTS, maker, args.seed)


def _warm_up(args: argparse.Namespace, target: "Target", jobs: "list[Job]") -> None:
    """Send some requests that do not count.

    Raises:
        MinisglError: one of them failed: so would all others.
    """
    from minisgl.benchmark.serving.load import Job
    from minisgl.benchmark.serving.processes import generate_load

    if not jobs:
        return
    now = [Job(job.number, 0.0, job.body) for job in jobs]
    result = generate_load(target, now, max_concurrency=args.max_concurrency, num_processes=1)
    for record in result.records:
        if record.error is not None:
            raise MinisglError(f"a request before the measurement failed: {record.error}")


def _without_key(words: tuple[str, ...]) -> list[str]:
    """Return the command line as it may be written down."""
    shown = list(words)
    for index, word in enumerate(shown):
        if word == "--api-key" and index + 1 < len(shown):
            shown[index + 1] = "***"
        elif word.startswith("--api-key="):
            shown[index] = "--api-key=***"
    return shown
