"""boto3 clients, configured in one place; botocore does retries and paging."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib import metadata
from json import JSONDecodeError
from typing import TYPE_CHECKING, Any

from botocore.config import Config
from botocore.exceptions import CredentialRetrievalError, InvalidEndpointConfigurationError
from botocore.loaders import create_loader
from botocore.session import Session

if TYPE_CHECKING:
    from botocore.loaders import Loader
    from mypy_boto3_autoscaling import AutoScalingClient
    from mypy_boto3_ec2 import EC2Client
    from mypy_boto3_pricing import PricingClient
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_sts import STSClient

# Has the endpoints of services without regions; stands in where the user named none.
HOME_REGION = "us-east-1"
CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 30.0
MAX_ATTEMPTS = 6


def _client(service: str, region: str, attempts: int | None = None) -> Any:
    config = Config(
        # `standard` backs off with jitter: https://docs.aws.amazon.com/boto3/latest/guide/retries.html
        retries={"mode": "standard", "total_max_attempts": attempts or MAX_ATTEMPTS},
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=READ_TIMEOUT_S,
        user_agent_extra=f"gpufleet/{metadata.version('gpufleet')}",
    )
    try:
        return _session().create_client(service, region_name=region, config=config)
    except (AttributeError, KeyError, TypeError, JSONDecodeError) as error:
        what = f"credential_process of the profile prints no credentials as JSON ({error!r})"
        raise CredentialRetrievalError(provider="custom-process", error_msg=what) from error
    except ValueError as error:  # AWS_ENDPOINT_URL is no URL
        raise InvalidEndpointConfigurationError(msg=str(error)) from error


def _session() -> Session:
    # One session a client, because of threads:
    # https://docs.aws.amazon.com/boto3/latest/guide/clients.html#multithreading-or-multiprocessing-with-clients
    session = Session()
    # One reader of the services' descriptions for all, as they take a client 0.1 s to read.
    session.register_component("data_loader", _loader())
    return session


@cache
def _loader() -> Loader:
    return create_loader()


# Clients of a region.
autoscaling: Callable[[str], AutoScalingClient] = partial(_client, "autoscaling")
ecr: Callable[[str], Any] = partial(_client, "ecr")
ec2: Callable[[str], EC2Client] = partial(_client, "ec2")
# For a call that spends and takes no client token: botocore must not send it twice.
ec2_once: Callable[[str], EC2Client] = partial(_client, "ec2", attempts=1)
fis: Callable[[str], Any] = partial(_client, "fis")
logs: Callable[[str], Any] = partial(_client, "logs")
s3: Callable[[str], S3Client] = partial(_client, "s3")
service_quotas: Callable[[str], Any] = partial(_client, "service-quotas")
ssm: Callable[[str], Any] = partial(_client, "ssm")
sts: Callable[[str], STSClient] = partial(_client, "sts")
# Services with one endpoint: https://docs.aws.amazon.com/general/latest/gr/billing.html. The Price List API has three:
# https://docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/using-the-aws-price-list-query-api.html
cost_explorer: Callable[[], Any] = partial(_client, "ce", HOME_REGION)
pricing: Callable[[], PricingClient] = partial(_client, "pricing", HOME_REGION)
