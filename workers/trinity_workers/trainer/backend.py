"""Port of training backends, as the trainer's loop drives them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal, TypeAlias, cast

from trinity_events.errors import TrinityError
from trinity_schemas import ExperienceHeader

from ..rollout_engines.base import Generation, GenerationRequest, OnlyTrains
from .state import TrainerState

WeightSyncAddress: TypeAlias = tuple[str, int, list[tuple[str, str, tuple[int, ...]]]]
"""Address and port of the collective group, and name, dtype and shape of each tensor."""


TrainingBatch: TypeAlias = Sequence[ExperienceHeader] | Sequence[Sequence[ExperienceHeader]]
"""Samples of a training step, or references to them: a flat list, as in Trinity-RFT, or the groups
of its prompts."""


class UnusableBatch(TrinityError):
    """A training step is given no samples, or samples next to groups of samples.

    Attributes:
        samples: Number of samples.
        groups: Number of groups next to them.
    """

    samples: int = 0
    groups: int = 0

    def __str__(self) -> str:
        if not self.groups:
            return "the training batch is empty: give samples, or groups of samples"
        return (
            f"the training batch has {self.samples} samples next to {self.groups} groups: give a "
            "flat list, or groups alone"
        )


class NoWeightSyncGroup(TrinityError):
    """A collective group is asked for that the run cannot have.

    Attributes:
        run_id: The run.
        fault: ``method`` if versions take another way, ``address`` if the group forms elsewhere,
            ``size`` if it has too few members.
        group: Name of the group.
        address: Address at which it forms.
        given: Address that was given.
        size: Number of its members.
    """

    run_id: str
    fault: Literal["method", "address", "size"]
    group: str = ""
    address: str = ""
    given: str = ""
    size: int = 0
    texts: ClassVar = {
        "method": "run {run_id} has no collective group: set sync.method nccl",
        "address": "the group {group} forms at {address}, and not at {given}: take the address of "
        "get_weight_sync_info",
        "size": "the group {group} has {size} members: it needs the trainer and at least one "
        "explorer",
    }


class CannotLoad(TrinityError):
    """A run resumes, and its engine does not load checkpoints.

    Attributes:
        engine: Class of the engine.
        step: Step of the checkpoint.
        folder: Its folder.
    """

    engine: str
    step: int
    folder: Path
    text = (
        "{engine} cannot go on from the checkpoint of step {step} in {folder}: it has no "
        "load_checkpoint(); begin anew with --fresh"
    )


def group_by_prompt(batch: TrainingBatch) -> list[Sequence[ExperienceHeader]]:
    """Return the groups of a training batch: groups as they are, a flat list by its ordinals.

    Groups of a flat list are in the order of their first samples.

    Raises:
        UnusableBatch: There are no samples, or there are samples next to groups.
    """
    # Trinity-RFT's trainers give a flat list, and this project's loop gives groups.
    samples = [item for item in batch if isinstance(item, ExperienceHeader)]
    if not samples:
        groups = [group for group in cast("Sequence[Sequence[ExperienceHeader]]", batch) if group]
        if not groups:
            raise UnusableBatch()
        return groups
    if len(samples) < len(batch):
        raise UnusableBatch(len(samples), len(batch) - len(samples))
    by_ordinal: dict[int, list[ExperienceHeader]] = {}
    for sample in samples:
        by_ordinal.setdefault(sample.ordinal, []).append(sample)
    return list(by_ordinal.values())


class TrainEngineWrapper(ABC):
    """Training engine, with workers that may run in other processes."""

    loads_payloads: ClassVar[bool] = False
    """True if its workers load the tokens of references; else the trainer's process does."""

    @abstractmethod
    async def prepare(self) -> None:
        """Start the workers and load the model."""

    async def load_checkpoint(self, folder: Path, step: int) -> None:
        """Load the checkpoint of a step on every rank, before the first publication.

        Raises:
            CannotLoad: The engine does not load checkpoints.
        """
        raise CannotLoad(type(self).__name__, step, folder)

    @property
    @abstractmethod
    def train_step_num(self) -> int:
        """Number of steps taken."""

    @abstractmethod
    async def train_step(self, batch_exps: TrainingBatch) -> dict[str, float]:
        """Take one step on samples; return its metrics.

        Args:
            batch_exps: Samples in a flat list, or in the groups of their prompts:
                :func:`group_by_prompt` returns the groups of both. They are references only if
                ``loads_payloads`` is True.

        Raises:
            PayloadsUnusable: Tokens of references cannot be used; no step was begun.
        """

    async def generate_sequences(self, prompts: Sequence[GenerationRequest]) -> list[Generation]:
        """Generate one turn for each request, in order, with the present weights.

        Raises RolloutEngineError if the engine only trains.
        """
        raise OnlyTrains(type(self).__name__)

    @abstractmethod
    async def save_checkpoint(
        self,
        block_until_saved: bool = False,
        save_as_hf: bool = False,
        state: TrainerState | None = None,
    ) -> None:
        """Save the whole checkpoint: model, optimizer, random states, and the loop's own state.

        The model is saved as a Hugging Face folder if ``save_as_hf`` is set, or if the step's
        weights are a version in files.
        """

    @abstractmethod
    async def save_state_dict(self, metrics: dict[str, float] | None = None) -> None:
        """Save the weights in files, for checkpoint-based weight sync, and commit the version."""

    @abstractmethod
    async def upload_state_dict(self, metrics: dict[str, float] | None = None) -> None:
        """Publish the weights for memory-based weight sync, and commit the version."""

    @abstractmethod
    async def sync_weight_nccl(self, metrics: dict[str, float] | None = None) -> None:
        """Send the weights through the collective group, and commit the version."""

    @abstractmethod
    async def get_weight_sync_info(self) -> WeightSyncAddress | None:
        """Return address, port and tensors for the collective group; None without a group.

        Each tensor has its name, its dtype and its shape. Every rank gathers the tensors for it.
        """

    @abstractmethod
    async def setup_weight_sync_group(
        self, master_address: str, master_port: int, world_size: int, group_name: str, timeout: int
    ) -> None:
        """Form the collective group of trainer and explorers.

        Args:
            master_address: Address of :meth:`get_weight_sync_info`.
            master_port: Port of :meth:`get_weight_sync_info`.
            world_size: Members: the trainer, and at least one explorer.
            group_name: Name of the group in the log of this process.
            timeout: Seconds to wait for the explorers.

        Raises:
            NoWeightSyncGroup: The run has no group, or none at this address or of this size.
            DeadlineExceeded: Explorers are missing after ``timeout`` seconds.
        """

    @abstractmethod
    async def teardown_weight_sync_group(self) -> None:
        """End the group; it can be set up again. Without a group, do nothing."""

    async def wait_for_save(self) -> None:  # noqa: B027 - an engine without such saves has none
        """Wait for background saves, and raise the error of one that failed."""

    async def shutdown(self) -> None:  # noqa: B027 - an engine in this process has no workers
        """Stop the workers."""
