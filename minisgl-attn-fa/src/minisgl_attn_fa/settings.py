"""The settings ``backend_options.fa``. Imports neither torch nor FlashAttention."""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _name(value: object) -> object:
    """Write ``4`` or ``"4"`` as ``"fa4"``."""
    return f"fa{value}" if str(value) in {"2", "3", "4"} else value


class FaSettings(BaseModel):
    """Which FlashAttention the backend ``fa`` runs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Annotated[Literal["auto", "fa4", "fa3", "fa2"], BeforeValidator(_name)] = Field(
        "auto",
        description=(
            "FlashAttention 4, 3 or 2 (fa4, fa3, fa2, or just the number); auto takes the first of "
            "these that is installed and can run here."
        ),
    )
