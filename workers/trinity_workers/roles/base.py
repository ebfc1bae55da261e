"""Base of roles: a rank with the models of one role, and the step that computes with them."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch.distributed as dist
from torch import Tensor

from trinity_events.errors import TrinityError

from ..algorithms.batch import Batch
from ..config.train_config import RunConfig
from ..trainer.rank_actors import start_rank_actors, worker_class
from ..trainer.step.base import ModelName, Trained, TrainingStep
from ..trainer.workers.fsdp import TrainWorker, critic_folder
from ..trainer.workers.rank import TrainingRank
from ..worker_group.dispatch import Dispatch
from ..worker_group.megatron import MegatronWorker
from ..worker_group.ranks import DistRankInfo
from ..worker_group.registered import register
from .group import RoleGroup


class RoleRefused(TrinityError):
    """A role is asked for what it does not have.

    Attributes:
        fault: ``unknown`` for a name that is no role, ``part`` for a method of a part that the role
            lacks, ``save`` if it trains nothing, ``checkpoint`` if it has no model with one,
            ``model`` if it lacks the model, ``init`` before its models are loaded,
            ``reward model`` if the run has none.
        worker: Class of the workers.
        role: Name of the role.
        method: Method that was called.
        part: Part or model that is lacking.
        choices: Roles that there are, or models that it has.
    """

    fault: Literal["unknown", "part", "save", "checkpoint", "model", "init", "reward model"]
    worker: str
    role: str = ""
    method: str = ""
    part: str = ""
    choices: tuple[str, ...] = ()
    texts: ClassVar = {
        "unknown": "unknown role {role!r}: take one of {_choices}",
        "part": "{method} needs the part {part}, and this {worker} was started with role={role!r}",
        "save": "this {worker} trains nothing, so it has nothing to save: save the role that "
        "trains",
        "checkpoint": "{method} is of a policy or a critic, and this {worker} has {_choices} alone",
        "model": "this {worker} has no {part}: it was started with {_choices}",
        "init": "the role has no models yet: call init_model() first",
        "reward model": "the run has no reward model: set rewards.reward_model",
    }

    @property
    def _choices(self) -> str:
        return ", ".join(self.choices)


class RoleWorker(MegatronWorker, TrainingRank):
    """Rank of a role, on the engine that the run's configuration names.

    Batches are dealt out over replicas. Results of rows come from the last pipeline stage, which
    has sent them to the other stages. Metrics are of all replicas.
    """

    _step: TrainingStep | None = None
    _worker: TrainWorker | None = None

    def rank_info(self) -> DistRankInfo:
        """Return the place of this rank in the layout of its engine."""
        if self._config.trainer.on_megatron:
            return MegatronWorker.rank_info(self)
        return TrainingRank.rank_info(self)

    @property
    def models(self) -> Collection[ModelName]:
        """Models of the role."""
        raise NotImplementedError

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the models of the role. All ranks have joined their process group."""
        # Imported by choice: megatron-core and veRL are installed for the runs that use them.
        if self._config.trainer.engine == "megatron":
            from ..trainer.models import megatron

            self._step = megatron.make_step(self._config, self._device, self.models)
        elif self._config.trainer.engine == "verl":
            from ..trainer.models import verl

            self._step = verl.make_step(self._config, self._device, self.models)
        elif self._config.trainer.engine == "verl-megatron":
            from ..trainer.models import verl_megatron

            self._step = verl_megatron.make_step(self._config, self._device, self.models)
        else:
            from ..trainer.models import fsdp

            self._step = fsdp.make_step(self._config, self._device, self.models)

    @property
    def _in_run(self) -> TrainWorker:
        """Worker that saves and publishes the models as a run's trainer does.

        The first use opens the log of the run.
        """
        if self._worker is None:
            worker = worker_class(self._config)(self._config, self._rank)
            worker.open(self._loaded)
            self._worker = worker
        return self._worker

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wait_on_save_thread(self) -> None:
        """Wait for this rank's background saves; raises what failed in them."""
        self._in_run.wait_on_save_thread()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, local_path: str, global_step: int | None = None) -> None:
        """Save models, optimizers and random states of what is trained.

        Args:
            local_path: Folder of the files.
            global_step: Step of a run: the saves are in the background, in the layout of its
                checkpoints, and each is an event. Without it the files are on disk on return.
        """
        engines = self._get_engines("save_checkpoint")
        if not self._loaded.models.trained:
            raise RoleRefused("save", type(self).__name__)
        if global_step is not None:
            self._save_in_run(local_path, global_step)
            return
        for name, engine in engines:
            engine.save_checkpoint(f"{local_path}/{name}")

    def _save_in_run(self, local_path: str, global_step: int) -> None:
        """Save in the background what is trained, as parts of a checkpoint of the run."""
        raise NotImplementedError

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, local_path: str) -> None:
        """Load what :meth:`save_checkpoint` wrote; a role that generates alone loads the weights.

        Args:
            local_path: Folder that was given to it. Of a run's checkpoint that is ready, it is
                `global_step_N/actor`, for the critic too.

        Raises:
            RoleRefused: The role has neither a policy nor a critic.
        """
        in_run: dict[Trained, Path] = {
            "policy": Path(local_path),
            "critic": critic_folder(local_path),
        }
        for name, engine in self._get_engines("load_checkpoint"):
            own = Path(local_path) / name
            # The layout of save_checkpoint() without a step, else that of a run's checkpoint.
            engine.load_checkpoint(str(own if own.is_dir() else in_run[name]))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def leave(self) -> None:
        """Wait for background saves, and leave the process group."""
        if self._worker is not None:
            # First: it waits for the background saves, whose errors are raised from here.
            self._worker.close()
        if self._config.trainer.on_megatron:
            from ..engines.megatron import leave

            # Before the process group, of which its groups are parts.
            leave()
        dist.destroy_process_group()

    def _compute(self, model: ModelName, field: str, batch: Batch) -> dict[str, Tensor]:
        """Return a field of the batch, computed without gradients. Collective."""
        return self._with(model).passes(batch.to(self._device), [field])

    def _update(self, model: Trained, batch: Batch) -> dict[str, float]:
        """Take the optimizer steps of a model on a prepared batch. Collective."""
        return self._with(model).update(batch.to(self._device), model)

    def _with(self, model: ModelName) -> TrainingStep:
        """Return the step. Raises RoleRefused on all ranks if it lacks the model."""
        if model not in self.models:
            raise RoleRefused(
                "model", type(self).__name__, part=model, choices=tuple(sorted(self.models))
            )
        return self._loaded

    @property
    def _loaded(self) -> TrainingStep:
        if self._step is None:
            raise RoleRefused("init", type(self).__name__)
        return self._step

    def _get_engines(self, method: str) -> list[tuple[Trained, Any]]:
        """Return the engines that have checkpoints. Raises RoleRefused if there are none."""
        models = self._loaded.models
        both: list[tuple[Trained, Any]] = [("policy", models.policy), ("critic", models.critic)]
        engines = [(name, engine) for name, engine in both if engine is not None]
        if not engines:
            raise RoleRefused(
                "checkpoint", type(self).__name__, method=method, choices=tuple(sorted(self.models))
            )
        return engines


async def start_role(kind: type[RoleWorker], config: RunConfig, **options: Any) -> RoleGroup:
    """Start a role on all ranks of the run's trainer, and let them form their process group.

    Args:
        kind: Class of the role.
        config: The run: engine, ranks and layout of its trainer, models, algorithm.
        options: Options of the workers, such as the role of an :class:`ActorRolloutRefWorker`.

    Raises:
        RoleRefused: The role is unknown.
    """
    workers = start_rank_actors(kind, config, options)
    group = RoleGroup(kind, workers, config=config, name=kind.__name__)
    # Before the join: a rank that dies in it is then named with its process and signal.
    await group.watch()
    host, port = await group.call("address")
    await group.call("join", host, port)
    return group
