"""Weights through a collective group: real processes over Gloo, some of which die."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import socket
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import anyio
import anyio.to_thread
import msgspec
import pytest
import redis
import torch

from tests.support import collective_processes as at
from tests.support.collective_processes import TRAINERS, Places, Tiny
from tests.support.errors import assert_attributes, raises
from tests.support.gpu import GPU
from tests.support.pipeline import reducer_task, reports_accepted
from tests.support.rank_processes import RankProcesses, collect
from tests.support.tensors import identical
from tests.support.waits import PATIENCE, wait_until
from tests.support.weight_versions import ready
from trinity_events import Synchronizer
from trinity_events.errors import (
    CorruptVersion,
    DeadlineExceeded,
    GroupBroken,
    VersionNotStored,
)
from trinity_events.weights import model_digest
from trinity_events.weights.errors import TransportRefused
from trinity_events.weights.transports.collective.frames import MOST_BYTES, FrameSender
from trinity_events.weights.transports.collective.groups import backend_for
from trinity_events.weights.transports.collective.messages import Channel, Hello
from trinity_events.weights.transports.collective.rendezvous import own_address
from trinity_events.weights.transports.collective.staged_versions import Buffer
from trinity_schemas import (
    PublishedPart,
    ResendRequested,
    SaveFailed,
    StepReady,
    StepRef,
    VersionOpened,
    WeightsApplied,
    decode_envelope,
    version_digest,
)
from trinity_schemas.keys import meeting_key
from trinity_workers.config.sections.explorer import ExplorerConfig
from trinity_workers.config.sections.sync import SyncConfig
from trinity_workers.config.train_config import TrainConfig
from trinity_workers.explorer.installer import VersionInstaller, VersionPrefetcher
from trinity_workers.explorer.run_follower import followed_run
from trinity_workers.explorer.versions import VersionFollower
from trinity_workers.learning.policy import load_policy
from trinity_workers.rollout_engines import EngineOptions, load_engine
from trinity_workers.runtime.collective_errors import CollectiveBroken, PeerFailed
from trinity_workers.trainer.rollouts.explorer_requests import ExplorerRequests

EXPLORERS = 2


def soon(places: Places) -> float:
    """Seconds within which everybody must have heard that a peer is gone."""
    return 2 * places.timeout + 60


@pytest.fixture(scope="module", params=["cpu", GPU])
def processes(request):
    """Over Gloo, and over NCCL on one GPU of which each process says that it is another host's."""
    made = RankProcesses(request.param)
    yield made
    made.close()


@pytest.fixture
def places(publisher, redis_url, weights_url, run_id, tmp_path) -> Places:
    return Places(run_id, publisher.epoch, redis_url, weights_url, tmp_path)


class Run:
    """A trainer of two ranks and some explorers, as processes."""

    def __init__(self, processes: RankProcesses, places: Places) -> None:
        self.processes = processes
        self.places = places._replace(device=processes.device)
        self._meetings = 0

    def ask(self, ranks, function, *args):
        """What the function returned or raised on each of the ranks."""
        return collect([self.processes.ask(rank, function, *args) for rank in ranks])

    def begin(self, kind="fsdp2", explorers=EXPLORERS):
        self.processes.start(TRAINERS + EXPLORERS)
        self.begin_training(kind)
        self.explorers = range(TRAINERS, TRAINERS + explorers)
        assert self.ask(self.explorers, at.explore, self.places) == [None] * explorers
        [names] = self.ask([0], at.set_up, explorers)
        return names

    def begin_training(self, kind="fsdp2"):
        self._meetings += 1
        answers = self.ask(range(TRAINERS), at.begin_training, self.places, kind, self._meetings)
        assert answers == [None, None], answers

    def send(self, step, *args):
        return self.ask(range(TRAINERS), at.send, step, *args)

    def sending(self, step, stop):
        """Send until rank 0 is at a tensor; returns how to get the answers."""
        at_it = self.places.folder / f"step-{step}"
        pending = [
            self.processes.ask(rank, at.send, step, (stop, at_it)) for rank in range(TRAINERS)
        ]
        wait_until(at_it.exists)
        return pending, at_it.with_suffix(".go")

    def end(self):
        for rank in range(TRAINERS + EXPLORERS):
            with contextlib.suppress(ProcessLookupError, OSError):
                os.kill(self.processes.pid(rank), signal.SIGCONT)
        self.processes.end()


