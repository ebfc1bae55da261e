"""The seeds' Megatron helpers on real ranks over Gloo, against a real server."""

from __future__ import annotations

import itertools
import logging
import os
import signal
from dataclasses import FrozenInstanceError, dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import anyio
import anyio.to_thread
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

import torch.distributed as dist  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from tests.support import megatron_ranks as at  # noqa: E402
from tests.support.failing_synchronizers import FailingSynchronizer  # noqa: E402
from tests.support.pipeline import announced, reducer_task, until  # noqa: E402
from tests.support.rank_processes import collect  # noqa: E402
from tests.support.tensors import identical  # noqa: E402
from tests.support.waits import PATIENCE  # noqa: E402
from trinity_events import CheckpointCoordinator, Synchronizer  # noqa: E402
from trinity_events.checkpoints.layout import MANIFEST  # noqa: E402
from trinity_events.coordinator import staged_path  # noqa: E402
from trinity_events.log import Publisher, SyncEventLog, new_producer  # noqa: E402
from trinity_events.server import open_client  # noqa: E402
from trinity_schemas import (  # noqa: E402
    ALIGNMENT,
    SaveFailed,
    SaveFinished,
    SaveStarted,
    StepFailed,
    StepReady,
    VersionPartPublished,
    decode_envelope,
)
from trinity_workers.engines.megatron import OptimizerOptions, ParallelLayout  # noqa: E402
from trinity_workers.helpers import (  # noqa: E402
    PublishFull,
    PublishShards,
    megatron_save_state_dict,
    megatron_sync_weight_nccl,
    megatron_upload_state_dict,
)
from trinity_workers.runtime.collective_errors import CollectiveBroken, PeerFailed  # noqa: E402

pytestmark = pytest.mark.megatron

TENSOR = ParallelLayout(tensor=2)
PIPELINE = ParallelLayout(pipeline=2)
EXPERTS = ParallelLayout(expert=2)
TRAINED = OptimizerOptions(learning_rate=3e-3)
GROUP_TIMEOUT = timedelta(seconds=10)
"""Of the group with the explorer, where one of its ranks dies."""
PATIENT = timedelta(seconds=PATIENCE)

logger = logging.getLogger(__name__)


@pytest.fixture
def where(publisher, redis_url, weights_url, run_id, tmp_path) -> SimpleNamespace:
    """What every rank is told."""
    return SimpleNamespace(
        run_id=run_id,
        epoch=publisher.epoch,
        redis_url=redis_url,
        weights_url=weights_url,
        run_folder=tmp_path / run_id,
    )


def synchronizer(rank, where, kind=Synchronizer):
    made = kind(
        where.run_id,
        where.epoch,
        redis_url=where.redis_url,
        weights_url=where.weights_url,
        role="actor",
        rank=rank.number,
        chunk_bytes=4096,
    )
    rank.exits.callback(made.close)
    return made


def coordinator(rank, where):
    log = SyncEventLog(open_client(where.redis_url), where.run_id)
    rank.exits.callback(log.close)
    publisher = Publisher(log, where.epoch, new_producer("actor", rank.number))
    return CheckpointCoordinator(publisher, where.run_folder)


async def on(ranks, function, *args):
    """What the function returned or raised on each rank, while the loop goes on."""
    return await anyio.to_thread.run_sync(lambda: ranks.answers(function, *args))


async def events(log, *kinds: type) -> list:
    """Return the log's events of these types so far."""
    read = [decode_envelope(entry.payload).event for entry in await log.read(limit=100_000)]
    return [event for event in read if isinstance(event, kinds)]


async def wait_for_event(log, kind: type) -> None:
    """Wait for an event of the type: a rank's publisher sends in a thread of its own."""

    async def is_there():
        return await events(log, kind)

    await until(is_there)


async def said_of(log, kind: type, step: int):
    """The first announcement of the type about the step."""
    with anyio.fail_after(PATIENCE):
        while True:
            for event in await announced(log, 1):
                if isinstance(event, kind) and event.step == step:
                    return event
            await anyio.sleep(0.01)


