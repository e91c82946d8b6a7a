"""Sources, precedence and error messages of the settings."""

import json
import pickle
from typing import Any

import pytest

from minisgl.errors import SettingsError
from minisgl.settings import Settings, json_schema, resolve_settings, settings_from_keywords
from minisgl.settings.names import FLAT_NAMES, SWITCHES, fields

TOML = "[cache]\npage_size = 4\n[server]\nport = 1\nhost = 'file'\n"


def resolve(flags=None, config=None, environ=None):
    return resolve_settings(flags=flags or {}, config=config, environ=environ or {})


def message_of(call, *args, **kwargs):
    with pytest.raises(SettingsError) as caught:
        call(*args, **kwargs)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_command_line_over_environment_over_file_over_default(tmp_path):
    config = tmp_path / "server.toml"
    config.write_text(TOML)
    resolved = resolve(
        {"cache.page_size": "16"},
        config,
        {"MINISGL_CACHE__PAGE_SIZE": "8", "MINISGL_SERVER__PORT": "2", "OTHER": "x"},
    )
    settings = resolved.settings
    assert (settings.cache.page_size, settings.server.port, settings.server.host) == (16, 2, "file")
    assert settings.log.level == "info"
    assert resolved.sources["cache.page_size"] == "command line"
    assert resolved.sources["server.port"] == "environment"
    assert resolved.sources["server.host"] == f"file {config}"
    assert resolved.sources["log.level"] == "default"


def test_a_command_s_own_defaults_stand_below_what_anybody_gives():
    resolved = resolve_settings(
        flags={"cache.page_size": 4}, environ={"MINISGL_MODEL__MAX_SEQ_LEN": "99"}
    )
    wanted = {"cache.page_size": 8, "model.max_seq_len": 11, "model.skip_tokenizer_init": True}
    changed = resolved.with_defaults(wanted, "preset x")
    assert changed.settings.cache.page_size == 4
    assert changed.settings.model.max_seq_len == 99
    assert changed.settings.model.skip_tokenizer_init is True
    assert changed.sources["model.skip_tokenizer_init"] == "preset x"
    assert changed.sources["model.max_seq_len"] == "environment"
    assert resolved.settings.model.skip_tokenizer_init is False, "the original stays as it is"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.toml", "[backend_options.fa]\nnum_splits = 2\n[plugins]\ndisabled = ['x']"),
        ("a.yaml", "backend_options: {fa: {num_splits: 2}}\nplugins:\n  disabled: [x]"),
        ("a.yml", "backend_options: {fa: {num_splits: 2}}\nplugins: {disabled: x}"),
        (
            "a.json",
            '{"backend_options": {"fa": {"num_splits": 2}}, "plugins": {"disabled": ["x"]}}',
        ),
    ],
)
def test_every_file_format(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    settings = resolve(config=tmp_path / name).settings
    assert settings.backend_options == {"fa": {"num_splits": 2}}
    assert settings.plugins.disabled == ("x",)


@pytest.mark.parametrize("name", ["a.toml", "a.yaml"])
def test_an_empty_file_sets_nothing(tmp_path, name):
    (tmp_path / name).write_text("")
    assert resolve(config=tmp_path / name).settings == Settings()


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.ini", "", "must end in one of .toml, .yaml, .yml, .json."),
        ("a.toml", "x = ", "is malformed: "),
        ("a.json", "{", "is malformed: "),
        ("a.yaml", "a: [", "is malformed: "),
        ("a.yaml", "[1]", "holds a list; it must hold sections"),
        ("a.toml", "[cach]\nx=1", "Unknown setting 'cach'"),
        ("a.toml", "[cache]\npage_sise = 1", "Nearest: 'cache.page_size'."),
        ("a.yaml", "page-size: 1", "Unknown setting 'page-size' (file "),
        ("a.yaml", "max_model_len: 1", "Write 'model.max_seq_len'."),
        ("a.yaml", "model: x", "is a section of settings, not a value. It has: model.cache_dir"),
        ("a.yaml", "backend_options: {fa: 1}", "Write backend_options.BACKEND.OPTION."),
        ("a.toml", "[cache]\npage_size = 'x'", "cache.page_size='x' (file "),
    ],
)
def test_a_file_that_is_wrong(tmp_path, name, text, expected):
    (tmp_path / name).write_text(text)
    assert expected in message_of(resolve, config=tmp_path / name)


def test_a_file_that_is_missing(tmp_path):
    path = tmp_path / "none.toml"
    assert message_of(resolve, config=path) == (
        f"config={str(path)!r} cannot be read: No such file or directory."
    )


