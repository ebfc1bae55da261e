"""Training ranks and an explorer on a GPU: FSDP over NCCL, and each transport that takes GPUs.

On a machine with one GPU its ranks share it: NCCL takes each for another host's.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import anyio.to_thread
import pytest
import torch

from tests.support.experiences import make_groups
from tests.support.gpu import needs_gpu
from tests.support.rank_processes import Rank, RankProcesses
from tests.support.tensors import assert_equal
from tests.support.weight_versions import ready
from trinity_events import Synchronizer
from trinity_workers.algorithms.collate import collate
from trinity_workers.engines.fsdp import FSDPEngine
from trinity_workers.engines.fsdp_context import ContextRanks
from trinity_workers.engines.fsdp_options import FSDPOptions
from trinity_workers.engines.fsdp_tensor import TensorRanks
from trinity_workers.engines.learning_rate import LearningRate
from trinity_workers.helpers import fsdp_upload_state_dict, strategy_for
from trinity_workers.learning.logprobs import response_logprobs
from trinity_workers.learning.policy import load_policy
from trinity_workers.runtime.collective_errors import PeerFailed
from trinity_workers.runtime.collectives import raise_together

pytestmark = [pytest.mark.processes, needs_gpu]

WORLD = 2
logger = logging.getLogger(__name__)


class Settings(NamedTuple):
    """Settings of one run that every rank is given."""

    run_id: str
    epoch: int
    redis_url: str
    weights_url: str
    model_folder: Any
    run_folder: Any
    transport: str


@pytest.fixture(scope="module")
def processes():
    made = RankProcesses("cuda")
    yield made
    made.close()


@pytest.fixture(params=["redis", "shm", "cuda-ipc"])
def settings(request, publisher, redis_url, weights_url, run_id, policy_folder, tmp_path):
    urls = (redis_url, weights_url)
    folders = (policy_folder, tmp_path / run_id)
    return Settings(run_id, publisher.epoch, *urls, *folders, request.param)


@pytest.fixture
def ranks(processes, settings):
    group = processes.group(WORLD)
    group(begin, settings)
    yield group
    processes.leave()


def begin(rank: Rank, settings: Settings) -> None:
    torch.use_deterministic_algorithms(mode=True)
    torch.manual_seed(0)
    rank.objects.settings = settings
    rank.objects.engine = FSDPEngine(
        settings.model_folder,
        device=torch.device("cuda", 0),
        learning_rate=LearningRate(highest=1e-3, warmup_steps=4),
    )
    rank.objects.engine.module.train()
    rank.objects.synchronizer = Synchronizer(
        settings.run_id,
        settings.epoch,
        redis_url=settings.redis_url,
        weights_url=settings.weights_url,
        role="actor",
        rank=rank.number,
        transport=settings.transport,
        chunk_bytes=65536,
    )
    rank.exits.callback(rank.objects.synchronizer.close)


def take_step(rank: Rank, seed: int) -> float:
    generator = torch.Generator().manual_seed(10 * seed + rank.number)
    tokens = torch.randint(3, 90, (4, 16), generator=generator).cuda()
    loss = rank.objects.engine.module(input_ids=tokens, labels=tokens, use_cache=False).loss
    return rank.objects.engine.optimizer_step(loss)


def full_weights(rank: Rank) -> dict[str, torch.Tensor]:
    return {name: value.cpu() for name, value in rank.objects.engine.get_per_tensor_param()}


def upload(rank: Rank, step: int, how: str) -> dict[str, torch.Tensor]:
    """Publish the weights as they are now; a snapshot while the next step is taken."""
    before = full_weights(rank)
    synchronizer, engine = rank.objects.synchronizer, rank.objects.engine
    strategy = strategy_for(how, 20)
    fsdp_upload_state_dict(engine, synchronizer, step, logger, strategy=strategy)
    if how == "snapshot":
        take_step(rank, 99)
    strategy.close()
    synchronizer.flush()
    return before


@pytest.mark.parametrize("where", ["cpu", "cuda"])
@pytest.mark.parametrize("how", ["full", "shards", "snapshot"])
async def test_an_explorer_serves_what_a_trainer_on_a_gpu_published_bit_for_bit(
    ranks, settings, log, committer, how, where
):
    model = load_policy(settings.model_folder)[0].to(where)
    explorer = committer.bind("explorer", 0)
    for step in (1, 2):
        await anyio.to_thread.run_sync(ranks, take_step, step)
        trained = (await anyio.to_thread.run_sync(ranks, upload, step, how))[0]
        committer.commit(step)
        event = await ready(log, step)
        assert event.transport == settings.transport
        await anyio.to_thread.run_sync(explorer.apply, model, event)
        served = {name: value.detach().cpu() for name, value in model.named_parameters()}
        assert_equal(served, trained)
    explorer.close()


def fails_on_rank_1(rank: Rank) -> None:
    raise_together(OSError("no room") if rank.number == 1 else None)


@pytest.mark.parametrize("settings", ["shm"], indirect=True)
def test_ranks_on_gpus_agree_on_an_error_and_go_on(ranks):
    own, peer = reversed(ranks.answers(fails_on_rank_1))
    assert isinstance(own, OSError)
    assert isinstance(peer, PeerFailed)
    assert str(peer) == "rank 1 failed: OSError: no room"
    norms = ranks(take_step, 1)
    assert norms[0] == norms[1] > 0


def checkpoint(rank: Rank, folder: Any) -> None:
    rank.objects.engine.save_checkpoint(str(folder), global_step=1)


def restore(rank: Rank, folder: Any) -> None:
    rank.objects.engine.load_checkpoint(str(folder))


@pytest.mark.parametrize("settings", ["shm"], indirect=True)
def test_training_goes_on_from_a_checkpoint_of_gpus_as_if_nothing_had_happened(
    ranks, settings, tmp_path
):
    ranks(take_step, 1)
    ranks(checkpoint, tmp_path)
    ranks(take_step, 2)
    undisturbed = ranks(full_weights)[0]
    ranks(take_step, 3)
    ranks(restore, tmp_path)
    ranks(take_step, 2)
    assert_equal(ranks(full_weights)[0], undisturbed)


@pytest.fixture
def pair(processes):
    yield processes.group(WORLD)
    processes.leave()


def step_on(rank: Rank, folder: Any, dtype: str, way: str | None) -> tuple[torch.Tensor, float]:
    """Return log-probabilities of one batch, and the norm of their mean's gradient."""
    cuda = torch.device("cuda", 0)
    context = ContextRanks.of(2 if way == "context" else 1, cuda)
    tensor = TensorRanks.of(2 if way == "tensor" else 1, cuda)
    engine = FSDPEngine(
        folder,
        device=cuda,
        learning_rate=1e-3,
        dtype=dtype,
        options=FSDPOptions(context=context, tensor=tensor, shard_layers_from=1),
    )
    group = None if context is None else context.group
    batch = collate(make_groups("r", 1), 0).to(cuda)
    logprobs = response_logprobs(engine.module, batch, fused=way == "tensor", group=group)
    # All have the same batch: without shared sequences, FSDP's mean is of equal gradients.
    engine.accumulate(logprobs.sum() / batch.token_count, first=True, last=True)
    return logprobs.detach().cpu(), engine.apply_gradients()


@pytest.mark.parametrize("way", ["context", "tensor"])
@pytest.mark.parametrize(("dtype", "close"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_ranks_that_share_sequences_or_layers_have_the_numbers_of_whole_ones(
    pair, policy_folder, dtype, close, way
):
    whole = pair(step_on, policy_folder, dtype, None)[0]
    for logprobs, norm in pair(step_on, policy_folder, dtype, way):
        torch.testing.assert_close(logprobs, whole[0], rtol=0, atol=close)
        assert norm == pytest.approx(whole[1], rel=close)
