"""node_init.sh as a whole: whatever step fails, the launch hook gets ABANDON exactly once and nothing is started."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from bootstrap.agent.group import STATE_KEY
from bootstrap.contract import state
from bootstrap.contract.gpus import FIELDS
from bootstrap.contract.requirements import read_pins
from examples.local_imds import LocalImds
from tests.bootstrap.node import BOOTSTRAP, HERE, Node, in_order

STEPS = [*in_order("steps"), "check-xid-errors"]
HOOK = "aws autoscaling complete-lifecycle-action "


def healthy(folder: Path, **options: object) -> Node:
    return Node(folder, HERE / "cases/node-init-healthy", **options)  # type: ignore[arg-type]


def answers(node: Node) -> list[str]:
    """Answers to the launch hook."""
    return [call.rsplit(" ", 1)[1] for call in node.calls if call.startswith(HOOK)]


def completed_terminations(node: Node) -> list[str]:
    """Calls that completed the terminate hook."""
    return [call for call in node.calls if "complete-lifecycle-action" in call and "gpufleet-demo-terminate" in call]


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def script_of(step: str) -> str:
    return f"steps/{step}.sh" if (BOOTSTRAP / f"steps/{step}.sh").exists() else f"checks/{step}.sh"


def test_every_script_is_a_step_or_called_by_name() -> None:
    callers = "".join(path.read_text() for path in BOOTSTRAP.rglob("*") if path.suffix in (".sh", ".service", ".py"))
    for path in (BOOTSTRAP / "steps").glob("*.sh"):
        assert path.stem in STEPS or re.search(rf"(steps/|run_step |run_step\(.){path.stem}\b", callers), path.name


@pytest.mark.parametrize("step", STEPS)
def test_a_failing_step_abandons_the_node(step: str, tmp_path: Path) -> None:
    node = healthy(tmp_path)
    node.replace(script_of(step), "echo the reason, whatever it is >&2\nexit 3")
    outcome = node.run("node_init.sh")
    where = "check-health" if step == "check-xid-errors" else step  # check-health runs it first
    assert outcome.exit_code == (1 if where == "check-health" and step != where else 3)
    assert f"node set-up failed in {where}" in outcome.output
    assert answers(node) == ["ABANDON"]
    assert len(completed_terminations(node)) == 1, "the terminate hook would be waited out, and paid"
    (state,) = [json.loads(line) for line in (node.state / "node-states").read_text().splitlines()]
    assert state | {"at": ""} == {
        "schema_version": 1, "run": "0123456789ab", "state": "unfit", "exit_status": outcome.exit_code, "step": where,
        "at": "",
    }  # fmt: skip
    assert datetime.fromisoformat(state["at"]).tzinfo is UTC
    assert not any(call.startswith(("systemctl enable --now gpufleet-train", "shutdown")) for call in node.calls)
    (sent,) = json.loads((node.state / "log-events.json").read_text())
    assert "the reason, whatever it is" in sent["message"]
    assert f"node set-up failed in {where}" in sent["message"]
    assert abs(sent["timestamp"] / 1000 - time.time()) < 600


@pytest.mark.parametrize(
    ("limit_s", "exit_code", "says"),
    [
        ("8", 124, "node set-up failed in check-platform with exit code 124"),
        ("0", 1, "no time left for check-platform"),
    ],
)
def test_no_step_lasts_or_begins_when_the_time_is_up(limit_s: str, exit_code: int, says: str, tmp_path: Path) -> None:
    node = healthy(tmp_path)
    node.replace("steps/check-platform.sh", "sleep 60")
    outcome = node.run("node_init.sh", {"NODE_INIT_TIMEOUT_S": limit_s})
    assert outcome.exit_code == exit_code and says in outcome.output
    assert answers(node) == ["ABANDON"]


def test_a_healthy_node_joins_once_in_order(tmp_path: Path) -> None:
    node = healthy(tmp_path)
    outcome = node.run("node_init.sh")
    assert outcome.exit_code == 0, outcome.output
    took = re.findall(r"node_init.sh: ([a-z-]+) took \d+ s", outcome.output)
    assert took == [*STEPS, "complete-launch-hook", "start-training"]
    assert answers(node) == ["CONTINUE"]
    told = next(i for i, call in enumerate(node.calls) if call.startswith(HOOK))
    started = node.calls.index("systemctl enable --now gpufleet-train.service")
    smoke = next(i for i, call in enumerate(node.calls) if "-m bootstrap.smoke" in call)
    assert smoke < told < started


def test_a_second_run_does_nothing(tmp_path: Path) -> None:
    node = healthy(tmp_path)
    assert node.run("node_init.sh").exit_code == 0
    before = len(node.calls)
    assert node.run("node_init.sh").exit_code == 0
    calls = [call for call in node.calls[before:] if not call.startswith("logger ")]
    assert calls == ["systemctl is-active --quiet gpufleet-train.service"]


def test_a_run_that_was_cut_off_is_resumed(tmp_path: Path) -> None:
    """Killed in the smoke test, as by a reboot: the next run finds mount and environment done and goes on."""
    node = healthy(tmp_path)
    smoke = (node.bootstrap / "steps/run-smoke-test.sh").read_text()
    node.replace("steps/run-smoke-test.sh", f"touch {tmp_path}/reached\nsleep 60")
    running = subprocess.Popen(node.command("node_init.sh"), env=node.environment(), start_new_session=True)
    wait_for(tmp_path / "reached")
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    node.kill_leftovers()
    assert answers(node) == []
    before = len(node.calls)

    (node.bootstrap / "steps/run-smoke-test.sh").write_text(smoke)
    outcome = node.run("node_init.sh")
    assert outcome.exit_code == 0, outcome.output
    assert answers(node) == ["CONTINUE"]
    again = node.calls[before:]
    assert not any(call.startswith(("mkfs", "mdadm", "mount ", "python3 -m venv", "aws s3")) for call in again)


def test_ended_by_a_signal_it_abandons(tmp_path: Path) -> None:
    node = healthy(tmp_path)
    node.replace("steps/run-smoke-test.sh", f"touch {tmp_path}/reached\nsleep 3")
    running = subprocess.Popen(node.command("node_init.sh"), env=node.environment(), stderr=subprocess.DEVNULL)
    wait_for(tmp_path / "reached")
    running.send_signal(signal.SIGTERM)
    assert running.wait(timeout=120) == 143
    assert answers(node) == ["ABANDON"]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("autoscaling/target-lifecycle-state", "Terminated"),
        ("spot/instance-action", '{"action": "terminate", "time": "2999-01-01T00:00:00Z"}'),
    ],
)
def test_a_node_that_is_taken_away_waits_for_no_step(path: str, value: str, tmp_path: Path) -> None:
    """The group shrinks, or EC2 wants the machine, while a step runs that would take minutes."""
    node = healthy(tmp_path)
    node.replace("steps/run-smoke-test.sh", f"touch {tmp_path}/reached\nsleep 600")
    with LocalImds().running() as imds:
        settings = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": imds.endpoint, "GPUFLEET_IMDS_POLL_S": "0.2"}
        with (tmp_path / "output").open("wb") as output:
            running = subprocess.Popen(
                node.command("node_init.sh"), env=node.environment(settings), stdout=output, stderr=output
            )
        wait_for(tmp_path / "reached")
        imds.values[path] = value
        assert running.wait(timeout=120) == 1
    said = (tmp_path / "output").read_text()
    assert f"this node is taken away during run-smoke-test: {path}" in said
    assert answers(node) == ["ABANDON"]
    assert len(completed_terminations(node)) == 1
    assert not (node.state / "node-states").exists(), "nothing is wrong with this node"
    assert not any("sleep 600" in line for line in processes_of(node)), "the step goes on"
    assert "shutdown -h now" not in node.calls


def processes_of(node: Node) -> list[str]:
    """Command lines of this node's running processes."""
    mark = f"FAKE_STATE={node.state}".encode()
    commands = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (process / "environ").read_bytes().split(b"\0"):
                commands.append((process / "cmdline").read_text().replace("\0", " "))
    return commands


