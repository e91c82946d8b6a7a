"""The flags of ``minisgl bench serve``, and what they may not say together."""

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from minisgl.cli.bench.numbers import number, token_range
from minisgl.cli.flags import add_settings_arguments
from minisgl.errors import SettingsError, nearest

ENDPOINTS: Final = {"completions": "/completions", "chat": "/chat/completions"}
"""Paths below the API's own."""

DEFAULT_NUM_PROMPTS: Final = 1000
DEFAULT_INPUT_LEN: Final = (1024, 1024)
DEFAULT_OUTPUT_LEN: Final = (128, 128)
DEFAULT_NUM_GROUPS: Final = 16
DEFAULT_PREFIX_LEN: Final = 1024
DEFAULT_MAX_TOKEN_ID: Final = 10000

_LIMITS: Final = {"ttft": "ttft", "tpot": "tpot", "e2e": "e2e", "e2el": "e2e"}
_BELONGS: Final = {
    "num_groups": "shared-prefix",
    "prefix_len": "shared-prefix",
    "trace_file": "trace",
    "trace_unit": "trace",
    "trace_speedup": "trace",
}
"""Flags that only one data set looks at."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    _add_server(parser)
    _add_data(parser)
    _add_load(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    output.add_argument(
        "--json-requests", action="store_true", help="into --json, also each request's own figures"
    )
    output.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw the run; needs minisgl-core[bench]"
    )
    output.add_argument(
        "--commit", metavar="HASH", help="commit to note, where the code runs outside its checkout"
    )
    add_settings_arguments(parser, only=("log.level",))


def _add_server(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--base-url", default="http://127.0.0.1:8000", metavar="URL",
        help="address, with or without /v1 (default: http://127.0.0.1:8000)",
    )  # fmt: skip
    group.add_argument(
        "--endpoint", choices=tuple(ENDPOINTS), default="completions", help="(default: completions)"
    )
    group.add_argument(
        "--model", metavar="NAME", help="name to ask for (default: the first of /v1/models)"
    )
    group.add_argument("--api-key", metavar="KEY", help="sent as Authorization: Bearer KEY")
    group.add_argument(
        "--ignore-eos", action="store_true",
        help="send ignore_eos, so that every answer has the length that was asked for",
    )  # fmt: skip
    group.add_argument(
        "--extra-body", type=_object, default={}, metavar="JSON",
        help='fields for every request, such as \'{"temperature": 0}\'; null takes one out',
    )  # fmt: skip
    group.add_argument(
        "--timeout", type=_positive, default=600.0, metavar="SECONDS",
        help="that one request may take (default: 600)",
    )  # fmt: skip


def _add_data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument(
        "--dataset", choices=("random", "shared-prefix", "trace"),
        help="(default: random, or trace with --trace-file)",
    )  # fmt: skip
    group.add_argument(
        "--num-prompts", type=number, metavar="N",
        help=f"requests (default: {DEFAULT_NUM_PROMPTS}, or all of a trace)",
    )  # fmt: skip
    group.add_argument(
        "--input-len", type=token_range, metavar="MIN:MAX",
        help=f"tokens of a prompt, behind its prefix if any (default: {DEFAULT_INPUT_LEN[0]})",
    )  # fmt: skip
    group.add_argument(
        "--output-len", type=token_range, metavar="MIN:MAX",
        help=f"most tokens of an answer (default: {DEFAULT_OUTPUT_LEN[0]})",
    )  # fmt: skip
    group.add_argument(
        "--prompt-form", choices=("ids", "text"),
        help="token ids, which have exact lengths and which only the completions of minisgl, vLLM "
        "and the like take, or text (default: ids; text for chat)",
    )  # fmt: skip
    group.add_argument(
        "--max-token-id",
        type=number,
        metavar="N",
        help=f"of prompts of ids (default: {DEFAULT_MAX_TOKEN_ID})",
    )
    group.add_argument(
        "--tokenizer", metavar="MODEL",
        help="model whose tokenizer makes texts of exact length; without it a text has as many "
        "common words as it should have tokens",
    )  # fmt: skip
    group.add_argument(
        "--num-groups", type=number, metavar="N",
        help=f"shared-prefix: different prefixes (default: {DEFAULT_NUM_GROUPS})",
    )  # fmt: skip
    group.add_argument(
        "--prefix-len", type=number, metavar="N",
        help=f"shared-prefix: tokens of each (default: {DEFAULT_PREFIX_LEN})",
    )  # fmt: skip
    group.add_argument(
        "--trace-file", type=Path, metavar="FILE",
        help="JSON lines: timestamp, prompt or input_length (and hash_ids), output_length",
    )  # fmt: skip
    group.add_argument("--trace-unit", choices=("s", "ms"), help="of its timestamps (default: s)")
    group.add_argument(
        "--trace-speedup", type=_positive, metavar="X", help="how much faster to send it"
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of all draws (default: 0)")


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument(
        "--request-rate", type=_rate, metavar="R",
        help="requests a second, at random intervals (default: inf, or a trace's timestamps)",
    )  # fmt: skip
    group.add_argument(
        "--burstiness", type=_positive, default=1.0, metavar="B",
        help="shape of the gamma distribution of the intervals: 1 is a Poisson process, less comes "
        "in bursts, more is more even (default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--max-concurrency", type=number, metavar="N", help="requests at once (default: no limit)"
    )
    group.add_argument(
        "--warmup", type=_count, default=1, metavar="N",
        help="requests beforehand that do not count (default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--processes", type=number, default=1, metavar="N",
        help="client processes, if one cannot keep up (default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--goodput", type=_limit, nargs="+", default=[], metavar="NAME:MS",
        help="also count requests within limits, such as ttft:200 tpot:50 e2e:5000",
    )  # fmt: skip


def check(args: argparse.Namespace) -> None:
    """Settle defaults, and refuse flags that the chosen data set would not look at.

    Raises:
        SettingsError: flags contradict one another.
    """
    if args.dataset is None:
        args.dataset = "random" if args.trace_file is None else "trace"
    for name, dataset in _BELONGS.items():
        if getattr(args, name) is not None and args.dataset != dataset:
            flag = name.replace("_", "-")
            raise SettingsError(f"--{flag} belongs to --dataset {dataset}, got {args.dataset}")
    if args.dataset == "trace" and args.trace_file is None:
        raise SettingsError("--dataset trace needs --trace-file FILE")
    if args.dataset == "trace" and args.input_len is not None:
        raise SettingsError("--input-len does not go with a trace, which has lengths of its own")
    _check_prompt_form(args)
    if args.json_requests and args.json is None:
        raise SettingsError("--json-requests needs --json FILE")
    if args.max_concurrency is not None and args.max_concurrency < args.processes:
        raise SettingsError(
            f"--processes {args.processes}: each needs one of --max-concurrency "
            f"{args.max_concurrency} requests"
        )
    if args.seed < 0:
        raise SettingsError(f"--seed must be at least 0, got {args.seed}")


def _check_prompt_form(args: argparse.Namespace) -> None:
    if args.endpoint == "chat" and args.prompt_form == "ids":
        raise SettingsError("--endpoint chat takes text; leave out --prompt-form ids")
    if args.prompt_form is None:
        args.prompt_form = "text" if args.endpoint == "chat" or args.tokenizer else "ids"
    if args.prompt_form == "ids" and args.tokenizer is not None:
        raise SettingsError("--tokenizer belongs to --prompt-form text, got ids")
    if args.prompt_form == "text" and args.max_token_id is not None:
        raise SettingsError("--max-token-id belongs to --prompt-form ids, got text")


def _object(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise SettingsError(f"--extra-body {text!r} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise SettingsError(f"--extra-body must be a JSON object, got {text!r}")
    return value


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _positive(text: str) -> float:
    value = _float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"a number greater than 0 is needed, got {text!r}")
    return value


def _rate(text: str) -> float:
    value = _float(text)
    if not value > 0:
        raise SettingsError(f"--request-rate must be greater than 0, or inf, got {text!r}")
    return value


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"a number of at least 0 is needed, got {text!r}")
    return int(text)


def _limit(text: str) -> tuple[str, float]:
    name, _, value = text.partition(":")
    if name not in _LIMITS:
        raise SettingsError(
            f"--goodput knows {', '.join(_LIMITS)}, got {name!r}.{nearest(name, _LIMITS)}"
        )
    return _LIMITS[name], _positive(value)
