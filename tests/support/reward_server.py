"""HTTP server of rewards in a process of its own, which is slow, dies, lies or floods by its path.

Usage: python -m tests.support.reward_server [PORT]

It prints its port. A question may name its path in ``data["mode"]``, at the path ``/by-question``.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.support.waits import child

FLOOD = 64 << 20


class Handler(BaseHTTPRequestHandler):
    """Answers by its path."""

    inside = most = 0
    tries: dict[str, int] = {}  # noqa: RUF012 - shared by all requests
    lock = threading.Lock()

    def do_GET(self) -> None:
        """Say that it is there."""
        if self.path.startswith("/refuses"):
            self.send_error(401)
        else:
            self._send(json.dumps({"most": Handler.most}).encode())

    def do_POST(self) -> None:
        """Judge, in the way that the path names."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        request = json.loads(body)
        mode = self.path.strip("/")
        if mode == "by-question":
            mode = request["question"]["data"].get("mode", "lengths")
        with Handler.lock:
            Handler.inside += 1
            Handler.most = max(Handler.most, Handler.inside)
            count = Handler.tries[mode] = Handler.tries.get(mode, 0) + 1
        try:
            self._answer(mode, request, count)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client has had enough
        finally:
            with Handler.lock:
                Handler.inside -= 1

    def _answer(self, mode: str, request: dict, count: int) -> None:
        answers = request.get("answers", [])
        lengths = [{"reward": float(len(answer["text"])), "score": 0.5} for answer in answers]
        reply = json.dumps({"rewards": lengths}).encode()
        if mode == "slow":
            time.sleep(3600)
        elif mode == "drips":
            self.send_response(200)
            self.end_headers()
            while True:
                self.wfile.write(b" ")
                time.sleep(0.01)
        elif mode == "dies":
            os._exit(3)
        elif mode == "floods":
            self.send_response(200)
            self.end_headers()
            for _ in range(FLOOD // 65536):
                self.wfile.write(b"x" * 65536)
        elif mode == "busy" and count < 3:
            self.send_error(503)
        elif mode == "hangs-up" and count < 2:
            self.close_connection = True
        elif mode == "broken":
            self.send_error(500)
        elif mode == "token":
            right = self.headers["Authorization"] == "Bearer secret"
            self._send(reply) if right else self.send_error(401)
        elif mode.endswith("chat/completions"):
            self._judge(mode, request, count)
        else:
            time.sleep(0.05 * (mode == "together"))
            self._send(LIES.get(mode, reply))

    def _judge(self, mode: str, request: dict, count: int) -> None:
        prompt = request["messages"][0]["content"]
        if mode.startswith("raw"):
            self._send(prompt.encode("latin-1"))
            return
        reply = f"The answer is short.\n{'7' if 'right' in prompt else '2.5'}"
        if mode.startswith("hesitant") and count < 3:
            reply = "I cannot say." if count < 2 else "Grade: 11"
        elif mode.startswith("mute"):
            reply = "no number"
        self._send(json.dumps({"choices": [{"message": {"content": reply}}]}).encode())

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


LIES = {
    "too few": b'{"rewards": []}',
    "no numbers": b'{"rewards": ["high", "high"]}',
    "infinite": b'{"rewards": [1e999, 1e999]}',
    "no json": b"<html>welcome</html>",
    "no rewards": b'{"scores": [1, 2]}',
}


@contextmanager
def reward_server(port: int = 0):
    """Start the server; yield its process and its URL."""
    command = [sys.executable, "-m", "tests.support.reward_server", str(port)]
    with child(command, stdout=-1) as process:
        yield process, f"http://127.0.0.1:{int(process.stdout.readline())}"


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    server.daemon_threads = True
    print(server.server_address[1], flush=True)
    server.serve_forever()