@pytest.fixture
async def run(processes, places):
    made = Run(processes, places)
    async with reducer_task(places.redis_url, places.run_id):
        yield made
        await anyio.to_thread.run_sync(made.end)


async def off(function, *args):
    """In a thread, while the reducer goes on."""
    return await anyio.to_thread.run_sync(lambda: function(*args))


async def read_envelopes(log) -> list:
    return [decode_envelope(entry.payload) for entry in await log.read(limit=100_000)]


@pytest.fixture
def committer(places):
    made = Synchronizer(
        places.run_id, places.epoch, redis_url=places.redis_url, weights_url=places.weights_url
    )
    yield made
    made.close()


def expected() -> dict[str, torch.Tensor]:
    return dict(Tiny(seed=7).state_dict())


def assert_equal(tensors, sent_tensors):
    assert not isinstance(tensors, BaseException), tensors
    assert list(tensors) == list(sent_tensors)
    for name, tensor in sent_tensors.items():
        assert identical(tensors[name], tensor), name


# --- whole runs -------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["fsdp1", "fsdp1-original", "fsdp2"])
async def test_every_explorer_serves_the_trainers_weights_and_says_so_by_digest(
    run, committer, log, kind
):
    assert sorted(await off(run.begin, kind)) == ["explorer-0", "explorer-1"]
    for step in (1, 2):
        assert await off(run.send, step) == [None, None]
        committer.commit(step)
        event = await ready(log, step)
        assert event.transport == "collective"
        for applied_tensors in await off(run.ask, run.explorers, at.apply, event):
            assert_equal(applied_tensors, expected())
    await reports_accepted(log)
    heard = await read_envelopes(log)
    applied = [(envelope.producer.rank, envelope.event) for envelope in heard]
    applied = [(rank, event) for rank, event in applied if isinstance(event, WeightsApplied)]
    ref = StepRef(run.places.epoch, 2)
    assert [
        rank
        for rank, application in applied
        if (application.version, application.digest) == (ref, event.version_digest)
    ]
    assert sorted(rank for rank, _ in applied) == [0, 0, 1, 1]
    opened = [
        envelope.event.transport for envelope in heard if isinstance(envelope.event, VersionOpened)
    ]
    assert opened == ["collective"] * 2


@pytest.mark.processes
async def test_an_explorer_that_is_killed_midway_is_an_error_in_time_and_the_next_group_works(
    run, committer, log
):
    await off(run.begin)
    pending, go = await off(run.sending, 1, 3)
    began = time.monotonic()
    at.kill(run.processes, TRAINERS + 1)
    go.touch()
    own, peer = await off(collect, pending)
    assert time.monotonic() - began < soon(run.places)
    assert isinstance(own, GroupBroken), own
    assert isinstance(peer, PeerFailed), peer
    events = [envelope.event for envelope in await read_envelopes(log)]
    [failed] = [event for event in events if isinstance(event, SaveFailed)]
    # NCCL sends what its buffers hold: its first rank may learn of the death only from the others.
    broke = "collective group broke|did not get the complete weights"
    assert re.search(broke, failed.message), failed.message
    # The same step again, with those who are left.
    assert await off(run.send, 1) == [None, None]
    committer.commit(1)
    [applied_tensors] = await off(run.ask, [TRAINERS], at.apply, await ready(log, 1))
    assert_equal(applied_tensors, expected())


