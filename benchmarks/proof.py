"""Cost of the proof of a version, in the trainer and in a rollout engine, by size and data type.

The engine of Hugging Face always, and vLLM's where it is installed (make vllm): random Qwen2 models
of one rank, versions through shared memory. A row for each check: the time of an installation, from
the announcement to the served version, over that with the check of names alone.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import anyio
import anyio.to_thread
import torch
from msgspec.structs import replace
from transformers import Qwen2Config, Qwen2ForCausalLM

from trinity_events import Synchronizer
from trinity_events.log import open_run
from trinity_events.server import connect
from trinity_events.weights import PartRef
from trinity_schemas import Probes, StepReady, make_probes
from trinity_workers.learning.policy import create_policy, isolated_rng, save_policy
from trinity_workers.rollout_engines import EngineOptions, RolloutEngine, load_engine
from trinity_workers.rollout_engines.proof import (
    MEAN_SHARE,
    PROBE_TOLERANCES,
    ProofOptions,
    compare_logprobs,
)
from trinity_workers.trainer.probes import LENGTH, fixed_sequences

from .environment import Stage
from .measure import Findings, Noise, Row, median, ratio, say, say_row, spread
from .report import PROOF
from .weights_peer import announced

TITLE = "what an engine serves is proven"
PLACE = PROOF
_RUN = "bench-proof"
_EPOCH = 1
_PROBES = 4
_VOCABULARY = 32_000
_DEADLINE = 600.0
"""Seconds of an installation: one of 250 million parameters took above 30 s on two busy cores."""
_RATES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
"""Most by which an element of a stale tensor differs, as after one optimizer step of that rate."""


class Shape(NamedTuple):
    """Shape of a Qwen2 with heads of 64, which vLLM's attention on a CPU has."""

    name: str
    hidden: int
    layers: int
    vocabulary: int = _VOCABULARY


class Size(NamedTuple):
    """Models, rounds of each check, and data types."""

    shapes: tuple[Shape, ...]
    rounds: int
    dtypes: tuple[str, ...]
    takes: str
    measures_changes: bool = True
    """Measure the smallest changes that probes see too, which takes most of the time."""


_SMALL = Shape("60 M", 512, 12)
SIZES = {
    "tiny": Size((Shape("0.2 M", 64, 2, 512),), 1, ("float32",), "10 s"),
    "small": Size((_SMALL,), 2, ("float32", "bfloat16"), "3 min", measures_changes=False),
    "full": Size((_SMALL, Shape("250 M", 1024, 16)), 2, ("float32", "bfloat16"), "15 min"),
}
CHECKS = {
    "names": ProofOptions(checks="names"),
    "served": ProofOptions(checks="served"),
    "served, 2 layers in turn": ProofOptions(checks="served", layers=2),
    "probes": ProofOptions(checks="probes", tolerance=1e9),
    "all": ProofOptions(checks="all", tolerance=1e9),
}


class Version(NamedTuple):
    """Published version, and the seconds that its publisher took."""

    ready: StepReady
    probing: float
    publishing: float
    probes: Probes


def run(on: Stage, size: Size, noise: Noise) -> Findings:
    """Measure engine by engine, model by model."""
    return anyio.run(_run, on, size, noise)


async def _run(on: Stage, size: Size, noise: Noise) -> Findings:
    rows: list[Row] = []
    engines = ["huggingface"]
    if importlib.util.find_spec("vllm") is not None:
        engines.append("vllm")
    async with connect(on.url) as client:
        await open_run(client, _RUN)
    for engine in engines:
        for shape in size.shapes:
            for dtype in size.dtypes:
                say(f"{engine}, {shape.name}, {dtype}")
                with TemporaryDirectory() as folder:
                    _create(Path(folder), shape)
                    async with _case(on, engine, Path(folder), dtype) as case:
                        rows += await case.measure(shape, size.rounds, noise)
                        if shape is size.shapes[0] and size.measures_changes:
                            rows += await case.measure_changes(shape)
    notes = [
        f"Random Qwen2 with tied embeddings, {torch.get_num_threads()} threads. {_PROBES} probes "
        f"of {LENGTH} tokens.",
        "An installation lasts from the announcement to the served version.",
        "An update of a rate moves each element by at most that rate. Its lack is above the floor "
        "if the largest difference, or the mean, is twice that with nothing wrong; it is refused "
        "if one is above the tolerance. Hugging Face's engine computes as the publisher does here, "
        "so that nothing differs.",
    ]
    if "vllm" not in engines:
        notes.append("vLLM is not installed here: make vllm.")
    return Findings(rows, notes)


