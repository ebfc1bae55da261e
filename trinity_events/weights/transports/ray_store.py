"""Parts in Ray's object store, for readers anywhere in the publisher's Ray cluster.

A part is put in pieces, each an object, while the next is being written. Its publisher owns them:
when the publisher ends, however it ends, Ray frees them. A small actor of the publishing process
says which objects there are, and ends with the process too; which actor to ask is a word in the
cluster's key-value store.
"""

from __future__ import annotations

import logging
import secrets
import threading
from bisect import bisect_left
from collections.abc import Container, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import accumulate
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...errors import RayUnusable, VersionUnavailable
from .base import Check, PartRef
from .in_memory import Chunks, cut, look

if TYPE_CHECKING:
    from collections.abc import Iterator

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

CHUNK_BYTES = 1 << 20
"""Of what is digested at once."""
OBJECT_BYTES = 64 << 20
"""Smaller objects cost Ray more by the byte; larger ones would take more room."""
MOST_KEPT = 4
"""Parts of one publisher. Two versions are kept and one is put; more when nobody retires any."""
DEADLINE = 60.0
"""Seconds for the next object to come from another node, or for an actor to answer."""
NAMESPACE = "trinity-events"
_PREFIX = "trinity-weights"


class Objects(NamedTuple):
    """Arrays of bytes, end to end, that a part is made of."""

    references: list[Any]
    """In a list, so that Ray leaves them as they are."""
    sizes: list[int]
    """Their bytes."""


class Directory:
    """Which parts one publisher has, as an actor. It borrows their objects; it owns none."""

    def __init__(self) -> None:
        self._parts: dict[PartRef, tuple[bytes, Objects]] = {}

    def keep(self, part: PartRef, manifest: bytes, objects: Objects) -> None:
        """Let a part be found."""
        self._parts[part] = (manifest, objects)

    def find(self, part: PartRef) -> tuple[bytes, Objects] | None:
        """A part's manifest and objects."""
        return self._parts.get(part)

    def forget(self, part: PartRef) -> None:
        """Let a part be found no more."""
        self._parts.pop(part, None)

    def parts(self) -> list[PartRef]:
        """All of them."""
        return list(self._parts)


