"""What is planned for CUDA graphs, when, and what is refused; recorded launches run on a card."""

import numpy as np
import pytest
import torch

from minisgl.errors import MinisglError
from minisgl.testing.paged_rows import PagedRows
from minisgl_attn_flashinfer.graphs import FlashInferGraphs, GraphPlan
from support.fake_flashinfer import Fakes

SPLIT, UNSPLIT = 3, 6
"""Rows of launches that the fake kernels split, and leave whole."""


def make() -> tuple[PagedRows, Fakes, FlashInferGraphs]:
    rows = PagedRows([300] * 4, page_size=16, num_q_heads=4, num_kv_heads=2, head_dim=8)
    fakes = Fakes(rows.context)
    rows.allocate()
    assert isinstance(fakes.backend.cuda_graphs, FlashInferGraphs)
    return rows, fakes, fakes.backend.cuda_graphs


def capture(rows: PagedRows, graphs: FlashInferGraphs, size: int) -> GraphPlan:
    return graphs.prepare_capture(rows.batch([rows.padding_row] * size, [1] * size))


def lengths(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@pytest.mark.parametrize(("size", "graph"), [(SPLIT, True), (UNSPLIT, False)])
def test_only_launches_that_may_be_split_are_planned_for_graphs(size, graph):
    rows, fakes, graphs = make()
    plan = capture(rows, graphs, size)
    assert plan.planned == graph
    assert {planned for _, _, _, planned in fakes.decode.plans} == {graph}


def test_capture_plans_the_shortest_and_the_longest_rows_too():
    rows, fakes, graphs = make()
    seen = []
    plan = fakes.decode.plan

    def noting(workspace, host, num_rows, num_tokens, *, graph):
        seen.append(host.kv_lens[:num_rows].tolist())
        return plan(workspace, host, num_rows, num_tokens, graph=graph)

    fakes.decode.plan = noting  # type: ignore[method-assign]
    capture(rows, graphs, SPLIT)
    assert seen == [[1, 1, 1], [304, 304, 304], [1, 1, 1]]


def test_a_graph_attends_to_whatever_it_is_replayed_with():
    rows, fakes, graphs = make()
    layer = rows.layers[0]
    for size in (UNSPLIT, SPLIT):
        plan = capture(rows, graphs, size)
        for number, seen in enumerate(([300] * size, [1] * size, [17, 16, *[250] * (size - 2)])):
            q, order = rows.queries(size), [row % 4 for row in range(size)]
            graphs.prepare_replay(plan, lengths(*seen), number % 2)
            fakes.stream.run_up_to(fakes.stream.place())
            if not plan.planned:
                # Its schedule holds no lengths on a card; the fakes look at them all the same.
                plan.workspace.ints.view(torch.int32)[:size] = torch.tensor(seen)
            graphs.enqueue(rows.batch(order, seen), plan)
            out = fakes.backend.attend(q, layer, plan)
            expected = rows.expected(q, layer, order, seen)
            torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)


def test_a_replay_without_splits_costs_no_plan_and_no_copy():
    rows, fakes, graphs = make()
    plan = capture(rows, graphs, UNSPLIT)
    before = len(fakes.decode.plans), fakes.stream.place()
    for number in range(4):
        graphs.prepare_replay(plan, lengths(*[number + 1] * UNSPLIT), number % 2)
    assert (len(fakes.decode.plans), fakes.stream.place()) == before


def test_replays_of_split_rows_alternate_between_two_host_buffers_and_wait_for_copies():
    rows, fakes, graphs = make()
    plan = capture(rows, graphs, SPLIT)
    fakes.stream.run_up_to(fakes.stream.place())
    fakes.decode.plans.clear()
    fakes.stream.log.clear()
    for number in range(3):
        graphs.prepare_replay(plan, lengths(300, 2, 16 * number + 20), number % 2)
    first, second, third = (host for host, _, _, _ in fakes.decode.plans)
    assert first is third
    assert first is not second
    assert fakes.stream.log == ["plan", "plan", "wait", "plan"]
    assert {ints.data_ptr() for _, ints, _, _ in fakes.decode.plans} == {
        plan.workspace.ints.data_ptr()
    }


def test_split_rows_are_planned_anew_only_when_one_of_them_gets_a_page():
    """Catches: a schedule that is older than the rows' pages."""
    rows, fakes, graphs = make()
    plan = capture(rows, graphs, SPLIT)
    fakes.decode.plans.clear()
    planned = []
    for number, last in enumerate([14, 15, 16, 17, 18, 33, 32, 1]):
        graphs.prepare_replay(plan, lengths(300, 2, last), number % 2)
        planned.append(len(fakes.decode.plans))
    assert planned == [1, 1, 1, 2, 2, 3, 4, 5]


def test_graphs_share_the_list_of_pages_and_no_schedule():
    rows, _, graphs = make()
    plans = [capture(rows, graphs, size) for size in (UNSPLIT, SPLIT, 1)]
    assert len({plan.index.indices.data_ptr() for plan in plans}) == 1
    assert len(plans[0].index.indices) == UNSPLIT * 19
    for part in ("kv_indptr", "last_page_lens", "qo_indptr"):
        assert len({getattr(plan.index, part).data_ptr() for plan in plans}) == 3
    assert len({plan.workspace.ints.data_ptr() for plan in plans}) == 3
    assert plans[1].index.qo_indptr.tolist() == [0, 1, 2, 3]


def test_a_larger_graph_after_a_smaller_one_gets_buffers_of_its_own():
    rows, _, graphs = make()
    small = capture(rows, graphs, SPLIT)
    large = capture(rows, graphs, 200)
    assert len(large.index.indices) == 200 * 19
    assert len(small.index.indices) == 4 * 19
    graphs.prepare_replay(small, lengths(1, 2, 3), 0)


def test_a_plan_unlike_the_recorded_one_is_an_error_before_the_replay():
    rows, fakes, graphs = make()
    plan = capture(rows, graphs, SPLIT)
    fakes.decode.extra = 16
    with pytest.raises(MinisglError, match=r"of 3 rows as \(19, True, True\), but its CUDA graph"):
        graphs.prepare_replay(plan, lengths(100, 2, 3), 0)
    with pytest.raises(MinisglError):
        graphs.prepare_replay(plan, lengths(100, 2, 3), 1)  # the same pages again: no less wrong


def test_a_planner_that_goes_by_the_lengths_is_refused_when_recording():
    rows, fakes, graphs = make()
    plan = fakes.decode.plan

    def by_length(workspace, host, num_rows, num_tokens, *, graph):
        info = plan(workspace, host, num_rows, num_tokens, graph=graph)
        return [*info[:-1], int(host.kv_lens[0]) > 100]

    fakes.decode.plan = by_length  # type: ignore[method-assign]
    with pytest.raises(MinisglError, match="but its CUDA graph needs"):
        capture(rows, graphs, SPLIT)


def test_splits_where_none_were_expected_are_refused_when_recording():
    rows, fakes, graphs = make()
    fakes.decode.never_splits = lambda num_rows: True  # type: ignore[method-assign]
    with pytest.raises(MinisglError, match="splits a decode launch of 3 rows"):
        capture(rows, graphs, SPLIT)
