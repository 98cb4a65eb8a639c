"""Refusals of gpufleet:tags: what AWS takes as a tag."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from infra.naming import NOT_IN_TAGS, TAG_VALUE_LENGTH, tags

# An S3 object takes 10 tags, and gpufleet adds its own:
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/object-tagging.html
TAGS_LIMIT = 6


def tag_refusals(given: Mapping[str, str]) -> Iterator[str]:
    """Problems of the user's own tags."""
    for key, text in given.items():
        # https://docs.aws.amazon.com/tag-editor/latest/userguide/best-practices-and-strats.html
        if not 1 <= len(key) <= 128 or key.lower().startswith("aws:") or len(text) > TAG_VALUE_LENGTH:
            yield (
                f"gpufleet:tags {key!r}: a tag has 1 to 128 characters, a value up to {TAG_VALUE_LENGTH}, and no aws: "
                "prefix"
            )
        if NOT_IN_TAGS.search(key + text):
            yield (
                f"gpufleet:tags {key!r}: {text!r} has a character that AWS refuses in tags: use letters, digits, "
                "spaces and _ . : / = + - @"
            )
    # IAM refuses two keys that differ in case alone: https://docs.aws.amazon.com/IAM/latest/UserGuide/id_tags.html
    for key in given:
        twins = sorted(other for other in tags("", "", dict(given)) if other.lower() == key.lower() and other != key)
        if twins:
            yield (
                f"gpufleet:tags {key!r} differs from {twins[0]!r} in case alone, and IAM refuses two such tags: name "
                "it otherwise"
            )
    if len(given) > TAGS_LIMIT:
        yield (
            f"gpufleet:tags has {len(given)} tags: the limit is {TAGS_LIMIT}, as an S3 object takes 10 with gpufleet's "
            "own"
        )
