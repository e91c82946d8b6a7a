"""Each way in which a plugin can fail to load, and what is said about it."""

import importlib.metadata
import logging
from pathlib import Path

import pytest

from minisgl.errors import PluginError
from minisgl.plugins import AttentionBackendRecord
from support import plugin_code

IMPORT = "from minisgl.plugins import hookimpl\n"


def only_failure(host):
    assert [failure.distribution for failure in host.failures] == ["acme-attn"]
    return host.failures[0]


def test_a_plugin_is_known_by_its_normalised_distribution_name(plugin_site):
    plugin_site.add("Acme.Attn", plugin_code.attention(), entry_points=["core = acme_attn_plugin"])
    host = plugin_site.load()
    assert not host.failures
    assert ("acme-attn", "1.0") in host.fingerprint()
    assert host.attention.get("acme").distribution == "acme-attn"
    assert host.attention.get("torch").distribution == "minisgl-core"


@pytest.mark.parametrize("requirement", ["minisgl-core>=0.2", "minisgl_core==0.0.1"])
def test_version_out_of_range(plugin_site, requirement):
    plugin_site.add("acme-attn", "raise AssertionError", requires=[requirement])
    failure = only_failure(plugin_site.load())
    assert failure.stage == "version"
    assert failure.error == f"it needs minisgl-core{requirement[12:]}, installed is 0.1.0"
    assert failure.hint == "Install a matching pair: pip install -U minisgl-core acme-attn"


def test_version_range_of_an_extra_or_another_package_does_not_count(plugin_site):
    requires = ["other<1", "minisgl-core<0.1; extra == 'old'", "minisgl-core>=0.1"]
    plugin_site.add("acme-attn", plugin_code.attention(), requires=requires)
    assert not plugin_site.load().failures


def test_malformed_requirement(plugin_site):
    plugin_site.add("acme-attn", plugin_code.attention(), requires=["minisgl-core >> 1"])
    failure = only_failure(plugin_site.load())
    assert failure.stage == "version"
    assert "its requirement 'minisgl-core >> 1' is malformed" in failure.error


def test_missing_kernel_package(plugin_site):
    plugin_site.add("acme-attn", "import acme_kernels_xyz")
    failure = only_failure(plugin_site.load())
    assert failure.stage == "import"
    assert failure.error == "No module named 'acme_kernels_xyz'"
    assert failure.hint == "Install what provides the module 'acme_kernels_xyz'."


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("raise ValueError('no\\n good')", "ValueError: no good"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("def f(:", "SyntaxError: invalid syntax"),
        ("from minisgl.plugins import nothing_so_called", "cannot import name 'nothing_so_called'"),
    ],
)
def test_import_that_breaks(plugin_site, code, error):
    plugin_site.add("acme-attn", code)
    failure = only_failure(plugin_site.load())
    assert failure.stage == "import"
    assert failure.error.startswith(error)
    assert failure.hint == "Run: python -c 'import acme_attn_plugin'"


