"""Every setting by its dotted name, and the flat names that people type for some of them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from minisgl.errors import SettingsError, nearest
from minisgl.settings.model import ENV_DELIMITER, ENV_PREFIX, Settings

OPTIONS = "backend_options"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatName:
    """A setting's own flag (``--page-size``) and keyword (``page_size``), with its aliases.

    Attributes:
        name: without dashes in front.
        setting: dotted name.
        aliases: what SGLang, vLLM and mini-sglang call it.
        short: further command-line spellings, dashes included.
        repeated: given once for each item of a list.
    """

    name: str
    setting: str
    aliases: tuple[str, ...] = ()
    short: tuple[str, ...] = ()
    repeated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """A flag without a value, or a keyword that is true or false.

    Attributes:
        name: without dashes in front.
        setting: dotted name.
        on, off: what the setting becomes; only a keyword or a negated flag says off.
        negatable: whether ``--no-NAME`` exists.
    """

    name: str
    setting: str
    on: Any
    off: Any
    negatable: bool = False


FLAT_NAMES: tuple[FlatName, ...] = (
    FlatName(name="model", setting="model.path", aliases=("model-path",), short=("-m",)),
    FlatName(name="served-model-name", setting="model.served_name"),
    FlatName(name="tokenizer", setting="model.tokenizer", aliases=("tokenizer-path",)),
    FlatName(name="dtype", setting="model.dtype"),
    FlatName(name="load-format", setting="model.load_format"),
    FlatName(name="model-implementation", setting="model.implementation", aliases=("model-impl",)),
    FlatName(
        name="max-seq-len",
        setting="model.max_seq_len",
        aliases=("max-model-len", "context-length", "max-seq-len-override"),
    ),
    FlatName(name="cache-dir", setting="model.cache_dir", aliases=("download-dir",)),
    FlatName(name="device", setting="engine.device"),
    FlatName(
        name="memory-fraction",
        setting="engine.memory_fraction",
        aliases=("gpu-memory-utilization", "mem-fraction-static", "memory-ratio"),
    ),
    FlatName(name="seed", setting="engine.seed", aliases=("random-seed",)),
    FlatName(
        name="cuda-graph-max-rows",
        setting="engine.cuda_graph_max_rows",
        aliases=("cuda-graph-max-bs", "graph"),
    ),
    FlatName(
        name="attention-backend", setting="attention.backend", aliases=("attn", "attn-backend")
    ),
    FlatName(name="attention-measurements", setting="attention.measurements"),
    FlatName(name="moe-backend", setting="moe.backend", aliases=("moe-runner-backend",)),
    FlatName(
        name="moe-exchange",
        setting="moe.exchange",
        aliases=("moe-a2a-backend", "all2all-backend"),
    ),
    FlatName(name="moe-weights-dtype", setting="moe.weights_dtype", aliases=("quantization",)),
    FlatName(name="prefix-cache", setting="cache.prefix", aliases=("cache-type",)),
    FlatName(name="page-size", setting="cache.page_size", aliases=("block-size",)),
    FlatName(name="num-pages", setting="cache.num_pages"),
    FlatName(
        name="max-running-requests",
        setting="scheduler.max_running_requests",
        aliases=("max-num-seqs", "max-running-req"),
    ),
    FlatName(
        name="max-prefill-tokens",
        setting="scheduler.max_prefill_tokens",
        aliases=(
            "max-num-batched-tokens",
            "chunked-prefill-size",
            "max-prefill-length",
            "max-extend-length",
            "max-extend-tokens",
        ),
    ),
    FlatName(name="scheduler-policy", setting="scheduler.policy"),
    FlatName(name="scheduler-order", setting="scheduler.order"),
    FlatName(
        name="grammar-backend",
        setting="structured.backend",
        aliases=("guided-decoding-backend",),
    ),
    FlatName(
        name="tensor-parallel-size",
        setting="parallel.tensor_parallel_size",
        aliases=("tp", "tp-size"),
        short=("-tp",),
    ),
    FlatName(
        name="expert-parallel-size",
        setting="parallel.expert_parallel_size",
        aliases=("ep", "ep-size"),
        short=("-ep",),
    ),
    FlatName(name="host", setting="server.host"),
    FlatName(name="port", setting="server.port"),
    FlatName(name="api-key", setting="server.api_key", repeated=True),
    FlatName(name="api-key-file", setting="server.api_key_file"),
    FlatName(name="ssl-certfile", setting="server.ssl_certfile"),
    FlatName(name="ssl-keyfile", setting="server.ssl_keyfile"),
    FlatName(name="ssl-keyfile-password", setting="server.ssl_keyfile_password"),
    FlatName(name="ssl-ca-certs", setting="server.ssl_ca_certs"),
    FlatName(
        name="cors-allow-origin",
        setting="server.cors_allow_origins",
        aliases=("allowed-origins",),
        repeated=True,
    ),
    FlatName(
        name="max-queued-requests",
        setting="server.max_queued_requests",
        aliases=("max-num-queued-reqs",),
    ),
    FlatName(
        name="max-queued-tokens",
        setting="server.max_queued_tokens",
        aliases=("max-num-queued-tokens",),
    ),
    FlatName(name="request-timeout", setting="server.request_timeout"),
    FlatName(name="watchdog-timeout", setting="server.watchdog_timeout"),
    FlatName(name="drain-timeout", setting="server.drain_timeout", aliases=("shutdown-timeout",)),
    FlatName(
        name="num-tokenizers",
        setting="server.num_tokenizers",
        aliases=("tokenizer-worker-num",),
    ),
    FlatName(name="tool-call-parser", setting="server.tool_call_parser"),
    FlatName(name="reasoning-parser", setting="server.reasoning_parser"),
    FlatName(name="disable-plugin", setting="plugins.disabled", repeated=True),
    FlatName(name="log-level", setting="log.level"),
)

SWITCHES: tuple[Switch, ...] = (
    Switch(name="strict-requests", setting="server.strict_requests", on=True, off=False),
    Switch(name="strict-plugins", setting="plugins.strict", on=True, off=False),
    Switch(name="skip-tokenizer-init", setting="model.skip_tokenizer_init", on=True, off=False),
    Switch(name="dummy-weight", setting="model.load_format", on="dummy", off="auto"),
    Switch(name="disable-cuda-graph", setting="engine.cuda_graph_max_rows", on=0, off=None),
    Switch(name="enforce-eager", setting="engine.cuda_graph_max_rows", on=0, off=None),
    Switch(name="disable-radix-cache", setting="cache.prefix", on="naive", off="radix"),
    Switch(
        name="enable-prefix-caching",
        setting="cache.prefix",
        on="radix",
        off="naive",
        negatable=True,
    ),
    Switch(name="disable-overlap-schedule", setting="scheduler.overlap", on="off", off="auto"),
    Switch(
        name="async-scheduling", setting="scheduler.overlap", on="on", off="off", negatable=True
    ),
)

PAIR_NAMES = ("prefill-attention-backend", "decode-attention-backend")
"""SGLang's two halves of ``attention.backend``; what is left out is ``auto``."""


