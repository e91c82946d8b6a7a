"""The process in which grammars are compiled: each in a fork of its own, with limits.

Whatever a client sends, it can make XGrammar run for hours, take all memory or crash. So the
process that serves never compiles: a helper, made ready once, forks for every grammar, and kills
the fork that takes too long. What has been compiled comes back as data.
"""

import contextlib
import os
import pickle
import resource
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, Final, Literal, Never

import msgspec
import numpy as np

from minisgl.processes import die_with_parent, leave_signals_to_parent
from minisgl.request import GrammarKind, GrammarSpec
from minisgl.structured.code_points import escapes
from minisgl.structured.interface import GrammarContext, mask_words
from minisgl.structured.json_schema import prepare
from minisgl.structured.pattern import translate
from minisgl.structured.printed_grammar import UnknownFormError, rewritten, tells_names_apart
from minisgl.structured.utf8 import INVALID

if TYPE_CHECKING:
    import xgrammar

MAX_COMPILED_BYTES: Final = 64 * 2**20
"""Longest compiled grammar, as data."""

_MEMORY: Final = 4 * 2**30
"""Bytes that one compilation may take beside what the helper has."""


_TRIED_TOKENS: Final = 200
_TRIAL_S: Final = 0.5
"""What a grammar must be able to follow in so many seconds of CPU time."""


class Job(msgspec.Struct, frozen=True):
    """One grammar to compile."""

    number: int
    spec: GrammarSpec


class Outcome(msgspec.Struct, frozen=True):
    """What became of a job.

    Attributes:
        number: of the job; -1 is the start of the helper.
        status: ``done``; ``refused`` (the grammar is at fault); ``late``; ``crashed``; ``failed``.
        data: the compiled grammar, or at the start the vocabulary.
        message: what is wrong.
    """

    number: int
    status: Literal["done", "refused", "late", "crashed", "failed"]
    data: bytes = b""
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerArguments:
    """What the helper gets, pickled, with its first message.

    Attributes:
        context: what the engine is made for.
        max_whitespace: see ``XGrammarSettings``.
    """

    context: GrammarContext
    max_whitespace: int | None


@dataclass(slots=True)
class _Fork:
    """A compilation that runs."""

    number: int
    pid: int
    deadline: float


def run_worker(descriptor: int, parent_pid: int) -> Never:
    """Compile for the process at the other end of a socket until that closes it."""
    die_with_parent(parent_pid, None, by_kernel=False)
    leave_signals_to_parent()
    end = Connection(socket.socket(fileno=descriptor).detach())
    with contextlib.suppress(EOFError, OSError):
        _serve(end)
    os._exit(0)


def _serve(end: Connection) -> None:
    arguments: WorkerArguments = pickle.loads(end.recv_bytes())  # noqa: S301  (from our parent)
    escapes()  # which every fork needs
    try:
        info = tokenizer_info(arguments.context)
    except Exception as error:  # noqa: BLE001  (our parent reports it)
        end.send_bytes(_encode(Outcome(-1, "failed", message=f"{type(error).__name__}: {error}")))
        return
    end.send_bytes(_encode(Outcome(-1, "done", info.serialize_json().encode())))
    forks: dict[Connection, _Fork] = {}
    while True:
        deadlines = [fork.deadline for fork in forks.values()]
        timeout = max(min(deadlines) - time.monotonic(), 0) if deadlines else None
        for ready in wait([end, *forks], timeout):
            if ready is end:
                job = msgspec.msgpack.decode(end.recv_bytes(), type=Job)
                pipe, pid = _fork(partial(compile_spec, job.spec, info, arguments))
                deadline = time.monotonic() + arguments.context.compile_timeout_s
                forks[pipe] = _Fork(job.number, pid, deadline)
            elif isinstance(ready, Connection):
                fork = forks.pop(ready)
                end.send_bytes(_encode(_result(ready, fork)))
        now = time.monotonic()
        for pipe, fork in list(forks.items()):
            if now >= fork.deadline:
                del forks[pipe]
                _end(pipe, fork)
                end.send_bytes(_encode(Outcome(fork.number, "late")))


