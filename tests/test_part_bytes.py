"""Where the bytes of a part lie, when its transport has them in several pieces."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trinity_events.weights.part_bytes import PartBytes, as_tensor
from trinity_events.weights.tensors import copy_bytes
from trinity_schemas import TensorEntry


@st.composite
def cut_and_asked(draw):
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=6))
    begin = draw(st.integers(0, sum(lengths)))
    return lengths, begin, draw(st.integers(0, sum(lengths) - begin))


def pieces(data: bytes, lengths):
    found, at = [], 0
    for length in lengths:
        found.append(memoryview(bytearray(data[at : at + length])))
        at += length
    return found


@given(cut_and_asked())
def test_any_span_is_found_however_it_is_cut(asked):
    lengths, begin, nbytes = asked
    data = bytes(range(sum(lengths)))
    there = PartBytes(pieces(data, lengths))
    assert bytes(there.span(begin, nbytes).tolist()) == data[begin : begin + nbytes]
    copied = torch.zeros(nbytes, dtype=torch.uint8)
    at = copied.data_ptr()
    for source, here in there.runs(begin, nbytes):
        copy_bytes(at, source, here)
        at += here
    assert bytes(copied.tolist()) == data[begin : begin + nbytes]


@pytest.mark.parametrize("cut", [4, 6, 8, 16])
def test_a_tensor_is_a_view_only_where_it_lies_together(cut):
    data = torch.arange(4, dtype=torch.float32)
    raw = bytes(data.numpy().tobytes())
    there = PartBytes(pieces(raw, [cut, 16 - cut]))
    entry = TensorEntry(name="a", dtype="float32", shape=(2, 2), offset=0)
    found = as_tensor(there, entry)
    assert torch.equal(found, data.view(2, 2))
    assert (found.data_ptr() == there.span(0, 1).data_ptr()) == (cut == 16)
