"""The TLS of a client: an error names the file that is to blame."""

from __future__ import annotations

from pathlib import Path

import pytest

from postroad.client.addresses import tls
from postroad.errors import UsageError
from postroad.net.certificates import make_authority, make_certificate


def test_an_error_names_the_file_that_cannot_be_used(tmp_path: Path) -> None:
    authority = str(make_authority(tmp_path).certificate)
    alice = make_certificate(tmp_path, "alice", days=1)
    certificate, key, none = str(alice.certificate), str(alice.key), str(tmp_path / "none")
    tls(ca=authority, certificate=certificate, key=key)
    with pytest.raises(UsageError, match=f"the authority {none}"):
        tls(ca=none, certificate=certificate, key=key)
    with pytest.raises(UsageError, match=f"the certificate {certificate} with no key file"):
        tls(ca=authority, certificate=certificate)
    with pytest.raises(UsageError, match=f"the certificate {certificate} with the key {none}"):
        tls(ca=authority, certificate=certificate, key=none)
