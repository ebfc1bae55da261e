"""Log-probabilities and entropies from logits, chunk by chunk, so that memory stays bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .types import Reduce, this_rank_alone

# With Qwen's vocabulary of 151,936 tokens, the distributions of a chunk take 0.6 GB.
CHUNK = 1024
"""Tokens whose float32 distribution is held at once, forward and backward."""
LEAST = -100.0
"""Log-probability in nats that stands for less: that of a forbidden token is -inf, and 0 times
infinity is NaN."""


class TokenStatistics(NamedTuple):
    """Log-probabilities of tokens, and entropies of their distributions if asked for."""

    logprobs: Tensor
    entropy: Tensor | None

    def masked(self, mask: Tensor) -> TokenStatistics:
        """Return the statistics, 0 where the mask is false."""
        entropy = None if self.entropy is None else self.entropy.masked_fill(~mask, 0.0)
        return TokenStatistics(self.logprobs.masked_fill(~mask, 0.0), entropy)

    def stacked(self) -> Tensor:
        """Return the statistics that there are as one tensor [..., X]."""
        return torch.stack([tensor for tensor in self if tensor is not None], dim=-1)

    @classmethod
    def from_stacked(cls, values: Tensor) -> TokenStatistics:
        """Return the statistics of a tensor that :meth:`stacked` made."""
        logprobs, *entropies = values.unbind(dim=-1)
        return cls(logprobs, entropies[0] if entropies else None)


class VocabularyPart(NamedTuple):
    """Columns of the vocabulary that this rank holds, where several ranks share it."""

    first: int = 0
    """Token of the first column."""
    columns: int | None = None
    """Columns that are tokens; those after them are padding. None for all."""
    largest: Reduce = this_rank_alone
    """Elementwise maximum over the ranks that share the vocabulary."""
    total: Reduce = this_rank_alone
    """Sum over them."""

    def find_columns(self, tokens: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Return the column of each token, and True for those that this rank holds: [N] each."""
        if self.total is this_rank_alone:
            return tokens, torch.ones_like(tokens, dtype=torch.bool)
        columns = tokens - self.first
        is_local = (columns >= 0) & (columns < width)
        # Column 0 stands in for a token of another rank; callers drop what they read there.
        return columns.masked_fill(~is_local, 0), is_local


WHOLE = VocabularyPart()


def token_statistics(
    logits: Tensor,
    tokens: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    chunk: int = CHUNK,
    part: VocabularyPart = WHOLE,
) -> TokenStatistics:
    """Return log-probabilities, and entropies H = -sum_v p_v log p_v in nats.

    The float32 distribution of a chunk alone is held at once: in the backward pass it is computed
    again. Ranks that share the vocabulary get equal results, and each the gradient of its columns.

    Args:
        logits: [B, R, V] of any floating dtype; the column that predicts each token.
        tokens: [B, R] int64.
        temperature: Temperature that sampled; logits are divided by it.
        entropy: Compute entropies too.
        chunk: Tokens of a chunk.
        part: Part of the vocabulary that the logits are of. Collective over its ranks.

    Returns:
        [B, R] float32 (float64 for logits of float64), with gradient.
    """
    softmax = _Softmax(temperature, chunk, part, entropy)
    compute: Any = _OfLogits.apply  # it has no annotations
    return softmax.statistics(compute(logits.flatten(0, -2), tokens.flatten(), softmax), tokens)


