"""Tensors of a model that a version fills: names, dtypes, shapes and memory, and their changes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from operator import attrgetter, call, is_, methodcaller
from typing import Any, TypeAlias, TypeVar
from weakref import ref

import torch

from trinity_schemas import WeightManifest

from .errors import AbsentTensor, UnfillableTensor, UnfitTensor
from .tensors import DTYPES, FormCheck, is_castable, is_freed

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
"""Prefixes that torch adds to the names of a module that it wraps."""
_DATA_PARALLEL = "module."
"""Prefix of DistributedDataParallel and DataParallel, which a child of a model may have too."""
_MARK = "_mod"
"""Text common to all wrappers, a fast test for models of many tensors."""

T = TypeVar("T")

_MEMBERS = attrgetter("_modules", "_parameters", "_buffers")
_NOT_SAVED = attrgetter("_non_persistent_buffers_set")
_Place: TypeAlias = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]


def find_targets(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that a version fills, under every name: parameters, and saved buffers.

    The tensors of a compiled or otherwise wrapped module are listed under plain names too.

    Raises IncompatibleWeights for a tensor on the meta device, which has no memory to fill.
    """
    # With duplicates: a version may name a tied tensor by either name.
    targets: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    # Some wrappers use plain names only in a state dict.
    saved = {plain_name(name) for name in (module.state_dict(keep_vars=True) if buffers else ())}
    targets |= {name: buffer for name, buffer in buffers.items() if plain_name(name) in saved}
    wrapped = {plain_name(name): target for name, target in targets.items() if _MARK in name}
    # Both names stay, since a publisher may be wrapped in another way than the reader.
    targets = wrapped | targets
    if _is_data_parallel(targets):
        bare = {name: plain_name(name).removeprefix(_DATA_PARALLEL) for name in targets}
        targets = {bare[name]: target for name, target in targets.items()} | targets
    for name, target in targets.items():
        if target.is_meta:  # a copy into it does nothing and raises nothing
            raise UnfillableTensor(name, fault="meta")
    return targets


def unwrapped_names(names: Collection[str]) -> list[str]:
    """Return the plain names of all tensors of a model, also of one that is data-parallel."""
    plain = list(map(plain_name, names))
    if not _is_data_parallel(names):
        return plain
    return [name.removeprefix(_DATA_PARALLEL) for name in plain]


def _is_data_parallel(names: Collection[str]) -> bool:
    """Return True if all tensors of a model are in a child that is called as DDP calls it.

    A model whose only child has that name loses the prefix on both sides, and so fits still.
    """
    return bool(names) and all(plain_name(name).startswith(_DATA_PARALLEL) for name in names)


def plain_name(name: str) -> str:
    """Return the name of a tensor as it was before the module was wrapped."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def compatible_target(
    targets: Mapping[str, torch.Tensor],
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    *,
    cast: bool = False,
) -> torch.Tensor:
    """Return the model's tensor that a tensor of the version fills.

    Args:
        targets: The model's tensors.
        name: Name of the version's tensor.
        dtype: Dtype of the version's tensor.
        shape: Shape that the version has for the model's tensor.
        cast: Allow another floating-point dtype in the model.

    Raises IncompatibleWeights when the tensor is missing or does not fit.
    """
    target = targets.get(name)
    if target is None:
        raise AbsentTensor(name, fault="model")
    castable = is_castable(target.dtype) and is_castable(DTYPES[dtype])
    if target.shape != shape or not (target.dtype == DTYPES[dtype] or (cast and castable)):
        raise UnfitTensor(
            name,
            fault="dtype" if castable and target.shape == shape else "form",
            in_model=f"{target.dtype} {list(target.shape)}",
            in_version=f"{DTYPES[dtype]} {list(shape)}",
            dtype=str(target.dtype),
        )
    if is_freed(target):
        raise UnfillableTensor(name, fault="freed")
    # A DTensor: this rank has a shard of it, and a copy of the whole does not fit.
    if type(target) is not torch.nn.Parameter and hasattr(target, "full_tensor"):
        raise UnfillableTensor(name, fault="spread")
    return target


def is_cast(targets: Mapping[str, torch.Tensor], manifests: Iterable[WeightManifest]) -> bool:
    """Return True if any of the version's tensors has another dtype in the model."""
    return any(
        targets[entry.name].dtype != DTYPES[entry.dtype]
        for manifest in manifests
        for entry in manifest.tensors
        if entry.name in targets
    )


def check_covered(targets: Mapping[str, torch.Tensor], names: Collection[str]) -> None:
    """Raise IncompatibleWeights when the model needs a tensor that these names do not cover."""
    name = find_uncovered(targets, names, targets)
    if name is not None:
        raise AbsentTensor(name, fault="version")


