"""Where checkpoints live: one bucket, encrypted, versioned, private; and the bootstrap bundle the nodes fetch."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass

import pulumi
import pulumi_aws as aws

from infra import policies
from infra.bundle import Bundle
from infra.naming import Names
from infra.settings import Settings

# What was deleted or overwritten can be brought back for a day, S3's shortest; longer would bill every pruned
# checkpoint, and a version a minute of the controller's state.
NONCURRENT_DAYS = 1
ABANDONED_UPLOAD_DAYS = 1


@dataclass(frozen=True, kw_only=True)
class StorageArgs:
    """What is stored and with which key."""

    settings: Settings
    names: Names
    tags: dict[str, str]
    key_arn: pulumi.Input[str]
    bundle: Bundle
    train_code: Bundle | None


class Storage(pulumi.ComponentResource):
    """The checkpoint bucket and the bootstrap bundle in it.

    Unless gpufleet:forceDestroy is set, the bucket and what guards it are protected: `pulumi destroy` says so instead
    of deleting checkpoints that cost a training run, and `pulumi destroy --exclude-protected` deletes the rest.

    Attributes:
        bucket: the bucket's name.
        bundle_key: the bundle's key in it.
        train_archive: the training code's key in it; empty without one.
        node_files: every object a node fetches when it starts.
    """

    def __init__(self, name: str, args: StorageArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("gpufleet:infra:Storage", name, None, opts)
        prefix, names, tags = args.names.prefix, args.names, args.tags
        own = pulumi.ResourceOptions(parent=self, protect=not args.settings.force_destroy)
        bucket = aws.s3.Bucket(
            f"{prefix}-checkpoints",
            bucket=names.bucket,
            force_destroy=args.settings.force_destroy,
            tags=tags,
            opts=own,
        )
        encryption = aws.s3.BucketServerSideEncryptionConfiguration(
            f"{prefix}-checkpoints",
            bucket=bucket.id,
            rules=[
                aws.s3.BucketServerSideEncryptionConfigurationRuleArgs(
                    apply_server_side_encryption_by_default=(
                        aws.s3.BucketServerSideEncryptionConfigurationRuleApplyServerSideEncryptionByDefaultArgs(
                            sse_algorithm="aws:kms", kms_master_key_id=args.key_arn
                        )
                    ),
                    # One KMS request a bucket and a while instead of one a shard:
                    # https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucket-key.html
                    bucket_key_enabled=True,
                )
            ],
            opts=own,
        )
        ownership = aws.s3.BucketOwnershipControls(
            f"{prefix}-checkpoints",
            bucket=bucket.id,
            rule=aws.s3.BucketOwnershipControlsRuleArgs(object_ownership="BucketOwnerEnforced"),
            opts=own,
        )
        block = aws.s3.BucketPublicAccessBlock(
            f"{prefix}-checkpoints",
            bucket=bucket.id,
            block_public_acls=True,
            block_public_policy=True,
            ignore_public_acls=True,
            restrict_public_buckets=True,
            opts=own,
        )
        policy = aws.s3.BucketPolicy(
            f"{prefix}-checkpoints",
            bucket=bucket.id,
            policy=pulumi.Output.from_input(args.key_arn).apply(
                lambda arn: json.dumps(policies.bucket_policy(names, key_arn=arn))
            ),
            # S3 refuses two changes of a bucket's access at once with OperationAborted.
            opts=pulumi.ResourceOptions.merge(own, pulumi.ResourceOptions(depends_on=[block, ownership])),
        )
        versioning = aws.s3.BucketVersioning(
            f"{prefix}-checkpoints",
            bucket=bucket.id,
            versioning_configuration=aws.s3.BucketVersioningVersioningConfigurationArgs(status="Enabled"),
            opts=own,
        )
        aws.s3.BucketLifecycleConfiguration(
            f"{prefix}-checkpoints",
            bucket=bucket.id,
            rules=[
                aws.s3.BucketLifecycleConfigurationRuleArgs(
                    id="old-versions",
                    status="Enabled",
                    # The whole bucket.
                    filter=aws.s3.BucketLifecycleConfigurationRuleFilterArgs(prefix=""),
                    noncurrent_version_expiration=(
                        aws.s3.BucketLifecycleConfigurationRuleNoncurrentVersionExpirationArgs(
                            noncurrent_days=NONCURRENT_DAYS
                        )
                    ),
                    expiration=aws.s3.BucketLifecycleConfigurationRuleExpirationArgs(expired_object_delete_marker=True),
                    # A killed node leaves parts of an upload, billed until removed.
                    abort_incomplete_multipart_upload=(
                        aws.s3.BucketLifecycleConfigurationRuleAbortIncompleteMultipartUploadArgs(
                            days_after_initiation=ABANDONED_UPLOAD_DAYS
                        )
                    ),
                )
            ],
            # Rules on noncurrent versions need versioning first.
            opts=pulumi.ResourceOptions.merge(own, pulumi.ResourceOptions(depends_on=[versioning])),
        )
        ready = pulumi.ResourceOptions(parent=self, depends_on=[encryption, policy, versioning])

        def archive(name: str, key: str, content: Bundle) -> aws.s3.BucketObjectv2:
            return aws.s3.BucketObjectv2(
                f"{prefix}-{name}",
                bucket=bucket.id,
                key=key,
                content_base64=base64.b64encode(content.content).decode(),
                content_type="application/gzip",
                server_side_encryption="aws:kms",
                kms_key_id=args.key_arn,
                bucket_key_enabled=True,
                tags=tags,
                opts=ready,
            )

        bundle = archive("bootstrap", f"{names.bootstrap_prefix}/{args.bundle.sha256}.tar.gz", args.bundle)
        self.node_files: list[pulumi.Resource] = [bundle]
        self.train_archive: pulumi.Input[str] = ""
        if args.train_code:
            key = f"{names.bootstrap_prefix}/train-{args.train_code.sha256}.tar.gz"
            code = archive("train-code", key, args.train_code)
            self.train_archive = code.key
            self.node_files.append(code)
        if args.settings.wheels:
            # Each node's pip accepts a wheel only with the SHA-256 in the bundle's requirements-node.txt.
            wheels = aws.s3.BucketObjectv2(
                f"{prefix}-wheels",
                bucket=bucket.id,
                key=names.wheels_key,
                source=pulumi.FileAsset(str(args.settings.wheels)),
                server_side_encryption="aws:kms",
                kms_key_id=args.key_arn,
                bucket_key_enabled=True,
                tags=tags,
                opts=ready,
            )
            self.node_files.append(wheels)
        self.bucket = bucket.id
        self.bundle_key = bundle.key
        self.register_outputs({"bucket": self.bucket})
