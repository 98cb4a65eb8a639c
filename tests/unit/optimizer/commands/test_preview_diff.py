"""A stack's export against the program: only what a person would change differs."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from infra.offline.exported import SIGNATURE, ExportError, read_export
from infra.offline.preview import resources
from optimizer.commands.preview.difference import Before, changes, read_before
from tests.plans import sample_plan

# A real account's values for a preview's stand-ins.
REAL = {
    "000000000000": "123456789012",
    "us-east-1a": "us-east-1d",
    "ami-00000000000000000": "ami-0123456789abcdef0",
    "pl-00000000": "pl-63a5400a",
}


def export(**config: str) -> dict[str, Any]:
    """Write the sample plan's stack as `pulumi stack export` does, with AWS's identifiers."""
    declared = resources(sample_plan(), stack="dev", config={f"gpufleet:{key}": value for key, value in config.items()})
    real = dict(REAL)
    for resource in declared:
        real[f"{resource.name}-id"] = f"x-{abs(hash(resource.name)) % 10**10}"
        service = resource.type.split(":")[1].split("/")[0]
        real[f"arn:aws:{service}:::{resource.name}"] = f"arn:aws:{service}:us-east-1:123456789012:{resource.name}-a1b2"

    def named(text: str) -> str:
        for stand_in in sorted(real, key=len, reverse=True):
            text = text.replace(stand_in, real[stand_in])
        return text

    def realistic(value: dict[str, Any]) -> Any:
        if "userData" in value:
            text = base64.b64decode(value["userData"]).decode()
            value = {**value, "userData": base64.b64encode(named(text).encode()).decode()}
        return json.loads(named(json.dumps(value)))

    entries: list[dict[str, Any]] = [
        {"urn": "urn:pulumi:dev::gpufleet::pulumi:pulumi:Stack::s", "type": "pulumi:pulumi:Stack"}
    ]
    for resource in declared:
        service = resource.type.split(":")[1].split("/")[0]
        inputs = realistic(dict(resource.inputs))
        outputs = {
            **inputs,
            "arn": real.get(f"arn:aws:{service}:::{resource.name}"),
            "keyId": real[f"{resource.name}-id"],
            "prefixListId": "pl-63a5400a",
            "somethingAwsAdds": {"size": 1},
        }
        entries.append(
            {
                "urn": f"urn:pulumi:dev::gpufleet::{resource.type}::{resource.name}",
                "type": resource.type,
                "parent": f"urn:pulumi:dev::gpufleet::gpufleet:infra:X::{resource.parent}"
                if resource.parent
                else "urn:pulumi:dev::gpufleet::pulumi:pulumi:Stack::s",
                "id": real[f"{resource.name}-id"],
                "protect": resource.protected,
                "inputs": {**inputs, "name_": "made-up-7a3f", "__defaults": ["name_"]} if resource.parent else {},
                "outputs": outputs,
            }
        )
    return {"version": 3, "deployment": {"resources": entries}}


def differences(tmp_path: Path, data: dict[str, Any], **config: str) -> list[tuple[str, str, str]]:
    path = tmp_path / "dev.json"
    path.write_text(json.dumps(data))
    before = read_before(path, stack="dev")
    assert before.export is not None
    texts = {f"gpufleet:{key}": value for key, value in config.items()}
    after = resources(sample_plan(), stack="dev", config=texts, known=before.export.known)
    return [
        (change.kind, change.type.split(":")[-1], change.name) for change in changes(before.export.resources, after)
    ]


def test_what_is_deployed_as_declared_does_not_differ(tmp_path: Path) -> None:
    """Account, zones, image, identifiers and a provider's defaults are not what a person would change."""
    assert differences(tmp_path, export()) == []


def test_only_what_would_change_differs(tmp_path: Path) -> None:
    difference = differences(tmp_path, export(nat="true"), tags='{"team": "nlp"}')
    kinds = {name: kind for kind, _, name in difference}
    assert kinds["gpufleet-dev-nat"] == "removed" and kinds["gpufleet-dev-vpc"] == "changed"
    assert ("removed", "NatGateway", "gpufleet-dev-nat") in difference
    difference = differences(tmp_path, export(), nat="true")
    assert ("added", "NatGateway", "gpufleet-dev-nat") in difference
    assert not [kind for kind, _, _ in difference if kind == "removed"]


def test_a_changed_argument_that_cannot_change_in_place_replaces(tmp_path: Path) -> None:
    difference = differences(tmp_path, export(), vpcCidr="10.7.0.0/16")
    assert {("replaced", "Vpc", "gpufleet-dev-vpc"), ("replaced", "Subnet", "gpufleet-dev-use1-az2")} <= set(difference)


def test_an_export_tells_account_region_zones_and_image() -> None:
    exported = read_export(export())
    assert (exported.stack, exported.region) == ("dev", "us-east-1")
    assert exported.known.account == "123456789012" and exported.known.image == "ami-0123456789abcdef0"
    assert exported.known.zones == {"use1-az2": "us-east-1d"}


def test_secrets_and_assets_are_not_compared() -> None:
    data = export()
    bucket = next(entry for entry in data["deployment"]["resources"] if entry["type"].endswith("Bucket"))
    bucket["inputs"] |= {
        "source": {SIGNATURE: "c44067f5952c0a294b673a41bacd8c17", "hash": "a"},
        "list": [{SIGNATURE: "x"}],
    }
    (bucket,) = [resource for resource in read_export(data).resources if resource.kind == "Bucket"]
    assert "source" not in bucket.inputs and bucket.inputs["list"] == []


@pytest.mark.parametrize("resources_", [[], [{"type": "aws:x"}], [{"type": "aws:x", "urn": 1}]])
def test_what_is_no_export_is_refused(resources_: list[Any]) -> None:
    with pytest.raises(ExportError):
        read_export({"deployment": {"resources": resources_}})


def test_recommends_output_and_a_plan_are_read_as_plans(tmp_path: Path) -> None:
    for data in (sample_plan().model_dump(mode="json"), {"plans": [sample_plan().model_dump(mode="json")]}):
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(data))
        assert read_before(path, stack="dev") == Before(origin=str(path), plan=sample_plan())
