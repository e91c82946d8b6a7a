"""An HTTP server that answers with given bytes, cut and delayed as a test says."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from support.patience import PATIENCE

Piece: TypeAlias = "bytes | float | Callable[[ScriptedServer], bool]"
"""Bytes to send, seconds to wait, or what to wait for."""

Script = Callable[[int, str, bytes], Sequence[Piece]]
"""What to answer to the request of this number, with this first line and this body."""

CLOSE: Piece = b""
"""Close the connection here."""


class ScriptedServer:
    """Its address, what it was asked, and how many connections it has seen."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.num_connections = 0
        self.num_open = self.most_open = 0

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """The JSON of each request that had any."""
        return [json.loads(body) for _, _, body in self.requests if body]


@contextlib.contextmanager
def scripted_server(script: Script) -> Iterator[ScriptedServer]:
    """Run a server in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> tuple[asyncio.Server, ScriptedServer]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            server.num_connections += 1
            try:
                # A cancelled one must end well, or asyncio's streams report it.
                gone = (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError)
                with contextlib.suppress(*gone):
                    while await _answer(reader, writer, script, server):
                        pass
            finally:
                writer.close()

        listener = await asyncio.start_server(serve, "127.0.0.1", 0)
        server = ScriptedServer(listener.sockets[0].getsockname()[1])
        return listener, server

    async def stop(listener: asyncio.Server) -> None:
        listener.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(0)  # transports close in the loop's next turn

    listener, server = asyncio.run_coroutine_threadsafe(start(), loop).result(PATIENCE)
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(stop(listener), loop).result(PATIENCE)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE)
        loop.close()


async def _answer(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    script: Script,
    server: ScriptedServer,
) -> bool:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.strip().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    server.requests.append((first, headers, body))
    server.num_open += 1
    server.most_open = max(server.most_open, server.num_open)
    try:
        for piece in script(len(server.requests) - 1, first, body):
            if piece == CLOSE:
                return False
            if isinstance(piece, float):
                await asyncio.sleep(piece)
            elif callable(piece):
                while not piece(server):
                    await asyncio.sleep(0.005)
            else:
                writer.write(piece)
                await writer.drain()
    finally:
        server.num_open -= 1
    return True


def whole(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    """Return a response with a length."""
    lines = "".join(f"{line}\r\n" for line in (f"Content-Length: {len(body)}", *headers))
    return f"HTTP/1.1 {status}\r\n{lines}\r\n".encode() + body


def chunked(*pieces: Piece) -> list[Piece]:
    """Return a response in HTTP chunks, one for each piece."""
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    framed = [b"%x\r\n%s\r\n" % (len(p), p) if isinstance(p, bytes) else p for p in pieces]
    return [head, *framed, b"0\r\n\r\n"]


def event(data: Any) -> bytes:
    """Return a server-sent event that holds JSON."""
    return b"data: " + json.dumps(data).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def text_chunk(text: str, finish_reason: str | None = None, **fields: Any) -> bytes:
    """Return an event of ``/v1/completions``."""
    choice = {"index": 0, "text": text, "finish_reason": finish_reason}
    return event({"choices": [choice], **fields})


def usage(prompt: int, completion: int, cached: int | None = None) -> dict[str, Any]:
    """Return a ``usage`` object."""
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"prompt_tokens": prompt, "completion_tokens": completion, **details}
