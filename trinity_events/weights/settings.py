"""Settings of a Synchronizer."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import torch
from msgspec import Struct

from trinity_schemas import TransportName

from .errors import TransportRefused


class SynchronizerSettings(Struct, frozen=True, kw_only=True):
    """Arguments of a :class:`~trinity_events.Synchronizer`, which documents them.

    Raises ValueError for an unknown transport.
    """

    run_id: str
    epoch: int
    redis_url: str | None
    weights_url: str | None
    role: str
    rank: int
    transport: TransportName
    chunk_bytes: int | None
    group_timeout: float
    full_every: int
    tensor_digests: bool
    dtype: torch.dtype | None
    lease: float
    deadline: float
    checkpoint_folder: Path | None = None

    def __post_init__(self) -> None:
        if self.transport not in get_args(TransportName):
            raise TransportRefused("name", self.transport, get_args(TransportName))
