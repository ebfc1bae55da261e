"""Digests of single tensors: what was published is compared with what a model has."""

import msgspec
import pytest
import torch

from tests.support.errors import raises
from tests.support.fake_devices import HostDevice
from tests.support.gpu import GPU
from tests.support.pipeline import reducer_task, reports_accepted
from tests.support.published_parts import announcement
from tests.support.weight_versions import awkward, publish, ready
from trinity_events import Synchronizer
from trinity_events.weights import (
    CudaStore,
    PartWriter,
    ShardOffset,
    SharedMemoryStore,
    TensorSlice,
    check_installed,
    version_reader,
)
from trinity_events.weights.applying.verify_model import InstallChecks
from trinity_events.weights.deltas.tracker import LastPublished
from trinity_events.weights.devices.digests import ALGORITHM
from trinity_events.weights.errors import CorruptTensor, UnfillableTensor
from trinity_events.weights.tensors import as_bytes, as_plain, digest
from trinity_schemas import (
    VersionRefused,
    WeightManifest,
    WeightsApplied,
    decode_envelope,
    decode_manifest,
)


@pytest.fixture
def store():
    made = SharedMemoryStore()
    yield made
    made.close()


def manifest(store, part, tensors, *, digests=True, last=None, chunk_bytes=None) -> WeightManifest:
    """Of what is published: names, tensors, and places of shards."""
    writer = PartWriter(store, part, chunk_bytes, last=last, tensor_digests=digests)
    for named_tensor in tensors:
        writer.add(*named_tensor)
    announcement(part, writer.seal())
    source = store.open(part)
    try:
        return decode_manifest(source.manifest)
    finally:
        source.close()


def test_a_manifest_has_the_digest_of_every_tensor_when_asked_for(store, part):
    tensors = list(awkward().items())
    sealed = manifest(store, part, tensors)
    assert [entry.digest for entry in sealed.tensors] == [
        digest(as_bytes(tensor)) for _, tensor in tensors
    ]
    without = manifest(store, part._replace(step=2), tensors, digests=False)
    assert {entry.digest for entry in without.tensors} == {None}


def test_two_versions_have_the_same_digest_of_a_tensor_only_where_it_is_the_same(store, part):
    first_tensor, other = torch.ones(5), torch.ones(7)
    first = manifest(store, part, [("a", first_tensor), ("b", other)])
    other[3] = 2
    second = manifest(store, part._replace(step=2), [("b", other), ("a", first_tensor)])
    before, after = (
        {each.name: each.digest for each in sealed.tensors} for sealed in (first, second)
    )
    assert before["a"] == after["a"]
    assert before["b"] != after["b"]


def test_a_delta_has_the_digest_of_the_whole_tensor(store, part):
    tensor, last = torch.ones(4096), LastPublished(4)
    last.begin(part, lambda _: True)
    manifest(store, part, [("a", tensor)], last=last)
    tensor[7] = 3
    second = part._replace(step=2)
    last.begin(second, lambda _: True)
    [entry] = manifest(store, second, [("a", tensor)], last=last).tensors
    assert entry.encoding == "delta"
    assert entry.digest == digest(as_bytes(tensor))


def test_what_something_else_wrote_into_a_model_is_found_and_named(store, part):
    sent = {"a": torch.randn(6, 4), "b": torch.randn(3)}
    sealed = manifest(store, part, sent.items())
    module = torch.nn.ParameterDict({name: tensor.clone() for name, tensor in sent.items()})
    assert check_installed(module, [sealed]).tensors == 2
    with torch.no_grad():
        module.get_parameter("b")[1] += 1
    with raises(CorruptTensor, fault="installed", tensor="b", step=1):
        check_installed(module, [sealed])
    proof = check_installed(module, [sealed], {"a": None})
    assert (proof.tensors, proof.status) == (1, "proven"), "of the others nothing was asked"


def test_shards_are_compared_where_the_model_has_all_of_them(store, part):
    whole = torch.randn(6, 4)
    rows = [("a", whole[:4].contiguous(), ShardOffset((0, 0), (6, 4)))]
    sealed = manifest(store, part, rows)
    with torch.no_grad():
        assert check_installed(torch.nn.ParameterDict({"a": whole.clone()}), [sealed]).tensors == 1
        wrong = whole.clone()
        wrong[2, 2] += 1
        with raises(CorruptTensor, fault="installed", tensor="a"):
            check_installed(torch.nn.ParameterDict({"a": wrong}), [sealed])
    rows_slice = TensorSlice((2, 0), (4, 4))
    proof = check_installed(
        torch.nn.ParameterDict({"a": whole[2:].clone()}), [sealed], {"a": rows_slice}
    )
    assert proof.tensors == 0
    rows_slice = TensorSlice((0, 0), (5, 4))
    proof = check_installed(
        torch.nn.ParameterDict({"a": whole[:5].clone()}), [sealed], {"a": rows_slice}
    )
    assert proof.tensors == 1


