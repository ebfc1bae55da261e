"""``trinity-events delete``."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated

import anyio
import redis.asyncio
import typer

from ..archive.kept_states import KeptStates
from ..archive.ownership import log_identity, read_mark
from ..archive.segments import Archive
from ..errors import TrinityError
from ..liveness import abandoned_since
from ..log import RedisEventLog, require_run
from ..log.redis.deletion import RunInUse, delete_run
from ..record.files import RECORD
from ..replay import SnapshotUnreadable, current_state
from ..system.open_folder import OpenFolder
from ..views.terminal import print_err, print_out
from .options import CheckpointRoot, RedisUrl, RunArgument, checkpoint_root, open_client


class NotConfirmed(TrinityError):
    """The user did not confirm the deletion.

    Attributes:
        run_id: The run.
        folder: Folder that would be deleted too.
        was_asked: True if the user was asked.
    """

    run_id: str
    folder: Path | None
    was_asked: bool

    def __str__(self) -> str:
        if self.was_asked:
            return "nothing was deleted"
        return f"this deletes {self.what} for good: confirm it with --yes"

    @property
    def what(self) -> str:
        """The run and the folder, as text."""
        too = "" if self.folder is None else f" and {self.folder}, with every checkpoint in it"
        return f"run {self.run_id}{too}"


def delete(
    run: RunArgument,
    folder: Annotated[
        bool,
        typer.Option(
            "--checkpoints",
            help="Delete the run's folder too: checkpoints, archive and recorded rollouts.",
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    root: CheckpointRoot = None,
    redis_url: RedisUrl = None,
) -> None:
    """Delete an old run from its server: its log, its state and its listing.

    The run must be closed or abandoned, and no reducer may lead it. Its folder stays, unless
    --checkpoints is given; with the archive in it, export cannot restore the run.

    Example: trinity-events delete demo-1
    """
    run_folder = checkpoint_root(root) / run
    removed = run_folder if folder and run_folder.is_dir() else None
    deleted = anyio.run(_delete, redis_url, run, removed, yes)
    # They are in TRINITY_HOME if the folder was another user's, and would stay there for good.
    KeptStates.for_run(run_folder).clear()
    if removed is not None:
        shutil.rmtree(removed)
    print_out(f"run {run} is deleted: {deleted} keys" + (f", and {removed}" if removed else ""))
    record = run_folder / RECORD
    if record.is_dir():
        # They have private texts, which a user may take to be gone.
        print_out(f"its recorded rollouts stay in {record}: delete them with rm -r")


async def _delete(redis_url: str | None, run: str, folder: Path | None, yes: bool) -> int:
    """Delete a run's keys; return their number. A folder to be removed must be the run's own."""
    async with open_client(redis_url) as client:
        log = RedisEventLog(client, await require_run(client, run))
        # Before all checks: the script deletes nothing if an event came after it
        # (test_what_is_led_or_has_gone_on_meanwhile_stays).
        last = await log.last_id()
        await _require_over(client, log)
        if folder is not None:
            await _require_own(log, folder)
        _confirm(run, folder, yes)
        return await delete_run(client, run, last)


async def _require_over(client: redis.asyncio.Redis, log: RedisEventLog) -> None:
    """Raise RunInUse for a run that goes on."""
    try:
        state = await current_state(log)
    except SnapshotUnreadable:
        return  # no version of the program can go on with it either
    open_now = state.closed is None and state.opened_at is not None
    # An open run without a sign of life has no trainer to close it, and could never be deleted.
    if open_now and await abandoned_since(client, state) is None:
        raise RunInUse(log.run_id, "open")


async def _require_own(log: RedisEventLog, folder: Path) -> None:
    """Raise RunInUse for a folder of another log of the run's name."""
    # Two servers may have a run of this name below one root.
    identity = await log_identity(log, Archive(folder, log.run_id))
    with OpenFolder.open_run(folder) as opened:
        mark = read_mark(opened, log.run_id)
    if mark is not None and mark.log != identity:
        raise RunInUse(log.run_id, "folder", folder=folder, mark=str(mark))


def _confirm(run: str, folder: Path | None, yes: bool) -> None:
    if yes:
        return
    refusal = NotConfirmed(run, folder, was_asked=sys.stdin.isatty())
    # A script has no terminal to answer at.
    if not refusal.was_asked:
        raise refusal
    print_err(f"Delete {refusal.what} for good? Type the run's id to confirm:")
    if sys.stdin.readline().strip() != run:
        raise refusal
