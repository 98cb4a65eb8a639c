"""Check that the name of the checkpoint bucket is free or the account's own: names are unique in all of AWS."""

from __future__ import annotations

from collections.abc import Iterator

from botocore.exceptions import ClientError

from optimizer.aws import clients, errors
from optimizer.preflight.model import Context, Finding, Unknown, ask, failure, passed, unknown

_CHECK = "bucket"


def check_bucket(context: Context) -> Iterator[Finding]:
    """Look in the account's own list first: HeadBucket answers 403 for another's bucket and for missing permission."""
    stack, account = context.target.stack, context.account
    if stack is None or account is None:
        yield unknown(
            _CHECK,
            "the account's id is not known" if stack else "no stack was named, and the bucket is named after it",
            why="a name that is taken fails pulumi up",
            next_step="gpufleet preflight PLAN --stack NAME",
        )
        return
    name = stack.names(account.id, account.partition).bucket
    s3 = clients.s3(context.region)

    def is_listed() -> bool:
        pages = s3.get_paginator("list_buckets").paginate(Prefix=name)
        return any(bucket["Name"] == name for page in pages for bucket in page.get("Buckets", ()))

    listed = ask(is_listed)
    if listed is True:
        yield passed(
            _CHECK,
            f"{name} is this account's: a stack that has it in its state goes on with it",
            value=name,
            why="a stack that lost its state must import it: pulumi import aws:s3/bucket:Bucket",
        )
        return
    foreign = failure(
        _CHECK,
        f"{name} is another account's",
        value=name,
        why="pulumi up cannot make it, and checkpoints must not go to somebody else's bucket",
        next_step="choose another --stack NAME: the name is made of stack, account and region",
    )
    try:
        s3.head_bucket(Bucket=name)
    except ClientError as error:
        if errors.is_not_found(error):
            yield passed(_CHECK, f"{name} is free", value=name)
        elif isinstance(listed, Unknown) and errors.is_not_permitted(error):
            yield listed.finding(_CHECK, about=f"{name} is taken, by this account or another")
        elif errors.is_not_permitted(error) or errors.code(error) in ("301", "PermanentRedirect"):
            yield foreign
        else:
            raise
    else:
        yield listed.finding(_CHECK, about=f"{name} exists") if isinstance(listed, Unknown) else foreign
