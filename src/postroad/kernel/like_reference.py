"""LIKE in plain Python: what `match_like.pxi` means, and what runs where nothing was compiled.

A pattern is a sequence of signs: a character, None for any one character, "" for any number of them. The
pieces between the latter are looked for one after the other, each as far left as it can be, so no choice is
ever taken back. Looking for a piece that has "any one character" inside is where a search by hand goes back
over the text; here all places where the piece may have begun are followed at once, a bit each (Shift-And:
Baeza-Yates and Gonnet, "A new approach to text searching", 1992). So a character of the text is looked at
once, for the price of as many words as the piece has bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Sign = str | None
_Find = Callable[[str, int, int], int]  # text, from, to -> where the piece found ends, -1 if it is not there


def like_matcher(signs: Sequence[Sign]) -> Callable[[str], bool]:
    pieces: list[list[Sign]] = [[]]
    for sign in signs:
        if sign == "":
            pieces.append([])
        else:
            pieces[-1].append(sign)
    first, *middle, last = pieces if len(pieces) > 1 else [pieces[0], []]
    if len(pieces) == 1:
        return lambda text: len(text) == len(first) and _fits(first, text, 0)
    finders = [_finder(piece) for piece in middle if piece]

    def matches(text: str) -> bool:
        at, end = len(first), len(text) - len(last)
        if at > end or not _fits(first, text, 0) or not _fits(last, text, end):
            return False
        for find in finders:
            at = find(text, at, end)
            if at < 0:
                return False
        return True

    return matches


def _fits(piece: Sequence[Sign], text: str, start: int) -> bool:
    return all(sign is None or text[start + at] == sign for at, sign in enumerate(piece))


def _finder(piece: Sequence[Sign]) -> _Find:
    plain = [sign for sign in piece if sign is not None]
    if len(plain) == len(piece):
        return _plain_finder("".join(plain))
    anything = sum(1 << at for at, sign in enumerate(piece) if sign is None)
    fitting = {
        letter: anything | sum(1 << at for at, sign in enumerate(piece) if sign == letter) for letter in plain
    }
    goal = 1 << (len(piece) - 1)

    def find(text: str, start: int, end: int) -> int:
        state = 0  # bit n: the last n + 1 characters are the piece's first n + 1
        for at in range(start, end):
            state = (state << 1 | 1) & fitting.get(text[at], anything)
            if state & goal:
                return at + 1
        return -1

    return find


def _plain_finder(plain: str) -> _Find:
    def find(text: str, start: int, end: int) -> int:
        at = text.find(plain, start, end)
        return -1 if at < 0 else at + len(plain)

    return find
