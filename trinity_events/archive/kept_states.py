"""Files of kept states: a cache, which any process may delete."""

from __future__ import annotations

import logging
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from ..checkpoints.layout import ARCHIVE
from ..core.kept_states import KeptState, StateSpacing, decode_kept, encode_kept
from ..log import position
from ..server import trinity_home
from ..system.open_folder import OpenFolder

logger = logging.getLogger(__name__)

_FOLDER = "states"
_NAME = re.compile(r"(\d{15})\.(\d{1,20}-\d{1,20})\.state")
_LARGEST = 256 << 20
"""Maximum bytes of a file."""


class _StateFile(NamedTuple):
    number: int
    """Entries of the log up to the state."""
    entry_id: str
    name: str


class KeptStates:
    """Kept states of one log, in a folder of their own.

    A state that cannot be written is not kept: the folder may be another user's, or the disk full.

    Args:
        folder: The folder; it is made with the first state.
        spacing: Places of the states.
    """

    def __init__(self, folder: Path, spacing: StateSpacing = StateSpacing()) -> None:
        self.folder = folder
        self.spacing = spacing

    @staticmethod
    def for_run(run_folder: Path, spacing: StateSpacing = StateSpacing()) -> KeptStates:
        """Return those of a run: beside its archive if it can be, or in ``TRINITY_HOME``."""
        archive = run_folder / ARCHIVE
        # The run of another user may be readable only.
        if archive.is_dir() and os.access(archive, os.W_OK):
            return KeptStates(archive / _FOLDER, spacing)
        return KeptStates(trinity_home() / _FOLDER / run_folder.name, spacing)

    @staticmethod
    def for_file(run_id: str, digest: str, spacing: StateSpacing = StateSpacing()) -> KeptStates:
        """Return those of an exported file, by the digest of the file."""
        name = f"{run_id}.{digest.rpartition(':')[2][:32]}"
        return KeptStates(trinity_home() / _FOLDER / name, spacing)

    def before(self, until: tuple[int, int], number: int | None = None) -> KeptState | None:
        """Return the last readable state up to a position and up to a number of entries."""
        for file in reversed(self._files()):
            if position(file.entry_id) > until or (number is not None and file.number > number):
                continue
            kept_state = self._read(file)
            if kept_state is not None:
                return kept_state
        return None

    def save(self, kept_state: KeptState) -> None:
        """Write a state, and remove those that are nearer together than the log's length asks."""
        number = kept_state.state.entries
        name = f"{number:015d}.{kept_state.state.position}.state"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with OpenFolder.at(self.folder) as folder:
                folder.write(name, encode_kept(kept_state))
        except OSError as error:
            # No warning: without this state, the next question folds a longer part of the log.
            logger.debug("the state at %s is not kept (%s)", kept_state.state.position, error)
            return
        apart = self.spacing.interval(number)
        self._remove([file for file in self._files() if file.number % apart])

    def clear(self) -> None:
        """Remove all states: they are of another log, or of another version."""
        self._remove(self._files())

    def _files(self) -> list[_StateFile]:
        """Return the files, by the number of entries."""
        try:
            with OpenFolder.at(self.folder) as folder:
                names = folder.names()
        except OSError:
            return []
        matches = (_NAME.fullmatch(name) for name in names)
        return sorted(
            _StateFile(int(match[1]), match[2], match[0]) for match in matches if match is not None
        )

    def _read(self, file: _StateFile) -> KeptState | None:
        """Return the state of a file; None for one that is damaged or of another version."""
        try:
            with OpenFolder.at(self.folder) as folder:
                kept_state = decode_kept(folder.read(file.name, _LARGEST) or b"")
        except (OSError, msgspec.DecodeError) as error:
            logger.debug("%s is not used (%s)", self.folder / file.name, error)
            return None
        # A file that was renamed says another place than its state has.
        key = kept_state.state.entries, kept_state.state.position
        return kept_state if key == (file.number, file.entry_id) else None

    def _remove(self, files: list[_StateFile]) -> None:
        # What stays is removed with the next state.
        with suppress(OSError), OpenFolder.at(self.folder) as folder:
            for file in files:
                folder.remove(file.name)
