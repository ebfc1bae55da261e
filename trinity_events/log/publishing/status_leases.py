"""Leases of a run's trainer and explorers, by which the log learns that a host is off or cut off.

1. A process renews its lease by heartbeats while it runs, from a thread: a long step is no end. A
   heartbeat is one SET of a key, and no entry of the log.
2. A trainer without a heartbeat for a whole lease is silent, and an explorer is lost, by the
   leader's ``lease-expired``.
3. A process that returns publishes its status again. It does so twice, one renewal apart: the
   leader may publish the expiry that it saw after the first time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from msgspec import structs

from trinity_schemas import ExplorerStatusChanged, TrainerStatusChanged

from ...errors import TrinityError
from .heartbeat import FIRST_HEARTBEAT, LEASE, Heartbeat
from .publisher import Publisher

logger = logging.getLogger(__name__)

STATUS_LEASE = LEASE
"""Seconds without a heartbeat after which a trainer is silent and an explorer is lost: that of a
saving process."""


@contextmanager
def renewing_trainer_lease(
    publisher: Publisher, get_step: Callable[[], int | None], *, lease: float = STATUS_LEASE
) -> Iterator[None]:
    """Publish that the trainer runs, and renew its lease for the block.

    Args:
        publisher: Publisher of the trainer's process.
        get_step: Returns the steps taken; None once the trainer has published its end.
        lease: Seconds without a heartbeat after which the trainer is silent.
    """

    def get_status() -> TrainerStatusChanged | None:
        step = get_step()
        if step is None:
            return None
        return TrainerStatusChanged(status="running", step=step, lease=lease)

    with _renewing_lease(publisher, get_status, lease):
        yield


@contextmanager
def renewing_explorer_lease(
    publisher: Publisher,
    get_status: Callable[[], ExplorerStatusChanged],
    *,
    lease: float = STATUS_LEASE,
) -> Iterator[None]:
    """Publish that an explorer runs, renew its lease for the block, and publish that it stopped.

    Args:
        publisher: Publisher of the explorer's process.
        get_status: Returns its present status.
        lease: Seconds without a heartbeat after which the explorer is lost.
    """
    has_stopped = False

    def get_running_status() -> ExplorerStatusChanged | None:
        return None if has_stopped else structs.replace(get_status(), lease=lease)

    with _renewing_lease(publisher, get_running_status, lease):
        try:
            yield
        finally:
            # Before the event: from here on the heartbeat's thread publishes no "running" behind
            # it.
            has_stopped = True
            publisher.publish(ExplorerStatusChanged(status="stopped"))


@contextmanager
def _renewing_lease(
    publisher: Publisher,
    get_status: Callable[[], ExplorerStatusChanged | TrainerStatusChanged | None],
    lease: float,
) -> Iterator[None]:
    def publish() -> None:
        status = get_status()
        if status is not None:
            publisher.publish(status)

    def publish_return() -> None:
        try:
            publish()
        except TrinityError as error:  # the heartbeat continues
            name = f"{publisher.producer.role}-{publisher.producer.rank}"
            logger.warning("the return of %s was not published: %s", name, error)

    heartbeat = Heartbeat.of(publisher)
    with heartbeat.active(publisher, lease, FIRST_HEARTBEAT, on_return=publish_return):
        publish()
        yield
