"""Weights of a real run: the demo's policy over its GRPO steps, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch

Learning = Iterator[dict[str, torch.Tensor]]
"""Weights after each step, float32, by name; the tensors are the model's and change with it."""

_WARM_UP_STEPS = 400


def policy_steps(folder: Path, steps: int, learning_rate: float) -> Learning:
    """Warm up the policy for a folder once, and train it as the trainer does by default."""
    from trinity_workers.config import TrainConfig, TrainerConfig
    from trinity_workers.learning.grpo import collate, grpo_loss, response_logprobs
    from trinity_workers.learning.policy import create_policy, load_policy
    from trinity_workers.learning.rollout import generate
    from trinity_workers.learning.tasks import make_task
    from trinity_workers.learning.warm_up import warm_up

    settings = TrainConfig(steps=steps, trainer=TrainerConfig(learning_rate=learning_rate))
    task = make_task(settings.task.name)
    if not (folder / "config.json").exists():
        create_policy(folder, settings.seed)
        warm_up(folder, task, settings.seed, max_steps=min(_WARM_UP_STEPS, 20 * steps))
    model, tokenizer = load_policy(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.99))
    ramp = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / settings.trainer.ramp_steps)
    )
    questions = task.training_questions(settings.seed)
    generator = torch.Generator().manual_seed(settings.seed)
    yield dict(_weights(model))
    for _ in range(steps):
        rollouts = generate(
            model,
            tokenizer,
            task,
            list(islice(questions, settings.rollouts.prompts_per_step)),
            samples=settings.rollouts.samples_per_prompt,
            max_new_tokens=settings.rollouts.max_new_tokens,
            temperature=settings.rollouts.temperature,
            generator=generator,
        )
        batch = collate(rollouts, tokenizer.pad_token_id)
        model.train()
        loss, _ = grpo_loss(response_logprobs(model, batch), batch, clip=settings.trainer.clip)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss / batch.token_count)
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.trainer.gradient_norm)
        optimizer.step()
        ramp.step()
        yield dict(_weights(model))


def _weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights as the FSDP engine publishes them, with names for a ParameterDict."""
    for name, parameter in model.named_parameters():
        yield name.replace(".", "_"), parameter.detach()
