"""boto3 clients, configured in one place; botocore does retries and paging."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from boto3.session import Session
    from mypy_boto3_autoscaling import AutoScalingClient
    from mypy_boto3_ec2 import EC2Client
    from mypy_boto3_kms import KMSClient
    from mypy_boto3_pricing import PricingClient
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_sts import STSClient

# One of the three endpoints of the Price List API, which has the prices of all regions:
# https://docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/using-the-aws-price-list-query-api.html
PRICING_REGION = "us-east-1"
# The one endpoint of Cost Explorer:
# https://docs.aws.amazon.com/general/latest/gr/billing.html#billing-cost-explorer
COST_EXPLORER_REGION = "us-east-1"
# Answers where the user named no region.
HOME_REGION = "us-east-1"
CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 30.0
MAX_ATTEMPTS = 6


def ec2(region: str) -> EC2Client:
    """Return an EC2 client of ``region``; every function here raises as ``_client``."""
    return cast("EC2Client", _client("ec2", region))


def pricing() -> PricingClient:
    """Return a client of the Price List Query API."""
    return cast("PricingClient", _client("pricing", PRICING_REGION))


def sts(region: str) -> STSClient:
    """Return a client that tells whose credentials these are."""
    return cast("STSClient", _client("sts", region))


def kms(region: str) -> KMSClient:
    """Return a KMS client of ``region``."""
    return cast("KMSClient", _client("kms", region))


def s3(region: str) -> S3Client:
    """Return an S3 client of ``region``."""
    return cast("S3Client", _client("s3", region))


def service_quotas(region: str) -> Any:
    """Return a Service Quotas client of ``region``."""
    return _client("service-quotas", region)


def lambda_(region: str) -> Any:
    """Return a Lambda client of ``region``."""
    return _client("lambda", region)


def budgets() -> Any:
    """Return a client of AWS Budgets, at its one endpoint: https://docs.aws.amazon.com/general/latest/gr/billing.html."""
    return _client("budgets", HOME_REGION)


def autoscaling(region: str) -> AutoScalingClient:
    """Return an EC2 Auto Scaling client of ``region``."""
    return cast("AutoScalingClient", _client("autoscaling", region))


def cloudwatch(region: str) -> Any:
    """Return a CloudWatch client of ``region``."""
    return _client("cloudwatch", region)


def cost_explorer() -> Any:
    """Return a Cost Explorer client; AWS bills each request."""
    return _client("ce", COST_EXPLORER_REGION)


def _client(service: str, region: str) -> Any:
    """Return a client of ``service``.

    Raises:
        botocore.exceptions.BotoCoreError: profile, configuration file, region or endpoint is unusable.
    """
    from botocore.exceptions import InvalidEndpointConfigurationError

    session: Any = _session()  # its type knows services only by literal names
    try:
        return session.client(service, region_name=region, config=_config())
    except ValueError as error:  # AWS_ENDPOINT_URL is no URL
        raise InvalidEndpointConfigurationError(msg=str(error)) from error


def _session() -> Session:
    import boto3

    # One session a client: several threads must not make clients from the default session.
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
