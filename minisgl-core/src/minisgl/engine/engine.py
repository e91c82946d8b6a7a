"""One device's engine: applies plans to its row state, runs the model, samples."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from minisgl.attention.batch import Batch
from minisgl.attention.interface import AttentionBackend
from minisgl.engine.batch_builder import build_batch
from minisgl.engine.controls import rehearsal_of
from minisgl.engine.device_reports import DeviceReports
from minisgl.engine.graph_runner import GraphRunner
from minisgl.engine.host_mirror import HostMirror, Launch
from minisgl.engine.info import EngineInfo
from minisgl.engine.logits import LogitsProcessing, SampledRows
from minisgl.engine.logits_bound import max_scored_tokens
from minisgl.engine.plan import CHUNK, NO_CONTROLS, ROW_PARAMS, BatchPlan, IntArray
from minisgl.engine.plan_codec import PlanLayout, decode_plan
from minisgl.engine.prefill_graphs import PrefillGraphs
from minisgl.engine.reports import NO_REPORTS, StepReports
from minisgl.engine.row_state import DeviceChunks, RowState
from minisgl.engine.sampler import SamplingTensors, sample
from minisgl.engine.staging import PlanStager, upload, usual_words
from minisgl.kernel.ops import OpTable
from minisgl.models.interface import BaseLLMModel


class StepHandle:
    """A launched step; ``tokens`` waits for it.

    Args:
        tokens: int32 ``[S]`` on the device: all launches' tokens, one after the other; the next
            step may overwrite them.
        reports: log-probabilities on the device, if there are any.
    """

    def __init__(self, tokens: torch.Tensor, reports: DeviceReports | None) -> None:
        self._event: torch.cuda.Event | None = None
        # Copied behind this step and waited for by its own event: later steps may run on.
        on_host = torch.empty(tokens.shape, dtype=torch.int32, pin_memory=tokens.is_cuda)
        self._tokens = on_host.copy_(tokens, non_blocking=True)
        self._reports = None if reports is None else reports.to_host()
        if tokens.is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def tokens(self) -> npt.NDArray[np.int32]:
        """Return the sampled tokens, int32 ``[S]``: of the decode rows, then of sampled chunks."""
        if self._event is not None:
            self._event.synchronize()
        array: npt.NDArray[np.int32] = self._tokens.numpy()
        return array

    def reports(self) -> StepReports:
        """Return the log-probabilities that came with the tokens, which have been read."""
        return NO_REPORTS if self._reports is None else self._reports.arrays()


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Seconds until the host had launched a prefill, and until its tokens were there."""

    launched: float
    done: float


