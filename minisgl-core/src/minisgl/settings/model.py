"""The one settings model: frozen sections, each field with the text that help and docs show.

It validates values and knows nothing about where they come from (see ``resolve``). An instance
holds only what it was given: building one reads neither the environment nor a file, so a pickled
instance means the same in every process.
"""

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from minisgl.settings.lists import Names, Secrets

ENV_PREFIX = "MINISGL_"
ENV_DELIMITER = "__"


MAX_SECONDS = 86400
"""Longest time that a setting may give."""


class Section(BaseModel):
    """Base of all sections: frozen, and a field that it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelSettings(Section):
    """What is served."""

    path: str | None = Field(
        None,
        min_length=1,
        description="Model: a local folder, a .gguf file, a hub id, or package:NAME.",
    )
    served_name: str | None = Field(
        None,
        min_length=1,
        description="Name of the model in the HTTP API; by default, what was given as path.",
    )
    tokenizer: str | None = Field(
        None,
        min_length=1,
        description="Tokenizer: a folder, a .gguf file or a hub id; by default, the model's.",
    )
    skip_tokenizer_init: bool = Field(
        False,
        description="Load no tokenizer: LLM then takes and returns token ids only, and serve"
        " refuses to start.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Dtype of weights and activations; auto is float32 on a CPU, else the"
        " checkpoint's.",
    )
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = Field(
        "auto", description="Format of the checkpoint; dummy fills random weights from the seed."
    )
    implementation: Literal["auto", "plugin", "transformers"] = Field(
        "auto",
        description="What computes the model: a plugin, or transformers' own code (eagerly, on one"
        " rank); auto takes the code only if no plugin offers the architecture.",
    )
    max_seq_len: int | None = Field(
        None, ge=1, description="Most tokens of one sequence; by default, what the model allows."
    )
    cache_dir: Path | None = Field(
        None, description="Folder for downloaded checkpoints; by default, the hub's own."
    )


class EngineSettings(Section):
    """The device and what it may use."""

    device: str = Field(
        "auto",
        description="Device to run on: auto, cpu, cuda, cuda:1; auto takes a GPU if there is one.",
    )
    memory_fraction: float = Field(
        0.9, gt=0, le=1, description="Share of the device's memory for weights and KV pages."
    )
    seed: int = Field(0, ge=0, description="Seed of sampling and of dummy weights.")
    num_threads: int | None = Field(
        None,
        ge=1,
        description="Threads of torch on the CPU, for each rank; by default, torch's own choice,"
        " or the cores divided by the ranks.",
    )

    cuda_graph_max_rows: int | None = Field(
        None,
        ge=0,
        description="Most rows of a decode step that runs as one CUDA graph; 0 records none; by"
        " default, as many as run at once.",
    )
    prefill_graph_max_tokens: int | None = Field(
        None,
        ge=0,
        description="Most tokens of a prefill whose layers run as CUDA graphs; 0 records none; by"
        " default, up to 1024, as far as launching takes the host longer than computing takes the"
        " GPU.",
    )
    nvtx: bool = Field(False, description="Name the parts of a step for NVIDIA's profilers.")

    @field_validator("device")
    @classmethod
    def _device_name(cls, value: str) -> str:
        if not re.fullmatch(r"[a-z]+(:\d+)?", value):
            raise ValueError("must be auto, or a torch device such as cpu, cuda or cuda:1")
        return value


class AttentionSettings(Section):
    """The attention backend."""

    backend: str = Field(
        "auto", description="Attention backend: auto, a name, or PREFILL,DECODE for a pair."
    )
    measurements: Path | None = Field(
        None,
        description="File that minisgl bench kernels --attention --json wrote on this device: auto"
        " ranks attention backends by it; by default, by what their plugins say.",
    )
    shared_prefix_mib: float = Field(
        128.0,
        ge=0,
        le=2**40,
        allow_inf_nan=False,
        description="Decode rows attend to a cached prefix that they share once, if that saves "
        "reading so many MiB of K and V a layer; 0 switches it off.",
    )

    @field_validator("backend")
    @classmethod
    def _one_or_two_names(cls, value: str) -> str:
        parts = [part.strip() for part in value.split(",")]
        if len(parts) > 2 or not all(parts):
            raise ValueError("must be one name, or two as PREFILL,DECODE")
        return ",".join(parts)


class MoeSettings(Section):
    """The backend of routed experts, and how ranks exchange tokens for them."""

    backend: str = Field("auto", min_length=1, description="MoE backend: auto or a name.")
    exchange: str = Field(
        "auto",
        min_length=1,
        description="Exchange between ranks with different experts: auto or a name.",
    )
    weights_dtype: Literal["auto", "fp8"] = Field(
        "auto",
        description="Dtype of the experts' weights; auto is model.dtype; fp8 (e4m3, a scale for an"
        " output channel) quantizes them while they load, and tokens for them: half of bfloat16.",
    )


class CacheSettings(Section):
    """The KV pool and its prefix cache."""

    prefix: str = Field(
        "radix",
        min_length=1,
        description="Prefix cache: radix shares equal prefixes, naive shares nothing.",
    )
    pool: str = Field("mha", min_length=1, description="KV pool: auto or a name.")
    page_size: int = Field(16, ge=1, le=256, description="Tokens a page.")
    num_pages: int | None = Field(
        None, ge=2, description="Pages of the KV pool; by default, what fits into memory."
    )


class SchedulerSettings(Section):
    """How steps are filled and launched."""

    max_running_requests: int = Field(256, ge=1, description="Most requests of one step.")
    max_prefill_tokens: int | None = Field(
        None,
        ge=1,
        description="Token budget of a step; longer prompts are computed in chunks. By default,"
        " 2048 on a CPU and 8192 on a GPU.",
    )
    policy: Literal["decode-first", "prefill-first"] = Field(
        "decode-first",
        description="Who gets a step: decode-first lets no running request wait; prefill-first"
        " lets them wait up to 8 steps for prompts, for the most tokens a second offline.",
    )
    order: Literal["fcfs", "longest-prefix"] = Field(
        "fcfs",
        description="Order of admission within a priority: fcfs is by age; longest-prefix takes,"
        " of the first 8, the one of which the prefix cache holds most.",
    )
    overlap: Literal["auto", "on", "off"] = Field(
        "auto", description="Prepare the next step while the device runs this one."
    )
    launch: Literal["auto", "mixed", "split"] = Field(
        "auto", description="Launch decode and prefill rows of a step together or one by one."
    )


class StructuredSettings(Section):
    """Texts of a given form: JSON schemas, regular expressions, choices, grammars."""

    backend: str = Field(
        "auto",
        min_length=1,
        description="Grammar engine: auto, a name, or none; auto starts without one if none is"
        " installed, and refuses requests that need it.",
    )
    compile_timeout_s: float = Field(
        10.0,
        gt=0,
        le=600,
        allow_inf_nan=False,
        description="Seconds that one grammar may take to compile; its request waits meanwhile,"
        " and no other one does.",
    )


class ParallelSettings(Section):
    """How the model is spread over devices."""

    tensor_parallel_size: int = Field(
        1,
        ge=1,
        le=64,
        description="Ranks that share each layer; on a CPU each is a process of its own. "
        "The model's attention heads and KV heads must fit them: SmolLM2's 9 and 3 allow 1, 3, 9.",
    )
    expert_parallel_size: int = Field(
        1,
        ge=1,
        le=64,
        description="Groups of those ranks that experts are spread over: each holds an equal share,"
        " and its ranks share each expert. It must divide tensor_parallel_size and the number of"
        " experts.",
    )
    timeout: float = Field(
        10.0,
        gt=0,
        le=86400,
        allow_inf_nan=False,
        description="Seconds that a rank may be behind the others before the engine gives up.",
    )
    start_timeout: float = Field(
        300.0,
        gt=0,
        le=86400,
        allow_inf_nan=False,
        description="The same while ranks start: one may load its weights last.",
    )


class ServerSettings(Section):
    """The HTTP server."""

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    api_key: Secrets = Field(
        (),
        description="Keys, any one of which requests must carry as a bearer token; by default, none"
        " is needed.",
    )
    api_key_file: Path | None = Field(
        None, description="File with more of them, one a line; lines that begin with # are skipped."
    )
    ssl_certfile: Path | None = Field(
        None, description="Certificate chain (PEM); the server then speaks HTTPS only."
    )
    ssl_keyfile: Path | None = Field(
        None, description="Its private key (PEM), if the chain's file does not hold it."
    )
    ssl_keyfile_password: SecretStr | None = Field(None, description="Password of that key.")
    ssl_ca_certs: Path | None = Field(
        None,
        description="Authorities (PEM), one of which must have signed each client's certificate.",
    )
    cors_allow_origins: Names = Field(
        (),
        description="Web sites, such as https://example.org, whose pages may read answers; * means"
        " all. By default, none may.",
    )
    max_queued_requests: int = Field(
        4096,
        ge=0,
        description="Most answers that wait beyond scheduler.max_running_requests; further requests"
        " get 429.",
    )
    max_queued_tokens: int = Field(
        16 * 2**20,
        ge=1,
        description="Most prompt tokens that wait for their turn; further requests get 429.",
    )
    request_timeout: float | None = Field(
        None,
        gt=0,
        le=MAX_SECONDS,
        allow_inf_nan=False,
        description="Most seconds that an answer may take; then it ends with 504. A request's own"
        " timeout may be shorter.",
    )
    max_body_bytes: int = Field(
        16 * 2**20, ge=1024, description="Largest request body; larger ones get 413."
    )
    max_connections: int = Field(
        16384, ge=1, description="Most connections at once; further ones get 503."
    )
    watchdog_timeout: float = Field(
        300.0,
        ge=1,
        le=MAX_SECONDS,
        allow_inf_nan=False,
        description="Seconds that a step of the scheduler may take; then the server ends with code"
        " 7.",
    )
    num_tokenizers: int = Field(
        1,
        ge=1,
        le=64,
        description="Tokenizer processes; each request goes to the one with the least left to do.",
    )
    tool_call_parser: str = Field(
        "auto",
        min_length=1,
        description="Parser of the model's tool calls: a name, none, or auto, which goes by the"
        " chat template.",
    )
    reasoning_parser: str = Field(
        "auto",
        min_length=1,
        description="Parser of the model's reasoning: a name, none, or auto, which goes by the chat"
        " template.",
    )
    drain_timeout: float = Field(
        20.0, ge=0, description="Seconds that running requests get when the server stops."
    )
    strict_requests: bool = Field(
        False, description="Refuse requests with unknown fields, instead of warning about them."
    )


class PluginSettings(Section):
    """Which plugins are loaded."""

    disabled: Names = Field((), description="Distributions whose plugins are not loaded.")
    strict: bool = Field(False, description="Refuse to start when any plugin fails to load.")
    routes: Names = Field((), description="Distributions that may add HTTP routes.")


class LogSettings(Section):
    """Logging."""

    level: Literal["debug", "info", "warning", "error", "critical"] = Field(
        "info", description="Least severe messages to log."
    )


class Settings(BaseSettings):
    """All settings of minisgl."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix=ENV_PREFIX, env_nested_delimiter=ENV_DELIMITER
    )

    model: ModelSettings = Field(default_factory=ModelSettings)
    engine: EngineSettings = Field(default_factory=EngineSettings)
    attention: AttentionSettings = Field(default_factory=AttentionSettings)
    moe: MoeSettings = Field(default_factory=MoeSettings)
    cache: CacheSettings = Field(default_factory=CacheSettings)
    scheduler: SchedulerSettings = Field(default_factory=SchedulerSettings)
    structured: StructuredSettings = Field(default_factory=StructuredSettings)
    parallel: ParallelSettings = Field(default_factory=ParallelSettings)
    server: ServerSettings = Field(default_factory=ServerSettings)
    plugins: PluginSettings = Field(default_factory=PluginSettings)
    backend_options: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="Settings of the backends themselves, by backend name and option.",
    )
    log: LogSettings = Field(default_factory=LogSettings)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Read nothing but what the constructor is given; ``resolve`` merges the sources."""
        return (init_settings,)
