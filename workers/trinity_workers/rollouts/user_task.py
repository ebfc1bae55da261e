"""Task and rewards of a run, as its configuration names them."""

from __future__ import annotations

from trinity_events.diagnostics.waits import NO_REPORTS, WaitReporter

from ..config.train_config import TrainConfig
from ..rewards import RewardPool, Rewards, RewardSource, TaskRewards
from ..rewards.judge_choice import chosen_rewards
from ..tasks import Task, built_in_task, is_built_in, load_task


def task_of(config: TrainConfig) -> Task:
    """Return the task of a run. Raises TaskError."""
    task = config.task
    return load_task(
        task.name,
        seed=config.seed,
        questions=task.questions,
        sets=task.sets,
        prompt=task.prompt,
        answer=task.answer,
        options=task.options,
    )


def rewards_of(config: TrainConfig, waits: WaitReporter = NO_REPORTS) -> Rewards:
    """Return the judge of a run's answers: a pool of processes, but for the built-in task.

    ``waits`` reports long waits for a reward. Raises RewardFailed if a judge's token is not set.
    """
    task, rewards = config.task, config.rewards
    chosen = chosen_rewards(rewards, waits)
    if chosen is not None:
        return chosen
    if is_built_in(task.name) and not task.has_questions and rewards.function is None:
        return TaskRewards(built_in_task(task.name, config.seed).reward)
    return RewardPool(
        RewardSource(
            reward=rewards.function,
            task=task.name,
            questions=task.questions,
            sets=task.sets,
            seed=config.seed,
            options=task.options,
            deadline=rewards.deadline,
        ),
        waits=waits,
    )


async def start_rewards(config: TrainConfig, waits: WaitReporter = NO_REPORTS) -> Rewards:
    """Return the judge, ready. Raises RewardFailed if it cannot judge."""
    rewards = rewards_of(config, waits)
    try:
        await rewards.start()
    # Cancellation too: the processes have sessions of their own, which Ctrl-C does not reach.
    except BaseException:
        await rewards.aclose()
        raise
    return rewards
