"""A call that has failed, or is given up, leaves nothing pending in its event loop."""

from __future__ import annotations

from types import SimpleNamespace

import anyio
import pytest

pytest.importorskip("torch")
pytest.importorskip("ray")

from tests.support.errors import raises
from trinity_events.errors import DeadlineExceeded, TrinityError
from trinity_workers.worker_group.dispatch import Dispatch
from trinity_workers.worker_group.group import WorkerGroup
from trinity_workers.worker_group.registered import register


class Ranks:
    """Class of the workers, of which the tests call the handles alone."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def work(self):
        raise AssertionError("handles answer in its place")


class Handle:
    """Handle of a worker that answers, fails or hangs, and records the end of a hanging call."""

    def __init__(self, outcome):
        self._outcome = outcome
        self.ended_waiting = False
        self.execute = SimpleNamespace(remote=self._execute)

    async def _execute(self, *args, **options):
        if isinstance(self._outcome, Exception):
            raise self._outcome
        if self._outcome is None:
            try:
                await anyio.sleep_forever()
            finally:
                self.ended_waiting = True
        return self._outcome


async def test_the_call_of_a_rank_that_hangs_ends_with_the_error_of_another():
    hanging = Handle(None)
    group = WorkerGroup(Ranks, [hanging, Handle(TrinityError("rank 1 failed"))])
    with pytest.raises(TrinityError, match="rank 1 failed"):
        await group.call("work")
    assert hanging.ended_waiting


async def test_the_call_of_a_rank_that_hangs_ends_at_its_deadline():
    hanging = Handle(None)
    group = WorkerGroup(Ranks, [Handle(b""), hanging], timeout=0.05)
    missing = "no answer to work came from worker-1"
    with raises(DeadlineExceeded, missing=missing, deadline=0.05):
        await group.call("work")
    assert hanging.ended_waiting


async def test_a_caller_that_is_cancelled_leaves_no_call():
    hanging = Handle(None)
    with anyio.move_on_after(0.05) as given_up:
        await WorkerGroup(Ranks, [hanging]).call("work")
    assert given_up.cancelled_caught
    assert hanging.ended_waiting
