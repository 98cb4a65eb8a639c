"""The scripts of a Kubernetes node, on the pretended one of the other cases."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.bootstrap.node import BOOTSTRAP, HERE, Node

INSTANCE = "i-0123456789abcdef0"
# The metadata service and kubelet: an answer is a file under meta/, or $FAKE_STATE/kubelet.
CURL = r"""
case "$*" in
  *"--request PUT"*"/latest/api/token") echo -n IMDS-TOKEN-SECRET ;;
  *"/latest/meta-data/"*)
    [[ $(cat) == "X-aws-ec2-metadata-token: IMDS-TOKEN-SECRET" ]] || exit 22
    path=${*: -1}
    cat "$FAKE_CASE/meta/${path##*/latest/meta-data/}" 2>/dev/null || exit 22
    ;;
  *"/healthz") [[ ! -e $FAKE_CASE/kubelet-down ]] || exit 7 ;;
esac
exit 0
"""
# A container runs the agent for so many looks.
PGREP = r"""
left=$(cat "$FAKE_CASE/looks" 2>/dev/null || echo 0)
echo "$((left - 1))" >"$FAKE_CASE/looks"
((left > 0)) || exit 1
exit 0
"""
SYSCTL = r"""
if [[ $1 == --values ]]; then cat "$FAKE_STATE/hugepages" 2>/dev/null || echo 0; exit 0; fi
last=${*: -1}
echo "${last##*=}" >"$FAKE_STATE/hugepages"
exit 0
"""
FAST = {"NOTICE_POLL_S": "0.05", "LEAVE_POLL_S": "0.05", "CHECK_ATTEMPTS": "1", "GPUFLEET_SCALE_IN_LIMIT_S": "300"}


class KubernetesNode(Node):
    """A healthy p4d.24xlarge that boots Amazon's EKS image."""

    def __init__(self, folder: Path, answers: Mapping[str, str] | None = None) -> None:
        self.case = folder / "case"
        (self.case / "input/answers").mkdir(parents=True)
        (self.case / "meta").mkdir()
        for tool, answer in {"curl": CURL, "pgrep": PGREP, "sysctl": SYSCTL, **(answers or {})}.items():
            (self.case / f"input/answers/{tool}.sh").write_text(f"# shellcheck shell=bash\n{answer}")
        (self.case / "meta/instance-id").write_text(INSTANCE)
        super().__init__(folder / "node", self.case)
        for tool in ("pgrep", "sysctl"):
            (self._bin / tool).symlink_to(HERE / "fake.sh")
        for card in range(4):
            (self.root / f"sys/class/infiniband/rdmap{card}").mkdir(parents=True)
        self.run_dir = self.root / "run/gpufleet"
        self.run_dir.mkdir(parents=True)

    def _copy_bootstrap(self) -> None:
        super()._copy_bootstrap()
        shutil.copytree(BOOTSTRAP / "kubernetes", self.bootstrap / "kubernetes")

    def meta(self, path: str, value: str) -> None:
        """Set a value of the metadata service."""
        file = self.case / "meta" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(value)

    def trains(self, looks: int) -> None:
        """A container runs the agent the next ``looks`` times somebody looks."""
        (self.case / "looks").write_text(str(looks))

    def count(self, beginning: str) -> int:
        return sum(call.startswith(beginning) for call in self.calls)

    def hook(self, result: str) -> list[str]:
        return [call for call in self.calls if "complete-lifecycle-action" in call and call.endswith(result)]


def test_a_healthy_node_reserves_pages_and_leaves_its_service_behind(tmp_path: Path) -> None:
    node = KubernetesNode(tmp_path)
    done = node.run("kubernetes/node_init.sh", FAST)
    assert done.exit_code == 0, done.output
    assert (node.state / "hugepages").read_text().strip() == "5128"
    # cloud-init, and kubelet after it, must not wait for a service that waits for kubelet.
    assert "systemctl enable --now --no-block gpufleet-node.service" in node.calls
    assert (node.root / "etc/systemd/system/gpufleet-node.service").is_file()
    # The launch hook stays open until kubelet is healthy.
    assert not node.hook("CONTINUE") and not node.hook("ABANDON")
    assert node.count("shutdown") == 0


