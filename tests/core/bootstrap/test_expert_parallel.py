"""What of the settings of expert parallelism is refused, and what is created from the others."""

import json

import pytest

from minisgl.bootstrap import load_host
from minisgl.bootstrap.engine import build_engine
from minisgl.bootstrap.survey import survey
from minisgl.cli import main
from minisgl.errors import SettingsError, UnknownBackendError, UnsupportedBackendError
from minisgl.layers.moe import MoeLayer
from minisgl.settings import settings_from_keywords
from minisgl.testing.communicators import run_ranks
from support import plugin_code
from support.plugin_site import plugin_site
from support.tiny_models import write_tiny_model

__all__ = ["plugin_site"]


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """A model of 6 experts, which 8 attention heads and 2 KV heads let run on 1, 2, 4 and 8."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "olmoe", "OlmoeForCausalLM")


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "llama", "LlamaForCausalLM")


def settings_for(model, **keywords):
    return settings_from_keywords(model=str(model), environ={}, **keywords)


def look(model, **keywords):
    settings = settings_for(model, **keywords)
    return survey(settings, load_host(settings))


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        (
            {"tp": 2, "ep": 4},
            r"expert_parallel_size=4 is more than parallel\.tensor_parallel_size=2.* set that to 4",
        ),
        ({"ep": 2}, r"expert_parallel_size=2 is more than parallel\.tensor_parallel_size=1"),
        (
            {"tp": 4, "ep": 3},
            r"=3 does not divide .*size=4 and this model's 6 experts; use one of \[1, 2\]",
        ),
        ({"tp": 4, "ep": 4}, r"=4 does not divide .* 6 experts; use one of \[1, 2\]"),
        (
            {"tp": 2, "moe_exchange": "all-to-all"},
            r"moe\.exchange='all-to-all' has nothing to do, because .*expert_parallel_size=1",
        ),
    ],
)
def test_sizes_that_cannot_be_are_refused_with_those_that_can(experts, keywords, message):
    with pytest.raises(SettingsError, match=message):
        look(experts, **keywords)


def test_a_model_without_experts_is_refused(dense):
    with pytest.raises(SettingsError, match="=2: LlamaForCausalLM has no routed experts; set it"):
        look(dense, tp=2, ep=2)


@pytest.mark.parametrize("alias", ["--expert-parallel-size", "--ep-size", "--ep", "-ep"])
def test_the_flags_are_those_of_other_servers(alias, experts, capsys):
    arguments = ["plugins", "explain", "moe", "--model", str(experts), "--json", "--tp", "2"]
    assert main([*arguments, alias, "2"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["query"]["expert_parallel_size"] == 2
    assert {
        (row["name"], row["outcome"])
        for row in answer["decisions"]
        if row["kind"] == "moe.exchange"
    } == {("all-reduce", "chosen"), ("all-to-all", "usable")}


def test_without_it_no_exchange_is_among_the_decisions(experts, capsys):
    assert main(["plugins", "explain", "moe", "--model", str(experts), "--tp", "2"]) == 0
    assert "moe.exchange" not in capsys.readouterr().out


PLUGIN = """
from pydantic import BaseModel, ConfigDict
from minisgl.plugins import ExpertExchangeRecord, Supported, Unsupported, hookimpl

class Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    factor: float = 1.0

def create(context, settings):
    from minisgl.moe import DispatchedTokens, ExpertExchange

    class Scaled(ExpertExchange):
        def dispatch(self, hidden, weights, experts):
            return DispatchedTokens(hidden, weights, experts, settings.factor)

        def combine(self, out, tokens, partial):
            total = out if partial is None else out + partial
            return context.communicator.all_reduce(total) * tokens.state

    exchange = Scaled()
    exchange.context = context
    return exchange

@hookimpl
def minisgl_expert_exchanges():
    yield ExpertExchangeRecord(
        name="scaled", summary="A test's", settings_type=Options,
        probe=lambda query: {answer}, create=create,
    )
"""


def layer_outputs(model, host, **keywords):
    """What the first layer with experts makes of the same rows, by rank."""
    settings = settings_for(model, tp=2, ep=2, num_pages=20, **keywords)
    site = survey(settings, host)

    def work(communicator):
        import torch

        engine = build_engine(site, communicator, progress=False)
        layer = next(x for x in engine._model.layers() if isinstance(x, MoeLayer))
        rows = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
        return layer.forward(rows), layer._exchange

    return run_ranks(2, work)


def test_a_plugin_takes_the_exchange_over(experts, plugin_site):
    plugin_site.add("acme", PLUGIN.replace("{answer}", "Supported(5, 5)"))
    host = plugin_site.load()
    (expected, own), _ = layer_outputs(experts, host, moe_exchange="all-reduce")
    (outputs, taken), (_, other) = layer_outputs(
        experts, host, backend_options={"scaled": {"factor": 2.0}}
    )
    assert (type(own).__name__, type(taken).__name__) == ("AllReduceExchange", "Scaled")
    assert (outputs - 2 * expected).abs().max() < 1e-4 * expected.abs().max()
    context = other.context
    assert context.communicator.rank == 1
    assert context.placement.experts_of(1) == range(3, 6)
    assert (context.top_k, context.hidden_size) == (2, 64)
    assert context.max_num_tokens >= 2048


def test_a_plugin_that_cannot_run_is_refused_with_its_reason(experts, plugin_site):
    plugin_site.add("acme", PLUGIN.replace("{answer}", "Unsupported('needs a switch')"))
    host = plugin_site.load()
    with pytest.raises(UnsupportedBackendError, match=r"moe\.exchange='scaled'.*needs a switch"):
        layer_outputs(experts, host, moe_exchange="scaled")
    _, (_, chosen) = layer_outputs(experts, host)
    assert type(chosen).__name__ == "AllReduceExchange"


def test_what_is_no_exchange_and_no_backend_is_refused_by_name(experts, plugin_site):
    """Catches: a create without its return, after which nothing exchanged anything."""
    code = PLUGIN.replace("{answer}", "Supported(5, 5)").replace("return exchange", "pass")
    plugin_site.add("acme", code)
    plugin_site.add("other", plugin_code.moe("two"))
    plugin_site.add("third", plugin_code.attention("both"))
    host = plugin_site.load()
    others = {"moe_exchange": "all-reduce", "moe_backend": "torch", "attention_backend": "torch"}
    for changed, message in (
        ({"moe_exchange": "scaled"}, "moe.exchange backend 'acme:scaled' .*returned None, .*Expe"),
        ({"moe_backend": "two"}, r"moe backend 'other:two' .*returned \(Moe.* is no MoeBackend"),
        ({"attention_backend": "both"}, "attention backend 'third:both' .*no AttentionBackend"),
        ({"attention_backend": "torch,both"}, "backend 'third:both' .*no AttentionBackend"),
    ):
        with pytest.raises(UnsupportedBackendError, match=message):
            layer_outputs(experts, host, **(others | changed))


def test_a_typo_names_the_nearest(experts, plugin_site):
    with pytest.raises(UnknownBackendError, match=r"moe\.exchange='all-to-al'.*'all-to-all'"):
        layer_outputs(experts, plugin_site.load(), moe_exchange="all-to-al")
