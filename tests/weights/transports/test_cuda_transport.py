"""Through a GPU's memory: what holds beside what every transport promises."""

import ctypes
import gc
import re
from contextlib import nullcontext
from unittest import mock

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.errors import raises
from tests.support.fake_devices import Computing, EagerLane, HostDevice, HostRuntime
from tests.support.gpu import GPU
from tests.support.pipeline import reducer_task
from tests.support.published_parts import announcement, assert_same, put, read
from tests.support.stored_parts import find_stored, layout, segment
from tests.support.tensors import identical
from tests.support.transport_processes import CHUNK, SOME, Where
from tests.support.weight_versions import awkward, publish, ready
from trinity_events import Synchronizer
from trinity_events.errors import CorruptVersion, GpuUnusable, VersionNotStored
from trinity_events.system.shared_memory import available
from trinity_events.weights import CudaStore, PartRef, PartWriter, load_version
from trinity_events.weights.deltas.tracker import LastPublished
from trinity_events.weights.devices.device_to_host import DeviceRuns
from trinity_events.weights.devices.digests import digest_all
from trinity_events.weights.errors import CorruptPart, PartClosed, TransportRefused
from trinity_events.weights.publishing.part_writer import PartLayout
from trinity_events.weights.transports import stores
from trinity_events.weights.transports.cuda import CudaMemory, memory
from trinity_events.weights.transports.cuda.block_pool import BlockSizes
from trinity_events.weights.transports.cuda.layout import encode_layout

U8 = torch.uint8

pytestmark = pytest.mark.skipif(not available(), reason="the host has no shared memory as files")


@pytest.fixture
def device():
    return HostDevice()


@pytest.fixture
def ours(device):
    made = CudaStore(device)
    yield made
    made.close()


@pytest.fixture
def theirs():
    made = CudaStore(HostDevice())
    yield made
    made.close()


# --- digests ----------------------------------------------------------------------------------


def reference(data: bytes) -> str:
    """The same by Python's own numbers."""
    word = (1 << 64) - 1
    padded = data + bytes(-len(data) % 8)
    plain = weighted = 0
    for place in range(len(padded) // 8):
        key = ((place + 1) * 0x9E3779B97F4A7C15 & word) | 1
        word_value = int.from_bytes(padded[8 * place :][:8], "little") ^ key
        word_value = word_value * 0xFF51AFD7ED558CCD & word
        word_value ^= word_value >> 32
        word_value = word_value * 0xC4CEB9FE1A85EC53 & word
        word_value ^= word_value >> 29
        plain, weighted = plain + word_value, weighted + word_value * key
    return f"mix128:{plain + len(data) & word:016x}{weighted & word:016x}"


def make_chunk(data: bytes, device="cpu") -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8, device=device)


@given(st.lists(st.binary(max_size=100), max_size=4))
def test_a_digest_is_what_it_is_said_to_be(chunks):
    assert digest_all([make_chunk(data) for data in chunks]) == [reference(data) for data in chunks]


@given(st.binary(min_size=1, max_size=200), st.data())
def test_a_digest_sees_bits_that_flip_bytes_that_swap_and_zeros_that_are_added(data, drawn):
    [before] = digest_all([make_chunk(data)])
    at = drawn.draw(st.integers(0, len(data) - 1))
    flipped = bytearray(data)
    flipped[at] ^= 1 << drawn.draw(st.integers(0, 7))
    assert digest_all([make_chunk(flipped)]) != [before]
    other = drawn.draw(st.integers(0, len(data) - 1))
    if data[at] != data[other]:
        swapped = bytearray(data)
        swapped[at], swapped[other] = data[other], data[at]
        assert digest_all([make_chunk(swapped)]) != [before]
    assert digest_all([make_chunk(data + b"\0")]) != [before]
    assert digest_all([make_chunk(data[1:])]) != [before]


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_two_signs_that_flip_do_not_cancel_each_other(device):
    """As they would in a sum of words times odd numbers."""
    words = torch.zeros(1000, dtype=torch.int64, device=device)
    [before] = digest_all([words.view(torch.uint8)])
    words[[3, 500]] = -(2**63)
    assert digest_all([words.view(torch.uint8)]) != [before]
    assert digest_all([words.view(torch.uint8).cpu()]) == digest_all([words.view(torch.uint8)])


def test_what_is_digested_may_lie_at_any_address():
    data = torch.arange(100, dtype=torch.uint8)
    for begin in range(9):
        assert digest_all([data[begin:90]]) == [reference(bytes(range(begin, 90)))]


