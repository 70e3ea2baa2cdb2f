"""Topics and patterns."""

from __future__ import annotations

import pytest

from postroad.errors import TooLargeError, UsageError
from postroad.events.topics import check_pattern, check_topic, pattern_matches, topic_number
from postroad.wire.frames import DEFAULT_LIMITS


@pytest.mark.parametrize(
    "topic", ["a", "a/b", "/", "//", "a//b", "/a", "a/", "$postroad/x", "größe/日本", " ", "a b"]
)
def test_good_topics_are_good_patterns_and_match_themselves(topic: str) -> None:
    check_topic(topic, DEFAULT_LIMITS)
    check_pattern(topic, DEFAULT_LIMITS)
    assert pattern_matches(topic, topic)


@pytest.mark.parametrize("topic", ["", "a\0", "a\nb", "\x7f", "\x85", "a\x9f", "\ud800"])
def test_bad_as_topic_and_as_pattern(topic: str) -> None:
    with pytest.raises(UsageError):
        check_topic(topic, DEFAULT_LIMITS)
    with pytest.raises(UsageError):
        check_pattern(topic, DEFAULT_LIMITS)


@pytest.mark.parametrize("topic", ["+", "#", "a/+", "a/#", "a+b", "a#"])
def test_nobody_publishes_to_a_wildcard(topic: str) -> None:
    with pytest.raises(UsageError, match="wildcard"):
        check_topic(topic, DEFAULT_LIMITS)


@pytest.mark.parametrize("pattern", ["+", "#", "a/+", "a/#", "+/+", "+/a/#", "/+", "+/"])
def test_good_patterns(pattern: str) -> None:
    check_pattern(pattern, DEFAULT_LIMITS)


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("a+", "whole level"),
        ("a/b#", "whole level"),
        ("++", "whole level"),
        ("#/a", "last level"),
        ("a/#/#", "last"),
    ],
)
def test_bad_patterns(pattern: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        check_pattern(pattern, DEFAULT_LIMITS)


def test_limits() -> None:
    check_topic("x" * DEFAULT_LIMITS.topic_bytes, DEFAULT_LIMITS)
    check_topic("/" * (DEFAULT_LIMITS.topic_depth - 1), DEFAULT_LIMITS)
    for topic in ("x" * (DEFAULT_LIMITS.topic_bytes + 1), "é" * 513, "/" * DEFAULT_LIMITS.topic_depth):
        with pytest.raises(TooLargeError):
            check_topic(topic, DEFAULT_LIMITS)
        with pytest.raises(TooLargeError):
            check_pattern(topic, DEFAULT_LIMITS)


@pytest.mark.parametrize(
    "topic", ["x" * (4 << 20), "\0" * (4 << 20), "\ud800" * (4 << 20), "/" * (4 << 20), "a+/" * (1 << 20)]
)
def test_what_is_wrong_with_a_long_text_is_said_shortly(topic: str) -> None:
    for check in (check_topic, check_pattern):
        with pytest.raises(UsageError) as caught:
            check(topic, DEFAULT_LIMITS)
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("a/b", ["a/b"], ["a", "a/c", "a/b/c", "A/b", "a/b/"]),
        ("a/+", ["a/b", "a/"], ["a", "a/b/c", "b/b"]),
        ("+/b", ["a/b", "/b"], ["b", "$a/b", "a/b/c"]),
        ("a/+/c", ["a/b/c", "a//c"], ["a/c", "a/b/b/c"]),
        ("a/#", ["a", "a/b", "a/b/c", "a/"], ["ab", "b", "b/a"]),
        ("#", ["a", "a/b", "/", "/$a"], ["$postroad", "$postroad/x"]),
        ("+", ["a"], ["a/b", "$a", "/"]),
        ("+/#", ["a", "a/b", "/"], ["$a/b"]),
        ("/#", ["/", "/a", "/a/b"], ["a"]),
        ("$postroad/#", ["$postroad", "$postroad/x/y"], ["a", "$postroadx"]),
        ("$postroad/+", ["$postroad/x"], ["$postroad"]),
    ],
)
def test_matching(pattern: str, yes: list[str], no: list[str]) -> None:
    assert [topic for topic in yes if not pattern_matches(pattern, topic)] == []
    assert [topic for topic in no if pattern_matches(pattern, topic)] == []


def test_topic_number_is_fnv_1a() -> None:
    """The vectors that the authors of FNV publish for FNV-1a of 64 bits."""
    assert topic_number(b"") == 0xCBF29CE484222325
    assert topic_number(b"a") == 0xAF63DC4C8601EC8C
    assert topic_number(b"foobar") == 0x85944171F73967E8
