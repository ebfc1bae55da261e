"""The backend for veRL, without veRL: both ends against a real server and reducer."""

from __future__ import annotations

import asyncio
import re
import threading
from contextlib import ExitStack, suppress

import anyio
import pytest
import redis
import torch

from tests.support.errors import raises
from tests.support.pipeline import events_of, reducer_task, reports_accepted
from tests.support.waits import PATIENCE
from tests.support.weight_versions import awkward
from trinity_events import Synchronizer
from trinity_events.errors import (
    DeadlineExceeded,
    PublishError,
    SharedMemoryUnusable,
    VersionNotAnnounced,
    VersionUnavailable,
)
from trinity_events.server import open_client
from trinity_events.system.shared_memory import available
from trinity_events.weights.tensors import as_bytes
from trinity_schemas import StepRef, WeightsApplied
from trinity_workers.runtime.collective_errors import CollectiveBroken
from trinity_workers.verl import waiting
from trinity_workers.verl.receiver import WeightReceiver
from trinity_workers.verl.sender import WeightSender
from trinity_workers.verl.settings import VerlSettingsRefused, parse_settings
from trinity_workers.verl.topology import (
    OpenedRun,
    ProcessLocation,
    find_topology,
    this_location,
    transport_between,
)

AWKWARD = dict(awkward())


class Ends:
    """A trainer's rank 0 and rollouts, which meet before each update as veRL lets them."""

    def __init__(self, exits: ExitStack, **options) -> None:
        self._exits = exits
        self._settings = parse_settings(options)
        self.sender = WeightSender(self._settings)
        exits.callback(self.sender.close)
        self.receivers = []

    def meet(self, rollouts=1):
        places = [this_location(self.sender.open()), *(this_location() for _ in range(rollouts))]
        meeting = find_topology(places, rollouts)
        self.sender.meet(meeting)
        for rank in range(len(self.receivers), rollouts):
            self.receivers.append(WeightReceiver(self._settings, rank, meeting))
            self._exits.callback(self.receivers[-1].close)
        for receiver in self.receivers:
            receiver.meet(meeting)
        return meeting

    async def update(self, weights, step, rollouts=1):
        """What each rollout was given, as bits, looked at before the update is finished."""
        self.meet(rollouts)
        sent, *got = await asyncio.gather(
            self.sender.send(iter(weights.items()), step),
            *(receive_weights(receiver, step) for receiver in self.receivers),
        )
        seen = [as_bits(tensor) for tensor in got]
        for receiver in self.receivers:
            receiver.finish()
        return sent, seen


async def receive_weights(receiver, step):
    return {name: tensor async for name, tensor in receiver.receive(step)}


def as_bits(weights):
    return {
        name: (tensor.dtype, tensor.shape, bytes(as_bytes(tensor)))
        for name, tensor in weights.items()
    }


@pytest.fixture
def exits():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def make_ends(exits, redis_url, weights_url, run_id):
    def make(**options):
        urls = {"redis_url": redis_url, "weights_url": weights_url, "run_id": run_id}
        return Ends(exits, **{**urls, "transport": "redis", "deadline": PATIENCE, **options})

    return make


@pytest.fixture
async def reducer(redis_url, run_id):
    async with reducer_task(redis_url, run_id):
        yield


@pytest.mark.parametrize("transport", ["redis", "shm", "collective"])
async def test_every_rollout_is_given_the_version_bit_for_bit_and_the_log_hears_who_serves_it(
    make_ends, reducer, log, transport
):
    if transport == "shm" and not available():
        pytest.skip("the host has no shared memory as files")
    ends = make_ends(transport=transport)
    later = {name: torch.full_like(tensor, 1) for name, tensor in AWKWARD.items()}
    for step, weights in ((1, AWKWARD), (2, later)):
        sent, seen = await ends.update(weights, step, rollouts=2)
        assert seen == [as_bits(weights)] * 2
        assert sent["checkpoint_engine/payload_mbytes"] > 0
    with anyio.fail_after(PATIENCE):
        while len(applied := await events_of(log, WeightsApplied)) < 4:
            await anyio.sleep(0.01)
    versions = sorted((entry.event.version, entry.producer.rank) for entry in applied)
    assert versions == [
        (StepRef(1, 1), 0),
        (StepRef(1, 1), 1),
        (StepRef(1, 2), 0),
        (StepRef(1, 2), 1),
    ]


