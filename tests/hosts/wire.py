"""``python -m tests.hosts.wire PORT DEVICE DELAY LOSS``: carry packets late, and lose some.

It does the work of netem, which not every kernel has. It runs in the switch's namespace, makes a
device for the switch, and carries packets between this and the host's port until SIGTERM.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import time

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_SIOCETHTOOL = 0x8946
_OFFLOADS = (0x17, 0x1F, 0x24, 0x2C)
"""ETHTOOL_STXCSUM, STSO, SGSO and SGRO: checksums and segments that hardware would make."""
_ALL_PROTOCOLS = 3
_LARGEST_FRAME = 65_536
_AT_ONCE = 256
"""Packets of one direction that are taken before those that are due are sent."""
_BUFFER = 32 << 20


def disable_offloads(device: str) -> None:
    """Let the kernel finish each packet of a device, as no hardware does."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for command in _OFFLOADS:
            value = ctypes.create_string_buffer(struct.pack("II", command, 0))
            request = struct.pack("16sP16x", device.encode(), ctypes.addressof(value))
            fcntl.ioctl(control, _SIOCETHTOOL, request)


def carry(port: str, device: str, delay: float, loss: float) -> None:
    """Carry packets between a host's port and a new device of the switch, until SIGTERM.

    Args:
        port: End of the host's link in this namespace.
        device: Name of the device that takes the port's place at the switch.
        delay: Seconds in each direction.
        loss: Part of the packets that are lost, in each direction.
    """
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH", device.encode(), _IFF_TAP | _IFF_NO_PI))
    raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS))
    raw.bind((port, _ALL_PROTOCOLS))
    raw.setblocking(False)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
    disable_offloads(port)
    subprocess.run(["ip", "link", "set", port, "promisc", "on"], check=True)
    subprocess.run(["ip", "link", "set", device, "txqueuelen", "10000", "up"], check=True)
    ended, end = os.pipe()
    signal.signal(signal.SIGTERM, lambda *_: os.close(end))
    print("ready", flush=True)
    packets: list[tuple[float, int, bool, bytes]] = []
    serial = 0
    while True:
        pause = None if not packets else max(0.0, packets[0][0] - time.monotonic())
        ready, _, _ = select.select([tap, raw, ended], [], [], pause)
        if ended in ready:
            return
        due = time.monotonic() + delay
        for source in ready:
            for frame in _receive(source, raw):
                serial += 1
                if random.random() >= loss:
                    heapq.heappush(packets, (due, serial, source is raw, frame))
        while packets and packets[0][0] <= time.monotonic():
            _, _, is_outwards, frame = heapq.heappop(packets)
            try:
                if is_outwards:
                    os.write(tap, frame)
                else:
                    raw.send(frame)
            except OSError:
                continue  # a full queue loses packets, as a switch's does


def _receive(source: int | socket.socket, raw: socket.socket) -> list[bytes]:
    """Return the packets that are here of one direction, at most :data:`_AT_ONCE`."""
    frames: list[bytes] = []
    try:
        while len(frames) < _AT_ONCE:
            if isinstance(source, int):
                frames.append(os.read(source, _LARGEST_FRAME))
                continue
            frame, address = raw.recvfrom(_LARGEST_FRAME)
            if address[2] != socket.PACKET_OUTGOING:
                frames.append(frame)
    except BlockingIOError:
        pass
    return frames


if __name__ == "__main__":
    carry(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
