"""Publish parts, announce them, and compare what is read with what was sent."""

import torch

from tests.support.tensors import identical
from tests.support.transport_processes import CHUNK, SOME
from trinity_events.weights import PartWriter, pull_version
from trinity_schemas import PublishedPart, StepReady, version_digest


def put(store, part, tensors=SOME, chunk_bytes=CHUNK):
    writer = PartWriter(store, part, chunk_bytes)
    for name, tensor in tensors:
        writer.add(name, tensor)
    return announcement(part, writer.seal())


def announcement(part, *reports) -> StepReady:
    """As the reducer announces a version of ranks 0, 1 and so on."""
    parts = tuple(
        PublishedPart(rank=rank, manifest_digest=report.manifest_digest, bytes=report.bytes)
        for rank, report in enumerate(reports)
    )
    return StepReady(
        epoch=part.epoch,
        step=part.step,
        kind="weights",
        caused_by="1-0",
        parts=parts,
        version_digest=version_digest(
            (published.rank, published.manifest_digest) for published in parts
        ),
    )


def read(store, run_id, ready) -> dict[str, torch.Tensor]:
    with pull_version(store, run_id, ready) as version:
        return {name: tensor.cpu().clone() for name, tensor in version.tensors()}


def assert_same(tensors, sent):
    assert list(tensors) == [name for name, _ in sent]
    for name, tensor in sent:
        assert tensors[name].dtype == tensor.dtype
        assert tensors[name].shape == tensor.shape
        assert identical(tensors[name].cpu(), tensor), name