def test_heartbeats_end_with_the_run(tmp_path: Path) -> None:
    node = healthy(tmp_path)
    beats_so_far = 'grep -c record-lifecycle-action-heartbeat "$FAKE_CALLS"'
    node.replace("steps/check-health.sh", f"until (( $({beats_so_far}) >= 2 )); do sleep 0.05; done")
    assert node.run("node_init.sh", {"HOOK_HEARTBEAT_S": "0.1"}).exit_code == 0
    beats = [call for call in node.calls if "record-lifecycle-action-heartbeat" in call]
    assert len(beats) >= 2
    time.sleep(0.5)
    assert [call for call in node.calls if "record-lifecycle-action-heartbeat" in call] == beats


def test_heartbeats_outlive_a_metadata_service_that_does_not_answer(tmp_path: Path) -> None:
    """Without them the hook's timeout ends a node that is well."""
    answers = tmp_path / "case/input/answers"
    answers.mkdir(parents=True)
    (answers / "curl.sh").write_text('[[ -e $FAKE_STATE/answered ]] || { touch "$FAKE_STATE/answered"; exit 28; }\n')
    # Ends the endless heartbeats, at the first that names the node.
    (answers / "aws.sh").write_text('if [[ $* == *i-0123456789abcdef0* ]]; then kill "$PPID"; fi\n')
    node = Node(tmp_path, tmp_path / "case")
    assert node.run("steps/send-heartbeats.sh", {"HOOK_HEARTBEAT_S": "0.1"}).exit_code == -signal.SIGTERM
    assert sum("record-lifecycle-action-heartbeat" in call for call in node.calls) == 2


def test_heartbeats_do_not_keep_a_node_for_ever(tmp_path: Path) -> None:
    node = healthy(tmp_path)
    outcome = node.run("steps/send-heartbeats.sh", {"HOOK_HEARTBEAT_S": "0.1", "NODE_INIT_TIMEOUT_S": "1"})
    assert outcome.exit_code == 0


