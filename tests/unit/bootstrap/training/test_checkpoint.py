"""Only whole checkpoints count, and retention never takes the last good one."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bootstrap.contract.checkpoint import ManifestError, compact_json, rank_file_name, read_contents
from bootstrap.training import stager
from bootstrap.training.checkpoint import Manifest, StoredCheckpoints
from bootstrap.training.checksum import checksum
from bootstrap.training.errors import AlreadyExistsError, CheckpointError
from bootstrap.training.index import Chunk, Index
from bootstrap.training.planning import Piece
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


def save(store: Store, step: int, *, writer: str = "abc123", number: int = 1, commit: bool = True, **facts: Any) -> str:
    """A checkpoint of two ranks: a tensor in two chunks, and the ranks' values."""
    prefix = StoredCheckpoints(store).prefix_name(step, writer, number)
    files, sums, values = [], [], []
    for rank in range(2):
        data, value = os.urandom(400), os.urandom(100)
        store.write(f"{prefix}/{rank_file_name(rank)}", [data, value])
        files.append([Piece(key="w", offsets=(100 * rank,), sizes=(100,), dtype=torch.float32, shape=(200,), at=0)])
        sums.append([checksum(memoryview(data))])
        values.append(Chunk((), (), rank, 400, 100, checksum(memoryview(value))))
    if commit:
        StoredCheckpoints(store).commit(prefix, manifest(step, Index.of(files, sums, values), **facts).to_bytes())
    return prefix


def manifest(step: int, index: Index, **facts: Any) -> Manifest:
    return Manifest(
        step=step, samples=step * 8, world_size=2, global_batch=8, dataset_size=100, seed=0,
        created_unix_s=1000.0 + step, torch_version="2.11.0", index=index, facts=facts,
    )  # fmt: skip


def flip(path: Path, at: int = 250) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def flip_last(path: Path) -> None:
    flip(path, -1)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def valid_prefixes(store: Store) -> list[str]:
    checkpoints = StoredCheckpoints(store)
    return [one.prefix for one in checkpoints.scan()[0] if checkpoints.is_valid(one)]


def test_a_manifest_tells_the_sizes_of_its_files_without_torch(store: LocalStore) -> None:
    prefix = save(store, 40)
    contents = read_contents(prefix, store.read(f"{prefix}/manifest.json"))
    assert contents is not None and (contents.step, contents.created_unix_s) == (40, 1040.0)
    assert contents.files == {"rank-00000.bin": 500, "rank-00001.bin": 500}
    assert read_contents("ledger", b"") is None
    changed = store.read(f"{prefix}/manifest.json").replace(b'"step":40', b'"step":41')
    for data, why in ((changed, "checksum is wrong"), (b"{torn", "is torn"), (b"[]", "is torn")):
        with pytest.raises(ManifestError, match=why):
            read_contents(prefix, data)


