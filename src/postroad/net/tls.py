"""TLS contexts from files, and who a certificate says its holder is.

A broker with a certificate listens with TLS and dials with TLS; one with only a CA dials with TLS and
listens in the clear (on loopback, unless authentication is configured).
"""

from __future__ import annotations

import ssl
from typing import Any

from postroad.config import TlsConfig
from postroad.errors import UsageError
from postroad.net.log import complain


class _Accepted(ssl.SSLObject):
    """Our side of a connection somebody opened. The event loop drops one whose handshake fails without a
    word, and those who run a broker want to know why nobody can connect."""

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            complain("warning", f"refused a connection in its TLS handshake: {reason(error)}")
            raise


def server_context(tls: TlsConfig) -> ssl.SSLContext | None:
    if not tls.certificate:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.sslobject_class = _Accepted
    _load_pair(context, tls)
    if tls.require_client_certificate:
        _load_ca(context, tls.ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(tls: TlsConfig) -> ssl.SSLContext | None:
    if not tls.certificate and not tls.ca:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if tls.ca:
        _load_ca(context, tls.ca)
    else:
        context.load_default_certs()
    if tls.certificate:
        _load_pair(context, tls)
    return context


def reload_files(server: ssl.SSLContext | None, client: ssl.SSLContext | None, tls: TlsConfig) -> list[bytes]:
    """New connections use what the files hold now. UsageError where a file cannot be used: all stays then.

    Authorities are added, never taken away: those that are trusted although the file does not name them any
    more are given back.
    """
    fresh = server_context(tls), client_context(tls)  # what cannot be used is refused before anything changes
    removed: list[bytes] = []
    for context, reread in zip((server, client), fresh, strict=True):
        if context is None or reread is None:
            continue
        if tls.certificate:
            _load_pair(context, tls)
        if tls.ca and reread.get_ca_certs(True):
            _load_ca(context, tls.ca)
        removed += set(context.get_ca_certs(True)) - set(reread.get_ca_certs(True))
    return removed


def reason(error: ssl.SSLError) -> str:
    """Why a TLS connection to or from somebody failed, for people."""
    if error.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST"):
        return "it does not speak TLS"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    return f"TLS: {error.reason or error}"


def unheard(context: ssl.SSLContext | None, *, known: bool) -> str:
    """Why somebody who was dialled with this closed the connection before saying anything, for people.

    One who is `known` has spoken to us before, so this is no matter of TLS: it stops or has restarted. Who
    asks for certificates refuses only after the handshake, and the event loop does not send the reason.
    """
    hint = "serves TLS" if context is None else "wants a certificate that an authority of its own signed"
    return "it closed the connection without a word" + ("" if known else f"; perhaps it {hint}")


def principal(ssl_object: ssl.SSLObject | None) -> str | None:
    """The verified peer's common name, else its first alternative name; None without a certificate."""
    # A dictionary of nested tuples that no stub describes well.
    certificate: Any = ssl_object.getpeercert() if ssl_object is not None else None
    if not certificate:
        return None
    for part in certificate.get("subject", ()):
        for key, value in part:
            if key == "commonName":
                return str(value)
    for _, value in certificate.get("subjectAltName", ()):
        return str(value)
    return None


def _load_pair(context: ssl.SSLContext, tls: TlsConfig) -> None:
    try:
        context.load_cert_chain(tls.certificate, tls.key or None)
    except FileNotFoundError:
        named = f"--tls-cert {tls.certificate}" + (f" or --tls-key {tls.key}" if tls.key else "")
        raise UsageError(f"no such file: {named}") from None
    except (ssl.SSLError, OSError) as error:
        key = f"--tls-key {tls.key}" if tls.key else "no --tls-key: a PEM file with both is needed then"
        raise UsageError(f"cannot use --tls-cert {tls.certificate} ({key}): {error}") from None


def _load_ca(context: ssl.SSLContext, path: str) -> None:
    try:
        context.load_verify_locations(path)
    except FileNotFoundError:
        raise UsageError(f"no such file: --tls-ca {path}") from None
    except (ssl.SSLError, OSError) as error:
        raise UsageError(f"cannot use --tls-ca {path}: {error}") from None
