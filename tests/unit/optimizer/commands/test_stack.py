from __future__ import annotations

import json
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from optimizer.aws import images
from optimizer.cli import cli
from optimizer.commands.stack_file import write_stack_file
from optimizer.contract.errors import GpufleetError, InvalidInputError
from optimizer.contract.plan import plan_from_dict
from tests.plans import SPOT_P4D, merged, sample_plan, sealed

EXISTING = """\
# The NLP team's stack: ask Ada before changing it.
encryptionsalt: v1:c2FsdA==
config:
  gpufleet:tags:  # who pays
    team: 'nlp'
  aws:region: eu-west-1  # moved in March
  gpufleet:trainCommand: "python train.py"
"""


@pytest.fixture
def project(tmp_path: Path, repository: Path) -> Path:
    (tmp_path / "Pulumi.yaml").write_text((repository / "Pulumi.yaml").read_text())
    return tmp_path


def write(project: Path, data: Any) -> Path:
    path = project / "plan.json"
    path.write_text(data if isinstance(data, str) else json.dumps(sealed(data)))
    return path


def run(project: Path, plan: Path | str, *more: str, stdin: str | None = None) -> Result:
    arguments = ["stack", "set", str(plan), "--stack", "dev", "--directory", str(project), "--accept-stale-prices"]
    arguments += more
    return CliRunner().invoke(cli, arguments, input=stdin)


def test_the_plan_comes_back_from_the_stack_file_as_it_was(project: Path) -> None:
    done = run(project, write(project, SPOT_P4D))
    assert done.exit_code == 0, done.output
    config = yaml.safe_load((project / "Pulumi.dev.yaml").read_text())["config"]
    assert plan_from_dict(config["gpufleet:plan"]) == sample_plan()
    assert config["aws:region"] == "us-east-1"
    assert config["gpufleet:plan"]["prices"][0]["as_of"] == "2026-01-21", "a date would not be text for Pulumi"
    assert "null" not in (project / "Pulumi.dev.yaml").read_text()
    assert "2 x p4d.24xlarge (spot, 1 on-demand)" in done.output
    assert "once: pulumi config set gpufleet:trainCommand" in done.output
    assert "next: pulumi stack select --create dev && pulumi up" in done.output


def test_other_keys_and_comments_stay(project: Path) -> None:
    path = project / "Pulumi.dev.yaml"
    path.write_text(EXISTING)
    path.chmod(0o600)
    assert run(project, write(project, SPOT_P4D)).exit_code == 0
    text = path.read_text()
    for line in EXISTING.splitlines():
        assert line.replace("eu-west-1", "us-east-1") in text
    assert path.stat().st_mode & 0o777 == 0o600
    # Again changes nothing, and another plan replaces the first as a whole.
    assert run(project, write(project, SPOT_P4D)).exit_code == 0
    assert path.read_text() == text
    assert run(project, write(project, merged(SPOT_P4D, {"job": {"budget_usd": None}}))).exit_code == 0
    assert "budget_usd" not in path.read_text()
    assert "ask Ada" in path.read_text()


@pytest.mark.parametrize(
    ("changes", "config", "proposed"),
    [
        ({}, {}, "adaptive"),
        ({"purchase": {"fallback": "none"}}, {}, ""),
        ({"job": {"deadline_hours": None}}, {}, ""),
        ({"job": {"deadline_hours": 6.0}}, {}, "fallback"),
        ({}, {"gpufleet:spotPolicy": "fallback"}, ""),
        ({}, {"gpufleet:mode": "workers"}, ""),
    ],
)
def test_the_spot_policy_that_costs_least_is_proposed(
    project: Path, changes: dict[str, Any], config: dict[str, str], proposed: str
) -> None:
    (project / "Pulumi.dev.yaml").write_text(yaml.safe_dump({"config": config}))
    done = run(project, write(project, merged(merged(SPOT_P4D, {"purchase": {"fallback": "on-demand"}}), changes)))
    assert done.exit_code == 0, done.output
    assert ("spot policy:" in done.output) is bool(proposed)
    assert f"spot policy: {proposed}" in done.output or not proposed
    assert ("pulumi config set gpufleet:spotPolicy adaptive" in done.output) is (proposed == "adaptive")


