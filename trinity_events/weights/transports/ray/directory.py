"""Directory of a publisher's objects in Ray: an actor per publishing process, and its lookup."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import threading
from contextlib import suppress
from typing import Any, ClassVar, Literal, NamedTuple

from ....errors import RayUnusable, StructuredError
from ..base import PartRef

DEADLINE = 60.0
"""Seconds to wait for the next object from another node, or for an actor's reply."""
_ANSWERING = 10.0
"""Seconds to wait for a connection to a cluster."""
_MOST_FOLLOWING = 10_000
"""Maximum concurrent calls of an actor; each prefetching reader waits in one."""
NAMESPACE = "trinity-events"
_PREFIX = "trinity-weights"


class NoPublisher(StructuredError, ValueError):
    """No process of the Ray cluster publishes as a rank of the run.

    Attributes:
        fault: ``absent``, or ``ended`` a moment ago.
        run_id: The run.
        rank: The rank.
    """

    fault: Literal["absent", "ended"]
    run_id: str
    rank: int
    texts: ClassVar = {
        "absent": "no publisher has rank {rank} of run {run_id}",
        "ended": "the publisher of rank {rank} of run {run_id} has just ended",
    }


class Objects(NamedTuple):
    """Consecutive byte arrays of a part, as Ray objects."""

    references: list[Any]
    """Ray object references; in a list, since Ray replaces a direct argument by its value."""
    sizes: list[int]
    """Size of each object, in bytes."""


class PutAttempt(NamedTuple):
    """One attempt to put a part; after a failed attempt another one may follow."""

    number: int
    """Number of the attempt among its process's attempts, in order."""
    chunk_bytes: int
    """Bytes of each chunk in an object, except its last."""


NONE = PutAttempt(0, 0)


class PartInProgress(NamedTuple):
    """Objects of a part whose put is in progress or has ended."""

    attempt: PutAttempt
    """Attempt that put these objects."""
    objects: Objects
    sealed: bool


class Directory:
    """Actor that lists the parts of one publisher. It borrows their objects and owns none.

    Calls about a part may arrive in any order, as with any actor with concurrent calls.
    """

    def __init__(self) -> None:
        self._parts: dict[PartRef, tuple[bytes, Objects]] = {}
        self._coming: dict[PartRef, _Coming] = {}
        """Parts in progress, and ended ones: their followers must learn the end."""
        self._changed = asyncio.Event()

    def add_object(self, part: PartRef, attempt: PutAttempt, number: int, objects: Objects) -> None:
        """Record an object of a part, by its number."""
        coming = self._find_attempt(part, attempt)
        if coming is not None:
            coming.objects[number] = objects
            self._notify()

    def give_up(self, part: PartRef, attempt: PutAttempt) -> None:
        """Record that an attempt will not complete its part."""
        if self._find_attempt(part, attempt) is not None:
            self._coming[part] = _Coming(attempt, {}, "given up")
            self._notify()

    def add_part(
        self, part: PartRef, attempt: PutAttempt, manifest: bytes, objects: Objects
    ) -> None:
        """List a part that an attempt has completed."""
        self._parts[part] = (manifest, objects)
        self._coming[part] = _Coming(attempt, {}, "sealed")
        self._notify()

    async def follow(
        self, part: PartRef, attempt: PutAttempt, have: int, seconds: float
    ) -> PartInProgress:
        """Return the objects of a part behind the first ``have`` of an attempt.

        Return as soon as there is a new object, the part is sealed, or the attempt is given up. At
        the latest return after ``seconds``.
        """
        loop = asyncio.get_running_loop()
        late = loop.time() + seconds
        while True:
            progress = self._behind(part, attempt, have)
            remaining = late - loop.time()
            if (
                progress.sealed
                or progress.attempt != attempt
                or progress.objects.references
                or remaining <= 0
            ):
                return progress
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), remaining)

    def find(self, part: PartRef) -> tuple[bytes, Objects] | None:
        """Return a part's manifest and objects."""
        return self._parts.get(part)

    def forget(self, part: PartRef) -> None:
        """Remove a part from the directory."""
        self._parts.pop(part, None)
        self._coming.pop(part, None)
        self._notify()

    def parts(self) -> list[PartRef]:
        """Return all listed parts."""
        return list(self._parts)

    def _find_attempt(self, part: PartRef, attempt: PutAttempt) -> _Coming | None:
        """Return the state of an attempt, or None if it has ended or another one has followed."""
        coming = self._coming.get(part)
        # Calls may overtake one another: an older attempt must not replace a newer one.
        if coming is None or coming.attempt.number < attempt.number:
            coming = self._coming[part] = _Coming(attempt, {})
        return None if coming.ended or coming.attempt != attempt else coming

    def _behind(self, part: PartRef, attempt: PutAttempt, have: int) -> PartInProgress:
        coming = self._coming.get(part)
        if coming is None or coming.ended == "given up":
            return PartInProgress(NONE, Objects([], []), sealed=False)
        sealed = coming.ended == "sealed"
        references, sizes = self._parts[part][1] if sealed else coming.in_order()
        first = have if coming.attempt == attempt else 0
        return PartInProgress(coming.attempt, Objects(references[first:], sizes[first:]), sealed)

    def _notify(self) -> None:
        self._changed.set()
        # A new one for the next change; the waiting calls hold the old one.
        self._changed = asyncio.Event()


