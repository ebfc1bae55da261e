"""The one writer of Hugging Face folders, and what reads them: libraries, and our engines."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
)

from tests.support.errors import raises  # noqa: E402
from tests.support.manifests import drop_manifests  # noqa: E402
from tests.support.rank_processes import Rank  # noqa: E402
from tests.support.tensors import assert_equal, identical  # noqa: E402
from tests.support.weight_versions import awkward  # noqa: E402
from trinity_events.checkpoints.layout import COMPLETING  # noqa: E402
from trinity_events.weights.errors import UnsupportedWeights  # noqa: E402
from trinity_workers.conversion.convert import convert  # noqa: E402
from trinity_workers.engines.fsdp import FSDPEngine  # noqa: E402
from trinity_workers.engines.learning_rate import LearningRate  # noqa: E402
from trinity_workers.engines.model_folder import (  # noqa: E402
    INDEX,
    FolderReader,
    WeightsWriter,
    copy_files,
    write_model_folder,
)
from trinity_workers.helpers.full_tensors import full_tensors  # noqa: E402
from trinity_workers.learning.values import load_critic  # noqa: E402
from trinity_workers.storage.sealed_folders import has_weights  # noqa: E402

pytestmark = pytest.mark.timeout(300)


def nothing_more(folder: Path) -> None:
    del folder


@pytest.mark.parametrize(("shard_bytes", "files"), [(1 << 30, 1), (300, None)])
def test_the_librarys_own_reader_gets_every_tensor(tmp_path, shard_bytes, files):
    nbytes = write_model_folder(tmp_path, nothing_more, awkward().items(), shard_bytes=shard_bytes)
    tensors = {}
    paths = sorted(tmp_path.glob("*.safetensors"))
    for path in paths:
        tensors |= load_file(path)
    assert nbytes == sum(tensor.nbytes for tensor in awkward().values())
    assert sorted(tensors) == sorted(awkward())
    assert all(identical(tensors[name], tensor) for name, tensor in awkward().items())
    assert has_weights(tmp_path)
    if files == 1:
        assert [path.name for path in paths] == ["model.safetensors"]
    else:
        index = json.loads((tmp_path / INDEX).read_text())
        assert index["metadata"]["total_size"] == nbytes
        assert set(index["weight_map"].values()) == {path.name for path in paths}
        assert paths[-1].name == f"model-{len(paths):05}-of-{len(paths):05}.safetensors"


def test_a_file_ends_where_its_header_would_outgrow_its_room(tmp_path):
    tensors = {f"layer.{number}.weight": torch.full((2,), number) for number in range(40)}
    with WeightsWriter(tmp_path, header_bytes=1024) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    reader = FolderReader(tmp_path)
    assert_equal({name: reader.tensor(name) for name in tensors}, tensors)


def test_dtypes_are_read_without_mapping_any_values(tmp_path):
    weights = {name: value.repeat(1 << 16) for name, value in awkward().items() if value.dim() == 1}
    assert weights
    write_model_folder(tmp_path, nothing_more, weights.items())
    reader = FolderReader(tmp_path)
    assert {name: reader.dtype(name) for name in weights} == {
        name: value.dtype for name, value in weights.items()
    }
    assert mapped_bytes(tmp_path / "model.safetensors") == 0
    value = reader.tensor(next(iter(weights)))
    assert mapped_bytes(tmp_path / "model.safetensors") > 0
    del value


def mapped_bytes(file):
    """Return the bytes of a file that this process has mapped into memory."""
    mapped, current = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        field, *values = line.split(maxsplit=5)
        if not field.endswith(":"):
            current = values[-1] == str(file)
        elif field == "Rss:" and current:
            mapped += int(values[0]) * 1024
    return mapped


def test_writing_a_folder_again_leaves_no_file_of_the_first_time(tmp_path):
    write_model_folder(tmp_path, nothing_more, awkward().items(), shard_bytes=300)
    write_model_folder(tmp_path, nothing_more, {"a": torch.ones(2)}.items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["XXH128SUMS", "model.safetensors"]


def test_a_folder_whose_writing_fails_has_no_weights(tmp_path):
    def tensors():
        yield "a", torch.ones(2)
        yield "b", torch.ones(2, dtype=torch.complex128)

    with raises(UnsupportedWeights, fault="saved", tensor="b", dtype="torch.complex128"):
        write_model_folder(tmp_path, nothing_more, tensors(), shard_bytes=1)
    assert [path.name for path in tmp_path.iterdir()] == [COMPLETING]
    assert not has_weights(tmp_path)


# --- FSDP --------------------------------------------------------------------------------------


def begin(rank: Rank, policy: Path, dtype: str = "float32") -> None:
    rate = LearningRate(highest=1e-3, warmup_steps=4)
    rank.objects.engine = FSDPEngine(
        policy, device=torch.device("cpu"), learning_rate=rate, dtype=dtype
    )
    rank.objects.engine.module.train()


def take_step(rank: Rank, seed: int) -> None:
    tokens = torch.randint(3, 90, (4, 16), generator=torch.Generator().manual_seed(seed))
    loss = rank.objects.engine.module(input_ids=tokens, labels=tokens, use_cache=False).loss
    rank.objects.engine.optimizer_step(loss)


def save(rank: Rank, folder: Path) -> None:
    """Save a checkpoint whose model is a Hugging Face folder, in the optimizer's dtype."""
    engine = rank.objects.engine
    engine.save_checkpoint(str(folder))
    tensors = engine.master_params()
    if rank.number == 0:
        write_model_folder(folder / "huggingface", engine.write_description, tensors)
        drop_manifests(folder)
    else:
        list(tensors)
    for path in folder.glob("model_world_size_*.pt"):
        path.unlink(missing_ok=True)


