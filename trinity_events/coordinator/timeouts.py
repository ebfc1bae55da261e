"""Timeouts of a process that saves."""

from msgspec import Struct

from ..log.publishing.heartbeat import FIRST_HEARTBEAT


class SaveTimeouts(Struct, frozen=True, kw_only=True):
    """Waits and periods of a coordinator that no run needs to set, in seconds.

    Attributes:
        first_heartbeat: Longest wait of a save for its first heartbeat to reach the server. A
            server that is away delays no save for longer.
        progress_every: Pause between two progress events of one save.
        flush: Time that a caller waits for the log to accept the published events; None is the
            publisher's deadline.
        grant_read: Longest blocking read for the grant of a turn.
        request_again: Time after which a waiting save publishes its request again. The fold drops
            a request from the queue when its process is silent for a whole lease. A second
            request of a queued save changes nothing.
    """

    first_heartbeat: float = FIRST_HEARTBEAT
    progress_every: float = 10.0
    flush: float | None = None
    grant_read: float = 10.0
    request_again: float = 60.0
