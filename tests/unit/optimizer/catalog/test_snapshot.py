from __future__ import annotations

import json
import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from optimizer.catalog import load, snapshot
from optimizer.catalog.snapshot import FILE, SHIPPED, read_snapshot, write_snapshot
from optimizer.catalog.tables import Tables
from optimizer.contract.errors import DataMissingError

MADE_AT = datetime(2026, 11, 21, 9, tzinfo=UTC)


@pytest.fixture
def written(tmp_path: Path, tables: Tables) -> Path:
    write_snapshot(tmp_path / "catalog", tables, made_at=MADE_AT)
    return tmp_path / "catalog"


def test_a_snapshot_reads_back_as_written(written: Path, tables: Tables) -> None:
    read = read_snapshot(written)
    assert read.made_at == MADE_AT
    assert Tables.of(read) == tables
    assert load(written).offers == load(SHIPPED).offers


def test_writing_again_replaces_the_tables_and_leaves_nothing_behind(written: Path, tables: Tables) -> None:
    tables.offers.pop()
    write_snapshot(written, tables, made_at=MADE_AT)
    assert len(load(written).offers) == len(tables.offers)
    assert [path.name for path in written.iterdir()] == [FILE]


def test_a_write_that_dies_leaves_the_old_snapshot_whole(
    written: Path, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = load(written)

    def dies(source: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", dies)
    del tables.offers[10:]
    with pytest.raises(KeyboardInterrupt):
        write_snapshot(written, tables, made_at=MADE_AT)
    assert load(written).offers == before.offers


def _no_directory(directory: Path) -> None:
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()


Rows = list[dict[str, Any]]


def _rewritten(name: str, change: Callable[[Rows], Rows]) -> Callable[[Path], None]:
    return _changed(lambda document: document.update({name: change(document[name])}))


def _changed(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def do(directory: Path) -> None:
        document = json.loads((directory / FILE).read_text())
        change(document)
        (directory / FILE).write_text(json.dumps(document))

    return do


def _stated(kind: str, **facts: Any) -> Callable[[Path], None]:
    """Change the first offer that has a fact of this kind."""

    def change(rows: Rows) -> Rows:
        next(row for row in rows if kind in row)[kind].update(facts)
        return rows

    return _rewritten("offers", change)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_no_directory, "No such file"),
        (lambda d: (d / FILE).write_text("[]"), "is no catalog"),
        (lambda d: (d / FILE).write_bytes(b"\xff\xfe"), "is no catalog"),
        (lambda d: (d / FILE).write_bytes((d / FILE).read_bytes()[:-100]), "is no catalog"),
        (_changed(lambda d: d.update(format_version=99)), "format version 99, not 7"),
        (_changed(lambda d: d.update(made_at="0001-01-01T00:00:00+14:00")), "is no catalog"),
        (_rewritten("offers", lambda rows: []), "holds no on-demand price"),
        (_rewritten("offers", lambda rows: [{**rows[0], "colour": "red"}]), "is no catalog.*colour"),
        (_rewritten("instance_types", lambda rows: rows[1:]), "is no catalog: KeyError"),
        # A traceback, or a fleet for the price of its disks.
        (_stated("on_demand", usd_per_hour=math.nan), "on-demand nan .rule: a price is above 0"),
        (_stated("spot", usd_per_hour="9"), "is no catalog: TypeError"),
        (_stated("spot", as_of="2999-01-01"), "a date not in the future"),  # it was current for ever
        (_rewritten("unit_prices", lambda rows: [{**row, "usd": -5.0} for row in rows]), "breaks .* -5.0 .rule"),
    ],
)
def test_a_damaged_snapshot_is_refused_with_what_is_wrong(
    written: Path, damage: Callable[[Path], object], says: str
) -> None:
    damage(written)
    with pytest.raises(DataMissingError, match=says) as caught:
        load(written)
    assert caught.value.exit_code == 4
    assert str(written) in caught.value.got or "offer" in caught.value.got
    assert caught.value.limit and caught.value.why and "gpufleet catalog refresh" in caught.value.next_step


def test_a_damaged_shipped_snapshot_asks_for_a_new_installation(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "SHIPPED", written)
    (written / FILE).write_bytes(b"")
    with pytest.raises(DataMissingError) as caught:
        load()
    assert caught.value.next_step.startswith("pip install --force-reinstall gpufleet")


def test_the_environment_names_another_snapshot(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(snapshot.DIRECTORY_VARIABLE, str(written))
    assert load().origin == str(written)
    monkeypatch.setenv(snapshot.DIRECTORY_VARIABLE, str(written / "nowhere"))
    with pytest.raises(DataMissingError, match="unset GPUFLEET_CATALOG"):
        load()


class TestTheUsersSnapshot:
    @pytest.fixture(autouse=True)
    def _cache(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def test_a_newer_one_is_used(self, tables: Tables) -> None:
        write_snapshot(snapshot.user_directory(), tables, made_at=load().made_at + timedelta(hours=1))
        assert load().origin == str(snapshot.user_directory())

    def test_an_older_one_is_passed_over_with_a_note(self, tables: Tables) -> None:
        write_snapshot(snapshot.user_directory(), tables, made_at=load().made_at - timedelta(days=1))
        assert load().origin == "shipped"
        assert "before the shipped one: not used" in load().notes[0]

    def test_a_damaged_one_is_passed_over_with_a_note(self, tables: Tables) -> None:
        write_snapshot(snapshot.user_directory(), tables, made_at=load().made_at + timedelta(hours=1))
        (snapshot.user_directory() / FILE).write_bytes(b"")
        assert load().origin == "shipped"
        assert "the shipped one is read instead" in load().notes[0]

    def test_the_cache_variable_must_be_absolute(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert snapshot.user_directory() == tmp_path / ".cache" / "gpufleet" / "catalog"
