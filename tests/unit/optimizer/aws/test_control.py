from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from bootstrap.controller.state import ENDED as CONTROLLERS_ENDED
from bootstrap.controller.state import PHASES, Nodes, Request, State
from bootstrap.controller.state import read_request as controllers_read_request
from optimizer.aws import control
from optimizer.errors import GpufleetError
from tests.unit.optimizer.deployed import DeployedStack

NOW = datetime(2026, 11, 21, 16, tzinfo=UTC)


def test_it_reads_what_the_controller_writes(deployed: DeployedStack) -> None:
    """The two sides share no code: a renamed key would show here."""
    written = State(
        run="r",
        job="j",
        phase="draining",
        after="over-budget",
        reason="the ceiling",
        since=NOW,
        run_started_at=NOW,
        updated_at=NOW,
        spent_usd=12.5,
        usd_per_hour=3.0,
        ceiling_usd=13.0,
        nodes=Nodes(wanted=0, terminating=2),
        attempts=2,
        interruptions=3,
        rebalance_notices=4,
        failed_launches=5,
        last_failure="InsufficientInstanceCapacity",
    )
    deployed.put("control/state.json", written.to_text())
    read = control.read_state(deployed.s3, deployed.names.bucket, "control")
    assert read is not None
    shared = set(control.ControllerState.model_fields) - {"nodes", "instances"}
    assert {name: getattr(read, name) for name in shared} == {name: getattr(written, name) for name in shared}
    assert read.nodes.terminating == 2 and read.instances == {}
    assert set(CONTROLLERS_ENDED) == set(control.ENDED_PHASES) <= set(PHASES)


def test_a_bucket_without_state_or_request_has_none(deployed: DeployedStack) -> None:
    assert control.read_state(deployed.s3, deployed.names.bucket, "control") is None
    assert control.read_request(deployed.s3, deployed.names.bucket, "control") is None


@pytest.mark.parametrize(
    ("text", "says"),
    [("{torn", "Invalid JSON"), ('{"schema_version": 2}', "schema_version"), ("[]", "should be an object")],
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
        expected = Request(schema_version=1, want=want, at=NOW, by="arn:aws:iam::1:user/ada")
        assert controllers_read_request(text, "request") == expected
        read = control.read_request(deployed.s3, bucket, "control")
        assert read is not None and (read.want, read.at) == (want, NOW)


def test_of_two_requests_at_once_one_is_told(deployed: DeployedStack, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket, read, others = deployed.names.bucket, control._read, iter("12")

    def somebody_else_first(*arguments: object) -> object:
        found = read(*arguments)  # type: ignore[arg-type]
        deployed.put("control/request.json", next(others))
        return found

    monkeypatch.setattr(control, "_read", somebody_else_first)
    for kept in (1, 2):  # nothing there, then something there
        with pytest.raises(GpufleetError, match="changed while it was written"):
            control.write_request(deployed.s3, bucket, "control", want="stop", by="ada", now=NOW)
        assert deployed.get("control/request.json") == kept
