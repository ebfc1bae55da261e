"""Collectives that are drained, and errors that all ranks agree on (invariant 10)."""

from __future__ import annotations

import torch
import torch.distributed as dist

from trinity_events.errors import TrinityError

_MESSAGE_BYTES = 512


class PeerFailed(TrinityError):
    """Another rank failed in a collective operation; the message is that rank's."""


def raise_together(error: BaseException | None, device: torch.device | None = None) -> None:
    """Tell every rank whether any failed; raise on all of them if so.

    A collective: every rank must call it, after it has finished the collectives before. A rank
    that failed raises its own error, the others raise :class:`PeerFailed` with the message of
    the lowest rank that did. Text travels as bytes; nothing is pickled.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if error is not None:
            raise error
        return
    said = b"" if error is None else f"{type(error).__name__}: {error}".encode()[:_MESSAGE_BYTES]
    mine = torch.zeros(_MESSAGE_BYTES + 1, dtype=torch.uint8, device=device)
    mine[0] = error is not None
    mine[1 : 1 + len(said)] = torch.frombuffer(bytearray(said or b"\0"), dtype=torch.uint8)[
        : len(said)
    ]
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    if error is not None:
        raise error
    for rank, theirs in enumerate(everyone):
        if theirs[0]:
            text = bytes(theirs[1:].tolist()).rstrip(b"\0").decode(errors="replace")
            raise PeerFailed(f"rank {rank} failed: {text}")
