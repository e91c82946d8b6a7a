"""``LLM`` with ``skip_tokenizer_init``: token ids in and out, on a folder without a tokenizer."""

import asyncio
import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minisgl import LLM, AsyncLLM, SamplingParams
from minisgl.cli import main
from minisgl.errors import ModelLoadError, RequestError, SettingsError
from minisgl.message import Failure, StreamStart, TokenBatch
from minisgl.request import FinishReason
from minisgl.tokenizer.token_ids import TokenIdStreams
from support.patience import PATIENCE
from support.tiny_models import build_tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
PROMPTS = [[5, 6, 7, 8, 9, 10], [11], [12, 13, 14]]
OPTIONS: dict[str, Any] = {"progress": False, "page_size": 4, "num_pages": 100}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights and configuration, and no tokenizer."""
    folder = tmp_path_factory.mktemp("bare") / "llama"
    build_tiny_model("LlamaForCausalLM").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bare(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), skip_tokenizer_init=True, **OPTIONS) as opened:
        yield opened


def test_the_tokens_are_those_of_an_llm_with_a_tokenizer(bare: LLM, tiny_path: Path) -> None:
    with LLM(str(tiny_path), **OPTIONS) as llm:
        expected = llm.generate(PROMPTS, GREEDY, progress=False)
    found = bare.generate(PROMPTS, GREEDY, progress=False)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert [one.num_prompt_tokens for one in found] == [6, 1, 3]
    assert {one.text for one in found} == {""}
    assert {one.finish_reason for one in found} == {"length"}


def test_without_the_setting_a_tokenizer_is_needed(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="holds no tokenizer"):
        LLM(str(folder), **OPTIONS)


def test_a_stream_yields_each_token_as_it_comes(bare: LLM) -> None:
    whole = bare.generate(PROMPTS[0], GREEDY, progress=False)[0]
    chunks = list(bare.stream(PROMPTS[0], GREEDY))
    assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
    assert [len(chunk.token_ids) for chunk in chunks] == [1] * 9
    assert [chunk.finish_reason for chunk in chunks] == [None] * 8 + ["length"]
    assert chunks[-1].num_prompt_tokens == 6


def test_an_async_llm_does_the_same(folder: Path, bare: LLM) -> None:
    async def collect() -> list[int]:
        async with AsyncLLM(str(folder), skip_tokenizer_init=True, **OPTIONS) as llm:
            return [t async for chunk in llm.generate(PROMPTS[1], GREEDY) for t in chunk.token_ids]

    assert asyncio.run(collect()) == bare.generate(PROMPTS[1], GREEDY, progress=False)[0].token_ids


@pytest.mark.parametrize("prompt", ["hello", "", [{"role": "user", "content": "hello"}]])
def test_text_is_refused(bare: LLM, prompt: object) -> None:
    with pytest.raises(RequestError, match=r"must be a list of token ids.*skip_tokenizer_init"):
        bare.generate(prompt, GREEDY, progress=False)  # type: ignore[arg-type]


def test_stop_strings_are_refused(bare: LLM) -> None:
    with pytest.raises(RequestError, match="stop strings cannot be found") as caught:
        bare.generate(PROMPTS, SamplingParams(stop=("x",)), progress=False)
    assert caught.value.param == "stop"


def test_ids_are_checked(bare: LLM) -> None:
    with pytest.raises(RequestError, match="token ids from 0 to 262, got 263"):
        bare.generate([[1, 263]], GREEDY, progress=False)


def test_there_is_no_tokenizer_to_ask_for(bare: LLM) -> None:
    with pytest.raises(SettingsError, match="leave that setting out"):
        _ = bare.tokenizer


def test_stop_tokens_still_stop(bare: LLM) -> None:
    whole = bare.generate(PROMPTS[0], GREEDY, progress=False)[0].token_ids
    stop = next(token for token in whole[2:] if token not in whole[:2])
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, stop_token_ids=(stop,))
    result = bare.generate(PROMPTS[0], params, progress=False)[0]
    assert result.token_ids == whole[: whole.index(stop) + 1]
    assert result.finish_reason == "stop"


def test_the_server_refuses_to_start(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(folder), "--skip-tokenizer-init", "--port", "0"]) == 2
    assert "the HTTP API takes and returns text" in capsys.readouterr().err


def test_generate_takes_ids_on_the_command_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": PROMPTS[0]}))
    line = ["generate", "--model", str(folder), "--skip-tokenizer-init", "--prompts", str(prompts)]
    assert main([*line, "--max-tokens", "3", "--ignore-eos", "--log-level", "error"]) == 0
    assert json.loads(capsys.readouterr().out)["completion_tokens"] == 3


def test_failures_and_early_ends_get_one_terminal_event() -> None:
    streams = TokenIdStreams()
    start = StreamStart(uid=1, num_prompt_tokens=4, params=GREEDY)
    replies, _ = streams.process(TokenBatch([start], b"", b"", [], [], [], []))
    assert replies == []
    replies, stops = streams.process(
        TokenBatch(
            started=[], uids=b"", token_ids=b"", finished_uids=[1, 2],
            finish_reasons=[FinishReason.ERROR, FinishReason.ABORT],
            num_cached_tokens=[0, 0], failures=[Failure("broken", 500), None],
        )
    )  # fmt: skip
    assert stops == []
    assert (replies[0].message, replies[0].status) == ("broken", 500)  # type: ignore[union-attr]
    assert replies[1].finish_reason == "abort"  # type: ignore[union-attr]
    assert streams.num_open == 0


def test_its_start_imports_neither_text_generation_nor_a_compiler(tmp_path: Path) -> None:
    """They are a thousand modules, which take seconds; a configuration's docstring asks for them.

    Newer versions of transformers import less there, so the module that leads to them is named
    too. Llama's configuration imports some of them by itself.
    """
    config = build_tiny_model("Qwen3ForCausalLM").config
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(tmp_path)
    code = f"""
        import sys
        from minisgl import LLM
        options = {{"skip_tokenizer_init": True, "load_format": "dummy", "num_pages": 100}}
        with LLM({str(tmp_path)!r}, progress=False, **options) as llm:
            assert llm.generate([5, 6, 7], progress=False)
        heavy = ("transformers.models.auto.auto_factory", "transformers.generation.utils",
                 "transformers.modeling_utils", "torch._dynamo", "torch._inductor",
                 "torch.distributed.tensor", "sympy", "sklearn", "scipy", "pandas")
        print([name for name in heavy if name in sys.modules])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True, text=True, check=False, timeout=PATIENCE,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


def test_logprobs_have_ids_and_numbers_and_bad_words_are_refused(bare: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=1)
    (result,) = bare.generate(PROMPTS[0], params, progress=False)
    assert result.logprobs is not None
    assert [one.token.token_id for one in result.logprobs] == result.token_ids
    assert [one.top[0].token_id for one in result.logprobs] == result.token_ids, "greedy"
    assert {(one.token.text, one.token.data) for one in result.logprobs} == {("", b"")}
    with pytest.raises(RequestError, match="bad_words") as caught:
        bare.generate(PROMPTS[0], SamplingParams(bad_words=("x",)), progress=False)
    assert caught.value.param == "bad_words"
