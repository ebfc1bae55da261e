"""Payloads of answers: the tokens of a group, which lie next to the streams, under leases."""

from .base import ANSWER_LEASE, CHECKPOINT_LEASE, PayloadReader, PayloadStore, digest_payload
from .loading import PayloadFault, PayloadsUnusable, load_group, load_groups
from .redis_store import RedisPayloadReader, RedisPayloads
from .shared_memory import SharedMemoryPayloadReader, SharedMemoryPayloads

__all__ = [
    "ANSWER_LEASE",
    "CHECKPOINT_LEASE",
    "PayloadFault",
    "PayloadReader",
    "PayloadStore",
    "PayloadsUnusable",
    "RedisPayloadReader",
    "RedisPayloads",
    "SharedMemoryPayloadReader",
    "SharedMemoryPayloads",
    "digest_payload",
    "load_group",
    "load_groups",
]