@pytest.mark.skipif(not available(), reason="the host has no shared memory as files")
async def test_versions_that_fill_the_memory_do_not_drive_the_next_one_out_of_it(
    make_ends, reducer, monkeypatch
):
    free = [1 << 40]
    monkeypatch.setattr("trinity_workers.verl.topology.free_bytes", lambda: free[0])
    ends = make_ends(transport="auto")
    for step in (1, 2):
        _, seen = await ends.update(AWKWARD, step)
        assert seen == [as_bits(AWKWARD)]
        assert ends.sender._transport == "shm"
        free[0] = 0
    with pytest.raises(TypeError, match="complex128"):
        await ends.sender.send(iter([("weight", torch.zeros(2, dtype=torch.complex128))]), 3)
    assert (
        find_topology([this_location(ends.sender.open()), this_location()], 1).transport == "ray"
    ), "if it does not arrive"


async def test_between_full_versions_a_rollout_receives_what_changed_alone(make_ends, reducer):
    ends = make_ends(full_every=3)
    weights = {f"layer.{number}": torch.randn(4000) for number in range(4)}
    sizes = []
    for step in range(1, 6):
        weights["layer.2"][step] = step  # in place, as training does
        sent, seen = await ends.update(weights, step)
        assert seen == [as_bits(weights)]
        sizes.append(sent["checkpoint_engine/payload_mbytes"])
    full = 4 * 4000 * 4 / (1 << 20)
    assert [size < full / 10 for size in sizes] == [False, True, True, False, True]
    # One that comes late is given what the version rests on, too.
    weights["layer.2"][9] = 9.0
    _, seen = await ends.update(weights, 6, rollouts=2)
    assert seen == [as_bits(weights)] * 2


async def test_a_step_that_is_sent_again_or_none_at_all_is_a_version_of_its_own(
    make_ends, reducer, log
):
    """Invariant 2 of the sender."""
    ends = make_ends()
    given = []
    for number, step in enumerate((None, None, 7, 7, 3, None)):
        weights = {"weight": torch.full((5,), float(number))}
        _, seen = await ends.update(weights, step)
        assert seen == [as_bits(weights)]
        given.append(number)
    with anyio.fail_after(PATIENCE):
        while len(applied := await events_of(log, WeightsApplied)) < len(given):
            await anyio.sleep(0.01)
    served = [(entry.event.version.epoch, entry.event.version.step) for entry in applied]
    assert served == [(1, 1), (1, 2), (1, 7), (2, 7), (3, 3), (3, 4)]


async def test_after_an_error_the_gathers_go_on_and_rollouts_hear_of_it_and_the_step_can_be_retried(
    make_ends, reducer, weights_url, run_id
):
    """Invariants 1 and 3 of the sender."""
    ends = make_ends()
    ends.meet()
    gathered = []

    def weights():
        for number in range(5):
            gathered.append(number)
            # The second is of a dtype that cannot travel.
            yield str(number), torch.zeros(3, dtype=torch.complex128 if number == 1 else None)

    sent, got = await asyncio.gather(
        ends.sender.send(weights(), 1),
        receive_weights(ends.receivers[0], 1),
        return_exceptions=True,
    )
    assert isinstance(sent, TypeError) and "its dtype is torch.complex128" in str(sent)
    assert gathered == list(range(5)), "other ranks wait in each of them"
    assert isinstance(got, VersionUnavailable) and "its dtype is torch.complex128" in str(got)
    with open_client(weights_url) as chunks:
        assert chunks.keys(f"trinity-weights:{{{run_id}.*") == []
    _, seen = await ends.update(AWKWARD, 1)
    assert seen == [as_bits(AWKWARD)]


async def test_rollouts_hear_of_each_failure_of_a_step_that_is_tried_again(make_ends, reducer):
    """Invariant 2 of the receiver."""
    ends = make_ends(deadline=PATIENCE)
    for reason in ("first", "second"):
        ends.meet()
        sent, got = await asyncio.gather(
            ends.sender.send(broken_by(reason), 1),
            receive_weights(ends.receivers[0], 1),
            return_exceptions=True,
        )
        assert isinstance(sent, CollectiveBroken)
        assert isinstance(got, VersionUnavailable) and reason in str(got)
    _, seen = await ends.update(AWKWARD, 1)
    assert seen == [as_bits(AWKWARD)]


async def test_a_step_is_tried_again_although_nobody_heard_that_it_failed(make_ends, reducer):
    ends = make_ends()
    ends.meet()
    heard = ends.sender._give_up
    ends.sender._give_up = lambda *_: None  # the server was away
    with pytest.raises(CollectiveBroken):
        await ends.sender.send(broken_by("first"), 1)
    ends.sender._give_up = heard
    _, seen = await ends.update(AWKWARD, 1)
    assert seen == [as_bits(AWKWARD)]


