"""Who a peer is and what it may do; patterns that cover and overlap, against enumeration."""

from __future__ import annotations

import itertools

import pytest

from postroad.errors import DeniedError, UsageError
from postroad.links.access import (
    Access,
    Action,
    AuthConfig,
    Rule,
    covers,
    hash_token,
    overlap,
    replies_to,
)


def rule(text: str) -> Rule:
    """`alice allow publish orders/#`"""
    principal, verdict, action, *topic = text.split()
    return Rule(principal=principal, allow=verdict == "allow", action=action, topic=" ".join(topic))  # type: ignore[arg-type]


def access(*rules: str, tokens: bool = True, **fields: object) -> Access:
    known = {hash_token("secret"): "alice"} if tokens else {}
    return Access(AuthConfig(tokens=known, rules=tuple(map(rule, rules)), **fields))  # type: ignore[arg-type]


# -- authentication --------------------------------------------------------------------------------


def test_without_configuration_loopback_is_anonymous_and_others_are_refused() -> None:
    open_house = access(tokens=False)
    assert open_house.authenticate(digest="", certificate=None, loopback=True) == "anonymous"
    assert open_house.authenticate(digest=hash_token("any"), certificate="cn", loopback=True) == "anonymous"
    with pytest.raises(DeniedError, match="loopback"):
        open_house.authenticate(digest=hash_token("any"), certificate="cn", loopback=False)


def test_with_tokens_everybody_needs_one() -> None:
    guarded = access()
    assert guarded.authenticate(digest=hash_token("secret"), certificate=None, loopback=False) == "alice"
    for loopback in (False, True):
        for token in ("", "Secret", "secret "):
            with pytest.raises(DeniedError):
                guarded.authenticate(
                    digest=hash_token(token) if token else "", certificate="cn", loopback=loopback
                )


def test_anonymous_beside_tokens_is_for_loopback_only() -> None:
    mixed = access(anonymous=True)
    assert mixed.authenticate(digest="", certificate=None, loopback=True) == "anonymous"
    with pytest.raises(DeniedError, match="loopback"):
        mixed.authenticate(digest="", certificate=None, loopback=False)
    with pytest.raises(DeniedError, match="not known"):
        mixed.authenticate(digest=hash_token("wrong"), certificate=None, loopback=True)


def test_certificates_are_principals_where_accepted() -> None:
    both = access(certificates=True)
    assert both.authenticate(digest="", certificate="carol", loopback=False) == "carol"
    assert both.authenticate(digest=hash_token("secret"), certificate="carol", loopback=False) == "alice"
    with pytest.raises(DeniedError, match="not known"):
        both.authenticate(digest=hash_token("wrong"), certificate="carol", loopback=False)
    with pytest.raises(DeniedError, match="cannot be named"):
        both.authenticate(digest="", certificate="anonymous", loopback=False)
    only = Access(AuthConfig(certificates=True))
    assert only.authenticate(digest="", certificate="carol", loopback=False) == "carol"
    with pytest.raises(DeniedError):
        only.authenticate(digest="", certificate=None, loopback=True)


# -- rules -----------------------------------------------------------------------------------------


def test_defaults() -> None:
    guarded, open_house = access(link_principals=("b2",)), access(tokens=False)
    for who in (guarded, open_house):
        assert who.may_publish("alice", "a/b")
        assert who.may_publish("alice", "$other/a")
        assert not who.may_publish("alice", "$postroad/filters")
        assert not who.may_publish("alice", "$postroad")
        assert who.may_subscribe("alice", "#")
        assert who.may_subscribe("alice", "$postroad/#")
    assert not guarded.may_link("alice")
    assert guarded.may_link("b2")
    assert not guarded.may_admin("alice")
    assert guarded.may_admin("b2")
    assert open_house.may_link("anonymous")
    assert open_house.may_admin("anonymous")
    assert open_house.may_subscribe("anonymous", "")
    assert guarded.may_subscribe("b2", "")
    assert not guarded.may_subscribe("alice", ""), "answers to others are among them"


def test_the_first_rule_that_fits_decides_and_a_named_action_is_closed() -> None:
    guarded = access(
        "bob deny publish orders/secret/#",
        "* allow publish orders/#",
        "sensor-* allow publish readings/+",
        "root allow publish",
        "* allow link",
    )
    assert guarded.may_publish("alice", "orders/secret/x")
    assert not guarded.may_publish("bob", "orders/secret/x")
    assert not guarded.may_publish("bob", "orders/secret")
    assert guarded.may_publish("bob", "orders/eu")
    assert guarded.may_publish("sensor-7", "readings/t")
    assert not guarded.may_publish("sensor-7", "readings/t/u")
    assert not guarded.may_publish("alice", "readings/t")
    assert guarded.may_publish("root", "$postroad/anything")
    assert guarded.may_subscribe("alice", "#"), "no rule names subscribing"
    assert guarded.may_link("alice")
    assert not access("* deny link", link_principals=("b2",)).may_link("b2"), "rules go before the list"
    assert access("ops allow admin").may_admin("ops")
    assert not access("ops allow admin", tokens=False).may_admin("anonymous")
    assert not access("* allow publish #").may_publish("alice", "$postroad/x"), "'#' does not match '$...'"