def test_keyboard_interrupt_is_not_swallowed(plugin_site):
    plugin_site.add("acme-attn", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        plugin_site.load()


def test_hook_with_an_argument_that_does_not_exist(plugin_site):
    plugin_site.add("acme-attn", f"{IMPORT}@hookimpl\ndef minisgl_models(device): return []")
    failure = only_failure(plugin_site.load())
    assert failure.stage == "register"
    assert "minisgl_models" in failure.error
    assert "device" in failure.error
    assert "minisgl.plugins.HookSpecs" in failure.hint


def test_unknown_hook_names_the_nearest(plugin_site):
    plugin_site.add("acme-attn", f"{IMPORT}@hookimpl\ndef minisgl_model(): return []")
    failure = only_failure(plugin_site.load())
    assert failure.stage == "hooks"
    assert failure.error == "unknown hook 'minisgl_model'. Nearest: 'minisgl_models'."


def test_hook_that_is_not_marked(plugin_site):
    plugin_site.add("acme-attn", "def minisgl_models(): return []")
    failure = only_failure(plugin_site.load())
    assert (failure.stage, failure.error) == ("hooks", "minisgl_models is not marked")


def test_hook_wrapper(plugin_site):
    code = f"{IMPORT}@hookimpl(wrapper=True)\ndef minisgl_models(): return (yield)"
    plugin_site.add("acme-attn", code)
    failure = only_failure(plugin_site.load())
    assert (failure.stage, failure.error) == ("hooks", "minisgl_models is a wrapper")


def test_module_without_hooks(plugin_site):
    plugin_site.add("acme-attn", "x = 1")
    failure = only_failure(plugin_site.load())
    assert failure.stage == "hooks"
    assert failure.error == "module 'acme_attn_plugin' has no function marked with hookimpl"


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("return 3", "minisgl_models returned 3, which is no iterable"),
        ("return ['x']", "minisgl_models returned 'x'"),
        ("yield 1 / 0", "minisgl_models raised ZeroDivisionError: division by zero"),
        ("raise SystemExit(1)", "minisgl_models raised SystemExit: 1"),
    ],
)
def test_hook_that_returns_no_records(plugin_site, body, error):
    plugin_site.add("acme-attn", f"{IMPORT}@hookimpl\ndef minisgl_models():\n    {body}")
    failure = only_failure(plugin_site.load())
    assert (failure.stage, failure.error) == ("records", error)


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("name='acme'", "name='Acme!'", "name 'Acme!' must match"),
        ("name='acme'", "name='auto'", "name 'auto' is taken"),
        ("name='acme'", "name=None", "name None must match"),
        ('extra="forbid"', "extra='allow'", "acme: Options must be declared with ConfigDict("),
        ("frozen=True, ", "", "acme: Options must be declared with ConfigDict(frozen=True"),
        ("settings_type=Options", "settings_type=dict", "acme: settings_type <class 'dict'> must"),
        ('summary="A test\'s backend"', "summary=1", "acme: summary 1 must be a string"),
        ("Capabilities()", "None", "acme: capabilities None must be Capabilities"),
        ("probe=lambda query: Supported(5, 5)", "probe=1", "acme: probe 1 must be callable"),
    ],
)
def test_record_with_a_fault(plugin_site, old, new, error):
    code = plugin_code.attention()
    assert old in code
    plugin_site.add("acme-attn", code.replace(old, new))
    failure = only_failure(plugin_site.load())
    assert failure.stage == "records"
    assert failure.error.startswith(f"minisgl_attention_backends: {error}")


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ("architectures=('A',), config_reader='m', model='m:C'", "A: config_reader 'm' must be"),
        ("architectures=('A',), config_reader='m:f', model=int", "A: model <class 'int'> must be"),
        ("architectures='A', config_reader='m:f', model='m:C'", "architectures 'A' must be a"),
        ("architectures=(), config_reader='m:f', model='m:C'", "architectures () must be a"),
    ],
)
def test_model_record_with_a_fault(plugin_site, fields, error):
    code = "from minisgl.plugins import ModelRecord, hookimpl\n@hookimpl\n"
    code += f"def minisgl_models(): return [ModelRecord(summary='', {fields})]"
    plugin_site.add("acme-attn", code)
    failure = only_failure(plugin_site.load())
    assert failure.stage == "records"
    assert failure.error.startswith(f"minisgl_models: {error}")


def test_one_plugin_may_not_offer_a_name_twice(plugin_site):
    code = plugin_code.attention().replace("    yield", "    for _ in range(2): yield")
    plugin_site.add("acme-attn", code)
    failure = only_failure(plugin_site.load())
    assert failure.error == "minisgl_attention_backends offers 'acme' twice"


def test_two_entry_points_of_one_distribution(plugin_site):
    points = ["a = acme_attn_plugin", "b = acme_attn_other"]
    plugin_site.add("acme-attn", plugin_code.attention(), entry_points=points)
    failure = only_failure(plugin_site.load())
    assert failure.stage == "entry point"
    assert "it has 2 entry points in the group 'minisgl': acme_attn_plugin" in failure.error


def test_entry_point_that_names_an_object(plugin_site):
    points = ["a = acme_attn_plugin:Plugin"]
    plugin_site.add("acme-attn", plugin_code.attention(), entry_points=points)
    failure = only_failure(plugin_site.load())
    assert failure.stage == "entry point"
    assert "'acme_attn_plugin:Plugin' names an object; it must name a module" in failure.error


def test_two_distributions_that_name_one_module(plugin_site):
    plugin_site.add("acme-attn", plugin_code.attention())
    plugin_site.add("acme-aaa", "", entry_points=["a = acme_attn_plugin"])
    host = plugin_site.load()
    assert host.attention.get("acme").distribution == "acme-aaa"
    assert only_failure(host).stage == "register"


def test_the_first_copy_on_the_path_counts(plugin_site, tmp_path, monkeypatch):
    plugin_site.add("acme-attn", plugin_code.attention(), version="1.0")
    second = tmp_path / "second"
    plugin_site.add("acme-attn", plugin_code.attention(), version="2.0", folder=second)
    monkeypatch.syspath_prepend(str(second))
    monkeypatch.syspath_prepend(str(plugin_site.root))
    host = plugin_site.load()
    assert ("acme-attn", "1.0") in host.fingerprint()
    assert not host.failures
    assert len(host.attention.named("acme")) == 1


def test_broken_plugins_leave_the_healthy_ones_alone(plugin_site, caplog):
    plugin_site.add("acme-attn", plugin_code.attention())
    plugin_site.add("broken-import", "import nothing_so_called")
    plugin_site.add("broken-record", f"{IMPORT}@hookimpl\ndef minisgl_models(): return [1]")
    plugin_site.add("broken-register", f"{IMPORT}@hookimpl\ndef minisgl_ops(a): return []")
    plugin_site.add("broken-version", "", requires=["minisgl-core>=9"])
    plugin_site.add("zebra", plugin_code.attention("zebra"))
    host = plugin_site.load()
    assert [f.stage for f in host.failures] == ["import", "records", "register", "version"]
    assert host.attention.names == ["acme", "torch", "triton", "zebra"]
    statuses = {info.distribution: info.status for info in host.plugins}
    assert statuses["broken-record"] == "failed"
    assert statuses["zebra"] == "active"
    assert list(statuses) == sorted(statuses)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 4
    assert warnings[0] == (
        "plugin broken-import 1.0 ignored, stage 'import' failed: No module named"
        " 'nothing_so_called'. See: minisgl plugins show broken-import"
    )
    assert all(record.exc_info is None for record in caplog.records)


