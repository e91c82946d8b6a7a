"""The command line: dispatch, flags, errors and exit codes."""

import json
import subprocess
import sys

import pytest

from minisgl import cli
from minisgl.cli import flags
from minisgl.cli.parser import Parser
from minisgl.errors import DoesNotFitError, RequestError, SettingsError
from minisgl.settings.names import FLAT_NAMES, PAIR_NAMES, SWITCHES


@pytest.fixture
def fake_command(monkeypatch):
    """Install a command ``serve`` whose ``run`` is a list's ``pop``."""
    import types

    module = types.ModuleType("fake_serve_command")
    module.add_arguments = lambda parser: flags.add_settings_arguments(
        parser, positional_model=True
    )
    module.seen = []
    module.outcome = 0

    def run(args, resolved):
        module.seen.append(resolved)
        if isinstance(module.outcome, BaseException):
            raise module.outcome
        return module.outcome

    module.run = run
    monkeypatch.setitem(sys.modules, "fake_serve_command", module)
    monkeypatch.setattr(cli, "COMMANDS", {**cli.COMMANDS, "serve": ("fake_serve_command", "x")})
    return module


def collected(*arguments):
    parser = Parser(prog="minisgl serve", allow_abbrev=False)
    flags.add_settings_arguments(parser, positional_model=True)
    return flags.collect(parser.parse_strictly(arguments))


def failure(capsys, *arguments):
    code = cli.main(arguments)
    out, err = capsys.readouterr()
    assert out == ""
    return code, err


def test_help_and_version(capsys):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(command in text for command in cli.COMMANDS)
    assert "bench" in text
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == "minisgl 0.1.0\n"


def test_no_command_shows_the_help_and_fails(capsys):
    assert cli.main([]) == 2
    assert "usage: minisgl COMMAND" in capsys.readouterr().err


def test_an_unknown_command_names_the_nearest(capsys):
    code, err = failure(capsys, "srve")
    assert code == 2
    assert err.startswith("minisgl: error: Unknown command 'srve'. Commands: serve, generate")
    assert err.endswith("Nearest: 'serve'.\n")


@pytest.mark.parametrize("line", [["--model", "m"], ["serve", "m"], ["serve", "--port=1", "m"]])
def test_flags_without_a_command_belong_to_serve(fake_command, line):
    assert cli.main(line) == 0
    assert fake_command.seen[0].settings.model.path == "m"


