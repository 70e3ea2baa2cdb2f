"""A NodeConfig from a TOML file and flags: one tree, one check, flags win.

A key of the file and the flag that says the same share one path (`tls.certificate`), so what a flag may say
is exactly what the file may say. Sections that mirror a configuration class are read by its field names:
`..._bytes` and `..._window` take a size ("64 MiB"), `..._us` drops its suffix and takes a duration
(`silence = "1 s"`). An unknown key is an error that names the nearest valid one: a misspelt limit is none.
"""

from __future__ import annotations

import difflib
import ipaddress
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar, cast, get_args
from urllib.parse import urlsplit

from postroad.config import BrokerConfig, NodeConfig, TlsConfig, format_address, is_loopback, parse_address
from postroad.discovery.settings import DiscoveryConfig, Weights
from postroad.errors import UsageError, shorten
from postroad.ids import MAX_NAME, name_fits
from postroad.links.access import Action, AuthConfig, Rule, hash_token
from postroad.net.log import FORMS, LEVELS
from postroad.tracking.bloom import MAX_BITS
from postroad.tracking.planner import MAX_FPP
from postroad.units import GIB, SECOND_US, duration_us, size
from postroad.wire.frames import MAX_CONTROL_BYTES

MAX_FILE_BYTES: Final = 1 << 20
SHOWN: Final = 60  # characters of a value in an error
MAX_COUNT: Final = MAX_BITS  # the largest of them is tracking.bits
MAX_SIZE: Final = 1024 * GIB
MAX_LINKS: Final = 1_000
MAX_PUBENDS: Final = 256
MIN_KEEP_US: Final = 2 * SECOND_US  # a broker with its first durable subscription has this long to say so
MAX_DRAIN_US: Final = 3_600 * SECOND_US
SHARED_PRINCIPAL: Final = "shared"  # whoever presents the token of --token
LINK_PRINCIPAL: Final = "brokers"  # whoever presents that of --link-token
# A flag for one replaces the other in the file.
_INSTEAD_OF: Final = {
    "auth.token": "token_file",
    "auth.token_file": "token",
    "auth.link_token": "link_token_file",
    "auth.link_token_file": "link_token",
}
_NONE: Final[tuple[str, ...]] = ()
T = TypeVar("T")


def configure(flags: Mapping[str, object], file: Path | None = None) -> NodeConfig:
    """`flags` maps paths such as `tls.certificate` to values; None means that the flag was not given."""
    tree = _read(file) if file is not None else {}
    for path, value in flags.items():
        if value is not None:
            _put(tree, path, value)
            if path in _INSTEAD_OF:
                tree["auth"].pop(_INSTEAD_OF[path], None)
    return _node(_Table(tree, ""))


