"""Grammar engines through the hook: chosen by rank or name, missing ones said, others' used."""

from pathlib import Path

import pytest

from minisgl import LLM, SamplingParams
from minisgl.errors import RequestError, SettingsError, UnknownBackendError, UnsupportedBackendError
from minisgl.plugins.grammar_selection import select_grammar
from minisgl.request import GrammarSpec
from support.markdown import blocks
from support.tiny_models import write_tiny_model

PLUGINS = Path(__file__).parents[3] / "docs" / "plugins.md"

ACME = """
from pydantic import BaseModel, ConfigDict

from minisgl.plugins import GrammarBackendRecord, NoSettings, Unsupported, hookimpl


class Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    strict: bool = False


def create(context, settings):
    from acme_grammar_engine import Letters

    return Letters(context)


@hookimpl
def minisgl_grammar_backends():
    yield GrammarBackendRecord(
        name="letters", summary="", settings_type=Options, probe=lambda: RANK, create=create
    )
"""


@pytest.fixture
def without_xgrammar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl.plugins.builtin.find_spec", lambda name: None)


def acme(plugin_site, rank: str = "20") -> None:
    plugin_site.add("acme-grammar", ACME.replace("RANK", rank))
    [engine] = [one.text for one in blocks(PLUGINS, "python") if "class Letters" in one.text]
    (plugin_site.root / "acme_grammar_engine.py").write_text(engine)
    plugin_site.modules.add("acme_grammar_engine")


def test_auto_takes_the_highest_rank(plugin_site):
    acme(plugin_site)
    chosen = select_grammar(plugin_site.load())
    assert chosen.record is not None
    assert chosen.record.name == "letters"
    assert {row.name: row.outcome for row in chosen.table} == {
        "letters": "chosen", "xgrammar": "usable",
    }  # fmt: skip


def test_a_name_beats_a_rank(plugin_site):
    acme(plugin_site)
    host = plugin_site.load()
    for name in ("xgrammar", "minisgl-core:xgrammar"):
        chosen = select_grammar(host, name)
        assert chosen.record is not None
        assert chosen.record.name == "xgrammar"
        assert chosen.settings.max_whitespace == 8


@pytest.mark.parametrize(
    ("rank", "reason"),
    [
        ("Unsupported('needs a licence')", "letters needs a licence"),
        ("1 / 0", "letters its probe raised ZeroDivisionError"),
        ("'high'", "letters its probe returned 'high'"),
    ],
)
def test_without_any_the_reasons_are_kept(plugin_site, without_xgrammar, rank, reason):
    acme(plugin_site, rank)
    chosen = select_grammar(plugin_site.load())
    assert chosen.record is None
    assert reason in chosen.off
    assert "pip install 'minisgl-core[structured]'" in chosen.off


def test_none_switches_them_off(plugin_site):
    chosen = select_grammar(plugin_site.load(), "none")
    assert (chosen.record, chosen.off) == (None, "structured.backend is none")


def test_a_name_that_cannot_run_ends_the_start(plugin_site, without_xgrammar):
    with pytest.raises(UnsupportedBackendError, match="needs the package xgrammar"):
        select_grammar(plugin_site.load(), "xgrammar")
    with pytest.raises(UnknownBackendError, match="Nearest: 'xgrammar'"):
        select_grammar(plugin_site.load(), "xgramar")


def test_two_of_one_name_are_no_candidates(plugin_site):
    acme(plugin_site)
    plugin_site.add("other-grammar", ACME.replace("RANK", "30"))
    chosen = select_grammar(plugin_site.load())
    assert chosen.record is not None
    assert chosen.record.name == "xgrammar"


def test_options_are_checked(plugin_site):
    acme(plugin_site)
    host = plugin_site.load()
    chosen = select_grammar(host, "letters", {"letters": {"strict": True}})
    assert chosen.settings.strict
    with pytest.raises(SettingsError, match="max_whitespace"):
        select_grammar(host, "auto", {"xgrammar": {"max_whitespace": 0}})


@pytest.mark.parametrize("name", ["auto", "none"])
def test_names_that_mean_something_else_are_refused(plugin_site, name):
    plugin_site.add("acme-grammar", ACME.replace('"letters"', repr(name)).replace("RANK", "1"))
    [failure] = plugin_site.load().failures
    assert f"name '{name}' is taken" in failure.error


def test_the_example_of_the_documentation_is_obeyed(plugin_site, tmp_path):
    """A separately-made distribution, from its entry point to the tokens of a model."""
    acme(plugin_site)
    model = write_tiny_model(tmp_path / "tiny", "LlamaForCausalLM")
    params = SamplingParams(
        temperature=1, seed=1, max_tokens=30, grammar=GrammarSpec("regex", "[heo]*")
    )
    with LLM(str(model), progress=False, num_pages=40) as llm:
        [result] = llm.generate([[5, 6]], params, progress=False)
        assert result.text
        assert set(result.text) <= set("heo")
        with pytest.raises(RequestError, match="letters knows regex"):
            llm.generate(
                [[5, 6]], SamplingParams(grammar=GrammarSpec("json_object")), progress=False
            )


def test_without_the_extra_all_else_is_served(plugin_site, without_xgrammar, tmp_path):
    model = write_tiny_model(tmp_path / "tiny", "LlamaForCausalLM")
    with LLM(str(model), progress=False, num_pages=40) as llm:
        with pytest.raises(RequestError, match=r"minisgl-core\[structured\]") as refused:
            llm.generate(
                [[5, 6]], SamplingParams(grammar=GrammarSpec("json_object")), progress=False
            )
        assert (refused.value.status, refused.value.param) == (400, "grammar")
        [result] = llm.generate([[5, 6]], SamplingParams(max_tokens=3), progress=False)
        assert result.token_ids
