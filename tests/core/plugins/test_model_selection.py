"""Who computes a model: a plugin, or transformers' own code; and what is said about it."""

from types import SimpleNamespace

import pytest

from minisgl.errors import AmbiguousBackendError, UnknownBackendError
from minisgl.models.hf import architectures
from minisgl.plugins.model_selection import select_model

MODELS = """
from minisgl.plugins import ModelRecord, hookimpl
@hookimpl
def minisgl_models():
    return (ModelRecord(architectures=("Olmo2ForCausalLM", "OwnForCausalLM"), config_reader="x:r",
                        model="x:X", summary=""),)
"""


def rows(selection):
    return [(row.name, row.distribution, row.outcome, row.rank) for row in selection.table]


def test_a_plugin_comes_first(plugin_site):
    plugin_site.add("acme-models", MODELS)
    chosen = select_model(plugin_site.load(), ["Olmo2ForCausalLM"])
    assert (chosen.record.model, chosen.warning) == ("x:X", "")
    assert not chosen.through_transformers
    assert rows(chosen) == [
        ("Olmo2ForCausalLM", "acme-models", "chosen", 1),
        ("transformers", "minisgl-core", "usable", 0),
    ]
    assert chosen.table[1].reason == "Olmo2ForCausalLM has rank 1"


def test_transformers_runs_what_no_plugin_offers(plugin_site):
    chosen = select_model(plugin_site.load(), ["Olmo2ForCausalLM"])
    assert chosen.through_transformers
    assert rows(chosen) == [("transformers", "minisgl-core", "chosen", 0)]
    assert chosen.record.model == "minisgl.models.hf.model:TransformersModel"


def test_transformers_can_be_insisted_on(plugin_site):
    plugin_site.add("acme-models", MODELS)
    chosen = select_model(plugin_site.load(), ["Olmo2ForCausalLM"], "transformers")
    assert chosen.through_transformers
    assert chosen.warning == ""
    assert rows(chosen)[0] == ("Olmo2ForCausalLM", "acme-models", "refused", None)
    assert chosen.table[0].reason == "model.implementation='transformers'"


def test_a_plugin_can_be_insisted_on(plugin_site):
    with pytest.raises(UnknownBackendError) as caught:
        select_model(plugin_site.load(), ["Olmo2ForCausalLM"], "plugin")
    message = str(caught.value)
    assert message.startswith("architecture='Olmo2ForCausalLM' is not installed. Installed: ")
    assert message.endswith("Or run it by transformers' own code: --model-implementation auto.")
    plugin_site.add("acme-models", MODELS)
    chosen = select_model(plugin_site.load(), ["Olmo2ForCausalLM"], "plugin")
    assert rows(chosen)[1] == ("transformers", "minisgl-core", "refused", None)


def test_an_architecture_of_a_plugin_alone(plugin_site):
    plugin_site.add("acme-models", MODELS)
    host = plugin_site.load()
    chosen = select_model(host, ["OwnForCausalLM"])
    assert chosen.record.model == "x:X"
    assert chosen.table[1].reason == "it has no causal language model of that name"
    with pytest.raises(UnknownBackendError) as caught:
        select_model(host, ["OwnForCausalLM"], "transformers")
    message = str(caught.value)
    assert message.startswith("model.implementation='transformers': transformers, too, has no ")


@pytest.mark.parametrize("implementation", ["auto", "plugin", "transformers"])
def test_a_typo_names_the_nearest(plugin_site, implementation):
    with pytest.raises(UnknownBackendError) as caught:
        select_model(plugin_site.load(), ["Olmo2ForCausalLn"], implementation)
    message = str(caught.value)
    assert "has no causal language model 'Olmo2ForCausalLn'." in message
    assert message.endswith("Nearest: 'Olmo2ForCausalLM'.")
    if implementation != "transformers":
        assert "Try: pip install -U minisgl-models" in message


def test_the_first_architecture_that_anybody_has(plugin_site):
    plugin_site.add("acme-models", MODELS)
    host = plugin_site.load()
    assert select_model(host, ["Unknown", "OwnForCausalLM"]).record.model == "x:X"
    assert select_model(host, ["Unknown", "GlmForCausalLM"]).through_transformers
    # A plugin is preferred even where transformers knows a name that comes earlier.
    assert select_model(host, ["GlmForCausalLM", "OwnForCausalLM"]).record.model == "x:X"


def test_choosing_a_plugin_imports_no_modelling_code(plugin_site):
    """It takes a second, which a start without it need not pay."""
    plugin_site.add("acme-models", MODELS)
    code = """
    import sys
    from minisgl.plugins.host import load_plugins
    from minisgl.plugins.model_selection import select_model
    assert not select_model(load_plugins(), ["Olmo2ForCausalLM"]).through_transformers
    heavy = ("transformers.modeling_utils", "transformers.models.auto.auto_factory")
    print(any(name in sys.modules for name in heavy))
    """
    done = plugin_site.python(code)
    assert (done.stdout, done.returncode) == ("False\n", 0), done.stderr


def test_two_plugins_that_offer_it_are_not_settled_by_transformers(plugin_site):
    plugin_site.add("acme-models", MODELS)
    plugin_site.add("other-models", MODELS)
    with pytest.raises(AmbiguousBackendError, match="Disable one"):
        select_model(plugin_site.load(), ["Olmo2ForCausalLM"])


def test_the_warning_cites_a_package_that_failed_or_is_disabled(plugin_site):
    plugin_site.add("broken", "import nothing_so_called")
    host = plugin_site.load(disabled=["minisgl-models"])
    warning = select_model(host, ["LlamaForCausalLM"]).warning
    assert "the fast version is in minisgl-models (pip install minisgl-models)." in warning
    assert "Failed to load: broken 1.0" in warning
    assert "Disabled: minisgl-models." in warning


def test_the_names_in_the_source_of_transformers_are_all_that_it_has():
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert architectures.written_names() == dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert architectures.known_architectures() == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())


@pytest.mark.parametrize("source", ["", "X = 1", "NAMES = OrderedDict(\n    list(pairs)\n)\n"])
def test_a_source_that_does_not_spell_them_out_is_imported(monkeypatch, tmp_path, source):
    file = tmp_path / "names.py"
    file.write_text(f"\n{source}".replace("NAMES", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"))
    spec = SimpleNamespace(origin=str(file))
    monkeypatch.setattr(architectures, "find_spec", lambda _: spec)
    assert architectures.written_names() is None
    assert "LlamaForCausalLM" in architectures.known_architectures()
