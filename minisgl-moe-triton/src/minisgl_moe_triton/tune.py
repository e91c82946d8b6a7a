"""``minisgl tune moe``: times launches on this card and writes the fastest into a tuned file.

For each number of tokens the two products are searched one after the other, as neither changes the
other's time; the best launch without sorting and the best grouped ones are then timed whole.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
import triton

from minisgl.errors import SettingsError, UnsupportedBackendError
from minisgl.models.progress import progress_bar
from minisgl.moe import ExpertScales, MoeContext, TuneRequest, quantize_stack
from minisgl_moe_triton import candidates
from minisgl_moe_triton.backend import run_launch
from minisgl_moe_triton.configs import (
    TOKENS,
    Columns,
    Few,
    Grouped,
    Key,
    Launch,
    Tile,
    TunedFile,
    check_folder,
    read_own,
    user_folder,
    write_tuned,
)
from minisgl_moe_triton.create import key_of, shared_memory
from minisgl_moe_triton.kernels.few import few_down, few_gate_up
from minisgl_moe_triton.kernels.grouped import down, gate_up
from minisgl_moe_triton.kernels.quantize import operand
from minisgl_moe_triton.kernels.routing import Routed, route, sort_by_expert
from minisgl_moe_triton.settings import TritonMoeSettings
from minisgl_moe_triton.timing import compile_in_parallel, time_on_gpu

logger = logging.getLogger(__name__)

OptionT = TypeVar("OptionT")
Call = Callable[[], object]

_ROUTINGS: Final = 6
"""Launches differ in their routing, so that the L2 cache does not hold an expert's weights."""

_OPTION: Final = "backend_options.triton.tuned_folder"

_COMPARED: Final = 4
"""Of the tiles that copy weights, so many of the fastest are tried without."""

_BATCH: Final = 32
"""Candidates that are compiled together before they are timed."""


def tune(context: MoeContext, settings: TritonMoeSettings, request: TuneRequest) -> str:
    """Search, write the file after each number of tokens, and return a table for people.

    Launches that the file holds for other numbers of tokens stay. Without a folder in ``request``
    it is the one where a start with these settings looks.

    Raises:
        UnsupportedBackendError: the device is no GPU.
        SettingsError: the folder cannot be written to.
    """
    require_gpu(context)
    began = time.monotonic()
    counts = request.tokens or tuple(one for one in TOKENS if one <= context.max_num_tokens)
    deadline = None if request.time_limit_s is None else began + request.time_limit_s
    used = settings.tuned_folder or user_folder()
    key, folder = key_of(context), request.folder or used
    check_folder(folder, _named_by(settings, request))
    launches = _earlier(key, folder)
    lines: list[str] = []
    with torch.inference_mode(), progress_bar(show=request.progress, unit="launch") as bar:
        search = Search(context, bar.update)
        for place, tokens in enumerate(counts):
            bar.set_description(f"{tokens} tokens")
            now = time.monotonic()
            if deadline is not None and now > deadline and lines:
                break
            share = None if deadline is None else now + (deadline - now) / (len(counts) - place)
            launches[tokens], seconds = search.fastest(tokens, share)
            lines.append(
                f"{tokens:>6} tokens  {1e6 * seconds:>9.1f} us  {_describe(launches[tokens])}"
            )
            _write(key, launches, folder)
    took = time.monotonic() - began
    file = folder / key.file_name
    return "\n".join(
        [*lines, f"{file} was written within {took:.0f} s; {_how_used(folder, settings)}"]
    )


def _named_by(settings: TritonMoeSettings, request: TuneRequest) -> str:
    if request.folder is not None:
        return "--folder"
    return "the default folder" if settings.tuned_folder is None else _OPTION


def _earlier(key: Key, folder: Path) -> dict[int, Launch]:
    """Return the launches that are there, by number of tokens; what is none is replaced."""
    try:
        found = read_own(key, folder)
    except SettingsError as error:
        logger.warning("What is there is replaced: %s", error)
        return {}
    return {} if found is None else {launch.tokens: launch for launch in found.launches}


def _how_used(folder: Path, settings: TritonMoeSettings) -> str:
    option, configured = _OPTION, settings.tuned_folder
    if configured is None and folder.absolute() == user_folder().absolute():
        return f"it is used from now on, unless {option} names another folder"
    if configured is not None and folder.absolute() == configured.absolute():
        return f"it is used wherever {option} names that folder, as it does here"
    return f"to use it, type: --set {option}={folder.absolute()}"


