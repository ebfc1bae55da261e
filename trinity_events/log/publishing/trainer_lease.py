"""Lease of a run's trainer, by which the log learns that its host is off or cut off.

1. The trainer renews its lease by heartbeats while it runs, from a thread: a long step is no end.
2. A trainer without a heartbeat for a whole lease is silent, by the leader's ``lease-expired``.
3. A trainer that returns says so. It does so twice, one renewal apart: the leader may publish the
   expiry that it saw after the first time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trinity_schemas import TrainerStatusChanged

from ...errors import TrinityError
from .heartbeat import FIRST_HEARTBEAT, LEASE, Heartbeat
from .publisher import Publisher

logger = logging.getLogger(__name__)

TRAINER_LEASE = LEASE
"""Seconds without a heartbeat after which a trainer is silent: that of a saving process."""


@contextmanager
def renewing_trainer_lease(
    publisher: Publisher, get_step: Callable[[], int | None], *, lease: float = TRAINER_LEASE
) -> Iterator[None]:
    """Publish that the trainer runs, and renew its lease for the block.

    Args:
        publisher: Publisher of the trainer's process.
        get_step: Returns the steps taken; None once the trainer has published its end.
        lease: Seconds without a heartbeat after which the trainer is silent.
    """

    def publish() -> None:
        step = get_step()
        if step is not None:
            publisher.publish(TrainerStatusChanged(status="running", step=step, lease=lease))

    def publish_return() -> None:
        try:
            publish()
        except TrinityError as error:  # the heartbeat continues
            logger.warning("the return of the trainer was not published: %s", error)

    heartbeat = Heartbeat.of(publisher, lease)
    with heartbeat.active(publisher, FIRST_HEARTBEAT, on_return=publish_return):
        publish()
        yield