@pytest.mark.parametrize(
    ("broken", "tool", "answer"),
    [
        (
            "check-gpus",
            "nvidia-smi",
            'if [[ $* == *query-gpu=name* ]]; then echo "NVIDIA A100-SXM4-40GB"; exit 0; fi\n',
        ),
        ("check-xid-errors", "dmesg", 'echo "NVRM: Xid (PCI:0000:10:1c): 79, GPU has fallen off the bus."; exit 0\n'),
        ("reserve-huge-pages", "sysctl", "if [[ $1 == --values ]]; then echo 100; fi; exit 0\n"),
    ],
)
def test_an_unhealthy_node_never_starts_kubelet(tmp_path: Path, broken: str, tool: str, answer: str) -> None:
    node = KubernetesNode(tmp_path, {tool: answer})
    done = node.run("kubernetes/node_init.sh", FAST)
    assert done.exit_code != 0
    assert f"FAIL node set-up failed in {broken}" in done.output
    assert len(node.hook("ABANDON")) == 1
    assert node.count("shutdown -h now") == 1
    enabled = [call for call in node.calls if call.startswith("systemctl enable")]
    assert enabled == ["systemctl enable --now gpufleet-lease.timer"]


def test_a_missing_efa_device_is_found_without_libfabric(tmp_path: Path) -> None:
    node = KubernetesNode(tmp_path)
    (node.root / "sys/class/infiniband/rdmap3").rmdir()
    done = node.run("kubernetes/node_init.sh", FAST)
    assert done.exit_code != 0
    assert "3 EFA devices are there, the plan counts on 4" in done.output
    assert node.count("fi_info") == 0


def test_a_node_that_is_scaled_in_lets_the_container_save_and_completes_both_hooks(tmp_path: Path) -> None:
    node = KubernetesNode(tmp_path)
    node.meta("autoscaling/target-lifecycle-state", "Terminated")
    (node.run_dir / "state").write_text("training 0\n")
    node.trains(4)
    began = time.time()
    done = node.run("kubernetes/serve.sh", FAST)
    assert done.exit_code == 0, done.output
    save_by, why = (node.run_dir / "drain").read_text().strip().split(" ", 1)
    assert 290 <= int(save_by) - began <= 400
    assert why == "autoscaling/target-lifecycle-state (Terminated)"
    launched, left = node.hook("CONTINUE")
    assert "gpufleet-demo-launch" in launched and "gpufleet-demo-terminate" in left and INSTANCE in left
    assert any("record-lifecycle-action-heartbeat" in call for call in node.calls)
    # The agent's state reaches the controller in the node's name.
    own = f"control/nodes/arn:aws:ec2:us-east-1:123456789012:instance/{INSTANCE}.json"
    assert any(f"put-object --bucket gpufleet-demo-bucket --key {own}" in call for call in node.calls)


def test_the_pods_metrics_learn_the_nodes_id(tmp_path: Path) -> None:
    node = KubernetesNode(tmp_path)
    node.meta("autoscaling/target-lifecycle-state", "Terminated")
    assert node.run("kubernetes/serve.sh", FAST).exit_code == 0
    assert (node.run_dir / "instance-id").read_text() == f"{INSTANCE}\n"


def test_an_idle_node_that_is_scaled_in_waits_for_nobody(tmp_path: Path) -> None:
    node = KubernetesNode(tmp_path)
    node.meta("autoscaling/target-lifecycle-state", "Terminated")
    assert node.run("kubernetes/serve.sh", FAST).exit_code == 0
    assert not (node.run_dir / "drain").exists()
    assert len(node.hook("CONTINUE")) == 2


def test_a_spot_notice_leaves_the_time_there_is(tmp_path: Path) -> None:
    node = KubernetesNode(tmp_path)
    at = int(time.time()) + 120
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
    node.meta("spot/instance-action", f'{{"action": "terminate", "time": "{when}"}}')
    node.trains(3)
    assert node.run("kubernetes/serve.sh", FAST).exit_code == 0
    assert (node.run_dir / "drain").read_text() == f"{at - 40} spot/instance-action (terminate at {when})\n"


def test_a_rebalance_notice_asks_for_a_checkpoint_and_no_more(tmp_path: Path) -> None:
    node = KubernetesNode(tmp_path)
    node.meta("events/recommendations/rebalance", '{"noticeTime": "2026-11-21T16:00:00Z"}')
    node.meta("autoscaling/target-lifecycle-state", "Terminated")
    node.run("kubernetes/serve.sh", FAST)
    assert "rebalance (2026-11-21T16:00:00Z)" in (node.run_dir / "drain.save").read_text()
    assert not (node.run_dir / "drain").exists()


