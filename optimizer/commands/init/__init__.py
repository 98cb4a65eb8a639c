"""``gpufleet init``: a folder to choose and stand up a fleet in, for a gpufleet installed from a wheel."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from infra.bundle import SOURCE
from infra.project import FILE, project_file
from optimizer.commands.output import say
from optimizer.contract.errors import GpufleetError, InvalidInputError

_FILES = Path(__file__).parent / "files"


@click.command(
    epilog="""\b
Example:
  gpufleet init my-fleet && cd my-fleet
  gpufleet recommend request.yaml --save plans.json
"""
)
@click.argument("directory", metavar="[DIR]", default=Path(), type=click.Path(path_type=Path, file_okay=False))
def command(directory: Path) -> None:
    """Lay out a folder for a fleet: Pulumi project, example request, README.

    DIR is the current folder by default, and is made where it is missing. The Pulumi program there runs the installed
    gpufleet. Nothing is overwritten: where a file of the same name exists, nothing is written. Needs no Pulumi CLI.
    """
    files = _contents(directory)
    present = sorted(name for name in files if (directory / name).exists())
    if present:
        raise InvalidInputError(
            f"{directory.resolve()} has {', '.join(present)}",
            limit=f"a folder without {', '.join(files)}",
            why="init overwrites nothing",
            next_step="gpufleet init ANOTHER-FOLDER",
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            with (directory / name).open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise GpufleetError(
            f"{directory} cannot be written: {error.strerror}", next_step="gpufleet init ANOTHER-FOLDER"
        ) from error
    say(f"{directory.resolve()} has {', '.join(files)}")
    enter = "" if directory.resolve() == Path.cwd() else f"cd {directory} && "
    say(f"next: {enter}gpufleet recommend request.yaml --save plans.json")


def _contents(directory: Path) -> dict[str, str]:
    """Texts of the files by name."""

    def read(name: str) -> str:
        return (_FILES / name).read_text(encoding="utf-8")

    # A wheel brings docs/ (pyproject.toml, shared-data); a checkout has it.
    installed = Path(sys.prefix, "share", "doc", "gpufleet")
    docs = installed if installed.is_dir() else SOURCE.parent / "docs"
    readme = read("README.md").replace("{docs}", str(docs)).replace("{bootstrap}", str(SOURCE))
    return {
        FILE: project_file(virtualenv=_virtualenv(directory)),
        "__main__.py": read("program.py"),
        "request.yaml": read("request.yaml"),
        "README.md": readme,
        ".gitignore": read("gitignore"),
    }


def _virtualenv(directory: Path) -> str:
    """The running environment, from ``directory`` if it is inside; empty for a Python without one."""
    if sys.prefix == sys.base_prefix:
        return ""
    prefix, folder = Path(sys.prefix), directory.resolve()
    return str(prefix.relative_to(folder) if prefix.is_relative_to(folder) else prefix)