def fields() -> Iterator[tuple[str, FieldInfo]]:
    """Yield dotted name and field of every setting, in the order of the model.

    ``backend_options`` comes as one entry: the fields below it belong to the backends.
    """
    for section, field in Settings.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            for name, inner in field.annotation.model_fields.items():
                yield f"{section}.{name}", inner
        else:
            yield section, field


def environment_name(setting: str) -> str:
    """Return the environment variable of a dotted name: ``MINISGL_CACHE__PAGE_SIZE``."""
    return ENV_PREFIX + setting.replace(".", ENV_DELIMITER).upper()


def flat_spellings() -> dict[str, str]:
    """Return every flat name and alias (with dashes) and the dotted name it sets."""
    spellings = {name: flat.setting for flat in FLAT_NAMES for name in (flat.name, *flat.aliases)}
    spellings |= {switch.name: switch.setting for switch in SWITCHES}
    return spellings | dict.fromkeys(PAIR_NAMES, "attention.backend")


def check_name(setting: str, source: str) -> None:
    """Refuse a dotted name that no setting has.

    Raises:
        SettingsError: names the nearest setting.
    """
    known = {name for name, _ in fields()}
    parts = setting.split(".", 2)
    if setting in known - {OPTIONS} or (parts[0] == OPTIONS and len(parts) == 3 and all(parts)):
        return
    if parts[0] == OPTIONS:
        raise SettingsError(
            f"Unknown setting {setting!r} ({source}). Write {OPTIONS}.BACKEND.OPTION."
        )
    sections = Settings.model_fields
    if setting in sections:
        inner = [name for name in known if name.startswith(f"{setting}.")]
        raise SettingsError(
            f"{setting!r} ({source}) is a section of settings, not a value."
            f" It has: {', '.join(sorted(inner))}."
        )
    flat = flat_spellings().get(setting.replace("_", "-"))
    hint = f" Write {flat!r}." if flat else nearest(setting, [*known, *sections])
    raise SettingsError(f"Unknown setting {setting!r} ({source}).{hint}")


def flatten(nested: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return ``{"cache.page_size": 16}`` for ``{"cache": {"page_size": 16}}``.

    Raises:
        SettingsError: a name that no setting has, or a value where a section belongs.
    """
    flat: dict[str, Any] = {}
    for section, values in nested.items():
        if section not in Settings.model_fields or not isinstance(values, Mapping):
            check_name(str(section), source)
        for name, value in values.items():
            dotted = f"{section}.{name}"
            if section != OPTIONS:
                flat[dotted] = value
            elif isinstance(value, Mapping):
                flat |= {f"{dotted}.{option}": item for option, item in value.items()}
            else:
                check_name(dotted, source)
    for dotted in flat:
        check_name(dotted, source)
    return flat


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Undo ``flatten``."""
    nested: dict[str, Any] = {}
    for dotted, value in flat.items():
        section, name, *option = dotted.split(".", 2)
        values = nested.setdefault(section, {})
        if option:
            values.setdefault(name, {})[option[0]] = value
        else:
            values[name] = value
    return nested
