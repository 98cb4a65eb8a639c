"""AWS's GPU instance types, regions and prices, each number with source and date; ``load()`` returns a ``Catalog``."""

from optimizer.catalog.model import Catalog, Source, UnitPrice
from optimizer.catalog.snapshot import load

__all__ = ["Catalog", "Source", "UnitPrice", "load"]
