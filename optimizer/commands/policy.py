"""``gpufleet stack policy``: print the least permissions that a person or pipeline needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from botocore.session import get_session

from infra.naming import Names
from infra.policies.deployer import deployer_documents, deployer_policy
from infra.settings import read_shared_ceiling
from optimizer.aws import errors
from optimizer.commands.options import OutputFile, one_stack_options
from optimizer.commands.output import json_text, write_file, write_json
from optimizer.commands.preflight.model import preflight_policy
from optimizer.commands.stack_file import caller_of, read_stack
from optimizer.contract.errors import InvalidInputError

_PREFLIGHT = {"gpufleet-preflight": preflight_policy()}


@click.command(
    epilog="""\b
Example:
  gpufleet stack policy deployer --stack dev --out policies
  gpufleet stack policy deployer --stack dev --account 111122223333
  gpufleet stack policy preflight
"""
)
@click.argument("who", type=click.Choice(["deployer", "preflight"]))
@click.option("--account", metavar="ID", help="Account of the stack.  [default: of the credentials]")
@one_stack_options
@click.option("--out", type=OutputFile(is_folder=True), help="Write one file a document there.")
def command(who: str, stack: str | None, account: str | None, directory: Path, out: Path | None) -> None:
    """Print the least IAM permissions to run `gpufleet up` and `gpufleet down` (deployer), or the checks (preflight).

    The deployer's come in several documents, each small enough for a managed policy; the last is preflight's. They name
    the stack's resources by name, tag, region and account; its plan and configuration count, so print them again when
    these change. Whoever may write roles and pass them may do what those roles may: set gpufleet:permissionsBoundary to
    bound that.
    """
    documents = _deployer(stack, account, directory) if who == "deployer" else _PREFLIGHT
    if out is None:
        write_json(documents)
        return
    out.mkdir(parents=True, exist_ok=True)
    for name, document in documents.items():
        path = out / f"{name}.json"
        write_file(path, json_text(document) + "\n")
        click.echo(path)


def _deployer(stack: str | None, account: str | None, directory: Path) -> dict[str, Any]:
    if account is not None and not (account.isdecimal() and len(account) == 12):
        raise InvalidInputError(f"--account is {account}", limit="12 digits", next_step="aws sts get-caller-identity")
    file = read_stack(stack, directory)
    region, config = file.plan.region, file.config_texts
    with errors.explained(f"the plan's region {region} is none of AWS"):
        partition = get_session().get_partition_for_region(region)
    account = account or caller_of(region)[0]
    names = Names(stack=file.stack, account_id=account, region=region, partition=partition)
    policy = deployer_policy(
        names,
        boundary=config.get("gpufleet:permissionsBoundary", ""),
        vpc_id=config.get("gpufleet:vpcId", ""),
        lustre=file.plan.lustre is not None,
        shared=read_shared_ceiling(config.get("gpufleet:sharedCeiling", "")),
    )
    parts = enumerate(deployer_documents(policy), start=1)
    return {f"{names.prefix}-deployer-{number}": part for number, part in parts} | _PREFLIGHT
