"""What a broker is configured with fits into a datagram, or it says so when it starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.worlds.certificates import Certificates

from postroad.config import TlsConfig
from postroad.discovery.lengths import check_lengths
from postroad.discovery.node import NodeSettings
from postroad.discovery.sealing import CertificateSealer
from postroad.errors import UsageError
from postroad.net.sealing import load_sealer
from postroad.wire.discovery import MAX_NAME_BYTES, MAX_PLACE_BYTES
from postroad.wire.frames import MAX_ADDRESS_BYTES

LONGEST_ADDRESS = "x" * (MAX_ADDRESS_BYTES - 5) + ":7420"


@pytest.fixture
def sealer(tmp_path: Path) -> CertificateSealer:
    certificates = Certificates(tmp_path)
    certificate, key = certificates.issue("a" * 60, host=".".join(["x" * 60] * 3))
    made = load_sealer(TlsConfig(certificate=certificate, key=key, ca=str(certificates.ca)))
    assert made is not None
    return made


def test_without_certificates_every_permitted_length_fits() -> None:
    place = "p" * MAX_PLACE_BYTES
    check_lengths(
        None, name="n" * MAX_NAME_BYTES, address=LONGEST_ADDRESS, geography=place, institution=place
    )
    with pytest.raises(UsageError, match="name of at most"):
        check_lengths(None, name="n" * (MAX_NAME_BYTES + 1), address="", geography="", institution="")
    with pytest.raises(UsageError, match="at most"):
        NodeSettings(name="n" * (MAX_NAME_BYTES + 1))


def test_beside_a_large_certificate_they_do_not_and_the_error_says_by_how_much(
    sealer: CertificateSealer,
) -> None:
    check_lengths(sealer, name="n" * 40, address="broker.example.org:7420", geography="eu", institution="x")
    with pytest.raises(UsageError, match=r"by (\d+) bytes") as raised:
        check_lengths(
            sealer,
            name="n" * 120,
            address="127.0.0.1:7420",
            geography="g" * MAX_PLACE_BYTES,
            institution="i" * MAX_PLACE_BYTES,
        )
    excess = int(str(raised.value).split(" by ")[1].split()[0])
    spare = 3  # a signature of the same key is up to so much longer another time
    texts = ("n" * 120 + "g" * MAX_PLACE_BYTES + "i" * MAX_PLACE_BYTES)[excess + spare :]
    check_lengths(
        sealer,
        name=texts[:120],
        address="127.0.0.1:7420",
        geography=texts[120 : 120 + MAX_PLACE_BYTES],
        institution=texts[120 + MAX_PLACE_BYTES :],
    )
