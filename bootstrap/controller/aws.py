"""The thin shell around boto3: gathers a tick's facts and carries its actions out. It decides nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from bootstrap.contract.codec import FormatError
from bootstrap.contract.report import NodeReport, read_report
from bootstrap.contract.request import PersonRequest, read_request
from bootstrap.contract.settings import ControllerSettings, Lifecycle
from bootstrap.contract.state import ControllerState, NewerStateError, read_state
from bootstrap.controller.decide import Action, EndLeaving, EndStaying, LiftProtection, SetGroup
from bootstrap.controller.observation import AutoScalingGroup, FailedLaunch, Machine, Member, Observation

if TYPE_CHECKING:
    from mypy_boto3_autoscaling import AutoScalingClient
    from mypy_boto3_ec2 import EC2Client
    from mypy_boto3_s3 import S3Client

INTERRUPTION = "EC2 Spot Instance Interruption Warning"
REBALANCE = "EC2 Instance Rebalance Recommendation"
# Ten messages each: an account's other instances send theirs too, and the next tick is a minute away.
QUEUE_BATCHES = 50
# https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_SetInstanceProtection.html
PROTECTION_BATCH = 50
# EC2 describes an ended instance for "usually less than one hour"; a tick that comes so soon after the last sees all:
# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeInstances.html
FORGETS = timedelta(minutes=10)
# Of six weeks, the most that Auto Scaling tells: a launch and an end each of some thousand nodes.
ACTIVITIES = 5000
# Between a launch's beginning in Auto Scaling and its instance in EC2's answers.
LAUNCHES = timedelta(minutes=10)
# A report has a few hundred bytes, a run of months some thousand nodes. Nodes may write what they like below nodes/,
# and more than this would take the tick its memory or its minute, and with them the meter.
REPORT_BYTES = 16 * 1024
REPORTS = 10_000


class StateError(RuntimeError):
    """control/state.json cannot be trusted, so the dollars spent are unknown; the message says what to do."""


class ConflictError(RuntimeError):
    """Another tick wrote the state since this one read it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Clients:
    """boto3 clients of the stack's region."""

    autoscaling: AutoScalingClient
    ec2: EC2Client
    s3: S3Client
    sqs: Any
    cloudwatch: Any

    @classmethod
    def of(cls, session: Any, region: str) -> Clients:
        """Clients of a boto3 session, whose calls end long before the function's time does."""
        from botocore.config import Config

        config = Config(
            region_name=region, connect_timeout=3, read_timeout=8, retries={"mode": "standard", "max_attempts": 3}
        )
        names = ("autoscaling", "ec2", "s3", "sqs", "cloudwatch")
        return cls(**{name: session.client(name, config=config) for name in names})


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _seconds(moment: datetime) -> datetime:
    return moment.astimezone(UTC).replace(microsecond=0)


# --- the objects under control/ ---------------------------------------------------------------------------------------


def state_key(settings: ControllerSettings) -> str:
    """Key of the state in the bucket."""
    return f"{settings.control_prefix}/state.json"


def load_state(clients: Clients, settings: ControllerSettings) -> tuple[ControllerState | None, str | None]:
    """The state and its ETag; both None before the first tick.

    Raises:
        NewerStateError: a newer version of the controller wrote it.
        StateError: it was deleted, or is not a state.
    """
    key = state_key(settings)
    place = f"s3://{settings.bucket}/{key}"
    help_ = (
        f"bring an earlier version back (aws s3api list-object-versions --bucket {settings.bucket} --prefix {key}); "
        "until then no node is started, and running ones are ended"
    )
    try:
        found = clients.s3.get_object(Bucket=settings.bucket, Key=key)
    except ClientError as error:
        if _code(error) not in ("NoSuchKey", "404"):
            raise
        headers = error.response["ResponseMetadata"]["HTTPHeaders"]
        if headers.get("x-amz-delete-marker") == "true":
            raise StateError(f"{place} was deleted, and with it what was spent: {help_}") from error
        return None, None
    try:
        return read_state(found["Body"].read().decode(errors="replace"), place), found["ETag"]
    except NewerStateError as error:
        raise NewerStateError(
            f"{error}: a newer controller wrote it; `pulumi up` with that version of gpufleet goes on. Until then "
            "nothing is started, metered or ended; the nodes save and end themselves half an hour after its last word"
        ) from error
    except FormatError as error:
        raise StateError(f"{error}: {help_}") from error


