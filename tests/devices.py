"""Stand-ins for a GPU, which show what is done too early, or too late."""

import mmap
import os

from trinity_events.errors import VersionUnavailable
from trinity_events.weights.tensors import as_buffer
from trinity_events.weights.transports.cuda.memory import Block


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
        self._left = most
        self._descriptors = {}

    def allocate(self, nbytes):
        assert nbytes <= self._left, "the device is full"
        self._left -= nbytes
        descriptor = os.memfd_create("trinity-test")
        os.ftruncate(descriptor, nbytes)
        handle = f"/proc/{os.getpid()}/fd/{descriptor}".encode()
        self._descriptors[handle] = descriptor
        memory = as_buffer(memoryview(mmap.mmap(descriptor, nbytes)))
        return Block(memory.fill_(0xEE), handle)

    def free(self, block):
        self.lane.wait(self.lane.mark())
        block.tensor.fill_(0xDD)  # who still reads it is seen
        self._left += len(block.tensor)
        os.close(self._descriptors.pop(block.handle))

    def borrow(self, device, handle, nbytes):
        assert device == self.device
        try:
            descriptor = os.open(handle, os.O_RDONLY)
        except FileNotFoundError:
            raise VersionUnavailable("its publisher ended") from None
        try:
            memory = mmap.mmap(descriptor, nbytes, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        return Block(as_buffer(memoryview(memory)), handle)

    def let_go(self, block):
        pass
