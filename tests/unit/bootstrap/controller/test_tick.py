"""Ticks against an emulated AWS: reads, writes, calls, and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import ClientError
from moto.ec2.models import ec2_backends
from moto.ec2.models.instances import StateReason
from moto.s3.models import s3_backends

from bootstrap.contract.codec import FormatError, to_json
from bootstrap.contract.settings import VARIABLE, FirstGroup
from bootstrap.contract.shared_ceiling import SharedCeiling, read_shared_spend
from bootstrap.contract.state import NewerStateError
from bootstrap.contract.timings import LEASE, LEASE_ACTS
from bootstrap.controller import bucket
from bootstrap.controller.bucket import ConflictError, StateError
from bootstrap.controller.gather import HEALTH, gather
from bootstrap.controller.handler import TickError, handler, tick
from infra.controller import TIMEOUT_S
from infra.policies.resources import EVENTS
from tests.engine.moto_extension.auto_scaling_launches import rooms
from tests.unit.bootstrap.controller.conftest import ACCOUNT, REGION, Stack, complete, make_group
from tests.unit.bootstrap.controller.world import PLACES, rotating, union

# In UTC this is in the year 0, which no datetime holds.
FIRST_HOUR = "0001-01-01T00:00:00+14:00"


def events(output: str, kind: str) -> list[dict[str, Any]]:
    """The log lines of one kind."""
    return [line for line in map(json.loads, output.splitlines()) if line["event"] == kind]


def watch(monkeypatch: pytest.MonkeyPatch, client: Any, operation: str) -> list[dict[str, Any]]:
    """Return the list that the arguments of every later call go to."""
    sent: list[dict[str, Any]] = []
    call = getattr(client, operation)

    def watched(**arguments: Any) -> Any:
        sent.append(arguments)
        return call(**arguments)

    monkeypatch.setattr(client, operation, watched)
    return sent


# S3's answer for a deleted object; moto's 404 lacks the header:
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/DeleteMarker.html
DELETED = {"x-amz-delete-marker": "true"}


def refuse(
    monkeypatch: pytest.MonkeyPatch,
    client: Any,
    operation: str,
    code: str = "Throttling",
    *,
    message: str = "no",
    bucket: str = "",
    headers: dict[str, str] | None = None,
    status: int = 400,
) -> None:
    """AWS answers one operation, or that on one bucket, with an error from now on."""
    own = getattr(client, operation)

    def call(**asked: Any) -> Any:
        if bucket and asked["Bucket"] != bucket:
            return own(**asked)
        answered = {"HTTPHeaders": headers or {}, "HTTPStatusCode": status}
        error: Any = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": answered}
        raise ClientError(error, operation)

    monkeypatch.setattr(client, operation, call)


def suspend(monkeypatch: pytest.MonkeyPatch, client: Any, **reasons: str) -> None:
    """Let AWS describe groups with suspended processes from now on."""
    describe = client.describe_auto_scaling_groups

    def described(**arguments: Any) -> Any:
        answer = describe(**arguments)
        for group in answer["AutoScalingGroups"]:
            group["SuspendedProcesses"] = [
                {"ProcessName": name, "SuspensionReason": reason} for name, reason in reasons.items()
            ]
        return answer

    monkeypatch.setattr(client, "describe_auto_scaling_groups", described)


def test_launches_that_aws_has_suspended_go_on(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Auto Scaling does it after a day without capacity, and no node would come again."""
    resumed = watch(monkeypatch, stack.clients.autoscaling, "resume_processes")
    ours, awss = "User suspended at 2026-11-26T10:00:00Z", "Administratively suspended"
    suspend(monkeypatch, stack.clients.autoscaling, Launch=awss, ReplaceUnhealthy=awss, AZRebalance=awss)
    assert stack.tick().phase == "starting"
    assert resumed == [{"AutoScalingGroupName": stack.config.group, "ScalingProcesses": ["Launch", "ReplaceUnhealthy"]}]
    # A person's suspension stays, and so does any of a run that has stopped.
    suspend(monkeypatch, stack.clients.autoscaling, Launch=ours, AZRebalance=ours)
    stack.tick()
    suspend(monkeypatch, stack.clients.autoscaling, Launch=awss)
    stack.ask("stop")
    stack.tick()
    assert len(resumed) == 1


def test_ends_that_a_person_has_suspended_go_on_where_no_node_may_run(stack: Stack) -> None:
    """A size of 0 would end none, beyond the ceiling."""
    client: Any = stack.clients.autoscaling

    def suspended() -> list[str]:
        (group,) = client.describe_auto_scaling_groups(AutoScalingGroupNames=[stack.config.group])["AutoScalingGroups"]
        return [process["ProcessName"] for process in group["SuspendedProcesses"]]

    stack.trained()
    client.suspend_processes(AutoScalingGroupName=stack.config.group, ScalingProcesses=["Terminate", "HealthCheck"])
    stack.tick()
    assert set(suspended()) == {"Terminate", "HealthCheck"}
    stack.ask("stop")
    stack.tick()
    assert suspended() == ["HealthCheck"]


