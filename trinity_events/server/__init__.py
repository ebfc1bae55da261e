"""Redis-compatible servers: their URLs and clients, and the embedded server."""

from .acl_errors import permission_error
from .binary import BINARY_VARIABLE, find_binary
from .clients import address_of
from .connect import SOCKET_DEADLINE, connect, connect_sync, open_client
from .deadline import Deadline
from .embedded import EmbeddedServer, trinity_home
from .private_files import make_home, make_private, open_private
from .resolve import serving, serving_weights
from .server_info import server_clock, server_info, warn_of_eviction
from .url import LOG_SERVER, WEIGHTS_SERVER, ServerSetting, redacted

__all__ = [
    "BINARY_VARIABLE",
    "LOG_SERVER",
    "SOCKET_DEADLINE",
    "WEIGHTS_SERVER",
    "Deadline",
    "EmbeddedServer",
    "ServerSetting",
    "address_of",
    "connect",
    "connect_sync",
    "find_binary",
    "make_home",
    "make_private",
    "open_client",
    "open_private",
    "permission_error",
    "redacted",
    "server_clock",
    "server_info",
    "serving",
    "serving_weights",
    "trinity_home",
    "warn_of_eviction",
]
