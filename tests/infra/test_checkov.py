"""checkov over the equivalent Terraform: each failed check is argued in docs/security.md, each argument is needed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine import provider_binary
from tests.engine.conftest import unavailable
from tests.engine.plugin.terraform import TerraformProvider
from tests.infra.deployed import VARIANTS, as_list, statements, variant
from tests.infra.terraform import terraform

# Together they declare every type of resource there is.
SCANNED = ("nat", "existing vpc", "workers", "reserved")
HOW_TO_GET_IT = "run `make checkov`, put checkov on PATH, or set GPUFLEET_CHECKOV to it"
# Check and resource ("aws_s3_bucket.checkpoints") of each failed check.
Scan = set[tuple[str, str]]


def checkov() -> str:
    """Path of the program; without it the test is skipped (a failure in CI)."""
    own = Path(__file__).parents[2] / ".tools/checkov/bin/checkov"
    program = os.environ.get("GPUFLEET_CHECKOV") or (str(own) if own.exists() else shutil.which("checkov"))
    return program or unavailable(f"no checkov: {HOW_TO_GET_IT}")


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TerraformProvider]:
    binary = provider_binary.find_provider_binary(os.environ, tmp_path_factory.mktemp("terraform-init"))
    if binary is None:
        unavailable(f"no terraform-provider-aws: {provider_binary.HOW_TO_GET_IT}")
    provider = TerraformProvider(binary)
    yield provider
    provider.close()


@pytest.fixture(scope="module")
def scan(provider: TerraformProvider, tmp_path_factory: pytest.TempPathFactory) -> Scan:
    """One run over all variants, as checkov starts slowly, without the network."""
    program, folder = checkov(), tmp_path_factory.mktemp("terraform")
    for name in SCANNED:
        (folder / name).mkdir()
        (folder / name / "main.tf").write_text(terraform(variant(name), provider))
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        # A closed port keeps checkov from fetching explanations and anything else.
        **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9"),
    }
    arguments = ("--framework", "terraform", "--skip-download", "--compact", "--output", "json")
    done = subprocess.run([program, "-d", folder, *arguments], capture_output=True, text=True, env=environment)
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["summary"]["parsing_errors"] == 0
    checks = report["results"]["failed_checks"]
    return {(check["check_id"], check["resource"].replace(".gpufleet-dev-", ".")) for check in checks}


def argued(page: Path) -> dict[tuple[str, str], str]:
    """Reason of each check and resource in the table of docs/security.md."""
    rows = re.findall(r"^\| (CKV2?_AWS_\d+) \| ([^|]+) \| ([^|]+) \|$", page.read_text(), re.M)
    return {
        (check, resource): reason.strip()
        for check, resources, reason in rows
        for resource in re.findall(r"`([^`]+)`", resources)
    }


def test_each_failed_check_is_argued_and_each_argument_is_needed(scan: Scan, repository: Path) -> None:
    arguments = argued(repository / "docs/security.md")
    assert scan - arguments.keys() == set(), "fix it, or argue it in docs/security.md"
    assert arguments.keys() - scan == set(), "an argument that nothing needs hides the next failure"
    assert all(len(reason) > 20 for reason in arguments.values())


def action_problems(asked: list[tuple[str, str, list[str]]]) -> list[str]:
    """Problems that checkov_actions.py lists."""
    python = Path(checkov()).resolve().parent / "python"
    script = Path(__file__).with_name("checkov_actions.py")
    # -P: no module of this folder shadows checkov's.
    done = subprocess.run([python, "-P", script], input=json.dumps(asked), capture_output=True, text=True, check=True)
    return list(json.loads(done.stdout))


def test_every_action_of_a_role_exists_on_its_resources() -> None:
    # The key's stand-in ARN has no account.
    key = "arn:aws:kms:us-east-1:000000000000:key/k"
    asked = {
        (statement["Sid"], action, tuple(arn.replace("arn:aws:kms:::gpufleet-dev-key", key) for arn in resources))
        for name in VARIANTS
        for kind, statement in statements(variant(name))
        if kind == "role" and statement["Effect"] == "Allow"
        for resources in [as_list(statement["Resource"])]
        for action in as_list(statement["Action"])
    }
    assert len(asked) > 40
    # LaunchInstances, of December 2025, is younger than checkov's table: https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_LaunchInstances.html
    known = [one for one in sorted(asked) if one[1] != "autoscaling:LaunchInstances"]
    assert action_problems([(sid, action, list(resources)) for sid, action, resources in known]) == []
    bucket = "arn:aws:s3:::gpufleet-dev-000000000000-us-east-1"
    wrong = [("a", "s3:ReadObject", [bucket]), ("b", "s3:GetObject", [bucket]), ("c", "sqs:ReceiveMessage", ["*"])]
    assert [problem[0] for problem in action_problems(wrong)] == ["a", "b", "c"]