def test_a_move_to_another_region_is_said(project: Path) -> None:
    path = project / "Pulumi.dev.yaml"
    path.write_text(EXISTING)
    done = run(project, write(project, SPOT_P4D))
    assert "aws:region was eu-west-1: resources do not move" in done.stderr
    assert "once: pulumi config set gpufleet:trainCommand" not in done.stdout
    assert "The reference trainer does not carry out this plan" in done.stdout
    assert run(project, write(project, SPOT_P4D)).stderr == ""


# AWS's image with torch suits a gang without EFA (infra/images.py).
WITHOUT_EFA = merged(SPOT_P4D, {"node": {"efa_cards": 0}})
PARAMETER = "/aws/service/deeplearning/ami/x86_64/oss-nvidia-driver-gpu-pytorch-2.11-ubuntu-24.04/latest/ami-id"


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the releases that AWS's parameter had, the newest last."""
    releases = ["ami-00000000000000001"]

    def newest(region: str, parameter: str) -> str:
        assert (region, parameter) == ("us-east-1", PARAMETER)
        return releases[-1]

    monkeypatch.setattr(images, "newest", newest)
    return releases


def test_the_newest_image_is_pinned_once_and_stays_until_asked(project: Path, published: list[str]) -> None:
    plan = write(project, WITHOUT_EFA)

    def pinned() -> Any:
        return yaml.safe_load((project / "Pulumi.dev.yaml").read_text())["config"].get("gpufleet:dlami")

    assert f"image: {published[0]}, the newest of {PARAMETER}" in run(project, plan).stdout
    first = {"id": published[0], "parameter": PARAMETER, "region": "us-east-1"}
    assert pinned() == first
    published.append("ami-00000000000000002")
    assert f"image: {published[0]} stays" in run(project, plan).stdout
    assert pinned() == first
    assert f"image: {published[1]}" in run(project, plan, "--new-image").stdout
    assert pinned() == {**first, "id": published[1]}
    path = project / "Pulumi.dev.yaml"
    path.write_text(path.read_text() + "  gpufleet:amiId: ami-0123456789abcdef0\n")
    assert "image: ami-0123456789abcdef0 (gpufleet:amiId)" in run(project, plan).stdout
    assert pinned() is None


def test_without_an_answer_of_aws_the_parameter_decides_at_each_up(project: Path) -> None:
    # The emulated AWS has no such parameter.
    done = run(project, write(project, WITHOUT_EFA))
    assert done.exit_code == 0
    assert f"image: the newest of {PARAMETER} at each pulumi up" in done.stdout
    assert "gpufleet:dlami" not in (project / "Pulumi.dev.yaml").read_text()


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("[]", "holds a JSON list"),
        ({"plans": []}, "nothing met its limits"),
        (merged(SPOT_P4D, {"node_count": 3}), "parallelism covers 16 x 1 x 1 x 1"),
        (merged(SPOT_P4D, {"region": "moon"}), "region: must match "),
        (json.dumps(SPOT_P4D), "no digest"),
    ],
)
def test_nonsense_ends_with_2_and_writes_nothing(project: Path, plan: Any, message: str) -> None:
    path = project / "Pulumi.dev.yaml"
    path.write_text(EXISTING)
    error = run(project, write(project, plan)).exception
    assert isinstance(error, InvalidInputError) and error.exit_code == 2 and message in str(error)
    assert path.read_text() == EXISTING


def raises(project: Path, *arguments: str) -> str:
    result = CliRunner().invoke(cli, ["stack", "set", *arguments])
    assert isinstance(result.exception, InvalidInputError)
    return str(result.exception)


