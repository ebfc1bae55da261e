"""Access rules of a server for the roles of a run: one user each, with the least that it needs.

1. Only the reducer's user writes announcements, and moves its positions in events and reports.
2. Only the trainer's and the reducer's users append to the events of a run.
3. The explorer's user appends to the reports, which the reducer checks. It reads no events: an
   explorer takes nothing from the log but what the reducer announced.
4. No user but the reducer's trims, deletes or rewrites a log.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from trinity_schemas import RUN_INDEX, check_run_id

Server = Literal["both", "log", "weights"]
"""Server that rules are for: one of everything, that of the log, or that of the weights."""

_CONNECTION = "+@connection -@dangerous -client|tracking +info"
"""Commands of a connection itself; CLIENT TRACKING would name the keys of all runs."""
_LISTING = "-scan -randomkey"
"""Commands on no key, which would name the keys of all runs; `delete` needs them."""
_WEIGHTS = "trinity-weights:"

USERS = ("reducer", "trainer", "explorer", "consumer", "viewer")


class _Rules(Struct, frozen=True):
    """Rules of one user."""

    commands: str
    """Categories and commands on the keys that follow."""
    keys: tuple[str, ...]
    """Patterns of keys, with their access."""
    selectors: tuple[str, ...] = ()
    """Further pairs of commands and keys, each by itself."""


def _rules(access: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{access}RUN:{name}" for name in names)


_READ_RUN = _rules("%R~", "*")
_INDEX = (f"%R~{RUN_INDEX}",)
_HOLD_CHECKPOINTS = (
    "-@all +evalsha ~RUN:holds ~RUN:doomed",
    # Not on `doomed`: a user could write a sorted set there, where the reducer needs a set.
    "-@all +zadd +zrem +zremrangebyscore ~RUN:holds",
)

_RULES = {
    "reducer": _Rules("+@read +@write +@scripting +@transaction +time", ("~trinity:*",)),
    "trainer": _Rules(
        "+@read +time +multi +exec +script|load",
        (*_READ_RUN, *_INDEX),
        (
            f"-@all +xadd ~{RUN_INDEX}",
            # INCR: the trainer opens the next epoch by its counter.
            "-@all +xadd +evalsha +incr ~RUN:events ~RUN:epoch",
            "-@all +set +del ~RUN:alive:*",
            "-@all +evalsha ~RUN:epoch ~RUN:rollouts ~RUN:experiences ~RUN:evaluations ~RUN:judged",
            "-@all +xadd +xdel +xack +xtrim +del +xgroup|create +xgroup|destroy "
            "+xgroup|delconsumer ~RUN:rollouts ~RUN:evaluations",
            "-@all +xdel +xtrim +del ~RUN:experiences ~RUN:judged",
            *_HOLD_CHECKPOINTS,
            "-@all +get +mget +getrange +set +unlink +xadd +expire +xrevrange +evalsha +zadd +zrem "
            f"+zcard +zremrangebyscore +pttl +pexpire ~{_WEIGHTS}*",
        ),
    ),
    "explorer": _Rules(
        "+@read +time +script|load",
        (
            *_rules("%R~", "announcements", "current", "epoch", "rollouts", "evaluations"),
            *_rules("%R~", "experiences", "judged", "explorer:*", "promoted", "holds", "doomed"),
            *_INDEX,
            f"%R~{_WEIGHTS}*",
        ),
        (
            "-@all +xadd +evalsha ~RUN:reports",
            "-@all +xadd ~RUN:experiences ~RUN:judged",
            "-@all +evalsha ~RUN:epoch ~RUN:rollouts ~RUN:experiences ~RUN:evaluations ~RUN:judged",
            "-@all +xreadgroup +xack +xdel +xclaim +xgroup|delconsumer ~RUN:rollouts "
            "~RUN:evaluations",
            "-@all +evalsha +set +del +pexpire ~RUN:explorer:*",
            "-@all +set +del ~RUN:alive:explorer-*",
            *_HOLD_CHECKPOINTS,
            f"-@all +evalsha +zadd +zrem +zremrangebyscore +pttl +pexpire ~{_WEIGHTS}*:leases",
            # An explorer writes the payload of its answer; the trainer alone deletes it.
            f"-@all +set ~{_WEIGHTS}*:payload",
        ),
    ),
    "consumer": _Rules(
        "+@read +time +script|load",
        (*_READ_RUN, *_INDEX),
        (
            "-@all +evalsha +xreadgroup +xack +xclaim +xpending +xgroup|create "
            "+xgroup|createconsumer +xgroup|delconsumer +xinfo|groups +xinfo|consumers "
            "~RUN:announcements ~RUN:events ~RUN:dead",
            "-@all +xadd ~RUN:dead",
            *_HOLD_CHECKPOINTS,
        ),
    ),
    "viewer": _Rules("+@read", (*_READ_RUN, *_INDEX)),
}


def access_rules(run_id: str | None = None, server: Server = "both") -> list[str]:
    """Return the lines of an ACL file; each user's password is its name in capital letters.

    Args:
        run_id: The one run that the users may use; None for all.
        server: Server that the file is for.

    Raises:
        ValueError: ``run_id`` is not a run id.
    """
    run = "*" if run_id is None else check_run_id(run_id)
    lines = [f"user {user} on >{user.upper()} {_text(_RULES[user], server)}" for user in USERS]
    # Without it any client has all rights: the default user needs no password.
    return ["user default off", *(line.replace("RUN:", f"trinity:{{{run}}}:") for line in lines)]


def _text(rules: _Rules, server: Server) -> str:
    of_weights = {"both": (True, False), "log": (False,), "weights": (True,)}[server]

    def is_for(rule: str) -> bool:
        return (_WEIGHTS in rule) in of_weights

    keys = [key for key in rules.keys if is_for(key)]
    # On a server that has none of its keys, a role needs no commands on keys.
    commands = rules.commands if keys else ""
    listing = _LISTING if "+@read" in commands and "+@write" not in commands else ""
    selectors = [f"({selector})" for selector in rules.selectors if is_for(selector)]
    return " ".join(filter(None, ["-@all", commands, _CONNECTION, listing, *keys, *selectors]))
