"""Memory of a model's tensors, recognised as unchanged from version to version."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter, call, is_, methodcaller
from typing import Any, TypeVar
from weakref import ref

import torch

from ..tensors import FormCheck

T = TypeVar("T")

_MEMBERS = attrgetter("_modules", "_parameters", "_buffers")
_NOT_SAVED = attrgetter("_non_persistent_buffers_set")


class ModuleFingerprint:
    """Submodules and tensors of a module, and the tensors' memory, as they were at one time.

    It keeps none of them alive: a module may free or replace its tensors.

    Args:
        module: The module.
        tensors: Tensors of the module whose memory matters, as of :func:`distinct`.
    """

    def __init__(self, module: torch.nn.Module, tensors: Sequence[torch.Tensor]) -> None:
        modules = list(module.modules())
        self._modules = list(map(ref, modules))
        self._names, members = _members(modules)
        self._members = list(map(_reference, members))
        self._not_saved = [set(names) for names in map(_NOT_SAVED, modules)]
        self._tensors = list(map(ref, tensors))
        self._addresses = _addresses(tensors)
        self._form = FormCheck(tensors)

    def unchanged(self, module: torch.nn.Module) -> list[torch.Tensor] | None:
        """Return the tensors, or None if the module, or a tensor's form or memory, has changed."""
        modules, tensors = _resolve(self._modules), _resolve(self._tensors)
        if modules is None or tensors is None or modules[0] is not module:
            return None
        names, members = _members(modules)
        same_module = (
            names == self._names
            and all(map(is_, members, map(call, self._members)))
            and list(map(_NOT_SAVED, modules)) == self._not_saved
        )
        if not same_module or not self._form.fits(tensors):
            return None
        return tensors if _addresses(tensors) == self._addresses else None


def distinct(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return each tensor once, although it may have several names."""
    return list({id(tensor): tensor for tensor in tensors}.values())


def _resolve(references: Sequence[ref[T]]) -> list[T] | None:
    """Return the objects, or None if one is gone."""
    objects = [referent for referent in map(call, references) if referent is not None]
    return objects if len(objects) == len(references) else None


def _members(modules: Iterable[torch.nn.Module]) -> tuple[list[str], Iterator[Any]]:
    """Return the names of all submodules, parameters and buffers, and an iterator of these."""
    registries = list(chain.from_iterable(map(_MEMBERS, modules)))
    names = list(chain.from_iterable(map(methodcaller("keys"), registries)))
    return names, chain.from_iterable(map(methodcaller("values"), registries))


def _reference(member: Any) -> Callable[[], Any]:
    return _nothing if member is None else ref(member)


def _nothing() -> None:
    """Stand for the reference to a member that is None, such as a bias that a layer lacks."""


def _addresses(tensors: Iterable[torch.Tensor]) -> list[int]:
    return list(map(torch.Tensor.data_ptr, tensors))
