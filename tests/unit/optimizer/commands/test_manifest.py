from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from optimizer.contract.plan import FleetPlan
from tests.infra.test_manifests import facts
from tests.plans import SPOT_P4D, sample_plan
from tests.unit.optimizer.commands.conftest import Gpufleet

IMAGE = "111122223333.dkr.ecr.us-east-1.amazonaws.com/train@sha256:" + "0" * 64


@pytest.fixture
def plan(tmp_path: Path) -> str:
    path = tmp_path / "plans.json"
    path.write_text(json.dumps({"plans": [SPOT_P4D]}))
    return str(path)


def outputs(tmp_path: Path, plan: FleetPlan | None = None, **changes: Any) -> str:
    known = facts(plan or sample_plan()).model_dump() | changes
    path = tmp_path / "outputs.json"
    path.write_text(json.dumps({"bucket": "demo", "kubernetes": known}))
    return str(path)


def test_the_manifests_are_yaml_in_the_order_to_apply(gpufleet: Gpufleet, plan: str, tmp_path: Path) -> None:
    code, out, err = gpufleet("manifest", plan, "--outputs", outputs(tmp_path), "--image", IMAGE)
    assert (code, err) == (0, "")
    documents = list(YAML(typ="safe").load_all(out))
    assert [document["kind"] for document in documents] == [
        "Namespace",
        "ServiceAccount",
        "DaemonSet",
        "DaemonSet",
        "JobSet",
    ]
    # The script of the init container is readable, and there are no anchors.
    assert re.search(r"^ +import hashlib", out, re.MULTILINE)
    assert "&id" not in out and "*id" not in out


def test_kubeflow_instead_of_jobset(gpufleet: Gpufleet, plan: str, tmp_path: Path) -> None:
    arguments = ("--outputs", outputs(tmp_path), "--image", IMAGE, "--kind", "pytorchjob")
    _, out, _ = gpufleet("manifest", plan, *arguments)
    assert list(YAML(typ="safe").load_all(out))[-1]["apiVersion"] == "kubeflow.org/v1"


def test_a_tag_that_may_move_is_said(gpufleet: Gpufleet, plan: str, tmp_path: Path) -> None:
    code, out, err = gpufleet("manifest", plan, "--outputs", outputs(tmp_path))
    assert code == 0
    assert "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch:2.11.0-cu130-amzn2023" in out
    assert "is a tag, which AWS moves" in err


def test_pulumi_is_asked_for_the_stacks_outputs(
    gpufleet: Gpufleet, plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = outputs(tmp_path)
    program = tmp_path / "bin/pulumi"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\n[ "$*" = "stack output --json --stack nlp" ] && exec cat "{answer}"\nexit 9\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    assert gpufleet("manifest", plan, "--stack", "nlp", "--image", IMAGE)[0] == 0
    code, _, err = gpufleet("manifest", plan, "--stack", "other", "--image", IMAGE)
    assert code == 1 and "ended with 9" in err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"plan_sha256": "0" * 64}, "PLAN is not the plan that the stack carries out"),
        ({"registry": None}, "kubernetes is not this version's: registry"),
        ({"more": 1}, "kubernetes is not this version's: more"),
    ],
)
def test_what_does_not_fit_the_stack_is_refused(
    gpufleet: Gpufleet, plan: str, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    code, out, err = gpufleet("manifest", plan, "--outputs", outputs(tmp_path, **changes))
    assert (code, out) == (2, "")
    assert said in err


def test_a_stack_without_a_command_is_refused(gpufleet: Gpufleet, plan: str, tmp_path: Path) -> None:
    environment = facts(sample_plan()).environment | {"GPUFLEET_TRAIN_COMMAND": " "}
    code, out, err = gpufleet("manifest", plan, "--outputs", outputs(tmp_path, environment=environment))
    assert (code, out) == (2, "")
    assert "gpufleet:trainCommand is empty" in err


def test_arm_nodes_need_an_image_of_ones_own(gpufleet: Gpufleet, tmp_path: Path) -> None:
    arm = sample_plan(node={"cpu_architecture": "arm64"})
    path = tmp_path / "arm.json"
    path.write_text(arm.to_json())
    known = outputs(tmp_path, arm)
    code, _, err = gpufleet("manifest", str(path), "--outputs", known)
    assert code == 2 and "no training image for arm64" in err
    assert gpufleet("manifest", str(path), "--outputs", known, "--image", IMAGE)[0] == 0


def test_a_stack_on_platform_ec2_has_no_manifests(gpufleet: Gpufleet, plan: str, tmp_path: Path) -> None:
    path = tmp_path / "outputs.json"
    path.write_text(json.dumps({"bucket": "demo"}))
    code, _, err = gpufleet("manifest", plan, "--outputs", str(path))
    assert code == 2 and "pulumi config set gpufleet:platform eks" in err


@pytest.mark.parametrize("arguments", [(), ("--stack", "dev", "--outputs", "x.json")])
def test_one_source_of_outputs_and_not_two(gpufleet: Gpufleet, plan: str, arguments: tuple[str, ...]) -> None:
    code, _, err = gpufleet("manifest", plan, *arguments)
    assert code == 2 and "--stack and --outputs are" in err


def test_outputs_that_are_no_json_are_said(gpufleet: Gpufleet, plan: str, tmp_path: Path) -> None:
    (tmp_path / "outputs.json").write_text("{")
    code, _, err = gpufleet("manifest", plan, "--outputs", str(tmp_path / "outputs.json"))
    assert code == 2 and "cannot be read as JSON" in err
