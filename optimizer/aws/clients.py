"""boto3 clients, all configured in one place; retries and paging are botocore's."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from boto3.session import Session
    from mypy_boto3_autoscaling import AutoScalingClient
    from mypy_boto3_ec2 import EC2Client
    from mypy_boto3_kms import KMSClient
    from mypy_boto3_pricing import PricingClient
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_sts import STSClient

# The Price List API answers for every region, from three: https://docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/using-the-aws-price-list-query-api.html
PRICING_REGION = "us-east-1"
# Cost Explorer is one service for all regions, and answers here:
# https://docs.aws.amazon.com/general/latest/gr/billing.html#billing-cost-explorer
COST_EXPLORER_REGION = "us-east-1"
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


def sts(region: str) -> STSClient:
    """A client that says whose credentials these are."""
    return _session().client("sts", region_name=region, config=_config())


def kms(region: str) -> KMSClient:
    """A KMS client of ``region``."""
    return _session().client("kms", region_name=region, config=_config())


def s3(region: str) -> S3Client:
    """An S3 client of ``region``."""
    return _session().client("s3", region_name=region, config=_config())


def service_quotas(region: str) -> Any:
    """A Service Quotas client of ``region``."""
    return _session().client("service-quotas", region_name=region, config=_config())


def lambda_(region: str) -> Any:
    """A Lambda client of ``region``."""
    return _session().client("lambda", region_name=region, config=_config())


def budgets() -> Any:
    """A client of AWS Budgets, which knows one endpoint: https://docs.aws.amazon.com/general/latest/gr/billing.html."""
    return _session().client("budgets", region_name=HOME_REGION, config=_config())


def autoscaling(region: str) -> AutoScalingClient:
    """An EC2 Auto Scaling client of ``region``."""
    return _session().client("autoscaling", region_name=region, config=_config())


def cloudwatch(region: str) -> Any:
    """A CloudWatch client of ``region``."""
    return _session().client("cloudwatch", region_name=region, config=_config())


def cost_explorer() -> Any:
    """A Cost Explorer client; AWS bills each of its requests."""
    return _session().client("ce", region_name=COST_EXPLORER_REGION, config=_config())


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
