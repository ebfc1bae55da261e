"""Ray actors of the trainer's ranks, made by a process that loads no torch for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ray

from trinity_events.diagnostics.stacks import enable_stack_dumps

from ..config.train_config import RunConfig
from ..worker_group.placement import rank_options
from .workers import ROLE

if TYPE_CHECKING:
    from .workers.fsdp import TrainWorker


class RankActor:
    """Ray actor of one rank.

    The libraries of its worker load in its own process, while other processes load theirs.

    Args:
        config: The run.
        rank: Which of its trainers.
        own_gpu: Whether every trainer was given a GPU of its own.
    """

    def __init__(self, config: RunConfig, rank: int, *, own_gpu: bool) -> None:
        # First: a rank that hangs while it loads its libraries is named by its process, too.
        enable_stack_dumps(config.run_id, f"{ROLE}-{rank}")
        self._worker = worker_class(config)(config, rank, own_gpu=own_gpu)

    def execute(self, *args: Any, **options: Any) -> Any:
        """Call a method of the worker, as :meth:`.Worker.execute`."""
        return self._worker.execute(*args, **options)


def worker_class(config: RunConfig) -> type[TrainWorker]:
    """Return the class of the workers on the run's engine."""
    if config.trainer.engine == "megatron":
        from .workers.megatron import MegatronTrainWorker

        return MegatronTrainWorker
    if config.trainer.engine == "verl":
        from .workers.verl import VerlTrainWorker

        return VerlTrainWorker
    if config.trainer.engine == "verl-megatron":
        from .workers.verl_megatron import VerlMegatronTrainWorker

        return VerlMegatronTrainWorker
    from .workers.fsdp import TrainWorker

    return TrainWorker


def start_rank_actors(
    kind: type, config: RunConfig, own: Mapping[str, Any] | None = None
) -> list[Any]:
    """Start an actor of this class for each rank of the run, where its placement says.

    Args:
        kind: Class of the actors.
        config: The run.
        own: Keyword arguments of the class, in addition to those of its rank.
    """
    actor: Any = ray.remote(kind)
    actors = []
    for rank in range(config.trainer.rank_count):
        # Without a wait for the one before: libraries and weights load in all processes at once.
        placed, own_gpu = rank_options(config, rank)
        actors.append(actor.options(**placed).remote(config, rank, own_gpu=own_gpu, **(own or {})))
    return actors
