"""Explorer's end of a collective group: a thread that receives versions."""

from __future__ import annotations

import logging
import socket
import threading
from typing import Any

import torch

from ....errors import GroupBroken
from ....log.position import ORIGIN
from ....log.retry import CONNECTION_ERRORS, backoff_delays, is_transient
from ..base import PartRef
from .frames import FrameKind, FrameReceiver
from .groups import ProcessGroup, current_gpu, gpu_identity, open_store
from .messages import (
    Ack,
    Channel,
    ChannelClosed,
    DeliveryReport,
    FormGroup,
    Hello,
    RankAssignment,
    Sending,
)
from .rendezvous import Rendezvous, WeightSyncInfo
from .staged_versions import Buffer, StagedVersions

logger = logging.getLogger(__name__)

_CONNECTING = 10.0  # seconds to connect, and to send one short message
_LONGEST_PAUSE = 3.0  # seconds between two attempts to reach a trainer
_LOOK_AROUND = 5.0
"""Seconds without a message from the trainer before the receiver looks for another trainer."""
_ENDING = 10.0  # seconds; a thread that hangs in a collective is a daemon, and left behind


class GroupReceiver:
    """Thread that joins the trainer's group, rejoins it if needed, and stages arriving versions."""

    def __init__(self, run_id: str, name: str, place: Rendezvous, staging: StagedVersions) -> None:
        self._run_id = run_id
        self._name = name
        self._place = place
        self._staging = staging
        self._ended = threading.Event()
        self._met = threading.Event()
        self._channel: Channel | None = None
        self._group: ProcessGroup | None = None
        self._position = ORIGIN
        self.info: WeightSyncInfo | None = None
        self.failure: str | None = None
        """Reason why the thread has ended, if it has."""
        # of this thread: the current GPU of a new thread is always the first one
        self._gpu = current_gpu()
        self._thread = threading.Thread(target=self._run, name="weight-sync-group", daemon=True)
        self._thread.start()

    def is_met(self, seconds: float) -> bool:
        """Return True if the trainer knows this explorer, or does within ``seconds``."""
        return self._met.wait(seconds)

    def close(self) -> None:
        """Leave the group and end the thread."""
        self._ended.set()
        if (channel := self._channel) is not None:
            channel.close()
        self._thread.join(_ENDING)  # a collective in progress ends within its own timeout

    def _run(self) -> None:
        try:
            # In this thread: the current GPU is a property of each thread.
            if self._gpu is not None:
                torch.cuda.set_device(self._gpu)
            self._follow()
        except Exception as error:
            self.failure = str(error)
            logger.exception("this explorer has left the collective group for good")
        finally:
            self._leave()

    def _follow(self) -> None:
        """Follow one trainer after the other; retry one that cannot be reached."""
        waits = backoff_delays(_LONGEST_PAUSE)
        while not self._ended.is_set():
            seconds = _LONGEST_PAUSE if self.info is None else next(waits)
            try:
                announcement = self._place.find(self._position, seconds)
            except CONNECTION_ERRORS as error:
                if not is_transient(error):
                    raise
                self._ended.wait(next(waits))
                continue
            if announcement is not None:
                self._position, self.info = announcement
                waits = backoff_delays(_LONGEST_PAUSE)
            if self.info is not None and self._meet(self.info):
                waits = backoff_delays(_LONGEST_PAUSE)

    def _meet(self, info: WeightSyncInfo) -> bool:
        """Serve one trainer until it is gone; return False if it could not be reached."""
        try:
            connected = socket.create_connection((info.address, info.port), _CONNECTING)
        except OSError as error:
            logger.debug("the trainer at %s:%d: %s", info.address, info.port, error)
            return False
        self._channel = Channel(connected)
        try:
            gpu = gpu_identity(self._gpu)
            hello = Hello(run_id=self._run_id, token=info.token, name=self._name, gpu=gpu)
            self._channel.send(hello, _CONNECTING)
            self._met.set()
            while not self._ended.is_set():
                try:
                    self._process(self._channel, info)
                except TimeoutError:
                    # A trainer that hangs keeps its connection, while its successor announces
                    # itself.
                    if self._superseded():
                        break
        except ChannelClosed as error:
            logger.debug("the trainer's end of the collective group closed: %s", error)
        finally:
            self._met.clear()
            self._leave()
            self._channel.close()
        return True

    def _superseded(self) -> bool:
        """Return True if another trainer has announced itself; this one may hang forever."""
        try:
            announcement = self._place.find(self._position, 0.001)
        except CONNECTION_ERRORS:
            return False
        if announcement is None:
            return False
        before = self.info
        self._position, self.info = announcement
        return self.info != before  # otherwise the same trainer has renewed its announcement

    def _process(self, channel: Channel, info: WeightSyncInfo) -> None:
        message = channel.receive(_LOOK_AROUND)
        if isinstance(message, FormGroup):
            self._leave()
            # After the old group is left: rank 0 forms the new one once all have answered.
            channel.send(Ack(generation=message.generation), _CONNECTING)
        elif isinstance(message, RankAssignment):
            self._sit_down(message, info, channel.own_address)
            if self._group is not None:
                channel.send(Ack(generation=message.generation), _CONNECTING)
        elif isinstance(message, Sending):
            # Rank 0's part is the only one: it gathers the others (decision 15).
            error = self._receive_part(PartRef(self._run_id, message.epoch, message.step, 0))
            report = DeliveryReport(
                generation=message.generation, number=message.number, error=error
            )
            channel.send(report, _CONNECTING)

    def _sit_down(self, seat: RankAssignment, info: WeightSyncInfo, address: str) -> None:
        try:
            store: Any = open_store(info.address, seat.store_port, seat.timeout, master=False)
            self._group = ProcessGroup(
                store, seat.generation, seat.rank, seat.world, seat.backend, seat.timeout, address
            )
        except (GroupBroken, RuntimeError) as error:
            logger.warning("%s could not join the collective group: %s", self._name, error)

    def _receive_part(self, part: PartRef) -> str | None:
        """Receive one part; return the reason if it is incomplete."""
        if self._group is None:
            return "is in no group"
        buffer: Buffer | None = None
        try:
            buffer = self._staging.begin()
            receiver = FrameReceiver(self._group)
            while True:
                frame, nbytes = receiver.next()
                if frame is FrameKind.CHUNK:
                    receiver.receive(buffer.extend(nbytes))
                elif frame is FrameKind.SEAL:
                    manifest = bytearray(nbytes)
                    if nbytes:
                        receiver.receive(_tensor(manifest))
                    buffer.manifest = bytes(manifest)
                    self._staging.complete(part, buffer)
                    return None
                else:
                    self._staging.abandon(buffer)
                    return "was informed that it will not come"
        # Mapped memory is refused by OSError; CUDA raises RuntimeError once NCCL was aborted.
        except (GroupBroken, MemoryError, OSError, RuntimeError) as error:
            if buffer is not None:
                self._staging.abandon(buffer)
            self._leave()
            logger.warning("%s did not get the %s: %s", self._name, part, error)
            return f"stopped: {error}"

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()


def _tensor(memory: bytearray) -> Any:
    return torch.frombuffer(memory, dtype=torch.uint8)
