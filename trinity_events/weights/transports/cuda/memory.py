"""Memory of a device that another process can look at.

The CUDA runtime lends an allocation by a handle of 64 bytes (CUDA Runtime API, "Device Management",
``cudaIpcGetMemHandle``). Torch lends its own memory to one receiver each; here any number may come,
so these allocations are the runtime's, beside torch's allocator.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch

from ....errors import GpuUnusable, VersionUnavailable
from ...devices.copy_streams import CopyStream, copy_stream_of

_LENT_AT_ONCE = 2 << 20


class Block(NamedTuple):
    """An allocation of this process's, or another's that it looks at."""

    tensor: torch.Tensor
    """Its bytes, uint8 [bytes]. Not to be touched once it was given back."""
    handle: bytes
    """By which other processes find it."""


class DeviceMemory(Protocol):
    """Memory of one device."""

    @property
    def device(self) -> str:
        """Which it is, by the same name in every process of the host."""
        ...

    @property
    def lane(self) -> CopyStream:
        """Takes copies into it."""
        ...

    def near(self, tensor: torch.Tensor) -> None:
        """A tensor that will be copied into it, before anything was asked of it; or later."""
        ...

    def allocate(self, nbytes: int) -> Block:
        """Memory to lend. Raises GpuUnusable when there is not so much."""
        ...

    def free(self, block: Block) -> None:
        """Give back what was allocated here, and is lent to nobody."""
        ...

    def borrow(self, device: str, handle: bytes, nbytes: int) -> Block:
        """Look at another process's. Raises VersionUnavailable when it is not to be seen here."""
        ...

    def let_go(self, block: Block) -> None:
        """Look at it no more."""
        ...


class CudaMemory:
    """Implements :class:`DeviceMemory` by CUDA's own calls.

    Args:
        index: Of the GPU; by default that of the first tensor on one that is published, or the
            current one where none is. Other threads have another current one.
    """

    def __init__(self, index: int | None = None) -> None:
        if not torch.cuda.is_available():
            raise GpuUnusable(
                "weights that travel by a GPU's memory need a GPU, and this process sees none: "
                "publish with --weights shm"
            )
        self._index = index

    @property
    def device(self) -> str:
        """The GPU's UUID."""
        return _uuid(self._used())

    @property
    def lane(self) -> CopyStream:
        """A stream of its own."""
        return copy_stream_of(torch.device("cuda", self._used()))

    def near(self, tensor: torch.Tensor) -> None:
        """Be on the tensor's GPU, unless it is settled which one it is."""
        if self._index is None and tensor.is_cuda:
            self._index = tensor.device.index

    def allocate(self, nbytes: int) -> Block:
        """Allocate; what torch keeps of memory that it does not need is given back first if needed.

        Raises GpuUnusable when there is not so much.
        """
        if torch.cuda.get_allocator_backend() == "cudaMallocAsync":
            raise GpuUnusable(
                "torch with backend:cudaMallocAsync copies to no memory beside its own: leave that "
                "out of PYTORCH_CUDA_ALLOC_CONF, or publish with --weights shm"
            )
        index, pointer = self._used(), ctypes.c_void_p()
        # What is smaller may be lent together with its neighbours, by the same handle.
        nbytes += -nbytes % _LENT_AT_ONCE
        with torch.cuda.device(index):
            runtime = _runtime()
            if runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(nbytes)):
                runtime.cudaGetLastError()  # else torch would take it for its own
                torch.cuda.empty_cache()
                code = runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(nbytes))
                if code:
                    raise GpuUnusable(
                        f"the GPU has no {nbytes} bytes left for a weight version "
                        f"({_words(code)}): publish with --weights shm"
                    )
            handle = _Handle()
            code = runtime.cudaIpcGetMemHandle(ctypes.byref(handle), pointer)
            if code:
                why = _words(code)
                runtime.cudaFree(pointer)
                raise GpuUnusable(
                    f"the GPU's memory cannot be lent to other processes ({why}): publish "
                    "with --weights shm"
                )
        block = Block(_tensor(pointer, nbytes, index), bytes(handle.reserved))
        _lent[block.handle] = block
        return block

    def free(self, block: Block) -> None:
        """Free it."""
        del _lent[block.handle]
        with torch.cuda.device(block.tensor.device):
            if _runtime().cudaFree(ctypes.c_void_p(block.tensor.data_ptr())):
                _runtime().cudaGetLastError()

    def borrow(self, device: str, handle: bytes, nbytes: int) -> Block:
        """Map another process's memory.

        Raises VersionUnavailable when this process does not see that GPU, or the owner is gone.
        """
        if handle in _lent:  # CUDA lends nothing to its owner
            return _lent[handle]
        index = _index_of(device)
        if index is None:
            raise VersionUnavailable(
                f"it lies in the memory of GPU {device}, which this process does not see: add it "
                "to CUDA_VISIBLE_DEVICES, or publish with --weights shm"
            )
        pointer, lent = ctypes.c_void_p(), _Handle.from_buffer_copy(handle.ljust(64, b"\0"))
        with torch.cuda.device(index):
            code = _runtime().cudaIpcOpenMemHandle(ctypes.byref(pointer), lent, _LAZY_PEER_ACCESS)
        if code:
            raise VersionUnavailable(
                f"the memory of GPU {device} that it lies in cannot be seen from here "
                f"({_words(code)}): its publisher ended, or is in another container"
            )
        return Block(_tensor(pointer, nbytes, index), handle)

    def let_go(self, block: Block) -> None:
        """Unmap it, once nothing that the GPU was told to do reads it."""
        if block.handle in _lent:
            return
        torch.cuda.synchronize(block.tensor.device)
        with torch.cuda.device(block.tensor.device):
            if _runtime().cudaIpcCloseMemHandle(ctypes.c_void_p(block.tensor.data_ptr())):
                _runtime().cudaGetLastError()

    def _used(self) -> int:
        if self._index is None:
            self._index = torch.cuda.current_device()
        return self._index


