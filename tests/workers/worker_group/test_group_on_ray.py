"""A worker group over Ray: what its methods return, and how errors and deaths are told."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest

from tests.support.errors import raises

torch = pytest.importorskip("torch")
ray = pytest.importorskip("ray")

from tests.support.batches import make_batch  # noqa: E402
from tests.support.tensors import assert_equal, identical  # noqa: E402
from tests.support.waits import PATIENCE  # noqa: E402
from trinity_events.errors import DeadlineExceeded, TrinityError  # noqa: E402
from trinity_workers.runtime.collective_errors import CollectiveBroken  # noqa: E402
from trinity_workers.worker_group.dispatch import Dispatch  # noqa: E402
from trinity_workers.worker_group.group import (  # noqa: E402
    UnknownMethod,
    WorkerDied,
    WorkerGroup,
    WouldBlock,
)
from trinity_workers.worker_group.ranks import DistRankInfo  # noqa: E402
from trinity_workers.worker_group.registered import register  # noqa: E402
from trinity_workers.worker_group.worker import Worker  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.heavy]


class Stages(Worker):
    """Two pipeline stages of one replica, which compute next to nothing."""

    def __init__(self, rank):
        self._rank = rank

    def rank_info(self):
        return DistRankInfo(tp_rank=0, dp_rank=0, pp_rank=self._rank, cp_rank=0)

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def compute(self, batch, *, factor):
        return {"rewards": batch.rewards * factor, "batch": batch, "stage": self._rank}

    @register(dispatch_mode=Dispatch.MEGATRON_PP_AS_DP_PROTO, blocking=False)
    def generate(self, prompts):
        return [f"{prompt} by {self._rank}" for prompt in prompts]

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO, all_answer=True)
    def load(self, rows):
        return [f"{row} by {self._rank}" for row in rows]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fails(self, rank):
        if rank == self._rank:
            os.kill(os.getpid(), signal.SIGKILL)
        raise CollectiveBroken("agree", f"rank {self._rank} lost its peer")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, settles=True)
    def fails_later(self):
        time.sleep(0.5 * (1 - self._rank))
        raise TrinityError(f"rank {self._rank} failed")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def hangs(self, rank):
        time.sleep(3600 if rank == self._rank else 0)

    def unregistered(self):
        raise AssertionError


@pytest.fixture(scope="module")
def _ray():
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def made(_ray):
    groups = []

    def make(kind=Stages, **options):
        actor = ray.remote(Stages).options(num_cpus=0)
        groups.append(WorkerGroup(kind, [actor.remote(rank) for rank in range(2)], **options))
        return groups[-1]

    yield make
    for group in groups:
        group.kill()


async def test_a_group_deals_out_and_collects_and_tells_deaths_and_silence(made):
    # Of the base alone, as in the trainer's process: the workers report what they have.
    group = made(Worker, name="stage", format_death=lambda method: f"died in {method} at step 3")
    with raises(UnknownMethod, kind="Worker", method="compute"):
        await group.call("compute")
    await group.load_methods()
    batch = make_batch([1, 2, 3])
    result = await group.call("compute", batch, factor=2)
    assert result.pop("stage") == 1, "the last stage answers"
    assert_equal(result["batch"].known(), batch.known())
    assert identical(result["rewards"], batch.rewards * 2)
    texts = await group.call("generate", ["a", "b", "c"])
    assert texts == ["a by 0", "b by 1", "c by 0"]
    assert await group.call("load", ["a"]) == [["a by 0"], ["a by 1"]]
    with raises(UnknownMethod, kind="Stages", method="unregistered"):
        await group.call("unregistered")
    with raises(WouldBlock, method="compute"):
        group.compute(batch, factor=2)
    with pytest.raises(TrinityError, match="rank 0 failed"):
        await group.call("fails_later")
    await group.watch()
    # The peer's error is there at once, and Ray's of the death after it.
    with raises(
        WorkerDied,
        worker=re.compile(r"^stage-1 \(process \d+ on .*\)$"),
        method="fails",
        where="died in fails at step 3",
    ):
        await group.call("fails", 1)


def test_without_an_event_loop_methods_block_or_return_what_is_waited_on(made):
    group = made(timeout=PATIENCE)
    batch = make_batch([2, 1])
    assert identical(group.compute(batch, factor=3)["rewards"], batch.rewards * 3)
    assert group.generate(["a"]).result() == ["a by 0"]
    group._timeout = 1.0
    with raises(DeadlineExceeded, missing=re.compile("hangs came from .*worker-1"), deadline=1):
        group.hangs(1)
