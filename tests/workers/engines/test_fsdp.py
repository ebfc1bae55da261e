"""The FSDP engine and its helpers on two real ranks over Gloo, against a real server."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import pickle
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.to_thread
import pytest

from tests.support.errors import assert_attributes, raises

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch.distributed as dist  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import FullyShardedDataParallel  # noqa: E402
from torch.distributed.tensor import Replicate, Shard, distribute_tensor  # noqa: E402
from transformers import AutoConfig, AutoTokenizer  # noqa: E402

from tests.support.experiences import make_groups  # noqa: E402
from tests.support.failing_synchronizers import (  # noqa: E402
    FailingSynchronizer,
    FailsOnRank1,
    TellsNothingOnRank1,
)
from tests.support.fsdp_runs import Where, ready  # noqa: E402
from tests.support.pipeline import folded, outcomes, reducer_task, until  # noqa: E402
from tests.support.rank_processes import Rank, RankGroup, RankProcesses  # noqa: E402
from tests.support.tensors import (  # noqa: E402
    assert_equal,
    identical,
)
from tests.support.waits import PATIENCE  # noqa: E402
from trinity_events import CheckpointCoordinator, Synchronizer  # noqa: E402
from trinity_events.checkpoints.layout import MANIFEST  # noqa: E402
from trinity_events.checkpoints.verification import CheckpointDamaged  # noqa: E402
from trinity_events.coordinator import staged_path  # noqa: E402
from trinity_events.errors import BufferFull  # noqa: E402
from trinity_events.log import Publisher, SyncEventLog, new_producer  # noqa: E402
from trinity_events.server import open_client  # noqa: E402
from trinity_events.weights import PartWriter, Publication  # noqa: E402
from trinity_schemas import (  # noqa: E402
    Experience,
    SaveFailed,
    SaveFinished,
    SaveStarted,
    VersionPartPublished,
    decode_envelope,
)
from trinity_workers.config.train_config import RunConfig  # noqa: E402
from trinity_workers.engines.base import LocalShard  # noqa: E402
from trinity_workers.engines.fsdp import FSDPEngine  # noqa: E402
from trinity_workers.engines.learning_rate import LearningRate  # noqa: E402
from trinity_workers.engines.sharded import write_huggingface  # noqa: E402
from trinity_workers.engines.state_files import read_state, write_state  # noqa: E402
from trinity_workers.helpers import (  # noqa: E402
    PublishFull,
    PublishShards,
    PublishSnapshot,
    fsdp_save_state_dict,
    fsdp_upload_state_dict,
    strategy_for,
)
from trinity_workers.helpers.fsdp import ShardsRefused, fsdp_shards  # noqa: E402
from trinity_workers.helpers.full_tensors import full_tensors  # noqa: E402
from trinity_workers.learning.policy import load_policy  # noqa: E402
from trinity_workers.runtime.collective_errors import PeerFailed  # noqa: E402
from trinity_workers.trainer.workers.fsdp import TrainWorker  # noqa: E402
from trinity_workers.trainer.workers.rank import compute_device  # noqa: E402

WORLD = 2
NO_SERVER = "redis://127.0.0.1:1"
logger = logging.getLogger(__name__)


# --- two processes, which run functions of this module on command -----------------------------


def synchronizer_of(
    rank: Rank, kind: type[Synchronizer] = Synchronizer, **but: str
) -> Synchronizer:
    """The rank's end of weight versions, closed when it leaves its group."""
    where = rank.objects.where
    urls = {"redis_url": where.redis_url, "weights_url": where.weights_url} | but
    made = kind(
        where.run_id, where.epoch, role="actor", rank=rank.number, chunk_bytes=65536, **urls
    )
    rank.exits.callback(made.close)
    return made


