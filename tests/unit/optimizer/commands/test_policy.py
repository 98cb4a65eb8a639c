"""``gpufleet stack policy``: documents on standard output or as files, for one stack."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from optimizer.commands.preflight.model import preflight_policy
from optimizer.commands.stack_file import write_stack_file
from tests.plans import sample_plan, sealed
from tests.unit.optimizer.commands.conftest import Gpufleet

ACCOUNT = ("--account", "111122223333")


def test_the_documents_are_printed_or_written(gpufleet: Gpufleet, tmp_path: Path) -> None:
    write_stack_file(tmp_path / "Pulumi.dev.yaml", sample_plan(region="us-gov-west-1"))
    code, out, _ = gpufleet("stack", "policy", "deployer", "--stack", "dev", *ACCOUNT, "--directory", str(tmp_path))
    documents = json.loads(out)
    assert code == 0
    assert list(documents) == ["gpufleet-dev-deployer-1", "gpufleet-dev-deployer-2", "gpufleet-preflight"]
    assert "arn:aws-us-gov:s3:::gpufleet-dev-111122223333-us-gov-west-1" in out
    assert "arn:aws:" not in out
    written = tmp_path / "policies"
    code, out, _ = gpufleet(
        "stack", "policy", "deployer", *ACCOUNT, "--directory", str(tmp_path), "--out", str(written)
    )
    assert code == 0 and out.splitlines() == [str(written / f"{name}.json") for name in documents]
    assert {name: json.loads((written / f"{name}.json").read_text()) for name in documents} == documents
    _, out, _ = gpufleet("stack", "policy", "preflight")
    assert json.loads(out) == {"gpufleet-preflight": preflight_policy()}


def test_the_stacks_configuration_counts(gpufleet: Gpufleet, tmp_path: Path) -> None:
    file = tmp_path / "Pulumi.dev.yaml"
    plan = sample_plan().model_dump(mode="json", exclude_none=True)
    boundary = "arn:aws:iam::111122223333:policy/limits"
    config = {"gpufleet:plan": plan, "gpufleet:permissionsBoundary": boundary}
    arguments = ("stack", "policy", "deployer", *ACCOUNT, "--directory", str(tmp_path))
    file.write_text(json.dumps({"config": config}))
    code, out, _ = gpufleet(*arguments)
    assert code == 0 and boundary in out
    assert "arn:aws:iam::111122223333:role/gpufleet-dev-*" in out and "us-east-1" in out
    assert "fsx:CreateFileSystem" not in out
    lustre = {"storage_gib": 1200, "data_gib": 900.0, "usd": 5.0}
    file.write_text(json.dumps({"config": {**config, "gpufleet:plan": sealed({**plan, "lustre": lustre})}}))
    assert "fsx:CreateFileSystem" in gpufleet(*arguments)[1]
    file.write_text(json.dumps({"config": {**config, "gpufleet:sharedCeiling": "s3://team/budget.json@5000"}}))
    assert "arn:aws:s3:::team/budget.json" in gpufleet(*arguments)[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--stack", "d v"), "stack name 'd v'"),
        ((), "has no stack"),
        (("--account", "1"), "12 digits"),
    ],
)
def test_wrong_input_says_what_is_wrong(
    gpufleet: Gpufleet, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    code, _, err = gpufleet("stack", "policy", "deployer", *arguments, "--directory", str(tmp_path))
    assert code == 2 and message in err
