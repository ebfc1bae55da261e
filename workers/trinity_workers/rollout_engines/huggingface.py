"""Rollout engine of Hugging Face models: `generate` of transformers, on any causal model."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import groupby
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import torch
from msgspec import Struct
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from trinity_events import Synchronizer
from trinity_events.diagnostics.waits import NO_REPORTS
from trinity_events.errors import NotAsPublished
from trinity_events.weights import model_digest
from trinity_events.weights.applying.verify_model import InstallChecks
from trinity_events.weights.tensors import dtype_name
from trinity_schemas import PauseMode, Probes, StepReady, StepRef, WeightsProof

from ..learning.adapters import adapter_tree, policy_loader
from ..learning.policy import end_tokens
from .base import (
    SAMPLING_SETTINGS,
    EngineOptions,
    EngineOptionsRefused,
    Generation,
    GenerationRequest,
    InstallRefused,
    NotServing,
)
from .gate import Gate
from .loading import applies_adapters, reads_options, samples_with, updates_amid_turns
from .proof import ProofOptions, ProofRecord
from .turns import OpenTurn, StopFinder, make_sampler, turn_limit

NAME = "huggingface"


class HuggingFaceOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the engine `huggingface`."""

    max_batch: int = 256
    """Maximum number of turns that are generated at a time."""


def read_options(options: Mapping[str, Any]) -> HuggingFaceOptions:
    """Return the engine's own options. Raises EngineOptionsRefused for others."""
    try:
        return msgspec.convert(options, HuggingFaceOptions)
    except msgspec.ValidationError as error:
        fields = HuggingFaceOptions.__struct_fields__
        raise EngineOptionsRefused("huggingface", str(error), fields) from None


