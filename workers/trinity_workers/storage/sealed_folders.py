"""Folders of weights, of which the list of digests, written last, says that they are whole."""

from __future__ import annotations

from pathlib import Path

from trinity_events.checkpoints.digest_list import list_digests
from trinity_events.checkpoints.layout import COMPLETING, FILE_DIGESTS
from trinity_events.system.open_folder import OpenFolder

from .durable_files import make_folder, sync, sync_tree


def begin_folder(folder: Path) -> None:
    """Mark a folder as one whose files change, until :func:`seal`.

    It may be in a checkpoint that has a manifest: a run that resumes with weights in files
    completes the model of its checkpoint.
    """
    make_folder(folder)
    # The mark before the list goes: at each moment one of both says that files may change.
    (folder / COMPLETING).touch()
    sync(folder)
    (folder / FILE_DIGESTS).unlink(missing_ok=True)


def seal(folder: Path) -> None:
    """Make a folder durable, and then write the list of its files' digests."""
    # The files before their list: a list that survives a crash must not name lost bytes.
    sync_tree(folder)
    with OpenFolder.at(folder) as opened:
        opened.write(FILE_DIGESTS, list_digests(folder))
    (folder / COMPLETING).unlink(missing_ok=True)


def has_weights(folder: Path) -> bool:
    """Return True if the folder has all of its weights: its last writer has sealed it."""
    return (folder / FILE_DIGESTS).is_file()