def test_a_subscription_is_allowed_only_as_a_whole() -> None:
    guarded = access("* deny subscribe orders/secret", "* allow subscribe orders/#", "* allow subscribe b/+")
    assert guarded.may_subscribe("alice", "orders/eu")
    assert guarded.may_subscribe("alice", "orders/eu/#")
    assert not guarded.may_subscribe("alice", "orders/secret")
    assert not guarded.may_subscribe("alice", "orders/+"), "some of it is denied"
    assert not guarded.may_subscribe("alice", "orders/#")
    assert not guarded.may_subscribe("alice", "b/#"), "more than the rule allows"
    assert guarded.may_subscribe("alice", "b/+")
    assert not guarded.may_subscribe("alice", "")
    assert not guarded.may_subscribe("alice", "#")
    assert access("* allow subscribe").may_subscribe("alice", "$postroad/#")
    assert access("* allow subscribe", "alice allow admin").may_subscribe("alice", "")
    assert not access("* allow subscribe #").may_subscribe("alice", ""), "any topic includes '$...'"


def test_no_rule_opens_the_answers_to_others() -> None:
    guarded = access("* allow subscribe $reply/#", "* allow subscribe", "ops allow admin")
    own, other = replies_to("alice"), replies_to("bob")
    assert guarded.may_subscribe("alice", f"{own}/x")
    assert guarded.may_subscribe("alice", f"{own}/#")
    for pattern in ("", "$reply/#", "$reply/+/x", "$reply", f"{other}/x", f"{other}/#"):
        assert not guarded.may_subscribe("alice", pattern), pattern
        assert guarded.may_subscribe("ops", pattern), pattern
    assert not access("* allow subscribe orders/#").may_subscribe("alice", f"{own}/x"), "closed, as any topic"


def test_a_denial_after_the_allowance_does_not_matter() -> None:
    guarded = access("alice allow subscribe orders/#", "* deny subscribe orders/secret")
    assert guarded.may_subscribe("alice", "orders/#")
    assert not guarded.may_subscribe("bob", "orders/secret")


@pytest.mark.parametrize(
    "fields",
    [
        {"action": "dance"},
        {"principal": ""},
        {"principal": "a*b"},
        {"topic": "a/#/b"},
        {"topic": "a/b+"},
        {"topic": "#b"},
        {"action": "link", "topic": "a"},
    ],
)
def test_rules_that_make_no_sense_are_the_callers_error(fields: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        Rule(**({"principal": "*", "allow": True, "action": "publish", "topic": ""} | fields))  # type: ignore[arg-type]


def test_configurations_that_make_no_sense_are_the_callers_error() -> None:
    for tokens in ({"plain": "alice"}, {hash_token("x"): "anonymous"}, {hash_token("x"): ""}):
        with pytest.raises(UsageError):
            AuthConfig(tokens=tokens)
    many: Action = "publish"
    with pytest.raises(UsageError):
        AuthConfig(rules=(Rule(principal="*", allow=True, action=many),) * 1_001)
    assert "secret" not in repr(AuthConfig(tokens={hash_token("secret"): "alice"}))


# -- patterns --------------------------------------------------------------------------------------


def matches(pattern: str, topic: str) -> bool:
    """The definition, level by level."""
    p, t = pattern.split("/"), topic.split("/")
    if p[0] in ("+", "#") and t[0].startswith("$"):
        return False
    if p[-1] == "#":
        return len(t) >= len(p) - 1 and all(a in ("+", b) for a, b in zip(p[:-1], t, strict=False))
    return len(p) == len(t) and all(a in ("+", b) for a, b in zip(p, t, strict=True))


def test_covers_and_overlap_agree_with_enumeration() -> None:
    """All patterns of up to three levels over a small alphabet, against all topics of up to four."""
    levels = ("a", "b", "$s", "")
    topics = ["/".join(t) for n in range(1, 5) for t in itertools.product((*levels, "other"), repeat=n)]
    patterns = [
        "/".join((*head, last))
        for n in range(3)
        for head in itertools.product(("a", "$s", "+"), repeat=n)
        for last in ("a", "b", "$s", "+", "#")
    ]
    sets = {p: frozenset(i for i, topic in enumerate(topics) if matches(p, topic)) for p in patterns}
    for one, other in itertools.product(patterns, repeat=2):
        assert covers(one, other) == (sets[other] <= sets[one]), (one, other)
        assert overlap(one, other) == bool(sets[one] & sets[other]), (one, other)


def test_the_empty_pattern_is_any_topic() -> None:
    assert covers("", "")
    assert covers("", "$s/#")
    assert not covers("#", "")
    assert overlap("", "$s")
    assert overlap("a", "")
