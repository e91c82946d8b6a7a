"""What ranks must have in common, without any process."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.bootstrap import load_host, ranks
from minisgl.bootstrap import survey as bootstrap_survey
from minisgl.bootstrap.memory import smallest
from minisgl.bootstrap.ranks import RankJob, build_parallel_engine, serve_rank
from minisgl.bootstrap.survey import _share_of_threads, survey
from minisgl.errors import PluginError, SettingsError
from minisgl.settings import Settings, settings_from_keywords
from minisgl.testing.communicators import run_ranks
from support.tiny_models import write_tiny_model


def settings_for(model: Path, **keywords: Any) -> Settings:
    return settings_from_keywords(model=str(model), environ={}, **keywords)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "llama", "LlamaForCausalLM")


def test_the_smallest_pool_of_all_ranks_is_everybodys() -> None:
    assert run_ranks(3, lambda c: smallest(c, [70, 30, 50][c.rank])) == [30, 30, 30]


def test_a_rank_s_backends_are_chosen_for_its_share_of_the_heads(tiny: Path) -> None:
    settings = settings_for(tiny, tp=4)
    site = survey(settings, load_host(settings))
    assert (site.query.num_q_heads, site.query.num_kv_heads) == (2, 1)
    assert site.query.tensor_parallel_size == 4


def test_heads_that_ranks_cannot_share_are_refused_before_anything_is_loaded(tiny: Path) -> None:
    settings = settings_for(tiny, tp=3)
    with pytest.raises(SettingsError, match=r"tensor_parallel_size=3 .* use one of \[1, 2, 4, 8\]"):
        survey(settings, load_host(settings))


def test_a_model_that_is_refused_starts_no_rank(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: fifteen interpreters that import torch before --tp 16 is refused."""

    def start(*_: Any, **__: Any) -> None:
        raise AssertionError("ranks are started")

    monkeypatch.setattr(ranks, "RankGroup", start)
    settings = settings_for(tiny, tp=16)
    with pytest.raises(SettingsError, match="use one of"):
        build_parallel_engine(settings, load_host(settings))


def test_several_ranks_on_a_gpu_are_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap_survey, "resolve_device", lambda _: torch.device("cuda"))
    settings = settings_for(tiny, tp=2)
    with pytest.raises(
        SettingsError, match=r"=2: several ranks run on the CPU only .*, not on cuda"
    ):
        survey(settings, load_host(settings))


@pytest.mark.parametrize(
    ("allowed", "ranks", "expected"), [("8", 2, 4), ("8", 3, 2), ("1", 4, 1), ("8", 1, None)]
)
def test_ranks_share_the_threads(
    monkeypatch: pytest.MonkeyPatch, allowed: str, ranks: int, expected: int | None
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", allowed)
    assert _share_of_threads(ranks) == expected


def test_a_rank_with_other_plugins_stops_and_names_the_difference(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for(tiny, tp=2)
    plugins = tuple(
        (name, "0.0.1" if name == "minisgl-models" else version)
        for name, version in load_host(settings).fingerprint()
    )

    class Link:
        rank = 1

        def receive_job(self) -> bytes:
            return pickle.dumps(RankJob(settings, plugins))

    monkeypatch.setattr(ranks, "configure_logging", lambda *_: None)
    with pytest.raises(PluginError, match=r"minisgl-models \(here \S+, there 0\.0\.1\)"):
        serve_rank(Link())  # type: ignore[arg-type]  # all of a link that it comes to need