def head_statistics(
    hidden: Tensor,
    head: tuple[Tensor, Tensor | None],
    tokens: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    chunk: int = CHUNK,
    part: VocabularyPart = WHOLE,
) -> TokenStatistics:
    """Return :func:`token_statistics` of the logits that a linear head makes of hidden states.

    The logits of a chunk alone are held at once: in the backward pass they are computed again.
    Ranks that share the vocabulary get the gradient of the hidden states from their own columns:
    its sum over those ranks is the whole one.

    Args:
        hidden: [B, R, H]; the column that predicts each token.
        head: Weight [V, H], and bias [V] or None, in the dtype of the hidden states.
        tokens: [B, R] int64.
        temperature: Temperature that sampled; logits are divided by it.
        entropy: Compute entropies too.
        chunk: Tokens of a chunk.
        part: Part of the vocabulary that the head is of. Collective over its ranks.
    """
    softmax = _Softmax(temperature, chunk, part, entropy)
    compute: Any = _OfHead.apply  # it has no annotations
    statistics = compute(hidden.flatten(0, -2), *head, tokens.flatten(), softmax)
    return softmax.statistics(statistics, tokens)


def exact(logits: Tensor) -> Tensor:
    """Return logits as float32; those of float64 as they are."""
    return logits.to(_exact_dtype(logits))


def in_chunks(function: Callable[..., Tensor], *rows: Tensor, chunk: int) -> Tensor:
    """Apply a function to rows, chunk by chunk; its results [..., n] are joined at the end."""

    def kept_small(*parts: Tensor) -> Tensor:
        # The functions draw no random numbers, so no generator's state has to be kept.
        result = checkpoint(function, *parts, use_reentrant=False, preserve_rng_state=False)
        assert isinstance(result, Tensor)
        return result

    pieces = zip(*(torch.split(tensor, chunk) for tensor in rows), strict=True)
    return torch.cat([kept_small(*piece) for piece in pieces], dim=-1)


def _exact_dtype(like: Tensor) -> torch.dtype:
    return torch.promote_types(like.dtype, torch.float32)


class _Softmax(NamedTuple):
    """Softmax of logits over a vocabulary that ranks may share."""

    temperature: float
    chunk: int
    part: VocabularyPart
    entropy: bool

    def scaled(self, logits: Tensor) -> Tensor:
        """Return a copy of logits [n, V] in float32, over the temperature; -inf on padding."""
        scaled = exact(logits) / self.temperature
        if self.part.columns is not None:
            # Megatron pads the vocabulary to a multiple; its extra columns must get no probability.
            scaled[:, self.part.columns :] = -torch.inf
        return scaled

    def summary(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Return log-probabilities, entropies and logarithms of the normalisers: [3, n]."""
        shifted = self.scaled(logits)
        # (n,). The largest of all ranks, so that their sums of exponentials have one scale.
        peak = self.part.largest(shifted.amax(dim=-1))
        shifted -= peak[:, None]
        column, is_local = self.part.find_columns(tokens, shifted.shape[-1])
        # Exactly one rank holds the token's column. The others add 0 to the sum over ranks.
        chosen = shifted.gather(-1, column[:, None]).squeeze(-1).masked_fill(~is_local, 0.0)
        weights = shifted.exp()
        sums = [weights.sum(dim=-1), chosen]
        if self.entropy:
            sums.append((weights * shifted.clamp_(min=LEAST)).sum(dim=-1))
        # One exchange of two or three numbers a token, in the place of V logits.
        normaliser, chosen, *mean = self.part.total(torch.stack(sums))
        log_normaliser = normaliser.log()
        entropy = log_normaliser - mean[0] / normaliser if mean else log_normaliser
        return torch.stack([chosen - log_normaliser, entropy, peak + log_normaliser])

    def gradient(self, logits: Tensor, tokens: Tensor, summary: Tensor, given: Tensor) -> Tensor:
        """Return the gradient of logits [n, V] in float32.

        Args:
            logits: [n, V].
            tokens: [n].
            summary: [3, n], of the forward pass.
            given: [2, n], gradients of log-probabilities and entropies.
        """
        _, entropy, log_normaliser = summary
        logs = self.scaled(logits)
        logs -= log_normaliser[:, None]
        weights = logs.exp()
        # d log p_t / d x_v = [v = t] - p_v, and d H / d x_v = -p_v (log p_v + H).
        factors = -given[0][:, None]
        if self.entropy:
            factors = factors - given[1][:, None] * (logs.clamp_(min=LEAST) + entropy[:, None])
        gradient = weights.mul_(factors)
        column, is_local = self.part.find_columns(tokens, gradient.shape[-1])
        # One column a row: an indexed += adds only once where indices repeat, and none does.
        gradient[torch.arange(len(gradient), device=gradient.device), column] += given[0] * is_local
        return gradient.div_(self.temperature)

    def statistics(self, statistics: Tensor, tokens: Tensor) -> TokenStatistics:
        """Return statistics [2, N] in the shape of the tokens."""
        logprobs, entropy = statistics.view(2, *tokens.shape)
        return TokenStatistics(logprobs, entropy if self.entropy else None)

    def chunks(self, count: int) -> Iterator[slice]:
        """Yield the chunks of so many tokens."""
        for start in range(0, count, self.chunk):
            yield slice(start, start + self.chunk)


class _OfLogits(torch.autograd.Function):
    """Statistics [2, N] of logits [N, V]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, softmax: _Softmax) -> Tensor:
        summary = logits.new_empty(3, len(tokens), dtype=_exact_dtype(logits))  # (3, N)
        for chunk in softmax.chunks(len(tokens)):
            summary[:, chunk] = softmax.summary(logits[chunk], tokens[chunk])
        ctx.softmax = softmax
        ctx.save_for_backward(logits, tokens, summary)
        # Autograd holds `summary`: an in-place change of a view of it would make backward fail.
        return summary[:2].clone()

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, None, None]:
        softmax: _Softmax = ctx.softmax
        logits, tokens, summary = ctx.saved_tensors
        gradient = torch.empty_like(logits)  # (N, V), in the dtype of the logits
        for chunk in softmax.chunks(len(tokens)):
            gradient[chunk] = softmax.gradient(
                logits[chunk], tokens[chunk], summary[:, chunk], given[0][:, chunk]
            )
        return gradient, None, None


