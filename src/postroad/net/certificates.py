"""A small authority of one's own, and the certificates that it signs for brokers and clients.

An authority is a folder: `authority.pem`, which everybody may see and all peers are given, and
`authority.key`, which signs. A certificate is NAME.pem with NAME.key beside it. Nothing is replaced but a
certificate that is to be renewed; its key stays, so that only one file changes.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from postroad.errors import UsageError
from postroad.ids import MAX_PRINCIPAL, principal_fits

AUTHORITY: Final = "authority"
AUTHORITY_DAYS: Final = 3_650
SKEW: Final = datetime.timedelta(hours=1)  # clocks may be that far apart when a certificate is new
_PRIVATE: Final = 0o600
_MAX_COMMON_NAME: Final = 64  # of X.509


class Files(NamedTuple):
    certificate: Path
    key: Path


def make_authority(folder: Path) -> Files:
    """A new authority in `folder`, which is made if need be."""
    files = _files(folder, AUTHORITY)
    if files.key.exists() or files.certificate.exists():
        raise UsageError(f"{folder} has an authority already: {files.certificate}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make {folder}: {error.strerror}") from None
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(f"Postroad authority {folder.resolve().name}"[:_MAX_COMMON_NAME])
    certificate = (
        _builder(name, name, key.public_key(), AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write_key(files.key, key)
    _write(files.certificate, certificate.public_bytes(serialization.Encoding.PEM))
    return files


def make_certificate(
    folder: Path, name: str, *, hosts: Sequence[str] = (), days: int, renew: bool = False
) -> Files:
    """A certificate for `name`, signed by the authority in `folder`. With `hosts` it is a broker's: these are
    the names and addresses under which others reach it."""
    fits = principal_fits(name) and 0 < len(name) <= _MAX_COMMON_NAME and name[0] != "." and "/" not in name
    if not fits or name == AUTHORITY:
        raise UsageError(
            f"{name!r} cannot be the name of a certificate: up to {min(MAX_PRINCIPAL, _MAX_COMMON_NAME)}"
            f" printable characters without '/', not {AUTHORITY!r}, not beginning with '.'"
        )
    files = _files(folder, name)
    if files.key.exists() and not renew:
        raise UsageError(f"{files.certificate} exists: --renew makes it anew with the same key")
    authority, signer = _load_authority(folder)
    key = _load_key(files.key) if renew and files.key.exists() else ec.generate_private_key(ec.SECP256R1())
    purposes = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if hosts else [])]
    builder = (
        _builder(_name(name), authority.subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
    )
    if hosts:
        alternatives = x509.SubjectAlternativeName([_host(host) for host in hosts])
        builder = builder.add_extension(alternatives, critical=False)
    certificate = builder.sign(signer, hashes.SHA256())
    if not files.key.exists():
        _write_key(files.key, key)
    _write(files.certificate, certificate.public_bytes(serialization.Encoding.PEM))
    return files


def _files(folder: Path, name: str) -> Files:
    return Files(folder / f"{name}.pem", folder / f"{name}.key")


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError:
        raise UsageError(f"{host!r} is neither an address nor a name of a machine") from None


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=not signs,  # discovery seals what it says with a key that both agree on
        encipher_only=False,
        decipher_only=False,
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _load_authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    files = _files(folder, AUTHORITY)
    try:
        certificate = x509.load_pem_x509_certificate(files.certificate.read_bytes())
    except FileNotFoundError:
        raise UsageError(f"{folder} has no authority: `postroad certs authority` makes one") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot use {files.certificate}: {error}") from None
    return certificate, _load_key(files.key)


def _load_key(file: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(file.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"cannot use {file}: {error}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UsageError(f"{file} is no key that `postroad certs` made")
    return key


def _write_key(file: Path, key: ec.EllipticCurvePrivateKey) -> None:
    data = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    _write(file, data, _PRIVATE)


def _write(file: Path, data: bytes, mode: int = 0o644) -> None:
    """Whole or not at all: a broker may read it at any moment."""
    beside = file.with_name(f".{file.name}.new")
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with open(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        beside.replace(file)
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}") from None
