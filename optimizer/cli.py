"""The ``gpufleet`` command group: finds the commands in ``optimizer/commands`` and imports one when it is called.

``gpufleet offers`` never pays for pulumi, nor ``--help`` for numpy. Only a module:function imports torch.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import re
import sys
from functools import cache
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn

import click

from optimizer.contract.errors import GpufleetError
from optimizer.contract.spelling import near_names

# In the order of a user's work; a command that is not named here is listed last.
SECTIONS = {
    "Choose a fleet": ("init", "recommend", "what-if", "report", "offers", "simulate"),
    "Models, speeds and prices of your own": ("estimate", "profile", "calibrate", "catalog"),
    "Stand it up": ("up", "preview", "stack", "wheels", "preflight", "policy", "blocks", "manifest", "launch-config"),
    "Follow it": ("status", "logs", "trace", "ssh", "port-forward", "costs"),
    "End it, or go on": ("stop", "resume", "move", "down"),
    "Shell": ("completion",),
}
ORDER = tuple(name for names in SECTIONS.values() for name in names)

# Options of earlier versions, by command, and what does their work now.
GONE_OPTIONS = {
    "estimate": {
        "attention": "--batch reads it from the column attention",
        "sequence-parallel": "--batch reads it from the column sequence_parallel",
        "no-sequence-parallel": "--batch reads it from the column sequence_parallel",
        "gpus-per-node": "--gpus over --nodes says it (--gpus 8 --nodes 2: 4 a node)",
        "require-fit": "--format json has it as fits",
        "no-compile": "without --compile nothing is compiled",
    },
    "recommend": {"no-compile": "leave --compile out, or write compiled: false into the request"},
    "what-if": {"no-compile": "leave --compile out, or write compiled: false into the request"},
    "offers": {"type": "use --instance-type", "max-age": "as_of, reserved_1yr_as_of and spot_as_of have the dates"},
    "refresh": {
        "cloud": "prices of other clouds come with each version; refresh reads AWS's",
        "endpoint": "prices of other clouds come with each version; AWS_ENDPOINT_URL sets AWS's address",
    },
    "stop": {"wait": "stop waits unless --no-wait is given"},
    "costs": {
        "untagged": "the region's costs without the tag are always read",
        "no-untagged": "the region's costs without the tag are always read",
    },
    "preview": {"against": "pulumi preview --diff compares with the deployed stack"},
    "move": {"request": "give a plan for the region with --plans"},
    "manifest": {
        "stack": "give PLAN, which recommend wrote, and --checkpoints",
        "outputs": "give PLAN, which recommend wrote, and --checkpoints",
    },
}


@cache
def first_sentences() -> dict[str, str]:
    """Return the first sentence of each command's help, read from the source of its function ``command``."""
    pattern = re.compile(r'^def command\(.*?\) -> None:\n    """(.*?)(?:\n\n|""")', re.MULTILINE | re.DOTALL)
    folder = Path(__file__).parent / "commands"
    sentences = {}
    for path in sorted([*folder.glob("*.py"), *folder.glob("*/__init__.py")]):
        match = pattern.search(path.read_text(encoding="utf-8"))
        if match:
            name = path.stem if path.parent == folder else path.parent.name
            sentences[name.replace("_", "-")] = " ".join(match[1].split())
    names = sorted(sentences, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))
    return {name: sentences[name] for name in names}


class LazyGroup(click.Group):
    """A group whose commands are imported on use; a command's module has it as attribute ``command``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands."""
        return list(first_sentences())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one command, or None for an unknown name."""
        # Names in ORDER start 2 ms earlier, without reading the sources.
        if cmd_name not in ORDER and cmd_name not in first_sentences():
            return None
        command = importlib.import_module(f"optimizer.commands.{cmd_name.replace('-', '_')}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; the error of an unknown one names the near ones, which click seeks among imported ones."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = near_names(args[0], self.list_commands(ctx))
            if not near:
                raise
            raise click.UsageError(f"{error.message} Did you mean {' or '.join(map(repr, near))}?", ctx) from error

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; a reader that has closed the pipe (head, less) has what it wanted: exit status 0."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except click.NoSuchOption as error:
            name = str(error.ctx.info_name) if error.ctx else ""
            instead = GONE_OPTIONS.get(name, {}).get(error.option_name.lstrip("-"))
            if not instead:
                raise
            raise click.UsageError(f"{error.option_name} is gone: {instead}", error.ctx) from error
        except (BrokenPipeError, SystemExit) as ended:
            # rich ends the program with status 1 instead (rich.console.Console.on_broken_pipe).
            if isinstance(ended, SystemExit) and not isinstance(ended.__context__, BrokenPipeError):
                raise
            # Python flushes standard output at its end: https://docs.python.org/3/library/signal.html#note-on-sigpipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)
        return result

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands by section, importing none."""
        sentences = first_sentences()
        others = tuple(name for name in sentences if name not in ORDER)
        for title, names in {**SECTIONS, "Others": others}.items():
            if names:
                with formatter.section(title):
                    formatter.write_dl([(name, sentences[name]) for name in names])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="gpufleet")
def cli() -> None:
    """From a model, a budget and a deadline to a GPU fleet on AWS.

    Results go to standard output, progress and errors to standard error. Exit status: 0 done, 1 failure, 2 wrong
    usage or input, 3 nothing feasible, 4 data missing or too stale.
    """


def main() -> None:
    """Run the command line; an error meant for the user ends with its message and exit status, never a traceback."""
    if sys.stdout is None:  # started with standard output closed (`>&-`)
        _fail("standard output is closed\n  next: send it to a file, or to /dev/null", 1)
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
        cli()
    except GpufleetError as error:
        _fail(error, error.exit_code)
    except RecursionError:
        _fail("the input is nested too deeply\n  next: look at what wrote it", 2)
    except UnicodeError as error:
        _fail(f"text that cannot be read or written: {error}\n  next: use UTF-8", 2)
    except OSError as error:
        _fail(error, 1)


def _fail(message: object, exit_code: int) -> NoReturn:
    from optimizer.commands.output import say  # here: only a failure waits for it

    say(f"error: {message}", err=True)
    sys.exit(exit_code)
