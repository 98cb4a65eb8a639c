"""Read AWS's notices on nodes from the queue, and delete the counted ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

from bootstrap.contract.settings import ControllerSettings
from bootstrap.controller.clients import Clients, to_seconds

INTERRUPTION = "EC2 Spot Instance Interruption Warning"
REBALANCE = "EC2 Instance Rebalance Recommendation"
# AWS's page has had both names.
RESERVATION = tuple(f"EC2 {kind}Capacity Reservation Instance Interruption Warning" for kind in ("", "Interruptible "))
HEALTH = "AWS Health Event"
# Batches of ten messages; an account's other instances send notices too.
QUEUE_BATCHES = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Notices:
    """Instances by kind of notice, of the whole account."""

    interrupted: set[str] = field(default_factory=set)
    rebalanced: set[str] = field(default_factory=set)
    maintenance: dict[str, datetime] = field(default_factory=dict)  # when EC2 ends or restarts the instance
    receipts: list[str] = field(default_factory=list)  # of the messages


def receive_notices(clients: Clients, settings: ControllerSettings, problems: list[str]) -> Notices:
    """Receive all messages of the queue."""
    notices = Notices()
    for _ in range(QUEUE_BATCHES):
        answer = clients.sqs.receive_message(QueueUrl=settings.queue_url, MaxNumberOfMessages=10, WaitTimeSeconds=0)
        messages = answer.get("Messages", [])
        if not messages:
            break
        for message in messages:
            notices.receipts.append(message["ReceiptHandle"])
            try:
                _take(notices, json.loads(message["Body"]))
            except (ValueError, KeyError, TypeError, AttributeError):
                problems.append(f"a message is not an event: {message['Body'][:200]}")
    return notices


def _take(notices: Notices, event: Any) -> None:
    """Take in an event; infra/policies/resources.py has the kinds, with AWS's pages."""
    kind, detail = event["detail-type"], event["detail"]
    if kind == HEALTH:
        if detail.get("statusCode") != "closed":
            starts_at = to_seconds(parsedate_to_datetime(detail["startTime"]))
            notices.maintenance.update(
                {entity["entityValue"]: starts_at for entity in detail.get("affectedEntities", [])}
            )
    elif kind == REBALANCE:
        notices.rebalanced.add(detail["instance-id"])
    elif kind == INTERRUPTION:
        notices.interrupted.add(detail["instance-id"])
    elif kind in RESERVATION:
        # No page says that the metadata service tells the node, which has two minutes to save.
        notices.interrupted.add(detail["instance-id"])
        ends_at = datetime.fromisoformat(detail["instance-termination-time"].replace("Z", "+00:00"))
        notices.maintenance[detail["instance-id"]] = to_seconds(ends_at)


def delete_notices(clients: Clients, settings: ControllerSettings, receipts: Sequence[str]) -> None:
    """Delete counted messages."""
    for start in range(0, len(receipts), 10):
        batch = receipts[start : start + 10]
        entries = [{"Id": str(number), "ReceiptHandle": receipt} for number, receipt in enumerate(batch)]
        clients.sqs.delete_message_batch(QueueUrl=settings.queue_url, Entries=entries)