def broken_by(reason):
    yield "weight", torch.zeros(3)
    raise RuntimeError(reason)


async def test_gathers_that_break_are_told_to_rollouts(make_ends, reducer):
    """Invariant 3 of the sender."""
    ends = make_ends()
    ends.meet()

    def weights():
        yield "first", torch.zeros(3)
        raise RuntimeError("connection closed by peer")

    sent, got = await asyncio.gather(
        ends.sender.send(weights(), 1),
        receive_weights(ends.receivers[0], 1),
        return_exceptions=True,
    )
    assert isinstance(sent, CollectiveBroken) and "closed by peer" in str(sent)
    assert isinstance(got, VersionUnavailable) and "closed by peer" in str(got)


async def test_a_version_of_another_step_is_never_given_in_place_of_the_one_asked_for(
    make_ends, reducer
):
    """Invariant 1 of the receiver."""
    ends = make_ends()
    ends.meet()
    _, got = await asyncio.gather(
        ends.sender.send(iter(AWKWARD.items()), 2),
        receive_weights(ends.receivers[0], 1),
        return_exceptions=True,
    )
    assert isinstance(got, VersionUnavailable)
    assert "step 1" in str(got) and "published those of step 2" in str(got)


async def test_a_version_that_is_gone_is_an_error_and_not_reported_as_served(
    make_ends, reducer, weights_url, log, run_id
):
    """Invariant 3 of the receiver."""
    ends = make_ends()
    ends.meet()
    await ends.sender.send(iter(AWKWARD.items()), 1)
    with open_client(weights_url) as chunks:
        chunks.delete(*chunks.keys(f"trinity-weights:{{{run_id}.*"))
    with raises(VersionUnavailable, version=re.compile(r"step 1 \(epoch 1, rank 0\)")):
        await receive_weights(ends.receivers[0], 1)
    ends.receivers[0].finish()
    await reports_accepted(log)
    assert await events_of(log, WeightsApplied) == []


async def test_weights_that_do_not_come_are_an_error_that_says_what_is_missing(
    make_ends, reducer, log
):
    ends = make_ends(deadline=0.3)
    ends.meet()
    what, why = re.compile("weights of step 1 of run"), re.compile("is known of step 1")
    with raises(DeadlineExceeded, missing=what, deadline=0.3, reason=why):
        await receive_weights(ends.receivers[0], 1)


async def test_a_log_that_cannot_say_why_weights_do_not_come_is_named_in_the_error(
    make_ends, reducer, monkeypatch
):
    async def breaks(log):
        raise redis.ConnectionError("connection reset")

    monkeypatch.setattr(waiting, "current_state", breaks)
    ends = make_ends(deadline=0.1)
    ends.meet()
    with raises(DeadlineExceeded, reason=re.compile("connection reset")):
        await receive_weights(ends.receivers[0], 1)


async def test_both_ends_end_their_threads_although_the_log_takes_nothing_more(
    make_ends, reducer, exits
):
    ends = make_ends()
    await ends.update({"weight": torch.zeros(3)}, 1)
    exits.pop_all()  # they are closed below

    def full():
        raise PublishError("run", "the event", "it is slow")

    for end in (ends.sender, *ends.receivers):
        synchronizer, end._synchronizer.close = end._synchronizer, full
        with pytest.raises(PublishError):
            end.close()
        Synchronizer.close(synchronizer)
        with pytest.raises(RuntimeError, match="after shutdown"):
            end._thread.wait(int)


@pytest.mark.parametrize("transport", ["redis", "shm"])
async def test_an_update_that_another_one_follows_waits_no_longer(make_ends, reducer, transport):
    """Invariant 4 of the receiver."""
    if transport == "shm" and not available():
        pytest.skip("the host has no shared memory as files")
    ends = make_ends(transport=transport, deadline=60.0)
    ends.meet()
    waits = asyncio.create_task(receive_weights(ends.receivers[0], 1))
    while ends.receivers[0]._waiting is None:
        await asyncio.sleep(0)
    with anyio.fail_after(PATIENCE):
        _, seen = await ends.update(AWKWARD, 2)
        with raises(VersionNotAnnounced, fault="interrupted", version=re.compile("step 1")):
            await waits
    assert seen == [as_bits(AWKWARD)]


