"""Text of a condition -> tree.

The grammar is sqlglot's (default dialect); what may be said is decided here, twice. Before sqlglot sees
anything, a lexer admits only the language's own characters, words and sizes, and grammar.py refuses the
first token that does not fit. After it, only listed node types in listed places are taken over into our
tree. Hence no input makes the parser recurse deeper than MAX_DEPTH or see syntax that is not ours, and
every error knows its character.

sqlglot takes about 100 us for a comparison, so it is asked as little as possible. AND, OR, NOT and the
parentheses around conditions are read here. What stands between them, a predicate, has its names, its
literals and its list lifted out, which leaves a template: `"0" > 0`, `"0" IN (0)`. However differently
conditions are built, they are made of few templates, and sqlglot runs once for each; only arithmetic has
many shapes. And a million subscriptions of one application differ in their literals alone: what is left
without those is kept as a skeleton, and filling one in takes a few microseconds. JMS 1.1 section 3.8.1 is
the model for the language.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NoReturn

import sqlglot
from sqlglot import expressions as exp
from sqlglot.errors import SqlglotError

from postroad.errors import SelectorError
from postroad.selectors import tree
from postroad.selectors.grammar import Grammar
from postroad.selectors.tree import Condition, Constant, ValueNode

MAX_TEXT: Final = 4096  # characters of a condition
MAX_DEPTH: Final = 32  # parentheses, NOT and signs inside each other
MAX_NODES: Final = 512  # names, literals and operators, the members of IN lists not counted
MAX_IN: Final = 1000  # members of one IN list
MAX_LIKE: Final = 256  # characters of a LIKE pattern
MAX_TEMPLATES: Final = 4096  # of predicates, kept
MAX_SKELETONS: Final = 128  # of conditions, kept: up to 20 KiB each
MAX_KEPT: Final = 512  # characters of either; what is longer is read anew each time
MAX_NAME_BYTES: Final = 255  # what an attribute name may have on the wire

_WIDE: Final = "an integer has 64 bits; write 1e30 for a float"

_MARK: Final = "\0"
_TEXT_MARK: Final = "\0s"
_NUMBER_MARK: Final = "\0n"
_QUICK: Final = re.compile(
    r"('(?:[^']|'')*'|(?<![\w$.])(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?(?![\w$.]))"
)
_TOKEN: Final = re.compile(
    r"""\s*(?:
      (?P<text>'(?:[^']|'')*')
    | (?P<quoted>"(?:[^"]|"")*")
    | (?P<number>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?(?![\w$.]))
    | (?P<word>[^\W\d][\w$]*(?:\.[^\W\d][\w$]*)*)
    | (?P<comment>--|/\*)
    | (?P<sign><>|!=|<=|>=|[=<>+\-*/(),])
    | (?P<end>\Z)
    )""",
    re.VERBOSE,
)
_WORDS: Final = frozenset(
    {"AND", "OR", "NOT", "BETWEEN", "IN", "LIKE", "ESCAPE", "IS", "NULL", "TRUE", "FALSE"}
)
_COMPARE: Final[dict[type[exp.Expr], tree.CompareOperator]] = {
    exp.EQ: "=",
    exp.NEQ: "<>",
    exp.LT: "<",
    exp.LTE: "<=",
    exp.GT: ">",
    exp.GTE: ">=",
}
_ARITHMETIC: Final[dict[type[exp.Expr], tree.ArithmeticOperator]] = {
    exp.Add: "+",
    exp.Sub: "-",
    exp.Mul: "*",
    exp.Div: "/",
}


@dataclass(frozen=True, slots=True)
class _Literal:
    value: str | int | float
    position: int


class _Fault(Exception):
    """Something at an offset of the template is not allowed."""

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message)
        self.message = message
        self.offset = offset


_Fill = Callable[["_Values"], Condition]
_Token = tuple[str, str, int]  # kind, piece, position. A literal's piece is "'" for text, "0" for a number.


_Make = Callable[["_Source"], Condition]


class _Source:
    """A text and its literals."""

    __slots__ = ("literals", "text")

    def __init__(self, text: str, literals: list[_Literal]) -> None:
        self.text = text
        self.literals = literals


class _Values:
    """What was lifted out of one predicate, and how to complain about it."""

    __slots__ = ("attributes", "literals", "members", "text")

    def __init__(
        self,
        text: str,
        literals: list[_Literal],
        attributes: tuple[tree.Attribute, ...],
        members: tuple[str, ...],
    ) -> None:
        self.text = text
        self.literals = literals
        self.attributes = attributes
        self.members = members  # of the list of IN: "+" or "-" before a literal, "TRUE" or "FALSE"

    def refuse(self, message: str, position: int) -> NoReturn:
        raise SelectorError(message, text=self.text, position=position)


def parse(text: str) -> Condition:
    """The tree of a condition; SelectorError at the character that is wrong. "" is always true."""
    if len(text) > MAX_TEXT:
        raise SelectorError(f"a condition has at most {MAX_TEXT} characters, this one {len(text)}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SelectorError("not a character that can be sent", text=text, position=error.start) from None
    if not text.strip():
        return tree.TRUE
    if len(text) <= MAX_KEPT:
        made = _parse_known(text)
        if made is not None:
            return made
    make, literals = _read(text)
    return make(_Source(text, literals))


def _parse_known(text: str) -> Condition | None:
    """The tree of a text that differs from one parsed before in its literals only.

    One split at the literals replaces the lexer. Whatever is unusual or wrong gives None: the long way
    then says what it is.
    """
    if '"' in text or _MARK in text:
        return None
    pieces = _QUICK.split(text)
    raws = pieces[1::2]
    for at in range(1, len(pieces), 2):
        pieces[at] = _TEXT_MARK if pieces[at][0] == "'" else _NUMBER_MARK
    try:
        make = _skeleton("".join(pieces))
        literals = [_literal(text, "text" if raw[0] == "'" else "number", raw, 0) for raw in raws]
        return make(_Source(text, literals))
    except (SelectorError, _Fault):
        return None


@lru_cache(maxsize=MAX_SKELETONS)
def _skeleton(key: str) -> _Make:
    make, literals = _read(key.replace(_TEXT_MARK, "'0'").replace(_NUMBER_MARK, "0"))
    if len(literals) != key.count(_MARK):
        raise _Fault("the lexer sees other literals", 0)
    return make


def _read(text: str) -> tuple[_Make, list[_Literal]]:
    tokens, literals, conditions = _lift(text)
    return _Reader(text, tokens, conditions).read(), literals


def _lift(text: str) -> tuple[list[_Token], list[_Literal], set[int]]:
    """The tokens, the literals among them, and the positions of the parentheses around conditions."""
    literals: list[_Literal] = []
    tokens: list[_Token] = []
    nodes = at = 0
    nesting, grammar = _Nesting(text), Grammar(text)
    before = last = ""  # pieces
    while True:
        token = _TOKEN.match(text, at)
        if token is None:
            position = at + len(text[at:]) - len(text[at:].lstrip())
            raise SelectorError(_misread(text[position]), text=text, position=position)
        kind = str(token.lastgroup)
        raw, position, at = token[kind], token.start(kind), token.end()
        if kind == "end":
            break
        piece = raw
        if kind in ("text", "number"):
            piece = "'" if kind == "text" else "0"
            literals.append(_literal(text, kind, raw, position))
        elif kind in ("word", "quoted"):
            piece = _name(text, kind, raw, position)
        elif kind == "comment":
            raise SelectorError("comments are not part of a condition", text=text, position=position)
        elif raw == "(" and last.startswith('"'):
            raise SelectorError("there are no functions in a condition", text=text, position=tokens[-1][2])
        if piece == "NULL" and last != "IS" and (before, last) != ("IS", "NOT"):
            raise SelectorError("NULL stands only after IS or IS NOT", text=text, position=position)
        nodes += nesting.step(piece, position)
        if nodes > MAX_NODES:
            raise SelectorError(f"a condition has at most {MAX_NODES} parts", text=text, position=position)
        grammar.step(kind, piece, position)
        tokens.append((kind, piece, position))
        before, last = last, piece
    grammar.finish()
    nesting.finish()
    return tokens, literals, grammar.conditions


class _Joined:
    """Conditions joined by AND, or by OR."""

    __slots__ = ("items", "kind")

    def __init__(self, kind: type[tree.And] | type[tree.Or], items: list[_Make]) -> None:
        self.kind = kind
        self.items = items

    def __call__(self, source: _Source) -> Condition:
        return self.kind(tuple([item(source) for item in self.items]))


class _Reader:
    """Reads what joins predicates. grammar.py has seen to it that everything is where it belongs."""

    __slots__ = ("_at", "_conditions", "_literals", "_text", "_tokens")

    def __init__(self, text: str, tokens: list[_Token], conditions: set[int]) -> None:
        self._text = text
        self._tokens = tokens
        self._conditions = conditions
        self._at = 0
        self._literals = 0  # before `_at`

    def read(self) -> _Make:
        return self._joined("OR", tree.Or, lambda: self._joined("AND", tree.And, self._negatable))

    def _joined(self, word: str, kind: type[tree.And] | type[tree.Or], read: Callable[[], _Make]) -> _Make:
        items: list[_Make] = []
        while True:
            item = read()
            if isinstance(item, _Joined) and item.kind is kind:
                items += item.items
            else:
                items.append(item)
            if self._at == len(self._tokens) or self._tokens[self._at][1] != word:
                return items[0] if len(items) == 1 else _Joined(kind, items)
            self._at += 1

    def _negatable(self) -> _Make:
        _, piece, position = self._tokens[self._at]
        if piece == "NOT":
            self._at += 1
            inner = self._negatable()
            return lambda source: tree.Not(inner(source))
        if position not in self._conditions:
            return self._predicate()
        self._at += 1
        inside = self.read()
        self._at += 1
        return inside

    def _predicate(self) -> _Make:
        first, end = self._literals, self._end_of_predicate()
        names: list[tree.Attribute] = []
        members: tuple[str, ...] = ()
        pieces: list[str] = []
        positions: list[tuple[int, int]] = []  # offset in the template, position in the text
        offset = 0
        while self._at < end:
            kind, piece, position = self._tokens[self._at]
            self._at += 1
            if piece[0] == '"':
                names.append(tree.Attribute(piece[1:-1].replace('""', '"')))
                piece = f'"{len(names) - 1}"'
            elif kind in ("text", "number"):
                piece = f"'{self._literals - first}'" if kind == "text" else str(self._literals - first)
                self._literals += 1
            elif piece == "(" and pieces[-1:] == ["IN"]:
                members = self._members(end)
                if members:
                    piece = f"({self._literals - first})"
                    self._literals += sum(1 for member in members if member in "+-")
            pieces.append(piece)
            positions.append((offset, position))
            offset += len(piece) + 1
        return self._filled(" ".join(pieces), positions, tuple(names), members, slice(first, self._literals))

    def _end_of_predicate(self) -> int:
        at = self._at
        depth = between = 0
        while at < len(self._tokens):
            piece = self._tokens[at][1]
            if piece == "(":
                depth += 1
            elif piece == ")":
                depth -= 1
                if depth < 0:
                    break
            elif depth == 0 and piece in ("BETWEEN", "AND", "OR"):
                if piece != "BETWEEN" and not between:
                    break
                between = int(piece == "BETWEEN")
            at += 1
        return at

    def _members(self, end: int) -> tuple[str, ...]:
        """The list that begins here, taken as a whole if it has literals only; () leaves it to sqlglot."""
        members: list[str] = []
        sign, complete = "", False  # of the member that is being read
        for at in range(self._at, end):
            kind, piece, _ = self._tokens[at]
            if complete and piece == ")":
                self._at = at + 1
                return tuple(members)
            if complete and piece == ",":
                sign, complete = "", False
            elif piece in ("+", "-") and not sign and not complete:
                sign = piece
            elif (kind in ("text", "number") or piece in ("TRUE", "FALSE")) and not complete:
                members.append(piece if kind == "word" else sign or "+")
                complete = True
            else:
                break
        return ()

    def _filled(
        self,
        template: str,
        positions: list[tuple[int, int]],
        names: tuple[tree.Attribute, ...],
        members: tuple[str, ...],
        literals: slice,
    ) -> _Make:
        text = self._text
        try:
            fill = _template(template) if len(template) <= MAX_KEPT else _template.__wrapped__(template)
        except _Fault as fault:
            raise _at_character(fault, text, positions) from None

        def make(source: _Source) -> Condition:
            try:
                return fill(_Values(source.text, source.literals[literals], names, members))
            except _Fault as fault:
                # Of another text with the same skeleton the positions are not known; the long way finds them.
                raise _at_character(fault, source.text, positions) from None

        return make


def _at_character(fault: _Fault, text: str, positions: list[tuple[int, int]]) -> SelectorError:
    at = max((pair for pair in positions if pair[0] <= fault.offset), default=(0, 0))
    return SelectorError(fault.message, text=text, position=at[1])


class _Nesting:
    """Keeps depth and sizes of what the lexer reads within their limits, before anything recurses."""

    __slots__ = ("_depth", "_open", "_prefix", "_text", "_was")

    def __init__(self, text: str) -> None:
        self._text = text
        self._open: list[list[int]] = []  # position, prefixes before it, IN members or -1
        self._depth = 0  # of `_open`, the prefixes before each included
        self._prefix = 0  # NOT and signs in a row
        self._was = ""  # the last piece

    def step(self, piece: str, position: int) -> int:
        """Counts one token; the number of nodes it adds."""
        counted = 0 if piece in ("(", ")", ",") else 1
        if piece == "(":
            self._open.append([position, self._prefix, 1 if self._was == "IN" else -1])
            self._depth += 1 + self._prefix
            self._prefix = 0
        elif piece == ")":
            if not self._open:
                self._refuse("a closing parenthesis without its opening one", position)
            self._depth -= 1 + self._open.pop()[1]
        elif self._open and self._open[-1][2] >= 0:
            # A literal is no node, also with a sign; whoever calculates in a list pays for the operator and
            # what it adds.
            counted = 2 if piece in ("+", "-", "*", "/") and self._was not in ("(", ",") else 0
            if piece == ",":
                self._open[-1][2] += 1
                if self._open[-1][2] > MAX_IN:
                    self._refuse(f"IN takes at most {MAX_IN} values", position)
        if piece in ("NOT", "-", "+"):
            self._prefix += 1
        elif piece != "(":
            self._prefix = 0
        if self._depth + self._prefix > MAX_DEPTH:
            self._refuse(f"more than {MAX_DEPTH} levels deep", position)
        self._was = piece
        return counted

    def finish(self) -> None:
        if self._open:
            self._refuse("this parenthesis is never closed", self._open[-1][0])

    def _refuse(self, message: str, position: int) -> NoReturn:
        raise SelectorError(message, text=self._text, position=position)


def _misread(character: str) -> str:
    if character == "'":
        return "this text is never closed"
    if character == '"':
        return "this name is never closed"
    if character.isdigit() or character == ".":
        return "not a number"
    return f"{character!r} means nothing in a condition"


def _literal(text: str, kind: str, raw: str, position: int) -> _Literal:
    if kind == "text":
        return _Literal(raw[1:-1].replace("''", "'"), position)
    if raw.isdigit():
        # 2**63 itself is let through: with its minus sign it is the least integer.
        if len(raw.lstrip("0")) > 19 or int(raw) > tree.INTEGER_MAX + 1:
            raise SelectorError(
                "an integer has 64 bits; write 1e30 for a float", text=text, position=position
            )
        return _Literal(int(raw), position)
    value = float(raw)
    if value == float("inf"):
        raise SelectorError("this number is too large for a float", text=text, position=position)
    return _Literal(value, position)


def _name(text: str, kind: str, raw: str, position: int) -> str:
    if kind == "word" and raw.upper() in _WORDS:
        return raw.upper()
    name = raw[1:-1].replace('""', '"') if kind == "quoted" else raw
    if not 0 < len(name.encode()) <= MAX_NAME_BYTES:
        raise SelectorError(
            f"an attribute name has 1 to {MAX_NAME_BYTES} bytes", text=text, position=position
        )
    return raw if kind == "quoted" else f'"{raw}"'


@lru_cache(maxsize=MAX_TEMPLATES)
def _template(template: str) -> _Fill:
    try:
        parsed = sqlglot.parse_one(template)
    except SqlglotError as error:
        details = getattr(error, "errors", None) or [{}]
        # sqlglot counts columns from 1 and to the end of the token.
        raise _Fault("this does not fit here", max(0, details[0].get("col", 1) - 1)) from None
    except RecursionError:
        raise _Fault("too deeply nested", 0) from None
    return _condition(parsed)


def _offset(node: exp.Expr) -> int:
    """Where a node begins, which is where its leftmost part does."""
    leftmost: object = node
    while isinstance(leftmost, exp.Expr):
        if "start" in leftmost.meta:
            return int(leftmost.meta["start"])
        leftmost = leftmost.this
    starts = [int(part.meta["start"]) for part in node.walk() if "start" in part.meta]
    return min(starts, default=0)


def _strip(node: exp.Expr) -> exp.Expr:
    while isinstance(node, exp.Paren):
        node = node.this
    return node


def _condition(node: exp.Expr) -> _Fill:
    node = _strip(node)
    match node:
        case exp.Not():  # of NOT BETWEEN, NOT IN, IS NOT NULL
            inner = _condition(node.this)
            return lambda values: tree.Not(inner(values))
        case exp.Column():
            index = _attribute(node)
            return lambda values: values.attributes[index]
        case exp.Boolean():
            flag = tree.constant(bool(node.this))
            return lambda _: flag
        case exp.Between():
            return _between(node)
        case exp.In():
            return _in(node)
        case exp.Like():
            return _like(node, None)
        case exp.Escape() if isinstance(_strip(node.this), exp.Like):
            return _like(_strip(node.this), node.expression)
        case exp.Is():
            return _is_null(node)
    if type(node) in _COMPARE:
        return _comparison(_COMPARE[type(node)], node)
    raise _Fault(
        _not_a("condition", node), _offset(node.args["alias"] if isinstance(node, exp.Alias) else node)
    )


def _not_a(wanted: str, node: exp.Expr) -> str:
    if isinstance(node, exp.Alias):
        return "an operator is missing here"
    if isinstance(node, exp.Literal):
        return f"a {wanted} is needed here, not a literal"
    return f"a {wanted} is needed here"


def _attribute(node: exp.Column) -> int:
    if not isinstance(node.this, exp.Identifier) or len(node.parts) != 1:
        raise _Fault("not an attribute name", _offset(node))
    return int(node.this.this)


def _value(node: exp.Expr, depth: int = 0) -> Callable[[_Values], ValueNode]:
    node = _strip(node)
    if depth > MAX_DEPTH:
        raise _Fault(f"more than {MAX_DEPTH} levels deep", _offset(node))
    match node:
        case exp.Column():
            name = _attribute(node)
            return lambda values: values.attributes[name]
        case exp.Boolean():
            flag = tree.constant(bool(node.this))
            return lambda _: flag
        case exp.Literal():
            index = int(node.this)
            return lambda values: _bounded(values, index)
        case exp.Neg():
            return _negation(node, depth)
    if type(node) in _ARITHMETIC:
        return _calculation(_ARITHMETIC[type(node)], node, depth)
    raise _Fault(_not_a("value", node), _offset(node))


def _bounded(values: _Values, index: int) -> Constant:
    literal = values.literals[index]
    if isinstance(literal.value, int) and literal.value > tree.INTEGER_MAX:
        values.refuse(_WIDE, literal.position)
    return tree.constant(literal.value)


def _negation(node: exp.Neg, depth: int) -> Callable[[_Values], ValueNode]:
    operand = _strip(node.this)
    if isinstance(operand, exp.Literal):
        index = int(operand.this)

        def literal(values: _Values) -> ValueNode:
            value = values.literals[index]
            if isinstance(value.value, str):
                values.refuse("only numbers can be calculated with", value.position)
            return tree.constant(-value.value)

        return literal
    inner, offset = _value(operand, depth + 1), _offset(operand)

    def negation(values: _Values) -> ValueNode:
        made = inner(values)
        _check_numeric(made, offset)
        return tree.constant(tree.negate(made.value)) if isinstance(made, Constant) else tree.Negate(made)

    return negation


def _calculation(
    operator: tree.ArithmeticOperator, node: exp.Expr, depth: int
) -> Callable[[_Values], ValueNode]:
    left, right = _value(node.this, depth + 1), _value(node.expression, depth + 1)
    literals = [int(part.this) for part in (_strip(node.this), _strip(node.expression)) if _is_literal(part)]
    offset = _offset(node)

    def calculation(values: _Values) -> ValueNode:
        for index in literals:
            if isinstance(values.literals[index].value, str):
                values.refuse("only numbers can be calculated with", values.literals[index].position)
        first, second = left(values), right(values)
        _check_numeric(first, offset)
        _check_numeric(second, offset)
        if isinstance(first, Constant) and isinstance(second, Constant):
            return tree.constant(tree.calculate(operator, first.value, second.value))
        return tree.Arithmetic(operator, first, second)

    return calculation


def _is_literal(node: exp.Expr) -> bool:
    return isinstance(node, exp.Literal)


def _check_numeric(node: ValueNode, offset: int) -> None:
    if isinstance(node, Constant) and node.kind in ("text", "boolean"):
        raise _Fault("only numbers can be calculated with", offset)


def _comparison(operator: tree.CompareOperator, node: exp.Expr) -> _Fill:
    left, right = _value(node.this), _value(node.expression)
    return lambda values: _compared(operator, left(values), right(values))


def _compared(operator: tree.CompareOperator, left: ValueNode, right: ValueNode) -> Condition:
    """A comparison in normal form: a literal on the right, two literals decided."""
    if isinstance(left, Constant):
        if isinstance(right, Constant):
            return tree.constant(tree.compare(operator, left.value, right.value))
        left, right, operator = right, left, tree.MIRRORED[operator]
    return tree.Compare(operator, left, right)


def _between(node: exp.Between) -> _Fill:
    if node.args.get("symmetric"):
        raise _Fault("BETWEEN takes no SYMMETRIC", _offset(node))
    operand, low, high = _value(node.this), _value(node.args["low"]), _value(node.args["high"])

    def between(values: _Values) -> Condition:
        made = operand(values)
        return tree.And((_compared(">=", made, low(values)), _compared("<=", made, high(values))))

    return between


def _in(node: exp.In) -> _Fill:
    members = node.expressions
    if not members or {name for name, value in node.args.items() if value} - {"this", "expressions"}:
        raise _Fault("IN takes a list of literals in parentheses", _offset(node))
    operand = _value(node.this)
    made = [(_value(member), _offset(member)) for member in members]
    only = members[0]
    first = int(only.this) if isinstance(only, exp.Literal) else 0  # of a list that was lifted out

    def contained(values: _Values) -> Condition:
        if values.members:
            listed = tuple(dict.fromkeys(_members(values, first)))
        else:
            members: dict[Constant, None] = {}
            for member, offset in made:
                value = member(values)
                if not isinstance(value, Constant) or value.kind == "unknown":
                    raise _Fault("IN takes literals only", offset)
                members[value] = None
            listed = tuple(members)
        left = operand(values)
        if isinstance(left, Constant):
            return tree.constant(tree.contains(left.value, listed))
        return tree.In(left, listed)

    return contained


def _members(values: _Values, index: int) -> Iterator[Constant]:
    for member in values.members:
        if member not in ("+", "-"):
            yield tree.constant(member == "TRUE")
            continue
        value = values.literals[index].value
        yield (
            tree.constant(-value) if member == "-" and not isinstance(value, str) else _bounded(values, index)
        )
        index += 1


def _like(node: exp.Expr, escape: exp.Expr | None) -> _Fill:
    pattern = _strip(node.expression)
    if not isinstance(pattern, exp.Literal) or not pattern.is_string:
        raise _Fault("LIKE takes a text literal", _offset(pattern) or _offset(node))
    if escape is not None and not (isinstance(escape, exp.Literal) and escape.is_string):
        raise _Fault("ESCAPE takes one character", _offset(escape))
    operand, negated = _value(node.this), bool(node.args.get("negate"))
    index, escape_index = int(pattern.this), None if escape is None else int(escape.this)

    def like(values: _Values) -> Condition:
        pattern = values.literals[index]
        text = str(pattern.value)
        if len(text) > MAX_LIKE:
            values.refuse(f"a pattern has at most {MAX_LIKE} characters", pattern.position)
        sign = ""
        if escape_index is not None:
            sign = str(values.literals[escape_index].value)
            if len(sign) != 1:
                values.refuse("ESCAPE takes one character", values.literals[escape_index].position)
            if not _well_escaped(text, sign):
                values.refuse("the escape character stands before %, _ or itself only", pattern.position)
        made: Condition = tree.Like(operand(values), text, sign)
        return tree.Not(made) if negated else made

    return like


def _well_escaped(pattern: str, sign: str) -> bool:
    at = 0
    while at < len(pattern):
        if pattern[at] == sign:
            at += 1
            if at == len(pattern) or pattern[at] not in ("%", "_", sign):
                return False
        at += 1
    return True


def _is_null(node: exp.Is) -> _Fill:
    operand = _strip(node.this)
    if not isinstance(node.expression, exp.Null):
        raise _Fault("IS is followed by NULL or NOT NULL only", _offset(node))
    if not isinstance(operand, exp.Column):
        raise _Fault("IS NULL asks about an attribute only", _offset(node))
    index = _attribute(operand)
    return lambda values: tree.IsNull(values.attributes[index].name)
