"""The bucket of the checkpoints, encrypted, versioned and private, and the files that nodes fetch from it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pulumi
import pulumi_aws as aws

from bootstrap.contract.checkpoint import PRUNED, PRUNED_DAYS, PRUNED_TAG
from infra.bundle import Bundle, pack
from infra.component import Component, Stack
from infra.policies.resources import bucket_policy
from infra.security import Security

# S3's shortest, for what is not a checkpoint: the controller's state has a version a minute.
NONCURRENT_DAYS = 1
ABANDONED_UPLOAD_DAYS = 1


class Storage(Component):
    """The checkpoint bucket, protected from `pulumi destroy` unless gpufleet:forceDestroy is set, and ``node_files``.

    `pulumi destroy --exclude-protected` deletes the rest of the stack. Without training code ``train_archive`` is "".
    """

    def __init__(self, stack: Stack, security: Security, archive: Bundle) -> None:
        super().__init__(stack)
        self._key_arn, self.bucket = security.key_arn, pulumi.Output.from_input(self._names.bucket)
        bucket = aws.s3.Bucket(
            **self._of_bucket(security.claim), force_destroy=self._settings.force_destroy, tags=self._tags
        )
        self.bucket = bucket.id
        by_default: Any = {"sse_algorithm": "aws:kms", "kms_master_key_id": self._key_arn}
        encryption = aws.s3.BucketServerSideEncryptionConfiguration(
            **self._of_bucket(),
            # A bucket key makes fewer calls of KMS than one a shard:
            # https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucket-key.html
            rules=[{"apply_server_side_encryption_by_default": by_default, "bucket_key_enabled": True}],
        )
        ready = self._after(encryption, self._access(), self._versions())
        put = partial(self._object, bucket=self.bucket, key_arn=self._key_arn, opts=ready)
        pack_type, prefix = "application/gzip", self._names.bootstrap_prefix
        name = f"{self._prefix}-bootstrap"
        bundle = put(name, f"{prefix}/{archive.sha256}.tar.gz", archive=archive.content, content_type=pack_type)
        self.bundle_key = bundle.key
        self.node_files: list[pulumi.Resource] = [bundle]
        self.train_archive: pulumi.Input[str] = ""
        if self._settings.train_dir:
            code, name = pack(self._settings.train_dir, "train"), f"{self._prefix}-train-code"
            uploaded = put(name, f"{prefix}/train-{code.sha256}.tar.gz", archive=code.content, content_type=pack_type)
            self.train_archive = uploaded.key
            self.node_files.append(uploaded)
        if self._settings.wheels:
            # Each node's pip accepts a wheel only with the SHA-256 in the bundle's lists of requirements.
            wheels = pulumi.FileAsset(str(self._settings.wheels))
            self.node_files.append(put(f"{self._prefix}-wheels", self._names.wheels_key, source=wheels))
        self.register_outputs({"bucket": self.bucket})

    def _access(self) -> pulumi.Resource:
        owner: Any = {"object_ownership": "BucketOwnerEnforced"}
        ownership = aws.s3.BucketOwnershipControls(**self._of_bucket(), rule=owner)
        block = aws.s3.BucketPublicAccessBlock(
            **self._of_bucket(),
            block_public_acls=True,
            block_public_policy=True,
            ignore_public_acls=True,
            restrict_public_buckets=True,
        )
        # S3 refuses two changes of a bucket's access at once with OperationAborted.
        policy = self._policy(bucket_policy, key_arn=self._key_arn)
        return aws.s3.BucketPolicy(**self._of_bucket(block, ownership), policy=policy)

    def _versions(self) -> pulumi.Resource:
        versioning = aws.s3.BucketVersioning(**self._of_bucket(), versioning_configuration={"status": "Enabled"})
        names = self._names
        days_by_prefix = {
            names.bootstrap_prefix: NONCURRENT_DAYS,
            names.control_prefix: NONCURRENT_DAYS,
            names.checkpoint_prefix: self._settings.undo_days,
        }
        left_overs: Any = {
            "id": "left-overs",
            "status": "Enabled",
            "filter": {"prefix": ""},
            "expiration": {"expired_object_delete_marker": True},
            # A killed node leaves parts of an upload, billed until removed.
            "abort_incomplete_multipart_upload": {"days_after_initiation": ABANDONED_UPLOAD_DAYS},
        }
        aws.s3.BucketLifecycleConfiguration(
            # Rules on noncurrent versions need versioning.
            **self._of_bucket(versioning),
            rules=[
                *(_old_versions(name, {"prefix": f"{name}/"}, days) for name, days in days_by_prefix.items()),
                # Only objects below checkpoints/ may get the tag (roles.py).
                _old_versions("pruned", {"tag": {"key": PRUNED_TAG, "value": PRUNED}}, PRUNED_DAYS),
                left_overs,
            ],
        )
        return versioning

    def _of_bucket(self, *before: pulumi.Resource) -> dict[str, Any]:
        """Arguments of the bucket and of what belongs to it, which is protected alike and comes after others."""
        opts = self._after(*before, protect=not self._settings.force_destroy)
        return {"resource_name": f"{self._prefix}-checkpoints", "bucket": self.bucket, "opts": opts}


def _old_versions(name: str, objects: dict[str, Any], days: int) -> Any:
    # A rule each, as of overlapping rules the shortest wins:
    # https://docs.aws.amazon.com/AmazonS3/latest/userguide/lifecycle-conflicts.html
    expiration = {"noncurrent_days": days}
    return {
        "id": f"old-{name}", "status": "Enabled", "filter": objects, "noncurrent_version_expiration": expiration,
    }  # fmt: skip