def test_a_node_whose_kubelet_does_not_come_is_replaced(tmp_path: Path) -> None:
    node = KubernetesNode(tmp_path)
    (node.case / "kubelet-down").touch()
    done = node.run("kubernetes/serve.sh", {**FAST, "KUBELET_LIMIT_S": "0"})
    assert done.exit_code == 1
    assert len(node.hook("ABANDON")) == 1 and not node.hook("CONTINUE")
    assert node.count("shutdown -h now") == 1


def test_a_node_nobody_uses_says_so_instead_of_being_paid_for_ever(tmp_path: Path) -> None:
    """The scaling-in comes only when the controller has been told, as in life."""
    aws = r"""
if [[ $* == *put-object* ]]; then
  mkdir -p "$FAKE_CASE/meta/autoscaling"
  echo -n Terminated >"$FAKE_CASE/meta/autoscaling/target-lifecycle-state"
  cat "$(sed 's/.*--body \([^ ]*\).*/\1/' <<<"$*")" >"$FAKE_CASE/told"
fi
exit 0
"""
    node = KubernetesNode(tmp_path, {"aws": aws})
    done = node.run("kubernetes/serve.sh", {**FAST, "IDLE_LIMIT_S": "0"})
    assert done.exit_code == 0, done.output
    assert "nothing has trained here" in done.output
    told = (node.case / "told").read_text()
    assert '"state": "gave-up", "exit_status": 1, "step": "idle"' in told


def test_why_a_command_gave_up_outlives_the_node(tmp_path: Path) -> None:
    aws = r"""
if [[ $* == *put-object* ]]; then
  mkdir -p "$FAKE_CASE/meta/autoscaling"
  echo -n Terminated >"$FAKE_CASE/meta/autoscaling/target-lifecycle-state"
fi
[[ $* == *put-log-events* ]] || exit 0
"""
    node = KubernetesNode(tmp_path, {"aws": aws})
    (node.run_dir / "state").write_text("gave-up 1\n")
    pods = node.root / "var/log/pods"
    for number, (name, text) in enumerate(
        [
            ("kube-system_train-x_1/train", "no"),
            ("gpufleet_train-a_2/metrics", "no"),
            ("gpufleet_train-a_2/train", "why"),
        ]
    ):
        (pods / name).mkdir(parents=True)
        (pods / name / "0.log").write_text(f"stderr F {text}\n")
        os.utime(pods / name / "0.log", (100 - number, 100 - number))
    assert node.run("kubernetes/serve.sh", FAST).exit_code == 0
    # Before the controller is told, as it ends the node then.
    sent, told = (next(i for i, call in enumerate(node.calls) if text in call) for text in ("put-log-ev", "put-object"))
    assert sent < told
    assert f"--log-stream-name train/{INSTANCE}" in node.calls[sent]
    assert "stderr F why" in (node.state / "log-events.json").read_text()
    assert node.count("aws logs put-log-events") == 1


def test_a_broken_gpu_is_told_and_the_node_replaced(tmp_path: Path) -> None:
    xid = 'echo "NVRM: Xid (PCI:0000:10:1c): 79, GPU has fallen off the bus."; exit 0\n'
    aws = r"""
if [[ $* == *set-instance-health* ]]; then
  mkdir -p "$FAKE_CASE/meta/autoscaling"
  echo -n Terminated >"$FAKE_CASE/meta/autoscaling/target-lifecycle-state"
fi
exit 0
"""
    node = KubernetesNode(tmp_path, {"dmesg": xid, "aws": aws})
    assert node.run("kubernetes/serve.sh", FAST).exit_code == 0
    assert sum("set-instance-health" in call and "Unhealthy" in call for call in node.calls) == 1


def test_a_link_in_the_shared_folder_is_replaced_and_not_followed(tmp_path: Path) -> None:
    node = KubernetesNode(tmp_path)
    secret = tmp_path / "host-file"
    secret.write_text("untouched")
    (node.run_dir / "drain").symlink_to(secret)
    node.meta("autoscaling/target-lifecycle-state", "Terminated")
    node.trains(3)
    assert node.run("kubernetes/serve.sh", FAST).exit_code == 0
    assert secret.read_text() == "untouched"
    assert not (node.run_dir / "drain").is_symlink()
