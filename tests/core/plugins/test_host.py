"""Observers, checkpoints, routes and fingerprints."""

import logging
from pathlib import Path

import pytest

from minisgl.errors import ModelLoadError, PluginError
from minisgl.plugins import RequestStats, StepStats

IMPORT = "from minisgl.plugins import hookimpl\nfrom pathlib import Path\n"
OBSERVER = IMPORT + "seen = []\n@hookimpl\ndef minisgl_step_finished(stats): seen.append(stats)\n"
STEP = StepStats(
    step=1,
    num_decode_rows=2,
    num_prefill_rows=0,
    num_prefill_tokens=0,
    num_running=2,
    num_waiting=0,
    num_free_pages=3,
    num_cached_pages=0,
    num_pages=8,
    num_evictable_pages=0,
    num_queried_tokens=0,
    num_cached_tokens=0,
    num_retracted=0,
    host_us=1.0,
)
REQUEST = RequestStats(
    uid=1,
    num_prompt_tokens=2,
    num_cached_tokens=0,
    num_completion_tokens=3,
    finish_reason="stop",
    queue_time=0.1,
    prefill_time=0.1,
    time_to_first_token=0.2,
    total_time=0.3,
    num_retractions=0,
)


def test_nobody_listens_without_observers(plugin_site):
    assert not plugin_site.load().has_step_observers


def test_every_observer_is_told_although_another_one_raises(plugin_site, caplog):
    broken = IMPORT + "@hookimpl\ndef minisgl_step_finished(stats): raise ValueError('full')\n"
    plugin_site.add("acme-broken", broken)
    module = plugin_site.add("acme-good", OBSERVER)
    host = plugin_site.load()
    assert host.has_step_observers
    with caplog.at_level(logging.WARNING, "minisgl"):
        for _ in range(3):
            host.step_finished(STEP)
    assert __import__(module).seen == [STEP] * 3
    assert host.observer_errors == {("acme-broken", "minisgl_step_finished"): 3}
    assert [record.getMessage() for record in caplog.records] == [
        "plugin acme-broken 1.0: minisgl_step_finished raised ValueError: full; this is logged once"
    ]


def test_request_observer(plugin_site):
    module = plugin_site.add("acme", OBSERVER.replace("step_finished", "request_finished"))
    host = plugin_site.load()
    host.request_finished(REQUEST)
    assert __import__(module).seen == [REQUEST]
    assert not host.has_step_observers


def resolver(condition: str, result: str) -> str:
    hook = "@hookimpl\ndef minisgl_resolve_checkpoint(reference, cache_dir):\n"
    return f"{IMPORT}{hook}    return {result} if {condition} else None\n"


def test_plugins_resolve_before_core(plugin_site, tmp_path):
    # Named so that it sorts after minisgl-core: it comes first because core's is the last.
    plugin_site.add("zebra", resolver("reference.startswith('zoo:')", "cache_dir / reference[4:]"))
    host = plugin_site.load()
    assert host.resolve_checkpoint("zoo:x", Path("/models")) == Path("/models/x")
    assert host.resolve_checkpoint(str(tmp_path), None) == tmp_path


def test_a_reference_that_nobody_knows(plugin_site):
    with pytest.raises(ModelLoadError, match=r"model.path='zoo:x' is nothing that an installed"):
        plugin_site.load().resolve_checkpoint("zoo:x", None)


def test_a_resolver_that_breaks_is_named(plugin_site):
    plugin_site.add("acme", resolver("1 / 0", "None"))
    with pytest.raises(PluginError, match=r"plugin acme 1.0 failed to resolve 'zoo:x': ZeroDiv"):
        plugin_site.load().resolve_checkpoint("zoo:x", None)


def test_a_resolver_that_returns_no_path_is_named(plugin_site):
    plugin_site.add("acme", resolver("True", "'/models'"))
    with pytest.raises(PluginError, match=r"minisgl_resolve_checkpoint returned '/models', not a"):
        plugin_site.load().resolve_checkpoint("zoo:x", None)


def test_routes_are_mounted_for_named_plugins_only(plugin_site):
    code = IMPORT + "@hookimpl\ndef minisgl_routes(app, client): app.append(client)\n"
    plugin_site.add("acme-routes", code)
    host = plugin_site.load()
    app: list[str] = []
    host.mount_routes([], app, "client")
    assert app == []
    host.mount_routes(["Acme_Routes"], app, "client")
    assert app == ["client"]
    with pytest.raises(PluginError, match=r"'acme-route', which has no routes.*'acme-routes'"):
        host.mount_routes(["acme-route"], app, "client")


def test_routes_that_break_are_fatal(plugin_site):
    plugin_site.add("acme", IMPORT + "@hookimpl\ndef minisgl_routes(app): raise OSError('no')\n")
    with pytest.raises(PluginError, match=r"plugin acme 1.0 failed to add its routes: OSError: no"):
        plugin_site.load().mount_routes(["acme"], [], None)


def test_a_process_with_other_plugins_stops(plugin_site):
    plugin_site.add("acme", OBSERVER)
    host = plugin_site.load()
    expected = host.fingerprint()
    host.check_fingerprint(expected)
    other = (*((n, "2.0" if n == "acme" else v) for n, v in expected), ("new", "1.0"))
    with pytest.raises(PluginError) as caught:
        host.check_fingerprint(other)
    assert "acme (here 1.0, there 2.0), new (here missing, there 1.0)." in str(caught.value)


def test_a_failed_plugin_is_no_part_of_the_fingerprint(plugin_site):
    plugin_site.add("acme", "import nothing_so_called")
    assert "acme" not in dict(plugin_site.load().fingerprint())
