"""A server by hand, which gives the replies that a real one gives in no test."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


@contextmanager
def scripted_server(reply: Callable[[bytes], bytes]) -> Iterator[str]:
    """Answer each command, as its bytes came, with what ``reply`` returns; yield the URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection, suppress(ConnectionError):  # a client may reset it
                    while data := connection.recv(4096):
                        for command in data.split(b"*")[1:]:
                            connection.sendall(reply(command))

        threading.Thread(target=serve, daemon=True).start()
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}"