def load(rank: Rank, folder: Path) -> None:
    rank.objects.engine.load_checkpoint(str(folder))


def masters(rank: Rank) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in rank.objects.engine.master_params()}


def published(rank: Rank) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in full_tensors(rank.objects.engine)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("loaded_with", [2, 1])
def test_fsdp_goes_on_bit_for_bit_from_a_checkpoint_whose_model_is_a_hugging_face_folder(
    rank_group, policy_folder, tmp_path, dtype, loaded_with
):
    group = rank_group(2)
    group(begin, policy_folder, dtype)
    for seed in (1, 2):
        group(take_step, seed)
    group(save, tmp_path)
    assert not list(tmp_path.glob("model_*"))
    expected = group(masters)[0]
    served = group(published)[0]

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "huggingface", dtype=dtype)
    for name, tensor in model.named_parameters():
        assert identical(tensor.detach(), served[name]), name

    group = rank_group(loaded_with)
    group(begin, policy_folder, dtype)
    group(load, tmp_path)
    for weights in group(masters):
        assert_equal(weights, expected)
    group(take_step, 3)


def shards(rank: Rank, folder: Path) -> None:
    rank.objects.engine.save_checkpoint(str(folder))


@pytest.mark.parametrize("world", [1, 3])
def test_shards_of_fsdp_convert_to_a_folder_that_transformers_loads(
    rank_group, policy_folder, tmp_path, world
):
    group = rank_group(world)
    group(begin, policy_folder)
    group(take_step, 1)
    group(shards, tmp_path / "step" / "actor")
    expected = group(masters)[0]
    done = convert(tmp_path / "step", tmp_path / "converted", shard_bytes=200_000)
    assert (done.to, done.tensors) == ("huggingface", len(expected))
    assert done.bytes == sum(tensor.nbytes for tensor in expected.values())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "converted")
    assert_equal(
        {name: parameter.detach() for name, parameter in model.named_parameters()}, expected
    )
    drop_manifests(tmp_path)
    (tmp_path / "step" / "actor" / f"model_world_size_{world}_rank_{world - 1}.pt").unlink()
    if world > 1:
        with pytest.raises(FileNotFoundError, match="rank_2"):
            convert(tmp_path / "step", tmp_path / "again")
        assert not (tmp_path / "again").exists()


def begin_critic(rank: Rank, folder: Path) -> None:
    """Make a critic whose head is not 0 any more."""
    engine = FSDPEngine(folder, device=torch.device("cpu"), learning_rate=3e-3, load=load_critic)
    with torch.no_grad():
        for parameter in engine.module.score.parameters():
            parameter.fill_(0.25)
    rank.objects.engine = engine


def test_a_critic_of_fsdp_converts_to_a_model_for_token_classification(
    rank_group, policy_folder, tmp_path
):
    group = rank_group(2)
    group(begin_critic, policy_folder)
    group(shards, tmp_path / "step" / "critic")
    expected = group(published)[0]
    done = convert(tmp_path / "step" / "critic", tmp_path / "converted")
    assert (done.to, done.tensors) == ("huggingface", len(expected))
    model, loading_info = AutoModelForTokenClassification.from_pretrained(
        tmp_path / "converted", output_loading_info=True
    )
    assert not loading_info["missing_keys"]
    assert not loading_info["unexpected_keys"]
    assert_equal(
        {name: parameter.detach() for name, parameter in model.named_parameters()}, expected
    )
    assert float(model.score.bias.detach()) == 0.25


def test_a_checkpoint_whose_model_is_a_hugging_face_folder_converts_to_that(
    tmp_path, policy_folder
):
    """Only the folder of digests tells such a checkpoint from one whose model is elsewhere."""
    actor = tmp_path / "global_step_3" / "actor"
    tensors = load_file(policy_folder / "model.safetensors")
    describe = partial(copy_files, policy_folder)
    write_model_folder(actor / "huggingface", describe, tensors.items())
    done = convert(tmp_path / "global_step_3", tmp_path / "converted")
    assert (done.to, done.tensors) == ("huggingface", len(tensors))
    assert load_file(tmp_path / "converted" / "model.safetensors").keys() == tensors.keys()
    AutoModelForCausalLM.from_pretrained(tmp_path / "converted")
