"""No code of a Megatron checkpoint is run: a pickle of anything but its data is refused."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from torch.distributed.checkpoint.filesystem import _StorageInfo  # noqa: E402
from torch.distributed.checkpoint.metadata import (  # noqa: E402
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
)
from torch.distributed.checkpoint.planner import (  # noqa: E402
    SavePlan,
    WriteItem,
    WriteItemType,
)

from tests.support import megatron_ranks as at  # noqa: E402
from tests.support.manifests import drop_manifests  # noqa: E402
from tests.support.rank_processes import Rank, collect  # noqa: E402
from trinity_workers.engines.megatron import (  # noqa: E402
    CheckpointRefused,
    MissingCheckpointFile,
    OptimizerOptions,
    ParallelLayout,
    UndecodableFile,
    UnsafePickle,
)
from trinity_workers.engines.megatron.checkpoint_errors import ForeignCheckpoint  # noqa: E402
from trinity_workers.engines.megatron.checkpoint_reader import read_metadata  # noqa: E402
from trinity_workers.runtime.collective_errors import PeerFailed  # noqa: E402

TRAINED = OptimizerOptions(learning_rate=3e-3)
TENSOR = ParallelLayout(tensor=2)


class MakesFolder:
    """Object whose pickle makes a folder when it is loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


MAKES_FOLDER = f"{os.mkdir.__module__}.mkdir"


def save(rank: Rank, folder: Path, *contents: str) -> None:
    if contents:
        rank.objects.engine.checkpoint_manager.checkpoint_save_contents = list(contents)
    rank.objects.engine.save_checkpoint(str(folder))


def load(rank: Rank, folder: Path) -> None:
    rank.objects.engine.load_checkpoint(str(folder))


def raw(value: Any) -> bytes:
    return pickle.dumps(value)


def as_torch_saves(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.mark.megatron
def test_a_file_that_runs_code_when_it_is_unpickled_is_refused_by_name(
    converting, engine_ranks, tmp_path
):
    ranks = engine_ranks("qwen3", 1, ParallelLayout(), TRAINED)
    ranks(at.train, [at.padded_batch(0, rows=8)])
    whole, proof = tmp_path / "whole", tmp_path / "proof"
    ranks(save, whole)
    drop_manifests(whole)
    cases = [
        ("model/.metadata", raw),
        ("model/common.pt", raw),
        ("model/common.pt", as_torch_saves),
        ("training/.metadata", raw),
        ("training/common.pt", as_torch_saves),
        ("training/rank_0.pt", raw),
        ("training/rank_0.pt", as_torch_saves),
    ]
    folders = []
    for number, (name, dump) in enumerate(cases):
        folder = shutil.copytree(whole, tmp_path / str(number))
        (folder / name).write_bytes(dump(MakesFolder(proof)))
        [error] = ranks.answers(load, folder)
        assert isinstance(error, UnsafePickle), (name, error)
        assert (error.path, error.name) == (folder / name, MAKES_FOLDER)
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
        folders.append(folder)
    ranks(load, whole)
    with pytest.raises(UnsafePickle) as caught:
        converting(folders[0], tmp_path / "converted")
    error = caught.value
    assert (error.path, error.name) == (folders[0] / "model" / ".metadata", MAKES_FOLDER)
    assert not proof.exists()


def replace_object(folder: Path, blob: bytes, *, of_tensor: bool) -> None:
    """Replace a layer's extra state, or a tensor, by an object with these bytes."""
    index = read_metadata(folder)
    key = next(
        item
        for item in index.storage_data
        if item.fqn == "embedding.word_embeddings.weight" or "_extra_state" in item.fqn
        if of_tensor != ("_extra_state" in item.fqn)
    )
    [file] = {info.relative_path for info in index.storage_data.values()}
    place = _StorageInfo(file, (folder / file).stat().st_size, len(blob))
    with (folder / file).open("ab") as stream:
        stream.write(blob)
    if of_tensor:
        del index.storage_data[key]
        key = MetadataIndex(key.fqn)
        index.state_dict_metadata[key.fqn] = BytesStorageMetadata()
    index.storage_data[key] = place
    (folder / ".metadata").write_bytes(pickle.dumps(index))


@pytest.mark.megatron
def test_an_object_among_the_tensors_runs_no_code(converting, engine_ranks, tmp_path):
    ranks = engine_ranks("qwen3", 1, ParallelLayout())
    whole, proof = tmp_path / "whole", tmp_path / "proof"
    ranks(save, whole)
    blob = as_torch_saves([MakesFolder(proof)])

    drop_manifests(whole)
    folder = shutil.copytree(whole, tmp_path / "extra")
    replace_object(folder / "model", blob, of_tensor=False)
    [error] = ranks.answers(load, folder)
    assert isinstance(error, UnsafePickle)
    assert (error.path, error.name) == (folder / "model" / "__0_0.distcp", MAKES_FOLDER)

    # Transformer Engine unpickles the bytes of such a tensor.
    folder = shutil.copytree(whole, tmp_path / "fp8")
    state = torch.frombuffer(bytearray(raw(MakesFolder(proof))), dtype=torch.uint8)
    replace_object(folder / "model", as_torch_saves([state]), of_tensor=False)
    [error] = ranks.answers(load, folder)
    assert isinstance(error, ForeignCheckpoint)
    assert error.fault == "FP8"

    folder = shutil.copytree(whole, tmp_path / "tensor")
    replace_object(folder / "model", blob, of_tensor=True)
    [error] = ranks.answers(load, folder)
    assert isinstance(error, CheckpointRefused)
    with pytest.raises(CheckpointRefused):
        converting(folder, tmp_path / "converted")
    assert not proof.exists()


def replace_tensors(folder: Path, blob: bytes) -> None:
    """Put a blob where the index places each tensor and each object."""
    index = read_metadata(folder)
    for key in index.storage_data:
        index.storage_data[key] = _StorageInfo("__0_0.distcp", 0, len(blob))
    (folder / "__0_0.distcp").write_bytes(blob)
    (folder / ".metadata").write_bytes(pickle.dumps(index))


@pytest.mark.megatron
def test_tensors_that_are_none_are_refused_by_the_folder_that_has_them(
    converting, engine_ranks, tmp_path
):
    ranks = engine_ranks("qwen3", 1, ParallelLayout())
    whole, proof = tmp_path / "whole", tmp_path / "proof"
    ranks(save, whole)
    drop_manifests(whole)
    unsafe, damaged, missing = (
        shutil.copytree(whole, tmp_path / name) for name in ("unsafe", "damaged", "missing")
    )
    replace_tensors(unsafe / "model", as_torch_saves(MakesFolder(proof)))
    replace_tensors(damaged / "model", as_torch_saves(torch.ones(2))[:-9])
    file = missing / "model" / "__0_0.distcp"
    file.unlink()
    folders = (unsafe, damaged, missing)
    errors = [ranks.answers(load, folder)[0] for folder in folders]
    errors += collect(partial(converting, folder, tmp_path / "converted") for folder in folders)
    assert [type(error) for error in errors] == 2 * [
        UnsafePickle,
        UndecodableFile,
        MissingCheckpointFile,
    ]
    assert {errors[0].name, errors[3].name} == {MAKES_FOLDER}
    assert {errors[2].path, errors[5].path} == {file}
    assert not proof.exists()


# --- the index ---------------------------------------------------------------------------------


def index_of(**changes: Any) -> Metadata:
    return Metadata({}, **{"storage_data": {}, **changes})


def test_an_index_of_megatrons_own_writer_loads(tmp_path):
    index = index_of()
    # It adds what each rank wrote, as an attribute that is no field.
    index.all_local_plans = [  # type: ignore[attr-defined]
        SavePlan([WriteItem(MetadataIndex("key", [0]), WriteItemType.SHARD)])
    ]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(index))
    assert read_metadata(tmp_path) == index
    assert read_metadata(tmp_path).all_local_plans == index.all_local_plans


