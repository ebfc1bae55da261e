"""Ray clusters of tests: nodes that are started, actors on another node, the object store."""

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch

from tests.support.published_parts import put, read
from tests.support.transport_processes import SOME
from tests.support.waits import PATIENCE, child, wait_until
from trinity_events.weights import PartRef, RayStore
from trinity_events.weights.transports.ray.directory import NAMESPACE
from trinity_schemas import StepReady


def in_ray(run_id) -> list[PartRef]:
    """What the publishers in the Ray cluster have of the run."""
    import ray

    parts = []
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == NAMESPACE:
            with contextlib.suppress(ValueError, ray.exceptions.RayError):  # it is ending
                directory = ray.get_actor(actor["name"], NAMESPACE)
                parts += ray.get(directory.parts.remote(), timeout=PATIENCE)
    return [part for part in parts if part.run_id == run_id]


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
        return {
            name: array.numpy() for name, array in read(self._store, part.run_id, event).items()
        }

    def along(self, part):
        return self._store.prefetch([part], threading.Event(), 30.0)

    def delete(self, part):
        self._store.delete(part)


def on_ray(reference):
    import ray

    return ray.get(reference, timeout=PATIENCE)


ELSEWHERE = "elsewhere"
"""Host name of the second node."""


@dataclass(frozen=True)
class TwoNodes:
    """A Ray cluster of two nodes, each a ``ray start`` of its own."""

    address: str
    hidden: Path
    """Folder that the second node does not see."""
    environment: dict[str, str]
    """Variables of a process that joins it."""

    def joining(self) -> dict[str, str]:
        """All variables of a process that joins it."""
        return {**os.environ, **self.environment}

    @contextmanager
    def pretending(self, name: str, value: str) -> Iterator[None]:
        """Let the cluster say of itself that it was started with another version."""
        from ray._private.ray_constants import KV_NAMESPACE_CLUSTER
        from ray._raylet import GcsClient

        key = b"CLUSTER_METADATA"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_AUTH_MODE", self.environment["RAY_AUTH_MODE"])
            client = GcsClient(address=self.address)
        metadata = client.internal_kv_get(key, namespace=KV_NAMESPACE_CLUSTER)
        other = json.dumps(json.loads(metadata) | {name: value}).encode()
        client.internal_kv_put(key, other, overwrite=True, namespace=KV_NAMESPACE_CLUSTER)
        try:
            yield
        finally:
            client.internal_kv_put(key, metadata, overwrite=True, namespace=KV_NAMESPACE_CLUSTER)


@contextmanager
def two_nodes(room: Path, cpus: int = 2, gpus: int = 0) -> Iterator[TwoNodes]:
    """Start a cluster; the second node has a host name and a view of the files of its own.

    Skips the test where this user may not make a namespace.

    Args:
        room: Folder with a short name, for Ray's sockets.
        cpus: CPUs of each node.
        gpus: GPUs that each node says it has.
    """
    hidden = room / "hidden"
    hidden.mkdir()
    view = ["unshare", "--mount", "--uts", "--propagation", "private", "sh", "-c"]
    try:
        subprocess.run([*view, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no namespace can be made: {error}")
    environment = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    start = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block"),
        *(f"--num-cpus={cpus}", f"--num-gpus={gpus}", f"--object-store-memory={100 << 20}"),
    ]
    head = [*start, "--head", "--port=0", "--include-dashboard=false", f"--temp-dir={room}/ray"]
    with ExitStack() as exits:
        output = exits.enter_context(_ray_node(head, environment, room / "head.log"))
        [address] = re.findall(r"--address='([^']+)'", output)
        inside = (
            f"mount -t tmpfs none {shlex.quote(str(hidden))} && hostname {ELSEWHERE} && exec "
            + shlex.join([*start, f"--address={address}"])
        )
        exits.enter_context(_ray_node([*view, inside], environment, room / "second.log"))
        yield TwoNodes(address, hidden, {**environment, "RAY_ADDRESS": address})


@contextmanager
def _ray_node(command: list[str], environment: dict[str, str], log: Path) -> Iterator[str]:
    """Run a node for the block; yields what it printed until it was up."""
    env = {**os.environ, **environment}
    with log.open("w") as output, child(command, stdout=output, stderr=output, env=env) as process:

        def started() -> bool:
            assert process.poll() is None, log.read_text()
            return "Ray runtime started" in log.read_text()

        wait_until(started, f"no node started: {log}")
        try:
            yield log.read_text()
        finally:
            process.terminate()  # so that it ends its own processes
            process.wait(PATIENCE)