def test_environment_of_lists_and_backend_options():
    settings = resolve(
        environ={
            "MINISGL_PLUGINS__DISABLED": "a, b",
            "MINISGL_BACKEND_OPTIONS": '{"fa": {"num_splits": 2}}',
            "MINISGL_BACKEND_OPTIONS__FLASHINFER__USE_TENSOR_CORES": "true",
            "minisgl_log__level": "debug",
        }
    ).settings
    assert settings.plugins.disabled == ("a", "b")
    assert settings.log.level == "debug"
    assert settings.backend_options == {
        "fa": {"num_splits": 2},
        "flashinfer": {"use_tensor_cores": "true"},
    }


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("MINISGL_MODLE__PATH", "x", "'MINISGL_MODLE__PATH': variables that start with MINISGL_"),
        ("MINISGL_MODLE__PATH", "x", "Nearest: 'MINISGL_MODEL__PATH'."),
        ("MINISGL_MODEL", "x", "Nearest: 'MINISGL_MODEL__PATH'."),
        ("MINISGL_CACHE__PAGE_SIZE__X", "1", "Nearest: 'MINISGL_CACHE__PAGE_SIZE'."),
        ("MINISGL_BACKEND_OPTIONS__FA", "1", "written MINISGL_SECTION__FIELD"),
        ("MINISGL_BACKEND_OPTIONS", "x", "MINISGL_BACKEND_OPTIONS must hold a JSON object"),
        ("MINISGL_BACKEND_OPTIONS", '{"fa": 1}', "Write backend_options.BACKEND.OPTION."),
        ("MINISGL_CACHE__PAGE_SIZE", "x", "cache.page_size='x' (environment) must be a valid int"),
    ],
)
def test_an_environment_that_is_wrong(name, value, expected):
    assert expected in message_of(resolve, environ={name: value})


def test_one_line_for_each_fault():
    flags = {"cache.page_size": "512", "model.dtype": "bflat16", "log.level": "info"}
    assert message_of(resolve, flags).splitlines() == [
        "2 settings are wrong:",
        (
            "  model.dtype='bflat16' (command line) must be 'auto', 'float32', 'bfloat16' or"
            " 'float16'. Nearest: 'bfloat16'."
        ),
        "  cache.page_size='512' (command line) must be less than or equal to 256.",
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cache.page_size", 0),
        ("cache.page_size", 257),
        ("cache.num_pages", 1),
        ("engine.memory_fraction", 0),
        ("engine.memory_fraction", 1.5),
        ("engine.memory_fraction", float("nan")),
        ("engine.device", ""),
        ("engine.seed", -1),
        ("parallel.tensor_parallel_size", 0),
        *(
            (f"parallel.{name}", value)
            for name in ("timeout", "start_timeout")
            for value in (0, 86401, 1e18, float("inf"), float("nan"))
        ),
        ("server.port", 65536),
        ("attention.backend", "a,b,c"),
        ("attention.backend", "a,"),
        ("scheduler.overlap", "maybe"),
        ("scheduler.max_prefill_tokens", 0),
        ("server.drain_timeout", -1),
    ],
)
def test_values_out_of_range_are_refused(name, value):
    assert message_of(resolve, {name: value}).startswith(f"{name}={value!r} (command line) must ")


def test_bounds_are_allowed():
    for page_size in (1, 256):
        assert resolve({"cache.page_size": page_size}).settings.cache.page_size == page_size
    assert resolve({"parallel.tensor_parallel_size": "4"}).settings.parallel.tensor_parallel_size


def test_an_unknown_dotted_name():
    assert message_of(resolve, {"cache.pagesize": 1}) == (
        "Unknown setting 'cache.pagesize' (command line). Nearest: 'cache.page_size'."
    )


def test_secrets_are_masked_everywhere():
    resolved = resolve({"server.api_key": "hush,whisper"})
    keys = resolved.settings.server.api_key
    assert [key.get_secret_value() for key in keys] == ["hush", "whisper"]
    assert "hush" not in repr(resolved)
    assert "whisper" not in repr(resolved)
    masked = ("**********", "**********")
    assert ("server.api_key", masked, "command line") in list(resolved.entries())
    assert "4711" not in message_of(settings_from_keywords, api_key=4711, environ={})


@pytest.mark.parametrize("given", ["", " ", ","])
def test_an_empty_key_never_means_that_none_is_needed(given):
    for message in (
        message_of(resolve, {"server.api_key": given}),
        message_of(settings_from_keywords, environ={"MINISGL_SERVER__API_KEY": given}),
    ):
        assert "server.api_key=..." in message
        assert "must hold a key" in message


def test_settings_are_frozen_and_survive_pickling():
    settings = resolve({"server.api_key": "hush", "backend_options.fa.x": 1}).settings
    assert pickle.loads(pickle.dumps(settings)) == settings
    with pytest.raises(ValueError, match="frozen"):
        settings.cache.page_size = 1
    with pytest.raises(ValueError, match="frozen"):
        settings.cache = None


