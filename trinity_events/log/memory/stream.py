"""One stream of the in-memory log with its groups: pure; callers pass the time."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from msgspec import Struct, field

from ..base import Claimed, Entry, GroupInfo
from ..position import position

At = tuple[int, int]


class Pending(Struct):
    """Entry that was delivered to a group member and is not acknowledged."""

    entry: Entry
    member: str
    since: float
    times: int = 1


class MemoryGroup(Struct):
    """Consumer group of a stream in memory."""

    last: At
    """Position of the newest entry that was delivered to any member."""
    created: float
    pending: dict[At, Pending] = field(default_factory=dict)
    members: dict[str, float] = field(default_factory=dict)
    """Time of each member's last read, in seconds."""

    def give(self, entries: list[Entry], member: str, now: float) -> None:
        """Give a member entries that no member was given yet."""
        self.members[member] = now
        for entry in entries:
            self.last = position(entry.id)
            self.pending[self.last] = Pending(entry, member, now)

    def claim(self, member: str, now: float, idle: float, most: int, limit: int) -> Claimed:
        """Give a member the entries that are pending for ``idle`` seconds.

        An entry that was delivered ``most`` times is given up instead.
        """
        claimed = Claimed([], [])
        for at in [at for at in sorted(self.pending) if now - self.pending[at].since >= idle]:
            pending = self.pending[at]
            if len(claimed.entries) + len(claimed.dead) == limit:
                break
            if pending.times >= most:
                del self.pending[at]
                claimed.dead.append(pending.entry)
                continue
            pending.member, pending.since, pending.times = member, now, pending.times + 1
            self.members[member] = now
            claimed.entries.append(pending.entry)
        return claimed

    def forget_members(self, now: float, idle: float) -> int:
        """Remove idle members with nothing pending, but never the member that read last."""
        busy = {pending.member for pending in self.pending.values()}
        freshest = max(self.members, key=lambda name: self.members[name], default=None)
        gone = [
            name
            for name, seen in self.members.items()
            if name not in busy and name != freshest and now - seen >= idle
        ]
        for name in gone:
            del self.members[name]
        return len(gone)

    def info(self, name: str, now: float, *, undelivered: bool) -> GroupInfo:
        """Return the state of the group; ``undelivered`` tells if its stream has new entries."""
        oldest = min(self.pending, default=None)
        return GroupInfo(
            name=name,
            pending=len(self.pending),
            last_delivered=entry_id(self.last),
            oldest_pending=entry_id(oldest) if oldest else None,
            idle=now - max([self.created, *self.members.values()]),
            members=len(self.members),
            caught_up=not undelivered and not self.pending,
        )


class MemoryStream(Struct):
    """Entries of a stream in order, and its groups."""

    entries: list[Entry] = field(default_factory=list)
    positions: list[At] = field(default_factory=list)
    groups: dict[str, MemoryGroup] = field(default_factory=dict)
    last: At = (0, 0)
    """Newest position that any entry ever had."""
    trimmed: bool = False

    def add(self, payload: bytes, milliseconds: int) -> str:
        """Append a payload; its id is above the last one, even if the clock went back."""
        # As a server does: ids only ever grow.
        at = max((milliseconds, 0), (self.last[0], self.last[1] + 1))
        entry = Entry(entry_id(at), bytes(payload))
        self.last = at
        self.positions.append(at)
        self.entries.append(entry)
        return entry.id

    def between(self, after: At, limit: int, through: str = "+") -> list[Entry]:
        """Return up to ``limit`` entries after a position, up to and including ``through``."""
        first = bisect_right(self.positions, after)
        end = len(self.entries)
        if through != "+":
            end = bisect_right(self.positions, position(through))
        return self.entries[first : min(end, first + limit)]

    def info(self, name: str, now: float) -> GroupInfo:
        """Return the state of one of the groups."""
        group = self.groups[name]
        return group.info(name, now, undelivered=bool(self.between(group.last, 1)))

    def trim(self, limit: At) -> int:
        """Drop entries below the limit that no group needs; return their number."""
        for group in self.groups.values():
            # As in `trim.lua`: what a group has not been given or has not acknowledged stays.
            limit = min(limit, group.last, *group.pending)
        dropped = bisect_left(self.positions, limit)
        del self.entries[:dropped], self.positions[:dropped]
        self.trimmed = self.trimmed or dropped > 0
        return dropped


def entry_id(at: At) -> str:
    """Return the entry id of a position."""
    return f"{at[0]}-{at[1]}"
