"""GRPO in one process without the pipeline: it samples, judges and trains in turn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import anyio
import torch

from trinity_schemas import RolloutRequest, StepRef
from trinity_workers.algorithms.collate import collate
from trinity_workers.algorithms.prepare import prepare
from trinity_workers.algorithms.update import policy_update
from trinity_workers.config.train_config import TrainConfig
from trinity_workers.engines.learning_rate import LearningRate
from trinity_workers.learning.logprobs import response_logprobs
from trinity_workers.learning.policy import load_policy
from trinity_workers.rewards import TaskRewards
from trinity_workers.rollout_engines.huggingface import HuggingFaceEngine
from trinity_workers.rollouts.episodes import Episodes
from trinity_workers.tasks import built_in_task
from trinity_workers.trainer.models.rates import get_adamw_options

_VERSION = StepRef(1, 0)
"""Version that all samples name: the engine samples from the module that is trained."""


class OneProcess:
    """Training of a built-in task with the pipeline's algorithm, rollout engine and questions.

    Args:
        config: Settings of the run; those of sync, checkpoints and ranks have no effect.
        folder: Hugging Face folder of the policy that it starts from.
    """

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        self.config = config
        self.model, self.tokenizer = load_policy(folder)
        self.task = built_in_task(config.task.name, config.seed)
        self.steps_taken = 0
        self._algorithm = config.algorithm_of_step
        self._episodes = Episodes(
            engine=HuggingFaceEngine(self.model, self.tokenizer, serves=_VERSION),
            tokenizer=self.tokenizer,
            task=self.task,
            judge=TaskRewards(self.task.reward),
            explorer="explorer-0",
        )
        rate = LearningRate(
            highest=config.trainer.learning_rate,
            warmup_steps=config.trainer.warmup_steps,
            schedule=config.trainer.schedule,
            steps=config.steps,
        )
        adamw = get_adamw_options(config.trainer)
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=rate.highest,
            betas=adamw.betas,
            eps=adamw.epsilon,
            weight_decay=adamw.weight_decay,
            fused=True,
        )
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(self._optimizer, rate.share)

    def step(self) -> float:
        """Take one step; return the mean reward of its samples."""
        self.model.train(False)
        answered = anyio.run(self._episodes.answer_all, self._requests())
        groups = [group for group in answered if isinstance(group, list)]
        assert len(groups) == len(answered), "a built-in task does not fail"
        self.model.train()
        batch = collate(groups, self.tokenizer.pad_token_id)
        logprobs = response_logprobs(self.model, batch, self.config.rollouts.temperature)
        batch = replace(batch, proximal_logprobs=logprobs.detach())
        batch, _ = prepare(batch, self._algorithm)
        update = policy_update(batch, logprobs, self._algorithm)
        self._optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(update.loss(update.denominator))
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.trainer.max_grad_norm)
        self._optimizer.step()
        self._scheduler.step()
        self.steps_taken += 1
        rewards = [sample.reward for group in groups for sample in group]
        return sum(rewards) / len(rewards)

    def _requests(self) -> list[RolloutRequest]:
        rollouts = self.config.rollouts
        first = self.steps_taken * rollouts.prompts_per_step
        return [
            RolloutRequest(
                run_id="one-process",
                epoch=1,
                ordinal=ordinal,
                attempt=1,
                samples=rollouts.samples_per_prompt,
                sampling=self.config.sampling,
                oldest=_VERSION,
                fingerprint=self.task.fingerprint,
                deadline=rollouts.request_deadline,
            )
            for ordinal in range(first, first + rollouts.prompts_per_step)
        ]
