"""Lifecycle of one rank's part of a version: begin, add, seal, publish, or fail and discard."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import torch

from ..slices import ShardOffset
from .part_layout import Places
from .publish import PartWriter, PublishedPartReport
from .version_publisher import VersionPublisher

logger = logging.getLogger(__name__)


class Publication:
    """One rank's part of a version, from its first event to its last.

    As a context manager it publishes the part when the block ends. When the block raises, or the
    part cannot be published, it publishes the failure and discards the chunks. The first
    :meth:`add` begins the attempt, unless :meth:`begin` was called before.

    Args:
        publisher: Publishes the events and sends the chunks.
        global_step: Training step, which names the version.
        rank: Rank that publishes the part.
        ranks: Ranks of the version, to open it at the begin; None if another rank opens it.
        subset: The version has only some of the model's tensors, such as an adapter.
        dtype: Floating-point dtype to send in; by default the client's.
    """

    def __init__(
        self,
        publisher: VersionPublisher,
        global_step: int,
        rank: int = 0,
        *,
        ranks: Iterable[int] | None = None,
        subset: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.global_step = global_step
        self.rank = rank
        self.report: PublishedPartReport | None = None
        """Summary of the part, once it is sealed."""
        self.published = False
        """True once the log was told that the part is whole."""
        self._publisher = publisher
        self._ranks = ranks
        self._subset = subset
        self._dtype = dtype
        self._writer: PartWriter | None = None
        self._ended = False
        self._began = time.monotonic()
        self._reported = ExitStack()
        """Report of the publication as a wait, if it lasts."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.fail(error)
        elif not (self.published or self._ended):
            try:
                self.publish()
            except BaseException as caught:
                self.fail(caught)
                raise

    def begin(self) -> PartWriter:
        """Open the version if ``ranks`` were given, and begin the attempt. Idempotent."""
        if self._writer is None:
            if self._ranks is not None:
                self._publisher.open_version(self.global_step, ranks=self._ranks)
            what = f"its part of the weights of step {self.global_step} to be stored"
            self._reported.enter_context(self._publisher.waits.waiting(what))
            self._writer = self._publisher.begin_part(
                self.global_step, self.rank, subset=self._subset, dtype=self._dtype
            )
        return self._writer

    def add(self, name: str, tensor: torch.Tensor, place: ShardOffset | None = None) -> None:
        """Append a tensor, or a shard of one, as :meth:`PartWriter.add`."""
        self.begin().add(name, tensor, place)

    def add_all(
        self, names: Sequence[str], tensors: Sequence[torch.Tensor], places: Places = None
    ) -> None:
        """Append tensors at once, as :meth:`PartWriter.add_all`."""
        self.begin().add_all(names, tensors, places)

    def seal(self) -> PublishedPartReport:
        """Send the rest and the manifest. Idempotent; readers learn of the part by a publish."""
        if self.report is None:
            self.report = self.begin().seal()
        return self.report

    def publish(self, seconds: float | None = None) -> PublishedPartReport:
        """Seal the part and publish that it is whole.

        Args:
            seconds: Stall of the training loop; by default the age of the publication.
        """
        report = self.seal()
        stall = time.monotonic() - self._began if seconds is None else seconds
        self._publisher.part_published(self.global_step, self.rank, report, stall)
        self.published = True
        self._reported.close()
        return report

    def fail(self, error: BaseException) -> None:
        """Publish the failure and discard the chunks, as far as the servers answer. Idempotent."""
        self._end(lambda: self._publisher.part_failed(self.global_step, self.rank, error))

    def give_up(self) -> None:
        """End the part as :meth:`fail`, because of another rank, whose event has the reason."""
        self._end(lambda: self._publisher.part_given_up(self.rank))

    def _end(self, tell: Callable[[], None]) -> None:
        if self._ended:
            return
        self._ended = True
        self._reported.close()
        try:
            tell()
        except Exception:
            logger.exception(
                "step %d: the failure of the part could not be published", self.global_step
            )
        try:
            if self._writer is not None:
                self._writer.discard()
        except Exception:
            logger.exception(
                "step %d: the chunks of the failed part stay until they expire", self.global_step
            )
