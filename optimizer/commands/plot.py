"""``--plot FILE``: figures of commands that can also draw, with matplotlib, an extra."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from optimizer.commands.options import F, OutputFile
from optimizer.commands.output import say
from optimizer.contract.errors import GpufleetError, InvalidInputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_option(function: F) -> F:
    """Add ``--plot``, passed to the command as ``plot``: a path or None."""
    return click.option(
        "--plot",
        metavar="FILE.png|svg",
        type=OutputFile(),
        help="Also draw it (needs the extra: pip install 'gpufleet[plot]').",
    )(function)


def check_plot(path: Path) -> None:
    """Refuse a plot that cannot be drawn, before the work."""
    if path.suffix not in (".png", ".svg"):
        raise InvalidInputError(
            f"--plot is {path}", limit="a name that ends in .png or .svg", next_step="--plot curves.svg"
        )
    if find_spec("matplotlib") is None:
        raise GpufleetError(
            f"--plot {path} needs matplotlib, which is not installed",
            why="only plots need it, so it is an extra",
            next_step="pip install 'gpufleet[plot]', or --format csv and a program of your own",
        )


def new_figure(width_in: float, height_in: float) -> Figure:
    """Return an empty figure of a size in inches, without pyplot, which has windows and global state.

    https://matplotlib.org/stable/gallery/user_interfaces/web_application_server_sgskip.html
    """
    from matplotlib.figure import Figure

    return Figure(figsize=(width_in, height_in), layout="constrained")


def save_plot(figure: Figure, path: Path) -> None:
    """Write the figure, and say so on standard error."""
    try:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise GpufleetError(f"--plot {path} cannot be written: {error}", next_step="name another file") from error
    say(f"wrote {path}", err=True)
