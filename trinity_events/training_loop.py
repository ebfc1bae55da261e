"""One object for each rank of a training loop: its run, its saves and its weights.

1. All ranks work in the epoch that rank 0 has opened, or all of them raise.
2. The run is closed as finished once the saves of every rank have ended well, and else as failed.
3. A rank that ends with an error waits for no other rank: they may be dead, or in a collective.
4. Ranks exchange bytes of a fixed length, and unpickle nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from trinity_schemas import SaveStrategy, StepRef, WeightsApplied

from . import blocking
from .checkpoints.layout import STAGING
from .client.training_run import publishing, training_run
from .coordinator import CheckpointCoordinator, staged_path
from .errors import DeadlineExceeded, RankFailed
from .log import DEADLINE, Publisher
from .server import trinity_home
from .system.error_text import format_cause
from .weights import Synchronizer

_MESSAGE_BYTES = 512
"""Bytes of a message from rank 0, whose length all ranks must know; a longer one is cut."""
_SERVED = 60.0
"""Seconds that a trainer waits by default for explorers to serve a version."""


class TrainingLoop:
    """One rank's part in a run: ``with TrainingLoop("grpo-7b", ROOT) as loop``.

    Every rank of the process group makes one; without a group there is one rank. Rank 0 opens the
    run and gives its epoch to the others. At the end every rank waits for its saves, and then
    rank 0 closes the run, as failed if any rank failed. Callbacks have no block, and call
    :meth:`open` and :meth:`close`.

    Args:
        run: The run's id.
        checkpoint_root: Folder with one checkpoint directory for each run; below
            ``TRINITY_HOME`` by default.
        resume_from: Step that training resumes from; None for a new training.
        config: JSON for the run's other processes: no URLs, no secrets, no absolute paths.
        save_strategy: Saves that may run at once.
        redis_url: The server; ``TRINITY_REDIS_URL`` by default, else the embedded server.
        deadline: Seconds for which each wait for a server that is away lasts.
        group: Process group of the ranks; by default torch's, if it is initialized.
        weights: Options of :class:`~trinity_events.Synchronizer`, such as ``transport="shm"``.
    """

    saves: CheckpointCoordinator
    """Coordinator of this rank's saves."""
    weights: Synchronizer
    """Client through which this rank publishes weights."""
    epoch: int
    """Epoch of the run."""

    def __init__(
        self,
        run: str,
        checkpoint_root: Path | str | None = None,
        *,
        resume_from: int | None = None,
        config: str | None = None,
        save_strategy: SaveStrategy = "unrestricted",
        redis_url: str | None = None,
        deadline: float = DEADLINE,
        group: dist.ProcessGroup | None = None,
        **weights: Any,
    ) -> None:
        self.run_id = run
        self.folder = Path(checkpoint_root or trinity_home() / "checkpoints") / run
        self._run = training_run(
            run,
            resume_from=resume_from,
            config=config,
            save_strategy=save_strategy,
            redis_url=redis_url,
            deadline=deadline,
        )
        self._deadline = deadline
        self._save_strategy = save_strategy
        self._redis_url = redis_url
        self._group = group
        self._weights = weights
        self._exits: ExitStack | None = None

    @property
    def rank(self) -> int:
        """Rank of this process in the group; 0 without one."""
        return dist.get_rank(self._group) if dist.is_initialized() else 0

    @property
    def ranks(self) -> int:
        """Number of ranks in the group; 1 without one."""
        return dist.get_world_size(self._group) if dist.is_initialized() else 1

    def open(self) -> TrainingLoop:
        """Open the run on rank 0, and connect every rank in its epoch. Collective.

        Raises:
            RankFailed: if another rank could not.
            TrinityError: as :func:`~trinity_events.training_run`.
        """
        opened: Publisher | None = None
        error: Exception | None = None
        if self.rank == 0:
            try:
                opened = self._run.open()
            except Exception as caught:
                error = caught
        try:
            self.epoch = int(self._from_rank_0(str(opened.epoch if opened else 0), error))
            self._connect()
        except BaseException as caught:
            self._run.close(caught)
            raise
        return self

    def _connect(self) -> None:
        with ExitStack() as exits:
            error: Exception | None = None
            try:
                actor = exits.enter_context(
                    publishing(
                        self.run_id,
                        self.epoch,
                        "actor",
                        self.rank,
                        redis_url=self._redis_url,
                        deadline=self._deadline,
                    )
                )
                self.saves = CheckpointCoordinator(actor, self.folder, strategy=self._save_strategy)
                self.weights = exits.enter_context(
                    closing(
                        Synchronizer(
                            self.run_id,
                            self.epoch,
                            redis_url=self._redis_url,
                            deadline=self._deadline,
                            **self._weights,
                        )
                    )
                )
            except Exception as caught:
                error = caught
            self._agree(error)
            self._exits = exits.pop_all()

    def close(self, error: BaseException | None = None) -> None:
        """Wait for the saves of all ranks, and close the run; once. Collective without an error.

        Args:
            error: Error that ended training on this rank; the run is closed as failed with it.

        Raises what :meth:`~trinity_events.CheckpointCoordinator.wait_all` raises, RankFailed if
        another rank failed, or PublishError. With ``error`` nothing is raised.
        """
        exits, self._exits = self._exits, None
        if exits is None:
            return
        if error is not None:
            # Invariant 3; what fails here follows from the error.
            with suppress(Exception), exits:
                pass
            self._run.close(error)
            return
        try:
            with exits:
                failure: Exception | None = None
                try:
                    self.saves.wait_all()
                    self.weights.flush()
                except Exception as caught:
                    failure = caught
                self._agree(failure)  # rank 0 closes the run after the other ranks' saves
        except BaseException as caught:
            self._run.close(caught)
            raise
        self._run.close()

    def __enter__(self) -> TrainingLoop:
        return self.open()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(error)

    def publish(
        self,
        step: int,
        named_tensors: Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor],
        metrics: Mapping[str, object] | None = None,
    ) -> None:
        """Publish the whole model's weights of a step from rank 0; other ranks do nothing.

        Ranks that each hold a part publish it through :attr:`weights`.
        """
        if self.rank == 0:
            self.weights.open_version(step)
            self.weights.publish(named_tensors, step)
            self.weights.commit(step, metrics)

    def staged_folder(self, step: int) -> Path:
        """Return a new folder for a step's checkpoint, the same on every rank. Collective.

        It becomes ``global_step_N`` once all saves of the step have finished.
        """
        name = self._from_rank_0(staged_path(self.folder, self.epoch, step).name)
        staged = self.folder / STAGING / name
        staged.mkdir(parents=True, exist_ok=True)
        return staged

    def save(self, step: int, state: Mapping[str, Any], name: str = "model") -> None:
        """Save a copy of this rank's state for a step's checkpoint, in the background. Collective.

        The file is ``NAME_rank_RANK.pt``, by ``torch.save``. For several saves a rank, or another
        format: :meth:`staged_folder`, :attr:`saves` and :meth:`commit_checkpoint`.
        """
        path = self.staged_folder(step) / f"{name}_rank_{self.rank}.pt"
        # Training changes the tensors while the thread writes.
        copy = tree_map_only(
            torch.Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), state
        )
        self.saves.save_async(name, partial(torch.save, copy, path), step, path=path)
        self.commit_checkpoint(step)

    def commit_checkpoint(
        self, step: int, *, saves: int = 1, metrics: Mapping[str, object] | None = None
    ) -> None:
        """Say on rank 0 that every rank began ``saves`` saves of a step; others do nothing."""
        if self.rank == 0:
            self.saves.register_and_monitor_blocking(
                step, checkpoint_thread_count=self.ranks * saves, metrics=metrics
            )

    def wait_served(self, step: int, explorers: int, *, deadline: float = _SERVED) -> None:
        """Wait on rank 0 until so many explorers have applied a version; others do nothing.

        Weights in shared memory are removed with their publisher.

        Raises DeadlineExceeded, which says how many are missing.
        """
        if self.rank != 0:
            return
        served: set[int] = set()
        applied = blocking.subscribe(
            self.run_id,
            WeightsApplied,
            # An explorer may have applied it before the trainer waits.
            start="beginning",
            deadline=deadline,
            redis_url=self._redis_url,
        )
        with applied as events:
            try:
                while len(served) < explorers:
                    event = next(events)
                    if event.version == StepRef(self.epoch, step):
                        # A set: an explorer that started again applies a version twice.
                        served.add(event.envelope.producer.rank)
            except DeadlineExceeded as error:
                raise replace(
                    error,
                    missing=f"only {len(served)} of {explorers} explorers served the weights of "
                    f"step {step}",
                ) from None

    def _from_rank_0(self, text: str, error: Exception | None = None) -> str:
        """Return rank 0's text on every rank, or raise its error. Collective; without pickle."""
        if self.ranks > 1:
            # Neither an epoch nor a folder begins with this mark.
            payload = text if error is None else f"!{format_cause(error)}"
            message = torch.frombuffer(
                bytearray(payload.encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0")),
                dtype=torch.uint8,
            ).to(self._device)
            dist.broadcast(message, group=self._group, group_src=0)
            text = bytes(message.tolist()).rstrip(b"\0").decode(errors="replace")
        if error is not None:
            raise error
        if text.startswith("!"):
            raise RankFailed(self.run_id, reason=text[1:])
        return text

    def _agree(self, error: Exception | None) -> None:
        """Raise on every rank if any failed. Collective."""
        failed = 0
        if self.ranks > 1:
            # (), the number of failed ranks once it is reduced.
            mine = torch.tensor(int(error is not None), device=self._device)
            dist.all_reduce(mine, group=self._group)
            failed = int(mine)
        if error is not None:
            raise error
        if failed:
            raise RankFailed(self.run_id, failed)

    @property
    def _device(self) -> torch.device:
        """Device for messages: NCCL takes no tensors of the CPU."""
        if dist.get_backend(self._group) == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")
