"""``moe.weights_dtype``: who may run quantized experts, who is refused, and what the start says."""

import json
import logging
import re

import pytest

from minisgl import LLM, SamplingParams
from minisgl.bootstrap import load_host
from minisgl.bootstrap.experts import fp8_hint
from minisgl.bootstrap.site import Site
from minisgl.bootstrap.survey import survey
from minisgl.cli import main
from minisgl.errors import SettingsError, UnsupportedBackendError
from minisgl.plugins.capabilities import unmet_weights_dtype
from minisgl.plugins.experts import BACKENDS
from minisgl.plugins.selection import select_moe
from minisgl.settings import settings_from_keywords
from support import plugin_code
from support.plugin_site import plugin_site
from support.tiny_models import write_tiny_model

__all__ = ["plugin_site"]

FP8 = "float8_e4m3fn"


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "moe", "Qwen3MoeForCausalLM")


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "llama", "LlamaForCausalLM")


def look(model, **keywords) -> Site:
    settings = settings_from_keywords(model=str(model), environ={}, **keywords)
    return survey(settings, load_host(settings))


@pytest.mark.parametrize("keyword", ["moe_weights_dtype", "quantization"])
def test_the_query_asks_for_it_under_either_name(experts, keyword):
    assert look(experts, **{keyword: "fp8"}).query.moe_weights_dtype == FP8
    assert look(experts).query.moe_weights_dtype is None


def test_another_quantization_is_refused_with_what_there_is(experts, capsys):
    assert main(["plugins", "explain", "moe", "-m", str(experts), "--quantization", "awq"]) == 2
    assert re.search(r"'awq'.*'auto' or 'fp8'|--quantization.*auto.*fp8", capsys.readouterr().err)


@pytest.mark.parametrize("implementation", ["auto", "transformers"])
def test_a_model_without_experts_of_ours_is_refused(dense, experts, implementation):
    model, lack = dense, "LlamaForCausalLM has none; leave it at auto"
    if implementation == "transformers":
        model, lack = experts, "Qwen3MoeForCausalLM runs by transformers' own code, or a plugin's"
    with pytest.raises(SettingsError, match=rf"weights_dtype='fp8'.*{lack}"):
        look(model, moe_weights_dtype="fp8", model_implementation=implementation)


def test_a_backend_that_does_not_declare_it_is_refused_by_name(experts, plugin_site):
    plugin_site.add("acme", plugin_code.moe())
    host = plugin_site.load()
    query = look(experts, moe_weights_dtype="fp8").query
    with pytest.raises(UnsupportedBackendError) as caught:
        select_moe(host, query, "acme")
    assert str(caught.value) == (
        "moe.backend='acme' cannot run here: needs experts in float32, found float8_e4m3fn "
        "(moe.weights_dtype='fp8'; 'auto' is float32). Usable: torch."
    )
    assert select_moe(host, query).record.name == "torch"
    assert select_moe(host, look(experts).query).record.name == "acme"


def test_explain_says_so(experts, plugin_site, capsys):
    plugin_site.add("acme", plugin_code.moe())
    plugin_site.load()
    arguments = ["plugins", "explain", "moe", "--model", str(experts), "--quantization", "fp8"]
    assert main(arguments) == 0
    assert "6 experts in float8_e4m3fn" in capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["decisions"]}
    assert rows["torch"]["outcome"] == "chosen"
    assert rows["acme"]["outcome"] == "refused"
    assert "needs experts in float32" in rows["acme"]["reason"]


@pytest.mark.parametrize(
    ("capability", "refused"), [((8, 0), True), ((8, 6), True), ((8, 9), False), ((9, 0), False)]
)
def test_a_card_that_does_not_know_fp8_is_refused(experts, capability, refused, capsys):
    arguments = ["plugins", "explain", "moe", "--model", str(experts), "--quantization", "fp8"]
    version = ".".join(map(str, capability))
    words = ["--device", "cuda", "--dtype", "bfloat16", "--compute-capability", version]
    assert main([*arguments, *words]) == 0
    found = f"float8_e4m3fn need compute capability 8.9, found {version}"
    assert (found in capsys.readouterr().out) is refused


def test_a_device_that_is_not_known_yet_is_no_reason(experts):
    query = look(experts, moe_weights_dtype="fp8").query
    assert unmet_weights_dtype(BACKENDS[0], query) is None


def test_the_start_says_what_is_saved_and_serves(experts, caplog):
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    with (
        caplog.at_level(logging.INFO),
        LLM(str(experts), num_pages=60, quantization="fp8", progress=False) as llm,
    ):
        (result,) = llm.generate([[5, 6, 7]], params, progress=False)
    assert len(result.token_ids) == 5
    assert "experts are held in float8_e4m3fn with a scale for each output channel" in caplog.text


def test_who_runs_out_of_memory_is_told_of_it(experts, dense):
    assert "moe.weights_dtype" in fp8_hint(look(experts))
    assert not fp8_hint(look(experts, moe_weights_dtype="fp8"))
    assert not fp8_hint(look(dense))