def save_state(clients: Clients, settings: ControllerSettings, state: ControllerState, etag: str | None) -> None:
    """Write the state, unless it changed since it was read with ``etag`` (None: since it did not exist).

    https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html

    Raises:
        ConflictError: it did.
    """
    condition: dict[str, Any] = {"IfMatch": etag} if etag else {"IfNoneMatch": "*"}
    try:
        clients.s3.put_object(
            Bucket=settings.bucket,
            Key=state_key(settings),
            Body=state.to_text().encode(),
            ContentType="application/json",
            **condition,
        )
    except ClientError as error:
        if _code(error) in ("PreconditionFailed", "ConditionalRequestConflict", "412", "409"):
            raise ConflictError(f"{state_key(settings)} was written by another tick") from error
        raise


def _request(clients: Clients, settings: ControllerSettings) -> PersonRequest | None:
    key = f"{settings.control_prefix}/request.json"
    try:
        found = clients.s3.get_object(Bucket=settings.bucket, Key=key)
    except ClientError as error:
        if _code(error) in ("NoSuchKey", "404"):
            return None
        raise
    return read_request(found["Body"].read().decode(errors="replace"), f"s3://{settings.bucket}/{key}")


def _reports(
    clients: Clients, settings: ControllerSettings, known: dict[str, datetime | None], problems: list[str]
) -> dict[str, NodeReport]:
    """What the nodes in ``known`` wrote since the time there.

    Whatever hostile code on a node put there (an object too large, archived, under a key of its own, no JSON) is a
    problem to be logged: it must not stop the meter.
    """
    prefix = f"{settings.control_prefix}/nodes/"
    found = {}
    pages = clients.s3.get_paginator("list_objects_v2").paginate(
        Bucket=settings.bucket, Prefix=prefix, PaginationConfig={"MaxItems": REPORTS}
    )
    for page in pages:
        for entry in page.get("Contents", []):
            instance_id = entry["Key"].removeprefix(prefix).removesuffix(".json")
            modified_at = _seconds(entry["LastModified"])
            if instance_id not in known or known[instance_id] == modified_at:
                continue
            place = f"s3://{settings.bucket}/{entry['Key']}"
            try:
                found[instance_id] = read_report(_small(clients, settings, entry["Key"]), modified_at, place)
            except (ValueError, RecursionError, ClientError) as error:
                # One node's garbled word must not stop the meter of all.
                problems.append(f"{place} is not a report: {str(error)[:200]}")
    return found


def _small(clients: Clients, settings: ControllerSettings, key: str) -> str:
    body = clients.s3.get_object(Bucket=settings.bucket, Key=key)["Body"].read(REPORT_BYTES + 1)
    if len(body) > REPORT_BYTES:
        raise FormatError(f"it has more than {REPORT_BYTES} bytes")
    return body.decode()


# --- facts ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Gathered:
    """What a tick saw.

    Attributes:
        receipts: of the messages to delete once the state that counts them is written.
        problems: what could not be read and is left out.
    """

    facts: Observation
    receipts: tuple[str, ...]
    problems: tuple[str, ...]


def gather(clients: Clients, settings: ControllerSettings, state: ControllerState | None, now: datetime) -> Gathered:
    """Everything the tick at ``now`` looks at.

    Raises:
        botocore.exceptions.ClientError: AWS refused a call: nothing is decided on half of the facts.
    """
    problems: list[str] = []
    # Notices first: an instance they name is then among the machines.
    notices, receipts = _notices(clients, settings, problems)
    group = _group(clients, settings)
    machines = _machines(clients, settings, now, problems)
    activities = _activities(clients, settings, state.updated_at if state else None, now) if group else []
    missed = _missed(settings, activities, state, machines, now)
    known: dict[str, datetime | None] = {machine.instance_id: None for machine in (*machines, *missed)}
    if state:
        known |= {key: instance.reported_at for key, instance in state.instances.items()}
    try:
        request = _request(clients, settings)
    except FormatError as error:
        # The word of a person that cannot be read changes nothing.
        problems.append(str(error))
        request = state.request if state else None
    facts = Observation(
        group=group,
        machines=machines,
        missed=missed,
        interrupted=frozenset(notices[INTERRUPTION]),
        rebalanced=frozenset(notices[REBALANCE]),
        reports=_reports(clients, settings, known, problems),
        failed_launches=_failed_launches(activities, state.updated_at if state else None),
        request=request,
    )
    return Gathered(facts=facts, receipts=tuple(receipts), problems=tuple(problems))


