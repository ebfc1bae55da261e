"""Conformance kit of rollout engines: a model of their life, and an oracle of what they answer.

An engine of your own passes it as a test of pytest::

    async def test_my_engine_conforms():
        oracle = TransformersOracle("retract")
        for sequence in legal_sequences(3):
            await check_sequence(MyDriver(oracle), oracle, sequence)

1. What is answered is what the weights of the claimed version give: each token is the most likely
   one, with its log-probability, both computed again by transformers.
2. A call is answered exactly once: by whole answers, or, where a version cut it short or none is
   served, by a refusal; its requests are answered when they are asked for again.
3. Nothing is sampled while the engine is paused, asleep or amid an update, whatever resumes it.
4. After the operations that end a sequence, every call ends within the deadline.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, get_args

import anyio

from trinity_events.errors import StructuredError
from trinity_schemas import PauseMode, Sampling, StepRef

from .base import Generation, GenerationRequest, NotServing

Operation = Literal[
    "pause",
    "drain",
    "sleep",
    "wake",
    "start_update",
    "load",
    "finish",
    "break_update",
    "invalidate_caches",
    "resume",
]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)

TOLERANCE = 1e-4
"""Nats by which another order of sums may change a log-probability, in float32."""
DEADLINE = 60.0
"""Seconds within which an operation, and every call after a sequence, must end."""
_REQUESTS = 2
_TOKENS = 6
_CHECKPOINTS = 16
"""Turns of the event loop that a call gets at an engine that stands still: doubles need no time."""


class EngineDriver(Protocol):
    """Engine under test, which serves a first version, driven operation by operation.

    Each operation returns once its effect is there. Those of an update may be parts of one call of
    the engine's `install`, which the driver holds up in between.
    """

    @property
    def serves(self) -> StepRef | None:
        """Version that the engine claims to serve."""
        ...

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Generate one turn for each request. Raises NotServing."""
        ...

    async def pause(self) -> None:
        """Stop generating; requests wait."""
        ...

    async def sleep(self) -> None:
        """Let the weights go; nothing is in flight."""
        ...

    async def wake(self) -> None:
        """Hold the last whole version again."""
        ...

    async def start_update(self) -> None:
        """Stand still for the next version, and begin to change the weights."""
        ...

    async def load(self) -> None:
        """Bring the rest of the weights."""
        ...

    async def finish(self) -> None:
        """Serve the version that was loaded."""
        ...

    async def break_update(self) -> None:
        """Fail the update amid its load: the earlier version is whole, or none is served."""
        ...

    async def invalidate_caches(self) -> None:
        """Drop all key-value caches."""
        ...

    async def resume(self) -> None:
        """End a pause."""
        ...

    async def close(self) -> None:
        """End the engine and what the driver holds."""
        ...


class Oracle(Protocol):
    """Judge of answers."""

    def find_fault(self, request: GenerationRequest, generation: Generation) -> str | None:
        """Return what is wrong with an answer; None if nothing is."""
        ...


class EngineNotConforming(StructuredError):
    """An engine does not do what the model of its life says.

    Attributes:
        sequence: Operations up to the fault.
        fault: What is wrong.
    """

    sequence: tuple[str, ...]
    fault: str
    text = "after {_operations}: {fault}"

    @property
    def _operations(self) -> str:
        return ", ".join(self.sequence) or "no operation"


@dataclass(frozen=True)
class EngineLife:
    """Model of an engine's life, as far as it decides which operations are legal."""

    mode: PauseMode = "retract"
    paused: bool = False
    update: Literal["none", "started", "loaded"] = "none"
    serving: bool = True
    """False asleep, and after an update that broke: there may be no whole version."""
    drained: bool = False
    """True if nothing is in flight, since a drain that nothing has begun after."""

    @property
    def generates(self) -> bool:
        """Return True if requests are answered."""
        return not self.paused and self.update == "none" and self.serving

    def is_legal(self, operation: Operation) -> bool:
        """Return True if an engine must do an operation now."""
        settled = self.update == "none"
        # A version that waits for the end of calls waits for that of a pause too.
        may_change = settled and (self.mode != "wait" or self.drained or not self.paused)
        return {
            "pause": not self.paused,
            "drain": self.generates and not self.drained,
            "sleep": self.serving and self.drained and settled,
            "wake": not self.serving and may_change,
            "start_update": may_change,
            "load": self.update == "started",
            "break_update": self.update == "started",
            "finish": self.update == "loaded",
            "invalidate_caches": self.serving and settled,
            # Also amid an update, which it does not end.
            "resume": self.paused,
        }[operation]

    def after(self, operation: Operation) -> EngineLife:
        """Return the model after a legal operation."""
        changes: dict[Operation, dict[str, Any]] = {
            "pause": {"paused": True},
            "resume": {"paused": False},
            "sleep": {"serving": False},
            "wake": {"serving": True},
            "start_update": {"update": "started"},
            "load": {"update": "loaded"},
            "finish": {"update": "none", "serving": True},
            "break_update": {"update": "none", "serving": False},
        }
        # A call begins after each operation, but after these while nothing is in flight.
        idle = operation == "drain" or (
            self.drained and operation in ("pause", "invalidate_caches")
        )
        return replace(self, drained=idle, **changes.get(operation, {}))

    def ending(self) -> list[Operation]:
        """Return the operations after which the engine generates."""
        operations: list[Operation] = []
        if self.paused and self.mode == "wait":
            operations.append("resume")
        if self.update == "started":
            operations.append("load")
        if self.update != "none":
            operations.append("finish")
        elif not self.serving:
            operations.append("wake")
        if self.paused and self.mode != "wait":
            operations.append("resume")
        return operations


