"""Who a peer is and what it may do.

A principal is the name behind a token or a certificate. Tokens are kept as SHA-256 digests only.
Without any authentication configured everybody is `anonymous`, and served on loopback only. Rules are
read in order and the first that fits decides. An action that at least one rule names is closed: what no
rule allows is denied. An action that no rule names keeps its default (table: docs/reference/security.md).

A subscription is a set of topics, not one. It is allowed only if a single rule allows all of it before
any rule denies some of it; a pattern that rules allow piecewise is refused rather than narrowed.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from postroad.errors import DeniedError, UsageError, shorten
from postroad.ids import MAX_PRINCIPAL, principal_fits

Action = Literal["publish", "subscribe", "send", "receive", "link", "admin"]

ANONYMOUS: Final = "anonymous"
RESERVED: Final = "$postroad/#"  # the network's own history; clients read it, brokers write it
REPLIES: Final = "$reply"  # first level of the topics of answers, each of one principal
MAX_TOKENS: Final = 1_000
MAX_RULES: Final = 1_000
MAX_REMEMBERED: Final = 10_000
_DIGEST_CHARACTERS: Final = 64
_REPLIES_DIGITS: Final = 32


def hash_token(token: str) -> str:
    """What a configuration stores in place of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


def owning(principal: str) -> str:
    """Who owns what this principal makes: what anonymous peers make belongs to nobody in particular, ""."""
    return "" if principal == ANONYMOUS else principal


