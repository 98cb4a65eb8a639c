"""``--dry-run`` of each command that creates, pays or ends: AWS and Pulumi are only read, and no file changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from botocore.client import BaseClient

from optimizer.catalog.snapshot import user_directory
from optimizer.commands import move
from optimizer.commands.stack_file import StackFile, write_stack_file
from optimizer.commands.stop import ask
from tests.plans import sample_plan
from tests.unit.optimizer.commands.conftest import Gpufleet
from tests.unit.optimizer.commands.test_up import Pulumi, pulumi
from tests.unit.optimizer.deployed import DeployedStack
from tests.unit.optimizer.emulated_regions import EUROPE, OREGON, plan_in

__all__ = ["pulumi"]  # a fixture

READING = ("Describe", "Get", "List", "Head", "Filter")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the calls to AWS."""
    seen: list[str] = []
    real: Any = BaseClient._make_api_call  # type: ignore[attr-defined]

    def call(client: Any, name: str, given: Any) -> Any:
        seen.append(name)
        return real(client, name, given)

    monkeypatch.setattr(BaseClient, "_make_api_call", call)
    return seen


@pytest.fixture
def unchanged(deployed: DeployedStack, pulumi: Pulumi, calls: list[str]) -> Iterator[None]:
    """Nothing of the folder, of AWS and of Pulumi's state changes in the test."""

    def files() -> dict[str, str]:
        return {path.name: path.read_text() for path in deployed.directory.glob("*.*") if path.is_file()}

    before, nodes, kept = files(), deployed.group.nodes, sorted(user_directory().rglob("*"))
    calls.clear()
    yield
    assert [name for name in calls if not name.startswith(READING)] == []
    assert calls and files() == before and deployed.group.nodes == nodes
    assert sorted(user_directory().rglob("*")) == kept
    assert not any(pulumi.ran(command) for command in ("up", "destroy", "select", "init"))


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("stop",), "would save a checkpoint within 5 min, and end 2 x p4d.24xlarge"),
        (("resume",), "would start 2 x p4d.24xlarge (spot, 1 on-demand) again"),
        (("down",), "2 nodes to save a checkpoint and end"),
        (("down", "--yes", "--everywhere"), "Destroy it? Not asked; nothing was changed"),
        (("move", EUROPE, "--yes", "--accept-stale-prices"), "Move it? Not asked; nothing was changed"),
    ],
)
def test_a_run_stays_as_it_is(
    gpufleet: Gpufleet, deployed: DeployedStack, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], says: str
) -> None:
    place = StackFile(stack="new", path=deployed.directory / "new", plan=plan_in(EUROPE), config={})
    monkeypatch.setattr(move, "find_place", lambda *_, **__: place)
    code, out, err = gpufleet(words[0], *words[1:], *deployed.arguments, "--dry-run")
    assert code == 0, err
    assert says in out and "dry run: " in out.splitlines()[-1]


def test_a_move_that_was_interrupted_does_not_go_on(
    gpufleet: Gpufleet, deployed: DeployedStack, pulumi: Pulumi, calls: list[str]
) -> None:
    """It asks no question, for it was answered before."""
    name = f"{deployed.names.stack}-{EUROPE}"
    new = DeployedStack.without_nodes(stack=name, directory=deployed.directory, region=EUROPE)
    write_stack_file(deployed.directory / f"Pulumi.{name}.yaml", sample_plan(region=EUROPE))
    ask(new.names, "stop", moved_to=deployed.names.stack)
    ask(deployed.names, "stop", moved_to=name)
    calls.clear()
    code, out, _ = gpufleet("move", EUROPE, *deployed.arguments, "--yes", "--dry-run")
    assert code == 0 and f"dry run: stack {name} would take over" in out
    assert calls and all(call.startswith(READING) for call in calls) and not pulumi.ran("up")


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("regions", ["", f"--regions us-east-1,{OREGON}"])
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("", "dry run: Stand it up? Not asked; nothing was created"),
        ("--config celingUsd=5", "did you mean gpufleet:ceilingUsd?"),
        ("--config data=s3://corpus/tokens", f"gpufleet:nat is false, and the plan's data in {OREGON}"),
        ("--directory missing", "missing/Pulumi.yaml is missing"),
    ],
)
def test_no_fleet_is_stood_up(
    gpufleet: Gpufleet, deployed: DeployedStack, tmp_path: Path, calls: list[str], regions: str, given: str, says: str
) -> None:
    calls.append("GetNothing")  # plans of a file are made without AWS: fresh prices would change the catalog
    work = {"tokens": "1B", "seq_len": 2048, "data_gib": 0.01, "data_region": OREGON}
    request = {"model": "llama-3.2-1b", "workload": work}
    request |= {"constraints": {"purchase_options": ["spot", "on-demand"], "instance_types": ["p4d"]}}
    (tmp_path / "elsewhere").mkdir()
    path = tmp_path / "elsewhere" / "request.yaml"
    path.write_text(yaml.safe_dump(request))
    where = ("--stack", "new", "--directory", str(deployed.directory), "--yes", "--dry-run")
    code, out, err = gpufleet("up", str(path), *regions.split(), *where, *given.split())
    is_asked = not given or ("data" in given and bool(regions))  # in Oregon alone
    assert (code == 0, "Stand it up?" in out) == (is_asked, is_asked) and says in out + err, err
