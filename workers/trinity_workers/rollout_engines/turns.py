"""Turns while they are generated, for engines that generate token by token."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from trinity_schemas import StepRef

from .base import Generation, GenerationRequest, PromptRefused
from .proof import ProofRecord
from .sampling import NoisySampler, turn_key

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


class Stopped(NamedTuple):
    """End of a row by a stop string."""

    length: int
    """Tokens of the row, up to the one that completes the string."""
    stop: str


@dataclass(slots=True)
class OpenTurn:
    """Turn of a request while it is generated."""

    request: GenerationRequest
    limit: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[StepRef] = field(default_factory=list)
    finished: bool = False
    stop: str | None = None
    aborted: bool = False

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
        stopped: Stopped | None = None,
    ) -> None:
        """Add the tokens of a row, up to the first end of sequence, stop string or the limit."""
        # A batch continues until its last turn is over: this row may be longer than it may be.
        row = row[: self.limit - len(self.tokens)]
        end = next((place for place, token in enumerate(row) if token in ends), None)
        length = len(row) if end is None else end + 1
        self.finished = end is not None
        # An end of sequence outranks the stop string that it completes.
        if stopped is not None and stopped.length <= length and end != stopped.length - 1:
            length, self.stop, self.finished = stopped.length, stopped.stop, True
        self.tokens += row[:length]
        self.logprobs += logprobs[:length]
        self.versions += versions[:length]

    def generation(self, proofs: ProofRecord | None = None) -> Generation:
        """Return what was generated so far, with the status of its versions."""
        return Generation(
            tokens=self.tokens,
            logprobs=self.logprobs,
            versions=[(version, len(list(same))) for version, same in groupby(self.versions)],
            finished=self.finished,
            stop=self.stop,
            aborted=self.aborted,
            proof=(proofs or ProofRecord()).get_weakest(self.versions),
        )


class StopFinder:
    """Finds the stop strings of rows while these are sampled.

    A string ends a turn wherever it begins and ends, also within tokens. Each step decodes the
    last tokens of a row alone: a token has at least one byte, so that a string of n bytes has at
    most n of them, and one more for a space that decoding drops at the begin of a text.

    Args:
        tokenizer: Tokenizer of the policy.
        turns: Turns of the rows, whose earlier tokens count too.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, turns: Sequence[OpenTurn]) -> None:
        self._tokenizer = tokenizer
        self._stops = [turn.request.sampling.stop for turn in turns]
        self._tokens = [list(turn.tokens) for turn in turns]
        self._begins = [len(turn.tokens) for turn in turns]
        self._windows = [
            max((len(stop.encode()) for stop in stops), default=0) + 1 for stops in self._stops
        ]
        self.ends: list[Stopped | None] = [None] * len(turns)
        """End of each row that has a stop string."""
        self.is_needed = any(self._stops)
        """False if no row has one."""

    def add(self, tokens: Sequence[int]) -> list[bool]:
        """Add the next token of each row; return True for the rows that a stop string ended."""
        for row, token in enumerate(tokens):
            if self._stops[row] and self.ends[row] is None:
                self._tokens[row].append(token)
                self.ends[row] = self._find(row)
        return [stopped is not None for stopped in self.ends]

    def _find(self, row: int) -> Stopped | None:
        tokens = self._tokens[row]
        # Of the last tokens alone, or a turn of n tokens would decode n * n / 2.
        text = str(self._tokenizer.decode(tokens[-self._windows[row] :], skip_special_tokens=False))
        stop = find_first_stop(text, self._stops[row])
        return None if stop is None else Stopped(len(tokens) - self._begins[row], stop)


def find_first_stop(text: str, stops: Sequence[str]) -> str | None:
    """Return the stop string that a text has first; None if it has none."""
    # By place, then by text: the order in which the strings are listed decides nothing.
    places = [(text.find(stop), stop) for stop in stops]
    return min(((at, stop) for at, stop in places if at >= 0), default=(0, None))[1]


def turn_limit(request: GenerationRequest, room: int | None) -> int:
    """Return the number of tokens that a turn may have, with ``room`` for tokens in the model.

    Raises:
        RolloutEngineError: if the prompt is empty, or leaves no room for a token.
    """
    limit = request.sampling.max_new_tokens
    if not request.tokens:
        raise PromptRefused(request.ordinal, 0, request.turn)
    if room is None:
        return limit
    if len(request.tokens) >= room:
        raise PromptRefused(request.ordinal, len(request.tokens), request.turn, room)
    return min(limit, room - len(request.tokens))


def make_sampler(turns: Sequence[OpenTurn], device: torch.device) -> NoisySampler:
    """Return the sampler of the next tokens of turns.

    Args:
        turns: One for each row.
        device: Device of the logits.
    """
    requests = [turn.request for turn in turns]
    keys = [
        turn_key(request.sampling.seed, request.ordinal, request.sample, request.turn)
        for request in requests
    ]
    return NoisySampler(
        keys,
        [request.sampling for request in requests],
        device,
        [request.tokens + turn.tokens for turn, request in zip(turns, requests, strict=True)],
    )
