"""The certificates of discovery, from the files of TLS."""

from __future__ import annotations

from pathlib import Path

from postroad.config import TlsConfig
from postroad.discovery.sealing import CertificateSealer
from postroad.errors import UsageError


def load_sealer(tls: TlsConfig) -> CertificateSealer | None:
    """None without a certificate and an authority to check others' with."""
    if not tls.certificate or not tls.ca:
        return None
    certificate = _read(tls.certificate)
    return CertificateSealer(certificate, _read(tls.key) if tls.key else certificate, _read(tls.ca))


def _read(file: str) -> bytes:
    try:
        return Path(file).expanduser().read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from None
