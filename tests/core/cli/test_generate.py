"""``minisgl generate`` with a model that is a fake."""

import io
import json
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, Self

import pytest

from minisgl.cli import main
from minisgl.request import SamplingParams

TOKEN = SimpleNamespace(token_id=5, text="�", data=b"\xc3", logprob=-0.5, rank=1)
LOGPROBS = SimpleNamespace(token=TOKEN, top=[TOKEN])


class FakeLLM:
    """Answers with what it was asked, and remembers how."""

    asked: list[tuple[Any, SamplingParams]]

    def __init__(self, *, settings: Any, progress: bool) -> None:
        FakeLLM.asked = []
        self.model = settings.model.path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def stream(self, prompt: Any, params: SamplingParams) -> Iterator[Any]:
        FakeLLM.asked.append((prompt, params))
        yield SimpleNamespace(text=f"<{prompt}", finish_reason=None)
        yield SimpleNamespace(text=">", finish_reason="stop")

    def generate(self, prompts: list[Any], params: list[SamplingParams], **_: Any) -> list[Any]:
        FakeLLM.asked = list(zip(prompts, params, strict=True))
        return [
            SimpleNamespace(
                text=f"<{prompt}>",
                finish_reason="length",
                num_prompt_tokens=3,
                num_cached_tokens=1,
                token_ids=[1, 2],
                logprobs=None if one.logprobs is None else [LOGPROBS] * 2,
                prompt=prompt if one.return_prompt else None,
                prompt_token_ids=[3, 4] if one.return_prompt else None,
                prompt_logprobs=None if one.prompt_logprobs is None else [None, LOGPROBS],
            )
            for prompt, one in zip(prompts, params, strict=True)
        ]


@pytest.fixture(autouse=True)
def fake_llm(monkeypatch) -> None:
    module = ModuleType("minisgl.llm")
    module.LLM = FakeLLM  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "minisgl.llm", module)


def generate(*arguments: str) -> int:
    return main(["generate", "--model", "m", *arguments])


def test_the_text_of_one_prompt_is_printed_as_it_is(capsys) -> None:
    assert generate("--prompt", "hi") == 0
    assert capsys.readouterr().out == "<hi>\n"


def test_several_prompts_are_json_lines_in_order(capsys) -> None:
    assert generate("--prompt", "é", "--prompt", "b") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == {
        "index": 0,
        "prompt": "é",
        "text": "<é>",
        "finish_reason": "length",
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "cached_tokens": 1,
    }
    assert lines[1]["prompt"] == "b"


def test_a_single_prompt_is_a_json_line_when_asked_for(capsys) -> None:
    assert generate("--prompt", "a", "--json") == 0
    assert json.loads(capsys.readouterr().out)["text"] == "<a>"


def test_sampling_flags_reach_the_model() -> None:
    flags = "--temperature 0 --top-p .5 --top-k 4 --min-p .1 --max-tokens 9 --min-tokens 2"
    more = "--sampling-seed 7 --stop x --stop y --stop-token-id 5 --ignore-eos --include-stop"
    more += " --presence-penalty .5 --frequency-penalty -1 --repetition-penalty 1.2"
    more += " --bad-word x --bad-word y"
    assert generate("--prompt", "a", *flags.split(), *more.split(), "--show-special-tokens") == 0
    assert FakeLLM.asked[0][1] == SamplingParams(
        temperature=0,
        top_p=0.5,
        top_k=4,
        min_p=0.1,
        max_tokens=9,
        min_tokens=2,
        seed=7,
        stop=("x", "y"),
        stop_token_ids=(5,),
        ignore_eos=True,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        presence_penalty=0.5,
        frequency_penalty=-1,
        repetition_penalty=1.2,
        bad_words=("x", "y"),
    )


def test_chat_sends_the_prompt_as_a_message() -> None:
    assert generate("--prompt", "a", "--chat") == 0
    assert FakeLLM.asked[0][0] == [{"role": "user", "content": "a"}]


def test_a_file_holds_prompts_messages_and_parameters(tmp_path, capsys) -> None:
    file = tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": "x"}]
    file.write_text(
        json.dumps({"prompt": "a", "temperature": 0.5, "stop": ["z"]})
        + "\n\n"
        + json.dumps({"messages": messages})
        + "\n"
        + json.dumps({"prompt": [1, 2]})
    )
    assert generate("--prompts", str(file), "--max-tokens", "3") == 0
    prompts = [prompt for prompt, _ in FakeLLM.asked]
    assert prompts == ["a", messages, [1, 2]]
    first, second, _ = [params for _, params in FakeLLM.asked]
    assert (first.temperature, first.stop, first.max_tokens) == (0.5, ("z",), 3)
    assert (second.temperature, second.stop) == (1.0, ())
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["index"] for line in lines] == [0, 1, 2]
    assert lines[1]["messages"] == messages


def test_a_line_that_asks_for_logprobs_and_the_prompt_gets_them(tmp_path, capsys) -> None:
    file = tmp_path / "prompts.jsonl"
    asked = {"logprobs": 1, "prompt_logprobs": 1, "return_prompt": True, "logit_bias": {"7": -3}}
    file.write_text(json.dumps({"prompt": "a", **asked}) + "\n" + json.dumps({"prompt": "b"}))
    assert generate("--prompts", str(file)) == 0
    assert FakeLLM.asked[0][1].logit_bias == {7: -3}
    first, second = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    token = {"token_id": 5, "text": "�", "bytes": [0xC3], "logprob": -0.5, "rank": 1}
    assert first["logprobs"] == [{**token, "top": [token]}] * 2
    assert first["prompt_logprobs"] == [None, {**token, "top": [token]}]
    assert (first["prompt_text"], first["prompt_token_ids"]) == ("a", [3, 4])
    assert set(first) - set(second) == {
        "logprobs", "prompt_logprobs", "prompt_text", "prompt_token_ids"
    }  # fmt: skip


def test_a_file_of_one_prompt_is_still_json_lines(tmp_path, capsys) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}')
    assert generate("--prompts", str(file)) == 0
    assert json.loads(capsys.readouterr().out)["text"] == "<a>"


def test_standard_input_is_a_dash(monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO('{"prompt": "a"}\n'))
    assert generate("--prompts", "-") == 0
    assert FakeLLM.asked[0][0] == "a"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 2"),
        ("[]", "must be a JSON object"),
        ("{}", "'prompt' or 'messages'"),
        ('{"prompt": "a", "messages": []}', "not both"),
        ('{"prompt": ""}', "must hold text"),
        ('{"messages": "x"}', "must hold a list of objects"),
        ('{"messages": [1, 2]}', "must hold a list of objects"),
        ('{"prompt": "a", "temprature": 1}', "Nearest: 'temperature'"),
        ('{"prompt": "a", "temperature": -1}', "temperature"),
        ('{"prompt": "a", "logit_bias": {"x": 1}}', "logit_bias"),
    ],
)
def test_a_bad_line_is_named_with_its_number(tmp_path, capsys, line, complaint) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line)
    assert generate("--prompts", str(file)) == 2
    error = capsys.readouterr().err
    assert "line 2" in error
    assert complaint in error


def test_a_file_that_does_not_exist_is_named(tmp_path, capsys) -> None:
    assert generate("--prompts", str(tmp_path / "none")) == 2
    assert str(tmp_path / "none") in capsys.readouterr().err


def test_no_prompt_and_no_model_are_usage_errors(capsys) -> None:
    assert generate() == 2
    assert "--prompt TEXT" in capsys.readouterr().err
    assert main(["generate", "--prompt", "a"]) == 2
    assert "--model" in capsys.readouterr().err
