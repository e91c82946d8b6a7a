"""``minisgl plugins list | show | check | explain``."""

import json

import pytest

from minisgl.cli import main
from support import plugin_code
from support.tiny_models import write_tiny_model


@pytest.fixture
def site(plugin_site):
    code = plugin_code.attention(
        answer="Supported(200, 200)", devices=("cuda",), min_compute_capability=(9, 0)
    )
    plugin_site.add("acme-attn", code)
    return plugin_site


@pytest.fixture
def run(capsys):
    def run(*arguments, code=0):
        assert main(["plugins", *arguments]) == code
        return capsys.readouterr()

    return run


def test_list(site, run):
    site.add("broken", "import nothing_so_called")
    text = run("list", "--disable-plugin", "minisgl-models").out
    lines = {line.split()[0]: line for line in text.splitlines()}
    assert lines["acme-attn"].split() == [
        *("acme-attn", "1.0", "active", "attention_backends:", "acme")
    ]
    offers = lines["minisgl-core"]
    assert "prefix_caches: radix, naive; grammar_backends: xgrammar; tool_parsers: " in offers
    assert "disabled" in lines["minisgl-models"]
    assert lines["failed:"].startswith("failed: broken 1.0 (import: No module named 'nothing_so")


def test_list_as_json(site, run):
    site.add("acme-other", plugin_code.attention())
    site.add("broken", "import nothing_so_called")
    shown = json.loads(run("list", "--json").out)
    plugins = {plugin["distribution"]: plugin for plugin in shown["plugins"]}
    assert plugins["acme-attn"]["offers"] == {"minisgl_attention_backends": ["acme"]}
    assert plugins["acme-attn"]["failure"] is None
    assert plugins["broken"]["failure"]["stage"] == "import"
    ways = ["acme-attn:acme", "acme-other:acme"]
    assert shown["ambiguous"] == {"attention.backend": {"acme": ways}}


@pytest.mark.parametrize("name", ["Acme_Attn", "acme"])
def test_show(site, run, name):
    text = run("show", name).out
    assert text.startswith("acme-attn 1.0: active\n  attention\n    acme: A test's backend\n")
    assert "option width = 3" in text
    assert "devices: cuda; min compute capability: 9, 0; cuda graphs: no" in text


def test_show_a_failure(site, run):
    site.add("broken", "import nothing_so_called")
    (shown,) = json.loads(run("show", "broken", "--json").out)
    assert shown["status"] == "failed"
    assert shown["failure"]["hint"] == "Install what provides the module 'nothing_so_called'."
    text = run("show", "broken").out
    assert "  stage: import\n  error: No module named 'nothing_so_called'\n  hint: " in text


def test_show_what_is_not_there(site, run):
    done = run("show", "acme-atn", code=2)
    assert "No installed plugin is called or offers 'acme-atn'." in done.err
    assert "Nearest: 'acme-attn'." in done.err


def test_check(site, run):
    assert run("check").out == "3 active, 0 failed\n"
    site.add("broken", "import nothing_so_called")
    done = run("check", code=3)
    assert done.out.startswith("3 active, 1 failed\nfailed: broken 1.0 (import: ")
    shown = json.loads(run("check", "--json", code=3).out)
    assert (shown["ok"], len(shown["failures"])) == (False, 1)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        name: str(write_tiny_model(folder / name, name))
        for name in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
    }


def test_explain_without_a_gpu(site, run, models):
    model = models["Qwen3ForCausalLM"]
    text = run("explain", "attention", "--model", model, "--device", "cpu").out
    assert text.startswith("device cpu (compute capability none), dtype float32, page size 16,")
    assert "refused  -     needs device cuda, found cpu" in text
    assert "To ask for one, give --device cuda." in text


def test_explain_says_why_the_backends_that_are_named_cannot_run(plugin_site, site, run, models):
    plugin_site.add("acme-hnd", plugin_code.attention("hnd", kv_layout="HND"))
    arguments = ["explain", "attention", "--model", models["Qwen3ForCausalLM"], "--device", "cpu"]
    problem = "attention.backend='hnd,torch' cannot be a pair: 'hnd' reads pages of layout HND and"
    text = run(*arguments, "--attention-backend", "hnd,torch").out
    assert problem in text
    assert "needs KV layout HND, found NHD" in text
    named = run(*arguments, "--attention-backend", "hnd,torch", "--json").out
    assert json.loads(named)["problem"].startswith(problem)
    for choice in ("auto", "torch"):
        named = run(*arguments, "--attention-backend", choice, "--json").out
        assert json.loads(named)["problem"] is None


