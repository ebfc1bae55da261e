"""Inputs of a run's reward model."""

from __future__ import annotations

from pathlib import Path

from ...config.train_config import RunConfig
from ...learning.policy import load_tokenizer
from ...learning.reward_model import RewardTokens, reward_tokenizer
from ...rollouts.user_task import task_of


def reward_tokens(config: RunConfig, folder: Path) -> RewardTokens:
    """Return the translation of the run's episodes into the tokens of its reward model.

    Args:
        config: The run.
        folder: Hugging Face folder of the reward model.

    Raises:
        BadPolicy: if the folder holds no reward model.
        TaskError: if the reward model reads chats, and the run's task cannot be loaded.
    """
    own = reward_tokenizer(folder)
    # A chat is built from the question; other reward models read the policy's text as it is.
    questions = task_of(config).question if own.chat_template else None
    return RewardTokens(
        load_tokenizer(config.model_folder), own, questions, config.rollouts.chat_template_kwargs
    )
