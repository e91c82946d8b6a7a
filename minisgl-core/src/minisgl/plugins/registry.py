"""Looks up records by the name that users type."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from packaging.utils import canonicalize_name

from minisgl.errors import AmbiguousBackendError, UnknownBackendError, nearest

RecordT = TypeVar("RecordT")


@dataclass(frozen=True, slots=True)
class Offer(Generic[RecordT]):
    """A record, the name that it is offered under, and who offers it."""

    name: str
    record: RecordT
    distribution: str
    version: str

    @property
    def qualified(self) -> str:
        """The name that is always unambiguous: ``DISTRIBUTION:NAME``."""
        return f"{self.distribution}:{self.name}"

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


class Registry(Generic[RecordT]):
    """All offers of one kind; read-only.

    Two distributions may offer one name. Both stay listed, neither is a candidate of ``auto``,
    and only the qualified name finds one.

    Args:
        setting: what the user sets to choose one, such as ``attention.backend``.
        offers: in any order.
        qualifiable: whether users type the name, and so can qualify it.
        left_out: what failed or is disabled, one sentence each, to be named as likely causes.
    """

    def __init__(
        self,
        setting: str,
        offers: Sequence[Offer[RecordT]],
        left_out: Sequence[str] = (),
        *,
        qualifiable: bool = True,
    ) -> None:
        self.setting = setting
        self.offers = tuple(sorted(offers, key=lambda offer: (offer.name, offer.distribution)))
        self.left_out = tuple(left_out)
        self._qualifiable = qualifiable

    def __iter__(self) -> Iterator[Offer[RecordT]]:
        return iter(self.offers)

    def __len__(self) -> int:
        return len(self.offers)

    @property
    def names(self) -> list[str]:
        """Every offered name once, sorted."""
        return sorted({offer.name for offer in self.offers})

    @property
    def ambiguous(self) -> dict[str, tuple[Offer[RecordT], ...]]:
        """The names that several distributions offer, and their offers."""
        by_name = {name: self.named(name) for name in self.names}
        return {name: offers for name, offers in by_name.items() if len(offers) > 1}

    def named(self, name: str) -> tuple[Offer[RecordT], ...]:
        """Return every offer of a bare name."""
        return tuple(offer for offer in self.offers if offer.name == name)

    def get(self, choice: str) -> Offer[RecordT]:
        """Return the offer that ``choice`` means: ``NAME`` or ``DISTRIBUTION:NAME``.

        Raises:
            UnknownBackendError: nobody offers it; cites plugins that failed to load.
            AmbiguousBackendError: several offer the bare name.
        """
        distribution, colon, name = choice.rpartition(":")
        offers = self.named(name)
        if colon:
            owner = canonicalize_name(distribution)
            offers = tuple(offer for offer in offers if offer.distribution == owner)
        if not offers:
            raise UnknownBackendError(self._unknown(choice))
        if len(offers) > 1:
            raise AmbiguousBackendError(self._ambiguous(name, offers))
        return offers[0]

    def _unknown(self, choice: str) -> str:
        known = self.names
        if ":" in choice:
            known = [offer.qualified for offer in self.offers]
        installed = ", ".join(known) or "none"
        causes = "".join(f" {cause}." for cause in self.left_out)
        return (
            f"{self.setting}={choice!r} is not installed. Installed: {installed}."
            f"{nearest(choice, known)}{causes}"
        )

    def _ambiguous(self, name: str, offers: Sequence[Offer[RecordT]]) -> str:
        owners = " and ".join(str(offer) for offer in offers)
        ways = " or ".join(repr(offer.qualified) for offer in offers)
        write = f"Write {ways}, or disable one" if self._qualifiable else "Disable one"
        return (
            f"{self.setting}={name!r} is offered by {owners}."
            f" {write}: --disable-plugin {offers[0].distribution}."
        )
