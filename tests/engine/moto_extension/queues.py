"""SQS queues whose redrive policy reads as SQS writes it.

SQS answers GetQueueAttributes with compact JSON; moto 5.2 puts spaces between, which the AWS provider takes for a
change: https://docs.aws.amazon.com/cli/latest/reference/sqs/get-queue-attributes.html (Examples)
"""

from __future__ import annotations

import json
from typing import Any

from moto.sqs.models import Queue

_attributes = Queue.attributes


def install() -> None:
    """Put the property into moto's queues."""
    Queue.attributes = property(attributes)  # type: ignore[method-assign, assignment]


def attributes(self: Queue) -> dict[str, Any]:
    """The queue's attributes."""
    values: dict[str, Any] = _attributes.__get__(self)
    if self.redrive_policy:
        values["RedrivePolicy"] = json.dumps(self.redrive_policy, separators=(",", ":"))
    return values
