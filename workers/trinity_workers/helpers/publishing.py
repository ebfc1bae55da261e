"""Strategies by which the ranks publish a version, and what the other helpers share with them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from logging import Logger
from typing import Any, NamedTuple, Protocol

import torch
from msgspec import Struct

from trinity_events.errors import DeadlineExceeded
from trinity_events.weights import Publication, PublishedPartReport, ShardOffset, Synchronizer
from trinity_events.weights.compatibility import plain_name
from trinity_events.weights.devices.staging_memory import StagingMemory
from trinity_schemas import Probes

from ..config.sections.sync import PublishedForm
from ..engines.base import LocalShard, NamedTensors
from ..engines.buffers import saved_buffers
from ..learning.finite import check_finite
from ..runtime.collective_errors import CollectiveBroken, PeerFailed
from ..runtime.collectives import raise_together, rank_and_world, together

PUBLISHED = "the weights to be published"
"""Name of a version's weights in errors; the event of the failure names the step."""


class ModelWeights(Struct, frozen=True):
    """Weights of an engine's model, in the forms that the ranks can publish."""

    full: Callable[[], NamedTensors]
    """Returns full tensors; the iterator gathers each one on all ranks."""
    shards: Callable[[], Iterable[LocalShard]]
    """Returns this rank's shards; all ranks' shards are the whole model, once.

    The call is collective. The iteration is not, and raises ShardsRefused on its own.
    """
    buffers: frozenset[str] = frozenset()
    """Names of tensors that may have values that are not finite, since they are no parameters."""
    probes: Probes | None = None
    """Probes of these weights, which rank 0 seals with its part."""


