"""Turns while they are generated, for engines that generate token by token."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from trinity_schemas import StepRef

from .base import Generation, GenerationRequest, RolloutEngineError


@dataclass(slots=True)
class OpenTurn:
    """Turn of a request while it is generated."""

    request: GenerationRequest
    limit: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[StepRef] = field(default_factory=list)
    finished: bool = False

    @property
    def is_over(self) -> bool:
        """Return True if it has its end of sequence, or as many tokens as it may have."""
        return self.finished or len(self.tokens) >= self.limit

    def extend(
        self,
        row: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[StepRef],
        ends: Collection[int],
    ) -> None:
        """Add the tokens of a row, up to the first end of sequence or the limit."""
        row = row[: self.limit - len(self.tokens)]
        end = next((place for place, token in enumerate(row) if token in ends), None)
        self.finished = end is not None
        length = len(row) if end is None else end + 1
        self.tokens += row[:length]
        self.logprobs += logprobs[:length]
        self.versions += versions[:length]

    def generation(self) -> Generation:
        """Return what was generated so far."""
        return Generation(
            tokens=self.tokens,
            logprobs=self.logprobs,
            versions=[(version, len(list(same))) for version, same in groupby(self.versions)],
            finished=self.finished,
        )


def turn_limit(request: GenerationRequest, room: int | None) -> int:
    """Return the number of tokens that a turn may have, with ``room`` for tokens in the model.

    Raises:
        RolloutEngineError: if the prompt is empty, or leaves no room for a token.
    """
    limit = request.sampling.max_new_tokens
    if not request.tokens:
        raise RolloutEngineError(f"ordinal {request.ordinal} has an empty prompt")
    if room is None:
        return limit
    if len(request.tokens) >= room:
        raise RolloutEngineError(
            f"ordinal {request.ordinal} has {len(request.tokens)} tokens before turn "
            f"{request.turn}, and the model has room for {room}: leave it out, or shorten it"
        )
    return min(limit, room - len(request.tokens))