def test_explain_says_why_the_moe_backend_that_is_named_cannot_run(plugin_site, site, run, models):
    plugin_site.add("acme-moe", plugin_code.moe("onward", devices=("cuda",)))
    line = ["explain", "moe", "--model", models["Qwen3MoeForCausalLM"], "--device", "cpu"]
    problem = "moe.backend='onward' cannot run here: needs device cuda, found cpu. Usable: "
    assert problem in run(*line, "--moe-backend", "onward").out
    named = run(*line, "--moe-backend", "onward", "--json").out
    assert json.loads(named)["problem"].startswith(problem)
    assert "cannot run here" not in run(*line, "--moe-backend", "torch").out
    spread = ["--tp", "2", "--ep", "2", "--moe-exchange"]
    assert "cannot run here" not in run(*line, *spread, "all-to-all").out
    assert "moe.exchange='all' is not installed" in run(*line, *spread, "all", code=3).err
    dense = ["explain", "moe", "--model", models["Qwen3ForCausalLM"], "--device", "cpu"]
    for arguments in (line, dense):
        assert "Nearest: 'torch'" in run(*arguments, "--moe-backend", "trch", code=3).err


def test_explain_for_a_gpu_that_is_not_here(site, run, models):
    arguments = ["explain", "attention", "--model", models["Qwen3ForCausalLM"], "--json"]
    arguments += ["--device", "cuda", "--dtype", "bfloat16", "--compute-capability"]
    shown = json.loads(run(*arguments, "9.0").out)
    assert shown["query"]["compute_capability"] == [9, 0]
    assert shown["query"]["dtype"] == "bfloat16"
    chosen = [row for row in shown["decisions"] if row["outcome"] == "chosen"]
    assert [(row["name"], row["phase"]) for row in chosen] == [
        ("acme", "prefill"),
        ("acme", "decode"),
    ]
    older = json.loads(run(*arguments, "8.9").out)
    assert "needs compute capability 9.0, found 8.9" in {r["reason"] for r in older["decisions"]}


@pytest.mark.parametrize("kind", ["moe", "ops"])
def test_explain_the_other_kinds(site, run, models, kind):
    model = models["Qwen3MoeForCausalLM"]
    text = run("explain", kind, "--model", model, "--device", "cpu").out
    assert ("moe" if kind == "moe" else "op rms_norm") in text
    assert "chosen" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["attention"], "explain needs a model: give --model PATH_OR_ID."),
        (["attenton", "--model", "x"], "invalid choice: 'attenton'"),
    ],
)
def test_explain_what_cannot_be(site, run, arguments, message):
    assert message in run("explain", *arguments, code=2).err


def test_explain_experts_that_cannot_be_spread_as_serve_would(site, run, models):
    line = ["explain", "moe", "--model", models["Qwen3ForCausalLM"], "--device", "cpu"]
    assert "has no routed experts; set it to 1" in run(*line, "--tp", "2", "--ep", "2", code=2).err


def test_a_flag_of_other_commands_is_not_its_own_nearest_one(site, run):
    error = run("explain", "moe", "--num-pages", "5", code=2).err
    assert "Unknown argument '--num-pages'. It is a flag of other commands" in error
    assert "Nearest" not in error


def test_explain_a_malformed_compute_capability(site, run, models):
    arguments = ["attention", "--model", models["Qwen3ForCausalLM"], "--compute-capability", "9"]
    done = run("explain", *arguments, code=2)
    assert "--compute-capability '9' must be written as 9.0." in done.err


def test_explain_a_model(site, run, models):
    model = models["Qwen3ForCausalLM"]
    text = run("explain", "model", "--model", model, "--device", "cpu").out
    lines = [line.split() for line in text.splitlines()]
    assert ["model", "any", "Qwen3ForCausalLM", "minisgl-models", "chosen", "1"] in lines
    without = ("--disable-plugin", "minisgl-models")
    text = run("explain", "model", "--model", model, "--device", "cpu", *without).out
    assert "transformers  minisgl-core  chosen" in text
    assert "the fast version is in minisgl-models" in text
    shown = json.loads(run("explain", "model", "--model", model, "--json", *without).out)
    (row,) = shown["decisions"]
    assert (row["name"], row["outcome"]) == ("transformers", "chosen")
    assert shown["query"]["num_kv_heads"] == 2
