"""Rank 0's engine with the other ranks behind it, and what every rank checks against it."""

import zlib
from typing import Final

import numpy as np
import numpy.typing as npt

from minisgl.distributed.progress import DIGEST_DEPTH, Digests, RankProgress
from minisgl.distributed.rank_group import RankGroup
from minisgl.engine.engine import Engine, StepHandle
from minisgl.engine.plan import BatchPlan, IntArray
from minisgl.engine.reports import StepReports
from minisgl.engine.staging import PlanStager
from minisgl.errors import EngineLostError

COMPARE_EVERY: Final = 64
"""Every so many plans rank 0 compares all ranks' digests with its own."""


class DigestKeeper:
    """One rank's running digests, published step by step.

    Args:
        progress: of this rank.
    """

    def __init__(self, progress: RankProgress) -> None:
        self._progress = progress
        self._plans = [0] * DIGEST_DEPTH
        self._tokens = 0

    def begin(self, number: int, words: IntArray) -> None:
        """Take in a packed plan that is about to run."""
        before = self._plans[(number - 1) % DIGEST_DEPTH]
        self._plans[number % DIGEST_DEPTH] = zlib.crc32(words.data, before)
        self._progress.begin(number)

    def finish(self, number: int, tokens: npt.NDArray[np.int32]) -> None:
        """Take in the tokens of the oldest plan that has not finished."""
        self._tokens = zlib.crc32(tokens.data, self._tokens)
        self._progress.finish(number, Digests(self._plans[number % DIGEST_DEPTH], self._tokens))


class ParallelStepHandle:
    """A step launched on every rank; ``tokens`` waits for this rank's, which are everybody's."""

    def __init__(self, engine: "ParallelEngine", number: int, local: StepHandle) -> None:
        self._engine = engine
        self._number = number
        self._local = local

    def tokens(self) -> npt.NDArray[np.int32]:
        """Return the sampled tokens, as ``StepHandle.tokens`` does.

        Raises:
            EngineLostError: the step failed, or the ranks do not agree on what they have done.
        """
        return self._engine.finish(self._number, self._local)

    def reports(self) -> StepReports:
        """Return this rank's, which are everybody's, as ``StepHandle.reports`` does."""
        return self._local.reports()


class ParallelEngine:
    """A ``StepEngine`` of several ranks: every plan is packed once, sent, and run by all.

    With several ranks each failed step is fatal: nobody can tell which ranks have run how much
    of it, and a rank that waits in a collective would take the next step's numbers for its own.

    Args:
        engine: this process's.
        group: the other ranks, serving. The engine closes it.
    """

    def __init__(self, engine: Engine, group: RankGroup) -> None:
        self.info = engine.info
        self._engine = engine
        self._group = group
        self._own = group.board.ranks[0]
        self._keeper = DigestKeeper(self._own)
        self._stager = PlanStager()

    def forward_batch(self, plan: BatchPlan) -> ParallelStepHandle:
        """Send ``plan`` to the other ranks and launch this rank's part; returns at once.

        Raises:
            EngineLostError: a rank, this one included, has failed, ended or fallen behind.
        """
        words = self._stager.stage(plan)
        self._keeper.begin(plan.number, words)
        self._group.send(words.data.cast("B"))
        try:
            local = self._engine.forward_packed(words, plan)
        except Exception as error:
            raise self._group.explain(error, f"step {plan.number}") from error
        return ParallelStepHandle(self, plan.number, local)

    def finish(self, number: int, local: StepHandle) -> npt.NDArray[np.int32]:
        """Wait for a step's tokens; now and then compare what the ranks have done.

        Raises:
            EngineLostError: the step failed, or the ranks do not agree on what they have done.
        """
        try:
            tokens = local.tokens()
        except Exception as error:
            raise self._group.explain(error, f"step {number}") from error
        self._keeper.finish(number, tokens)
        # All ranks took part in this step, so they had finished the one before it.
        if number % COMPARE_EVERY == 0 and number > 0:
            self._compare(number - 1)
        return tokens

    def check_alive(self) -> None:
        """Look after the other ranks, for a scheduler with nothing to do.

        Raises:
            EngineLostError: one of them has ended, hangs, or has done something else.
        """
        self._group.check_alive()
        last = self._own.finished
        if all(progress.finished == last for progress in self._group.board.ranks):
            self._compare(last)

    def close(self) -> None:
        """Stop the other ranks. Safe to call twice."""
        self._group.close()

    def _compare(self, number: int) -> None:
        """Compare the digests up to plan ``number``, one of the last ones finished."""
        own = self._own.digests(number)
        for rank, progress in enumerate(self._group.board.ranks[1:], start=1):
            digests = progress.digests(number)
            if digests != own:
                what = "sampled other tokens" if digests.plans == own.plans else "got other plans"
                raise self._group.explain(
                    EngineLostError(
                        f"{self._group.name(rank)} {what} than rank 0 by step {number}"
                    ),
                    f"step {number}",
                )
