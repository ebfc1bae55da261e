"""Application of all commands, which prints each error as one sentence."""

from __future__ import annotations

import io
import logging
import sys
import traceback
from importlib import metadata
from typing import Annotated, Any

import redis
import typer
from redis.exceptions import RedisClusterException
from typer.core import TyperGroup

from ..errors import StructuredError
from ..log.redis.error_replies import is_reply, reply_text
from ..server import permission_error
from ..system.error_text import leaf_errors
from ..views.terminal import LogFormatter, print_err, print_out
from .acl import acl
from .audit import audit
from .bisect import bisect
from .dashboard import dashboard
from .delete import delete
from .diff import diff
from .explain import explain
from .export import export, import_
from .goodput import goodput
from .metrics import metrics
from .plot import plot
from .reducer import reducer
from .replay import replay
from .runs import runs
from .samples import samples
from .serve import serve
from .status import status
from .tail import tail
from .traces import traces
from .track import track
from .verify import verify
from .watch import watch

# The workers' package registers its commands here: imports run one way (decision 8).
PLUGINS = "trinity_events.commands"
"""Entry point group of commands of other packages, which this package does not import."""


class _WithPlugins(TyperGroup):
    """Group that imports the commands of other packages to list them, or if it lacks a command."""

    _loaded = False

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands but the deprecated ones."""
        self._load()
        return [name for name in super().list_commands(ctx) if not self.commands[name].hidden]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, or None if there is no such command."""
        # A command of this package starts without the imports of other packages
        # (test_a_command_of_this_package_loads_none_of_another).
        if cmd_name not in self.commands:
            self._load()
        return super().get_command(ctx, cmd_name)

    def _load(self) -> None:
        if self._loaded:
            return
        self._loaded = True
        app = typer.Typer(rich_markup_mode=None)
        for plugin in metadata.entry_points(group=PLUGINS):
            command = plugin.load()
            # As PEP 702 marks what is deprecated.
            app.command(plugin.name, hidden=hasattr(command, "__deprecated__"))(command)
        # Names of this package win: a plugin cannot take the place of one of its commands.
        self.commands = {**typer.main.get_group(app).commands, **self.commands}


def _print_version(show: bool) -> None:
    if show:
        print_out(f"trinity-events {metadata.version('trinity-events')}")
        raise typer.Exit


def build() -> typer.Typer:
    """Return the application with every installed command."""
    app = typer.Typer(
        name="trinity-events",
        cls=_WithPlugins,
        callback=_trinity_events,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    # typer lists commands in the order of their creation, and click would sort them by name.
    listing = (
        *(serve, reducer, runs, status, watch, explain, tail, samples, dashboard, replay),
        *(diff, bisect, audit, goodput, export, import_, verify, delete, metrics, traces, track),
        *(plot, acl),
    )
    for command in listing:
        # `import` is a keyword, so that the name of its function ends with an underscore.
        app.command(command.__name__.rstrip("_"))(command)
    return app


def _trinity_events(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version."
        ),
    ] = False,
) -> None:
    """Event-driven checkpoint and weight-sync pipeline for RL post-training."""


def run() -> None:
    """Run the command line; a user error prints one sentence and exits with status 1."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Write out characters that the terminal cannot encode, as standard error does.
        sys.stdout.reconfigure(errors="backslashreplace")
    # Commands that configure no logging print warnings by this handler, and a record may hold
    # escape sequences of any writer.
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(LogFormatter("%(message)s"))
    try:
        build()()
    except Exception as error:
        print_err(_format_error(error) or traceback.format_exc().rstrip())
        sys.exit(1)


def _format_error(error: Exception) -> str | None:
    """Return the message of an error; None for a defect of the program."""
    # A group of tasks raises all their errors at once, and one of them may be the user's.
    for leaf in leaf_errors(error):
        cause = permission_error(leaf) or leaf
        if isinstance(cause, StructuredError):
            return f"error: {cause}"
        if is_reply(cause):
            return f"error: the server refuses this: {reply_text(cause)}"
        if isinstance(cause, (redis.RedisError, RedisClusterException)):
            return f"error: the server went away: {cause}"
        # An OSError without one has no number of the system's: a library raised it by itself.
        if isinstance(cause, OSError) and cause.strerror:
            where = f"{cause.filename}: " if cause.filename else ""
            return f"error: {where}{cause.strerror}"
    return None
