"""``minisgl bench offline`` on a tiny model: rounds, the record, the profile."""

import json
import shutil
import time

import pytest

from minisgl.benchmark import environment
from minisgl.benchmark.offline import Round
from minisgl.benchmark.step_profiler import StepProfiler
from minisgl.benchmark.workload import Workload
from minisgl.cli import main
from minisgl.engine.plan import BatchPlan
from minisgl.llm import GenerationProgress
from minisgl.scheduler import launch as scheduler_launch
from minisgl.settings import resolve_settings
from support.tiny_models import build_tiny_model

FLAGS = (
    "--load-format", "dummy", "--num-pages", "200", "--max-running-requests", "8",
    "--log-level", "error",
)  # fmt: skip
SMALL = (
    "--num-prompts", "5", "--input-len", "3:20", "--output-len", "30:40", "--max-token-id", "262",
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a ``config.json`` and nothing else."""
    folder = tmp_path_factory.mktemp("models") / "Tiny-0.0B"
    folder.mkdir()
    config = build_tiny_model("Qwen3ForCausalLM").config.to_dict()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(environment, "find_commit", lambda: "abc123")


def run(model, tmp_path, *flags):
    path = tmp_path / "out.json"
    line = ["bench", "offline", "--model", str(model), *FLAGS, *flags, "--json", str(path)]
    assert main(line) == 0
    return json.loads(path.read_text())


def test_two_rounds_and_their_record(model, tmp_path, capsys):
    began = time.perf_counter()
    record = run(model, tmp_path, *SMALL, "--seeds", "7,3")
    took = time.perf_counter() - began
    rounds = record["rounds"]
    workload = Workload(num_prompts=5, input_len=(3, 20), output_len=(30, 40), max_token_id=262)
    for one, seed in zip(rounds, (7, 3), strict=True):
        prompts, params = workload.requests(seed)
        assert one["seed"] == seed
        assert one["num_input_tokens"] == sum(map(len, prompts))
        assert one["num_output_tokens"] == sum(p.max_tokens or 0 for p in params)
        assert one["num_cached_tokens"] == 0, "the prefix cache must not answer"
        assert one["tokens_per_second"] == one["num_output_tokens"] / one["seconds"]
        first, between = one["time_to_first_token_ms"], one["time_per_output_token_ms"]
        assert 0 < first["median"] <= first["p99"] <= one["seconds"] * 1e3
        assert 0 < between["median"] * 29 < one["seconds"] * 1e3
    assert [one["counts"] for one in rounds] == [False, True]
    assert record["tokens_per_second"] == rounds[1]["tokens_per_second"]
    startup = record["startup"]
    assert 0 < startup["load_s"] < took < startup["process_to_ready_s"] + took
    assert startup["process_to_ready_s"] > startup["load_s"]
    assert record["model"] == "Tiny-0.0B"
    assert record["commit"] == "abc123"
    assert record["command"].startswith("minisgl bench offline --model ")
    assert record["versions"].keys() >= {"python", "torch", "transformers", "minisgl-core"}
    assert record["device"]["name"]
    assert record["settings"] == {
        "model.path": str(model), "model.load_format": "dummy", "model.skip_tokenizer_init": True,
        "cache.num_pages": 200, "scheduler.max_running_requests": 8, "log.level": "error",
    }  # fmt: skip
    assert record["workload"]["input_len"] == [3, 20]
    text = capsys.readouterr().out
    assert "warm-up" in text
    assert "median of seeds 3:" in text


@pytest.mark.parametrize(("launch", "mixed"), [("split", False), ("mixed", True), ("auto", True)])
def test_the_record_says_how_steps_were_launched(model, tmp_path, monkeypatch, launch, mixed):
    plans = []

    def watched(**parts):
        plans.append(BatchPlan(**parts))
        return plans[-1]

    monkeypatch.setattr(scheduler_launch, "BatchPlan", watched)
    record = run(model, tmp_path, *SMALL, "--seeds", "0,1", "--set", f"scheduler.launch={launch}")
    assert {plan.mixed for plan in plans} == {mixed}
    assert record["engine"]["mixed_launches"] is mixed


def test_a_preset_brings_its_settings_unless_the_user_says_otherwise(model, tmp_path, monkeypatch):
    from minisgl.benchmark import offline

    seen = []
    real = offline.bench_offline

    def watched(settings, workload, seeds, **options):
        seen.append((settings, workload))
        small = Workload(num_prompts=1, input_len=(5, 5), output_len=(2, 2), max_token_id=9)
        return real(settings, small, seeds, **options)

    monkeypatch.setattr(offline, "bench_offline", watched)
    record = run(model, tmp_path, "--preset", "one-request", "--max-seq-len", "300")
    settings, workload = seen[0]
    assert settings.model.max_seq_len == 300
    assert settings.scheduler.max_running_requests == 8
    assert workload.input_len == (512, 512)
    assert record["preset"] == "one-request"


def test_steps_are_recorded_in_a_round_that_does_not_count(model, tmp_path, capsys):
    trace = tmp_path / "trace.json"
    record = run(
        model, tmp_path, *SMALL, "--seeds", "0,1", "--profile", str(trace), "--profile-steps", "4"
    )
    assert len(record["rounds"]) == 2
    assert record["profile"]["seed"] == 2
    assert record["profile"]["num_running"] == 5
    events = json.loads(trace.read_text())["traceEvents"]
    steps = [e for e in events if str(e.get("name", "")).startswith("ProfilerStep#")]
    assert len({e["name"] for e in steps}) == 4
    assert "0 launches of CUDA graphs" in capsys.readouterr().out, "there is no GPU here"


def test_recording_waits_until_every_prompt_has_its_first_token(tmp_path):
    """Catches: a profile of prompts, where one of decode steps is wanted."""
    profiler = StepProfiler(tmp_path / "trace.json", 2)
    for num_started in (0, 1):
        for _ in range(20):
            profiler(GenerationProgress(num_prompts=2, num_started=num_started, num_done=0))
    assert not profiler.is_written
    for _ in range(20):
        profiler(GenerationProgress(num_prompts=2, num_started=2, num_done=1))
    assert profiler.is_written
    profiler.close()
    assert profiler.num_running == 1
    assert (tmp_path / "trace.json").is_file()


def test_a_round_too_short_to_record_is_an_error(model, tmp_path, capsys):
    flags = ("--num-prompts", "1", "--input-len", "5", "--output-len", "6", "--max-token-id", "9")
    line = ["bench", "offline", "--model", str(model), *FLAGS, *flags]
    assert main([*line, "--seeds", "0,1", "--profile", str(tmp_path / "t.json")]) == 2
    assert "--profile-steps 10: the round ended too early" in capsys.readouterr().err


def test_what_a_preset_brought_is_said_where_a_model_is_too_small(model, capsys):
    """Catches: advice to lower a setting that nobody has typed, down to where nothing fits."""
    line = ["bench", "offline", "--preset", "shared-prefix", "--model", str(model), *FLAGS]
    assert main(line) == 2
    error = capsys.readouterr().err
    assert "--preset shared-prefix brings model.max_seq_len=10240, scheduler.max_running" in error
    assert "its requests have up to 8576 tokens" in error


def test_ids_beyond_the_vocabulary_are_refused(model, capsys):
    assert main(["bench", "offline", "--model", str(model), *FLAGS, "--num-prompts", "1"]) == 2
    assert "--max-token-id 10000: the model's ids go from 0 to 262" in capsys.readouterr().err


def test_text_needs_a_tokenizer(model, capsys):
    line = ["bench", "offline", "--model", str(model), *FLAGS, *SMALL, "--detokenize"]
    assert main(line) == 4
    assert "holds no tokenizer" in capsys.readouterr().err


def test_the_result_is_the_median_of_the_rounds_that_count():
    from minisgl.benchmark.offline import OfflineResult

    rounds = tuple(
        Round(
            seed=seed, counts=seed > 0, num_prompts=1, num_input_tokens=1, num_output_tokens=tokens,
            num_cached_tokens=0, seconds=1.0, time_to_first_token_ms=None,
            time_per_output_token_ms=None,
        )
        for seed, tokens in enumerate((9000, 100, 300, 200))
    )  # fmt: skip
    result = OfflineResult(engine={}, load_s=1.0, ready_s=None, rounds=rounds, profile=None)
    assert result.tokens_per_second == 200.0


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_that_of_the_checkout_and_of_no_other(tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(environment.minisgl, "__file__", str(tmp_path / "__init__.py"))
    (tmp_path / "__init__.py").touch()
    assert environment.find_commit() is None
    words = [["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]]
    for one in words:
        identity = ("-c", "user.name=x", "-c", "user.email=x@x")
        assert environment._git(tmp_path, *identity, *one) is not None
    assert environment.find_commit() is None, "the package lies in somebody else's repository"
    environment._git(tmp_path, "add", ".")
    environment._git(tmp_path, "-c", "user.name=x", "-c", "user.email=x@x", "commit", "-qm", "y")
    commit = environment.find_commit()
    assert commit is not None
    assert len(commit) == 40
    (tmp_path / "__init__.py").write_text("# edited")
    assert environment.find_commit() == f"{commit}+changes"


def test_secrets_stay_out_of_the_record():
    resolved = resolve_settings(flags={"server.api_key": "hush"}, environ={})
    assert "hush" not in str(environment.changed_settings(resolved))
