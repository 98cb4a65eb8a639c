from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootstrap.contract.node_env import NodeEnvironment
from bootstrap.contract.node_plan import Band, Expected, NodePlan, read_node_plan
from infra.naming import Names
from infra.settings import StackSettings
from infra.user_data import LIMIT_BYTES, NodeFacts, environment, environment_file, user_data
from optimizer.contract.plan import FleetPlan
from tests.infra.deployed import WORKERS, deploy, reserved
from tests.plans import sample_plan

NAMES = Names(stack="dev", account_id="123456789012", region="us-east-1", partition="aws")
FACTS = NodeFacts(
    bucket="gpufleet-dev-123456789012-us-east-1",
    bundle_key=f"bootstrap/{'0' * 64}.tar.gz",
    train_archive="",
    key_arn="arn:aws:kms:us-east-1:123456789012:key/k",
    log_group="/gpufleet/dev",
    ami_kind="dlami",
    group="gpufleet-dev-nodes",
)


def variables(plan: FleetPlan, **keys: Any) -> dict[str, Any]:
    """Variables of node.env of a plan, with configuration keys like trainCommand."""
    return dict(environment(settings_of(plan, **keys), NAMES, FACTS))


def settings_of(plan: FleetPlan, **keys: Any) -> StackSettings:
    return StackSettings.model_validate({"stack": "dev", "plan": plan, **keys})


def script(digest: str = "0" * 64, **keys: Any) -> str:
    """User data of the sample plan."""
    facts = dataclasses.replace(FACTS, bundle_key=f"bootstrap/{digest}.tar.gz")
    return user_data(settings_of(sample_plan(), **keys), NAMES, facts)


def read_back(path: Path) -> dict[str, str]:
    """The variables as bash sees them after sourcing the file, NUL-separated."""
    script = f'set -a; set -u; . "{path}"; env -0'
    out = subprocess.run(
        ["bash", "-c", script], env={"PATH": os.environ["PATH"]}, capture_output=True, check=True, timeout=120
    ).stdout
    pairs = (entry.split("=", 1) for entry in out.decode().split("\0") if entry)
    return {name: value for name, value in pairs if name.startswith("GPUFLEET_")}


def node_plan(given: Mapping[str, str]) -> NodePlan:
    plan = read_node_plan(given)
    assert plan is not None
    return plan


def test_the_environment_is_the_contract() -> None:
    given = variables(sample_plan())
    assert given.keys() == NodeEnvironment.__annotations__.keys()
    expected = {"NODE_COUNT": "2", "GPUS_PER_NODE": "8", "EFA_CARDS": "4", "CHECKPOINT_INTERVAL_S": "600"}
    assert {name: given[f"GPUFLEET_{name}"] for name in expected} == expected
    plan = node_plan(given)
    assert (plan.deadline_hours, plan.budget_usd) == (48, 3000)
    # p95 is e^(1.645 x relative error) times the step time.
    assert plan.predicted and plan.predicted.step_time_p95_s == 8.487300827
    assert (plan.predicted.step_time_s, plan.predicted.tokens_per_second) == (7.2, 36408.9)
    assert (plan.steps, plan.global_batch, plan.precision, plan.compiled) == (2000, 128, "bf16", False)
    assert plan.architecture == {}
    # 95 USD of compute over 4.5 expected hours.
    assert float(given["GPUFLEET_PRICE_USD_PER_HOUR"]) == pytest.approx(95 / 4.5)


def test_the_parallelism_of_the_plan_reaches_the_node_number_by_number() -> None:
    split: dict[str, object] = {
        "data": 2,
        "tensor": 2,
        "pipeline": 2,
        "context": 2,
        "expert": 2,
        "sequence_parallel": True,
    }
    split |= {"virtual_stages": 2, "micro_batch": 4, "grad_accum": 16, "sharding": "zero1"}
    plan = sample_plan(parallelism=split)
    given = node_plan(variables(plan))
    assert (given.tensor_parallel, given.pipeline_parallel, given.context_parallel, given.expert_parallel) == (2,) * 4
    assert (given.sequence_parallel, given.virtual_stages, given.micro_batch) == (True, 2, 4)
    assert (given.sharding, given.activation_checkpointing) == ("zero1", "full")


def test_a_reservation_is_priced_by_its_hour_not_by_its_year() -> None:
    plan = sample_plan(
        **reserved(), cost_usd={"expected": 50_000, "p50": 50_000, "p95": 50_000, "breakdown": {"compute": 49_995}}
    )
    assert variables(plan)["GPUFLEET_PRICE_USD_PER_HOUR"] == "20"


