"""Network interface of a rank's collectives."""

from __future__ import annotations

import fcntl
import os
import socket
import struct

_GET_ADDRESS = 0x8915
"""``SIOCGIFADDR`` of Linux."""
_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def meet_through(host: str) -> None:
    """Let Gloo and NCCL use the interface that leads to a host, unless the user has named one.

    By itself, Gloo takes the address of the host's name, which on many hosts is loopback.
    """
    name = interface_to(host)
    if name is not None:
        for variable in _VARIABLES:
            os.environ.setdefault(variable, name)


def interface_to(host: str) -> str | None:
    """Return the interface from which a host is reached; None if it is not known."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # A datagram socket that connects only gets a route, and its interface's address.
            probe.connect((host, 9))  # sends nothing
            own = probe.getsockname()[0]
            return next((name for _, name in socket.if_nameindex() if _address(name) == own), None)
    except OSError:
        return None


def _address(interface: str) -> str | None:
    # struct ifreq: 16 bytes of the name with its final 0, then the address. The kernel writes
    # at most sizeof(struct ifreq), 40 bytes.
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking, _GET_ADDRESS, request)
        except OSError:
            return None
    # sockaddr_in: 2 bytes of family and 2 of port come before the address.
    return socket.inet_ntoa(answer[20:24])
