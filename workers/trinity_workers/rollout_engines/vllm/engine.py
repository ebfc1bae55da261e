"""Rollout engine of vLLM: an asynchronous engine whose workers pull versions themselves.

1. A request begins while a version is served, and never while one is being loaded.
2. A version is fetched and verified next to generation. No token leaves that was sampled by a
   version before its verdict. Until the tensors have passed nothing is generated. Probes need the
   scheduler, which then goes on with the turns that it held: their ends wait for the verdict.
3. A version that fails a check has changed the model: the engine is out of service until another
   one is whole, and the turns that it stopped raise NotServing. One that fails before leaves the
   earlier version served.
4. The version of each token is vLLM's own label of the step that sampled it.
5. A call ends as soon as vLLM's core has ended, also amid an update.
6. An update ends within the synchronizer's deadline, or vLLM's processes do: nothing else can stop
   a worker that loads.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import anyio
import anyio.to_thread
import msgspec

from trinity_events.errors import (
    CorruptVersion,
    IncompatibleWeights,
    NotAsPublished,
    ProofTooWeak,
    TrinityError,
    VersionUnavailable,
)
from trinity_events.system.error_text import ungrouped
from trinity_events.weights.applying.verify_model import make_proof
from trinity_events.weights.pauses import Pause
from trinity_events.weights.tensors import digest
from trinity_events.weights.version_reader import LoadedVersion
from trinity_schemas import (
    AppliedPhases,
    Probes,
    Sampling,
    StepReady,
    StepRef,
    WeightsProof,
)

from ...learning.policy import load_tokenizer
from ..base import (
    EngineOptions,
    Generation,
    GenerationRequest,
    InstallRefused,
    NotServing,
    RolloutEngineError,
)
from ..loading import applies_adapters, reads_options, samples_with, updates_amid_turns
from ..proof import ProofRecord
from ..sampling import turn_key
from ..turns import OpenTurn, StopFinder, Stopped, turn_limit
from .core_watch import CoreWatch
from .options import (
    VLLMUnusable,
    build_engine_args,
    build_gpu_args,
    build_probe_params,
    build_sampling_params,
    gpus_of,
    prepare_environment,
    read_end_tokens,
    read_options,
)
from .reports import (
    FetchOutcome,
    LoadReport,
    WorkerCannotLoad,
    WorkerFailure,
    WorkerFoundCorruption,
    WorkerLacksVersion,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NAME = "vLLM"
_BASE_LABEL = "default"
"""Label that vLLM gives the weights of the folder; also that of a core which started again."""
_REFUSED_AMID_TURN = "the version that was installed amid the turn is not what was published"
# Not negative: to vLLM -1 is no seed (sampling_params.py).
_SEED_BITS = 2**62 - 1
_LARGEST_OUTCOME = 1 << 16
_SECONDS_TO_END = 10.0
"""vLLM kills a core that has not ended within a few seconds; the kernel then frees its memory."""


class EngineLimits(NamedTuple):
    """Limits that vLLM was configured with."""

    context_length: int
    """Maximum number of tokens of an episode."""
    max_num_seqs: int
    """Maximum number of requests that it computes at a time."""
    world_size: int
    """Number of its workers."""
    vocabulary_size: int
    """Token ids of the model."""


class Watch(Protocol):
    """Watch over vLLM's processes."""

    def alive(self) -> AbstractAsyncContextManager[None]:
        """End the block as soon as a process has ended. Raises RolloutEngineError then."""
        ...

    def give_up(self, reason: str) -> RolloutEngineError:
        """End processes that do not answer, or leave them; return the error to raise."""
        ...


