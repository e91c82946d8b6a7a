"""Settings of several values, which the environment and ``--set`` write as ``a,b``."""

from typing import Annotated

from pydantic import BeforeValidator, SecretStr
from pydantic_settings import NoDecode


def _split_commas(value: object) -> object:
    """Let the environment and ``--set`` write a list as ``a,b``."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


def _split_secrets(value: object) -> object:
    """Read ``a,b``; what is empty, as a variable that was never set, must not mean "none"."""
    parts = _split_commas(value)
    if isinstance(value, str) and not parts:
        raise ValueError("must hold a key; leave the setting out if none shall be needed")
    return parts


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_commas)]
Secrets = Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_split_secrets)]
