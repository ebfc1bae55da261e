"""Versions that are files: exactly the announced bytes, from wherever the folder lies."""

from __future__ import annotations

import hashlib
import json
from contextlib import closing
from pathlib import Path

import pytest
import torch
import xxhash

from tests.support.errors import raises, raises_from
from tests.support.pipeline import accept_reports, events_of, reducer_task
from tests.support.tensors import assert_equal, identical
from tests.support.weight_versions import awkward
from tests.support.weight_versions import ready as announced_ready
from trinity_events import CheckpointCoordinator, Synchronizer
from trinity_events.checkpoints.layout import FILE_DIGESTS, MODEL_FOLDER, final_name
from trinity_events.coordinator import staged_path
from trinity_events.core.file_versions import WEIGHTS_SAVE, weights_save
from trinity_events.errors import CheckpointHeld, IncompatibleWeights, VersionNotStored
from trinity_events.log import Publisher, SyncEventLog, new_producer
from trinity_events.weights.errors import CorruptFile, UnsupportedWeights
from trinity_schemas import (
    SaveProof,
    Slot,
    StepReady,
    StepRef,
    VersionRefused,
    WeightsApplied,
)
from trinity_workers.engines.model_folder import seal, write_model_folder

STEP = 7


def describe(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


@pytest.fixture
def run_folder(tmp_path, run_id):
    return tmp_path / run_id


@pytest.fixture
def explorer(redis_url, run_id, run_folder):
    made = Synchronizer(
        run_id, 0, redis_url=redis_url, role="explorer", rank=1, checkpoint_folder=run_folder
    )
    with closing(made):
        yield made


@pytest.fixture
def saved(run_folder):
    """Write tensors below a folder of the run; returns the announcement that they would have."""

    def save(tensors, place: str, *, path: str | None = None, shard_bytes: int = 1 << 20):
        folder = run_folder / place / Path(*MODEL_FOLDER)
        nbytes = write_model_folder(folder, describe, tensors.items(), shard_bytes=shard_bytes)
        return ready(folder, path, nbytes)

    return save


def ready(folder: Path, path: str | None = None, nbytes: int = 0, name: str = WEIGHTS_SAVE):
    listed = (folder / FILE_DIGESTS).read_bytes()
    slot = Slot(step=STEP, kind="state_dict", role="actor", rank=0, name=name)
    digest = f"sha256:{hashlib.sha256(listed).hexdigest()}"
    proof = SaveProof(slot=slot, save_id="one", bytes=nbytes, digest=digest)
    return StepReady(
        epoch=1, step=STEP, kind="state_dict", caused_by="1-0", saves=(proof,), path=path
    )


@pytest.mark.parametrize("shard_bytes", [1 << 20, 200], ids=["one file", "several files"])
def test_every_tensor_comes_bit_for_bit(explorer, saved, shard_bytes):
    event = saved(awkward(), final_name(STEP), shard_bytes=shard_bytes)
    with explorer.pull(event) as version:
        assert len(version.parts) == 1 if shard_bytes > 200 else len(version.parts) > 5
        assert_equal(dict(version.tensors()), awkward())
        assert (version.ref, version.digest) == (StepRef(1, STEP), event.saves[0].digest)


async def test_an_explorer_says_which_version_it_serves_by_its_digest(explorer, saved, log):
    model, source = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    event = saved(source.state_dict(), final_name(STEP))
    for take in (explorer.apply, explorer.load):
        torch.nn.init.zeros_(model.weight)
        take(model, event)
        assert identical(model.weight, source.weight)
    explorer.flush()
    await accept_reports(log)
    applied = [envelope.event for envelope in await events_of(log, WeightsApplied)]
    assert {(event.version, event.digest) for event in applied} == {
        (StepRef(1, STEP), event.saves[0].digest)
    }


def test_a_model_in_another_dtype_gets_what_its_dtype_makes_of_the_weights(explorer, saved):
    source = torch.nn.Linear(3, 2)
    model = torch.nn.Linear(3, 2).to(torch.bfloat16)
    event = saved(source.state_dict(), final_name(STEP))
    with pytest.raises(IncompatibleWeights):
        explorer.apply(model, event)
    explorer.apply(model, event, cast=True)
    assert identical(model.weight, source.weight.to(torch.bfloat16))


def test_a_folder_is_read_before_and_after_it_gets_its_name(explorer, saved, run_folder):
    staged = ".staging/epoch_1_step_7_ab"
    event = saved(awkward(), staged, path=staged)
    with explorer.pull(event) as version:
        # The reducer renames the folder while it is read.
        (run_folder / staged).rename(run_folder / final_name(STEP))
        assert_equal(dict(version.tensors()), awkward())
    with explorer.pull(event) as version:
        assert_equal(dict(version.tensors()), awkward())


def damaged(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-3, 2)
        file.write(b"\x55")


def cut(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(70_000)


def emptied(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def listed_otherwise(folder: Path) -> None:
    (folder / "more").write_text("more")
    seal(folder)


@pytest.mark.parametrize("harm", [damaged, cut, emptied, listed_otherwise])
async def test_other_bytes_than_those_announced_are_refused_and_leave_the_model_alone(
    explorer, saved, run_folder, log, harm
):
    model = torch.nn.Linear(3, 2)
    before = model.weight.detach().clone()
    event = saved(torch.nn.Linear(3, 2).state_dict(), final_name(STEP))
    harm(run_folder / final_name(STEP) / Path(*MODEL_FOLDER))
    fault = "list" if harm is listed_otherwise else "digest"
    with raises(CorruptFile, fault=fault, step=STEP):
        explorer.apply(model, event)
    assert identical(model.weight, before)
    explorer.flush()
    await accept_reports(log)
    [refused] = await events_of(log, VersionRefused)
    assert refused.event.version == StepRef(1, STEP)
    assert not await events_of(log, WeightsApplied)


HEADERS = [
    {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
    {"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}},
    {"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}},
    {"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}},
    {"a": 3},
    [],
]


@pytest.mark.parametrize("header", HEADERS, ids=[str(header) for header in HEADERS])
def test_a_header_that_contradicts_itself_is_refused(explorer, saved, run_folder, header):
    saved({"a": torch.zeros(2)}, final_name(STEP))
    folder = run_folder / final_name(STEP) / Path(*MODEL_FOLDER)
    text = json.dumps(header).encode()
    for length in (len(text), len(text) + 9_000_000, 0):
        data = length.to_bytes(8, "little") + text + bytes(8)
        (folder / "model.safetensors").write_bytes(data)
        seal(folder)
        with (
            raises(CorruptFile, fault="contradiction", file="model.safetensors"),
            explorer.pull(ready(folder)),
        ):
            pass


def test_a_link_in_place_of_the_weights_is_not_followed(explorer, saved, run_folder, tmp_path):
    event = saved({"a": torch.zeros(2)}, final_name(STEP))
    weights = run_folder / final_name(STEP) / Path(*MODEL_FOLDER) / "model.safetensors"
    weights.rename(tmp_path / "elsewhere")
    weights.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"), explorer.pull(event):
        pass


def test_weights_that_are_not_here_are_said_to_be_missing_with_the_folder(
    explorer, saved, run_folder
):
    event = saved({"a": torch.zeros(2)}, final_name(STEP))
    (run_folder / final_name(STEP)).rename(run_folder / "elsewhere")
    with raises(VersionNotStored, fault="folder", place=str(run_folder)), explorer.pull(event):
        pass


async def test_a_step_is_held_while_it_is_read_and_one_that_is_being_removed_is_not_begun(
    explorer, saved, log, client
):
    event = saved({"a": torch.zeros(2)}, final_name(STEP))
    token, _ = await log.lead(60)
    with explorer.pull(event):
        assert await log.mark_deleting(token, [STEP]) == set()
    assert await log.mark_deleting(token, [STEP]) == {STEP}
    with raises_from(CheckpointHeld, fault="removing", step=STEP), explorer.pull(event):
        pass


def test_a_state_dict_in_another_form_is_no_version(explorer, saved):
    event = saved({"a": torch.zeros(2)}, final_name(STEP))
    [proof] = event.saves
    other = SaveProof(
        slot=Slot(step=STEP, kind="state_dict", role="actor", rank=0, name="model_state_dict"),
        save_id="one",
        bytes=1,
        digest=proof.digest,
    )
    shards = StepReady(
        epoch=1, step=STEP, kind="state_dict", caused_by="1-0", saves=(other,), path=None
    )
    assert weights_save(shards) is None
    assert weights_save(event) == proof
    with raises(UnsupportedWeights, fault="format", step=STEP), explorer.pull(shards):
        pass


def test_the_list_of_digests_has_the_form_that_xxhsum_reads(saved, run_folder):
    saved(awkward(), final_name(STEP))
    folder = run_folder / final_name(STEP) / Path(*MODEL_FOLDER)
    lines = (folder / FILE_DIGESTS).read_text().splitlines()
    files = [folder / "config.json", folder / "model.safetensors"]
    assert lines == [f"{xxhash.xxh128_hexdigest(file.read_bytes())}  {file.name}" for file in files]


async def test_a_saved_folder_is_announced_with_the_digest_of_its_list(
    explorer, publisher, log, sync_client, redis_url, run_id, run_folder
):
    """The whole way: a save, its announcement, and the pull of what it announces."""
    folder = staged_path(run_folder, publisher.epoch, STEP) / Path(*MODEL_FOLDER)
    own = Publisher(SyncEventLog(sync_client, run_id), publisher.epoch, new_producer("actor"))
    with closing(own):
        coordinator = CheckpointCoordinator(own, run_folder)
        coordinator.save_sync(
            lambda: write_model_folder(folder, describe, awkward().items()) and None,
            STEP,
            is_state_dict=True,
            name=WEIGHTS_SAVE,
            path=folder,
        )
        async with reducer_task(redis_url, run_id, run_folder.parent):
            await coordinator.register_and_monitor(STEP, True, state_dict_thread_count=1)
            event = await announced_ready(log, STEP)
            assert weights_save(event) is not None
            with explorer.pull(event) as version:
                assert_equal(dict(version.tensors()), awkward())
        coordinator.wait_all()