def test_two_runs_at_once_are_refused(tmp_path: Path) -> None:
    node = healthy(tmp_path)
    node.replace(
        "steps/check-health.sh", f"touch {tmp_path}/reached\nuntil [[ -e {tmp_path}/go-on ]]; do sleep 0.05; done"
    )
    first = subprocess.Popen(node.command("node_init.sh"), env=node.environment(), stderr=subprocess.DEVNULL)
    wait_for(tmp_path / "reached")
    second = node.run("node_init.sh")
    (tmp_path / "go-on").touch()
    assert second.exit_code == 1
    assert "another node_init.sh is running" in second.output
    assert first.wait(timeout=120) == 0
    assert answers(node) == ["CONTINUE"]


def test_a_machine_that_is_no_node_is_left_alone(tmp_path: Path) -> None:
    node = healthy(tmp_path)
    (node.root / "etc/gpufleet/node.env").unlink()
    outcome = node.run("node_init.sh")
    assert outcome.exit_code == 1
    assert "this is not a node of a fleet" in outcome.output
    assert not any(call.startswith(("shutdown", "aws")) for call in node.calls)


def test_a_node_reads_what_user_data_writes(tmp_path: Path) -> None:
    """infra quotes with shlex; the reader gives every value back exactly and runs none of it."""
    user_data = pytest.importorskip("infra.user_data")
    values = {
        "GPUFLEET_A": "",
        "GPUFLEET_B": "plain-1.5",
        "GPUFLEET_C": "train.py --name 'my run' --x \"y\"",
        "GPUFLEET_D": "it's $(touch /tmp/never) `id` \\ $HOME",
        "GPUFLEET_E": "'",
        "GPUFLEET_F": "''a''",
    }
    node = healthy(tmp_path)
    (node.root / "etc/gpufleet/node.env").write_text(user_data.environment_file(values))
    node.replace(
        "steps/show.sh",
        'source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"\n'
        + "".join(f'printf "%s\\n" "[${name}]"\n' for name in values),
    )
    assert node.run("steps/show.sh").output.splitlines() == [f"[{value}]" for value in values.values()]


def test_the_unit_file_keeps_the_interruption_contract() -> None:
    unit = (BOOTSTRAP / "gpufleet-train.service").read_text()
    for line in (
        "KillSignal=SIGTERM",
        "KillMode=mixed",
        "TimeoutStopSec=110",
        "Restart=on-failure",
        "StartLimitAction=poweroff",
        "OOMPolicy=continue",
        "LimitCORE=0:infinity",
        "EnvironmentFile=/etc/gpufleet/node.env",
        "EnvironmentFile=/etc/gpufleet/runtime.env",
        "ExecStart=/usr/bin/python3 /opt/gpufleet/bootstrap/agent",
        "WantedBy=multi-user.target",
    ):
        assert line in unit.splitlines()


def test_nodes_look_for_the_controllers_state_where_it_writes() -> None:
    naming = pytest.importorskip("infra.naming")
    assert f"{naming.Names.control_prefix}/{state.FILE}" == STATE_KEY


def test_unit_of_the_gpus_never_hurts_training_and_prints_what_is_read() -> None:
    unit = (BOOTSTRAP / "gpufleet-gpus.service").read_text().splitlines()
    for line in ("Restart=always", "StartLimitIntervalSec=0", "Nice=19", "MemoryMax=512M", "OOMScoreAdjust=1000"):
        assert line in unit
    script = (BOOTSTRAP / "steps/print-gpus.sh").read_text()
    assert "".join(re.findall(r"^fields\+?=(.*)$", script, re.MULTILINE)) == ",".join(FIELDS)
    config = json.loads((BOOTSTRAP / "cloudwatch-agent.json").read_text())
    sent = {one["file_path"] for one in config["logs"]["logs_collected"]["files"]["collect_list"]}
    for name in ("gpus", "train"):
        text = (BOOTSTRAP / f"gpufleet-{name}.service").read_text()
        assert f"StandardOutput=append:/var/log/gpufleet/{name}.log" in text and f"LOG_DIR/{name}.log" in sent


def test_no_version_is_latest() -> None:
    for script in (BOOTSTRAP / "versions.sh", *(BOOTSTRAP / "steps").glob("*.sh")):
        for line in script.read_text().splitlines():
            code = line.split("#", 1)[0]
            assert not re.search(r"latest(?!/(api|meta-data))", code), f"{script.name}: {line}"


def test_every_requirement_is_pinned_by_hash() -> None:
    lists = [list(read_pins((BOOTSTRAP / f"requirements-{name}.txt").read_text())) for name in ("node", "torch")]
    assert all(len(pins) > 20 for pins in lists)
    versions = {pin.name: pin.version for pins in lists for pin in pins}
    assert len(versions) == sum(map(len, lists)), "a package is in both lists"
    pins = (BOOTSTRAP / "versions.sh").read_text()
    assert f"TORCH_MIN={versions['torch']}" in pins
    assert f"TORCH_NCCL_MIN={versions['nvidia-nccl-cu13']}" in pins
    assert f"NCCL_PIN={versions['nvidia-nccl-cu13']}-" in pins