def test_a_gang_is_started_metered_and_ended_when_done(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    assert stack.tick().phase == "starting"
    assert stack.group.desired_capacity == 3
    nodes = stack.members("Pending:Wait")
    assert len(nodes) == 3
    stack.complete(stack.config.launch_hook, "CONTINUE", *nodes)
    assert stack.tick().phase == "running"
    written = stack.read()
    assert written["nodes"] == {"wanted": 3, "in_service": 3, "pending": 0, "terminating": 0}
    assert set(written["instances"]) == set(nodes)
    assert written["usd_per_hour"] == 90.0
    assert {metric["lifecycle"] for metric in written["instances"].values()} == {"on-demand"}
    assert stack.metrics()["NodesInService"] == 3

    state = stack.tick(60)
    assert state.spent_usd == pytest.approx(90 * 61 / 60, abs=2)
    for node in nodes:
        stack.say(node, "done")
    state = stack.tick()
    assert (state.phase, state.after) == ("draining", "done")
    assert stack.group.desired_capacity == 0
    assert sorted(stack.members("Terminating:Wait")) == sorted(nodes)
    stack.complete(stack.config.terminate_hook, "CONTINUE", *nodes)
    state = stack.tick()
    assert (state.phase, state.usd_per_hour) == ("done", 0)
    assert all(instance.ended_at for instance in state.instances.values())
    assert stack.tick(600).spent_usd == state.spent_usd
    phases = [line["phase"] for line in events(capsys.readouterr().out, "phase")]
    assert phases == ["starting", "running", "draining", "done"]


def test_a_done_run_ends_however_many_nodes_reported_before(stack: Stack) -> None:
    """Months of reclaims leave a report of each node; S3 lists them by instance id, in no order of time."""
    nodes = stack.trained()
    folder = f"control/nodes/arn:aws:ec2:{REGION}:{ACCOUNT}:instance"
    store = s3_backends[ACCOUNT]["aws"]
    for number in range(10_001):
        store.put_object(stack.config.bucket, f"{folder}/i-{number:017x}.json", b"{}")
    assert min(nodes) > f"i-{10_001:017x}"
    for node in nodes:
        stack.say(node, "done")
    assert stack.tick().phase == "draining"


@pytest.mark.parametrize("run_id", ["0123456789ab", "ffffffffffff"])
def test_reports_of_before_that_no_tick_had_time_for_neither_end_a_new_start_nor_hide_its_reports(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, run_id: str
) -> None:
    monkeypatch.setattr("bootstrap.controller.bucket.MOST_REPORTS", 1)
    for node in stack.trained():
        stack.say(node, "gave-up")
    assert stack.tick().after == "failed"
    stack.config = replace(stack.config, run_id=run_id)
    stack.ask("run")
    for _ in range(6):
        stack.complete(stack.config.terminate_hook, "CONTINUE", *stack.members("Terminating:Wait"))
        stack.complete(stack.config.launch_hook, "CONTINUE", *stack.members("Pending:Wait"))
        stack.tick()
    for node in stack.members("InService"):
        stack.say(node, "done")
    states = [stack.tick() for _ in range(3)]
    assert [known.report for known in states[-1].instances.values()].count("done") == 3


def test_a_node_that_a_person_put_into_standby_is_replaced_once_and_ended_too(stack: Stack) -> None:
    """It counts for no size, so that a size of 0 leaves it there, paid, for ever."""
    nodes = stack.trained()
    stack.clients.autoscaling.enter_standby(
        AutoScalingGroupName=stack.config.group, InstanceIds=[nodes[0]], ShouldDecrementDesiredCapacity=True
    )
    for _ in range(10):
        stack.tick()
    assert (len(stack.members()), len(stack.group.instance_states), stack.group.desired_capacity) == (4, 4, 3)
    stack.ask("stop")
    stack.tick()
    for _ in range(9):
        stack.complete(stack.config.terminate_hook, "CONTINUE", *stack.members("Terminating:Wait"))
        state = stack.tick()
    assert (stack.members(), state.phase) == ([], "stopped")


def die(instance_id: str) -> None:
    """EC2 ends the instance; its group is not told, as moto's is."""
    state = ec2_backends[ACCOUNT][REGION].get_instance(instance_id)._state
    state.name, state.code = "terminated", 48


def test_a_node_that_died_in_its_launch_hook_is_replaced_at_once(stack: Stack) -> None:
    """The hook would hold it for half an hour, and Auto Scaling looks at no node before it is in service."""
    stack.tick()
    first, *others = stack.members("Pending:Wait")
    die(first)
    stack.tick()
    stack.tick()
    members = stack.members("Pending:Wait")
    assert (len(members), set(members) & {first, *others}) == (3, set(others))


def test_a_node_that_died_in_its_terminate_hook_holds_up_no_drain(stack: Stack) -> None:
    nodes = stack.trained()
    stack.ask("stop")
    stack.tick()
    die(nodes[0])
    stack.tick()
    assert sorted(stack.members("Terminating:Wait")) == sorted(nodes[1:])
    # The group still has the others, too.
    for node in nodes[1:]:
        die(node)
    assert stack.tick().phase == "stopped"


def test_a_node_that_never_completes_its_hook_is_ended_in_time(stack: Stack) -> None:
    nodes = stack.trained()
    stack.ask("stop")
    stack.tick()
    for _ in range(5):
        assert stack.tick().phase == "draining"
    # The first tick that sees them wait, and five minutes: then they are ended, and the next one sees it.
    stack.tick()
    assert stack.members() == []
    assert stack.tick().phase == "stopped"
    reservations = stack.clients.ec2.describe_instances(InstanceIds=nodes)["Reservations"]
    assert {node["State"]["Name"] for entry in reservations for node in entry["Instances"]} == {"terminated"}
    stack.ask("run")
    assert stack.tick().phase == "starting"


def test_a_node_that_holds_on_is_ended_through_its_group(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = stack.trained()
    stack.ask("stop")
    # Stands for nodes that protect themselves again between two ticks.
    monkeypatch.setattr(stack.clients.autoscaling, "set_instance_protection", lambda **given: None)
    for _ in range(5):
        stack.tick()
    ended = [
        line["instance_id"] for line in events(capsys.readouterr().out, "action") if line["action"] == "EndStaying"
    ]
    assert set(ended) == set(nodes)
    assert all(instance.lifecycle_state != "InService" for instance in stack.group.instance_states)


@pytest.mark.parametrize("reclaim", EVENTS["reservation-interruption"]["detail-type"])
def test_maintenance_and_a_reservation_s_reclaim_end_the_node_in_time(stack: Stack, reclaim: str) -> None:
    """https://docs.aws.amazon.com/health/latest/ug/aws-health-events-eventbridge-schema.html"""
    first, second, third = stack.trained()
    later = (stack.now + timedelta(hours=1)).strftime("%a, %d %b %Y %H:%M:%S GMT")
    for node, status in ((first, "upcoming"), (second, "closed")):
        entities = [{"entityValue": node}, {"entityValue": "i-0123456789abcdef0"}]
        stack.send(HEALTH, "", statusCode=status, startTime=later, affectedEntities=entities)
    soon = (stack.now + timedelta(minutes=2)).strftime("%Y-%m-%dT%H:%M:%SZ")
    stack.send(reclaim, third, **{"instance-action": "terminate", "instance-termination-time": soon})
    state = stack.tick()
    assert [state.instances[node].interrupted for node in (first, second, third)] == [False, False, True]
    assert sorted(stack.members("Terminating:Wait")) == sorted([first, third])


def test_notices_are_counted_for_own_nodes_and_deleted(stack: Stack) -> None:
    nodes = stack.trained()
    stack.send(EVENTS["spot-interruption"]["detail-type"][0], nodes[0])
    stack.send(EVENTS["spot-interruption"]["detail-type"][0], "i-0123456789abcdef0")
    stack.send("EC2 Instance State-change Notification", nodes[1])
    stack.clients.sqs.send_message(QueueUrl=stack.config.queue_url, MessageBody="hello")
    state = stack.tick()
    assert state.interruptions == 1
    assert state.instances[nodes[0]].interrupted
    attributes = stack.clients.sqs.get_queue_attributes(
        QueueUrl=stack.config.queue_url,
        AttributeNames=["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"],
    )
    assert set(attributes["Attributes"].values()) == {"0"}
    assert stack.metrics()["Interruptions"] == 1
    # The alarms sum over time.
    assert stack.tick().interruptions == 1
    assert stack.metrics()["Interruptions"] == 0


def test_nodes_that_ec2_ends_at_their_launch_are_told_from_failed_tests(stack: Stack) -> None:
    message = "Client.InternalError: Client error on launch"
    state = stack.tick()
    for _ in range(2):
        for node in stack.members("Pending:Wait"):
            instance = stack.group.ec2_backend.get_instance(node)
            instance.terminate()
            instance.state_reason = StateReason(message, "Client.InternalError")
        stack.group.instance_states.clear()
        stack.group.set_desired_capacity(3)
        state = stack.tick()
    assert (state.phase, state.after, state.unfit_nodes) == ("draining", "unfit", 6)
    assert f"failed launch ({message})" in state.reason and "node-init" not in state.reason


@pytest.mark.parametrize("room", [0, 2])
def test_a_part_of_a_gang_is_given_back_in_the_tick_that_asked_for_it(
    stack: Stack, room: int, capsys: pytest.CaptureFixture[str]
) -> None:
    rooms(stack.group)["nodes"] = room
    state = stack.tick()
    assert (state.phase, stack.group.desired_capacity, stack.members("Pending:Wait")) == ("waiting", 0, [])
    assert state.last_failure == "InsufficientInstanceCapacity: There is no capacity."
    assert state.failed_launches == stack.metrics()["FailedLaunches"] == 1
    assert stack.read()["answers"]["spot p4d az1"]["answer"] == state.last_failure
    (told,) = events(capsys.readouterr().out, "launch")
    assert (told["nodes"], len(told["ids"]), told["code"]) == (3, room, "InsufficientInstanceCapacity")
    stack.complete(stack.config.terminate_hook, "CONTINUE", *stack.members("Terminating:Wait"))
    rooms(stack.group)["nodes"] = 3
    assert stack.tick(5).phase == "starting"
    stack.complete(stack.config.launch_hook, "CONTINUE", *stack.members("Pending:Wait"))
    state = stack.tick()
    assert (state.phase, state.unfit_nodes, len(state.instances)) == ("running", 0, 3 + room)
    assert stack.metrics()["FailedLaunches"] == 0


def test_refused_spot_nodes_bill_no_node_on_demand_beside_them(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    base = FirstGroup(number=2, nodes=1, purchase="on-demand", usd_per_hour=30.0)
    (name, own), *_ = stack.config.places.items()
    stack.config = replace(stack.config, places={name: replace(own, first=base)})
    make_group(stack.clients, stack.config, beside := f"{stack.config.group}-2")
    rooms(stack.group)["nodes"] = 0
    sent = watch(monkeypatch, stack.clients.launching, "launch_instances")
    assert stack.tick().phase == "waiting"
    asked = [(call["AutoScalingGroupName"], call["RequestedCapacity"]) for call in sent]
    assert asked == [(stack.config.group, 2)] and stack.members(group=beside) == []
    rooms(stack.group)["nodes"] = 3
    assert stack.tick(5).phase == "starting"
    assert (len(stack.members()), len(stack.members(group=beside))) == (2, 1)


def test_a_node_of_a_reservation_costs_its_price_alive_and_ended(stack: Stack) -> None:
    (name, own), *_ = stack.config.places.items()
    stack.config = replace(stack.config, places={name: replace(own, first=union().owned)})
    make_group(stack.clients, stack.config, f"{stack.config.group}-2")
    rooms(stack.group)["nodes"] = 0
    stack.tick()
    assert [one.usd_per_hour for one in stack.tick().instances.values()] == [0.5, 0.5]


def make_team(stack: Stack, usd: float) -> SharedCeiling:
    """A versioned bucket with a shared ceiling, which the stack is under."""
    stack.clients.s3.create_bucket(Bucket="team")
    stack.clients.s3.put_bucket_versioning(Bucket="team", VersioningConfiguration={"Status": "Enabled"})
    shared = SharedCeiling(bucket="team", key="budgets/team.json", usd=usd)
    stack.config = replace(stack.config, shared=shared)
    return shared


def test_two_stacks_write_their_rows_of_a_shared_ceiling_over_what_they_read(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = make_team(stack, 25.0)
    config = replace(stack.config, stack="other", group="gpufleet-other-nodes", control_prefix="other")
    make_group(stack.clients, config, config.group)
    other = replace(stack, config=config)
    load_rows, between = bucket.load_rows, [other]

    def slow(*args: Any) -> Any:
        seen = load_rows(*args)
        if between:
            # Ten minutes of one gang's drain cost 13.50 USD, so the ceiling pays one start.
            assert between.pop().tick().phase == "starting"
        return seen

    monkeypatch.setattr("bootstrap.controller.bucket.load_rows", slow)
    state = stack.tick()
    assert (state.phase, stack.members(), len(other.members())) == ("over-budget", [], 3)
    failed = [event for event in events(capsys.readouterr().out, "failed") if event["action"] == "row"]
    assert len(failed) == 1 and "was written by another tick" in failed[0]["reason"]
    body = stack.clients.s3.get_object(Bucket="team", Key="budgets/team.json")["Body"].read().decode()
    rows = read_shared_spend(body, "the rows").rows
    assert sorted(row.usd_per_hour for row in rows.values()) == [0.0, 90.0]
    # No row, no node, and the state says why; it ages, so that the lease ends nodes that the other stacks do not count.
    stack.config = replace(stack.config, shared=replace(shared, usd=500.0))
    stack.now += timedelta(minutes=1)
    refuse(monkeypatch, stack.clients.s3, "put_object", "AccessDenied")
    with pytest.raises(TickError, match="no node was asked for"):
        stack.tick()
    kept, _ = bucket.load_state(stack.clients, stack.config)
    assert stack.members() == [] and kept and kept.updated_at == state.updated_at


def test_a_missing_object_of_rows_is_begun_and_one_that_cannot_be_read_stops_all(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3 = stack.clients.s3
    make_team(stack, 500.0)
    assert stack.tick().phase == "starting"
    assert len(stack.members()) == 3
    s3.put_object(Bucket="team", Key="budgets/team.json", Body=b"[]")
    with pytest.raises(FormatError, match=r"s3://team/budgets/team.json is '\[\]', and must be an object"):
        stack.tick()
    # The rows of other stacks would be forgotten until their next ticks, and those of destroyed ones for good.
    refuse(monkeypatch, s3, "get_object", "NoSuchKey", bucket="team", headers=DELETED)
    with pytest.raises(FormatError, match=r"s3://team/budgets/team.json was deleted: bring an earlier version back"):
        stack.tick()


@pytest.mark.parametrize("operation", ["get_object", "put_object"])
def test_a_shared_ceiling_that_s3_refuses_starts_no_node_and_status_says_why(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    """S3 refuses where the bucket's key is not granted, on a stack's first tick and later."""
    make_team(stack, 500.0)
    s3, denied = stack.clients.s3, "not authorized to perform: kms:Decrypt"
    with monkeypatch.context() as patch:
        refuse(patch, s3, operation, "AccessDenied", message=denied, bucket="team")
        for _ in range(2):
            with pytest.raises((TickError, ClientError), match="kms:Decrypt"):
                stack.tick()
            said = stack.read()["reason"]
            assert said.startswith("gpufleet:sharedCeiling: ") and denied in said
    assert stack.members() == []
    assert stack.tick().phase == "starting"
    # A node's lease must not be renewed.
    written = stack.read_text()
    refuse(monkeypatch, s3, operation, "AccessDenied", message=denied, bucket="team")
    with pytest.raises((TickError, ClientError)):
        stack.tick()
    assert stack.group.desired_capacity == 3 and stack.read_text() == written
    # Nodes end, also where the plan has another size.
    stack.config = replace(stack.config, node_count=5)
    stack.ask("stop")
    with pytest.raises((TickError, ClientError)):
        stack.tick()
    assert (stack.group.desired_capacity == 0) is (operation == "put_object")


def test_a_run_that_ended_keeps_its_reason_until_a_person_asks_it_to_go_on(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack.ask("stop")
    stack.tick()
    stopped = stack.read_text()
    stack.config = replace(stack.config, shared=SharedCeiling(bucket="nowhere", key="team.json", usd=500.0))
    for want, says in (("stop", "asked to stop"), ("run", "gpufleet:sharedCeiling: ")):
        stack.ask(want)
        with pytest.raises(ClientError, match="NoSuchBucket"):
            stack.tick()
        assert says in stack.read()["reason"] and (stack.read_text() == stopped) is (want == "stop")
    make_team(stack, 500.0)
    assert stack.tick().phase == "starting"


def test_a_bucket_without_versions_holds_no_rows_as_nobody_would_see_them_deleted(stack: Stack) -> None:
    stack.clients.s3.create_bucket(Bucket="team")
    stack.config = replace(stack.config, shared=SharedCeiling(bucket="team", key="team.json", usd=500.0))
    with pytest.raises(FormatError, match="keeps no versions"):
        stack.tick()
    assert stack.members() == [] and "aws s3api put-bucket-versioning --bucket team" in stack.read()["reason"]


@pytest.mark.parametrize(("code", "status"), [("IdempotentCallInProgress", 400), ("ResourceContention", 500)])
def test_a_launch_without_an_answer_is_repeated_with_its_token(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, code: str, status: int
) -> None:
    """The tick died, or AWS was late: nodes that came are found by the same request."""
    refuse(monkeypatch, stack.clients.launching, "launch_instances", code, status=status)
    first = stack.tick()
    assert first.launch and first.phase == "starting"
    monkeypatch.undo()
    sent = watch(monkeypatch, stack.clients.launching, "launch_instances")
    assert stack.tick().launch is None
    (call,) = sent
    assert call["ClientToken"].startswith(f"{first.launch.asked_at.timestamp():.0f}-{stack.config.group}")
    assert (call["RequestedCapacity"], call["RetryStrategy"]) == (3, "none")
    assert len(stack.members()) == 3


def test_a_lack_of_capacity_is_an_answer_though_ec2_calls_it_a_servers_error(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, stack.clients.launching, "launch_instances", "InsufficientInstanceCapacity", status=500)
    state = stack.tick()
    assert (state.launch, state.failed_launches) == (None, 1)
    assert "InsufficientInstanceCapacity" in state.last_failure


def test_calls_end_before_the_function_does(stack: Stack) -> None:
    config: Any = stack.clients.ec2.meta.config
    longest_s = config.retries["total_max_attempts"] * (config.connect_timeout + config.read_timeout)
    assert longest_s <= TIMEOUT_S - 20, "botocore's waits between attempts, and the rest of the tick"


def test_two_ticks_at_once_lose_nothing(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    stack.trained()
    other: list[Any] = []

    def slow(*args: Any) -> Any:
        gathered = gather(*args)
        if not other:
            other.append(None)
            other[0] = tick(stack.clients, stack.config, stack.now + timedelta(seconds=30))
        return gathered

    monkeypatch.setattr("bootstrap.controller.handler.gather", slow)
    stack.ask("stop")
    calls: list[Any] = []
    monkeypatch.setattr("bootstrap.controller.handler.carry_out", lambda *args: calls.append(args))
    state = stack.tick()
    # The slower one found the state written, and did nothing.
    assert state == other[0]
    assert stack.read()["updated_at"] == other[0].updated_at.strftime("%Y-%m-%dT%H:%M:%SZ")
    assert len({id(call) for call in calls}) == len([*other[0].instances]) - 1


def test_the_first_state_is_written_once(stack: Stack) -> None:
    state = stack.tick()
    for etag in (None, '"of-another-version"'):
        with pytest.raises(ConflictError):
            bucket.save_state(stack.clients, stack.config, state, etag)


@pytest.mark.parametrize("content", ["{torn", "[]", '{"schema_version": 1}', "{}"])
def test_nodes_whose_dollars_nobody_knows_are_ended_with_their_checkpoint(stack: Stack, content: str) -> None:
    stack.trained()
    good = json.dumps(stack.read())
    stack.put("state.json", content)
    with pytest.raises(StateError, match="bring an earlier version back"):
        stack.tick()
    assert (stack.group.desired_capacity, stack.read_text()) == (0, content)
    assert len(stack.members("Terminating:Wait")) == 3
    # The earlier version is brought back: the fleet goes on, and nothing of what was spent is lost.
    stack.put("state.json", good)
    stack.complete(stack.config.terminate_hook, "CONTINUE", *stack.members())
    state = stack.tick(5)
    assert state.spent_usd > 0 and len(state.instances) == 3


def test_a_newer_controllers_fleet_is_left_alone_and_goes_on_with_its_meter(stack: Stack) -> None:
    nodes = stack.trained()
    spent_usd = stack.tick().spent_usd
    good = stack.read()
    # The stack was deployed with an older version, which does not know a field.
    newer = json.dumps({**good, "owed_usd": 5.0})
    stack.put("state.json", newer)
    stack.ask("stop")
    for _ in range(3):
        with pytest.raises(NewerStateError, match="or the nodes end themselves in half an hour"):
            stack.tick()
    assert (stack.members("InService"), stack.group.desired_capacity) == (nodes, 3)
    assert stack.read_text() == newer, "untouched, so the nodes' own lease runs out"
    # The newer version is deployed again: nothing was lost, the minutes between are charged.
    stack.put("state.json", good)
    stack.ask("run")
    state = stack.tick()
    assert state.phase == "running"
    assert state.spent_usd == pytest.approx(spent_usd + 4 / 60 * state.usd_per_hour)


def test_a_deleted_state_is_not_a_first_tick(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    stack.trained()
    with monkeypatch.context() as patch, pytest.raises(StateError, match="was deleted"):
        refuse(patch, stack.clients.s3, "get_object", "NoSuchKey", headers=DELETED)
        bucket.load_state(stack.clients, stack.config)
    with monkeypatch.context() as patch:
        refuse(patch, stack.clients.s3, "get_object", "NoSuchKey")
        assert bucket.load_state(stack.clients, stack.config) == (None, None)


@pytest.mark.parametrize("code", ["Throttling", "AccessDenied"])
def test_without_the_facts_nothing_is_done(stack: Stack, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    stack.trained()
    before = stack.read()
    with monkeypatch.context() as patch:
        refuse(patch, stack.clients.autoscaling, "describe_auto_scaling_groups", code)
        stack.ask("stop")
        with pytest.raises(ClientError, match=code):
            stack.tick()
    assert stack.read() == before
    state = stack.tick()
    assert state.phase == "draining"
    # The minute nobody looked is charged all the same.
    assert state.spent_usd == pytest.approx(before["spent_usd"] + 3.0)


def test_an_action_that_fails_is_told_does_not_stop_the_others_and_is_tried_again(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stack.trained()
    stack.ask("stop")
    with monkeypatch.context() as patch:
        refuse(patch, stack.clients.autoscaling, "update_auto_scaling_group")
        with pytest.raises(TickError, match=r"ChangeGroup.*Throttling"):
            stack.tick()
    output = capsys.readouterr().out
    assert [line["action"] for line in events(output, "failed")] == ["ChangeGroup"]
    assert "LiftProtection" in [line["action"] for line in events(output, "action")]
    assert stack.read()["phase"] == "draining"
    stack.tick()
    assert stack.group.desired_capacity == 0


def test_a_queue_and_metrics_that_aws_refuses_stop_nothing(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, stack.clients.sqs, "receive_message", "AccessDenied")
    refuse(monkeypatch, stack.clients.cloudwatch, "put_metric_data")
    with pytest.raises(TickError, match=r"notices: .*AccessDenied.*; publish: .*Throttling"):
        stack.tick()
    assert (stack.group.desired_capacity, stack.read()["phase"]) == (3, "starting")


WITHOUT_UTC = {"schema_version": 1, "run": "r", "state": "done", "exit_status": 0, "step": "", "at": FIRST_HOUR}


@pytest.mark.parametrize(
    ("body", "storage"),
    [
        pytest.param("[" * 10_000, "STANDARD", id="nested deeper than Python reads"),
        pytest.param(json.dumps({"step": "x" * bucket.REPORT_BYTES}), "STANDARD", id="larger than a report"),
        pytest.param(json.dumps(WITHOUT_UTC), "STANDARD", id="a time without UTC"),
        pytest.param("{}", "GLACIER", id="archived by its node"),
    ],
)
def test_what_hostile_code_says_of_a_node_does_not_stop_the_meter(stack: Stack, body: str, storage: Any) -> None:
    key = f"control/nodes/{stack.trained()[0]}.json"
    stack.clients.s3.put_object(Bucket=stack.config.bucket, Key=key, Body=body.encode(), StorageClass=storage)
    before = stack.read()["spent_usd"]
    assert stack.tick(60).phase == "running"
    assert stack.read()["spent_usd"] > before + 80


def test_a_garbled_word_of_a_node_or_a_person_changes_nothing(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = stack.trained()
    stack.put(f"nodes/{nodes[0]}.json", "[1]")
    stack.put(f"nodes/{nodes[1]}.json", {"schema_version": 1, "run": stack.config.run_id, "state": "finished"})
    stack.put("request.json", {"schema_version": 1, "want": "explode"})
    assert stack.tick().phase == "running"
    assert len(events(capsys.readouterr().out, "unreadable")) == 3


def take_places(stack: Stack, **changes: Any) -> str:
    """Give the stack a second place, on demand, with a group of its own; return the group's name."""
    places = {"own": PLACES["spot p4d az1"], "other": replace(PLACES["on-demand p4d az2"], number=2)}
    stack.config = rotating(queue_url=stack.config.queue_url, places=places, **changes)
    name = stack.config.group_of("other")
    make_group(stack.clients, stack.config, name)
    return name


def test_an_adaptive_gang_moves_to_nodes_on_demand_once_they_serve(stack: Stack) -> None:
    # 16 h of work on demand, and an hour of a slow launch.
    other = take_places(stack, spot_policy="adaptive", deadline_hours=19.0, steps=1000, checkpoint_interval_s=900.0)
    nodes = stack.trained()
    stack.say(nodes[0], "training", done_steps=40)
    state = stack.tick(60)
    assert (state.phase, state.done_steps, state.progress) == ("running", 40, 0.04)
    # It trains no more: soon the deadline would be at risk.
    state = stack.tick(90)
    assert (state.phase, state.group, stack.members("InService")) == ("running", stack.config.group, nodes)
    assert "in other: on demand, as the deadline allows no more risk" in state.reason
    came = stack.members("Pending:Wait", group=other)
    assert len(came) == 3
    complete(stack.clients, other, stack.config.launch_hook, *came)
    state = stack.tick()
    assert (state.phase, stack.group.desired_capacity, stack.members("InService", group=other)) == ("draining", 0, came)
    assert "so the gang saves and moves" in state.reason
    stack.complete(stack.config.terminate_hook, "CONTINUE", *stack.members("Terminating:Wait"))
    state = stack.tick()
    assert (state.phase, state.on_demand, state.group) == ("running", True, other)
    # On-demand nodes stay until the end: there is no time to spare.
    assert stack.tick(30).phase == "running" and len(state.instances) == 6


def test_a_refused_gang_starts_in_the_other_places_group_in_the_same_tick(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = take_places(stack, deadline_hours=1.0)
    rooms(stack.group).update(nodes=1, code="UnfulfillableCapacity")
    state = stack.tick()
    assert (state.phase, state.group) == ("starting", other)
    assert len(stack.members("Pending:Wait", group=other)) == 3
    assert len(stack.members("Terminating:Wait")) == 1 and stack.group.desired_capacity == 0
    # All is as it should be now: nothing is set again.
    sent = watch(monkeypatch, stack.clients.autoscaling, "update_auto_scaling_group")
    pools = stack.tick().capacity
    assert sent == [] and pools["us-east-1/use1-az1/p4d.24xlarge/spot"].refused == 1
    # The part has nothing to save: its terminate hook is not paid for.
    assert stack.members("Terminating:Wait") == []


def test_nodes_of_a_place_that_the_function_has_no_room_for_any_more_are_metered_and_end_before_a_start(
    stack: Stack,
) -> None:
    other = take_places(stack, deadline_hours=1.0)
    rooms(stack.group).update(nodes=0, code="UnfulfillableCapacity")
    nodes = stack.members(group=other) if stack.tick().group == other else []
    assert len(nodes) == 3
    complete(stack.clients, other, stack.config.launch_hook, *nodes)
    assert stack.tick().phase == "running"
    # `pulumi up` keeps the group, and leaves its place out of the function's variable.
    rooms(stack.group).clear()
    stack.config = replace(stack.config, places={"own": stack.config.places["own"]})
    state = stack.tick(2)
    assert (state.phase, stack.members("Terminating:Wait", group=other), stack.members()) == ("draining", nodes, [])
    assert {key for key, one in state.instances.items() if not one.ended_at} == set(nodes)
    complete(stack.clients, other, stack.config.terminate_hook, *nodes)
    state = stack.tick(2)
    assert (state.phase, state.group, len(stack.members())) == ("starting", stack.config.group, 3)


def spot(stack: Stack, monkeypatch: pytest.MonkeyPatch, prices: list[Any]) -> None:
    """A gang of spot nodes in a market of these prices; moto's group starts no spot instance, and its price is one."""
    nodes = stack.trained()
    backend = stack.group.ec2_backend
    for node in nodes:
        backend.get_instance(node).lifecycle = "spot"
    sent: list[dict[str, Any]] = []

    class Pages:
        def paginate(self, **asked: Any) -> list[dict[str, Any]]:
            sent.append(asked)
            return [{"SpotPriceHistory": prices}]

    ec2: Any = stack.clients.ec2
    own = ec2.get_paginator
    monkeypatch.setattr(
        ec2, "get_paginator", lambda name: Pages() if name == "describe_spot_price_history" else own(name)
    )
    last = stack.now
    stack.tick()
    assert sent[0] == {
        "InstanceTypes": ["p4d.24xlarge"],
        "ProductDescriptions": ["Linux/UNIX"],
        "StartTime": last,
        "EndTime": stack.now,
    }


def price(zone: str, usd: str) -> dict[str, Any]:
    return {"AvailabilityZone": zone, "InstanceType": "p4d.24xlarge", "SpotPrice": usd}


def forget(stack: Stack, nodes: list[str]) -> None:
    """Neither the group nor EC2 tells of the nodes any more: EC2 forgets an ended instance in an hour."""
    stack.clients.autoscaling.detach_instances(
        AutoScalingGroupName=stack.config.group, InstanceIds=nodes, ShouldDecrementDesiredCapacity=True
    )
    stack.clients.ec2.delete_tags(Resources=nodes, Tags=[{"Key": "aws:autoscaling:groupName"}])


def test_a_node_that_a_person_detached_stays_on_the_meter_until_it_ends(stack: Stack) -> None:
    """The stack's tag stays, as does the price; taking the tag off takes it off the meter."""
    ec2, nodes = stack.clients.ec2, stack.trained()
    ec2.create_tags(Resources=nodes, Tags=[{"Key": "gpufleet:stack", "Value": stack.config.stack}])
    ended, kept, taken = nodes
    before = stack.tick()
    forget(stack, nodes)
    state = stack.tick(60)
    assert state.total_usd == pytest.approx(before.total_usd + 90)
    ec2.terminate_instances(InstanceIds=[ended])
    ec2.delete_tags(Resources=[taken], Tags=[{"Key": "gpufleet:stack"}])
    state = stack.tick()
    assert [key for key, one in state.instances.items() if key in nodes and not one.ended_at] == [kept]


def test_what_came_and_went_in_an_outage_is_charged_as_auto_scaling_tells(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = stack.trained()
    before, went = stack.tick(), stack.now
    forget(stack, known)

    def activity(what: str, node: str, begin: float, end: float | None, status: str = "Successful") -> dict[str, Any]:
        told = {"Description": f"{what} EC2 instance: {node}", "StatusCode": status}
        times = {"StartTime": went + timedelta(hours=begin)} | ({"EndTime": went + timedelta(hours=end)} if end else {})
        return told | times

    launching, ending = "Launching a new", "Terminating"
    activities = [
        # A hang of weeks ago, which Auto Scaling lists first.
        activity(ending, "i-0000000000000aaa", -900, None, "InProgress"),
        activity(launching, "i-0000000000000bbb", 7, 7.5, "Failed"),
        activity(ending, "i-0000000000000ccc", 5.9, 6),
        activity(launching, "i-0000000000000ccc", 3, 3.1),
        activity(ending, known[0], 1.9, 2),
        {"Description": "Updating the group", "StatusCode": "Successful", "StartTime": went, "EndTime": went},
        # It began to save before the last tick, and one was over by then.
        activity(ending, known[1], -0.05, 0.1),
        activity(ending, "i-0000000000000ddd", -0.05, -0.01),
        activity(ending, "i-0000000000000eee", -100, -99),
        activity(ending, known[2], -101, 5),
    ]
    own = stack.clients.autoscaling.get_paginator
    pages = SimpleNamespace(paginate=lambda **asked: [{"Activities": activities[:3]}, {"Activities": activities[3:]}])
    monkeypatch.setattr(
        stack.clients.autoscaling,
        "get_paginator",
        lambda name: pages if name == "describe_scaling_activities" else own(name),
    )
    monkeypatch.setattr("bootstrap.controller.gather.MOST_ACTIVITIES", 5)
    state = stack.tick(10 * 60)
    assert f"no node before {went + timedelta(hours=1.9)} that no tick saw" in capsys.readouterr().out
    leased = (LEASE + LEASE_ACTS + timedelta(seconds=stack.config.drain_s)) / timedelta(hours=1)
    # A failed launch and an unseen node; two known ones, and one of which nothing is told.
    assert state.spent_usd - before.spent_usd == pytest.approx(30 * (0.5 + 3 + 2 + 0.1 + leased))
    assert state.unfit_nodes == 0 and {key for key in state.instances if key.startswith("i-0000")} == set()
    assert stack.tick().spent_usd == pytest.approx(state.spent_usd)


def test_an_outage_ends_where_a_boundary_denies_the_activities(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    forget(stack, stack.trained())
    before, autoscaling = stack.tick(), stack.clients.autoscaling
    refuse(monkeypatch, autoscaling, "describe_scaling_activities", "AccessDenied")
    assert stack.tick(10 * 60).updated_at > before.updated_at
    refuse(monkeypatch, autoscaling, "describe_scaling_activities")
    with pytest.raises(ClientError, match="Throttling"):
        stack.tick(10 * 60)


@pytest.mark.parametrize(
    ("own_zone", "usd"),
    # These settings have no spot price: without the market's the dearest counts.
    # After an outage in which the price has fallen, the earlier one was paid for most of it.
    [(("7.5", "7.4"), 3 * 7.5), (("7.5", "12"), 3 * 12), (("0",), 90)],
)
def test_spot_nodes_are_charged_what_the_market_of_their_zone_says(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, own_zone: tuple[str, ...], usd: float
) -> None:
    spot(stack, monkeypatch, [price("us-east-1b", "99"), *(price("us-east-1a", text) for text in own_zone)])
    before = stack.read()
    assert before["usd_per_hour"] == pytest.approx(usd)
    assert stack.tick(60).spent_usd - before["spent_usd"] == pytest.approx(usd)


def test_lambda_runs_a_tick_with_the_settings_that_its_variable_names(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = json.dumps(to_json(stack.config))
    stack.clients.s3.put_object(Bucket=stack.config.bucket, Key="control/settings-1.json", Body=body.encode())
    monkeypatch.setenv(VARIABLE, f"s3://{stack.config.bucket}/control/settings-1.json")
    monkeypatch.setenv("AWS_REGION", stack.config.region)
    assert handler({"source": "aws.events"}, None) == {"phase": "starting", "spent_usd": 0.0}
    assert stack.group.desired_capacity == 3


def test_an_sdk_without_launch_instances_says_so_in_each_tick_and_ends_no_node(
    stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing: Any = object()
    old = replace(stack.clients, launching=nothing)
    for _ in range(2):
        stack.now += timedelta(minutes=1)
        with pytest.raises(TickError, match=r"botocore [\d.]+ of the function's runtime has no LaunchInstances"):
            tick(old, stack.config, stack.now)
    assert stack.read()["launch"] and "boto3 1.44 or newer" in capsys.readouterr().out
