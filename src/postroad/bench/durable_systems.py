"""The systems of `bench durable`, each set up to keep what subscribers have not acknowledged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from postroad.bench.durable_sessions import ACK_EVENTS, AmqpDurable, JetStream, MqttDurable, NativeDurable
from postroad.bench.processes import Running, free_port
from postroad.bench.systems import (
    System,
    own_version,
    program,
    rabbit_version,
    start_postroad,
    start_rabbit,
    version,
)

# It syncs event by event, and delivers nothing while more wait to be stored: the window of the others would
# take longer than a measurement.
_ALWAYS_IN_FLIGHT: Final = 256
_ACKS: Final = f"acknowledged cumulatively every {ACK_EVENTS} events"


def _start_mosquitto(running: Running, folder: Path, brokers: int) -> None:
    del brokers
    port = free_port()
    config = folder / "mosquitto.conf"
    config.write_text(
        f"listener {port} 127.0.0.1\nallow_anonymous true\npersistence true\n"
        f"persistence_location {folder}/\nset_tcp_nodelay true\nmax_inflight_messages 0\n"
        "max_queued_messages 0\nmax_queued_bytes 0\nlog_type error\nuser root\n"
    )
    running.wait_port(port, running.spawn([program("mosquitto"), "-c", str(config)], folder))


def _start_jetstream(sync: str) -> Callable[[Running, Path, int], None]:
    def start(running: Running, folder: Path, brokers: int) -> None:
        del brokers
        port = free_port()
        config = folder / "nats.conf"
        config.write_text(
            f'host: "127.0.0.1"\nport: {port}\nping_interval: "1h"\nping_max: 100\n'
            f'jetstream {{ store_dir: "{folder}/store", max_buffered_msgs: 100000{sync} }}\n'
        )
        running.wait_port(port, running.spawn([program("nats-server"), "-c", str(config)], folder))
        session = JetStream.connect(running.addresses[0], "setup")
        session.create_stream()
        session.close()

    return start


_nats_version: Final = version("nats-server", "--version", r"v(\d\S*)")
_CONSUMERS: Final = f"a file stream, a durable push consumer per subscriber, {_ACKS}"
DURABLE_SYSTEMS: Final = {
    system.name: system
    for system in (
        System(
            name="postroad",
            session=NativeDurable,
            start=start_postroad,
            version=own_version,
            settings=f"durable mode, defaults, the broker keeps the tokens, {_ACKS}",
            syncs="the event, synced",
        ),
        System(
            name="jetstream",
            session=JetStream,
            start=_start_jetstream(""),
            version=_nats_version,
            settings=f"{_CONSUMERS}, sync_interval 2m (the default)",
            syncs="nothing for sure: written, synced every two minutes",
        ),
        System(
            name="jetstream-always",
            session=JetStream,
            start=_start_jetstream(", sync_interval: always"),
            version=_nats_version,
            settings=f"{_CONSUMERS}, sync_interval always, {_ALWAYS_IN_FLIGHT} events in flight per topic",
            syncs="the event, synced",
            in_flight=_ALWAYS_IN_FLIGHT,
        ),
        System(
            name="rabbitmq",
            session=AmqpDurable,
            start=start_rabbit,
            version=rabbit_version,
            settings=f"AMQP 0-9-1, a durable queue per subscriber, persistent messages, confirms, {_ACKS}",
            syncs="the event in every queue, synced, unless all consumers have acknowledged it before",
        ),
        System(
            name="mosquitto",
            session=MqttDurable,
            start=_start_mosquitto,
            version=version("mosquitto", "-h", r"mosquitto version (\S+)"),
            settings="MQTT 3.1.1 QoS 1, persistent sessions, no limits, each event acknowledged",
            syncs="nothing: sessions are saved every 30 minutes (the default)",
        ),
    )
}
