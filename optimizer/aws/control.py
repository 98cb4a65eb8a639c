"""The objects that the controller, the nodes and a person exchange in a stack's bucket, under ``control/``.

``state.json`` is the controller's (bootstrap/controller/state.py has its schema and says what each phase means);
``request.json`` is what a person wants. Both may gain keys: a reader takes those it knows.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from optimizer.aws import errors
from optimizer.errors import GpufleetError

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

STATE, REQUEST = "state.json", "request.json"

# In these no node runs, and only a person's request (or a new run, or a higher ceiling) starts one again.
ENDED_PHASES = ("stopped", "done", "failed", "unfit", "over-budget", "block-ended")
# The controller ticks every minute; after this many missed ticks it is not there, s.
CONTROLLER_SILENT_S = 300

Usd = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Want = Literal["run", "stop"]
Model = TypeVar("Model", bound=BaseModel)


class _Read(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class MeteredInstance(_Read):
    """What one instance cost so far; ``ended_at`` is None while it lives."""

    instance_type: str = ""
    launched_at: AwareDatetime
    ended_at: AwareDatetime | None = None
    lifecycle: str
    usd_per_hour: Usd
    spent_usd: Usd


class NodeCounts(_Read):
    """Nodes, by what Auto Scaling says of them."""

    wanted: int = 0
    in_service: int = 0
    pending: int = 0
    terminating: int = 0


class ControllerState(_Read):
    """control/state.json, the keys that people are shown."""

    schema_version: Literal[1]
    run: str
    phase: str
    after: str | None = None
    reason: str
    since: AwareDatetime
    run_started_at: AwareDatetime | None = None
    updated_at: AwareDatetime
    spent_usd: Usd
    earlier_usd: Usd = 0.0
    fixed_usd: Usd = 0.0
    usd_per_hour: Usd
    ceiling_usd: Usd | None = None
    nodes: NodeCounts = NodeCounts()
    attempts: int = 0
    next_attempt_at: AwareDatetime | None = None
    on_demand: bool = False
    unfit_nodes: int = 0
    failed_launches: int = 0
    interruptions: int = 0
    rebalance_notices: int = 0
    last_failure: str = ""
    instances: dict[str, MeteredInstance] = Field(default_factory=dict)

    def silent_s(self, now: datetime) -> float:
        """Seconds since the controller's last tick."""
        return (now - self.updated_at).total_seconds()

    def is_silent(self, now: datetime) -> bool:
        """Whether the controller missed so many ticks that nobody meters or ends the nodes."""
        return self.silent_s(now) > CONTROLLER_SILENT_S


class PersonRequest(_Read):
    """control/request.json."""

    schema_version: Literal[1]
    want: Want
    at: AwareDatetime
    by: str = ""


def read_state(client: S3Client, bucket: str, prefix: str) -> ControllerState | None:
    """The controller's state; None where it has not written any yet.

    Raises:
        GpufleetError: the object is not what the controller writes.
        botocore.exceptions.BotoCoreError, ClientError: S3 did not answer with it.
    """
    found = _read(client, bucket, f"{prefix}/{STATE}")
    return None if found is None else _parsed(ControllerState, found[0], f"s3://{bucket}/{prefix}/{STATE}")


def read_request(client: S3Client, bucket: str, prefix: str) -> PersonRequest | None:
    """What was last asked for; None where nobody asked for anything. Raises as ``read_state``."""
    found = _read(client, bucket, f"{prefix}/{REQUEST}")
    return None if found is None else _parsed(PersonRequest, found[0], f"s3://{bucket}/{prefix}/{REQUEST}")


def write_request(client: S3Client, bucket: str, prefix: str, *, want: Want, by: str, now: datetime) -> None:
    """Ask the controller to ``want``.

    The put is conditional on what was read (https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html):
    of two people who ask for different things at once, one is told. The bucket's default encrypts it.

    Args:
        client: of the bucket's region.
        bucket: the stack's.
        prefix: ``Names.control_prefix``.
        want: "stop" or "run".
        by: the caller's ARN.
        now: UTC.

    Raises:
        GpufleetError: somebody else asked for something at the same time.
        botocore.exceptions.BotoCoreError, ClientError: S3 refused it.
    """
    key = f"{prefix}/{REQUEST}"
    found = _read(client, bucket, key)
    body = {"schema_version": 1, "want": want, "at": f"{now:%Y-%m-%dT%H:%M:%SZ}", "by": by}
    text = json.dumps(body) + "\n"
    common = {"Bucket": bucket, "Key": key, "Body": text.encode(), "ContentType": "application/json"}
    try:
        if found is None:
            client.put_object(**common, IfNoneMatch="*")  # type: ignore[arg-type]
        else:
            client.put_object(**common, IfMatch=found[1])  # type: ignore[arg-type]
    except Exception as error:
        if not errors.is_written_by_another(error):
            raise
        raise GpufleetError(
            f"s3://{bucket}/{key} changed while it was written",
            why="somebody else asked the controller for something at the same moment",
            next_step="gpufleet status says what is going on; then ask again",
        ) from error


def _read(client: S3Client, bucket: str, key: str) -> tuple[bytes, str] | None:
    """An object's content and entity tag; None where there is none."""
    try:
        answer = client.get_object(Bucket=bucket, Key=key)
        return answer["Body"].read(), answer["ETag"]
    except Exception as error:
        if errors.is_no_object(error):
            return None
        raise


def _parsed(kind: type[Model], content: bytes, place: str) -> Model:
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"]) or "the object"
        raise GpufleetError(
            f"{place} is not what this version of gpufleet writes: {where}: {problem['msg']}",
            next_step="use the version of gpufleet that the stack was deployed with",
        ) from error
