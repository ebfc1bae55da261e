"""Ways in which a file of a checkpoint is damaged, each by a function of its path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from trinity_events.verify_checkpoint import CheckpointDamaged


def flip(path: Path) -> None:
    """Flip a bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x40
    path.write_bytes(data)


def cut(path: Path) -> None:
    """Cut the file in half."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    """Remove all bytes."""
    path.write_bytes(b"")


def remove(path: Path) -> None:
    """Remove the file."""
    path.unlink()


def zero(path: Path) -> None:
    """Replace all bytes by zeros."""
    path.write_bytes(bytes(path.stat().st_size))


def add(path: Path) -> None:
    """Write another file next to it."""
    path.with_name(f"{path.name}.other").write_bytes(b"other")


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "flip": (flip, "was changed"),
    "cut": (cut, "were saved"),
    "empty": (empty, "were saved"),
    "gone": (remove, "is not there"),
    "zeros": (zero, "was changed"),
    "extra": (add, "is not listed"),
}
"""Damage by its name, and what the error says of it."""


def restored(path: Path, damage: Callable[[Path], None], attempt: Callable[[], object]) -> object:
    """Damage a file, call a function, and restore the file; return what the call returned."""
    data = path.read_bytes()
    damage(path)
    try:
        return attempt()
    finally:
        path.write_bytes(data)
        path.with_name(f"{path.name}.other").unlink(missing_ok=True)


def check(error: object, path: Path, kind: str) -> None:
    """Assert that an error names the damaged file and what is wrong with it, in one sentence."""
    assert isinstance(error, CheckpointDamaged), (path, kind, error)
    name = f"{path.name}.other" if kind == "extra" else path.name
    assert error.path.name == name, (path, kind, error)
    assert DAMAGE[kind][1] in error.reason, (path, kind, error)
    assert "\n" not in str(error)
