"""veRL's own workers on a CPU, as Ray actors: a trainer's, and those beside rollout engines.

What veRL has for accelerators alone is set beforehand: the process group, and the engine's device.
"""

from __future__ import annotations

import asyncio
import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hydra import compose, initialize_config_module
from verl.checkpoint_engine.base import (
    CheckpointEngineManager,
    CheckpointEngineRegistry,
    CheckpointEngineWorker,
)
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.workers.config import CheckpointEngineConfig, HFModelConfig, RolloutConfig
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine_workers import ActorRolloutRefWorker

BACKEND = "trinity_workers.verl.backend"
ENGINE = "actor_rollout_ref.rollout.checkpoint_engine"


def checkpoint_engine(**options: Any) -> dict[str, Any]:
    """What the part of veRL's configuration comes to that switches the backend on."""
    return {
        "backend": "trinity",
        "custom_backend_module": BACKEND,
        "engine_kwargs": {"trinity": options},
    }


def actor_config(model_folder: Path, **options: Any) -> Any:
    """What veRL's trainer gives its workers, from veRL's own files."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        whole = compose(
            "ppo_trainer",
            overrides=[
                f"actor_rollout_ref.model.path={model_folder}",
                "actor_rollout_ref.model.use_remove_padding=False",
                "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
                "actor_rollout_ref.actor.strategy=fsdp2",
                "actor_rollout_ref.actor.use_torch_compile=False",
                "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
                "actor_rollout_ref.actor.optim.lr=0.01",
                "actor_rollout_ref.actor.optim.total_training_steps=10",
                "actor_rollout_ref.rollout.name=vllm",
                "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
                f"{ENGINE}.backend=trinity",
                f"{ENGINE}.custom_backend_module={BACKEND}",
                *(f"+{ENGINE}.engine_kwargs.trinity.{name}={options[name]}" for name in options),
            ],
        )
    return whole.actor_rollout_ref


class CpuActor(ActorRolloutRefWorker):
    """veRL's worker of a trainer's rank, with a training step and what tests ask for."""

    def __init__(self, config: Any) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        EngineRegistry.register(
            model_type="language_model", backend=["fsdp", "fsdp2"], device=["cpu"]
        )(FSDPEngineWithLMHead)
        super().__init__(config, role="actor")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_step(self, seed: int) -> None:
        from tests.verl.ranks import optimizer_step

        optimizer_step(self.actor.engine, dist.get_rank(), seed)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def full_weights(self) -> dict[str, torch.Tensor]:
        named, _ = self.actor.engine.get_per_tensor_param()
        return {name: tensor.detach().clone() for name, tensor in named}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def configure(self, options: dict[str, Any]) -> None:
        """Another checkpoint engine, made as veRL makes it."""
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            "trinity", is_master=dist.get_rank() == 0, bucket_size=2 << 30, **options
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def die_at(self, rank: int, count: int) -> None:
        """Let a rank's process die in the middle of the gathers, once it gave so many."""
        if dist.get_rank() == rank:
            engine = self.actor.engine
            engine.get_per_tensor_param = lambda: (_dying(count, engine), None)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def refuse_third(self) -> None:
        """Let the next version's writer take no more than two tensors."""
        sender = self.checkpoint_engine._sender
        if sender is not None:
            begin = sender._begin

            def begin_once(step: int) -> Any:
                sender._begin = begin
                return _Refusing(begin(step))

            sender._begin = begin_once


def _dying(count: int, engine: Any) -> Any:
    for number, named in enumerate(type(engine).get_per_tensor_param(engine)[0]):
        if number == count:
            os.kill(os.getpid(), signal.SIGKILL)
        yield named


class _Refusing:
    """A part's writer without room for a third tensor."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._added = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self._added += 1
        if self._added == 3:
            raise OSError("no room for the third tensor")
        self._writer.add(name, tensor)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)


class Collecting:
    """In the place of a rollout engine's adapter: keeps what it is given."""

    replica_rank = 0
    is_leader_rank = True

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.error = ""

    async def update_weights(self, weights: Any, global_steps: Any = None, **_: Any) -> None:
        self.error, weights_received = "", {}
        try:
            async for name, tensor in weights:
                weights_received[name] = tensor.clone()
                await asyncio.sleep(0)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
            raise
        self.weights = weights_received


class CpuRollout(CheckpointEngineWorker):
    """veRL's worker beside a rollout engine, on which tests look at what came."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def configure(self, options: dict[str, Any]) -> None:
        """Another checkpoint engine, made as veRL makes it."""
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            "trinity", bucket_size=2 << 30, **options
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def collected(self) -> dict[str, torch.Tensor]:
        return self.server_adapter.weights

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def heard(self, seconds: float) -> str:
        """What the last update failed with, once it has."""
        for _ in range(int(seconds * 20)):
            if self.server_adapter.error:
                return self.server_adapter.error
            await asyncio.sleep(0.05)
        return ""


class Replica:
    """A rollout replica, of which the manager knows workers, and asks to hold still."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers = workers
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        async def ask(**_: Any) -> None:
            self.calls.append(name)

        return ask


class Fleet:
    """veRL's manager with two trainers and two replicas of one process each."""

    def __init__(self, model_folder: Path, **options: Any) -> None:
        import ray

        self._config = actor_config(model_folder, **options)
        self._engine = CheckpointEngineConfig(**checkpoint_engine(**options))
        self._options = options
        self.trainer = self._new_trainer()
        self.rollouts = _group(
            ray.remote(CpuRollout),
            2,
            rollout_config=RolloutConfig(name="vllm", checkpoint_engine=self._engine),
            model_config=HFModelConfig(path=str(model_folder)),
            server_adapter=Collecting(),
        )
        self.trainer.init_model()
        self.replicas = [Replica([worker]) for worker in self.rollouts.workers]
        self.manager = CheckpointEngineManager(self._engine, self.trainer, self.replicas)

    def _new_trainer(self) -> RayWorkerGroup:
        import ray

        return _group(ray.remote(CpuActor), 2, config=self._config)

    def replace_trainer(self) -> None:
        """Another trainer, as after a crash; the rollouts stay."""
        import ray

        for worker in self.trainer.workers:
            ray.kill(worker)
        self.trainer = self._new_trainer()
        self.trainer.init_model()
        self.trainer.configure(self._options)
        self.manager = CheckpointEngineManager(self._engine, self.trainer, self.replicas)

    def configure(self, **options: Any) -> None:
        """Other options from now on."""
        self._options = options
        self.trainer.configure(options)
        self.rollouts.configure(options)


def _group(actor_class: Any, count: int, **arguments: Any) -> RayWorkerGroup:
    return RayWorkerGroup(
        resource_pool=RayResourcePool([count], use_gpu=False, max_colocate_count=1),
        ray_cls_with_init=RayClassWithInitArgs(actor_class, **arguments),
        device_name="cpu",
    )
