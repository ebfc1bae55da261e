"""Probes in a manifest: typed arrays that are checked as they are decoded."""

import math

import msgspec
import pytest

from tests.support.errors import raises
from trinity_schemas import Probes, ProbesContradiction, decode_manifest, encode, make_probes
from trinity_schemas.errors import MessageUndecodable
from trinity_schemas.manifest import WeightManifest

TOKENS = [[1, 2, 3], [4, 5, 6]]
LOGPROBS = [[-0.5, -1.25], [0.0, -3.0]]


def manifest(probes):
    return WeightManifest(run_id="r", epoch=1, step=2, rank=0, tensors=(), chunks=(), probes=probes)


def test_probes_come_back_from_a_manifest_as_they_were_sealed():
    sealed = decode_manifest(encode(manifest(make_probes(TOKENS, LOGPROBS, "bfloat16"))))
    probes = sealed.probes
    assert (probes.count, probes.dtype, probes.sequences()) == (2, "bfloat16", TOKENS)
    assert probes.logprobs.to_rows() == LOGPROBS


def test_a_manifest_without_probes_is_encoded_as_before():
    encoded = msgspec.msgpack.decode(encode(manifest(None)))
    assert "probes" not in encoded
    assert decode_manifest(encode(manifest(None))).probes is None


@pytest.mark.parametrize("array", ["tokens", "logprobs"])
def test_a_changed_byte_is_seen_by_the_digest_of_its_array(array):
    encoded = msgspec.msgpack.decode(encode(manifest(make_probes(TOKENS, LOGPROBS, "float32"))))
    data = bytearray(encoded["probes"][array]["data"])
    data[0] ^= 1
    encoded["probes"][array]["data"] = bytes(data)
    with pytest.raises(MessageUndecodable) as refused:
        decode_manifest(msgspec.msgpack.encode(encoded))
    assert isinstance(refused.value.__cause__, ProbesContradiction)
    assert refused.value.__cause__.fault == "digest"


@pytest.mark.parametrize(
    ("tokens", "logprobs", "fault"),
    [
        (TOKENS, [[-1.0], [-1.0]], "shapes"),
        ([[1, -2]], [[-1.0]], "tokens"),
        ([[1, 2]], [[0.5]], "logprobs"),
        ([[1, 2]], [[math.nan]], "logprobs"),
        ([[1, 2]] * 257, [[-1.0]] * 257, "count"),
    ],
)
def test_probes_that_do_not_fit_together_are_refused(tokens, logprobs, fault):
    with raises(ProbesContradiction, fault=fault):
        make_probes(tokens, logprobs, "float32")


def test_a_shape_that_its_bytes_do_not_have_is_refused():
    probes = msgspec.to_builtins(make_probes(TOKENS, LOGPROBS, "float32"), builtin_types=(bytes,))
    probes["tokens"]["shape"] = [2, 2]
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.convert(probes, Probes)
    assert refused.value.__cause__.fault == "size"