def replies_to(principal: str) -> str:
    """Where this principal has its answers: the topics below, which nobody else reads."""
    return f"{REPLIES}/{hashlib.sha256(principal.encode()).hexdigest()[:_REPLIES_DIGITS]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """`principal` is a name, a prefix ending in `*`, or `*`; `topic` a pattern, "" for any topic at all. Of
    `send` and `receive` it is a pattern of applications: whom to send to, whom to receive as."""

    principal: str
    allow: bool
    action: Action
    topic: str = ""

    def __post_init__(self) -> None:
        if self.action not in get_args(Action):
            raise UsageError(f"{self.action!r} is not an action; one of {', '.join(get_args(Action))}")
        if not self.principal or "*" in self.principal[:-1]:
            raise UsageError(f"{self.principal!r} is not a principal, a prefix ending in '*', or '*'")
        if self.topic and self.action in ("link", "admin"):
            raise UsageError(f"a rule about {self.action!r} has no topic")
        levels = self.topic.split("/")
        if "#" in levels[:-1] or any(len(level) > 1 and ("+" in level or "#" in level) for level in levels):
            raise UsageError(f"{self.topic!r} is not a topic pattern: '+' is a whole level, '#' the last one")

    def names(self, principal: str) -> bool:
        if self.principal.endswith("*"):
            return principal.startswith(self.principal[:-1])
        return principal == self.principal


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthConfig:
    tokens: Mapping[str, str] = field(default_factory=dict)  # SHA-256 of a token, hexadecimal -> principal
    certificates: bool = False  # a verified certificate's name is a principal
    anonymous: bool = False  # serve anonymous peers on loopback beside authenticated ones
    rules: tuple[Rule, ...] = ()
    link_principals: tuple[str, ...] = ()  # may link as brokers and administer, without a rule

    def __post_init__(self) -> None:
        if len(self.tokens) > MAX_TOKENS or len(self.rules) > MAX_RULES:
            raise UsageError(
                f"{len(self.tokens)} tokens and {len(self.rules)} access rules; at most {MAX_TOKENS} and "
                f"{MAX_RULES} are allowed"
            )
        for digest, principal in self.tokens.items():
            if len(digest) != _DIGEST_CHARACTERS or set(digest) - set("0123456789abcdef"):
                raise UsageError(
                    f"the token of {principal!r} is configured by {len(digest)} characters: give its "
                    f"SHA-256, {_DIGEST_CHARACTERS} digits in lower-case hexadecimal"
                )
            if not principal or principal == ANONYMOUS or "*" in principal or not principal_fits(principal):
                raise UsageError(
                    f"{shorten(principal, 40)!r} cannot be a principal: it has 1 to {MAX_PRINCIPAL} "
                    f"printable bytes without '*', and is not {ANONYMOUS!r}"
                )

    @property
    def configured(self) -> bool:
        """Whether peers can authenticate at all. If not, a broker serves loopback only."""
        return bool(self.tokens) or self.certificates

    @property
    def closed(self) -> frozenset[str]:
        """The actions that rules name: what none allows is denied."""
        return frozenset(rule.action for rule in self.rules)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaConfig:
    """What one principal may have at this broker. Anonymous clients are one principal together."""

    connections: int = 50_000
    subscriptions: int = 1_000_000  # plain ones
    names: int = 20_000  # durable subscriptions that belong to it
    readers: int = 1_024
    condition_cost: int = 12 << 20  # a million different conditions of the usual kind, or 1,500 searches
    requests: int = 2_000  # a second
    stored_bytes: int = 0  # of durable events that it published; 0: half of the disk


class Access:
    """Answers for one configuration."""

    __slots__ = ("_closed", "_config", "_publishing")

    def __init__(self, config: AuthConfig) -> None:
        self._config = config
        self._closed = config.closed
        self._publishing: dict[tuple[str, str], bool] = {}  # what may_publish answered: asked for every batch

    def authenticate(self, *, digest: str, certificate: str | None, loopback: bool) -> str:
        """The principal of a peer; DeniedError if it is nobody who may be served. `digest` is that of its
        token, "" without one.

        A wrong token is refused even where a certificate or loopback would do: the peer meant something
        by it, and a typing error must not turn into other rights.
        """
        config = self._config
        if digest and config.tokens:
            principal = ""
            for known, name in config.tokens.items():  # all of them: time says nothing about which
                if hmac.compare_digest(known, digest):
                    principal = name
            if not principal:
                raise DeniedError("the token is not known here")
            return principal
        if certificate and config.certificates:
            if certificate == ANONYMOUS:
                raise DeniedError(f"a certificate cannot be named {ANONYMOUS!r}")
            if not principal_fits(certificate):
                raise DeniedError(
                    f"a certificate's name has up to {MAX_PRINCIPAL} bytes and is printable, not "
                    f"{shorten(certificate, 40)!r}"
                )
            return certificate
        if config.configured and not config.anonymous:
            raise DeniedError(
                "authentication is required: a token, or a certificate where those are accepted"
            )
        if not loopback:
            raise DeniedError(
                "anonymous peers are served on loopback only: configure tokens or certificates at this broker"
            )
        return ANONYMOUS

    def rights(self, principal: str) -> tuple[object, ...]:
        """All that decides what this principal may do: two configurations that agree in it grant it the
        same."""
        rules = tuple(rule for rule in self._config.rules if rule.names(principal))
        trusted = principal in self._config.link_principals or not self._config.configured
        return rules, self._closed, trusted

    def serves(self, principal: str) -> bool:
        """Whether such a peer may be served here at all; of others its token or certificate decides."""
        return principal != ANONYMOUS or not self._config.configured or self._config.anonymous

    def may_publish(self, principal: str, topic: str) -> bool:
        key = (principal, topic)
        known = self._publishing.get(key)
        if known is None:
            if len(self._publishing) >= MAX_REMEMBERED:
                self._publishing.clear()
            known = self._publishing[key] = self._may_publish(principal, topic)
        return known

    def _may_publish(self, principal: str, topic: str) -> bool:
        for rule in self._config.rules:
            if rule.action == "publish" and rule.names(principal) and covers(rule.topic, topic):
                return rule.allow
        return "publish" not in self._closed and not covers(RESERVED, topic)

    def may_subscribe(self, principal: str, pattern: str) -> bool:
        """Whether every topic of the pattern ("" for any) may be read. Rules do not open the answers of
        others: who asked alone has those, and administrators."""
        if overlap(f"{REPLIES}/#", pattern) and not covers(f"{replies_to(principal)}/#", pattern):
            return self.may_admin(principal) and self._may_subscribe(principal, pattern)
        return self._may_subscribe(principal, pattern)

    def _may_subscribe(self, principal: str, pattern: str) -> bool:
        for rule in self._config.rules:
            if rule.action != "subscribe" or not rule.names(principal):
                continue
            if rule.allow and covers(rule.topic, pattern):
                return True
            if not rule.allow and overlap(rule.topic, pattern):
                return False
        return "subscribe" not in self._closed

    def may_read_some(self, principal: str, pattern: str) -> bool:
        """Whether some topic of the pattern may be read."""
        for rule in self._config.rules:
            if rule.action != "subscribe" or not rule.names(principal):
                continue
            if rule.allow and overlap(rule.topic, pattern):
                return True
            if not rule.allow and covers(rule.topic, pattern):
                return False
        return "subscribe" not in self._closed

    def may_send(self, principal: str, application: str) -> bool:
        return self._may_use(principal, "send", application)

    def may_receive(self, principal: str, application: str) -> bool:
        """Whether it may receive as that application. Whose the name is, is another question."""
        return self._may_use(principal, "receive", application)

    def _may_use(self, principal: str, action: Action, application: str) -> bool:
        for rule in self._config.rules:
            if rule.action == action and rule.names(principal) and covers(rule.topic, application):
                return rule.allow
        return action not in self._closed

    def may_link(self, principal: str) -> bool:
        """Whether the peer may join the network as a broker; such a peer sees and routes everything."""
        return self._trusted(principal, "link")

    def may_admin(self, principal: str) -> bool:
        """Whether the peer may ask for changes of the broker. Asking for its status needs no right."""
        return self._trusted(principal, "admin")

    def may_use(self, principal: str, owner: str) -> bool:
        """Whether the peer may use a name that belongs to `owner`; "" is nobody in particular."""
        return owner in ("", owning(principal)) or self.may_admin(principal)

    def _trusted(self, principal: str, action: Action) -> bool:
        """Rules decide. Then brokers are trusted, and where nobody can authenticate, everybody."""
        for rule in self._config.rules:
            if rule.action == action and rule.names(principal):
                return rule.allow
        if principal in self._config.link_principals:
            return True
        return not self._config.configured and action not in self._closed


def _first_matches(wide: str, narrow: str) -> bool:
    """A leading wildcard does not match a first level that begins with `$`."""
    return not (wide in ("+", "#") and narrow.startswith("$"))


def covers(wide: str, narrow: str) -> bool:
    """Whether every topic that matches the pattern `narrow` matches `wide`. A topic is a pattern too."""
    if not wide or not narrow:
        return not wide
    # A topic has at least one level, so '#' says no more than '+/#'.
    a, b = wide.split("/"), ("+/#" if narrow == "#" else narrow).split("/")
    if not _first_matches(a[0], b[0]):
        return False
    for at, level in enumerate(a):
        if level == "#":
            return True
        if at == len(b):
            return False
        if b[at] == "#":
            # `narrow` goes on for any number of levels, or stops before this one; only '#' keeps up.
            return False
        if level != "+" and level != b[at]:
            return False
    return len(a) == len(b)


def overlap(pattern: str, other: str) -> bool:
    """Whether some topic matches both patterns."""
    if not pattern or not other:
        return True
    a, b = pattern.split("/"), other.split("/")
    if not (_first_matches(a[0], b[0]) and _first_matches(b[0], a[0])):
        return False
    for x, y in zip(a, b, strict=False):
        if x == "#" or y == "#":
            return True
        if x != y and x != "+" and y != "+":
            return False
    # One may be longer by a final '#', which also matches the level above it.
    longer = a if len(a) > len(b) else b
    return len(a) == len(b) or (abs(len(a) - len(b)) == 1 and longer[-1] == "#")
