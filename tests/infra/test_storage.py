from __future__ import annotations

import base64
import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest

from infra.bundle import ENTRY_POINT, build
from infra.config import ConfigError
from infra.naming import Names
from infra.policies import bucket_policy
from tests.infra.deployed import Deployed, deploy

GUARDS = ("BucketServerSideEncryptionConfiguration", "BucketVersioning", "BucketPolicy", "BucketPublicAccessBlock")


@pytest.fixture(scope="module")
def stack() -> Deployed:
    return deploy()


def test_the_bucket_is_private_encrypted_and_versioned(stack: Deployed) -> None:
    block = stack.one("BucketPublicAccessBlock")
    assert all(
        block[key] for key in ("blockPublicAcls", "blockPublicPolicy", "ignorePublicAcls", "restrictPublicBuckets")
    )
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


def test_what_is_deleted_is_billed_for_a_day_only(stack: Deployed) -> None:
    (rule,) = stack.one("BucketLifecycleConfiguration")["rules"]
    assert rule["status"] == "Enabled"
    assert rule["filter"] == {"prefix": "checkpoints/"}
    assert rule["noncurrentVersionExpiration"] == {"noncurrentDays": 1}
    assert rule["abortIncompleteMultipartUpload"] == {"daysAfterInitiation": 1}
    assert "days" not in rule["expiration"], "a current checkpoint never expires"


def test_checkpoints_and_their_key_are_protected_unless_said_otherwise(stack: Deployed) -> None:
    for kind in ("Bucket", "Key", *GUARDS):
        assert all(resource.protected for resource in stack.all(kind)), kind
    assert stack.one("Bucket")["forceDestroy"] is False
    assert not any(resource.protected for resource in stack.all("Group") + stack.all("VpcEndpoint"))
    forced = deploy(config={"gpufleet:forceDestroy": "true"})
    assert not any(resource.protected for resource in forced.found)
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
    assert not any("__pycache__" in name or name.endswith(".pyc") for name in entries)


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
    (tmp_path / "two" / "steps" / "a.py").write_text("x = 2\n")
    assert build(tmp_path / "two").sha256 != first.sha256


def test_a_bundle_without_an_entry_point_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"node_init\.sh is missing"):
        build(tmp_path)


def test_wheels_are_uploaded_where_the_nodes_look_for_them(tmp_path: Path) -> None:
    for name in ("torch-2.11.0-cp312-none-linux_x86_64.whl", "numpy-2.5.5-cp312-none-linux_x86_64.whl"):
        (tmp_path / name).write_bytes(b"wheel")
    stack = deploy(config={"gpufleet:wheels": str(tmp_path)})
    keys = {resource.inputs["key"] for resource in stack.all("BucketObjectv2")}
    assert {"wheels/torch-2.11.0-cp312-none-linux_x86_64.whl", "wheels/numpy-2.5.5-cp312-none-linux_x86_64.whl"} < keys
    assert (
        "checkpoints/*"
        in stack.policy("RolePolicy")["ListCheckpointsAndWheels"]["Condition"]["StringLike"]["s3:prefix"]
    )
    assert any(arn.endswith("/wheels/*") for arn in stack.policy("RolePolicy")["ReadBootstrap"]["Resource"])


def test_a_folder_without_torch_is_refused(tmp_path: Path) -> None:
    (tmp_path / "numpy-2.5.5-cp312-none-linux_x86_64.whl").write_bytes(b"wheel")
    with pytest.raises(ConfigError, match="1 wheels and none of torch"):
        deploy(config={"gpufleet:wheels": str(tmp_path)})


def test_the_policy_is_for_this_bucket_alone() -> None:
    names = Names(stack="dev", account_id="123456789012", region="us-east-1", partition="aws")
    text = json.dumps(bucket_policy(names, key_arn="k"))
    assert '"Resource": "*"' not in text and "NotPrincipal" not in text
