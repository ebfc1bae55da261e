"""Memory of a model that is moved to the host while the model is idle, and back.

What moves are storages: every view of one, such as the flat buffers of Megatron's DDP or the shards
of FSDP2, stays the tensor that it was. A storage that is away has the size 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, Concatenate, Literal, ParamSpec, TypeAlias, TypeVar

import torch
from torch.distributed.tensor import DTensor

from trinity_events.errors import TrinityError

from .offload import FrozenOffload, Offload

Part: TypeAlias = Literal["parameters", "gradients", "optimizer"]
Tensors: TypeAlias = Callable[[], Iterable[torch.Tensor]]

P = ParamSpec("P")
R = TypeVar("R")

ALL: tuple[Part, ...] = ("parameters", "gradients", "optimizer")
"""All parts of a model that is trained."""


class MemoryAway(TrinityError):
    """A model is to compute while its parameters are away."""

    text = "the model's parameters were moved to the host: compute in a block of resident()"


def holding(
    *parts: Part,
) -> Callable[[Callable[Concatenate[Any, P], R]], Callable[Concatenate[Any, P], R]]:
    """Decorate a method of an engine, so that these parts are on the device while it runs."""

    def decorate(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
        @wraps(method)
        def held(engine: Any, /, *args: P.args, **keywords: P.kwargs) -> R:
            with engine.resident(*parts):
                return method(engine, *args, **keywords)

        return held

    return decorate


class OffloadedModel:
    """Parts of a model, each of which is on its device while a block asks for it.

    Outside of all such blocks a part is away, if ``offload`` says so. One thread uses it at a time.

    Args:
        offload: Parts that are moved away.
        parameters: Returns the model's parameters.
        gradients: Drops gradients that are no buffers, and returns the buffers.
        optimizer: Returns the optimizer's tensors; those that share memory with a parameter are
            the parameter's.
    """

    def __init__(
        self,
        offload: Offload | FrozenOffload,
        parameters: Tensors,
        gradients: Tensors = tuple,
        optimizer: Tensors = tuple,
    ) -> None:
        def optimizer_tensors() -> Iterator[torch.Tensor]:
            # In float32 the optimizer updates the model's parameters themselves.
            mine = {_key(parameter) for parameter in parameters()}
            return (tensor for tensor in optimizer() if _key(tensor) not in mine)

        self._parts: dict[Part, Movable] = {
            "parameters": Movable(parameters, moves=offload.param_offload)
        }
        if isinstance(offload, Offload):
            self._parts["gradients"] = Movable(
                gradients, moves=offload.grad_offload, keeps_values=False
            )
            self._parts["optimizer"] = Movable(optimizer_tensors, moves=offload.optimizer_offload)
        for part in self._parts.values():
            part.leave_if_idle()

    @contextmanager
    def resident(self, *parts: Part) -> Iterator[None]:
        """Keep these parts on the device for the block; by default the parameters. Blocks nest."""
        with ExitStack() as exits:
            for name in parts or ("parameters",):
                if name in self._parts:
                    exits.enter_context(self._parts[name].held())
            yield

    def is_resident(self, part: Part = "parameters") -> bool:
        """Return True if the part stays on the device after a block that begins now."""
        return part not in self._parts or self._parts[part].is_held

    def guard(self, module: torch.nn.Module) -> None:
        """Let the module raise MemoryAway, where it is called while its parameters are away."""
        if not self.is_resident():
            # Before FSDP's own hook, which would gather the empty shards.
            module.register_forward_pre_hook(self.check_resident, prepend=True)

    def check_resident(self, *_: Any) -> None:
        """Raise MemoryAway if the parameters are away: torch would read memory that was freed."""
        if not self.is_resident():
            raise MemoryAway()


def optimizer_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a torch optimizer: what it updates, and its state."""
    for group in optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


class Movable:
    """Storages of one part, and their copies on the host while it is away.

    It begins on the device; :meth:`leave_if_idle` moves it.

    Args:
        tensors: Returns the tensors of the part.
        moves: If False, the part always stays.
        keeps_values: If False, values are dropped, and are zero when the part comes back.
    """

    def __init__(self, tensors: Tensors, *, moves: bool = True, keeps_values: bool = True) -> None:
        self._tensors = tensors
        self._moves = moves
        self._keeps_values = keeps_values
        self._blocks = 0
        self._away: list[tuple[torch.UntypedStorage, int, torch.Tensor | None]] = []

    @property
    def is_held(self) -> bool:
        """Return True if the part cannot leave now."""
        return not self._moves or self._blocks > 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Bring the part back, and keep it for the block."""
        self._restore()
        self._blocks += 1
        try:
            yield
        finally:
            self._blocks -= 1
            self.leave_if_idle()

    def leave_if_idle(self) -> None:
        """Move the part away, unless a block holds it."""
        if self.is_held or self._away:
            return
        storages = {
            # By its address in C++: tensors that share a storage move it once.
            storage._cdata: storage
            for storage in (_resizable_storage(tensor) for tensor in self._tensors())
            if storage.nbytes()
        }
        copies = [
            _copied_to_host(storage) if self._keeps_values else None
            for storage in storages.values()
        ]
        # Before the memory is freed: copies and earlier kernels may still read it.
        _synchronize(storages.values())
        for storage, copy in zip(storages.values(), copies, strict=True):
            self._away.append((storage, storage.nbytes(), copy))
            # Not `del`: views of the storage stay valid objects, and get their values back later.
            storage.resize_(0)

    def _restore(self) -> None:
        storages = [storage for storage, _, _ in self._away]
        while self._away:
            storage, size, copy = self._away[-1]
            storage.resize_(size)
            if copy is None:
                _view_bytes(storage).zero_()
            else:
                _view_bytes(storage).copy_(copy, non_blocking=True)
            self._away.pop()  # only now: a device without room leaves the copies whole
        _synchronize(storages)


def _copied_to_host(storage: torch.UntypedStorage) -> torch.Tensor:
    # From pageable memory a copy waits for the CPU, and cannot overlap with others.
    pinned = storage.device.type == "cuda"
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
    return copy.copy_(_view_bytes(storage), non_blocking=True)


def _view_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the storage's bytes as a tensor that shares them."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _synchronize(storages: Iterable[torch.UntypedStorage]) -> None:
    """Wait for pending work on the storages' GPU, which may read or write them."""
    if any(storage.device.type == "cuda" for storage in storages):
        torch.cuda.synchronize()


def _resizable_storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Return the tensor's storage; one that was mapped or read from a file is copied first."""
    local = _local(tensor)
    # Memory of a mapped file or of NumPy cannot be freed by resize_().
    if not local.untyped_storage().resizable():
        local.data = local.data.clone()
    return local.untyped_storage()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _key(tensor: torch.Tensor) -> int:
    return int(_local(tensor).untyped_storage()._cdata)