def test_absent_limits_are_null_and_a_fraction_of_a_gpu_is_one_rank() -> None:
    plan = sample_plan(
        job={"budget_usd": None, "deadline_hours": None},
        node={"gpu_count": 0.5},
        parallelism={"data": 2, "grad_accum": 16},
    )
    given = variables(plan)
    assert (node_plan(given).budget_usd, node_plan(given).deadline_hours) == (None, None)
    assert given["GPUFLEET_GPUS_PER_NODE"] == "1"


def test_the_rates_that_the_plan_expects_reach_the_node() -> None:
    assert node_plan(variables(sample_plan())).expected is None
    rates = {"network_gb_per_s": {"value": 29.5, "warn_below": 22.125, "fail_below": 14.75}}
    band = Band(value=29.5, warn_below=22.125, fail_below=14.75)
    assert node_plan(variables(sample_plan(expected=rates))).expected == Expected(network_gb_per_s=band)


@settings(max_examples=25, deadline=None)
@given(value=st.text(st.characters(exclude_categories=["C", "Zl", "Zp"])).filter(str.isprintable))
def test_bash_reads_any_printable_value_back(value: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("env") / "node.env"
    path.write_text(environment_file({"GPUFLEET_TRAIN_COMMAND": value}), encoding="utf-8")
    assert read_back(path) == {"GPUFLEET_TRAIN_COMMAND": value}


@pytest.mark.parametrize("value", ["a\nEND_OF_NODE_ENV\nrm -rf /", "a\x00b", "a\rb", "a\x1bb"])
def test_a_line_break_or_control_character_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="GPUFLEET_TRAIN_COMMAND has a line break"):
        script(trainCommand=value)


def test_the_limit_of_ec2_is_kept() -> None:
    assert len(script().encode()) < LIMIT_BYTES / 2
    with pytest.raises(ValueError, match="the limit of EC2 is 16384"):
        script(trainCommand="x" * LIMIT_BYTES)


def bundle(folder: Path, script: str) -> tuple[bytes, str]:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        entry = tarfile.TarInfo("bootstrap/node_init.sh")
        entry.size, entry.mode = len(script), 0o755
        archive.addfile(entry, io.BytesIO(script.encode()))
    content = packed.getvalue()
    (folder / "bundle.tar.gz").write_bytes(content)
    return content, hashlib.sha256(content).hexdigest()


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """A folder with stand-ins for aws (copies the bundle) and shutdown (leaves a mark), and the script's own root."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "aws").write_text(
        f'#!/bin/bash\necho "$@" >{tmp_path}/aws.log\n[[ -e {tmp_path}/bundle.tar.gz ]] || exit 1\n'
        f'cp {tmp_path}/bundle.tar.gz "${{@: -1}}"\n'
    )
    (tools / "shutdown").write_text(f'#!/bin/bash\necho "$@" >{tmp_path}/shutdown.log\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    return tmp_path


def boot(node: Path, text: str) -> subprocess.CompletedProcess[bytes]:
    """Run the very script, its two absolute folders moved under the test's."""
    moved = text.replace("/etc/gpufleet", f"{node}/etc/gpufleet").replace("/opt/gpufleet", f"{node}/opt/gpufleet")
    environment = {"PATH": f"{node}/bin:{os.environ['PATH']}", "RETRY_DELAY_S": "0"}
    return subprocess.run(["bash", "-c", moved], env=environment, capture_output=True, check=False, timeout=120)


def test_the_script_runs_the_bundle_it_was_promised(node: Path) -> None:
    _, digest = bundle(node, f"#!/bin/bash\ncp {node}/etc/gpufleet/node.env {node}/ran\n")
    command = "python train.py --name 'a b'"
    done = boot(node, script(digest, trainCommand=command))
    assert done.returncode == 0, done.stderr
    assert read_back(node / "ran") == variables(sample_plan(), trainCommand=command)
    assert f"s3://gpufleet-dev-123456789012-us-east-1/bootstrap/{digest}.tar.gz" in (node / "aws.log").read_text()
    assert not (node / "shutdown.log").exists()


def test_a_bundle_that_cannot_be_read_at_first_is_asked_for_again(node: Path) -> None:
    _, digest = bundle(node, f"#!/bin/bash\ntouch {node}/ran\n")
    fake = (node / "bin" / "aws").read_text()
    first = f"#!/bin/bash\nif [[ ! -e {node}/tried ]]; then touch {node}/tried; exit 1; fi\n"
    (node / "bin" / "aws").write_text(first + fake.removeprefix("#!/bin/bash\n"))
    done = boot(node, script(digest))
    assert done.returncode == 0, done.stderr
    assert (node / "ran").exists() and not (node / "shutdown.log").exists()


