"""Publishers and readers of weight parts in processes of their own, which are killed."""

import os
import secrets
import signal
import sys
import time
from contextlib import contextmanager
from multiprocessing import get_context
from typing import NamedTuple
from unittest import mock

import torch

from tests.support.fake_devices import HostDevice
from tests.support.waits import PATIENCE
from trinity_events.errors import RayUnusable
from trinity_events.server import open_client
from trinity_events.weights import (
    CollectiveStore,
    CudaStore,
    PartRef,
    PartWriter,
    RayStore,
    RedisChunkStore,
    SharedMemoryStore,
)
from trinity_events.weights.transports.collective.frames import FrameSender
from trinity_events.weights.transports.shared_memory.reading import PartPrefetch

STAGES = ("begun", "midway", "unsealed", "sealing", "sealed")
SOME = [(f"layer.{number}", torch.full((1000,), float(number))) for number in range(6)]
CHUNK = 4096
ON_A_DEVICE = ("device", "cuda")
"""A GPU's memory: what stands in for one, and one."""
TIMEOUT = 5.0
"""Of collective groups."""


class Where(NamedTuple):
    """A transport, as any process can open it."""

    name: str
    weights_url: str
    ray_address: str = ""
    ray_auth: str = "disabled"
    """As Ray put it into the environment of the process that started the cluster."""
    run_id: str = ""
    """The run whose collective group it is."""
    lease: float = 30.0
    """Of readers over Redis, in seconds."""

    def store(self, *, reads=False):
        if self.name == "shm":
            return SharedMemoryStore()
        if self.name == "ray":
            ray = sys.modules.get("ray")
            if ray is None or not ray.is_initialized():  # in a process of its own
                os.environ["RAY_AUTH_MODE"] = self.ray_auth
                import ray

                ray.init(address=self.ray_address, log_to_driver=False, logging_level=40)
            return RayStore()
        if self.name in ON_A_DEVICE:
            return CudaStore(HostDevice() if self.name == "device" else None)
        if self.name == "collective":
            return Meeting.opened(self, reads=reads)
        return RedisChunkStore(open_client(self.weights_url), lease=self.lease)


class Meeting(CollectiveStore):
    """A collective group that sends once all of a test's readers are there."""

    readers = 1

    @classmethod
    def opened(cls, where: Where, *, reads: bool):
        """An end of the group; who reads is in it from now on."""
        name = f"explorer-{secrets.token_hex(4)}"
        made = cls(open_client(where.weights_url), where.run_id, name, timeout=TIMEOUT)
        if reads:
            made.join()
        return made

    def begin(self, part, chunk_bytes=None):
        if self._trainer is None or len(self._trainer._members) < self.readers:
            self.set_up(part.epoch, self.readers, 20)
        return super().begin(part, chunk_bytes)


@contextmanager
def actor(target, *arguments):
    """The process, once it is where it says; killed at the end, if not before."""
    ours, theirs = processes.Pipe()
    started = processes.Process(target=target, args=(theirs, *arguments), daemon=True)
    started.start()
    theirs.close()
    try:
        assert ours.poll(PATIENCE), "the process did not get there"
        yield started, ours.recv()
    finally:
        kill(started)
        ours.close()


def kill(process):
    if process.pid is not None and process.is_alive():
        os.kill(process.pid, signal.SIGKILL)
    process.join(PATIENCE)


def publishes_until(pipe, where: Where, part: PartRef, stage: str) -> None:
    """Publish, and stop for ever at a stage."""

    def stop(*_, **__):
        pipe.send(stage)
        time.sleep(600)

    writer = PartWriter(where.store(), part, CHUNK)
    if stage == "begun":
        stop()
    for index, (name, tensor) in enumerate(SOME):
        writer.add(name, tensor)
        if stage == "midway" and index == 3:
            stop()
    if stage == "unsealed":
        stop()
    if stage == "sealing" and where.name in {"shm", *ON_A_DEVICE}:
        # All is written; what is left is the name.
        with mock.patch("pathlib.Path.rename", stop):
            writer.seal()
    elif stage == "sealing" and where.name == "ray":
        # The object is put; nobody was told that it is all.
        with mock.patch.object(RayStore, "add_part", stop):
            writer.seal()
    elif stage == "sealing" and where.name == "collective":
        # All bytes are sent; what is left is the manifest.
        with mock.patch.object(FrameSender, "finish", stop):
            writer.seal()
    elif stage == "sealing":
        with mock.patch("redis.Redis.set", stop):
            writer.seal()
    pipe.send(writer.seal())
    time.sleep(600)


def reads(pipe, where: Where, part: PartRef) -> None:
    """Open a part, and read it for ever; what is sent is read by who is there when it is."""
    store = where.store(reads=True)
    source = store.open(part)
    pipe.send(source is not None or where.name == "collective")
    time.sleep(600)


def leaves_ray_and_comes_back(pipe, where: Where, part: PartRef) -> None:
    """Publish, leave the cluster while another part is put, and publish again from within it."""
    store = where.store()
    import ray

    def put(step):
        writer = PartWriter(store, part._replace(step=step), CHUNK)
        for name, tensor in SOME:
            writer.add(name, tensor)
        return writer

    put(1).seal()
    left_open = put(2)
    ray.shutdown()
    try:
        left_open.seal()
    except RayUnusable as error:
        fault = error.fault
    left_open.discard()
    store.delete(part)
    store.close()
    outside = ray.is_initialized()
    where.store()
    pipe.send((fault, outside, put(3).seal()))
    time.sleep(600)


def reads_along(pipe, where: Where, part: PartRef) -> None:
    """Read a part along with its writer, for ever."""
    store = where.store()
    follower = PartPrefetch(part, store._newest_first, store._map)
    pipe.send(follower.advance())
    time.sleep(600)


# One process that has torch, forked for each actor: it has no threads and nothing open.
processes = get_context("forkserver")
processes.set_forkserver_preload([__name__])