def _notices(
    clients: Clients, settings: ControllerSettings, problems: list[str]
) -> tuple[dict[str, set[str]], list[str]]:
    found: dict[str, set[str]] = {INTERRUPTION: set(), REBALANCE: set()}
    receipts: list[str] = []
    for _ in range(QUEUE_BATCHES):
        answer = clients.sqs.receive_message(QueueUrl=settings.queue_url, MaxNumberOfMessages=10, WaitTimeSeconds=0)
        messages = answer.get("Messages", [])
        if not messages:
            break
        for message in messages:
            receipts.append(message["ReceiptHandle"])
            try:
                event = json.loads(message["Body"])
                kind = event["detail-type"]
                if kind in found:
                    found[kind].add(event["detail"]["instance-id"])
            except (ValueError, KeyError, TypeError):
                problems.append(f"an event that is none: {message['Body'][:200]}")
    return found, receipts


def forget(clients: Clients, settings: ControllerSettings, receipts: Iterable[str]) -> None:
    """Delete messages that are in the state by now."""
    handles = list(receipts)
    for start in range(0, len(handles), 10):
        batch = handles[start : start + 10]
        entries = [{"Id": str(number), "ReceiptHandle": handle} for number, handle in enumerate(batch)]
        clients.sqs.delete_message_batch(QueueUrl=settings.queue_url, Entries=entries)


def _group(clients: Clients, settings: ControllerSettings) -> AutoScalingGroup | None:
    answer = clients.autoscaling.describe_auto_scaling_groups(AutoScalingGroupNames=[settings.group])
    if not answer["AutoScalingGroups"]:
        return None
    found: Any = answer["AutoScalingGroups"][0]
    distribution = found.get("MixedInstancesPolicy", {}).get("InstancesDistribution")
    return AutoScalingGroup(
        created_at=_seconds(found["CreatedTime"]),
        desired=found["DesiredCapacity"],
        min_size=found["MinSize"],
        max_size=found["MaxSize"],
        on_demand_base=None if distribution is None else int(distribution.get("OnDemandBaseCapacity") or 0),
        members=tuple(
            Member(
                instance_id=member["InstanceId"],
                state=member["LifecycleState"],
                protected=member["ProtectedFromScaleIn"],
            )
            for member in found["Instances"]
        ),
    )


def _machines(
    clients: Clients, settings: ControllerSettings, now: datetime, problems: list[str]
) -> tuple[Machine, ...]:
    # Auto Scaling tags its instances so; ended ones are described for about an hour more:
    # https://docs.aws.amazon.com/autoscaling/ec2/userguide/ec2-auto-scaling-tagging.html
    filters: Any = [{"Name": "tag:aws:autoscaling:groupName", "Values": [settings.group]}]
    pages = clients.ec2.get_paginator("describe_instances").paginate(Filters=filters)
    found: list[Any] = [
        instance for page in pages for reservation in page["Reservations"] for instance in reservation["Instances"]
    ]
    spot = {instance["InstanceType"] for instance in found if instance.get("InstanceLifecycle") == "spot"}
    prices = _spot_prices(clients, sorted(spot), now, problems) if spot else {}
    return tuple(_machine(instance, prices) for instance in found)


def _spot_prices(
    clients: Clients, types: list[str], now: datetime, problems: list[str]
) -> dict[tuple[str, str], float]:
    """Spot price by zone name and instance type, USD per hour: a range of no length has the prices in effect then.

    https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeSpotPriceHistory.html
    """
    found: dict[tuple[str, str], float] = {}
    pages = clients.ec2.get_paginator("describe_spot_price_history")
    asked: Any = {"InstanceTypes": types, "ProductDescriptions": ["Linux/UNIX"], "StartTime": now, "EndTime": now}
    try:
        for page in pages.paginate(**asked):
            for entry in page["SpotPriceHistory"]:
                usd = float(entry["SpotPrice"])
                if usd > 0:
                    # The latest comes first.
                    found.setdefault((entry["AvailabilityZone"], entry["InstanceType"]), usd)
    except ClientError as error:
        # The plan's prices do instead.
        problems.append(f"no spot prices: {error}")
    return found


