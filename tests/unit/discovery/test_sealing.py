"""Signed and encrypted datagrams (spec V10, paper 9.1)."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from tests.worlds.certificates import Certificates

from postroad.config import TlsConfig
from postroad.discovery.envelopes import Envelopes
from postroad.discovery.sealing import CertificateSealer
from postroad.errors import PeerError, UsageError
from postroad.net.sealing import load_sealer
from postroad.wire.discovery import (
    Acknowledge,
    Cookie,
    Ping,
    Request,
    Response,
    Sealed,
    Usage,
    decode,
    encode,
)

NOW_US = time.time_ns() // 1000
DAY_US = 86_400_000_000
Make = Callable[[str], CertificateSealer]


@pytest.fixture
def sealer(tmp_path: Path) -> Make:
    certificates = Certificates(tmp_path)

    def make(name: str) -> CertificateSealer:
        certificate, key = certificates.issue(name)
        made = load_sealer(TlsConfig(certificate=certificate, key=key, ca=str(certificates.ca)))
        assert made is not None
        return made

    return make


def acknowledge() -> Acknowledge:
    return Acknowledge(uuid=bytes(16), attempt=1, brokers=5)


def test_what_is_sealed_for_somebody_is_opened_by_nobody_else(
    sealer: Make,
) -> None:
    """V10."""
    alice, bob, eve = (sealer(name) for name in ("alice", "bob", "eve"))
    data = Envelopes(alice).pack(acknowledge(), bob.public_key)
    opened = Envelopes(bob).unpack(data, NOW_US)
    assert opened.message == acknowledge()
    assert opened.certificate == "alice"
    assert bytes(16) not in data  # the UUID cannot be read on the way
    with pytest.raises(PeerError, match="signature"):
        Envelopes(eve).unpack(data, NOW_US)


def test_a_first_request_is_signed_and_everything_fits_into_a_datagram(
    sealer: Make,
) -> None:
    alice, bob = sealer("a" * 60), sealer("b" * 60)
    request = Request(
        uuid=bytes(range(16)),
        attempt=16,
        sent_us=NOW_US,
        offset_us=-NOW_US,
        cookie=bytes(24),
        credential=bytes(24),
        transports=("tcp", "udp"),
        key=alice.public_key,
    )
    first = Envelopes(alice).pack(msgspec.structs.replace(request, cookie=b""))
    assert Envelopes(bob).unpack(first, NOW_US).certificate == "a" * 60
    cookie = Cookie(uuid=bytes(16), cookie=bytes(24), sent_us=NOW_US, time_us=NOW_US, key=bob.public_key)
    assert len(Envelopes(bob).pack(cookie, alice.public_key)) <= len(first)
    second = Envelopes(alice).pack(request, bob.public_key)
    assert Envelopes(bob).unpack(second, NOW_US).message == request
    response = Response(
        uuid=bytes(16),
        attempt=1,
        sent_us=NOW_US,
        broker=7,
        name="b" * 128,
        address="a.b:7420".rjust(100, "x"),
        transports=("tcp", "udp"),
        ping_key=bytes(24),
        usage=Usage(connections=1 << 31, links=99, cpu_share=0.5, memory_total_bytes=1 << 50),
        network=1,
        members=10,
    )
    sealed = Envelopes(bob).pack(response, alice.public_key)
    assert Envelopes(alice).unpack(sealed, NOW_US).message == response


def test_what_was_changed_or_signed_by_a_stranger_is_refused(sealer: Make, tmp_path: Path) -> None:
    """V10."""
    alice, bob = sealer("alice"), sealer("bob")
    sealed = decode(Envelopes(alice).pack(acknowledge(), bob.public_key))
    assert isinstance(sealed, Sealed)
    for field in ("ephemeral", "signature", "body", "certificate"):
        value: bytes = getattr(sealed, field)
        changed = value[:-1] + bytes((value[-1] ^ 1,))
        with pytest.raises(PeerError):
            Envelopes(bob).unpack(encode(msgspec.structs.replace(sealed, **{field: changed})), NOW_US)
    with pytest.raises(PeerError):
        Envelopes(bob).unpack(encode(msgspec.structs.replace(sealed, kind=33)), NOW_US)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    strangers = Certificates(elsewhere)
    certificate, key = strangers.issue("alice")
    stranger = load_sealer(TlsConfig(certificate=certificate, key=key, ca=str(strangers.ca)))
    with pytest.raises(PeerError, match="no authority here"):
        Envelopes(bob).unpack(Envelopes(stranger).pack(acknowledge(), bob.public_key), NOW_US)


def test_a_certificate_that_expired_is_refused(sealer: Make) -> None:
    alice, bob = sealer("alice"), sealer("bob")
    data = Envelopes(alice).pack(acknowledge(), bob.public_key)
    assert Envelopes(bob).unpack(data, NOW_US).message == acknowledge()
    with pytest.raises(PeerError, match="not valid now"):
        Envelopes(bob).unpack(data, NOW_US + 3 * DAY_US)


def test_a_key_that_nothing_can_be_encrypted_for_is_refused_when_it_comes(sealer: Make) -> None:
    """Not when something is to be sent there, which may be at any time."""
    alice, bob = sealer("alice"), sealer("bob")
    cookie = Cookie(uuid=bytes(16), cookie=bytes(24), sent_us=0, time_us=0, key=bytes(32))
    with pytest.raises(PeerError, match="agrees with none"):
        Envelopes(bob).unpack(Envelopes(alice).pack(cookie, bob.public_key), NOW_US)


def test_sealed_and_plain_do_not_mix_but_for_pings(sealer: Make) -> None:
    alice = sealer("alice")
    with pytest.raises(PeerError):
        Envelopes(alice).unpack(encode(acknowledge()), NOW_US)
    with pytest.raises(PeerError):
        Envelopes(None).unpack(Envelopes(alice).pack(acknowledge()), NOW_US)
    ping = Ping(key=bytes(24), sent_us=5)
    assert Envelopes(alice).unpack(encode(ping), NOW_US).message == ping


def test_a_certificate_that_does_not_fit_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    certificate, key = certificates.issue("long", host="x" * 60 + "." + "y" * 60 + "." + "z" * 60)
    made = TlsConfig(certificate=certificate, key=key, ca=str(certificates.ca))
    if load_size(certificate) > 640:
        with pytest.raises(UsageError, match="does not fit"):
            load_sealer(made)
    with pytest.raises(UsageError, match="cannot use"):
        CertificateSealer(b"nothing", b"nothing", b"nothing")


def load_size(file: str) -> int:
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    return len(x509.load_pem_x509_certificate(Path(file).read_bytes()).public_bytes(Encoding.DER))
