"""Calls to the Auto Scaling group, and reports to the controller.

No call ends the agent: AWS may be out of reach, and training goes on without it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bootstrap.agent.commands import aws_cli, file_of, log, output_of
from bootstrap.agent.settings import Settings
from bootstrap.contract.state import UP
from bootstrap.training.imds import Imds, ImdsError

# The metadata service may answer 503, or late, for a moment: https://github.com/canonical/cloud-init/issues/5577
METADATA_ATTEMPTS = 3
# The controller writes it every minute (contract/state.py).
STATE_KEY = "control/state.json"
METADATA_DELAY_S = 1.0


@dataclass(frozen=True, order=True)
class Instance:
    """Node of the group; the order is by age, of equals by id. Of an incomplete group only the id is known."""

    launched_at: str
    id: str
    private_ip: str


class GroupClient:
    """This node's group and its place's other group. Without a group or a hook its methods do nothing and succeed."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._instance_id = settings.instance_id

    def instance_id(self) -> str:
        """Id of this node; empty where the metadata service does not answer."""
        for attempt in range(1, METADATA_ATTEMPTS + 1):
            if self._instance_id:
                break
            try:
                self._instance_id = Imds().get("instance-id") or ""
            except ImdsError as error:
                log(f"the instance metadata service does not answer instance-id: {error}")
                if attempt < METADATA_ATTEMPTS:
                    time.sleep(METADATA_DELAY_S)
        return self._instance_id

    def in_service(self, enough: int) -> list[Instance] | None:
        """Running nodes in service, the oldest first; None where AWS does not answer.

        EC2 is asked only once the group has ``enough`` of them. A filter doubles the account's limit, to 100 calls and
        20 more a second: https://docs.aws.amazon.com/ec2/latest/devguide/ec2-api-throttling.html. 64 nodes look 6.4
        times a second.
        """
        names = self._settings.place_groups
        ids = self._aws(
            "autoscaling", "describe-auto-scaling-groups", "--auto-scaling-group-names", *names,
            "--query", "AutoScalingGroups[].Instances[] | [?LifecycleState=='InService'].InstanceId",
        )  # fmt: skip
        if ids is None or ids.split() in ([], ["None"]):
            return None if ids is None else []
        members = set(ids.split())
        if len(members) < enough:
            return [Instance("", member, "") for member in sorted(members)]
        # Auto Scaling may still show a node in service that EC2 just interrupted.
        lines = self._aws(
            "ec2", "describe-instances", "--filters", f"Name=tag:aws:autoscaling:groupName,Values={','.join(names)}",
            "--query", "Reservations[].Instances[] | [?State.Name=='running'].[LaunchTime,InstanceId,PrivateIpAddress]",
        )  # fmt: skip
        rows = [line.split() for line in (lines or "").splitlines()]
        found = sorted(Instance(*row) for row in rows if len(row) == 3)
        return None if lines is None else [instance for instance in found if instance.id in members]

    def is_chosen(self) -> bool:
        """Return whether the controller lets this node's group train: its place may be one that the gang moves to.

        Both would write the same checkpoints. Without a bucket there is no controller; a state that cannot be read
        chooses nobody.
        """
        settings = self._settings
        if not settings.bucket or not settings.group_name:
            return True
        text = self._aws("s3", "cp", f"s3://{settings.bucket}/{STATE_KEY}", "-", "--only-show-errors")
        try:
            state = json.loads(text or "")
            chosen, phase = state.get("group", ""), state["phase"]
        except (ValueError, KeyError, AttributeError):
            log("the controller's state cannot be read, so whether this node's group trains is unknown")
            return False
        # Workers, and a state of before groups had places, name none.
        return chosen in ("", *settings.place_groups) and phase in UP

    def complete_terminate_hook(self) -> None:
        """Let the group end this node now."""
        if not (hook := self._hook()):
            return
        done = self._aws("autoscaling", "complete-lifecycle-action", *hook, "--lifecycle-action-result", "CONTINUE")
        # No hook waits on a spot interruption or a plain stop of the service.
        end = "completed" if done is not None else "not completed; its timeout will"
        log(f"terminate hook {self._settings.terminate_hook} {end}")

    def extend_terminate_hook(self) -> None:
        """Send a heartbeat: the node still saves."""
        hook = self._hook()
        if hook and self._aws("autoscaling", "record-lifecycle-action-heartbeat", *hook) is None:
            log(f"a heartbeat of terminate hook {self._settings.terminate_hook} was not taken")

    def protect_from_scale_in(self, *, on: bool) -> None:
        """Keep the group from choosing this node when it shrinks, or let it."""
        if not self._settings.group_name or not self.instance_id():
            return
        done = self._aws(
            "autoscaling", "set-instance-protection", "--auto-scaling-group-name", self._settings.group_name,
            "--instance-ids", self.instance_id(), f"--{'' if on else 'no-'}protected-from-scale-in",
        )  # fmt: skip
        if done is None:
            log(f"scale-in protection of this node could not be turned {'on' if on else 'off'}")

    def ask_to_be_replaced(self) -> bool:
        """Mark this node unhealthy: the group ends it and starts another."""
        health = ["--health-status", "Unhealthy", "--no-should-respect-grace-period"]
        return not self._settings.in_group or self._is_taken("autoscaling", "set-instance-health", *health)

    def leave(self) -> bool:
        """End this node without a replacement; its terminate hook holds it while it saves."""
        shrinks = "--should-decrement-desired-capacity"
        return self._is_taken("autoscaling", "terminate-instance-in-auto-scaling-group", shrinks)

    def report(self, report: Mapping[str, Any]) -> bool:
        """Write this node's report (contract/report.py); True where it is written, or there is no controller."""
        settings = self._settings
        if not settings.bucket or not settings.in_group:
            return True
        instance_id = self.instance_id()
        if not instance_id:
            return False
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        document = {"schema_version": 1, "run": settings.run_id, **report, "at": at}
        # Encrypted by the bucket's default, the stack's key.
        key = f"{settings.report_folder}/{instance_id}.json"
        with file_of(json.dumps(document) + "\n", settings.run_dir) as body:
            return None is not self._aws(
                "s3api", "put-object", "--bucket", settings.bucket, "--key", key, "--body", body,
                "--content-type", "application/json",
            )  # fmt: skip

    def send_log(self, stream: str, title: str, file: Path) -> bool:
        """Send the end of a log to the stack's log group: the node's own copy ends with its disks."""
        settings, instance_id = self._settings, self.instance_id()
        if not settings.log_group or not file.exists():
            return True
        # One event, which holds 1 MB: https://docs.aws.amazon.com/AmazonCloudWatchLogs/latest/APIReference/API_PutLogEvents.html
        text = (output_of(["tail", "--lines=200", str(file)], 10.0) or "")[-200_000:]
        event = [{"timestamp": int(time.time() * 1000), "message": f"{title}\n{text}"}]
        where = ["--log-group-name", settings.log_group, "--log-stream-name", f"{stream}/{instance_id}"]
        # After a reboot the stream may exist.
        self._aws("logs", "create-log-stream", *where)
        with file_of(json.dumps(event), settings.run_dir) as events:
            return None is not self._aws("logs", "put-log-events", *where, "--log-events", f"file://{events}")

    def state_written_at(self) -> str | None:
        """Time at which the controller wrote its state, ISO 8601; None where S3 does not tell.

        The listing tells the time even where the object's key is disabled. It has no prefix, as the node's role may use
        only others (infra/policies/roles.py).
        """
        written = self._aws(
            "s3api", "list-objects-v2", "--bucket", self._settings.bucket, "--start-after", STATE_KEY[:-1],
            "--max-keys", "1", "--query", f"Contents[?Key=='{STATE_KEY}'].LastModified | [0]",
        )  # fmt: skip
        return (written or "").strip().removeprefix("None") or None

    def _hook(self) -> list[str]:
        """Words that name this node's terminate hook; none without one."""
        settings = self._settings
        if not (settings.terminate_hook and settings.in_group and self.instance_id()):
            return []
        group = ["--auto-scaling-group-name", settings.group_name, "--lifecycle-hook-name", settings.terminate_hook]
        return [*group, "--instance-id", self.instance_id()]

    def _is_taken(self, service: str, call: str, *options: str) -> bool:
        """Make a call for this node; returns whether it succeeded."""
        instance_id = self.instance_id()
        return bool(instance_id) and self._aws(service, call, "--instance-id", instance_id, *options) is not None

    def _aws(self, *arguments: str) -> str | None:
        return aws_cli(self._settings.region, *arguments)
