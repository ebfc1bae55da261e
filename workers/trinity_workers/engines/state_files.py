"""State on disk: written whole and durably, read without executing anything."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch
import torch.distributed.tensor  # until it is imported, torch.load refuses sharded tensors


def copied(value: Any) -> Any:
    """The same structure with every tensor, sharded ones too, copied to the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: copied(one) for key, one in value.items()}
    if isinstance(value, list):
        return [copied(one) for one in value]
    return value


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Write the file whole or not at all, and durably."""
    with _whole_file(path) as file:
        torch.save(state, file)


def write_json(path: Path, value: Any) -> None:
    """Write the file whole or not at all, and durably."""
    with _whole_file(path) as file:
        file.write(msgspec.json.format(msgspec.json.encode(value), indent=2))


@contextmanager
def _whole_file(path: Path) -> Iterator[BinaryIO]:
    """Give a file that has its name, on disk, once the block has ended without an error."""
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)  # half a shard would keep a full disk full
        raise
    sync(path.parent)


def read_state(path: Path) -> dict[str, Any]:
    """Read what :func:`write_state` wrote. Tensors and plain values alone: nothing is executed."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is not there: a checkpoint is loaded with as many ranks as it was saved with"
        )
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def make_folder(folder: Path) -> None:
    """Create the folder and what is missing above it, durably."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for one in missing:
        sync(one.parent)


def sync_tree(folder: Path) -> None:
    """Make everything in the folder durable, for what others wrote there."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def sync(path: Path) -> None:
    """Make a file's bytes, or a folder's names, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
