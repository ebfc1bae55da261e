"""What a rank last published, and what changed of it since the last version that was full.

A delta rests on the last full version, never on another delta. It holds every element that changed
at any time since then, also one that changed back: so it may be laid over the full version or over
any version since, and nobody ever needs more than two of them.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from trinity_schemas import PartBase, PartDelta, StepRef, TensorEntry
from trinity_schemas.manifest import DTYPE_BYTES

from ..tensors import digest
from ..transports.base import PartRef
from .encoding import BLOCK, Changes, Positions, Words, blocks, encoded, words
from .reconstruct import Key

MOST_OF_A_TENSOR = 0.5
"""Share of a tensor's bytes above which its delta is not worth the work on both sides."""


class LastPublished:
    """One rank's versions of one run, one after the other.

    It keeps one copy of all tensors, and four bytes for each element that changed since the last
    full version. A version is full when ``full_every`` versions began since the last full one, when
    the deltas since then took as many bytes as a full version does, when names, shapes, dtypes or
    the ranks' shares of tensors changed, when the version before was given up, and when the last
    full one is not there any more.

    Args:
        full_every: Versions from one full version to the next, at most.
    """

    def __init__(self, full_every: int) -> None:
        self._full_every = full_every
        self._tensors: dict[Key, _Tracked] = {}
        self._anchor: PartBase | None = None
        self._whole = self._spent = self._since = 0
        self._open = False
        self._current = _Current()

    def begin(self, part: PartRef, is_there: Callable[[PartRef], bool]) -> None:
        """Begin a part.

        Args:
            part: The part.
            is_there: Whether readers are sure to find a part that was published before.
        """
        # What was opened and never sealed has left nobody knows what behind.
        due = self._open or self._since + 1 >= self._full_every or self._spent >= self._whole
        if due or not self._is_earlier(part) or not is_there(self._anchors(part)):
            self._anchor = None
        self._open = True
        self._current = _Current()

    def _is_earlier(self, part: PartRef) -> bool:
        """Whether there is a full version that a part may rest on: not on itself, sent again."""
        anchor = self._anchor
        return anchor is not None and anchor.epoch == part.epoch and anchor.step < part.step

    def _anchors(self, part: PartRef) -> PartRef:
        assert self._anchor is not None
        return part._replace(step=self._anchor.step)

    def shrunk(self, entry: TensorEntry, data: memoryview) -> tuple[TensorEntry, memoryview]:
        """The tensor as it is to travel, and the bytes that do.

        Args:
            entry: The tensor, dense.
            data: Its bytes, row-major.
        """
        current = self._current
        current.keys.add(entry.key)
        current.whole += len(data)
        tracked = self._tensors.get(entry.key)
        if tracked is None or tracked.layout != entry.layout:
            tracked = self._tensors[entry.key] = _Tracked(entry)
            current.renewed = True
        found = None if self._anchor is None or tracked.dense else tracked.delta(data)
        if found is None:
            tracked.take(data, dense=self._anchor is not None)
            current.dense += 1
            return entry, data
        delta, changed = found
        current.elements += len(tracked.last)
        current.changed += changed
        current.delta += changed > 0
        current.skip += changed == 0
        shrunk = msgspec.structs.replace(
            entry,
            encoding="delta" if changed else "skip",
            stored=len(delta),
            digest=entry.digest or digest(data),
        )
        return shrunk, memoryview(delta)

    @property
    def base(self) -> PartBase | None:
        """What the part rests on; None when all of its tensors are dense after all."""
        return self._anchor if self._current.delta or self._current.skip else None

    def sealed(self, part: PartRef, manifest_digest: str, nbytes: int) -> PartDelta | None:
        """The part is whole, in so many bytes; returns what of it travelled when it is a delta."""
        base, current = self.base, self._current
        self._open = False
        if base is None:
            self._anchor = PartBase(
                epoch=part.epoch, step=part.step, manifest_digest=manifest_digest, bytes=nbytes
            )
            self._whole, self._spent, self._since = nbytes, 0, 0
            self._tensors = {key: self._tensors[key] for key in current.keys}
            for tracked in self._tensors.values():
                tracked.restart()
            return None
        self._since += 1
        self._spent += nbytes
        if current.renewed or len(current.keys) != len(self._tensors):
            self._anchor = None
        return PartDelta(
            base=StepRef(base.epoch, base.step),
            whole=current.whole,
            dense=current.dense,
            delta=current.delta,
            skip=current.skip,
            changed=current.changed,
            elements=current.elements,
        )

    def forget(self) -> None:
        """What was published is taken back: the next version is full."""
        self._anchor = None


class _Current:
    """What is counted of the part that is being published."""

    def __init__(self) -> None:
        self.keys: set[Key] = set()
        self.whole = self.dense = self.delta = self.skip = self.changed = self.elements = 0
        self.renewed = False
        """Whether a tensor is new, or of another shape, dtype or layout."""


class _Tracked:
    """One tensor as it was last published."""

    def __init__(self, entry: TensorEntry) -> None:
        self.layout = entry.layout
        itemsize = DTYPE_BYTES[entry.dtype]
        self.last: Words = words(np.empty(entry.nbytes, np.uint8).data, itemsize)
        self.dense = True
        """Whether it travels in full until the next full version."""
        self._changed: dict[int, Positions] = {}

    def restart(self) -> None:
        """As after a full version: nothing changed since."""
        self.dense = not len(self.last)
        self._changed = {}

    def take(self, data: memoryview, *, dense: bool) -> None:
        """Keep a copy of what travels in full."""
        self.last[:] = words(data, self.last.itemsize)
        self.dense, self._changed = dense or not len(data), {}

    def delta(self, data: memoryview) -> tuple[bytes, int] | None:
        """What changed since the full version, and of how many elements.

        None when that takes too much to be worth it; what is kept is of no use then.
        """
        new, most = words(data, self.last.itemsize), len(data) * MOST_OF_A_TENSOR
        found: list[Changes] = []
        changed = 0
        for start in blocks(len(new)):
            one = self._changes_of(start, new[start : start + BLOCK])
            if one is not None:
                found.append(one)
                changed += len(one.positions)
                if changed * new.itemsize > most:  # and positions come on top
                    return None
        if not found:
            return b"", 0
        coded = encoded(found, len(new), new.itemsize)
        return (coded, changed) if len(coded) <= most else None

    def _changes_of(self, start: int, new: Words) -> Changes | None:
        last, before = self.last[start : start + BLOCK], self._changed.get(start)
        differs = new != last
        if before is not None:
            differs[before] = True
        positions = np.flatnonzero(differs)
        if not len(positions):
            return None
        if before is None or len(before) != len(positions):
            self._changed[start] = positions.astype(np.uint32)
        values = new[positions]
        last[positions] = values
        return Changes(start, positions, values)
