"""What of a model may hold some of a version that never became whole there."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from weakref import ref

import torch

from ..errors import IncompatibleWeights
from .compatibility import first_uncovered, targets_of


class PartialLoads:
    """Which tensors of which models, until a version brings all of them.

    A version of some tensors, such as an adapter's, makes no model whole whose others are torn.
    """

    def __init__(self) -> None:
        self._torn: list[tuple[ref[torch.nn.Module], set[str]]] = []

    def add(self, module: torch.nn.Module, names: Collection[str]) -> None:
        """These of its tensors may hold anything."""
        if names:
            kept = [one for one in self._torn if one[0]() not in (None, module)]
            self._torn = [*kept, (ref(module), self._of(module) | set(names))]

    @contextmanager
    def until_whole(self, module: torch.nn.Module, names: Collection[str]) -> Iterator[None]:
        """In the block these tensors are filled, all of each.

        Raises IncompatibleWeights before it when others are torn, which are not tied to these.
        """
        torn = self._of(module)
        if not torn <= set(names):
            name = first_uncovered(targets_of(module), set(names), torn)
            if name is not None:
                raise IncompatibleWeights(
                    f"{name!r} may hold some of a version that never became whole in this model, "
                    "and is not brought: load or apply a full version first"
                )
        self.add(module, names)
        yield
        self._torn = [one for one in self._torn if one[0]() not in (None, module)]

    def _of(self, module: torch.nn.Module) -> set[str]:
        return next((names for one, names in self._torn if one() is module), set())
