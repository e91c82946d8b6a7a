"""Runs a server: this process answers HTTP and supervises the workers.

::

    bind port -> resolve model -> start workers -> all ready -> listen -> serve
    stop signal -> refuse (503) -> drain -> close HTTP -> tokenizer, scheduler, detokenizer
    a worker is lost -> open requests get errors -> close HTTP -> kill the rest -> WorkerDiedError
"""

import asyncio
import contextlib
import functools
import logging
import signal
import socket
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import uvicorn
import uvloop
import zmq
import zmq.asyncio

from minisgl.errors import RequestError, SettingsError, WorkerDiedError
from minisgl.message import (
    BackendMessage,
    DetokenizerMessage,
    FrontendMessage,
    Shutdown,
    TokenizerMessage,
)
from minisgl.message.sockets import Addresses, AsyncPullSocket, PushSocket, private_addresses
from minisgl.plugins.host import PluginHost, load_plugins
from minisgl.plugins.parsers import check_parsers, select_parsers
from minisgl.processes import HANDLED_SIGNALS, quiet_collector, raise_file_limit
from minisgl.server.api_keys import read_api_keys
from minisgl.server.app import create_app
from minisgl.server.client import ClientLimits, EngineClient
from minisgl.server.greeting import greeting
from minisgl.server.heartbeat import PING_INTERVAL
from minisgl.server.http_server import build_http_server
from minisgl.server.listen_socket import bind_socket, listen
from minisgl.server.scheduler_process import scheduler_main
from minisgl.server.served_model import ServedModel
from minisgl.server.worker_pool import SilenceLimits, StartFailedError, WorkerPool
from minisgl.server.worker_process import WorkerTarget
from minisgl.settings import Settings
from minisgl.tokenizer.dispatch import LeastLoaded, WorkCounter
from minisgl.tokenizer.worker import detokenizer_main, tokenizer_main

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerTargets:
    """What the worker processes run; tests put fakes here."""

    tokenizer: WorkerTarget = tokenizer_main
    scheduler: WorkerTarget = scheduler_main
    detokenizer: WorkerTarget = detokenizer_main


def serve(
    settings: Settings,
    *,
    announce: Callable[[str], None],
    targets: WorkerTargets | None = None,
    limits: SilenceLimits | None = None,
) -> int:
    """Serve until a signal stops it; return the exit code.

    Args:
        settings: of everything; ``model.path`` names the model.
        announce: gets the text that people should see once the server is ready.
        targets: what the workers run.
        limits: how long a worker may show no sign of life.

    Returns:
        0 after a clean stop, 128 + the signal's number if a second signal cut the stop short.

    Raises:
        MinisglError: the start fails, or a worker is lost; its ``exit_code`` is the server's.
    """
    if settings.model.path is None:
        raise SettingsError("no model is given; type --model PATH_OR_ID")
    if settings.model.skip_tokenizer_init:
        raise SettingsError(
            "model.skip_tokenizer_init=True: the HTTP API takes and returns text, which needs the "
            "tokenizer; leave that setting out"
        )
    raise_file_limit()
    bound = bind_socket(settings.server.host, settings.server.port)
    with contextlib.closing(bound), _signals_unblocked_at_the_end():
        host = load_plugins(settings.plugins.disabled, settings.plugins.strict)
        check_parsers(host, settings)
        api_keys = read_api_keys(settings.server)
        resolved = _with_local_paths(settings, host)
        name = settings.model.served_name or settings.model.path
        with private_addresses() as addresses:
            server = _Server(
                settings=resolved,
                api_keys=api_keys,
                model=ServedModel(name),
                addresses=addresses,
                host=host,
                bound=bound,
                targets=targets or _targets(host),
                limits=limits or SilenceLimits(),
            )
            try:
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    return runner.run(server.run(announce))
            except asyncio.CancelledError:
                return 128 + server.last_signal


@contextlib.contextmanager
def _signals_unblocked_at_the_end() -> Iterator[None]:
    """Let signals through again that the server's end has held back."""
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)


def _targets(host: PluginHost) -> WorkerTargets:
    """Return the real workers; the scheduler must see the plugins that this process has seen."""
    return WorkerTargets(
        scheduler=functools.partial(scheduler_main, expected_plugins=host.fingerprint())
    )


def _with_local_paths(settings: Settings, host: PluginHost) -> Settings:
    """Return settings whose model and tokenizer are local: downloads happen once, here."""
    local = {
        name: str(host.resolve_checkpoint(reference, settings.model.cache_dir))
        for name in ("path", "tokenizer")
        if (reference := getattr(settings.model, name)) is not None
    }
    return settings.model_copy(update={"model": settings.model.model_copy(update=local)})


