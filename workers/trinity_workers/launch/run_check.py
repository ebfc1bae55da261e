"""Checks of a run before anything of it is started, which find all mistakes at once."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import anyio.to_thread

from trinity_events.errors import TrinityError
from trinity_events.system.disk_space import get_free_disk_bytes
from trinity_events.system.error_text import first_error
from trinity_events.system.shared_memory import SHARED_MEMORY, free_bytes
from trinity_events.trackers import find_tracker

from ..config.errors import BadSettings, SeveralMistakes
from ..config.sections.model import ModelConfig
from ..config.sections.trainer import TrainerConfig
from ..config.train_config import TrainConfig
from ..rollout_engines.loading import check_installed, find_engine
from ..rollouts.held_out_sets import held_out_sets, read_own_questions
from ..rollouts.user_task import start_rewards, task_of
from ..sandbox.environments import EnvironmentProcesses
from ..storage.object_store import ObjectStore
from ..tasks import is_built_in
from ..tasks.errors import SetsUnusable
from ..worker_group.placement import Needs
from .cluster import check_gpus
from .memory_estimate import format_estimates
from .transport import chosen_transport

_CHECKPOINT_BYTES = 12
"""Bytes of a parameter in a checkpoint: its value and both moments of AdamW, in float32."""
_VERSIONS = 2
"""Versions in shared memory at a time: one is written while explorers read the other."""
_GIB = 1 << 30

Check = Callable[[], Awaitable[Any]]


class BuiltInModelRefused(BadSettings):
    """A run asks for what the built-in model does not do.

    Attributes:
        fault: ``task`` for another task than the built-in ones, ``dtype`` for other numbers.
        dtype: Data type that the run asks for.
    """

    fault: Literal["task", "dtype"]
    dtype: str = ""
    texts: ClassVar = {
        "task": "a task of your own needs a model of your own: set model.path to a Hugging Face "
        "folder (the small built-in model only answers the built-in tasks)",
        "dtype": "model.dtype is {dtype}, and the built-in model is float32: set model.path, or "
        "leave model.dtype out",
    }


class ExpertsNotTaken(BadSettings):
    """Explorers cannot load the experts that a Megatron trainer would publish.

    Attributes:
        model_type: Type of the model.
    """

    model_type: str
    text = (
        "explorers of the engine huggingface join the experts of {model_type} in memory, and a "
        "trainer on Megatron publishes each by itself, as files have them: set trainer.colocated "
        "true, or another explorer.engine"
    )


class NotEnoughSpace(BadSettings):
    """A disk or the shared memory has less space than the run is about to need.

    Attributes:
        place: The folder.
        free: Its free bytes.
        needed: The bytes that are needed.
        what: Clause that says what needs them.
        way_out: Advice.
    """

    place: Path
    free: int
    needed: int
    what: str
    way_out: str
    text = "{place} has {_free_gib:.1f} GiB free, and {what} about {_needed_gib:.1f} GiB: {way_out}"

    @property
    def _free_gib(self) -> float:
        return self.free / _GIB

    @property
    def _needed_gib(self) -> float:
        return self.needed / _GIB


async def check_run(
    config: TrainConfig, root: Path, *, alone: bool, ray_address: str | None
) -> None:
    """Raise the mistake that :func:`find_mistakes` finds, or SeveralMistakes."""
    mistakes = await find_mistakes(config, root, alone=alone, ray_address=ray_address)
    if mistakes:
        raise mistakes[0] if len(mistakes) == 1 else SeveralMistakes(tuple(mistakes))


async def find_mistakes(
    config: TrainConfig,
    root: Path | None,
    *,
    alone: bool,
    ray_address: str | None,
    thorough: bool = False,
) -> list[TrinityError]:
    """Return an error for each mistake that can be found without training.

    What is the user's own is loaded: questions, reward function, environment, engine.

    Args:
        config: The run.
        root: Folder with one checkpoint directory for each run; None leaves its disk unchecked.
        alone: True if the explorers are started with the trainer.
        ray_address: Ray cluster that the run joins; None if all of it is on this host.
        thorough: Compare the model's tensors with its configuration too, and the prompts' lengths
            with their limit. That takes the seconds in which torch is imported; a run's ranks and
            its trainer do it anyway.
    """
    # By its text: two checks that meet one mistake tell it once.
    mistakes: dict[str, TrinityError] = {}
    for check in _checks(config, root, alone=alone, ray_address=ray_address, thorough=thorough):
        try:
            await check()
        # Groups of errors too, as those of task groups.
        except Exception as caught:
            error = first_error(caught)
            # A defect of ours, or of the user's library: its traceback says more than a sentence.
            if not isinstance(error, TrinityError):
                raise
            for mistake in error.errors if isinstance(error, SetsUnusable) else (error,):
                mistakes.setdefault(str(mistake), mistake)  # the reward names its questions too
    return list(mistakes.values())


def _checks(
    config: TrainConfig, root: Path | None, *, alone: bool, ray_address: str | None, thorough: bool
) -> Iterator[Check]:
    here: Callable[..., Check] = partial(partial, anyio.to_thread.run_sync)
    folder = None if config.model.path is None else Path(config.model.path)
    yield here(partial(_check_model, config, folder, thorough=thorough))
    if folder is not None and config.teacher_folder is not None:
        yield here(_check_teacher, config.teacher_folder, folder)
    if config.reward_folder is not None:
        yield here(_check_reward_model, config.reward_folder)
    if config.model.lora.rank:
        yield here(_check_adapters, config.model)
    yield here(partial(_check_task, config, folder, thorough=thorough))
    for name, settings in config.evaluation.sets.items():
        if settings.questions is not None:
            yield here(read_own_questions, config, name, settings.questions)
    yield partial(_check_rewards, config)
    if config.task.environment is not None:
        yield partial(_check_environment, config)
    yield here(_check_experts, config)
    if config.explorer.engine != "huggingface":  # it has all modes and all sampling settings
        yield here(_check_engine, config)
    if alone:
        yield here(check_installed, config.explorer.engine)
    for name in config.tracking.trackers:
        yield here(find_tracker, name)
    if config.checkpoints.mirror is not None:
        yield here(_check_mirror, config.checkpoints.mirror)
    if not config.trainer.colocated:
        yield here(
            partial(
                _check_transport, config, folder, explorers_here=alone, one_host=ray_address is None
            )
        )
    needs = Needs.for_run(config, explorers=config.explorers if alone else 0)
    yield partial(check_gpus, needs, ray_address)
    # Adapters and the built-in model are small.
    if folder is not None and root is not None and _saves_model(config):
        yield here(_check_disk, folder, root)


def _saves_model(config: TrainConfig) -> bool:
    return config.checkpoints.interval > 0 and not config.model.lora.rank


def _check_model(config: TrainConfig, folder: Path | None, *, thorough: bool) -> None:
    if folder is not None:
        from ..learning.policy import check_policy, check_policy_files

        check_policy_files(folder)
        if thorough:
            check_policy(folder)
            _check_layers(folder, config.trainer)
    elif not is_built_in(config.task.name) or config.task.has_questions:
        raise BuiltInModelRefused("task")
    elif config.model.dtype != "float32":
        raise BuiltInModelRefused("dtype", config.model.dtype)


def _check_experts(config: TrainConfig) -> None:
    trainer, folder = config.trainer, config.model.path
    takes_any = trainer.colocated or config.explorer.engine != "huggingface"
    if folder is None or trainer.engine != "megatron" or takes_any:
        return
    try:
        model_type = str(json.loads(Path(folder, "config.json").read_bytes())["model_type"])
    except (OSError, ValueError, KeyError, TypeError):
        return  # the check of the model reports it
    # As engines.megatron.model.has_experts() knows them, which imports torch.
    if model_type.endswith(("_moe", "deepseek_v3")):
        raise ExpertsNotTaken(model_type)


def _check_teacher(folder: Path, policy: Path) -> None:
    from ..learning.policy import check_policy
    from ..learning.teacher import checked_teacher

    check_policy(checked_teacher(folder, policy))


def _check_reward_model(folder: Path) -> None:
    from ..learning.reward_model import check_reward_model

    check_reward_model(folder)


def _check_adapters(model: ModelConfig) -> None:
    from ..learning.adapters import check_adapters

    check_adapters(model.lora, None if model.path is None else Path(model.path))


def _check_layers(folder: Path, trainer: TrainerConfig) -> None:
    if trainer.engine == "fsdp" and trainer.tensor_ranks > 1:
        from ..engines.fsdp_tensor import check_layers

        check_layers(folder, trainer.tensor_ranks)


def _check_task(config: TrainConfig, folder: Path | None, *, thorough: bool) -> None:
    """Read the questions, but those that only a built-in task draws.

    Sets of held-out questions that have a source of their own are checked by themselves. A thorough
    check compares the lengths of prompts with their limit.
    """
    sets = config.evaluation.sets.values()
    filters = thorough and config.rollouts.max_prompt_tokens is not None
    has_sources = config.task.has_questions or any(settings.questions for settings in sets)
    if is_built_in(config.task.name) and not has_sources and not filters:
        return
    task = task_of(config)
    task.question(0)
    for settings in sets:
        if settings.questions is None:
            task.held_out(settings.count)
    if filters:
        from ..rollouts.prompt_filter import load_filter

        load_filter(config, folder, task, held_out_sets(config, task))


async def _check_rewards(config: TrainConfig) -> None:
    await (await start_rewards(config)).aclose()


async def _check_environment(config: TrainConfig) -> None:
    task = config.task
    async with EnvironmentProcesses(task.environment or "", deadline=task.environment_deadline):
        pass


def _check_engine(config: TrainConfig) -> None:
    find_engine(
        config.explorer.engine,
        config.rollouts.pause_mode,
        adapters=config.model.lora.rank > 0,
        sampling_settings=config.sampling_settings,
        options=config.explorer.engine_options,
    )


def _check_mirror(url: str) -> None:
    ObjectStore(url).check()


def _check_transport(
    config: TrainConfig, folder: Path | None, *, explorers_here: bool, one_host: bool
) -> None:
    chosen = chosen_transport(
        config.sync,
        explorers_here=explorers_here,
        one_host=one_host,
        reads_ray=config.explorers_pull,
    )
    if chosen.name != "shm" or folder is None:
        return
    bytes_each = 2 if config.model.dtype == "bfloat16" else 4
    needed, free = _VERSIONS * bytes_each * _count_parameters(folder), free_bytes()
    if free < needed:
        raise NotEnoughSpace(
            *(SHARED_MEMORY, free, needed),
            "two versions of the weights take",
            "give it more memory, or set sync.transport to ray or redis",
        )


def _check_disk(folder: Path, root: Path) -> None:
    needed = _CHECKPOINT_BYTES * _count_parameters(folder)
    free = get_free_disk_bytes(root)
    if free < needed:
        raise NotEnoughSpace(
            *(root, free, needed),
            "a checkpoint of the model takes",
            "make room, or name another disk by checkpoints.root",
        )


def estimate_memory(config: TrainConfig) -> list[str]:
    """Return lines about the memory of ranks and explorers; none for the small built-in model."""
    folder = None if config.model.path is None else Path(config.model.path)
    return [] if folder is None else format_estimates(config, folder, _count_parameters(folder))


def _count_parameters(folder: Path) -> int:
    """Return the parameters of a model by the headers of its files; 0 if these are unreadable."""
    from ..learning.pretrained import BadPolicy, raising_bad_policy, tensor_shapes

    try:
        with raising_bad_policy(""):
            return sum(map(math.prod, tensor_shapes(folder).values()))
    except BadPolicy:  # the check of the model says so
        return 0
