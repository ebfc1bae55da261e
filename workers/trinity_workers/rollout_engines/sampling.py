"""Sampling by noise that is a function of its place: pure functions on tensors.

A token is the largest of its logits over the temperature plus Gumbel noise, which samples the
softmax (Gumbel-max trick). The noise of a vocabulary entry is a hash of (key of the turn, place of
the token, entry). So it depends on no generator's state, on no batch, and on no explorer.

1. The order of the settings is vLLM's: repetition_penalty, temperature, min_p, top_k, top_p. Each
   takes the probabilities that the one before leaves, whose sum is 1 again.
2. A token's log-probability is that of the distribution it was sampled from, after all settings.
   Losses divide by it (docs/rollouts.md), so that ratios are those of importance sampling.
3. A row's settings change no bit of another row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from trinity_schemas import Sampling

# Constants of splitmix64 (https://prng.di.unimi.it/splitmix64.c), as signed integers.
_STEP = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64
_LEAST = 2.0**-53
"""Smallest uniform number; from it follows the largest noise, 36.7."""
_MOST = 1.0 - 2.0**-24
"""Largest uniform number; the noise stays finite."""


def turn_key(seed: int, ordinal: int, sample: int, turn: int) -> int:
    """Return the key of a turn's noise, as a signed integer of 64 bits."""
    place = f"{seed}:{ordinal}:{sample}:{turn}".encode()
    # Not Python's hash(), which differs from process to process.
    return int.from_bytes(hashlib.sha256(place).digest()[:8], "big", signed=True)


class NoisySampler:
    """Chooses the next token of B rows, each with a key and sampling settings of its own.

    Args:
        keys: Keys of the rows.
        samplings: Sampling settings of the rows.
        device: Device of the logits.
        histories: Tokens before the next one of each row, the prompt's included. They are needed
            for a repetition penalty alone.
    """

    def __init__(
        self,
        keys: Sequence[int],
        samplings: Sequence[Sampling],
        device: torch.device,
        histories: Sequence[Sequence[int]] = (),
    ) -> None:
        self._keys = torch.tensor(keys, dtype=torch.int64, device=device)[:, None]  # (rows, 1)
        temperatures = [sampling.temperature for sampling in samplings]
        self._greedy = None
        if 0.0 in temperatures:
            self._greedy = torch.tensor(temperatures, device=device)[:, None] == 0.0
        scales = torch.tensor(
            [1.0 / (temperature or 1.0) for temperature in temperatures], device=device
        )[:, None]
        # None leaves the bits of the logits as they are, at the usual temperature of 1.
        self._scales = (
            None if all(temperature in (0.0, 1.0) for temperature in temperatures) else scales
        )
        self._top_k = _column([sampling.top_k for sampling in samplings], 0, device)
        self._top_p = _column([sampling.top_p for sampling in samplings], 1.0, device)
        self._min_p = _column([sampling.min_p for sampling in samplings], 0.0, device)
        penalties = [sampling.repetition_penalty for sampling in samplings]
        self._penalties = _column(penalties, 1.0, device)
        self._histories = histories
        self._occurred: Tensor | None = None
        """True at each row's tokens so far, (rows, vocabulary)."""
        self._entries = torch.empty(0, dtype=torch.int64, device=device)

    def choose(self, logits: Tensor, place: int) -> tuple[Tensor, Tensor]:
        """Return the token of each row, and its log-probability in the sampled distribution.

        Args:
            logits: [B, vocabulary].
            place: Number of tokens that the turn has already.
        """
        scaled = self._penalise(logits.float())
        if self._scales is not None:
            scaled = scaled * self._scales
        logprobs = self._truncate(scaled.log_softmax(dim=-1))
        noise = self._noise(logits.shape[-1], place)  # (rows, vocabulary)
        if self._greedy is not None:
            # The largest logit is then the token, with its log-probability at temperature 1
            # (base.py).
            noise = noise.masked_fill(self._greedy, 0.0)
        tokens = (logprobs + noise).argmax(dim=-1)
        if self._occurred is not None:
            self._occurred.scatter_(-1, tokens[:, None], True)
        return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)

    def _penalise(self, logits: Tensor) -> Tensor:
        """Return the logits, those of tokens that occurred nearer to being unlikely."""
        if self._penalties is None:
            return logits
        if self._occurred is None:
            self._occurred = torch.zeros_like(logits, dtype=torch.bool)
            for row, tokens in enumerate(self._histories):
                self._occurred[row, torch.tensor(tokens, device=logits.device)] = True
        penalised = torch.where(logits > 0, logits / self._penalties, logits * self._penalties)
        return torch.where(self._occurred, penalised, logits)

    def _truncate(self, logprobs: Tensor) -> Tensor:
        """Return the log-probabilities that min_p, top_k and top_p leave, minus infinity beyond."""
        if self._top_k is None and self._top_p is None and self._min_p is None:
            return logprobs
        ordered, order = logprobs.sort(dim=-1, descending=True)
        refused = torch.zeros_like(ordered, dtype=torch.bool)
        if self._min_p is not None:
            # Of probabilities that are alike the first one stays, at any min_p.
            refused |= ordered.exp() < self._min_p * ordered[:, :1].exp()
        if self._top_k is not None:
            ranks = torch.arange(ordered.shape[-1], device=ordered.device)
            refused |= (self._top_k > 0) & (ranks >= self._top_k)
        if self._top_p is not None:
            probabilities = ordered.masked_fill(refused, -torch.inf).softmax(dim=-1)
            # An entry is in the nucleus if those before it have less than top_p together.
            before = probabilities.cumsum(dim=-1) - probabilities
            refused |= (before >= self._top_p) & (self._top_p < 1.0)
        # The likeliest entry stays, so that no row is left without one.
        refused[:, 0] = False
        truncated = logprobs.masked_fill(refused.scatter(-1, order, refused), -torch.inf)
        # A row that keeps all entries keeps its bits: another row's settings do not touch it.
        return torch.where(
            refused.any(dim=-1, keepdim=True), truncated.log_softmax(dim=-1), logprobs
        )

    def _noise(self, vocabulary: int, place: int) -> Tensor:
        """Return Gumbel noise, [B, vocabulary] float32."""
        if len(self._entries) != vocabulary:
            entries = torch.arange(1, vocabulary + 1, device=self._keys.device)
            self._entries = entries * _STEP
        # The key of a place is mixed by itself, lest places and entries of one turn overlap.
        mixed = _mix(_mix(self._keys + _signed((place + 1) * _STEP)) + self._entries)
        # 53 bits, as many as a double has; in float32 the largest may round up to 1.
        uniform = mixed.bitwise_right_shift_(11).bitwise_and_(2**53 - 1).float()
        uniform.mul_(_LEAST).clamp_(_LEAST, _MOST)
        return uniform.neg_().log1p_().neg_().log_().neg_()


def _signed(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def _mix(values: Tensor) -> Tensor:
    """Return the output function of splitmix64, in place."""
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        values ^= (values >> shift).bitwise_and_(2 ** (64 - shift) - 1)
        values *= factor
    values ^= (values >> 31).bitwise_and_(2**33 - 1)
    return values


def _column(values: Sequence[float], none: float, device: torch.device) -> Tensor | None:
    """Return settings as a column; None if no row has any."""
    if all(value == none for value in values):
        return None
    return torch.tensor(values, device=device)[:, None]
