"""Task, rewards and model of a run, as its configuration names them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import anyio.to_thread

from trinity_events.diagnostics.waits import NO_REPORTS, WaitReporter

from ..config.errors import BadSettings
from ..config.sections.model import ModelConfig
from ..config.train_config import TrainConfig
from ..rewards import RewardPool, Rewards, RewardSource, TaskRewards
from ..rewards.judge_choice import chosen_rewards
from ..rollout_engines.loading import ENGINES, find_engine
from ..sandbox.environments import EnvironmentProcesses
from ..storage.object_store import ObjectStore
from ..tasks import Task, built_in_task, is_built_in, load_task
from .held_out_sets import held_out_sets


def task_of(config: TrainConfig) -> Task:
    """Return the task of a run. Raises TaskError."""
    task = config.task
    return load_task(
        task.name,
        seed=config.seed,
        questions=task.questions,
        prompt=task.prompt,
        answer=task.answer,
        options=task.options,
    )


def rewards_of(config: TrainConfig, waits: WaitReporter = NO_REPORTS) -> Rewards:
    """Return the judge of a run's answers: a pool of processes, but for the built-in task.

    ``waits`` reports long waits for a reward. Raises RewardFailed if a judge's token is not set.
    """
    task = config.task
    chosen = chosen_rewards(config.rewards, task.reward_deadline, waits)
    if chosen is not None:
        return chosen
    if is_built_in(task.name) and task.questions is None and task.reward is None:
        return TaskRewards(built_in_task(task.name, config.seed).reward)
    return RewardPool(
        RewardSource(
            reward=task.reward,
            task=task.name,
            questions=task.questions,
            seed=config.seed,
            options=task.options,
            deadline=task.reward_deadline,
        ),
        waits=waits,
    )


async def start_rewards(config: TrainConfig, waits: WaitReporter = NO_REPORTS) -> Rewards:
    """Return the judge, ready. Raises RewardFailed if it cannot judge."""
    rewards = rewards_of(config, waits)
    try:
        await rewards.start()
    except BaseException:
        await rewards.aclose()
        raise
    return rewards


async def check_user_task(config: TrainConfig) -> None:
    """Load what is the user's own, and check the models' folders, before a run is opened.

    Raises:
        TrinityError: in one sentence, if one of them cannot be used.
    """
    built_in = is_built_in(config.task.name) and config.task.questions is None
    if config.model.path is not None:
        await anyio.to_thread.run_sync(_check_model, Path(config.model.path))
    elif not built_in:
        raise BadSettings(
            "a task of your own needs a model of your own: set model.path to a Hugging Face "
            "folder (the small built-in model only answers the built-in tasks)"
        )
    elif config.model.dtype != "float32":
        raise BadSettings(
            f"model.dtype is {config.model.dtype}, and the built-in model is float32: set "
            "model.path, or leave model.dtype out"
        )
    if config.model.path is not None and config.teacher_folder is not None:
        await anyio.to_thread.run_sync(
            _check_teacher, config.teacher_folder, Path(config.model.path)
        )
    if config.reward_folder is not None:
        await anyio.to_thread.run_sync(_check_reward_model, config.reward_folder)
    if config.model.lora.rank:
        await anyio.to_thread.run_sync(_check_adapters, config.model)
    await anyio.to_thread.run_sync(_check_questions, config)
    if config.explorer.engine not in ENGINES:
        await anyio.to_thread.run_sync(
            partial(
                find_engine,
                config.explorer.engine,
                config.rollouts.on_update,
                adapters=config.model.lora.rank > 0,
            )
        )
    if config.checkpoints.mirror is not None:
        await anyio.to_thread.run_sync(_check_mirror, config.checkpoints.mirror)
    if config.task.environment is not None:
        async with EnvironmentProcesses(
            config.task.environment, deadline=config.task.environment_deadline
        ):
            pass
    await (await start_rewards(config)).aclose()


def _check_questions(config: TrainConfig) -> None:
    """Read the questions, but those that only a built-in task draws."""
    sources = [settings.questions for settings in config.evaluation.sets.values()]
    if not is_built_in(config.task.name) or config.task.questions is not None or any(sources):
        task = task_of(config)
        task.question(0)
        held_out_sets(config, task)


def _check_teacher(folder: Path, policy: Path) -> None:
    from ..learning.policy import check_policy
    from ..learning.teacher import checked_teacher

    check_policy(checked_teacher(folder, policy))


def _check_mirror(url: str) -> None:
    ObjectStore(url).check()


def _check_reward_model(folder: Path) -> None:
    from ..learning.reward_model import check_reward_model

    check_reward_model(folder)


def _check_adapters(model: ModelConfig) -> None:
    from ..learning.adapters import check_adapters

    check_adapters(model.lora, None if model.path is None else Path(model.path))


def _check_model(folder: Path) -> None:
    from ..learning.policy import check_policy_files

    check_policy_files(folder)
