"""The step that copies the data, run for real against an S3 server."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import boto3
import pytest

from bootstrap.contract.staging import copied_gib
from tests.bootstrap.node import Node
from tests.unit.bootstrap.training.conftest import BUCKET, aws, moto_url  # noqa: F401 (fixtures)

ENVIRONMENT = (
    "AWS_ENDPOINT_URL",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_DEFAULT_REGION",
    "AWS_EC2_METADATA_DISABLED",
)


def make_node(folder: Path, **node_env: str) -> Node:
    """A node whose environment for training is this Python."""
    node = Node(folder / "node", folder / "case", node_env=node_env)
    # The step puts ROOT before the program's path, as before every path of a node.
    python = node.root / "python3"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (node.root / "var/log/gpufleet").mkdir(parents=True)
    (node.root / "etc/gpufleet/runtime.env").write_text("GPUFLEET_PYTHON=/python3\nGPUFLEET_SCRATCH_DIR=/mnt/nvme\n")
    return node


def test_data_is_on_the_disk_before_the_node_is_in_service(
    aws: str,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = boto3.client("s3")
    client.put_object(Bucket=BUCKET, Key="corpus/tokens/train.bin", Body=b"tokens")
    settings = {name: value for name in ENVIRONMENT if (value := os.environ.get(name))}
    node = make_node(tmp_path, GPUFLEET_TRAIN_DATA=f"s3://{BUCKET}/corpus/tokens")
    runtime = node.root / "etc/gpufleet/runtime.env"

    first = node.run("steps/stage-data.sh", settings)
    assert first.exit_code == 0, first.output
    assert "1 of 1 files copied" in first.output
    folder = runtime.read_text().rsplit("GPUFLEET_DATA_DIR=", 1)[1].strip()
    assert folder.startswith("/mnt/nvme/gpufleet-data/tokens-")
    assert (node.root / folder[1:] / "train.bin").read_bytes() == b"tokens"
    # `gpufleet status` and `gpufleet logs` show the progress.
    lines = (node.root / "var/log/gpufleet/train.log").read_text().splitlines()
    assert [copied_gib(line) for line in lines] == [0.0]

    # After a reboot S3 is not asked: its answer would end this step.
    again = node.run("steps/stage-data.sh", settings | {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"})
    assert again.exit_code == 0 and "files copied" not in again.output

    shutil.rmtree(node.root / folder[1:])
    client.delete_object(Bucket=BUCKET, Key="corpus/tokens/train.bin")
    gone = node.run("steps/stage-data.sh", settings)
    assert gone.exit_code == 78 and "no object under this prefix" in gone.output
    # No node could do better: the controller ends the run, and the group is not asked for the next node.
    node.replace("steps/report.sh", 'source "$(dirname "$0")/../lib.sh"\nagent report-failure stage-data 78')
    assert node.run("steps/report.sh", settings).exit_code == 0
    told = json.loads((node.state / "node-states").read_text())
    assert (told["state"], told["step"]) == ("gave-up", "stage-data")


def test_data_of_a_lustre_file_system_is_read_where_it_is(aws: str, tmp_path: Path) -> None:  # noqa: F811
    boto3.client("s3").put_object(Bucket=BUCKET, Key="images/train/1.jpg", Body=b"image")
    system = "fs-0123456789abcdef0.fsx.us-east-1.amazonaws.com@tcp:/abcdefgh"
    node = make_node(tmp_path, GPUFLEET_TRAIN_DATA=f"s3://{BUCKET}/images", GPUFLEET_LUSTRE=system)
    linked = node.root / "mnt/lustre/train"
    linked.mkdir(parents=True)
    (linked / "1.jpg").write_bytes(b"image")
    done = node.run("steps/stage-data.sh", {name: value for name in ENVIRONMENT if (value := os.environ.get(name))})
    assert done.exit_code == 0 and "1 of 1 files are in" in done.output
    runtime = (node.root / "etc/gpufleet/runtime.env").read_text()
    # The reference trainer reads a folder as it is.
    assert "GPUFLEET_DATA_DIR=/mnt/lustre\nGPUFLEET_TRAIN_DATA=/mnt/lustre\n" in runtime
    assert not (node.root / "mnt/nvme/gpufleet-data").exists()
