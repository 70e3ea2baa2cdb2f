"""An authority and its certificates: what is made, what is refused, what stays."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from postroad.errors import UsageError
from postroad.net.certificates import make_authority, make_certificate


def read(file: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(file.read_bytes())


def test_an_authority_signs_brokers_and_clients(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "certs"
    authority = make_authority(folder)
    broker = make_certificate(folder, "b1", hosts=["b1.example.org", "10.0.0.1"], days=30)
    client = make_certificate(folder, "alice", days=30)
    for files in (broker, client):
        read(files.certificate).verify_directly_issued_by(read(authority.certificate))
        assert stat.S_IMODE(files.key.stat().st_mode) == 0o600
    names = read(broker.certificate).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["b1.example.org"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.1"]
    purposes = read(client.certificate).extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(purposes) == [ExtendedKeyUsageOID.CLIENT_AUTH]  # a client cannot pose as a broker


def test_nothing_is_replaced_but_what_is_to_be_renewed(tmp_path: Path) -> None:
    authority = make_authority(tmp_path)
    with pytest.raises(UsageError, match="has an authority already"):
        make_authority(tmp_path)
    first = make_certificate(tmp_path, "b1", hosts=["localhost"], days=1)
    key, before = first.key.read_bytes(), read(first.certificate)
    with pytest.raises(UsageError, match="--renew"):
        make_certificate(tmp_path, "b1", hosts=["localhost"], days=1)
    make_certificate(tmp_path, "b1", hosts=["localhost"], days=2, renew=True)
    assert first.key.read_bytes() == key
    assert read(first.certificate).not_valid_after_utc > before.not_valid_after_utc
    read(first.certificate).verify_directly_issued_by(read(authority.certificate))


def test_what_cannot_be_is_refused_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no authority"):
        make_certificate(tmp_path, "b1", days=1)
    make_authority(tmp_path)
    for name in ("", "authority", "a/b", "../x", ".hidden", "x" * 65, "a\nb"):
        with pytest.raises(UsageError, match="cannot be the name"):
            make_certificate(tmp_path, name, days=1)
    with pytest.raises(UsageError, match="neither an address nor a name"):
        make_certificate(tmp_path, "b1", hosts=["b\u00fccher"], days=1)
    (tmp_path / "authority.key").write_text("no key")
    with pytest.raises(UsageError, match=r"authority\.key"):
        make_certificate(tmp_path, "b1", days=1)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot make"):
        make_authority(tmp_path / "file" / "certs")
