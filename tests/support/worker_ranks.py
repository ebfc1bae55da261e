"""Workers of a trainer: in the session's rank processes, or called in this process."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tests.support.rank_processes import Rank, RankProcesses
from trinity_workers.config.train_config import RunConfig


class WorkerRanks:
    """Ranks of one trainer, whose workers stay from one call to the next.

    Args:
        processes: Processes that the ranks are.
        config: The run; it has the number of ranks and the engine.
    """

    def __init__(self, processes: RankProcesses, config: RunConfig) -> None:
        processes.leave()
        self._processes = processes
        self._world = config.trainer.rank_count
        processes.start(self._world)
        [place, *_] = processes.call(range(self._world), _make, config)
        self(_set_up, *place)

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What the function returns on each rank, given its worker; raises what one raised."""
        return self._processes.call(range(self._world), _call, function, args)

    def close(self) -> None:
        """Shut the workers down."""
        self(_shut_down)


class LocalActor:
    """Handle of a worker in this process, which is called as Ray's actors are."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def __getattr__(self, method: str) -> SimpleNamespace:
        async def remote(*args: Any, **options: Any) -> Any:
            return getattr(self._worker, method)(*args, **options)

        return SimpleNamespace(remote=remote)


def _make(rank: Rank, config: RunConfig) -> tuple[str, int] | None:
    from trinity_workers.trainer.rank_actors import worker_class

    rank.objects.worker = worker_class(config)(config, rank.number)
    return rank.objects.worker.address() if rank.number == 0 else None


def _call(rank: Rank, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(rank.objects.worker, *args)


def _set_up(worker: Any, host: str, port: int) -> None:
    worker.setup(host, port)


def _shut_down(worker: Any) -> None:
    worker.shutdown()
