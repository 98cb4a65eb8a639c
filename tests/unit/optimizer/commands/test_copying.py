"""Copies of a checkpoint between buckets, against moto with small parts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import boto3
import moto
import pytest

from bootstrap.contract.checkpoint import compact_json
from infra.naming import Names
from optimizer.commands.move import copying
from optimizer.contract.errors import GpufleetError

OLD_NAMES, NEW_NAMES = (
    Names(stack="dev", account_id="123456789012", region=region, partition="aws")
    for region in ("us-east-1", "eu-west-1")
)
OLD, NEW = OLD_NAMES.bucket, NEW_NAMES.bucket
MIB = 2**20


def manifest(step: int, sizes: list[int], created_unix_s: float = 0.0) -> bytes:
    """Manifest of a checkpoint with one chunk a rank."""
    chunks = [[[0], [size], rank, 0, size, "crc32:0"] for rank, size in enumerate(sizes)]
    body = {
        "format": 2,
        "step": step,
        "created_unix_s": created_unix_s,
        "index": {"tensors": {"w": {"dtype": "float32", "shape": [1], "chunks": chunks}}, "values": []},
    }
    digest = hashlib.sha256(compact_json(body)).hexdigest()
    return json.dumps({"sha256": digest, "checkpoint": body}).encode()


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """S3 of two regions, with a bucket each; a part has 5 MiB, S3's least."""
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    monkeypatch.setattr(copying, "PART_BYTES", 5 * MIB)
    with moto.mock_aws():
        old, new = (boto3.client("s3", region_name=region) for region in ("us-east-1", "eu-west-1"))
        old.create_bucket(Bucket=OLD)
        new.create_bucket(Bucket=NEW, CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
        monkeypatch.setattr("optimizer.aws.clients.s3", lambda region: new if region == "eu-west-1" else old)
        yield old, new


def save(client: Any, step: int, *sizes: int, prefix: str = "", commit: bool = True) -> str:
    """A checkpoint of ranks' files with these sizes."""
    prefix = prefix or f"step-{step:08d}-abc.1"
    for rank, size in enumerate(sizes):
        body = bytes([step % 251, rank]) * (size // 2) + b"x" * (size % 2)
        client.put_object(
            Bucket=OLD, Key=f"checkpoints/{prefix}/rank-{rank:05d}.bin", Body=body, ChecksumAlgorithm="CRC64NVME"
        )
    if commit:
        client.put_object(Bucket=OLD, Key=f"checkpoints/{prefix}/manifest.json", Body=manifest(step, list(sizes)))
    return prefix


def carry(clients: tuple[Any, Any]) -> list[str]:
    """Copy what is to carry; return what was shown."""
    shown: list[str] = []
    copying.copy(OLD_NAMES, NEW_NAMES, copying.find_carried(clients[0], OLD, "checkpoints"), shown.append)
    return shown


def contents(client: Any, bucket: str) -> dict[str, bytes]:
    keys = [one["Key"] for one in client.list_objects_v2(Bucket=bucket).get("Contents", [])]
    return {key: client.get_object(Bucket=bucket, Key=key)["Body"].read() for key in keys}


def test_the_newest_checkpoint_and_the_ledger_arrive_byte_for_byte(clients: tuple[Any, Any]) -> None:
    old, new = clients
    save(old, 5, 100)
    prefix = save(old, 40, 12 * MIB, 100)
    save(old, 50, 100, commit=False)
    old.put_object(Bucket=OLD, Key="checkpoints/ledger/w-000001.jsonl", Body=b"{}")
    old.put_object(Bucket=OLD, Key="control/state.json", Body=b"{}")
    before = contents(old, OLD)
    assert len(carry(clients)) == 4
    arrived = contents(new, NEW)
    assert set(arrived) == {key for key in before if prefix in key or "ledger" in key}
    assert all(before[key] == body for key, body in arrived.items())
    assert contents(old, OLD) == before
    assert len(carry(clients)) == 1, "a second call finds the checkpoint there; the ledger may have grown"


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        ({"rank-00000.bin": b"short"}, "has 5 bytes, not its manifest's"),
        ({"rank-00000.bin": None}, "rank-00000.bin has 0 bytes"),
        ({"manifest.json": manifest(40, [100]).replace(b'"step": 40', b'"step": 41')}, "checksum is wrong"),
        ({"manifest.json": b"{torn"}, "is torn"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over(
    clients: tuple[Any, Any], damage: dict[str, bytes | None], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    old, _ = clients
    good, bad = save(old, 5, 100), save(old, 40, 100)
    for name, body in damage.items():
        key = f"checkpoints/{bad}/{name}"
        if body is None:
            old.delete_object(Bucket=OLD, Key=key)
        else:
            old.put_object(Bucket=OLD, Key=key, Body=body)
    carried = copying.find_carried(old, OLD, "checkpoints")
    assert (carried.step, carried.manifest) == (5, f"{good}/manifest.json")
    fault = capsys.readouterr().err
    assert bad in fault and why in fault


def test_an_engine_s_checkpoint_is_carried_too(clients: tuple[Any, Any]) -> None:
    old, new = clients
    prefix, body = "engine-00000007-abc.1", {"step": 7, "created_unix_s": 1.0, "files": [{"name": "a/b", "bytes": 3}]}
    old.put_object(Bucket=OLD, Key=f"checkpoints/{prefix}/files/a/b", Body=b"abc")
    text = json.dumps({"checksum": "crc64nvme:0", "checkpoint": body})
    old.put_object(Bucket=OLD, Key=f"checkpoints/{prefix}/manifest.json", Body=text.encode())
    assert copying.find_carried(old, OLD, "checkpoints").step == 7
    carry(clients)
    assert set(contents(new, NEW)) == {f"checkpoints/{prefix}/files/a/b", f"checkpoints/{prefix}/manifest.json"}


@pytest.mark.parametrize("operation", ["copy_object", "upload_part_copy", "complete_multipart_upload"])
def test_an_interrupted_copy_is_no_checkpoint_and_goes_on(
    clients: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    old, new = clients
    prefix = save(old, 40, 12 * MIB, 100)
    call, calls = getattr(new, operation), []

    def interrupt(**given: Any) -> Any:
        calls.append(given)
        if len(calls) == 1:
            raise OSError("the network is gone")
        return call(**given)

    monkeypatch.setattr(new, operation, interrupt)
    with pytest.raises(OSError, match="network is gone"):
        carry(clients)
    assert f"checkpoints/{prefix}/manifest.json" not in contents(new, NEW)
    assert not new.list_multipart_uploads(Bucket=NEW).get("Uploads")
    carry(clients)
    assert contents(new, NEW) == contents(old, OLD)


def test_a_copy_that_differs_is_an_error(clients: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = clients
    save(old, 40, 100)
    put = new.put_object

    def corrupt(**given: Any) -> None:
        source = given["CopySource"]
        body = old.get_object(Bucket=source["Bucket"], Key=source["Key"])["Body"].read()
        put(Bucket=given["Bucket"], Key=given["Key"], Body=body if "manifest" in given["Key"] else b"y" * 99)

    monkeypatch.setattr(new, "copy_object", corrupt)
    with pytest.raises(GpufleetError, match="is not whole in"):
        carry(clients)