async def test_a_wait_ends_although_a_client_passes_over_its_cancellation(
    make_ends, reducer, monkeypatch
):
    async def deaf(*_):
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        await asyncio.sleep(60)

    ends = make_ends()
    ends.meet()
    monkeypatch.setattr("trinity_workers.verl.receiver.wait_for_version", deaf)
    waits = asyncio.create_task(receive_weights(ends.receivers[0], 1))
    while ends.receivers[0]._waiting is None:
        await asyncio.sleep(0)
    ends.meet()
    ended, _ = await asyncio.wait([waits], timeout=PATIENCE)
    assert ended
    with raises(VersionNotAnnounced, fault="interrupted"):
        await waits


async def test_a_version_that_is_let_go_for_another_update_is_not_handed_on(make_ends, reducer):
    """Invariant 4 of the receiver."""
    ends = make_ends()
    ends.meet()
    await ends.sender.send(iter(AWKWARD.items()), 1)
    half = ends.receivers[0].receive(1)
    await anext(half)
    ends.meet()
    with raises(VersionNotAnnounced, fault="interrupted"):
        await anext(half)


async def test_the_event_loop_goes_on_while_tensors_are_published(make_ends, reducer):
    """Invariant 4 of the sender."""
    ends = make_ends()
    ends.meet()
    gate, turned = threading.Event(), []
    begin = ends.sender._begin

    def delayed_begin(step):
        assert gate.wait(PATIENCE)
        return begin(step)

    ends.sender._begin = delayed_begin

    async def turns():
        turned.append(1)
        gate.set()

    await asyncio.gather(ends.sender.send(iter(AWKWARD.items()), 1), turns())
    assert turned


def place(host, *, room=True):
    return ProcessLocation(host=host, room=room)


def test_weights_travel_through_memory_where_everybody_shares_it_else_through_ray():
    assert transport_between("auto", [place("a"), place("a")]) == "shm"
    assert transport_between("auto", [place("a"), place("a", room=False)]) == "ray"
    assert transport_between("auto", [place("a"), place("b")]) == "ray"
    full = [place("a"), place("a", room=False)]  # perhaps of the versions before
    assert transport_between("auto", full, previous="shm") == "shm"
    assert transport_between("auto", [place("a"), place("a")], previous="ray") == "ray"
    assert transport_between("auto", [place("a"), place("b")], previous="shm") == "ray"
    assert transport_between("redis", [place("a")], previous="ray") == "redis"
    assert transport_between("redis", [place("a"), place("b")]) == "redis"
    with raises(SharedMemoryUnusable, fault="verl hosts"):
        transport_between("shm", [place("a"), place("b")])


@pytest.mark.parametrize(
    ("options", "fault", "reason"),
    [
        ({}, "server", ""),
        ({"redis_url": "redis://h", "transprt": "shm"}, "options", "transprt"),
        ({"redis_url": "redis://h", "transport": "smoke"}, "options", "transport"),
        ({"redis_url": "redis://h", "transport": "collective", "full_every": 2}, "deltas", ""),
        ({"redis_url": "redis://h", "run_id": "no slug"}, "run", ""),
        ({"redis_url": "redis://h", "deadline": 0}, "options", "deadline"),
    ],
)
def test_settings_that_make_no_sense_are_refused_in_one_sentence(
    options, fault, reason, monkeypatch
):
    monkeypatch.delenv("TRINITY_REDIS_URL", raising=False)
    with raises(VerlSettingsRefused, fault=fault, reason=re.compile(reason)) as refused:
        parse_settings(options)
    assert "\n" not in str(refused.value)


def test_the_environment_names_the_servers_where_the_configuration_does_not(monkeypatch):
    monkeypatch.setenv("TRINITY_REDIS_URL", "redis://from-environment")
    monkeypatch.setenv("TRINITY_WEIGHTS_REDIS_URL", "redis://chunks")
    assert parse_settings({}).redis_url == "redis://from-environment"
    assert parse_settings({"redis_url": "redis://h"}).redis_url == "redis://h"
    assert parse_settings({"redis_url": None}).weights_url == "redis://chunks"


def test_what_everybody_is_told_comes_from_the_trainers_rank_0():
    opened = OpenedRun(run_id="r", epoch=3, transport="redis", newest_entry="1-0", announced="0-0")
    meeting = find_topology(
        [place("a"), ProcessLocation(host="b", room=True, opened=opened), place("c")], 1
    )
    assert (meeting.opened, meeting.transport, meeting.rollouts) == (opened, "redis", 1)
