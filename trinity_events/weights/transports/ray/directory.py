"""What says which objects there are: an actor of each publishing process, and who to ask."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import threading
from contextlib import suppress
from typing import Any, Literal, NamedTuple

from ....errors import RayUnusable
from ..base import PartRef

DEADLINE = 60.0
"""Seconds for the next object to come from another node, or for an actor to answer."""
_ANSWERING = 10.0
"""Seconds for a cluster to take a connection."""
_MOST_FOLLOWING = 10_000
"""Calls that an actor has at a time; those who read along wait in theirs."""
NAMESPACE = "trinity-events"
_PREFIX = "trinity-weights"


class Objects(NamedTuple):
    """Arrays of bytes, end to end, that a part is made of."""

    references: list[Any]
    """In a list, since Ray would send objects in the place of its own references."""
    sizes: list[int]
    """Their bytes."""


class PutAttempt(NamedTuple):
    """To put a part; one that is given up may be followed by another."""

    number: int
    """Of its process's, in their order."""
    chunk_bytes: int
    """Of each chunk in an object, but for its last."""


NONE = PutAttempt(0, 0)


class PartInProgress(NamedTuple):
    """What there is of a part that is being put, or was."""

    attempt: PutAttempt
    """Whose objects these are."""
    objects: Objects
    sealed: bool


class Directory:
    """Which parts one publisher has, as an actor. It borrows their objects; it owns none.

    What is said of a part may arrive in any order, as with any actor that has several calls at a
    time.
    """

    def __init__(self) -> None:
        self._parts: dict[PartRef, tuple[bytes, Objects]] = {}
        self._coming: dict[PartRef, _Coming] = {}
        """Those that are being put, and those that were: who follows one is to hear of its end."""
        self._changed = asyncio.Event()

    def came(self, part: PartRef, attempt: PutAttempt, number: int, objects: Objects) -> None:
        """Another object of a part is put, by its number."""
        coming = self._of(part, attempt)
        if coming is not None:
            coming.objects[number] = objects
            self._tell()

    def give_up(self, part: PartRef, attempt: PutAttempt) -> None:
        """A part will not be whole by this attempt."""
        if self._of(part, attempt) is not None:
            self._coming[part] = _Coming(attempt, {}, "given up")
            self._tell()

    def keep(self, part: PartRef, attempt: PutAttempt, manifest: bytes, objects: Objects) -> None:
        """Let a part be found that an attempt has made whole."""
        self._parts[part] = (manifest, objects)
        self._coming[part] = _Coming(attempt, {}, "sealed")
        self._tell()

    async def follow(
        self, part: PartRef, attempt: PutAttempt, have: int, seconds: float
    ) -> PartInProgress:
        """What there is of a part behind what the caller has of an attempt.

        As soon as there is some, or the part is sealed, or the attempt is given up; or after so
        many seconds.
        """
        loop = asyncio.get_running_loop()
        late = loop.time() + seconds
        while True:
            found = self._behind(part, attempt, have)
            left = late - loop.time()
            if found.sealed or found.attempt != attempt or found.objects.references or left <= 0:
                return found
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left)

    def find(self, part: PartRef) -> tuple[bytes, Objects] | None:
        """A part's manifest and objects."""
        return self._parts.get(part)

    def forget(self, part: PartRef) -> None:
        """Let a part be found no more."""
        self._parts.pop(part, None)
        self._coming.pop(part, None)
        self._tell()

    def parts(self) -> list[PartRef]:
        """All of them."""
        return list(self._parts)

    def _of(self, part: PartRef, attempt: PutAttempt) -> _Coming | None:
        """What came of an attempt; None when it is over, or another one has followed it."""
        coming = self._coming.get(part)
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

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class _Coming(NamedTuple):
    attempt: PutAttempt
    objects: dict[int, Objects]
    """By the number of each."""
    ended: Literal["", "sealed", "given up"] = ""

    def in_order(self) -> Objects:
        """The first ones, as far as they came."""
        found = Objects([], [])
        for number in range(len(self.objects)):
            if number not in self.objects:
                break
            found.references.extend(self.objects[number].references)
            found.sizes.extend(self.objects[number].sizes)
        return found