# --- where parts lie --------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_bytes", [64, 4096, None])
def test_a_part_in_several_blocks_travels_and_no_tensor_lies_in_two(
    device, theirs, part, chunk_bytes
):
    ours = CudaStore(device, sizes=BlockSizes(most=9000))
    sent = [*SOME, ("large", torch.rand(5000)), ("none", torch.empty(0)), *awkward().items()]
    for step in range(3):  # in new memory, and again
        here = part._replace(step=step)
        assert_same(read(theirs, part.run_id, put(ours, here, sent, chunk_bytes)), sent)
        sizes = [lent.nbytes for lent in layout(here).blocks]
        assert len(sizes) > 4
        assert all(size <= 9000 or size >= 20_000 for size in sizes)
        ours.delete(here)
    ours.close()


def test_the_memory_grows_and_shrinks_with_the_model_and_is_all_given_back(part):
    device = HostDevice()
    before = device._free_bytes
    ours, theirs = CudaStore(device), CudaStore(HostDevice())
    for step, count in enumerate((1000, 9_000_000, 10, 5_000_000)):
        sent = [("first", torch.rand(10)), ("a", torch.rand(count)), ("last", torch.rand(10))]
        here = part._replace(step=step)
        assert_same(read(theirs, part.run_id, put(ours, here, sent, None)), sent)
        ours.delete(here)
    theirs.close()
    ours.close()
    assert device._free_bytes == before


def test_memory_that_is_read_is_neither_written_nor_freed(device, ours, theirs, part):
    event = put(ours, part)
    source = theirs.open(part)
    ours.delete(part)
    put(ours, part._replace(step=2), [("other", torch.rand(6000))])
    ours.close()
    assert len(device._descriptors) == 1, "what is read stays, what nobody reads is freed"
    copied, came = source.copy([CHUNK] * 6)
    assert identical(copied[0][:4000].view(torch.float32), SOME[0][1])
    assert len(came) == 6
    source.close()
    assert event.step == part.step


def test_what_was_given_may_change_once_it_was_taken(ours, theirs, part):
    tensor = torch.full((1000,), 1.0)
    writer = PartWriter(ours, part, CHUNK)
    writer.add("a", tensor)
    tensor.fill_(2)
    event = announcement(part, writer.seal())
    assert (read(theirs, part.run_id, event)["a"] == 1).all()


def test_where_it_lies_is_not_believed_when_it_cannot_be(ours, theirs, part):
    event = put(ours, part)
    for nonsense in (b"\xc1" * 40, msgspec.msgpack.encode({"device": 3, "blocks": []})):
        with segment(part).open("r+b") as file:
            file.seek(4096)
            file.write(nonsense)
        with raises(CorruptPart, fault="location", version=str(part)):
            read(theirs, part.run_id, event)


def test_a_part_whose_blocks_are_fewer_than_it_takes_is_corrupt(ours, theirs, part):
    event = put(ours, part, [("a", torch.rand(9000))])
    module = torch.nn.ParameterDict({"a": torch.zeros(9000)})
    encoded_layout = encode_layout(msgspec.structs.replace(layout(part), blocks=()))
    with segment(part).open("r+b") as file:
        file.seek(4096)
        file.write(encoded_layout)
        file.seek(8)
        file.write(len(encoded_layout).to_bytes(8, "little"))
    with raises(CorruptVersion, version=str(part)):
        read(theirs, part.run_id, event)
    with raises(CorruptVersion, version=str(part)):
        load_version(theirs, part.run_id, event, module)


def test_what_is_behind_the_end_of_a_block_is_not_looked_at(ours, theirs, part):
    """There a GPU ends with an error that stays."""
    event = put(ours, part)
    original = layout(part)
    [lent] = original.blocks
    lent = msgspec.structs.replace(lent, nbytes=lent.nbytes + 64)
    with segment(part).open("r+b") as file:
        file.seek(4096)
        file.write(encode_layout(msgspec.structs.replace(original, blocks=(lent,))))
    with raises(CorruptPart, fault="blocks", version=str(part)):
        read(theirs, part.run_id, event)


def test_a_reader_that_does_not_see_the_device_is_told_why(ours, theirs, part, monkeypatch):
    event = put(ours, part)

    def unseen(*_):
        raise VersionNotStored(fault="hidden gpu", place="7")

    monkeypatch.setattr(HostDevice, "borrow", unseen)
    with raises(VersionNotStored, version=str(part), fault="hidden gpu", place="7"):
        read(theirs, part.run_id, event)


