"""The systems that are compared: how each is started, told apart and spoken to.

Settings are each system's defaults except where they would make the comparison unfair to it: limits that
drop messages are lifted, persistence nobody asked for is off, Nagle's algorithm is off where it is an option.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from postroad import __version__, kernel
from postroad.bench.amqp import Amqp
from postroad.bench.native import Native
from postroad.bench.processes import Running, free_port
from postroad.bench.sessions import Mqtt, Nats, Resp, Session
from postroad.errors import PeerError, UsageError

IN_FLIGHT_EVENTS: Final = 4096  # a busy publisher stops when its slowest subscriber is this far behind
_SBIN: Final = "/usr/sbin:/usr/local/sbin"  # where Debian keeps servers; not on everybody's path
_RABBIT: Final = "/usr/lib/rabbitmq/bin/rabbitmq-server"  # the one on the path changes user and folder


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    name: str
    session: type[Session]
    start: Callable[[Running, Path, int], None]  # brokers in a line; all but ours ignore more than one
    version: Callable[[], str | None]  # None: not installed
    settings: str
    syncs: str  # what is on disk when a publish is acknowledged
    in_flight: int = IN_FLIGHT_EVENTS


def _program(name: str) -> str | None:
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name, path=f"{os.environ['PATH']}:{_SBIN}")


def program(name: str) -> str:
    path = _program(name)
    if path is None:
        raise UsageError(f"{name} is not installed; `make bench-peers` installs the peers")
    return path


def version(name: str, option: str, pattern: str) -> Callable[[], str | None]:
    def ask() -> str | None:
        path = _program(name)
        if path is None:
            return None
        said = subprocess.run([path, option], capture_output=True, text=True, timeout=20, check=False)
        match = re.search(pattern, said.stdout + said.stderr)
        return match[1] if match else "unknown"

    return ask


def own_version() -> str:
    # The slower reference kernel is another thing to measure than the compiled one.
    kind = "compiled" if kernel.COMPILED else "reference"
    return f"{__version__} ({kind} kernel)"


def rabbit_version() -> str | None:
    library = Path(_RABBIT).parent.parent / "lib"
    folders = sorted(library.glob("rabbitmq_server-*")) if Path(_RABBIT).exists() else []
    return folders[-1].name.partition("-")[2] if folders else None


def start_postroad(running: Running, folder: Path, brokers: int) -> None:
    for number in range(brokers):
        command = [sys.executable, "-m", "postroad", "up", "--name", f"b{number + 1}"]
        command += ["--listen", "127.0.0.1:0", "--data", str(folder / f"data{number + 1}")]
        if running.addresses:
            host, port = running.addresses[-1]
            command += ["--link", f"{host}:{port}"]
        running.wait_ready(running.spawn(command, folder))


def _start_mosquitto(running: Running, folder: Path, brokers: int) -> None:
    del brokers
    port = free_port()
    config = folder / "mosquitto.conf"
    config.write_text(
        f"listener {port} 127.0.0.1\nallow_anonymous true\npersistence false\nset_tcp_nodelay true\n"
        "max_queued_messages 0\nmax_queued_bytes 0\nlog_type error\nuser root\n"
    )
    running.wait_port(port, running.spawn([program("mosquitto"), "-c", str(config)], folder))


def _start_redis(running: Running, folder: Path, brokers: int) -> None:
    del brokers
    port = free_port()
    command = [program("redis-server"), "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    command += ["--appendonly", "no", "--dir", str(folder)]
    command += ["--client-output-buffer-limit", "pubsub 0 0 0"]
    running.wait_port(port, running.spawn(command, folder))


def _start_nats(running: Running, folder: Path, brokers: int) -> None:
    del brokers
    port = free_port()
    config = folder / "nats.conf"
    config.write_text(f'host: "127.0.0.1"\nport: {port}\nping_interval: "1h"\nping_max: 100\n')
    running.wait_port(port, running.spawn([program("nats-server"), "-c", str(config)], folder))


def start_rabbit(running: Running, folder: Path, brokers: int) -> None:
    """More than one form a cluster, each joining those before it while it starts."""
    names_port = free_port()
    # Erlang's name server would stay behind as a daemon; started here it ends with the rest.
    names = running.spawn(
        [program("epmd"), "-port", str(names_port), "-address", "127.0.0.1"], folder, measured=False
    )
    running.wait_port(names_port, names)
    running.addresses.clear()
    plugins = folder / "enabled_plugins"
    plugins.write_text("[].\n")
    ports = [free_port() for _ in range(brokers)]
    config = folder / "rabbitmq.conf"
    if brokers > 1:
        nodes = [
            f"cluster_formation.classic_config.nodes.{number} = bench{port}@localhost"
            for number, port in enumerate(ports, 1)
        ]
        nodes.insert(0, "cluster_formation.peer_discovery_backend = classic_config")
        config.write_text("\n".join([*nodes, ""]))
    for port in ports:
        environment = {
            "HOME": str(folder),
            "ERL_EPMD_PORT": str(names_port),
            "RABBITMQ_NODENAME": f"bench{port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(port),
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_MNESIA_BASE": str(folder),
            "RABBITMQ_LOG_BASE": str(folder),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(plugins),
            "RABBITMQ_CONFIG_FILE": str(config) if brokers > 1 else str(folder / "none"),
            "RABBITMQ_CONF_ENV_FILE": str(folder / "none-env"),
            "LC_ALL": "C.UTF-8",
        }
        running.wait_port(port, running.spawn([_RABBIT], folder, environment=environment))


SYSTEMS: Final = {
    system.name: system
    for system in (
        System(
            name="postroad",
            session=Native,
            start=start_postroad,
            version=own_version,
            settings="plain mode, defaults",
            syncs="nothing (plain mode keeps events in memory)",
        ),
        System(
            name="mosquitto",
            session=Mqtt,
            start=_start_mosquitto,
            version=version("mosquitto", "-h", r"mosquitto version (\S+)"),
            settings="MQTT 3.1.1 QoS 0, persistence off, no queue limit, TCP_NODELAY",
            syncs="nothing (QoS 0 is not acknowledged)",
        ),
        System(
            name="nats",
            session=Nats,
            start=_start_nats,
            version=version("nats-server", "--version", r"v(\d\S*)"),
            settings="core NATS, defaults",
            syncs="nothing (core NATS is not acknowledged)",
        ),
        System(
            name="redis",
            session=Resp,
            start=_start_redis,
            version=version("redis-server", "--version", r"v=(\S+)"),
            settings="PUBLISH/SUBSCRIBE, save and appendonly off, no output buffer limit",
            syncs="nothing (in memory)",
        ),
        System(
            name="rabbitmq",
            session=Amqp,
            start=start_rabbit,
            version=rabbit_version,
            settings="AMQP 0-9-1, direct exchange, a transient exclusive queue per subscriber, no acks",
            syncs="nothing (transient messages, no confirms)",
        ),
    )
}


def chosen(names: str, default: Sequence[str], known: Mapping[str, System] = SYSTEMS) -> list[System]:
    """The systems of a comma-separated list, or those of `default` that are installed."""
    if not names:
        return [known[name] for name in default if known[name].version() is not None]
    systems = []
    for name in names.split(","):
        if name not in known:
            raise UsageError(f"unknown system {name!r}; known are {', '.join(known)}")
        if known[name].version() is None:
            raise UsageError(f"{name} is not installed; `make bench-peers` installs the peers")
        systems.append(known[name])
    return systems


@contextmanager
def serving(system: System, brokers: int = 1) -> Iterator[Running]:
    """The system's servers, ready, in a temporary folder; ended and removed on the way out."""
    with TemporaryDirectory(prefix="postroad-bench-", ignore_cleanup_errors=True) as folder:
        running = Running()
        try:
            system.start(running, Path(folder), brokers)
            yield running
            running.check_alive()
        except (PeerError, OSError):
            running.check_alive()  # a server that died explains the failure better than its peers can
            raise
        finally:
            running.stop()
