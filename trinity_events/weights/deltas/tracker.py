"""Tracker of a rank's published tensors, and of the elements changed since the full version.

A delta rests on the last full version, never on another delta. It holds every element that changed
at any time since then, also one that changed back. It can therefore be applied to the full version
or to any version since, and a reader never needs more than two versions.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from trinity_schemas import PartBase, PartDelta, StepRef, TensorEntry
from trinity_schemas.manifest import DTYPE_BYTES

from ..tensors import digest
from ..transports.base import PartRef
from .encoding import BLOCK, Changes, Positions, Words, blocks, encode_delta, words
from .reconstruct import Key

MOST_OF_A_TENSOR = 0.5
"""Share of a tensor's bytes above which the tensor is sent in full, not as a delta."""


class LastPublished:
    """Tracker of one rank's versions of one run.

    It keeps one copy of all tensors, and four bytes for each element that changed since the last
    full version. A version is full in any of these cases:

    - ``full_every`` versions began since the last full one;
    - the deltas since then took as many bytes as a full version;
    - names, shapes, dtypes or the ranks' shares of tensors changed;
    - the version before was abandoned;
    - the last full version is gone.

    Args:
        full_every: Maximum number of versions from one full version to the next.
    """

    def __init__(self, full_every: int) -> None:
        self._full_every = full_every
        self._tensors: dict[Key, _Tracked] = {}
        self._anchor: PartBase | None = None
        # Bytes of the last full version, bytes of all deltas since, and their number.
        self._whole = self._spent = self._since = 0
        self._open = False
        self._current = _Current()

    def begin(self, part: PartRef, is_there: Callable[[PartRef], bool]) -> None:
        """Begin a part.

        Args:
            part: The part.
            is_there: Returns True if readers are sure to find a part published before.
        """
        # A part that was never sealed leaves the tracked copy in an unknown state.
        # As many bytes of deltas as of the full version: there all versions together take least
        # (decision 16).
        due = self._open or self._since + 1 >= self._full_every or self._spent >= self._whole
        if due or not self._is_earlier(part) or not is_there(self._anchors(part)):
            self._anchor = None
        self._open = True
        self._current = _Current()

    def _is_earlier(self, part: PartRef) -> bool:
        """Return True if there is an earlier full version to rest on, not the part itself again."""
        anchor = self._anchor
        # A new epoch may have resumed from before the anchor.
        return anchor is not None and anchor.epoch == part.epoch and anchor.step < part.step

    def _anchors(self, part: PartRef) -> PartRef:
        assert self._anchor is not None
        return part._replace(step=self._anchor.step)

    def shrink(self, entry: TensorEntry, data: memoryview) -> tuple[TensorEntry, memoryview]:
        """Return the entry and the bytes to send for a tensor: in full, as a delta, or skipped.

        Args:
            entry: Entry of the dense tensor.
            data: Row-major bytes of the tensor.
        """
        current = self._current
        current.keys.add(entry.key)
        current.whole += len(data)
        tracked = self._tensors.get(entry.key)
        if tracked is None or tracked.layout != entry.layout:
            tracked = self._tensors[entry.key] = _Tracked(entry)
            current.renewed = True
        difference = None if self._anchor is None or tracked.dense else tracked.delta(data)
        if difference is None:
            # Dense until the next full version: which elements changed since the last one is not
            # known now.
            tracked.store(data, dense=self._anchor is not None)
            current.dense += 1
            return entry, data
        delta, changed = difference
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
        """Base of the part; None if all of its tensors are dense."""
        return self._anchor if self._current.delta or self._current.skip else None

    def seal(self, part: PartRef, manifest_digest: str, nbytes: int) -> PartDelta | None:
        """Record that the part is sealed; return the counts of a delta, None for a full part."""
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
        # The base lacks a tensor of this version, or has one that is gone.
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
        """Make the next version full, because the current part is discarded."""
        self._anchor = None


class _Current:
    """Counters of the part that is being published."""

    def __init__(self) -> None:
        self.keys: set[Key] = set()
        self.whole = self.dense = self.delta = self.skip = self.changed = self.elements = 0
        self.renewed = False
        """True if a tensor is new, or has another shape, dtype or layout."""


class _Tracked:
    """One tensor as it was last published."""

    def __init__(self, entry: TensorEntry) -> None:
        self.layout = entry.layout
        itemsize = DTYPE_BYTES[entry.dtype]
        self.last: Words = words(np.empty(entry.nbytes, np.uint8).data, itemsize)
        self.dense = True
        """True if the tensor is sent in full until the next full version."""
        self._changed: dict[int, Positions] = {}

    def restart(self) -> None:
        """Forget the changes, after a full version."""
        self.dense = not len(self.last)
        self._changed = {}

    def store(self, data: memoryview, *, dense: bool) -> None:
        """Store a copy of a tensor that is sent in full."""
        self.last[:] = words(data, self.last.itemsize)
        self.dense, self._changed = dense or not len(data), {}

    def delta(self, data: memoryview) -> tuple[bytes, int] | None:
        """Return the delta since the full version, and the number of changed elements.

        Return None if the delta is too large; the kept copy is invalid then.
        """
        new, most = words(data, self.last.itemsize), len(data) * MOST_OF_A_TENSOR
        blocks_changed: list[Changes] = []
        changed = 0
        for start in blocks(len(new)):
            changes = self._find_changes(start, new[start : start + BLOCK])
            if changes is not None:
                blocks_changed.append(changes)
                changed += len(changes.positions)
                if changed * new.itemsize > most:  # and positions come on top
                    return None
        if not blocks_changed:
            return b"", 0
        coded = encode_delta(blocks_changed, len(new), new.itemsize)
        return (coded, changed) if len(coded) <= most else None

    def _find_changes(self, start: int, new: Words) -> Changes | None:
        last, before = self.last[start : start + BLOCK], self._changed.get(start)
        differs = new != last  # (block,), compared as integers, so that NaN equals itself
        if before is not None:
            # Also those that changed back: the delta must fit over any version since (decision 16).
            differs[before] = True
        positions = np.flatnonzero(differs)
        if not len(positions):
            return None
        if before is None or len(before) != len(positions):
            # Four bytes for each changed element; a block has 2**18 positions.
            self._changed[start] = positions.astype(np.uint32)
        values = new[positions]
        # The kept copy follows, so that the next comparison is with this version.
        last[positions] = values
        return Changes(start, positions, values)