def test_a_proof_names_the_tensors_of_the_model_that_no_digest_is_of(store, part):
    sealed = manifest(store, part, [("embed", torch.ones(3, 2))])
    module = torch.nn.Module()
    module.register_parameter("embed", torch.nn.Parameter(torch.ones(3, 2)))
    module.register_parameter("head", module.embed)
    proof = check_installed(module, [sealed])
    assert (proof.status, proof.tensors, proof.unproven) == ("proven", 1, ())
    module.head = torch.nn.Parameter(torch.zeros(3, 2))  # tied before, and stale now
    proof = check_installed(module, [sealed])
    assert (proof.status, proof.tensors, proof.unproven) == ("partly", 1, ("head",))
    undigested = manifest(
        store, part._replace(step=2), [("embed", torch.ones(3, 2))], digests=False
    )
    proof = check_installed(module, [undigested])
    assert (proof.status, proof.checks) == ("unproven", ("names",))


def test_a_tensor_that_was_converted_is_not_proven(store, part):
    sealed = manifest(store, part, [("a", torch.ones(3)), ("b", torch.ones(2))])
    module = torch.nn.ParameterDict({"a": torch.ones(3), "b": torch.ones(2, dtype=torch.bfloat16)})
    proof = check_installed(module, [sealed], cast=True)
    assert (proof.status, proof.tensors, proof.unproven) == ("partly", 1, ("b",))
    assert proof.unproven_count == 1


@pytest.mark.parametrize("way", ["apply", "load"])
async def test_an_explorer_says_that_it_serves_only_what_its_model_has(
    way, publisher, redis_url, weights_url, run_id, log, monkeypatch
):
    urls = {"redis_url": redis_url, "weights_url": weights_url}
    trainer = Synchronizer(run_id, publisher.epoch, tensor_digests=True, **urls)
    explorer = Synchronizer(run_id, 0, role="explorer", **urls)
    model = torch.nn.ParameterDict({"a": torch.zeros(8), "b": torch.zeros(4)})

    def spoil(*_):
        with torch.no_grad():
            model.get_parameter("b")[0] = -1

    async with reducer_task(redis_url, run_id):
        publish(trainer, {"a": torch.ones(8), "b": torch.ones(4)}, 1)
        event = await ready(log, 1)
        with monkeypatch.context() as patch:
            if way == "apply":
                real = version_reader.install
                patch.setattr(version_reader, "install", lambda fit: (real(fit), spoil()))
            else:
                at = "trinity_events.weights.applying.load.check_installed"
                patch.setattr(at, lambda *args, **how: (spoil(), check_installed(*args, **how)))
            with raises(CorruptTensor, fault="installed", tensor="b"):
                getattr(explorer, way)(model, event)
        trainer.open_version(2)
        trainer.publish({"a": torch.ones(8)}.items(), 2, subset=True)
        trainer.commit(2)
        with raises(UnfillableTensor, fault="torn", tensor="b"):
            explorer.apply(model, await ready(log, 2))
        getattr(explorer, way)(model, event)
        explorer.flush()
        await reports_accepted(log)
        events = [decode_envelope(entry.payload).event for entry in await log.read()]
        [applied] = [event for event in events if isinstance(event, WeightsApplied)]
        assert (applied.version.step, applied.proof.status) == (1, "proven")
        assert (applied.proof.tensors, applied.proof.checks) == (2, ("names", "served"))
        [refused] = [event for event in events if isinstance(event, VersionRefused)]
        assert (refused.version.step, refused.chunk) == (1, None)
        assert "'b' of the model" in refused.reason
    explorer.close()
    trainer.close()


# --- by digests of chunks -------------------------------------------------------------------


class ByChunks(InstallChecks):
    """Checks of a consumer that compares versions without digests of tensors."""

    compares_chunks = True

    def __init__(self, names=None):
        self.names = names

    def select(self, names):
        return names if self.names is None else self.names