def _machine(found: Any, spot_prices: Mapping[tuple[str, str], float]) -> Machine:
    state = found["State"]["Name"]
    lifecycle: Lifecycle = "on-demand"
    usd_per_hour = None
    if found.get("InstanceLifecycle") in ("spot", "capacity-block"):
        lifecycle = found["InstanceLifecycle"]
    if lifecycle == "spot":
        zone = found.get("Placement", {}).get("AvailabilityZone", "")
        usd_per_hour = spot_prices.get((zone, found["InstanceType"]))
    reason = found.get("StateReason", {}).get("Code", "")
    return Machine(
        instance_id=found["InstanceId"],
        instance_type=found["InstanceType"],
        lifecycle=lifecycle,
        launched_at=_seconds(found["LaunchTime"]),
        # Hours are billed in these two states alone:
        # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-instance-lifecycle.html
        running=state in ("pending", "running"),
        ended=state in ("shutting-down", "terminated"),
        until=_transition(found.get("StateTransitionReason", "")),
        reclaimed=reason.startswith("Server.Spot"),
        usd_per_hour=usd_per_hour,
    )


def _transition(text: str) -> datetime | None:
    """The time in "User initiated (2026-11-21 16:00:00 GMT)"; a reclaimed spot instance has none."""
    found = re.search(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?:GMT|UTC)\)", text)
    return datetime.fromisoformat(found[1]).replace(tzinfo=UTC) if found else None


def _activities(clients: Clients, settings: ControllerSettings, since: datetime | None, now: datetime) -> list[Any]:
    """What Auto Scaling did, the latest first: as much as one answer has, and after a long silence all since then.

    Groups of that name that were deleted meanwhile are asked for too: their nodes were paid. What is still going on
    comes first, however old, so it does not say that the rest is older.
    https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_DescribeScalingActivities.html
    """
    asked: dict[str, Any] = {"AutoScalingGroupName": settings.group}
    if since is None or now - since <= FORGETS:
        return list(clients.autoscaling.describe_scaling_activities(**asked, MaxRecords=100)["Activities"])
    pages = clients.autoscaling.get_paginator("describe_scaling_activities").paginate(
        **asked, IncludeDeletedGroups=True, PaginationConfig={"MaxItems": ACTIVITIES}
    )
    # An end that began before the silence may have ended in it.
    enough = since - LAUNCHES - timedelta(seconds=settings.drain_s)
    found: list[Any] = []
    for page in pages:
        found += page["Activities"]
        if any(one["StartTime"] < enough for one in page["Activities"] if one.get("EndTime")):
            break
    return found


def _failed_launches(activities: Iterable[Any], since: datetime | None) -> tuple[FailedLaunch, ...]:
    found = [
        FailedLaunch(
            at=_seconds(activity.get("EndTime") or activity["StartTime"]), message=activity.get("StatusMessage", "")
        )
        for activity in activities
        if activity["StatusCode"] == "Failed" and activity.get("Description", "").startswith("Launching")
    ]
    new = [failed for failed in found if since is None or failed.at > since]
    return tuple(sorted(new, key=lambda failed: failed.at))


def _missed(
    settings: ControllerSettings,
    activities: Iterable[Any],
    state: ControllerState | None,
    machines: Iterable[Machine],
    now: datetime,
) -> tuple[Machine, ...]:
    """Instances that ended since the last tick and that EC2 describes no more: to when they were paid.

    "Launching a new EC2 instance: i-..." begins before the instance is billed, "Terminating EC2 instance: i-..." ends
    after it. How one that no tick saw was bought is not in them, so it counts as the dearest (an empty type has no
    price of its own); one that a tick saw has the price it had.
    https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_DescribeScalingActivities.html
    """
    if state is None or now - state.updated_at <= FORGETS:
        return ()
    described = {machine.instance_id for machine in machines}
    launched: dict[str, datetime] = {}
    ended: dict[str, datetime] = {}
    for activity in activities:
        said = re.match(r"(Launching|Terminating)\b.*\b(i-[0-9a-f]+)", activity.get("Description", ""))
        if said is None or said[2] in described:
            continue
        if said[1] == "Terminating":
            ended.setdefault(said[2], min(_seconds(activity.get("EndTime") or now), now))
        elif (started := _seconds(activity["StartTime"])) > state.updated_at - LAUNCHES:
            launched[said[2]] = started
    found = []
    for key in sorted(ended.keys() & (launched.keys() | state.instances.keys())):
        known = state.instances.get(key)
        if known and known.ended_at:
            continue
        found.append(
            Machine(
                instance_id=key,
                instance_type=known.instance_type if known else "",
                lifecycle=known.lifecycle if known else "on-demand",
                launched_at=known.launched_at if known else launched[key],
                running=False,
                ended=True,
                until=ended[key],
                usd_per_hour=known.usd_per_hour - settings.volume_usd_per_node_hour if known else None,
            )
        )
    return tuple(found)


