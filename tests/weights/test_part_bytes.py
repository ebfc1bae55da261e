"""Where the bytes of a part lie, when its transport has them in several pieces."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.errors import raises
from tests.support.tensors import identical
from trinity_events.weights.errors import CorruptTensor
from trinity_events.weights.part_bytes import PartBytes, as_tensor
from trinity_schemas import TensorEntry


def cut(data: bytes, *lengths: int) -> PartBytes:
    pieces, at = [], 0
    for length in lengths:
        pieces.append(memoryview(bytearray(data[at : at + length])))
        at += length
    return PartBytes(pieces)


@pytest.mark.parametrize("lengths", [(12,), (4, 8), (4, 0, 8), (0, 4, 4, 4)])
def test_what_lies_together_is_looked_at_where_it_lies(lengths):
    data = bytes(range(12))
    there = cut(data, *lengths)
    for begin in (0, 4, 8):
        span = there.span(begin, 4)
        assert bytes(span.tolist()) == data[begin : begin + 4]
        assert span.data_ptr() == there.address(begin, 4)


def test_a_tensor_is_a_view():
    data = torch.arange(6, dtype=torch.float32)
    there = cut(data.numpy().tobytes(), 8, 16)
    entry = TensorEntry(name="a", dtype="float32", shape=(2, 2), offset=8)
    tensor = as_tensor(there, entry)
    assert identical(tensor, data[2:].view(2, 2))
    assert tensor.data_ptr() == there.address(8, 16)


@pytest.mark.parametrize(("begin", "nbytes"), [(2, 4), (8, 8), (12, 1), (0, 13)])
def test_what_does_not_lie_together_is_refused(begin, nbytes):
    there = cut(bytes(12), 4, 8)
    with raises(CorruptTensor, fault="pieces", begin=begin, size=nbytes):
        there.span(begin, nbytes)


def test_nothing_lies_anywhere():
    assert cut(b"").address(0, 0) == 0
    assert not len(cut(b"").span(0, 0))


@pytest.mark.parametrize("shape", [(), (6,), (2, 3), (3, 1, 2), (0, 4)])
@pytest.mark.parametrize("begin", [0, 2, 4, 5])
def test_a_tensor_is_row_major_wherever_it_begins(shape, begin):
    elements = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    # What follows on it does not make up an element.
    there = cut(bytes(begin) + elements.numpy().tobytes() + b"rest.", begin, elements.nbytes + 5)
    tensor = there.tensor(begin, torch.float32, shape)
    assert identical(tensor, elements)
    assert tensor.is_contiguous()
    assert tensor.data_ptr() % 4 == 0, "other processors fault on what is not aligned"


def test_a_tensor_in_two_pieces_is_refused():
    with raises(CorruptTensor, fault="pieces", begin=4, size=4):
        cut(bytes(16), 6, 10).tensor(4, torch.float32, (1,))
