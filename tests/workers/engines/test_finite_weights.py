"""Weights that are not finite are neither published, saved, exported, loaded nor resumed from."""

from __future__ import annotations

import logging
import math
import pickle
from contextlib import closing
from pathlib import Path
from unittest.mock import patch

import anyio.to_thread
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.support.fsdp_runs import Where  # noqa: E402
from tests.support.pipeline import events_of  # noqa: E402
from tests.support.poisoned_folders import POISONED, poisoned_copy  # noqa: E402
from tests.support.rank_processes import Rank  # noqa: E402
from tests.support.waits import PATIENCE  # noqa: E402
from trinity_events import CheckpointCoordinator, Synchronizer  # noqa: E402
from trinity_events.errors import SaveError  # noqa: E402
from trinity_events.log import Publisher, SyncEventLog, new_producer  # noqa: E402
from trinity_events.server import open_client  # noqa: E402
from trinity_schemas import SaveFailed, SaveFinished, VersionPartPublished  # noqa: E402
from trinity_workers.conversion.convert import convert  # noqa: E402
from trinity_workers.engines import state_files  # noqa: E402
from trinity_workers.engines.fsdp import FSDPEngine, frozen_policy  # noqa: E402
from trinity_workers.helpers import (  # noqa: E402
    PublishFull,
    PublishShards,
    PublishSnapshot,
    fsdp_save_state_dict,
    fsdp_upload_state_dict,
    save_huggingface,
)
from trinity_workers.helpers.publishing import drain  # noqa: E402
from trinity_workers.learning.adapters import policy_loader  # noqa: E402
from trinity_workers.learning.finite import NonFiniteWeights, check_finite  # noqa: E402
from trinity_workers.learning.lora_settings import LoraConfig  # noqa: E402
from trinity_workers.learning.policy import load_policy  # noqa: E402
from trinity_workers.learning.values import load_critic  # noqa: E402
from trinity_workers.runtime.collective_errors import PeerFailed  # noqa: E402

CPU = torch.device("cpu")
FLOATS = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    *(torch.float8_e5m2, torch.complex64),
]
logger = logging.getLogger(__name__)


# --- the check --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_value_among_the_largest_and_smallest_is_found(dtype, value):
    largest = torch.finfo(dtype).max
    values = [largest, -largest, 0.0, largest, largest, 1.0]
    tensor = torch.tensor(values, dtype=torch.float64).to(dtype)
    check_finite([("tensor", tensor), ("empty", tensor[:0])], "here")
    tensor[4] = value
    with pytest.raises(NonFiniteWeights) as raised:
        check_finite([("whole", torch.ones(3)), ("tensor", tensor[::2])], "here")
    error = pickle.loads(pickle.dumps(raised.value))
    assert (error.tensor, error.place, error.count, error.size) == ("tensor", "here", 1, 3)
    assert str(error).startswith("1 of 3 values of tensor in here are not finite")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu], ids=str)
def test_formats_without_infinity_have_a_nan_that_is_found(dtype):
    tensor = torch.tensor([0x38, 0xFF, 0x38], dtype=torch.uint8).view(dtype)
    check_finite([("tensor", tensor[:1])], "here")
    with pytest.raises(NonFiniteWeights) as raised:
        check_finite([("tensor", tensor)], "here")
    assert (raised.value.count, raised.value.size) == (1, 3)


def test_integers_tensors_without_values_and_exempt_names_are_not_checked():
    tensors = [
        ("integers", torch.ones(3, dtype=torch.int64)),
        ("flags", torch.ones(3, dtype=torch.bool)),
        ("meta", torch.empty(3, device="meta")),
        ("exempt", torch.tensor([math.nan])),
    ]
    check_finite(tensors, "here", exempt={"exempt"})


def test_the_first_of_many_tensors_is_named():
    tensors = [(f"tensor.{number}", torch.zeros(2)) for number in range(200)]
    for number in (150, 70, 190):
        tensors[number][1][1] = math.inf
    with pytest.raises(NonFiniteWeights) as raised:
        check_finite(tensors, "here")
    assert raised.value.tensor == "tensor.70"


# --- FSDP: publishing and saving --------------------------------------------------------------


def poison(engine: FSDPEngine, rank: Rank) -> None:
    """Make a value of the last rank's shard NaN; buffers may be infinite, and one is."""
    module = engine.module
    module.model.layers[0].mlp.register_buffer("mask", torch.full((3,), -math.inf))
    if rank.number == rank.world - 1:
        dict(module.named_parameters())[POISONED].detach().to_local()[-1, -1] = math.nan


