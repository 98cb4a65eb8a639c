"""The proposed new state is Terraform core's."""

from __future__ import annotations

from typing import Any

from tests.engine.plugin.planning import proposed_new_state
from tests.engine.plugin.values import PULUMI_UNKNOWN, UNKNOWN, to_terraform
from tests.engine.schemas import NODE


def config(**properties: Any) -> dict[str, Any]:
    problems: list[str] = []
    state = to_terraform(NODE, properties, "node", problems)
    assert problems == []
    return state


def test_on_create_what_the_provider_computes_is_null_and_not_unknown() -> None:
    assert proposed_new_state(NODE, config(name="a"), None) == config(name="a")


def test_on_update_what_the_provider_computed_stays() -> None:
    prior = {**config(name="a"), "arn": "arn:a", "default_version": 3}
    proposed = proposed_new_state(NODE, config(name="b"), prior)
    assert (proposed["name"], proposed["arn"], proposed["default_version"]) == ("b", "arn:a", 3)


def test_what_the_configuration_says_wins_over_what_was_computed() -> None:
    prior = {**config(), "default_version": 3}
    assert proposed_new_state(NODE, config(defaultVersion=1), prior)["default_version"] == 1


def test_an_argument_taken_away_is_null_unless_computed() -> None:
    assert proposed_new_state(NODE, config(), config(name="a"))["name"] is None


def test_list_blocks_keep_computed_values_by_position() -> None:
    prior = config(disks=[{"deviceName": "a", "volumeSize": 8}, {"deviceName": "b", "volumeSize": 16}])
    proposed = proposed_new_state(NODE, config(disks=[{"deviceName": "a"}]), prior)
    assert proposed["disk"] == [{"device_name": "a", "volume_size": 8}]


def test_set_blocks_keep_computed_values_by_content() -> None:
    prior = config(rules=[{"port": 1}, {"port": 2}])
    for rule, name in zip(prior["rule"], ("one", "two"), strict=True):
        rule["rule_id"] = name
    proposed = proposed_new_state(NODE, config(rules=[{"port": 2}, {"port": 3}]), prior)
    assert proposed["rule"] == [{"port": 2, "rule_id": "two"}, {"port": 3, "rule_id": None}]


def test_unknown_blocks_are_proposed_as_they_are() -> None:
    assert proposed_new_state(NODE, config(disks=[PULUMI_UNKNOWN]), None)["disk"] == [UNKNOWN]