@pytest.mark.parametrize("last", [10, 0])
def test_what_fills_gaps_is_computed_before_it_is_copied(part, last):
    """As is the tensor itself, which is put in order first."""
    device = HostDevice()
    with Computing() as computing:
        device.lane = EagerLane(computing)
        ours = CudaStore(device)
        writer = PartWriter(ours, part, CHUNK)
        writer.add("odd", torch.rand(3, 5).t())
        writer.add("more", torch.rand(7))
        writer.add("last", torch.rand(last))
        writer.seal()
    ours.close()


def test_the_next_part_takes_as_much_memory_as_the_last_one_needed(device, part):
    ours = CudaStore(device, sizes=BlockSizes(most=1 << 20, least=1 << 10))
    sent = [(f"layer.{number}", torch.rand(25_000)) for number in range(50)]
    put(ours, part, sent, None)
    before = device._free_bytes
    put(ours, part._replace(step=2), sent, None)
    assert before - device._free_bytes < 51 * 100_096
    ours.close()


def test_who_publishes_in_inference_mode_may_do_so_outside_of_it_later(ours, theirs, part):
    with torch.inference_mode():
        event = put(ours, part)
    assert_same(read(theirs, part.run_id, event), SOME)
    ours.delete(part)
    event = put(ours, part._replace(step=2))
    with torch.inference_mode():
        assert_same(read(theirs, part.run_id, event), SOME)


def test_a_part_that_was_given_up_writes_into_no_other(ours, theirs, part):
    given_up = PartWriter(ours, part, CHUNK)
    given_up.add("a", torch.rand(10))
    given_up.add("none", torch.rand(0))
    event = put(ours, part._replace(step=2))
    for late in (lambda: given_up.add("b", torch.rand(10)), given_up.seal):
        with raises(PartClosed, version=str(part)):
            late()
    given_up.discard()
    assert_same(read(theirs, part.run_id, event), SOME)


def test_a_device_that_answers_no_more_keeps_no_files(part, monkeypatch):
    device = HostDevice()
    ours = CudaStore(device)
    put(ours, part)
    writer = PartWriter(ours, part._replace(step=2))
    writer.add("a", torch.rand(10))
    monkeypatch.setattr(device.lane, "wait", mock.Mock(side_effect=RuntimeError("CUDA error")))
    with pytest.raises(RuntimeError, match="CUDA error"):
        writer.discard()
    assert len(ours._files._idle) == 1
    with pytest.raises(RuntimeError, match="CUDA error"):
        ours.close()
    assert find_stored(Where("device", ""), part.run_id) == []


def test_a_copy_that_there_is_no_memory_for_is_an_error_with_the_way_out(
    ours, theirs, part, monkeypatch
):
    event = put(ours, part)
    model = torch.nn.ParameterDict({"a": torch.zeros(3)})
    monkeypatch.setattr(torch, "empty_like", mock.Mock(side_effect=torch.OutOfMemoryError))
    with raises(GpuUnusable, fault="no room to copy", size=24160, version=str(part)):
        read(theirs, part.run_id, event)
    sent = [("a", torch.rand(3))]
    load_version(theirs, part.run_id, put(ours, part._replace(step=2), sent), model)
    assert identical(model["a"], sent[0][1])


def test_deltas_are_refused(ours, part):
    with raises(TransportRefused, fault="deltas", transport="cuda-ipc"):
        PartWriter(ours, part, last=LastPublished(2))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused_with_the_way_out():
    with raises(GpuUnusable, fault="absent"):
        CudaStore()


# --- what CUDA answers ------------------------------------------------------------------------