def test_a_pickle_changes_no_class(tmp_path):
    # GLOBAL, then BUILD with the state (None, {"version": "changed"}), which sets attributes.
    data = b"\x80\x02c" + f"{Metadata.__module__}\nMetadata\n".encode()
    data += b"N}X\x07\x00\x00\x00versionX\x07\x00\x00\x00changeds\x86b."
    assert pickle.loads(data) is Metadata, "the pickle does what it is to do"
    assert Metadata.version == "changed"
    Metadata.version = None
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(UndecodableFile):
        read_metadata(tmp_path)
    assert Metadata.version is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no pickle",
        pickle.dumps(index_of())[:-9],
        pickle.dumps({"storage_data": {}}),
        pickle.dumps(index_of(storage_data=None)),
        pickle.dumps(index_of(storage_data={"key": _StorageInfo("../other", 0, 1)})),
        pickle.dumps(index_of(storage_data={"key": _StorageInfo("/etc/passwd", 0, 1)})),
    ],
)
def test_an_index_that_is_none_is_refused_by_its_path(tmp_path, content):
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(UndecodableFile) as raised:
        read_metadata(tmp_path)
    assert raised.value.path == tmp_path / ".metadata"


# --- files of the ranks ------------------------------------------------------------------------


@pytest.mark.megatron
def test_a_missing_file_of_a_rank_is_refused_at_its_layout_alone(engine_ranks, tmp_path):
    ranks = engine_ranks("qwen3", 2, TENSOR, TRAINED)
    ranks(at.train, [at.padded_batch(0, rows=8)])
    whole, extra_missing = tmp_path / "whole", tmp_path / "no-extra"
    ranks(save, whole)
    ranks(save, extra_missing, "model", "optimizer")
    assert not (extra_missing / "training" / "rank_0.pt").exists()
    ranks(load, extra_missing)

    second_missing = drop_manifests(shutil.copytree(whole, tmp_path / "second"))
    (second_missing / "training" / "rank_1.pt").unlink()
    peer, error = ranks.answers(load, second_missing)
    assert isinstance(peer, PeerFailed)
    assert isinstance(error, MissingCheckpointFile)
    assert error.path == second_missing / "training" / "rank_1.pt"

    all_missing = shutil.copytree(second_missing, tmp_path / "all")
    (all_missing / "training" / "rank_0.pt").unlink()
    for error in ranks.answers(load, all_missing):
        assert isinstance(error, MissingCheckpointFile)
        assert error.path == all_missing / "training" / "rank_0.pt"

    ranks = engine_ranks("qwen3", 1, ParallelLayout(), TRAINED)
    ranks(load, second_missing)