def joined() -> Any:
    """Ray, of whose cluster this process is one."""
    try:
        import ray
    except ImportError:
        raise RayUnusable(
            "weights that travel by Ray need it: pip install 'trinity-events[workers]'"
        ) from None
    if not ray.is_initialized():
        try:
            _look_for(os.environ.get("RAY_ADDRESS", ""))
            ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
        except OSError as error:
            why = str(error).partition(". ")[0]
            raise RayUnusable(
                f"this process is in no Ray cluster and finds none to join ({why}): set "
                "RAY_ADDRESS to one that runs, or publish with --weights redis"
            ) from None
    return ray


def _look_for(address: str) -> None:
    """Raise OSError where nobody answers: Ray itself would try for a quarter of an hour."""
    host, _, port = address.rpartition(":")
    if host and "/" not in host and port.isdecimal():
        try:
            socket.create_connection((host.strip("[]"), int(port)), _ANSWERING).close()
        except OSError as error:
            raise OSError(f"{address} does not answer: {error}") from None


def membership(ray: Any) -> tuple[str, str] | None:
    """What changes when this process leaves its cluster, and joins it again, or another one.

    None in no cluster: Ray would start one there, for whatever it is asked to do.
    """
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    # By itself the second is that of the first driver of any cluster.
    return context.get_node_id(), context.get_worker_id()


class SharedDirectory:
    """This process's directory, for all of its stores."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._member: tuple[str, str] | None = None
        self._actor: tuple[str, Any] | None = None
        self._users = 0

    def take(self, ray: Any) -> tuple[str, Any]:
        """The actor and its name. It is this process's: Ray ends it when the process ends."""
        with self._lock:
            member = membership(ray)
            if self._actor is None or self._member != member:
                self._member, self._users = member, 0
                name = f"{_PREFIX}~{secrets.token_hex(8)}"
                made = ray.remote(Directory).options(
                    name=name,
                    namespace=NAMESPACE,
                    num_cpus=0,
                    max_restarts=0,
                    max_concurrency=_MOST_FOLLOWING,
                )
                self._actor = name, made.remote()
            self._users += 1
            return self._actor

    def give(self, ray: Any, name: str) -> None:
        """One store less; the last one ends the actor, if it still is the one of this name."""
        with self._lock:
            if self._actor is None or self._actor[0] != name:
                return
            self._users -= 1
            if not self._users:
                with suppress(ray.exceptions.RayError):
                    ray.kill(self._actor[1])
                self._actor = None

    def lost(self, name: str) -> None:
        """The actor of this name is gone, or hangs: the next to take one gets another."""
        with self._lock:
            if self._actor is not None and self._actor[0] == name:
                self._actor, self._users = None, 0


SHARED = SharedDirectory()


def key_of(part: PartRef) -> bytes:
    """Where the cluster's key-value store says who publishes as this rank of the run."""
    return f"{_PREFIX}~{part.run_id}~{part.epoch}~{part.rank}".encode()


def point(part: PartRef, name: str) -> None:
    """Say which actor knows the part."""
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(key_of(part), name.encode(), overwrite=True, namespace=NAMESPACE.encode())


def pointed(part: PartRef) -> str:
    """The name of the actor that knows the part. Raises ValueError when there is none."""
    from ray.experimental.internal_kv import _internal_kv_get

    found: bytes | None = _internal_kv_get(key_of(part), namespace=NAMESPACE.encode())
    if found is None:
        raise ValueError("nobody publishes as that rank of the run")
    return found.decode()


def directory_of(ray: Any, part: PartRef) -> Any:
    """The actor that knows the part. Raises ValueError when there is none, or its process ended."""
    try:
        return ray.get_actor(pointed(part), namespace=NAMESPACE)
    except (AssertionError, TypeError):
        # Ray lets go of an actor's class with its process, and of its name a moment later: between
        # the two it trips over the class that is not there.
        raise ValueError("who published as that rank of the run has just ended") from None


def unpoint(key: bytes, name: str) -> None:
    """Take the word back, unless another publisher has taken the part over."""
    from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get

    if _internal_kv_get(key, namespace=NAMESPACE.encode()) == name.encode():
        _internal_kv_del(key, namespace=NAMESPACE.encode())