class Engine:
    """Launches steps in the order of their plans.

    Args:
        model: built and filled.
        attention: the backend that the model's layers call.
        info: the engine's facts.
        device: where the row state lives.
        ops: the table of small fused operations.
        nvtx: name the parts of a step for a profiler.
    """

    def __init__(
        self,
        model: BaseLLMModel,
        attention: AttentionBackend,
        info: EngineInfo,
        device: torch.device,
        ops: OpTable | None = None,
        *,
        nvtx: bool = False,
    ) -> None:
        self.info = info
        self.graphs: GraphRunner | None = None
        self.prefill_graphs: PrefillGraphs | None = None
        self.state = RowState(
            info.max_running_requests, info.max_seq_len, info.page_size, device, ops
        )
        self._model = model
        self._attention = attention
        usual = usual_words(info.max_running_requests, info.vocab_size)
        on_gpu = device.type == "cuda"
        self._stager = PlanStager(usual, pin=True) if on_gpu else PlanStager()
        self._mirror = HostMirror(info.max_running_requests)
        self._processing = LogitsProcessing(info, device, self.state.ops)
        # A stream of its own: the default one waits for all others and they for it.
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            # What was made on other streams (weights, pool, row state) is there before it is used.
            torch.cuda.synchronize(device)
        # Not a method: a cycle would keep the engine's memory until the collector comes by.
        self._upload = partial(upload, device=device)
        self._nvtx = nvtx and device.type == "cuda"
        self._next_plan = 0

    def forward_batch(self, plan: BatchPlan) -> StepHandle:
        """Pack ``plan``, apply it and launch its forward passes; returns at once.

        Raises:
            Exception: whatever the model or a backend raises; the row state is consistent then
                (the plan is applied), and the step's tokens do not exist.
        """
        return self.forward_packed(self._stager.stage(plan), plan)

    def forward_packed(self, words: IntArray, plan: BatchPlan | None = None) -> StepHandle:
        """Do the same for a plan that is packed already, as another rank sent it.

        Args:
            words: int32; left as they are until the step's tokens have been read.
            plan: what ``words`` hold, where it is at hand.
        """
        layout = PlanLayout.of(words)
        plan = plan or decode_plan(words, layout)
        assert plan.number == self._next_plan, "plans are applied in order, each once"
        self._next_plan += 1
        with torch.inference_mode(), self.on_stream(), self._range("step"):
            launches = self._mirror.apply(plan)
            chunks = self.state.receive(words, layout)
            self._processing.take_reports()  # of a step that failed
            self._processing.receive(plan, self.state.words(layout.controls))
            tokens = self._run(launches, chunks, plan.number % 2)
            return StepHandle(tokens, self._processing.take_reports())

    def check_alive(self) -> None:
        """Nothing can be lost: the engine lives in this process."""

    def close(self) -> None:
        """There is nothing to stop: the engine lives in this process."""

    def warm_up(
        self,
        num_tokens: int = 1,
        *,
        most_rows: int | None = None,
        filtered: bool = False,
        controlled: bool = False,
    ) -> Prefilled:
        """Prefill tokens in as many rows as can be, then decode: no request pays for first times.

        The rows are greedy and sampled in turns, and one has a mask. K and V go to the dummy page:
        no plan has given the rows pages. To be called before the first plan; leaves no trace.

        Args:
            num_tokens: of all rows together.
            most_rows: that they are spread over; by default, as many as run at once.
            filtered: all rows are sampled, with filters.
            controlled: the rows ask for all that can be asked for beyond sampling; the last one of
                several for nothing.
        """
        info = self.info
        num_rows = min(info.max_running_requests, num_tokens, most_rows or num_tokens)
        added = np.zeros(num_rows, dtype=ROW_PARAMS)
        added["row"] = np.arange(num_rows)
        added["temperature"] = 1 if filtered else added["row"] % 2
        added["top_k"] = 9 if filtered else 0
        added["top_p"] = 0.9 if filtered else 1
        most = max_scored_tokens(info.vocab_size, info.page_size)
        lengths = _lengths(num_tokens, num_rows, info.max_seq_len, most if controlled else None)
        chunks = np.zeros(num_rows, dtype=CHUNK)
        chunks["row"], chunks["length"], chunks["sampled"] = added["row"], lengths, 1
        controls = NO_CONTROLS
        if controlled:
            controls = rehearsal_of(lengths[: max(1, num_rows - 1)], info.vocab_size, most)
        plan = BatchPlan(
            number=0,
            added=added,
            controls=controls,
            chunks=chunks,
            token_ids=np.zeros(sum(lengths), dtype=np.int32),
            mask_rows=np.zeros(1, dtype=np.int32),
            masks=np.full((1, -(-info.vocab_size // 32)), -1, dtype=np.int32),
        )
        began = time.perf_counter()
        handle = self.forward_batch(plan)
        launched = time.perf_counter()
        handle.tokens()
        prefilled = Prefilled(launched - began, time.perf_counter() - began)
        if max(lengths) < info.max_seq_len:
            order = added["row"].copy()
            plan = BatchPlan(number=1, decode_rows=order, num_decode_rows=num_rows)
            self.forward_batch(plan).tokens()
        self._forget_rows()
        return prefilled

    def _forget_rows(self) -> None:
        """Make everything as if no plan had come."""
        self._next_plan = 0
        self._mirror = HostMirror(self.info.max_running_requests)
        self._processing.reset()
        with torch.inference_mode(), self.on_stream():
            self.state.reset()

    def record_graphs(
        self, runner: GraphRunner, progress: Callable[[Sequence[int]], Iterable[int]]
    ) -> None:
        """Record decode steps; from now on they are replayed.

        Args:
            runner: made for this engine's state.
            progress: wraps the sizes, to show how far it is.
        """
        with torch.inference_mode(), self.on_stream():
            runner.record(progress)
        self.graphs = runner

    def record_prefills(
        self, graphs: PrefillGraphs, progress: Callable[[Sequence[int]], Iterable[int]]
    ) -> None:
        """Record prefills of few tokens; from now on they are replayed."""
        with torch.inference_mode(), self.on_stream():
            graphs.record(progress)
        self.prefill_graphs = graphs

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """Run on the engine's stream, on a GPU."""
        if self._stream is None:
            yield
        else:
            with torch.cuda.stream(self._stream):
                yield

    def _run(self, launches: tuple[Launch, ...], chunks: DeviceChunks, slot: int) -> torch.Tensor:
        """Run a step's launches; returns their tokens, int32."""
        state = self.state
        first, tokens = launches[0], []
        if self._replays(first):
            with self._range("decode graph"):
                tokens.append(self._replay(first, slot))
            launches = launches[1:]
        else:
            state.apply()
        # All lengths advance before anything can fail: the state stays that of the plan.
        shares = self._mirror.shares
        batches = [build_batch(launch, chunks, state, shares=shares) for launch in launches]
        for launch, batch in zip(launches, batches, strict=True):
            with self._range("prefill" if launch.num_prefill_tokens else "decode"):
                tokens.append(self._launch(launch, batch, slot, sum(map(len, tokens))))
        return tokens[0] if len(tokens) == 1 else torch.cat(tokens)

    def _replays(self, launch: Launch) -> bool:
        """Whether a recorded graph runs this launch."""
        return (
            self.graphs is not None
            and not launch.num_prefill_tokens
            and launch.num_decode_rows <= self.graphs.max_rows
        )

    def _replay(self, launch: Launch, slot: int) -> torch.Tensor:
        """Return the tokens of decode rows, int32 ``[R]``, by a graph."""
        assert self.graphs is not None
        if not self.state.in_inbox:
            self.state.apply()
        try:
            ends, shares = launch.ends.astype(np.int32), self._mirror.shares
            logits, tokens = self.graphs.replay(ends, slot, shares=shares)
        except Exception:
            # The graph would have applied the plan, which is about rows outside of this step too.
            self.state.apply()
            raise
        places = self._special(launch)
        if len(places):
            # The graph has drawn from the bare logits; these rows draw again.
            on_device = self._upload(places)
            rows = self.state.decode_rows[on_device]
            drawn = self._sample(launch, logits[on_device], rows, places, 0)
            tokens[on_device] = drawn.int()
            self.state.rows.last_token[rows] = drawn
        return tokens

    def _launch(self, launch: Launch, batch: Batch, slot: int, first: int) -> torch.Tensor:
        """Return the sampled tokens of one forward pass, int32 ``[S]``.

        ``first`` is the number of the step's tokens before these.
        """
        chunks, indices = self._processing.scored(launch)
        if chunks:
            assert batch.sample_indices is not None, "a launch with chunks names its rows"
            batch.sample_indices = torch.cat((batch.sample_indices, self._upload(indices)))
        batch.plan = self._attention.plan(batch, slot)
        if self.prefill_graphs is not None and self.prefill_graphs.fits(batch):
            logits = self.prefill_graphs.run(batch)
        else:
            logits = self._model.forward(batch)
        if chunks:
            self._processing.score(logits[launch.num_sampled :], chunks)
            logits = logits[: launch.num_sampled]
        rows = batch.rows[: launch.num_sampled]
        tokens = self._sample(launch, logits, rows, np.arange(launch.num_sampled), first)
        self.state.rows.last_token[rows] = tokens
        return tokens.int()

    def _sample(
        self,
        launch: Launch,
        logits: torch.Tensor,
        rows: torch.Tensor,
        places: npt.NDArray[np.int64],
        first: int,
    ) -> torch.Tensor:
        """Return one token, int64, of each of ``rows``, the launch's rows at ``places``.

        ``first`` is the number of the step's tokens before the launch's.
        """
        host_rows, lengths = launch.rows[places], self.state.rows.lengths[rows]
        sampled = SampledRows(
            rows=rows,
            lengths=lengths,
            host_rows=host_rows,
            ends=launch.ends[places],
            places=first + places,
        )
        changed = self._processing.change(logits, sampled)
        if changed is None:
            tokens = self._draw(logits, rows, lengths, host_rows)
        elif len(changed.places) == len(places):
            tokens = self._draw(changed.logits, rows, lengths, host_rows)
        else:
            # The others draw from what the model has left, in its dtype: as without neighbours.
            others = np.delete(np.arange(len(places)), changed.places)
            at, tokens = self._upload(others), torch.empty_like(rows)
            tokens[at] = self._draw(logits[at], rows[at], lengths[at], host_rows[others])
            at = changed.on_device
            of_changed = host_rows[changed.places]
            tokens[at] = self._draw(changed.logits, rows[at], lengths[at], of_changed)
        self._processing.accept(tokens, sampled)
        return tokens

    def _draw(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        host_rows: npt.NDArray[np.int64],
    ) -> torch.Tensor:
        """Return a token, int64, of each of ``rows``, which have ``lengths`` tokens.

        ``logits`` ``[S, vocab]`` may be written to.
        """
        state, mirror = self.state.rows, self._mirror
        if mirror.has_masks:
            self._mask(logits, host_rows)
        params = SamplingTensors(
            temperature=state.temperature[rows],
            top_k=state.top_k[rows],
            top_p=state.top_p[rows],
            min_p=state.min_p[rows],
            seed=state.seed[rows],
            positions=lengths,
            all_greedy=not mirror.temperature[host_rows].any(),
            filtered=mirror.filtered[host_rows],
        )
        return sample(logits, params, self.state.ops)

    def _special(self, launch: Launch) -> npt.NDArray[np.int64]:
        """Return the places of rows whose tokens need more than logits and noise, int64."""
        rows = launch.sampled_rows
        special = self._mirror.filtered[rows]
        concerned = self._processing.concerns(rows, launch.sampled_ends)
        if self._mirror.has_masks:
            special = special | (self._mirror.mask_places[rows] >= 0)
        return (special if concerned is None else special | concerned).nonzero()[0]

    def _mask(self, logits: torch.Tensor, host_rows: npt.NDArray[np.int64]) -> None:
        """Leave those rows that have a mask only the tokens that it names."""
        which = self._mirror.mask_places[host_rows]
        places = (which >= 0).nonzero()[0]
        if len(places):
            assert self.state.masks is not None, "the plan has brought the masks"
            on_device = self._upload(np.stack((places, which[places])))
            self.state.ops.mask_tokens(logits, on_device[0], self.state.masks, on_device[1])

    @contextlib.contextmanager
    def _range(self, name: str) -> Iterator[None]:
        """Name a part of a step for a profiler, if that is asked for."""
        if not self._nvtx:
            yield
            return
        torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


def _lengths(num_tokens: int, num_rows: int, longest: int, first: int | None) -> list[int]:
    """Return how many of the tokens each row gets: equal shares, at most ``longest``.

    With ``first`` the first row gets that many, as far as the others have one each.
    """
    if first is not None:
        first = min(first, longest, num_tokens - num_rows + 1)
        rest = _lengths(num_tokens - first, num_rows - 1, longest, None) if num_rows > 1 else []
        return [first, *rest]
    share, more = divmod(num_tokens, num_rows)
    return [min(share + (row < more), longest) for row in range(num_rows)]
