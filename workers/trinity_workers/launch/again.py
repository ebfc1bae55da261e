"""Commands that a run's summary tells a user to type next."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence

from trinity_events.server.url import redacted

_NUMBERED = re.compile(r"(.*)-(\d{1,3})")
_LONGEST = 63
"""Characters that a run's id may have."""


def again_command(arguments: Sequence[str], run_id: str) -> str:
    """Return what to type to train again from the beginning, under a name of its own.

    Args:
        arguments: Those of the command that is to be given again.
        run_id: The run that it named, or that was named for it.
    """
    words = ["trinity-events"]
    follows_run = False
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if follows_run:
            words.append(next_name(run_id))
        elif option == "--run" and equals:
            words.append(f"--run={next_name(run_id)}")
        elif equals and "://" in value:
            words.append(f"{option}={redacted(value)}")
        else:
            words.append(redacted(argument) if "://" in argument else argument)
        follows_run = argument == "--run"
    return shell_command(words)


def shell_command(words: Sequence[str]) -> str:
    """Return a command as it is typed in any shell, with this process's ``TRINITY_HOME``."""
    home = os.environ.get("TRINITY_HOME")
    prefix = f"TRINITY_HOME={shlex.quote(home)} " if home else ""
    return prefix + shlex.join(words)


def next_name(run_id: str) -> str:
    """Return a name for another try of a run: ``grpo`` is followed by ``grpo-2``, ``grpo-3``."""
    numbered = _NUMBERED.fullmatch(run_id)
    name, number = (numbered[1], int(numbered[2]) + 1) if numbered else (run_id, 2)
    return f"{name[: _LONGEST - len(str(number)) - 1]}-{number}"
