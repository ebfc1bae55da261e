"""The pipeline over TLS: certificates are checked, and what is wrong with one is said."""

import asyncio
import shutil
import ssl
import subprocess
import threading
from contextlib import contextmanager, suppress

import pytest

from tests.support.event_histories import started
from tests.support.pipeline import publish_steps, reducer_task
from tests.support.waits import PATIENCE
from trinity_events import StepReady, subscribe
from trinity_events.errors import CertificateRefused, ServerUnreachable
from trinity_events.log import (
    AsyncPublisher,
    Publisher,
    RedisEventLog,
    SyncEventLog,
    new_producer,
    open_run,
)
from trinity_events.server import connect, connect_sync, open_client

OPENSSL = shutil.which("openssl")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(OPENSSL is None, reason="there is no openssl to certify with"),
]

CONFIG = """\
[req]
distinguished_name = nobody
[nobody]
[authority]
basicConstraints = critical, CA:TRUE
[named]
subjectAltName = DNS:localhost, IP:127.0.0.1
[misnamed]
subjectAltName = DNS:elsewhere.example
"""


class Authority:
    """Certifies keys, in a folder of its own."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir()
        self._config = folder / "openssl.cnf"
        self._config.write_text(CONFIG)
        self.certificate = folder / "ca.pem"
        self._openssl("req", "-x509", "-extensions", "authority", *self._key("ca"))

    def certify(self, name, extension):
        """A chain and a key."""
        self._openssl("req", *self._key(name), out=f"{name}.csr")
        by = ("-CA", str(self.certificate), "-CAkey", str(self.folder / "ca.key"))
        request = ("-in", str(self.folder / f"{name}.csr"), "-CAcreateserial", *by)
        extended = ("-extfile", str(self._config), "-extensions", extension)
        self._openssl("x509", "-req", *request, *extended, out=f"{name}.pem", config=False)
        return self.folder / f"{name}.pem", self.folder / f"{name}.key"

    def _key(self, name):
        made = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        return (*made, "-keyout", str(self.folder / f"{name}.key"), "-subj", f"/CN={name}")

    def _openssl(self, command, *args, out="ca.pem", config=True):
        where = ("-config", str(self._config)) if config else ()
        subprocess.run(
            [OPENSSL, command, *args, *where, "-out", str(self.folder / out)],
            check=True,
            capture_output=True,
        )


class Front:
    """Terminates TLS before the server on a unix socket, in a thread with a loop of its own."""

    def __init__(self, socket_path, context):
        self._path = socket_path
        self._context = context
        self._passing = set()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self):
        self._thread.start()
        assert self._ready.wait(PATIENCE)
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join(PATIENCE)

    async def _serve(self):
        self._loop, self._done = asyncio.get_running_loop(), asyncio.Event()
        # A client that refuses our certificate is what is tested, and no error of this side.
        self._loop.set_exception_handler(lambda *_: None)
        server = await asyncio.start_server(self._pass_on, "127.0.0.1", 0, ssl=self._context)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        async with server:
            await self._done.wait()
        if self._passing:  # clients are gone, or about to go: each closes what it opened
            await asyncio.wait(self._passing, timeout=PATIENCE)

    async def _pass_on(self, client_reader, client_writer):
        self._passing.add(asyncio.current_task())
        server_reader, server_writer = await asyncio.open_unix_connection(self._path)
        both = [
            asyncio.ensure_future(self._pump(client_reader, server_writer)),
            asyncio.ensure_future(self._pump(server_reader, client_writer)),
        ]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in both:
                task.cancel()
            for writer in (client_writer, server_writer):
                writer.close()
                with suppress(OSError, ssl.SSLError):
                    await writer.wait_closed()

    async def _pump(self, reader, writer):
        with suppress(OSError, ssl.SSLError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("tls") / "ca")


@contextmanager
def tls(authority, redis_url, extension="named", *, clients=False):
    """A front with a certificate; yields its URL, which trusts the authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    chain, key = authority.certify(f"server-{extension}", extension)
    context.load_cert_chain(chain, key)
    if clients:
        context.load_verify_locations(authority.certificate)
        context.verify_mode = ssl.CERT_REQUIRED
    with Front(redis_url.removeprefix("unix://"), context) as front:
        yield f"rediss://127.0.0.1:{front.port}?ssl_ca_certs={authority.certificate}"


async def test_the_whole_pipeline_runs_over_tls(authority, redis_url, run_id):
    with tls(authority, redis_url) as url:
        async with connect(url) as client, reducer_task(url, run_id):
            epoch = await open_run(client, run_id)
            log = RedisEventLog(client, run_id)
            await publish_steps(AsyncPublisher(log, epoch, new_producer("trainer")), [1])
            for group in (None, "eval"):
                options = {"start": "beginning", "group": group, "deadline": PATIENCE}
                async with subscribe(run_id, StepReady, redis_url=url, **options) as events:
                    event = await anext(aiter(events))
                    assert event.step == 1
                    await event.ack()
            with open_client(url) as sync_client:
                publisher = Publisher(SyncEventLog(sync_client, run_id), epoch, new_producer("a"))
                before = len(await log.read())
                publisher.publish(started(2))
                await asyncio.to_thread(publisher.close)
                assert len(await log.read()) == before + 1


async def refused(url):
    """Errors of both kinds of clients; what does not answer here never will."""
    with pytest.raises(ServerUnreachable) as caught:
        async with connect(url, patience=0.1):
            pass
    with pytest.raises(ServerUnreachable) as caught_sync:
        await asyncio.to_thread(connect_sync(url, patience=0.1).__enter__)
    return caught.value, caught_sync.value


async def test_a_certificate_of_an_unknown_authority_is_refused(authority, redis_url):
    with tls(authority, redis_url) as url:
        for error in await refused(url.partition("?")[0]):
            assert type(error) is CertificateRefused
            assert "unable to get local issuer certificate" in error.reason


async def test_a_certificate_of_another_name_is_refused_unless_one_asks_for_it(
    authority, redis_url
):
    with tls(authority, redis_url, "misnamed") as url:
        for error in await refused(url):
            assert type(error) is CertificateRefused
            assert "IP address mismatch" in error.reason
        async with connect(f"{url}&ssl_check_hostname=false") as client:
            assert await client.ping()


async def test_a_server_can_ask_for_a_certificate_of_the_client(authority, redis_url):
    chain, key = authority.certify("client", "named")
    with tls(authority, redis_url, clients=True) as url:
        await refused(url)
        async with connect(f"{url}&ssl_certfile={chain}&ssl_keyfile={key}") as client:
            assert await client.ping()


async def test_a_client_without_tls_is_refused_by_a_server_with_it(authority, redis_url):
    with tls(authority, redis_url) as url:
        for error in await refused(url.partition("?")[0].replace("rediss:", "redis:")):
            assert type(error) is ServerUnreachable


def test_commands_take_the_url_of_a_server_with_tls(authority, redis_url, cli):
    with tls(authority, redis_url) as url:
        result = cli("runs", "--json", env={"TRINITY_REDIS_URL": url})
    assert result.returncode == 0, result.stderr