def test_a_missing_plan_project_or_number_is_named(project: Path, tmp_path: Path) -> None:
    plan, directory = str(write(project, SPOT_P4D)), ["--directory", str(project)]
    assert "absent.json cannot be read" in raises(project, str(project / "absent.json"), "--stack", "dev", *directory)
    too_high = raises(project, plan, "--stack", "dev", "--plan", "2", *directory)
    assert "there is no plan 2" in too_high and "--plan N picks one" in too_high
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "Pulumi.yaml is missing" in raises(project, plan, "--stack", "dev", "--directory", str(empty))
    for stack in ("a b", "../up", "", "x/y"):
        assert "stack name" in raises(project, plan, "--stack", stack, *directory)
    assert not list(project.glob("Pulumi.*.yaml"))


@pytest.mark.parametrize("text", ["a: [", "- 1\n- 2\n", "config: 5\n", "\x00"])
def test_a_broken_stack_file_is_left_alone(project: Path, text: str) -> None:
    path = project / "Pulumi.dev.yaml"
    with pytest.raises(InvalidInputError, match="cannot be read: Is a directory"):
        write_stack_file(project, sample_plan())
    path.write_text(text)
    with pytest.raises(InvalidInputError, match=r"Pulumi\.dev\.yaml (is not|cannot be read)"):
        write_stack_file(path, sample_plan())
    assert path.read_text() == text
    assert [entry.name for entry in project.iterdir() if entry.name.startswith("tmp")] == []


def test_a_file_that_cannot_be_written_keeps_its_content(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = project / "Pulumi.dev.yaml"
    path.write_text(EXISTING)

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(GpufleetError, match="No space left"):
        write_stack_file(path, sample_plan())
    assert path.read_text() == EXISTING
    assert {entry.name for entry in project.iterdir()} == {"Pulumi.yaml", "Pulumi.dev.yaml"}


def priced(as_of: date, **purchase: Any) -> dict[str, Any]:
    prices = [price | {"as_of": as_of.isoformat()} for price in SPOT_P4D["prices"]]
    return merged(SPOT_P4D, {"prices": prices, "purchase": purchase})


def test_a_plan_at_an_old_spot_price_needs_a_refresh_or_a_flag(project: Path) -> None:
    today = datetime.now(UTC).date()
    arguments = ["stack", "set", "", "--stack", "dev", "--directory", str(project)]
    for age_days, status in ((2, 4), (1, 0)):
        arguments[2] = str(write(project, priced(today - timedelta(days=age_days))))
        result = CliRunner().invoke(cli, arguments)
        error = result.exception
        got = error.exit_code if isinstance(error, GpufleetError) else result.exit_code
        assert got == status
        assert (project / "Pulumi.dev.yaml").exists() == (status == 0)
        if status:
            assert "spot p4d.24xlarge us-east-1 is 2 days old" in str(error)
            assert "recommend --refresh" in str(error) and "--accept-stale-prices" in str(error)


def test_another_zone_is_said_and_the_persons_own_stays(project: Path) -> None:
    today = datetime.now(UTC).date()
    for zone_id in ("use1-az6", "use1-az6"):
        done = run(project, write(project, priced(today, zone_id=zone_id)))
        assert done.exit_code == 0 and "gpufleet stop" not in done.output
    path = project / "Pulumi.dev.yaml"
    path.write_text(path.read_text().replace("config:\n", "config:\n  gpufleet:zoneId: use1-az6\n"))
    moved = run(project, write(project, priced(today, zone_id="use1-az2")))
    assert "zone was use1-az6: if nodes run there, gpufleet stop --stack dev before pulumi up" in moved.stdout
    assert "the spot price is of zone use1-az2; gpufleet:zoneId decides" in moved.output
    assert yaml.safe_load(path.read_text())["config"]["gpufleet:zoneId"] == "use1-az6"


def test_in_an_existing_vpc_the_subnets_choose_the_zone(project: Path) -> None:
    (project / "Pulumi.dev.yaml").write_text("config:\n  gpufleet:subnetIds: [subnet-1]\n")
    done = run(project, write(project, priced(datetime.now(UTC).date(), zone_id="use1-az6")))
    assert "the spot price is of zone use1-az6; gpufleet:subnetIds decides" in done.output
    assert "zoneId" not in (project / "Pulumi.dev.yaml").read_text()
