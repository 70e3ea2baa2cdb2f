"""What a datagram is, and how endpoints are written."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from postroad.errors import BugError, UsageError
from postroad.net.datagrams import to_address, to_endpoint
from postroad.seam.datagrams import SendTo
from postroad.wire.datagrams import DATAGRAM_PREFIX_BYTES, MAX_DATAGRAM_BYTES, datagram_kind, is_ours, pack


def test_one_that_is_too_long_is_refused_where_it_is_made() -> None:
    longest = pack(3, bytes(MAX_DATAGRAM_BYTES - DATAGRAM_PREFIX_BYTES))
    assert SendTo(("127.0.0.1", 7420), longest).data is longest
    with pytest.raises(
        BugError, match=r"a datagram of 1233 bytes for \('127.0.0.1', 7420\), the most is 1232"
    ):
        SendTo(("127.0.0.1", 7420), longest + b"x")


def test_only_what_begins_as_ours_and_is_not_too_long_is_ours() -> None:
    assert is_ours(pack(3, b""))
    assert datagram_kind(pack(3, b"body")) == 3
    assert is_ours(pack(255, bytes(MAX_DATAGRAM_BYTES - 4)))
    for data in (b"", b"pr", b"pr\x01", b"pr\x02\x03", b"PR\x01\x03", pack(3, bytes(MAX_DATAGRAM_BYTES - 3))):
        assert not is_ours(data)


@pytest.mark.parametrize(
    ("endpoint", "family", "address"),
    [
        (("192.0.2.1", 7), socket.AF_INET, ("192.0.2.1", 7)),
        (("2001:db8::1", 7), socket.AF_INET6, ("2001:db8::1", 7, 0, 0)),
        (("192.0.2.1", 7), socket.AF_INET6, ("::ffff:192.0.2.1", 7, 0, 0)),
        (("fe80::1%3", 7), socket.AF_INET6, ("fe80::1", 7, 0, 3)),
    ],
)
def test_endpoints_are_plain_addresses(
    endpoint: tuple[str, int], family: int, address: tuple[object, ...]
) -> None:
    assert to_address(endpoint, family) == address
    assert to_endpoint(address) == endpoint


@pytest.mark.parametrize(
    ("endpoint", "text"),
    [
        (("example.org", 7), "'example.org' is not a numeric address"),
        (("127.0.0.1", 0), "0 is not a port: it is between 1 and 65535"),
        (("127.0.0.1", 65_536), "65536 is not a port"),
        (("::1", 7), "::1 is an IPv6 address, and this node listens on an IPv4 one"),
    ],
)
def test_what_is_no_endpoint_says_why(endpoint: tuple[str, int], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        to_address(endpoint, socket.AF_INET)


def test_an_interface_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match="there is no interface 'nonesuch0'"):
        to_address(("fe80::1%nonesuch0", 7), socket.AF_INET6)


def test_the_document_says_how_datagrams_begin_and_how_long_they_are() -> None:
    text = (Path(__file__).parents[3] / "docs" / "reference" / "protocol.md").read_text()
    assert f"It has at most {MAX_DATAGRAM_BYTES:,} bytes" in text
    assert "| 0 | 2 | mark | bytes | `pr` |\n| 2 | 1 | version | u8 | 1 |\n| 3 | 1 | kind |" in text
    assert pack(7, b"") == b"pr" + bytes((1, 7))
