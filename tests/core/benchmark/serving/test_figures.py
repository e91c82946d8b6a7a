"""Figures of records that were made by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.benchmark.serving.figures import Distribution, concurrency, summarize
from minisgl.benchmark.serving.records import ClientHealth, LoadResult, RequestRecord


def record(number=0, sent=0.0, first=1.0, ended=2.0, tokens=11, **fields):
    return RequestRecord(
        number, sent, sent, first_token=first, ended=ended, output_tokens=tokens,
        num_chunks=fields.pop("num_chunks", tokens), status=200, **fields,
    )  # fmt: skip


HEALTH = [ClientHealth(0.1, 1.0, [0.001])]


def test_every_figure_of_two_answers_and_a_failure():
    records = [
        record(0, 1.0, 1.5, 3.5, 11, input_tokens=10, intervals=[0.2] * 10, finish_reason="stop"),
        record(1, 2.0, 3.0, 5.0, 5, input_tokens=30, intervals=[0.5] * 4, cached_tokens=8),
        RequestRecord(2, 2.0, 2.0, ended=2.5, error="HTTP 500: no"),
    ]
    figures = summarize(LoadResult(records, HEALTH), {"ttft": 600.0, "tpot": 300.0})
    assert (figures.successful, figures.failed) == (2, 1)
    assert figures.failures == {"HTTP 500: no": 1}
    assert figures.duration_s == 4.0
    assert figures.requests_per_s == 0.5
    assert (figures.input_tokens, figures.cached_tokens, figures.output_tokens) == (40, 8, 16)
    assert (figures.input_tokens_per_s, figures.output_tokens_per_s) == (10.0, 4.0)
    assert figures.ttft_ms.mean == pytest.approx(750)
    assert figures.e2e_ms.max == pytest.approx(3000)
    assert figures.tpot_ms.mean == pytest.approx((200 + 500) / 2)
    assert figures.itl_ms.mean == pytest.approx((10 * 200 + 4 * 500) / 14)
    assert figures.goodput.num_good == 1
    assert figures.goodput.requests_per_s == 0.25
    assert figures.finish_reasons == {"stop": 1, "None": 1}
    assert figures.max_concurrency == 3
    assert figures.mean_concurrency == pytest.approx((2.5 + 3 + 0.5) / 4)
    assert figures.client.busy is None


def test_an_answer_of_one_token_has_no_time_per_token_and_meets_any_limit_on_it():
    figures = summarize(LoadResult([record(tokens=1)], HEALTH), {"tpot": 0.001})
    assert figures.tpot_ms is None
    assert figures.itl_ms is None
    assert figures.goodput.num_good == 1


@pytest.mark.parametrize(
    ("health", "words"),
    [(ClientHealth(0.9, 1.0), "90% of a core"), (ClientHealth(0.1, 1.0, [0.05]), "50 ms late")],
)
def test_a_busy_client_is_named(health, words):
    busy = summarize(LoadResult([record()], [*HEALTH, health])).client.busy
    assert busy is not None
    assert words in busy


@given(st.lists(st.floats(0, 1e3), min_size=1))
def test_percentiles_are_ordered_and_those_of_numpy(seconds):
    found = Distribution.of(seconds)
    assert found.median <= found.p90 <= found.p95 <= found.p99 <= found.max
    assert found.p95 == pytest.approx(float(np.percentile(np.asarray(seconds), 95)) * 1e3)


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.01, 10)), min_size=1, max_size=20))
def test_most_requests_at_once_is_the_most_at_any_beginning(spans):
    records = [record(i, at, at, at + took) for i, (at, took) in enumerate(spans)]
    most, mean = concurrency(records)
    assert most == max(sum(a.sent <= b.sent < a.ended for a in records) for b in records)
    assert 0 < mean <= most + 1e-6
