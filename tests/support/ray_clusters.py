"""Ray clusters of tests: actors on another node, and what the object store holds."""

import contextlib
import os
import threading

import msgspec
import torch

from tests.support.published_parts import put, read
from tests.support.transport_processes import SOME
from tests.support.waits import PATIENCE
from trinity_events.weights import PartRef, RayStore
from trinity_events.weights.transports.ray.directory import NAMESPACE
from trinity_schemas import StepReady


def in_ray(run_id) -> list[PartRef]:
    """What the publishers in the Ray cluster have of the run."""
    import ray

    found = []
    for one in ray.util.list_named_actors(all_namespaces=True):
        if one["namespace"] == NAMESPACE:
            with contextlib.suppress(ValueError, ray.exceptions.RayError):  # it is ending
                directory = ray.get_actor(one["name"], NAMESPACE)
                found += ray.get(directory.parts.remote(), timeout=PATIENCE)
    return [part for part in found if part.run_id == run_id]


def references() -> int:
    """To how many objects in the Ray cluster this process, or one that it knows of, refers."""
    from ray._private.worker import global_worker

    return len(global_worker.core_worker.get_all_reference_counts())


class Elsewhere:
    """Publishes and reads in a process of Ray's."""

    def __init__(self):
        self._store = RayStore()

    def pid(self):
        return os.getpid()

    def put(self, part, value=None):
        tensors = SOME if value is None else [("big", torch.full((1 << 20,), value))]
        return msgspec.msgpack.encode(put(self._store, part, tensors))

    def read(self, part, event):
        event = msgspec.msgpack.decode(event, type=StepReady)
        return {name: one.numpy() for name, one in read(self._store, part.run_id, event).items()}

    def along(self, part):
        return self._store.prefetch([part], threading.Event(), 30.0)

    def delete(self, part):
        self._store.delete(part)


def on_ray(reference):
    import ray

    return ray.get(reference, timeout=PATIENCE)
