"""The shipped catalog."""

from __future__ import annotations

import pytest

from optimizer.catalog import Catalog, load
from optimizer.catalog.snapshot import SHIPPED, read_snapshot
from optimizer.catalog.tables import Tables


@pytest.fixture(scope="session")
def catalog() -> Catalog:
    return load(SHIPPED)


@pytest.fixture
def tables() -> Tables:
    return Tables.of(read_snapshot(SHIPPED))