def legal_sequences(depth: int, mode: PauseMode = "retract") -> Iterator[tuple[Operation, ...]]:
    """Yield all legal sequences of a depth; shorter ones are their beginnings."""

    def extend(sequence: tuple[Operation, ...], life: EngineLife) -> Iterator[Any]:
        if len(sequence) == depth:
            yield sequence
            return
        for operation in OPERATIONS:
            if life.is_legal(operation):
                yield from extend((*sequence, operation), life.after(operation))

    yield from extend((), EngineLife(mode))


def random_sequence(depth: int, seed: int, mode: PauseMode = "retract") -> tuple[Operation, ...]:
    """Return a legal sequence of a depth, drawn operation by operation."""
    generator = random.Random(seed)  # noqa: S311 - of test cases
    life, sequence = EngineLife(mode), []
    for _ in range(depth):
        # Only legal ones: what an engine does with others is its own affair.
        operation = generator.choice([each for each in OPERATIONS if life.is_legal(each)])
        life = life.after(operation)
        sequence.append(operation)
    return tuple(sequence)


@dataclass
class _TestedCall:
    requests: list[GenerationRequest]
    outcome: list[Generation] | NotServing | None = None
    done: anyio.Event = field(default_factory=anyio.Event)
    is_held: bool = False
    """True if it began while the engine stood still, which has not ended."""


async def check_sequence(
    driver: EngineDriver,
    oracle: Oracle,
    sequence: Sequence[Operation],
    mode: PauseMode = "retract",
    *,
    deadline: float = DEADLINE,
) -> None:
    """Drive an engine through a sequence of operations amid calls, and judge all answers.

    One call is in flight when the first operation comes, and one more begins after each operation,
    but between a drain and a sleep. A call that comes while the engine generates is waited for; one
    that comes while it stands still must not be answered before it generates again.

    Args:
        driver: The engine; it is not closed.
        oracle: Judge of the answers.
        sequence: A legal sequence, as :func:`legal_sequences` yields them.
        mode: Mode of the engine's pauses.
        deadline: Seconds within which all operations and calls of the sequence must end.

    Raises:
        EngineNotConforming: The engine does something else.
    """
    await _SequenceCheck(driver, oracle, mode, deadline).run(sequence)


