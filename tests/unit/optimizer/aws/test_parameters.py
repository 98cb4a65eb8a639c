"""Parameters of a stack go along with its run, each checked against AWS's model of the request."""

from __future__ import annotations

import boto3
import pytest
from botocore.stub import Stubber

from infra.naming import Names
from optimizer.aws import clients
from optimizer.aws.parameters import Parameter, write_parameters
from optimizer.commands.handover import _carry_parameters
from optimizer.contract.errors import GpufleetError

OLD, NEW = (
    Names(stack=stack, account_id="111122223333", region=region, partition="aws")
    for stack, region in (("dev", "us-east-1"), ("dev-eu-west-1", "eu-west-1"))
)


@pytest.fixture
def ssm(monkeypatch: pytest.MonkeyPatch) -> dict[str, Stubber]:
    """A stub of each region's client."""
    session = boto3.Session(aws_access_key_id="a", aws_secret_access_key="s")
    stubs = {names.region: Stubber(session.client("ssm", region_name=names.region)) for names in (OLD, NEW)}
    for stub in stubs.values():
        stub.activate()
    monkeypatch.setattr(clients, "ssm", lambda region: stubs[region].client)
    return stubs


def test_a_secret_is_encrypted_with_the_new_stacks_key_and_nothing_is_overwritten(ssm: dict[str, Stubber]) -> None:
    stub, common = ssm["eu-west-1"], {"DataType": "text", "Tier": "Intelligent-Tiering", "Overwrite": False}
    secret = {"Name": f"{NEW.parameter_path}/token", "Value": "s3cret", "Type": "SecureString"}
    stub.add_response("put_parameter", {"Version": 1}, secret | common | {"KeyId": NEW.key_alias})
    stub.add_client_error("put_parameter", "ParameterAlreadyExists")
    parameters = [
        Parameter(name="token", kind="SecureString", data_type="text", value="s3cret"),
        Parameter(name="deep/run", kind="StringList", data_type="text", value="a,b"),
    ]
    written = write_parameters(stub.client, NEW.parameter_path, parameters, key_id=NEW.key_alias)
    assert written == ["token"]
    stub.assert_no_pending_responses()


def test_an_image_is_left_behind_and_a_parameter_that_cannot_be_written_stops_the_hand_over(
    ssm: dict[str, Stubber], capsys: pytest.CaptureFixture[str]
) -> None:
    ami = {"Name": f"{OLD.parameter_path}/ami", "Value": "ami-1", "Type": "String", "DataType": "aws:ec2:image"}
    token = {"Name": f"{OLD.parameter_path}/token", "Value": "s3cret", "Type": "SecureString", "DataType": "text"}
    asked = {"Path": OLD.parameter_path, "Recursive": True, "WithDecryption": True}
    ssm["us-east-1"].add_response("get_parameters_by_path", {"Parameters": [ami, token]}, asked)
    ssm["eu-west-1"].add_client_error("put_parameter", "AccessDeniedException")
    with pytest.raises(GpufleetError, match="cannot be written") as caught:
        _carry_parameters(OLD, NEW, "gpufleet move eu-west-1")
    assert caught.value.next_step == "gpufleet move eu-west-1" and "s3cret" not in str(caught.value)
    assert "parameter ami is left behind" in capsys.readouterr().err


def test_without_the_permission_to_read_the_hand_over_goes_on_and_says_what_to_do(
    ssm: dict[str, Stubber], capsys: pytest.CaptureFixture[str]
) -> None:
    ssm["us-east-1"].add_client_error("get_parameters_by_path", "AccessDeniedException")
    _carry_parameters(OLD, NEW, "gpufleet move eu-west-1")
    assert f"make them below {NEW.parameter_path} in eu-west-1" in capsys.readouterr().err
