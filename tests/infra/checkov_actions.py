"""Report actions that do not exist, or not on their resources: AWS accepts them, and denies the right one at run time.

Reads a JSON list of [statement, action, resources] from standard input and writes a JSON list of problems. checkov's
Python runs it with the table of https://github.com/salesforce/policy_sentry.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator

from policy_sentry.querying.actions import get_action_data  # type: ignore[import-not-found]


def problems(statement: str, action: str, resources: list[str]) -> Iterator[str]:
    service, name = action.split(":")
    known = get_action_data(service, name)
    if not known:
        yield f"{statement}: there is no action {action}"
        return
    formats = {row["resource_arn_format"] for row in known[service]}
    for resource in resources:
        if resource == "*":
            if formats != {"*"}:
                yield f"{statement}: {action} could name {', '.join(sorted(formats - {'*'}))} and has '*'"
        elif not any(fits(resource, form) for form in formats):
            yield f"{statement}: {action} is never on {resource}, but on {', '.join(sorted(formats))}"


def fits(resource: str, form: str) -> bool:
    """Tell whether an ARN with wildcards fits a form like "arn:${Partition}:s3:::${BucketName}"."""
    example = re.sub(r"\$\{[^}]*\}", "\0", form)
    # Our wildcard covers any rest of the form; a variable of the form covers any text of ours.
    ours = re.escape(resource).replace(r"\*", "(.*)")
    theirs = "(.+)".join(map(re.escape, example.split("\0")))
    return bool(re.fullmatch(theirs, resource)) or bool(re.fullmatch(ours, _filled(example, resource)))


def _filled(example: str, resource: str) -> str:
    """The form with its variables filled from ``resource``, part by part, else by "x"."""
    parts = resource.split(":")
    filled = []
    for index, part in enumerate(example.split(":")):
        own = parts[index] if index < len(parts) else "x"
        filled.append(own if part == "\0" else part.replace("\0", "x"))
    return ":".join(filled)


if __name__ == "__main__":
    json.dump([line for row in json.load(sys.stdin) for line in problems(*row)], sys.stdout)
