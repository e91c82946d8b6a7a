"""``LLM``: forms of prompts, results, streams, errors, closing."""

import dataclasses
import gc
import itertools
import signal
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minisgl import LLM, SamplingParams
from minisgl.errors import (
    ModelLoadError,
    RequestError,
    SettingsError,
    UnknownBackendError,
    UnsupportedBackendError,
)
from minisgl.llm import GenerationProgress
from minisgl.plugins import Capabilities, builtin, hookimpl
from support.patience import PATIENCE

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def all_pages_are_free(llm: LLM) -> bool:
    scheduler = llm._session._scheduler
    scheduler.check()
    held = scheduler.cache.prefix_cache.num_pages
    return (
        scheduler.num_running == 0
        and scheduler.cache.num_free + held == llm.info.num_pages
        and scheduler.cache.prefix_cache.num_evictable_pages == held
    )


def test_one_prompt_of_each_form_and_many_of_mixed_forms(llm: LLM) -> None:
    chat = [{"role": "user", "content": "hello"}]
    ids = llm.tokenizer("hello")["input_ids"]
    single = [llm.generate(prompt, GREEDY, progress=False) for prompt in ("hello", ids, chat)]
    assert [len(results) for results in single] == [1, 1, 1]
    assert single[0][0].token_ids == single[1][0].token_ids
    many = llm.generate(["hello", ids, chat], GREEDY, progress=False)
    assert [one.token_ids for one in many] == [one.token_ids for [one] in single]
    template = llm.tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=False
    )
    assert many[2].num_prompt_tokens == len(template)


def test_results_are_in_the_order_of_prompts_whatever_their_length(llm: LLM) -> None:
    prompts = ["a" * n for n in (40, 1, 25, 3)]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (2, 9, 1, 5)]
    results = llm.generate(prompts, params, progress=False)
    assert [one.num_prompt_tokens for one in results] == [40, 1, 25, 3]
    assert [len(one.token_ids) for one in results] == [2, 9, 1, 5]
    assert {one.finish_reason for one in results} == {"length"}


def test_times_are_those_of_each_request(llm: LLM) -> None:
    """Catches: a time since the engine's start, or the same one for all."""
    long, short = (SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (30, 2))
    began = time.perf_counter()
    # The long one comes first and ends last, however long anything takes.
    first, second = llm.generate(["hello", "hello you"], [long, short], progress=False)
    took = time.perf_counter() - began
    for one in (first, second):
        assert one.time_to_first_token is not None
        assert 0 < one.time_to_first_token < one.total_time <= took
    assert first.total_time > second.total_time


def test_a_caller_may_watch_the_steps(llm: LLM) -> None:
    seen: list[GenerationProgress] = []
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (2, 6)]
    llm.generate(["hello", "hello you"], params, progress=False, on_step=seen.append)
    assert {one.num_prompts for one in seen} == {2}
    assert [one.num_started for one in seen] == sorted(one.num_started for one in seen)
    assert [one.num_done for one in seen] == sorted(one.num_done for one in seen)
    assert (seen[-1].num_started, seen[-1].num_done) == (2, 2)
    assert any((one.num_started, one.num_done) == (2, 1) for one in seen)


def test_no_prompts_give_no_results(llm: LLM) -> None:
    assert llm.generate([], GREEDY, progress=False) == []


def test_the_prefix_cache_lives_on_between_calls(llm: LLM) -> None:
    prompt = "a prompt that nobody else in this module uses"
    cold = llm.generate(prompt, GREEDY, progress=False)[0]
    warm = llm.generate(prompt, GREEDY, progress=False)[0]
    assert warm.num_cached_tokens == (cold.num_prompt_tokens - 1) // 4 * 4
    assert warm.token_ids == cold.token_ids


def test_stop_strings_cut_the_text_and_count_what_was_needed(llm: LLM) -> None:
    free = llm.generate("hello", GREEDY, progress=False)[0]
    stop = free.text[2:4]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=(stop,))
    cut = llm.generate("hello", params, progress=False)[0]
    assert cut.text == free.text[: free.text.index(stop)]
    assert cut.finish_reason == "stop"
    assert len(cut.token_ids) < len(free.token_ids)
    assert all_pages_are_free(llm)


def test_a_stream_concatenates_to_the_whole_answer(llm: LLM) -> None:
    whole = llm.generate("hello", GREEDY, progress=False)[0]
    chunks = list(llm.stream("hello", GREEDY))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == "length"