class RayStore:
    """Implements :class:`~trinity_events.weights.ChunkStore`.

    The process must be one of a Ray cluster, or able to join one (``RAY_ADDRESS``). What travels
    are NumPy arrays of bytes and a manifest of bytes, as Ray serialises those; whoever may put
    objects into the cluster may run code in it anyway.

    Args:
        most: The most parts that this publisher keeps.
        object_bytes: Of one object; the publisher has two rooms for them.
    """

    name = "ray"

    def __init__(self, *, most: int = MOST_KEPT, object_bytes: int = OBJECT_BYTES) -> None:
        self._ray = _joined()
        self._most = most
        self._object_bytes = object_bytes
        self._directory: tuple[str, Any] | None = None
        self._pointers: set[bytes] = set()
        self._published: dict[PartRef, Objects] = {}
        self._directories: dict[str, Any] = {}
        """Those of other publishers, by their names: to look one up takes as long as to ask it."""
        self._putter = Putter(self._ray)
        self._sink: RaySink | None = None

    # --- publishing ------------------------------------------------------------------------

    def begin(self, part: PartRef, chunk_bytes: int | None = None) -> RaySink:
        """Begin a part; one that was begun before and is not sealed is given up."""
        if self._sink is not None:
            self._sink.give_up()
        size = chunk_bytes or min(CHUNK_BYTES, self._object_bytes)
        self._sink = RaySink(self, self._putter, part, size, max(size, self._object_bytes))
        return self._sink

    def keep(self, part: PartRef, objects: Objects, manifest: bytes) -> None:
        """Let a part be found that is whole."""
        name, directory = self._own_directory()
        told = directory.keep.remote(part, manifest, objects)
        _point(part, name)  # while the directory keeps it
        self._pointers.add(_key(part))
        self._ray.get(told, timeout=DEADLINE)
        self._published.pop(part, None)
        self._published[part] = objects
        for oldest in list(self._published)[: -self._most]:
            self.delete(oldest)
        self._sink = None

    def delete(self, part: PartRef) -> None:
        """Forget the part. Ray frees it when its last reader has let go."""
        if self._published.pop(part, None) is not None:
            with suppress(self._ray.exceptions.RayError):  # it is gone, and with it the part
                _, directory = self._own_directory()
                self._ray.get(directory.forget.remote(part), timeout=DEADLINE)

    def _own_directory(self) -> tuple[str, Any]:
        if self._directory is None:
            self._directory = _SHARED.take(self._ray)
        return self._directory

    # --- reading ---------------------------------------------------------------------------

    def open(self, part: PartRef) -> RaySource | None:
        """The part, or None when it is not there."""
        errors = self._ray.exceptions
        try:
            directory = self._directory_of(part)
            found = self._ray.get(directory.find.remote(part), timeout=DEADLINE)
        except (ValueError, errors.RayActorError, errors.GetTimeoutError):
            self._directories = {}
            return None
        if found is None:
            return None
        manifest, objects = found
        return RaySource(self._ray, part, bytes(manifest), objects)

    def _directory_of(self, part: PartRef) -> Any:
        """The actor that knows the part. Raises ValueError when there is none."""
        name = _pointed(part)
        if name not in self._directories:
            self._directories[name] = self._ray.get_actor(name, namespace=NAMESPACE)
        return self._directories[name]

    def missing(self, part: PartRef) -> str:
        """Why the part may not be there, in words."""
        try:
            self._directory_of(part)
        except ValueError:
            return (
                "nothing of the run is in this Ray cluster: its trainer ended, or is in another "
                "one; for such explorers start it with --weights redis"
            )
        return "retired from the Ray cluster's object store"

    # --- both ------------------------------------------------------------------------------

    def close(self) -> None:
        """Take back what is published here. The process stays in its Ray cluster."""
        if self._sink is not None:
            self._sink.give_up()
            self._sink = None
        self._putter.close()
        self._putter = Putter(self._ray)  # without their memory
        for part in list(self._published):
            self.delete(part)
        if self._directory is not None:
            for key in self._pointers:
                _unpoint(key, self._directory[0])
            self._pointers, self._directory = set(), None
            _SHARED.give(self._ray)

    @contextmanager
    def told(self, part: PartRef) -> Iterator[None]:
        """What Ray does not take, said in words."""
        errors = self._ray.exceptions
        try:
            yield
        except errors.ObjectStoreFullError:
            raise RayUnusable(
                f"Ray's object store is full: there is no room for the {part}; start Ray with more "
                "object_store_memory, or publish with --weights redis"
            ) from None
        except (errors.RayActorError, errors.GetTimeoutError) as error:
            self._directory = None
            _SHARED.lost()
            raise RayUnusable(f"Ray did not take the {part}: {error}; look at ray status") from None


