"""Only whole checkpoints count, and retention never takes the last good one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from bootstrap.training.checkpoint import Checkpoints, Manifest, Shard, _digest, prefix_name
from bootstrap.training.errors import AlreadyExistsError, CheckpointError, InvalidCheckpoint
from bootstrap.training.stores import LocalStore, Store, open_store
from tests.unit.bootstrap.training.conftest import BUCKET


@pytest.fixture(params=["directory", "s3"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "directory":
        return LocalStore(tmp_path / "store")
    request.getfixturevalue("aws")
    return open_store(f"s3://{BUCKET}/run")


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def save(store: Store, step: int, *, writer: str = "abc123", number: int = 1, commit: bool = True) -> str:
    """A checkpoint of two small shards."""
    prefix = prefix_name(step, writer, number)
    shards = []
    for rank, name in enumerate(("replicated.pt", "rank-00000.pt")):
        data = os.urandom(500)
        written = store.write(f"{prefix}/{name}", lambda file, data=data: file.write(data) and None)
        shards.append(Shard(name=name, kind="replicated", rank=rank, bytes=written.bytes, sha256=written.sha256))
    if commit:
        Checkpoints(store).commit(prefix, manifest(step, shards))
    return prefix


def manifest(step: int, shards: list[Shard]) -> Manifest:
    return Manifest(
        step=step, samples=step * 8, world_size=1, global_batch=8, dataset_size=100, seed=0,
        layout="replicated", created_unix_s=1000.0 + step, torch_version="2.11.0", shards=tuple(shards),
    )  # fmt: skip


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def valid_prefixes(store: Store) -> list[str]:
    checkpoints = Checkpoints(store)
    return [one.prefix for one in checkpoints.scan()[0] if checkpoints._is_valid(one)]


def test_newest_first_and_whole_ones_verify(any_store: Store) -> None:
    prefixes = [save(any_store, step) for step in (5, 40, 12)]
    candidates, broken = Checkpoints(any_store).scan()
    assert [candidate.manifest.step for candidate in candidates] == [40, 12, 5] and broken == []
    assert sorted(valid_prefixes(any_store)) == sorted(prefixes)


@pytest.mark.parametrize("shard", ["replicated.pt", "rank-00000.pt"])
@pytest.mark.parametrize(
    ("damage", "reason"),
    [(flip, "another SHA-256"), (truncate, "bytes, its manifest says"), (Path.unlink, "is missing")],
)
def test_damaged_shard_is_found(store: LocalStore, shard: str, damage: Callable[[Path], None], reason: str) -> None:
    good, bad = save(store, 5), save(store, 9)
    damage(store.root / bad / shard)
    checkpoints = Checkpoints(store)
    with pytest.raises(InvalidCheckpoint, match=reason):
        checkpoints.verify(checkpoints.scan()[0][0])
    assert valid_prefixes(store) == [good]


@pytest.mark.parametrize(
    "damage", [flip, truncate, lambda path: path.write_text(""), lambda path: path.write_text("[]")]
)
def test_damaged_manifest_is_found(store: LocalStore, damage: Callable[[Path], None]) -> None:
    good, bad = save(store, 5), save(store, 9)
    damage(store.root / bad / "manifest.json")
    candidates, broken = Checkpoints(store).scan()
    assert [candidate.prefix for candidate in candidates] == [good]
    assert len(broken) == 1 and bad in broken[0]


def test_every_single_bit_of_the_manifest_is_protected(store: LocalStore) -> None:
    data = manifest(3, [Shard(name="a", kind="rank", rank=0, bytes=1, sha256="00")]).to_bytes()
    whole = Manifest.from_bytes(data)
    for position in range(len(data)):
        for bit in (0x01, 0x10):
            changed = bytearray(data)
            changed[position] ^= bit
            try:
                read = Manifest.from_bytes(bytes(changed))
            except CheckpointError:
                continue
            assert read == whole, f"byte {position} changed the manifest unnoticed"


def test_manifest_of_another_step_than_its_name(store: LocalStore) -> None:
    prefix = save(store, 9)
    (store.root / prefix).rename(store.root / prefix_name(11, "abc123", 1))
    assert Checkpoints(store).scan()[0] == []


def test_newer_format_is_an_error_and_not_passed_over(store: LocalStore) -> None:
    save(store, 5)
    prefix = save(store, 9)
    path = store.root / prefix / "manifest.json"
    body = json.loads(path.read_text())["checkpoint"] | {"format": 2}
    path.write_text(json.dumps({"sha256": _digest(body), "checkpoint": body}))
    with pytest.raises(CheckpointError, match="format 2, and this version reads 1"):
        Checkpoints(store).scan()


def test_prefix_without_manifest_never_counts(any_store: Store) -> None:
    good = save(any_store, 5)
    save(any_store, 9, commit=False)
    assert valid_prefixes(any_store) == [good]
    assert Checkpoints(any_store).scan()[1] == []


def test_two_writers_of_one_step_do_not_meet(any_store: Store) -> None:
    save(any_store, 5, writer="aaa", commit=False)  # the slow one, dead half way
    good = save(any_store, 5, writer="bbb")
    assert valid_prefixes(any_store) == [good]
    with pytest.raises(AlreadyExistsError):
        save(any_store, 5, writer="bbb")


def test_foreign_names_are_left_alone(store: LocalStore) -> None:
    for name in ("step-by-step.txt", "step-00000001/manifest.json", "ledger.jsonl"):
        (store.root / name).parent.mkdir(exist_ok=True)
        (store.root / name).write_text("mine")
    for step in range(1, 6):
        save(store, step)
    Checkpoints(store).prune(keep=1)
    assert (store.root / "step-by-step.txt").exists() and (store.root / "step-00000001/manifest.json").exists()


def test_prune_keeps_the_newest_and_clears_debris(any_store: Store) -> None:
    debris_old = save(any_store, 1, commit=False)
    prefixes = [save(any_store, step) for step in (2, 3, 4, 5)]
    in_progress = save(any_store, 6, commit=False)
    deleted = Checkpoints(any_store).prune(keep=2, known_valid=prefixes[-1])
    assert sorted(deleted) == sorted([debris_old, *prefixes[:2]])
    left = {name.split("/")[0] for name in any_store.names("step-")}
    assert left == {*prefixes[2:], in_progress}


def test_prune_never_deletes_the_newest_valid_one(store: LocalStore) -> None:
    prefixes = [save(store, step) for step in (1, 2, 3, 4, 5)]
    for bad in prefixes[2:]:
        flip(store.root / bad / "replicated.pt")
    Checkpoints(store).prune(keep=1)
    assert valid_prefixes(store) == [prefixes[1]]
    assert not (store.root / prefixes[0]).exists()


def test_prune_deletes_nothing_when_nothing_is_valid(store: LocalStore) -> None:
    prefixes = [save(store, step) for step in (1, 2, 3)]
    for bad in prefixes:
        truncate(store.root / bad / "replicated.pt")
    assert Checkpoints(store).prune(keep=1) == []


def test_prune_refuses_to_keep_none(store: LocalStore) -> None:
    with pytest.raises(CheckpointError, match="keep is 0"):
        Checkpoints(store).prune(keep=0)


def test_prune_deletes_the_manifest_first(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    save(store, 1)
    save(store, 2)
    order: list[str] = []
    monkeypatch.setattr(store, "delete", order.append)
    Checkpoints(store).prune(keep=1)
    assert order[0].endswith("manifest.json") and len(order) == 3
