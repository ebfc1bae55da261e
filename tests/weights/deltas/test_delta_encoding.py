"""Deltas as bytes: exact, small, and refused when they are not what they should be."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.errors import raises
from trinity_events.errors import CorruptVersion
from trinity_events.weights.deltas import encoding as coding
from trinity_events.weights.deltas.encoding import (
    BLOCK,
    Changes,
    blocks,
    decode_delta,
    digest_with,
    encode_delta,
)
from trinity_events.weights.errors import CorruptDelta
from trinity_events.weights.tensors import digest

ITEMSIZES = (1, 2, 4, 8)


def changes(base, new):
    """What changed, found in the plainest way."""
    changed = []
    for start in blocks(len(base)):
        positions = np.flatnonzero(base[start : start + BLOCK] != new[start : start + BLOCK])
        if len(positions):
            changed.append(Changes(start, positions, new[start : start + BLOCK][positions]))
    return changed


def made(base, new):
    return memoryview(encode_delta(changes(base, new), len(base), base.itemsize))


def random_words(elements, itemsize, seed=0):
    data = np.random.default_rng(seed).integers(0, 256, elements * itemsize, np.uint8)
    return coding.words(data, itemsize).copy()


def changed_in(base, share, seed=1):
    new = base.copy()
    where = np.random.default_rng(seed).random(len(base)) < share
    new[where] ^= 1
    return new


@pytest.mark.parametrize("itemsize", ITEMSIZES)
@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.2, 1.0])
@pytest.mark.parametrize("elements", [1, 7, BLOCK, 2 * BLOCK + 3])
def test_a_delta_over_its_base_is_the_new_tensor_bit_for_bit(elements, share, itemsize):
    base = random_words(elements, itemsize)
    new = changed_in(base, share)
    coded = made(base, new)
    assert digest_with(base, coded) == digest(new)
    patched = base.copy()
    for _ in range(2):  # to overwrite again changes nothing
        coding.overwrite(patched, coded)
        assert np.array_equal(patched, new)
    assert digest_with(patched, coded) == digest(new)


def test_of_an_empty_tensor_nothing_travels():
    empty = random_words(0, 2)
    assert made(empty, empty) == b""
    assert digest_with(empty, memoryview(b"")) == digest(b"")


@pytest.mark.parametrize(
    ("share", "most"), [(0.001, 4.1), (0.01, 3.1), (0.03, 3.01), (0.5, 2.3), (1.0, 2.2)]
)
def test_a_changed_element_takes_its_value_and_the_smallest_form_of_its_position(share, most):
    base = random_words(2 * BLOCK, 2)
    new = changed_in(base, share)
    assert len(made(base, new)) / np.count_nonzero(base != new) < most


@st.composite
def tensors(draw):
    """A base, and what became of it: positions in clusters and far apart."""
    elements = draw(st.sampled_from([1, 8, 300, 70_000, BLOCK + 9]))
    base = random_words(elements, draw(st.sampled_from(ITEMSIZES)))
    new = base.copy()
    for start, length in draw(
        st.lists(st.tuples(st.integers(0, elements - 1), st.integers(1, 600)), max_size=6)
    ):
        new[start : start + length] += 1
    return base, new


@given(tensors())
@settings(max_examples=60, deadline=None)
def test_any_change_comes_back(pair):
    base, new = pair
    coded = made(base, new)
    blocks = list(decode_delta(coded, len(base), base.itemsize))
    assert all(np.all(np.diff(block.positions.astype(np.int64)) > 0) for block in blocks)
    patched = base.copy()
    coding.overwrite(patched, coded)
    assert np.array_equal(patched, new)
    assert digest_with(base, coded) == digest(new)


@given(tensors(), st.data())
@settings(max_examples=150, deadline=None)
def test_a_broken_delta_is_refused_or_is_another_delta_of_the_tensor(pair, data):
    base, new = pair
    coded = bytearray(made(base, new))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(coded) - 1))
        coded[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(coded)))
    for hostile in (coded, coded[:cut], coded + b"\0"):
        is_used(base, memoryview(bytes(hostile)))


@given(st.binary(max_size=400), st.sampled_from([0, 1, 200, BLOCK + 1, 2**48]))
@settings(max_examples=150, deadline=None)
def test_bytes_of_anyone_are_refused_or_are_a_delta(hostile, elements):
    try:
        for block in decode_delta(memoryview(hostile), elements, 2):
            assert int(block.positions[-1]) < min(BLOCK, elements - block.start)
    except CorruptVersion:
        pass


def is_used(base, coded):
    """Whether it is; what it would make is what it makes."""
    patched = base.copy()
    try:
        foretold = digest_with(base, coded)
    except CorruptVersion:
        return False
    coding.overwrite(patched, coded)
    assert digest(patched) == foretold
    return True


def table(*rows):
    return np.array(list(rows), coding._HEADER).tobytes()


@pytest.mark.parametrize(
    ("hostile", "attributes"),
    [
        (b"", {"fault": "table"}),
        (table((0, 2**32 - 1, 2**32 - 1)), {"fault": "size"}),
        (table((0, 1, 1)) + b"\0\0", {"fault": "size"}),
        (table((3, 1, 1)) + b"\0\0\0", {"fault": "form", "actual": 3}),
        (table((0, 9, 9)) + bytes(27), {"fault": "changes", "actual": 9, "expected": 8}),
        (table((0, 2, 1)) + b"\0" + bytes(4), {"fault": "positions"}),
        (table((0, 1, 1)) + b"\x08" + bytes(2), {"fault": "positions"}),
        (table((0, 1, 2)) + b"\xff\x00" + bytes(2), {"fault": "positions"}),
        (table((1, 1, 1)) + b"\0" + bytes(2), {"fault": "gaps"}),
        (table((0, 1, 19)) + bytes(21), {"fault": "gaps"}),
        (table((2, 1, 2)) + b"\1\0" + bytes(2), {"fault": "bits", "actual": 2, "expected": 8}),
        (table((2, 2, 1)) + b"\1" + bytes(4), {"fault": "positions"}),
    ],
)
def test_a_delta_that_lies_is_refused_in_words(hostile, attributes):
    with raises(CorruptDelta, **attributes):
        list(decode_delta(memoryview(hostile), 8, 2))


def test_a_delta_that_lies_allocates_nothing_large():
    rows = [(0, BLOCK, 2 * BLOCK)] * 40
    hostile = memoryview(table(*rows) + bytes(40 * 4 * BLOCK))
    tracemalloc.start()
    try:
        with pytest.raises(CorruptVersion):
            list(decode_delta(hostile, 40 * BLOCK, 2))
        with pytest.raises(CorruptVersion):
            list(decode_delta(memoryview(bytes(900)), 2**48, 8))
        assert tracemalloc.get_traced_memory()[1] < 64 * BLOCK, "of one block at a time"
    finally:
        tracemalloc.stop()
