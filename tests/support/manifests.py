"""Checkpoints without a manifest, as of earlier versions: tests may then change their files."""

from __future__ import annotations

from pathlib import Path

from trinity_events.checkpoints.layout import MANIFEST


def drop_manifests(folder: Path) -> Path:
    """Remove each manifest below a folder; return the folder."""
    for path in folder.rglob(MANIFEST):
        path.unlink()
    return folder
