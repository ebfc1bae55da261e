"""Parts in Ray's object store, for readers anywhere in the publisher's Ray cluster.

A part is one object, put by its publisher, who owns it: when the publisher ends, however it ends,
Ray frees it. A small actor of the publishing process says which objects there are, and ends with
the process too; which actor to ask is a word in the cluster's key-value store.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import RayUnusable, VersionUnavailable
from .base import Check, PartRef, checked

if TYPE_CHECKING:
    from collections.abc import Iterator

CHUNK_BYTES = 1 << 20
"""Of what is digested at once; a part is one object all the same."""
MOST_KEPT = 4
"""Parts of one publisher. Two versions are kept and one is put; more when nobody retires any."""
DEADLINE = 60.0
"""Seconds for one object of any size to come from another node, or for an actor to answer."""
NAMESPACE = "trinity-events"
_PREFIX = "trinity-weights"
_LEAST = 1 << 20
_WORTH = 8 << 20
"""Bytes from which on several threads digest them."""
_MOST_THREADS = 4


class Directory:
    """Which parts one publisher has, as an actor. It borrows their objects; it owns none."""

    def __init__(self) -> None:
        self._parts: dict[PartRef, tuple[bytes, Any]] = {}

    def keep(self, part: PartRef, manifest: bytes, references: Any) -> None:
        """Let a part be found. ``references`` is a list of one, which Ray leaves as it is."""
        self._parts[part] = (manifest, references)

    def find(self, part: PartRef) -> tuple[bytes, Any] | None:
        """A part's manifest and object."""
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
    is one NumPy array of bytes and a manifest of bytes, as Ray serialises those; whoever may put
    objects into the cluster may run code in it anyway.

    Args:
        most: The most parts that this publisher keeps.
    """

    name = "ray"

    def __init__(self, *, most: int = MOST_KEPT) -> None:
        self._ray = _joined()
        self._most = most
        self._directory: tuple[str, Any] | None = None
        self._pointers: set[bytes] = set()
        self._published: dict[PartRef, Any] = {}
        self._staging = np.empty(0, np.uint8)
        self._sink: RaySink | None = None

    # --- publishing ------------------------------------------------------------------------

    def begin(self, part: PartRef, chunk_bytes: int | None = None) -> RaySink:
        """Begin a part; one that was begun before and is not sealed is given up."""
        if self._sink is not None:
            self._sink.give_up()
        self._sink = RaySink(self, part, chunk_bytes or CHUNK_BYTES)
        return self._sink

    def staging(self, nbytes: int, filled: int) -> Any:
        """Memory of at least so many bytes, the first ``filled`` as they were; used again."""
        if nbytes > len(self._staging):
            grown = np.empty(max(nbytes, 2 * len(self._staging), _LEAST), np.uint8)
            grown[:filled] = self._staging[:filled]
            self._staging = grown
        return self._staging

    def keep(self, part: PartRef, nbytes: int, manifest: bytes) -> None:
        """Put a part that is whole, and let it be found."""
        with self._told(part):
            reference = self._ray.put(self._staging[:nbytes])
            name, directory = self._own_directory()
            told = directory.keep.remote(part, manifest, [reference])
            _point(part, name)  # while the directory keeps it
            self._pointers.add(_key(part))
            self._ray.get(told, timeout=DEADLINE)
        self._published.pop(part, None)
        self._published[part] = reference
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
            directory = self._ray.get_actor(_pointed(part), namespace=NAMESPACE)
            found = self._ray.get(directory.find.remote(part), timeout=DEADLINE)
        except (ValueError, errors.RayActorError, errors.GetTimeoutError):
            return None
        if found is None:
            return None
        manifest, [reference] = found
        return RaySource(self._ray, part, bytes(manifest), reference)

    def missing(self, part: PartRef) -> str:
        """Why the part may not be there, in words."""
        try:
            self._ray.get_actor(_pointed(part), namespace=NAMESPACE)
        except ValueError:
            return (
                "nothing of the run is in this Ray cluster: its trainer ended, or is in another "
                "one; for such explorers start it with --weights redis"
            )
        return "retired from the Ray cluster's object store"

    # --- both ------------------------------------------------------------------------------

    def close(self) -> None:
        """Take back what is published here. The process stays in its Ray cluster."""
        self._sink = None
        for part in list(self._published):
            self.delete(part)
        self._staging = np.empty(0, np.uint8)
        if self._directory is not None:
            for key in self._pointers:
                _unpoint(key, self._directory[0])
            self._pointers, self._directory = set(), None
            _SHARED.give(self._ray)

    @contextmanager
    def _told(self, part: PartRef) -> Iterator[None]:
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


class RaySink:
    """Implements :class:`~trinity_events.weights.PartSink`: chunks are staged end to end.

    Ray copies an object into its store when it is put, so the part is staged whole before: one
    copy of the model in this process, used again from version to version.
    """

    def __init__(self, store: RayStore, part: PartRef, chunk_bytes: int) -> None:
        self._store = store
        self._part = part
        self._chunk_bytes = chunk_bytes
        self._filled = 0
        self._state = "open"

    def room(self) -> memoryview:
        """The place in the staging memory where the chunk stays."""
        self._check()
        end = self._filled + self._chunk_bytes
        memory: memoryview = self._store.staging(end, self._filled).data[self._filled : end]
        return memory

    def put(self, nbytes: int) -> None:
        """The chunk is where it is to be."""
        self._check()
        self._filled += nbytes

    def seal(self, manifest: bytes) -> None:
        """Put the part as one object, and let it be found."""
        self._check()
        self._store.keep(self._part, self._filled, manifest)
        self._state = "sealed"

    def discard(self) -> None:
        """Nothing of it is in Ray before it is sealed; what is sealed is deleted."""
        if self._state == "sealed":
            self._store.delete(self._part)
        self._state = "given up"

    def give_up(self) -> None:
        """Another part takes the staging memory."""
        if self._state == "open":
            self._state = "given up"

    def _check(self) -> None:
        if self._state != "open":
            raise ValueError(f"the {self._part} are sealed or given up: nothing can be added")


class RaySource:
    """Implements :class:`~trinity_events.weights.PartSource`: the object where it lies.

    Ray keeps it for as long as anybody has it. On another node than the publisher's, Ray fetches
    it into that node's store first.
    """

    def __init__(self, ray: Any, part: PartRef, manifest: bytes, reference: Any) -> None:
        self.manifest = manifest
        self._ray = ray
        self._part = part
        self._reference = reference

    def read(
        self, sizes: Sequence[int], check: Check, wanted: Container[int] | None = None
    ) -> memoryview:
        """The bytes in the object store itself; nothing is copied.

        Raises VersionUnavailable when the publisher ended, or Ray lost the object.
        """
        data = self._fetched()
        threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
        if threads == 1 or len(data) < _WORTH:
            return checked(data, sizes, check, wanted)
        indices = [index for index in range(len(sizes)) if wanted is None or index in wanted]
        with ThreadPoolExecutor(threads) as pool:
            found = [
                pool.submit(checked, data, sizes, check, set(indices[first::threads]))
                for first in range(threads)
            ]
        return [one.result() for one in found][0]  # noqa: RUF015 (all of them may raise)

    def close(self) -> None:
        """Let go of the object."""
        self._reference = None

    def _fetched(self) -> memoryview:
        errors = self._ray.exceptions
        try:
            found = self._ray.get(self._reference, timeout=DEADLINE)
        except errors.OwnerDiedError:
            why = "the process that published them ended"
        except errors.GetTimeoutError:
            why = f"they did not come from their node within {DEADLINE:g} s"
        except errors.ObjectLostError:
            why = "the node that kept them is gone"
        else:
            if isinstance(found, np.ndarray) and found.dtype == np.uint8 and found.ndim == 1:
                return found.data.toreadonly()
            why = "what is there are no bytes"
        raise VersionUnavailable(f"the {self._part} cannot be read from Ray: {why}")


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
