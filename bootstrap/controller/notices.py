"""Read EC2's notices on nodes from the queue, and delete the counted ones."""

from __future__ import annotations

import json
from collections.abc import Sequence

from bootstrap.contract.settings import ControllerSettings
from bootstrap.controller.clients import Clients

INTERRUPTION = "EC2 Spot Instance Interruption Warning"
REBALANCE = "EC2 Instance Rebalance Recommendation"
# Batches of ten messages; an account's other instances send notices too.
QUEUE_BATCHES = 50


def receive_notices(
    clients: Clients, settings: ControllerSettings, problems: list[str]
) -> tuple[dict[str, set[str]], list[str]]:
    """Return instance ids by kind of notice, and the messages' receipts."""
    instances: dict[str, set[str]] = {INTERRUPTION: set(), REBALANCE: set()}
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
                if (kind := event["detail-type"]) in instances:
                    instances[kind].add(event["detail"]["instance-id"])
            except (ValueError, KeyError, TypeError):
                problems.append(f"a message is not an event: {message['Body'][:200]}")
    return instances, receipts


def delete_notices(clients: Clients, settings: ControllerSettings, receipts: Sequence[str]) -> None:
    """Delete counted messages."""
    for start in range(0, len(receipts), 10):
        batch = receipts[start : start + 10]
        entries = [{"Id": str(number), "ReceiptHandle": receipt} for number, receipt in enumerate(batch)]
        clients.sqs.delete_message_batch(QueueUrl=settings.queue_url, Entries=entries)