def upload_poisoned(rank: Rank, where: Where, name: str, *, is_poisoned: bool = True) -> None:
    engine = FSDPEngine(where.model_folder, device=CPU, learning_rate=1e-3)
    poison(engine, rank)
    if not is_poisoned:
        dict(engine.module.named_parameters())[POISONED].detach().to_local().zero_()
    strategy = {
        "full": PublishFull,
        "shards": PublishShards,
        "snapshot": lambda: PublishSnapshot(PATIENCE),
    }[name]()
    urls = {"redis_url": where.redis_url, "weights_url": where.weights_url}
    synchronizer = Synchronizer(where.run_id, where.epoch, role="actor", rank=rank.number, **urls)
    with closing(synchronizer):
        try:
            fsdp_upload_state_dict(engine, synchronizer, 1, logger, strategy=strategy)
            strategy.close()
        finally:
            synchronizer.flush()


@pytest.mark.parametrize("name", ["full", "shards", "snapshot"])
async def test_a_version_with_a_shard_that_is_not_finite_fails_and_is_never_whole(
    rank_group, where, log, name
):
    ranks = rank_group(2)
    answers = await anyio.to_thread.run_sync(ranks.answers, upload_poisoned, where, name)
    own = [error for error in answers if isinstance(error, NonFiniteWeights)]
    assert [error.tensor for error in own] == [POISONED]
    if name != "snapshot":  # whose other ranks have sent their parts
        assert sum(isinstance(error, PeerFailed) for error in answers) == 1
        assert not await events_of(log, VersionPartPublished)
    failures = [entry.event for entry in await events_of(log, SaveFailed)]
    [failed] = [event for event in failures if not event.followed]
    assert failed.error_type == "NonFiniteWeights"
    assert POISONED in failed.message
    assert len(await events_of(log, VersionPartPublished)) == (name == "snapshot")


@pytest.mark.parametrize("name", ["full", "shards"])
async def test_a_version_with_an_infinite_buffer_is_published(rank_group, where, log, name):
    def upload() -> None:
        rank_group(1)(upload_poisoned, where, name, is_poisoned=False)

    await anyio.to_thread.run_sync(upload)
    assert len(await events_of(log, VersionPartPublished)) == 1


def save_poisoned(rank: Rank, where: Where, form: str) -> list[BaseException]:
    """Let a rank save its poisoned model or optimizer; return what failed in the saves."""
    engine = FSDPEngine(where.model_folder, device=CPU, learning_rate=1e-3)
    poison(engine, rank)
    log = SyncEventLog(open_client(where.redis_url), where.run_id)
    with (
        closing(log),
        closing(Publisher(log, where.epoch, new_producer("actor", rank.number))) as publisher,
    ):
        coordinator = CheckpointCoordinator(publisher, where.run_folder)
        save = fsdp_save_state_dict if form == "shards" else save_huggingface
        save(engine, str(where.run_folder / "actor"), 1, coordinator, logger)
        try:
            coordinator.wait_all(PATIENCE)
        except SaveError as error:
            return list(error.failures)
    return []


@pytest.mark.parametrize("form", ["shards", "folder"])
async def test_a_save_of_parameters_that_are_not_finite_fails_and_is_not_complete(
    rank_group, where, log, form
):
    [[error]] = await anyio.to_thread.run_sync(rank_group(1), save_poisoned, where, form)
    assert isinstance(error, NonFiniteWeights)
    assert error.tensor == POISONED
    assert error.place.startswith(str(where.run_folder))
    [failed] = await events_of(log, SaveFailed)
    assert failed.event.error_type == "NonFiniteWeights"
    assert not await events_of(log, SaveFinished)
    files = {path.name for path in where.run_folder.rglob("*") if path.is_file()}
    assert not {name for name in files if name.endswith((".pt", ".safetensors", "SUMS"))}


def test_an_optimizers_state_that_is_not_finite_is_not_written(tmp_path):
    state = {"optimizer": {"state": {0: {"exp_avg_sq": torch.tensor([1.0, math.inf])}}}}
    with pytest.raises(NonFiniteWeights) as raised:
        state_files.write_state(tmp_path / "optim.pt", state)
    assert raised.value.tensor == "optimizer.state.0.exp_avg_sq"
    assert not list(tmp_path.iterdir())


