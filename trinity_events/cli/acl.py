"""``trinity-events acl``."""

from __future__ import annotations

from typing import Annotated

import typer

from ..server.access_rules import Server, access_rules
from ..views.terminal import print_out
from .options import parse_run_id


def acl(
    run: Annotated[
        str | None,
        typer.Argument(
            help="Run that the users may use; by default every run.", show_default=False
        ),
    ] = None,
    server: Annotated[
        Server,
        typer.Option(help="Server that the rules are for, if weights have a server of their own."),
    ] = "both",
) -> None:
    """Print the users of a server, as lines of its ACL file: a user for each role.

    Put a password in the place of each >NAME. docs/security.md says what each user can do.

    Example: trinity-events acl grpo-7b > users.acl
    """
    for line in access_rules(None if run is None else parse_run_id(run), server):
        print_out(line)
