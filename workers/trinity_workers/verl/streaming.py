"""Streaming of weights from veRL's engines, which gather them on all ranks one by one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from typing import TypeAlias

import torch

Weights: TypeAlias = Iterable[tuple[str, torch.Tensor]] | AsyncIterable[tuple[str, torch.Tensor]]
Take: TypeAlias = Callable[[str, torch.Tensor], Awaitable[None]]
"""Begins to take a tensor; the awaitable ends once it is taken."""


async def drain(
    weights: Weights, take: Take | None, error: Exception | None = None, *, ahead: bool = True
) -> Exception | None:
    """Advance every gather and pass on each tensor; return the first error of the passing.

    The gathers run on the event loop's thread, which is the training thread; the loop runs between
    two of them. After an error the gathers still advance, since other ranks take part in them.

    Args:
        weights: Tensors that are gathered as the iterator advances.
        take: Takes a tensor in another thread; None on ranks that only gather.
        error: Earlier error; no tensor is taken then.
        ahead: If True, the next tensor may be gathered while one is taken; at most two are held.

    Raises whatever ends the gathers themselves, once the last tensor is taken.
    """
    under_way: Awaitable[None] | None = None
    try:
        async for name, tensor in _each(weights):
            if under_way is not None:
                error, under_way = await _outcome(under_way), None
            if take is not None and error is None:
                under_way = take(name, tensor)
                if not ahead:
                    error, under_way = await _outcome(under_way), None
    finally:
        if under_way is not None:
            error = await _outcome(under_way)
    return error


async def _each(weights: Weights) -> AsyncIterator[tuple[str, torch.Tensor]]:
    if isinstance(weights, AsyncIterable):
        async for named in weights:
            yield named
        return
    for named in weights:
        yield named
        await asyncio.sleep(0)  # gathers block the loop, which runs here alone


async def _outcome(under_way: Awaitable[None]) -> Exception | None:
    try:
        await under_way
    except Exception as error:
        return error
    return None
