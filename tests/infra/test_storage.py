from __future__ import annotations

import base64
import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest

from bootstrap.contract.requirements import read_pins
from infra.bundle import ENTRY_POINT, build, pack
from infra.naming import Names
from infra.settings import ConfigError
from infra.wheels import TRAINER_LIST, Wanted
from tests.infra.deployed import Deployed, deploy

GUARDS = ("BucketServerSideEncryptionConfiguration", "BucketVersioning", "BucketPolicy", "BucketPublicAccessBlock")


@pytest.fixture(scope="module")
def stack() -> Deployed:
    return deploy()


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


def test_old_versions_and_pruned_checkpoints_are_billed_for_a_day_and_other_checkpoints_as_long_as_asked(
    stack: Deployed,
) -> None:
    for given, days in ((stack, 14), (deploy(config={"gpufleet:undoDays": "30"}), 30)):
        *old, pruned, rest = given.one("BucketLifecycleConfiguration")["rules"]
        assert {rule["filter"]["prefix"]: rule["noncurrentVersionExpiration"]["noncurrentDays"] for rule in old} == {
            "bootstrap/": 1,
            "control/": 1,  # the controller writes its state every minute, and each is a version
            "checkpoints/": days,
        }
        assert pruned["filter"] == {"tag": {"key": "gpufleet-pruned", "value": "true"}}
        assert pruned["noncurrentVersionExpiration"] == {"noncurrentDays": 1}, "training writes one after the other"
        old.append(pruned)
        assert "noncurrentVersionExpiration" not in rest, "of overlapping rules the shortest wins"
        assert rest["filter"] == {"prefix": ""}
        assert rest["abortIncompleteMultipartUpload"] == {"daysAfterInitiation": 1}
        assert {rule["status"] for rule in (*old, rest)} == {"Enabled"}
        assert not any("days" in rule.get("expiration", {}) for rule in (*old, rest)), "a checkpoint never expires"


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


def wheels(folder: Path, *lists: Path, machine: str = "any", top: str = "", without: str = "") -> Path:
    """An archive with a wheel for each package of ``lists``."""
    path = folder / "wheels.tar"
    with tarfile.open(path, "w") as archive:
        for text in (file.read_text() for file in lists):
            for pin in read_pins(text):
                if pin.name != without:
                    archive.addfile(
                        tarfile.TarInfo(f"{top}{pin.name.replace('-', '_')}-{pin.version}-py3-none-{machine}.whl")
                    )
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


def test_training_code_that_is_absent_empty_or_too_large_is_refused(tmp_path: Path) -> None:
    for name, message in (
        ("absent", "is not a folder"),
        ("a" * 256, "is not a folder|cannot be read"),
        (".", r"has 0\.0 MiB"),
    ):
        with pytest.raises(ConfigError, match=message):
            deploy(config={"gpufleet:trainDir": str(tmp_path / name)})
    with (tmp_path / "weights.bin").open("wb") as file:
        file.truncate(11 * 2**20)
    with pytest.raises(ConfigError, match=r"has 11\.0 MiB of files, the limit"):
        deploy(config={"gpufleet:trainDir": str(tmp_path)})


# A gang over EFA boots the image without torch (infra/images.py).
WITH_TORCH = {"gpufleet:amiName": "Deep Learning OSS Nvidia Driver AMI GPU PyTorch 2.11 (Ubuntu 24.04) 20260517"}


@pytest.mark.parametrize("top", ["", "./"], ids=["plain", "dot"])
def test_wheels_are_uploaded_where_the_nodes_look_for_them(tmp_path: Path, repository: Path, top: str) -> None:
    path = wheels(tmp_path, TRAINER_LIST, top=top)
    stack = deploy(config={**WITH_TORCH, "gpufleet:wheels": str(path)})
    assert stack.one("BucketObjectv2", "-wheels")["key"] == Names.wheels_key
    assert f"WHEELS_KEY:={Names.wheels_key}}}" in (repository / "bootstrap/lib.sh").read_text()
    assert stack.policy("RolePolicy", "-node")["ReadBootstrap"]["Resource"].endswith("/bootstrap/*")


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"without": "transformers"}, r"has no wheel of transformers==[\d.]+ for x86_64"),
        ({"top": "wheels/"}, r"no wheel of accelerate==.* and 45 more"),
        ({"machine": "manylinux_2_28_aarch64"}, "for x86_64, which the plan's nodes need"),
    ],
)
def test_wheels_that_nodes_cannot_use_are_refused(tmp_path: Path, made: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        deploy(config={**WITH_TORCH, "gpufleet:wheels": str(wheels(tmp_path, TRAINER_LIST, **made))})


def test_where_the_image_has_no_torch_the_wheels_have_it() -> None:
    lists = [Wanted(image_torch=there, cpu_architecture="x86_64", own=None).missing_from(()) for there in (True, False)]
    assert ["torch==2.11.0" in missing for missing in lists] == [False, True]
    assert all("transformers==5.23.0" in missing for missing in lists)


HASHES = f"--hash=sha256:{'0' * 64}"


def test_own_requirements_travel_in_the_bundle_and_their_wheels_in_the_archive(tmp_path: Path) -> None:
    own = tmp_path / "requirements.txt"
    own.write_text(f"# locked\nMy_Package==1.0 \\\n    {HASHES}\ntorch==2.11.0+cu130 {HASHES}\n")
    config = {**WITH_TORCH, "gpufleet:requirements": str(own)}
    content = base64.b64decode(deploy(config=config).one("BucketObjectv2", "-bootstrap")["contentBase64"])
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        packed = archive.extractfile("bootstrap/requirements-own.txt")
        assert packed is not None and packed.read() == own.read_bytes()
    with pytest.raises(ConfigError, match=r"no wheel of my-package==1\.0 for"):
        deploy(config={**config, "gpufleet:wheels": str(wheels(tmp_path, TRAINER_LIST))})
    assert deploy(config={**config, "gpufleet:wheels": str(wheels(tmp_path, TRAINER_LIST, own))}).all("Group")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("numpy==2.5.5\n", r"'numpy==2\.5\.5' is no name==version with --hash"),
        (f"numpy>=2 {HASHES}\n", "is no name==version"),
        ("--index-url https://example.com/simple\n", "is no name==version"),
        (f"torch==2.9.0 {HASHES}\n", r"locks torch 2\.9\.0, and the nodes have 2\.11\.0"),
    ],
)
def test_requirements_that_are_not_locked_or_of_another_torch_are_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    own = tmp_path / "requirements.txt"
    own.write_text(text)
    with pytest.raises(ConfigError, match=message):
        deploy(config={"gpufleet:requirements": str(own)})


def test_an_absent_or_broken_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.tar").write_bytes(b"not a tar" * 100)
    for name in ("absent.tar", "broken.tar"):
        with pytest.raises(ConfigError, match=rf"{name} is no uncompressed tar"):
            deploy(config={"gpufleet:wheels": str(tmp_path / name)})
