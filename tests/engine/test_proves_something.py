"""The engine's tests can fail: the provider's validation is real, a hanging destroy is noticed, and so is a leak."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.deployment import Deployment, Tools, deployment
from tests.engine.inventory import Client, inventory, left_behind
from tests.engine.pulumi_cli import PulumiError

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(scope="module")
def refused(tools: Tools, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    scratch = tmp_path_factory.mktemp("refused")
    shutil.copytree(FIXTURES / "refused", scratch / "project")
    with deployment(tools, scratch, "refused") as deployed:
        yield deployed


@pytest.mark.parametrize(
    ("resource", "complaint"),
    [
        ("name", "invalid value for name (cannot begin with sg-)"),
        ("value", 'expected http_tokens to be one of ["optional" "required"]'),
        ("conflict", '"event_pattern": one of `event_pattern,schedule_expression` must be specified'),
        ("argument", "aws_vpc: no argument unicorn"),
    ],
)
@pytest.mark.engine
def test_a_wrong_resource_is_refused_before_anything_exists(resource: str, complaint: str, refused: Deployment) -> None:
    empty = inventory(refused.aws)
    refused.stack.configure("resource", resource)
    with pytest.raises(PulumiError) as error:
        refused.stack.up()
    assert complaint in str(error.value)
    assert left_behind(empty, inventory(refused.aws)) == {}


@pytest.mark.engine
def test_a_destroy_that_waits_for_protected_nodes_is_noticed(tools: Tools, tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "undrained", tmp_path / "project")
    with deployment(tools, tmp_path, "undrained") as deployed:
        empty = inventory(deployed.aws)
        deployed.stack.up()
        with pytest.raises(PulumiError, match="did not end within 20 s"):
            deployed.stack.destroy(time_limit_s=20)
        assert "instance" in left_behind(empty, inventory(deployed.aws))


def test_a_leak_is_named(aws: Client) -> None:
    empty = inventory(aws)
    assert left_behind(empty, inventory(aws)) == {}
    aws("s3").create_bucket(Bucket="forgotten")
    vpc = aws("ec2").create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    key = aws("kms").create_key()["KeyMetadata"]["KeyId"]
    leaks = left_behind(empty, inventory(aws))
    assert leaks["bucket"] == ["forgotten"]
    assert leaks["vpc"] == [vpc]
    assert leaks["key"] == [key]
    aws("kms").schedule_key_deletion(KeyId=key, PendingWindowInDays=7)
    assert "key" not in left_behind(empty, inventory(aws)), "AWS deletes a key only after a waiting period"
