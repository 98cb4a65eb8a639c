"""Help of one screen: ``--help`` has what people use first, ``--help-all`` the rest."""

from __future__ import annotations

import inspect

import click

# Key of a context's meta.
SHOWS_ALL = "optimizer.commands.long_help.shows_all"


class FurtherOption(click.Option):
    """An option that few people need: ``--help`` of a LongCommand leaves it to ``--help-all``."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the lines of help, or None for an option that is not shown."""
        return super().get_help_record(ctx) if ctx.meta.get(SHOWS_ALL) else None


class LongCommand(click.Command):
    """A command whose ``--help`` has a paragraph, examples and the options people use first; ``--help-all`` has all."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters, with ``--help-all``."""
        help_all = click.Option(
            ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_help_all, help="Show all of it."
        )
        return [*super().get_params(ctx), help_all]

    def get_help(self, ctx: click.Context) -> str:
        """Return the help, in one screen unless all is asked for."""
        whole = self.help, self.epilog
        if not ctx.meta.get(SHOWS_ALL):
            self.help, self.epilog = (text and inspect.cleandoc(text).partition("\n\n")[0] for text in whole)
        try:
            return super().get_help(ctx)
        finally:
            self.help, self.epilog = whole


def _help_all(ctx: click.Context, _: click.Parameter, is_asked: bool) -> None:
    if is_asked:
        ctx.meta[SHOWS_ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()
