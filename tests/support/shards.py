"""Tensors that several ranks publish in shards."""

import torch

from tests.support.published_parts import announcement
from trinity_events.weights import PartWriter
from trinity_events.weights.reading import pull
from trinity_events.weights.slices import ShardOffset
from trinity_events.weights.transports.cuda import source
from trinity_events.weights.transports.redis import values

CHUNK = 64


def verified(monkeypatch) -> list[int]:
    """Sizes of what pulls verify from now on: what lies there, or as it comes from the server."""
    sizes = []
    digest, received = pull.digest, values.ReceivedChunk

    def digested(*pieces):
        sizes.append(sum(map(len, pieces)))
        return digest(*pieces)

    def noted(number, into, length, digested):
        sizes.append(length)
        return received(number, into, length, digested)

    monkeypatch.setattr(pull, "digest", digested)
    monkeypatch.setattr(values, "ReceivedChunk", noted)
    digests = source.digest_all
    monkeypatch.setattr(
        source, "digest_all", lambda chunks: sizes.extend(map(len, chunks)) or digests(chunks)
    )
    return sizes


def publish(stores, part, *ranks, chunk_bytes=CHUNK):
    """One part a rank, each of ``(name, elements, begins, global shape)``."""
    reports = []
    for rank, (store, shards) in enumerate(zip(stores, ranks, strict=False)):
        writer = PartWriter(store, part._replace(rank=rank), chunk_bytes)
        for name, tensor, *place in shards:
            writer.add(name, tensor, ShardOffset(*place) if place else None)
        reports.append(writer.seal())
    return announcement(part, *reports)


def rows(tensor, *cuts):
    """A tensor cut along its first dimension, as FSDP does."""
    return [
        (tensor[begin:end], (begin, *(0,) * (tensor.dim() - 1)), tuple(tensor.shape))
        for begin, end in zip((0, *cuts), (*cuts, len(tensor)), strict=True)
    ]


def module_of(**shapes):
    return torch.nn.ParameterDict({name: torch.zeros(shape) for name, shape in shapes.items()})
