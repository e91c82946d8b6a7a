"""``AsyncLLM``: streams on an event loop, aborts, errors, closing."""

import asyncio
from pathlib import Path

import pytest

from minisgl import LLM, AsyncLLM, SamplingParams
from minisgl.errors import RequestError
from minisgl.llm import GenerationChunk
from support.patience import PATIENCE

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)


async def collect(llm: AsyncLLM, prompt: str) -> list[int]:
    return [token async for chunk in llm.generate(prompt, GREEDY) for token in chunk.token_ids]


def test_many_streams_at_once_get_what_each_gets_alone(tiny_path: Path, llm: LLM) -> None:
    prompts = ["a" * n for n in range(1, 9)]
    expected = [one.token_ids for one in llm.generate(prompts, GREEDY, progress=False)]

    async def main() -> list[list[int]]:
        async with AsyncLLM(str(tiny_path), progress=False) as served:
            return await asyncio.gather(*(collect(served, prompt) for prompt in prompts))

    assert asyncio.run(main()) == expected


def test_abort_ends_a_stream_with_its_reason_and_frees_its_pages(tiny_path: Path) -> None:
    async def main() -> None:
        async with AsyncLLM(str(tiny_path), progress=False, num_pages=60) as llm:
            reasons = []
            async for chunk in llm.generate("hello", LONG, request_id="mine"):
                if chunk.finish_reason is None:
                    assert await llm.abort("mine")
                reasons.append(chunk.finish_reason)
            assert reasons[-1] == "abort"
            assert not await llm.abort("mine"), "it is over"
            assert await collect(llm, "hello"), "the next request is served"
            llm._session._scheduler.check()
            assert llm._session._scheduler.num_running == 0

    asyncio.run(main())


def test_leaving_the_loop_early_aborts(tiny_path: Path) -> None:
    async def main() -> None:
        async with AsyncLLM(str(tiny_path), progress=False) as llm:
            stream = llm.generate("hello", LONG)
            async for _ in stream:
                break
            await stream.aclose()  # type: ignore[attr-defined]
            async with asyncio.timeout(PATIENCE):
                while llm._session.has_work:
                    await asyncio.sleep(0.01)
            assert llm._session._scheduler.num_running == 0

    asyncio.run(main())


def test_a_bad_prompt_raises_and_the_next_is_served(tiny_path: Path) -> None:
    async def main() -> None:
        async with AsyncLLM(str(tiny_path), progress=False) as llm:
            with pytest.raises(RequestError, match="the prompt is empty"):
                await collect(llm, "")
            assert await collect(llm, "hello")

    asyncio.run(main())


def test_one_request_id_serves_one_running_request(tiny_path: Path) -> None:
    async def main() -> None:
        async with AsyncLLM(str(tiny_path), progress=False) as llm:
            first = llm.generate("hello", LONG, request_id="same")
            await anext(first)
            with pytest.raises(ValueError, match="'same' is already running"):
                await anext(llm.generate("hello", GREEDY, request_id="same"))
            await first.aclose()  # type: ignore[attr-defined]

    asyncio.run(main())


def test_closing_ends_what_runs(tiny_path: Path) -> None:
    async def main() -> None:
        llm = AsyncLLM(str(tiny_path), progress=False)
        stream = llm.generate("hello", LONG)
        await anext(stream)
        await llm.close()
        await llm.close()
        reasons = [chunk.finish_reason async for chunk in stream]
        assert reasons[-1] == "abort"
        with pytest.raises(RuntimeError, match="closed"):
            await anext(llm.generate("hello", GREEDY))

    asyncio.run(main())


def test_a_loop_that_ended_under_a_stream_does_not_hurt_the_next_one(tiny_path: Path) -> None:
    llm = AsyncLLM(str(tiny_path), progress=False)

    async def leave_early() -> None:
        async for _ in llm.generate("hello", LONG):
            break

    async def use_and_close() -> list[int]:
        async with llm:
            return await collect(llm, "hello")

    for _ in range(3):
        asyncio.run(leave_early())
    assert len(asyncio.run(use_and_close())) == GREEDY.max_tokens


def test_a_name_is_taken_once_even_if_both_calls_start_together(tiny_path: Path) -> None:
    async def first_chunk(llm: AsyncLLM) -> None:
        async for _ in llm.generate("hello", LONG, request_id="mine"):
            await asyncio.sleep(0.05)

    async def main() -> list[object]:
        async with AsyncLLM(str(tiny_path), progress=False) as llm:
            tasks = [asyncio.create_task(first_chunk(llm)) for _ in range(2)]
            done, running = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            return [type(task.exception()) for task in done]

    assert asyncio.run(main()) == [ValueError]


def test_priority_and_cache_salt_go_with_the_request(tiny_path: Path) -> None:
    async def main() -> None:
        async with AsyncLLM(str(tiny_path), progress=False) as llm:

            async def cached(salt: str | None) -> int:
                chunks = llm.generate("a long prompt " * 4, GREEDY, priority=1, cache_salt=salt)
                return [chunk.num_cached_tokens async for chunk in chunks][-1]

            assert [await cached(salt) for salt in ("a", "b", "a")] == [0, 0, 48]
            with pytest.raises(RequestError, match="priority must be a whole number"):
                await anext(aiter(llm.generate("x", GREEDY, priority=2**40)))

    asyncio.run(main())


def test_logprobs_and_the_prompt_come_with_the_chunks_that_they_belong_to(
    tiny_path: Path, llm: LLM
) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, logprobs=2, prompt_logprobs=1, stop=("\x00",)
    )
    (whole,) = llm.generate("hello é", params, progress=False)
    assert whole.logprobs is not None
    assert len(whole.logprobs) == len(whole.token_ids)

    async def main() -> list[GenerationChunk]:
        async with AsyncLLM(str(tiny_path), progress=False) as served:
            return [chunk async for chunk in served.generate("hello é", params)]

    chunks = asyncio.run(main())
    for chunk in chunks:
        assert chunk.logprobs is not None
        assert [one.token.token_id for one in chunk.logprobs] == chunk.token_ids
    streamed = [one for chunk in chunks for one in chunk.logprobs or ()]
    assert [one.token.data for one in streamed] == [one.token.data for one in whole.logprobs]
    data = b"".join(one.token.data for one in streamed)
    assert data.decode(errors="replace") == whole.text
    first, *others = chunks
    assert first.prompt_logprobs == whole.prompt_logprobs
    assert (first.prompt, first.prompt_token_ids) == (whole.prompt, whole.prompt_token_ids)
    assert all(chunk.prompt_logprobs is None and chunk.prompt is None for chunk in others)
