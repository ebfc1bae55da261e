"""Supervised warm-up of a policy.

A binary reward teaches nothing to a policy that is never right. The warm-up takes random weights to
the first right answers, and leaves the rest to reinforcement learning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from trinity_schemas import Sampling, StepRef

from ..learning.policy import encode_prompt, load_policy, save_policy
from ..rollout_engines.base import GenerationRequest
from ..rollout_engines.huggingface import HuggingFaceEngine
from ..tasks import Answer, DrawnTask, Question

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LEARNING_RATE = 2e-3
_BETAS = (0.9, 0.95)
_BATCH = 128
_RAMP_STEPS = 20
_STEPS_BETWEEN_CHECKS = 5
_VALIDATION_QUESTIONS = 256

# What cross_entropy leaves out by default.
_IGNORED = -100


def warm_up(
    folder: Path,
    task: DrawnTask,
    seed: int,
    *,
    max_steps: int = 400,
    report: Callable[[int, float, float], None] | None = None,
) -> tuple[int, float]:
    """Train the policy in `folder` on right answers, and save it back there.

    Ends when the task's `warm_up_accuracy` of the sampled answers to validation questions are
    right. Returns the steps taken and the accuracy in [0, 1] last measured, which is below that
    where `max_steps` ended it. `report` is called with (step, loss in nats a token, accuracy) at
    every check. The same seed and number of torch threads give the same weights.
    """
    model, tokenizer = load_policy(folder)
    # The engine samples from the module that is trained; the version is of no account.
    engine = HuggingFaceEngine(model, tokenizer, serves=StepRef(1, 0))
    validation = task.validation(_VALIDATION_QUESTIONS)
    training = task.training_questions(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, betas=_BETAS)
    ramp = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / _RAMP_STEPS)
    )

    step, accuracy = 0, 0.0
    model.train()
    while step < max_steps:
        ids, mask, labels = _examples(tokenizer, list(islice(training, _BATCH)))
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        # (batch, length, vocabulary), each of the next token: the last ones have no target.
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels.flatten())
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        optimizer.step()
        ramp.step()
        step += 1
        if step % _STEPS_BETWEEN_CHECKS == 0 or step == max_steps:
            accuracy = _accuracy(engine, tokenizer, task, validation, seed=seed, step=step)
            # Again: the check has put the model into evaluation mode.
            model.train()
            if report is not None:
                report(step, loss.item(), accuracy)
            if accuracy >= task.warm_up_accuracy:
                break
    save_policy(model, folder)
    return step, accuracy


def _accuracy(
    engine: HuggingFaceEngine,
    tokenizer: PreTrainedTokenizerBase,
    task: DrawnTask,
    questions: Sequence[Question],
    *,
    seed: int,
    step: int,
) -> float:
    """Return the share of sampled answers that are right, in [0, 1]."""
    sampling = Sampling(max_new_tokens=task.answer_tokens, seed=seed)
    requests = [
        GenerationRequest(
            tokens=encode_prompt(tokenizer, question.prompt),
            sampling=sampling,
            ordinal=index,
            sample=0,
            # Each check draws other random numbers: the key has the turn.
            turn=step,
        )
        for index, question in enumerate(questions)
    ]
    right = 0.0
    for question, generation in zip(questions, engine.generate_here(requests), strict=True):
        tokens = generation.tokens[:-1] if generation.finished else generation.tokens
        text = str(tokenizer.decode(tokens, skip_special_tokens=False))
        answer = Answer(
            text=text, finished=generation.finished, messages=[], tokens=len(generation.tokens)
        )
        right += task.reward(question, answer)["reward"]
    return right / len(questions)


def _examples(
    tokenizer: PreTrainedTokenizerBase, questions: Sequence[Question]
) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids and mask, [B, L] padded on the right, and the targets, [B, L - 1].

    The prompt is no target: the policy is to answer questions, not to make them up.
    """
    prompts = [encode_prompt(tokenizer, q.prompt) for q in questions]
    answers = [
        [*tokenizer.encode(str(q.answer), add_special_tokens=False), tokenizer.eos_token_id]
        for q in questions
    ]
    width = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    ids = torch.full((len(questions), width), tokenizer.pad_token_id)  # (questions, length) int64
    mask = torch.zeros((len(questions), width), dtype=torch.int64)
    # The targets of prompts and padding stay ignored.
    labels = torch.full((len(questions), width), _IGNORED)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        mask[row, :end] = 1
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return ids, mask, labels[:, 1:]
