"""Signed and encrypted datagrams with X.509 certificates (paper 9.1, spec V10).

The sender's certificate travels along, is checked against the authority that both sides trust, and its key
signs. What is said to somebody whose key is known is encrypted for that key: an ephemeral X25519 key agrees
on one for ChaCha20-Poly1305. Every process has an X25519 key of its own, which it tells in what it signs; so
the first request is signed only, and contains nothing but a UUID and that key.

A datagram is small, so certificates are of elliptic curves: P-256, P-384 or Ed25519.
"""

from __future__ import annotations

from collections import OrderedDict
from copy import copy
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature, InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import NameOID

from postroad.errors import PeerError, UsageError
from postroad.wire.discovery import MAX_NAME_BYTES, Sealed

MAX_CERTIFICATE_BYTES: Final = 640  # so that the largest of our messages fits beside it
MAX_CHECKED: Final = 1_000  # certificates whose check is remembered
_INFO: Final = b"postroad discovery 1"
_NONCE: Final = bytes(12)  # each key is used once
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

PrivateKey = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey


class CertificateSealer:
    """Of one process. `certificate`, `key` and `authorities` are PEM."""

    def __init__(self, certificate: bytes, key: bytes, authorities: bytes) -> None:
        try:
            self._certificate = x509.load_pem_x509_certificate(certificate)
            private = serialization.load_pem_private_key(key, None)
            self._authorities = x509.load_pem_x509_certificates(authorities)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise UsageError(f"cannot use these certificates for discovery: {error}") from None
        if not isinstance(private, ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey):
            raise UsageError("discovery needs certificates of elliptic curves (P-256, P-384, Ed25519)")
        self._private: PrivateKey = private
        self._der = self._certificate.public_bytes(serialization.Encoding.DER)
        if len(self._der) > MAX_CERTIFICATE_BYTES:
            raise UsageError(
                f"a certificate of {len(self._der)} bytes does not fit into a datagram: the most is"
                f" {MAX_CERTIFICATE_BYTES}; those of elliptic curves with few extensions are smaller"
            )
        self._agreement = X25519PrivateKey.generate()
        self._public = self._agreement.public_key().public_bytes_raw()
        # DER -> the certificate and until when it is valid, of those that an authority here has signed.
        self._checked: OrderedDict[bytes, x509.Certificate] = OrderedDict()

    @property
    def public_key(self) -> bytes:
        return self._public

    def afresh(self) -> CertificateSealer:
        """The same, without the memory of certificates that were checked."""
        sealer = copy(self)
        sealer._checked = OrderedDict()
        return sealer

    # ---- sealing

    def seal(self, kind: int, body: bytes, to: bytes) -> Sealed:
        ephemeral = b""
        if to:
            private = X25519PrivateKey.generate()
            ephemeral = private.public_key().public_bytes_raw()
            body = _cipher(private, to, ephemeral).encrypt(_NONCE, body, None)
        signature = self._sign(_signed(kind, ephemeral, to, body))
        return Sealed(certificate=self._der, ephemeral=ephemeral, signature=signature, kind=kind, body=body)

    def _sign(self, data: bytes) -> bytes:
        if isinstance(self._private, ed25519.Ed25519PrivateKey):
            return self._private.sign(data)
        return self._private.sign(data, ec.ECDSA(hashes.SHA256()))

    # ---- opening

    def open(self, sealed: Sealed, now_us: int) -> tuple[bytes, str]:
        """Anybody can send these bytes, and the library does not say all that it raises for some of them:
        whatever it is, they are not sealed as they must be."""
        try:
            return self._open(sealed, now_us)
        except PeerError:
            raise
        except Exception as error:
            raise PeerError(f"a datagram that is not sealed as it must be: {type(error).__name__}") from None

    def _open(self, sealed: Sealed, now_us: int) -> tuple[bytes, str]:
        certificate = self.check(sealed.certificate, now_us)
        to = self._public if sealed.ephemeral else b""
        _verify(certificate, sealed.signature, _signed(sealed.kind, sealed.ephemeral, to, sealed.body))
        name = _name(certificate)
        if not sealed.ephemeral:
            return sealed.body, name
        try:
            cipher = _cipher(self._agreement, sealed.ephemeral, sealed.ephemeral)
            return cipher.decrypt(_NONCE, sealed.body, None), name
        except InvalidTag:
            raise PeerError("a datagram that was not encrypted for us") from None

    def check(self, der: bytes, now_us: int) -> x509.Certificate:
        """The certificate, if an authority here signed it and it is valid now."""
        certificate = self._checked.get(der)
        if certificate is None:
            if len(der) > MAX_CERTIFICATE_BYTES:
                raise PeerError(f"a certificate of {len(der)} bytes, the most is {MAX_CERTIFICATE_BYTES}")
            certificate = self._signed_here(der)
            self._checked[der] = certificate
            if len(self._checked) > MAX_CHECKED:
                self._checked.popitem(last=False)
        now = _EPOCH + timedelta(microseconds=now_us)
        if not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc:
            raise PeerError("a certificate that is not valid now")
        return certificate

    def _signed_here(self, der: bytes) -> x509.Certificate:
        certificate = x509.load_der_x509_certificate(der)
        issuer = certificate.issuer
        for authority in self._authorities:
            if authority.subject == issuer:
                try:
                    certificate.verify_directly_issued_by(authority)
                    return certificate
                except (InvalidSignature, ValueError, TypeError, UnsupportedAlgorithm):
                    continue
        raise PeerError("a certificate that no authority here has signed")


def _signed(kind: int, ephemeral: bytes, to: bytes, body: bytes) -> bytes:
    """What is signed names the receiver, so that nobody else can be given it."""
    return msgspec.msgpack.encode((_INFO, kind, ephemeral, to, body))


def _cipher(private: X25519PrivateKey, public: bytes, ephemeral: bytes) -> ChaCha20Poly1305:
    try:
        shared = private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise PeerError("a key that agrees with none") from None
    return ChaCha20Poly1305(HKDF(hashes.SHA256(), 32, salt=ephemeral, info=_INFO).derive(shared))


def _verify(certificate: x509.Certificate, signature: bytes, data: bytes) -> None:
    key = certificate.public_key()
    try:
        if isinstance(key, ed25519.Ed25519PublicKey):
            key.verify(signature, data)
        elif isinstance(key, ec.EllipticCurvePublicKey):
            key.verify(signature, data, ec.ECDSA(hashes.SHA256()))
        else:
            raise PeerError("a certificate of a kind that discovery does not use")
    except InvalidSignature:
        raise PeerError("a signature that is not of the certificate's key") from None


def _name(certificate: x509.Certificate) -> str:
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    name = str(names[0].value) if names else ""
    if not 0 < len(name.encode()) <= MAX_NAME_BYTES or not name.isprintable():
        raise PeerError(f"a certificate without a name, or with one over {MAX_NAME_BYTES} bytes")
    return name
