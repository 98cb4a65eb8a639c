from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bootstrap.contract.codec import to_text
from bootstrap.contract.request import PersonRequest, StackSpend, read_request
from bootstrap.contract.state import ControllerState, NodeCounts
from optimizer.aws import control
from optimizer.contract.errors import GpufleetError
from tests.unit.optimizer.deployed import DeployedStack

NOW = datetime(2026, 11, 21, 16, tzinfo=UTC)


def test_a_state_of_a_newer_controller_is_read_without_what_is_unknown(deployed: DeployedStack) -> None:
    written = ControllerState(
        run_id="r",
        job="j",
        phase="draining",
        after="over-budget",
        reason="the ceiling",
        since=NOW,
        run_started_at=NOW,
        updated_at=NOW,
        spent_usd=12.5,
        nodes=NodeCounts(wanted=0, terminating=2),
    )
    newer = {**json.loads(to_text(written)), "owed_usd": 5.0, "phase": "moving"}
    deployed.put("control/state.json", json.dumps(newer))
    assert control.read_state(deployed.s3, deployed.names.bucket, "control") == replace(
        written,
        phase="moving",  # type: ignore[arg-type]
    )


def test_a_bucket_without_state_or_request_has_none(deployed: DeployedStack) -> None:
    assert control.read_state(deployed.s3, deployed.names.bucket, "control") is None
    assert control.read_request(deployed.s3, deployed.names.bucket, "control") is None


@pytest.mark.parametrize(
    ("text", "says"),
    [("{torn", "is not JSON"), ('{"schema_version": 99}', "schema_version"), ("[]", "must be an object")],
)
def test_a_state_of_another_version_is_an_error_with_its_place(deployed: DeployedStack, text: str, says: str) -> None:
    deployed.put("control/state.json", text)
    with pytest.raises(GpufleetError, match=says) as error:
        control.read_state(deployed.s3, deployed.names.bucket, "control")
    assert f"s3://{deployed.names.bucket}/control/state.json" in str(error.value)


def test_the_controller_reads_what_a_person_asks(deployed: DeployedStack) -> None:
    bucket = deployed.names.bucket
    for want in ("stop", "run"):  # the first creates, the second replaces
        control.write_request(deployed.s3, bucket, "control", want=want, by="arn:aws:iam::1:user/ada", now=NOW)
        text = json.dumps(deployed.get("control/request.json"))
        expected = PersonRequest(schema_version=1, want=want, at=NOW, by="arn:aws:iam::1:user/ada")
        assert read_request(text, "request") == expected
        assert set(deployed.get("control/request.json")) == {"schema_version", "want", "at", "by"}, "as before moves"
        assert control.read_request(deployed.s3, bucket, "control") == expected


def test_what_other_stacks_spent_outlives_stop_and_resume(deployed: DeployedStack) -> None:
    bucket, by = deployed.names.bucket, "arn:aws:iam::1:user/ada"
    spend = StackSpend(job="j", usd=5.0, usd_per_hour=1.0, at=NOW)
    control.write_request(deployed.s3, bucket, "control", want="run", by=by, now=NOW, elsewhere={"old": spend})
    asked = control.read_request(deployed.s3, bucket, "control")
    assert asked and asked.elsewhere == {"old": spend}
    later = NOW + timedelta(hours=2)
    control.end_spend(deployed.s3, bucket, "control", stack="old", now=later)
    control.end_spend(deployed.s3, bucket, "control", stack="unknown", now=later)
    ended = control.read_request(deployed.s3, bucket, "control")
    assert ended and ended.is_same_ask(asked), "the controller starts nothing anew"
    assert ended.elsewhere == {"old": StackSpend(job="j", usd=7.0, usd_per_hour=0.0, at=later)}
    control.write_request(deployed.s3, bucket, "control", want="stop", by=by, now=later, moved_to="new")
    control.write_request(deployed.s3, bucket, "control", want="stop", by=by, now=later)
    stopped = deployed.get("control/request.json")
    assert stopped["moved_to"] == "new" and stopped["elsewhere"]["old"]["usd"] == 7.0
    control.write_request(deployed.s3, bucket, "control", want="run", by=by, now=later)
    assert "moved_to" not in deployed.get("control/request.json")


def test_of_two_changes_at_once_one_is_told(deployed: DeployedStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 answers 404 for If-Match without an object, where it answers 412 for another ETag."""
    s3, bucket, key, read = deployed.s3, deployed.names.bucket, "control/request.json", control._read
    # Nothing was there, something was, and it is deleted.
    others = iter(("1", "2", ""))

    def somebody_else_first(*arguments: Any) -> object:
        content = read(*arguments)
        if text := next(others):
            deployed.put(key, text)
        else:
            s3.delete_object(Bucket=bucket, Key=key)
        return content

    monkeypatch.setattr(control, "_read", somebody_else_first)
    for kept in ("1", "2", ""):
        with pytest.raises(GpufleetError, match="changed while it was written"):
            control.write_request(s3, bucket, "control", want="stop", by="ada", now=NOW)
        assert (read(s3, bucket, key) or ("",))[0] == kept
