"""Trainer's end of a collective group: membership, and delivery of versions."""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import time
from collections.abc import Collection
from typing import Any, TypeVar

from ....diagnostics.waits import Wait, WaitReporter
from ....errors import DeadlineExceeded, GroupBroken
from ..base import PartRef
from .groups import ProcessGroup, backend_for, current_gpu, gpu_identity, open_store
from .messages import (
    Ack,
    Channel,
    ChannelClosed,
    DeliveryReport,
    FormGroup,
    Hello,
    Message,
    RankAssignment,
    Sending,
    readable,
    readable_channels,
)
from .rendezvous import Rendezvous, WeightSyncInfo

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)

GREETING = 5.0
"""Seconds that new connections have for their first messages, all of them together, by default."""
_BACKLOG = 1024
"""Connections that wait to be accepted: more than explorers of a run that start together."""
_ATTEMPTS = 3  # times: explorers may die while a group is formed


class GroupSender:
    """Rank 0 of a collective group, with one connection to every explorer.

    A connection shows at once that its explorer is gone. One thread may use the sender. A group is
    made before a version is sent, if its members have changed. Between two versions no rank is
    inside a collective.

    Args:
        run_id: Id of the run.
        epoch: Epoch of the run.
        place: Rendezvous at which explorers find this trainer.
        timeout: Seconds after which a dead or hung peer is an error to all others.
        host: Address at which explorers reach this trainer.
        waits: Reporter of long waits for explorers.
        greeting: Seconds that new connections have for their first messages, all together.
    """

    def __init__(
        self,
        run_id: str,
        epoch: int,
        place: Rendezvous,
        *,
        timeout: float,
        host: str,
        waits: WaitReporter,
        greeting: float = GREETING,
    ) -> None:
        self._greeting = greeting
        self._run_id = run_id
        self._waits = waits
        self._place = place
        self._timeout = timeout
        self._listener = socket.create_server((host, 0), backlog=_BACKLOG)
        self._store: Any = open_store(host, 0, timeout, master=True)
        self.info = WeightSyncInfo(
            run_id=run_id,
            epoch=epoch,
            address=host,
            port=self._listener.getsockname()[1],
            # Only a client that may read the weights' server knows it.
            token=secrets.token_hex(16),
        )
        self._members: dict[str, Channel] = {}
        self._gpus: dict[str, str | None] = {}
        self._generation = 0
        self._number = 0
        self._seated: tuple[str, ...] = ()
        self._group: ProcessGroup | None = None
        # Last: an explorer that reads it connects at once.
        place.announce(self.info)

    def set_up(self, explorers: int, patience: float) -> tuple[str, ...]:
        """Wait for ``explorers`` explorers and make the group; return their names.

        Raises:
            DeadlineExceeded: if fewer came within ``patience`` seconds; it names those that did.
            GroupBroken: if they came, and the group could not be made.
        """
        self._place.renew(self.info)
        self._reconcile()
        if len(self._members) < explorers:
            with self._waits.waiting(self._format_wait(explorers), deadline=patience) as reported:
                self._wait_for_members(explorers, patience, reported)
        self._form()
        return self._seated

    def _wait_for_members(self, explorers: int, patience: float, reported: Wait) -> None:
        give_up = time.monotonic() + patience
        while len(self._members) < explorers:
            reported.update(self._format_wait(explorers))
            remaining = give_up - time.monotonic()
            if remaining <= 0:
                raise DeadlineExceeded(
                    f"{len(self._members)} of {explorers} explorers of run {self._run_id} joined "
                    "the collective group",
                    patience,
                    f"{', '.join(self._members) or 'none'} did: start the others, each with a rank "
                    "of its own, or look at why they ended",
                )
            # A second at most, so that explorers that have left are noticed too.
            readable(self._listener, min(remaining, 1.0))
            self._reconcile()

    def _format_wait(self, explorers: int) -> str:
        there = len(self._members)
        return f"{explorers} explorers in the collective group, of which {there} are there"

    def begin(self, part: PartRef) -> ProcessGroup:
        """Return the group of the connected explorers, after announcing the part to them."""
        self._reconcile()
        if self._group is None or set(self._seated) != set(self._members):
            if not self._members:
                self.tear_down()
                raise GroupBroken("empty", self._run_id)
            self._form()
        assert self._group is not None
        self._place.renew(self.info)
        self._number += 1
        announcement = Sending(
            generation=self._generation, number=self._number, epoch=part.epoch, step=part.step
        )
        # Before a collective begins: a rank that is missing in it blocks all others.
        for name, channel in list(self._members.items()):
            try:
                channel.send(announcement, self._timeout)
            except ChannelClosed as error:
                self.tear_down()
                raise GroupBroken("departure", self._run_id, name, str(error)) from None
        return self._group

    def confirm(self) -> None:
        """Wait until every explorer of the group has the complete version. Raises GroupBroken."""
        what, pending = "the report that sent weights are complete", list(self._seated)
        until = time.monotonic() + self._timeout
        with self._waits.waiting(what, pending, deadline=self._timeout) as reported:
            for name in self._seated:
                answer = self._answer(name, DeliveryReport, until)
                if answer is None or answer.error is not None:
                    self.tear_down()
                    reason = "said nothing" if answer is None else str(answer.error)
                    raise GroupBroken("delivery", self._run_id, name, reason)
                pending.remove(name)
                reported.update(what, pending)

    def tear_down(self) -> None:
        """End the group; explorers stay connected and wait for the next group."""
        if self._group is not None:
            self._group.close()
        self._group, self._seated = None, ()

    def close(self) -> None:
        """End the group and close all connections."""
        self.tear_down()
        try:
            self._place.withdraw(self.info)
        finally:
            for channel in self._members.values():
                channel.close()
            self._members = {}
            self._listener.close()
            self._store = None

    def _reconcile(self) -> None:
        """Drop explorers that are gone, and greet those that have connected."""
        for name, channel in list(self._members.items()):
            if not channel.is_open():
                self._drop(name, "it is gone")
        connected: list[Channel] = []
        while len(connected) < _BACKLOG and readable(self._listener, 0):
            connected.append(Channel(self._listener.accept()[0]))
        self._greet(connected)

    def _greet(self, connected: Collection[Channel]) -> None:
        """Receive the first messages of new connections, side by side until one deadline.

        A connection that sends nothing, such as a port scan, delays no explorer after it.
        """
        silent, until = list(connected), time.monotonic() + self._greeting
        while silent and (ready := readable_channels(silent, until - time.monotonic())):
            for channel in ready:
                try:
                    self._admit(channel, channel.receive(0))
                except TimeoutError:  # the message is not whole yet
                    continue
                except ChannelClosed as error:
                    self._refuse(channel, str(error))
                silent.remove(channel)
        for channel in silent:
            self._refuse(channel, f"it sent no greeting within {self._greeting:g} s")

    def _refuse(self, channel: Channel, reason: str) -> None:
        logger.warning("%s did not join the collective group: %s", channel.peer, reason)
        channel.close()

    def _admit(self, channel: Channel, hello: Message) -> None:
        if not isinstance(hello, Hello):
            raise ChannelClosed("greeting")
        # In constant time: the token must not be guessed byte by byte.
        if hello.run_id != self._run_id or not hmac.compare_digest(hello.token, self.info.token):
            raise ChannelClosed("token")
        if hello.name in self._members:
            # A restarted explorer: its old connection may look open for a long time.
            self._drop(hello.name, "it came again")
        self._members[hello.name] = channel
        self._gpus[hello.name] = hello.gpu
        # Its new process is not in the group, which is therefore formed again.
        self._seated = tuple(name for name in self._seated if name != hello.name)

    def _form(self) -> None:
        """Form a new group of all explorers that answer."""
        reason = "no explorer was left in it"
        for _ in range(_ATTEMPTS):
            self.tear_down()
            self._call()
            if not self._members:
                break
            names = tuple(self._members)
            try:
                self._group = self._make(names)
            except (GroupBroken, ChannelClosed) as error:
                reason = str(error)
                self._reconcile()
            else:
                self._seated = names
                logger.info("collective group %d: %s", self._generation, ", ".join(names))
                return
        raise GroupBroken("formation", self._run_id, reason=reason)

    def _call(self) -> None:
        """Request an answer of every explorer. A hung one is dropped, and may connect again."""
        # A new prefix in the store: keys of a failed attempt must not be found.
        self._generation += 1
        # an explorer that waits for a hung peer answers when that wait is over
        patience = 2 * self._timeout
        until = time.monotonic() + patience
        for name, channel in list(self._members.items()):
            try:
                channel.send(FormGroup(generation=self._generation), self._timeout)
            except ChannelClosed as error:
                self._drop(name, str(error))
        what, pending = "an answer before the collective group is formed", list(self._members)
        with self._waits.waiting(what, pending, deadline=patience) as reported:
            for name in list(self._members):
                if self._answer(name, Ack, until) is None:
                    self._drop(name, f"it did not answer within {patience:g} s")
                pending.remove(name)
                reported.update(what, pending)

    def _make(self, names: tuple[str, ...]) -> ProcessGroup:
        backend = backend_for([gpu_identity(current_gpu()), *(self._gpus[name] for name in names)])
        world = len(names) + 1
        for rank, name in enumerate(names, start=1):
            seat = RankAssignment(
                generation=self._generation,
                rank=rank,
                world=world,
                backend=backend,
                store_port=self._store.port,
                timeout=self._timeout,
            )
            self._members[name].send(seat, self._timeout)
        group = ProcessGroup(
            self._store, self._generation, 0, world, backend, self._timeout, self.info.address
        )
        until = time.monotonic() + self._timeout
        for name in names:
            if self._answer(name, Ack, until) is None:
                group.close()
                raise GroupBroken("join", self._run_id, name, deadline=self._timeout)
        return group

    def _answer(self, name: str, kind: type[M], until: float) -> M | None:
        """Return a member's answer of this kind to the last request; skip earlier answers."""
        while True:
            channel = self._members.get(name)
            try:
                message = channel.receive(max(0.0, until - time.monotonic())) if channel else None
            except (ChannelClosed, TimeoutError):
                return None
            if message is None:
                return None
            if (
                isinstance(message, kind)
                # An answer to an earlier request may come late, after its deadline.
                and getattr(message, "generation", None) == self._generation
                and getattr(message, "number", self._number) == self._number
            ):
                return message

    def _drop(self, name: str, why: str) -> None:
        logger.warning("collective group: %s leaves: %s", name, why)
        self._members.pop(name).close()
        del self._gpus[name]