def test_the_traceback_is_logged_at_debug(plugin_site, caplog):
    plugin_site.add("acme-attn", "import nothing_so_called")
    with caplog.at_level(logging.DEBUG, "minisgl"):
        plugin_site.load()
    (record,) = [record for record in caplog.records if record.exc_info]
    assert (record.levelno, "acme-attn" in record.getMessage()) == (logging.DEBUG, True)


def test_a_failed_plugin_offers_nothing(plugin_site):
    code = plugin_code.attention() + "\n@hookimpl\ndef minisgl_models(): return [1]"
    plugin_site.add("acme-attn", code)
    host = plugin_site.load()
    assert only_failure(host).stage == "records"
    assert host.attention.names == ["torch", "triton"]


def test_generators_become_tuples(plugin_site):
    plugin_site.add("acme-attn", plugin_code.attention())
    host = plugin_site.load()
    for _ in range(2):
        assert isinstance(host.attention.get("acme").record, AttentionBackendRecord)


def test_strict_mode_lists_every_failure(plugin_site):
    plugin_site.add("acme-attn", "import nothing_so_called")
    plugin_site.add("broken-version", "", requires=["minisgl-core>=9"])
    with pytest.raises(PluginError) as caught:
        plugin_site.load(strict=True)
    message = str(caught.value)
    assert message.startswith("2 plugin(s) failed to load:\n  acme-attn 1.0 (import: No module")
    assert "broken-version 1.0 (version: it needs minisgl-core>=9" in message
    assert caught.value.exit_code == 3


def test_strict_mode_passes_without_failures(plugin_site):
    plugin_site.add("acme-attn", plugin_code.attention())
    assert plugin_site.load(strict=True).attention.names == ["acme", "torch", "triton"]


def test_a_disabled_plugin_is_not_imported(plugin_site):
    plugin_site.add("acme-attn", "raise KeyboardInterrupt")
    host = plugin_site.load(disabled=["Acme_Attn"])
    assert not host.failures
    assert {i.distribution: i.status for i in host.plugins}["acme-attn"] == "disabled"
    assert "acme-attn" not in dict(host.fingerprint())


def test_disabling_what_is_not_installed_warns_with_the_nearest(plugin_site, caplog):
    plugin_site.add("acme-attn", plugin_code.attention())
    plugin_site.load(disabled=["acme-atn"])
    assert "'acme-atn', which is not installed. Nearest: 'acme-attn'." in caplog.text


def test_core_cannot_be_disabled(plugin_site):
    with pytest.raises(PluginError, match="'minisgl-core', which cannot be disabled"):
        plugin_site.load(disabled=["minisgl-core"])


def test_a_failure_of_core_is_fatal_whatever_else_fails(plugin_site):
    plugin_site.add("aaa", "import nothing_so_called")
    plugin_site.add("acme-thief", "", entry_points=["a = minisgl.plugins.builtin"])
    with pytest.raises(PluginError, match=r"minisgl-core 0\.1\.0 \(register: "):
        plugin_site.load()


def test_a_copy_without_a_plugin_that_comes_first_on_the_path_hides_the_other(
    plugin_site, tmp_path, monkeypatch
):
    plugin_site.add("acme-attn", plugin_code.attention())
    first = tmp_path / "first"
    plugin_site.add(
        "acme-attn", plugin_code.attention(), version="0.9", folder=first, entry_points=[]
    )
    monkeypatch.syspath_prepend(str(first))
    assert "acme-attn" not in dict(plugin_site.load().fingerprint())
    (first / "acme_attn-0.9.dist-info" / "METADATA").unlink()
    importlib.invalidate_caches()
    host = plugin_site.load()
    assert dict(host.fingerprint())["acme-attn"] == "1.0", "remains of an installation hide nothing"


def test_metadata_of_distributions_without_a_plugin_are_not_parsed(plugin_site, monkeypatch):
    """There may be hundreds, with long descriptions."""
    plugin_site.add("acme-attn", plugin_code.attention())
    plugin_site.add("other", "", entry_points=[])
    read = []
    text_of = importlib.metadata.PathDistribution.read_text

    def noting(self, name):
        read.append((Path(self._path).name, name))
        return text_of(self, name)

    monkeypatch.setattr(importlib.metadata.PathDistribution, "read_text", noting)
    plugin_site.load()
    assert ("acme_attn-1.0.dist-info", "METADATA") in read
    assert ("other-1.0.dist-info", "METADATA") not in read
