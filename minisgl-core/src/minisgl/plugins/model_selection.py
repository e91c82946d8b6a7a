"""Chooses what computes a model: the plugin that offers its architecture, or transformers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from minisgl.errors import UnknownBackendError, nearest
from minisgl.plugins.decisions import Decision
from minisgl.plugins.discovery import CORE
from minisgl.plugins.host import PluginHost
from minisgl.plugins.records import ModelRecord

Implementation = Literal["auto", "plugin", "transformers"]

THROUGH_TRANSFORMERS = ModelRecord(
    architectures=(),
    config_reader="minisgl.models.hf.config:read_config",
    model="minisgl.models.hf.model:TransformersModel",
    summary="Any causal language model of transformers, eagerly, by transformers' own code",
)

FASTER_ELSEWHERE: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(
        (
            "LlamaForCausalLM",
            "MistralForCausalLM",
            "MixtralForCausalLM",
            "OlmoeForCausalLM",
            "Qwen2ForCausalLM",
            "Qwen2MoeForCausalLM",
            "Qwen3ForCausalLM",
            "Qwen3MoeForCausalLM",
        ),
        "minisgl-models",
    )
)
"""Architectures of distributions that need not be installed: which one has a fast version."""


@dataclass(frozen=True, slots=True)
class ModelSelection:
    """What computes a model, and why.

    Attributes:
        record: the chosen one.
        warning: what a user who did not ask for transformers' code should know; else empty.
        table: how it was chosen.
    """

    record: ModelRecord
    warning: str
    table: tuple[Decision, ...]

    @property
    def through_transformers(self) -> bool:
        """Whether transformers' own code computes the model, on one rank and eagerly."""
        return self.record is THROUGH_TRANSFORMERS


def select_model(
    host: PluginHost, architectures: Sequence[str], implementation: Implementation = "auto"
) -> ModelSelection:
    """Choose what computes a model of one of ``architectures``.

    ``auto`` takes the plugin that offers one of them, and transformers' own code if none does;
    ``plugin`` and ``transformers`` insist.

    Raises:
        UnknownBackendError: nobody has any of them.
        AmbiguousBackendError: two plugins offer it; one must be disabled.
    """
    table = _table(host, architectures, implementation)
    chosen = next((row for row in table if row.outcome == "chosen"), None)
    if chosen is None or chosen.name != "transformers":
        return ModelSelection(_from_plugin(host, architectures, implementation), "", table)
    forced = implementation == "transformers"
    warning = "" if forced else _warning(host, _known(architectures))
    return ModelSelection(THROUGH_TRANSFORMERS, warning, table)


def _from_plugin(
    host: PluginHost, architectures: Sequence[str], implementation: Implementation
) -> ModelRecord:
    """Return a plugin's record, or raise what is wrong, with what transformers has to say."""
    if implementation != "transformers":
        try:
            return host.model_for(architectures)
        except UnknownBackendError as error:
            raise UnknownBackendError(f"{error} {_way_out(architectures)}") from None
    raise UnknownBackendError(f"model.implementation='transformers': {_way_out(architectures)}")


def _way_out(architectures: Sequence[str]) -> str:
    from minisgl.models.hf.architectures import known_architectures

    if _known(architectures):
        return "Or run it by transformers' own code: --model-implementation auto."
    wanted = architectures[0] if architectures else ""
    return (
        f"transformers, too, has no causal language model {wanted!r}."
        f"{nearest(wanted, known_architectures())}"
    )


def _known(architectures: Sequence[str]) -> str:
    """Return the first architecture that transformers has, or an empty string."""
    from minisgl.models.hf.architectures import known_architectures

    known = known_architectures()
    return next((name for name in architectures if name in known), "")


def _table(
    host: PluginHost, architectures: Sequence[str], implementation: Implementation
) -> tuple[Decision, ...]:
    """Return a row for each plugin that offers one of the architectures, and transformers' row."""
    forced = "model.implementation='{}'"
    offers = [offer for name in architectures for offer in host.models.named(name)]
    refused = forced.format(implementation) if implementation == "transformers" else ""
    rows = [
        Decision("model", offer.name, offer.distribution, "any",
                 "refused" if refused else "usable" if place else "chosen",
                 None if refused else 1, refused)
        for place, offer in enumerate(offers)
    ]  # fmt: skip
    name, rank, reason = "transformers", None, ""
    outcome: Literal["chosen", "usable", "refused"] = "refused"
    if implementation == "plugin":
        reason = forced.format(implementation)
    elif not _known(architectures):
        reason = "it has no causal language model of that name"
    else:
        taken = bool(offers) and not refused
        outcome, rank = ("usable" if taken else "chosen"), 0
        reason = f"{offers[0].name} has rank 1" if taken else ""
    return (*rows, Decision("model", name, CORE, "any", outcome, rank, reason))


def _warning(host: PluginHost, architecture: str) -> str:
    begin = (
        f"{architecture} runs by transformers' own code, eagerly and with none of minisgl's fused "
        "operations"
    )
    package = FASTER_ELSEWHERE.get(architecture)
    if package is None:
        return (
            f"{begin}, because no installed plugin offers it; none of minisgl's own packages has a "
            "fast version of this architecture yet"
        )
    causes = "".join(f" {cause}." for cause in host.models.left_out)
    return f"{begin}: the fast version is in {package} (pip install {package}).{causes}"
