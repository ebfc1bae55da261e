"""The FSDP helpers on veRL's own FSDP engine, as it is, on two ranks over Gloo."""

from __future__ import annotations

import json

import anyio
import anyio.to_thread
import pytest
import torch

from tests.support.errors import raises
from tests.support.fsdp_runs import ready
from tests.support.tensors import assert_equal, identical
from tests.verl import ranks as at
from tests.verl.ranks import Where
from trinity_events import Synchronizer
from trinity_events.coordinator import staged_path
from trinity_schemas import SaveFailed, VersionPartPublished, decode_envelope
from trinity_workers.engines.state_files import read_state
from trinity_workers.helpers import ShardsRefused
from trinity_workers.runtime.collective_errors import PeerFailed

pytestmark = pytest.mark.timeout(420)  # its own deadlines are shorter, and say what is missing


@pytest.fixture
def engines(ranks, where):
    """Two ranks with veRL's engine, a step into training."""
    ranks(at.begin, where)
    norms = ranks(at.take_step, 1)
    assert norms[0] == norms[1] > 0
    return ranks


async def pulled(where: Where, log, step: int) -> dict[str, torch.Tensor]:
    """The tensors of the version, once it is ready."""
    event = await ready(log, "weights", step)
    explorer = Synchronizer(
        where.run_id, 0, redis_url=where.redis_url, weights_url=where.weights_url, role="explorer"
    )

    def pull():
        with explorer.pull(event) as version:
            return {name: tensor.clone() for name, tensor in version.tensors()}

    tensors = await anyio.to_thread.run_sync(pull)
    explorer.close()
    return tensors


async def test_an_upload_is_what_the_engine_itself_gives_bit_for_bit(
    engines, where, log, committer
):
    engines(at.upload, 1, "full")
    committer.commit(1)
    given, again = engines(at.full_weights)
    assert_equal(given, again)
    assert_equal(await pulled(where, log, 1), given)
    # An optimizer step in between is in the next version, and in nothing before.
    engines(at.take_step, 2)
    engines(at.upload, 2, "full")
    committer.commit(2)
    later = engines(at.full_weights)[0]
    assert not identical(later["model.norm.weight"], given["model.norm.weight"])
    assert_equal(await pulled(where, log, 2), later)


@pytest.mark.parametrize("how", ["shards", "snapshot"])
async def test_what_every_rank_publishes_of_its_own_makes_up_the_parameters(
    engines, where, log, committer, how
):
    at_the_call = engines(at.full_parameters)[0]
    engines(at.upload, 1, how)
    committer.commit(1)
    event = await ready(log, "weights", 1)
    assert [part.rank for part in event.parts] == [0, 1]
    tensors = await pulled(where, log, 1)
    assert_equal(dict(sorted(tensors.items())), dict(sorted(at_the_call.items())))
    after = engines(at.full_parameters)[0]
    same = identical(after["model.norm.weight"], at_the_call["model.norm.weight"])
    assert same == (how == "shards"), "beside a snapshot training went on"


@pytest.mark.parametrize("sharded", [False, True])
async def test_a_rank_that_fails_fails_all_and_the_same_step_can_be_tried_again(
    engines, where, log, committer, sharded
):
    answers = engines.answers(at.upload_that_fails, 1, sharded)
    own, peer = reversed(answers) if sharded else answers
    assert isinstance(own, OSError)
    assert isinstance(peer, PeerFailed)
    assert str(peer) == f"rank {int(sharded)} failed: OSError: no room for the third tensor"
    events = [decode_envelope(entry.payload).event for entry in await log.read()]
    failed = [event for event in events if isinstance(event, SaveFailed)]
    assert [failure.message for failure in failed if not failure.followed] == [str(own)]
    assert len(failed) == 1 + sharded, "who follows says so"
    assert not any(isinstance(event, VersionPartPublished) for event in events)
    # The ranks' collectives still match.
    engines(at.upload, 1, "shards" if sharded else "full")
    committer.commit(1)
    expected = engines(at.full_parameters if sharded else at.full_weights)[0]
    tensors = await pulled(where, log, 1)
    assert_equal(dict(sorted(tensors.items())), dict(sorted(expected.items())))
    assert engines(at.take_step, 3)[0] > 0


async def test_each_rank_saves_its_shard_as_it_was_at_the_call_and_verl_loads_it(
    engines, where, log
):
    folder = staged_path(where.run_folder, where.epoch, 5) / "actor"
    at_the_call = engines(at.save_then_train, folder, 5)
    for rank, expected in enumerate(at_the_call):
        state = read_state(folder / f"model_world_size_2_rank_{rank}.pt")
        assert_equal({name: value.to_local() for name, value in state.items()}, expected)
    assert (folder / "huggingface" / "tokenizer.json").is_file()
    config = json.loads((folder / "fsdp_config.json").read_text())
    assert config == {"FSDP_version": 2, "world_size": 2}
    changed, loaded = zip(*engines(at.load_model_of, folder), strict=True)
    assert all(changed) and all(loaded)


async def test_verls_own_checkpoints_are_as_ever_beside_the_helpers(engines, tmp_path):
    engines(at.upload, 1, "full")
    changed, restored = zip(*engines(at.save_and_load, tmp_path / "checkpoint"), strict=True)
    assert all(changed) and all(restored)


async def test_explorers_of_a_group_get_what_the_engine_itself_gives(
    engines, where, log, committer
):
    explorer = Synchronizer(
        where.run_id, 0, redis_url=where.redis_url, weights_url=where.weights_url, role="explorer"
    )
    try:
        explorer.join_weight_sync_group()
        engines(at.broadcast, 1)
        committer.commit(1)
        event = await ready(log, "weights", 1)
        given = engines(at.full_weights)[0]

        def pull():
            with explorer.pull(event) as version:
                return {name: tensor.clone() for name, tensor in version.tensors()}

        assert_equal(await anyio.to_thread.run_sync(pull), given)
    finally:
        explorer.close()


ADAPTER = {"lora_rank": 4, "lora_alpha": 8}


@pytest.mark.heavy
async def test_a_merged_adapter_is_uploaded_as_the_engine_merges_it(ranks, where, log, committer):
    ranks(at.begin, where, lora={"merge": True}, **ADAPTER)
    base = ranks(at.full_weights)[0]
    for seed in (1, 2):
        ranks(at.take_step, seed)
    ranks(at.upload, 1, "full")
    committer.commit(1)
    given = ranks(at.full_weights)[0]
    tensors = await pulled(where, log, 1)
    assert_equal(tensors, given)
    name = "model.layers.0.self_attn.q_proj.weight"
    merged = not identical(tensors[name], base[name])
    # 0.8.0 gives the weights without the adapter; what it gives is what is published.
    assert merged == (not ranks(at.import_verl)[0].startswith("0.8."))
    with raises(ShardsRefused, fault="adapters"):
        ranks(at.upload, 2, "shards")


@pytest.mark.heavy
async def test_an_adapter_alone_is_a_version_of_its_own(ranks, where, log, committer):
    ranks(at.begin, where, lora={"merge": False}, **ADAPTER)
    ranks(at.take_step, 1)
    adapter, again = ranks(at.publish_adapter, 1)
    committer.commit(1)
    assert_equal(adapter, again)
    assert all("lora_" in name for name in adapter)
    assert_equal(await pulled(where, log, 1), adapter)
    assert len((await ready(log, "weights", 1)).parts) == 1
