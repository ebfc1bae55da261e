"""How the weights of a run are to travel, by where its processes are."""

from __future__ import annotations

from typing import Literal

from trinity_events.errors import SharedMemoryUnusable
from trinity_events.weights.segments import SHARED_MEMORY, available, free_bytes

from ..config import TransportName

TransportChoice = Literal["auto", "shm", "redis", "collective"]

ENOUGH = 1 << 30
"""Free bytes below which shared memory is not chosen unasked; a container often has 64 MiB."""


def chosen_transport(choice: TransportChoice, *, explorers_here: bool) -> TransportName:
    """The transport asked for, or the fastest that is sure to reach every explorer.

    Raises:
        SharedMemoryUnusable: when it was asked for, and the host has none.
    """
    if choice == "auto":
        fits = explorers_here and available() and free_bytes() >= ENOUGH
        return "shm" if fits else "redis"
    if choice == "shm" and not available():
        raise SharedMemoryUnusable(
            f"this host has no {SHARED_MEMORY} that can be written: leave --weights shm out"
        )
    return choice
