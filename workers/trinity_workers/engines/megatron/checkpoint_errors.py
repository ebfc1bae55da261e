"""Errors of Megatron checkpoints that cannot be written or read."""

from __future__ import annotations

from pathlib import Path

from trinity_events.errors import TrinityError


class CheckpointRefused(TrinityError):
    """Raised if the checkpoint cannot be written or read as requested."""

    is_lasting = True


class UnsafePickle(CheckpointRefused):
    """A file of a checkpoint holds a pickle of a class that no checkpoint needs.

    Args:
        path: The file.
        name: Full name of the class or function.
    """

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(path, name)
        self.path = path
        self.name = name

    def __str__(self) -> str:
        return (
            f"{self.path} was not loaded: its pickle names {self.name}, which no checkpoint needs "
            "and which could run code; use an older checkpoint, and find out who wrote the file"
        )


class UndecodableFile(CheckpointRefused):
    """A file of a checkpoint cannot be decoded.

    Args:
        path: The file.
        reason: Text of the decoder's error.
    """

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path} is damaged ({self.reason}): use an older checkpoint"


class MissingCheckpointFile(CheckpointRefused):
    """A file of a checkpoint is not there.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.path = path

    def __str__(self) -> str:
        return (
            f"{self.path} is missing, so the checkpoint is not whole: restore the file, or use an "
            "older checkpoint"
        )
