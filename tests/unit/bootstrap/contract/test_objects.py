"""Settings, state and requests as JSON: read exactly, or refused with the place of the error."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from bootstrap.contract import state
from bootstrap.contract.codec import FormatError, from_json, to_json
from bootstrap.contract.request import read_request
from bootstrap.contract.settings import ControllerSettings
from bootstrap.contract.state import NewerStateError, read_state
from bootstrap.contract.timings import LEASE_ACTS
from tests.unit.bootstrap.controller.world import World, settings, trained

REQUEST = {"schema_version": 1, "want": "stop", "at": "2026-11-21T16:00:00Z", "by": "arn:aws:iam::1:user/ann"}


def test_settings_survive_their_object() -> None:
    config = settings(ceiling_usd=100.0)
    assert ControllerSettings.from_text(json.dumps(to_json(config)), "the settings") == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the settings is not JSON"),
        ("[1]", "must be an object"),
        ('{"stack": "dev"}', "lacks bucket, "),
    ],
)
def test_malformed_settings_are_refused(text: str, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        ControllerSettings.from_text(text, "the settings")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"node_count": "3"}, r"node_count is '3', and must be a whole number"),
        ({"node_count": True}, "node_count"),
        ({"fixed_usd_per_hour": float("nan")}, "fixed_usd_per_hour is 'nan', and must be a number"),
        ({"mode": "gang"}, "mode is 'gang', and must be 'training' or 'workers'"),
        ({"schema_version": 2}, "schema_version is '2', and must be 1"),
        ({"colour": "red"}, "unknown fields: colour"),
        ({"prices": {"spot": {"p4d.24xlarge": None}}}, r"prices\.spot\.p4d\.24xlarge is 'None'"),
        ({"waits": 1}, "true or false"),
        (
            {"opening_hours": {"b": {"start": "2026-11-21T16:00:00", "end": "2026-11-22T16:00:00Z"}}},
            "a time with its zone",
        ),
        ({"opening_hours": {"b": {"start": "soon", "end": "2026-11-22T16:00:00Z"}}}, "must be a time like"),
        ({"bucket": 1}, "must be a text"),
    ],
)
def test_a_field_of_the_wrong_kind_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        from_json(ControllerSettings, {**to_json(settings()), **change}, "the settings")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("null", "an object"),
        ("{}", "lacks job, phase"),
        ('{"schema_version": "2"}', "lacks job, phase"),
    ],
)
def test_a_malformed_state_is_refused(text: str, message: str) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        read_state(text, "s3://bucket/control/state.json")
    assert not isinstance(caught.value, NewerStateError)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 4, "spent_usd": {"usd": 1.0}}, "schema_version 4, this version 3"),
        ({"owed_usd": 5.0}, "unknown fields: owed_usd"),
        ({"phase": "moving"}, "phase is 'moving'"),
        ({"nodes": {"wanted": 3, "spare": 1}}, "nodes has unknown fields: spare"),
    ],
)
def test_a_state_of_a_newer_controller_is_told_from_a_broken_one(change: dict[str, Any], message: str) -> None:
    data = {**to_json(trained(World(settings())).known), **change}
    with pytest.raises(NewerStateError, match=message):
        read_state(json.dumps(data), "s3://bucket/control/state.json")


def test_a_state_of_an_earlier_controller_is_read_without_its_further_fields() -> None:
    known = trained(World(settings())).known
    earlier = {**to_json(known), "schema_version": 1, "decision": {"what": "waits"}}
    assert read_state(json.dumps(earlier), "state") == known


def test_a_request_is_read_strictly() -> None:
    assert read_request(json.dumps(REQUEST), "the request").want == "stop"
    with pytest.raises(FormatError, match="want is 'halt'"):
        read_request(json.dumps({**REQUEST, "want": "halt"}), "the request")


def test_nodes_look_at_their_lease_often_enough() -> None:
    folder = Path(state.__file__).parents[1]
    timer = (folder / "gpufleet-lease.timer").read_text()
    # At once, too: a node that fails within five minutes is replaced for as long as nobody counts.
    assert "\nOnActiveSec=0\n" in timer
    (minutes,) = re.findall(r"OnUnitActiveSec=(\d+)min", timer)
    assert timedelta(minutes=int(minutes)) < LEASE_ACTS
