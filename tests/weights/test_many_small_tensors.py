"""Many small tensors on the CPU: copied by size, without an operation of torch for each."""

import random

import pytest
import torch

from tests.support.published_parts import announcement
from tests.support.tensors import identical
from tests.support.torch_operations import Operations
from trinity_events.weights import (
    PartWriter,
    SharedMemoryStore,
    check_fit,
    install,
    pull_version,
)
from trinity_events.weights.publishing.part_writer import LastLayout
from trinity_events.weights.tensors import address, copy_all


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("aligned", [1, 8, 64])
def test_copies_of_any_sizes_and_places_are_those_of_memmove(seed, aligned):
    chance = random.Random(seed)
    memory, target = bytearray(chance.randbytes(1 << 20)), bytearray(1 << 20)
    expected = bytearray(target)
    sizes = [
        chance.choice((0, 1, 8, 100, 2048, 70_000, chance.randrange(3000))) for _ in range(300)
    ]
    origins, places, at = [], [], 0
    for nbytes in sizes:
        origins.append(chance.randrange((len(memory) - nbytes) // aligned) * aligned)
        places.append(at)
        at = (at + nbytes + chance.choice((0, 0, 500))) // aligned * aligned + aligned
        if at + 70_000 > len(target):
            at = 0
    # Later places may begin again from 0: those that would overlap are left out.
    copies, end = [], 0
    for place, origin, nbytes in zip(places, origins, sizes, strict=True):
        if place < end:
            break
        copies.append((place, origin, nbytes))
        end = place + nbytes
    chance.shuffle(copies)
    for place, origin, nbytes in copies:
        expected[place : place + nbytes] = memory[origin : origin + nbytes]
    into, out = address(memoryview(target)), address(memoryview(memory))
    copy_all(
        [into + place for place, _, _ in copies],
        [out + origin for _, origin, _ in copies],
        [nbytes for _, _, nbytes in copies],
    )
    assert target == expected
    assert len(copies) > 16


@pytest.mark.parametrize("gap", [0, 8])
def test_copies_of_one_size_are_moved_as_rows(gap):
    """From places that follow one another, and from one place."""
    memory = torch.arange(100 * (64 + gap), dtype=torch.uint8)
    begins = [number * (64 + gap) for number in range(100)]
    target = torch.zeros(100, 64, dtype=torch.uint8)
    into = [target.data_ptr() + 64 * number for number in range(100)]
    copy_all(into, [memory.data_ptr() + begin for begin in begins], [64] * 100)
    assert target.tolist() == [memory[begin : begin + 64].tolist() for begin in begins]
    copy_all(into, [memory.data_ptr()] * 100, [64] * 100)
    assert target.tolist() == [memory[:64].tolist()] * 100
    copy_all([], [], [])


@pytest.mark.parametrize("count", [200, 2000])
def test_operations_of_a_version_do_not_grow_with_its_tensors(part, count):
    store, layout = SharedMemoryStore(), LastLayout()
    tensors = {f"t{number}": torch.full((100,), float(number)) for number in range(count)}
    model = torch.nn.ParameterDict({name: torch.zeros(100) for name in tensors})
    for step in (1, 2):  # the second by the plans of the first
        at = part._replace(step=step)
        torch._foreach_add_(list(tensors.values()), step)
        with Operations() as operations:
            writer = PartWriter(store, at, last_layout=layout)
            writer.add_all(list(tensors), list(tensors.values()))
            ready = announcement(at, writer.seal())
            with pull_version(store, at.run_id, ready) as version:
                install(check_fit(model, version))
        for name, tensor in tensors.items():
            assert identical(model.get_parameter(name).detach(), tensor)
    assert operations.count <= 20
    store.close()