class NamedTensorSink(Protocol):
    """Sink of full tensors, one by one."""

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Append a tensor."""
        ...


def buffer_names(module: Any) -> frozenset[str]:
    """Return the published names of a model's buffers; none for a list of Megatron's chunks."""
    if not isinstance(module, torch.nn.Module):
        return frozenset()
    return frozenset(plain_name(name) for name, _ in saved_buffers(module))


def drain(
    tensors: NamedTensors,
    sink: NamedTensorSink | None,
    error: Exception | None,
    *,
    buffers: Collection[str] | None = frozenset(),
) -> Exception | None:
    """Exhaust the tensors, since each is a gather, and write them up to an error; return it.

    Args:
        tensors: Full tensors, gathered as the iterator advances.
        sink: Sink of the tensors; None on ranks that only gather.
        error: Error because of which nothing is written.
        buffers: Names of tensors that need not be finite; None if the sink checks by itself.
    """
    for name, tensor in tensors:
        if sink is not None and error is None:
            try:
                if buffers is not None:
                    check_finite([(name, tensor)], PUBLISHED, exempt=buffers)
                sink.add(name, tensor)
            except Exception as caught:
                error = caught  # the others are inside the gathers: go on with them
    return error


class PublishStrategy(Protocol):
    """Strategy of one rank. All ranks of a trainer use the same one."""

    def publish(
        self, weights: ModelWeights, synchronizer: Synchronizer, global_step: int, logger: Logger
    ) -> None:
        """Publish the weights, as they are now, as the version of ``global_step``. Collective.

        If a rank fails, all ranks raise, and the version is never announced.

        Args:
            weights: Weights of the rank's engine.
            synchronizer: Publishes the part and its events.
            global_step: Training step, which names the version.
            logger: Logs the published bytes.
        """
        ...

    def close(self) -> None:
        """Wait for a version that is published in the background. Raises what failed in it."""
        ...


class PublishFull:
    """Strategy that streams full tensors one by one: no rank ever holds the whole model."""

    def publish(
        self, weights: ModelWeights, synchronizer: Synchronizer, global_step: int, logger: Logger
    ) -> None:
        """Publish full tensors as the version of ``global_step``, from rank 0. Collective.

        If rank 0 fails, all ranks finish the gathers and then raise; the version is never
        announced. If the gathers fail because a rank died, every other rank publishes the failure.

        Raises:
            PeerFailed: on the ranks that did not fail themselves.
            CollectiveBroken: if a rank died or was too slow.
            NonFiniteWeights: on rank 0, if a parameter has values that are not finite.
        """
        rank, _ = rank_and_world()
        part = synchronizer.publication(global_step, rank, ranks=(0,), probes=weights.probes)
        error: Exception | None = None
        if rank == 0:
            try:
                part.begin()
            except Exception as caught:
                error = caught
        try:
            sink = part if rank == 0 else None
            error = drain(weights.full(), sink, error, buffers=weights.buffers)
        except Exception as caught:
            broken = CollectiveBroken("gather", str(caught), global_step)
            part.fail(broken)
            raise broken from caught
        if rank == 0 and error is None:
            try:
                part.publish()
            except Exception as caught:
                error = caught
        try:  # the others first: they hold the training loop, and a server may be slow to answer
            raise_together(error)
        except PeerFailed:  # rank 0, whose event has the reason
            raise
        except Exception as caught:
            if not part.published:  # rank 0 may have died before it could publish
                part.fail(error or caught)
            raise
        if part.report is not None:
            logger.info("step %d: published %d bytes", global_step, part.report.bytes)

    def close(self) -> None:
        """Do nothing: a version is published on return."""


FULL = PublishFull()
"""Default strategy of uploads; it keeps nothing between versions."""


class PublishShards:
    """Strategy by which every rank publishes its own shards, while training waits."""

    def publish(
        self, weights: ModelWeights, synchronizer: Synchronizer, global_step: int, logger: Logger
    ) -> None:
        """Publish every rank's shards as the version of ``global_step``. Collective.

        The version is ready once all ranks' parts are. When one rank fails, all discard what they
        wrote, then all raise; the version is never announced.

        Raises:
            PeerFailed: on the ranks that did not fail themselves.
            CollectiveBroken: when a rank died, or was too slow.
            ShardsRefused: if the model's layout cannot be published as shards.
            NonFiniteWeights: if a shard of a parameter has values that are not finite.
        """
        shards = weights.shards()
        rank, ranks = rank_and_world()
        opens = range(ranks) if rank == 0 else None
        probes = weights.probes if rank == 0 else None
        with synchronizer.publication(global_step, rank, ranks=opens, probes=probes) as part:
            with _agreed(part):
                # First: refused shards leave the version unopened, to be published in full.
                local_shards = list(shards)
                report = write_shards(part, local_shards, weights.buffers)
            with _agreed(part):
                # Only now: a part in the log is whole, and so is every other.
                part.publish()
        logger.info("step %d: rank %d published %d bytes", global_step, rank, report.bytes)

    def close(self) -> None:
        """Do nothing: a version is published on return."""


def write_shards(
    part: Publication, shards: Sequence[LocalShard], buffers: Collection[str]
) -> PublishedPartReport:
    """Begin a rank's part, check and write its shards, and seal it.

    The check comes after the start, so that its failure is an event of the part.

    Raises:
        NonFiniteWeights: naming the first shard of a parameter with values that are not finite.
    """
    part.begin()
    check_finite(((shard.name, shard.tensor) for shard in shards), PUBLISHED, exempt=buffers)
    places = [ShardOffset(shard.offsets, shard.global_shape) for shard in shards]
    part.add_all([shard.name for shard in shards], [shard.tensor for shard in shards], places)
    return part.seal()


@contextmanager
def _agreed(part: Publication) -> Iterator[None]:
    """Raise on all ranks when the block fails on one. Collective.

    On :class:`PeerFailed` the rank gives up its part; the failed rank's event has the reason.
    """
    try:
        with together():
            yield
    except PeerFailed:
        part.give_up()
        raise


class _StagedShards(NamedTuple):
    """Copied shards of a rank, and the part that they are sent as."""

    part: Publication
    shards: list[LocalShard]
    buffers: frozenset[str]


class PublishSnapshot:
    """Strategy that copies a rank's shards into staging memory and sends them from a thread.

    From a GPU the copies are only begun here: the thread waits for them, and later GPU operations
    run after them. The reported stall lasts until the copies are complete, which is the longest
    that training can have waited.

    The thread takes part in no collective. If one rank's thread fails, its part never comes and the
    log has the reason, so the version is never announced.

    Args:
        deadline: Seconds to wait for a version's publishing before the next one begins.
    """

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._staging = StagingMemory()
        # One thread: the staging memory holds one version.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")
        self._sending: Future[None] | None = None
        self._step = 0

    def publish(
        self, weights: ModelWeights, synchronizer: Synchronizer, global_step: int, logger: Logger
    ) -> None:
        """Copy the shards, and begin to publish them as the version of ``global_step``. Collective.

        Raises on all ranks if a rank could not copy, or if the previous version could not be
        published. The call waits for the previous version, since it reuses its memory. Nothing
        else uses the synchronizer until :meth:`wait` returns.

        Raises:
            PeerFailed: on the ranks that did not fail themselves.
            CollectiveBroken: if a rank died or was too slow.
            ShardsRefused: if the model's layout cannot be published as shards.
            DeadlineExceeded: if the previous version takes too long.
        """
        shards = weights.shards()
        began = time.monotonic()
        rank, ranks = rank_and_world()
        part = synchronizer.publication(
            global_step, rank, probes=weights.probes if rank == 0 else None
        )
        error: Exception | None = None
        local_shards: list[LocalShard] = []
        try:
            self._wait_for_previous(synchronizer)
            local_shards = list(shards)  # where they are refused nothing was said of the version
            if rank == 0:
                synchronizer.open_version(global_step, ranks=range(ranks))
            copies = self._staging.copy([shard.tensor for shard in local_shards])
            local_shards = [
                LocalShard(shard.name, copy, shard.global_shape, shard.offsets)
                for shard, copy in zip(local_shards, copies, strict=True)
            ]
        except Exception as caught:
            error = caught
        try:
            raise_together(error)
        finally:
            if error is not None:
                part.fail(error)
        self._step = global_step
        stall = time.monotonic() - began
        sent = _StagedShards(part, local_shards, weights.buffers)
        self._sending = self._thread.submit(self._send, sent, began, stall, logger)

    def _wait_for_previous(self, synchronizer: Synchronizer) -> None:
        what = f"the publication of the weights of step {self._step}"
        with synchronizer.waits.waiting(what, deadline=self._deadline):
            self.wait()

    def wait(self) -> None:
        """Wait until the pending version is published; raise its error, once."""
        sending, self._sending = self._sending, None
        if sending is None:
            return
        try:
            sending.result(self._deadline)
        except TimeoutError:
            # A TimeoutError of the publication itself, and not of this wait.
            if sending.done():
                raise
            # Kept, so that a later wait can still end it: its thread reads the staging memory.
            self._sending = sending
            raise DeadlineExceeded(
                f"the weights of step {self._step} were not published",
                self._deadline,
                "is the server of the chunks slow?",
            ) from None

    def close(self) -> None:
        """Wait for the pending version and end the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown(wait=False)

    def _send(self, snapshot: _StagedShards, began: float, stall: float, logger: Logger) -> None:
        part = snapshot.part
        with part:
            if self._staging.settle():  # a GPU trains on meanwhile only as far as it may
                stall = time.monotonic() - began
            report = write_shards(part, snapshot.shards, snapshot.buffers)
            part.publish(stall)
        logger.info(
            "step %d: rank %d published %d bytes of a copy",
            part.global_step,
            part.rank,
            report.bytes,
        )


def strategy_for(form: PublishedForm, deadline: float) -> PublishStrategy:
    """Return the strategy that publishes in a form.

    Args:
        form: Full tensors from rank 0, shards from each rank, or a snapshot of those shards.
        deadline: Seconds to wait for the snapshot of a version before the next one begins.
    """
    if form == "full":
        return PublishFull()
    return PublishShards() if form == "shards" else PublishSnapshot(deadline)
