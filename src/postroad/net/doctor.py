"""What `postroad doctor` looks at. Nothing here changes anything, and nothing needs a broker that runs.

Each check gives findings: what was looked at, whether that is well, and what to do where it is not. A check
that cannot be made because an earlier one failed is left out: one line is said about one fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Final, Literal

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from postroad import __version__, kernel
from postroad.config import (
    DEFAULT_DATA,
    DEFAULT_NODE_PORT,
    NodeConfig,
    TlsConfig,
    format_address,
    is_loopback,
    parse_address,
)
from postroad.discovery.settings import SearchSettings
from postroad.errors import PostroadError, UnavailableError, UsageError
from postroad.net.configure import configure, is_wildcard
from postroad.net.finding import OFF, Where, find
from postroad.net.listen import bind_both, bind_metrics
from postroad.net.sealing import load_sealer
from postroad.net.tls import client_context, server_context
from postroad.storage.backup import is_in_use
from postroad.storage.identity import DATABASE
from postroad.units import GIB, MIB, SECOND_US

Result = Literal["ok", "warning", "problem"]

NEEDED_BYTES: Final = 16 * MIB  # a data folder begins with them
SCARCE_BYTES: Final = GIB
SYNCS: Final = 5
SLOW_SYNC_MS: Final = 50.0
EXPIRES_SOON: Final = timedelta(days=30)
REACH_S: Final = 3.0
MANY_FILES: Final = 1_024


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    result: Result
    text: str
    advice: str = ""  # what to do, where it is not ok


def examine(file: Path | None, data: Path | None) -> Iterator[Finding]:
    """What can be looked at without a broker."""
    yield from _installation()
    try:
        config = configure({"data": None if data is None else str(data)}, file)
    except UsageError as error:
        yield Finding("configuration", "problem", str(error), f"correct {file or 'the setting'}")
        return
    yield from _configuration(config, file)
    yield from _certificates(config)
    folder = config.data or Path(DEFAULT_DATA)
    looked = [*_folder(folder)]
    yield from looked
    if looked[0].result != "problem":  # else it may be that its own broker has the ports
        yield from _ports(config, running=is_in_use(folder))
    yield from _links(config)
    yield from _discovery(config)


def _installation() -> Iterator[Finding]:
    python = ".".join(map(str, sys.version_info[:3]))
    yield Finding("version", "ok", f"postroad {__version__}, Python {python}")
    if kernel.COMPILED:
        yield Finding("kernel", "ok", "compiled")
    else:
        advice = "install with a C compiler: pip install --force-reinstall --no-binary postroad postroad"
        yield Finding("kernel", "warning", "not compiled: the slow reference does its work", advice)


def _configuration(config: NodeConfig, file: Path | None) -> Iterator[Finding]:
    used = f"{file} can be used" if file else "the defaults; name a file with --config"
    yield Finding("configuration", "ok", used)
    host = parse_address(config.listen)[0] if config.listen else "127.0.0.1"
    if is_wildcard(host) and config.advertise is None:
        advice = "set `advertise` to the address that others dial"
        yield Finding("configuration", "warning", f"others are not told where {host} is reached", advice)
    if not is_loopback(host) and not config.tls.certificate:
        advice = "make certificates with `postroad certs` and set [tls]"
        yield Finding(
            "configuration", "warning", f"{host} is served without TLS, tokens are readable", advice
        )


# ---- the disk


def _folder(folder: Path) -> Iterator[Finding]:
    place = folder
    while not os.path.exists(place) and place != place.parent:
        place = place.parent
    if not place.is_dir():
        yield Finding("data folder", "problem", f"{place} is not a folder", "choose another with --data")
        return
    if not os.access(place, os.R_OK | os.W_OK | os.X_OK):
        advice = f"give the user {os.geteuid()} the folder, or choose another with --data"
        yield Finding("data folder", "problem", f"{place} cannot be written to", advice)
        return
    if place != folder:
        yield Finding("data folder", "ok", f"{folder} will be made by the first start")
    elif not (folder / DATABASE).exists() and any(folder.iterdir()):
        advice = "choose another with --data"
        yield Finding("data folder", "warning", f"{folder} holds something, and no broker's data", advice)
    elif folder.stat().st_mode & 0o077:
        yield Finding("data folder", "warning", f"others can look into {folder}", f"chmod 700 {folder}")
    else:
        state = "in use by a broker that runs" if is_in_use(folder) else "of no broker that runs"
        yield Finding("data folder", "ok", f"{folder}, {state}")
    yield _free(place)
    yield _sync_time(place)


def _free(place: Path) -> Finding:
    free = shutil.disk_usage(place).free
    shown = f"{free / GIB:.1f} GiB are free" if free >= GIB else f"{free / MIB:.0f} MiB are free"
    if free < NEEDED_BYTES:
        return Finding("disk space", "problem", shown, f"free {NEEDED_BYTES // MIB} MiB: a start needs them")
    if free < SCARCE_BYTES:
        return Finding("disk space", "warning", shown, "make room: on a full disk durable events are refused")
    return Finding("disk space", "ok", shown)


def _sync_time(place: Path) -> Finding:
    """With a file that has no name, so nothing is left of it."""
    times: list[float] = []
    try:
        file = os.open(place, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            for _ in range(SYNCS):
                os.write(file, bytes(4096))
                began = time.perf_counter()
                os.fdatasync(file)
                times.append((time.perf_counter() - began) * 1000)
        finally:
            os.close(file)
    except OSError as error:
        return Finding(
            "disk sync", "warning", f"cannot be measured in {place}: {error.strerror}", "try --data"
        )
    shown = f"{median(times):.1f} ms (median of {SYNCS} syncs of 4 KiB)"
    if median(times) > SLOW_SYNC_MS:
        return Finding("disk sync", "warning", shown, "durable publishes wait for it: use a faster disk")
    return Finding("disk sync", "ok", shown)


# ---- the network


def _ports(config: NodeConfig, *, running: bool) -> Iterator[Finding]:
    soft = _open_files()
    if soft < MANY_FILES:
        yield Finding("open files", "warning", f"at most {soft}", "raise the limit: ulimit -n 65536")
    else:
        yield Finding("open files", "ok", f"at most {soft}")
    if running:
        yield Finding("ports", "ok", "not tried: the broker of this data folder runs, and has them")
        return
    try:
        with contextlib.ExitStack() as stack:
            for bound in bind_both(config.listen):
                stack.enter_context(bound)
            metrics = bind_metrics(config.metrics)
            if metrics is not None:
                stack.enter_context(metrics)
    except UsageError as error:
        yield Finding("ports", "problem", str(error), "stop who has it, or choose another address")
    else:
        yield Finding("ports", "ok", f"{config.listen or 'the default address'} is free (TCP and UDP)")


def _open_files() -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if hard == resource.RLIM_INFINITY else hard


def _links(config: NodeConfig) -> Iterator[Finding]:
    for address in config.broker.dial:
        host, port = parse_address(address)
        try:
            with socket.create_connection((host, port), REACH_S):
                yield Finding("link", "ok", f"{address} accepts connections")
        except OSError as error:
            advice = "start that broker, or look at its address, the route and the firewall"
            yield Finding(
                "link", "problem", f"{address} cannot be reached: {error.strerror or error}", advice
            )


def _discovery(config: NodeConfig) -> Iterator[Finding]:
    discovery = config.broker.discovery
    if not discovery.nodes and not discovery.join:
        return
    mutual = config.tls.require_client_certificate
    try:
        where = Where(
            nodes=discovery.nodes,
            interface="" if discovery.multicast else OFF,
            remember=False,
            token=discovery.token,
            sealer=load_sealer(config.tls) if mutual else None,
            search=SearchSettings(timeout_us=round(REACH_S * SECOND_US)),
        )
        result = asyncio.run(find(where))
    except UnavailableError as error:
        advice = f"look at the discovery nodes (UDP port {DEFAULT_NODE_PORT}), and at the firewall"
        # The first broker of a network finds nobody, and is right.
        yield Finding("discovery", "warning", str(error).partition(";")[0], advice)
    except PostroadError as error:
        yield Finding("discovery", "problem", str(error), "correct [discovery]")
    else:
        yield Finding("discovery", "ok", f"{len(result.candidates)} brokers answered")
        for host, port in result.silent_nodes:
            silent = f"the discovery node {format_address(host, port)} did not answer"
            yield Finding("discovery", "problem", silent, "start it, or look at the firewall (UDP)")


# ---- certificates


def _certificates(config: NodeConfig) -> Iterator[Finding]:
    tls = config.tls
    if not tls.certificate and not tls.ca:
        return
    try:
        server_context(tls)
        client_context(tls)
        chain = _load(tls.certificate)
        authorities = _load(tls.ca)
    except (PostroadError, OSError, ValueError) as error:
        yield Finding("certificate", "problem", str(error), "look at the files of [tls]")
        return
    for certificate in (*chain[:1], *authorities):
        yield _validity(certificate)
    if chain:
        yield from _signed(chain, authorities)
        yield from _named(chain[0], config)
        yield from _key_rights(tls)


def _load(file: str) -> list[x509.Certificate]:
    return x509.load_pem_x509_certificates(Path(file).read_bytes()) if file else []


def _common_name(certificate: x509.Certificate) -> str:
    return certificate.subject.rfc4514_string() or f"number {certificate.serial_number:x}"


def _validity(certificate: x509.Certificate) -> Finding:
    now, name = datetime.now(UTC), _common_name(certificate)
    left = certificate.not_valid_after_utc - now
    renew = "make it anew (`postroad certs ... --renew`), then SIGHUP"
    if certificate.not_valid_before_utc > now:
        return Finding("certificate", "problem", f"{name} is not valid yet", "look at this machine's clock")
    if left <= timedelta(0):
        return Finding("certificate", "problem", f"{name} is over since {-left.days} days", renew)
    if left < EXPIRES_SOON:
        return Finding("certificate", "warning", f"{name} is valid for {left.days} days more", renew)
    return Finding("certificate", "ok", f"{name} is valid for {left.days} days more")


def _signed(chain: list[x509.Certificate], authorities: list[x509.Certificate]) -> Iterator[Finding]:
    if not authorities:
        return
    last = chain[-1]
    for authority in authorities:
        with contextlib.suppress(ValueError, TypeError, InvalidSignature):
            last.verify_directly_issued_by(authority)
            yield Finding("certificate", "ok", f"signed by {_common_name(authority)}")
            return
    text = f"{_common_name(last)} is not signed by the authority of `tls.ca`"
    yield Finding("certificate", "problem", text, "use certificates of one authority for all brokers")


def _named(certificate: x509.Certificate, config: NodeConfig) -> Iterator[Finding]:
    address = config.advertise or config.listen
    host = parse_address(address)[0] if address else "127.0.0.1"
    if is_wildcard(host):
        return
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = x509.SubjectAlternativeName([])
    known = [*names.get_values_for_type(x509.DNSName)]
    known += [str(number) for number in names.get_values_for_type(x509.IPAddress)]
    wild = any(name.startswith("*.") and host.partition(".")[2] == name[2:] for name in known)
    if host in known or wild:
        yield Finding("certificate", "ok", f"names {host}")
    else:
        text = (
            f"does not name {host}, where others reach this broker; it names {', '.join(known) or 'nobody'}"
        )
        yield Finding(
            "certificate", "problem", text, f"make one with `postroad certs broker NAME --host {host}`"
        )


def _key_rights(tls: TlsConfig) -> Iterator[Finding]:
    key = Path(tls.key or tls.certificate)
    if key.stat().st_mode & 0o077:
        yield Finding("certificate", "warning", f"others can read the key {key}", f"chmod 600 {key}")
