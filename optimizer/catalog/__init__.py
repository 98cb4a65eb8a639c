"""The catalog: which GPU instance types AWS offers, where, at what price, with the source and date of every number.

``load()`` returns a ``Catalog``; README.md in this folder says where each fact comes from and what to edit.
"""

from optimizer.catalog.model import Catalog, Source, UnitItem, UnitPrice
from optimizer.catalog.snapshot import load

__all__ = ["Catalog", "Source", "UnitItem", "UnitPrice", "load"]
