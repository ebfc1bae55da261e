"""Copies from and to a device: without a GPU by a stand-in that copies as late as it may."""

import pytest
import torch

from tests.support.fake_devices import LateLane
from tests.support.gpu import GPU
from tests.support.tensors import bits, identical
from tests.support.weight_versions import awkward
from trinity_events.system.shared_memory import available
from trinity_events.weights import PartRef, PartWriter, SharedMemoryStore, check_fit, install
from trinity_events.weights.copy_streams import CudaCopyStream, HostCopyStream, on_host
from trinity_events.weights.devices.host_to_device import HostToDevice, copy_pairs
from trinity_events.weights.devices.staging_memory import StagingMemory
from trinity_events.weights.reading.pull import pull_version


@pytest.fixture(params=["host", "late", GPU])
def lane(request):
    if request.param == "cuda":
        return CudaCopyStream(torch.device("cuda", 0))
    return LateLane() if request.param == "late" else HostCopyStream()


def device_of(lane):
    return torch.device("cuda", 0) if isinstance(lane, CudaCopyStream) else torch.device("cpu")


@pytest.mark.parametrize("slot_bytes", [64, 192, 4096, 1 << 20])
def test_what_goes_into_a_device_is_bit_for_bit_in_slots_of_any_size(lane, slot_bytes):
    sent = [tensor.contiguous() for tensor in awkward().values()] + [torch.rand(5000)]
    targets = [torch.zeros_like(tensor, device=device_of(lane)) for tensor in sent]
    into = HostToDevice(lane, slot_bytes)
    for target, tensor in zip(targets, sent, strict=True):
        given = tensor.clone()
        into.copy(target, given)
        given.zero_()  # it is not needed any more
    into.finish()
    for target, tensor in zip(targets, sent, strict=True):
        assert identical(target.cpu(), tensor)


def test_staged_copies_are_there_once_settled_and_hold_later_work_back(lane):
    tensors = {name: tensor.to(device_of(lane)) for name, tensor in awkward().items()}
    expected = {name: bits(tensor.cpu()).clone() for name, tensor in tensors.items()}
    staging = StagingMemory(lane)
    for _ in range(2):  # in memory that is used again
        copies = staging.copy(list(tensors.values()))
        assert staging.settle() is lane.pinned
        assert staging.settle() is False, "nothing is waited for twice"
        for (name, raw), copy in zip(expected.items(), copies, strict=True):
            assert identical(bits(copy), raw), name
    if isinstance(lane, LateLane):
        filled = sum(tensor.numel() > 0 for tensor in tensors.values())
        assert lane.held_back_at == [filled, 2 * filled]


def test_a_staging_that_was_not_settled_is_before_its_memory_is_used_again():
    lane = LateLane()
    staging = StagingMemory(lane)
    [copy] = staging.copy([torch.full((100,), 12345.0)])
    assert not (copy == 12345).any(), "nothing is copied yet"
    staging.copy([torch.full((100,), 54321.0)])
    assert (copy == 12345).all()
    staging.settle()
    assert (copy == 54321).all()


def test_pairs_on_the_cpu_are_copied_as_ever():
    source = torch.arange(6.0).reshape(2, 3)
    pairs = [(torch.zeros(3, 2).t(), source), (torch.zeros(2, 3, dtype=torch.float64), source)]
    copy_pairs(pairs)
    for target, _ in pairs:
        assert identical(target.float(), source)


def test_staging_is_on_the_host_whatever_is_the_default():
    lane, sent = LateLane(), [torch.rand(100), torch.empty(0)]
    with torch.device("meta"):
        staging = StagingMemory(lane)
        copies = staging.copy(sent)
        staging.settle()
        into, target = HostToDevice(lane), torch.zeros(100, device="cpu")
        into.copy(target, sent[0])
        into.finish()
    assert identical(copies[0], sent[0])
    assert copies[1].is_cpu
    assert identical(target, sent[0])


def test_what_is_on_the_host_stays_where_it_is():
    tensor = torch.rand(100_000)
    assert on_host(tensor).data_ptr() == tensor.data_ptr()


@pytest.mark.skipif(not available(), reason="the host has no shared memory as files")
@pytest.mark.parametrize("device", ["cpu", GPU])
def test_a_version_goes_from_device_to_device_bit_for_bit(device, run_id):
    """As an upload and an explorer do it, without the log."""
    from tests.support.published_parts import announcement

    ours, theirs = SharedMemoryStore(), SharedMemoryStore()
    sent = awkward() | {"large": torch.rand((1 if device == "cpu" else 36) << 18)}
    sent = {name.replace(".", "-"): tensor.to(device) for name, tensor in sent.items()}
    part = PartRef(run_id, 1, 1, 0)
    writer = PartWriter(ours, part)
    for name, tensor in sent.items():
        writer.add(name, tensor)
    event = announcement(part, writer.seal())
    model = torch.nn.Module()
    for name, tensor in sent.items():
        model.register_buffer(name, torch.zeros_like(tensor, memory_format=torch.contiguous_format))
    with pull_version(theirs, run_id, event) as version:
        install(check_fit(model, version))
    for name, tensor in sent.items():
        installed = getattr(model, name)
        assert installed.device == tensor.device
        assert identical(installed.cpu(), tensor.cpu()), name
    for store in (theirs, ours):
        store.close()
