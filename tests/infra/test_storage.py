from __future__ import annotations

import base64
import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest

from infra.bundle import ENTRY_POINT, build, pack
from infra.naming import Names
from infra.settings import ConfigError
from tests.infra.deployed import Deployed, deploy

GUARDS = ("BucketServerSideEncryptionConfiguration", "BucketVersioning", "BucketPolicy", "BucketPublicAccessBlock")


@pytest.fixture(scope="module")
def stack() -> Deployed:
    return deploy()


def test_the_bucket_is_encrypted_versioned_and_without_acls(stack: Deployed) -> None:
    (rule,) = stack.one("BucketServerSideEncryptionConfiguration")["rules"]
    assert rule["applyServerSideEncryptionByDefault"] == {
        "sseAlgorithm": "aws:kms",
        "kmsMasterKeyId": "arn:aws:kms:::gpufleet-dev-key",
    }
    assert rule["bucketKeyEnabled"] is True
    assert stack.one("BucketVersioning")["versioningConfiguration"] == {"status": "Enabled"}
    assert stack.one("BucketOwnershipControls")["rule"] == {"objectOwnership": "BucketOwnerEnforced"}


def test_the_bucket_refuses_plain_http_and_other_keys(stack: Deployed) -> None:
    statements = stack.policy("BucketPolicy")
    assert {statement["Effect"] for statement in statements.values()} == {"Deny"}
    bucket = "arn:aws:s3:::gpufleet-dev-000000000000-us-east-1"
    assert statements["OnlyTls"]["Resource"] == [bucket, f"{bucket}/*"]
    assert statements["OnlyTls"]["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}
    assert statements["OnlyTls12"]["Condition"] == {"NumericLessThan": {"s3:TlsVersion": "1.2"}}
    header = "s3:x-amz-server-side-encryption-aws-kms-key-id"
    assert statements["OnlyThisKey"]["Condition"] == {
        "StringNotEquals": {header: "arn:aws:kms:::gpufleet-dev-key"},
        # An upload without the header gets the bucket's default and must pass: StringNotEquals alone denies it.
        "Null": {header: "false"},
    }
    assert statements["OnlyKms"]["Condition"]["Null"] == {"s3:x-amz-server-side-encryption": "false"}
    # An upload under the uploader's own key has neither header.
    assert all(bucket in json.dumps(statement["Resource"]) for statement in statements.values())
    own_key = statements["NoKeysOfUploaders"]
    assert own_key["Condition"] == {"Null": {"s3:x-amz-server-side-encryption-customer-algorithm": "false"}}
    assert (own_key["Action"], own_key["Resource"]) == ("s3:PutObject", f"{bucket}/*")


def test_a_deleted_object_is_billed_for_a_day_only(stack: Deployed) -> None:
    (rule,) = stack.one("BucketLifecycleConfiguration")["rules"]
    assert rule["status"] == "Enabled"
    assert rule["filter"] == {"prefix": ""}, "the controller writes its state every minute, and each is a version"
    assert rule["noncurrentVersionExpiration"] == {"noncurrentDays": 1}
    assert rule["abortIncompleteMultipartUpload"] == {"daysAfterInitiation": 1}
    assert "days" not in rule["expiration"], "a current checkpoint never expires"


def test_checkpoints_and_their_key_are_protected_unless_said_otherwise(stack: Deployed) -> None:
    for kind in ("Bucket", "Key", *GUARDS):
        assert all(resource.protected for resource in stack.all(kind)), kind
    assert stack.one("Bucket")["forceDestroy"] is False
    assert not any(resource.protected for resource in stack.all("Group") + stack.all("VpcEndpoint"))
    forced = deploy(config={"gpufleet:forceDestroy": "true"})
    assert not any(resource.protected for resource in forced.resources)
    assert forced.one("Bucket")["forceDestroy"] is True
    assert forced.one("Key")["deletionWindowInDays"] == 7


def test_the_bundle_is_the_bootstrap_under_its_own_digest(stack: Deployed, repository: Path) -> None:
    bundle = stack.one("BucketObjectv2", "-bootstrap")
    content = base64.b64decode(bundle["contentBase64"])
    assert bundle["key"] == f"bootstrap/{hashlib.sha256(content).hexdigest()}.tar.gz"
    assert (bundle["serverSideEncryption"], bundle["kmsKeyId"]) == ("aws:kms", "arn:aws:kms:::gpufleet-dev-key")
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        entries = {entry.name: entry for entry in archive.getmembers()}
        script = archive.extractfile(ENTRY_POINT)
        assert script is not None and script.read() == (repository / ENTRY_POINT).read_bytes()
    assert entries[ENTRY_POINT].mode == 0o755
    assert all((entry.uid, entry.gid, entry.mtime) == (0, 0, 0) for entry in entries.values())
    assert not any("__pycache__" in name or name.endswith((".pyc", ".md")) for name in entries)


def test_the_same_files_make_the_same_bundle_and_a_change_another(tmp_path: Path) -> None:
    for name in ("one", "two"):
        folder = tmp_path / name
        (folder / "steps" / "__pycache__").mkdir(parents=True)
        (folder / "node_init.sh").write_text("#!/bin/bash\n")
        (folder / "steps" / "a.py").write_text("x = 1\n")
        (folder / "steps" / "__pycache__" / "a.pyc").write_text(name)
    (tmp_path / "two" / "node_init.sh").chmod(0o700)
    first, second = build(tmp_path / "one"), build(tmp_path / "two")
    assert first == second
    (tmp_path / "two" / "README.md").write_text("# bootstrap\n")
    (tmp_path / "two" / "steps" / "README.md").write_text("Nodes read none, so its edit must not replace them.\n")
    assert build(tmp_path / "two").sha256 == first.sha256
    (tmp_path / "two" / "steps" / "a.py").write_text("x = 2\n")
    assert build(tmp_path / "two").sha256 != first.sha256


def test_training_code_keeps_its_readme(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("A package's long description, perhaps.\n")
    with tarfile.open(fileobj=io.BytesIO(pack(tmp_path, "train").content)) as archive:
        assert archive.getnames() == ["train/README.md"]


def test_a_bundle_without_an_entry_point_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"node_init\.sh is missing"):
        build(tmp_path)


def wheels(folder: Path, name: str) -> Path:
    path = folder / "wheels.tar"
    with tarfile.open(path, "w") as archive:
        archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    return path


def test_training_code_is_uploaded_and_named_by_its_digest(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('hi')\n")
    (tmp_path / ".env").write_text("TOKEN=secret\n")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "train.pyc").write_bytes(b"x")
    stack = deploy(config={"gpufleet:trainDir": str(tmp_path), "gpufleet:trainCommand": "train.py"})
    code = stack.one("BucketObjectv2", "-train-code")
    content = base64.b64decode(code["contentBase64"])
    assert code["key"] == f"bootstrap/train-{hashlib.sha256(content).hexdigest()}.tar.gz"
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        assert archive.getnames() == ["train/train.py"]
    assert f"GPUFLEET_TRAIN_ARCHIVE={code['key']}\n" in stack.user_data
    assert code["serverSideEncryption"] == "aws:kms"


def test_without_training_code_nothing_is_uploaded() -> None:
    stack = deploy()
    assert not [r for r in stack.all("BucketObjectv2") if r.name.endswith("-train-code")]
    assert "GPUFLEET_TRAIN_ARCHIVE=''\n" in stack.user_data


def test_training_code_that_is_absent_empty_or_too_large_is_refused(tmp_path: Path) -> None:
    for name, message in (("absent", "is not a folder"), (".", r"has 0\.0 MiB")):
        with pytest.raises(ConfigError, match=message):
            deploy(config={"gpufleet:trainDir": str(tmp_path / name)})
    with (tmp_path / "weights.bin").open("wb") as file:
        file.truncate(11 * 2**20)
    with pytest.raises(ConfigError, match=r"has 11\.0 MiB of files, the limit"):
        deploy(config={"gpufleet:trainDir": str(tmp_path)})


@pytest.mark.parametrize("top", ["", "./"], ids=["plain", "dot"])
def test_wheels_are_uploaded_where_the_nodes_look_for_them(tmp_path: Path, repository: Path, top: str) -> None:
    path = wheels(tmp_path, f"{top}torch-2.11.0-cp312-none-linux_x86_64.whl")
    stack = deploy(config={"gpufleet:wheels": str(path)})
    assert stack.one("BucketObjectv2", "-wheels")["key"] == Names.wheels_key
    assert f"WHEELS_KEY:={Names.wheels_key}}}" in (repository / "bootstrap/lib.sh").read_text()
    assert stack.policy("RolePolicy", "-node")["ReadBootstrap"]["Resource"].endswith("/bootstrap/*")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("numpy-2.5.5.whl", "1 wheels and none of torch"),
        ("wheels/torch-2.11.0.whl", "none of torch at its top"),
        ("torch-2.11.0-cp312-cp312-manylinux_2_28_aarch64.whl", "the plan's nodes are x86_64"),
    ],
)
def test_wheels_that_nodes_cannot_use_are_refused(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        deploy(config={"gpufleet:wheels": str(wheels(tmp_path, name))})


def test_an_absent_or_broken_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.tar").write_bytes(b"not a tar" * 100)
    for name in ("absent.tar", "broken.tar"):
        with pytest.raises(ConfigError, match=rf"{name} cannot be read"):
            deploy(config={"gpufleet:wheels": str(tmp_path / name)})