class _Coming(NamedTuple):
    attempt: PutAttempt
    objects: dict[int, Objects]
    """Objects by their number."""
    ended: Literal["", "sealed", "given up"] = ""

    def in_order(self) -> Objects:
        """Return the objects up to the first missing number."""
        objects = Objects([], [])
        # Reports come from a thread, and may arrive out of order.
        for number in range(len(self.objects)):
            if number not in self.objects:
                break
            objects.references.extend(self.objects[number].references)
            objects.sizes.extend(self.objects[number].sizes)
        return objects


def join_cluster() -> Any:
    """Return the ``ray`` module, after joining a cluster if needed."""
    try:
        import ray
    except ImportError:
        raise RayUnusable("missing") from None
    if not ray.is_initialized():
        try:
            _check_answers(os.environ.get("RAY_ADDRESS", ""))
            # "auto" joins a cluster, and never starts one.
            ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
        except OSError as error:
            why = str(error).partition(". ")[0]
            raise RayUnusable("no cluster", reason=why) from None
    return ray


def _check_answers(address: str) -> None:
    """Raise OSError if the address does not respond; Ray would retry for 15 minutes."""
    host, _, port = address.rpartition(":")
    if host and "/" not in host and port.isdecimal():
        try:
            socket.create_connection((host.strip("[]"), int(port)), _ANSWERING).close()
        except OSError as error:
            raise OSError(f"{address} does not answer: {error}") from None


def membership(ray: Any) -> tuple[str, str] | None:
    """Return an identity that changes when this process joins a cluster again, or another one.

    Return None outside of a cluster: there Ray's calls would start a new cluster.
    """
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    # The worker id alone is the same for the first driver of every cluster.
    return context.get_node_id(), context.get_worker_id()


class SharedDirectory:
    """Directory actor of this process, shared by all its stores."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._member: tuple[str, str] | None = None
        self._actor: tuple[str, Any] | None = None
        self._users = 0

    def acquire(self, ray: Any) -> tuple[str, Any]:
        """Return the actor and its name. This process owns it: Ray ends it with the process."""
        with self._lock:
            member = membership(ray)
            # An actor of a cluster that was left is not reachable any more.
            if self._actor is None or self._member != member:
                self._member, self._users = member, 0
                name = f"{_PREFIX}~{secrets.token_hex(8)}"
                made = ray.remote(Directory).options(
                    name=name,
                    namespace=NAMESPACE,
                    # It only lists: reserved cores would be missing for the user's tasks.
                    num_cpus=0,
                    # A restarted actor would list nothing, and its name would still be found.
                    max_restarts=0,
                    max_concurrency=_MOST_FOLLOWING,
                )
                self._actor = name, made.remote()
            self._users += 1
            return self._actor

    def release(self, ray: Any, name: str) -> None:
        """Release one store's use of the actor; the last release ends the actor of this name."""
        with self._lock:
            # Another store has replaced it, after it was lost.
            if self._actor is None or self._actor[0] != name:
                return
            self._users -= 1
            if not self._users:
                with suppress(ray.exceptions.RayError):
                    ray.kill(self._actor[1])
                self._actor = None

    def lost(self, name: str) -> None:
        """Forget an actor that is gone or hangs; the next :meth:`acquire` creates another."""
        with self._lock:
            if self._actor is not None and self._actor[0] == name:
                self._actor, self._users = None, 0


SHARED = SharedDirectory()


def publisher_key(part: PartRef) -> bytes:
    """Return the key at which the cluster's key-value store names a rank's publisher."""
    return f"{_PREFIX}~{part.run_id}~{part.epoch}~{part.rank}".encode()


def set_pointer(part: PartRef, name: str) -> None:
    """Record the actor that lists the part."""
    # Private API: Ray has no public key-value store.
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(
        publisher_key(part), name.encode(), overwrite=True, namespace=NAMESPACE.encode()
    )


def get_pointer(part: PartRef) -> str:
    """Return the name of the actor that lists the part. Raises NoPublisher without one."""
    from ray.experimental.internal_kv import _internal_kv_get

    name: bytes | None = _internal_kv_get(publisher_key(part), namespace=NAMESPACE.encode())
    if name is None:
        raise NoPublisher("absent", part.run_id, part.rank)
    return name.decode()


def find_directory(ray: Any, part: PartRef) -> Any:
    """Return the actor that lists the part. Raises ValueError if there is none or it has ended."""
    try:
        return ray.get_actor(get_pointer(part), namespace=NAMESPACE)
    except (AssertionError, TypeError):
        # Ray forgets an actor's class with its process, and its name a moment later. Between the
        # two, a lookup fails on the missing class.
        raise NoPublisher("ended", part.run_id, part.rank) from None


def remove_pointer(key: bytes, name: str) -> None:
    """Remove the record of the actor, unless another publisher has replaced it."""
    from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get

    if _internal_kv_get(key, namespace=NAMESPACE.encode()) == name.encode():
        _internal_kv_del(key, namespace=NAMESPACE.encode())
