"""Where brokers are, as people write it, and the TLS to reach them with."""

from __future__ import annotations

import ssl

from postroad.config import format_address, parse_address
from postroad.errors import UsageError


def parse_addresses(text: str) -> tuple[str, ...]:
    """`a:7420,b:7420` as a list, each with its port and none twice."""
    if not isinstance(text, str):
        raise UsageError(f"an address is a text such as 127.0.0.1:7420, not {type(text).__name__}")
    return tuple(dict.fromkeys(format_address(*parse_address(part)) for part in text.split(",")))


def tls(*, ca: str | None = None, certificate: str | None = None, key: str | None = None) -> ssl.SSLContext:
    """A context for `connect(tls=...)`: whom to trust (the system's authorities unless `ca` names a file),
    and the client's own certificate where the broker asks for one."""
    files = f"the authority {ca}"
    try:
        context = ssl.create_default_context(cafile=ca)
        if certificate is not None:
            files = f"the certificate {certificate} with {'no key file' if key is None else f'the key {key}'}"
            context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"cannot use {files}: {error}") from None
    return context
