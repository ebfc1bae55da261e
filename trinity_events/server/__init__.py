"""Which Redis-compatible server to talk to, and the one we start ourselves."""

from .binary import BINARY_VARIABLE, find_binary
from .clients import address_of
from .clock import server_clock
from .connect import SOCKET_DEADLINE, connect, connect_sync, open_client
from .denied import denied
from .embedded import EmbeddedServer, trinity_home
from .eviction import warn_of_eviction
from .private import make_home, make_private, open_private
from .resolve import serving, serving_weights
from .url import LOG_SERVER, WEIGHTS_SERVER, Setting, redacted
from .wait import Wait

__all__ = [
    "BINARY_VARIABLE",
    "LOG_SERVER",
    "SOCKET_DEADLINE",
    "WEIGHTS_SERVER",
    "EmbeddedServer",
    "Setting",
    "Wait",
    "address_of",
    "connect",
    "connect_sync",
    "denied",
    "find_binary",
    "make_home",
    "make_private",
    "open_client",
    "open_private",
    "redacted",
    "server_clock",
    "serving",
    "serving_weights",
    "trinity_home",
    "warn_of_eviction",
]
