"""Check the account of the credentials, and that the account has enabled the region."""

from __future__ import annotations

from collections.abc import Iterator

from optimizer.aws import clients, errors
from optimizer.contract.errors import GpufleetError
from optimizer.preflight.model import Account, Context, Finding, Unknown, ask, failure, passed

# Errors after which no other call would work.
_FATAL = (
    errors.has_no_credentials,
    errors.is_misconfigured,
    errors.has_bad_credentials,
    errors.is_unreachable,
    errors.is_unreadable,
)


def home_region(region: str) -> str:
    """Return a region that every account of ``region``'s partition has enabled: its refusal is about the account."""
    return "us-gov-west-1" if region.startswith("us-gov-") else clients.HOME_REGION


def identify(region: str) -> Account | Unknown:
    """Return the account of the credentials; the call needs no permission.

    https://docs.aws.amazon.com/STS/latest/APIReference/API_GetCallerIdentity.html

    Raises:
        GpufleetError: there are no credentials, AWS refuses them, or it cannot be reached.
    """

    def call() -> Account:
        try:
            answer = clients.sts(home_region(region)).get_caller_identity()
        except Exception as error:
            if any(predicate(error) for predicate in _FATAL):
                raise GpufleetError(
                    f"nothing was checked: {errors.reason(error)}",
                    limit="credentials that may read, and a way to AWS",
                    why="preflight asks the account the plan would run in",
                    next_step=errors.CHECK_CREDENTIALS,
                ) from error
            raise
        return Account(id=answer["Account"], arn=answer["Arn"])

    return ask(call)


def check_region(context: Context) -> Iterator[Finding]:
    """Check first: a region that is not enabled refuses every call as if the credentials were wrong."""
    ec2 = clients.ec2(home_region(context.region))
    answer = ec2.describe_regions(AllRegions=True, Filters=[{"Name": "region-name", "Values": [context.region]}])
    regions = {region["RegionName"]: region["OptInStatus"] for region in answer["Regions"]}
    status = regions.get(context.region)
    if status is None:
        yield failure(
            "region",
            f"AWS knows no region {context.region} for this account",
            value=context.region,
            next_step="gpufleet recommend --region REGION",
        )
    elif status == "not-opted-in":
        yield failure(
            "region",
            f"the account has not enabled {context.region}",
            value=status,
            limit="opted-in",
            why="every call there is refused, and enabling takes minutes to hours",
            next_step=f"aws account enable-region --region-name {context.region}",
        )
    else:
        yield passed("region", f"{context.region} is enabled ({status})", value=status)