class VLLMEngine:
    """Engine in vLLM's processes, of which this one sends requests and receives tokens.

    Args:
        engine: vLLM's AsyncLLM, or a client with those of its methods that are called here.
        options: Options of the engine.
        tokenizer: Tokenizer of the policy.
        end_tokens: Tokens that end an answer.
        limits: Limits that vLLM was configured with.
        core: Watch over vLLM's processes.
        processes: Those that are this one's own, which :meth:`close` waits for.
    """

    def __init__(
        self,
        engine: Any,
        options: EngineOptions,
        tokenizer: PreTrainedTokenizerBase,
        end_tokens: tuple[int, ...],
        limits: EngineLimits,
        core: Watch,
        processes: Sequence[Any] = (),
    ) -> None:
        self.serves = options.serves
        self.pause_mode = options.pause_mode
        self._engine = engine
        self._synchronizer = options.synchronizer
        self._base = options.serves
        lora = options.lora
        self._adapter_scale = lora.scaled_alpha / lora.rank if lora.rank else None
        self._tokenizer = tokenizer
        self._dtype = options.dtype
        self._proof = options.proof
        self._proofs = ProofRecord()
        self._comparisons = itertools.count()
        self._proving: _Verdict | None = None
        """Version whose probes are computed."""
        self._refused: set[StepRef] = set()
        """Versions whose probes did not agree; vLLM's label may name them until the next one."""
        self._resumed = anyio.Event()
        self._end_tokens = end_tokens
        self._limits = limits
        self._core = core
        self._processes = processes
        self._folder = tempfile.TemporaryDirectory(prefix="trinity-vllm-")
        # A call that waited for a fetch would hold up generation in the workers; a datagram does
        # not.
        self._outcomes = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._outcomes.setblocking(False)
        self._outcomes.bind(str(self._outcomes_path))
        self._prepared = False
        self._preparing = anyio.Lock()
        self._numbers = itertools.count()
        self._calls = 0
        self._idle = anyio.Event()
        self._idle.set()
        self._in_flight = 0
        """Requests that vLLM has."""
        self._none_in_flight = anyio.Event()
        self._none_in_flight.set()
        self._aborted = 0
        """Requests that versions cut short."""
        self._installed: anyio.Event | None = None
        """Set at the end of the installation that holds new requests back; None without one."""
        self._is_updating = False
        """True from the stop for a version to the verdict on it."""
        self._paused_until = 0.0
        self._lease: asyncio.TimerHandle | None = None
        # A request in vLLM's own queue would have the cache salt of a version that is gone.
        self._slots = anyio.Semaphore(limits.max_num_seqs)

    @classmethod
    @applies_adapters
    @samples_with("top_k", "top_p", "min_p", "repetition_penalty", "stop")
    @updates_amid_turns("keep", "retract", "abort")
    @reads_options(read_options)
    def open(cls, options: EngineOptions) -> VLLMEngine:
        """Return an engine of a Hugging Face folder, once vLLM's processes have loaded it.

        Raises:
            RolloutEngineError: for options that it does not have, and as vLLM fails to start.
        """
        own = read_options(options.options)
        if options.deterministic:
            raise VLLMUnusable("deterministic")
        prepare_environment()
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        tokenizer = load_tokenizer(options.model_folder)
        end_tokens = read_end_tokens(options.model_folder, tokenizer)
        try:
            gpu_args = build_gpu_args(options, own)
            args = AsyncEngineArgs(**build_engine_args(options, own), **gpu_args)
            with gpus_of(options):
                engine = AsyncLLM.from_engine_args(args)
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            raise VLLMUnusable("start", _one_line(error)) from error
        manager = engine.engine_core.resources.engine_manager
        processes = () if manager is None else tuple(manager.processes)
        core, limits = CoreWatch(processes), _read_limits(engine)
        return cls(engine, options, tokenizer, end_tokens, limits, core, processes)

    async def close(self) -> None:
        """End vLLM's processes."""
        if self._lease is not None:
            self._lease.cancel()
        self._outcomes.close()
        self._folder.cleanup()
        await anyio.to_thread.run_sync(self._shut_down)

    def _shut_down(self) -> None:
        self._engine.shutdown()
        # vLLM waits for none that was ended before, whose threads may still be on their way out.
        for process in self._processes:
            process.join(_SECONDS_TO_END)

    @property
    def context_length(self) -> int | None:
        """Maximum number of tokens of an episode, as vLLM was configured."""
        return self._limits.context_length

    @property
    def _outcomes_path(self) -> Path:
        return Path(self._folder.name) / "fetched"

    # --- generating ------------------------------------------------------------------------

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Generate one turn for each request, in order; see :class:`~..base.RolloutEngine`.

        Raises EngineEnded as soon as vLLM's core has ended.
        """
        limits = [turn_limit(request, self.context_length) for request in requests]
        generations: dict[int, Generation] = {}

        async def generate(place: int) -> None:
            generations[place] = await self._generate(requests[place], limits[place])

        async with self._core.alive():
            await self._prepare()
            await self._served_version()
            with self._counted(), ungrouped():
                async with anyio.create_task_group() as tasks:
                    for place in range(len(requests)):
                        tasks.start_soon(generate, place)
        return [generations[place] for place in range(len(requests))]

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count the block as a call that is generating."""
        if not self._calls:
            self._idle = anyio.Event()
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()

    @contextmanager
    def _counted_in_flight(self) -> Iterator[None]:
        if not self._in_flight:
            self._none_in_flight = anyio.Event()
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._none_in_flight.set()

    async def _served_version(self) -> StepRef:
        """Return the served version, once none is being loaded. Raises NotServing."""
        while self._installed is not None:
            await self._installed.wait()
        return self._version()

    def _version(self) -> StepRef:
        if self.serves is None:
            raise NotServing()
        return self.serves

    async def _generate(self, request: GenerationRequest, limit: int) -> Generation:
        async with self._slots:
            # Under `wait` an installation waits for the turns of a call, and not they for it.
            if self.pause_mode == "wait":
                version = self._version()
            else:
                version = await self._served_version()
            return await self._generate_with(version, request, limit)

    async def _generate_with(
        self, version: StepRef, request: GenerationRequest, limit: int
    ) -> Generation:
        sampling, place = request.sampling, (request.ordinal, request.sample, request.turn)
        seed = turn_key(sampling.seed, *place) & _SEED_BITS
        # The prefixes of another version are never hit, so that no cache has to be dropped.
        prompt = {"prompt_token_ids": request.tokens, "cache_salt": self._label(version)}
        name = "-".join(map(str, (*place, next(self._numbers))))
        params = self._sampling_params(sampling, limit, seed)
        turn = OpenTurn(request, limit)
        with self._counted_in_flight():
            completion, stopped = await self._complete(prompt, params, name, turn)
        is_aborted = completion.finish_reason == "abort" and stopped is None
        if is_aborted and self.pause_mode == "abort":
            self._aborted += 1
            return Generation(tokens=[], logprobs=[], versions=[], finished=False, aborted=True)
        if is_aborted:
            raise NotServing(_REFUSED_AMID_TURN)
        tokens = completion.token_ids
        chosen = zip(completion.logprobs, tokens, strict=True)
        versions: list[StepRef] = []
        for span in completion.weight_versions or ():
            if span.end > span.start:
                versions += [self._version_of_label(span.version)] * (span.end - span.start)
        await self._wait_for_verdict(versions)
        turn.extend(
            tokens,
            [logprobs[token].logprob for logprobs, token in chosen],
            versions,
            self._end_tokens,
            stopped,
        )
        return turn.generation(self._proofs)

    async def _complete(
        self, prompt: dict[str, Any], params: Any, name: str, turn: OpenTurn
    ) -> tuple[Any, Stopped | None]:
        """Return vLLM's completion of a prompt, and its end if that is a stop string.

        vLLM has no tokenizer here: the strings are found as for other engines, token by token. A
        request that has its own is aborted, so that its last tokens may come after the string.
        """
        finder = StopFinder(self._tokenizer, [turn])
        examined = 0
        async for output in self._engine.generate(prompt, params, name):
            (completion,) = output.outputs
            while (
                finder.is_needed and not any(finder.ends) and examined < len(completion.token_ids)
            ):
                examined += 1
                if any(finder.add([completion.token_ids[examined - 1]])) and not output.finished:
                    await self._engine.abort(name)
        return completion, finder.ends[0]

    def _sampling_params(self, sampling: Sampling, limit: int, seed: int) -> Any:
        return build_sampling_params(sampling, limit, seed, self._end_tokens)

    def _probe_params(self) -> Any:
        return build_probe_params()

    def _label(self, version: StepRef) -> str:
        """Return the label that vLLM gives each token of a version."""
        return f"{version.epoch}/{version.step}"

    async def _wait_for_verdict(self, versions: Sequence[StepRef]) -> None:
        """Return once no probes of these versions are computed. Raises NotServing."""
        verdict = self._proving
        if verdict is not None and verdict.version in versions:
            await verdict.given.wait()
        if not self._refused.isdisjoint(versions):
            raise NotServing(_REFUSED_AMID_TURN)

    def _version_of_label(self, label: str) -> StepRef:
        """Return the version that vLLM names: never the one that is believed to be served."""
        if label != _BASE_LABEL:
            epoch, _, step = label.partition("/")
            return StepRef(int(epoch), int(step))
        if self._base is None:
            raise NotServing("vLLM answered with the weights of its folder, which are no version")
        return self._base

    # --- standing still --------------------------------------------------------------------

    async def pause(self, lease: float) -> None:
        """Stand still between tokens for at most `lease` seconds."""
        async with self._core.alive():
            await self._engine.pause_generation(mode="keep", clear_cache=False)
        loop = asyncio.get_running_loop()
        if self._lease is not None:
            self._lease.cancel()
        self._paused_until, self._resumed = time.monotonic() + lease, anyio.Event()
        self._lease = loop.call_later(lease, lambda: loop.create_task(self.resume()))

    async def resume(self) -> None:
        """End a pause."""
        if self._lease is not None:
            self._lease.cancel()
            self._lease = None
        self._paused_until = 0.0
        self._resumed.set()
        # An update ends by itself: resumed amid it, vLLM would generate with half of a version.
        # After one that broke there is nothing to generate with before the next.
        if not self._is_updating and self.serves is not None:
            await self._engine.resume_generation()

    async def release(self) -> None:
        """Return None: the weights lie in vLLM's processes. The served version stays."""
        return

    # --- versions --------------------------------------------------------------------------

    async def install(self, ready: StepReady) -> None:
        """Serve a weight version; see :class:`~..base.RolloutEngine`.

        Raises:
            NotAsPublished: vLLM does not compute with it as it was published.
            ProofTooWeak: Its checks prove less of it than is asked for.
            EngineEnded: vLLM's core has ended.
        """
        if self._synchronizer is None:
            raise InstallRefused(ready.step, "synchronizer")
        began = time.monotonic()
        async with self._core.alive():
            await self._prepare()
            fetched = await self._fetch(ready)
            fetch = time.monotonic() - began
            async with self._new_turns_held(ready) as paused:
                pause_began = time.monotonic()
                reports, proof = await self._update_within_deadline(ready, paused)
                pause = time.monotonic() - pause_began
        installed = LoadedVersion(
            StepRef(ready.epoch, ready.step), reports[0].digest, reports[0].bytes
        )
        # The version is there once the last worker has it.
        verified_at = max(outcome.verified_at for outcome in fetched)
        phases = AppliedPhases(fetch=fetch, pause=pause)
        await anyio.to_thread.run_sync(
            self._synchronizer.applied, installed, verified_at, phases, proof
        )

    @asynccontextmanager
    async def _new_turns_held(self, ready: StepReady) -> AsyncIterator[Pause]:
        """Let no turn begin in the block; under `wait`, wait for those that have begun."""
        assert self._synchronizer is not None
        pausing: AbstractContextManager[Pause] = nullcontext(Pause())
        if self.serves is not None:
            pausing = self._synchronizer.pausing(
                ready, mode=self.pause_mode, in_flight=self._in_flight
            )
        with pausing as pause:
            self._installed = anyio.Event()
            try:
                if self.pause_mode == "wait" and self._calls:
                    await self._idle.wait()
                yield pause
            finally:
                pause.serves = self.serves
                self._installed.set()
                self._installed = None

    async def _update_within_deadline(
        self, ready: StepReady, pause: Pause
    ) -> tuple[list[LoadReport], WeightsProof]:
        """Update, or end vLLM's processes at the deadline. Raises as :meth:`install`."""
        assert self._synchronizer is not None
        deadline = self._synchronizer.settings.deadline
        # Shielded: an explorer cancels an installation when the answers next to it are done, and
        # vLLM's session would stay open amid a half-loaded model. The watch is within the shield,
        # or a core that ends amid the update would hold the call for ever.
        self._is_updating = True
        try:
            with anyio.move_on_after(deadline, shield=True):
                async with self._core.alive():
                    return await self._update(ready, pause)
        finally:
            self._is_updating = False
        self.serves = None
        raise self._core.give_up(f"step {ready.step} was not loaded within {deadline:g} s")

    async def _prepare(self) -> None:
        """Prepare the workers, once, in the event loop that calls them."""
        async with self._preparing:
            if self._prepared:
                return
            if self._synchronizer is not None:
                await self._connect_workers()
            self._prepared = True

    async def _connect_workers(self) -> None:
        assert self._synchronizer is not None
        settings = self._synchronizer.settings
        folder = settings.checkpoint_folder
        init_info = {
            "run_id": settings.run_id,
            "redis_url": settings.redis_url,
            "weights_url": settings.weights_url,
            "rank": settings.rank,
            "checkpoint_folder": None if folder is None else str(folder),
            "outcomes": str(self._outcomes_path),
            "deadline": settings.deadline,
            "adapter_scale": self._adapter_scale,
        }
        # As AsyncLLM does it, whose method takes a class of vLLM; a server needs none here.
        await self._engine.collective_rpc(
            "init_weight_transfer_engine", kwargs={"init_info": init_info}
        )

    async def _fetch(self, ready: StepReady) -> list[FetchOutcome]:
        """Let each worker pull the version, next to generation, and return the outcomes.

        Raises as :meth:`trinity_events.Synchronizer.pull`.
        """
        version = StepRef(ready.epoch, ready.step)
        announcement = msgspec.json.encode(ready).decode()
        await self._engine.collective_rpc("trinity_fetch", args=(announcement,))
        outcomes = await self._receive_outcomes(version)
        failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
        if failures:
            await self._engine.collective_rpc("trinity_abandon")
            raise _fetch_error(failures[0], ready)
        return outcomes

    async def _receive_outcomes(self, version: StepRef) -> list[FetchOutcome]:
        outcomes: dict[int, FetchOutcome] = {}
        while len(outcomes) < self._limits.world_size:
            await anyio.wait_readable(self._outcomes)
            outcome = msgspec.json.decode(self._outcomes.recv(_LARGEST_OUTCOME), type=FetchOutcome)
            if outcome.version == version:  # an earlier fetch may have been cancelled
                outcomes[outcome.worker] = outcome
        return list(outcomes.values())

    async def _update(
        self, ready: StepReady, pause: Pause
    ) -> tuple[list[LoadReport], WeightsProof]:
        """Stop, load a fetched version, look into it, and serve it. Raises as :meth:`install`."""
        version = StepRef(ready.epoch, ready.step)
        aborted = self._aborted
        await self._engine.pause_generation(
            mode="abort" if self.pause_mode == "abort" else "keep",
            clear_cache=self.pause_mode == "retract",
        )
        self.serves = None
        try:
            if self.pause_mode == "abort":
                await self._none_in_flight.wait()
                pause.aborted = self._aborted - aborted
            reports = await self._load(ready)
            _check_reports(reports, version)
            proof = _join_proofs(reports, compared=self._proof.compares_tensors)
            probes = next((each.probes for each in reports if each.probes is not None), None)
            if probes is None or not self._proof.runs_probes:
                proof = self._proof.require(proof, engine=NAME, step=version.step)
                # The label comes last: no token has it before the checks have passed.
                await self._engine.finish_weight_update(self._label(version))
            else:
                # Turns that the scheduler goes on with next to the probes need the label.
                await self._engine.finish_weight_update(self._label(version))
                proof = await self._check_probes(version, probes, proof)
            self._proofs.add(version, proof.status)
            self.serves = version
        except Exception as error:
            self._refused.add(version)
            try:
                await self._give_up_turns()
            except Exception:
                # Half loaded, and not to be stopped: a process of it died, which vLLM reports by
                # several errors until its core has ended too.
                reason = f"the update to step {version.step} could not be given up"
                raise self._core.give_up(reason) from error
            if isinstance(error, NotAsPublished | ProofTooWeak):
                assert self._synchronizer is not None
                await anyio.to_thread.run_sync(self._synchronizer.report_refusal, ready, error)
            if isinstance(error, TrinityError):
                raise
            raise VLLMUnusable("install", _one_line(error), ready.step) from error
        finally:
            if self._proving is not None:
                self._proving.given.set()
                self._proving = None
        self._refused.discard(version)
        # Before the look at the pause: one that ends later resumes by itself.
        self._is_updating = False
        if time.monotonic() >= self._paused_until:
            await self._engine.resume_generation()
        return reports, proof

    async def _check_probes(
        self, version: StepRef, probes: Probes, proof: WeightsProof
    ) -> WeightsProof:
        """Compute probes by the scheduler, and return the proof with their result.

        Raises NotAsPublished, and ProofTooWeak.
        """
        self._check_fit(version, probes.sequences())
        self._proving = _Verdict(version, anyio.Event())
        with anyio.move_on_after(max(0.0, self._paused_until - time.monotonic())):
            await self._resumed.wait()
        await self._engine.resume_generation()
        logprobs = await self._compute_logprobs(version, probes.sequences())
        proof = self._proof.check_probes(
            proof, probes, logprobs, engine=NAME, step=version.step, dtype=self._dtype
        )
        return self._proof.require(proof, engine=NAME, step=version.step)

    def _check_fit(self, version: StepRef, sequences: Sequence[list[int]]) -> None:
        """Raise NotAsPublished unless vLLM can compute probes.

        A sequence as long as its context leaves no room for the token that it samples.
        """
        vocabulary, room = self._limits.vocabulary_size, self.context_length
        if max(map(max, sequences)) >= vocabulary or (room or 0) <= len(sequences[0]):
            detail = "its probes do not fit the model"
            raise NotAsPublished(step=version.step, engine=NAME, fault="probes", detail=detail)

    async def _compute_logprobs(
        self, version: StepRef, sequences: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """Return the log-probability of each token but the first of its sequence."""
        logprobs: dict[int, list[float]] = {}

        async def compute(place: int) -> None:
            tokens = list(sequences[place])
            prompt = {"prompt_token_ids": tokens, "cache_salt": self._label(version)}
            name, params = f"probe-{place}-{next(self._numbers)}", self._probe_params()
            outputs = [output async for output in self._engine.generate(prompt, params, name)]
            rows = outputs[-1].prompt_logprobs
            logprobs[place] = [
                float(row[token].logprob) for row, token in zip(rows[1:], tokens[1:], strict=True)
            ]

        with ungrouped():
            async with anyio.create_task_group() as tasks:
                for place in range(len(sequences)):
                    tasks.start_soon(compute, place)
        return [logprobs[place] for place in range(len(sequences))]

    async def _load(self, ready: StepReady) -> list[LoadReport]:
        update_info = {
            "ready": msgspec.json.encode(ready).decode(),
            "served": self._proof.compares_tensors,
            "layers": self._proof.layers,
            "turn": next(self._comparisons),
        }
        await self._engine.collective_rpc("start_weight_update")
        await self._engine.collective_rpc("update_weights", kwargs={"update_info": update_info})
        reports = await self._engine.collective_rpc("trinity_report")
        return [msgspec.json.decode(report, type=LoadReport) for report in reports]

    async def _give_up_turns(self) -> None:
        """End the update, and every turn that it stopped: the model is not whole."""
        await self._engine.collective_rpc("trinity_abandon")
        await self._engine.pause_generation(mode="abort", clear_cache=True)
        await self._engine.resume_generation()

    async def prove(self) -> str:
        """Return a digest of what all workers compute with, as far as it can be looked into."""
        async with self._core.alive():
            await self._prepare()
            workers = await self._engine.collective_rpc("trinity_digests")
        return digest(msgspec.json.encode([sorted(digests.items()) for digests in workers]))

    async def probe(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return log-probabilities of sequences; see :class:`~..base.RolloutEngine`."""
        async with self._core.alive():
            version = await self._served_version()
            with self._counted():
                return await self._compute_logprobs(version, sequences)


def _read_limits(engine: Any) -> EngineLimits:
    config = engine.vllm_config
    return EngineLimits(
        int(engine.model_config.max_model_len),
        config.scheduler_config.max_num_seqs,
        config.parallel_config.world_size,
        engine.model_config.get_vocab_size(),
    )


def _check_reports(reports: Sequence[LoadReport], version: StepRef) -> None:
    """Raise NotAsPublished, or IncompatibleWeights, unless each worker has loaded the version."""
    for report in reports:
        if report.failure is not None:
            if report.failure.kind == IncompatibleWeights.__name__:
                raise WorkerCannotLoad(report.failure.tensor, reason=report.failure.reason)
            raise NotAsPublished(
                step=version.step, engine=NAME, fault="load", detail=report.failure.reason
            )
        if report.version != version:
            loaded = "nothing" if report.version is None else f"step {report.version.step}"
            raise NotAsPublished(
                step=version.step, engine=NAME, fault="another version", detail=loaded
            )
        if report.missing:
            raise _not_as_published(version, "not given", report.missing)
        if report.unloaded:
            raise _not_as_published(version, "not loaded", report.unloaded)
        if report.differing:
            raise _not_as_published(version, "not served", report.differing)


class _Verdict(NamedTuple):
    """Version that turns go on with before its probes are compared."""

    version: StepRef
    given: anyio.Event


def _join_proofs(reports: Sequence[LoadReport], *, compared: bool) -> WeightsProof:
    """Return one proof of all workers: each has compared its slices."""
    if not compared:
        return WeightsProof(status="unproven", checks=("names",))
    unproven = {name for report in reports for name in report.unproven}
    proven = {name for report in reports for name in report.compared} - unproven
    seconds = max(report.proof_seconds for report in reports)
    return make_proof(len(proven), sorted(unproven), seconds)


def _not_as_published(version: StepRef, fault: Any, tensors: Sequence[str]) -> NotAsPublished:
    return NotAsPublished(step=version.step, engine=NAME, fault=fault, tensors=tuple(tensors))


def _fetch_error(failure: WorkerFailure, ready: StepReady) -> TrinityError:
    """Return the error of a fetch in a worker, as :meth:`Synchronizer.pull` raises it."""
    if failure.kind == CorruptVersion.__name__:
        return WorkerFoundCorruption(failure.rank, failure.chunk, reason=failure.reason)
    if failure.kind == VersionUnavailable.__name__:
        return WorkerLacksVersion(f"weights of step {ready.step}", reason=failure.reason)
    return VLLMUnusable("fetch", failure.reason, ready.step)


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