def tokenizer_info(context: GrammarContext) -> "xgrammar.TokenizerInfo":
    """Return the vocabulary as XGrammar wants it: special tokens, and invalid ones, are no text."""
    import xgrammar

    if not context.eos_token_ids:
        raise ValueError("the model has no end-of-sequence token, so no text could end")
    tokenizer: Any = context.tokenizer()
    eos = list(context.eos_token_ids)
    found = xgrammar.TokenizerInfo.from_huggingface(
        tokenizer, vocab_size=context.vocab_size, stop_token_ids=eos
    )
    special = set(tokenizer.all_special_ids)
    special |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    vocabulary = [
        b"" if token_id in special or INVALID.search(token) else token
        for token_id, token in enumerate(found.decoded_vocab)
    ]
    return xgrammar.TokenizerInfo(
        vocabulary,
        xgrammar.VocabType.RAW,  # decoded already
        vocab_size=context.vocab_size,
        stop_token_ids=eos,
        add_prefix_space=found.add_prefix_space,
    )


def compile_spec(
    spec: GrammarSpec, info: "xgrammar.TokenizerInfo", arguments: WorkerArguments
) -> bytes:
    """Compile one grammar and try it; returns it as data.

    Raises:
        ValueError: the grammar is at fault.
    """
    import xgrammar

    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    try:
        compiled = _COMPILERS[spec.kind](compiler, spec.value, arguments.max_whitespace)
    except RuntimeError as error:
        raise ValueError(_without_place(str(error))) from None
    data: bytes = compiled.serialize_json().encode()
    if len(data) > MAX_COMPILED_BYTES:
        raise ValueError(f"it is too large: {len(data)} bytes compiled, {MAX_COMPILED_BYTES} fit")
    # As the process that serves will do it: what fails there must fail here before.
    again = xgrammar.CompiledGrammar.deserialize_json(data.decode(), info)
    _try_out(xgrammar.GrammarMatcher(again), info.vocab_size, arguments.context.eos_token_ids)
    return data


def _try_out(matcher: "xgrammar.GrammarMatcher", vocab_size: int, eos: Sequence[int]) -> None:
    """Follow a random text, to see how fast that is: ambiguous grammars get slower and slower.

    Raises:
        ValueError: it is too slow for a scheduler, or no text matches.
    """
    random, spent = np.random.default_rng(0), 0.0
    mask = np.zeros((1, mask_words(vocab_size)), dtype=np.int32)
    for place in range(_TRIED_TOKENS):
        began = time.thread_time()
        matcher.fill_next_token_bitmask(mask)
        spent += time.thread_time() - began
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size]
        if place == 0 and not bits.any():
            raise ValueError("no text matches it")
        bits[list(eos)] = 0
        may = bits.nonzero()[0]
        if not len(may):
            return
        token = int(may[random.integers(len(may))])
        began = time.thread_time()
        matcher.accept_token(token)
        spent += time.thread_time() - began
        if spent > _TRIAL_S:
            raise ValueError(
                f"it takes over {_TRIAL_S:g} s to follow {place + 1} tokens; make it less ambiguous"
            )


_WITH_OTHER_NAMES: Final = (
    '{"type": "object", "properties": {"a": true}, "additionalProperties": true}'
)

_Compiler = Callable[["xgrammar.GrammarCompiler", str, int | None], "xgrammar.CompiledGrammar"]


def _json_schema(
    compiler: "xgrammar.GrammarCompiler", value: str, whitespace: int | None
) -> "xgrammar.CompiledGrammar":
    import xgrammar

    found = prepare(value)
    if not found.rules and not found.has_other_names:
        return compiler.compile_json_schema(found.text, max_whitespace_cnt=whitespace)
    printed = str(xgrammar.Grammar.from_json_schema(found.text, max_whitespace_cnt=whitespace))
    if found.has_other_names and not tells_names_apart(printed):  # perhaps no rule leads there
        known = str(xgrammar.Grammar.from_json_schema(_WITH_OTHER_NAMES))
        if not tells_names_apart(known):
            raise UnknownFormError
    return compiler.compile_grammar(rewritten(printed, found.rules))


