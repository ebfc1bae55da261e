"""Episodes of a run, with the judge and the environment that it configures."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace

from trinity_events.diagnostics.phases import PhaseClock
from trinity_events.diagnostics.waits import WaitReporter
from trinity_schemas import RewardErrorReported

from ..config.train_config import RunConfig
from ..learning.policy import load_tokenizer
from ..rewards.error_reports import ErrorReports
from ..rollout_engines.base import TurnGenerator
from ..sandbox.environments import EnvironmentProcesses
from ..tasks import Task
from .episodes import Episodes
from .user_task import start_rewards


async def open_episodes(
    config: RunConfig,
    engine: TurnGenerator,
    task: Task,
    *,
    name: str,
    waits: WaitReporter,
    publish: Callable[[RewardErrorReported], None],
    exits: AsyncExitStack,
    clock: PhaseClock,
) -> Episodes:
    """Start the judge and the environment of a run, and return its episodes.

    Args:
        config: The run.
        engine: Engine that generates the policy's turns.
        task: Task of the run.
        name: Name in experiences of the process that answers.
        waits: Reporter of long waits.
        publish: Publishes the error of a reward; it is called in a thread.
        exits: Stack that ends the judge and the environment.
        clock: Clock of the process that answers.

    Raises:
        TrinityError: if one of them cannot be started.
    """
    judge = await start_rewards(config, waits)
    exits.push_async_callback(judge.aclose)
    environment = None
    if config.task.environment is not None:
        environment = await exits.enter_async_context(
            EnvironmentProcesses(
                config.task.environment,
                deadline=config.task.environment_deadline,
                count=config.groups_per_claim,
                waits=waits,
            )
        )
    return Episodes(
        engine=engine,
        tokenizer=load_tokenizer(config.model_folder),
        task=task,
        judge=judge,
        explorer=name,
        environment=environment,
        max_turns=config.rollouts.max_turns,
        max_prompt_tokens=config.rollouts.max_prompt_tokens,
        template_kwargs=config.rollouts.chat_template_kwargs,
        include_stop=config.rollouts.include_stop_str_in_output,
        needed_part=config.algorithm.filters.needed_part,
        on_error=config.rewards.on_error,
        error_score=config.rewards.error_score,
        report=ErrorReports(publish).add,
        clock=clock,
        keeps_messages=config.record.rollouts != "none",
    )


def create_held_out_episodes(episodes: Episodes, task: Task) -> Episodes:
    """Return the episodes of a set of held-out questions.

    A reward that fails never fails their request: the trainer counts and names it in the result,
    as ``rewards.on_error`` asks.
    """
    # Without a needed part: filters.part chooses groups for training, and none here.
    return replace(episodes, task=task, on_error="score", held_out=True, needed_part=None)
