"""Copies that stay as they are while what they are of changes."""

import torch

from tests.support.errors import raises
from tests.support.tensors import bits, identical
from tests.support.weight_versions import awkward
from trinity_events.weights.devices.staging_memory import StagingMemory
from trinity_events.weights.errors import FreedTensor


def test_copies_are_bit_for_bit_and_of_their_own():
    tensors = awkward()
    expected = {name: bits(tensor).clone() for name, tensor in tensors.items()}
    copies = StagingMemory().copy(list(tensors.values()))
    for tensor in tensors.values():
        tensor.zero_()
    for (name, raw), copy in zip(expected.items(), copies, strict=True):
        assert (copy.dtype, copy.shape) == (tensors[name].dtype, tensors[name].shape)
        assert copy.is_contiguous()
        assert identical(bits(copy), raw), name


def test_memory_that_was_freed_is_not_copied():
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    with raises(FreedTensor, tensor=""):
        StagingMemory().copy([torch.ones(2), tensor])


def test_memory_is_used_again_and_grows_with_what_is_asked_for():
    staging = StagingMemory()
    [first] = staging.copy([torch.ones(1000)])
    [again] = staging.copy([torch.zeros(900)])
    assert again.data_ptr() == first.data_ptr()
    assert (again == 0).all()
    assert (staging.copy([torch.full((900,), 2.0)])[0] == 2).all(), "of a layout seen before"
    [grown] = staging.copy([torch.full((5000,), 3.0)])
    assert (grown == 3).all()
    assert staging.copy([]) == []
