"""The account, and the zones in it."""

from __future__ import annotations

from typing import Any

import pytest

from optimizer.commands.preflight import preflight
from optimizer.commands.preflight.model import Unknown
from optimizer.contract.errors import GpufleetError
from tests.unit.optimizer.commands.preflight.account import FakeAws, Refusal, aws, context, target

__all__ = ["aws"]


CODES = ["ExpiredToken", "OptInRequired", "InvalidClientTokenId", "SignatureDoesNotMatch"]


@pytest.mark.parametrize("answer", [{}, *(Refusal(code, 403) for code in CODES)])
def test_without_an_account_nothing_is_checked(aws: FakeAws, answer: Any) -> None:
    aws.answers["GetCallerIdentity"] = answer
    with pytest.raises(GpufleetError, match="AWS does not say whose account this is: ") as caught:
        preflight(target(), stack="dev")
    assert caught.value.exit_code == 1 and "aws sts get-caller-identity" in caught.value.next_step


def test_the_nodes_go_to_the_zones_of_given_subnets_else_to_the_stacks_or_the_plans(aws: FakeAws) -> None:
    own: dict[str, Any] = {"vpc_id": "vpc-1", "subnet_ids": ("subnet-1",), "zone_id": "use1-az2"}
    assert context(**own, subnets=[{"SubnetId": "subnet-1", "AvailabilityZoneId": "use1-az4"}]).zone_ids == (
        "use1-az4",
    )
    assert context(**own, subnets=Unknown(reason="denied")).zone_ids == ()
    assert context(zone_id="use1-az6").zone_ids == ("use1-az6",)
    assert context().zone_ids == ("use1-az2",) and context(mode="workers").zone_ids == ("use1-az2", "use1-az6")