class HuggingFaceEngine:
    """Engine in this process. One batch at a time is generated, in a worker thread.

    Without `deterministic`, any requests share a batch: padding changes last bits of logits, and
    so a token now and then. With it, only the requests of one ordinal and turn share one.

    Args:
        model: The model; its generation defaults are replaced, except its ends of sequence. If it
            has adapters, versions are of these alone.
        tokenizer: Its tokenizer, for the ids of padding and end of sequence.
        synchronizer: Brings weight versions.
        deterministic: Generate each ordinal by itself.
        max_batch: Maximum number of turns that are generated at a time.
        serves: Version of the model's weights; None if they are not to be served.
        pause_mode: Treatment of unfinished turns when a version is installed.
        proof: Checks of a version before it is served.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        synchronizer: Synchronizer | None = None,
        deterministic: bool = False,
        max_batch: int = 256,
        serves: StepRef | None = None,
        pause_mode: PauseMode = "wait",
        proof: ProofOptions = ProofOptions(),  # noqa: B008  # frozen
    ) -> None:
        self.serves = serves
        self.deterministic = deterministic
        self.pause_mode = pause_mode
        model.train(False)  # no dropout, such as that of adapters
        self._model = model
        self._versioned = adapter_tree(model) or model
        """Module of the tensors that a version fills."""
        self._synchronizer = synchronizer
        self._max_batch = max_batch
        self._ends = end_tokens(model.generation_config, tokenizer)
        self._tokenizer = tokenizer
        self._pad = int(tokenizer.pad_token_id)
        # `generate` fills what it is not told from here: Qwen2.5's folder has a repetition penalty.
        configure: Any = GenerationConfig  # its constructor has no annotations
        model.generation_config = configure(pad_token_id=self._pad, eos_token_id=[*self._ends])
        self._gate = Gate(NO_REPORTS if synchronizer is None else synchronizer.waits)
        self._generating = threading.Lock()
        self._counting = threading.Lock()
        self._in_flight = 0
        """Requests of calls that have not returned."""
        self._aborted = 0
        """Turns that versions cut short."""
        self._proof = proof
        self._proofs = ProofRecord()
        self._turns_of_comparison = itertools.count()

    @classmethod
    @applies_adapters
    @updates_amid_turns("keep", "retract", "abort")
    @samples_with(*SAMPLING_SETTINGS)
    @reads_options(read_options)
    def open(cls, options: EngineOptions) -> HuggingFaceEngine:
        """Return an engine of a Hugging Face folder.

        Raises RolloutEngineError for options that it does not have, and as `load_policy`.
        """
        own = read_options(options.options)
        load = policy_loader(options.lora, options.seed)
        model, tokenizer = load(options.model_folder, options.dtype)
        move: Any = model.to  # its annotations lack strings
        return cls(
            move(options.device),
            tokenizer,
            synchronizer=options.synchronizer,
            deterministic=options.deterministic,
            max_batch=own.max_batch,
            serves=options.serves,
            pause_mode=options.pause_mode,
            proof=options.proof,
        )

    @property
    def context_length(self) -> int | None:
        """Maximum number of tokens of an episode, as the model's configuration says."""
        text = self._model.config.get_text_config()
        length: int | None = getattr(text, "max_position_embeddings", None)
        return length

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Generate one turn for each request, in order; see :class:`~.base.RolloutEngine`."""
        cancelled = threading.Event()
        try:
            # Abandoned: else a caller that is cancelled would wait for the end of the batch.
            return await anyio.to_thread.run_sync(
                self._generate, requests, cancelled, abandon_on_cancel=True
            )
        except BaseException:
            cancelled.set()  # the thread ends after its next token
            raise

    def generate_here(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Generate in the calling thread, without an event loop; else as :meth:`generate`."""
        return self._generate(requests, threading.Event())

    async def pause(self, lease: float) -> None:
        """Stand still for at most `lease` seconds: between tokens, or between batches."""
        await anyio.to_thread.run_sync(self._gate.pause, lease)

    async def resume(self) -> None:
        """Go on generating."""
        self._gate.resume()

    async def release(self) -> torch.nn.Module | None:
        """Serve no version, and return the module that versions fill."""
        await anyio.to_thread.run_sync(self._release)
        return self._versioned

    async def install(self, ready: StepReady) -> None:
        """Serve a weight version; see :class:`~.base.RolloutEngine`."""
        await anyio.to_thread.run_sync(self._install, ready)

    async def prove(self) -> str:
        """Return the digest of the model's tensors by name."""
        return await anyio.to_thread.run_sync(self._prove)

    async def probe(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return log-probabilities of sequences; see :class:`~.base.RolloutEngine`."""
        return await anyio.to_thread.run_sync(self._probe, sequences)

    async def close(self) -> None:
        """Do nothing: the engine is in this process."""

    # --- in worker threads -----------------------------------------------------------------

    def _release(self) -> None:
        # Waits for the batch that is being generated; none begins without a version.
        with self._generating:
            self.serves = None

    def _prove(self) -> str:
        with self._gate.hold():
            return model_digest(self._model)

    def _install(self, ready: StepReady) -> None:
        if self._synchronizer is None:
            raise InstallRefused(ready.step, "synchronizer")
        checks = _Checks(self, ready)
        if self.serves is None:
            # Nothing is served yet, so that the model may be filled as the chunks arrive.
            with self._changing(ready):
                self._synchronizer.load(self._versioned, ready, cast=True, checks=checks)
        else:
            self._synchronizer.apply(
                self._versioned,
                ready,
                cast=True,
                install_context=lambda: self._changing(ready),
                checks=checks,
            )

    def select_compared(self, names: Collection[str]) -> Collection[str]:
        """Return the names of the tensors to compare with the next version."""
        return self._proof.select(names, next(self._turns_of_comparison))

    def finish_proof(
        self, ready: StepReady, probes: Probes | None, proof: WeightsProof
    ) -> WeightsProof:
        """Return the proof of the version that the model holds, after its probes.

        Raises as :meth:`trinity_events.weights.applying.verify_model.InstallChecks.finish`.
        """
        step, dtype = ready.step, dtype_name(self._model.dtype)
        if probes is not None and self._proof.runs_probes:
            logprobs = self._compute_probes(probes, step)
            proof = self._proof.check_probes(
                proof, probes, logprobs, engine=NAME, step=step, dtype=dtype
            )
        proof = self._proof.require(proof, engine=NAME, step=step)
        self._proofs.add(StepRef(ready.epoch, step), proof.status)
        return proof

    def _compute_probes(self, probes: Probes, step: int) -> list[list[float]]:
        """Return log-probabilities of probes. Raises NotAsPublished if the model has no such."""
        sequences, room = probes.sequences(), self.context_length
        embeddings: Any = self._model.get_input_embeddings()
        if max(map(max, sequences)) >= len(embeddings.weight) or (
            room is not None and len(sequences[0]) > room
        ):
            raise NotAsPublished(
                step=step, engine=NAME, fault="probes", detail="its probes do not fit the model"
            )
        return self._compute_logprobs(sequences)

    def _probe(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        with self._gate.hold():
            self._version()
            return self._compute_logprobs(sequences)

    @torch.no_grad()
    def _compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        rows: list[list[float]] = []
        for sequence in sequences:  # one by one: the logits of a large vocabulary take its memory
            tokens = torch.tensor([list(sequence)], device=self._model.device)  # (1, tokens)
            logits = self._model(input_ids=tokens, use_cache=False).logits[:, :-1]
            logprobs = logits.float().log_softmax(-1)  # (1, tokens - 1, vocabulary)
            rows.append(logprobs.gather(-1, tokens[:, 1:, None]).flatten().tolist())
        return rows

    @contextmanager
    def _changing(self, ready: StepReady) -> Iterator[None]:
        """Hold generation still while the model changes; serve the version after the block."""
        with self._paused(ready):
            try:
                yield
            except BaseException:
                # Half of the tensors may be of the new version: the next one is loaded whole.
                self.serves = None
                raise
            self.serves = StepRef(ready.epoch, ready.step)

    @contextmanager
    def _paused(self, ready: StepReady) -> Iterator[None]:
        """Hold generation still for the block, and report that if it was serving."""
        # Batches hold this lock to the end of their turns, for which `wait` waits.
        unfinished = self._generating if self.pause_mode == "wait" else nullcontext()
        if self.serves is None or self._synchronizer is None:
            with unfinished, self._gate.hold():
                yield
            return
        mode, aborted = self.pause_mode, self._aborted
        with (
            self._synchronizer.pausing(ready, mode=mode, in_flight=self._in_flight) as pause,
            unfinished,
            self._gate.hold(end=mode == "abort"),
        ):
            # Counted here, inside the hold: what it ended has ended.
            pause.aborted = self._aborted - aborted
            yield

    @contextmanager
    def _counted(self, requests: int) -> Iterator[None]:
        with self._counting:
            self._in_flight += requests
        try:
            yield
        finally:
            with self._counting:
                self._in_flight -= requests

    def _generate(
        self, requests: Sequence[GenerationRequest], cancelled: threading.Event
    ) -> list[Generation]:
        generations: dict[int, Generation] = {}
        with self._counted(len(requests)), self._generating:
            for batch in self._batches(requests):
                with self._gate.moving() as ends:

                    def must_end(ends: int = ends) -> bool:
                        return cancelled.is_set() or self._gate.ends != ends

                    batch_requests = [requests[place] for place in batch]
                    generated = self._generate_batch(batch_requests, must_end)
                    self._aborted += sum(generation.aborted for generation in generated)
                generations.update(zip(batch, generated, strict=True))
        return [generations[at] for at in range(len(requests))]

    def _batches(self, requests: Sequence[GenerationRequest]) -> Iterator[list[int]]:
        """Yield the places of requests that are generated at a time."""

        def group(place: int) -> tuple[int, ...]:
            request = requests[place]
            return (request.ordinal, request.turn) if self.deterministic else ()

        def order(place: int) -> tuple[object, ...]:
            request = requests[place]
            # Deterministic batches have one order; others are of prompts of like lengths.
            return (*group(place), request.sample if self.deterministic else len(request.tokens))

        for _, members in groupby(sorted(range(len(requests)), key=order), group):
            places = list(members)
            for start in range(0, len(places), self._max_batch):
                yield places[start : start + self._max_batch]

    def _generate_batch(
        self, requests: Sequence[GenerationRequest], must_end: Callable[[], bool]
    ) -> list[Generation]:
        turns = [
            OpenTurn(request, turn_limit(request, self.context_length)) for request in requests
        ]
        unfinished = turns
        while unfinished and not must_end():
            self._continue(unfinished, must_end)
            unfinished = [turn for turn in turns if not turn.is_over]
        for turn in unfinished:
            turn.aborted = True
        return [turn.generation(self._proofs) for turn in turns]

    def _continue(self, turns: Sequence[OpenTurn], must_end: Callable[[], bool]) -> None:
        """Generate with one key-value cache, to the end of all turns or of the cache.

        The turns have the same number of tokens so far.
        """
        version = self._version()

        def must_stop() -> bool:
            if must_end():
                return True
            if not self.deterministic:
                self._gate.stop_over()
            return must_end() or (self.pause_mode == "retract" and self.serves != version)

        # Padded on the left, so that every row goes on from the last column.
        rows = [turn.request.tokens + turn.tokens for turn in turns]
        width = max(map(len, rows))
        # (turns, width), as the mask.
        ids = [[self._pad] * (width - len(row)) + row for row in rows]
        mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
        device = self._model.device
        limits = [turn.limit - len(turn.tokens) for turn in turns]
        choice = _TokenSampler(turns, device, self._version)
        stops = StopFinder(self._tokenizer, turns)
        configure: Any = GenerationConfig
        run: Any = self._model.generate  # a mixin's, which type checkers do not see
        output: Tensor = run(
            input_ids=torch.tensor(ids, device=device),
            attention_mask=torch.tensor(mask, device=device),
            # The processor has sampled: the largest of its scores is the token.
            generation_config=configure(do_sample=False, max_new_tokens=max(limits)),
            logits_processor=LogitsProcessorList([choice]),
            stopping_criteria=StoppingCriteriaList([_Stop(limits, width, must_stop, stops)]),
        )
        # (turns, new tokens)
        logprobs = torch.stack(choice.logprobs, dim=1).tolist()
        for turn, row, of_tokens, stopped in zip(
            turns, output[:, width:].tolist(), logprobs, stops.ends, strict=True
        ):
            turn.extend(row, of_tokens, choice.versions, self._ends, stopped)

    def _version(self) -> StepRef:
        """Return the version that is served. Raises NotServing if there is none."""
        if self.serves is None:
            raise NotServing()
        return self.serves


class _Checks(InstallChecks):
    """Checks of the engine's model that a version has filled.

    Args:
        engine: The engine.
        ready: Announcement of the version.
    """

    compares_chunks = True

    def __init__(self, engine: HuggingFaceEngine, ready: StepReady) -> None:
        self._engine = engine
        self._ready = ready

    def select(self, names: Collection[str]) -> Collection[str]:
        """Return the names of the tensors to compare."""
        return self._engine.select_compared(names)

    def finish(self, probes: Probes | None, proof: WeightsProof) -> WeightsProof:
        """Return the proof after the probes."""
        return self._engine.finish_proof(self._ready, probes, proof)


class _TokenSampler(LogitsProcessor):
    """Chooses each next token, and keeps its log-probability and the version that sampled it.

    Args:
        turns: Turns of the rows, which have the same number of tokens so far.
        device: Device of the logits.
        version: Returns the version that is served.
    """

    def __init__(
        self,
        turns: Sequence[OpenTurn],
        device: torch.device,
        version: Callable[[], StepRef],
    ) -> None:
        # The noise counts tokens of the turn, also those of an earlier cache.
        self._place = len(turns[0].tokens)
        self._version = version
        self._sampler = make_sampler(turns, device)
        self.logprobs: list[Tensor] = []
        self.versions: list[StepRef] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        version = self._version()
        # (turns, vocabulary) to (turns,) each.
        tokens, logprobs = self._sampler.choose(scores, self._place + len(self.logprobs))
        self.logprobs.append(logprobs)
        self.versions.append(version)
        # `generate` takes the largest of these.
        return torch.full_like(scores, -torch.inf).scatter_(-1, tokens[:, None], 0.0)


class _Stop(StoppingCriteria):
    """Ends each row at its own limit or stop string, and all where `must_stop` returns True."""

    def __init__(
        self,
        limits: Sequence[int],
        width: int,
        must_stop: Callable[[], bool],
        stops: StopFinder,
    ) -> None:
        self._limits = torch.tensor(limits)
        self._width = width
        self._must_stop = must_stop
        self._stops = stops

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        device = input_ids.device
        over = None
        if self._stops.is_needed:
            # (turns,), as what is returned.
            over = torch.tensor(self._stops.add(input_ids[:, -1].tolist()), device=device)
        if self._must_stop():
            return torch.ones(len(input_ids), dtype=torch.bool, device=device)
        self._limits = self._limits.to(device)
        at_limit = input_ids.shape[1] - self._width >= self._limits
        return at_limit if over is None else at_limit | over
