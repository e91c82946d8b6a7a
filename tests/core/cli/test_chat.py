"""The interactive shell, with a model that is a fake."""

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from minisgl.cli.chat import Shell
from minisgl.errors import RequestError
from minisgl.request import SamplingParams


@dataclass
class Chunk:
    text: str
    finish_reason: str | None = None


@dataclass
class FakeModel:
    """Answers with the last message in capitals, a word at a time."""

    conversations: list[list[dict[str, str]]] = field(default_factory=list)
    num_closed: int = 0
    before_chunk: Callable[[int], None] = lambda number: None

    def stream(self, messages: list[dict[str, str]], params: SamplingParams) -> Iterator[Chunk]:
        self.conversations.append([dict(message) for message in messages])
        return self._chunks(messages[-1]["content"].upper().split(" "))

    def _chunks(self, words: list[str]) -> Iterator[Chunk]:
        try:
            for number, word in enumerate(words):
                self.before_chunk(number)
                yield Chunk(word + " ")
            yield Chunk("", "stop")
        finally:
            self.num_closed += 1


def talk(model: FakeModel, *lines: str | type[BaseException], **options: Any) -> Shell:
    """Type ``lines`` and then Ctrl-D; an exception stands for a key that raises it."""
    typed = iter([*lines, EOFError])

    def read_line() -> str:
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    shell = Shell(model, SamplingParams(), **options)  # type: ignore[arg-type]
    shell.run(read_line)
    return shell


def test_answers_are_printed_and_the_history_grows(capsys) -> None:
    model = FakeModel()
    talk(model, "hello there", "again")
    assert "HELLO THERE" in capsys.readouterr().out
    assert model.conversations[1] == [
        {"role": "user", "content": "hello there"},
        {"role": "assistant", "content": "HELLO THERE "},
        {"role": "user", "content": "again"},
    ]


def test_the_system_message_opens_every_conversation() -> None:
    model = FakeModel()
    talk(model, "a", "/reset", "b", system="be brief")
    opening = {"role": "system", "content": "be brief"}
    assert [conversation[0] for conversation in model.conversations] == [opening, opening]


def test_reset_forgets_the_conversation() -> None:
    model = FakeModel()
    talk(model, "a", "/reset", "b")
    assert model.conversations[1] == [{"role": "user", "content": "b"}]


def test_exit_leaves_before_the_next_line() -> None:
    model = FakeModel()
    talk(model, "/exit", "never asked")
    assert model.conversations == []


def test_help_lists_every_command(capsys) -> None:
    talk(FakeModel(), "/help")
    out = capsys.readouterr().out
    assert all(name in out for name in ("/reset", "/help", "/exit"))


def test_an_unknown_command_is_said_to_be_one_and_is_not_sent(capsys) -> None:
    model = FakeModel()
    talk(model, "/rest", "hello")
    out = capsys.readouterr().out
    assert "unknown command '/rest'" in out
    assert "Nearest: '/reset'" in out
    assert len(model.conversations) == 1


def test_blank_lines_are_not_sent() -> None:
    model = FakeModel()
    talk(model, "", "   ")
    assert model.conversations == []


def test_ctrl_c_at_the_prompt_keeps_the_shell() -> None:
    model = FakeModel()
    talk(model, KeyboardInterrupt, "hello")
    assert len(model.conversations) == 1


def test_ctrl_c_stops_the_answer_and_not_the_shell(capsys) -> None:
    def interrupt(number: int) -> None:
        if number == 1 and len(model.conversations) == 1:
            os.kill(os.getpid(), signal.SIGINT)

    model = FakeModel(before_chunk=interrupt)
    before = signal.getsignal(signal.SIGINT)
    shell = talk(model, "one two three", "next")
    assert "(stopped)" in capsys.readouterr().out
    assert model.num_closed == 2
    assert shell.messages[1] == {"role": "assistant", "content": "ONE "}
    assert shell.messages[3]["content"] == "NEXT "
    assert signal.getsignal(signal.SIGINT) is before


def test_a_refused_request_is_explained_and_leaves_no_trace(capsys) -> None:
    def refuse(number: int) -> None:
        if len(model.conversations) == 1:
            raise RequestError("the conversation is too long")

    model = FakeModel(before_chunk=refuse)
    shell = talk(model, "a", "b")
    assert "error: the conversation is too long" in capsys.readouterr().out
    assert [message["content"] for message in shell.messages] == ["b", "B "]


def test_without_a_model_chat_is_a_usage_error(monkeypatch, capsys) -> None:
    from minisgl.cli import main

    monkeypatch.delenv("MINISGL_MODEL__PATH", raising=False)
    assert main(["chat"]) == 2
    assert main(["serve", "--shell"]) == 2
    assert "type --model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value"), [("--temperature", "-1"), ("--top-p", "2"), ("--max-tokens", "0")]
)
def test_a_sampling_flag_out_of_range_is_a_usage_error(flag, value, capsys) -> None:
    from minisgl.cli import main

    assert main(["chat", "--model", "x", flag, value]) == 2
    assert flag.removeprefix("--").replace("-", "_") in capsys.readouterr().err
