"""What may follow what in a condition.

A table of states, read token by token before sqlglot sees anything: what is not listed is an error, at
that very token, and the state knows what would be right. Meaning stays with sqlglot and with parse.py;
here only the first token that does not fit is found, which sqlglot reports one token late or not at all.

A predicate has a left side; after its operator it has a right side, the low side of BETWEEN, the list of
IN, the pattern of LIKE or the NULL of IS. Each side has two states: a value is needed, a value was read.
"""

from __future__ import annotations

from typing import Final, NoReturn

from postroad.errors import SelectorError

# Kinds of tokens, beside the words of the language, which are their own kind.
_KINDS: Final = {
    "=": "compare",
    "<>": "compare",
    "!=": "compare",
    "<": "compare",
    "<=": "compare",
    ">": "compare",
    ">=": "compare",
    "+": "sign",
    "-": "sign",
    "*": "times",
    "/": "times",
    "TRUE": "flag",
    "FALSE": "flag",
}
_VALUES: Final = ("name", "number", "text", "flag")
_NUMBERS: Final = ("name", "number")  # what an arithmetic sign may stand before
_LITERALS: Final = ("number", "text", "flag")
_END: Final = "end"


def _value(side: str, kinds: tuple[str, ...] = _VALUES) -> dict[str, str]:
    return {**dict.fromkeys(kinds, side), "(": side, "sign": side + " sum"}


def _calculating(side: str) -> dict[str, str]:
    return {"sign": side + " sum", "times": side + " sum"}


_JOINED: Final = {"AND": "condition", "OR": "condition", ")": "", _END: ""}
_NEGATABLE: Final = {"BETWEEN": "low value", "IN": "in", "LIKE": "pattern"}
_TABLE: Final[dict[str, dict[str, str]]] = {
    "condition": {**_value("left"), "NOT": "condition"},
    "left sum": _value("left", _NUMBERS),
    "left": {
        **_calculating("left"),
        **_NEGATABLE,
        **_JOINED,
        "compare": "right value",
        "NOT": "negated",
        "IS": "is",
    },
    "negated": _NEGATABLE,
    "right value": _value("right"),
    "right sum": _value("right", _NUMBERS),
    "right": {**_calculating("right"), **_JOINED},
    "low value": _value("low"),
    "low sum": _value("low", _NUMBERS),
    "low": {**_calculating("low"), "AND": "right value"},
    "in": {"(": "done"},
    "member": _value("listed", _LITERALS),
    "listed sum": _value("listed", ("number",)),
    "listed": {**_calculating("listed"), ",": "member", ")": ""},
    "pattern": {"text": "matched", "(": "matched"},
    "inner pattern": {"text": "inner matched", "(": "inner matched"},
    "inner matched": {")": ""},
    "matched": {"ESCAPE": "escape", **_JOINED},
    "escape": {"text": "done"},
    "is": {"NULL": "done", "NOT": "is not"},
    "is not": {"NULL": "done"},
    "done": _JOINED,
}
# Tokens behind which another value begins.
_ENDING: Final = frozenset({"AND", "OR", "NOT", "compare", "BETWEEN", "IN", "LIKE", "IS", ","})
# What stands behind the opening parenthesis of a state, unless a condition.
_INSIDE: Final = {
    "in": "member",
    "member": "member",
    "listed sum": "member",
    "pattern": "inner pattern",
    "inner pattern": "inner pattern",
}
_NEEDED: Final = {
    "condition": "an attribute, a literal, NOT or ( is needed here",
    "left": "an operator is needed here: a comparison, IN, LIKE, BETWEEN, IS, AND or OR",
    "negated": "BETWEEN, IN or LIKE is needed here",
    "right": "AND or OR is needed here",
    "low": "AND is needed here, as in BETWEEN 1 AND 9",
    "in": "( is needed here: IN takes a list, as in IN ('a', 'b')",
    "member": "a literal is needed here: IN takes a list, as in IN ('a', 'b')",
    "listed": "a comma or ) is needed here",
    "pattern": "a text in quotes is needed here, as in LIKE 'ab%'",
    "matched": "AND, OR or ESCAPE is needed here",
    "inner pattern": "a text in quotes is needed here, as in LIKE 'ab%'",
    "inner matched": ") is needed here",
    "escape": "one character in quotes is needed here, as in ESCAPE '!'",
    "is": "NULL or NOT NULL is needed here",
    "is not": "NULL is needed here",
    "done": "AND or OR is needed here",
}
_VALUE_NEEDED: Final = "an attribute, a literal or ( is needed here"
_NUMBER_NEEDED: Final = "a number or an attribute is needed here"
_CONDITION_NEEDED: Final = "a condition is needed here, as in price > 100"
# Words with which people begin what the language does not have. They are names, so only what follows
# them is an error; the mark belongs to the word all the same.
_FOREIGN: Final = frozenset({"CASE", "SELECT", "EXISTS", "CAST", "WITH", "WHERE", "DISTINCT", "ANY", "ALL"})


