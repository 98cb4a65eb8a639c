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
    """An EC2 client of ``region``; every client raises as ``_client``."""
    client: EC2Client = _client("ec2", region)
    return client


def pricing() -> PricingClient:
    """A client of the Price List Query API, which knows the prices of all regions."""
    client: PricingClient = _client("pricing", PRICING_REGION)
    return client


def sts(region: str) -> STSClient:
    """A client that says whose credentials these are."""
    client: STSClient = _client("sts", region)
    return client


def kms(region: str) -> KMSClient:
    """A KMS client of ``region``."""
    client: KMSClient = _client("kms", region)
    return client


def s3(region: str) -> S3Client:
    """An S3 client of ``region``."""
    client: S3Client = _client("s3", region)
    return client


def service_quotas(region: str) -> Any:
    """A Service Quotas client of ``region``."""
    return _client("service-quotas", region)


def lambda_(region: str) -> Any:
    """A Lambda client of ``region``."""
    return _client("lambda", region)


def budgets() -> Any:
    """A client of AWS Budgets, which knows one endpoint: https://docs.aws.amazon.com/general/latest/gr/billing.html."""
    return _client("budgets", HOME_REGION)


def autoscaling(region: str) -> AutoScalingClient:
    """An EC2 Auto Scaling client of ``region``."""
    client: AutoScalingClient = _client("autoscaling", region)
    return client


def cloudwatch(region: str) -> Any:
    """A CloudWatch client of ``region``."""
    return _client("cloudwatch", region)


def cost_explorer() -> Any:
    """A Cost Explorer client; AWS bills each of its requests."""
    return _client("ce", COST_EXPLORER_REGION)


def _client(service: str, region: str) -> Any:
    """A client of ``service``.

    Raises:
        botocore.exceptions.BotoCoreError: profile, configuration file, region or endpoint cannot be used.
    """
    from botocore.exceptions import InvalidEndpointConfigurationError

    session: Any = _session()  # its type knows services by literal names only
    try:
        return session.client(service, region_name=region, config=_config())
    except ValueError as error:  # botocore's of an AWS_ENDPOINT_URL that is no URL
        raise InvalidEndpointConfigurationError(msg=str(error)) from error


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