def _json_object(
    compiler: "xgrammar.GrammarCompiler",
    value: str,  # noqa: ARG001
    whitespace: int | None,
) -> "xgrammar.CompiledGrammar":
    return compiler.compile_json_schema('{"type": "object"}', max_whitespace_cnt=whitespace)


def _regex(
    compiler: "xgrammar.GrammarCompiler",
    value: str,
    whitespace: int | None,  # noqa: ARG001
) -> "xgrammar.CompiledGrammar":
    return compiler.compile_regex(translate(value, in_string=False))


def _choice(
    compiler: "xgrammar.GrammarCompiler",
    value: str,
    whitespace: int | None,  # noqa: ARG001
) -> "xgrammar.CompiledGrammar":
    try:
        choices = msgspec.json.decode(value, type=list[str])
    except msgspec.MsgspecError as error:
        raise ValueError(f"it must be a JSON list of strings: {error}") from None
    if not choices or not all(choices):
        raise ValueError("it must be a list of at least one string, none of them empty")
    return compiler.compile_grammar("root ::= " + " | ".join(map(_literal, choices)))


def _grammar(
    compiler: "xgrammar.GrammarCompiler",
    value: str,
    whitespace: int | None,  # noqa: ARG001
) -> "xgrammar.CompiledGrammar":
    return compiler.compile_grammar(value)


_COMPILERS: Final[dict[GrammarKind, _Compiler]] = {
    "json_object": _json_object,
    "json_schema": _json_schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}


def _literal(text: str) -> str:
    """Return a string of EBNF: every character that could mean something is a number."""
    plain = (c if c.isascii() and c.isalnum() else f"\\U{ord(c):08x}" for c in text)
    return f'"{"".join(plain)}"'


def _without_place(message: str) -> str:
    """Drop time and source line from the front of XGrammar's messages."""
    _, found, rest = message.strip().partition(".cc:")
    return rest.partition(": ")[2] if found else message


def _fork(work: Callable[[], bytes]) -> tuple[Connection, int]:
    """Run ``work`` in a fork; returns the pipe that brings its outcome, and its pid."""
    reader, writer = os.pipe()
    parent, pid = os.getpid(), os.fork()
    if pid:
        os.close(writer)
        return Connection(reader, writable=False), pid
    try:
        die_with_parent(parent, None)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        _limit_memory()
        try:
            outcome = Outcome(0, "done", work())
        except ValueError as error:
            outcome = Outcome(0, "refused", message=str(error))
        except RecursionError:
            outcome = Outcome(0, "refused", message="it is nested too deeply")
        except MemoryError:
            outcome = Outcome(0, "refused", message="it takes too much memory")
        except Exception as error:  # noqa: BLE001  (our parent's parent reports it)
            outcome = Outcome(0, "failed", message=f"{type(error).__name__}: {error}")
        Connection(writer, readable=False).send_bytes(_encode(outcome))
    finally:
        os._exit(0)


def _limit_memory() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + _MEMORY, now + _MEMORY))


def _result(pipe: Connection, fork: _Fork) -> Outcome:
    """Return what a fork has to say, or that it has crashed."""
    try:
        outcome = msgspec.msgpack.decode(pipe.recv_bytes(), type=Outcome)
        outcome = msgspec.structs.replace(outcome, number=fork.number)
    except (EOFError, OSError):
        outcome = Outcome(fork.number, "crashed")
    _end(pipe, fork)
    return outcome


def _end(pipe: Connection, fork: _Fork) -> None:
    pipe.close()
    with contextlib.suppress(ProcessLookupError):
        os.kill(fork.pid, signal.SIGKILL)
    os.waitpid(fork.pid, 0)


def _encode(message: Outcome) -> bytes:
    return msgspec.msgpack.encode(message)
