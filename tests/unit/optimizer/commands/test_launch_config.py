"""``gpufleet launch-config`` and ``manifest``: where texts and lines go, notes and refusals; not the objects."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.plans import LLAMA, sample_plan
from tests.unit.optimizer.commands.conftest import Gpufleet


def test_a_file_and_the_lines_that_start_it(gpufleet: Gpufleet, plan: str, tmp_path: Path) -> None:
    out = tmp_path / "my_run.py"
    code, printed, notes = gpufleet("launch-config", plan, "--engine", "torchtitan", "--out", str(out))
    line = "pulumi config set gpufleet:trainCommand -- '-m torchtitan.train --module my_run --config plan'"
    assert (code, printed) == (0, "") and line in notes and line in out.read_text(encoding="utf-8")
    assert "export HF_MODEL" in notes, "this plan has no model config"


def test_json_is_only_json_on_standard_output(
    gpufleet: Gpufleet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(sample_plan().to_json()))
    code, printed, notes = gpufleet("launch-config", "-", "--engine", "deepspeed")
    assert code == 0 and json.loads(printed)["train_batch_size"] == 128 and "train.py --deepspeed" in notes


REQUIRED = ("--image", "train@sha256:" + "0" * 64, "--checkpoints", "s3://bucket/run")


@pytest.fixture
def plan(tmp_path: Path) -> str:
    return write(tmp_path)


def write(folder: Path, **changes: Any) -> str:
    path = folder / "plan.json"
    path.write_text(sample_plan(**changes).to_json())
    return str(path)


def test_the_manifests_are_yaml_without_anchors(gpufleet: Gpufleet, plan: str) -> None:
    arguments = ("--karpenter", "ml", "--queue", "gpus", "--", "train.py", "--epochs", "3")
    code, out, err = gpufleet("manifest", plan, *REQUIRED, *arguments)
    assert (code, err) == (0, "")
    documents = list(YAML(typ="safe").load_all(out))
    assert [document["kind"] for document in documents] == ["EC2NodeClass", "NodePool", "JobSet"]
    assert "&id" not in out and "*id" not in out and "- --epochs\n" in out
    _, out, _ = gpufleet("manifest", plan, *REQUIRED, "--kind", "job", "--", "train.py")
    assert [document["kind"] for document in YAML(typ="safe").load_all(out)] == ["Service", "Job"]


@pytest.mark.parametrize(
    ("changes", "arguments", "said"),
    [
        ({}, ("--image", "train:1"), "train:1 is a tag"),
        ({"job": {"budget_usd": None}}, (), "nothing ends a job that hangs"),
        ({"job": {"budget_usd": 20.0}}, (), "20.00 USD lasts 0."),
    ],
)
def test_what_costs_money_is_said(
    gpufleet: Gpufleet, tmp_path: Path, changes: dict[str, Any], arguments: tuple[str, ...], said: str
) -> None:
    code, out, err = gpufleet("manifest", write(tmp_path, **changes), *REQUIRED, *arguments, "--", "train.py")
    assert code == 0 and "JobSet" in out and said in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*REQUIRED,), "own trainer does not carry out the plan"),
        ((*REQUIRED, "--kms-key", "k", "--", "train.py"), "--kms-key goes with --karpenter"),
        ((*REQUIRED[:2], "--checkpoints", "/mnt", "--", "train.py"), "--checkpoints is /mnt"),
        ((*REQUIRED[:2], "--", "train.py"), "--checkpoints is missing"),
        ((*REQUIRED, "--image", "", "--", "train.py"), "--image is empty"),
    ],
)
def test_what_pods_could_not_carry_out_is_refused(
    gpufleet: Gpufleet, plan: str, arguments: tuple[str, ...], said: str
) -> None:
    code, out, err = gpufleet("manifest", plan, *arguments)
    assert (code, out) == (2, "") and said in err


def test_without_a_command_the_reference_trainer_runs(gpufleet: Gpufleet, tmp_path: Path) -> None:
    code, out, _ = gpufleet("manifest", write(tmp_path, job={"architecture": LLAMA}), *REQUIRED)
    assert code == 0 and "- bootstrap.trainer\n" in out
