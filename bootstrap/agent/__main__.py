"""Command line of the agent: ``python3 /opt/gpufleet/bootstrap/agent [COMMAND]``; without a command it supervises."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import NoReturn

if not __package__:  # started by its folder, in whatever directory the command is to run
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from bootstrap.agent import container
from bootstrap.agent.commands import AgentError, log, python_path
from bootstrap.agent.efa import efa_settings
from bootstrap.agent.group import STATE_KEY, GroupClient
from bootstrap.agent.settings import Settings
from bootstrap.contract.report import EXIT_AT_FAULT
from bootstrap.contract.timings import LEASE


def main(arguments: list[str], environ: Mapping[str, str]) -> int:
    """Run a command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python3 bootstrap/agent", description=__doc__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser("complete-terminate-hook", help="let the group end this node now")
    commands.add_parser("check-lease", help="leave the group where the controller is silent")
    commands.add_parser("efa-settings", help="print the variables that make NCCL use EFA")
    commands.add_parser(
        "run-python", help="run the training's Python with the rest of the arguments (in its container)"
    )
    failure = commands.add_parser("report-failure", help="tell the controller what failed, and send the set-up's log")
    failure.add_argument("step")
    failure.add_argument("exit_status", type=int)
    # argparse would take the first option of the other program for its own.
    runs_python = arguments[:1] == ["run-python"]
    options = parser.parse_args(arguments[:1] if runs_python else arguments)
    settings = Settings(environ)
    group = GroupClient(settings)
    try:
        if options.command is None:
            # Here: these modules need Python 3.10.
            from bootstrap.agent.supervise import supervise

            return supervise(settings)
        if options.command == "complete-terminate-hook":
            group.complete_terminate_hook()
        elif options.command == "report-failure":
            # The stack's settings are at fault, and every node would fail alike.
            state = "gave-up" if options.exit_status == EXIT_AT_FAULT else "unfit"
            # First, as the time is limited (node_init.sh), and the controller would go on paying for nodes.
            is_told = group.report({"state": state, "exit_status": options.exit_status, "step": options.step})
            title, file = f"node set-up failed in {options.step}", settings.log_file.with_name("node-init.log")
            return 0 if group.send_log("node-init", title, file) and is_told else 1
        elif options.command == "check-lease":
            _check_lease(settings, group)
        elif runs_python:
            _run_python(settings, environ, arguments[1:])
        else:
            for name, value in efa_settings(settings.root, environ).items():
                sys.stdout.write(f"{name}={value}\n")
    except (AgentError, OSError) as error:
        log(f"FAIL {error}")
        return 1
    return 0


def _run_python(settings: Settings, environ: Mapping[str, str], arguments: list[str]) -> NoReturn:
    """Become the training's Python, which finds this package and has the variables of EFA."""
    words, environment = [settings.python, *arguments], {**environ, "PYTHONPATH": python_path(environ)}
    if settings.image:
        words, environment = container.command(settings, environ, arguments)
    elif settings.gpudirect:
        environment |= efa_settings(settings.root, environ)
    os.execvpe(words[0], words, environment)  # noqa: S606 (nothing expands the arguments)


def _check_lease(settings: Settings, group: GroupClient) -> None:
    """Have this node leave its group, with a checkpoint, where the controller stopped metering it.

    Only the controller meters and keeps the ceiling, and it writes its state every minute. Where its writing stops for
    good (function deleted, role changed, scheduler down), paid nodes must not go on. gpufleet-lease.timer looks every
    five minutes.
    """
    written = group.state_written_at()
    # An unreadable state is no silence: a node that only lost its way to S3 goes on.
    if written is None:
        raise AgentError(
            f"s3://{settings.bucket}/{STATE_KEY} cannot be read: nobody knows whether the controller meters"
        )
    silent_s = int(time.time() - datetime.fromisoformat(written.replace("Z", "+00:00")).timestamp())
    if silent_s <= LEASE.total_seconds():
        return
    log(
        f"the controller has written nothing for {silent_s} s, so nobody meters this node: it saves and ends; see the "
        "controller's log group, then gpufleet resume"
    )
    if not group.leave():
        raise AgentError("this node could not leave its group; the next check tries again")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