def _read(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise UsageError(f"{file} is larger than a configuration can be ({MAX_FILE_BYTES} bytes)")
        return tomllib.loads(data.decode())
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: {error}") from None


def _put(tree: dict[str, Any], path: str, value: object) -> None:
    *sections, key = path.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise UsageError(f"{section!r} is a section, not a value")
    tree[key] = value


class _Table:
    """One section being read: every key is taken once, `done()` complains about the rest."""

    def __init__(self, values: object, where: str) -> None:
        if not isinstance(values, dict):
            raise UsageError(f"{where!r} is a section: write [{where}]")
        self._values: dict[str, Any] = values
        self._where = where
        self._known: list[str] = []

    def path(self, key: str) -> str:
        return f"{self._where}.{key}" if self._where else key

    def take(self, key: str, read: Callable[[Any], T], default: T) -> T:
        self._known.append(key)
        if key not in self._values:
            return default
        try:
            return read(self._values[key])
        except UsageError as error:
            if str(error).startswith(self.path(key)):  # a table in there has said where
                raise
            raise UsageError(f"{self.path(key)}: {error}") from None

    def need(self, key: str, read: Callable[[Any], T]) -> T:
        if key not in self._values:
            raise UsageError(f"{self.path(key)!r} is missing")
        return self.take(key, read, cast(T, None))

    def table(self, key: str) -> _Table:
        self._known.append(key)
        return _Table(self._values.get(key, {}), self.path(key))

    def done(self) -> None:
        for key in self._values:
            if key not in self._known:
                near = difflib.get_close_matches(key, self._known, n=1, cutoff=0.0)
                hint = f"; did you mean {self.path(near[0])!r}?" if near else ""
                raise UsageError(f"unknown setting {self.path(key)!r}{hint}")


def _node(top: _Table) -> NodeConfig:
    name = top.take("name", _name, None)
    listen = top.take("listen", _address, None)
    advertise = top.take("advertise", _reached, None)
    data = top.take("data", lambda value: Path(_text(value)).expanduser(), None)
    links = top.take("links", _addresses, _NONE)
    metrics = top.take("metrics", _metrics, None)
    log = top.take("log", _level, "info")
    log_format = top.take("log_format", _log_format, "text")
    max_connections = top.take("max_connections", _count, 0)
    drain_us = top.take("drain", _drain, NodeConfig().drain_us)
    tls = _tls(top.table("tls"))
    otel = _otel(top.table("otel"))
    link_token, shown, auth = _auth(top.table("auth"), tls)
    defaults = BrokerConfig()
    broker = BrokerConfig(
        limits=_section(top.table("limits"), defaults.limits),
        streams=_section(top.table("streams"), defaults.streams),
        delivery=_section(top.table("delivery"), defaults.delivery),
        durable=_section(top.table("durable"), defaults.durable),
        quotas=_section(top.table("quotas"), defaults.quotas),
        tracking=_section(
            top.table("tracking"),
            defaults.tracking,
            texts=("strategy", "routing", "deliveries"),
            may_be_0=("jitter_us", "cache_bytes"),
        ),
        auth=auth,
        links=replace(
            _section(top.table("connections"), defaults.links, known=("datagrams",)), token=link_token
        ),
        discovery=replace(_discovery(top.table("discovery")), token=shown),
        queues=_section(top.table("queues"), defaults.queues),
        hops=bool(otel),
        dial=links,
    )
    top.done()
    _check_limits(broker)
    _check_listen(listen, auth)
    return NodeConfig(
        name=name,
        listen=listen,
        advertise=advertise,
        data=data,
        metrics=metrics,
        log=log,
        log_format=log_format,
        max_connections=max_connections,
        drain_us=drain_us,
        tls=tls,
        otel=otel,
        broker=broker,
    )


def _otel(table: _Table) -> str:
    endpoint = table.take("endpoint", _url, "")
    table.done()
    return endpoint


def _url(value: object) -> str:
    url = _text(value)
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise UsageError(f"{_shown(url)} is not a URL such as http://127.0.0.1:4318/v1/traces")
    return url


def _tls(table: _Table) -> TlsConfig:
    tls = TlsConfig(
        certificate=table.take("certificate", _text, ""),
        key=table.take("key", _text, ""),
        ca=table.take("ca", _text, ""),
        require_client_certificate=table.take("require_client_certificate", _boolean, False),
    )
    table.done()
    if tls.key and not tls.certificate:
        raise UsageError("a TLS key needs its certificate: add --tls-cert")
    if tls.require_client_certificate and not (tls.certificate and tls.ca):
        raise UsageError(
            "mutual TLS needs --tls-cert, --tls-key and the --tls-ca that signs the peers' certificates"
        )
    return tls


def _auth(table: _Table, tls: TlsConfig) -> tuple[str, str, AuthConfig]:
    """What this broker shows those that it links to, what it shows in discovery, and whom it serves.

    A token that clients share gives them no more than clients need: to link and to administer takes another.
    """
    token, link_token = _secret(table, "token"), _secret(table, "link_token")
    if token and token == link_token:
        raise UsageError(
            "auth.link_token is that of the clients as well: who has it may link as a broker, choose another"
        )
    own = {SHARED_PRINCIPAL: token, LINK_PRINCIPAL: link_token}
    no_digests: dict[str, str] = {}
    digests = table.take("tokens", _token_digests, no_digests)
    link_principals = table.take("link_principals", _texts, _NONE)
    auth = AuthConfig(
        tokens={hash_token(secret): principal for principal, secret in own.items() if secret} | digests,
        certificates=tls.require_client_certificate,
        anonymous=table.take("anonymous", _boolean, False),
        rules=table.take("rules", _rules, ()),
        link_principals=(LINK_PRINCIPAL, *link_principals) if link_token else link_principals,
    )
    table.done()
    return link_token or token, token or link_token, auth


def _secret(table: _Table, key: str) -> str:
    """A token, given as it is or by the file that holds it."""
    token, file = table.take(key, _text, ""), table.take(f"{key}_file", _text, "")
    if token and file:
        raise UsageError(f"give {table.path(key)} or {table.path(key)}_file, not both")
    return token_from(file) if file else token


def _discovery(table: _Table) -> DiscoveryConfig:
    defaults = DiscoveryConfig()
    search, weights = table.table("search"), table.table("weights")
    discovery = DiscoveryConfig(
        enabled=table.take("enabled", _boolean, True),
        nodes=table.take("nodes", _addresses, _NONE),
        multicast=table.take("multicast", _boolean, True),
        group=table.take("group", _reached, ""),
        mdns=table.take("mdns", _boolean, False),
        join=table.take("join", _boolean, False),
        links=table.take("links", _count, defaults.links),
        geography=table.take("geography", _text, ""),
        institution=table.take("institution", _text, ""),
        realms=table.take("realms", _texts, _NONE),
        private_nodes=table.take("private_nodes", _boolean, False),
        remember=table.take("remember", _count, defaults.remember),
        advertise_us=table.take("advertise", _duration, defaults.advertise_us),
        lifetime_s=table.take("lifetime", _duration, defaults.lifetime_s * SECOND_US) // SECOND_US,
        search=replace(
            _section(search, defaults.search, known=("weights",)),
            weights=Weights(
                **{
                    field.name: weights.take(
                        field.name, _number, getattr(defaults.search.weights, field.name)
                    )
                    for field in fields(Weights)
                }
            ),
        ),
    )
    weights.done()
    table.done()
    return discovery


def token_from(file: str) -> str:
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the token file {file}: {error}") from None
    if not text.strip():
        raise UsageError(f"the token file {file} is empty")
    return text.split("\n", 1)[0].strip()


def _check_listen(listen: str | None, auth: AuthConfig) -> None:
    if listen is None or auth.configured or is_loopback(parse_address(listen)[0]):
        return
    raise UsageError(
        f"without authentication a broker serves loopback only: to listen on {listen} configure --token-file"
        " (and TLS), or --mutual with --tls-cert, --tls-key and --tls-ca"
    )


def _section(
    table: _Table,
    defaults: T,
    texts: Collection[str] = (),
    may_be_0: Collection[str] = (),
    known: Collection[str] = (),
) -> T:
    """An object of the same class with the file's values, read as the field names say.

    Fields that are texts are left out, since secrets and names have a place of their own in the file, but
    for `texts`; and so is what is `known` by itself. Durations and sizes `may_be_0` besides those that are by
    default.
    """
    values: dict[str, object] = {}
    names = (
        [field.name for field in fields(defaults)]
        if is_dataclass(defaults)
        else list(getattr(defaults, "__struct_fields__"))  # noqa: B009
    )
    for name in names:
        default = getattr(defaults, name)
        if name in known:
            continue
        if isinstance(default, str):
            if name in texts:
                values[name] = table.take(name, _text, default)
        elif isinstance(default, bool):
            values[name] = table.take(name, _boolean, default)
        elif name.endswith("_us"):
            read = _duration_or_0 if name in may_be_0 else _or_never(_duration, default)
            values[name] = table.take(name.removesuffix("_us"), read, default)
        elif name.endswith(("_bytes", "_window")):
            read = _or_never(_size, 0 if name in may_be_0 else default)
            values[name] = table.take(name, read, default)
        else:
            values[name] = table.take(name, _count, default)
    table.done()
    return type(defaults)(**values)


def _check_limits(broker: BrokerConfig) -> None:
    limits, shape = broker.limits, broker.tracking.shape
    if round(shape.fpp, 9) > MAX_FPP:
        raise UsageError(
            f"tracking: a filter of {shape.m} bits full of {shape.n} messages, with {shape.k} hashes,"
            f" claims {shape.fpp:.0%} of all others: set bits, capacity and hashes together, as"
            " `postroad plan tracking` prints them"
        )
    if limits.event_bytes + MAX_CONTROL_BYTES // 1024 > limits.batch_bytes:
        raise UsageError(
            "limits.batch_bytes must leave room for one event of limits.event_bytes and its headers"
        )
    if broker.durable.pubends > MAX_PUBENDS:
        raise UsageError(f"durable.pubends = {broker.durable.pubends}, the most is {MAX_PUBENDS}")
    if broker.durable.keep_us < MIN_KEEP_US:
        raise UsageError(f"durable.keep is at least {MIN_KEEP_US // SECOND_US} s: brokers need it to report")


# -- values


def _texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise UsageError(f"{_shown(value)} is not a list of texts")
    return tuple(_text(item) for item in value)


def _token_digests(value: object) -> dict[str, str]:
    """The file says principal = "SHA-256 of its token"; a principal may have several, in a list."""
    if not isinstance(value, dict):
        raise UsageError('expected lines such as alice = "SHA-256 of the token in hexadecimal"')
    principals: dict[str, str] = {}
    for name, digests in value.items():
        for digest in _texts(digests if isinstance(digests, list) else [digests]):
            if principals.setdefault(digest.lower(), name) != name:
                raise UsageError(f"{name} and {principals[digest.lower()]} have the same token")
    return principals


def _rules(value: object) -> tuple[Rule, ...]:
    if not isinstance(value, list):
        raise UsageError("write each rule as [[auth.rules]]")
    rules: list[Rule] = []
    for position, rule in enumerate(value):
        table = _Table(rule, f"auth.rules[{position}]")
        rules.append(
            Rule(
                principal=table.need("principal", _text),
                allow=table.need("allow", _boolean),
                action=table.need("action", _action),
                topic=table.take("topic", _text, ""),
            )
        )
        table.done()
    return tuple(rules)


def _action(value: object) -> Action:
    for action in get_args(Action):
        if value == action:
            return cast(Action, action)
    raise UsageError(f"{_shown(value)} is not one of {', '.join(get_args(Action))}")


def _shown(value: object) -> str:
    return shorten(repr(value), SHOWN)


def _text(value: object) -> str:
    if value == "":
        raise UsageError("it is empty")
    if not isinstance(value, str) or "\0" in value:
        raise UsageError(f"{_shown(value)} is not a text")
    return value


def _name(value: object) -> str:
    name = _text(value)
    if not name_fits(name) or " " in name:
        raise UsageError(f"a name has up to {MAX_NAME} bytes, printable, without blanks, not {_shown(name)}")
    return name


def _address(value: object) -> str:
    parse_address(_text(value))
    return _text(value)


def _reached(value: object) -> str:
    """Where others reach this broker, so a place that means the same to all of them."""
    host, port = parse_address(_text(value))
    if port == 0 or is_wildcard(host):
        raise UsageError(f"{_shown(value)} is no address that others can dial")
    return format_address(host, port)


def _addresses(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or len(value) > MAX_LINKS:
        raise UsageError(f"expected a list of up to {MAX_LINKS} addresses")
    return tuple(dict.fromkeys(_address(address) for address in value))


def _metrics(value: object) -> str:
    return "off" if value is False or value == "off" else _address(value)


def _level(value: object) -> str:
    if value not in LEVELS:
        raise UsageError(f"{_shown(value)} is not one of {', '.join(LEVELS)}")
    return str(value)


def _log_format(value: object) -> str:
    if value not in FORMS:
        raise UsageError(f"{_shown(value)} is not one of {', '.join(FORMS)}")
    return str(value)


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{_shown(value)} is neither true nor false")
    return value


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{_shown(value)} is not a positive whole number")
    if value > MAX_COUNT:
        raise UsageError(f"{_shown(value)} is too large: the most is {MAX_COUNT}")
    return value


def _number(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= MAX_COUNT:
        raise UsageError(f"{_shown(value)} is not a number")
    return float(value)


def _size(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str) or size(value) < 1:
        raise UsageError(f"{_shown(value)} is not a size such as '64 KiB' or '1 MiB'")
    if size(value) > MAX_SIZE:
        raise UsageError(f"{_shown(value)} is too large: the most is {MAX_SIZE // GIB} GiB")
    return size(value)


def _duration(value: object) -> int:
    if _duration_or_0(value) == 0:
        raise UsageError(f"{_shown(value)} is not more than 0")
    return _duration_or_0(value)


def _duration_or_0(value: object) -> int:
    if not isinstance(value, str):
        raise UsageError(f"{_shown(value)} is not a duration such as '250 ms' or '30 s'")
    return duration_us(value)


def _drain(value: object) -> int:
    drain_us = _duration_or_0(value)
    if drain_us > MAX_DRAIN_US:
        raise UsageError(f"{_shown(value)} is too long: the most is {MAX_DRAIN_US // SECOND_US} s")
    return drain_us


def _or_never(read: Callable[[object], int], default: int) -> Callable[[object], int]:
    """What is 0 by default, for never or without end, may be 0."""
    return lambda value: 0 if default == 0 and value in (0, "0") and value is not False else read(value)


def is_wildcard(host: str) -> bool:
    """Whether it stands for all addresses of a machine."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
