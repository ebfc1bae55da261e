"""Buckets of small tensors, which cross the bus as one copy.

A copy of its own costs 40 to 90 us on an H100, whatever its size (``docs/gpu.md``): the time in
which the bus moves 2 MiB. So small tensors are gathered on their device, or scattered there, by one
operation for each bucket and dtype. Operations are proportional to bytes, not to tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

import torch

from trinity_schemas import ALIGNMENT

from ..copy_streams import CopyStream
from ..tensors import is_row_major

SMALL_BYTES = 1 << 20
"""Bytes from which a tensor is copied by itself; the bus then costs more than the operation."""
BUCKET_BYTES = 16 << 20
"""Largest size of a bucket: long enough for the bus, and short enough to overlap two of them."""
_PIECES = 2
"""Pieces of device memory in which buckets take turns: one is copied, one filled or emptied."""
_GATHERED = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    }
)
"""Dtypes that ``torch._foreach_copy_`` copies many of by one kernel; others it copies singly."""


def is_gathered(tensor: torch.Tensor) -> bool:
    """Return True if the tensor travels in a bucket."""
    return (
        0 < tensor.nbytes < SMALL_BYTES
        and tensor.dtype in _GATHERED
        and is_row_major(tensor)
        # A tensor made in inference mode is only written to by itself.
        and not tensor.is_inference()
    )


class Bucket:
    """Consecutive tensors of a list, and views of them in a piece of their device's memory.

    Each begins at a multiple of :data:`~trinity_schemas.ALIGNMENT`, as in a part.

    Attributes:
        first: Number of the first tensor in the list.
        offsets: Offset of each tensor in the bucket, in bytes.
        sizes: Bytes of each tensor.
        memory: Device memory of the whole bucket, uint8 [bytes].
    """

    def __init__(self, first: int) -> None:
        self.first = first
        self.offsets: list[int] = []
        self.sizes: list[int] = []
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._views: dict[torch.dtype, tuple[list[int], list[torch.Tensor]]] = {}

    @property
    def end(self) -> int:
        """Offset behind the last tensor, in bytes."""
        return self.offsets[-1] + self.sizes[-1] if self.sizes else 0

    @property
    def begin_of_next(self) -> int:
        """Offset at which a further tensor would begin, in bytes."""
        return self.end + -self.end % ALIGNMENT

    def append(self, nbytes: int) -> None:
        """Give the next tensor its place."""
        self.offsets.append(self.begin_of_next)
        self.sizes.append(nbytes)

    def place(self, piece: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """Make the views in a piece of memory."""
        self.memory = piece[: self.end]
        for place, (offset, nbytes) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            tensor = tensors[self.first + place]
            places, views = self._views.setdefault(tensor.dtype, ([], []))
            places.append(place)
            # Aligned offsets make the view as a wider dtype valid.
            views.append(piece[offset : offset + nbytes].view(tensor.dtype).view(tensor.shape))

    def gather(self, tensors: Sequence[torch.Tensor], first: int | None = None) -> None:
        """Copy the tensors into the memory, with zeros between them, after the device's work.

        Args:
            tensors: List that was divided, or one in which the bucket's tensors follow one another.
            first: Number of the bucket's first tensor in that list; by default :attr:`first`.
        """
        begin = self.first if first is None else first
        with torch.no_grad():
            if sum(self.sizes) < self.end:
                self.memory.zero_()  # another bucket may have used this memory
            for places, views in self._views.values():
                torch._foreach_copy_(views, [tensors[begin + place] for place in places])

    def scatter(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the memory into the tensors, after the device's earlier work."""
        with torch.no_grad():
            for places, views in self._views.values():
                torch._foreach_copy_([tensors[self.first + place] for place in places], views)


class GatheredCopies:
    """Copies of buckets from their device, each gathered while the one before is copied.

    A piece of memory is gathered into only after the copy of the bucket that had it before.

    Args:
        lane: Stream that runs the copies.
    """

    def __init__(self, lane: CopyStream) -> None:
        self._lane = lane
        self._marks: deque[Any] = deque()

    def copy(
        self,
        target: torch.Tensor,
        bucket: Bucket,
        tensors: Sequence[torch.Tensor],
        first: int | None = None,
    ) -> None:
        """Gather a bucket as :meth:`Bucket.gather` does, and begin its copy to ``target``."""
        if len(self._marks) == _PIECES:
            self._lane.wait(self._marks.popleft())
        bucket.gather(tensors, first)
        self._lane.begin()
        self._lane.copy(target, bucket.memory)
        self._marks.append(self._lane.mark())


def divide(
    tensors: Sequence[torch.Tensor],
    bucket_bytes: int = BUCKET_BYTES,
    starts: Collection[int] = (),
) -> list[Bucket]:
    """Divide tensors into buckets, in order; those in turn share a piece of device memory.

    Memory and views serve every version of a layout: making views costs more than copies.

    Args:
        tensors: Tensors of one device, for which :func:`is_gathered` holds; none is kept.
        bucket_bytes: Largest size of a bucket, unless one tensor is larger.
        starts: Numbers of tensors that begin a bucket.
    """
    buckets: list[Bucket] = []
    for number, tensor in enumerate(tensors):
        is_full = buckets and buckets[-1].begin_of_next + tensor.nbytes > bucket_bytes
        if not buckets or is_full or number in starts:
            buckets.append(Bucket(number))
        buckets[-1].append(tensor.nbytes)
    # A caller's inference mode would make memory that no other caller may write to.
    with torch.inference_mode(False):
        pieces = [
            torch.empty(
                max(bucket.end for bucket in buckets), dtype=torch.uint8, device=tensors[0].device
            )
            for _ in range(min(_PIECES, len(buckets)))
        ]
        for number, bucket in enumerate(buckets):
            bucket.place(pieces[number % _PIECES], tensors)
    return buckets
