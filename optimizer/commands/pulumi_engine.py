"""Carries a stack out and destroys it by the Pulumi CLI of PATH, which shows its own progress on standard error."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from optimizer.commands.output import say
from optimizer.contract.errors import GpufleetError

INSTALL_PAGE = "https://www.pulumi.com/docs/iac/download-install/"


def require_pulumi() -> None:
    """Raise GpufleetError without a Pulumi CLI on PATH."""
    if shutil.which("pulumi") is None:
        raise GpufleetError(
            "no Pulumi CLI is on PATH",
            why="it creates, changes and destroys the stack's resources",
            next_step=f"install it: {INSTALL_PAGE}",
        )


def carry_out(stack: str, directory: Path) -> None:
    """Run ``pulumi up``; make the stack where it is new. A GpufleetError where Pulumi failed, or was interrupted."""
    again = f"pulumi up --stack {stack} goes on where this ended; gpufleet down --stack {stack} ends all of it"
    _run(f"stack select --create {stack}", directory, again)
    _run(f"up --stack {stack} --yes --skip-preview --suppress-progress --suppress-outputs", directory, again)


def take_down(stack: str, directory: Path) -> list[str]:
    """Run ``pulumi destroy --exclude-protected``; return type and id of each resource that is left in the stack.

    Raises:
        GpufleetError: there is no such stack, Pulumi failed, or was interrupted.
    """
    again = f"gpufleet down --stack {stack}, again: it goes on where this ended"
    _run(f"destroy --stack {stack} --yes --skip-preview --suppress-progress --exclude-protected", directory, again)
    return [
        f"{resource['type']} {resource['id']}"
        for resource in _export(stack, directory)
        if resource.get("custom") and not resource["type"].startswith("pulumi:")
    ]


def deletes_checkpoints(stack: str, directory: Path) -> bool:
    """Tell whether ``take_down`` would delete the bucket, by the last update and not by the file.

    Raises:
        GpufleetError: there is no such stack, or Pulumi failed.
    """
    buckets = (resource for resource in _export(stack, directory) if resource["type"] == "aws:s3/bucket:Bucket")
    return any(not bucket.get("protect") for bucket in buckets)


def _export(stack: str, directory: Path) -> list[dict[str, Any]]:
    """Return the resources of a stack's state."""
    done = subprocess.run(
        f"pulumi stack export --stack {stack}".split(), cwd=directory, stdout=subprocess.PIPE, check=False
    )
    if done.returncode:
        raise _failed("stack", "pulumi whoami -v; pulumi stack ls")
    return (json.loads(done.stdout).get("deployment") or {}).get("resources") or []


def _run(command: str, directory: Path, again: str) -> None:
    """Run Pulumi to its end. Ctrl-C reaches it, too; it then finishes the calls it has begun, and saves its state."""
    # Standard output has the command's own answer alone. A stack's name has no blanks.
    with subprocess.Popen(["pulumi", *command.split()], cwd=directory, stdout=2) as process:
        try:
            status = process.wait()
        except KeyboardInterrupt as error:
            say("interrupted: Pulumi finishes the calls it has begun; Ctrl-C again ends it at once", err=True)
            process.wait()
            raise GpufleetError("Pulumi was interrupted; what it made stays as it is", next_step=again) from error
    if status:
        raise _failed(command.partition(" ")[0], again)


def _failed(command: str, next_step: str) -> GpufleetError:
    return GpufleetError(f"pulumi {command} failed", why="its output above has the reason", next_step=next_step)
