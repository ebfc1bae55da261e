"""Methods of weight sync: their names in Trinity-RFT, their announcements, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from trinity_events.core.file_versions import weights_save
from trinity_schemas import StepReady

if TYPE_CHECKING:
    from .train_config import SyncConfig, SyncMethod

METHOD_ALIASES = {"online": "nccl", "offline": "checkpoint"}
"""Names that Trinity-RFT has for methods, and the methods."""


def is_version(event: StepReady, method: SyncMethod) -> bool:
    """Return True if a run of this sync method announces a weight version by the event."""
    if method == "checkpoint":
        return weights_save(event) is not None
    return event.kind == "weights"


def contradictions(
    sync: SyncConfig, named: Callable[[str], str]
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield settings of versions in memory, where the method is another one.

    Args:
        sync: The section.
        named: Names a field, given by its path, in the sentences.
    """
    if sync.method == "memory":
        return
    method = named("sync.method")
    how = {
        "nccl": "sends full tensors from rank 0 to a collective group",
        "checkpoint": "writes full tensors to files from rank 0",
    }[sync.method]
    given = {
        "transport": sync.transport != "auto" and f"{sync.transport} chooses a way through memory",
        "publish": sync.publish in {"shards", "snapshot"} and f"{sync.publish} was asked for",
        "full_every": sync.full_every > 1 and "asks for deltas",
    }
    if sync.method == "checkpoint":
        given["tensor_digests"] = sync.tensor_digests and "is for versions in memory"
    for field, reason in given.items():
        if reason:
            yield (
                ("sync.method", f"sync.{field}"),
                f"{method} {sync.method} {how}, and {named(f'sync.{field}')} {reason}: leave that "
                f"out, or choose {method} memory",
            )
