"""Names of phases, of the roles that report them, and the pause between two reports."""

STARTING = "starting"
IDLE = "idle"
WAITING_SAMPLES, SERVING, STANDING_BY = "waiting-samples", "serving", "standing-by"
WRITER_ROLE, DISCARDS_WRITER_ROLE = "writer", "discards-writer"
"""Roles of the processes that write the record: of a rank, and of discarded answers."""
STANDBY_ROLE = "standby"
LOG_SERVER_ROLE, CHUNK_SERVER_ROLE = "log-server", "chunk-server"
PHASES = (
    STARTING,
    # Of one explorer that installs while it generates, the engine is held: nothing is generated.
    "installing",
    "publishing",
    "saving",
    "training",
    "generating",
    "environment",
    "judging",
    "evaluating",
    "folding",
    "writing",
    "waiting-rollouts",
    "waiting-weights",
    "waiting-requests",
    "waiting-evaluation",
    "waiting-trainer",
    WAITING_SAMPLES,
    SERVING,
    STANDING_BY,
    IDLE,
)
"""Phases by importance. A process that works and waits at once works."""
SHORTEST_PAUSE = 2.0
"""Seconds between two reports of a young process; a short run has some reports too."""
LONGEST_PAUSE = 60.0
"""Seconds between two reports of an old process: a thousand of them send 17 events a second."""
_SHARE = 20
"""A report comes once a process has aged by this part: a killed one has told 95 % of its time."""


def find_pause(age: float) -> float:
    """Return the seconds until the next report of a process of an age."""
    return min(max(age / _SHARE, SHORTEST_PAUSE), LONGEST_PAUSE)
