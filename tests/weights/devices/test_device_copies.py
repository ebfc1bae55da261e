"""Copies from and to a device: without a GPU by a stand-in that copies as late as it may."""

import ctypes

import pytest
import torch

from tests.support.fake_devices import LateLane
from tests.support.gpu import GPU
from tests.support.tensors import bits, identical
from tests.support.torch_operations import Operations
from tests.support.weight_versions import awkward
from trinity_events.system.shared_memory import available
from trinity_events.weights import PartRef, PartWriter, SharedMemoryStore, check_fit, install
from trinity_events.weights.copy_streams import CudaCopyStream, HostCopyStream, on_host
from trinity_events.weights.devices.buckets import divide
from trinity_events.weights.devices.device_to_host import DeviceRuns
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
        into.copy(target, given.data_ptr())
        given.zero_()  # it is not needed any more
    into.finish()
    for target, tensor in zip(targets, sent, strict=True):
        assert identical(target.cpu(), tensor)


def many_small(device="cpu", count=400):
    """Tensors of several dtypes and sizes, some of which leave a gap behind them."""
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
    return [
        torch.arange(1, 2 + number % 7 * 5, device=device).to(dtypes[number % 4])
        for number in range(count)
    ]


@pytest.mark.parametrize("bucket_bytes", [256, 1000, 4096, 1 << 20])
def test_small_tensors_go_through_buckets_of_any_size_bit_for_bit(lane, bucket_bytes):
    device = device_of(lane)
    staging, into = StagingMemory(lane, bucket_bytes), HostToDevice(lane, bucket_bytes // 64 * 64)
    buckets = divide(many_small(device), bucket_bytes // 64 * 64)
    for version in (1, 2):  # by the views of the version before
        sent = [(tensor * version).to(tensor.dtype) for tensor in many_small(device)]
        copies = staging.copy(sent)
        staging.settle()
        given = [copy.clone() for copy in copies]
        targets = [torch.zeros_like(tensor) for tensor in sent]
        into.scatter(buckets, targets, [tensor.data_ptr() for tensor in given])
        into.finish()
        for target, copy, tensor in zip(targets, copies, sent, strict=True):
            assert identical(target.cpu(), tensor.cpu())
            assert identical(copy, tensor.cpu())


@pytest.mark.parametrize("count", [400, 4000])
def test_operations_are_proportional_to_bytes_and_not_to_tensors(count):
    bucket_bytes = 16 << 10
    lane = HostCopyStream()
    staging, into = StagingMemory(lane, bucket_bytes), HostToDevice(lane, bucket_bytes)
    sent = many_small(count=count)
    targets = [torch.zeros_like(tensor) for tensor in sent]
    addresses = [tensor.data_ptr() for tensor in sent]
    staging.copy(sent)  # which makes the views
    buckets = divide(targets, bucket_bytes)
    number = -(-sum(tensor.nbytes + 64 for tensor in sent) // bucket_bytes)
    # A bucket takes a gather for each of four dtypes, zeros between tensors, views and a copy.
    with Operations() as gathered:
        staging.copy(sent)
    with Operations() as scattered:
        into.scatter(buckets, targets, addresses)
    assert gathered.count <= 8 * number
    assert scattered.count <= 8 * number


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
        first, second = lane.held_back_at
        assert (first, second) == (lane.mark() // 2, lane.mark()), "after all copies of a version"


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
        into.copy(target, sent[0].data_ptr())
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


@pytest.mark.parametrize("bucket_bytes", [256, 4096])
def test_runs_are_read_in_order_with_large_tensors_among_them(lane, bucket_bytes):
    large = torch.arange(300_000.0)
    sent = [*many_small(count=30), large, *many_small(count=5), large + 1, torch.empty(0)]
    sent = [tensor.to(device_of(lane)) for tensor in sent]
    runs = DeviceRuns(sent, bucket_bytes)
    for version in (1, 2):
        sent = [(tensor * version).to(tensor.dtype) for tensor in sent]
        following = 0
        for first, addresses in runs.read(sent, lane):
            assert first == following
            for tensor, at in zip(sent[first:], addresses, strict=False):
                read = ctypes.string_at(at, tensor.nbytes)
                assert read == bytes(bits(tensor.cpu()).numpy().tobytes())
            following = first + len(addresses)
        assert following == len(sent)
