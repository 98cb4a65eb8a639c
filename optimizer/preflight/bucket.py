"""Check the name of the checkpoint bucket, unique in all of AWS, and the region of a linked data bucket."""

from __future__ import annotations

from collections.abc import Iterator

from botocore.exceptions import ClientError

from optimizer.aws import clients, errors
from optimizer.preflight.model import Context, Finding, Unknown, ask, failure, passed, unknown

_CHECK, _DATA = "bucket", "data bucket"


def check_data_bucket(context: Context) -> Iterator[Finding]:
    """Check that a bucket which a file system is linked to is in the fleet's region."""
    bucket, plan = context.target.data_bucket, context.plan
    if plan.lustre is None or not bucket:
        return  # the configuration's check refuses a file system without data
    # https://docs.aws.amazon.com/AmazonS3/latest/API/API_HeadBucket.html
    region = ask(lambda: clients.s3(context.region).head_bucket(Bucket=bucket)["BucketRegion"])
    if isinstance(region, Unknown):
        yield region.finding(_DATA, about=f"region of {bucket}", why="reading across regions is billed by the GB")
    elif region == plan.region:
        yield passed(_DATA, f"{bucket} is in {region}, as the file system that shows it", value=region)
    else:
        yield failure(
            _DATA,
            f"{bucket} is in {region}, and the file system in {plan.region}",
            value=region,
            limit=plan.region,
            why="what it reads across regions is billed by the GB, which neither plan nor meter counts",
            next_step=f"copy the data into a bucket in {plan.region}, or plan without workload.lustre_gib",
        )


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