def test_of_tensors_that_are_broadcast_all_are_gathered_and_none_is_sent_after_the_bad_one():
    sent: list[str] = []

    class Sink:
        def add(self, name: str, tensor: torch.Tensor) -> None:
            sent.append(name)

    tensors = iter([(f"tensor.{number}", torch.tensor([1.0])) for number in range(4)])
    bad = ("bad", torch.tensor([math.nan]))
    error = drain((each for each in [next(tensors), bad, *tensors]), Sink(), None)
    assert isinstance(error, NonFiniteWeights)
    assert error.tensor == "bad"
    assert sent == ["tensor.0"]
    assert not list(tensors)


# --- loading ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def poisoned_folder(policy_folder, tmp_path_factory) -> Path:
    return poisoned_copy(policy_folder, tmp_path_factory.mktemp("poisoned"))


LOADERS = {"policy": load_policy, "critic": load_critic, "adapters": None}


@pytest.mark.parametrize("kind", LOADERS)
def test_a_folder_with_a_weight_that_is_not_finite_is_not_loaded(poisoned_folder, kind):
    load = LOADERS[kind]
    if load is None:
        pytest.importorskip("peft")
        load = policy_loader(LoraConfig(rank=2), 0)
    with pytest.raises(NonFiniteWeights) as raised:
        load(poisoned_folder, "bfloat16")
    assert (raised.value.tensor, raised.value.count) == (POISONED, 1)
    assert raised.value.place == str(poisoned_folder)


def load_frozen(rank: Rank, folder: Path) -> None:
    frozen_policy(folder, device=CPU)


def test_a_reference_or_a_teacher_with_such_a_weight_is_not_loaded(rank_group, poisoned_folder):
    [error] = rank_group(1).answers(load_frozen, poisoned_folder)
    assert isinstance(error, NonFiniteWeights)


def resume_poisoned(rank: Rank, model: Path, folder: Path, part: str) -> tuple[Exception, bool]:
    """Save a checkpoint whose model or optimizer is not finite on the last rank, and load it.

    Returns the error, and True if the engine that was to load it kept its weights.
    """
    engine = FSDPEngine(model, device=CPU, learning_rate=1e-3)
    engine.optimizer_step(engine.module(torch.tensor([[10, 20, 30]])).logits.square().mean())
    if part == "model":
        poison(engine, rank)
        del engine.module.model.layers[0].mlp.mask
    elif rank.number == rank.world - 1:
        next(iter(engine.optimizer.state.values()))["exp_avg"].to_local()[-1] = math.nan
    with patch.object(state_files, "check_finite"):
        engine.save_checkpoint(str(folder))
    fresh = FSDPEngine(model, device=CPU, learning_rate=1e-3)
    before = [parameter.detach().to_local().clone() for parameter in fresh.module.parameters()]
    with pytest.raises((NonFiniteWeights, PeerFailed)) as raised:
        fresh.load_checkpoint(str(folder))
    after = [parameter.detach().to_local() for parameter in fresh.module.parameters()]
    return raised.value, all(map(torch.equal, before, after))


@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_a_run_does_not_resume_from_shards_that_are_not_finite_on_one_rank(
    rank_group, policy_folder, tmp_path, part
):
    [(other, unchanged), (own, also_kept)] = rank_group(2)(
        resume_poisoned, policy_folder, tmp_path, part
    )
    assert isinstance(own, NonFiniteWeights)
    assert isinstance(other, PeerFailed)
    assert str(tmp_path) in own.place
    assert unchanged, "nothing is loaded on any rank"
    assert also_kept, "nothing is loaded on any rank"


# --- conversion -------------------------------------------------------------------------------


def save_shards(rank: Rank, model: Path, folder: Path) -> None:
    engine = FSDPEngine(model, device=CPU, learning_rate=1e-3)
    poison(engine, rank)
    del engine.module.model.layers[0].mlp.mask
    with patch.object(state_files, "check_finite"):
        engine.save_checkpoint(str(folder))


def test_shards_that_are_not_finite_are_not_converted(rank_group, policy_folder, tmp_path):
    rank_group(2)(save_shards, policy_folder, tmp_path / "source")
    with pytest.raises(NonFiniteWeights) as raised:
        convert(tmp_path / "source", tmp_path / "target")
    assert raised.value.tensor == POISONED
    assert not (tmp_path / "target").exists()