def find_uncovered(
    targets: Mapping[str, torch.Tensor], names: Collection[str], of: Collection[str]
) -> str | None:
    """Return the first of the names ``of`` that no given name covers, by itself or by a tie."""
    candidates = {
        name: target for name, target in _unnamed_targets(targets, names).items() if name in of
    }
    if not candidates:
        return None
    brought = _Memory([targets[name] for name in names])
    return next((name for name, target in candidates.items() if not brought.has(target)), None)


def find_ties(targets: Mapping[str, torch.Tensor], names: Collection[str]) -> dict[str, str]:
    """Map each other tensor that shares the memory of a named tensor to that tensor's name.

    Raises IncompatibleWeights when the other tensor has a different layout in that memory.
    """
    candidates = {} if len(names) == len(targets) else _unnamed_targets(targets, names)
    if not candidates:
        return {}
    brought = _Memory([targets[name] for name in names])
    places = {_place(targets[name]): name for name in names}
    ties: dict[str, str] = {}
    for name, target in candidates.items():
        if not brought.has(target):
            continue
        other = places.get(_place(target))
        if other is None:
            raise UnfillableTensor(name, fault="overlap")
        ties[name] = other
    return ties


def find_duplicates(targets: Mapping[str, torch.Tensor], names: Collection[str]) -> list[list[str]]:
    """Group the names that are one tensor in the model, such as tied embeddings."""
    # The fast path for models of many tensors: different addresses mean no duplicates.
    if len(set(map(torch.Tensor.data_ptr, map(targets.__getitem__, names)))) == len(names):
        return []
    groups: dict[object, list[str]] = {}
    for name in names:
        target = targets[name]
        if target.numel():
            # A subclass without an address is compared as an object.
            place = _place(target) if target.data_ptr() else id(target)
            groups.setdefault(place, []).append(name)
    return [sorted(group) for group in groups.values() if len(group) > 1]


def _unnamed_targets(
    targets: Mapping[str, torch.Tensor], names: Collection[str]
) -> dict[str, torch.Tensor]:
    """Return the nonempty tensors that are neither named nor the same object as a named one."""
    brought = {id(targets[name]) for name in names}
    return {
        name: target
        for name, target in targets.items()
        if name not in names and id(target) not in brought and target.numel()
    }


class _Memory:
    """Memory ranges of some tensors, used to find other tensors that are tied to them."""

    def __init__(self, tensors: Collection[torch.Tensor]) -> None:
        spans: list[tuple[int, int]] = []
        self._places: set[_Place] = set()
        """Layouts of the tensors whose elements are not dense in memory."""
        for tensor in tensors:
            if _is_dense(tensor):
                begin = tensor.data_ptr()
                spans.append((begin, begin + tensor.nbytes))
            else:
                self._places.add(_place(tensor))
        spans.sort()
        self._begins = [begin for begin, _ in spans]
        # Ranges may overlap: for each one the furthest end of all before it.
        self._ends = list(accumulate((end for _, end in spans), max))

    def has(self, tensor: torch.Tensor) -> bool:
        """Return True if the whole tensor lies in the memory of these tensors."""
        begin = tensor.data_ptr()
        if not begin:  # a subclass that does not expose its address
            return False
        before = bisect_right(self._begins, begin)
        most = self._ends[before - 1] if before else 0
        if begin < most and begin + _reach(tensor) <= most:
            return True
        return bool(self._places) and _place(tensor) in self._places


def _place(tensor: torch.Tensor) -> _Place:
    """Return a key that is equal for two tensors with the same elements in memory."""
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _reach(tensor: torch.Tensor) -> int:
    """Return the number of bytes from the first element to the end of the last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    # Strides count elements, and the result bytes.
    return (sum((size - 1) * step for size, step in steps) + 1) * tensor.itemsize


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return True if the elements are dense in memory, in any order of the dimensions."""
    if tensor.is_contiguous():
        return True
    # Dimensions from the slowest to the fastest: dense then means contiguous.
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()


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

    def find_unchanged(self, module: torch.nn.Module) -> list[torch.Tensor] | None:
        """Return the tensors, or None if the module, or a tensor's form or memory, has changed."""
        modules, tensors = _resolve(self._modules), _resolve(self._tensors)
        # A freed object may have left its address to another tensor.
        if modules is None or tensors is None or modules[0] is not module:
            return None
        names, members = _members(modules)
        same_module = (
            names == self._names
            # Identity: comparing tensors by value would read the whole model.
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
