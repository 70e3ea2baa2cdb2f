"""Hostile datagrams never crash a node, a broker or a search, nor leave anything behind in them."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from random import Random
from statistics import median
from time import process_time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.worlds.certificates import Certificates

from postroad.broker.core import Broker
from postroad.config import BrokerConfig, TlsConfig, parse_address
from postroad.discovery.envelopes import Envelopes, Sealer
from postroad.discovery.node import DiscoveryNode, NodeSettings
from postroad.discovery.search import Search, Stage
from postroad.discovery.settings import DiscoveryConfig, SearchSettings
from postroad.errors import PeerError
from postroad.ids import Identity
from postroad.net.sealing import load_sealer
from postroad.seam.datagrams import Datagram, SendTo
from postroad.wire.datagrams import MAX_DATAGRAM_BYTES, is_ours, pack
from postroad.wire.discovery import (
    MESSAGES,
    NUMBERS,
    Acknowledge,
    Advertise,
    Advertised,
    Announce,
    Cookie,
    Inject,
    Message,
    Ping,
    Pong,
    Request,
    Response,
    Sealed,
    Usage,
    decode,
    encode,
)
from postroad.wire.frames import check_address

NOW_US = 1_700_000_000_000_000
FEW, MANY, PARTS = 20_000, 100_000, 10  # many of each of so many parts: a million
SAMPLES: list[Message] = [
    Request(uuid=bytes(16), attempt=1, sent_us=NOW_US, cookie=bytes(24), credential=bytes(24)),
    Cookie(uuid=bytes(16), cookie=bytes(24), sent_us=1, time_us=2),
    Acknowledge(uuid=bytes(16), attempt=1, brokers=3),
    Inject(
        secret=bytes(16),
        uuid=bytes(16),
        attempt=1,
        host="192.0.2.1",
        port=5,
        offset_us=0,
        cookie=b"",
        credential=b"",
        key=b"",
        name="",
    ),
    Response(
        uuid=bytes(16),
        attempt=1,
        sent_us=NOW_US,
        broker=5,
        name="b",
        address="b:7420",
        transports=("tcp",),
        ping_key=bytes(24),
        usage=Usage(connections=3, links=1, cpu_share=0.5, memory_total_bytes=9, memory_free_bytes=4),
        network=1,
        members=2,
    ),
    Ping(key=bytes(24), sent_us=1),
    Pong(key=bytes(24), sent_us=1, time_us=2),
    Advertise(
        uuid=bytes(16),
        broker=5,
        name="b",
        address="b:7420",
        transports=("tcp",),
        geography="eu",
        institution="",
        secret=bytes(16),
        network=1,
        members=1,
        lifetime_s=60,
        sent_us=1,
    ),
    Advertised(uuid=bytes(16), time_us=1),
    Announce(uuid=bytes(16), name="n", sent_us=1),
    Sealed(certificate=b"c", ephemeral=bytes(32), signature=b"s", kind=32, body=b"b"),
]


def test_every_message_is_here_and_comes_back_as_it_was() -> None:
    assert [type(one) for one in SAMPLES] == list(MESSAGES.values())
    for one in SAMPLES:
        assert decode(encode(one)) == one


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("uuid", bytes(15)),
        ("name", "x" * 129),
        ("name", "a\nb"),
        ("address", "nonsense"),
        ("transports", ("t",) * 9),
        ("transports", ("t" * 33,)),
        ("ping_key", b""),
        ("broker", 0),
        ("broker", 1 << 32),
        ("members", 0),
        ("sent_us", 1 << 63),
        ("usage", Usage(cpu_share=float("nan"))),
        ("usage", Usage(cpu_share=1.5)),
        ("usage", Usage(connections=-1)),
    ],
)
def test_what_is_out_of_bounds_is_its_senders_error(field: str, value: object) -> None:
    response = SAMPLES[4]
    bad = msgspec.structs.replace(response, **{field: value})
    with pytest.raises(PeerError):
        decode(encode(bad))


def numbers() -> list[tuple[Message, str]]:
    """Every number in every message, those within its usage, too."""
    return [
        (message, f"{prefix}{field}")
        for message in SAMPLES
        for prefix, part in (("", message), ("usage.", getattr(message, "usage", None)))
        if part is not None
        for field in part.__struct_fields__
        if type(getattr(part, field)) is int
    ]


def with_number(message: Message, path: str, value: int) -> Message:
    outer, _, field = path.rpartition(".")
    if not outer:
        return msgspec.structs.replace(message, **{field: value})
    return msgspec.structs.replace(
        message, **{outer: msgspec.structs.replace(getattr(message, outer), **{field: value})}
    )


@pytest.mark.parametrize(
    ("message", "path"), numbers(), ids=[f"{type(message).__name__}.{path}" for message, path in numbers()]
)
def test_every_number_has_a_bound_and_sums_of_what_it_lets_pass_can_be_encoded(
    message: Message, path: str
) -> None:
    least, most = NUMBERS[path.rpartition(".")[2]]
    assert 4 * max(abs(least), most) < 1 << 63 or path.endswith("_bytes")
    for value in (least, most):
        assert decode(encode(with_number(message, path, value))) == with_number(message, path, value)
    for value in (least - 1, most + 1):
        with pytest.raises(PeerError):
            decode(encode(with_number(message, path, value)))


class Targets:
    """One of each that takes datagrams, with time that goes on."""

    def __init__(self, sealer: Sealer | None = None, now_us: int = NOW_US) -> None:
        draw = Random(1).randrange
        self.sealer = sealer
        self.node = DiscoveryNode(NodeSettings(name="n"), draw=draw, sealer=sealer)
        identity = Identity(number=1, node=bytes(15) + b"1", name="b", boot=1, starts=1)
        config = BrokerConfig(
            discovery=DiscoveryConfig(
                nodes=("192.0.2.9:7419",), join=True, private_nodes=True, group="239.0.0.1:1"
            )
        )
        self.broker = Broker(config, identity, draw=draw, now_us=now_us, sealer=sealer)
        self.now_us = now_us
        self.search = self._new_search()

    def _new_search(self) -> Search:
        search = Search(
            SearchSettings(),
            nodes=[("192.0.2.9", 7419)],
            group=("239.0.0.1", 1),
            known=[("192.0.2.8", 7420)],
            draw=Random(2).randrange,
            envelopes=Envelopes(self.sealer),
        )
        search.start(self.now_us)
        return search

    def give(self, data: bytes, host: int) -> None:
        self.now_us += 200
        datagram = Datagram((f"192.0.2.{host}", 7419 + host % 2), data)
        for core in (self.node, self.broker):
            sent = [one for one in core.handle([datagram], self.now_us) if isinstance(one, SendTo)]
            for one in sent:
                if one.endpoint == datagram.source:  # no amplifier
                    assert len(one.data) <= max(len(data), 120)
        with contextlib.suppress(PeerError):
            self.search.datagram(datagram, self.now_us)
        if self.search.stage is Stage.OVER:
            self.search = self._new_search()

    def check(self) -> None:
        self.node.check()
        self.broker.check()
        self.search.check()


def mutated(random: Random) -> bytes:
    """A message of ours with some bytes changed, a field replaced, or nonsense behind our mark."""
    data = bytearray(encode(random.choice(SAMPLES)))
    match random.randrange(4):
        case 0:
            return pack(random.randrange(30, 45), random.randbytes(random.randrange(200)))
        case 1:
            del data[random.randrange(4, len(data)) :]
        case 2:
            data += random.randbytes(random.randrange(60))
        case _:
            for _ in range(random.randrange(1, 6)):
                data[random.randrange(4, len(data))] = random.randrange(256)
    return bytes(data)


def batter(count: int, seed: int) -> None:
    """What they cost must not grow: a node that is battered is as quick at the end as at the beginning."""
    random = Random(seed)
    targets = Targets()
    took: list[float] = []
    for _ in range(count // 1000):
        hostile = [data for data in (mutated(random) for _ in range(1000)) if is_ours(data)]
        hosts = [random.randrange(1, 12) for _ in hostile]
        began = process_time()
        for data, host in zip(hostile, hosts, strict=True):
            targets.give(data, host)
        took.append(process_time() - began)
        targets.check()
    tenth = len(took) // 10
    assert median(took[-tenth:]) < 5 * median(took[:tenth]), took


def test_hostile_datagrams_hurt_nobody() -> None:
    """V6."""
    batter(FEW, seed=1)


@pytest.fixture
def sealers(tmp_path: Path) -> list[Sealer]:
    certificates = Certificates(tmp_path)
    made = []
    for name in ("alice", "bob"):
        certificate, key = certificates.issue(name)
        made.append(load_sealer(TlsConfig(certificate=certificate, key=key, ca=str(certificates.ca))))
    return [sealer for sealer in made if sealer is not None]


def test_hostile_certificates_and_seals_hurt_nobody(sealers: list[Sealer]) -> None:
    """V10.

    What a stranger puts where a certificate belongs is his error, whatever the library says of it; and so
    is a key that nothing can be encrypted for, of somebody whose certificate is good."""
    alice, bob = sealers
    targets = Targets(bob, time.time_ns() // 1000)
    random = Random(3)
    version = bytes((0xA0, 3, 2, 1, 2))
    for turn in range(3_000):
        message = random.choice(SAMPLES[:-1])
        if turn % 4 == 0 and hasattr(message, "key") and not isinstance(message, Ping | Pong):
            message = msgspec.structs.replace(message, key=bytes(32))
        data = Envelopes(alice).pack(message, random.choice((b"", bob.public_key)))
        sealed = decode(data)
        if isinstance(sealed, Sealed) and turn % 4:
            field = random.choice(("certificate", "certificate", "ephemeral", "signature", "body"))
            value = bytearray(getattr(sealed, field))
            if turn == 1:
                field, value = (
                    "certificate",
                    bytearray(sealed.certificate.replace(version, b"\xa0\x03\x02\x01\x1b")),
                )
            elif value:
                for _ in range(random.randrange(1, 4)):
                    value[random.randrange(len(value))] = random.randrange(256)
            data = encode(msgspec.structs.replace(sealed, **{field: bytes(value)}))
        targets.give(data, random.randrange(1, 12))
    targets.check()


@pytest.mark.soak
@pytest.mark.parametrize("part", range(PARTS))
def test_a_million_hostile_datagrams_hurt_nobody(part: int) -> None:
    """V6."""
    seed = PARTS * int.from_bytes(os.urandom(4), "big") + part
    print(f"seed {seed}")  # noqa: T201 -- shown if it fails
    batter(MANY, seed)


@given(st.binary(max_size=MAX_DATAGRAM_BYTES - 4), st.integers(0, 255))
def test_any_bytes_are_a_message_or_a_peers_error(body: bytes, kind: int) -> None:
    try:
        message = decode(pack(kind, body))
    except PeerError:
        return
    assert isinstance(message, Message)


@given(
    st.text(alphabet="a1[]:/.% \\é\x00", max_size=12).map(lambda host: f"{host}:80") | st.text(max_size=20)
)
def test_whoever_is_told_an_address_that_passes_can_read_it(address: str) -> None:
    try:
        check_address(address)
    except PeerError:
        return
    assert not address or parse_address(address)[1] > 0
