"""Track tensors left partially overwritten by an interrupted load."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from weakref import ref

import torch

from ..compatibility import find_targets, find_uncovered
from ..errors import UnfillableTensor


class PartialLoads:
    """Partially overwritten tensors of each model, until a version fills all of them.

    A subset, such as an adapter, does not repair a model whose other tensors are torn.
    """

    def __init__(self) -> None:
        self._torn: list[tuple[ref[torch.nn.Module], set[str]]] = []

    def add(self, module: torch.nn.Module, names: Collection[str]) -> None:
        """Record that these tensors of the module may hold any bytes."""
        if names:
            # Freed modules are dropped on the way.
            others = [entry for entry in self._torn if entry[0]() not in (None, module)]
            self._torn = [*others, (ref(module), self._torn_names(module) | set(names))]

    @contextmanager
    def until_whole(self, module: torch.nn.Module, names: Collection[str]) -> Iterator[None]:
        """Track these tensors as torn until the block, which fills them, has ended.

        Raises IncompatibleWeights at the start if other tensors, not tied to these, are torn.
        """
        torn = self._torn_names(module)
        if not torn <= set(names):
            name = find_uncovered(find_targets(module), set(names), torn)
            if name is not None:
                raise UnfillableTensor(name, fault="torn")
        # Before the block writes anything, and without a finally: an error leaves the names torn.
        self.add(module, names)
        yield
        self._torn = [entry for entry in self._torn if entry[0]() not in (None, module)]

    def _torn_names(self, module: torch.nn.Module) -> set[str]:
        return next((names for reference, names in self._torn if reference() is module), set())
