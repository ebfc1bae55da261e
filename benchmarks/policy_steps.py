"""Weights of a real run: the demo's policy over its GRPO steps, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import torch

Learning = Iterator[dict[str, torch.Tensor]]
"""Weights after each step, float32, by name; the tensors are the model's and change with it."""

_WARM_UP_STEPS = 400


def policy_steps(folder: Path, steps: int, learning_rate: float) -> Learning:
    """Warm up the policy for a folder once, and train it as the trainer does by default."""
    from trinity_schemas import RolloutRequest, StepRef
    from trinity_workers.algorithms.collate import collate
    from trinity_workers.algorithms.prepare import prepare
    from trinity_workers.algorithms.update import policy_update
    from trinity_workers.config import TrainConfig, TrainerConfig
    from trinity_workers.episodes import Episodes
    from trinity_workers.launch.warm_up import warm_up
    from trinity_workers.learning.logprobs import response_logprobs
    from trinity_workers.learning.policy import create_policy, load_policy
    from trinity_workers.rewards import TaskRewards
    from trinity_workers.rollout_engines.huggingface import HuggingFaceEngine
    from trinity_workers.tasks import SpellBackward

    settings = TrainConfig(steps=steps, trainer=TrainerConfig(learning_rate=learning_rate))
    task = SpellBackward(settings.seed)
    if not (folder / "config.json").exists():
        create_policy(folder, settings.seed)
        with _one_thread():
            warm_up(folder, task, settings.seed, max_steps=min(_WARM_UP_STEPS, 20 * steps))
    model, tokenizer = load_policy(folder)
    version = StepRef(1, 0)
    episodes = Episodes(
        engine=HuggingFaceEngine(model, tokenizer, serves=version),
        tokenizer=tokenizer,
        task=task,
        judge=TaskRewards(task.reward),
        explorer="explorer-0",
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.99))
    ramp = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / settings.trainer.ramp_steps)
    )
    yield dict(_weights(model))
    rollouts = settings.rollouts
    for step in range(steps):
        requests = [
            RolloutRequest(
                run_id="policy-steps",
                epoch=1,
                ordinal=ordinal,
                attempt=1,
                samples=rollouts.samples_per_prompt,
                sampling=settings.sampling,
                oldest=version,
                fingerprint=task.fingerprint,
                deadline=rollouts.request_deadline,
            )
            for ordinal in range(
                step * rollouts.prompts_per_step, (step + 1) * rollouts.prompts_per_step
            )
        ]
        model.train(False)
        groups = [one for one in anyio.run(episodes.answer_all, requests) if isinstance(one, list)]
        algorithm = settings.algorithm_of_step
        batch, _ = prepare(collate(groups, tokenizer.pad_token_id), algorithm)
        model.train()
        update = policy_update(batch, response_logprobs(model, batch), algorithm)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(update.loss(update.denominator))
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.trainer.gradient_norm)
        optimizer.step()
        ramp.step()
        yield dict(_weights(model))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Give torch one thread for the block, as the launcher does for its warm-up."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights as the FSDP engine publishes them, with names for a ParameterDict."""
    for name, parameter in model.named_parameters():
        yield name.replace(".", "_"), parameter.detach()
