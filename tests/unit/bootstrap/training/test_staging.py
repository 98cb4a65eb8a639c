from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
from botocore.config import Config

from bootstrap.contract.report import EXIT_AT_FAULT
from bootstrap.training import staging
from bootstrap.training.errors import CheckpointError, ConfigurationError
from bootstrap.training.staging import stage
from tests.unit.bootstrap.training.conftest import BUCKET

URI = f"s3://{BUCKET}/corpus/v1.5"


@pytest.fixture
def put(aws: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Writer of objects under the prefix, and the scratch disk that they are staged to."""
    monkeypatch.setattr(os, "sync", lambda: None)  # it writes the whole machine's files
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
def test_a_changed_prefix_is_copied_again(
    put: SimpleNamespace, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, small_bytes: int
) -> None:
    monkeypatch.setattr(staging, "SMALL_BYTES", small_bytes)
    monkeypatch.setattr(staging, "PIECE_BYTES", 4096)
    caplog.set_level(logging.INFO)
    folder = stage(URI)
    assert contents(folder) == {"train.bin": TRAIN, "a/b.bin": b"b"}
    assert "data: 0.00 of 0.00 GiB, 2 of 2 files copied" in caplog.text and "0:00:00 left" in caplog.text

    put.object("v1.5/a/b.bin", b"c")  # the same size
    put.object("v1.5/new.bin", b"new")
    assert stage(URI) == folder
    assert contents(folder) == {"train.bin": TRAIN, "a/b.bin": b"c", "new.bin": b"new"}

    put.client.delete_object(Bucket=BUCKET, Key="corpus/v1.5/a/b.bin")
    (folder / "new.bin").write_bytes(b"torn")
    stage(URI)
    assert contents(folder) == {"train.bin": TRAIN, "new.bin": b"new"}
    (folder / staging.COMPLETE).write_text("  4711")  # an earlier version's
    stage(URI)
    assert contents(folder) == {"train.bin": TRAIN, "new.bin": b"new"}


def test_other_local_ranks_wait_for_this_start_s_copy(put: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = stage(URI)
    (folder / staging.COMPLETE).write_text("an earlier start\n{}")
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
    with pytest.raises(ConfigurationError, match=r"needs 0.0 GiB and .* has 2.0 GiB free"):
        stage(URI)
    assert not list(tmp_path.rglob("*.bin"))
    put.object("v3/b/c", b"")
    for name in ("v3//a", "v3/../../a", "v3/b"):
        put.object(name, b"")
        with pytest.raises(
            ConfigurationError, match=rf"v3 has the object '{name[3:]}', which is no file below a folder"
        ):
            stage(f"s3://{BUCKET}/corpus/v3")
        put.client.delete_object(Bucket=BUCKET, Key=f"corpus/{name}")


def test_a_disk_that_takes_no_file_is_named(put: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "gpufleet-data").write_bytes(b"no folder")
    with pytest.raises(CheckpointError, match=r"cannot be copied to .*gpufleet-data.*set GPUFLEET_SCRATCH_DIR"):
        stage(URI)


def test_the_set_up_s_copy_serves_every_start(
    put: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["staging", URI])
    assert staging.main() == 0
    folder = Path(capsys.readouterr().out.strip())
    assert contents(folder) == {"train.bin": TRAIN, "a/b.bin": b"b"}

    monkeypatch.setenv(staging.DATA_VARIABLE, str(folder))
    with monkeypatch.context() as offline:
        offline.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        for rank in "01":  # nobody asks S3, and nobody waits
            offline.setenv("LOCAL_RANK", rank)
            assert stage(URI) == folder
        assert staging.main() == 0

    before = {path: path.stat().st_ino for path in folder.rglob("*.bin")}
    monkeypatch.delenv(staging.DATA_VARIABLE)
    for is_complete in (True, False):  # after a copy that broke off, files may lack their bytes
        if not is_complete:
            (folder / staging.COMPLETE).unlink()
            (folder / "gone.bin").write_bytes(b"an object that was deleted meanwhile")
        stage(URI)
        after = {path: path.stat().st_ino for path in folder.rglob("*.bin")}
        assert (not is_complete or after == before) and contents(folder) == {"train.bin": TRAIN, "a/b.bin": b"b"}

    monkeypatch.setattr(sys, "argv", ["staging", f"s3://{BUCKET}/nothing"])
    assert staging.main() == EXIT_AT_FAULT
    monkeypatch.setattr(sys, "argv", ["staging", f"s3://{BUCKET}/corpus"])
    monkeypatch.setattr(staging, "make_client", lambda **_: unreachable())
    assert staging.main() == 1


def unreachable() -> Any:
    config = Config(connect_timeout=1, retries={"total_max_attempts": 1})
    return boto3.client("s3", endpoint_url="http://127.0.0.1:9", config=config)


def test_a_linked_file_system_is_used_once_it_shows_every_object(
    put: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    linked = tmp_path / "data"
    (linked / "a").mkdir(parents=True)
    (linked / "train.bin").write_bytes(TRAIN[:-1])  # an older object's size
    arriving = [("train.bin", TRAIN), ("a/b.bin", b"b")]
    monkeypatch.setattr(time, "sleep", lambda s: (linked / arriving[0][0]).write_bytes(arriving.pop(0)[1]))
    caplog.set_level(logging.INFO)
    assert staging.wait_for_linked(URI, linked) == linked
    assert [text.split(" are ")[0] for text in caplog.messages if " are " in text] == [
        f"data: {n} of 2 files" for n in (0, 1, 2)
    ]


def test_a_file_system_that_shows_no_further_object_is_at_fault(
    put: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.bin").write_bytes(TRAIN)
    monkeypatch.setattr(time, "sleep", lambda s: None)
    monkeypatch.setattr(staging, "LINK_STALL_S", 0.0)
    with pytest.raises(ConfigurationError, match=r"lacks 1 objects, such as a/b\.bin, and none came for 0 s"):
        staging.wait_for_linked(URI, tmp_path)


@pytest.mark.parametrize(
    ("uri", "reason"),
    [(f"{URI}/train.bin", "is one object"), (f"{URI}/nothing", "no object under"), (f"s3://{BUCKET}-2/x", "be read")],
)
def test_a_prefix_that_no_file_system_can_show_is_refused(
    put: SimpleNamespace, tmp_path: Path, uri: str, reason: str
) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        staging.wait_for_linked(uri, tmp_path)