@pytest.mark.parametrize("case", ["tampered", "absent"])
def test_a_wrong_or_missing_bundle_never_runs_and_the_node_ends(node: Path, case: str) -> None:
    _, digest = bundle(node, f"#!/bin/bash\ntouch {node}/ran\n")
    if case == "tampered":
        bundle(node, f"#!/bin/bash\ntouch {node}/ran # evil\n")
    else:
        (node / "bundle.tar.gz").unlink()
    done = boot(node, script(digest))
    assert done.returncode != 0
    assert not (node / "ran").exists()
    assert (node / "shutdown.log").read_text().strip() == "-h now"


def test_shellcheck_has_nothing_to_say(tmp_path: Path) -> None:
    path = tmp_path / "user_data.sh"
    path.write_text(script())
    done = subprocess.run(
        [Path(sys.executable).parent / "shellcheck", path], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout


def test_a_worker_is_a_job_of_one_node() -> None:
    given = variables(sample_plan(**WORKERS), mode="workers")
    assert (given["GPUFLEET_MODE"], given["GPUFLEET_NODE_COUNT"]) == ("workers", "1")
    # Its own eight GPUs, and its half of the price.
    assert given["GPUFLEET_GPUS_PER_NODE"] == "8"
    assert float(given["GPUFLEET_PRICE_USD_PER_HOUR"]) == pytest.approx(95 / 4.5 / 2)


def test_the_run_is_that_of_the_code_the_command_and_the_plan() -> None:
    def run(changes: dict[str, Any] | None = None, **keys: str) -> str:
        text = deploy(changes, {f"gpufleet:{key}": value for key, value in keys.items()}).user_data
        (line,) = (line for line in text.splitlines() if line.startswith("GPUFLEET_RUN="))
        return line.partition("=")[2]

    same = run()
    assert re.fullmatch("[0-9a-f]{12}", same)
    # More money is the same run, another command or layout is not.
    assert run({"job": {"budget_usd": 9999}}) == same
    assert len({same, run(trainCommand="train.py"), run({"parallelism": {"micro_batch": 8, "grad_accum": 1}})}) == 3


def test_the_run_of_an_older_plan_goes_on() -> None:
    """The id that a stack of an earlier version has in its bucket: fields that came later do not change it."""
    assert settings_of(sample_plan()).run_id("x/train-1.tar.gz") == "c5a1c01885d3"


LLAMA = {"model_type": "llama", "num_attention_heads": 32, "intermediate_size": 11008, "name": "O'Neill\n"}


def test_a_first_up_trains_what_the_plan_says(tmp_path: Path) -> None:
    plan = sample_plan(job={"architecture": LLAMA})
    given = variables(plan)
    assert given["GPUFLEET_TRAIN_COMMAND"] == "-m bootstrap.trainer"
    assert node_plan(given).architecture == LLAMA
    file = tmp_path / "node.env"
    file.write_text(environment_file(given))
    assert read_back(file) == given and "'" not in given["GPUFLEET_PLAN"]
    assert given["GPUFLEET_STANDBY"] == ""
    assert variables(plan, standby=True)["GPUFLEET_STANDBY"] == "1"
    data = variables(plan, data="s3://corpus/tokens")
    assert (data["GPUFLEET_TRAIN_DATA"], data["GPUFLEET_STAGING_LIMIT_S"]) == ("s3://corpus/tokens", "1800")
    assert (base_limit := given["GPUFLEET_STAGING_LIMIT_S"]) == "0"
    assert variables(plan, data="/mnt/nvme/tokens")["GPUFLEET_STAGING_LIMIT_S"] == base_limit
    copies = {
        "data_gib": 300.0, "node_hours": 1.0, "gib_per_s": 0.08, "bound": "nvme", "source": "x", "hours": 1.0,
        "compute_usd": 1.0, "storage_usd": 1.0,
    }  # fmt: skip
    planned = variables(sample_plan(job={"architecture": LLAMA}, staging=copies), data="s3://corpus/tokens")
    assert planned["GPUFLEET_STAGING_LIMIT_S"] == "7200"
    base = variables(plan, baseWeights="s3://corpus/tokens")
    assert base["GPUFLEET_BASE_WEIGHTS"] == "s3://corpus/tokens"
    assert len({facts["GPUFLEET_RUN"] for facts in (given, data, base)}) == 3


@pytest.mark.parametrize(
    ("keys", "command"),
    [
        ({"trainCommand": "none"}, ""),
        ({"trainCommand": "train.py"}, "train.py"),
        # Code of one's own without its command, and nodes that train alone, wait as before.
        ({"trainDir": "tests"}, ""),
        ({"mode": "workers"}, ""),
    ],
)
def test_nodes_run_the_trainer_only_where_nothing_else_is_meant(keys: dict[str, Any], command: str) -> None:
    assert variables(sample_plan(job={"architecture": LLAMA}), **keys)["GPUFLEET_TRAIN_COMMAND"] == command
    assert variables(sample_plan())["GPUFLEET_TRAIN_COMMAND"] == ""
