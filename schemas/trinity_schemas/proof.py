"""Proof of what a consumer serves: its result, and the probes that a publisher seals."""

from __future__ import annotations

import array
import hashlib
import math
import sys
from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct

from .errors import ProbesContradiction
from .identity import Count, Digest, Seconds

ProofCheck = Literal["names", "served", "probes"]
ProofStatus = Literal["proven", "partly", "unproven"]
MAX_UNPROVEN = 32
"""Unproven tensors that an event names."""


class WeightsProof(Struct, frozen=True, kw_only=True):
    """Result of the checks that a version passed in a consumer, before it was served."""

    status: Annotated[
        ProofStatus,
        Meta(
            description="`proven` if each tensor that the consumer computes with was compared, "
            "`partly` if some were or probes agreed, and `unproven` if neither."
        ),
    ]
    checks: Annotated[
        tuple[ProofCheck, ...], Meta(max_length=8, description="Checks that it passed.")
    ]
    tensors: Annotated[Count, Meta(description="Tensors that were compared.")] = 0
    unproven: Annotated[
        tuple[Annotated[str, Meta(max_length=1024)], ...],
        Meta(max_length=MAX_UNPROVEN, description="Tensors that were not, the first ones."),
    ] = ()
    unproven_count: Annotated[Count, Meta(description="Number of tensors that were not.")] = 0
    seconds: Annotated[Seconds, Meta(description="Seconds that the comparison took.")] = 0.0
    probes: Annotated[Count, Meta(description="Probes that agreed.")] = 0
    difference: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(description="Largest difference of a probe's log-probability, in nats."),
    ] = None


MAX_PROBES = 256
"""Maximum number of sequences of a version: an engine computes all of them before it serves."""
MAX_PROBE_TOKENS = 1024
"""Maximum tokens of one sequence: their logits are in memory at once."""
_ITEM_BYTES = 4
_CODES = {"int32": "i", "float32": "f"}
_Size = Annotated[int, Meta(ge=1, le=MAX_PROBE_TOKENS)]


class ProbeArray(Struct, frozen=True, kw_only=True):
    """Two-dimensional array of typed elements, row-major and little-endian.

    Decoding checks that its size is that of its shape, and that its bytes have the digest.
    """

    dtype: Literal["int32", "float32"]
    shape: tuple[_Size, _Size]
    data: Annotated[bytes, Meta(max_length=MAX_PROBES * MAX_PROBE_TOKENS * _ITEM_BYTES)]
    digest: Digest

    def __post_init__(self) -> None:
        if len(self.data) != math.prod(self.shape) * _ITEM_BYTES:
            raise ProbesContradiction("size", len(self.data), math.prod(self.shape) * _ITEM_BYTES)
        if self.digest != _digest(self.data):
            raise ProbesContradiction("digest", _digest(self.data), self.digest)

    @classmethod
    def from_rows(
        cls, rows: Sequence[Sequence[float]], dtype: Literal["int32", "float32"]
    ) -> ProbeArray:
        """Return the array of rows of equal length."""
        values = array.array(_CODES[dtype], [value for row in rows for value in row])
        # Little-endian on the wire, as the hosts of two byte orders read the same digest.
        if sys.byteorder == "big":
            values.byteswap()
        data = values.tobytes()
        shape = (len(rows), len(rows[0]) if rows else 0)
        return cls(dtype=dtype, shape=shape, data=data, digest=_digest(data))

    def to_rows(self) -> list[list[float]]:
        """Return its rows."""
        # (sequences * tokens,): the shape was checked when it was decoded.
        values: array.array[float] = array.array(_CODES[self.dtype], self.data)
        if sys.byteorder == "big":
            values.byteswap()
        width = self.shape[1]
        return [values[at : at + width].tolist() for at in range(0, len(values), width)]


class Probes(Struct, frozen=True, kw_only=True):
    """Fixed token sequences, and their log-probabilities as the publisher computed them.

    They are those of a temperature of 1, in nats, of the weights as they are published.
    """

    tokens: Annotated[ProbeArray, Meta(description="Token ids, one sequence a row.")]
    logprobs: Annotated[
        ProbeArray, Meta(description="Log-probability of each token but the first of its row.")
    ]
    dtype: Annotated[
        str, Meta(max_length=32, description="Data type in which the publisher computed them.")
    ]

    def __post_init__(self) -> None:
        count, length = self.tokens.shape
        # The first token of a sequence has no log-probability: nothing comes before it.
        expected = ("int32", "float32", (count, length - 1))
        actual = (self.tokens.dtype, self.logprobs.dtype, self.logprobs.shape)
        if actual != expected:
            raise ProbesContradiction("shapes", actual, expected)
        if count > MAX_PROBES:
            raise ProbesContradiction("count", count, MAX_PROBES)
        if min(map(min, self.tokens.to_rows())) < 0:
            raise ProbesContradiction("tokens")
        if not all(value <= 0.0 for row in self.logprobs.to_rows() for value in row):
            raise ProbesContradiction("logprobs")  # nan is not below 0 either

    @property
    def count(self) -> int:
        """Return the number of sequences."""
        return self.tokens.shape[0]

    def sequences(self) -> list[list[int]]:
        """Return the token ids of each sequence."""
        return [[int(token) for token in row] for row in self.tokens.to_rows()]


def make_probes(
    sequences: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]], dtype: str
) -> Probes:
    """Return probes to seal with a version.

    Args:
        sequences: Token ids; all sequences have one length of 2 or more.
        logprobs: Log-probability of each token but the first of its sequence, in nats.
        dtype: Data type in which they were computed, such as ``bfloat16``.

    Raises:
        ProbesContradiction: if they do not fit together, or a log-probability is no number.
    """
    return Probes(
        tokens=ProbeArray.from_rows(sequences, "int32"),
        logprobs=ProbeArray.from_rows(logprobs, "float32"),
        dtype=dtype,
    )


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
