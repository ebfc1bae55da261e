"""Sink that puts a part into Ray's object store, one object while the next is written."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any, Protocol, TypeAlias

import numpy as np

from trinity_schemas import ALIGNMENT

from ...errors import PartClosed
from ..base import PartRef
from .directory import Objects, PutAttempt

Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"


_ATTEMPTS = count(1)  # of the process: the directory compares numbers of different stores


class Putter:
    """Thread that puts objects from two reused buffers."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._thread: ThreadPoolExecutor | None = None
        self._rooms: SimpleQueue[Bytes] = SimpleQueue()
        # Two: one is filled while Ray copies the other.
        for _ in range(2):
            self._rooms.put(np.empty(0, np.uint8))

    def room(self, nbytes: int) -> Bytes:
        """Return a buffer of at least ``nbytes``, once its former content is put."""
        room = self._rooms.get()
        try:
            return room if len(room) >= nbytes else np.empty(nbytes, np.uint8)
        except MemoryError:
            self._rooms.put(room)
            raise

    def replace_buffer(self) -> None:
        """Replace a buffer to which another thread may still write."""
        self._rooms.put(np.empty(0, np.uint8))

    def put(self, room: Bytes, nbytes: int) -> Future[Any]:
        """Put the first bytes of a buffer and release it; the future gives the reference."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "trinity-put")
        return self._thread.submit(self._put, room, nbytes)

    def close(self) -> None:
        """Wait for pending puts."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _put(self, room: Bytes, nbytes: int) -> Any:
        try:
            return self._ray.put(room[:nbytes])
        finally:
            self._rooms.put(room)


class PartRegister(Protocol):
    """Register of a publisher's parts, which readers find them by."""

    def announce(self, part: PartRef) -> None:
        """Announce a part that is being written to prefetching readers."""
        ...

    def add_object(self, part: PartRef, attempt: PutAttempt, number: int, objects: Objects) -> None:
        """Report an object of a part to prefetching readers."""
        ...

    def withdraw(self, part: PartRef, attempt: PutAttempt) -> None:
        """Report to prefetching readers that a part is not completed."""
        ...

    def add_part(
        self,
        part: PartRef,
        attempt: PutAttempt,
        objects: Objects,
        manifest: bytes,
        base: PartRef | None = None,
    ) -> None:
        """List a part that is complete."""
        ...

    def delete(self, part: PartRef) -> None:
        """Delete a part."""
        ...

    def explained_refusals(self, part: PartRef) -> AbstractContextManager[None]:
        """Raise RayUnusable if Ray refuses an object of a part."""
        ...


class RaySink:
    """Implements :class:`~trinity_events.weights.PartSink`; consecutive chunks fill objects.

    Ray copies an object into its store when it is put; the next one is written at the same time.
    """

    def __init__(
        self,
        register: PartRegister,
        putter: Putter,
        part: PartRef,
        chunk_bytes: int,
        object_bytes: int,
    ) -> None:
        self._register = register
        self._putter = putter
        self._part = part
        self._chunk_bytes = chunk_bytes
        self._object_bytes = object_bytes
        self._room: Bytes | None = None
        self._size = self._filled = 0
        """Capacity of the buffer for its object, and its filled bytes."""
        self._next_size = object_bytes
        self._attempt = PutAttempt(next(_ATTEMPTS), chunk_bytes)
        self._sizes: list[int] = []
        self._putting: list[Future[Any]] = []
        self._state = "open"

    def reserve(self) -> memoryview:
        """Return the place of the chunk in its object."""
        self._check()
        if self._room is not None and self._filled == self._size:
            self._put_object()
        if self._room is None:
            self._room, self._size = self._putter.room(self._next_size), self._next_size
            self._next_size = self._object_bytes
        end = min(self._filled + self._chunk_bytes, self._size)
        memory: memoryview = self._room.data[self._filled : end]
        return memory

    def fits(self, filled: int, nbytes: int) -> bool:
        """Return True if a tensor fits into the object."""
        size = self._next_size if self._room is None else self._size
        return self._filled + filled + nbytes <= size

    def next_piece(self, nbytes: int) -> None:
        """Begin another object with space for a tensor; a large tensor has an object of its own."""
        self._check()
        self._put_object()
        # Padding is included, so that the next tensor begins the next object aligned.
        self._next_size = max(self._object_bytes, nbytes + -nbytes % ALIGNMENT)

    def commit(self, nbytes: int) -> None:
        """Count the chunk as written."""
        self._check()
        self._filled += nbytes

    def seal(self, manifest: bytes, base: PartRef | None = None) -> None:
        """List the part once all its objects are put."""
        self._check()
        self._put_object()
        with self._register.explained_refusals(self._part):
            # Each raises if its put failed, before the part is listed.
            references = [put.result() for put in self._putting]
            self._state = "listed"  # the call may have failed midway
            objects = Objects(references, self._sizes)
            self._register.add_part(self._part, self._attempt, objects, manifest, base)
        self._putting = []

    def discard(self) -> None:
        """Delete a sealed part; an unsealed one was never listed."""
        if self._state == "listed":
            self._register.delete(self._part)
        self.give_up()

    def give_up(self) -> None:
        """Release the buffer and the objects."""
        self._state = "given up"
        if self._putting:
            self._register.withdraw(self._part, self._attempt)
        self._putting = []
        if self._room is not None:
            self._putter.replace_buffer()
            self._room = None

    def _put_object(self) -> None:
        """Put the content of the buffer, if there is any."""
        if self._room is None or not self._filled:
            return
        with self._register.explained_refusals(self._part):
            for previous in self._putting[-2:-1]:
                previous.result()  # It has ended, since there are two buffers; raises if it failed.
            if not self._putting:
                self._register.announce(self._part)
        put = self._putter.put(self._room, self._filled)
        put.add_done_callback(partial(self._report_object, len(self._putting), self._filled))
        self._putting.append(put)
        self._sizes.append(self._filled)
        self._room, self._filled = None, 0

    def _report_object(self, number: int, nbytes: int, put: Future[Any]) -> None:
        """Report an object to prefetching readers; runs in the thread that put it."""
        # A late report of an abandoned attempt would be followed.
        if put.exception() is None and self._state != "given up":
            self._register.add_object(
                self._part, self._attempt, number, Objects([put.result()], [nbytes])
            )

    def _check(self) -> None:
        if self._state != "open":
            raise PartClosed(str(self._part))
