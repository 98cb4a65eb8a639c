"""Every store keeps the same promises: all or nothing, never overwritten, the bytes that were given."""

from __future__ import annotations

import http.client
import os
import random
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import boto3
import jmespath
import pytest
from botocore.exceptions import ClientError

from bootstrap.contract.checkpoint import PRUNED, PRUNED_TAG
from bootstrap.training.errors import AlreadyExistsError, CheckpointError, ConfigurationError, InvalidCheckpoint
from bootstrap.training.stores import LocalStore, S3Store, Store, open_store
from bootstrap.training.stores.transfers import Boto3Transfers, CrtTransfers
from tests.unit.bootstrap.training.conftest import BUCKET

IN_PARTS = 20_000_003


def without_awscrt(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ImportError("awscrt")

    monkeypatch.setattr("bootstrap.training.stores.s3.CrtTransfers", refuse)


@pytest.fixture(params=["directory", "s3", "s3-boto3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    if request.param == "directory":
        return open_store(str(tmp_path / "store"))
    request.getfixturevalue("aws")
    if request.param == "s3-boto3":
        without_awscrt(monkeypatch)
    store = open_store(f"s3://{BUCKET}/run/a")
    assert isinstance(store, S3Store)
    assert isinstance(store._transfers, Boto3Transfers if request.param == "s3-boto3" else CrtTransfers)
    return store


@pytest.mark.parametrize("size", [0, 5, IN_PARTS], ids=["empty", "small", "in-parts"])
def test_parts_are_one_object(store: Store, size: int) -> None:
    data = os.urandom(size)
    cuts = sorted([0, 1, size // 3, size // 3, size])
    parts = [memoryview(data)[start:end] for start, end in pairwise(cuts)]
    store.write("step-1/a", [bytearray(parts[0]), *parts[1:]])
    assert store.read("step-1/a") == data
    into = bytearray(size // 2)
    store.read_into("step-1/a", size // 4, memoryview(into))
    assert into == data[size // 4 : size // 4 + size // 2]
    for offset, length in ((size, 1), (0, size + 1)):
        with pytest.raises(InvalidCheckpoint, match=f"ends at byte {size}|416|InvalidRange"):
            store.read_into("step-1/a", offset, memoryview(bytearray(length)))
    with pytest.raises(AlreadyExistsError, match="never overwritten"):
        store.write("step-1/a", [b"other"])
    assert store.read("step-1/a") == data


def test_absent_name(store: Store) -> None:
    with pytest.raises(FileNotFoundError, match="step-1/none"):
        store.read("step-1/none")
    with pytest.raises(FileNotFoundError, match="step-1/none"):
        store.read_into("step-1/none", 0, memoryview(bytearray(1)))
    store.delete("step-1/none")


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite

    def fill_up(descriptor: int, data: memoryview, offset: int) -> int:
        if offset:
            raise OSError(28, "No space left on device")
        return write(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", fill_up)
    with pytest.raises(CheckpointError, match="No space left"):
        LocalStore(tmp_path).write("step-1/a", [bytes(IN_PARTS)])
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_listing_survives_a_folder_pruned_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    for name in ("step-1/a", "step-2/b"):
        store.write(name, [b"x"])
    scandir = os.scandir

    def prune_first(folder: str) -> Any:
        if Path(folder).name == "step-1":
            store.delete("step-1/a")
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", prune_first)
    assert store.names("step-") == ["step-2/b"]


def test_a_folder_that_cannot_be_listed_is_no_empty_store_and_others_do_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only root may list the lost+found of a file system that is mounted for the checkpoints."""
    store = LocalStore(tmp_path)
    for name in ("step-1/a", "step-1/b/c", "lost+found/x"):
        store.write(name, [b"x"])
    scandir, closed = os.scandir, "lost+found"

    def refuse(folder: str) -> Any:
        if Path(folder).name == closed:
            raise PermissionError(13, "Permission denied", folder)
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    assert store.names("step-") == store.names("step-1/") == ["step-1/a", "step-1/b/c"]
    closed = "b"
    with pytest.raises(CheckpointError, match="cannot be listed: Permission denied"):
        store.names("step-")


def test_directory_is_gone_with_its_last_file(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.write("step-1/a", [b"x"])
    store.delete("step-1/a")
    assert list(tmp_path.iterdir()) == []


class Proxy(ThreadingHTTPServer):
    """Passes requests on to moto, records them, and closes the connection instead of answering where told to."""

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), _Pass)
        self.upstream = upstream.removeprefix("http://")
        self.requests: list[tuple[str, str, str | None]] = []
        self.loses_answer: Callable[[str, str], bool] = lambda method, path: False
        self.refusal: tuple[int, str, str] | None = None  # status, S3's code and message, to every request

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are no fault."""

    def conditions(self, method: str, mark: str) -> list[str | None]:
        return [condition for verb, path, condition in self.requests if verb == method and mark in path]


class _Pass(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def do_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.requests.append((self.command, self.path, self.headers.get("If-None-Match")))
        if self.server.refusal is not None:
            status, code, message = self.server.refusal
            refusal = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
            self.send_response(status)
            self.send_header("x-amz-bucket-region", "eu-west-1")
            self.send_header("Content-Length", str(len(refusal)))
            self.end_headers()
            self.wfile.write(refusal)
            return
        upstream = http.client.HTTPConnection(self.server.upstream)
        upstream.request(self.command, self.path, body, dict(self.headers))
        answer = upstream.getresponse()
        data = answer.read()
        if self.server.loses_answer(self.command, self.path):
            self.close_connection = True
            return
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "date", "server"):
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = do_any  # noqa: N815 - BaseHTTPRequestHandler's names

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def proxy(aws: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with Proxy(aws) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("with_awscrt", [True, False], ids=["crt", "boto3"])
def test_s3_writes_in_parts_and_on_condition(with_awscrt: bool, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    if not with_awscrt:
        without_awscrt(monkeypatch)
    store = S3Store(BUCKET, "run")
    store.write("small", [b"x"])
    store.write("large", [bytes(IN_PARTS)])
    assert proxy.conditions("PUT", "run/small") == ["*"]
    assert proxy.conditions("POST", "run/large?uploadId=") == ["*"]
    assert len(proxy.conditions("PUT", "partNumber=")) >= 2
    with pytest.raises(AlreadyExistsError):
        store.write("large", [bytes(IN_PARTS)])
    assert len(boto3.client("s3").list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])) == 0, "none left behind"


@pytest.mark.parametrize(("size", "method", "mark"), [(5, "PUT", "run/a"), (IN_PARTS, "POST", "uploadId=")])
def test_s3_own_write_whose_answer_was_lost_is_no_error(size: int, method: str, mark: str, proxy: Proxy) -> None:
    data = os.urandom(size)
    lost: list[str] = []

    def lose_first(verb: str, path: str) -> bool:
        is_wanted = verb == method and mark in path and not lost
        lost.extend([path] * is_wanted)
        return is_wanted

    proxy.loses_answer = lose_first
    generator = random.getstate()
    store = S3Store(BUCKET, "run")
    store.write("a", [data])
    assert lost and len(proxy.conditions(method, mark)) > 1, "the runtime tries again"
    assert store.read("a") == data
    assert random.getstate() == generator, "Python's random numbers belong to the training"
    with pytest.raises(AlreadyExistsError):
        store.write("a", [data])


def test_s3_small_requests_are_tried_again(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bootstrap.training.stores.s3.RETRY_PAUSES_S", (0.01, 0.01))
    store = S3Store(BUCKET, "run")
    store.write("a", [b"x"])
    proxy.loses_answer = lambda method, path: len(proxy.requests) % 3 != 0
    generator = random.getstate()
    assert store.names("") == ["a"]
    assert store.read("a") == b"x"
    store.delete("a")
    assert random.getstate() == generator
    proxy.loses_answer = lambda method, path: True
    with pytest.raises(CheckpointError, match="cannot list s3://"):
        store.names("")


def test_s3_tells_what_training_prunes_from_what_others_delete(aws: str) -> None:
    """The stack's bucket drops tagged versions after a day (infra/storage.py)."""
    store, client = open_store(f"s3://{BUCKET}/run"), boto3.client("s3")
    client.put_bucket_versioning(Bucket=BUCKET, VersioningConfiguration={"Status": "Enabled"})
    for name in ("pruned", "deleted"):
        store.write(name, [b"x"])
    store.delete("pruned")
    client.delete_object(Bucket=BUCKET, Key="run/deleted")
    tags = {
        version["Key"]: client.get_object_tagging(Bucket=BUCKET, Key=version["Key"], VersionId=version["VersionId"])[
            "TagSet"
        ]
        for version in client.list_object_versions(Bucket=BUCKET)["Versions"]
    }
    assert tags == {"run/pruned": [{"Key": PRUNED_TAG, "Value": PRUNED}], "run/deleted": []}
    # The commands of docs/operations.md undo a deletion.
    page = (Path(__file__).parents[4] / "docs/operations.md").read_text(encoding="utf-8")
    (query,) = re.findall(r"list-object-versions .*?--query '(.+?)'", page, re.DOTALL)
    listed = client.list_object_versions(Bucket=BUCKET, Prefix="run/deleted")
    client.delete_objects(Bucket=BUCKET, Delete=jmespath.search(query, listed))
    assert store.names("") == ["deleted"] and store.read("deleted") == b"x"
    # The fixture empties a bucket without versions.
    listed = client.list_object_versions(Bucket=BUCKET)
    for version in [*listed["Versions"], *listed["DeleteMarkers"]]:
        client.delete_object(Bucket=BUCKET, Key=version["Key"], VersionId=version["VersionId"])


def test_s3_deletes_also_where_it_may_not_tag(
    aws: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client = boto3.client("s3")

    def refuse(**_: object) -> None:
        answer: Any = {"Error": {"Code": "AccessDenied"}, "ResponseMetadata": {"HTTPStatusCode": 403}}
        raise ClientError(answer, "PutObjectTagging")

    monkeypatch.setattr(client, "put_object_tagging", refuse)
    store = S3Store(BUCKET, "run", client=client)
    for name in ("a", "b"):
        store.write(name, [b"x"])
        store.delete(name)
    assert store.names("") == []
    assert [record.message for record in caplog.records if "pruned" in record.message] == [caplog.messages[-1]]


def test_s3_encrypts_with_the_key_it_is_given(aws: str, monkeypatch: pytest.MonkeyPatch) -> None:
    key = "arn:aws:kms:us-east-1:123456789012:key/11111111-2222-3333-4444-555555555555"
    monkeypatch.setenv("GPUFLEET_KMS_KEY_ARN", key)
    store = open_store(f"s3://{BUCKET}/run")
    store.write("small", [b"x"])
    store.write("large", [bytes(IN_PARTS)])
    for name in ("small", "large"):
        head = boto3.client("s3").head_object(Bucket=BUCKET, Key=f"run/{name}")
        assert (head["ServerSideEncryption"], head["SSEKMSKeyId"]) == ("aws:kms", key)


@pytest.mark.parametrize(
    ("refusal", "says"),
    [
        ((301, "PermanentRedirect", "Use another endpoint."), "Use another endpoint. .*eu-west-1: set GPUFLEET_REGION"),
        ((403, "AccessDenied", "not authorized to perform: kms:GenerateDataKey"), "403 AccessDenied: not authorized"),
    ],
)
def test_s3_says_why_it_refuses_a_write(refusal: tuple[int, str, str], says: str, proxy: Proxy) -> None:
    store = S3Store(BUCKET, "run")
    proxy.refusal = refusal
    with pytest.raises(CheckpointError, match=says) as error:
        store.write("a", [b"x"])
    assert "<" not in str(error.value)


@pytest.mark.parametrize("uri", ["", "s3://", "gs://bucket/prefix"])
def test_unusable_uri_is_refused(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUFLEET_CHECKPOINT_URI", raising=False)
    with pytest.raises(ConfigurationError, match="s3://"):
        open_store(uri)


def test_a_folder_stays_where_a_script_changes_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store("run")
    monkeypatch.chdir("/")
    store.write("a", [b"1"])
    assert (tmp_path / "run" / "a").exists()


def test_uri_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GPUFLEET_CHECKPOINT_URI", f"file://{tmp_path}")
    assert open_store().uri == str(tmp_path)