@pytest.mark.processes
async def test_an_explorer_that_hangs_is_an_error_in_time_and_may_come_back(run, committer, log):
    await off(run.begin)
    began = time.monotonic()
    os.kill(run.processes.pid(TRAINERS), signal.SIGSTOP)
    own, peer = await off(run.send, 1)
    assert time.monotonic() - began < soon(run.places)
    assert isinstance(own, GroupBroken), own
    assert isinstance(peer, PeerFailed), peer
    assert await off(run.send, 1) == [None, None]
    os.kill(run.processes.pid(TRAINERS), signal.SIGCONT)
    assert sorted((await off(run.ask, [0], at.set_up, 2))[0]) == ["explorer-0", "explorer-1"]
    assert await off(run.send, 2) == [None, None]
    committer.commit(2)
    event = await ready(log, 2)
    for applied_tensors in await off(run.ask, run.explorers, at.apply, event):
        assert_equal(applied_tensors, expected())


@pytest.mark.processes
@pytest.mark.parametrize("killed", [0, 1])
async def test_a_trainers_rank_that_is_killed_midway_leaves_explorers_whole_and_free(
    run, committer, log, opened, killed
):
    await off(run.begin)
    assert await off(run.send, 1) == [None, None]
    committer.commit(1)
    first = await ready(log, 1)
    pending, go = await off(run.sending, 2, 3)
    began = time.monotonic()
    at.kill(run.processes, killed)
    go.touch()
    other = (await off(collect, pending))[1 - killed]
    assert time.monotonic() - began < soon(run.places)
    # Torch ends a rank whose own group over NCCL broke; over Gloo the rank hears of it.
    failure = CollectiveBroken if run.places.device == "cpu" else ProcessLookupError
    assert isinstance(other, failure), other
    # Nobody has half of step 2, and step 1 is still there to be applied.
    lie = StepReady(
        **{name: getattr(first, name) for name in first.__struct_fields__} | {"step": 2}
    )
    for answer in await off(run.ask, run.explorers, at.apply, lie):
        assert isinstance(answer, VersionNotStored)
        assert_attributes(answer, fault="late to group", newest=1)
    for applied_tensors in await off(run.ask, run.explorers, at.apply, first):
        assert_equal(applied_tensors, expected())
    # Another trainer takes over, and the explorers find it by themselves.
    successor = opened("trainer")
    names = await off(successor.setup_weight_sync_group, 2, 30)
    assert sorted(names) == ["explorer-0", "explorer-1"]
    newer = await off(sent, successor, 3, Tiny(seed=9).named_parameters())
    for applied_tensors in await off(run.ask, run.explorers, at.apply, newer):
        assert_equal(applied_tensors, dict(Tiny(seed=9).state_dict()))


# --- one process, explorers as threads --------------------------------------------------------


@pytest.fixture
def opened(places):
    """Makes trainers and explorers in this process, and closes them at the end."""
    made = []

    def make(role, rank=0, **but):
        options = {"group_timeout": PATIENCE, "transport": "collective", "chunk_bytes": 4096} | but
        made.append(
            Synchronizer(
                places.run_id,
                places.epoch if role == "trainer" else 0,
                redis_url=places.redis_url,
                weights_url=places.weights_url,
                role=role,
                rank=rank,
                **options,
            )
        )
        if role == "explorer":
            made[-1].join_weight_sync_group()
        return made[-1]

    yield make
    for synchronizer in reversed(made):
        synchronizer.close()


def sent(trainer, step, tensors) -> StepReady:
    """Send a version; what the reducer would announce of it."""
    group = trainer.model_update_group(step)
    try:
        for name, tensor in tensors:
            group.add(name, tensor)
        group.seal()
    except GroupBroken as error:
        group.fail(error)
        raise
    part = PublishedPart(
        rank=0, manifest_digest=group.report.manifest_digest, bytes=group.report.bytes
    )
    return StepReady(
        epoch=trainer.epoch,
        step=step,
        kind="weights",
        caused_by="1-0",
        parts=(part,),
        version_digest=version_digest([(0, part.manifest_digest)]),
        transport="collective",
    )


SOME = [(f"layer.{number}", torch.full((1000,), float(number))) for number in range(6)]


