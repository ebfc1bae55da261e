"""Copying of parameters from one layout to another in the same processes, slice by slice.

Every rank sends once which slices it holds and which it needs. All ranks derive the same plan from
that: what a rank has itself is copied, the rest comes from one of its holders, in buckets of a
bounded size. Nothing is gathered: a rank receives the bytes that it lacks, and no others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import field
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from trinity_events.errors import IncompatibleWeights
from trinity_events.weights.slices import CoverageFault, TensorSlice, coverage_error, intersection

from ...runtime.collective_errors import CollectiveBroken
from ...runtime.collectives import gather_bytes, raise_together
from .parameter_slices import ParameterSlice

_c10d: Any = distributed_c10d  # its private functions have no annotations

# Small: it is needed while the shards of both layouts are on the device (decision 28).
BUCKET_BYTES = 32 << 20
"""Bytes that all ranks together send at a time, unless one slice is larger."""

Places = list[tuple[str, str, TensorSlice]]
"""Name, dtype and place of each slice of a rank, in its order."""


class UnreshardableTensor(IncompatibleWeights):
    """The slices of all ranks do not make up what a rank wants of a tensor.

    Attributes:
        target: The rank.
        fault: ``coverage`` of the wanted slice, or the ``dtype``.
        coverage: What the slices do not cover exactly once.
        dtype: Dtype of the slices.
        expected: Dtype that the rank wants.
    """

    target: int = field(kw_only=True)
    fault: Literal["coverage", "dtype"] = field(kw_only=True)
    coverage: CoverageFault | None = field(default=None, kw_only=True)
    dtype: str = field(default="", kw_only=True)
    expected: str = field(default="", kw_only=True)
    texts: ClassVar = {
        "coverage": "{tensor} cannot be resharded for rank {target}: {coverage}",
        "dtype": "{tensor} cannot be resharded for rank {target}: it is {dtype}, and {expected} is "
        "wanted",
    }


class Copy(NamedTuple):
    """Copy of one slice of a parameter from one rank to another, or to itself."""

    source: int
    source_index: int
    """Index of the slice that holds it, among the source's."""
    target: int
    target_index: int
    place: TensorSlice
    nbytes: int


def plan(sources: Sequence[Places], targets: Sequence[Places]) -> list[Copy]:
    """Return the copies that fill every wanted slice of every rank, the same on all ranks.

    Of several holders of a slice the target itself is taken, else the one that sends least so far.

    Raises:
        IncompatibleWeights: if a wanted slice is not covered exactly once, or has another dtype.
    """
    holders: dict[str, dict[TensorSlice, list[tuple[int, int]]]] = {}
    dtypes: dict[str, str] = {}
    for rank, slices in enumerate(sources):
        for index, (name, dtype, place) in enumerate(slices):
            holders.setdefault(name, {}).setdefault(place, []).append((rank, index))
            dtypes[name] = dtype
    sent = [0] * len(sources)
    copies = []
    for target, slices in enumerate(targets):
        for index, (name, dtype, place) in enumerate(slices):
            candidates = holders.get(name, {})
            coverage = coverage_error(place, list(candidates))
            if coverage is not None:
                raise UnreshardableTensor(name, target=target, fault="coverage", coverage=coverage)
            if dtypes[name] != dtype:
                raise UnreshardableTensor(
                    name, target=target, fault="dtype", dtype=dtypes[name], expected=dtype
                )
            size = getattr(torch, dtype).itemsize
            for outer, ranks in candidates.items():
                part = intersection(place, outer)
                if part is None:
                    continue
                source, source_index = min(
                    ranks, key=lambda holder: (holder[0] != target, sent[holder[0]], holder[0])
                )
                nbytes = part.volume * size
                sent[source] += nbytes if source != target else 0
                copies.append(Copy(source, source_index, target, index, part, nbytes))
    return copies


def buckets(copies: Sequence[Copy], limit: int = BUCKET_BYTES) -> Iterator[list[Copy]]:
    """Yield consecutive copies, whose bytes between ranks come to at most ``limit``."""
    bucket: list[Copy] = []
    nbytes = 0
    for copy in copies:
        size = copy.nbytes if copy.source != copy.target else 0
        if bucket and nbytes + size > limit:
            yield bucket
            bucket, nbytes = [], 0
        bucket.append(copy)
        nbytes += size
    if bucket:
        yield bucket


