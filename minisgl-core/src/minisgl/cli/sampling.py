"""The sampling parameters as flags, for the commands that generate."""

import argparse
from typing import Any

from minisgl.errors import RequestError, SettingsError
from minisgl.request import SamplingParams


def add_sampling_arguments(parser: argparse.ArgumentParser, *, max_tokens: int | None) -> None:
    """Add one flag for each sampling parameter.

    Args:
        parser: of a command.
        max_tokens: the command's own default; ``None`` means all the room that is left.
    """
    group = parser.add_argument_group("sampling")
    default = "all the room that is left" if max_tokens is None else str(max_tokens)
    group.add_argument(
        "--max-tokens",
        type=int,
        default=max_tokens,
        metavar="N",
        help=f"most tokens of an answer [default {default}]",
    )
    for name, kind, text in (
        ("temperature", float, "0 takes the likeliest token; higher is more varied"),
        ("top-p", float, "sample from the likeliest tokens that reach this probability"),
        ("top-k", int, "sample from this many of the likeliest tokens; -1 from all"),
        ("min-p", float, "leave out tokens less likely than this fraction of the likeliest"),
        ("min-tokens", int, "fewest tokens of an answer"),
        ("presence-penalty", float, "taken off the logits of tokens that the answer has"),
        ("frequency-penalty", float, "the same for each time that the answer has them"),
        ("repetition-penalty", float, "divides the logits of tokens that prompt or answer have"),
    ):
        field = name.replace("-", "_")
        value = getattr(SamplingParams(), field)
        group.add_argument(
            f"--{name}",
            type=kind,
            default=value,
            metavar="N" if kind is int else "X",
            help=f"{text} [default {value}]",
        )
    group.add_argument(
        "--sampling-seed",
        type=int,
        metavar="N",
        help="makes each answer repeat, whatever else runs; --seed is the engine's",
    )
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before it; repeatable"
    )
    group.add_argument(
        "--stop-token-id",
        action="append",
        default=[],
        type=int,
        metavar="ID",
        help="end at this token; repeatable",
    )
    group.add_argument(
        "--bad-word",
        action="append",
        default=[],
        metavar="TEXT",
        help="must not appear; repeatable",
    )
    group.add_argument(
        "--include-stop", action="store_true", help="keep the stop string in the text"
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="do not end at the model's end-of-text token"
    )
    group.add_argument(
        "--show-special-tokens", action="store_true", help="keep special tokens in the text"
    )


def sampling_params(args: argparse.Namespace, **overrides: Any) -> SamplingParams:
    """Return the parameters that the flags say, except for ``overrides``.

    Raises:
        SettingsError: one is outside its range.
    """
    fields: dict[str, Any] = {
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "min_p": args.min_p,
        "seed": args.sampling_seed,
        "stop": tuple(args.stop),
        "stop_token_ids": tuple(args.stop_token_id),
        "include_stop_str_in_output": args.include_stop,
        "min_tokens": args.min_tokens,
        "ignore_eos": args.ignore_eos,
        "presence_penalty": args.presence_penalty,
        "frequency_penalty": args.frequency_penalty,
        "repetition_penalty": args.repetition_penalty,
        "bad_words": tuple(args.bad_word),
        "skip_special_tokens": not args.show_special_tokens,
    }
    try:
        return SamplingParams(**(fields | overrides))
    except RequestError as error:
        raise SettingsError(f"{error}.") from error
