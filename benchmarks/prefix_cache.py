"""What the radix prefix cache costs the host, in microseconds: match, insert, lock, evict.

Needs no model and no GPU. Every figure is the median of ``--rounds`` calls.

    python benchmarks/prefix_cache.py --rounds 200 --json out.json
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from minisgl.kvcache import RadixPrefixCache

Tokens = npt.NDArray[np.int32]

NUM_TOKENS = 10_000
VOCAB = 50_000


class Tree:
    """A radix cache to measure, and the pages that it was given so far."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.cache = RadixPrefixCache(page_size)
        self.random = np.random.default_rng(0)
        self._next_page = 1

    def prompt(self, num_tokens: int) -> Tokens:
        """Random tokens."""
        return self.random.integers(0, VOCAB, num_tokens).astype(np.int32)

    def insert(self, tokens: Tokens) -> None:
        """Insert the whole pages of ``tokens`` under new page numbers."""
        num_pages = len(tokens) // self.page_size
        pages = np.arange(self._next_page, self._next_page + num_pages, dtype=np.int32)
        self._next_page += num_pages
        self.cache.insert(tokens[: num_pages * self.page_size], pages)

    def fill(self, num_leaves: int, num_pages: int = 4) -> None:
        """Add unrelated prompts, one leaf each."""
        for _ in range(num_leaves):
            self.insert(self.prompt(num_pages * self.page_size))

    def cut(self, tokens: Tokens, every: int) -> int:
        """Cut the path of ``tokens`` into edges of ``every`` pages; returns their number."""
        ends = range(len(tokens) // self.page_size - every, 0, -every)
        for end in ends:
            handle = self.cache.match(tokens[: end * self.page_size + 1]).handle
            self.cache.lock(handle)
            self.cache.unlock(handle)
        return len(ends) + 1


def median_us(run: Callable[[], object], rounds: int) -> float:
    """Return the median time of ``run`` in microseconds, after one call that warms up."""
    run()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def measure_paths(page_size: int, rounds: int) -> dict[str, float]:
    """Match, insert and lock one prompt of 10,000 tokens in trees of several shapes."""
    results: dict[str, float] = {}
    for shape, others, every in (
        ("1 edge, no other prompt", 0, 0),
        ("1 edge, 10k other leaves", 10_000, 0),
        ("edges of 32 pages, 10k other leaves", 10_000, 32),
        ("edges of 1 page, 10k other leaves", 10_000, 1),
    ):
        tree = Tree(page_size)
        tree.fill(others)
        tokens = tree.prompt(NUM_TOKENS)
        tree.insert(tokens)
        if every:
            tree.cut(tokens, every)
        cache, query = tree.cache, np.append(tokens, 0).astype(np.int32)
        num_full = NUM_TOKENS // page_size
        assert len(cache.match(query).pages) == num_full
        results[f"match, {shape}"] = median_us(lambda: cache.match(query), rounds)  # noqa: B023
        handle = cache.match(query).handle

        def lock_and_unlock() -> None:
            cache.lock(handle)  # noqa: B023
            cache.unlock(handle)  # noqa: B023

        results[f"lock and unlock, {shape}"] = median_us(lock_and_unlock, rounds)
        other = cache.match(query).handle
        cache.lock(other)
        results[f"the same while another request holds it, {shape}"] = median_us(
            lock_and_unlock, rounds
        )
        cache.unlock(other)
        known, pages = tokens[: num_full * page_size], cache.match(query).pages
        results[f"insert of what is there, {shape}"] = median_us(
            lambda: cache.insert(known, pages),  # noqa: B023
            rounds,
        )
        if shape.startswith("1 edge"):
            cold = tree.prompt(NUM_TOKENS)
            results[f"match of nothing, {shape}"] = median_us(lambda: cache.match(cold), rounds)  # noqa: B023
    tree = Tree(page_size)
    prompts = iter([tree.prompt(NUM_TOKENS) for _ in range(rounds + 1)])
    results["insert of 10k new tokens"] = median_us(lambda: tree.insert(next(prompts)), rounds)
    return results


def measure_eviction(page_size: int) -> dict[str, float]:
    """Evict half of a tree, one page a call and many a call, with 1k and 10k leaves."""
    results: dict[str, float] = {}
    for num_leaves in (1000, 10_000):
        for at_once in (1, 64):
            tree = Tree(page_size)
            tree.fill(num_leaves)
            num_calls = tree.cache.num_pages // 2 // at_once
            began = time.perf_counter()
            for _ in range(num_calls):
                tree.cache.evict(at_once)
            took = time.perf_counter() - began
            name = f"evict a page, {num_leaves} leaves, {at_once} a call"
            results[name] = took * 1e6 / (num_calls * at_once)
    return results


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    figures: dict[str, dict[str, float]] = {}
    for page_size in args.page_sizes:
        one = measure_paths(page_size, args.rounds) | measure_eviction(page_size)
        figures[f"page size {page_size}"] = one
        print(f"page size {page_size}: microseconds")
        for name, value in one.items():
            print(f"  {name:<74} {value:10.2f}")
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
