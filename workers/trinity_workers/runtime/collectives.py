"""Helpers that finish collectives and agree on errors over all ranks (invariant 10)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from .collective_errors import CollectiveBroken, PeerFailed

_MESSAGE_BYTES = 512


def rank_and_world(group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """Return this process's rank and the number of ranks; (0, 1) without a process group."""
    return (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)


def all_reduced(
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> torch.Tensor:
    """Return the sum, or another reduction, of a tensor over all ranks of the group. Collective."""
    # all_reduce() works in place, and callers go on using their own part.
    total = tensor.clone()
    dist.all_reduce(total, op=op, group=group)
    return total


def largest(numbers: Sequence[int], group: dist.ProcessGroup | None = None) -> list[int]:
    """Return the largest of all ranks' numbers, for each place of the sequence. Collective."""
    mine = torch.tensor(numbers, device=_message_device(group))
    maxima: list[int] = all_reduced(mine, group, dist.ReduceOp.MAX).tolist()
    return maxima


def summed(number: int, group: dist.ProcessGroup | None = None) -> int:
    """Return the sum of all ranks' numbers. Collective."""
    return int(all_reduced(torch.tensor(number, device=_message_device(group)), group))


@contextmanager
def together(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Raise on every rank of the group if the block fails on any.

    The block must contain no collective: a rank that fails in it would leave the others waiting.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    raise_together(error, group)


def raise_together(error: Exception | None, group: dist.ProcessGroup | None = None) -> None:
    """Exchange errors over all ranks of the group; raise on every rank if any failed.

    This is a collective: every rank calls it after its earlier collectives are complete. A failed
    rank raises its own error. The others raise :class:`PeerFailed` with the message of the lowest
    failed rank. The text is sent as bytes; nothing is pickled.

    Raises:
        PeerFailed: if another rank failed.
        CollectiveBroken: if the ranks cannot exchange errors.
    """
    failed = _first_failed(error, group) if dist.is_available() and dist.is_initialized() else None
    # Its own error first: it has the traceback of the cause.
    if error is not None:
        raise error
    if failed is not None:
        raise failed


def _first_failed(error: Exception | None, group: dist.ProcessGroup | None) -> PeerFailed | None:
    text = b"" if error is None else f"{type(error).__name__}: {error}".encode(errors="replace")
    # One length for all: all_gather() takes tensors of one size; sizes need an exchange more.
    payload = bytes([error is not None]) + text[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0")
    mine = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(_message_device(group))
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    try:
        dist.all_gather(everyone, mine, group=group)
    # torch's DistBackendError and DistNetworkError, and Gloo's plain errors, all derive from it.
    except RuntimeError as caught:
        raise CollectiveBroken("agree", str(caught)) from caught
    for rank, theirs in enumerate(everyone):
        if theirs[0]:
            # The cut at _MESSAGE_BYTES may go through a character.
            message = bytes(theirs[1:].tolist()).rstrip(b"\0").decode(errors="replace")
            return PeerFailed(rank, message)
    return None


def gather_bytes(mine: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Return the bytes of every rank of the group, in rank order. Collective; without pickle."""
    device = _message_device(group)
    # Sizes first: all_gather() takes tensors of one size, and dist.all_gather_object() pickles.
    size = torch.tensor([len(mine)], device=device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    longest = max(1, *(int(length) for length in sizes))  # a tensor of no bytes has no buffer
    padded = bytearray(mine.ljust(longest, b"\0"))
    sent = torch.frombuffer(padded, dtype=torch.uint8).to(device)
    everyone = [torch.empty_like(sent) for _ in sizes]
    dist.all_gather(everyone, sent, group=group)
    return [
        bytes(theirs[: int(length)].tolist())
        for theirs, length in zip(everyone, sizes, strict=True)
    ]


def _message_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device for the group's tensors: NCCL takes none from the CPU."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
