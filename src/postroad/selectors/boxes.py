"""A condition as boxes: alternatives (OR), each a conjunction of independent constraints on attributes.

NOT is pushed down to the comparisons and AND distributed over OR; both are exact in three-valued logic.
All constraints of a box on one attribute become one `Domain`. What is not a constraint on one attribute
(arithmetic, two attributes, a LIKE with a wildcard inside) stays as an opaque condition beside the
domains that it implies. The number of boxes is bounded: a condition that would exceed it becomes a
single box that holds all of it as opaque.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from postroad.selectors import domains, tree
from postroad.selectors.domains import Domain, meet
from postroad.selectors.predicate import like_parts
from postroad.selectors.tree import Condition, ValueNode

MAX_BOXES: Final = 64


class Box(msgspec.Struct, frozen=True):
    """Matches when every domain holds its attribute's value and every opaque condition is true."""

    domains: Mapping[str, Domain]  # no empty domain; an attribute not named may be anything; sorted by name
    opaque: tuple[Condition, ...]  # no repetition, in order of the text


_ALWAYS: Final = Box({}, ())


class _TooManyError(Exception):
    pass


def to_boxes(condition: Condition) -> tuple[Box, ...]:
    """No box means that the condition is never true."""
    try:
        found = _boxes(condition, negated=False)
    except _TooManyError:
        return (Box({}, (condition,)),)
    return tuple(Box(dict(sorted(box.domains.items())), box.opaque) for box in found)


def _boxes(node: Condition, *, negated: bool) -> list[Box]:
    match node:
        case tree.And() | tree.Or():
            alternatives = [_boxes(item, negated=negated) for item in node.items]
            if isinstance(node, tree.And) is not negated:
                return _product(alternatives)
            return _bounded([box for boxes in alternatives for box in boxes])
        case tree.Not():
            return _boxes(node.item, negated=not negated)
        case tree.Constant():
            return [_ALWAYS] if node.value is (not negated) else []
    return _atom(node, negated)


def _bounded(boxes: list[Box]) -> list[Box]:
    if len(boxes) > MAX_BOXES:
        raise _TooManyError
    return boxes


def _product(alternatives: list[list[Box]]) -> list[Box]:
    # Most conditions have a single alternative throughout: one pass into one dictionary.
    single = _all([boxes[0] for boxes in alternatives if len(boxes) == 1])
    found = [] if single is None else [single]
    for boxes in alternatives:
        if len(boxes) == 1:
            continue
        found = [both for first in found for second in boxes if (both := _all([first, second])) is not None]
        _bounded(found)
    return found


def _all(boxes: list[Box]) -> Box | None:
    """The box of what is in all of these; None if nothing is."""
    joined: dict[str, Domain] = {}
    opaque: dict[Condition, None] = {}
    for box in boxes:
        for name, domain in box.domains.items():
            known = joined.get(name)
            if known is not None:
                domain = meet(known, domain)
                if domain.empty:
                    return None
            joined[name] = domain
        for item in box.opaque:
            opaque[item] = None
    return Box(joined, tuple(opaque))


def _single(name: str, domain: Domain) -> list[Box]:
    return [] if domain.empty else [Box({name: domain}, ())]


def _atom(node: Condition, negated: bool) -> list[Box]:
    match node:
        case tree.Compare(operator, tree.Attribute(name), tree.Constant() as literal):
            return _single(name, domains.compared(tree.NEGATED[operator] if negated else operator, literal))
        case tree.Attribute(name):
            return _single(name, Domain(booleans=domains.FALSE_BIT if negated else domains.TRUE_BIT))
        case tree.IsNull(name):
            return _single(name, domains.PRESENT if negated else domains.MISSING)
        case tree.In(tree.Attribute(name), members):
            return _single(name, domains.listed(members, negated=negated))
        case tree.Like(tree.Attribute(name), pattern, escape):
            return _like(node, name, pattern, escape, negated)
    return _opaque(node, negated)


def _like(node: Condition, name: str, pattern: str, escape: str, negated: bool) -> list[Box]:
    parts = like_parts(pattern, escape)
    plain = next((at for at, part in enumerate(parts) if not part), len(parts))
    prefix = "".join(part or "" for part in parts[:plain])
    if plain == len(parts):
        exact = domains.compared("=", tree.constant(prefix))
    else:
        exact = domains.prefixed(prefix)
        if any(part != "" for part in parts[plain:]):
            domain = domains.TEXT if negated else exact
            return [Box({name: domain}, (tree.Not(node) if negated else node,))]
    return _single(name, domains.minus(domains.TEXT, exact) if negated else exact)


def _opaque(node: Condition, negated: bool) -> list[Box]:
    """A condition over several values: whichever way it is decided, none of them was missing."""
    implied: dict[str, Domain] = {}
    match node:
        case tree.Compare(_, left, right):
            operands: tuple[ValueNode, ...] = (left, right)
        case tree.In(operand, _) | tree.Like(operand, _, _):
            operands = (operand,)
        case _:
            operands = ()
    for operand in operands:
        _imply(operand, domains.PRESENT, implied)
    if any(domain.empty for domain in implied.values()):
        return []
    return [Box(implied, (tree.Not(node) if negated else node,))]


def _imply(node: ValueNode, domain: Domain, implied: dict[str, Domain]) -> None:
    match node:
        case tree.Attribute(name):
            implied[name] = meet(implied.get(name, domains.PRESENT), domain)
        case tree.Negate(operand):
            _imply(operand, domains.NUMBER, implied)
        case tree.Arithmetic(_, left, right):
            _imply(left, domains.NUMBER, implied)
            _imply(right, domains.NUMBER, implied)
