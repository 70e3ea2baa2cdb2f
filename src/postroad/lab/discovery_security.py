"""What certificates cost discovery (Pallickara et al., section 9.1, figures 13 and 14).

Certificates of P-256, made for the experiment. Figure 13: a certificate that was never seen is checked.
Figure 14: a request is signed and encrypted, and then opened, its signature verified, by who it was for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median, stdev
from tempfile import TemporaryDirectory
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from postroad.discovery.envelopes import Envelopes
from postroad.discovery.sealing import CertificateSealer
from postroad.errors import BugError
from postroad.lab.discovery_figures import draw_pairs
from postroad.net.certificates import AUTHORITY, make_authority, make_certificate
from postroad.wire.discovery import Request

SECONDS: Final = 3.0  # of each figure
STRANGERS: Final = 200  # certificates to check
MOST: Final = 5_000
PAPER: Final = {
    "validate.mean_ms": 6.6104,
    "validate.deviation_ms": 3.7214,
    "validate.max_ms": 20.51,
    "validate.min_ms": 4.039,
    "request.mean_ms": 25.9497,
    "request.deviation_ms": 2.7311,
}
NOTES: Final = (
    "The paper: Java 1.4 on a Pentium M of 2 GHz, RSA certificates. `request` is signing, encrypting,"
    " decrypting and verifying one request; its parts are `sign_encrypt` and `decrypt_verify`. The paper's"
    " table of figure 14 has its greatest and least exchanged; they are left out.",
)

Figures = dict[str, float]


def run(seconds: float, out: Path | None, progress: Callable[[str], None]) -> tuple[Figures, Figures]:
    progress("making certificates")
    with TemporaryDirectory() as made:
        folder = Path(made)
        make_authority(folder)
        alice, bob = (_sealer(folder, name) for name in ("alice", "bob"))
        measured = {**_validate(folder, bob, seconds), **_seal(alice, bob, seconds)}
    if out is not None:
        names = ("validate.mean_ms", "request.mean_ms")
        draw_pairs(measured, PAPER, names, "Figures 13 and 14. What security costs", out, "figure13-14")
    return measured, dict(PAPER)


def _validate(folder: Path, bob: CertificateSealer, seconds: float) -> Figures:
    strangers = [make_certificate(folder, f"stranger {number}", days=1) for number in range(STRANGERS)]
    pems = [files.certificate.read_bytes() for files in strangers]
    ders = [x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER) for pem in pems]
    now_us = time.time_ns() // 1000
    took: list[float] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until and len(took) < MOST:
        fresh = bob.afresh()
        for der in ders:
            began = time.perf_counter()
            fresh.check(der, now_us)
            took.append((time.perf_counter() - began) * 1000)
    return _figures("validate", took)


def _seal(alice: CertificateSealer, bob: CertificateSealer, seconds: float) -> Figures:
    sender, receiver = Envelopes(alice), Envelopes(bob)
    now_us = time.time_ns() // 1000
    request = Request(
        uuid=bytes(16),
        attempt=1,
        sent_us=now_us,
        cookie=bytes(24),
        credential=bytes(24),
        key=alice.public_key,
    )
    whole: list[float] = []
    sealing: list[float] = []
    opening: list[float] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until and len(whole) < MOST:
        began = time.perf_counter()
        data = sender.pack(request, bob.public_key)
        sealed = time.perf_counter()
        opened = receiver.unpack(data, now_us)
        ended = time.perf_counter()
        if opened.message != request or opened.certificate != "alice":
            raise BugError("what was sealed is not what was opened")
        sealing.append((sealed - began) * 1000)
        opening.append((ended - sealed) * 1000)
        whole.append((ended - began) * 1000)
    return {
        **_figures("request", whole),
        **_figures("sign_encrypt", sealing),
        **_figures("decrypt_verify", opening),
    }


def _figures(name: str, took: list[float]) -> Figures:
    return {
        f"{name}.mean_ms": fmean(took),
        f"{name}.median_ms": median(took),
        f"{name}.deviation_ms": stdev(took),
        f"{name}.max_ms": max(took),
        f"{name}.min_ms": min(took),
    }


def _sealer(folder: Path, name: str) -> CertificateSealer:
    files = make_certificate(folder, name, days=1)
    return CertificateSealer(
        files.certificate.read_bytes(), files.key.read_bytes(), (folder / f"{AUTHORITY}.pem").read_bytes()
    )
