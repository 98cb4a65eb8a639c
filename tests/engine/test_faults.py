"""The next call of an action is refused, once, in the words of its protocol."""

from __future__ import annotations

import pytest
from botocore.exceptions import ClientError

from tests.engine.faults import refuse_next
from tests.engine.inventory import Client


def test_the_next_call_is_refused_and_acts_on_nothing(aws: Client) -> None:
    refuse_next(aws, "CreateVpc", "UnauthorizedOperation")
    refuse_next(aws, "CreateTopic", "AuthorizationError")
    refuse_next(aws, "CreateLogGroup", "LimitExceededException")
    ec2, sns, logs = aws("ec2"), aws("sns"), aws("logs")
    vpcs = len(ec2.describe_vpcs()["Vpcs"])
    with pytest.raises(ClientError, match=r"\(UnauthorizedOperation\).*CreateVpc is refused"):
        ec2.create_vpc(CidrBlock="10.0.0.0/16")
    assert len(ec2.describe_vpcs()["Vpcs"]) == vpcs
    with pytest.raises(ClientError, match=r"\(AuthorizationError\)"):
        sns.create_topic(Name="a")
    with pytest.raises(logs.exceptions.LimitExceededException):
        logs.create_log_group(logGroupName="a")
    ec2.create_vpc(CidrBlock="10.0.0.0/16")
    sns.create_topic(Name="a")
    logs.create_log_group(logGroupName="a")
