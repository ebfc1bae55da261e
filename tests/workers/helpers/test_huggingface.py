"""The save of weights as a Hugging Face folder: bounded, in the background, and told."""

from __future__ import annotations

import logging
import re
import threading
from contextlib import closing
from types import SimpleNamespace

import pytest

from tests.support.errors import raises

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file  # noqa: E402

from tests.support.pipeline import events_of  # noqa: E402
from tests.support.tensors import assert_equal  # noqa: E402
from tests.support.waits import PATIENCE  # noqa: E402
from trinity_events import CheckpointCoordinator  # noqa: E402
from trinity_events.coordinator import DiskTooFull, staged_path  # noqa: E402
from trinity_events.errors import DeadlineExceeded, SaveError  # noqa: E402
from trinity_events.log import Publisher, SyncEventLog, new_producer  # noqa: E402
from trinity_schemas import SaveFailed, SaveFinished  # noqa: E402
from trinity_workers.helpers import save_huggingface  # noqa: E402
from trinity_workers.helpers.huggingface import QueueLimits, TensorQueue  # noqa: E402
from trinity_workers.runtime.collective_errors import CollectiveBroken  # noqa: E402

STEP = 3
logger = logging.getLogger(__name__)


class Engine:
    """Engine without ranks."""

    def __init__(self, tensors) -> None:
        self.module = SimpleNamespace()
        self.tensors = tensors
        self.gathered = []

    def get_per_tensor_param(self):
        for name, tensor in self.tensors.items():
            self.gathered.append(name)
            yield name, tensor

    def write_description(self, folder):
        (folder / "config.json").write_text("{}")


@pytest.fixture
def folder(publisher, tmp_path, run_id):
    return staged_path(tmp_path / run_id, publisher.epoch, STEP) / "actor"


@pytest.fixture
def coordinator(publisher, sync_client, tmp_path, run_id):
    log = SyncEventLog(sync_client, run_id)
    with closing(Publisher(log, publisher.epoch, new_producer("actor"))) as own:
        yield CheckpointCoordinator(own, tmp_path / run_id)


SMALL = QueueLimits(nbytes=1, deadline=PATIENCE)
"""Limits of a queue that holds one tensor, so that gathers wait for the save."""


def make_tensors(count=4, size=100):
    return {f"tensor.{number}": torch.full((size,), float(number)) for number in range(count)}


async def test_training_may_change_the_weights_as_soon_as_the_call_returns(
    coordinator, folder, log
):
    engine = Engine(make_tensors())
    expected = {name: tensor.clone() for name, tensor in engine.tensors.items()}
    save_huggingface(engine, str(folder), STEP, coordinator, logger)
    for tensor in engine.tensors.values():
        tensor.fill_(-1.0)
    coordinator.wait_all(PATIENCE)
    assert_equal(load_file(folder / "huggingface" / "model.safetensors"), expected)
    [finished] = await events_of(log, SaveFinished)
    assert finished.event.slot.kind == "state_dict"
    assert finished.event.digest is not None
    assert finished.event.path == str(
        (folder / "huggingface").relative_to(folder.parent.parent.parent)
    )


async def test_a_disk_that_fails_fails_the_save_and_every_tensor_is_gathered(
    coordinator, folder, log, monkeypatch
):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trinity_workers.engines.model_folder.WeightsWriter.add", full)
    engine = Engine(make_tensors())
    save_huggingface(engine, str(folder), STEP, coordinator, logger)
    assert engine.gathered == list(engine.tensors), "other ranks are inside the gathers"
    with raises(SaveError, __cause__=re.compile("No space left")):
        coordinator.wait_all(PATIENCE)
    [failed] = await events_of(log, SaveFailed)
    assert "No space left" in failed.event.message


async def test_a_folder_that_does_not_fit_is_not_written_and_every_tensor_is_gathered(
    coordinator, folder, log, monkeypatch
):
    save_huggingface(Engine(make_tensors()), str(folder), STEP, coordinator, logger)
    coordinator.wait_all(PATIENCE)
    [finished] = await events_of(log, SaveFinished)
    full = SimpleNamespace(free=finished.event.bytes - 1)
    monkeypatch.setattr("trinity_events.system.disk_space.shutil.disk_usage", lambda _: full)
    engine, following = Engine(make_tensors()), folder.with_name("following")
    save_huggingface(engine, str(following), STEP + 1, coordinator, logger, limits=SMALL)
    assert engine.gathered == list(engine.tensors), "other ranks are inside the gathers"
    with raises(SaveError, __cause__=re.compile("bytes free, and the save needs about")):
        coordinator.wait_all(PATIENCE)
    [failed] = await events_of(log, SaveFailed)
    assert failed.event.error_type == "DiskTooFull"
    assert not following.exists()


def test_the_first_save_needs_what_the_parameters_take_in_their_published_dtypes(
    coordinator, folder, monkeypatch
):
    engine = Engine(make_tensors())
    engine.module = torch.nn.Linear(100, 10)
    engine.published_dtypes = {"weight": torch.bfloat16}
    needed = 2 * 1000 + 4 * 10
    monkeypatch.setattr(
        "trinity_events.system.disk_space.shutil.disk_usage",
        lambda _: SimpleNamespace(free=needed - 1),
    )
    save_huggingface(engine, str(folder), STEP, coordinator, logger, limits=SMALL)
    with pytest.raises(SaveError) as failed:
        coordinator.wait_all(PATIENCE)
    [error] = failed.value.failures
    assert isinstance(error, DiskTooFull)
    assert (error.needed, error.free) == (needed, needed - 1)


async def test_a_gather_that_breaks_fails_the_save_and_leaves_no_folder_that_counts(
    coordinator, folder, log
):
    class Broken(Engine):
        def get_per_tensor_param(self):
            yield "tensor.0", self.tensors["tensor.0"]
            raise RuntimeError("a rank died")

    with raises(CollectiveBroken, fault="gather", step=STEP, reason="a rank died"):
        save_huggingface(Broken(make_tensors()), str(folder), STEP, coordinator, logger)
    with raises(SaveError, __cause__=re.compile("a rank died")):
        coordinator.wait_all(PATIENCE)
    [failed] = await events_of(log, SaveFailed)
    assert failed.event.error_type == "CollectiveBroken"
    assert not (folder / "huggingface" / "XXH128SUMS").exists()


def test_the_queue_holds_no_more_than_its_limit_and_one_tensor():
    queue, most = TensorQueue(1000, PATIENCE), 0
    lock = threading.Lock()
    tensors = make_tensors(50, 100)  # 400 bytes each

    def produce():
        for name, tensor in tensors.items():
            queue.add(name, tensor)
        queue.end()

    thread = threading.Thread(target=produce)
    thread.start()
    copies = {}
    with queue:
        for name, tensor in queue:
            with lock:
                most = max(most, queue._bytes)
            copies[name] = tensor
    thread.join(PATIENCE)
    assert_equal(copies, tensors)
    assert most <= 1000


def test_a_disk_that_does_not_take_a_tensor_in_time_is_told():
    queue = TensorQueue(1000, 0.01)
    queue.add("a", torch.zeros(200))
    with raises(DeadlineExceeded, missing="b was not written", deadline=0.01):
        queue.add("b", torch.zeros(200))


def test_a_tensor_larger_than_the_limit_passes_alone():
    queue = TensorQueue(10, PATIENCE)
    queue.add("a", torch.zeros(200))
    queue.end()
    assert [name for name, _ in queue] == ["a"]
