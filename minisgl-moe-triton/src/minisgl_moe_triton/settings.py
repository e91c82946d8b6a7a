"""``backend_options.triton`` of the MoE backend. Imports no torch."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, field_validator


class TritonMoeSettings(BaseModel):
    """How the backend ``triton`` runs routed experts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tuned_folder: Path | None = Field(
        None,
        description="Tuned launches, as minisgl tune moe writes them; by default in ~/.config.",
    )

    @field_validator("tuned_folder")
    @classmethod
    def _home(cls, folder: Path | None) -> Path | None:
        """Let ``~`` be the home folder: behind ``--set NAME=`` and in files no shell sees to it."""
        try:
            return None if folder is None else folder.expanduser()
        except RuntimeError as error:
            raise ValueError(f"names a home folder that is not known: {error}") from None
