"""Rules on data: encryption, rotated keys, protected checkpoints, no readable secrets."""

from __future__ import annotations

import base64

from infra.offline.guardrails.declared import Breaches, Declared
from infra.offline.resource_types import NO_DATA, OWN_RULE, TYPES
from infra.secret_text import secrets_in

_PROTECTED = tuple(kind for kind, row in TYPES.items() if row.protected)


def encrypted_at_rest(declared: Declared) -> Breaches:
    """Every resource that holds data is encrypted under a key of the stack; queues under SQS's own."""
    for resource in declared.resources:
        if resource.kind == "BucketObjectv2" and not resource.inputs.get("serverSideEncryption"):
            continue  # the bucket's default applies
        row = TYPES.get(resource.kind)
        if row is None:
            yield resource, "has no row in resource_types.py, which says whether the type holds data"
        elif row.encryption not in (NO_DATA, OWN_RULE) and not resource.inputs.get(row.encryption):
            yield resource, f"does not set {row.encryption}"
    for template in declared.all("LaunchTemplate"):
        for mapping in template.inputs.get("blockDeviceMappings", []):
            volume = mapping.get("ebs", {})
            if volume.get("encrypted") != "true" or not volume.get("kmsKeyId"):
                yield template, f"does not encrypt volume {mapping.get('deviceName')} under the stack's key"
    for bucket in declared.all("Bucket"):
        settings = declared.referring("BucketServerSideEncryptionConfiguration", "bucket", bucket)
        defaults = [rule["applyServerSideEncryptionByDefault"] for given in settings for rule in given["rules"]]
        if not any(rule["sseAlgorithm"] == "aws:kms" and rule.get("kmsMasterKeyId") for rule in defaults):
            yield bucket, "does not encrypt objects under the stack's key by default"
    for function in declared.all("Function"):
        if function.inputs.get("environment") and not function.inputs.get("kmsKeyArn"):
            yield function, "does not encrypt environment variables under the stack's key"
    for parameter in declared.all("Parameter"):
        if parameter.inputs.get("type") != "SecureString" or not parameter.inputs.get("keyId"):
            yield parameter, "is not a SecureString under the stack's key"


def checkpoints_are_protected(declared: Declared) -> Breaches:
    """`pulumi destroy` deletes neither the checkpoints nor their key, unless gpufleet:forceDestroy says so."""
    for bucket in declared.all("Bucket"):
        if bucket.inputs.get("forceDestroy"):
            return
        versions = declared.referring("BucketVersioning", "bucket", bucket)
        if not any(given["versioningConfiguration"]["status"] == "Enabled" for given in versions):
            yield bucket, "is not versioned: a deleted object is lost"
    for resource in declared.all(*_PROTECTED):
        if not resource.protected:
            yield resource, "is not protected from `pulumi destroy`"


def keys_rotate(declared: Declared) -> Breaches:
    """Every KMS key is rotated."""
    for key in declared.all("Key"):
        if key.inputs.get("enableKeyRotation") is not True:
            yield key, "is not rotated"


def no_secrets(declared: Declared) -> Breaches:
    """No secret is readable for principals who may describe an instance or a function."""
    for template in declared.all("LaunchTemplate"):
        text = base64.b64decode(template.inputs.get("userData", "")).decode(errors="replace")
        yield from ((template, f"has a possible secret in its user data: {secret}") for secret in secrets_in(text))
    for function in declared.all("Function"):
        variables = (function.inputs.get("environment") or {}).get("variables", {})
        text = "\n".join(f"{name}={value}" for name, value in variables.items())
        yield from ((function, f"has a possible secret in its environment: {secret}") for secret in secrets_in(text))
