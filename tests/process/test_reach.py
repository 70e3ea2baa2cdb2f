"""How others reach a node: the UDP port and the address that HELLO, WELCOME and link state name."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import pytest
from tests.worlds.echo import ANSWER, ASK, EchoNode
from tests.worlds.node_server import run, serving, until
from tests.worlds.process_clients import cli
from tests.worlds.processes import BrokerProcess, Brokers

import postroad
from postroad.client import effects as fx
from postroad.client.core import ClientCore
from postroad.seam.datagrams import Datagram, SendTo
from postroad.seam.effects import Effect, Send
from postroad.seam.inputs import Input, Received
from postroad.units import MIB
from postroad.wire.datagrams import pack
from postroad.wire.frames import (
    DEFAULT_LIMITS,
    PROTOCOL_VERSION,
    Hello,
    Kind,
    Splitter,
    TopologyUpdate,
    Welcome,
    decode,
    encode,
    frame_kind,
)

BROKER = Hello(
    version=PROTOCOL_VERSION,
    role="broker",
    name="tester",
    token="",
    limits=DEFAULT_LIMITS,
    window=MIB,
    time_us=1,
    broker=99,
    node=b"t" * 16,
    boot=1,
    datagrams=7420,
    address="b.example.org:7420",
)


class EchoBroker(EchoNode):
    """Welcomes whoever says HELLO, and tells where its datagrams go."""

    port = 0

    def handle(self, inputs: Iterable[Input], now_us: int) -> list[Effect]:
        inputs = list(inputs)
        effects: list[Effect] = [
            Send(one.connection, encode(self._welcome(now_us)))
            for one in inputs
            if isinstance(one, Received) and frame_kind(one.frame) == Kind.HELLO
        ]
        echoes = super().handle(inputs, now_us)
        return effects + [one for one in echoes if not isinstance(one, Send)]

    def _welcome(self, now_us: int) -> Welcome:
        return Welcome(
            version=PROTOCOL_VERSION,
            name="echo",
            broker=1,
            node=bytes(16),
            boot=1,
            cost=1,
            limits=DEFAULT_LIMITS,
            window=MIB,
            time_us=now_us,
            publisher=5,
            resume_key=b"k",
            datagrams=self.port,
        )


class Recorder(ClientCore):
    """The client's core, with a record of the datagrams that it is handed."""

    got: list[Datagram]

    def handle(self, inputs: Sequence[fx.Input], now_us: int) -> list[fx.Effect]:
        self.got += [one for one in inputs if isinstance(one, Datagram)]
        return super().handle(inputs, now_us)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_client_sends_datagrams_where_the_broker_says_and_hears_the_answers(host: str) -> None:
    async def test() -> None:
        core = EchoBroker()
        shown = f"[{host}]" if ":" in host else host
        async with serving(core, f"{shown}:0") as (_, port):
            core.port = port
            client = postroad.connect(f"{shown}:{port}")
            recorder = client._core
            recorder.__class__ = Recorder
            assert isinstance(recorder, Recorder)
            recorder.got = []
            assert recorder._datagrams is None
            await client
            assert recorder._datagrams is not None
            assert recorder._datagrams.endpoint == (host, port)
            assert client._datagrams is None  # no socket before there is something to send
            client._perform([SendTo((host, port), pack(ASK, body)) for body in (b"one", b"two")])
            await until(lambda: len(recorder.got) == 2)
            answers = [Datagram((host, port), pack(ANSWER, body)) for body in (b"one", b"two")]
            assert sorted(recorder.got, key=lambda one: one.data) == answers
            (source,) = {one.source for one in core.of(Datagram)}
            assert source[0] == host
            await client.close()
            assert client._datagrams is None

    run(test())


def test_a_client_whose_broker_takes_no_datagrams_knows_it() -> None:
    async def test() -> None:
        core = EchoBroker()
        async with serving(core) as (_, port), postroad.connect(f"127.0.0.1:{port}") as client:
            assert client._core._datagrams is not None
            assert client._core._datagrams.endpoint is None

    run(test())


def dial(address: str, token: str = "") -> tuple[Welcome, list[TopologyUpdate]]:
    """What a broker answers to one that links to it."""
    host, port = address.rsplit(":", 1)
    splitter = Splitter(MIB)
    heard: list[object] = []
    with socket.create_connection((host, int(port)), 30) as connection:
        connection.sendall(encode(msgspec.structs.replace(BROKER, token=token)))
        while not any(isinstance(one, TopologyUpdate) for one in heard):
            data = connection.recv(65_536)
            assert data, heard
            heard += map(decode, splitter.feed(data))
    assert isinstance(heard[0], Welcome)
    return heard[0], [one for one in heard if isinstance(one, TopologyUpdate)]


def test_a_broker_names_its_port_and_address_in_welcome_and_link_state(brokers: Brokers) -> None:
    broker = brokers.start("b1")
    welcome, updates = dial(broker.address)
    assert welcome.datagrams == int(broker.address.rsplit(":", 1)[1])
    assert welcome.address == broker.address
    own = {ad.address for update in updates for ad in update.advertisements if ad.broker == welcome.broker}
    assert own == {broker.address}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as caller:  # a broker takes no notice of any yet
        for _ in range(100):
            caller.sendto(pack(ASK, b"x"), ("127.0.0.1", welcome.datagrams))
    assert dial(broker.address)[0].name == "b1"


def test_a_broker_names_the_address_that_it_was_told_to(brokers: Brokers, tmp_path: Path) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text('advertise = "b1.example.org"\n')
    broker = brokers.start("b1", extra=("--config", str(settings)))
    assert dial(broker.address)[0].address == "b1.example.org:7420"
    status = json.loads(cli(broker.address, "status", "--json").stdout)
    assert status["address"] == "b1.example.org:7420"  # who reads it may dial it, from wherever


def test_a_broker_on_any_address_names_none_unless_told(brokers: Brokers) -> None:
    broker = BrokerProcess("b1", brokers.folder / "b1", extra=("--link-token", "secret"), address="0.0.0.0:0")
    brokers.all.append(broker)
    broker.start()
    port = broker.address.rsplit(":", 1)[1]
    welcome, _ = dial(f"127.0.0.1:{port}", token="secret")
    assert (welcome.address, welcome.datagrams) == ("", int(port))
