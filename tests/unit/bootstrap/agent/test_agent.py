"""Parts of the agent that tests/training/launch_cases do not reach: settings, versions of Python, the lease."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import botocore.session
import pytest
from awscrt.auth import AwsCredentialsProvider

import bootstrap.agent
from bootstrap.agent import container, credentials, torchrun
from bootstrap.agent.credentials import TrainingCredentials
from bootstrap.agent.efa import efa_settings
from bootstrap.agent.group import GroupClient, Instance
from bootstrap.agent.node import Reports, SupervisedNode
from bootstrap.agent.rendezvous import meet
from bootstrap.agent.settings import Settings
from bootstrap.agent.torchrun import _path
from bootstrap.contract.launcher import split_command
from bootstrap.contract.report import read_report
from bootstrap.training.notices import Notice, NoticeFiles
from bootstrap.training.watcher import SPOT_PATH

AGENT = Path(bootstrap.agent.__file__).parent
BOOTSTRAP = AGENT.parent


@pytest.mark.parametrize(
    "command",
    [
        "train.py", "  -m my.train  --lr 1e-3 ", "a 'b c' \"d  e\" f'g 'h", r"a\ b '\n' c\\d", "--x '' \"\" y",
        r'--json "{\"a"', "# no comment $HOME `id` *", "'open", 'x "open', "--name 'oops",
    ],
)  # fmt: skip
def test_a_command_is_split_as_xargs_splits_it(command: str) -> None:
    """The words are those of `xargs printf`: nothing of a stack's command may change its meaning."""
    done = subprocess.run(["xargs", "printf", r"%s\0"], input=command.encode(), capture_output=True, check=False)
    words = split_command(command)
    assert words == (done.stdout.decode().split("\0")[:-1] if done.returncode == 0 else None)


def test_shell_and_agent_keep_the_same_heartbeat() -> None:
    """The shell reads no Python, so the number stands twice."""
    (seconds,) = re.findall(r"HOOK_HEARTBEAT_S:=(\d+)", (BOOTSTRAP / "lib.sh").read_text())
    assert float(seconds) == Settings({}).limits.hook_heartbeat_s


