from __future__ import annotations

import json
import logging
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import boto3
import pytest

from bootstrap.trainer.data import staging
from bootstrap.trainer.data.staging import stage
from bootstrap.training.errors import ConfigurationError
from tests.unit.bootstrap.training.conftest import BUCKET

URI = f"s3://{BUCKET}/corpus/v1.5"


@pytest.fixture
def put(aws: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Writer of objects under the prefix, and the scratch disk that they are staged to."""
    monkeypatch.setenv("GPUFLEET_SCRATCH_DIR", str(tmp_path))
    client = boto3.client("s3")

    def put(name: str, body: bytes) -> None:
        client.put_object(Bucket=BUCKET, Key=f"corpus/{name}", Body=body)

    put("v1.5/train.bin", TRAIN)
    put("v1.5/a/b.bin", b"b")
    put("v1.50/other.bin", b"another data set")
    return SimpleNamespace(object=put, client=client)


TRAIN = bytes(range(250)) * 40


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".staged"))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.mark.parametrize("small_bytes", [staging.SMALL_BYTES, 100])  # by boto3, by the CRT
def test_only_what_changed_is_copied_again(
    put: SimpleNamespace, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, small_bytes: int
) -> None:
    monkeypatch.setattr(staging, "SMALL_BYTES", small_bytes)
    monkeypatch.setattr(staging, "PIECE_BYTES", 4096)
    caplog.set_level(logging.INFO)
    folder = stage(URI)
    assert contents(folder) == {"train.bin": TRAIN, "a/b.bin": b"b"}
    assert "data: 0.00 of 0.00 GiB copied" in caplog.text

    first = {path: path.stat().st_ino for path in folder.rglob("*.bin")}
    with (folder / staging.JOURNAL).open("a") as journal:
        journal.write('\n["train.bi')  # a process was killed here
    put.object("v1.5/a/b.bin", b"c")  # the same size
    put.object("v1.5/new.bin", b"new")
    assert stage(URI) == folder
    assert contents(folder) == {"train.bin": TRAIN, "a/b.bin": b"c", "new.bin": b"new"}
    assert (folder / "train.bin").stat().st_ino == first[folder / "train.bin"]

    put.client.delete_object(Bucket=BUCKET, Key="corpus/v1.5/a/b.bin")
    (folder / "new.bin").write_bytes(b"torn")
    stage(URI)
    assert contents(folder) == {"train.bin": TRAIN, "new.bin": b"new"}


def test_other_local_ranks_wait_for_this_start_s_copy(put: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = stage(URI)
    (folder / staging.COMPLETE).write_text("an earlier start")
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        monkeypatch.setenv("LOCAL_RANK", "0")
        stage(URI)

    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(time, "sleep", sleep)
    assert stage(URI) == folder and len(waits) == 1


def test_one_object_comes_with_its_sidecars(put: SimpleNamespace) -> None:
    put.object("v1.5/train.json", json.dumps({"dtype": "uint16"}).encode())
    path = stage(f"{URI}/train.bin")
    assert path.name == "train.bin" and path.with_suffix(".json").is_file()
    assert set(contents(path.parent)) == {"train.bin", "train.json"}


def test_bad_addresses_and_small_disks_are_refused_before_a_byte_is_copied(
    put: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for uri, message in {
        f"s3://{BUCKET}/corpus/v2": "no object under this prefix",
        "s3://no-such-bucket/x": "needs s3:ListBucket and s3:GetObject",
        f"s3://{BUCKET}": "data comes from a path or s3://BUCKET/PREFIX",
        "gs://bucket/x": "data comes from a path or s3://BUCKET/PREFIX",
        str(tmp_path / "nothing"): "does not exist on this node",
    }.items():
        with pytest.raises(ConfigurationError, match=message):
            stage(uri)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2 * 2**30 + 10_000))
    with pytest.raises(ConfigurationError, match=r"still needs 0.0 GiB and .* has 2.0 GiB free"):
        stage(URI)
    assert not list(tmp_path.rglob("*.bin"))