_lent: dict[bytes, Block] = {}
"""What this process allocated, by its handle."""


class _Handle(ctypes.Structure):
    """As the runtime has it: ``cudaIpcMemHandle_t``."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


_LAZY_PEER_ACCESS = ctypes.c_uint(1)
"""``cudaIpcMemLazyEnablePeerAccess``, the only flag that there is."""


class _Array:
    """Memory of a GPU as torch takes it, without a copy (``__cuda_array_interface__``)."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }


def _tensor(pointer: ctypes.c_void_p, nbytes: int, index: int) -> torch.Tensor:
    assert pointer.value is not None
    return torch.as_tensor(_Array(pointer.value, nbytes), device=torch.device("cuda", index))


@lru_cache
def _runtime() -> Any:
    """The CUDA runtime that torch has loaded. Its calls return 0, or the number of an error.

    Raises GpuUnusable when there is none.
    """
    major = (torch.version.cuda or "").partition(".")[0]
    # What torch is linked with is found through torch, whatever its file is called.
    for name in (torch._C.__file__, f"libcudart.so.{major}"):
        with suppress(OSError, AttributeError):
            runtime = ctypes.CDLL(name)
            runtime.cudaGetErrorString.restype = ctypes.c_char_p
            return runtime
    raise GpuUnusable(
        f"torch {torch.__version__} has not loaded a CUDA runtime that can be called: publish "
        "with --weights shm"
    )


def _words(code: int) -> str:
    runtime = _runtime()
    runtime.cudaGetLastError()  # else torch would take it for its own
    said: bytes = runtime.cudaGetErrorString(code)
    return said.decode()


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _index_of(device: str) -> int | None:
    return next((one for one in range(torch.cuda.device_count()) if _uuid(one) == device), None)