# --- actions ----------------------------------------------------------------------------------------------------------


def carry_out(clients: Clients, settings: ControllerSettings, action: Action) -> None:
    """Do one thing; doing it again changes nothing.

    Raises:
        botocore.exceptions.ClientError: AWS refused it.
    """
    group = settings.group
    if isinstance(action, SetGroup):
        _set_group(clients, group, action)
        return
    if isinstance(action, LiftProtection):
        ids = list(action.instance_ids)
        for start in range(0, len(ids), PROTECTION_BATCH):
            clients.autoscaling.set_instance_protection(
                AutoScalingGroupName=group,
                InstanceIds=ids[start : start + PROTECTION_BATCH],
                ProtectedFromScaleIn=False,
            )
        return
    if isinstance(action, EndStaying):
        # The desired size is 0 by now, so nobody replaces it.
        clients.autoscaling.terminate_instance_in_auto_scaling_group(
            InstanceId=action.instance_id, ShouldDecrementDesiredCapacity=False
        )
        return
    leaving = isinstance(action, EndLeaving)
    try:
        clients.autoscaling.complete_lifecycle_action(
            AutoScalingGroupName=group,
            LifecycleHookName=settings.terminate_hook if leaving else settings.launch_hook,
            InstanceId=action.instance_id,
            LifecycleActionResult="CONTINUE" if leaving else "ABANDON",
        )
    except ClientError as error:
        # The node, or its hook's timeout, was faster.
        if _code(error) != "ValidationError" or "No active Lifecycle Action" not in str(error):
            raise


def _set_group(clients: Clients, group: str, action: SetGroup) -> None:
    changes: dict[str, Any] = {}
    if action.desired is not None:
        changes["DesiredCapacity"] = action.desired
    if changes and action == SetGroup(desired=action.desired):
        clients.autoscaling.set_desired_capacity(AutoScalingGroupName=group, HonorCooldown=False, **changes)
        return
    if action.min_size is not None and action.max_size is not None:
        changes |= {"MinSize": action.min_size, "MaxSize": action.max_size}
    if action.on_demand_base is not None:
        # Only this part of the policy: with a launch template in the request, AWS wants to see the caller's permission
        # to run instances and pass their role, and the controller has neither:
        # https://docs.aws.amazon.com/autoscaling/ec2/userguide/ec2-auto-scaling-launch-template-permissions.html
        found: Any = clients.autoscaling.describe_auto_scaling_groups(AutoScalingGroupNames=[group])
        present = found["AutoScalingGroups"][0]["MixedInstancesPolicy"]["InstancesDistribution"]
        changes["MixedInstancesPolicy"] = {
            "InstancesDistribution": {**present, "OnDemandBaseCapacity": action.on_demand_base}
        }
    clients.autoscaling.update_auto_scaling_group(AutoScalingGroupName=group, **changes)


def publish(
    clients: Clients, settings: ControllerSettings, state: ControllerState, before: ControllerState | None
) -> None:
    """One minute's metrics; the counts are of what is new since ``before``, so that sums over time are true."""

    def new(count: Callable[[ControllerState], int]) -> int:
        known = before and before.run_started_at == state.run_started_at
        # Never below 0: unfit nodes are counted in a row.
        return max(0, count(state) - (count(before) if before and known else 0))

    metrics: dict[str, tuple[float, str]] = {
        "SpentUsd": (state.spent_usd, "None"),
        "UsdPerHour": (state.usd_per_hour, "None"),
        "NodesInService": (state.nodes.in_service, "Count"),
        "NodesWanted": (state.nodes.wanted, "Count"),
        "Interruptions": (new(lambda state: state.interruptions), "Count"),
        "RebalanceNotices": (new(lambda state: state.rebalance_notices), "Count"),
        "FailedLaunches": (new(lambda state: state.failed_launches), "Count"),
        "UnfitNodes": (new(lambda state: state.unfit_nodes), "Count"),
    }
    clients.cloudwatch.put_metric_data(
        Namespace=settings.metric_namespace,
        MetricData=[
            {"MetricName": name, "Value": value, "Unit": unit, "Timestamp": state.updated_at}
            for name, (value, unit) in metrics.items()
        ],
    )