class _Level:
    """A parenthesis, or the whole: what has been read in it, and what it is to the level around it."""

    __slots__ = ("at", "begin", "joined", "operand", "state", "then")

    def __init__(self, state: str, then: str, at: int) -> None:
        self.state = state  # a key of _TABLE
        self.then = then  # the state of the level around it once this one has closed
        self.at = at  # position of the parenthesis
        self.begin = at  # position of the value being read
        self.operand = ""  # its kind: one of _VALUES, or "sum"
        self.joined = False  # AND, OR or NOT makes it a condition


class Grammar:
    """Reads a condition token by token and refuses the first that does not fit.

    Whoever calls it has seen to it that no parenthesis closes without its opening one.
    """

    __slots__ = ("_levels", "_text", "_word", "conditions")

    def __init__(self, text: str) -> None:
        self.conditions: set[int] = set()  # positions of parentheses around a condition, not a value
        self._text = text
        self._levels = [_Level("condition", "", 0)]
        self._word: tuple[str, int] = ("", 0)  # the last token if it is a name, and its position

    def step(self, kind: str, piece: str, position: int) -> None:
        """`kind` is the lexer's; `piece` a name in quotes, a word in capitals or the sign itself."""
        if kind == "quoted" or (kind == "word" and piece.startswith('"')):
            kind = "name"
        elif kind in ("word", "sign"):
            kind = _KINDS.get(piece, piece)
        self._read(kind, position)
        self._word = (piece[1:-1].upper(), position) if kind == "name" else ("", 0)

    def finish(self) -> None:
        """The text ends here. A parenthesis that is still open is for others to report."""
        if len(self._levels) == 1 or _END not in _TABLE[self._levels[-1].state]:
            self._read(_END, len(self._text))

    def _read(self, kind: str, position: int) -> None:
        level = self._levels[-1]
        following = _TABLE[level.state].get(kind)
        if following is None:
            self._misfit(level.state, position)
        self._note_operand(level, kind, position)
        if kind == "(":
            self._levels.append(_Level(_INSIDE.get(level.state, "condition"), following, position))
        elif kind == ")":
            self._close(self._levels.pop())
        elif kind != _END:
            level.joined = level.joined or following == "condition"
            level.state = following

    def _note_operand(self, level: _Level, kind: str, position: int) -> None:
        """Keeps what is known of the value being read, and refuses it where it is not of the right kind."""
        if level.state.endswith(" sum"):
            level.operand = "sum"
        elif kind in _VALUES or kind == "(" or (kind == "sign" and level.operand == ""):
            level.begin, level.operand = position, kind
        elif kind in ("sign", "times"):
            if level.operand in ("text", "flag"):
                self._refuse("only numbers can be calculated with", level.begin)
        elif level.state == "left":
            if kind == "IS" and level.operand != "name":
                self._refuse("IS NULL asks about an attribute only", level.begin)
            alone = kind in ("AND", "OR", _END) or (kind == ")" and level.joined)
            if alone and level.operand not in ("name", "flag"):
                self._refuse(_CONDITION_NEEDED, level.begin)
        if kind in _ENDING:
            level.operand = ""

    def _close(self, inner: _Level) -> None:
        level = self._levels[-1]
        if inner.joined or inner.state in ("right", "matched", "done"):
            if level.state != "condition":
                self._refuse("a value is needed here, not a condition", inner.at)
            level.operand, level.state = "", "done"
            self.conditions.add(inner.at)
            return
        if level.state.endswith(" sum"):
            if inner.operand in ("text", "flag"):
                self._refuse("only numbers can be calculated with", inner.begin)
        else:
            level.operand = inner.operand
        level.state = inner.then

    def _misfit(self, state: str, position: int) -> NoReturn:
        word, at = self._word
        if word in _FOREIGN:
            self._refuse(f"{word} is not part of a condition", at)
        needed = _NEEDED.get(state) or (_VALUE_NEEDED if state.endswith("value") else _NUMBER_NEEDED)
        if len(self._levels) > 1 and state in ("right", "done"):
            needed = "AND, OR or ) is needed here"
        self._refuse(needed, position)

    def _refuse(self, message: str, position: int) -> NoReturn:
        raise SelectorError(message, text=self._text, position=position)
