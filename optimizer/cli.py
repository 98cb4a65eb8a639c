"""The ``gpufleet`` command group: the list of commands in ``optimizer/commands``; one is imported when it is called.

``gpufleet offers`` never pays for pulumi, nor ``--help`` for numpy. Only a module:function imports torch.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import itertools
import os
import sys
from io import TextIOWrapper
from typing import Any, NoReturn

import click

from optimizer.contract.errors import GpufleetError, InvalidInputError

# Each command with its line in ``gpufleet --help``, in the order of a user's work.
SECTIONS = {
    "Choose": {
        "recommend": "Find the best fleets for a model, a budget and a deadline.",
        "what-if": "Show what a deadline, nodes or a budget would change.",
        "report": "Write a plan or a stack as one page of HTML.",
        "offers": "List GPU instance types with their prices.",
        "estimate": "Estimate memory and speed of one configuration, or of a table.",
        "profile": "Count parameters, FLOPs and memory of your own torch module.",
    },
    "Run": {
        "init": "Lay out a folder: Pulumi project, example request, README.",
        "up": "Stand up a fleet for a request or a plan, and follow its run.",
        "status": "Show phase, money, nodes and speed, beside the prediction.",
        "logs": "Print what the training writes.",
        "ssh": "Open a shell on a node, or forward a port of it.",
        "costs": "Show what AWS billed, beside the plan and the meter.",
        "stop": "Save a checkpoint, end every node, stay at zero.",
        "resume": "Go on from the last checkpoint.",
        "move": "Move a run to another region.",
        "down": "End a fleet and all that costs by the hour.",
    },
    "Look inside": {
        "preview": "Show what a plan would create, and what it costs.",
        "preflight": "Check whether this AWS account can carry out a plan now.",
        "stack": "Hand a plan to a Pulumi stack; drill an interruption.",
        "simulate": "Replay spot policies over traces of spot capacity.",
        "launch-config": "Write a plan for another engine, or for Kubernetes.",
    },
    "Data": {
        "catalog": "Show and refresh prices; calibrate the speed model.",
        "blocks": "Find Capacity Blocks, and buy one.",
        "doctor": "Show what is installed, how old the data is, what renews it.",
        "schema": "Print the JSON Schema of a request, a plan or an answer.",
        "mcp": "Serve the commands that only read to an agent.",
    },
}
# Names that work on, with the words that they stand for.
ALIASES = {
    "calibrate": ["catalog", "calibrate"],
    "drill": ["stack", "drill"],
    "manifest": ["launch-config", "--engine", "kubernetes"],
}
COMMANDS = {name: line for section in SECTIONS.values() for name, line in section.items()}

# Commands of earlier versions, and what does their work now.
GONE = {
    "completion": "source <(_GPUFLEET_COMPLETE=bash_source gpufleet) does it; zsh_source, fish_source likewise",
    "trace": "torch.profiler in the training's own loop takes one; gpufleet status names a slow rank",
    "port-forward": "gpufleet ssh RANK --port PORT does it",
    "policy": "gpufleet stack policy prints it",
    "wheels": "gpufleet stack wheels packs them",
}

# Packages that some commands alone import, with the extra of pyproject.toml that installs them.
EXTRAS = {
    "pulumi": "deploy",
    "pulumi_aws": "deploy",
    "jinja2": "report",
    "vl_convert": "report",
    "scipy": "calibrate",
    "mcp": "mcp",
}


class LazyGroup(click.Group):
    """A group whose commands are imported on use; a command's module has it as attribute ``command``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one command, or None for an unknown name."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"optimizer.commands.{cmd_name.replace('-', '_')}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; click seeks the near ones of an unknown one among imported ones."""
        if args[0] in GONE:
            raise click.UsageError(f"{args[0]} is gone: {GONE[args[0]]}", ctx)
        try:
            return super().resolve_command(ctx, [*ALIASES.get(args[0], args[:1]), *args[1:]])
        except click.NoSuchCommand as error:
            raise click.NoSuchCommand(error.command_name, possibilities=COMMANDS, ctx=ctx) from error

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; a reader that has closed the pipe (head, less) has what it wanted: exit status 0."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except (BrokenPipeError, SystemExit) as ended:
            # rich ends the program with status 1 instead (rich.console.Console.on_broken_pipe).
            if isinstance(ended, SystemExit) and not isinstance(ended.__context__, BrokenPipeError):
                raise
            # Python flushes standard output at its end: https://docs.python.org/3/library/signal.html#note-on-sigpipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)
        return result

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands by section, importing none; --help and --version need no line."""
        for title, lines in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl(list(lines.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="gpufleet")
def cli() -> None:
    """From a model, a budget and a deadline to a GPU fleet on AWS.

    Exit status: 0 done, 1 failure, 2 wrong input, 3 nothing feasible, 4 data missing or stale. With --format json
    stderr ends with the error, as JSON.
    """


def main() -> None:
    """Run the command line; an error meant for the user ends with its message and exit status, never a traceback."""
    as_json = _asks_for_json(sys.argv[1:])
    if sys.stdout is None:  # started with standard output closed (`>&-`)
        closed = GpufleetError("standard output is closed", next_step="send it to a file, or to /dev/null")
        _fail(closed, as_json=as_json)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # an ASCII terminal shows ? for what it lacks
            stream.reconfigure(errors="replace")
    # A command's 100,000 objects live until its end; collecting at every 700th takes 5% of its time.
    gc.set_threshold(100_000)
    atexit.register(gc.freeze)  # no last collection
    # Looking for plugins reads every package's metadata: https://docs.pydantic.dev/latest/concepts/plugins/
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    # OpenBLAS's threads spin beside the imports:
    # https://github.com/OpenMathLib/OpenBLAS#setting-the-number-of-threads-using-environment-variables
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        # Otherwise click prints its own errors, and ends the program.
        status = cli(prog_name="gpufleet", standalone_mode=False)
        sys.exit(status if isinstance(status, int) else 0)
    except GpufleetError as failed:
        error = failed
    except click.exceptions.NoArgsIsHelpError as failed:
        failed.show()
        sys.exit(failed.exit_code)
    except click.ClickException as failed:
        context = getattr(failed, "ctx", None)
        # click's parser gives an option without its value no context.
        path = context.command_path if context else " ".join(["gpufleet", *COMMANDS.keys() & sys.argv[1:2]])
        error = InvalidInputError(failed.format_message(), next_step=f"{path} --help")
    except ModuleNotFoundError as failed:
        package = (failed.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        install = f"pip install 'gpufleet[{EXTRAS[package]}]'"
        why = "this command needs it, which choosing a fleet does not"
        error = GpufleetError(f"{package} is not installed", why=why, next_step=install)
    except click.Abort:
        error = GpufleetError("interrupted")
    except RecursionError:
        error = InvalidInputError("the input is nested too deeply", next_step="look at what wrote it")
    except UnicodeError as failed:
        error = InvalidInputError(f"text that cannot be read or written: {failed}", next_step="use UTF-8")
    except OSError as failed:
        parts = map(str, filter(None, (failed.filename, failed.strerror)))
        error = GpufleetError(": ".join(parts) or str(failed))
    except SystemExit as ended:
        if not (as_json and isinstance(ended.code, int) and ended.code):
            raise
        error = GpufleetError("the answer on standard output has the reason")
        error.exit_code = ended.code
    _fail(error, as_json=as_json)


def _asks_for_json(words: list[str]) -> bool:
    """Return whether the answer is to be JSON, before click reads the words: one of them may be the error."""
    own = words[: words.index("--")] if "--" in words else words
    return "--format=json" in own or ("--format", "json") in itertools.pairwise(own)


def _fail(error: GpufleetError, *, as_json: bool) -> NoReturn:
    from optimizer.commands.output import write_error  # here: only a failure waits for it

    write_error(error, as_json=as_json)
    sys.exit(error.exit_code)
