"""boto3 clients of the controller, error codes, times and log lines."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from botocore.config import Config
from botocore.exceptions import ClientError

if TYPE_CHECKING:
    from mypy_boto3_autoscaling import AutoScalingClient
    from mypy_boto3_ec2 import EC2Client
    from mypy_boto3_s3 import S3Client


@dataclass(frozen=True, kw_only=True, slots=True)
class Clients:
    """boto3 clients of the stack's region."""

    autoscaling: AutoScalingClient
    ec2: EC2Client
    s3: S3Client
    sqs: Any
    cloudwatch: Any
    launching: AutoScalingClient  # its calls wait for EC2, and are not repeated

    @classmethod
    def create(cls, session: Any, region: str) -> Clients:
        """Make clients whose calls end long before the function's time."""
        # "max_attempts" would not count the first: https://docs.aws.amazon.com/boto3/latest/guide/retries.html
        retries: Any = {"mode": "standard", "total_max_attempts": 3}
        config = Config(region_name=region, connect_timeout=3, read_timeout=8, retries=retries)
        patient = config.merge(Config(read_timeout=20, retries={"mode": "standard", "total_max_attempts": 1}))
        return cls(
            launching=session.client("autoscaling", config=patient),
            **{name: session.client(name, config=config) for name in ("autoscaling", "ec2", "s3", "sqs", "cloudwatch")},
        )


def log(event: str, **values: Any) -> None:
    """Write one line to the log group."""
    sys.stdout.write(json.dumps({"event": event, **values}) + "\n")


def error_code(error: ClientError) -> str:
    """Return AWS's code, like "NoSuchKey"."""
    return str(error.response.get("Error", {}).get("Code", ""))


def to_seconds(moment: datetime) -> datetime:
    """Convert to UTC, to the second, as in state.json."""
    return moment.astimezone(UTC).replace(microsecond=0)