class Resharding:
    """Plan between two layouts of all ranks; making one is collective.

    Args:
        sources: Slices that this rank holds.
        targets: Slices that this rank wants. They are written.
        group: Process group of all ranks, for nothing else.

    Raises:
        IncompatibleWeights: if the slices of all ranks do not make up what one wants.
    """

    def __init__(
        self,
        sources: Sequence[ParameterSlice],
        targets: Sequence[ParameterSlice],
        group: dist.ProcessGroup,
    ) -> None:
        self._sources, self._targets, self._group = sources, targets, group
        mine = msgspec.msgpack.encode((_places(sources), _places(targets)))
        layouts = [
            msgspec.msgpack.decode(layout, type=tuple[Places, Places])
            for layout in gather_bytes(mine, group)
        ]
        self.copies = plan([places for places, _ in layouts], [places for _, places in layouts])
        self._error: Exception | None = None
        self._in_flight: list[tuple[int | None, Any]] = []
        self._buffers: list[torch.Tensor] = []

    def run(self) -> None:
        """Copy all slices. Collective; the sources are only read.

        A rank that cannot copy takes part to the end; then all raise.

        Raises:
            PeerFailed: on the ranks that did not fail themselves.
            CollectiveBroken: if a rank died or was too slow; it names the rank.
        """
        self._error = None
        for bucket in buckets(self.copies):
            self._run(bucket)
        try:
            raise_together(self._error, self._group)
        except CollectiveBroken as caught:
            raise self._broken(caught, None) from caught

    def _run(self, bucket: Sequence[Copy]) -> None:
        me = self._group.rank()
        # Every rank derives the same bucket; these are this rank's parts of it.
        here = [copy for copy in bucket if copy.source == copy.target == me]
        sent = _group_by_peer(
            (copy.target, copy) for copy in bucket if copy.source == me != copy.target
        )
        received = _group_by_peer(
            (copy.source, copy) for copy in bucket if copy.target == me != copy.source
        )
        outgoing = {peer: self._buffer(copies) for peer, copies in sent.items()}
        incoming = {peer: self._buffer(copies) for peer, copies in received.items()}
        for peer, copies in sent.items():
            with self._noted():
                for copy, part in zip(copies, _parts(outgoing[peer], copies), strict=True):
                    part.copy_(_view_bytes(self._source(copy)))
        # Kept beyond an error: what is in flight still reads and writes them.
        self._buffers = [*outgoing.values(), *incoming.values()]
        self._in_flight = self._begun(outgoing, incoming)
        with self._noted():
            for copy in here:
                self._target(copy).copy_(self._source(copy))
        for partner, work in self._in_flight:
            try:
                work.wait()
            except RuntimeError as caught:  # raised by the process group
                raise self._broken(caught, partner) from caught
        self._in_flight = []
        for peer, copies in received.items():
            with self._noted():
                for copy, part in zip(copies, _parts(incoming[peer], copies), strict=True):
                    target = self._target(copy)
                    target.copy_(part.view(target.dtype).view(target.shape))

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Keep the first error of this rank: the other ranks wait for what it sends."""
        try:
            yield
        except Exception as caught:
            self._error = self._error or caught

    def _begun(
        self, outgoing: dict[int, torch.Tensor], incoming: dict[int, torch.Tensor]
    ) -> list[tuple[int | None, Any]]:
        """Begin to send and to receive; return the pending works, with their peers if known."""
        ends: list[tuple[Any, int, torch.Tensor]] = []
        ends += [(dist.isend, peer, buffer) for peer, buffer in sorted(outgoing.items())]
        ends += [(dist.irecv, peer, buffer) for peer, buffer in sorted(incoming.items())]
        if not ends:
            return []
        if dist.get_backend(self._group) == "nccl":  # whose pairs must begin together
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(end, buffer, group=self._group, group_peer=peer)
                    for end, peer, buffer in ends
                ]
            )
            return [(None, work) for work in works]
        begun: list[tuple[int | None, Any]] = []
        for end, peer, buffer in ends:
            where = {"group_dst" if end is dist.isend else "group_src": peer}
            try:
                begun.append((peer, end(buffer, group=self._group, **where)))
            except RuntimeError as caught:  # raised by the process group
                raise self._broken(caught, peer) from caught
        return begun

    def _broken(self, error: Exception, peer: int | None) -> CollectiveBroken:
        """Return the error that names the rank which died or was too slow.

        A rank whose connection broke informs the others, which may have waited for the wrong one.
        """
        culprit = peer
        with suppress(Exception):  # the store may have been the dead rank's
            store = _c10d._get_default_store()
            key = f"resharding/{self._group.group_name}"
            # A broken connection names the culprit, a timeout only the rank that was waited for.
            # The first one that is stored wins: later ranks may see no more than the consequences.
            if peer is not None and "imed out" not in str(error):
                culprit = int(store.compare_set(key, "", str(peer)))
            elif store.check([key]):
                culprit = int(store.get(key))
        return CollectiveBroken("reshard", str(error), culprit=culprit)

    def _source(self, copy: Copy) -> torch.Tensor:
        source = self._sources[copy.source_index]
        return source.tensor[copy.place.inside(source.place)]

    def _target(self, copy: Copy) -> torch.Tensor:
        target = self._targets[copy.target_index]
        return target.tensor[copy.place.inside(target.place)]

    def _buffer(self, copies: Sequence[Copy]) -> torch.Tensor:
        any_tensor = (self._sources or self._targets)[0].tensor
        total = sum(copy.nbytes for copy in copies)
        return torch.empty(total, dtype=torch.uint8, device=any_tensor.device)


def _places(slices: Sequence[ParameterSlice]) -> Places:
    return [
        (piece.name, str(piece.tensor.dtype).removeprefix("torch."), piece.place)
        for piece in slices
    ]


def _group_by_peer(copies: Iterable[tuple[int, Copy]]) -> dict[int, list[Copy]]:
    copies_by_peer: dict[int, list[Copy]] = {}
    for peer, copy in copies:
        copies_by_peer.setdefault(peer, []).append(copy)
    return copies_by_peer


def _parts(buffer: torch.Tensor, copies: Sequence[Copy]) -> Sequence[torch.Tensor]:
    """Return the bytes of each copy in a buffer."""
    views: tuple[torch.Tensor, ...] = torch.split(buffer, [copy.nbytes for copy in copies])
    return views


def _view_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)  # (bytes,)