# --- weights in memory ------------------------------------------------------------------------


def upload(rank, where, step, kind=Synchronizer, sharded=False):
    made = synchronizer(rank, where, kind)
    strategy = PublishShards() if sharded else PublishFull()
    megatron_upload_state_dict(rank.objects.engine, made, step, logger, strategy=strategy)


@pytest.mark.parametrize(
    ("name", "world", "layout", "sharded"),
    [
        pytest.param("qwen2", 2, TENSOR, False, marks=pytest.mark.nightly),
        ("llama", 2, PIPELINE, False),
        pytest.param("qwen3-moe", 2, EXPERTS, False, marks=pytest.mark.nightly),
        ("qwen3", 4, ParallelLayout(tensor=2, pipeline=2), False),
        pytest.param("llama", 2, TENSOR, True, marks=pytest.mark.nightly),
        ("qwen3-moe", 2, EXPERTS, True),
        ("qwen3", 4, ParallelLayout(tensor=2, pipeline=2), True),
    ],
)
async def test_a_model_of_what_was_uploaded_equals_the_exported_weights_bit_for_bit(
    engine_ranks, megatron_folder, where, log, tmp_path, name, world, layout, sharded
):
    ranks = await anyio.to_thread.run_sync(engine_ranks, name, world, layout, TRAINED)
    ranks(at.train, [at.padded_batch(1)])
    exported = ranks(at.full_weights)[0]
    async with reducer_task(where.redis_url, where.run_id):
        assert await on(ranks, upload, where, 1, Synchronizer, sharded) == [None] * world
        explorer = Synchronizer(
            where.run_id, 0, redis_url=where.redis_url, weights_url=where.weights_url
        )
        trainer = Synchronizer(where.run_id, where.epoch, redis_url=where.redis_url)
        await anyio.to_thread.run_sync(trainer.commit, 1)
        with explorer.pull(await said_of(log, StepReady, 1)) as version:
            streamed = {key: value.clone() for key, value in version.tensors()}
            parts = [manifest.tensors for manifest, _ in version.parts]
        explorer.close()
        trainer.close()
    at.assert_same(streamed, exported)
    sent = sum(tensor.nbytes for tensors in parts for tensor in tensors)
    assert sent == sum(value.nbytes for value in exported.values()), "nothing travels twice"
    assert len(parts) == (world if sharded else 1)
    folder = tmp_path / "streamed"
    folder.mkdir()
    save_file(streamed, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_bytes((megatron_folder(name) / "config.json").read_bytes())
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    loaded.save_pretrained(tmp_path / "again")
    at.assert_same(at.in_folder(tmp_path / "again"), exported)


async def test_rank_0_failing_in_the_middle_of_a_stream_fails_all_and_the_next_one_works(
    engine_ranks, where, log
):
    ranks = await anyio.to_thread.run_sync(engine_ranks, "qwen2", 2, PIPELINE, TRAINED)
    async with reducer_task(where.redis_url, where.run_id):
        own, peers = await on(ranks, upload, where, 1, FailingSynchronizer)
        assert isinstance(own, OSError)
        assert isinstance(peers, PeerFailed)
        assert str(peers) == "rank 0 failed: OSError: no room for the third tensor"
        failed = await said_of(log, StepFailed, 1)
        assert "no room for the third tensor" in failed.reason
        assert await on(ranks, upload, where, 1) == [None, None]
        trainer = Synchronizer(where.run_id, where.epoch, redis_url=where.redis_url)
        await anyio.to_thread.run_sync(trainer.commit, 1)
        trainer.close()
        await said_of(log, StepReady, 1)
    losses = ranks(at.train, [at.padded_batch(2)])
    assert any(values[0] > 0 for values in losses)


# --- a collective group -----------------------------------------------------------------------


def broadcast(rank, place, shapes, timeout, dies_after=None):
    """Rank 0 of the trainer in a group with an explorer, which is this world's last rank."""
    group = None
    if rank.number in {0, 2}:
        store = dist.FileStore(str(place), 2)
        prefixed = dist.PrefixStore("update", store)
        group = dist.ProcessGroupGloo(prefixed, rank.number // 2, 2, timeout)
    if rank.number < 2:
        return megatron_sync_weight_nccl(rank.objects.engine, group)
    received = []
    for shape in shapes:
        if len(received) == dies_after:
            os.kill(os.getpid(), signal.SIGKILL)
        tensor = torch.empty(shape)
        group.broadcast(tensor, 0).wait()
        received.append(tensor)
    return received


def imported(rank):
    """Do nothing: to be asked it, a process imports this module, for longer than a group waits."""


def broadcasts(ranks, *calls):
    """What two ranks of a trainer and an explorer answer, each asked for a call of its own."""
    ranks.processes.start(3)
    ranks.processes.call(range(3), imported)
    return collect([ranks.processes.ask(rank, *call) for rank, call in enumerate(calls)])


def test_a_broadcast_brings_every_tensor_in_the_streams_order(engine_ranks, tmp_path):
    ranks = engine_ranks("qwen3", 2, TENSOR)
    exported = ranks(at.full_weights)[0]
    call = (broadcast, tmp_path / "store", [value.shape for value in exported.values()], PATIENT)
    first, second, received = broadcasts(ranks, call, call, call)
    assert first is None and second is None
    for (key, value), tensor in zip(exported.items(), received, strict=True):
        assert identical(tensor, value), key


def broadcast_to_nobody(rank):
    megatron_sync_weight_nccl(rank.objects.engine, None)


def test_a_broadcast_without_a_group_fails_on_all_ranks_after_the_gathers(engine_ranks):
    ranks = engine_ranks("qwen2", 2, TENSOR)
    own, peers = ranks.answers(broadcast_to_nobody)
    assert isinstance(own, ValueError)
    assert isinstance(peers, PeerFailed)
    ranks(at.full_weights)


# --- files ------------------------------------------------------------------------------------


def save_state(rank, where, folder, step):
    megatron_save_state_dict(
        rank.objects.engine, str(folder), step, coordinator(rank, where), logger
    )
    return rank.objects.engine.checkpoint_manager.checkpoint_save_contents


async def test_a_state_dict_save_is_one_save_of_the_model_alone(engine_ranks, where, log):
    ranks = await anyio.to_thread.run_sync(engine_ranks, "qwen3", 2, TENSOR, TRAINED)
    folder = staged_path(where.run_folder, where.epoch, 5) / "actor"
    async with reducer_task(where.redis_url, where.run_id, where.run_folder.parent):
        contents = await on(ranks, save_state, where, folder, 5)
        assert contents == [["model", "optimizer", "extra"]] * 2, "they are put back"
        await wait_for_event(log, SaveFinished)
        started, finished = await events(log, SaveStarted, SaveFinished)
        assert isinstance(finished, SaveFinished) and started.save_id == finished.save_id
        assert finished.slot.kind == "state_dict"
        assert finished.bytes == sum(
            path.stat().st_size
            for path in folder.rglob("*")
            if path.is_file() and path.name != MANIFEST
        )
        assert {path.name for path in folder.iterdir()} == {"model", "huggingface", MANIFEST}
        trainer = CheckpointCoordinator(
            Publisher(
                SyncEventLog(open_client(where.redis_url), where.run_id),
                where.epoch,
                new_producer("trainer"),
            )
        )
        await trainer.register_and_monitor(5, is_state_dict=True, state_dict_thread_count=1)
        await said_of(log, StepReady, 5)


async def test_a_save_that_cannot_be_written_fails_everywhere_and_puts_the_contents_back(
    engine_ranks, where, log, tmp_path
):
    ranks = await anyio.to_thread.run_sync(engine_ranks, "qwen2", 2, TENSOR)
    (tmp_path / "file").write_text("where a folder is to be")
    own, peers = await on(ranks, save_state, where, tmp_path / "file" / "actor", 5)
    assert isinstance(own, NotADirectoryError)
    assert isinstance(peers, PeerFailed)
    await wait_for_event(log, SaveFailed)
    failed = await events(log, SaveFailed)
    assert [event.error_type for event in failed] == ["NotADirectoryError"]
    assert ranks(contents_of) == [["model", "optimizer", "extra"]] * 2


def contents_of(rank):
    return rank.objects.engine.checkpoint_manager.checkpoint_save_contents


@dataclass
class VerlConfig:
    """As veRL's: what it was made with cannot be changed."""

    async_save: bool

    def __setattr__(self, name, value):
        if name in self.__dict__:
            raise FrozenInstanceError(name)
        super().__setattr__(name, value)


class VerlEngine:
    """What the helpers rely on in veRL's Megatron engine, by its own spelling."""

    def __init__(self) -> None:
        self.checkpoint_mananager = SimpleNamespace(
            checkpoint_save_contents=["model", "optimizer", "extra"],
            checkpoint_config=VerlConfig(async_save=True),
        )

    def save_checkpoint(self, local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None):
        manager = self.checkpoint_mananager
        assert not manager.checkpoint_config.async_save, "on disk on return"
        Path(local_path).mkdir(parents=True, exist_ok=True)
        text = f"{manager.checkpoint_save_contents} of {global_step}"
        Path(local_path, f"rank_{dist.get_rank()}").write_text(text)

    def get_per_tensor_param(self):
        weight = torch.arange(3.0)  # tied: the last stage has it too
        return iter([("tied", weight), ("other", weight + 1), ("tied", weight)]), None


def save_verl(rank, where, folder):
    engine = VerlEngine()
    megatron_save_state_dict(engine, str(folder), 7, coordinator(rank, where), logger)
    megatron_upload_state_dict(engine, synchronizer(rank, where), 7, logger)
    manager = engine.checkpoint_mananager
    return manager.checkpoint_save_contents, manager.checkpoint_config.async_save


async def test_verls_engine_is_taken_as_it_is(rank_group, where, log, tmp_path):
    ranks = await anyio.to_thread.run_sync(rank_group, 2)
    for contents, background in ranks(save_verl, where, tmp_path / "actor"):
        assert contents == ["model", "optimizer", "extra"]
        assert background
    assert (tmp_path / "actor" / "rank_1").read_text() == "['model'] of 7"
    await wait_for_event(log, VersionPartPublished)
    [published] = await events(log, VersionPartPublished)
    assert (published.tensors, published.bytes) == (2, ALIGNMENT + 12)


# --- a rank that dies -------------------------------------------------------------------------


def die_or(rank, dies, at_collective, function, *args):
    """Run the function; the rank that is to die does so when it enters that collective."""
    if rank.number == dies:
        count = itertools.count(1)

        def deadly(real):
            def collective(*given, **keywords):
                if next(count) == at_collective:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*given, **keywords)

            return collective

        for name in ("all_gather", "all_reduce", "barrier", "broadcast"):
            setattr(dist, name, deadly(getattr(dist, name)))
    return function(rank, *args)


@pytest.fixture
def mortal_ranks(rank_processes, engine_ranks):
    """Ranks of which some die; others take their places for the next test."""
    yield engine_ranks
    rank_processes.end()


@pytest.mark.parametrize(
    ("what", "at_collective", "dies", "layout"),
    [
        pytest.param("upload", 1, 1, TENSOR, marks=pytest.mark.nightly),
        pytest.param("upload", 5, 0, TENSOR, marks=pytest.mark.nightly),
        ("upload", 5, 1, PIPELINE),
        ("save", 1, 0, TENSOR),
        pytest.param("save", 1, 1, PIPELINE, marks=pytest.mark.nightly),
        pytest.param("save", 2, 0, PIPELINE, marks=pytest.mark.nightly),
        pytest.param("save", 2, 1, TENSOR, marks=pytest.mark.nightly),
    ],
)
async def test_a_rank_killed_in_a_collective_fails_the_others_and_the_log_says_the_step_and_why(
    mortal_ranks, where, log, tmp_path, what, at_collective, dies, layout
):
    ranks = await anyio.to_thread.run_sync(mortal_ranks, "qwen3", 2, layout)
    async with reducer_task(where.redis_url, where.run_id):
        call = (upload, where, 3) if what == "upload" else (save_state, where, tmp_path / "a", 3)
        with anyio.fail_after(PATIENCE):
            answers = await on(ranks, die_or, dies, at_collective, *call)
        assert isinstance(answers[dies], ProcessLookupError)
        assert isinstance(answers[1 - dies], CollectiveBroken)
        failed = await said_of(log, StepFailed, 3)
        assert failed.kind == ("weights" if what == "upload" else "state_dict")
        assert "a rank died or was too slow" in failed.reason


@pytest.mark.parametrize("dies", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_a_rank_killed_in_a_broadcast_fails_the_other_and_the_explorer(
    mortal_ranks, tmp_path, dies
):
    ranks = mortal_ranks("qwen3", 2, TENSOR)
    shapes = [value.shape for value in ranks(at.full_weights)[0].values()]
    call = (broadcast, tmp_path / "store", shapes, GROUP_TIMEOUT)
    deadly = (die_or, dies, 5, *call)
    answers = broadcasts(ranks, deadly, deadly, call)
    assert isinstance(answers[dies], ProcessLookupError)
    assert isinstance(answers[1 - dies], CollectiveBroken)
    assert isinstance(answers[2], RuntimeError), "within its group's timeout"


def test_an_explorer_killed_in_a_broadcast_fails_all_ranks_after_the_gathers(
    mortal_ranks, tmp_path
):
    ranks = mortal_ranks("qwen3", 2, TENSOR)
    shapes = [value.shape for value in ranks(at.full_weights)[0].values()]
    call = (broadcast, tmp_path / "store", shapes, GROUP_TIMEOUT)
    own, peers, gone = broadcasts(ranks, call, call, (*call, 2))
    assert isinstance(gone, ProcessLookupError)
    assert isinstance(own, CollectiveBroken)
    assert "a rank that receives them died" in str(own)
    assert isinstance(peers, PeerFailed)
    ranks(at.full_weights)  # the trainer's own collectives still match


def stop_or(rank, stops, function, *args):
    """Run the function; the rank that is to stop does so before, as one that hangs."""
    if rank.number == stops:
        os.kill(os.getpid(), signal.SIGSTOP)
    return function(rank, *args)


def test_a_rank_that_hangs_in_a_training_step_fails_the_others_within_the_engines_timeout(
    mortal_ranks,
):
    ranks = mortal_ranks("qwen3", 2, TENSOR, TRAINED, {"timeout": timedelta(seconds=8)})
    call = (stop_or, 1, at.train, [at.padded_batch(1)])
    answer, _ = [ranks.processes.ask(rank, *call) for rank in (0, 1)]
    # And not the 30 minutes of megatron-core.
    with pytest.raises(RuntimeError, match="Timed out waiting 8000ms"):
        answer(PATIENCE)


@pytest.mark.parametrize(
    ("layout", "dies"),
    [
        pytest.param(TENSOR, 1, marks=pytest.mark.nightly),
        (PIPELINE, 1),
        pytest.param(PIPELINE, 0, marks=pytest.mark.nightly),
    ],
)
def test_a_rank_killed_in_a_training_step_fails_the_others(mortal_ranks, layout, dies):
    ranks = mortal_ranks("qwen3", 2, layout, TRAINED)
    batch = [at.padded_batch(1)]
    answers = ranks.answers(die_or, dies, 3, at.train, batch)
    assert isinstance(answers[dies], ProcessLookupError)
    assert isinstance(answers[1 - dies], RuntimeError)
