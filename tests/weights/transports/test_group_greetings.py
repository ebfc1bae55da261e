"""New connections of a collective group are greeted side by side."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import ExitStack

import pytest

pytest.importorskip("torch")

from tests.support.waits import PATIENCE
from trinity_events.diagnostics.waits import NO_REPORTS
from trinity_events.errors import GroupBroken
from trinity_events.weights.transports.base import PartRef
from trinity_events.weights.transports.collective import sender
from trinity_events.weights.transports.collective.messages import (
    Channel,
    FormGroup,
    Hello,
)
from trinity_events.weights.transports.collective.rendezvous import WeightSyncInfo


class Place:
    """Rendezvous that keeps no address."""

    def announce(self, info: WeightSyncInfo) -> None: ...

    def renew(self, info: WeightSyncInfo) -> None: ...

    def withdraw(self, info: WeightSyncInfo) -> None: ...


@pytest.fixture
def group():
    made = sender.GroupSender(
        *("greeted", 1, Place()),
        timeout=PATIENCE,
        host="127.0.0.1",
        waits=NO_REPORTS,
        greeting=0.4,
    )
    yield made
    made.close()


def test_silent_connections_delay_an_explorer_by_one_deadline_in_all(group):
    info = group.info
    with ExitStack() as exits:
        for number in range(6):
            silent = exits.enter_context(socket.create_connection((info.address, info.port)))
            silent.sendall(b"\0" * (number % 3))  # nothing, or a part of a message
        explorer = Channel(socket.create_connection((info.address, info.port)))
        exits.callback(explorer.close)
        explorer.send(Hello(run_id=info.run_id, token=info.token, name="explorer-0"), PATIENCE)
        received: list[object] = []

        def leave_when_called() -> None:
            received.append(explorer.receive(PATIENCE))
            explorer.close()

        thread = threading.Thread(target=leave_when_called)
        thread.start()
        begun = time.monotonic()
        with pytest.raises(GroupBroken):
            group.begin(PartRef(run_id=info.run_id, epoch=1, step=1, rank=0))
        elapsed = time.monotonic() - begun
        thread.join()
    assert received == [FormGroup(generation=1)], "the explorer was admitted"
    assert elapsed < 2 * 0.4, "one deadline for all, and not one for each"
