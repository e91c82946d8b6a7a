"""Device, host mirror and scheduler agree on every row after every plan, whatever happens."""

import numpy as np
import torch
from hypothesis import given

from minisgl.benchmark.plan_replay import PlanReplay
from minisgl.engine.batch_builder import build_batch
from minisgl.engine.host_mirror import HostMirror
from minisgl.engine.plan_codec import PlanLayout
from minisgl.engine.row_state import RowState
from minisgl.engine.staging import PlanStager
from support.schedules import Ask, run, schedules, set_ups


@given(set_ups(), schedules(with_aborts=True, max_size=6))
def test_device_and_mirror_advance_alike(set_up: dict[str, object], schedule: list[Ask]) -> None:
    """Catches: a row whose length is taken over from its last owner, an order sent too late."""
    harness = run(set_up, schedule)
    info = harness.engine.info
    mirror, replay, stager = HostMirror(info.max_running_requests), PlanReplay(info), PlanStager()
    state = RowState(
        info.max_running_requests, info.max_seq_len, info.page_size, torch.device("cpu")
    )
    for plan in harness.engine.plans:
        words = stager.stage(plan)
        replay.apply([words])
        launches = mirror.apply(plan)
        chunks = state.receive(words, PlanLayout.of(words))
        state.apply()
        positions: dict[int, list[int]] = {}
        for launch in launches:
            batch = build_batch(launch, chunks, state)
            assert batch.rows.tolist() == launch.rows.tolist()
            assert batch.kv_lens.tolist() == state.rows.lengths[batch.rows].tolist()
            assert batch.kv_lens.tolist() == batch.kv_lens_device.tolist()
            of_token = np.repeat(launch.rows, launch.query_lens)
            ends = np.cumsum(launch.query_lens)
            assert batch.num_tokens == ends[-1]
            for row, position, slot in zip(
                of_token.tolist(), batch.positions.tolist(), batch.slots.tolist(), strict=True
            ):
                positions.setdefault(row, []).append(position)
                page = replay.pages[row, position // info.page_size]
                assert slot == page * info.page_size + position % info.page_size
            sampled = batch.sample_indices
            expected = (ends - 1)[: launch.num_sampled]
            assert (np.arange(len(ends)) if sampled is None else sampled).tolist() == list(expected)
        for row, found in positions.items():
            end = int(replay.lengths[row])
            assert found == list(range(end - len(found), end))
            assert int(state.rows.lengths[row]) == end
