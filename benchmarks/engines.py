"""Rollout engines: tokens a second, installation of a version, and log-probabilities."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, closing
from importlib.util import find_spec
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import anyio.to_thread
import torch

from trinity_events import Synchronizer, subscribe
from trinity_events.log import open_run
from trinity_events.server import EmbeddedServer, connect
from trinity_schemas import Sampling, StepReady, WeightsApplied
from trinity_workers.learning.policy import create_policy, load_policy
from trinity_workers.rollout_engines import (
    EngineOptions,
    GenerationRequest,
    RolloutEngine,
    load_engine,
)

from .environment import Stage, reducer
from .measure import Findings, Noise, Row, median, ratio, say, say_row, spread
from .report import ENGINES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TITLE = "vLLM and Hugging Face's generate, as explorers use them"
PLACE = ENGINES
RUN = "engines"
OPTIONS: dict[str, dict[str, Any]] = {
    "vllm": {"engine_args": {"max_num_seqs": 128, "kv_cache_memory_bytes": 1 << 30}},
    "huggingface": {},
}
"""Options of each engine."""
POLICY = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 704,
    "max_position_embeddings": 640,
}
"""Shape of the policy: heads of 64, and words enough that hardly any answer ends by itself."""
PROMPT = 24
SAMPLES = 8
"""Samples of a prompt, which share its prefix."""
DEADLINE = 120.0
"""Maximum seconds until an event comes."""


class Load(NamedTuple):
    """Requests that are generated at a time."""

    requests: int
    tokens: int
    varied: bool = False
    """Lengths are spread evenly over 8 to `tokens`."""

    def __str__(self) -> str:
        lengths = f"8 to {self.tokens}" if self.varied else str(self.tokens)
        return f"{self.requests} requests of {lengths} tokens"


class Size(NamedTuple):
    """Loads, rounds of each, and installed versions."""

    loads: tuple[Load, ...]
    rounds: int
    versions: int
    takes: str


_SHORTEST = Load(8, 16)
_ALL = tuple(Load(requests, tokens) for tokens in (64, 512) for requests in (8, 32, 128))
SIZES = {
    "tiny": Size((_SHORTEST,), 1, 1, "2 min"),
    "small": Size(_ALL[:3], 2, 5, "3 min"),
    "full": Size((*_ALL, Load(128, 512, varied=True)), 3, 5, "15 min"),
}


def missing() -> str | None:
    """Return why this benchmark cannot run here, or None."""
    return None if find_spec("vllm") else "vLLM is not installed: run it in .venv-vllm (make vllm)"


def run(on: Stage, size: Size, noise: Noise) -> Findings:
    """Measure both engines in turns, with the same requests and versions."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with (
        EmbeddedServer(on.folder, "weights", durable=False).attached() as weights_url,
        reducer(on, RUN),
    ):
        return anyio.run(_measure, on, weights_url, size, noise)


