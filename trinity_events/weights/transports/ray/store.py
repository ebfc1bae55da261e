"""Parts in Ray's object store, for readers anywhere in the publisher's Ray cluster.

A part is several objects; one is put while the next is written. The publisher owns them: Ray frees
them when it ends, even after a crash. A small actor of the publishing process lists them, and ends
with the process too. The cluster's key-value store names the actor.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from ....errors import RayUnusable, VersionNotStored
from ..base import Ended, OnPart, PartRef
from .directory import (
    DEADLINE,
    SHARED,
    Objects,
    PutAttempt,
    find_directory,
    join_cluster,
    membership,
    publisher_key,
    remove_pointer,
    set_pointer,
)
from .prefetch import Fetched, RayPartPrefetch, prefetch
from .sink import Putter, RaySink
from .source import RaySource

CHUNK_BYTES = 1 << 20
"""Bytes of a chunk."""
OBJECT_BYTES = 64 << 20
"""Bytes of an object: smaller objects cost Ray more per byte, larger ones take more memory."""
MOST_KEPT = 6
"""Maximum parts of one publisher: two are kept, two more for evaluations, and one is put."""


class RayStore:
    """Implements :class:`~trinity_events.weights.ChunkStore`.

    The process must be in a Ray cluster, or able to join one (``RAY_ADDRESS``). The objects are
    NumPy byte arrays and manifests, in Ray's serialisation. A process that can put objects into the
    cluster can run code in it anyway.

    Args:
        most: Maximum parts that this publisher keeps.
        object_bytes: Bytes of one object, unless a tensor is larger. The publisher has two buffers
            of that size.
        deadline: Seconds in which the actor of a publisher answers.
    """

    name = "ray"

    def __init__(
        self,
        *,
        most: int = MOST_KEPT,
        object_bytes: int = OBJECT_BYTES,
        deadline: float = DEADLINE,
    ) -> None:
        self._deadline = deadline
        self._ray = join_cluster()
        self._member = membership(self._ray)
        self._most = most
        self._object_bytes = object_bytes
        self._directory: tuple[str, Any] | None = None
        self._pointers: set[bytes] = set()
        self._published: dict[PartRef, Objects] = {}
        self._bases: dict[PartRef, PartRef | None] = {}
        """Base of each published part, or None."""
        self._seen: dict[PartRef, dict[Any, Fetched]] = {}
        """Prefetched objects, by part."""
        self._unanswered: PartRef | None = None
        """Part of the last lookup, if its directory did not reply."""
        self._putter = Putter(self._ray)
        self._sink: RaySink | None = None

    # --- publishing ------------------------------------------------------------------------

    def begin(self, part: PartRef, chunk_bytes: int | None = None) -> RaySink:
        """Begin a part; an unsealed part that was begun earlier is discarded."""
        self._join()
        if self._sink is not None:
            self._sink.give_up()
        size = chunk_bytes or CHUNK_BYTES
        self._sink = RaySink(self, self._putter, part, size, self._object_bytes)
        return self._sink

    def announce(self, part: PartRef) -> None:
        """Announce a part to prefetching readers."""
        name, _ = self._own_directory()
        if publisher_key(part) not in self._pointers:
            set_pointer(part, name)
            self._pointers.add(publisher_key(part))

    def add_object(self, part: PartRef, attempt: PutAttempt, number: int, objects: Objects) -> None:
        """Report an object to prefetching readers, without waiting: the part completes anyway."""
        if self._directory is not None:
            with suppress(self._ray.exceptions.RayError):
                self._directory[1].add_object.remote(part, attempt, number, objects)

    def withdraw(self, part: PartRef, attempt: PutAttempt) -> None:
        """Report to prefetching readers that the part will not come."""
        if self._is_in() and self._directory is not None:
            with suppress(self._ray.exceptions.RayError):
                self._directory[1].give_up.remote(part, attempt)

    def add_part(
        self,
        part: PartRef,
        attempt: PutAttempt,
        objects: Objects,
        manifest: bytes,
        base: PartRef | None = None,
    ) -> None:
        """List a part that is complete."""
        # Added again at the end: the order is that of publication.
        self._published.pop(part, None)
        self._published[part], self._bases[part] = objects, base
        name, directory = self._own_directory()
        confirmation = directory.add_part.remote(part, attempt, manifest, objects)
        set_pointer(part, name)  # while the directory keeps it
        self._pointers.add(publisher_key(part))
        # Waited for: the log announces the part next, and readers then ask for it.
        self._ray.get(confirmation, timeout=self._deadline)
        for oldest in self._superfluous():
            self.delete(oldest)
        self._sink = None

    def _superfluous(self) -> list[PartRef]:
        """Return the oldest parts above the limit that are not the base of another part."""
        most = self._most * len({part.rank for part in self._published})
        needed = set(self._bases.values())
        free = [part for part in self._published if part not in needed]
        return free[: max(0, min(len(self._published) - most, len(free) - 1))]

    def delete(self, part: PartRef) -> None:
        """Delete the part. Ray frees it when its last reader has released it."""
        self._bases.pop(part, None)
        if self._is_in() and self._published.pop(part, None) is not None:
            with suppress(self._ray.exceptions.RayError):  # it is gone, and with it the part
                _, directory = self._own_directory()
                self._ray.get(directory.forget.remote(part), timeout=self._deadline)

    def _own_directory(self) -> tuple[str, Any]:
        if self._directory is None:
            self._directory = SHARED.acquire(self._ray)
        return self._directory

    # --- reading ---------------------------------------------------------------------------

    def open(self, part: PartRef) -> RaySource | None:
        """Return the part, or None if it is missing."""
        self._join()
        self._unanswered = None
        errors = self._ray.exceptions
        try:
            directory = find_directory(self._ray, part)
            entry = self._ray.get(directory.find.remote(part), timeout=self._deadline)
        except errors.GetTimeoutError:
            self._unanswered = part
            return None
        except (ValueError, errors.RayActorError):
            return None
        if entry is None:
            return None
        manifest, objects = entry
        return RaySource(self._ray, part, bytes(manifest), objects, self._seen.pop(part, {}))

    def prefetch(
        self,
        parts: Sequence[PartRef],
        stop: threading.Event,
        deadline: float,
        on_part: OnPart | None = None,
    ) -> Ended:
        """Fetch the parts' objects as they are put, and digest them."""
        self._join()
        self._seen = {}
        followers = [RayPartPrefetch(self._ray, part, on_part) for part in parts]
        try:
            return prefetch(self._ray, followers, stop, deadline)
        finally:
            self._seen = {follower.part: follower.fetched for follower in followers}

    def missing(self, part: PartRef) -> VersionNotStored:
        """Return the error of a part that is missing here."""
        try:
            find_directory(self._ray, part)
        except ValueError:
            return VersionNotStored(str(part), fault="ray")
        if part == self._unanswered:
            return VersionNotStored(str(part), fault="ray actor", deadline=self._deadline)
        return VersionNotStored(str(part), fault="retired from ray")

    # --- both ------------------------------------------------------------------------------

    def close(self) -> None:
        """Delete the published parts. The process stays in its Ray cluster."""
        if self._sink is not None:
            self._sink.give_up()
            self._sink = None
        self._seen = {}
        self._putter.close()
        self._putter = Putter(self._ray)  # releases the old buffers
        # While the actor lives: its references keep the objects in the store.
        for part in list(self._published):
            self.delete(part)
        if self._is_in() and self._directory is not None:
            name, directory = self._directory
            # another store may publish as the same rank
            with suppress(self._ray.exceptions.RayError):
                parts = self._ray.get(directory.parts.remote(), timeout=self._deadline)
                self._pointers.difference_update(map(publisher_key, parts))
            for key in self._pointers:
                remove_pointer(key, name)
            SHARED.release(self._ray, name)
            self._pointers, self._directory = set(), None

    def _join(self) -> None:
        """Join a cluster, if the process is no longer in its former one."""
        if not self._is_in():
            join_cluster()
            self._member = membership(self._ray)

    def _is_in(self) -> bool:
        """Return True if the process is still in its cluster; otherwise forget all its objects."""
        if membership(self._ray) == self._member:
            return True
        self._directory = None
        for collection in (self._pointers, self._published, self._bases, self._seen):
            collection.clear()
        return False

    @contextmanager
    def explained_refusals(self, part: PartRef) -> Iterator[None]:
        """Raise RayUnusable if Ray refuses an object, and forget an actor that is gone."""
        errors = self._ray.exceptions
        if not self._is_in():
            raise RayUnusable("left", str(part))
        try:
            yield
        except (errors.ObjectStoreFullError, errors.OutOfDiskError):
            raise RayUnusable("full", str(part)) from None
        except (errors.RayActorError, errors.GetTimeoutError) as error:
            if self._directory is not None:
                SHARED.lost(self._directory[0])
                self._directory = None
            raise RayUnusable("refused", str(part), str(error)) from None
