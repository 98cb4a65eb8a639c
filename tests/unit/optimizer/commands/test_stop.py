from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from botocore.exceptions import ClientError

from optimizer.aws import clients
from tests.plans import sample_plan
from tests.unit.optimizer.commands.conftest import Gpufleet
from tests.unit.optimizer.deployed import Clock, DeployedStack


def test_stop_asks_the_controller_and_ends_stuck_nodes_itself(
    deployed: DeployedStack, gpufleet: Gpufleet, clock: Clock
) -> None:
    """No controller, and nodes that never complete their hooks: the whole command, to the end."""
    nodes = [node.instance_id for node in deployed.group.nodes]
    code, out, err = gpufleet("stop", *deployed.arguments)
    assert code == 0
    request = deployed.get("control/request.json")
    assert request["want"] == "stop" and request["by"].startswith("arn:aws:")
    assert deployed.group.nodes == ()
    # The nodes had the time that their plan's checkpoint takes, which is what their hook waits.
    assert clock.passed >= timedelta(seconds=sample_plan().terminate_timeout_s)
    assert all(node in err for node in nodes) and "steps after the last complete checkpoint are lost" in err
    assert f"gpufleet down --stack {deployed.names.stack}" in out


def test_no_wait_only_asks(deployed: DeployedStack, gpufleet: Gpufleet) -> None:
    code, out, _ = gpufleet("stop", *deployed.arguments, "--no-wait")
    assert code == 0 and f"gpufleet status --stack {deployed.names.stack}" in out
    assert len(deployed.group.nodes) == 2
    assert deployed.get("control/request.json")["want"] == "stop"


@pytest.mark.parametrize("more", [(), ("--no-wait",)])
def test_a_stack_without_its_bucket_is_ended_all_the_same(
    deployed: DeployedStack, gpufleet: Gpufleet, clock: Clock, more: tuple[str, ...]
) -> None:
    deployed.s3.delete_bucket(Bucket=deployed.names.bucket)
    code, _, err = gpufleet("stop", *deployed.arguments, *more)
    assert code == 0 and "no controller reads a request" in err
    assert deployed.group.nodes == ()
    assert gpufleet("resume", *deployed.arguments)[1] == "", "nobody was asked"


def test_a_request_that_cannot_be_written_ends_nothing(
    deployed: DeployedStack, gpufleet: Gpufleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller would start the nodes again."""

    class ReadOnly:
        def get_object(self, **given: Any) -> Any:
            return deployed.s3.get_object(**given)

        def put_object(self, **_: Any) -> None:
            raise ClientError({"Error": {"Code": "AccessDenied", "Message": "read only"}}, "PutObject")

    monkeypatch.setattr(clients, "s3", lambda region: ReadOnly())
    code, _, err = gpufleet("stop", *deployed.arguments)
    assert code == 1 and "the request cannot be written" in err and "read only" in err
    assert len(deployed.held("InService")) == 2


@pytest.mark.parametrize("code", ["KMS.DisabledException", "KMS.KMSInvalidStateException", "KMS.NotFoundException"])
def test_a_stack_whose_key_cannot_be_used_is_ended_all_the_same(
    deployed: DeployedStack, gpufleet: Gpufleet, clock: Clock, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    """Somebody disabled the key, or it waits for its deletion: no controller reads a state or a request."""

    class Sealed:
        def get_object(self, **_: Any) -> Any:
            raise ClientError({"Error": {"Code": code, "Message": "arn:aws:kms:... is pending deletion."}}, "GetObject")

        put_object = get_object

    monkeypatch.setattr(clients, "s3", lambda region: Sealed())
    status, _, err = gpufleet("stop", *deployed.arguments)
    assert status == 0 and "no controller reads a request" in err and "is pending deletion" in err
    assert deployed.group.nodes == ()


def test_ctrl_c_leaves_the_request(deployed: DeployedStack, gpufleet: Gpufleet, clock: Clock) -> None:
    def interrupt(passed: timedelta) -> None:
        raise KeyboardInterrupt

    clock.meanwhile = interrupt
    code, _, err = gpufleet("stop", *deployed.arguments)
    assert code == 1 and "the request to stop stands" in err
    assert deployed.get("control/request.json")["want"] == "stop"


def test_resume_asks_to_run_and_lets_the_group_grow_again(
    deployed: DeployedStack, gpufleet: Gpufleet, clock: Clock
) -> None:
    gpufleet("stop", *deployed.arguments)
    deployed.write_state(phase="stopped")
    code, out, err = gpufleet("resume", *deployed.arguments)
    assert (code, err) == (0, "") and "asked" in out
    assert deployed.get("control/request.json")["want"] == "run"
    (group,) = deployed.autoscaling.describe_auto_scaling_groups(AutoScalingGroupNames=[deployed.names.group])[
        "AutoScalingGroups"
    ]
    assert group["SuspendedProcesses"] == []


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (None, "the controller never ticked"),
        ({"updated_at": "2026-01-01T00:00:00Z"}, "the controller last ticked 2026-01-01"),
        ({"phase": "over-budget", "spent_usd": 2999.0}, "2,999.00 USD spent; first `pulumi config set"),
        ({"phase": "block-ended"}, "first a new plan: gpufleet stack set PLAN"),
    ],
)
def test_resume_says_what_keeps_the_fleet_at_zero(
    deployed: DeployedStack, gpufleet: Gpufleet, state: dict[str, Any] | None, says: str
) -> None:
    if state is not None:
        deployed.write_state(**state)
    code, _, err = gpufleet("resume", *deployed.arguments)
    assert code == 0 and says in err


def test_a_stack_that_is_not_deployed_cannot_be_resumed(deployed: DeployedStack, gpufleet: Gpufleet) -> None:
    deployed.autoscaling.delete_auto_scaling_group(AutoScalingGroupName=deployed.names.group, ForceDelete=True)
    code, _, err = gpufleet("resume", *deployed.arguments)
    assert code == 4 and "nothing to start" in err
