"""veRL's Megatron engine, as far as it runs on a CPU, and on a double of what needs a GPU."""

from __future__ import annotations

import logging
import multiprocessing
import traceback
import warnings
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import anyio.to_thread
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.batches import make_batch
from tests.support.fsdp_runs import ready
from tests.support.tensors import assert_equal, identical
from tests.verl import ranks as at
from tests.verl.gpu_double import gpu_double
from trinity_events import CheckpointCoordinator, Synchronizer
from trinity_events.coordinator import staged_path
from trinity_events.log import Publisher, SyncEventLog, new_producer
from trinity_events.server import open_client
from trinity_schemas import SaveFinished, decode_envelope
from trinity_workers.engines.verl.batches import (
    loss_function,
    no_padding,
    select_response_tokens,
)
from trinity_workers.helpers.megatron import (
    megatron_save_state_dict,
    megatron_upload_state_dict,
    only,
)

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.timeout(420),
    pytest.mark.filterwarnings("default"),  # veRL's, mbridge's and Megatron's
]

logger = logging.getLogger(__name__)
BATCH = make_batch([3, 1, 4, 2], groups=[1, 1, 2, 2])


def new_engine(folder: Path, tensor: int = 1, *, mbridge: bool = True, **options: Any) -> Any:
    """Return veRL's engine as its worker makes it, not yet initialised."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    return MegatronEngineWithLMHead(
        HFModelConfig(path=str(folder), use_remove_padding=False),
        McoreEngineConfig(
            vanilla_mbridge=mbridge,
            use_remove_padding=False,
            tensor_model_parallel_size=tensor,
            override_transformer_config={"sequence_parallel": False},
            **options,
        ),
        McoreOptimizerConfig(lr=1e-2, total_training_steps=10, lr_decay_style="constant"),
        CheckpointConfig(),
    )


def start(rank, folder, **options):
    """Make the engine on a machine without a GPU; return the error that stops it, and where."""
    from megatron.core import parallel_state

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with gpu_double(layers=False) if options.pop("cuda", False) else nullcontext():
                new_engine(folder, **options).initialize()
        except Exception as error:
            *_, place = traceback.extract_tb(error.__traceback__)
            return type(error).__name__, str(error), place.name
        finally:
            parallel_state.destroy_model_parallel()
    raise AssertionError("nothing stopped it")


def begin(rank, where, tensor):
    """Make the rank's engine on the double, which is in force until the group is left."""
    from megatron.core import parallel_state

    rank.exits.callback(parallel_state.destroy_model_parallel)
    rank.exits.enter_context(gpu_double())
    rank.objects.where = where
    make(rank, tensor)


def make(rank, tensor):
    rank.objects.engine = new_engine(rank.objects.where.model_folder, tensor)
    rank.objects.engine.initialize()


def weights(rank):
    stream = rank.objects.engine.get_per_tensor_param()[0]
    return dict(sorted((name, tensor.clone()) for name, tensor in stream))


def logprobs(rank):
    with rank.objects.engine.eval_mode():
        output = rank.objects.engine.infer_batch(no_padding(BATCH, 1.0))
    return select_response_tokens(output["model_output"]["log_probs"], BATCH)


def take_step(rank):
    """Take a step on the log-probabilities of responses; return its norm and the next rate."""
    engine = rank.objects.engine

    def loss(part, current):
        return -(current.logprobs * part.response_mask).sum() / part.response_mask.sum()

    with engine.train_mode():
        engine.optimizer_zero_grad()
        data = no_padding(BATCH, 1.0, calculate_entropy=True)
        engine.forward_backward_batch(data, loss_function(loss, BATCH))
        return float(engine.optimizer_step()), engine.lr_scheduler_step()


def upload(rank, step):
    synchronizer = at.synchronizer(rank)
    megatron_upload_state_dict(rank.objects.engine, synchronizer, step, logger)
    synchronizer.flush()


def save(rank, folder, step):
    """Save the model by the helper, as a run does, and the rest by the engine itself."""
    engine, where = rank.objects.engine, rank.objects.where
    log = SyncEventLog(open_client(where.redis_url), where.run_id)
    rank.exits.callback(log.close)
    publisher = Publisher(log, where.epoch, new_producer("actor", rank.number))
    coordinator = CheckpointCoordinator(publisher, where.run_folder)
    with children_allowed():
        megatron_save_state_dict(engine, str(folder), step, coordinator, logger)
        with only(engine, ["optimizer", "extra"]):
            engine.save_checkpoint(str(folder), global_step=step)
    publisher.close()


