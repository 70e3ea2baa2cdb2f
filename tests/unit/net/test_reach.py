"""The UDP port and the address that peers name: their bounds, and where they come from."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from postroad.errors import PeerError, UsageError
from postroad.links.handshake import check_hello, check_welcome
from postroad.net.configure import configure
from postroad.overlay.topology import Topology
from postroad.units import MIB
from postroad.wire.frames import DEFAULT_LIMITS, MAX_ADDRESS_BYTES, Hello, Message, Welcome, check_address

HELLO = Hello(
    version=1, role="client", name="c", token="", limits=DEFAULT_LIMITS, window=MIB, time_us=1, datagrams=7420
)
WELCOME = Welcome(
    version=1,
    name="b",
    broker=1,
    node=bytes(16),
    boot=1,
    cost=1,
    limits=DEFAULT_LIMITS,
    window=MIB,
    time_us=1,
    datagrams=65_535,
    address="[2001:db8::1]:7420",
)
BAD_ADDRESSES = [
    "b.example.org",
    ":7420",
    "b:0",
    "b:65536",
    "b:007420",
    "b:7_0",
    "b:٣",
    "b c:7420",
    "b\n:7420",
    "bé:7420",
    "b" * (MAX_ADDRESS_BYTES - 4) + ":7420",
]


def test_what_is_within_bounds_passes() -> None:
    assert check_hello(HELLO) == "client"
    check_welcome(WELCOME)
    for address in ("", "b:1", "127.0.0.1:65535", "b" * (MAX_ADDRESS_BYTES - 5) + ":7420"):
        check_address(address)


@pytest.mark.parametrize("address", BAD_ADDRESSES)
def test_an_address_out_of_bounds_is_the_peers_error(address: str) -> None:
    with pytest.raises(PeerError, match="an address "):
        check_hello(msgspec.structs.replace(HELLO, address=address))
    with pytest.raises(PeerError, match="an address "):
        check_welcome(msgspec.structs.replace(WELCOME, address=address))
    other = Topology(me=2, node=b"b" * 16, name="b2", boot=1).take_own()
    assert other is not None
    with pytest.raises(PeerError, match="an address "):
        Topology(me=1, node=b"a" * 16, name="b1", boot=1).accept(
            msgspec.structs.replace(other, address=address), 0
        )


@pytest.mark.parametrize("port", [-1, 65_536])
def test_a_port_out_of_bounds_is_the_peers_error(port: int) -> None:
    messages: list[Message] = [HELLO, WELCOME]
    for message in messages:
        bad = msgspec.structs.replace(message, datagrams=port)
        with pytest.raises(PeerError, match=f"a UDP port of {port}; it is between 1 and 65535, or 0"):
            check_hello(bad) if isinstance(bad, Hello) else check_welcome(bad)


def test_link_state_tells_every_broker_the_address_of_every_other() -> None:
    one = Topology(me=1, node=b"a" * 16, name="b1", boot=1, address="b1.example.org:7420")
    two = Topology(me=2, node=b"b" * 16, name="b2", boot=1)
    own = one.take_own()
    assert own is not None
    assert two.accept(own, 0)
    assert two.address(1) == "b1.example.org:7420"
    assert (two.address(2), two.address(3)) == ("", "")


def test_the_address_to_advertise_is_one_that_others_can_dial(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    assert configure({}).advertise is None
    file.write_text('advertise = "b1.example.org"\n')
    assert configure({}, file).advertise == "b1.example.org:7420"
    for bad in ("0.0.0.0:7420", "[::]:7420", "b1:0"):
        file.write_text(f'advertise = "{bad}"\n')
        with pytest.raises(UsageError, match=r"advertise: .* is no address that others can dial"):
            configure({}, file)


def test_what_only_the_sockets_know_is_no_setting(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    for line in ("datagrams = 7", 'address = "b:7"'):
        file.write_text(f"[connections]\n{line}\n")
        with pytest.raises(UsageError, match="unknown setting 'connections"):
            configure({}, file)
