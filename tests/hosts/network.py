"""Hosts from namespaces, each with its own address, host name, process ids, ``/tmp`` and
``/dev/shm``.

1. A switch joins the hosts. Nothing leads out of it: what listens here is reached from here alone.
2. ``/mnt/shared`` is one folder on all hosts. ``/tmp`` is a host's own, and outlives its power-off.
3. A fault is silent: packets are dropped, and no process receives a reset.
4. Whatever is left of the hosts ends with the block of their network.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

from .clocks import build_clock

REPOSITORY = Path(__file__).parents[2]
SHARED = Path("/mnt/shared")
_SUBNET = "10.77.0"
_TOOLS = ("ip", "unshare", "nsenter", "mount")
_SHARED_MEMORY = "1g"
_NAMESPACES = ("--uts", "--ipc", "--mount", "--pid")
_ENTERED = ("--mount", "--uts", "--ipc", "--net", "--pid")

# The folders are bound before /tmp is the host's own: they may lie below it.
_BOOT = """
set -e
mount --make-rprivate /
hostname "$NAME"
mkdir -p "$HOST_FOLDER/tmp"
for path in "$CODE" "$PYTHON_FOLDER" "$FOLDER"; do
    case "$path" in /tmp/*)
        mkdir -p "$HOST_FOLDER$path"
        mount --bind "$path" "$HOST_FOLDER$path";;
    esac
done
mount -t tmpfs tmpfs /mnt
mkdir /mnt/shared
mount --bind "$FOLDER/shared" /mnt/shared
mount --bind "$FOLDER/hosts" /etc/hosts
mount --rbind "$HOST_FOLDER/tmp" /tmp
mount -t tmpfs -o "size=$SHARED_MEMORY" tmpfs /dev/shm
mount -t proc proc /proc
ip link set lo up
exec "$PYTHON" -S -E -c "$INIT"
"""
# The first process of a namespace inherits those whose parents have ended.
_INIT = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
print("up", flush=True)
while True:
    signal.sigwait([signal.SIGCHLD])
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
"""


def explain_absence() -> str:
    """Return why no hosts can be made here; empty if they can."""
    if sys.platform != "linux" or os.geteuid():
        return "hosts are made by root, on Linux"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"hosts are made with {', '.join(missing)}: install iproute2 and util-linux"
    if subprocess.run(["unshare", "--net", *_NAMESPACES, "--fork", "true"], check=False).returncode:
        return "this container may make no namespaces"
    return ""


class Host:
    """Host of a network, which is up after :meth:`boot`.

    Args:
        network: The network.
        name: Name of the host.
        number: Last number of its address.
        clock: Seconds by which its clock is ahead of the machine's.
    """

    def __init__(self, network: HostNetwork, name: str, number: int, clock: float) -> None:
        self.name = name
        self.address = f"{_SUBNET}.{number}"
        self._network = network
        self._number = number
        self._clock = clock
        self.space = f"{network.prefix}-{name}"
        self.port = f"p{number}"
        self._uplink = self.port
        """Device that the switch joins to the others."""
        self._outer: subprocess.Popen[str] | None = None
        self._init = 0

    def boot(self) -> None:
        """Start the host; its files are those of before a power-off."""
        switch, space = self._network.switch, self.space
        _ip("netns", "add", space)
        link = ("link", "add", self.port, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("-n", switch, *link)
        # The same address after a boot: the others would send to the old one for seconds.
        _ip("-n", space, "link", "set", "eth0", "address", f"02:00:00:00:00:{self._number:02x}")
        _ip("-n", space, "addr", "add", f"{self.address}/24", "dev", "eth0")
        _ip("-n", space, "link", "set", "eth0", "up")
        _ip("-n", switch, "link", "set", self.port, "up")
        self._uplink = self.port
        self.heal()
        folder = self._network.folder
        python = Path(sys.executable).resolve()
        log = folder / f"{self.name}.boot.log"
        with log.open("w") as messages:
            self._outer = subprocess.Popen(
                [
                    *("ip", "netns", "exec", space, "unshare", *_NAMESPACES, "--fork"),
                    *("--kill-child=KILL", "bash", "-c", _BOOT),
                ],
                env=os.environ
                | {
                    "NAME": f"host-{self.name}",
                    "FOLDER": str(folder),
                    "HOST_FOLDER": str(folder / self.name),
                    "CODE": str(REPOSITORY),
                    "PYTHON": str(python),
                    "PYTHON_FOLDER": str(python.parent.parent),
                    "SHARED_MEMORY": _SHARED_MEMORY,
                    "INIT": _INIT,
                },
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=messages,
                text=True,
                start_new_session=True,
            )
        assert self._outer.stdout is not None
        if self._outer.stdout.readline() != "up\n":
            raise RuntimeError(f"host {self.name} did not boot: {log.read_text()}")
        pid = self._outer.pid
        [self._init] = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())

    def start(self, *command: str, log: Path, env: Mapping[str, str] | None = None) -> HostProcess:
        """Start a command on the host, whose messages go to a file."""
        variables = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(
                str(REPOSITORY / part) for part in ("", "schemas", "workers")
            ),
            "HOME": "/tmp",
            "TRINITY_HOME": "/tmp/trinity",
            "OMP_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "160",
            **(build_clock(self._network.folder, self._clock) if self._clock else {}),
            **(env or {}),
        }
        with log.open("a") as messages:
            process = subprocess.Popen(
                [
                    *("nsenter", "--target", str(self._init), *_ENTERED, "--wd=/tmp", "--"),
                    *("env", "-i", *(f"{name}={value}" for name, value in variables.items())),
                    *command,
                ],
                stdin=subprocess.DEVNULL,
                stdout=messages,
                stderr=messages,
                start_new_session=True,
            )
        self._network.started.append(process)
        return HostProcess(process)

    def run(self, *command: str, log: Path) -> int:
        """Run a command on the host to its end, and return its status."""
        return self.start(*command, log=log).wait()

    def cut(self) -> None:
        """Drop all packets from and to the host; its link stays up."""
        _ip("-n", self._network.switch, "link", "set", self._uplink, "nomaster")

    def heal(self) -> None:
        """Let packets pass again."""
        _ip("-n", self._network.switch, "link", "set", self._uplink, "master", "br0")

    def power_off(self) -> None:
        """End all processes at once; no packet leaves the host any more."""
        self.cut()
        self.end()
        # The kernel removes the links of a namespace some time after it.
        _ip("-n", self._network.switch, "link", "del", self.port)
        _ip("netns", "del", self.space)

    def end(self) -> None:
        """End all processes; the kernel ends those of a namespace with its first one."""
        if self._outer is None:
            return
        if self._outer.poll() is None and self._init:
            os.kill(self._init, signal.SIGKILL)
        self._outer.wait()
        assert self._outer.stdout is not None
        self._outer.stdout.close()

    @contextmanager
    def impaired(self, *, delay: float, loss: float) -> Iterator[None]:
        """Carry each packet of the host late, and lose some, for the block.

        Args:
            delay: Seconds in each direction.
            loss: Part of the packets that are lost, in each direction.
        """
        switch, wire = self._network.switch, f"w{self._number}"
        code = "from tests.hosts.wire import disable_offloads; disable_offloads('eth0')"
        own = ("ip", "netns", "exec", self.space, sys.executable, "-c", code)
        subprocess.run(own, cwd=REPOSITORY, check=True)
        with subprocess.Popen(
            [
                *("ip", "netns", "exec", switch, sys.executable, "-m", "tests.hosts.wire"),
                *(self.port, wire, str(delay), str(loss)),
            ],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                assert process.stdout is not None
                if process.stdout.readline() != "ready\n":
                    raise RuntimeError(f"the packets of host {self.name} are not carried")
                self.cut()
                self._uplink = wire
                self.heal()
                yield
            finally:
                process.terminate()
                process.wait()
                self._uplink = self.port
                self.heal()


class HostProcess:
    """Process on a host."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def terminate(self) -> None:
        """Send SIGTERM to the command; the process that entered the host waits for its end."""
        pid = self._process.pid
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            os.kill(int(child), signal.SIGTERM)

    def poll(self) -> int | None:
        """Return the status of the command; None while it runs."""
        return self._process.poll()

    def wait(self, seconds: float = 120.0) -> int:
        """Return the status of the command, after its end."""
        return self._process.wait(seconds)


class HostNetwork:
    """Hosts by name, which are up for the block.

    Args:
        names: Names of the hosts.
        clocks: Seconds by which the clock of a host is ahead of the machine's.
    """

    def __init__(self, names: Sequence[str], clocks: Mapping[str, float] | None = None) -> None:
        self.prefix = f"te{secrets.token_hex(2)}"
        self.switch = f"{self.prefix}-switch"
        self.started: list[subprocess.Popen[bytes]] = []
        # Not a folder of pytest: the path of a socket in it is short.
        self.folder = Path(tempfile.mkdtemp(prefix="te-hosts-"))
        self.shared = self.folder / "shared"
        """What hosts see as :data:`SHARED`."""
        clocks = clocks or {}
        self.hosts = {
            name: Host(self, name, number, clocks.get(name, 0.0))
            for number, name in enumerate(names, 1)
        }
        self._exits = ExitStack()

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def __enter__(self) -> HostNetwork:
        self._exits.callback(self._remove)
        self.shared.mkdir()
        lines = [f"{host.address} host-{name}" for name, host in self.hosts.items()]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        try:
            _ip("netns", "add", self.switch)
            _ip("-n", self.switch, "link", "add", "br0", "type", "bridge")
            _ip("-n", self.switch, "link", "set", "br0", "up")
            for host in self.hosts.values():
                host.boot()
        except BaseException:
            self._exits.close()
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._exits.close()

    def _remove(self) -> None:
        for host in self.hosts.values():
            host.end()
            subprocess.run(["ip", "netns", "del", host.space], capture_output=True, check=False)
        subprocess.run(["ip", "netns", "del", self.switch], capture_output=True, check=False)
        for process in self.started:
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