@pytest.mark.parametrize("chunk_bytes", [64, 1 << 20])
def test_tensors_without_digests_are_compared_by_the_chunks_that_they_lie_in(
    store, part, chunk_bytes
):
    tensors = {**awkward(), "odd": torch.arange(7, dtype=torch.int8), "b": torch.randn(33)}
    writer = PartWriter(store, part, chunk_bytes)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    announcement(part, writer.seal())
    source = store.open(part)
    sealed = decode_manifest(source.manifest)
    source.close()
    module = torch.nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name.replace(".", "_"), as_plain(tensor).clone())
    entries = tuple(
        msgspec.structs.replace(entry, name=entry.name.replace(".", "_"))
        for entry in sealed.tensors
    )
    sealed = msgspec.structs.replace(sealed, tensors=entries)
    proof = check_installed(module, [sealed], checks=ByChunks())
    assert (proof.status, proof.tensors) == ("proven", len(tensors))
    assert check_installed(module, [sealed]).status == "unproven", "by default it is not read"
    proof = check_installed(module, [sealed], checks=ByChunks({"b"}))
    assert (proof.status, proof.tensors) == ("partly", 1)
    for name in [entry.name for entry in entries if entry.nbytes]:
        buffer = module.get_buffer(name)
        flat = buffer.view(-1)[:1].view(torch.uint8)
        flat[0] ^= 1
        with pytest.raises(CorruptTensor) as error:
            check_installed(module, [sealed], checks=ByChunks())
        named = (error.value.tensor, error.value.last)
        assert error.value.fault in ("installed", "chunk")
        if chunk_bytes == 64:
            assert name in named
        flat[0] ^= 1
    assert check_installed(module, [sealed], checks=ByChunks()).status == "proven"


@pytest.mark.parametrize("place", ["host", GPU])
@pytest.mark.parametrize("chunk_bytes", [64, 1 << 20])
def test_tensors_of_a_device_are_compared_there_by_the_chunks_that_they_lie_in(
    part, chunk_bytes, place
):
    device = CudaStore(HostDevice() if place == "host" else None)
    on = "cpu" if place == "host" else place
    tensors = {
        "odd": torch.arange(7, dtype=torch.int8),
        "b": torch.randn(33),
        "none": torch.ones(0),
    }
    tensors = {name: tensor.to(on) for name, tensor in tensors.items()}
    sealed = manifest(device, part, tensors.items(), digests=False, chunk_bytes=chunk_bytes)
    assert {chunk.digest.partition(":")[0] for chunk in sealed.chunks} == {ALGORITHM}
    module = torch.nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor.clone())
    assert check_installed(module, [sealed], checks=ByChunks()).status == "proven"
    for name in ("odd", "b"):
        module.get_buffer(name)[-1] += 1
        with raises(CorruptTensor):
            check_installed(module, [sealed], checks=ByChunks())
        module.get_buffer(name)[-1] = tensors[name][-1]
    chunks = tuple(msgspec.structs.replace(chunk, digest="later:00") for chunk in sealed.chunks)
    unknown = msgspec.structs.replace(sealed, chunks=chunks)
    assert check_installed(module, [unknown], checks=ByChunks()).status == "partly"
    device.close()


def test_a_wider_tensor_is_compared_after_it_is_converted_back(store, part):
    narrow = torch.randn(50).bfloat16()
    sealed = manifest(store, part, [("a", narrow)], digests=False)
    module = torch.nn.ParameterDict({"a": narrow.float()})
    proof = check_installed(module, [sealed], cast=True, checks=ByChunks())
    assert (proof.status, proof.tensors) == ("proven", 1)
    with torch.no_grad():
        module.get_parameter("a")[3] *= 1 + 2**-20  # lost where it is converted back
    with raises(CorruptTensor, fault="installed", tensor="a"):
        check_installed(module, [sealed], cast=True, checks=ByChunks())
    module = torch.nn.ParameterDict({"a": narrow.to(torch.float16)})
    proof = check_installed(module, [sealed], cast=True, checks=ByChunks())
    assert (proof.status, proof.unproven_count) == ("unproven", 1)


def test_shards_of_ranks_are_compared_by_chunks(store, part):
    whole = torch.randn(6, 40)
    rows = [("a", whole[:4].contiguous(), ShardOffset((0, 0), (6, 40)))]
    columns = [("a", whole[4:, :].contiguous(), ShardOffset((4, 0), (6, 40)))]
    parts = [
        manifest(store, part._replace(rank=rank), shards, digests=False)
        for rank, shards in enumerate((rows, columns))
    ]
    module = torch.nn.ParameterDict({"a": whole.clone()})
    proof = check_installed(module, parts, checks=ByChunks())
    assert (proof.status, proof.tensors) == ("proven", 1)
    with torch.no_grad():
        module.get_parameter("a")[5, 39] += 1
    with raises(CorruptTensor, fault="installed", tensor="a"):
        check_installed(module, parts, checks=ByChunks())