class _Server:
    """One run of the server."""

    def __init__(
        self,
        *,
        settings: Settings,
        api_keys: Sequence[str],
        model: ServedModel,
        addresses: Addresses,
        host: PluginHost,
        bound: socket.socket,
        targets: WorkerTargets,
        limits: SilenceLimits,
    ) -> None:
        self._settings = settings
        self._api_keys = api_keys
        self._model = model
        self._addresses = addresses
        self._host = host
        self._bound = bound
        self._targets = targets
        self._limits = limits
        self._tokenizers = {
            "tokenizer" if index == 0 else f"tokenizer-{index}": addresses.of_tokenizer(index)
            for index in range(settings.server.num_tokenizers)
        }
        self.last_signal: int = 0

    async def run(self, announce: Callable[[str], None]) -> int:
        """Start, serve, stop."""
        self._main = asyncio.current_task()
        self._stop = asyncio.Event()
        self._death: str | None = None
        loop = asyncio.get_running_loop()
        for number in HANDLED_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it for SIGHUP
                loop.add_signal_handler(number, self._on_signal, number)
        pool = WorkerPool(self._settings, self._addresses, self._on_death, self._limits)
        with self._open_sockets() as client:
            self._client = client
            background = [
                asyncio.create_task(work)
                for work in (client.listen(), client.heartbeat.ping(), pool.watch())
            ]
            for task in background:
                task.add_done_callback(self._on_background_end)
            try:
                http = self._http_server(pool)
                infos = await self._start(pool)
                if infos is None:
                    return 0
                client.heartbeat.watch_steps()
                background.append(asyncio.create_task(self._watch_steps(pool)))
                self._model.max_seq_len = infos["scheduler"].get("max_seq_len")
                self._model.max_chars_per_token = infos["tokenizer"].get("max_chars_per_token")
                template = str(infos["tokenizer"].get("chat_template", ""))
                self._model.parsers = select_parsers(self._host, self._settings, template)
                can_chat = bool(template)
                return await self._serve(pool, http, announce, can_chat=can_chat)
            except WorkerDiedError as error:
                if not isinstance(error, StartFailedError) or error.is_silent:
                    await self._tell_last_words(pool)
                raise
            finally:
                # From here on it is quick, and nothing may cut it short: files would stay.
                signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
                await pool.kill_all()
                for task in background:
                    task.cancel()
                await asyncio.gather(*background, return_exceptions=True)

    @contextlib.contextmanager
    def _open_sockets(self) -> Iterator[EngineClient]:
        """Open this process's ends of the wire."""
        context = zmq.asyncio.Context()
        plain: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context.underlying)
        replies: AsyncPullSocket[FrontendMessage] = AsyncPullSocket(
            context, self._addresses.frontend, FrontendMessage
        )
        self._replies = replies
        self._to_tokenizers: dict[str, PushSocket[TokenizerMessage]] = {
            name: PushSocket(plain, addresses.tokenizer, TokenizerMessage)
            for name, addresses in self._tokenizers.items()
        }
        work_done = [
            WorkCounter(addresses.tokenizer_work) for addresses in self._tokenizers.values()
        ]
        self._to_scheduler: PushSocket[BackendMessage] = PushSocket(
            plain, self._addresses.scheduler, BackendMessage
        )
        self._to_detokenizer: PushSocket[DetokenizerMessage] = PushSocket(
            plain, self._addresses.detokenizer, DetokenizerMessage
        )
        try:
            yield EngineClient(
                tokenizer=LeastLoaded(list(self._to_tokenizers.values()), work_done),
                scheduler=self._to_scheduler,
                replies=replies,
                limits=self._client_limits(),
            )
        finally:
            for wire in self._to_tokenizers.values():
                wire.close()
            for counter in work_done:
                counter.close()
            for opened in (replies, self._to_scheduler, self._to_detokenizer):
                opened.close()
            context.destroy(linger=0)

    def _client_limits(self) -> ClientLimits:
        server = self._settings.server
        return ClientLimits(
            max_open=self._settings.scheduler.max_running_requests + server.max_queued_requests,
            request_timeout=server.request_timeout,
        )

    def _on_signal(self, number: int) -> None:
        """Begin to stop at the first signal; end at once at the second."""
        name = signal.Signals(number).name
        if self._stop.is_set() and self._main is not None:
            logger.warning("second %s: ending at once", name)
            self.last_signal = number
            self._main.cancel()
        else:
            logger.info("%s: stopping", name)
            self._stop.set()

    def _on_background_end(self, task: "asyncio.Task[None]") -> None:
        """Without its listener this process would only look alive."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_death(f"the API server can no longer follow its workers: {error!r}")

    async def _watch_steps(self, pool: WorkerPool) -> None:
        """Report the scheduler if its step does not end, or nothing goes on though some wait."""
        limit = self._settings.server.watchdog_timeout
        while self._client.heartbeat.stalled_s < limit:
            await asyncio.sleep(PING_INTERVAL)
        pool.report_hang(
            "scheduler", f"has not finished a step for {limit:g} s (server.watchdog_timeout)"
        )

    @staticmethod
    async def _tell_last_words(pool: WorkerPool) -> None:
        """Log what the lost worker logged last: its own lines may be far up, or elsewhere."""
        lines = await asyncio.to_thread(pool.last_words)
        if lines:
            logger.error(
                "the last lines of that process:\n%s", textwrap.indent("\n".join(lines), "  | ")
            )

    def _on_death(self, message: str) -> None:
        """Tell every client at once; the main task then ends the server."""
        if self._death is None:
            self._death = message
            self._client.fail_all(
                RequestError(f"the server has failed: {message}", status=500, code="worker_died")
            )
            self._stop.set()

    async def _start(self, pool: WorkerPool) -> dict[str, dict[str, Any]] | None:
        """Start the workers and wait until all serve; ``None`` if a signal came first.

        Raises:
            MinisglError: one of them cannot start.
        """
        pool.start("scheduler", self._targets.scheduler)
        pool.start("detokenizer", self._targets.detokenizer)
        for name, addresses in self._tokenizers.items():
            pool.start(name, self._targets.tokenizer, addresses)
        ready = asyncio.ensure_future(pool.wait_ready())
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({ready, stop}, return_when=asyncio.FIRST_COMPLETED)
            if self._death is not None:
                raise WorkerDiedError(self._death)
            return ready.result() if ready.done() else None
        finally:
            ready.cancel()
            stop.cancel()

    async def _serve(
        self,
        pool: WorkerPool,
        http: uvicorn.Server,
        announce: Callable[[str], None],
        *,
        can_chat: bool,
    ) -> int:
        """Answer HTTP until a signal or a death, then stop in order."""
        host, port = self._settings.server.host, self._bound.getsockname()[1]
        listen(self._bound, host, port)
        running = asyncio.create_task(http.serve(sockets=[self._bound]))
        quiet_collector()
        announce(
            greeting(
                host,
                port,
                self._model.name,
                has_key=bool(self._api_keys),
                has_tls=self._settings.server.ssl_certfile is not None,
                can_chat=can_chat,
            )
        )
        try:
            await self._stop.wait()
            if self._death is None:
                await self._drain()
        except asyncio.CancelledError:  # a second signal: open requests get no time, but an answer
            self._client.fail_all(_shutting_down())
            raise
        finally:
            http.should_exit = True
            await running
        if self._death is not None:
            raise WorkerDiedError(self._death)
        return await self._stop_workers(pool)

    def _http_server(self, pool: WorkerPool) -> uvicorn.Server:
        """Return the server around the routes, plugins' own included; it does not listen yet.

        Raises:
            PluginError: a plugin that ``plugins.routes`` names has no routes, or breaks.
        """
        server = self._settings.server
        app = create_app(
            self._client,
            self._model,
            api_keys=self._api_keys,
            strict_requests=server.strict_requests,
            max_body_bytes=server.max_body_bytes,
            cors_allow_origins=server.cors_allow_origins,
            num_dropped=lambda: {"api": self._replies.num_dropped, **pool.num_dropped()},
        )
        self._host.mount_routes(self._settings.plugins.routes, app, self._client)
        return build_http_server(app, server)

    async def _drain(self) -> None:
        """Refuse new requests and let the open ones end, for as long as the settings allow."""
        self._client.stop_accepting()
        limit = self._settings.server.drain_timeout
        if self._client.num_open:
            logger.info("waiting up to %g s for %d requests", limit, self._client.num_open)
        try:
            await asyncio.wait_for(self._client.wait_idle(), limit)
        except TimeoutError:
            logger.warning("%d requests did not end in time", self._client.num_open)
            self._client.fail_all(_shutting_down())

    async def _stop_workers(self, pool: WorkerPool) -> int:
        """Ask each worker to stop, in the order in which requests pass them."""
        pool.begin_stop()
        for wires in (
            self._to_tokenizers,
            {"scheduler": self._to_scheduler},
            {"detokenizer": self._to_detokenizer},
        ):
            for wire in wires.values():
                wire.send(Shutdown())
            await asyncio.gather(*map(pool.wait_finished, wires))
        return 0 if await pool.wait_exited() else WorkerDiedError.exit_code


def _shutting_down() -> RequestError:
    return RequestError("the server is shutting down", status=503, code="shutting_down")
