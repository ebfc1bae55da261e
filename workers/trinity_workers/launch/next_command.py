"""Command that continues a run which did not finish."""

from __future__ import annotations

from trinity_events.checkpoints.verification import CheckpointDamaged
from trinity_events.errors import TrinityError

from .resume import CheckpointUnusable
from .resume_command import FROM_STEP


def next_command(command: str | None, error: BaseException | None) -> str | None:
    """Return the command that continues a run which did not finish; None if none would.

    A command that has failed for a lasting reason would fail again: the error names the way out.

    Args:
        command: Command that resumes from the newest checkpoint.
        error: Error that ended the run; None if it was interrupted.
    """
    if command is not None and isinstance(error, CheckpointUnusable | CheckpointDamaged):
        return None if error.older is None else f"{command} {FROM_STEP} {error.older}"
    is_lasting = isinstance(error, TrinityError) and error.is_lasting
    return None if is_lasting else command
