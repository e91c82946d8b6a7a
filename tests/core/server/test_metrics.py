"""``/metrics``: names, numbers, and that they never fail a request."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from minisgl.message import Pong
from minisgl.server.metrics import EngineMetrics
from support.http_asks import CHAT, HELLO, TEXT, run
from support.in_process_engine import MODEL, Served

NAMES = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "prompt_tokens": "counter",
    "prompt_tokens_cached": "counter",
    "generation_tokens": "counter",
    "prefix_cache_queries": "counter",
    "prefix_cache_hits": "counter",
    "num_preemptions": "counter",
    "request_success": "counter",
    "request_failure": "counter",
    "http_requests": "counter",
    "http_responses": "counter",
    "time_to_first_token_seconds": "histogram",
    "time_per_output_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "request_prompt_tokens": "histogram",
    "request_generation_tokens": "histogram",
}


async def scrape(server: Served) -> dict[str, float]:
    """Every sample by its name and labels but ``model_name``."""
    text = (await server.http.get("/metrics")).text
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(
                f"{key}={value}" for key, value in sample.labels.items() if key != "model_name"
            )
            samples[f"{sample.name.removeprefix('minisgl:')}{{{labels}}}"] = sample.value
    return samples


async def after(server: Served, *bodies: dict[str, Any]) -> dict[str, float]:
    for body in bodies:
        await server.http.post(TEXT if "prompt" in body else CHAT, json=body)
    while server.client.heartbeat.last is None:
        await asyncio.sleep(0.001)
    return await scrape(server)


def test_every_metric_has_its_name_and_type_from_the_start() -> None:
    async def scenario(server: Served) -> dict[str, str]:
        await after(server)
        text = (await server.http.get("/metrics")).text
        assert f'model_name="{MODEL}"' in text
        return {f.name: f.type for f in text_string_to_metric_families(text)}

    found = run(scenario)
    assert {name: found.get(f"minisgl:{name}") for name in NAMES} == NAMES


def test_the_page_lists_exactly_these_metrics() -> None:
    async def scenario(server: Served) -> set[str]:
        await after(server)
        text = (await server.http.get("/metrics")).text
        return {
            f.name + ("_total" if f.type == "counter" else "")
            for f in text_string_to_metric_families(text)
            if not f.name.endswith("_created")  # the client library's own, one a counter
        }

    page = (Path(__file__).parents[3] / "docs" / "http.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(minisgl:\w+)`", page)) == run(scenario)


def test_tokens_reasons_and_sizes_are_counted() -> None:
    bodies: list[dict[str, Any]] = [
        {"prompt": "ace", "max_tokens": 5},
        {"prompt": ["ace", "ho"], "max_tokens": 2, "n": 2, "stream": True},
        HELLO,
        {"prompt": [299, 10**6], "max_tokens": 2},
    ]
    samples = run(lambda server: after(server, *bodies))
    [chat] = [bodies[2]]
    assert samples["request_success_total{finished_reason=length}"] == 5
    assert samples["request_success_total{finished_reason=stop}"] == 1
    assert samples["request_success_total{finished_reason=abort}"] == 0
    assert samples["request_failure_total{}"] == 1
    num_chat = samples["generation_tokens_total{}"] - 5 - 8
    assert num_chat > 5
    assert samples["prompt_tokens_total{}"] > 3 + 2 * (3 + 2)
    assert samples["request_generation_tokens_count{}"] == 6
    assert samples["request_generation_tokens_sum{}"] == 13 + num_chat
    assert samples["time_to_first_token_seconds_count{}"] == 6
    assert samples["e2e_request_latency_seconds_count{}"] == 6
    assert samples["time_per_output_token_seconds_count{}"] == 6
    between = samples["inter_token_latency_seconds_count{}"]
    assert between == samples["inter_token_latency_seconds_bucket{le=+Inf}"] > 0
    assert samples[f"http_requests_total{{handler={TEXT},method=POST}}"] == 3
    assert samples[f"http_responses_total{{handler={TEXT},method=POST,status=400}}"] == 1
    assert samples[f"http_responses_total{{handler={CHAT},method=POST,status=200}}"] == 1
    assert chat


def test_buckets_are_cumulative() -> None:
    samples = run(lambda server: after(server, {"prompt": "ace", "max_tokens": 50}))
    buckets = [v for k, v in samples.items() if k.startswith("inter_token_latency_seconds_bucket")]
    assert buckets == sorted(buckets)


def test_a_client_that_leaves_is_counted_as_an_abort() -> None:
    async def scenario(server: Served) -> dict[str, float]:
        from minisgl.request import SamplingParams

        server.client.generate(["ace"], [SamplingParams(max_tokens=4000)] * 2).close()
        return await after(server)

    assert run(scenario)["request_success_total{finished_reason=abort}"] == 2


def test_the_heartbeat_becomes_gauges_and_counters() -> None:
    beat = Pong(1, 7, 2, 3, 25, 100, num_retracted=4, num_queried_tokens=50, num_cached_tokens=20)
    registry = EngineMetrics("m", lambda: beat).registry
    for name, value in {
        "num_requests_running": 2,
        "num_requests_waiting": 3,
        "kv_cache_usage_perc": 0.75,
        "num_preemptions_total": 4,
        "prefix_cache_queries_total": 50,
        "prefix_cache_hits_total": 20,
        "scheduler_steps_total": 7,
    }.items():
        assert registry.get_sample_value(f"minisgl:{name}", {"model_name": "m"}) == value


def test_unknown_routes_and_methods_do_not_become_labels() -> None:
    async def scenario(server: Served) -> dict[str, float]:
        for name in ("a", "b"):
            await server.http.get(f"/{name}")
            await server.http.request(name.upper() * 3, TEXT)
        return await after(server)

    samples = run(scenario)
    assert samples["http_responses_total{handler=other,method=GET,status=404}"] == 2
    assert not any("AAA" in name or "/a" in name for name in samples)


def test_an_observer_that_fails_costs_no_request_anything(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("asked", "replied", "failed", "left"):
        monkeypatch.setattr(EngineMetrics, name, lambda *a: 1 / 0)

    async def scenario(server: Served) -> list[int]:
        bodies = [{"prompt": "ace", "max_tokens": 2}, {"prompt": [10**6]}]
        return [(await server.http.post(TEXT, json=body)).status_code for body in bodies]

    assert run(scenario) == [200, 400]
    assert "observer" in caplog.text


def test_after_everything_has_ended_nothing_is_remembered() -> None:
    async def scenario(server: Served) -> int:
        await after(server, HELLO, {"prompt": ["a", "b"], "n": 3}, {"prompt": [10**6]})
        return len(server.client.observer._running)

    assert run(scenario) == 0


def test_openmetrics_is_sent_to_who_asks_for_it() -> None:
    async def scenario(server: Served) -> tuple[str, str]:
        accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
        answer = await server.http.get("/metrics", headers=accept)
        plain = await server.http.get("/metrics")
        return answer.headers["content-type"], plain.headers["content-type"]

    openmetrics, plain = run(scenario)
    assert openmetrics.startswith("application/openmetrics-text")
    assert plain.startswith("text/plain")
