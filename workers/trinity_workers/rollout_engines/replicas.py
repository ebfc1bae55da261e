"""Requests of ranks that generate together: replicas share them, and each rank gets its answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import torch.distributed as dist

from ..runtime.collectives import gather_bytes, raise_together
from .base import Generation, GenerationRequest
from .turns import OpenTurn, turn_limit


class Replica(NamedTuple):
    """Ranks that hold the weights once, among all ranks that generate."""

    group: dist.ProcessGroup | None
    """All ranks that generate, of all replicas."""
    number: int
    replicas: int
    is_first: bool
    """True on the rank that answers for its replica."""


def generate_shared(
    requests: Sequence[GenerationRequest],
    replica: Replica,
    room: int | None,
    generate: Callable[[Sequence[OpenTurn]], Sequence[Generation]],
    *,
    by_prompt: bool = False,
) -> list[Generation]:
    """Generate one turn for each request of this rank, in order. Collective.

    Ranks that bring equal requests, as those of one training replica do, get equal answers.

    Args:
        requests: Requests of this rank.
        replica: Replica of this rank.
        room: Maximum number of tokens of an episode.
        generate: Generates turns on the ranks of one replica, which get the same ones.
        by_prompt: Leave all requests of an ordinal to one replica, whatever other requests there
            are, for engines whose answers depend on what is generated together.

    Raises:
        RolloutEngineError: on all ranks, if a request of one leaves no room for a token.
        PeerFailed: on the ranks that did not fail themselves.
        CollectiveBroken: if a rank died or was too slow.
    """
    group = replica.group
    mine = [msgspec.msgpack.encode(request) for request in requests]
    requests_by_rank = (
        msgspec.msgpack.decode(payload, type=list[bytes])
        for payload in gather_bytes(msgspec.msgpack.encode(mine), group)
    )
    everyones = list(dict.fromkeys(payload for theirs in requests_by_rank for payload in theirs))
    turns = [
        OpenTurn(request, turn_limit(request, room))
        for request in (
            msgspec.msgpack.decode(payload, type=GenerationRequest) for payload in everyones
        )
    ]
    shares: list[list[int]] = [[] for _ in range(replica.replicas)]
    for place, turn in enumerate(turns):
        shares[(turn.request.ordinal if by_prompt else place) % replica.replicas].append(place)
    error: Exception | None = None
    generations: Sequence[Generation] = ()
    try:
        generations = generate([turns[place] for place in shares[replica.number]])
    except Exception as caught:
        error = caught
    # Before the answers: a rank that failed has none, and the others would wait for them.
    raise_together(error, group)
    own = (replica.number, generations if replica.is_first else ())
    answers: dict[bytes, Generation] = {}
    for payload in gather_bytes(msgspec.msgpack.encode(own), group):
        number, theirs = msgspec.msgpack.decode(payload, type=tuple[int, list[Generation]])
        # A replica's ranks but the first one say nothing.
        answers |= zip((everyones[place] for place in shares[number]), theirs, strict=False)
    return [answers[payload] for payload in mine]