class Putter:
    """Puts objects in a thread of its own, from two rooms that are used again."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._thread: ThreadPoolExecutor | None = None
        self._rooms: SimpleQueue[Bytes] = SimpleQueue()
        for _ in range(2):
            self._rooms.put(np.empty(0, np.uint8))

    def room(self, nbytes: int) -> Bytes:
        """A room of so many bytes at least, once what was in it is put."""
        room = self._rooms.get()
        return room if len(room) >= nbytes else np.empty(nbytes, np.uint8)

    def give_back(self, room: Bytes) -> None:
        """Nobody needs what is in it any more."""
        self._rooms.put(room)

    def put(self, room: Bytes, nbytes: int) -> Future[Any]:
        """Put what a room begins with, and give it back; results in the reference."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "trinity-put")
        return self._thread.submit(self._put, room, nbytes)

    def close(self) -> None:
        """Wait for what is being put."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _put(self, room: Bytes, nbytes: int) -> Any:
        try:
            return self._ray.put(room[:nbytes])
        finally:
            self._rooms.put(room)


class RaySink:
    """Implements :class:`~trinity_events.weights.PartSink`: chunks fill objects, end to end.

    Ray copies an object into its store when it is put: while it does, the next one is written.
    """

    def __init__(
        self, store: RayStore, putter: Putter, part: PartRef, chunk_bytes: int, object_bytes: int
    ) -> None:
        self._store = store
        self._putter = putter
        self._part = part
        self._chunk_bytes = chunk_bytes
        self._object_bytes = object_bytes
        self._room: Bytes | None = None
        self._filled = 0
        """Of the room."""
        self._sizes: list[int] = []
        self._putting: list[Future[Any]] = []
        self._state = "open"

    def room(self) -> memoryview:
        """The place of the chunk in its object."""
        self._check()
        if self._room is not None and self._filled + self._chunk_bytes > self._object_bytes:
            self._put_object()
        if self._room is None:
            self._room = self._putter.room(self._object_bytes)
        memory: memoryview = self._room.data[self._filled : self._filled + self._chunk_bytes]
        return memory

    def put(self, nbytes: int) -> None:
        """The chunk is where it is to be."""
        self._check()
        self._filled += nbytes

    def seal(self, manifest: bytes) -> None:
        """Let the part be found, once all of its objects are put."""
        self._check()
        if self._filled:
            self._put_object()
        with self._store.told(self._part):
            references = [one.result() for one in self._putting]
            self._store.keep(self._part, Objects(references, self._sizes), manifest)
        self.give_up()
        self._state = "sealed"

    def discard(self) -> None:
        """Nobody was told of it before it was sealed; what is sealed is deleted."""
        if self._state == "sealed":
            self._store.delete(self._part)
        self.give_up()

    def give_up(self) -> None:
        """Let go of the room, and of what was put."""
        self._state = "given up"
        self._putting = []
        if self._room is not None:
            self._putter.give_back(self._room)
            self._room = None

    def _put_object(self) -> None:
        assert self._room is not None
        with self._store.told(self._part):
            for one in self._putting[-2:-1]:
                one.result()  # why go on, when one was not put?
        self._putting.append(self._putter.put(self._room, self._filled))
        self._sizes.append(self._filled)
        self._room, self._filled = None, 0

    def _check(self) -> None:
        if self._state != "open":
            raise ValueError(f"the {self._part} are sealed or given up: nothing can be added")


class RaySource:
    """Implements :class:`~trinity_events.weights.PartSource`: the objects where they lie.

    Ray keeps them for as long as anybody has them. On another node than the publisher's, Ray
    fetches those with something that is wanted into that node's store first.
    """

    def __init__(self, ray: Any, part: PartRef, manifest: bytes, objects: Objects) -> None:
        self.manifest = manifest
        self._ray = ray
        self._part = part
        self._objects = objects

    def read(
        self, sizes: Sequence[int], check: Check, wanted: Container[int] | None = None
    ) -> Sequence[memoryview]:
        """The bytes in the object store itself; nothing is copied.

        Raises VersionUnavailable when the publisher ended, or Ray lost an object.
        """
        references, lengths = self._objects
        ends = list(accumulate(sizes))
        firsts = [0, *(bisect_left(ends, end) + 1 for end in accumulate(lengths))]
        """Of each object the first of its chunks; the last number is behind the last."""
        numbers = {
            reference: number
            for number, reference in enumerate(references)
            if wanted is None or any(one in wanted for one in range(*firsts[number : number + 2]))
        }
        found = [np.empty(length, np.uint8).data for length in lengths]  # and not touched
        for some in self._as_they_come(list(numbers)):
            seen: Chunks = []
            for reference, data in some:
                number = numbers[reference]
                if len(data) != lengths[number]:
                    raise self._lost("what is there is not as long as it was said to be")
                first, end = firsts[number : number + 2]
                seen += cut(data, sizes[first:end], wanted, first)
                found[number] = data
            look(seen, check)
        look(cut(memoryview(b""), sizes[firsts[-1] :], wanted, firsts[-1]), check)  # never put
        return found

    def close(self) -> None:
        """Let go of the objects."""
        self._objects = Objects([], [])

    def _as_they_come(self, left: list[Any]) -> Iterator[list[tuple[Any, memoryview]]]:
        """Objects that are there, and then what comes meanwhile from another node."""
        while left:
            there, left = self._ray.wait(left, num_returns=len(left), timeout=0)
            if not there:
                there, left = self._ray.wait(left, num_returns=1, timeout=DEADLINE)
            if not there:
                raise self._lost(f"nothing of them came from their node within {DEADLINE:g} s")
            yield list(zip(there, self._fetched(there), strict=True))

    def _fetched(self, references: list[Any]) -> Iterator[memoryview]:
        errors = self._ray.exceptions
        try:
            found = self._ray.get(references, timeout=DEADLINE)
        except errors.OwnerDiedError:
            raise self._lost("the process that published them ended") from None
        except errors.GetTimeoutError:
            raise self._lost(f"Ray did not hand them over within {DEADLINE:g} s") from None
        except errors.ObjectLostError:
            raise self._lost("the node that kept them is gone") from None
        for one in found:
            if not (isinstance(one, np.ndarray) and one.dtype == np.uint8 and one.ndim == 1):
                raise self._lost("what is there are no bytes")
            yield one.data.toreadonly()

    def _lost(self, why: str) -> VersionUnavailable:
        return VersionUnavailable(f"the {self._part} cannot be read from Ray: {why}")


def _joined() -> Any:
    """Ray, of whose cluster this process is one."""
    try:
        import ray
    except ImportError:
        raise RayUnusable(
            "weights that travel by Ray need it: pip install 'trinity-events[workers]'"
        ) from None
    if not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError:
            raise RayUnusable(
                "this process is in no Ray cluster and finds none to join: set RAY_ADDRESS, "
                "or publish with --weights redis"
            ) from None
    return ray


class _Shared:
    """This process's directory, for all of its stores."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cluster = ""
        self._actor: tuple[str, Any] | None = None
        self._users = 0

    def take(self, ray: Any) -> tuple[str, Any]:
        """The actor and its name. It is this process's: Ray ends it when the process ends."""
        with self._lock:
            cluster = ray.get_runtime_context().gcs_address
            if self._actor is None or self._cluster != cluster:
                self._cluster, self._users = cluster, 0
                name = f"{_PREFIX}~{secrets.token_hex(8)}"
                made = ray.remote(Directory).options(
                    name=name, namespace=NAMESPACE, num_cpus=0, max_restarts=0
                )
                self._actor = name, made.remote()
            self._users += 1
            return self._actor

    def give(self, ray: Any) -> None:
        """One store less; the last one ends the actor."""
        with self._lock:
            self._users -= 1
            if self._users <= 0 and self._actor is not None:
                with suppress(ray.exceptions.RayError):
                    ray.kill(self._actor[1])
                self._actor = None

    def lost(self) -> None:
        """The actor is gone, or hangs: the next to take it gets another."""
        with self._lock:
            self._actor, self._users = None, 0


_SHARED = _Shared()


def _key(part: PartRef) -> bytes:
    return f"{_PREFIX}~{part.run_id}~{part.epoch}~{part.rank}".encode()


def _point(part: PartRef, name: str) -> None:
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(_key(part), name.encode(), overwrite=True, namespace=NAMESPACE.encode())


def _pointed(part: PartRef) -> str:
    """The name of the actor that knows the part. Raises ValueError when there is none."""
    from ray.experimental.internal_kv import _internal_kv_get

    found: bytes | None = _internal_kv_get(_key(part), namespace=NAMESPACE.encode())
    if found is None:
        raise ValueError("nobody publishes as that rank of the run")
    return found.decode()


def _unpoint(key: bytes, name: str) -> None:
    """Take the word back, unless another publisher has taken the part over."""
    from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get

    if _internal_kv_get(key, namespace=NAMESPACE.encode()) == name.encode():
        _internal_kv_del(key, namespace=NAMESPACE.encode())
