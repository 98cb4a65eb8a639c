"""The ``gpufleet`` command group; each command lives in ``optimizer/commands`` and is imported when it is called."""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import sys

import click

from optimizer.errors import GpufleetError

# Imported lazily, so that `gpufleet offers` never pays for pulumi; only a module:function imports torch.
COMMANDS = {
    "recommend": "optimizer.commands.recommend",
    "estimate": "optimizer.commands.estimate",
    "profile": "optimizer.commands.profile",
    "calibrate": "optimizer.commands.calibrate",
    "offers": "optimizer.commands.offers",
    "catalog": "optimizer.commands.catalog",
    "stack": "optimizer.commands.stack",
    "preview": "optimizer.commands.preview",
    "manifest": "optimizer.commands.manifest",
    "preflight": "optimizer.commands.preflight",
    "status": "optimizer.commands.status",
    "costs": "optimizer.commands.costs",
    "stop": "optimizer.commands.stop",
    "resume": "optimizer.commands.resume",
}


class LazyGroup(click.Group):
    """A group whose commands are imported on use; a module's command is its attribute named ``command``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the commands, in the order of a user's work."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one command, or None for an unknown name."""
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(COMMANDS[cmd_name]).command
        assert isinstance(command, click.Command)
        return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="gpufleet")
def cli() -> None:
    """From a model, a budget and a deadline to a GPU fleet on AWS.

    Results go to standard output, progress and errors to standard error. Exit status: 0 done, 1 failure, 2 wrong
    usage or input, 3 nothing feasible, 4 data missing or too stale.
    """


def main() -> None:
    """Run the command line; an error meant for the user ends with its message and exit status, never a traceback."""
    if sys.stdout is None:  # started with it closed (`>&-`)
        click.echo("error: standard output is closed\n  next: send it to a file, or to /dev/null", err=True)
        sys.exit(1)
    # A command makes a hundred thousand objects that live as long as it does; looking through them for cycles at every
    # 700th takes a twentieth of its time.
    gc.set_threshold(100_000)
    # And the end of the process frees them all, whether they are in cycles or not.
    atexit.register(gc.freeze)
    # gpufleet has no pydantic plugin; looking for one reads the metadata of every package that is installed
    # (https://docs.pydantic.dev/latest/concepts/plugins/).
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    # Importing numpy starts OpenBLAS's threads, which spin beside the imports; no matrix here is worth a second one
    # (https://github.com/OpenMathLib/OpenBLAS#setting-the-number-of-threads-using-environment-variables).
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        cli()
    except GpufleetError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except RecursionError:
        click.echo("error: the input is nested too deeply\n  next: look at what wrote it", err=True)
        sys.exit(2)
    except UnicodeError as error:
        click.echo(f"error: text that cannot be read or written: {error}\n  next: use UTF-8", err=True)
        sys.exit(2)
    except BrokenPipeError:
        # The reader (head, less) went away: not an error of ours, and Python must not complain at exit either.
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
