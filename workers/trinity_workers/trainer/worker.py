"""One rank of the trainer."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trinity_events import CheckpointCoordinator, Synchronizer
from trinity_events.log import Publisher, SyncEventLog, new_producer
from trinity_events.server import open_client
from trinity_schemas import ExperienceGroup

from ..config import RunConfig
from ..engines import FSDPEngine
from ..engines.fsdp import shard_name, write_state
from ..helpers import fsdp_save_state_dict, fsdp_upload_state_dict
from ..learning.grpo import collate, grpo_loss, response_logprobs

logger = logging.getLogger(__name__)

ROLE = "actor"


class TrainWorker:
    """Holds one rank's engine. Every method is collective: the fleet calls it on all ranks."""

    def __init__(self, config: RunConfig, rank: int) -> None:
        self._config = config
        self._rank = rank

    def address(self) -> tuple[str, int]:
        """A host and a free port for the process group, asked of rank 0."""
        host = socket.gethostbyname(socket.gethostname())
        with socket.socket() as probe:
            probe.bind(("", 0))
            return host, int(probe.getsockname()[1])

    def setup(self, host: str, port: int) -> None:
        """Join the process group and load the model."""
        config = self._config
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // config.trainers))
        cuda = torch.cuda.is_available()
        self._device = torch.device("cuda", 0) if cuda else torch.device("cpu")
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            init_method=f"tcp://{host}:{port}",
            rank=self._rank,
            world_size=config.trainers,
            timeout=timedelta(seconds=config.sync_timeout),
        )
        torch.manual_seed(config.seed)
        self._engine = FSDPEngine(
            config.model_folder,
            device=self._device,
            learning_rate=config.learning_rate,
            ramp_steps=config.ramp_steps,
            gradient_norm=config.gradient_norm,
        )
        self._engine.module.train()
        log = SyncEventLog(open_client(config.redis_url), config.run_id)
        publisher = Publisher(log, config.epoch, new_producer(ROLE, self._rank))
        self._coordinator = CheckpointCoordinator(publisher, config.checkpoint_folder)
        self._synchronizer = Synchronizer(
            config.run_id,
            config.epoch,
            redis_url=config.redis_url,
            weights_url=config.weights_url,
            role=ROLE,
            rank=self._rank,
        )

    def train_step(self, groups: Sequence[ExperienceGroup]) -> dict[str, float]:
        """One GRPO step on this rank's groups; metrics are of all ranks."""
        config = self._config
        batch = collate(groups, self._engine.tokenizer.pad_token_id).to(self._device)
        logprobs = response_logprobs(self._engine.module, batch, config.temperature)
        loss_sum, metrics = grpo_loss(logprobs, batch, clip=config.clip)
        tokens = torch.tensor(float(batch.token_count), device=self._device)
        dist.all_reduce(tokens)
        # FSDP averages gradients over ranks; the loss is a mean over all ranks' tokens.
        norm = self._engine.optimizer_step(loss_sum * (dist.get_world_size() / tokens))
        own = batch.token_count
        sums = torch.tensor(
            [float(loss_sum.detach()), metrics["approx_kl"] * own, metrics["clip_fraction"] * own],
            device=self._device,
        )
        dist.all_reduce(sums)
        loss, kl, clipped = (sums / tokens).tolist()
        return {
            "loss": loss,
            "approx_kl": kl,
            "clip_fraction": clipped,
            "gradient_norm": norm,
            "response_tokens": float(tokens),
        }

    def save_state_dict(self, local_path: str, global_step: int) -> None:
        """Save the sharded model in the background."""
        fsdp_save_state_dict(self._engine, local_path, global_step, self._coordinator, logger)

    def save_checkpoint(self, local_path: str, global_step: int) -> None:
        """Save the sharded model and the training state, both in the background."""
        self.save_state_dict(local_path, global_step)
        path = Path(local_path) / shard_name("optim")
        state: dict[str, Any] = self._engine.training_state()
        self._coordinator.save_async(
            "training_state", lambda: write_state(path, state), global_step, path=path
        )

    def upload_state_dict(self, global_step: int) -> None:
        """Publish the weights."""
        fsdp_upload_state_dict(self._engine, self._synchronizer, global_step, logger)

    def wait_on_save_thread(self) -> None:
        """Wait for this rank's background saves; raises what failed in them."""
        self._coordinator.wait_all()

    def shutdown(self) -> None:
        """Leave the process group."""
        self._synchronizer.close()
        if dist.is_initialized():
            dist.destroy_process_group()
