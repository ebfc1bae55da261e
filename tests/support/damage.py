"""Ways in which a file of a checkpoint is damaged, each by a function of its path."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity_events.checkpoints.manifest import saved_files
from trinity_events.checkpoints.verification import CheckpointDamaged

if TYPE_CHECKING:
    from tests.support.rank_processes import Rank


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


def save(rank: Rank, folder: Path) -> None:
    """Save the rank's engine."""
    rank.objects.engine.save_checkpoint(str(folder))


def load(rank: Rank, folder: Path, mode: str = "full") -> BaseException | None:
    """Load the rank's engine; return its error."""
    rank.objects.engine.verify_mode = mode
    try:
        rank.objects.engine.load_checkpoint(str(folder))
    except Exception as error:
        return error
    return None


def first_of_each_kind(sizes: dict[str, int]) -> dict[str, int]:
    """Return the first file of each kind: those of other ranks and parts are verified alike."""
    kinds = {re.sub(r"\d+", "N", Path(name).name): name for name in sorted(sizes, reverse=True)}
    return {
        name: sizes[name]
        for name in kinds.values()
        if "huggingface" not in name or Path(name).name in ("config.json", "adapter_config.json")
    }


def damage_all(rank: Rank, folder: Path) -> list[tuple[str, str, Any]]:
    """Damage each file in each way, and load; return the errors by file and kind of damage."""
    import torch.distributed as dist

    errors: list[tuple[str, str, Any]] = []
    sizes = sorted(first_of_each_kind(saved_files(folder)).items())
    dist.barrier()  # every rank has listed the files before the first is damaged
    for name, size in sizes:
        for kind in DAMAGE if size else ["gone", "extra"]:

            def attempt() -> BaseException | None:
                dist.barrier()
                error = load(rank, folder)
                dist.barrier()
                return error

            if rank.number == 0:
                errors.append((name, kind, restored(folder / name, DAMAGE[kind][0], attempt)))
            else:
                errors.append((name, kind, attempt()))
    dist.barrier()
    return errors


def check_all(answers: list[list[tuple[str, str, Any]]], folder: Path) -> set[str]:
    """Assert that all ranks raised the same; return the names of the damaged files."""
    for reports in zip(*answers, strict=True):
        name, kind, _ = reports[0]
        for _, _, error in reports:
            check(error, folder / name, kind)
        assert len({str(error) for _, _, error in reports}) == 1
    return {Path(name).name for name, _, _ in answers[0]}


def flipped_conversion(folder: Path, file: str, target: Path) -> CheckpointDamaged:
    """Flip a bit of a file, convert the checkpoint, and return the error."""
    from trinity_workers.conversion.convert import convert

    def attempt() -> CheckpointDamaged:
        try:
            convert(folder, target)
        except CheckpointDamaged as error:
            return error
        raise AssertionError("it was converted")

    error = restored(folder / file, flip, attempt)
    assert isinstance(error, CheckpointDamaged)
    assert not target.exists()
    return error