def test_python_dash_m():
    done = subprocess.run(
        [sys.executable, "-m", "minisgl", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "minisgl 0.1.0\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [(DoesNotFitError("too big"), 5), (RequestError("too big"), 1), (SettingsError("too big"), 2)],
)
def test_an_error_is_one_line_and_its_exit_code(fake_command, capsys, error, code):
    fake_command.outcome = error
    assert failure(capsys, "serve", "m") == (code, "minisgl: error: too big\n")


def test_an_error_has_its_traceback_at_log_level_debug(fake_command, capsys):
    fake_command.outcome = DoesNotFitError("too big")
    code, err = failure(capsys, "serve", "m", "--log-level", "debug")
    assert code == 5
    assert "Traceback (most recent call last)" in err
    assert err.endswith("minisgl: error: too big\n")


def test_an_interrupt_and_an_exit_of_the_command(fake_command):
    fake_command.outcome = KeyboardInterrupt()
    assert cli.main(["serve"]) == 130
    fake_command.outcome = SystemExit(4)
    assert cli.main(["serve"]) == 4
    fake_command.outcome = 7
    assert cli.main(["serve"]) == 7


def test_a_bug_keeps_its_traceback(fake_command):
    fake_command.outcome = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        cli.main(["serve"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--page-sise", "3"], "Unknown argument '--page-sise'. Nearest: '--page-size'."),
        (["--gpu-memory-utilisation=1"], "Nearest: '--gpu-memory-utilization'."),
        (["m", "n"], "Unknown argument 'n'. See: minisgl serve --help"),
        (["--page"], "Unknown argument '--page'"),
        (["--page-size"], "argument --page-size: expected one argument."),
        (["--page-size", "3", "--block-size", "4"], "--page-size and --block-size both set"),
        (["m", "--model-path", "n"], "MODEL and --model-path both set model.path"),
        (["--set", "cache.page_size"], "--set 'cache.page_size' must be SECTION.FIELD=VALUE."),
        (["--set", "cache.pagesize=3"], "Nearest: 'cache.page_size'."),
        (["--page-size", "300"], "cache.page_size='300' (command line) must be less than"),
        (["--config", "none.toml"], "config='none.toml' cannot be read"),
    ],
)
def test_command_lines_that_are_wrong(fake_command, capsys, arguments, message):
    code, err = failure(capsys, "serve", *arguments)
    assert code == 2
    assert err.startswith("minisgl: error: ")
    assert message in err
    assert not fake_command.seen


@pytest.mark.parametrize("flat", FLAT_NAMES, ids=lambda flat: flat.name)
def test_every_spelling_sets_its_setting(flat):
    expected = ["7"] if flat.repeated else "7"
    for spelling in (f"--{flat.name}", *(f"--{alias}" for alias in flat.aliases), *flat.short):
        assert collected(spelling, "7") == {flat.setting: expected}


@pytest.mark.parametrize("switch", SWITCHES, ids=lambda switch: switch.name)
def test_every_switch_sets_its_setting(switch):
    assert collected(f"--{switch.name}") == {switch.setting: switch.on}
    if switch.negatable:
        assert collected(f"--no-{switch.name}") == {switch.setting: switch.off}


def test_the_flags_that_the_issue_lists_exist():
    listed = (
        "model served-model-name host port dtype device attention-backend moe-backend prefix-cache"
        " page-size num-pages max-seq-len max-running-requests max-prefill-tokens"
        " tensor-parallel-size tp memory-fraction load-format seed api-key log-level"
        " model-path max-model-len context-length gpu-memory-utilization mem-fraction-static"
        " max-num-seqs max-num-batched-tokens chunked-prefill-size block-size tp-size random-seed"
        " attn memory-ratio"
    )
    for name in listed.split():
        assert len(collected(f"--{name}", "7")) == 1


def test_repeated_and_general_flags():
    assert collected("--disable-plugin", "a", "--disable-plugin", "b,c", "--strict-plugins") == {
        "plugins.disabled": ["a", "b", "c"],
        "plugins.strict": True,
    }
    assert collected("--set", "backend_options.fa.x=a=b", "-tp", "2") == {
        "backend_options.fa.x": "a=b",
        "parallel.tensor_parallel_size": "2",
    }
    assert collected("--port", "1", "--port", "2") == {"server.port": "2"}


def test_the_two_halves_of_the_attention_backend():
    prefill, decode = (f"--{name}" for name in PAIR_NAMES)
    assert collected(prefill, "fa", decode, "fi") == {"attention.backend": "fa,fi"}
    assert collected(decode, "fi") == {"attention.backend": "auto,fi"}
    with pytest.raises(SettingsError, match=r"both set attention\.backend"):
        collected(decode, "fi", "--attn", "fa")


def test_config_show(capsys, monkeypatch, tmp_path):
    (tmp_path / "a.toml").write_text("[server]\nport = 1\n")
    monkeypatch.setenv("MINISGL_SERVER__API_KEY", "hush")
    arguments = ["config", "show", "--page-size", "8", "--config", str(tmp_path / "a.toml")]
    assert cli.main(arguments) == 0
    lines = {line.split()[0]: line.split(maxsplit=2)[1:] for line in _lines(capsys)}
    assert lines["cache.page_size"] == ["8", "command line"]
    assert lines["server.api_key"] == ['["**********"]', "environment"]
    assert lines["server.port"] == ["1", f"file {tmp_path / 'a.toml'}"]
    assert lines["model.path"] == ["-", "default"]
    assert cli.main([*arguments, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["cache.page_size"] == {"value": 8, "source": "command line"}
    assert shown["server.api_key"]["value"] == ["**********"]
    assert shown["plugins.disabled"] == {"value": [], "source": "default"}


def test_config_schema(capsys):
    assert cli.main(["config", "schema"]) == 0
    assert "cache" in json.loads(capsys.readouterr().out)["properties"]


def test_an_unknown_variable_stops_any_command(capsys, monkeypatch):
    monkeypatch.setenv("MINISGL_MODLE__PATH", "x")
    code, err = failure(capsys, "config", "show")
    assert code == 2
    assert "Nearest: 'MINISGL_MODEL__PATH'" in err


def _lines(capsys):
    return capsys.readouterr().out.splitlines()
