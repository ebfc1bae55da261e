"""The Hugging Face engine of tiny models: requests, references, and its steps one by one."""

from __future__ import annotations

import threading

import anyio
import torch

from tests.support.experiences import FIRST, group
from tests.support.pipeline import PATIENCE, until
from trinity_schemas import Sampling, StepRef, make_probes
from trinity_workers.algorithms.collate import collate
from trinity_workers.learning.adapters import adapter_tree, policy_loader
from trinity_workers.learning.logprobs import response_logprobs
from trinity_workers.learning.lora_settings import LoraConfig
from trinity_workers.rollout_engines import EngineOptions, GenerationRequest, load_engine
from trinity_workers.trainer.probes import fixed_sequences


def engine_of(folder, **options):
    return load_engine(
        "huggingface", EngineOptions(model_folder=folder, **{"serves": FIRST, **options})
    )


def requests_for(ordinals, samples=3, tokens=8, **sampling):
    """Requests with prompts of different lengths."""
    settings = Sampling(**{"max_new_tokens": tokens, "seed": 7, **sampling})
    return [
        GenerationRequest(
            tokens=list(range(10, 13 + ordinal % 5)),
            sampling=settings,
            ordinal=ordinal,
            sample=sample,
        )
        for ordinal in ordinals
        for sample in range(samples)
    ]


def logprobs_of(model, request, tokens, temperature=1.0):
    """Log-probabilities of tokens after a prompt, computed in one pass without padding."""
    groups = [group(request.tokens, [tokens], [[0.0] * len(tokens)], [0.0])]
    with torch.no_grad():
        return response_logprobs(model, collate(groups, 0), temperature)[0].tolist()


class Steps:
    """Counts the engine's forward passes, and holds them up until they are allowed."""

    def __init__(self, engine):
        self.count = 0
        self.allowed = threading.Semaphore(0)
        self._total = 0
        self._engine = engine
        engine._model.register_forward_pre_hook(self._before)

    def _before(self, *_):
        assert self.allowed.acquire(timeout=PATIENCE)
        self.count += 1

    def allow(self, count):
        self._total += count
        self.allowed.release(count)

    async def take(self, count):
        """Allow forward passes, and wait until the last of them has begun."""
        self.allow(count)
        await until(lambda: self.count == self._total)

    async def install(self, announced, *, after):
        """Let the engine install a version amid what it generates, after some forward passes."""
        version = StepRef(announced.epoch, announced.step)
        await self.take(after)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._engine.install, announced)
            await until(lambda: self._engine._gate._is_closed() or self._engine.serves == version)
            self.allow(1)  # the generation may have passed the gate already
        assert self._engine.serves == version


def weights(folder, step, lora=None, dtype="float32"):
    """Weights of a step, by name, as a trainer publishes them: of the adapters alone if any."""
    torch.manual_seed(step)
    model, _ = policy_loader(lora or LoraConfig(), 0)(folder, dtype)
    published = adapter_tree(model) or model
    with torch.no_grad():
        for parameter in published.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model, dict(published.named_parameters())


@torch.no_grad()
def compute_probes(model, count=4, dtype="float32"):
    """Probes as a trainer computes them."""
    sequences = fixed_sequences(model.config.vocab_size, count=count, length=24)
    tokens = torch.tensor(sequences)
    logprobs = model(input_ids=tokens).logits[:, :-1].float().log_softmax(-1)
    own = logprobs.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return make_probes(sequences, own.clamp(max=0).tolist(), dtype)


async def in_thread(function, *args):
    return await anyio.to_thread.run_sync(function, *args)