class _SequenceCheck:
    def __init__(
        self, driver: EngineDriver, oracle: Oracle, mode: PauseMode, deadline: float
    ) -> None:
        self._deadline = deadline
        self._driver, self._oracle = driver, oracle
        self._ordinals = itertools.count()
        self._done: list[str] = []
        self._calls: list[_TestedCall] = []
        self._life = EngineLife(mode)
        self._is_ending = False

    async def run(self, sequence: Sequence[Operation]) -> None:
        try:
            with anyio.fail_after(self._deadline):
                async with anyio.create_task_group() as tasks:
                    await self._run(sequence, tasks)
        except TimeoutError:
            raise self._make_fault("an operation or a call does not end") from None
        except BaseExceptionGroup as errors:
            # A call's fault ends the other tasks, whose errors say less.
            faults = errors.subgroup(EngineNotConforming)
            if faults is None:
                raise
            raise next(_leaves(faults)) from None
        for call in self._calls:
            self._judge(call)
        await self._ask_again()

    async def _run(self, sequence: Sequence[Operation], tasks: Any) -> None:
        self._begin(tasks)
        await anyio.lowlevel.checkpoint()
        for operation in sequence:
            if not self._life.is_legal(operation):
                raise ValueError(f"{operation} is not legal after {self._done}")
            await self._apply(operation)
            if not self._life.drained:
                await self._begin_call(tasks)
        for operation in self._life.ending():
            await self._apply(operation)

    async def _begin_call(self, tasks: Any) -> None:
        """Begin a call; wait for its answer if the engine generates."""
        call = self._begin(tasks)
        if self._life.generates:
            await call.done.wait()
            self._check_answered(call)
        else:
            call.is_held = True
            for _ in range(_CHECKPOINTS):
                await anyio.lowlevel.checkpoint()

    async def _apply(self, operation: Operation) -> None:
        self._done.append(operation)
        # The operation that ends a standstill may answer calls before it returns.
        self._is_ending = self._life.after(operation).generates
        if operation == "drain":
            for call in self._calls:
                await call.done.wait()
        else:
            await getattr(self._driver, operation)()
        self._life = self._life.after(operation)
        if self._life.generates:
            for call in self._calls:
                call.is_held = False

    def _begin(self, tasks: Any) -> _TestedCall:
        call = _TestedCall(
            [
                GenerationRequest(
                    tokens=[10 + ordinal % 7, 11, 12 + index],
                    sampling=Sampling(max_new_tokens=_TOKENS, temperature=0.0, seed=3),
                    ordinal=ordinal,
                    sample=0,
                )
                for index, ordinal in enumerate(itertools.islice(self._ordinals, _REQUESTS))
            ]
        )
        self._calls.append(call)
        tasks.start_soon(self._generate, call)
        return call

    async def _generate(self, call: _TestedCall) -> None:
        try:
            call.outcome = await self._driver.generate(call.requests)
        except NotServing as error:
            call.outcome = error
        answered = isinstance(call.outcome, list) and not all(
            generation.aborted for generation in call.outcome
        )
        if call.is_held and answered and not self._is_ending:
            raise self._make_fault("a call was answered although the engine stands still")
        call.done.set()

    def _check_answered(self, call: _TestedCall) -> None:
        if not isinstance(call.outcome, list) or any(each.aborted for each in call.outcome):
            raise self._make_fault("a call was refused although a version is served")
        claimed = {version for each in call.outcome for version, _ in each.versions}
        if claimed != {self._driver.serves}:
            raise self._make_fault(f"{claimed} answered, and {self._driver.serves} is served")

    def _judge(self, call: _TestedCall) -> None:
        if not isinstance(call.outcome, list):
            return
        if len(call.outcome) != len(call.requests):
            raise self._make_fault(f"{len(call.requests)} requests had {len(call.outcome)} answers")
        for request, generation in zip(call.requests, call.outcome, strict=True):
            if generation.aborted:
                continue
            if sum(count for _, count in generation.versions) != len(generation.tokens):
                raise self._make_fault("some tokens have no version")
            if fault := self._oracle.find_fault(request, generation):
                raise self._make_fault(fault)

    async def _ask_again(self) -> None:
        """Ask again for what was refused or cut short."""
        for call in self._calls:
            outcome = call.outcome
            if not isinstance(outcome, list) or any(generation.aborted for generation in outcome):
                again = _TestedCall(call.requests)
                with suppress(TimeoutError), anyio.fail_after(self._deadline):
                    await self._generate(again)
                self._check_answered(again)
                self._judge(again)

    def _make_fault(self, fault: str) -> EngineNotConforming:
        return EngineNotConforming(tuple(self._done), fault)


def _leaves(errors: BaseExceptionGroup[EngineNotConforming]) -> Iterator[EngineNotConforming]:
    for error in errors.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


class TransformersOracle:
    """Oracle that computes answers again with the Hugging Face models of their versions.

    Args:
        mode: Mode of the engine's pauses. Under `keep` a token is computed with the caches of the
            versions before; else each token with its version alone.
    """

    def __init__(self, mode: PauseMode = "retract") -> None:
        self.models: dict[StepRef, Any] = {}
        """Models by version; the driver adds each one that it publishes."""
        self._mode = mode

    def find_fault(self, request: GenerationRequest, generation: Generation) -> str | None:
        """Return what is wrong with a greedy answer; None if nothing is."""
        import torch

        versions = [version for version, count in generation.versions for _ in range(count)]
        cache, inputs, history = None, list(request.tokens), list(request.tokens)
        pairs = zip(generation.tokens, generation.logprobs, versions, strict=True)
        for place, (token, logprob, version) in enumerate(pairs):
            if version not in self.models:
                return f"token {place} is of {version}, which was never published"
            with torch.no_grad():
                if self._mode == "keep":
                    output = self.models[version](
                        torch.tensor([inputs]), past_key_values=cache, use_cache=True
                    )
                    cache, inputs = output.past_key_values, [token]
                else:
                    output = self.models[version](torch.tensor([history]))
            logprobs = output.logits[0, -1].float().log_softmax(-1)  # (vocabulary,)
            if abs(float(logprobs[token]) - logprob) > TOLERANCE:
                return (
                    f"token {place} of {version} has the log-probability {logprob:.6f}, and its "
                    f"weights give {float(logprobs[token]):.6f}"
                )
            if float(logprobs.max()) - float(logprobs[token]) > TOLERANCE:
                return f"token {place} of {version} is not its most likely one"
            history.append(token)
        return None