def test_a_version_stays_as_it_is_while_it_is_held_and_memory_is_bounded(opened):
    trainer, explorer = opened("trainer"), opened("explorer")
    trainer.setup_weight_sync_group(1, 10)
    staging = explorer._session.groups._staging
    buffers = set()
    with explorer.pull(sent(trainer, 0, SOME)) as version:
        for step in range(1, 10):
            newer = sent(trainer, step, [("other", torch.rand(6000))])
            buffers.add(id(staging._newest[1]))
        for (name, tensor), (_, original) in zip(version.tensors(), SOME, strict=True):
            assert identical(tensor, original), name
        with explorer.pull(newer) as other:
            assert dict(other.tensors())["other"].shape == (6000,)
    for step in range(10, 14):
        sent(trainer, step, SOME)
        buffers.add(id(staging._newest[1]))
    assert len(buffers) <= 3


def test_an_explorer_that_keeps_up_has_room_for_one_version(opened):
    trainer, explorer = opened("trainer"), opened("explorer")
    trainer.setup_weight_sync_group(1, 10)
    staging, buffers = explorer._session.groups._staging, set()
    for step in range(6):
        with explorer.pull(
            sent(trainer, step, [("a", torch.full((3000,), float(step)))])
        ) as version:
            assert (dict(version.tensors())["a"] == step).all()
        buffers.add(id(staging._newest[1]))
    assert len(buffers) == 1


def test_what_nobody_has_read_yet_stays_until_the_next_version_is_whole(opened):
    trainer, explorer = opened("trainer"), opened("explorer")
    trainer.setup_weight_sync_group(1, 10)
    unread = sent(trainer, 1, SOME)
    writer = trainer.publication(2).begin()
    writer.add("a", torch.rand(3_000_000))
    writer.discard()
    with explorer.pull(unread) as version:
        assert len(version.names) == len(SOME)


@pytest.mark.parametrize("where", ["__init__", "_grow"])
def test_an_explorer_that_was_short_of_memory_gets_the_next_version(opened, monkeypatch, where):
    trainer, explorer = opened("trainer"), opened("explorer")
    trainer.setup_weight_sync_group(1, 10)
    large = [("large", torch.rand(500_000))]
    refused = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    with monkeypatch.context() as patch:
        patch.setattr(Buffer, where, mock.Mock(side_effect=refused))
        with pytest.raises(GroupBroken):
            sent(trainer, 1, large)
    with explorer.pull(sent(trainer, 2, large)) as version:
        assert identical(dict(version.tensors())["large"], large[0][1])


def test_a_bucket_is_no_larger_than_what_explorers_make_room_for():
    group: Any = SimpleNamespace(device=torch.device("cpu"))
    assert len(FrameSender(group, 2 * MOST_BYTES).reserve()) == MOST_BYTES


def test_bytes_that_were_changed_on_the_way_are_found_before_anything_is_installed(opened):
    trainer, explorer = opened("trainer"), opened("explorer")
    trainer.setup_weight_sync_group(1, 10)
    event = sent(trainer, 1, Tiny(seed=7).named_parameters())
    explorer._session.groups._staging._newest[1]._memory[70] ^= 0x55
    model = Tiny(seed=1)
    with raises(CorruptVersion, rank=0, chunk=0):
        explorer.apply(model, event)
    assert_equal(dict(model.state_dict()), dict(Tiny(seed=1).state_dict()))


def test_an_explorer_that_comes_late_gets_the_next_version_and_is_told_so(opened):
    trainer, first = opened("trainer"), opened("explorer", 0)
    assert trainer.get_weight_sync_info().run_id == trainer.run_id
    assert trainer.setup_weight_sync_group(1, 10) == ("explorer-0",)
    missed = sent(trainer, 1, SOME)
    late = opened("explorer", 1)
    with raises(VersionNotStored, fault="late to group", newest=None):
        late.pull(missed).__enter__()
    wait_until(lambda: late.get_weight_sync_info() is not None)
    trainer.setup_weight_sync_group(2, 10)
    newer = sent(trainer, 2, SOME)
    for explorer in (first, late):
        with explorer.pull(newer) as version:
            assert version.bytes >= 24_000


