"""Stand-ins for a GPU, which show what is done too early, or too late."""

import ctypes
import mmap
import os
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trinity_events.errors import VersionNotStored
from trinity_events.weights.copy_streams import HostCopyStream
from trinity_events.weights.tensors import as_buffer
from trinity_events.weights.transports.cuda.memory import DeviceBlock


class LateLane:
    """Copies nothing before it is waited for: who writes to a slot too early, or looks, is seen."""

    pinned = False

    def __init__(self):
        self._begun = []
        self._done = 0
        self.held_back_at = []

    def begin(self):
        pass

    def copy(self, target, source):
        self._begun.append((target, source))

    def mark(self):
        return len(self._begun)

    def wait(self, mark):
        for target, source in self._begun[self._done : mark]:
            target.copy_(source)
        self._done = max(self._done, mark)

    def hold_back(self, mark):
        self.held_back_at.append(mark)


class HostDevice:
    """A device whose memory is the host's; others see it for as long as its owner lives."""

    device = "the host's stand-in"

    def __init__(self, most=1 << 40):
        self.lane = LateLane()
        self._free_bytes = most
        self._descriptors = {}

    def near(self, tensor):
        pass

    def allocate(self, nbytes):
        assert nbytes <= self._free_bytes, "the device is full"
        self._free_bytes -= nbytes
        descriptor = os.memfd_create("trinity-test")
        os.ftruncate(descriptor, nbytes)
        handle = f"/proc/{os.getpid()}/fd/{descriptor}".encode()
        self._descriptors[handle] = descriptor
        memory = as_buffer(memoryview(mmap.mmap(descriptor, nbytes)))
        return DeviceBlock(memory.fill_(0xEE), handle)

    def free(self, block):
        self.lane.wait(self.lane.mark())
        block.tensor.fill_(0xDD)  # who still reads it is seen
        self._free_bytes += len(block.tensor)
        os.close(self._descriptors.pop(block.handle))

    def borrow(self, device, handle, nbytes):
        assert device == self.device
        try:
            descriptor = os.open(handle, os.O_RDONLY)
        except FileNotFoundError:
            raise VersionNotStored(fault="unmapped gpu", place=device) from None
        try:
            memory = mmap.mmap(descriptor, nbytes, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        return DeviceBlock(as_buffer(memoryview(memory)), handle)

    def release(self, block):
        pass


class HostRuntime:
    """Stands in for the CUDA runtime: memory of the host, and an error that stays until asked for.

    Args:
        most: Bytes that may be allocated.
    """

    def __init__(self, most):
        self.free_bytes = most
        self.last_error = 0
        self._made = {}

    def cudaMalloc(self, pointer, size):  # noqa: N802
        if size.value > self.free_bytes:
            return self._failed(2)
        memory = ctypes.create_string_buffer(size.value)
        pointer._obj.value = ctypes.addressof(memory)
        self._made[pointer._obj.value] = memory
        self.free_bytes -= size.value
        return 0

    def cudaFree(self, pointer):  # noqa: N802
        if pointer.value not in self._made:
            return self._failed(1)
        self.free_bytes += len(self._made.pop(pointer.value))
        return 0

    def cudaIpcGetMemHandle(self, handle, pointer):  # noqa: N802
        handle._obj.reserved[:8] = pointer.value.to_bytes(8, "little")
        return 0

    def cudaIpcOpenMemHandle(self, pointer, handle, flags):  # noqa: N802
        return self._failed(1)

    def cudaGetLastError(self):  # noqa: N802
        code, self.last_error = self.last_error, 0
        return code

    def cudaGetErrorString(self, code):  # noqa: N802
        return f"error {code}".encode()

    def _failed(self, code):
        self.last_error = code
        return code


class EagerLane(HostCopyStream):
    """Sees who gives it what was computed since it was told to begin, while that is watched."""

    def __init__(self, computing):
        self._computing = computing

    def begin(self):
        self._computing.fresh.clear()

    def copy(self, target, source):
        assert source.untyped_storage().data_ptr() not in self._computing.fresh, "too early"
        with self._computing.paused():
            target.copy_(source)


class Computing(TorchDispatchMode):
    """Notes in whose memory something was computed."""

    def __init__(self):
        super().__init__()
        self.fresh = set()
        self._watches = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if self._watches and isinstance(result, torch.Tensor) and not func.is_view:
            self.fresh.add(result.untyped_storage().data_ptr())
        return result

    @contextmanager
    def paused(self):
        self._watches = False
        yield
        self._watches = True
