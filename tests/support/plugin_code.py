"""Source text of small plugins that tests write into throw-away distributions."""


def attention(name: str = "acme", answer: str = "Supported(5, 5)", **capabilities: object) -> str:
    """Return a plugin with one attention backend, whose probe evaluates ``answer``."""
    return backend("attention", "AttentionBackendRecord", name, answer, capabilities)


def moe(name: str = "acme", answer: str = "Supported(5, 5)", **capabilities: object) -> str:
    """Return a plugin with one MoE backend, whose probe evaluates ``answer``."""
    return backend("moe", "MoeBackendRecord", name, answer, capabilities)


def backend(kind: str, record: str, name: str, answer: str, capabilities: dict[str, object]) -> str:
    """Return a plugin with one record that has an integer option ``width``."""
    arguments = ", ".join(f"{key}={value!r}" for key, value in capabilities.items())
    return f"""
from pydantic import BaseModel, ConfigDict
from minisgl.plugins import Capabilities, Supported, Unsupported, {record}, hookimpl

class Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    width: int = 3

@hookimpl
def minisgl_{kind}_backends():
    yield {record}(
        name={name!r}, summary="A test's backend", settings_type=Options,
        probe=lambda query: {answer}, create=lambda context, settings: (context, settings),
        capabilities=Capabilities({arguments}),
    )
"""


def op(name: str, rank: int, load: str = "lambda: len", entry: str = "rms_norm") -> str:
    """Return a plugin with one implementation of an op."""
    return f"""
from minisgl.plugins import OpRecord, Supported, hookimpl

@hookimpl
def minisgl_ops():
    return [OpRecord(op={entry!r}, name={name!r}, summary="A test's op",
                     probe=lambda query: Supported({rank}, {rank}), load={load})]
"""
