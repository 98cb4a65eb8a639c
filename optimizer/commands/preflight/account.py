"""Check the account: whose it is, and the key that an existing stack's checkpoints are under."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from optimizer.aws import clients, errors
from optimizer.commands.preflight.model import Account, Context, Finding, Unknown, ask, failure, find, passed, unknown
from optimizer.contract.errors import GpufleetError


def identify(region: str) -> Account | Unknown:
    """Return the account of the credentials; the call needs no permission, and the region to be enabled.

    https://docs.aws.amazon.com/STS/latest/APIReference/API_GetCallerIdentity.html

    Raises:
        GpufleetError: there are no credentials, AWS refuses them in ``region``, or it cannot be reached.
    """

    def call() -> Account:
        try:
            answer = clients.sts(region).get_caller_identity()
        except Exception as error:
            if errors.stops_all_calls(error):
                raise GpufleetError(
                    f"nothing was checked in {region}: {errors.reason(error)}",
                    limit="credentials that may read, and a way to AWS",
                    why="preflight asks the account the plan would run in",
                    next_step=f"{errors.CHECK_CREDENTIALS}; aws account enable-region --region-name {region} enables "
                    "a region",
                ) from error
            raise
        return Account(id=answer["Account"], arn=answer["Arn"])

    return ask(call)


def check_key(context: Context) -> Iterator[Finding]:
    """Check the state of the key with the stack's alias."""
    if not context.stack:
        yield unknown(
            "no stack was named",
            why="an existing stack's key may be disabled or waiting to be deleted",
            next_step="gpufleet preflight PLAN --stack NAME",
        )
        return
    alias, kms = context.key_alias, clients.kms(context.region)
    key: Any = find(lambda: kms.describe_key(KeyId=alias)["KeyMetadata"])
    if isinstance(key, Unknown):
        yield passed(f"there is no {alias} yet: pulumi up makes it")
    elif key["KeyState"] == "Enabled":
        yield passed(f"{alias} is enabled", value="Enabled", limit="Enabled")
    else:
        steps = ["cancel-key-deletion"] * (key["KeyState"] == "PendingDeletion") + ["enable-key"]
        yield failure(
            f"{alias} is {key['KeyState']}",
            value=key["KeyState"],
            limit="Enabled",
            why="without it no volume, checkpoint or queue of the stack can be read",
            next_step=" && ".join(
                f"aws kms {step} --region {context.region} --key-id {key['KeyId']}" for step in steps
            ),
        )