def _create(folder: Path, shape: Shape) -> None:
    """Write a random policy."""
    create_policy(folder, 0)  # its tokenizer
    config = Qwen2Config.from_pretrained(folder)
    config.update(
        {
            "vocab_size": shape.vocabulary,
            "hidden_size": shape.hidden,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.hidden // 64,
            "num_key_value_heads": max(1, shape.hidden // 256),
            "intermediate_size": 4 * shape.hidden,
            "max_position_embeddings": 256,
            "tie_word_embeddings": True,
            "layer_types": ["full_attention"] * shape.layers,
            "max_window_layers": shape.layers,
        }
    )
    with isolated_rng(0):
        save_policy(Qwen2ForCausalLM(config), folder)


class Case:
    """One engine and one model, and the publisher of its versions.

    Args:
        engine: The engine.
        trainer: Publisher of the versions.
        model: The publisher's model.
        dtype: Data type of both.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        trainer: Synchronizer,
        model: Any,
        dtype: str,
        name: str,
    ) -> None:
        self._engine, self._trainer, self._model = engine, trainer, model
        self._dtype, self._name = dtype, name
        self._step = 0
        self._floor = (0.0, 0.0)
        """Largest and mean difference of probes with nothing wrong."""
        self._sequences = fixed_sequences(model.config.vocab_size, count=_PROBES, length=LENGTH)

    def _title(self, shape: Shape) -> str:
        return f"{self._name}, {shape.name}, {self._dtype}"

    async def measure(self, shape: Shape, rounds: int, noise: Noise) -> list[Row]:
        """Return rows of the costs, and of the difference of probes with nothing wrong."""
        seconds: dict[str, list[float]] = {check: [] for check in CHECKS}
        parts: dict[str, list[float]] = {"probes": [], "publication": []}
        floors: list[tuple[float, float]] = []
        await self._install(await self._publish(), CHECKS["all"])  # all is warm
        for _ in range(rounds):
            for check, options in CHECKS.items():
                noise.beat()
                version = await self._publish()
                seconds[check].append(await self._install(version, options))
                parts["publication"].append(version.publishing)
                parts["probes"].append(version.probing)
                floors.append(await self._difference(version.probes))
        title = self._title(shape)
        rows = [
            Row(
                what=f"{title}: installation, {check}",
                figure=_format(seconds[check]),
                peer="names",
                peer_figure=_format(seconds["names"]),
                ratio=ratio(seconds[check], seconds["names"]),
                spread=spread(seconds[check]),
            )
            for check in CHECKS
        ]
        rows.append(
            Row(
                what=f"{title}: trainer, forward pass of probes",
                figure=_format(parts["probes"]),
                peer="publication",
                peer_figure=_format(parts["publication"]),
                ratio=ratio(parts["probes"], parts["publication"]),
            )
        )
        largest, mean = (max(values) for values in zip(*floors, strict=True))
        rows.append(
            Row(what=f"{title}: probes with nothing wrong", figure=_format_nats(largest, mean))
        )
        self._floor = (largest, mean)
        for row in rows:
            say_row(row)
        return rows

    async def measure_changes(self, shape: Shape) -> list[Row]:
        """Return the smallest rates of an update whose lack in one tensor shows."""
        title, (largest, mean) = self._title(shape), self._floor
        layers = self._model.config.num_hidden_layers
        stale = {
            "embedding": "model.embed_tokens.weight",
            "attention's output": "model.layers.0.self_attn.o_proj.weight",
            "a bias of keys": "model.layers.0.self_attn.k_proj.bias",
            "last layer's down": f"model.layers.{layers - 1}.mlp.down_proj.weight",
            "a layer's norm": f"model.layers.{layers - 1}.post_attention_layernorm.weight",
            "final norm": "model.norm.weight",
        }
        rows = []
        tolerance = PROBE_TOLERANCES[self._dtype]
        for tensor_title, tensor in stale.items():
            seen = refused = "at no rate"
            for rate in _RATES:
                differs = await self._stale(tensor, rate)
                if seen == "at no rate" and (differs[0] > 2 * largest or differs[1] > 2 * mean):
                    seen = f"at {rate:g}, by {_format_nats(*differs)}"
                if differs[0] > tolerance or differs[1] > tolerance * MEAN_SHARE:
                    refused = f"at {rate:g}"
                    break
            what = f"{title}: lack of an update of {tensor_title}"
            rows.append(Row(what=what, figure=f"refused {refused}, above the floor {seen}"))
            say_row(rows[-1])
        return rows

    async def _stale(self, name: str, rate: float) -> tuple[float, float]:
        """Return the differences of probes if the engine lacks one tensor's last update."""
        parameter = dict(self._model.named_parameters())[name]
        before = parameter.clone()
        await self._install(await self._publish(), CHECKS["names"])
        parameter.add_(torch.empty_like(parameter, dtype=torch.float32).uniform_(-rate, rate))
        probes = self._probe()
        parameter.copy_(before)
        return await self._difference(probes)

    async def _publish(self) -> Version:
        self._step += 1
        torch.manual_seed(self._step)
        for parameter in self._model.parameters():
            parameter.add_(torch.empty_like(parameter).uniform_(-1e-3, 1e-3))
        began = time.perf_counter()
        probes = self._probe()
        probed = time.perf_counter()
        trainer, step = self._trainer, self._step
        tensors = dict(self._model.named_parameters())
        report = await anyio.to_thread.run_sync(
            lambda: trainer.publish(tensors, step, probes=probes)
        )
        published = time.perf_counter()
        ready = replace(
            announced(PartRef(_RUN, _EPOCH, step, 0), report), transport=trainer.settings.transport
        )
        return Version(ready, probed - began, published - probed, probes)

    def _probe(self) -> Probes:
        rows = []
        for sequence in self._sequences:
            tokens = torch.tensor([sequence])  # (1, tokens)
            logits = self._model(input_ids=tokens, use_cache=False).logits[:, :-1]
            logprobs = logits.float().log_softmax(-1)
            rows.append(logprobs.gather(-1, tokens[:, 1:, None]).flatten().clamp(max=0.0).tolist())
        return make_probes(self._sequences, rows, self._dtype)

    async def _install(self, version: Version, options: ProofOptions) -> float:
        engine: Any = self._engine
        engine._proof = options  # one engine for all checks: vLLM takes a minute to open
        began = time.perf_counter()
        await engine.install(version.ready)
        seconds = time.perf_counter() - began
        self._trainer.close()  # frees the version, as a reducer would have it
        return seconds

    async def _difference(self, probes: Probes) -> tuple[float, float]:
        return compare_logprobs(
            probes.logprobs.to_rows(), await self._engine.probe(probes.sequences())
        )


@asynccontextmanager
async def _case(on: Stage, engine: str, folder: Path, dtype: str) -> AsyncIterator[Case]:
    """Open an engine and the publishers of its versions."""
    async with AsyncExitStack() as exits:
        trainer = Synchronizer(_RUN, _EPOCH, redis_url=on.url, transport="shm")
        explorer = Synchronizer(_RUN, 0, redis_url=on.url, role="explorer", deadline=_DEADLINE)
        exits.callback(trainer.close)
        exits.callback(explorer.close)
        args = {"max_num_seqs": 16, "kv_cache_memory_bytes": 1 << 28}
        options = EngineOptions(
            model_folder=folder,
            dtype=dtype,
            synchronizer=explorer,
            options={"engine_args": args} if engine == "vllm" else {},
        )
        opened = await anyio.to_thread.run_sync(load_engine, engine, options)
        exits.push_async_callback(opened.close)
        model: Any = Qwen2ForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        model.eval().requires_grad_(requires_grad=False)
        yield Case(opened, trainer, model, dtype, engine)


def _format(seconds: list[float]) -> str:
    return f"{median(seconds) * 1e3:,.3g} ms"


def _format_nats(largest: float, mean: float) -> str:
    return f"{largest:.2g} nats, mean {mean:.2g}"