class Ranks:
    """Ranks that run functions of this module while the test's own tasks go on."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group

    async def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What the function returns on each rank; raises what it raised on one."""
        return await anyio.to_thread.run_sync(self._group, function, *args)

    async def answers(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What the function returned or raised on each rank."""
        return await anyio.to_thread.run_sync(self._group.answers, function, *args)


@pytest.fixture
def processes(rank_processes) -> RankProcesses:
    """The ranks' processes, in no group."""
    rank_processes.leave()
    rank_processes.start(WORLD)
    return rank_processes


@pytest.fixture
async def ranks(rank_group, where):
    """Two processes in a new process group, each with an engine of its own."""
    ranks = Ranks(rank_group(WORLD))
    await ranks(_begin, where)
    return ranks


def _begin(rank: Rank, where: Where) -> None:
    rank.objects.where = where
    rank.objects.engine = _new_engine(where)
    log = SyncEventLog(open_client(where.redis_url), where.run_id)
    rank.exits.callback(log.close)
    rank.objects.publisher = Publisher(log, where.epoch, new_producer("actor", rank.number))


def _new_engine(where: Where) -> FSDPEngine:
    engine = FSDPEngine(
        where.model_folder,
        device=torch.device("cpu"),
        learning_rate=LearningRate(highest=1e-3, warmup_steps=4),
    )
    engine.module.train()
    return engine


def _full_weights(rank: Rank) -> list[tuple[str, torch.Tensor]]:
    return [(name, value.clone()) for name, value in rank.objects.engine.get_per_tensor_param()]


def _take_step(rank: Rank, seed: int) -> float:
    """An optimizer step on tokens of the rank's own; returns the gradient norm."""
    generator = torch.Generator().manual_seed(10 * seed + rank.number)
    tokens = torch.randint(3, 90, (4, 16), generator=generator)
    loss = rank.objects.engine.module(input_ids=tokens, labels=tokens, use_cache=False).loss
    return rank.objects.engine.optimizer_step(loss)


# --- weights in memory ------------------------------------------------------------------------


def upload(rank: Rank, step: int) -> None:
    fsdp_upload_state_dict(rank.objects.engine, synchronizer_of(rank), step, logger)


async def applied(where: Where, log, step: int) -> dict[str, torch.Tensor]:
    """The weights of a Hugging Face model into which the version was applied."""
    model, _ = load_policy(where.model_folder)
    explorer = Synchronizer(
        where.run_id, 0, redis_url=where.redis_url, weights_url=where.weights_url, role="explorer"
    )
    event = await ready(log, "weights", step)
    await anyio.to_thread.run_sync(explorer.apply, model, event)
    explorer.close()
    return dict(model.named_parameters())


async def test_full_tensors_are_the_model_folders_by_name_and_bit_on_every_rank(ranks, where):
    in_folder = load_file(where.model_folder / "model.safetensors")
    for weights in await ranks(_full_weights):
        names = [name for name, _ in weights]
        assert sorted(names) == sorted(in_folder)
        assert "lm_head.weight" not in names, "tied to the embeddings, which are there"
        assert_equal(dict(sorted(weights)), dict(sorted(in_folder.items())))


async def test_a_model_that_applies_an_upload_equals_the_trainers_bit_for_bit(
    ranks, where, log, committer
):
    at_start = dict((await ranks(_full_weights))[0])
    await ranks(_take_step, 1)
    await ranks(upload, 1)
    committer.commit(1)
    trained, again = (dict(weights) for weights in await ranks(_full_weights))
    assert not identical(trained["model.norm.weight"], at_start["model.norm.weight"])
    assert_equal(trained, again)
    assert_equal(await applied(where, log, 1), trained)


def upload_that_fails(rank: Rank, step: int) -> None:
    synchronizer = synchronizer_of(rank, FailingSynchronizer)
    try:
        fsdp_upload_state_dict(rank.objects.engine, synchronizer, step, logger)
    finally:
        synchronizer.flush()


async def test_an_upload_that_fails_midway_raises_on_all_ranks_and_the_next_one_works(
    ranks, where, log, committer
):
    began = time.monotonic()
    own, peers = await ranks.answers(upload_that_fails, 1)
    assert time.monotonic() - began < PATIENCE / 2, "it does not wait for the group to give up"
    assert isinstance(own, OSError)
    assert isinstance(peers, PeerFailed)
    assert str(peers) == "rank 0 failed: OSError: no room for the third tensor"
    last_event = [decode_envelope(entry.payload).event for entry in await log.read()][-1]
    assert isinstance(last_event, SaveFailed)
    assert (last_event.slot.kind, last_event.message) == ("weights", "no room for the third tensor")
    with open_client(where.weights_url) as weights:
        assert weights.keys(f"trinity-weights:{{{where.run_id}.*") == []
    # The ranks' collectives still match: the same step again, and training goes on.
    await ranks(upload, 1)
    committer.commit(1)
    expected = dict((await ranks(_full_weights))[0])
    assert_equal(await applied(where, log, 1), expected)
    norms = await ranks(_take_step, 1)
    assert norms[0] == norms[1] > 0


def upload_shards(rank: Rank, step: int) -> None:
    fsdp_upload_state_dict(
        rank.objects.engine, synchronizer_of(rank), step, logger, strategy=PublishShards()
    )


async def test_a_model_that_applies_every_ranks_shards_equals_the_trainers_bit_for_bit(
    ranks, where, log, committer
):
    await ranks(_take_step, 1)
    await ranks(upload_shards, 1)
    committer.commit(1)
    trained, _ = (dict(weights) for weights in await ranks(_full_weights))
    event = await ready(log, "weights", 1)
    assert [part.rank for part in event.parts] == [0, 1]
    whole = sum(tensor.nbytes for tensor in trained.values())
    assert sum(part.bytes for part in event.parts) == whole, "nothing travels twice"
    assert all(part.bytes < 0.6 * whole for part in event.parts), "no rank is the bottleneck"
    assert_equal(await applied(where, log, 1), trained)


def with_buffers(model: torch.nn.Module) -> torch.nn.Module:
    """As routers have them: one is saved, one is made anew."""
    inner = model.model.layers[0].mlp
    inner.register_buffer("correction_bias", torch.full((3,), float("nan")))
    inner.register_buffer("made_anew", torch.zeros(2), persistent=False)
    return model


def upload_with_buffers(rank: Rank, step: int, how: str) -> None:
    module = with_buffers(rank.objects.engine.module)
    module.model.layers[0].mlp.correction_bias.copy_(torch.tensor([1.0, 2.0, 3.0]))
    upload_shards(rank, step) if how == "shards" else upload(rank, step)


@pytest.mark.parametrize("how", ["shards", "full"])
async def test_buffers_that_a_model_saves_are_published_with_its_parameters(
    ranks, where, log, committer, how
):
    await ranks(upload_with_buffers, 1, how)
    committer.commit(1)
    event = await ready(log, "weights", 1)
    model = with_buffers(load_policy(where.model_folder)[0])
    explorer = committer.bind("explorer", 0)
    await anyio.to_thread.run_sync(explorer.apply, model, event)
    explorer.close()
    assert model.model.layers[0].mlp.correction_bias.tolist() == [1.0, 2.0, 3.0]


def full_tensors_of_fsdp1(rank: Rank) -> dict[str, list[float]]:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model[1].register_buffer("made_anew", torch.zeros(2), persistent=False)
    cpu = torch.device("cpu")
    model[1] = FullyShardedDataParallel(model[1], device_id=cpu)
    engine = SimpleNamespace(module=FullyShardedDataParallel(model, device_id=cpu))
    return {name: tensor.flatten().tolist() for name, tensor in full_tensors(engine)}


async def test_full_tensors_of_fsdp1_are_those_of_a_state_dict(ranks):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    for tensors in await ranks(full_tensors_of_fsdp1):
        assert sorted(tensors) == sorted(model.state_dict())
        assert tensors["1.running_var"] == [1.0, 1.0]


def is_begun(event) -> bool:
    return isinstance(event, SaveStarted) and event.slot.kind == "weights"


def upload_shards_by(rank: Rank, step: int, ending: type[Synchronizer]) -> None:
    synchronizer = synchronizer_of(rank, ending)
    try:
        fsdp_upload_state_dict(
            rank.objects.engine, synchronizer, step, logger, strategy=PublishShards()
        )
    finally:
        synchronizer.flush()


async def test_a_rank_that_fails_among_its_shards_fails_all_and_the_version_is_never_seen(
    ranks, where, log, committer
):
    peers, own = await ranks.answers(upload_shards_by, 1, FailsOnRank1)
    assert isinstance(own, OSError)
    assert isinstance(peers, PeerFailed)
    assert str(peers) == "rank 1 failed: OSError: no room for the third tensor"
    committer.commit(1)
    events = [decode_envelope(entry.payload).event for entry in await log.read()]
    failures = [event for event in events if isinstance(event, SaveFailed)]
    assert sorted((failure.slot.rank, failure.followed) for failure in failures) == [
        (0, True),
        (1, False),
    ]
    assert {failure.save_id for failure in failures} == {
        event.save_id for event in events if is_begun(event)
    }
    assert not any(isinstance(event, VersionPartPublished) for event in events)
    with open_client(where.weights_url) as weights:
        assert weights.keys(f"trinity-weights:{{{where.run_id}.*") == []
    # The ranks' collectives still match, and the same step can be tried again.
    await ranks(upload_shards, 1)
    assert_equal(await applied(where, log, 1), dict((await ranks(_full_weights))[0]))


async def test_a_rank_whose_part_the_log_does_not_hear_of_fails_all_and_the_next_one_works(
    ranks, where, log, committer
):
    peers, own = await ranks.answers(upload_shards_by, 1, TellsNothingOnRank1)
    assert isinstance(own, BufferFull)
    assert isinstance(peers, PeerFailed)
    assert_attributes(peers, rank=1, reason=re.compile("^BufferFull"))
    with open_client(where.weights_url) as weights:
        assert weights.keys(f"trinity-weights:{{{where.run_id}.*") == []
    await ranks(upload_shards, 1)
    committer.commit(1)
    assert_equal(await applied(where, log, 1), dict((await ranks(_full_weights))[0]))


def upload_as_it_can_be(rank: Rank, step: int, how: str) -> None:
    """As the error says: full tensors, where shards are refused."""
    synchronizer = synchronizer_of(rank)
    engine = rank.objects.engine
    engine.module.peft_config = {}
    with raises(ShardsRefused, fault="adapters"):
        fsdp_upload_state_dict(engine, synchronizer, step, logger, strategy=strategy_for(how, 20))
    fsdp_upload_state_dict(engine, synchronizer, step, logger, strategy=PublishFull())
    synchronizer.flush()


@pytest.mark.parametrize("how", ["shards", "snapshot"])
async def test_a_version_whose_shards_are_refused_may_be_published_in_full_instead(
    ranks, where, log, committer, how
):
    await ranks(upload_as_it_can_be, 1, how)
    committer.commit(1)
    assert_equal(await applied(where, log, 1), dict((await ranks(_full_weights))[0]))


class HeldPublication(Publication):
    """Writes nothing before it is let go."""

    gate: threading.Event

    def begin(self) -> PartWriter:
        assert self.gate.wait(PATIENCE)
        return super().begin()


class HeldSynchronizer(Synchronizer):
    gate: threading.Event

    def publication(self, global_step: int, rank: int = 0, **options: Any) -> Publication:
        part = HeldPublication(self._publisher, global_step, rank, **options)
        part.gate = self.gate
        return part


def upload_snapshot_then_train(rank: Rank, step: int) -> list[tuple[str, torch.Tensor]]:
    before = _full_weights(rank)
    synchronizer = synchronizer_of(rank, HeldSynchronizer)
    synchronizer.gate = threading.Event()
    strategy = PublishSnapshot(20)
    fsdp_upload_state_dict(rank.objects.engine, synchronizer, step, logger, strategy=strategy)
    _take_step(rank, 1)
    synchronizer.gate.set()
    strategy.close()
    synchronizer.flush()
    return before


async def test_a_snapshot_is_of_the_moment_although_training_goes_on_before_it_is_sent(
    ranks, where, log, committer
):
    at_the_moment = dict((await ranks(upload_snapshot_then_train, 1))[0])
    committer.commit(1)
    assert_equal(await applied(where, log, 1), at_the_moment)
    later = dict((await ranks(_full_weights))[0])
    assert not identical(later["model.norm.weight"], at_the_moment["model.norm.weight"])


def upload_snapshots_that_fail(rank: Rank, step: int) -> None:
    synchronizer = synchronizer_of(rank, FailsOnRank1)
    strategy = PublishSnapshot(20)
    fsdp_upload_state_dict(rank.objects.engine, synchronizer, step, logger, strategy=strategy)
    try:
        fsdp_upload_state_dict(
            rank.objects.engine, synchronizer, step + 1, logger, strategy=strategy
        )
    finally:
        synchronizer.flush()


async def test_a_snapshot_that_cannot_be_sent_is_told_and_fails_the_next_upload_on_all_ranks(
    ranks, log
):
    peers, own = await ranks.answers(upload_snapshots_that_fail, 1)
    assert isinstance(own, OSError)
    assert isinstance(peers, PeerFailed)
    assert str(peers) == "rank 1 failed: OSError: no room for the third tensor"
    events = [decode_envelope(entry.payload).event for entry in await log.read()]
    failed = [
        (event.slot.step, event.slot.rank) for event in events if isinstance(event, SaveFailed)
    ]
    assert failed == [(1, 1), (2, 1)]


LAYOUT = {"uneven": (5, 3), "short": (1, 4), "column": (4, 6)}


def shards_of_many_layouts(rank: Rank) -> list[LocalShard]:
    mesh = init_device_mesh("cpu", (WORLD,))
    module = torch.nn.Module()
    placed = {"uneven": Shard(0), "short": Shard(0), "column": Shard(1)}
    for name, shape in LAYOUT.items():
        full = torch.arange(1.0, 1 + math.prod(shape)).reshape(shape)
        module.register_parameter(
            name, torch.nn.Parameter(distribute_tensor(full, mesh, [placed[name]]))
        )
    same = distribute_tensor(torch.full((3,), 7.0), mesh, [Replicate()])
    module.register_parameter("same", torch.nn.Parameter(same))
    module.register_parameter("plain", torch.nn.Parameter(torch.full((2,), 9.0)))
    empty = distribute_tensor(torch.empty(0, 2), mesh, [Shard(0)])
    # Named as by what wraps layers to compute them again, which no other model has.
    module.add_module("_checkpoint_wrapped_module", torch.nn.Module())
    wrapped = module.get_submodule("_checkpoint_wrapped_module")
    wrapped.register_parameter("empty", torch.nn.Parameter(empty))
    return [
        LocalShard(
            local_shard.name,
            local_shard.tensor.clone(),
            local_shard.global_shape,
            local_shard.offsets,
        )
        for local_shard in fsdp_shards(module)
    ]


async def test_shards_lie_where_they_say_and_every_element_comes_from_one_rank(ranks):
    both = await ranks(shards_of_many_layouts)
    made = {name: torch.zeros(shape) for name, shape in LAYOUT.items()}
    made |= {"same": torch.zeros(3), "plain": torch.zeros(2), "empty": torch.zeros(0, 2)}
    times = {name: torch.zeros_like(tensor) for name, tensor in made.items()}
    for local_shard in [*both[0], *both[1]]:
        assert local_shard.global_shape == made[local_shard.name].shape
        region = tuple(
            slice(begin, begin + size)
            for begin, size in zip(local_shard.offsets, local_shard.tensor.shape, strict=True)
        )
        made[local_shard.name][region] = local_shard.tensor
        times[local_shard.name][region] += 1
    assert all((count == 1).all() for count in times.values())
    for name, shape in LAYOUT.items():
        assert identical(made[name], torch.arange(1.0, 1 + math.prod(shape)).reshape(shape))
    assert (made["same"] == 7).all() and (made["plain"] == 9).all()
    assert [local_shard.name for local_shard in [*both[0], *both[1]]].count("empty") == 1
    assert [local_shard.name for local_shard in both[1]].count("short") == 0, (
        "the second rank has none of it"
    )


def upload_without_server(rank: Rank, step: int) -> None:
    synchronizer = synchronizer_of(rank, weights_url=NO_SERVER)
    try:
        fsdp_upload_state_dict(rank.objects.engine, synchronizer, step, logger)
    finally:
        synchronizer.flush()


async def test_a_chunk_server_that_is_gone_fails_the_upload_in_the_log_too(ranks, log):
    own, peers = await ranks.answers(upload_without_server, 1)
    assert "refused" in str(own)
    assert isinstance(peers, PeerFailed)
    last_event = [decode_envelope(entry.payload).event for entry in await log.read()][-1]
    assert isinstance(last_event, SaveFailed)
    assert "refused" in last_event.message


# --- files ------------------------------------------------------------------------------------


class HeldPublisher(Publisher):
    """Publishes nothing before it is let go: a background save then has not begun to write."""

    gate: threading.Event

    def publish(self, event) -> str:
        assert self.gate.wait(PATIENCE)
        return super().publish(event)


@contextlib.contextmanager
def synced_paths() -> Iterator[set[str]]:
    """Every path that is synced in the block, in any thread; it is really synced, too."""
    paths: set[str] = set()
    fsync = os.fsync

    def recorded(handle: int) -> None:
        fsync(handle)
        paths.add(str(Path(f"/proc/self/fd/{handle}").readlink()))

    os.fsync = recorded
    try:
        yield paths
    finally:
        os.fsync = fsync


def save_and_overwrite(rank: Rank, folder: Path) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Save, overwrite the weights, and only then let the save go; returns what it should hold."""
    objects = rank.objects
    publisher = HeldPublisher(
        objects.publisher.log, objects.where.epoch, objects.publisher.producer
    )
    publisher.gate = threading.Event()
    coordinator = CheckpointCoordinator(publisher, objects.where.run_folder)
    shards = {
        name: value.to_local().clone() for name, value in objects.engine.module.state_dict().items()
    }
    with synced_paths() as synced:
        fsdp_save_state_dict(objects.engine, str(folder), 5, coordinator, logger)
        assert not shard(folder, rank.number).exists()
        with torch.no_grad():
            for parameter in objects.engine.module.parameters():
                parameter.to_local().fill_(7.0)
        publisher.gate.set()
        coordinator.wait_all()
    return shards, synced


def begin_to_save(rank: Rank, folder: Path, gated_rank: int) -> None:
    """Save in the background; on one rank nothing of it is told or written before it is let go."""
    objects = rank.objects
    publisher = HeldPublisher(
        objects.publisher.log, objects.where.epoch, objects.publisher.producer
    )
    publisher.gate = objects.gate = threading.Event()
    if rank.number != gated_rank:
        publisher.gate.set()
    objects.coordinator = CheckpointCoordinator(publisher, objects.where.run_folder)
    fsdp_save_state_dict(objects.engine, str(folder), 5, objects.coordinator, logger)
    if rank.number != gated_rank:
        objects.coordinator.wait_all()


def finish_saving(rank: Rank) -> None:
    rank.objects.gate.set()
    rank.objects.coordinator.wait_all()


async def test_a_state_dict_is_ready_when_all_ranks_wrote_it_although_one_was_registered(
    ranks, where, log, sync_client
):
    folder = staged_path(where.run_folder, where.epoch, 5) / "actor"
    trainer = Publisher(
        SyncEventLog(sync_client, where.run_id), where.epoch, new_producer("trainer")
    )
    async with reducer_task(where.redis_url, where.run_id, where.run_folder.parent):
        await ranks(begin_to_save, folder, 1)
        await CheckpointCoordinator(trainer).register_and_monitor(
            5, is_state_dict=True, state_dict_thread_count=1
        )
        await folded(log)
        assert shard(folder, 0).exists()
        assert await outcomes(log) == []
        await ranks(finish_saving)
        assert len((await ready(log, "state_dict", 5)).saves) == WORLD
        named = where.run_folder / "global_step_5" / "actor"
        await until(lambda: shard(named, 0).exists() and shard(named, 1).exists())


def shard(folder: Path, rank: int, what: str = "model") -> Path:
    return folder / f"{what}_world_size_{WORLD}_rank_{rank}.pt"


async def test_each_rank_saves_its_shard_in_the_background_as_it_was_at_the_call(
    ranks, where, log, sync_client
):
    folder = staged_path(where.run_folder, where.epoch, 5) / "actor"
    saved = await ranks(save_and_overwrite, folder)

    for rank, (expected, _) in enumerate(saved):
        state = read_state(shard(folder, rank))
        assert_equal({name: value.to_local() for name, value in state.items()}, expected)

    config = AutoConfig.from_pretrained(folder / "huggingface")
    assert (config.model_type, config.hidden_size) == ("qwen2", 64)
    assert (folder / "huggingface" / "generation_config.json").is_file()
    tokenizer = AutoTokenizer.from_pretrained(folder / "huggingface")
    assert tokenizer.decode(tokenizer.encode("sun>")) == "sun>"

    envelopes = [decode_envelope(entry.payload) for entry in await log.read()]
    saves = [
        envelope for envelope in envelopes if isinstance(envelope.event, SaveStarted | SaveFinished)
    ]
    for rank in range(WORLD):
        started, finished = (envelope.event for envelope in saves if envelope.producer.rank == rank)
        assert started.save_id == finished.save_id
        assert finished.slot.kind == "state_dict"
        assert finished.bytes == shard(folder, rank).stat().st_size
    assert len({envelope.event.slot for envelope in saves}) == WORLD

    # Both slots are what the trainer registers, so the step becomes ready with them.
    trainer = Publisher(
        SyncEventLog(sync_client, where.run_id), where.epoch, new_producer("trainer")
    )
    async with reducer_task(where.redis_url, where.run_id):
        await CheckpointCoordinator(trainer).register_and_monitor(
            5, is_state_dict=True, state_dict_thread_count=WORLD
        )
        assert len((await ready(log, "state_dict", 5)).saves) == WORLD


@pytest.mark.parametrize("how", ["helper", "engine"])
async def test_saved_shards_say_how_they_are_merged(ranks, where, tmp_path, how):
    folder = tmp_path / "actor"
    if how == "engine":
        await ranks(save_checkpoint, folder)
    else:
        await ranks(save_and_overwrite, folder)
    fsdp_config = json.loads((folder / "fsdp_config.json").read_text())
    assert fsdp_config == {"FSDP_version": 2, "world_size": WORLD}
    for rank in range(WORLD):
        for value in read_state(shard(folder, rank)).values():
            assert value.device_mesh.mesh_dim_names == ("fsdp",)


def test_defaults_of_generation_that_transformers_would_refuse_are_saved_too(
    policy_folder, tmp_path
):
    """As veRL's engine saves them: this project's engines copy the folder's file."""
    model, _ = load_policy(policy_folder)
    # Without do_sample, as the defaults of some released models are.
    model.generation_config.temperature = 0.6
    write_huggingface(tmp_path, model, tokenizer=None)
    written = json.loads((tmp_path / "generation_config.json").read_text())
    assert written["temperature"] == 0.6


async def test_a_save_has_finished_only_when_all_of_it_is_on_disk(ranks, where):
    folder = staged_path(where.run_folder, where.epoch, 5) / "actor"
    saved = await ranks(save_and_overwrite, folder)
    synced = set().union(*(paths for _, paths in saved))
    for rank, (_, paths) in enumerate(saved):
        path = shard(folder, rank)
        # Synced under its temporary name, then renamed, then the name itself synced.
        assert {str(path.with_name(f".{path.name}.tmp")), str(folder)} <= paths
    huggingface = [folder / "huggingface", *(folder / "huggingface").iterdir()]
    assert len(huggingface) > 3
    assert {str(path) for path in huggingface} <= saved[0][1]
    assert str(folder / ".fsdp_config.json.tmp") in saved[0][1]
    new_folders = [folder, folder.parent, folder.parent.parent, where.run_folder]
    assert {str(path.parent) for path in new_folders} <= synced, "the names of new folders"


async def test_a_shard_loads_in_a_process_that_knows_of_no_group(ranks, where, tmp_path):
    folder = tmp_path / "checkpoint"
    await ranks(_take_step, 1)  # so that the optimizer has a state
    await ranks(save_checkpoint, folder)
    code = (
        "import sys; from pathlib import Path;"
        "from trinity_workers.engines.state_files import read_state;"
        "model, optim = (read_state(Path(path)) for path in sys.argv[1:]);"
        "print(type(model['model.norm.weight']).__name__, len(optim['optimizer']['state']))"
    )
    command = [sys.executable, "-c", code, shard(folder, 1), shard(folder, 1, "optim")]
    done = await anyio.run_process(command, stderr=subprocess.DEVNULL)
    assert done.stdout.decode().split() == ["DTensor", "26"]


def test_a_file_that_would_execute_something_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "executed",))

    torch.save({"model": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(pickle.UnpicklingError):
        read_state(tmp_path / "evil.pt")
    assert not (tmp_path / "executed").exists()


def test_a_state_that_cannot_be_written_leaves_nothing(tmp_path):
    path = tmp_path / "model.pt"
    write_state(path, {"a": torch.ones(3)})
    with pytest.raises(AttributeError, match="pickle"):
        write_state(path, {"a": torch.ones(1000), "b": lambda: None})
    assert list(tmp_path.iterdir()) == [path]
    assert identical(read_state(path)["a"], torch.ones(3))


def save_checkpoint(rank: Rank, folder: Path) -> None:
    rank.objects.engine.save_checkpoint(str(folder))


def load_checkpoint(rank: Rank, folder: Path) -> None:
    rank.objects.engine.load_checkpoint(str(folder))


def replace_engine(rank: Rank) -> None:
    rank.objects.engine = _new_engine(rank.objects.where)


def everything(rank: Rank) -> dict[str, Any]:
    """Model, optimizer and scheduler, as plain tensors and values."""
    optimizer = rank.objects.engine.optimizer.state_dict()
    state = {
        f"{index}.{name}": value
        for index, values in optimizer["state"].items()
        for name, value in values.items()
    }
    tensors = dict(rank.objects.engine.module.state_dict()) | state
    return {
        "tensors": {
            name: value.to_local() if hasattr(value, "to_local") else value
            for name, value in tensors.items()
        },
        "groups": optimizer["param_groups"],
        "scheduler": rank.objects.engine.scheduler.state_dict(),
        "rng": torch.get_rng_state().tolist(),
    }


async def test_a_checkpoint_restores_everything_and_training_goes_on_identically(ranks, tmp_path):
    folder = tmp_path / "checkpoint"
    for seed in (1, 2):
        await ranks(_take_step, seed)
    await ranks(save_checkpoint, folder)
    at_save = await ranks(everything)
    norms = [await ranks(_take_step, seed) for seed in (3, 4)]
    at_end = await ranks(everything)

    await ranks(replace_engine)
    await ranks(_take_step, 9)
    await ranks(load_checkpoint, folder)
    for restored, saved in zip(await ranks(everything), at_save, strict=True):
        assert_equal(restored.pop("tensors"), saved.pop("tensors"))
        assert restored == saved
    assert [await ranks(_take_step, seed) for seed in (3, 4)] == norms
    for restored, saved in zip(await ranks(everything), at_end, strict=True):
        assert_equal(restored.pop("tensors"), saved.pop("tensors"))
        assert restored == saved


async def test_a_shard_that_is_missing_on_one_rank_loads_nothing_on_any(ranks, tmp_path):
    folder = tmp_path / "checkpoint"
    await ranks(_take_step, 1)
    await ranks(save_checkpoint, folder)
    await ranks(_take_step, 2)
    before = await ranks(_full_weights)
    shard(folder, 1, "optim").unlink()
    first, second = await ranks.answers(load_checkpoint, folder)
    assert isinstance(first, CheckpointDamaged) and isinstance(second, CheckpointDamaged)
    assert first.path == second.path == shard(folder, 1, "optim")
    (folder / MANIFEST).unlink()  # as of a checkpoint of an earlier version
    first, second = await ranks.answers(load_checkpoint, folder)
    assert isinstance(first, PeerFailed)
    assert "rank 1 failed: FileNotFoundError" in str(first)
    assert isinstance(second, FileNotFoundError)
    for now, then in zip(await ranks(_full_weights), before, strict=True):
        assert_equal(dict(now), dict(then))


async def test_a_checkpoint_that_one_rank_cannot_write_fails_on_all(ranks, tmp_path):
    folder = tmp_path / "checkpoint"
    shard(folder, 0).mkdir(parents=True)  # where a file is to be
    first, second = await ranks.answers(save_checkpoint, folder)
    assert isinstance(first, IsADirectoryError)
    assert isinstance(second, PeerFailed)


# --- training ---------------------------------------------------------------------------------


def settings(world: int) -> dict[str, dict[str, float]]:
    return {"trainer": {"ranks": world, "warmup_steps": 0}, "sync": {"timeout": 20.0}}


def make_worker(rank: Rank, config: RunConfig) -> tuple[str, int] | None:
    rank.objects.worker = TrainWorker(config, rank.number)
    return rank.objects.worker.address() if rank.number == 0 else None


def set_up_worker(rank: Rank, host: str, port: int) -> None:
    rank.objects.worker.setup(host, port)
    rank.objects.engine = rank.objects.worker._engine


def train(rank: Rank, groups: list[list[Experience]]) -> dict[str, float]:
    return rank.objects.worker.train_step(groups[rank.number :: dist.get_world_size()])


def shut_worker_down(rank: Rank) -> None:
    rank.objects.worker.shutdown()


@dataclass
class Training:
    metrics: list[dict[str, float]]
    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]


def train_from_the_start(rank: Rank, address, steps: list[list[list[Experience]]]) -> Training:
    set_up_worker(rank, *address)
    try:
        before = dict(_full_weights(rank))
        metrics = [train(rank, groups) for groups in steps]
        return Training(metrics, before, dict(_full_weights(rank)))
    finally:
        shut_worker_down(rank)


def train_alone(rank: Rank, config: RunConfig, steps: list[list[list[Experience]]]) -> Training:
    return train_from_the_start(rank, make_worker(rank, config), steps)


async def test_training_on_two_ranks_equals_training_on_one(processes, make_config, run_id):
    steps = [make_groups(run_id, seed) for seed in (1, 2, 3)]
    tokens = [
        sum(
            len(experience.turns[1].tokens)
            for group in steps[0][rank::WORLD]
            for experience in group
        )
        for rank in range(WORLD)
    ]
    assert tokens[0] > 3 * tokens[1], "the ranks' shares differ"

    config = make_config(**settings(1))
    [alone] = await Ranks(RankGroup(processes, 1))(train_alone, config, steps)
    both_ranks = Ranks(RankGroup(processes, WORLD))
    address, _ = await both_ranks(make_worker, make_config(**settings(WORLD)))
    together, second = await both_ranks(train_from_the_start, address, steps)

    assert together.metrics == second.metrics, "metrics are of all ranks"
    assert together.metrics[0]["response_tokens"] == sum(tokens)
    for both, expected in zip(together.metrics, alone.metrics, strict=True):
        assert both == pytest.approx(expected, abs=1e-5, rel=1e-5)
    for name, weights in alone.after.items():
        torch.testing.assert_close(together.after[name], weights, atol=1e-5, rtol=0)
    moved = max((after - alone.before[name]).abs().max() for name, after in alone.after.items())
    assert moved > 1e-3, "there was something to tell apart"


async def test_a_rank_without_groups_takes_the_step_with_the_others(processes, make_config, run_id):
    steps = [make_groups(run_id, 1, count=1)]
    [alone] = await Ranks(RankGroup(processes, 1))(train_alone, make_config(**settings(1)), steps)
    both_ranks = Ranks(RankGroup(processes, WORLD))
    address, _ = await both_ranks(make_worker, make_config(**settings(WORLD)))
    for result in await both_ranks(train_from_the_start, address, steps):
        assert result.metrics[0] == pytest.approx(alone.metrics[0], abs=1e-5, rel=1e-5)
        for name, weights in alone.after.items():
            torch.testing.assert_close(result.after[name], weights, atol=1e-5, rtol=0)


def surrogate(model, groups: list[list[Experience]]) -> torch.Tensor:
    """GRPO's loss by its definition, of each episode by itself, without padding."""
    losses = []
    for group in groups:
        rewards = [experience.reward for experience in group]
        mean, deviation = statistics.fmean(rewards), statistics.pstdev(rewards)
        for experience in group:
            prompt, response = ([*turn.tokens] for turn in experience.turns)
            whole = model(input_ids=torch.tensor([prompt + response])).logits[0]
            logits = whole[len(prompt) - 1 : -1]
            logprobs = logits.log_softmax(-1)[range(len(response)), response]
            ratio = (logprobs - torch.tensor([*experience.turns[1].logprobs])).exp()
            advantage = (experience.reward - mean) / (deviation + 1e-4)
            losses.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
    return torch.cat(losses).mean()


def gradients_of_a_step(rank: Rank, address, groups: list[list[Experience]]) -> Any:
    set_up_worker(rank, *address)
    try:
        metrics = train(rank, groups)
        parameters = rank.objects.engine.module.named_parameters()
        return metrics, {name: parameter.grad.full_tensor() for name, parameter in parameters}
    finally:
        shut_worker_down(rank)


async def test_a_step_of_the_default_algorithm_has_the_gradients_of_its_definition(
    processes, make_config, run_id, policy_folder
):
    groups = make_groups(run_id, 1)
    model, _ = load_policy(policy_folder)
    loss = surrogate(model, groups)
    torch.autograd.backward(loss)
    config = settings(WORLD)
    config["trainer"]["max_grad_norm"] = 1e9  # which clips nothing
    both_ranks = Ranks(RankGroup(processes, WORLD))
    address, _ = await both_ranks(make_worker, make_config(**config))
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert max(float(gradient.abs().max()) for gradient in expected.values()) > 1e-3
    for metrics, gradients in await both_ranks(gradients_of_a_step, address, groups):
        assert metrics["loss"] == pytest.approx(float(loss.detach()), abs=1e-6)
        assert 0.0 < metrics["pg_clipfrac"] < 1.0
        assert sorted(gradients) == sorted(expected)
        for name, value in expected.items():
            torch.testing.assert_close(gradients[name], value, atol=1e-6, rtol=1e-4)


async def test_reference_entropy_and_proximal_policy_are_computed_where_the_algorithm_asks(
    processes, make_config, run_id
):
    algorithm = {
        "kl": {"coefficient": 0.1},
        "entropy_coefficient": 0.01,
        "importance_sampling": {"ratio_to": "proximal", "weights": "token"},
    }
    config = make_config(algorithm=algorithm, **settings(WORLD))
    both_ranks = Ranks(RankGroup(processes, WORLD))
    address, _ = await both_ranks(make_worker, config)
    steps = [make_groups(run_id, seed) for seed in (1, 2)]
    (result, _) = await both_ranks(train_from_the_start, address, steps)
    first, second = result.metrics
    assert first["kl_loss"] == pytest.approx(0.0, abs=1e-9)
    assert second["kl_loss"] > 1e-6, "the reference stays where the run began"
    assert (first["ratio"], second["ratio"]) == pytest.approx((1.0, 1.0))
    assert first["entropy"] == pytest.approx(math.log(98), abs=0.2)
    assert first["rollout_corr/rollout_is_mean"] != pytest.approx(1.0, abs=1e-4)


@pytest.fixture
async def trainers(processes, make_config):
    """The two processes as the fleet's workers."""
    ranks = Ranks(RankGroup(processes, WORLD))
    address, _ = await ranks(make_worker, make_config(**settings(WORLD)))
    await ranks(set_up_worker, *address)
    yield ranks
    await ranks(shut_worker_down)


async def test_a_share_that_cannot_be_trained_on_fails_on_all_ranks_and_the_next_works(
    trainers, run_id
):
    groups = make_groups(run_id, 1)
    mixed = groups[0][:2] + groups[1][2:]
    first, second = await trainers.answers(train, [groups[0], mixed])
    assert isinstance(first, PeerFailed)
    assert isinstance(second, ValueError)
    first, second = await trainers(train, groups)
    assert first == second


def test_a_rank_computes_on_a_gpu_only_if_it_was_given_one():
    # Ray lets workers without a GPU of their own see all of them; they must not use them.
    assert compute_device(own_gpu=False) == torch.device("cpu")
    assert compute_device(own_gpu=True).type == ("cuda" if torch.cuda.is_available() else "cpu")
