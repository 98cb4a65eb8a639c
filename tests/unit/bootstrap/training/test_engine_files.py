"""An engine's checkpoint files in a directory and on S3: whole or not used, the newest valid one wins, old ones go."""

from __future__ import annotations

from pathlib import Path

import pytest

from bootstrap.training.errors import CheckpointError
from bootstrap.training.integrations.engine_files import EngineFiles, EngineManifest
from bootstrap.training.stores import LocalStore, S3Store, Store
from tests.unit.bootstrap.training.conftest import BUCKET

WEIGHTS = bytes(range(256)) * 40_000  # 10 MB: several parts on S3


@pytest.fixture(params=["directory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "directory":
        return LocalStore(tmp_path / "store")
    request.getfixturevalue("aws")
    return S3Store(BUCKET, "run")


def save(files: EngineFiles, folder: Path, step: int) -> None:
    prefix = f"engine-{step:08d}-abc.1"
    uploaded = files.upload(
        prefix, folder, [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    )
    manifest = EngineManifest(
        engine="any", step=step, world_size=1, global_batch=8, created_unix_s=float(step), files=tuple(uploaded),
    )  # fmt: skip
    files.commit(prefix, manifest.to_bytes())


def test_only_a_whole_checkpoint_is_used(store: Store, tmp_path: Path) -> None:
    files = EngineFiles(store)
    assert files.fetch_newest(tmp_path / "nothing yet") is None
    folder = tmp_path / "saved"
    (folder / "optimizer").mkdir(parents=True)
    (folder / "optimizer" / "model.bin").write_bytes(WEIGHTS)
    (folder / "empty").write_bytes(b"")
    for step in (1, 2, 3):
        save(files, folder, step)
    files.upload("engine-00000004-abc.1", folder, ["empty"])  # killed before its manifest
    files.prune(keep=2)
    assert [found.manifest.step for found in files.scan()[0]] == [3, 2]
    assert not store.names("engine-00000001")

    newest = files.fetch_newest(tmp_path / "node")
    assert newest is not None and newest.manifest.step == 3
    (newest.folder / "optimizer" / "model.bin").write_bytes(b"changed on the node")
    newest = files.fetch_newest(tmp_path / "node")
    assert newest is not None and (newest.folder / "optimizer" / "model.bin").read_bytes() == WEIGHTS
    assert (newest.folder / "empty").read_bytes() == b""

    store.delete("engine-00000003-abc.1/files/optimizer/model.bin")
    older = files.fetch_newest(tmp_path / "other node")
    assert older is not None and older.manifest.step == 2
    store.delete("engine-00000002-abc.1/files/optimizer/model.bin")
    flipped = WEIGHTS[:5_000_000] + bytes([WEIGHTS[5_000_000] ^ 1]) + WEIGHTS[5_000_001:]
    store.write("engine-00000002-abc.1/files/optimizer/model.bin", [flipped])
    with pytest.raises(CheckpointError, match="another checksum"):
        files.fetch_newest(tmp_path / "third node")
    for step in (2, 3):
        store.delete(f"engine-{step:08d}-abc.1/manifest.json")
        store.write(f"engine-{step:08d}-abc.1/manifest.json", [b"{"])
    with pytest.raises(CheckpointError, match="torn"):  # not: start over
        files.fetch_newest(tmp_path / "fourth node")


def test_a_name_that_leads_out_of_its_folder_is_not_written(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    files = EngineFiles(store)
    (tmp_path / "saved").mkdir()
    (tmp_path / "escape").write_bytes(b"x")
    (tmp_path / "saved" / "file").write_bytes(b"x")
    uploaded = files.upload("engine-00000001-abc.1", tmp_path / "saved", ["../escape"])
    files.commit(
        "engine-00000001-abc.1",
        EngineManifest(
            engine="any", step=1, world_size=1, global_batch=8, created_unix_s=1.0, files=tuple(uploaded)
        ).to_bytes(),
    )
    with pytest.raises(CheckpointError, match="leads out"):
        files.fetch_newest(tmp_path / "node" / "inside")
