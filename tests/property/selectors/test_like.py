"""LIKE, compiled and in plain Python, against a table of all prefixes of pattern and text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from postroad.events.batch import BatchBuilder, EventBatch
from postroad.kernel.like_reference import Sign, like_matcher
from postroad.selectors import MatchIndex, Selector
from postroad.selectors.predicate import like_parts
from postroad.wire.frames import DEFAULT_LIMITS

# Characters of one to four bytes, the ends of each length, and such as share their first byte.
LETTERS = ["a", "b", "\0", "\x7f", "\x80", "é", "è", "\u07ff", "\u0800", "€", "\uffff", "😀", "\U0010ffff"]


def naive(signs: list[Sign], text: str) -> bool:
    """reached[n]: the text so far is what the first n signs allow."""
    reached = [True] + [all(sign == "" for sign in signs[:n]) for n in range(1, len(signs) + 1)]
    for letter in text:
        following = [False]
        for n, sign in enumerate(signs, 1):
            if sign == "":
                following.append(following[n - 1] or reached[n])
            else:
                following.append(reached[n - 1] and sign in (None, letter))
        reached = following
    return reached[-1]


def quoted(signs: list[Sign]) -> str:
    made = "".join(
        "%" if sign == "" else "_" if sign is None else "!" + sign if sign in ("%", "_", "!") else sign
        for sign in signs
    )
    return "'" + made.replace("'", "''") + "' ESCAPE '!'"


def compiled(signs: list[Sign], text: str) -> bool:
    # Of three targets the first is LIKE, the second its negation, the third LIKE within a condition.
    index = MatchIndex()
    pattern = quoted(signs)
    for key, where in enumerate((f"a LIKE {pattern}", f"a NOT LIKE {pattern}", f"a LIKE {pattern} OR b = c")):
        index.add(key, Selector.parse("", where), key)
    builder = BatchBuilder()
    builder.add(bytes(16), "t", {"a": text}, b"", DEFAULT_LIMITS)
    groups = index.match(EventBatch.parse(builder.finish(channel=1), DEFAULT_LIMITS))
    targets = sorted(target for group in groups for target in group.targets)
    assert targets in ([0, 2], [1])
    return targets == [0, 2]


SIGNS: Any = st.lists(st.one_of(st.sampled_from(["a", "b", "é"]), st.sampled_from([None, ""])), max_size=12)
WILD: Any = st.lists(
    st.one_of(st.sampled_from([*LETTERS, "%", "_", "!", "'"]), st.sampled_from([None, ""])), max_size=8
)
TEXT = st.text(st.sampled_from(["a", "b", "é"]), max_size=16)
WILD_TEXT = st.text(st.sampled_from([*LETTERS, "%", "_", "!", "'"]), max_size=12)


@settings(max_examples=500, deadline=None)
@given(st.one_of(st.tuples(SIGNS, TEXT), st.tuples(WILD, WILD_TEXT)))
@example(([""], ""))
@example(([], ""))
@example(([None, "", None], "a"))
@example((["a", "", "a"], "a"))
@example((["", "a", None, ""], "aaa"))
def test_all_three_agree(case: tuple[list[Sign], str]) -> None:
    signs, text = case
    expected = naive(signs, text)
    assert like_matcher(signs)(text) is expected
    assert compiled(signs, text) is expected


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 70), st.integers(1, 150), st.integers(0, 3), st.sampled_from(["a", "é", "😀"]), st.data()
)
def test_pieces_longer_than_a_word(shift: int, length: int, wrong: int, letter: str, data: Any) -> None:
    """Pieces that begin and end anywhere in a word of bits, found behind false beginnings."""
    piece: list[Sign] = [data.draw(st.sampled_from(["x", letter, None])) for _ in range(length)]
    exact = "".join("y" if sign is None else sign for sign in piece)
    almost = exact[:-1] * wrong
    signs = [*["z"] * shift, "", *piece, "", "z"]
    for text in ("z" * shift + almost + exact + "z", "z" * shift + almost + "z"):
        expected = naive(signs, text)
        assert like_matcher(signs)(text) is expected
        assert compiled(signs, text) is expected


class CountedText(str):
    """Counts how often one of its characters is looked at."""

    looks = 0

    def __getitem__(self, at: Any) -> str:
        self.looks += 1
        return super().__getitem__(at)


@pytest.mark.parametrize("pattern", ["%a" + "_" * 250 + "b%", "%" + "_a" * 120 + "b%", "%a_%a_%a_b%_c"])
def test_every_character_of_a_text_is_looked_at_once(pattern: str) -> None:
    signs = like_parts(pattern, "")
    text = CountedText("a" * 20_000)
    assert like_matcher(signs)(text) is False
    assert text.looks <= len(text) + len(signs)


def test_the_longest_text_is_searched_to_its_end() -> None:
    text = "é" * 30_000
    for end, expected in (("b", True), ("c", False)):
        signs: list[Sign] = ["", "é", *[None] * 200, end, "", "d"]
        assert compiled(signs, text + "bd") is expected
