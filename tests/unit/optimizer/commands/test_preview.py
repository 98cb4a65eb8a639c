from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from optimizer.cli import cli
from optimizer.errors import InvalidInputError
from tests.plans import SPOT_P4D, merged

RESERVED = merged(SPOT_P4D, {"purchase": {"option": "reserved", "on_demand_base": 0}})


def preview(tmp_path: Path, plan: Any, *arguments: str) -> str:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan))
    done = CliRunner().invoke(cli, ["preview", str(path), *arguments], catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


def test_json_has_the_programs_resources_and_the_plans_dollars(tmp_path: Path) -> None:
    answer = json.loads(
        preview(tmp_path, {"plans": [RESERVED, SPOT_P4D]}, "--plan", "2", "--stack", "nlp", "--format", "json")
    )
    assert answer["schema_version"] == 1
    assert answer["stack"] == "nlp"
    rows = answer["resources"]
    assert all(set(row) == {"type", "name", "parent", "protected", "detail"} for row in rows)
    (group,) = [row for row in rows if row["type"] == "aws:autoscaling/group:Group"]
    assert group["parent"] == "fleet"
    assert (
        group["detail"]
        == "2 nodes while the controller holds them, else 0; protected from scale-in; 1 on demand, 1 spot"
    )
    (template,) = [row for row in rows if row["type"] == "aws:ec2/launchTemplate:LaunchTemplate"]
    assert template["detail"].startswith(
        "p4d.24xlarge, EFA on 4 of 4 interfaces, encrypted gp3 of 200 GiB, IMDSv2 required"
    )
    assert {row["name"] for row in rows if row["protected"]} == {"gpufleet-nlp-key", "gpufleet-nlp-checkpoints"}
    assert answer["cost_usd"] == {**SPOT_P4D["cost_usd"]}
    assert answer["prices"] == [{**price, "usd": price["usd"]} for price in SPOT_P4D["prices"]]
    assert answer["compute_usd_per_hour"] == pytest.approx(95 / 4.5)
    assert any("000000000000" in note for note in answer["notes"])


def test_the_table_shows_tree_cost_prices_and_notes(tmp_path: Path) -> None:
    text = preview(tmp_path, SPOT_P4D)
    assert "stack dev: 2 x p4d.24xlarge (spot) in us-east-1 for llama-2-7b" in text
    for component in ("Network", "Security", "Storage", "Observability", "Fleet"):
        assert f"── {component}\n" in text
    assert "Bucket gpufleet-dev-checkpoints protected  gpufleet-dev-000000000000-us-east-1" in text
    assert "compute" in text and "95.00" in text
    assert "98.00 USD" in text and "120.00 USD" in text
    assert "spot p4d.24xlarge us-east-1" in text and "2026-01-21" in text
    assert "21.11 USD an hour" in text
    assert "pulumi destroy" in text


@pytest.mark.parametrize(
    ("parallelism", "says"),
    [
        ({"tensor": 2, "pipeline": 4, "data": 2, "grad_accum": 16, "sharding": "ddp"}, "tensor, pipeline parallelism"),
        ({"sharding": "zero3"}, "zero3 sharding"),
        ({"sharding": "ddp"}, None),
    ],
)
def test_it_says_what_the_training_code_must_do(tmp_path: Path, parallelism: dict[str, Any], says: str | None) -> None:
    plan = merged(SPOT_P4D, {"parallelism": parallelism})
    notes = " ".join(json.loads(preview(tmp_path, plan, "--format", "json"))["notes"])
    assert ("bootstrap.training" in notes) == (says is not None)
    assert says is None or says in notes


def test_csv_has_one_row_a_resource(tmp_path: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(preview(tmp_path, SPOT_P4D, "--format", "csv"))))
    assert list(rows[0]) == ["type", "name", "parent", "protected", "detail"]
    expected = json.loads(preview(tmp_path, SPOT_P4D, "--format", "json"))["resources"]
    assert [row["name"] for row in rows] == [row["name"] for row in expected]


def test_it_says_the_same_every_time(tmp_path: Path) -> None:
    assert preview(tmp_path, SPOT_P4D) == preview(tmp_path, SPOT_P4D)


def test_a_reservation_shows_that_it_is_billed_from_the_start(tmp_path: Path) -> None:
    assert "CapacityReservation gpufleet-dev-nodes  2 x p4d.24xlarge, billed from creation to destroy" in preview(
        tmp_path, RESERVED
    )


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (merged(SPOT_P4D, {"node_count": 3}), "parallelism covers"),
        (merged(SPOT_P4D, {"region": "cn-north-1"}), "China partition"),
        (merged(SPOT_P4D, {"node": {"gpu": "V100"}}), "starts with Turing"),
    ],
)
def test_a_plan_that_cannot_be_deployed_ends_with_2(tmp_path: Path, plan: Any, message: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan))
    result = CliRunner().invoke(cli, ["preview", str(path)])
    assert isinstance(result.exception, InvalidInputError)
    assert message in str(result.exception)


def test_a_wrong_stack_name_ends_with_2(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(SPOT_P4D))
    result = CliRunner().invoke(cli, ["preview", str(path), "--stack", "a b"])
    assert isinstance(result.exception, InvalidInputError)


def test_it_needs_no_cli_no_account_and_no_traceback(tmp_path: Path) -> None:
    """As a user runs it: a process of its own, without PATH, home and credentials."""
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(SPOT_P4D))
    program = Path(sys.executable).parent / "gpufleet"
    done = subprocess.run(
        [program, "preview", path], env={}, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Fleet" in done.stdout
    path.write_text(json.dumps(merged(SPOT_P4D, {"node": {"gpu": "V100"}})))
    done = subprocess.run(
        [program, "preview", path], env={}, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr


def test_help_has_an_example() -> None:
    text = CliRunner().invoke(cli, ["preview", "--help"]).output
    assert "Example:" in text and "gpufleet preview plans.json" in text
