"""What SIGHUP does to a broker: access rules, tokens, certificates and the level of the log are read again.

A configuration that cannot be used changes nothing, and neither does a setting that only a start reads: the
log says which. A broker never ends because of SIGHUP.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace

from postroad.broker.core import Broker
from postroad.config import NodeConfig, TlsConfig
from postroad.discovery.envelopes import Sealer
from postroad.errors import UsageError
from postroad.links.access import AuthConfig
from postroad.net import log
from postroad.net.log import LOGGER
from postroad.net.server import Server
from postroad.net.tls import reload_files


@dataclass(slots=True, kw_only=True)
class Reloading:
    """Of one broker. `read` makes its configuration anew from its flags and files."""

    read: Callable[[], NodeConfig]
    config: NodeConfig  # as it holds
    server: Server
    core: Broker
    tls_server: ssl.SSLContext | None
    tls_client: ssl.SSLContext | None
    load_sealer: Callable[[TlsConfig], Sealer | None]  # for discovery

    def __call__(self) -> None:
        try:
            asked = self.read()
            after = _reloadable(self.config, asked)
            removed = reload_files(self.tls_server, self.tls_client, after.tls)
            sealer = self.load_sealer(after.tls)
        except UsageError as error:
            LOGGER.error("SIGHUP: everything stays as it is: %s", error)
            return
        log.set_level(after.log)
        before, self.config = self.config, after
        self.server.change(lambda now_us: self.core.reload(after.broker, sealer, now_us))
        changed = sorted({path.partition(".")[0] for path in differences(before, after)})
        certificates = "certificates are read again; " if self.tls_server or self.tls_client else ""
        LOGGER.info("SIGHUP: %schanged: %s", certificates, ", ".join(changed) or "no setting")
        if removed:
            LOGGER.warning("an authority that is not in %s any more is trusted until a restart", after.tls.ca)
        if waiting := list(differences(after, asked)):
            LOGGER.warning("a restart is needed for %s", ", ".join(waiting))


def _reloadable(before: NodeConfig, asked: NodeConfig) -> NodeConfig:
    """`before` with what can change while a broker runs."""
    tls = asked.tls
    if not _same_kind(before, asked):
        tls = before.tls
    # Whoever is let in by certificates is decided by TLS, which goes on asking for them, or not.
    auth = replace(asked.broker.auth, certificates=before.broker.auth.certificates)
    _check_shut(before.broker.auth, auth)
    return replace(
        before,
        log=asked.log,
        tls=tls,
        broker=replace(
            before.broker,
            auth=auth,
            links=replace(before.broker.links, token=asked.broker.links.token),
            discovery=replace(before.broker.discovery, token=asked.broker.discovery.token),
        ),
    )


def _check_shut(before: AuthConfig, after: AuthConfig) -> None:
    """UsageError where something would be free because a text is missing: a file that is half written ends
    before its last rules, or before the last line of one, and is a good file all the same."""
    if before.configured and not after.configured:
        raise UsageError("no token is left, and everybody would be let in; that takes a restart")
    if opened := sorted(before.closed - after.closed):
        raise UsageError(f"no rule about {opened[0]!r} is left, and everybody might; that takes a restart")
    last = after.rules[-1] if after.rules else None
    if last is not None and last.allow and not last.topic and last not in before.rules:
        for rule in before.rules:
            if rule.topic and replace(rule, topic="") == last and rule not in after.rules:
                raise UsageError(f"the last rule about {last.action!r} lost its topic; that takes a restart")


def _same_kind(before: NodeConfig, asked: NodeConfig) -> bool:
    """Whether TLS is used as before, with other files perhaps."""
    old, new = before.tls, asked.tls
    return (bool(old.certificate), bool(old.ca), old.require_client_certificate) == (
        bool(new.certificate),
        bool(new.ca),
        new.require_client_certificate,
    )


def differences(before: object, after: object, path: str = "") -> Iterator[str]:
    """The settings that differ, by their paths in a configuration file."""
    if before == after:
        return
    if is_dataclass(before):
        names = [setting.name for setting in fields(before)]
    else:
        names = list(getattr(before, "__struct_fields__", ()))
    if not names:
        yield path
    for name in names:
        inner = name if not path or path == "broker" else f"{path}.{name}"
        yield from differences(getattr(before, name), getattr(after, name), inner)
