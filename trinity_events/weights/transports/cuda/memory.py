"""Device memory that other processes can map.

The CUDA runtime exports an allocation by a handle of 64 bytes (CUDA Runtime API, "Device
Management", ``cudaIpcGetMemHandle``). Torch exports its own memory to one receiver each. Here any
number of processes may map it, so these allocations come from the runtime, outside torch's
allocator.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch

from ....errors import GpuUnusable, VersionNotStored
from ...copy_streams import CopyStream, get_copy_stream

_LENT_AT_ONCE = 2 << 20


class DeviceBlock(NamedTuple):
    """Allocation of this process, or a mapped one of another process."""

    tensor: torch.Tensor
    """Bytes of the allocation, uint8 [bytes]; invalid once the block is released."""
    handle: bytes
    """Handle by which other processes map it."""


class DeviceMemory(Protocol):
    """Memory of one device that can be exported."""

    @property
    def device(self) -> str:
        """Name of the device, the same in every process of the host."""
        ...

    @property
    def lane(self) -> CopyStream:
        """Stream of copies into this memory."""
        ...

    def near(self, tensor: torch.Tensor) -> None:
        """Choose the device of a tensor that will be copied here, if no device is chosen yet."""
        ...

    def allocate(self, nbytes: int) -> DeviceBlock:
        """Allocate memory to export. Raises GpuUnusable if there is too little."""
        ...

    def free(self, block: DeviceBlock) -> None:
        """Free an allocation of this process that no process has mapped."""
        ...

    def borrow(self, device: str, handle: bytes, nbytes: int) -> DeviceBlock:
        """Map another process's memory. Raises VersionUnavailable if this process cannot."""
        ...

    def release(self, block: DeviceBlock) -> None:
        """Unmap another process's memory."""
        ...


class CudaMemory:
    """Implements :class:`DeviceMemory` with the CUDA runtime.

    Args:
        index: Index of the GPU. The default is the GPU of the first published tensor, or else the
            current GPU. Other threads have another current GPU.
    """

    def __init__(self, index: int | None = None) -> None:
        if not torch.cuda.is_available():
            raise GpuUnusable("absent")
        self._index = index

    @property
    def device(self) -> str:
        """UUID of the GPU."""
        return _uuid(self._get_index())

    @property
    def lane(self) -> CopyStream:
        """Copy stream of this memory."""
        return get_copy_stream(torch.device("cuda", self._get_index()))

    def near(self, tensor: torch.Tensor) -> None:
        """Choose the tensor's GPU, unless a GPU is chosen already."""
        if self._index is None and tensor.is_cuda:
            self._index = tensor.device.index

    def allocate(self, nbytes: int) -> DeviceBlock:
        """Allocate memory; if there is too little, first empty torch's cache.

        Raises GpuUnusable if there is too little.
        """
        if torch.cuda.get_allocator_backend() == "cudaMallocAsync":
            raise GpuUnusable("allocator")
        index, pointer = self._get_index(), ctypes.c_void_p()
        # A smaller allocation may share its handle with its neighbours.
        nbytes += -nbytes % _LENT_AT_ONCE
        with torch.cuda.device(index):
            runtime = _runtime()
            if runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(nbytes)):
                runtime.cudaGetLastError()  # clears the error, which torch would report as its own
                # Torch holds memory that it does not use, and that the runtime cannot take.
                torch.cuda.empty_cache()
                code = runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(nbytes))
                if code:
                    raise GpuUnusable("full", nbytes, reason=_format_error(code))
            handle = _Handle()
            code = runtime.cudaIpcGetMemHandle(ctypes.byref(handle), pointer)
            if code:
                reason = _format_error(code)
                runtime.cudaFree(pointer)
                raise GpuUnusable("export", reason=reason)
        block = DeviceBlock(_tensor(pointer, nbytes, index), bytes(handle.reserved))
        _lent[block.handle] = block
        return block

    def free(self, block: DeviceBlock) -> None:
        """Free an allocation."""
        # First: a reader of this process must not find memory that is freed.
        del _lent[block.handle]
        with torch.cuda.device(block.tensor.device):
            if _runtime().cudaFree(ctypes.c_void_p(block.tensor.data_ptr())):
                _runtime().cudaGetLastError()

    def borrow(self, device: str, handle: bytes, nbytes: int) -> DeviceBlock:
        """Map another process's memory.

        Raises VersionUnavailable if this process does not see that GPU, or the owner is gone.
        """
        if handle in _lent:  # CUDA does not map an allocation in its own process
            return _lent[handle]
        index = _find_index(device)
        if index is None:
            raise VersionNotStored(fault="hidden gpu", place=device)
        pointer, lent = ctypes.c_void_p(), _Handle.from_buffer_copy(handle.ljust(64, b"\0"))
        with torch.cuda.device(index):
            code = _runtime().cudaIpcOpenMemHandle(ctypes.byref(pointer), lent, _LAZY_PEER_ACCESS)
        if code:
            reason = _format_error(code)
            raise VersionNotStored(fault="unmapped gpu", place=device, reason=reason)
        return DeviceBlock(_tensor(pointer, nbytes, index), handle)

    def release(self, block: DeviceBlock) -> None:
        """Unmap a block, once all queued reads of it are done."""
        if block.handle in _lent:
            return
        # A queued read of unmapped memory ends the whole CUDA context.
        torch.cuda.synchronize(block.tensor.device)
        with torch.cuda.device(block.tensor.device):
            if _runtime().cudaIpcCloseMemHandle(ctypes.c_void_p(block.tensor.data_ptr())):
                _runtime().cudaGetLastError()

    def _get_index(self) -> int:
        if self._index is None:
            self._index = torch.cuda.current_device()
        return self._index


_lent: dict[bytes, DeviceBlock] = {}
"""Allocations of this process, by handle."""


class _Handle(ctypes.Structure):
    """Handle of the runtime: ``cudaIpcMemHandle_t``."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


_LAZY_PEER_ACCESS = ctypes.c_uint(1)
"""``cudaIpcMemLazyEnablePeerAccess``, the only defined flag."""


class _Array:
    """GPU memory in a form that torch wraps without a copy (``__cuda_array_interface__``)."""

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
    """Return the CUDA runtime that torch has loaded; its calls return 0 or an error number.

    Raises GpuUnusable if there is none.
    """
    major = (torch.version.cuda or "").partition(".")[0]
    # A runtime that torch is linked with is found through torch, whatever its file name.
    for name in (torch._C.__file__, f"libcudart.so.{major}"):
        with suppress(OSError, AttributeError):
            runtime = ctypes.CDLL(name)
            runtime.cudaGetErrorString.restype = ctypes.c_char_p
            return runtime
    raise GpuUnusable("runtime", version=str(torch.__version__))


def _format_error(code: int) -> str:
    runtime = _runtime()
    runtime.cudaGetLastError()  # clears the error, which torch would report as its own
    text: bytes = runtime.cudaGetErrorString(code)
    return text.decode()


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _find_index(device: str) -> int | None:
    return next(
        (index for index in range(torch.cuda.device_count()) if _uuid(index) == device), None
    )