class _OfHead(torch.autograd.Function):
    """Statistics [2, N] of the logits that a linear head makes of hidden states [N, H]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        softmax: _Softmax,
    ) -> Tensor:
        summary = hidden.new_empty(3, len(tokens), dtype=_exact_dtype(hidden))
        for chunk in softmax.chunks(len(tokens)):
            logits = functional.linear(hidden[chunk], weight, bias)
            summary[:, chunk] = softmax.summary(logits, tokens[chunk])
        ctx.softmax = softmax
        ctx.save_for_backward(hidden, weight, bias, tokens, summary)
        return summary[:2].clone()

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        softmax: _Softmax = ctx.softmax
        hidden, weight, bias, tokens, summary = ctx.saved_tensors
        of_hidden = torch.empty_like(hidden)
        # Sums over chunks are float32: bfloat16 would lose what small chunks add.
        dtype = _exact_dtype(weight)
        of_weight = torch.zeros_like(weight, dtype=dtype)
        of_bias = None if bias is None else torch.zeros_like(bias, dtype=dtype)
        for chunk in softmax.chunks(len(tokens)):
            logits = functional.linear(hidden[chunk], weight, bias)
            of_logits = softmax.gradient(
                logits, tokens[chunk], summary[:, chunk], given[0][:, chunk]
            )
            if of_bias is not None:
                of_bias += of_logits.sum(dim=0)
            of_logits = of_logits.to(hidden.dtype)
            of_hidden[chunk] = of_logits @ weight
            # addmm_ takes tensors of one dtype alone, and saves the memory of the product.
            if dtype == hidden.dtype:
                of_weight.addmm_(of_logits.t(), hidden[chunk])
            else:
                of_weight += of_logits.t() @ hidden[chunk]
        if of_bias is not None:
            of_bias = of_bias.to(hidden.dtype)
        return of_hidden, of_weight.to(weight.dtype), of_bias, None, None
