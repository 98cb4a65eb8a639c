"""The ``gpufleet`` command group; each command lives in ``optimizer/commands`` and is imported when it is called."""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import sys

import click

from optimizer.errors import GpufleetError

# The first sentence of each command's help; a test compares them. A command is imported when it is called, from the
# module of its name, and never for the list of all: `gpufleet offers` never pays for pulumi, nor `--help` for numpy.
# Only a module:function imports torch.
COMMANDS = {
    "recommend": "Find the cheapest or fastest fleet that trains a model within a budget and a deadline.",
    "estimate": "Estimate memory and speed of one training configuration, or of every row of a table.",
    "profile": (
        "Count parameters, FLOPs and memory of a torch module of your own, without a GPU and without its memory."
    ),
    "calibrate": "Fit the speed model to your own measured runs.",
    "offers": "List instance types with their prices, one row a type and region.",
    "catalog": "Show, check and refresh the catalog of instance types and prices.",
    "stack": "Hand plans to Pulumi stacks.",
    "preview": "Show what PLAN would create and what each resource costs; nothing is created and nobody is asked.",
    "manifest": "Print PLAN as Kubernetes manifests, for kubectl apply.",
    "preflight": (
        "Check whether this AWS account can carry out PLAN now; every failure is listed, and nothing is changed."
    ),
    "status": "Show what a stack does now: phase, money, nodes, failed launches, speed; predicted against actual.",
    "costs": "Show what AWS billed a stack, by the tag gpufleet:stack, against its plan and the controller's meter.",
    "stop": "Save a checkpoint, end every node, and stay at zero until resume.",
    "resume": "Start a stopped, failed or finished run anew, from its last checkpoint.",
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
        command = importlib.import_module(f"optimizer.commands.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands, importing none."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


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
