"""Carries a stack out and destroys it by Pulumi's Automation API, which runs the Pulumi CLI of PATH.

https://www.pulumi.com/docs/iac/concepts/automation-api/
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pulumi import automation
from pulumi.automation import errors

from optimizer.commands.output import say
from optimizer.commands.progress import relayed
from optimizer.contract.errors import DataMissingError, GpufleetError

INSTALL_PAGE = "https://www.pulumi.com/docs/iac/download-install/"
# Parts of the CLI's messages, with the next step that each calls for.
_REMEDIES = {
    # https://www.pulumi.com/docs/iac/concepts/state-and-backends/
    "PULUMI_ACCESS_TOKEN must be set": "pulumi login, or pulumi login --local for a state on this machine",
    # https://www.pulumi.com/docs/iac/concepts/secrets/
    "passphrase": "export PULUMI_CONFIG_PASSPHRASE=...: it encrypts the secrets of a state outside Pulumi Cloud",
}


@dataclass(frozen=True, kw_only=True)
class StateResource:
    """A resource of a stack, with the provider's id."""

    type: str  # aws:s3/bucket:Bucket
    id: str


def require_pulumi() -> None:
    """Raise GpufleetError without a Pulumi CLI on PATH."""
    if shutil.which("pulumi") is None:
        raise GpufleetError(
            "no Pulumi CLI is on PATH",
            why="it creates, changes and destroys the stack's resources",
            next_step=f"install it: {INSTALL_PAGE}",
        )


def carry_out(stack: str, directory: Path) -> None:
    """Run ``pulumi up``; make the stack where it is new. Pulumi's progress goes to standard error.

    Raises:
        GpufleetError: Pulumi failed, or was interrupted.
    """
    again = f"pulumi up --stack {stack} goes on where this ended; gpufleet down --stack {stack} ends all of it"
    with _explained("pulumi up", again):
        # https://www.pulumi.com/docs/reference/pkg/python/pulumi/#pulumi.automation.create_or_select_stack
        program = automation.create_or_select_stack(stack_name=stack, work_dir=str(directory.resolve()))
        with relayed(f"stack {stack}") as show:
            _run(
                lambda: program.up(
                    on_output=_without_blanks(show), color="never", suppress_progress=True, suppress_outputs=True
                ),
                again,
            )


def take_down(stack: str, directory: Path) -> list[StateResource]:
    """Run ``pulumi destroy --exclude-protected``; return what is left in the stack.

    Raises:
        DataMissingError: there is no such stack.
        GpufleetError: Pulumi failed, or was interrupted.
    """
    again = f"gpufleet down --stack {stack}, again: it goes on where this ended"
    with _explained("pulumi destroy", again):
        program = automation.select_stack(stack_name=stack, work_dir=str(directory.resolve()))
        with relayed(f"stack {stack}") as show:
            _run(
                lambda: program.destroy(
                    on_output=_without_blanks(show), color="never", suppress_progress=True, exclude_protected=True
                ),
                again,
            )
        return [
            StateResource(type=resource["type"], id=resource["id"])
            for resource in _resources(program.export_stack())
            if resource.get("custom") and not resource["type"].startswith("pulumi:")
        ]


def deletes_checkpoints(stack: str, directory: Path) -> bool:
    """Tell whether ``take_down`` would delete the bucket, by the last update and not by the file.

    Raises:
        DataMissingError: there is no such stack.
        GpufleetError: Pulumi failed.
    """
    with _explained("pulumi stack export", f"gpufleet down --stack {stack}, again"):
        # select_stack would leave another stack selected, after a dry run too.
        state = automation.LocalWorkspace(work_dir=str(directory.resolve())).export_stack(stack)
        buckets = (resource for resource in _resources(state) if resource["type"] == "aws:s3/bucket:Bucket")
        return any(not bucket.get("protect") for bucket in buckets)


def _resources(state: automation.Deployment) -> list[dict[str, Any]]:
    return (state.deployment or {}).get("resources") or []


def _run(call: Callable[[], Any], again: str) -> None:
    """Run Pulumi to its end. Ctrl-C reaches it, too; it then finishes the calls it has begun, and saves its state."""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(call)
        try:
            running.result()
        except KeyboardInterrupt as error:
            message = "interrupted: Pulumi finishes the calls it has begun; Ctrl-C again ends it at once"
            say(message, err=True)
            running.exception()
            raise GpufleetError("Pulumi was interrupted; what it made stays as it is", next_step=again) from error


@contextmanager
def _explained(command: str, again: str) -> Iterator[None]:
    try:
        yield
    except errors.InvalidVersionError as error:
        raise GpufleetError(str(error), next_step=f"install a newer Pulumi CLI: {INSTALL_PAGE}") from error
    except errors.StackNotFoundError as error:
        raise DataMissingError(
            "Pulumi has no such stack in the state it is logged in to", next_step="pulumi whoami -v; pulumi stack ls"
        ) from error
    except errors.CommandError as error:
        # Standard output was shown as it came. The exception has no attribute for standard error.
        complaint = str(error).rpartition("\n stderr: ")[2].strip() or "its output above has the reason"
        remedy = next((step for part, step in _REMEDIES.items() if part in complaint), again)
        raise GpufleetError(f"{command} failed: {complaint}", next_step=remedy) from error


def _without_blanks(show: Callable[[str], None]) -> Callable[[str], None]:
    return lambda line: show(line) if line.strip() else None