def _write(key: Key, launches: Mapping[int, Launch], folder: Path) -> None:
    source = (
        f"minisgl tune moe: {key.device}, torch {torch.__version__}, Triton {triton.__version__}"
    )
    ascending = tuple(launches[tokens] for tokens in sorted(launches))
    write_tuned(key, TunedFile(source=source, launches=ascending), folder)


def require_gpu(context: MoeContext) -> None:
    """Refuse a device on which there is nothing to time."""
    if context.device.type != "cuda":
        raise UnsupportedBackendError(
            f"minisgl tune moe times kernels on an NVIDIA GPU; engine.device is {context.device}"
        )


class Search:
    """Searches for the fastest launches of a layer with random weights.

    Args:
        context: sizes of the layer, on a GPU.
        advance: told how many launches more have been tried.
    """

    def __init__(self, context: MoeContext, advance: Callable[[int], object]) -> None:
        self._context = context
        self._advance = advance
        self._gelu = context.activation == "gelu"
        self._shared = shared_memory(context.device)
        held, hidden = len(context.local_experts), context.hidden_size
        self._gate_up = self._random(held, 2 * context.intermediate_size, hidden)
        self._down = self._random(held, hidden, context.intermediate_size)
        self._scales: ExpertScales | None = None
        if context.weights_dtype is not None:
            self._gate_up, of_gate_up = quantize_stack(self._gate_up)
            self._down, of_down = quantize_stack(self._down)
            self._scales = ExpertScales(of_gate_up, of_down)
        self._logits = torch.randn(
            _ROUTINGS, max(TOKENS), context.num_experts, device=context.device
        )

    def fastest(self, tokens: int, deadline: float | None) -> tuple[Launch, float]:
        """Return the fastest launch for ``tokens`` and the seconds of a whole layer with it.

        Args:
            tokens: of the launch.
            deadline: by ``time.monotonic``: end with the best so far.
        """
        context = self._context
        logits = self._logits
        if tokens > logits.shape[1]:
            logits = torch.randn(2, tokens, context.num_experts, device=context.device)
        routed = []
        for one in logits:
            weights, experts = route(one[:tokens], context.top_k, renormalize=True)
            routed.append(Routed(experts, weights, context.local_experts.start))
        hidden = self._random(tokens, context.hidden_size)
        ways: list[Callable[[float | None], Launch]] = []
        mean = tokens * context.top_k / context.num_experts
        if mean <= candidates.MOST_FEW or tokens == 1:
            ways.append(partial(self._few, hidden, routed))
        rows = candidates.tile_rows(mean)
        if deadline is not None:
            rows = rows[:2]
        ways += [partial(self._grouped, hidden, routed, one) for one in rows]
        launches = []
        for place, way in enumerate(ways):
            try:
                launches.append(way(_share(deadline, len(ways) - place)))
            except UnsupportedBackendError:
                if place == len(ways) - 1 and not launches:
                    raise
        timed = []
        for launch in launches:
            calls = [partial(self.run, hidden, one, launch) for one in routed]
            calls[0]()
            timed.append((time_on_gpu(calls), launch))
        seconds, launch = min(timed, key=lambda pair: pair[0])
        return launch, seconds

    def run(self, hidden: torch.Tensor, routed: Routed, launch: Launch) -> torch.Tensor:
        """Run the whole layer behind its router."""
        return run_launch(
            hidden, routed, self._gate_up, self._down, launch, gelu=self._gelu, scales=self._scales
        )

    def _few(
        self, hidden: torch.Tensor, routed: Sequence[Routed], deadline: float | None
    ) -> Launch:
        context = self._context
        places = triton.next_power_of_2(context.top_k)
        rows = self._random(len(hidden) * context.top_k, context.intermediate_size)
        of_gate_up, of_down = self._scales_of_products()

        def first_product(how: Columns, to: Routed) -> torch.Tensor:
            return few_gate_up(hidden, self._gate_up, to, how, gelu=self._gelu, scale=of_gate_up)

        def second_product(how: Columns, to: Routed) -> torch.Tensor:
            return few_down(rows, self._down, to, how, scale=of_down)

        first = self._search(
            candidates.columns(context.hidden_size, 2),
            first_product,
            routed, _share(deadline, 2),
        )  # fmt: skip
        second = self._search(
            candidates.columns(context.intermediate_size, places),
            second_product,
            routed, deadline,
        )  # fmt: skip
        return Few(tokens=len(hidden), gate_up=first, down=second)

    def _grouped(
        self, hidden: torch.Tensor, routed: Sequence[Routed], rows: int, deadline: float | None
    ) -> Launch:
        context = self._context
        held = len(context.local_experts)
        sorted_ones = [(to, sort_by_expert(to, held, rows)) for to in routed]
        of_gate_up, of_down = self._scales_of_products()
        x, first = operand(hidden, of_gate_up)

        def first_product(how: Tile, given: Any) -> torch.Tensor:
            to, tiles = given
            top_k = to.experts.shape[1]
            return gate_up(x, self._gate_up, tiles, top_k, how, gelu=self._gelu, fp8=first)

        inner = self._random(len(hidden) * context.top_k, context.intermediate_size)
        y, second = operand(inner, of_down)

        def second_product(how: Tile, given: Any) -> torch.Tensor:
            to, tiles = given
            return down(y, self._down, to.weights, tiles, how, fp8=second)

        chosen = []
        for product, gated in ((first_product, True), (second_product, False)):
            until = _share(deadline, 1 + gated)
            best = self._tile(rows, product, sorted_ones, until, gated=gated)
            if rows >= 64:
                orders = [best.model_copy(update={"group": one}) for one in candidates.GROUPS]
                best = self._search(orders, product, sorted_ones, until)
            chosen.append(best)
        return Grouped(tokens=len(hidden), rows=rows, gate_up=chosen[0], down=chosen[1])

    def _tile(
        self,
        rows: int,
        run: Callable[[Tile, Any], object],
        inputs: Sequence[Any],
        deadline: float | None,
        *,
        gated: bool,
    ) -> Tile:
        """Search the tiles that copy weights, and those without among the fastest of them."""
        group, item = 8 if rows >= 64 else 1, self._gate_up.itemsize
        options = partial(candidates.tiles, rows, group, self._shared, gated=gated, item=item)
        timed = self._timed(options(tma=True), run, inputs, _share(deadline, 2))
        others: Iterable[Tile] = [
            tile.model_copy(update={"tma": False}) for _, tile in timed[:_COMPARED]
        ]
        timed += self._timed(others if timed else options(tma=False), run, inputs, deadline)
        return _fastest(timed)

    def _search(
        self,
        options: Iterable[OptionT],
        run: Callable[[OptionT, Any], object],
        inputs: Sequence[Any],
        deadline: float | None,
    ) -> OptionT:
        """Return the option with which ``run`` is fastest over ``inputs``; tries at least some."""
        return _fastest(self._timed(options, run, inputs, deadline))

    def _timed(
        self,
        options: Iterable[OptionT],
        run: Callable[[OptionT, Any], object],
        inputs: Sequence[Any],
        deadline: float | None,
    ) -> list[tuple[float, OptionT]]:
        """Return the seconds of ``run`` with each option that can run, the fastest first."""
        remaining, timed, least = iter(options), [], float("inf")
        while batch := list(islice(remaining, _BATCH)):
            calls = [partial(run, option, inputs[0]) for option in batch]
            for option, usable in zip(batch, compile_in_parallel(calls), strict=True):
                self._advance(1)
                if not usable:
                    continue
                seconds = time_on_gpu([partial(run, option, one) for one in inputs], least)
                logger.debug("%.1f us: %s", 1e6 * seconds, option)
                timed.append((seconds, option))
                least = min(least, seconds)
            if deadline is not None and time.monotonic() > deadline and timed:
                break
        return sorted(timed, key=itemgetter(0))

    def _scales_of_products(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return (None, None) if self._scales is None else (self._scales.gate_up, self._scales.down)

    def _random(self, *shape: int) -> torch.Tensor:
        out = torch.empty(shape, dtype=self._context.dtype, device=self._context.device)
        return out.normal_(std=shape[-1] ** -0.5)


def _fastest(timed: Iterable[tuple[float, OptionT]]) -> OptionT:
    """Return the option that took the fewest seconds.

    Raises:
        UnsupportedBackendError: there is none.
    """
    found = min(timed, key=itemgetter(0), default=None)
    if found is None:
        raise UnsupportedBackendError("no launch of these sizes fits on this device")
    return found[1]


def _share(deadline: float | None, parts: int) -> float | None:
    """Return when the first of so many equal parts of the time left ends."""
    if deadline is None:
        return None
    now = time.monotonic()
    return now + (deadline - now) / parts


def _describe(launch: Launch) -> str:
    if isinstance(launch, Few):
        parts = [
            f"{one.outputs}x{one.inputs} w{one.warps}" for one in (launch.gate_up, launch.down)
        ]
        return f"not sorted: {', '.join(parts)}"
    parts = [
        f"{one.outputs}x{one.inputs} s{one.stages} w{one.warps} g{one.group}"
        f"{' swapped' if one.swapped else ''}{' tma' if one.tma else ''}"
        for one in (launch.gate_up, launch.down)
    ]
    return f"tiles of {launch.rows}: {', '.join(parts)}"