def test_closing_a_stream_aborts_it_and_frees_its_pages(llm: LLM) -> None:
    stream = llm.stream("hello", SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    next(stream)
    assert not all_pages_are_free(llm)
    stream.close()
    assert all_pages_are_free(llm)


def test_a_stream_that_nobody_reads_runs_nothing(llm: LLM) -> None:
    stream = llm.stream("hello", SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    stream.close()
    before = llm._session._scheduler.num_processed_steps
    llm.generate("hello", SamplingParams(temperature=0, max_tokens=1), progress=False)
    assert llm._session._scheduler.num_processed_steps == before + 1
    assert all_pages_are_free(llm)


def test_streams_may_be_interleaved(llm: LLM) -> None:
    alone = ["".join(c.text for c in llm.stream(p, GREEDY)) for p in ("hello", "12 34")]
    first, second = llm.stream("hello", GREEDY), llm.stream("12 34", GREEDY)
    texts = ["", ""]
    for chunks in itertools.zip_longest(first, second):
        for place, chunk in enumerate(chunks):
            texts[place] += chunk.text if chunk else ""
    assert texts == alone


def test_threads_may_share_one_llm(llm: LLM) -> None:
    expected = {n: llm.generate("a" * n, GREEDY, progress=False)[0].token_ids for n in range(1, 7)}
    got: dict[int, list[int]] = {}

    def work(n: int) -> None:
        got[n] = llm.generate("a" * n, GREEDY, progress=False)[0].token_ids

    threads = [threading.Thread(target=work, args=(n,)) for n in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert got == expected


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (["hello", ""], "prompt 1: the prompt is empty"),
        (["hello", [1, 99999]], r"prompt 1: prompt must hold token ids from 0 to 262"),
        (["hello", "a" * 600], r"prompt 1: prompt has 600 tokens; this server takes at most"),
        (["a", [{"role": "user", "content": [{"type": "image_url"}]}]], "prompt 1: .*image_url"),
        (5, "prompts must be text, token ids, chat messages"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_named_before_anything_runs(
    llm: LLM, prompts: list[object], message: str
) -> None:
    before = llm._session._scheduler.num_processed_steps
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, GREEDY, progress=False)  # type: ignore[arg-type]
    assert llm._session._scheduler.num_processed_steps == before
    assert all_pages_are_free(llm)
    assert len(llm.generate("hello", GREEDY, progress=False)) == 1, "the next call is served"


def test_one_sampling_params_for_each_prompt_or_one_for_all(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 entries for 1 prompts"):
        llm.generate("hello", [GREEDY, GREEDY], progress=False)


@pytest.mark.parametrize("params", [{"temperature": 0}, 5, [None], "x"])
def test_what_is_no_sampling_params_is_refused(llm: LLM, params: Any) -> None:
    for call in (llm.generate, llm.stream):
        with pytest.raises(RequestError, match="sampling_params must be a SamplingParams"):
            call("h", params)


@pytest.mark.parametrize("way", ["generate", "stream"])
def test_ctrl_c_in_a_step_ends_the_call_and_nothing_else(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    expected = llm.generate("hello", GREEDY, progress=False)[0].token_ids
    engine = llm._session._scheduler._engine
    forward = engine.forward_batch
    num_calls = 0

    def interrupted(plan: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            signal.raise_signal(signal.SIGINT)
        return forward(plan)

    monkeypatch.setattr(engine, "forward_batch", interrupted)
    calls: dict[str, Callable[[], object]] = {
        "generate": lambda: llm.generate(["hello", "a" * 30], GREEDY, progress=False),
        "stream": lambda: list(llm.stream("hello", GREEDY)),
    }
    with pytest.raises(KeyboardInterrupt):
        calls[way]()
    assert num_calls <= 5, "it did not run on to the end"
    assert all_pages_are_free(llm)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert llm.generate("hello", GREEDY, progress=False)[0].token_ids == expected


def test_a_step_that_is_cut_in_its_middle_closes_the_llm_instead_of_hanging(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(str(tiny_path), progress=False) as llm:

        def cut(plan: Any) -> Any:
            raise KeyboardInterrupt

        monkeypatch.setattr(llm._session._scheduler._engine, "forward_batch", cut)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("hello", GREEDY, progress=False)
        with pytest.raises(RuntimeError, match="this LLM is closed"):
            llm.generate("hello", GREEDY, progress=False)


def test_min_tokens_keeps_the_end_of_sequence_away(llm: LLM) -> None:
    for n in range(8):
        params = SamplingParams(temperature=3.0, seed=n, min_tokens=9, max_tokens=9)
        result = llm.generate("hello", params, progress=False)[0]
        assert len(result.token_ids) == 9
        assert not {0, 2} & set(result.token_ids[:-1])


def test_a_closed_llm_says_so(tiny_path: Path) -> None:
    llm = LLM(str(tiny_path), progress=False)
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        llm.generate("hello", GREEDY, progress=False)


def test_memory_comes_back_without_the_garbage_collector(tiny_path: Path) -> None:
    """Catches: a cycle that keeps an engine's gigabytes until some collection comes by."""
    gc.disable()
    try:
        llm = LLM(str(tiny_path), progress=False, num_pages=20)
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3), progress=False)
        engine = weakref.ref(llm._session._scheduler._engine)
        del llm
        assert engine() is None
    finally:
        gc.enable()


def test_two_engines_live_in_one_process(tiny_path: Path, llm: LLM) -> None:
    expected = llm.generate("hello", GREEDY, progress=False)[0].token_ids
    with LLM(str(tiny_path), progress=False, page_size=16, max_prefill_tokens=16) as other:
        assert other.generate("hello", GREEDY, progress=False)[0].token_ids == expected


def test_dummy_weights_need_no_checkpoint_and_are_seeded(tiny_path: Path) -> None:
    outputs = []
    for seed in (1, 1, 2):
        with LLM(str(tiny_path), load_format="dummy", seed=seed, progress=False) as llm:
            outputs.append(llm.generate("hello", GREEDY, progress=False)[0].token_ids)
    assert outputs[0] == outputs[1] != outputs[2]


def test_a_moe_backend_for_a_dense_model_is_said_to_run_nothing(
    tiny_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(str(tiny_path), progress=False, moe_backend="torch"):
        pass
    assert "moe.backend='torch' runs nothing here" in caplog.text
    assert "has none; leave it at auto" in caplog.text


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"page_sise": 4}, SettingsError, "page_size"),
        ({"page_size": 0}, SettingsError, "page_size"),
        ({"tp": 3}, SettingsError, "tensor_parallel_size=3 does not divide"),
        ({"max_seq_len": 9999}, SettingsError, "beyond the 512 positions"),
        ({"device": "cuda:7"}, SettingsError, r"engine\.device='cuda:7'"),
        ({"load_format": "gguf"}, ModelLoadError, "gguf"),
        ({"moe_backend": "nope"}, UnknownBackendError, r"moe\.backend='nope' is not installed"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_the_reason(
    tiny_path: Path, keywords: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        LLM(str(tiny_path), progress=False, **keywords)


def test_a_model_that_is_not_there_is_a_model_load_error() -> None:
    with pytest.raises(ModelLoadError, match="/no/such/folder"):
        LLM("/no/such/folder", progress=False)


def test_mixed_launches_are_refused_for_a_backend_that_takes_none(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered = {one.name: one for one in builtin.minisgl_attention_backends()}
    unmixed = dataclasses.replace(offered["torch"], capabilities=Capabilities())
    monkeypatch.setattr(builtin, "minisgl_attention_backends", hookimpl(lambda: [unmixed]))
    with pytest.raises(UnsupportedBackendError, match=r"set scheduler\.launch to auto or split"):
        LLM(str(tiny_path), progress=False, scheduler={"launch": "mixed"})


def test_a_cache_salt_keeps_prefixes_apart(llm: LLM) -> None:
    prompt = "another prompt that nobody else in this module uses"

    def cached(salt: str | None) -> int:
        [result] = llm.generate(prompt, GREEDY, cache_salt=salt, progress=False)
        return result.num_cached_tokens

    assert [cached(salt) for salt in ("a", "b", None)] == [0, 0, 0]
    assert all(cached(salt) > 0 for salt in ("a", "b", None))
    *_, last = llm.stream(prompt, GREEDY, cache_salt="c")
    assert last.num_cached_tokens == 0


def test_priorities_reach_the_scheduler_each_with_its_prompt(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = []
    submit = llm._session.submit

    def noted(request: Any, listener: Any) -> None:
        sent.append(request.priority)
        submit(request, listener)

    monkeypatch.setattr(llm._session, "submit", noted)
    short = SamplingParams(temperature=0, max_tokens=1)
    llm.generate(["a", "b"], short, priority=[3, -1], progress=False)
    llm.generate(["a", "b"], short, priority=2, progress=False)
    list(llm.stream("a", short, priority=7))
    assert sent == [3, -1, 2, 2, 7]


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"priority": [1]}, "priority has 1 entries for 2 prompts"),
        ({"priority": "high"}, "prompt 0: priority must be a whole number"),
        ({"priority": [0, 2**40]}, "prompt 1: priority must be a whole number"),
        ({"cache_salt": ""}, "prompt 0: cache_salt must be a string of 1 to 256"),
        ({"cache_salt": ["a", "b"]}, "prompt 0: cache_salt must be a string of 1 to 256"),
    ],
)
def test_a_wrong_priority_or_salt_is_refused_before_anything_runs(
    llm: LLM, keywords: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(["a", "b"], GREEDY, progress=False, **keywords)
    assert not llm._session.has_work


def test_bad_words_do_not_appear(llm: LLM) -> None:
    [plain] = llm.generate("hello", GREEDY, progress=False)
    words = [llm.tokenizer.decode([token]) for token in plain.token_ids]
    # A character that one token alone can write: a byte of ASCII, and no white space.
    word = next(text for text in words if text.isascii() and text.isprintable() and text.strip())
    assert word in plain.text
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, bad_words=(word,))
    [found] = llm.generate("hello", params, progress=False)
    assert len(found.token_ids) == 12
    assert word not in found.text


def test_bad_words_without_tokens_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="bad_words") as caught:
        llm.generate("hello", SamplingParams(bad_words=(" ",)), progress=False)
    assert caught.value.param == "bad_words"