@pytest.fixture
def runtime(monkeypatch):
    """CUDA's calls, in the host's memory; of 8 MiB torch keeps 5 that it does not need."""
    made, reserved = HostRuntime(3 << 20), [5 << 20]

    def give_back():
        assert made.last_error == 0, "torch raises what it finds here"
        made.free_bytes += reserved.pop() if reserved else 0

    def tensor(pointer, nbytes, index):
        return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(pointer.value), dtype=U8)

    monkeypatch.setattr(memory, "_runtime", lambda: made)
    monkeypatch.setattr(memory, "_tensor", tensor)
    monkeypatch.setattr(memory, "_find_index", lambda device: 0 if device == "ours" else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", give_back)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    return made


def test_memory_that_torch_gave_back_is_lent_and_no_error_is_left_to_torch(runtime):
    ours = CudaMemory(0)
    first, second = ours.allocate(3 << 20), ours.allocate(100)
    assert [len(first.tensor), len(second.tensor)] == [4 << 20, 2 << 20], "whole pages are lent"
    assert runtime.last_error == 0
    assert ours.borrow("ours", second.handle, 100).tensor is second.tensor
    with raises(GpuUnusable, fault="full", size=4 << 20, reason=re.compile("error 2")):
        ours.allocate(4 << 20)
    for block in (first, second):
        ours.free(block)
    assert runtime.free_bytes == 8 << 20
    assert runtime.last_error == 0


def test_an_allocator_that_minds_memory_beside_its_own_is_refused(runtime, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    with raises(GpuUnusable, fault="allocator"):
        CudaMemory().allocate(100)


def test_memory_that_is_not_to_be_seen_is_told_with_the_reason(runtime):
    theirs = CudaMemory()
    with raises(VersionNotStored, fault="hidden gpu", place="another"):
        theirs.borrow("another", b"handle", 100)
    with raises(VersionNotStored, fault="unmapped gpu", reason=re.compile("error 1")):
        theirs.borrow("ours", b"handle", 100)
    assert runtime.last_error == 0


def test_the_gpu_of_the_first_tensor_is_taken_whatever_a_thread_takes_for_the_current_one(runtime):
    ours = CudaMemory()
    for tensor in (
        torch.rand(3),
        mock.Mock(is_cuda=True, device=torch.device("cuda", 5)),
        mock.Mock(is_cuda=True, device=torch.device("cuda", 6)),
    ):
        ours.near(tensor)
    assert ours._get_index() == 5


def test_a_torch_without_a_runtime_is_refused_with_the_way_out():
    if torch.version.cuda is None:
        with raises(GpuUnusable, fault="runtime"):
            memory._runtime()
    else:
        assert memory._runtime().cudaGetErrorString(0) == b"no error"


# --- all of it --------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["cpu", GPU])
@pytest.mark.parametrize("way", ["apply", "load"])
async def test_a_model_is_published_and_installed_without_the_host(
    place, way, publisher, redis_url, weights_url, run_id, log, monkeypatch
):
    if place == "cpu":

        class Standin(CudaStore):
            def __init__(self):
                super().__init__(HostDevice())

        monkeypatch.setattr(stores, "CudaStore", Standin)
    urls = {"redis_url": redis_url, "weights_url": weights_url}
    trainer = Synchronizer(run_id, publisher.epoch, transport="cuda-ipc", **urls)
    explorer = Synchronizer(run_id, 0, role="explorer", **urls)
    sent = {name.replace(".", "-"): tensor.to(place) for name, tensor in awkward().items()}
    model = torch.nn.Module()
    for name, tensor in sent.items():
        model.register_buffer(name, torch.zeros_like(tensor))
    async with reducer_task(redis_url, run_id):
        publish(trainer, sent, 1)
        event = await ready(log, 1)
        assert event.transport == "cuda-ipc"
        getattr(explorer, way)(model, event)
        for name, tensor in sent.items():
            assert identical(getattr(model, name).cpu(), tensor.cpu()), name
    explorer.close()
    trainer.close()
    gc.collect()


# --- many tensors at once ---------------------------------------------------------------------


@pytest.mark.parametrize("place", ["host", GPU])
def test_tensors_that_are_written_at_once_have_the_bytes_of_each_by_itself(ours, run_id, place):
    if place == "cuda":
        ours = CudaStore()
    device = "cpu" if place == "host" else place
    small = [torch.arange(1.0 + number % 9, device=device) for number in range(500)]
    large = torch.rand(1 << 19, device=device)
    tensors = [*small[:300], large, *small[300:], large.bfloat16(), small[0].bool()]
    layout = PartLayout([f"t{number}" for number in range(len(tensors))], tensors, None)
    part = ours.begin(PartRef(run_id, 1, 1, 0), CHUNK)
    for tensor, offset in zip(tensors, layout.offsets, strict=True):
        part.write(tensor, offset)
    apart = part.chunks(layout.ends[-1])
    part.discard()
    part = ours.begin(PartRef(run_id, 1, 2, 0), CHUNK)
    part.write_all(tensors, layout.offsets, DeviceRuns(tensors, 4096))
    at_once = part.chunks(layout.ends[-1])
    part.discard()
    assert at_once == apart
    if place == "cuda":
        ours.close()