def saved_model(rank, folder):
    """Return the Hugging Face folder of a checkpoint, which moved between veRL 0.8.0 and 0.9.1."""
    from verl.utils.megatron_utils import get_hf_model_checkpoint_path

    return get_hf_model_checkpoint_path(str(folder))


@contextmanager
def children_allowed():
    """Let a daemon process have children in the block: megatron-core writes in some of them."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    with patch.dict(multiprocessing.current_process()._config, daemon=False):
        yield
    filesystem_async._results_queue = None  # the process that serves it ends with it


def load(rank, folder):
    """Load a checkpoint; return the optimizer's steps of it."""
    rank.objects.engine.load_checkpoint(str(folder), del_local_after_load=False)
    [optimizer] = rank.objects.engine.optimizer.chained_optimizers
    return {group["step"] for group in optimizer.optimizer.param_groups}


STOPS = {
    "the random state of CUDA": (
        {},
        ("AssertionError", "Torch not compiled with CUDA enabled", "_lazy_init"),
    ),
    "the layers of Transformer Engine": (
        {"cuda": True},
        ("NameError", "name 'TENorm' is not defined", "get_gpt_decoder_layer_specs"),
    ),
    "Megatron-Bridge, which is not installed": (
        {"cuda": True, "mbridge": False},
        ("ModuleNotFoundError", "No module named 'megatron.bridge'", "<module>"),
    ),
}
"""What stops the engine on a CPU, in this order: each double lets it come to the next."""


@pytest.mark.parametrize(("options", "error"), STOPS.values(), ids=STOPS)
def test_without_a_gpu_it_stops_at(verl_processes, rank_group, policy_folder, options, error):
    [stopped] = rank_group(1)(start, policy_folder, **options)
    assert stopped == error


def plain_logprobs(folder):
    """Return log-probabilities by transformers' model in bfloat16, as the engine computes."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        logits = model(
            input_ids=BATCH.input_ids,
            attention_mask=BATCH.attention_mask,
            position_ids=BATCH.position_ids,
        ).logits.float()
    before = logits[:, BATCH.prompt_width - 1 : -1].log_softmax(-1)
    chosen = before.gather(-1, BATCH.responses[..., None])[..., 0]
    return chosen.masked_fill(~BATCH.response_mask, 0.0)


@pytest.mark.parametrize("tensor", [1, 2])
async def test_on_the_double_it_trains_publishes_saves_and_loads(
    verl_processes, rank_group, where, log, committer, policy_folder, tensor
):
    ranks = rank_group(tensor)
    in_thread = anyio.to_thread.run_sync
    await in_thread(ranks, begin, where, tensor)
    loaded = (await in_thread(ranks, weights))[0]
    plain = AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.bfloat16)
    assert_equal(loaded, dict(sorted(plain.named_parameters())))
    for computed in await in_thread(ranks, logprobs):
        torch.testing.assert_close(computed, plain_logprobs(policy_folder), atol=0.05, rtol=0)

    for norm, rate in await in_thread(ranks, take_step):
        assert norm > 0 and rate > 0
    trained = (await in_thread(ranks, weights))[0]
    assert not identical(trained["model.norm.weight"], loaded["model.norm.weight"])

    await in_thread(ranks, upload, 1)
    committer.commit(1)
    version = await ready(log, "weights", 1)
    explorer = Synchronizer(
        where.run_id, 0, redis_url=where.redis_url, weights_url=where.weights_url, role="explorer"
    )
    with explorer.pull(version) as pulled:
        assert_equal(dict(sorted(pulled.tensors())), trained)
    explorer.close()

    folder = staged_path(where.run_folder, where.epoch, 1) / "actor"
    await in_thread(ranks, save, folder, 1)
    events = [decode_envelope(entry.payload).event for entry in await log.read()]
    assert sum(isinstance(event, SaveFinished) for event in events) == 1
    saved = AutoModelForCausalLM.from_pretrained((await in_thread(ranks, saved_model, folder))[0])
    assert_equal(dict(sorted(saved.bfloat16().named_parameters())), trained)

    first = await in_thread(ranks, take_step)
    after = (await in_thread(ranks, weights))[0]
    for fresh in (False, True):
        if fresh:
            await in_thread(ranks, make, tensor)
        assert await in_thread(ranks, load, folder) == [{1}] * tensor
        assert_equal((await in_thread(ranks, weights))[0], trained)
        assert await in_thread(ranks, take_step) == first
        assert_equal((await in_thread(ranks, weights))[0], after)