async def _measure(on: Stage, weights_url: str, size: Size, noise: Noise) -> Findings:
    folder = on.folder / "policy"
    create_policy(folder, 0, **POLICY)
    urls: dict[str, Any] = {"redis_url": on.url, "weights_url": weights_url}
    async with AsyncExitStack() as exits:
        client = await exits.enter_async_context(connect(on.url))
        epoch = await open_run(client, RUN)
        trainer = exits.enter_context(closing(Synchronizer(RUN, epoch, **urls)))
        engines: dict[str, RolloutEngine] = {}
        for rank, name in enumerate(OPTIONS):
            explorer = Synchronizer(RUN, 0, role="explorer", rank=rank, **urls)
            exits.enter_context(closing(explorer))
            say(f"  {name} starts")
            options = EngineOptions(
                model_folder=folder, synchronizer=explorer, options=OPTIONS[name]
            )
            engines[name] = await anyio.to_thread.run_sync(load_engine, name, options)
            exits.push_async_callback(engines[name].close)
        versions = await exits.enter_async_context(
            subscribe(RUN, StepReady, start="beginning", redis_url=on.url, deadline=DEADLINE)
        )
        applied = await exits.enter_async_context(
            subscribe(RUN, WeightsApplied, start="beginning", redis_url=on.url, deadline=DEADLINE)
        )
        model, _ = load_policy(folder)
        pauses: dict[str, list[float]] = {name: [] for name in engines}
        for step in range(size.versions + 1):
            await anyio.to_thread.run_sync(_publish, trainer, model, step)
            ready = (await anext(versions)).event
            for name, engine in engines.items():
                noise.beat()
                await engine.install(ready)
                pause = (await anext(applied)).event.phases.pause
                pauses[name] += [pause] * bool(step)  # the first one warms up
        rows = [_row("pause of an installation", pauses, 1000, "ms")]
        await _generate(engines, _SHORTEST, 1, noise)  # all is warm
        rows += [await _generate(engines, load, size.rounds, noise) for load in size.loads]
        rows += await _compare(engines, model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    notes = [
        f"A random Qwen2 of {parameters / 1e6:.1f} M parameters in float32, {PROMPT} tokens before "
        f"each answer, {SAMPLES} samples of a prompt, temperature 1. The engines take turns, vLLM "
        "in its own process. Ratios of tokens a second above 1, and of times below 1, favour vLLM.",
        "Log-probabilities are compared with one pass of the published model over each answer, as "
        "the trainer computes them.",
    ]
    return Findings(rows, notes)


def _publish(trainer: Synchronizer, model: torch.nn.Module, step: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.001)
    trainer.open_version(step)
    trainer.publish(model.named_parameters(), step)
    trainer.commit(step)


async def _generate(
    engines: Mapping[str, RolloutEngine], load: Load, rounds: int, noise: Noise
) -> Row:
    """Return a row of both engines' tokens a second."""
    say(f"  {load}")
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(rounds):
        for name, engine in engines.items():
            noise.beat()
            began = time.perf_counter()
            generations = await engine.generate(_requests(load, number))
            seconds = time.perf_counter() - began
            tokens = sum(len(generation.tokens) for generation in generations)
            speeds[name].append(tokens / seconds)
    return _row(str(load), speeds, 1, "tokens/s")


def _requests(load: Load, number: int) -> list[GenerationRequest]:
    lengths = Random(0)
    return [
        GenerationRequest(
            tokens=[2 + place // SAMPLES % 90, *range(10, 9 + PROMPT)],
            sampling=Sampling(
                max_new_tokens=lengths.randint(8, load.tokens) if load.varied else load.tokens,
                seed=number,
            ),
            ordinal=place // SAMPLES,
            sample=place % SAMPLES,
        )
        for place in range(load.requests)
    ]


async def _compare(engines: Mapping[str, RolloutEngine], model: PreTrainedModel) -> list[Row]:
    """Return rows of the distance of log-probabilities from those of the trainer."""
    requests = _requests(Load(32, 64), 0)
    distances: dict[str, list[float]] = {}
    for name, engine in engines.items():
        distances[name] = []
        for request, generation in zip(requests, await engine.generate(requests), strict=True):
            tokens = torch.tensor([*request.tokens, *generation.tokens])
            with torch.no_grad():
                logits = model(tokens[None]).logits[0, len(request.tokens) - 1 : -1]
            chosen = torch.tensor(generation.tokens)
            # (tokens of the answer,)
            reference = logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0]
            difference = (torch.tensor(generation.logprobs) - reference).abs()
            distances[name] += difference.tolist()
    return [
        _row(f"log-probabilities against the trainer's, {what}", values, 1e6, "micronats")
        for what, values in (
            ("maximum", {name: [max(all_)] for name, all_ in distances.items()}),
            ("mean", {name: [fmean(all_)] for name, all_ in distances.items()}),
        )
    ]


def _row(what: str, values: Mapping[str, Sequence[float]], factor: float, unit: str) -> Row:
    ours, peer = values["vllm"], values["huggingface"]
    row = Row(
        what=what,
        figure=f"{median(ours) * factor:,.4g} {unit}",
        peer="huggingface",
        peer_figure=f"{median(peer) * factor:,.4g} {unit}",
        ratio=ratio(ours, peer),
        spread=spread(ours),
    )
    say_row(row)
    return row
