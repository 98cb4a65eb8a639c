"""Values between Pulumi and Terraform: nothing is lost, nothing unknown or misspelt gets through."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.plugin import newer_arguments
from tests.engine.plugin.schema import Attribute, Block
from tests.engine.plugin.values import (
    ARCHIVE,
    ASSET,
    PULUMI_UNKNOWN,
    SIGNATURE,
    UNKNOWN,
    UnsupportedValueError,
    coerce,
    comparable,
    decode,
    encode,
    from_terraform,
    is_unknown,
    to_terraform,
)
from tests.engine.schemas import NODE

texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=20)
numbers = st.integers(-(2**53), 2**53)
nodes = st.fixed_dictionaries(
    {},
    optional={
        "name": texts,
        "count": numbers,
        "protected": st.booleans(),
        "subnetIds": st.lists(texts, max_size=3),
        "commands": st.lists(texts, max_size=3),
        "tags": st.dictionaries(texts, texts, max_size=3),
        "ingresses": st.lists(
            st.fixed_dictionaries({"fromPort": numbers, "cidrBlocks": st.lists(texts, max_size=2)}), max_size=2
        ),
        "metadataOptions": st.fixed_dictionaries({"httpTokens": texts}),
        "disks": st.lists(st.fixed_dictionaries({"deviceName": texts}, optional={"volumeSize": numbers}), max_size=3),
        "rules": st.lists(st.fixed_dictionaries({"port": numbers}), max_size=3),
        "timeouts": st.fixed_dictionaries({"create": texts}),
    },
)


def given_only(properties: dict[str, Any]) -> dict[str, Any]:
    """Without the empty lists of blocks: Terraform does not tell an absent block from no blocks."""
    return {key: value for key, value in properties.items() if not (key in ("disks", "rules") and value == [])}


@given(nodes)
def test_properties_survive_the_way_to_terraform_and_back(properties: dict[str, Any]) -> None:
    problems: list[str] = []
    state = decode(encode(to_terraform(NODE, properties, "node", problems)))
    assert problems == []
    assert given_only(from_terraform(NODE, state)) == given_only(properties)


@given(nodes)
def test_a_terraform_object_has_every_attribute_and_block(properties: dict[str, Any]) -> None:
    state = to_terraform(NODE, properties, "node", [])
    assert state.keys() == NODE.attributes.keys() | NODE.blocks.keys()


def test_an_absent_repeated_block_is_an_empty_list_and_everything_else_null() -> None:
    state = to_terraform(NODE, {}, "node", [])
    assert {name for name, value in state.items() if value == []} == {"metadata_options", "disk", "rule"}
    assert {name for name, value in state.items() if value is None} == state.keys() - {
        "metadata_options",
        "disk",
        "rule",
    }


@pytest.mark.parametrize(
    "properties",
    [
        {"subnetId": ["a"]},  # Terraform's singular
        {"http_tokens": "required"},
        {"metadataOptions": {"httpToken": "required"}},
        {"disks": [{"size": 1}]},
        {"ingresses": [{"fromPort": 1, "toPort": 2}]},
    ],
)
def test_an_argument_that_does_not_exist_is_a_problem(properties: dict[str, Any]) -> None:
    problems: list[str] = []
    to_terraform(NODE, properties, "node", problems)
    assert len(problems) == 1
    assert "no argument" in problems[0]


def test_a_newer_argument_is_left_out_only_where_it_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(newer_arguments.NEWER_ARGUMENTS, "node.disk.warmUp", "for this test")
    problems: list[str] = []
    state = to_terraform(NODE, {"disks": [{"deviceName": "a", "warmUp": True}], "warmUp": True}, "node", problems)
    assert state["disk"] == [{"device_name": "a", "volume_size": None}]
    assert [problem.split(";")[0] for problem in problems] == ["node: no argument warmUp"]


@pytest.mark.parametrize(
    ("value", "cty_type", "converted"),
    [
        (2.0, "string", "2"),
        (0.5, "string", "0.5"),
        (True, "string", "true"),
        ("true", "bool", True),
        ("8", "number", 8),
        (8.0, "number", 8),
        (0.25, "number", 0.25),
        ("one", ["list", "string"], ["one"]),
        (PULUMI_UNKNOWN, "number", UNKNOWN),
        ([PULUMI_UNKNOWN], ["set", "string"], [UNKNOWN]),
        (None, ["list", "string"], None),
    ],
)
def test_conversions_are_terraforms(value: Any, cty_type: Any, converted: Any) -> None:
    assert coerce(value, cty_type, "x") == converted


@pytest.mark.parametrize(
    ("value", "cty_type"),
    [
        ("yes", "bool"),
        (1, "bool"),
        ("many", "number"),
        (True, "number"),
        ({"a": 1}, "string"),
        ("a", ["map", "string"]),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(value: Any, cty_type: Any) -> None:
    with pytest.raises(UnsupportedValueError, match=r"^node\.x: "):
        coerce(value, cty_type, "node.x")


def test_unknowns_stay_unknown_in_attributes_and_blocks() -> None:
    properties = {"name": PULUMI_UNKNOWN, "disks": [PULUMI_UNKNOWN], "metadataOptions": {"httpTokens": PULUMI_UNKNOWN}}
    state = decode(encode(to_terraform(NODE, properties, "node", [])))
    assert is_unknown(state["name"])
    assert is_unknown(state["disk"][0])
    assert from_terraform(NODE, state) == {**properties, "rules": []}


def test_a_list_that_pulumi_flattens_is_its_only_item() -> None:
    authority = Attribute(name="ca", pulumi_name="ca", type=["list", ["object", {"data": "string"}]], flat=True)
    flat = Block(attributes={"ca": authority}, blocks={})
    assert from_terraform(flat, {"ca": [{"data": "x"}]}) == {"ca": {"data": "x"}}
    assert from_terraform(flat, {"ca": []}) == {}
    assert from_terraform(flat, {"ca": UNKNOWN}) == {"ca": PULUMI_UNKNOWN}


def test_a_refined_unknown_is_unknown_too() -> None:
    refined = msgpack.ExtType(12, msgpack.packb({1: False}))
    assert from_terraform(NODE, {"name": refined}) == {"name": PULUMI_UNKNOWN}


def test_a_file_asset_is_a_path_that_changes_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    file = tmp_path / "a.whl"
    paths = []
    for content in ("one", "two"):
        file.write_text(content)
        path = coerce({SIGNATURE: ASSET, "path": str(file), "hash": content}, "string", "x")
        assert Path(path).read_text() == content
        paths.append(path)
    assert paths[0] != paths[1]


def test_an_archive_is_its_file_or_a_zip_of_its_assets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    file = tmp_path / "code.zip"
    file.write_bytes(b"zipped")
    path = coerce({SIGNATURE: ARCHIVE, "path": str(file), "hash": "one"}, "string", "x")
    assert Path(path).read_bytes() == b"zipped"
    assets = {"a.py": {SIGNATURE: ASSET, "text": "pass"}, "b.zip": {SIGNATURE: ASSET, "path": str(file)}}
    with zipfile.ZipFile(coerce({SIGNATURE: ARCHIVE, "assets": assets, "hash": "two"}, "string", "x")) as archive:
        assert {name: archive.read(name) for name in archive.namelist()} == {"a.py": b"pass", "b.zip": b"zipped"}


@given(nodes, st.randoms())
def test_the_order_of_a_set_is_no_change(properties: dict[str, Any], random: Any) -> None:
    state = to_terraform(NODE, properties, "node", [])
    shuffled = {**state, "rule": list(state["rule"]), "subnet_id": list(state["subnet_id"] or [])}
    random.shuffle(shuffled["rule"])
    random.shuffle(shuffled["subnet_id"])
    assert comparable(NODE, shuffled) == comparable(NODE, state)


def test_the_order_of_a_list_is_a_change() -> None:
    one = to_terraform(NODE, {"commands": ["a", "b"]}, "node", [])
    other = to_terraform(NODE, {"commands": ["b", "a"]}, "node", [])
    assert comparable(NODE, one) != comparable(NODE, other)
    disks = [{"deviceName": "a"}, {"deviceName": "b"}]
    one = to_terraform(NODE, {"disks": disks}, "node", [])
    other = to_terraform(NODE, {"disks": disks[::-1]}, "node", [])
    assert comparable(NODE, one) != comparable(NODE, other)


@pytest.mark.parametrize("change", [{"count": 0}, {"name": ""}, {"protected": False}])
def test_zero_is_not_absent(change: dict[str, Any]) -> None:
    assert comparable(NODE, to_terraform(NODE, change, "node", [])) != comparable(NODE, None)