@pytest.mark.parametrize(
    ("state", "trains"),
    [
        ('{"phase": "running", "group": "fleet-1"}', True),
        ('{"phase": "running", "group": "fleet-2"}', False),  # the gang trains elsewhere, and may move here
        ('{"phase": "draining", "group": "fleet-1"}', False),  # nodes that serve now would be ended
        ('{"phase": "running", "group": ""}', True),
        ("{", False),
        (None, False),  # AWS is silent
    ],
)
def test_only_the_group_that_the_controller_chose_trains(
    state: str | None, trains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two groups that train at once would write the same checkpoints."""
    group = GroupClient(Settings({"GPUFLEET_ASG_NAME": "fleet-1", "GPUFLEET_BUCKET": "b"}))
    monkeypatch.setattr(group, "_aws", lambda *_: state)
    assert group.is_chosen() == trains
    alone = GroupClient(Settings({"GPUFLEET_ASG_NAME": "fleet-1"}))
    assert alone.is_chosen(), "without a bucket there is no controller"


def test_a_waiting_node_asks_ec2_only_where_the_group_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """DescribeInstances without filters or pages refills at 10 calls/s; ten waiting fleets of 64 nodes made 64."""
    # Two groups of one place, whose nodes find each other.
    group = GroupClient(Settings({"GPUFLEET_ASG_NAME": "fleet-1,fleet", "GPUFLEET_INSTANCE_ID": "i-1"}))
    calls: list[tuple[str, ...]] = []
    launched = ("12:00:05Z\ti-2\t10.0.0.2", "12:00:00Z\ti-1\t10.0.0.1", "11:59:00Z\ti-9\t10.0.0.9")
    lines = "".join(f"2026-11-26T{line}\n" for line in launched)

    def answer(*words: str) -> str:
        calls.append(words)
        return lines if words[0] == "ec2" else "i-1\ti-2\n"

    monkeypatch.setattr(group, "_aws", answer)
    waiting = group.in_service(3)
    assert waiting is not None and [one.id for one in waiting] == ["i-1", "i-2"] and len(calls) == 1
    complete = group.in_service(2)
    assert complete is not None
    assert [(one.id, one.private_ip) for one in complete] == [("i-1", "10.0.0.1"), ("i-2", "10.0.0.2")]
    assert calls[2][:4] == (
        "ec2",
        "describe-instances",
        "--filters",
        "Name=tag:aws:autoscaling:groupName,Values=fleet-1,fleet",
    )
    assert {"fleet-1", "fleet"} < set(calls[0])


def test_nodes_look_for_each_other_at_times_of_their_own_and_less_often_where_aws_is_silent() -> None:
    silence = [None] * 5
    looks: Iterator[list[Instance] | None] = iter([[], *silence, []])
    rests: list[float] = []
    settings = Settings({"GPUFLEET_NODE_COUNT": "64", "GPUFLEET_ASG_NAME": "fleet-1"})
    group = SimpleNamespace(instance_id=lambda: "i-1", in_service=lambda enough: next(looks))
    notices = iter([None] * 6 + [Notice(source=SPOT_PATH, detail="terminate")])
    node = SimpleNamespace(settings=settings, group=group, rest=rests.append, leaving=lambda: next(notices))
    assert meet(cast(SupervisedNode, node)) is None
    for rest, mean in zip(rests, (10, 20, 40, 40, 40, 40), strict=True):
        assert mean * 0.75 <= rest <= mean * 1.25
    assert len(set(rests)) == len(rests)


def test_nccls_plugin_is_found_by_its_newer_name(tmp_path: Path) -> None:
    assert efa_settings(tmp_path, {}).keys() == {"FI_PROVIDER", "NCCL_NET", "FI_EFA_USE_HUGE_PAGE"}
    plugin = tmp_path / "opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so.0"
    plugin.parent.mkdir(parents=True)
    plugin.touch()
    found = efa_settings(tmp_path, {"LD_LIBRARY_PATH": "/own"})
    assert (found["LD_LIBRARY_PATH"], found["NCCL_NET_PLUGIN"]) == (f"{plugin.parent}:/own", "ofi")


def test_data_loaders_can_fork_beside_efa(tmp_path: Path) -> None:
    """torch's DataLoader forks by default, and a fork has to copy the huge pages that EFA's provider took."""
    assert efa_settings(tmp_path, {})["FI_EFA_USE_HUGE_PAGE"] == "0"
    assert efa_settings(tmp_path, {"FI_EFA_USE_HUGE_PAGE": "1"})["FI_EFA_USE_HUGE_PAGE"] == "1"


def test_programs_beside_the_trainings_python_are_found_first() -> None:
    given = {"GPUFLEET_PYTHON": "/opt/gpufleet/venv/bin/python3", "PATH": "/usr/bin", "ROOT": "/"}
    path = _path(Settings(given))
    assert path.startswith("/opt/gpufleet/venv/bin:/usr/bin:/opt/amazon/") and "/opt/amazon/openmpi/bin" in path.split(
        ":"
    )
    assert _path(Settings({"PATH": "/usr/bin"})).startswith("/usr/bin:")


def test_a_container_has_what_the_training_has_on_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders by their own paths and none twice, GPUs, EFA cards; values stay off the command line."""
    for device in (
        "nvidiactl",
        "nvidia0",
        "nvidia-caps/nvidia-cap1",
        "infiniband/uverbs1",
        "infiniband/uverbs0",
        "sda",
    ):
        (tmp_path / "dev" / device).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "dev" / device).touch()
    for folder in ("run", "run-credentials", "nvme/gpufleet-data", "code", "weights"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setattr(container, "BOOTSTRAP", tmp_path / "code/bootstrap")
    given = {
        "ROOT": str(tmp_path), "GPUFLEET_RUN_DIR": f"{tmp_path}/run", "GPUFLEET_IMAGE": "registry/train@sha256:7",
        "GPUFLEET_PYTHON": "/opt/venv/bin/python3", "GPUFLEET_SCRATCH_DIR": f"{tmp_path}/nvme",
        "GPUFLEET_DATA_DIR": f"{tmp_path}/nvme/gpufleet-data", "GPUFLEET_BASE_WEIGHTS": f"{tmp_path}/weights",
        "GPUFLEET_CHECKPOINT_URI": "s3://bucket/checkpoints", "GPUFLEET_TRAIN_DIR": f"{tmp_path}/code/train",
        "NCCL_DEBUG": "INFO", "PATH": "/usr/bin", "LD_LIBRARY_PATH": "/usr/lib", "HOME": "/home/x",
    }  # fmt: skip
    words, environment = container.command(Settings(given), given, ["-m", "train"], "one")
    text = " ".join(words)
    assert re.findall(r"--mount type=bind,source=(\S+),target=\1", text) == [
        f"{tmp_path}/{name}" for name in ("code", "nvme", "run", "run-credentials", "weights")
    ]
    assert re.findall(r"--device (\S+)", text) == [
        f"{tmp_path}/dev/{name}" for name in ("infiniband/uverbs0", "infiniband/uverbs1", "nvidia0", "nvidiactl")
    ]
    assert "--ulimit core=0" in text, "docker's service allows any size"
    assert "--gpus all" in text and f"--workdir {tmp_path}/code/train" in text and "--user" not in text
    assert words[words.index("--entrypoint") :] == [
        "--entrypoint", "python3", "registry/train@sha256:7", f"{tmp_path}/code/bootstrap/agent", "run-python", "-m",
        "train",
    ]  # fmt: skip
    passed = re.findall(r"--env (\S+)", text)
    assert "NCCL_DEBUG" in passed and not {"PATH", "LD_LIBRARY_PATH", "HOME", *container.OWN} & set(passed)
    assert environment["GPUFLEET_CHECKPOINT_URI"] == "s3://bucket/checkpoints" and "s3://" not in text
    assert environment.get("HOME") == os.environ.get("HOME"), "docker's client is root's"


def test_the_trainings_python_finds_the_bundle_anywhere_and_has_efas_variables(tmp_path: Path) -> None:
    program = "import bootstrap.contract, os; print(os.environ['FI_PROVIDER'], os.environ['PYTHONPATH'])"
    environment = {
        "GPUFLEET_PYTHON": sys.executable, "GPUFLEET_GPUDIRECT": "1", "PATH": os.environ["PATH"], "PYTHONPATH": "/own",
    }  # fmt: skip
    command = [sys.executable, str(AGENT), "run-python", "-S", "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"efa {BOOTSTRAP.parent}:/own\n"


AWS = """#!/bin/sh
echo "$@" "$AWS_STS_REGIONAL_ENDPOINTS" >>{folder}/calls
n=$(wc -l <{folder}/calls)
[ "$n" -gt 1 ] || exit 254
printf 'AKIA%s\\tsecret\\ttoken\\t2099-01-01T00:00:00+00:00\\n' "$n"
"""


def test_the_training_gets_its_own_roles_credentials_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """botocore, and with it every SDK, reads them; they are renewed, and a refusal is tried again."""
    program = tmp_path / "aws"
    program.write_text(AWS.format(folder=tmp_path))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    slept: list[float] = []
    kept: list[Any] = []
    monkeypatch.setattr("threading.Thread.start", lambda thread: kept.append(thread))
    role = "arn:aws:iam::123456789012:role/train"
    given = {"GPUFLEET_RUN_DIR": str(tmp_path / "run"), "GPUFLEET_REGION": "us-east-1", "GPUFLEET_INSTANCE_ID": "i-1"}
    without, settings = (Settings(given | {"GPUFLEET_TRAIN_ROLE_ARN": arn}) for arn in ("", role))
    nodes_own = TrainingCredentials(without, GroupClient(without))
    assert nodes_own.take() and nodes_own.environment() == {}
    own = TrainingCredentials(settings, GroupClient(settings))
    assert [own.take() for _ in range(3)] == [False, True, True] and len(kept) == 1, "one thread renews"
    for name, value in own.environment().items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    session = botocore.session.Session()
    found = session.get_credentials()
    assert found is not None and found.method == "custom-process"
    assert session.get_config_variable("region") == "us-east-1", "without the metadata service too"
    assert os.environ["AWS_SDK_LOAD_CONFIG"] == "1", "the SDK for Go 1.x reads the file"
    of_crt = AwsCredentialsProvider.new_default_chain().get_credentials().result(30)
    assert of_crt.session_token == "token", "S3's connector for PyTorch finds them as the CRT does"
    frozen = found.get_frozen_credentials()
    assert (
        frozen.access_key
        and frozen.access_key.startswith("AKIA")
        and (frozen.secret_key, frozen.token) == ("secret", "token")
    )
    call = (tmp_path / "calls").read_text().splitlines()[0]
    assert f"sts assume-role --role-arn {role} --role-session-name i-1 --duration-seconds 3600" in call
    assert call.endswith(" regional"), "the VPC has the region's endpoint of STS alone"
    file = tmp_path / "run-credentials/credentials.json"
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o640, 0o750)
    # Renewed well before botocore asks for the next ones, 15 minutes before the end of an hour.
    before = file.read_text()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            program.write_text("#!/bin/sh\nexit 254\n")
        if len(slept) == 3:
            raise StopIteration

    monkeypatch.setattr(credentials, "time", SimpleNamespace(sleep=sleep))
    with pytest.raises(StopIteration):
        own._keep()
    assert slept == [credentials.RENEW_S, credentials.RENEW_S, credentials.RETRY_S] and file.read_text() != before
    assert credentials.RENEW_S < credentials.LIFE_S - 15 * 60


def test_python_writes_bytecode_where_an_image_forbids_it(tmp_path: Path) -> None:
    node: Any = SimpleNamespace(settings=Settings({"PYTHONDONTWRITEBYTECODE": "1"}), notices=NoticeFiles(tmp_path))
    node.credentials = SimpleNamespace(environment=dict)
    assert not torchrun.training_environment(node, None)["PYTHONDONTWRITEBYTECODE"]


def test_a_fault_of_an_earlier_program_ends_no_later_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its script did without the rank that wrote the file."""
    monkeypatch.setattr(torchrun, "training_environment", lambda *_: {})
    monkeypatch.setattr(torchrun, "start_as", lambda *_: None)
    node = SimpleNamespace(settings=Settings({}), notices=NoticeFiles(tmp_path / "drain"))
    (tmp_path / "drain.at-fault").touch()
    torchrun.Torchrun(cast(Any, node), None)
    assert not (tmp_path / "drain.at-fault").exists()


def test_credentials_that_cannot_be_written_are_renewed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error would end the thread that renews them, and an hour later the training could save nothing."""
    monkeypatch.setattr(credentials, "aws_cli", lambda *arguments: "AKIA secret token 2026-11-26T16:00:00Z\n")
    (tmp_path / "file").touch()
    given = {
        "GPUFLEET_TRAIN_ROLE_ARN": "role",
        "GPUFLEET_INSTANCE_ID": "i-1",
        "GPUFLEET_RUN_DIR": f"{tmp_path}/file/run",
    }
    settings = Settings(given)
    assert not TrainingCredentials(settings, GroupClient(settings)).take()


def test_steps_reach_the_controller_with_the_nodes_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the root volume is full, which is why a run may give up."""
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    texts: list[str] = []

    def put(region: str, *words: str) -> str:
        texts.append(Path(words[words.index("--body") + 1]).read_text())
        return ""

    monkeypatch.setattr("bootstrap.agent.group.aws_cli", put)
    names = ("BUCKET", "ASG_NAME", "INSTANCE_ID", "RUN")
    given = {f"GPUFLEET_{name}": name.lower() for name in names} | {"GPUFLEET_RUN_DIR": f"{tmp_path}/run/gpufleet"}
    group = GroupClient(Settings(given))
    reports = Reports(group, 0.0)
    for done_steps in (None, None, 40):
        reports.tell("training", 0, done_steps=done_steps)
        reports.wait(5.0)
    told = [read_report(text, datetime.now(UTC), "a report") for text in texts]
    assert [(report.state, report.done_steps) for report in told] == [("training", None), ("training", 40)]
