"""Real broker processes on port 0, a proxy that breaks the network between them, certificates."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

import postroad

SOURCE = Path(postroad.__path__[0]).parent
# Far more than an idle machine needs: a busy one must not fail a test.
READY_S = 60.0
STOP_S = 30.0
PROXY_S = 30.0
POSTROAD = ("-m", "postroad")


@dataclass
class BrokerProcess:
    """One `postroad up`; restarts keep its data folder and its port."""

    name: str
    data: Path
    links: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    address: str = ""
    program: tuple[str, ...] = POSTROAD
    process: subprocess.Popen[str] | None = field(default=None, repr=False)

    @property
    def log(self) -> Path:
        return self.data.parent / f"{self.name}.log"

    def start(self) -> BrokerProcess:
        arguments = ["--name", self.name, "--listen", self.address or "127.0.0.1:0", "--data", str(self.data)]
        if "--metrics" not in self.extra:
            arguments += ["--metrics", "off"]
        for link in self.links:
            arguments += ["--link", link]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *self.program, "up", *arguments, *self.extra],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | {"PYTHONPATH": str(SOURCE), "PYTHONWARNINGS": "error"},
            )
        self.address = self._wait_ready()
        return self

    def _wait_ready(self) -> str:
        assert self.process is not None
        assert self.process.stdout is not None
        watchdog = threading.Timer(READY_S, self.process.kill)
        watchdog.start()
        try:
            line = self.process.stdout.readline()
        finally:
            watchdog.cancel()
        words = line.split()
        assert words[:2] == ["ready", self.name], f"{self.name} said {line!r}; log:\n{self.log.read_text()}"
        return words[2]

    def kill(self) -> None:
        """kill -9."""
        assert self.process is not None
        self.process.kill()
        self.reap()

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.reap()

    def pause(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def unpause(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def reap(self) -> int:
        assert self.process is not None
        code = self.process.wait(STOP_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def resident_bytes(self) -> int:
        assert self.process is not None
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


class Brokers:
    """Starts brokers; the fixture ends them all and fails the test if one died of a bug."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.all: list[BrokerProcess] = []

    def start(
        self, name: str, *links: str, extra: tuple[str, ...] = (), program: tuple[str, ...] = POSTROAD
    ) -> BrokerProcess:
        broker = BrokerProcess(name=name, data=self.folder / name, links=links, extra=extra, program=program)
        self.all.append(broker)
        return broker.start()

    def line(self, count: int) -> list[BrokerProcess]:
        found: list[BrokerProcess] = []
        for number in range(1, count + 1):
            found.append(self.start(f"b{number}", *(one.address for one in found[-1:])))
        return found

    def ring(self, count: int) -> list[BrokerProcess]:
        found = self.line(count - 1)
        found.append(self.start(f"b{count}", found[0].address, found[-1].address))
        return found

    def end(self) -> None:
        died: list[str] = []
        for broker in self.all:
            if broker.running:
                broker.unpause()
                broker.kill()
            elif broker.process is not None:
                broker.reap()
                if broker.process.returncode == 70:
                    died.append(f"{broker.name}:\n{broker.log.read_text()[-4000:]}")
        assert not died, "a broker died of a bug\n" + "\n".join(died)


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[Brokers]:
    started = Brokers(tmp_path)
    try:
        yield started
    finally:
        started.end()


class FaultProxy:
    """A TCP proxy in a thread of its own: cut, stall, delay, throttle, heal."""

    CHUNK = 16_384

    def __init__(self, target: str) -> None:
        host, port = target.rsplit(":", 1)
        self._target = (host, int(port))
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._refusing = False
        self._delay_s = 0.0
        self._bytes_per_s = 0.0
        self._flowing = asyncio.Event()
        self._flowing.set()
        self.address = ""
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(PROXY_S)

    def cut(self) -> None:
        """Drop every connection and refuse new ones until `heal`."""
        self._call(self._cut)

    def blip(self) -> None:
        """Drop every connection once; new ones are welcome."""
        self._call(self._drop)

    def stall(self) -> None:
        """Connections stay, no byte passes: the half-open link."""
        self._call(self._flowing.clear)

    def delay(self, seconds: float) -> None:
        self._delay_s = seconds

    def throttle(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s

    def heal(self) -> None:
        self._delay_s = self._bytes_per_s = 0.0
        self._refusing = False
        self._call(self._flowing.set)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PROXY_S)

    def _call(self, action: Callable[[], object]) -> None:
        done = threading.Event()

        def act() -> None:
            action()
            done.set()

        self._loop.call_soon_threadsafe(act)
        assert done.wait(PROXY_S)

    def _cut(self) -> None:
        self._refusing = True
        self._drop()

    def _drop(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        started.set()
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.05))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        far: asyncio.StreamWriter | None = None
        try:
            if not self._refusing:
                far_reader, far = await asyncio.open_connection(*self._target)
                pumps = [
                    asyncio.ensure_future(self._pump(reader, far)),
                    asyncio.ensure_future(self._pump(far_reader, writer)),
                ]
                try:
                    await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for pump in pumps:
                        pump.cancel()
                    await asyncio.gather(*pumps, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            for one in (writer, far):
                if one is not None:
                    one.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(self.CHUNK):
            await self._flowing.wait()
            if self._delay_s:
                await asyncio.sleep(self._delay_s)
            if self._bytes_per_s:
                await asyncio.sleep(len(data) / self._bytes_per_s)
            writer.write(data)
            await writer.drain()


@pytest.fixture
def proxied() -> Iterator[Callable[[str], FaultProxy]]:
    """`proxied(address)` puts a FaultProxy in front of it."""
    with contextlib.ExitStack() as stack:

        def make(target: str) -> FaultProxy:
            proxy = FaultProxy(target)
            stack.callback(proxy.close)
            return proxy

        yield make


class Certificates:
    """An authority and what it signs, as PEM files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"authority {folder.name}")])
        authority = (
            self._builder(self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.ca = folder / "ca.pem"
        self.ca.write_bytes(authority.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, *, host: str = "localhost", days: int = 1) -> tuple[str, str]:
        """(certificate file, key file) for `name`, valid for this machine, or another, and for so long."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        names = x509.SubjectAlternativeName(
            [
                x509.DNSName(host),
                *([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))] if host == "localhost" else []),
            ]
        )
        certificate = (
            self._builder(subject, key.public_key(), days)
            .add_extension(names, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        certificate_file, key_file = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        certificate_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return str(certificate_file), str(key_file)

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, days: int = 1
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=30))
            .not_valid_after(now + datetime.timedelta(days=days))
        )


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    folder = tmp_path / "certificates"
    folder.mkdir()
    return Certificates(folder)


@contextlib.asynccontextmanager
async def everywhere(
    client: postroad.Client, topic: str, where: str = ""
) -> AsyncIterator[postroad.Subscription]:
    """A subscription that every broker has confirmed: on a busy machine the first try may miss some."""
    while True:
        async with client.subscribe(topic, where) as events:
            if not events.missing:
                yield events
                return


def wait_until(holds: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Polls, since processes have no other way to tell."""
    give_up = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < give_up, f"{what}: not within {seconds} s"
        time.sleep(0.05)


@pytest.fixture
def until() -> Callable[..., None]:
    return wait_until
