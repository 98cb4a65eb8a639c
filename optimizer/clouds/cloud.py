"""Cloud: the record that a file of providers/ defines; a light named tuple, for each ``gpufleet offers`` imports it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from optimizer.catalog.sources import Skipped


class PricesUnreadableError(Exception):
    """The price API could not be reached, or answered with something other than prices."""


class RegionPrice(NamedTuple):
    """Linux prices of one type in one region, USD per hour."""

    on_demand: float
    spot: float | None


class PriceApi(NamedTuple):
    """A public price API that answers without an account; ``endpoint`` is its default address.

    ``read`` takes a type and an address, and returns prices by region and unusable answers, or raises
    PricesUnreadableError.
    """

    name: str
    endpoint: str
    read: Callable[[str, str], tuple[dict[str, RegionPrice], list[Skipped]]]


class Cloud(NamedTuple):
    """A cloud whose prices are compared with AWS's; ``place`` is its rank in lists, from 1."""

    name: str
    title: str
    place: int
    price_api: PriceApi | None = None

    @property
    def no_price_api(self) -> str:
        """Reason why the prices cannot be refreshed."""
        return f"{self.title} has no price API that answers without an account"

    @property
    def next_step(self) -> str:
        """Advice where a price is older than ``--max-age``."""
        if self.price_api is None:
            return f"drop --max-age: {self.no_price_api}"
        return f"gpufleet catalog refresh --cloud {self.name}"
