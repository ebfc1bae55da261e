"""Commands in a run's summary that a user types next."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

from trinity_events.server.url import redacted

FROM_STEP = "--from-step"
"""Option with a value, which names an older checkpoint than the newest."""


def resume_command(arguments: Sequence[str], run_id: str) -> str:
    """Return what to type to go on with a run, from its newest ready checkpoint.

    Args:
        arguments: Those of the command that began it.
        run_id: The run that it named, or that was named for it.
    """
    words = ["trinity-events"]
    named = False
    remaining = iter(arguments)
    for argument in remaining:
        option, equals, value = argument.partition("=")
        # Options of one start: typed again, they would begin anew or end a run that lives.
        if argument in ("--fresh", "--take-over"):
            continue
        if option == FROM_STEP:
            if not equals:
                next(remaining, None)
            continue
        named = named or option == "--run"
        if equals and "://" in value:
            # The command is printed and logged: URLs must not show their passwords.
            words.append(f"{option}={redacted(value)}")
        else:
            words.append(redacted(argument) if "://" in argument else argument)
    if not named:
        words += ["--run", run_id]
    return shell_command(words)


def shell_command(words: Sequence[str]) -> str:
    """Return a command as it is typed in any shell, with this process's ``TRINITY_HOME``."""
    home = os.environ.get("TRINITY_HOME")
    prefix = f"TRINITY_HOME={shlex.quote(home)} " if home else ""
    return prefix + shlex.join(words)