@pytest.mark.parametrize("name", ["rank-00000.bin", "rank-00001.bin"])
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flip, "another checksum at bytes 0 to 400"),
        (flip_last, "another checksum at bytes 400 to 500"),
        (truncate, "cannot read 100 bytes at 400"),
        (Path.unlink, "is missing"),
    ],
)
def test_damaged_file_is_found(
    store: LocalStore, name: str, damage: Callable[[Path], None], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = save(store, 5), save(store, 9)
    damage(store.root / bad / name)
    assert valid_prefixes(store) == [good]
    assert reason in caplog.text


def test_every_single_bit_of_the_manifest_is_protected(store: LocalStore) -> None:
    chunk = Chunk((), (), 0, 4, 1, "00")
    piece = Piece(key="w", offsets=(), sizes=(), dtype=torch.float32, shape=(), at=0)
    data = manifest(3, Index.of([[piece]], [["ab"]], [chunk])).to_bytes()
    whole = Manifest.from_bytes(data)
    for position in range(len(data)):
        for bit in (0x01, 0x10):
            changed = bytearray(data)
            changed[position] ^= bit
            try:
                read = Manifest.from_bytes(bytes(changed))
            except (CheckpointError, ManifestError):
                continue
            assert read == whole, f"byte {position} changed the manifest unnoticed"


def test_manifest_of_another_step_than_its_name(store: LocalStore) -> None:
    prefix = save(store, 9)
    (store.root / prefix).rename(store.root / prefix.replace("-00000009-", "-00000011-"))
    assert StoredCheckpoints(store).scan()[0] == []


@pytest.mark.parametrize("version", [1, 3])
def test_another_format_is_an_error_and_not_passed_over(store: LocalStore, version: int) -> None:
    save(store, 5)
    path = store.root / save(store, 9) / "manifest.json"
    body = json.loads(path.read_text())["checkpoint"] | {"format": version}
    path.write_text(json.dumps({"sha256": hashlib.sha256(compact_json(body)).hexdigest(), "checkpoint": body}))
    with pytest.raises(CheckpointError, match=f"format {version}, and this version reads 2"):
        StoredCheckpoints(store).scan()


def test_two_writers_of_one_step_do_not_meet(any_store: Store) -> None:
    save(any_store, 5, writer="aaa", commit=False)  # the slow one, dead half way
    good = save(any_store, 5, writer="bbb")
    assert valid_prefixes(any_store) == [good] and not StoredCheckpoints(any_store).scan()[1]
    with pytest.raises(AlreadyExistsError):
        save(any_store, 5, writer="bbb")


def test_foreign_names_are_left_alone(store: LocalStore) -> None:
    for name in ("step-by-step.txt", "step-00000001/manifest.json", "ledger.jsonl"):
        (store.root / name).parent.mkdir(exist_ok=True)
        (store.root / name).write_text("mine")
    for step in range(1, 6):
        save(store, step)
    StoredCheckpoints(store).prune(keep=1)
    assert (store.root / "step-by-step.txt").exists() and (store.root / "step-00000001/manifest.json").exists()


def test_prune_keeps_the_newest_and_clears_debris(any_store: Store) -> None:
    debris_old = save(any_store, 1, commit=False)
    prefixes = [save(any_store, step) for step in (2, 3, 4, 5)]
    in_progress = save(any_store, 6, commit=False)
    deleted = StoredCheckpoints(any_store).prune(keep=2, known_valid=prefixes[-1])
    assert sorted(deleted) == sorted([debris_old, *prefixes[:2]])
    left = {name.split("/")[0] for name in any_store.names("step-")}
    assert left == {*prefixes[2:], in_progress}


def test_prune_never_deletes_the_newest_valid_one(store: LocalStore) -> None:
    prefixes = [save(store, step) for step in (1, 2, 3, 4, 5)]
    for bad in prefixes[2:]:
        flip(store.root / bad / "rank-00001.bin")
    StoredCheckpoints(store).prune(keep=1)
    assert valid_prefixes(store) == [prefixes[1]]
    assert not (store.root / prefixes[0]).exists()


def test_prune_deletes_nothing_when_nothing_is_valid(store: LocalStore) -> None:
    prefixes = [save(store, step) for step in (1, 2, 3)]
    for bad in prefixes:
        truncate(store.root / bad / "rank-00001.bin")
    assert StoredCheckpoints(store).prune(keep=1) == []


def test_prune_leaves_another_run_s_checkpoints_and_says_so(
    store: LocalStore, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = [save(store, step, writer="fff", eps=1e-5) for step in (1, 3, 9)]
    begun = save(store, 2, writer="fff", commit=False)
    ours = [save(store, step, eps=1e-6) for step in (2, 3, 4)]
    deleted = StoredCheckpoints(store, {"eps": 1e-6}).prune(keep=1)
    assert sorted(deleted) == sorted(ours[:2])
    left = {name.split("/")[0] for name in store.names("step-")}
    assert left == {*theirs, begun, ours[-1]}
    assert f"another run, which stay: {theirs[-1]}, where eps is 1e-06, and was 1e-05" in caplog.text


def test_prune_deletes_the_manifest_first(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    save(store, 1)
    save(store, 2)
    order: list[str] = []
    monkeypatch.setattr(store, "delete", order.append)
    StoredCheckpoints(store).prune(keep=1)
    assert order[0].endswith("manifest.json") and len(order) == 3


def test_copies_are_cut_into_pieces_where_source_and_target_are_contiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stager, "PIECE_BYTES", 16)
    sources = [torch.arange(10.0), torch.arange(12.0).view(3, 4), torch.arange(6.0).view(2, 3).T, torch.tensor(7.0)]
    targets = [torch.zeros(source.shape) for source in sources]
    cut = stager._pieces(list(zip(targets, sources, strict=True)))
    assert [piece.numel() for piece in cut[1]] == [4, 4, 2, 4, 4, 4, 6, 1]
    torch._foreach_copy_(*cut)
    assert all(map(torch.equal, targets, sources))
