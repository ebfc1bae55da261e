"""Port of rollout engines: no trainer or explorer code depends on the engine behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from msgspec import Struct

from trinity_events.errors import TrinityError
from trinity_schemas import PauseMode, ProofStatus, Sampling, StepReady, StepRef

from ..learning.lora_settings import LoraConfig
from .proof import ProofOptions

if TYPE_CHECKING:
    import torch

    from trinity_events import Synchronizer


SAMPLING_SETTINGS = ("top_p", "top_k", "min_p", "repetition_penalty", "stop")
"""Settings of :class:`~trinity_schemas.Sampling` that an engine may lack."""


class RolloutEngineError(TrinityError):
    """An engine cannot be made, or refuses a request."""


class NotServing(RolloutEngineError):
    """No weight version is installed whole.

    Attributes:
        way_out: How to install one, or why none is served.
    """

    way_out: str = "install one first"
    text = "the rollout engine serves no weight version: {way_out}"


class EngineOptionsRefused(RolloutEngineError):
    """An engine has an option that is unknown or wrong.

    Attributes:
        engine: Its name.
        reason: The option, and what is wrong with it.
        allowed: Options that it has.
    """

    engine: str
    reason: str
    allowed: tuple[str, ...]
    text = "options of the rollout engine {engine}: {reason}; there is {_allowed}"

    @property
    def _allowed(self) -> str:
        return ", ".join(self.allowed)


class InstallRefused(RolloutEngineError):
    """An engine cannot install a version.

    Attributes:
        step: Step of the version.
        fault: ``synchronizer`` if it lacks one, ``ranks`` if it is part of the trainer's.
    """

    step: int
    fault: Literal["synchronizer", "ranks"]
    texts: ClassVar = {
        "synchronizer": "step {step} cannot be installed: the rollout engine has no synchronizer "
        "to install from",
        "ranks": "step {step} cannot be installed: the engine serves the weights of the trainer in "
        "its processes, in a block of serving()",
    }


class PromptRefused(RolloutEngineError):
    """A prompt is empty, or leaves no room for an answer.

    Attributes:
        ordinal: Ordinal of the question.
        tokens: Tokens of the prompt, with the turns so far; 0 if it is empty.
        turn: The turn.
        room: Tokens that the model has room for.
    """

    ordinal: int
    tokens: int
    turn: int
    room: int | None = None

    def __str__(self) -> str:
        if not self.tokens:
            return f"ordinal {self.ordinal} has an empty prompt"
        return (
            f"ordinal {self.ordinal} has {self.tokens} tokens before turn {self.turn}, and the "
            f"model has room for {self.room}: leave it out, or shorten it"
        )


class GenerationAborted(RolloutEngineError):
    """A pause for a weight version cut a request short: it is issued again.

    Attributes:
        ordinal: Ordinal of the question.
    """

    ordinal: int
    text = "the answer to ordinal {ordinal} was cut short, since a weight version came"


class UpdateModeNotSupported(RolloutEngineError):
    """An engine does not treat unfinished turns as the run asks.

    Attributes:
        engine: Its name.
        pause_mode: Mode that the run asks for.
        modes: Modes that it knows.
    """

    engine: str
    pause_mode: str
    modes: tuple[str, ...]
    text = (
        "rollouts.pause_mode is {pause_mode}, and the rollout engine {engine} knows {_modes} only: "
        "choose that, or another explorer.engine"
    )

    @property
    def _modes(self) -> str:
        return " and ".join(self.modes)


class AdaptersNotSupported(RolloutEngineError):
    """A run trains adapters, and what generates has none.

    Attributes:
        engine: Name of the engine; None for the trainer's ranks.
    """

    engine: str | None = None

    def __str__(self) -> str:
        if self.engine is None:
            return (
                "ranks generate with whole weights, and the policy trains adapters "
                "(model.lora.rank): let explorers generate, or leave the adapters out"
            )
        return (
            f"the rollout engine {self.engine} applies no versions of adapters: set "
            "model.lora.rank 0, or another explorer.engine"
        )


class OnlyTrains(RolloutEngineError):
    """An engine of the trainer is asked for rollouts, and only trains.

    Attributes:
        engine: Its class.
    """

    engine: str
    text = "{engine} only trains: let explorers answer the rollouts (trainer.colocated false)"


class EngineEnded(RolloutEngineError):
    """The processes of an engine have ended: only another engine can go on.

    Attributes:
        engine: Name of the engine.
        process: Name of the process that ended first.
    """

    engine: str
    process: str
    text = "the process {process} of {engine} has ended"


class GenerationRequest(Struct, frozen=True, kw_only=True):
    """Request for one turn of one sample.

    Its randomness follows from (the sampling's seed, ordinal, sample, turn) and the place of each
    token, and from nothing else.
    """

    tokens: list[int]
    """All tokens before the turn, the prompt's and those of earlier turns."""
    sampling: Sampling
    ordinal: int
    sample: int
    turn: int = 0


class Generation(Struct, frozen=True, kw_only=True):
    """Tokens that the policy sampled for one request."""

    tokens: list[int]
    """Token ids, with the end of sequence as the last one if it was sampled."""
    logprobs: list[float]
    """Log-probability of each token in nats, in the distribution that it was sampled from.

    That is the one after the request's repetition penalty, temperature, min_p, top_k and top_p,
    whose probabilities add up to 1. At temperature 0, which takes the most likely token, it is that
    at temperature 1.
    """
    versions: list[tuple[StepRef, int]]
    """Weight versions that sampled the tokens, in order, each with its number of tokens."""
    finished: bool
    """False if the limit of tokens ended it."""
    stop: str | None = None
    """Stop string that ended it, which the last token completes; None for an end of sequence."""
    aborted: bool = False
    """True if a pause for a version cut it short: it is no answer, and is to be requested again."""
    proof: ProofStatus = "unproven"
    """Weakest status of the versions, as their installation proved them."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options with which an entry point makes its engine."""

    model_folder: Path
    """Hugging Face folder of the policy, whose weights the first version replaces."""
    dtype: str = "float32"
    """Data type of the served parameters, `float32` or `bfloat16`."""
    device: str = "cpu"
    """Device of the served parameters."""
    gpus: float = 1.0
    """GPUs that the engine may use from `device` on; a part of one, if others share it."""
    synchronizer: Synchronizer | None = None
    """Synchronizer that brings weight versions; an engine without one cannot install any."""
    deterministic: bool = False
    """If True, what is generated for an ordinal depends on its own requests alone."""
    pause_mode: PauseMode = "wait"
    """Treatment of unfinished turns when a version is installed: `wait` for their end, `keep` them
    and their key-value caches, `retract` the caches and compute them again, or `abort` them."""
    proof: ProofOptions = field(default_factory=ProofOptions)
    """Checks that a version must pass before it is served."""
    sampling_settings: frozenset[str] = frozenset()
    """Settings of :data:`SAMPLING_SETTINGS` that requests of the run have."""
    serves: StepRef | None = None
    """Version that the folder's weights are; None if they are not to be served."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters that versions are of; the folder's weights are then their base, and stay."""
    seed: int = 0
    """Seed of the run."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of this engine."""


class TurnGenerator(Protocol):
    """Part of a rollout engine that generates the policy's turns."""

    @property
    def context_length(self) -> int | None:
        """Maximum number of tokens of an episode; None if there is no limit."""
        ...

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Generate one turn for each request, in order.

        Raises:
            NotServing: if no weight version is installed.
            RolloutEngineError: if a request leaves no room for a token.
        """
        ...


class RolloutEngine(TurnGenerator, Protocol):
    """Engine that holds one policy, generates with it, and takes new weights."""

    @property
    def serves(self) -> StepRef | None:
        """Weight version that it generates with; None before the first one is whole."""
        ...

    async def pause(self, lease: float) -> None:
        """Stop generating, and return once it stands still.

        It goes on after :meth:`resume`, or by itself after `lease` seconds: a caller that dies
        stops no engine for ever. Requests wait meanwhile.
        """
        ...

    async def resume(self) -> None:
        """Go on generating."""
        ...

    async def release(self) -> torch.nn.Module | None:
        """Serve no version, and return the module that arriving chunks may be written into.

        It waits for the end of what is being generated. None means that the engine's weights lie
        elsewhere. The next version is loaded whole.
        """
        ...

    async def install(self, ready: StepReady) -> None:
        """Serve a weight version, from a token boundary of unfinished turns on.

        `pause_mode` of the engine's options tells how those turns continue. Under `wait` there is
        no such boundary: the version waits for their end.

        Raises as :meth:`trinity_events.Synchronizer.apply`. Afterwards `serves` tells whether the
        earlier version is still whole; if so, unfinished turns go on with it.
        """
        ...

    async def prove(self) -> str:
        """Return a digest of the weights that it serves."""
        ...

    async def probe(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-probability of each token but the first of each sequence.

        They are those of a temperature of 1, in nats, by the served version. No sequence is longer
        than the context, less one token.

        Raises NotServing.
        """
        ...

    async def close(self) -> None:
        """End the engine and its processes."""
        ...
