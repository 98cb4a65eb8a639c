"""boto3 clients, all configured in one place; retries and paging are botocore's."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from boto3.session import Session
    from mypy_boto3_ec2 import EC2Client
    from mypy_boto3_pricing import PricingClient

# The Price List API answers for every region, from three: https://docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/using-the-aws-price-list-query-api.html
PRICING_REGION = "us-east-1"
# Where an account's list of regions is asked for, when the user named none.
HOME_REGION = "us-east-1"
CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 30.0
MAX_ATTEMPTS = 6


def ec2(region: str) -> EC2Client:
    """An EC2 client of ``region``.

    Raises:
        botocore.exceptions.BotoCoreError: the profile or region cannot be used.
    """
    return _session().client("ec2", region_name=region, config=_config())


def pricing() -> PricingClient:
    """A client of the Price List Query API, which knows the prices of all regions."""
    return _session().client("pricing", region_name=PRICING_REGION, config=_config())


def _session() -> Session:
    import boto3

    # One for each client: the default session is not safe to make clients from in several threads.
    # https://docs.aws.amazon.com/boto3/latest/guide/clients.html#multithreading-or-multiprocessing-with-clients
    return boto3.session.Session()


def _config() -> Any:
    from botocore.config import Config

    # `standard` backs off with jitter and knows which errors to try again:
    # https://docs.aws.amazon.com/boto3/latest/guide/retries.html
    return Config(
        retries={"mode": "standard", "total_max_attempts": MAX_ATTEMPTS},
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=READ_TIMEOUT_S,
        user_agent_extra=f"gpufleet/{metadata.version('gpufleet')}",
    )
