"""Messages reach a real server and a real program, and a fault of one changes nothing."""

import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import anyio
import msgspec
import pytest

from trinity_workers.config.sections.notify import NotifyConfig
from trinity_workers.launch.notifier import Message, notify

pytestmark = pytest.mark.processes
MESSAGE = Message(
    run="mine", event="failed", sentence="run mine failed: no", command="train a.yaml"
)


@pytest.fixture
def hook():
    """Server of webhooks: its URL, the bodies that it got, and the status that it answers."""
    bodies, status = [], [200]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(status[0])
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/secret", bodies, status
        server.shutdown()


def program(tmp_path, source: str) -> tuple[str, ...]:
    (tmp_path / "program.py").write_text(source)
    return (sys.executable, str(tmp_path / "program.py"), str(tmp_path / "got.json"))


async def send(message: Message = MESSAGE, **settings) -> list[str]:
    faults: list[str] = []
    await notify(NotifyConfig(**settings), message, faults.append)
    return faults


async def test_a_webhook_and_a_command_get_the_sentence_and_the_command(hook, tmp_path):
    url, bodies, _ = hook
    read = "import sys; open(sys.argv[1], 'w').write(sys.stdin.read())"
    assert await send(webhook=url, command=program(tmp_path, read)) == []
    [body] = bodies
    assert body == (tmp_path / "got.json").read_bytes()
    assert msgspec.json.decode(body) == {
        **{"run": "mine", "event": "failed", "sentence": "run mine failed: no"},
        "command": "train a.yaml",
        "text": "run mine failed: no\ntrain a.yaml",
    }


async def test_an_end_that_is_not_asked_for_sends_nothing(hook):
    url, bodies, _ = hook
    assert await send(webhook=url, events=("finished",)) == []
    assert bodies == []


async def test_a_url_of_the_environment_is_not_in_the_configuration(hook, monkeypatch):
    url, bodies, _ = hook
    monkeypatch.setenv("MY_HOOK", url)
    assert await send(webhook="$MY_HOOK") == []
    assert len(bodies) == 1
    monkeypatch.delenv("MY_HOOK")
    [fault] = await send(webhook="$MY_HOOK")
    assert "MY_HOOK" in fault


async def test_faults_are_reported_without_the_url_and_raise_nothing(hook, tmp_path):
    url, _, status = hook
    status[0] = 500
    failing = program(tmp_path, "import sys; sys.exit(3)")
    faults = await send(webhook=url, command=failing)
    assert sorted("answered 500" in fault or "ended with 3" in fault for fault in faults) == [
        True,
        True,
    ]
    faults += await send(webhook="http://127.0.0.1:1/secret", command=("./absent-program",))
    assert len(faults) == 4
    assert not any("secret" in fault for fault in faults)


async def test_a_program_that_hangs_is_killed_at_the_deadline(tmp_path):
    hanging = program(tmp_path, "import time; time.sleep(600)")
    with anyio.fail_after(30):
        [fault] = await send(command=hanging, deadline=0.5)
    assert "within 0.5 s" in fault