async def test_an_explorer_that_comes_too_late_asks_and_the_weights_are_sent_again(
    opened, places, committer, log, policy_folder
):
    trainer, _ = opened("trainer"), opened("explorer", 0)
    trainer.setup_weight_sync_group(1, 10)
    trained, _ = load_policy(policy_folder)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.25)
    config = TrainConfig(
        sync=SyncConfig(transport="collective"), explorer=ExplorerConfig(count=2)
    ).placed(
        run_id=places.run_id,
        epoch=places.epoch,
        redis_url=places.redis_url,
        weights_url=places.weights_url,
        checkpoint_folder=places.folder,
    )

    async def send():
        resends.publishing(1)
        await off(sent, trainer, 1, trained.named_parameters())

    resends = ExplorerRequests(places.run_id, places.redis_url, ResendRequested, send)
    began = await log.last_id()
    async with (
        reducer_task(places.redis_url, places.run_id),
        followed_run(places.run_id, places.redis_url) as run,
    ):
        versions = VersionFollower(run, places.epoch, method="nccl")
        await send()
        committer.commit(1)
        event = await ready(log, 1)
        late = opened("explorer", 1)
        options = EngineOptions(model_folder=policy_folder, synchronizer=late)
        engine = load_engine("huggingface", options)
        prefetcher = VersionPrefetcher(config, late)
        installer = VersionInstaller(config, engine, late, versions, prefetcher)
        with anyio.fail_after(PATIENCE):
            async with resends.listening(began), versions.listening(), resends.allowed():
                await installer.refresh(1)
    assert engine.serves == StepRef(places.epoch, 1)
    assert await engine.prove() == model_digest(trained)
    await off(late.flush)
    async with reducer_task(places.redis_url, places.run_id):
        await reports_accepted(log)
    heard = [envelope.event for envelope in await read_envelopes(log)]
    [resend] = [event for event in heard if isinstance(event, ResendRequested)]
    assert resend.version == StepRef(places.epoch, 1)
    [applied] = [event for event in heard if isinstance(event, WeightsApplied)]
    assert applied.digest == event.version_digest, "what was sent again is what was announced"


def test_a_version_is_not_asked_for_that_would_not_be_sent(opened):
    trainer, explorer = opened("trainer"), opened("explorer")
    trainer.setup_weight_sync_group(1, 10)
    first = sent(trainer, 1, SOME)
    sent(trainer, 2, SOME)
    assert not explorer.request_resend(first), "a newer one is here, and will be announced"
    other_transport = msgspec.structs.replace(first, step=3, transport="redis")
    assert not explorer.request_resend(other_transport)
    assert explorer.request_resend(msgspec.structs.replace(first, step=3))


def test_who_never_joined_is_told_what_to_do(opened, places):
    trainer, _ = opened("trainer"), opened("explorer")
    trainer.setup_weight_sync_group(1, 10)
    event = sent(trainer, 1, SOME)
    reader = opened("reader")
    with (
        raises(VersionNotStored, fault="outside group"),
        reader.pull(event),
    ):
        pass


def test_a_group_is_torn_down_and_set_up_anew(opened):
    trainer, explorer = opened("trainer"), opened("explorer")
    trainer.setup_weight_sync_group(1, 10)
    sent(trainer, 1, SOME)
    trainer.teardown_weight_sync_group()
    with explorer.pull(sent(trainer, 2, SOME)):
        pass
    explorer.teardown_weight_sync_group()
    with raises(GroupBroken, fault="empty", run_id=trainer.run_id):
        sent(trainer, 3, SOME)
    explorer.join_weight_sync_group()
    trainer.setup_weight_sync_group(1, 10)
    with explorer.pull(sent(trainer, 4, SOME)):
        pass