def test_building_settings_reads_no_environment(monkeypatch):
    monkeypatch.setenv("MINISGL_CACHE__PAGE_SIZE", "8")
    assert Settings().cache.page_size == 16
    assert settings_from_keywords().cache.page_size == 8


@pytest.mark.parametrize("flat", FLAT_NAMES, ids=lambda flat: flat.name)
def test_every_flat_name_and_alias_is_a_keyword(flat):
    values = {
        "model.dtype": "float32",
        "model.load_format": "dummy",
        "model.implementation": "transformers",
        "engine.device": "cpu",
        "engine.memory_fraction": "0.5",
        "scheduler.policy": "prefill-first",
        "scheduler.order": "longest-prefix",
        "moe.weights_dtype": "fp8",
        "log.level": "debug",
        "server.request_timeout": "5.0",
        "server.watchdog_timeout": "5.0",
        "server.drain_timeout": "5.0",
    }
    shown = {"server.ssl_keyfile_password": "**********", "server.cors_allow_origins": "('5',)"}
    value = values.get(flat.setting, "5")
    for name in (flat.name, *flat.aliases):
        settings = settings_from_keywords(environ={}, **{name.replace("-", "_"): value})
        section, field = flat.setting.split(".")
        found = getattr(getattr(settings, section), field)
        expected = {
            "plugins.disabled": "('5',)",
            "server.api_key": "(SecretStr('**********'),)",
            **shown,
        }
        assert str(found) == expected.get(flat.setting, value)


@pytest.mark.parametrize("switch", SWITCHES, ids=lambda switch: switch.name)
def test_every_switch_is_a_keyword(switch):
    section, field = switch.setting.split(".")
    for given, expected in ((True, switch.on), (False, switch.off)):
        keywords: dict[str, Any] = {switch.name.replace("-", "_"): given}
        settings = settings_from_keywords(environ={}, **keywords)
        assert getattr(getattr(settings, section), field) == expected


def test_keywords_may_be_sections_and_pairs():
    settings = settings_from_keywords(
        model="m",
        scheduler={"overlap": "off"},
        backend_options={"fa": {"num_splits": 2}},
        decode_attention_backend="fa",
        max_seq_len=None,
        environ={},
    )
    assert settings.model.path == "m"
    assert settings.scheduler.overlap == "off"
    assert settings.backend_options == {"fa": {"num_splits": 2}}
    assert settings.attention.backend == "auto,fa"
    assert settings_from_keywords(model={"path": "m"}, environ={}).model.path == "m"


def test_keywords_may_name_a_file(tmp_path):
    (tmp_path / "a.toml").write_text(TOML)
    settings = settings_from_keywords(config=str(tmp_path / "a.toml"), port=3, environ={})
    assert (settings.server.port, settings.cache.page_size) == (3, 4)


@pytest.mark.parametrize(
    ("keywords", "expected"),
    [
        ({"page_sise": 1}, "Unknown keyword 'page_sise'. Nearest: 'page_size'."),
        ({"cache": {"page_sise": 1}}, "Nearest: 'cache.page_size'."),
        ({"scheduler": "off"}, "'scheduler' is a section of settings: give a mapping, such as"),
        ({"page_size": 8, "block_size": 9}, "page_size and block_size both set cache.page_size"),
        ({"page_size": 8, "cache": {"page_size": 9}}, "both set cache.page_size, to 8 and 9."),
        ({"disable_radix_cache": "yes"}, "disable_radix_cache='yes' must be True or False."),
        ({"page_size": 300}, "cache.page_size=300 (keyword) must be less than or equal to 256."),
    ],
)
def test_keywords_that_are_wrong(keywords, expected):
    assert expected in message_of(settings_from_keywords, environ={}, **keywords)


def test_two_spellings_may_agree():
    assert settings_from_keywords(page_size=8, block_size=8, environ={}).cache.page_size == 8


def test_the_schema_has_every_setting_with_its_description():
    schema = json.loads(json.dumps(json_schema()))
    assert schema["additionalProperties"] is False
    for name, field in fields():
        assert field.description
        section, *rest = name.split(".")
        if rest:
            definition = schema["properties"][section]["$ref"].rpartition("/")[2]
            assert rest[0] in schema["$defs"][definition]["properties"]


def test_every_flat_name_is_unique_and_sets_a_setting():
    spellings = [name for flat in FLAT_NAMES for name in (flat.name, *flat.aliases)]
    spellings += [switch.name for switch in SWITCHES]
    assert len(spellings) == len(set(spellings))
    known = {name for name, _ in fields()}
    assert {flat.setting for flat in FLAT_NAMES} | {switch.setting for switch in SWITCHES} <= known
