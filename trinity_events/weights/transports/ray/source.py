"""Reader of a part from Ray's object store."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import numpy as np

from ....errors import VersionVanished
from ...errors import CorruptPart
from ..base import Check, PartRef
from ..chunk_slices import Chunks, check_chunks, cut_chunks
from .directory import DEADLINE, Objects
from .prefetch import Fetched, as_bytes


class RaySource:
    """Implements :class:`~trinity_events.weights.PartSource` over Ray's shared memory.

    Ray keeps an object while any process holds a reference. On another node than the publisher's,
    Ray first fetches the objects with wanted chunks into that node's store.

    Args:
        ray: The ``ray`` module.
        part: The part.
        manifest: Manifest of the part.
        objects: Objects of the part.
        seen: Prefetched objects, by reference.
    """

    def __init__(
        self,
        ray: Any,
        part: PartRef,
        manifest: bytes,
        objects: Objects,
        seen: Mapping[Any, Fetched] = MappingProxyType({}),
    ) -> None:
        self.manifest = manifest
        self._ray = ray
        self._part = part
        self._objects = objects
        self._seen = seen

    def read(
        self, sizes: Sequence[int], check: Check, indices: Container[int] | None = None
    ) -> Sequence[memoryview]:
        """Return the bytes in the object store itself, without a copy.

        Raises VersionUnavailable if the publisher ended, or Ray lost an object.
        """
        references, lengths = self._objects
        # Index of each object's first chunk, then the number of all chunks.
        firsts = self._first_chunks(sizes)
        numbers = {
            reference: number
            for number, reference in enumerate(references)
            if indices is None
            or any(index in indices for index in range(*firsts[number : number + 2]))
        }
        # Untouched memory takes no pages.
        pieces = [np.empty(length, np.uint8).data for length in lengths]

        def cut_up(reference: Any, data: memoryview) -> Chunks:
            number = numbers.pop(reference)
            if len(data) != lengths[number]:
                raise self._corrupt()
            pieces[number] = data
            first, end = firsts[number : number + 2]
            return cut_chunks(data, sizes[first:end], indices, first)

        for reference, seen in self._seen.items():
            if reference in numbers:
                for index, chunk in cut_up(reference, seen.data):
                    check(index, chunk, seen.find_digest(chunk))
        for arrivals in self._as_they_come(list(numbers)):
            check_chunks(
                [chunk for reference, data in arrivals for chunk in cut_up(reference, data)], check
            )
        return pieces

    def _first_chunks(self, sizes: Sequence[int]) -> list[int]:
        """Return the index of each object's first chunk.

        Raises CorruptVersion unless every object ends where a chunk ends, and the last with the
        last.
        """
        references, lengths = self._objects
        ends, cuts = list(accumulate(sizes)), list(accumulate(lengths))
        if not (
            len(set(references)) == len(references) == len(lengths)
            # An empty object would have no chunk, and shift all that follow.
            and 0 not in lengths
            and cuts[-1:] == ends[-1:]
            and set(cuts) <= set(ends)
        ):
            raise self._corrupt()
        return [0, *(bisect_left(ends, end) + 1 for end in cuts)]

    def close(self) -> None:
        """Release the objects."""
        self._objects, self._seen = Objects([], []), {}

    def _as_they_come(self, pending: list[Any]) -> Iterator[list[tuple[Any, memoryview]]]:
        """Yield objects that are on this node, and then those that arrive from other nodes."""
        while pending:
            # Those at hand are digested while others are under way.
            there, pending = self._ray.wait(pending, num_returns=len(pending), timeout=0)
            if not there:
                there, pending = self._ray.wait(pending, num_returns=1, timeout=DEADLINE)
            if not there:
                raise VersionVanished(str(self._part), fault="arrival", deadline=DEADLINE)
            yield list(zip(there, self._fetch(there), strict=True))

    def _fetch(self, references: list[Any]) -> Iterator[memoryview]:
        errors = self._ray.exceptions
        try:
            objects = self._ray.get(references, timeout=DEADLINE)
        except errors.OwnerDiedError:
            raise VersionVanished(str(self._part), fault="publisher") from None
        except errors.GetTimeoutError:
            raise VersionVanished(str(self._part), fault="fetch", deadline=DEADLINE) from None
        except errors.ObjectLostError:
            raise VersionVanished(str(self._part), fault="node") from None
        for value in objects:
            data = as_bytes(value)
            if data is None:
                raise VersionVanished(str(self._part), fault="object")
            yield data

    def _corrupt(self) -> CorruptPart:
        return CorruptPart(version=str(self._part), fault="objects")