def test_explorers_find_a_trainer_that_was_started_again(opened):
    trainer, explorer = opened("trainer"), opened("explorer")
    trainer.setup_weight_sync_group(1, 10)
    before = trainer.get_weight_sync_info()
    trainer.close()
    again = opened("trainer")
    assert again.setup_weight_sync_group(1, 10) == ("explorer-0",)
    assert again.get_weight_sync_info() != before
    with explorer.pull(sent(again, 1, SOME)):
        pass


@pytest.mark.parametrize("when", ["it sends", "it waits for explorers"])
def test_a_trainer_is_found_although_the_server_has_forgotten_where_it_waits(opened, places, when):
    """As after so long without a version that it expired, or a restart of a server in memory."""
    trainer, _ = opened("trainer"), opened("explorer", 0)
    trainer.setup_weight_sync_group(1, 10)
    with redis.Redis.from_url(places.weights_url) as client:
        assert client.delete(meeting_key(places.run_id))
    if when == "it sends":
        sent(trainer, 1, SOME)
    late = opened("explorer", 1)
    assert trainer.setup_weight_sync_group(2, 10) == ("explorer-0", "explorer-1")
    with late.pull(sent(trainer, 2, SOME)) as version:
        assert version.bytes >= 24_000


def test_explorers_that_do_not_come_are_an_error_that_says_who_is_there(opened):
    trainer, _ = opened("trainer"), opened("explorer", 3)
    trainer.setup_weight_sync_group(1, 10)
    with raises(
        DeadlineExceeded,
        missing=re.compile("1 of 2 "),
        deadline=0.3,
        reason=re.compile("explorer-3"),
    ):
        trainer.setup_weight_sync_group(2, 0.3)


@pytest.mark.parametrize(
    ("gpus", "backend"),
    [
        (["a", "b", "c"], "nccl"),
        (["a", "b", "b"], "gloo"),
        (["a", None], "gloo"),
        ([None, None], "gloo"),
    ],
)
def test_nccl_is_taken_where_each_has_a_gpu_of_its_own(gpus, backend):
    assert backend_for(gpus) == backend


def test_a_trainer_is_found_at_the_address_by_which_it_reaches_the_server(monkeypatch):
    class Probe:
        def __init__(self, *_):
            self.towards = None

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def connect(self, where):
            if where[0] == "nowhere":
                raise OSError("no such host")
            self.towards = where

        def getsockname(self):
            return ("127.0.0.1" if self.towards[0] == "localhost" else "10.1.2.3", 4)

    monkeypatch.setattr(socket, "socket", Probe)
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "10.9.9.9")
    clients = {url: redis.Redis.from_url(url) for url in SERVERS}
    assert {url: own_address(client) for url, client in clients.items()} == SERVERS


SERVERS = {
    "redis://elsewhere:7000": "10.1.2.3",
    "redis://localhost:7000": "10.9.9.9",
    "redis://nowhere:7000": "10.9.9.9",
    "unix:///run/redis.sock": "10.9.9.9",
}


def test_explorers_of_one_name_are_an_error_that_says_what_each_needs(opened):
    trainer, _, _ = opened("trainer"), opened("explorer", 0), opened("explorer", 0)
    with raises(DeadlineExceeded, missing=re.compile("^1 of 2 explorers")):
        trainer.setup_weight_sync_group(2, 1.0)


def test_strangers_do_not_get_in(opened):
    trainer, _ = opened("trainer"), opened("explorer")
    info = trainer.get_weight_sync_info()
    guess = socket.create_connection((info.address, info.port))
    Channel(guess).send(Hello(run_id=info.run_id, token="guess", name="mallory"), 5)
    noise = socket.create_connection((info.address, info.port))
    noise.sendall(b"GET / HTTP/1.1\r\n\r\n")
    huge = socket.create_connection((info.address, info.port))
    huge.sendall(b"\xff\xff\xff\xff")
    assert trainer.setup_weight_sync_group(1, 10) == ("explorer-0",)
    for connection in (guess, noise, huge):
        connection.close()


def test_only_rank_0_sends(opened):
    trainer = opened("trainer")
    with raises(TransportRefused, fault="rank", transport="collective"):
        trainer.publication(1, 1).begin()
