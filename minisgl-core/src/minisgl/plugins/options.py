"""Validates ``backend_options.<name>`` with the settings classes of the backends."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from minisgl.errors import SettingsError, nearest
from minisgl.plugins.host import PluginHost
from minisgl.plugins.registry import Offer
from minisgl.settings.resolve import validation_lines

Options = Mapping[str, Mapping[str, Any]]


def settings_of(host: PluginHost, offer: Offer[Any], options: Options) -> Any:
    """Return the settings object of a backend.

    Args:
        host: who knows the other backends of the same name.
        offer: the backend.
        options: all of ``backend_options``.

    Raises:
        SettingsError: a value is not allowed, or two keys mean this backend.
    """
    given = [key for key in options if _means(key, offer)]
    if len(given) > 1:
        raise SettingsError(
            f"backend_options.{given[0]} and backend_options.{given[1]} both set options of"
            f" {offer.qualified}. Keep one."
        )
    if not given:
        return _validated(offer.record.settings_type, {}, f"backend_options.{offer.name}")
    values = options[given[0]]
    if len([other for other in _offers(host) if _means(given[0], other)]) > 1:
        # An attention and an MoE backend of one name share the key: each takes its own fields.
        declared = _fields(offer.record.settings_type)
        values = {name: value for name, value in values.items() if name in declared}
    return _validated(offer.record.settings_type, values, f"backend_options.{given[0]}")


def validate_backend_options(host: PluginHost, options: Options) -> None:
    """Check every option of every backend, chosen or not.

    Raises:
        SettingsError: a backend that nobody offers, a bare name that two distributions offer for
            one purpose, two keys for one backend, an option that its backend does not have, or a
            value that is not allowed.
    """
    for key, values in options.items():
        offers = [offer for offer in _offers(host) if _means(key, offer)]
        if not offers:
            raise _unknown_backend(host, key)
        _refuse_rivals(host, key)
        known = {name for offer in offers for name in _fields(offer.record.settings_type)}
        for name in values:
            if name not in known:
                raise SettingsError(
                    f"Unknown option 'backend_options.{key}.{name}'."
                    f" {key} has: {', '.join(sorted(known)) or 'none'}.{nearest(name, known)}"
                )
    for offer in _offers(host):
        if any(_means(key, offer) for key in options):
            settings_of(host, offer, options)


def _refuse_rivals(host: PluginHost, key: str) -> None:
    for registry in _registries(host):
        offers = [offer for offer in registry if _means(key, offer)]
        owners = sorted({offer.distribution for offer in offers})
        if len(owners) > 1:
            ways = " or ".join(f"'{owner}:{offers[0].name}'" for owner in owners)
            raise SettingsError(
                f"backend_options.{key} is ambiguous: {' and '.join(owners)} offer it."
                f" Write {ways}."
            )


def _offers(host: PluginHost) -> Iterator[Offer[Any]]:
    """Yield the offers of every kind that has settings."""
    for registry in _registries(host):
        yield from registry


def _registries(host: PluginHost) -> tuple[Iterable[Offer[Any]], ...]:
    """Return the offers for each purpose."""
    backends = (host.attention, host.moe, host.exchanges, host.kv_pools)
    return (*backends, host.prefix_caches, host.grammars)


def _means(key: str, offer: Offer[Any]) -> bool:
    """Compare names; the environment can only write ``_`` where a name has ``-``."""
    return key.replace("-", "_") in (
        offer.name.replace("-", "_"),
        offer.qualified.replace("-", "_"),
    )


def _fields(settings_type: type[BaseModel]) -> set[str]:
    names = set(settings_type.model_fields)
    return names | {f.alias for f in settings_type.model_fields.values() if f.alias}


def _validated(settings_type: type[BaseModel], values: Mapping[str, Any], prefix: str) -> BaseModel:
    try:
        return settings_type.model_validate(dict(values))
    except ValidationError as error:
        raise SettingsError("\n  ".join(validation_lines(error, prefix))) from None


def _unknown_backend(host: PluginHost, key: str) -> SettingsError:
    known = sorted({offer.name for offer in _offers(host)})
    causes = "".join(f" {cause}." for cause in host.attention.left_out)
    return SettingsError(
        f"backend_options.{key} is for a backend that is not installed."
        f" Installed: {', '.join(known)}.{nearest(key, known)}{causes}"
    )
