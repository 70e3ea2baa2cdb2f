"""A condition as boxes: alternatives (OR), each a conjunction of independent constraints on attributes.

NOT is pushed down to the comparisons and AND distributed over OR; both are exact in three-valued logic.
All constraints of a box on one attribute become one `Domain`. What is not a constraint on one attribute
(arithmetic, two attributes, a LIKE with a wildcard inside) stays as an opaque condition beside the
domains that it implies. The boxes, their constraints and the work of making them are bounded: a condition
that would exceed a bound becomes a single box that holds all of it as opaque.
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
MAX_WORK: Final = 8192  # spans of domains put into boxes, those that come to nothing included


class Box(msgspec.Struct, frozen=True):
    """Matches when every domain holds its attribute's value and every opaque condition is true."""

    domains: Mapping[str, Domain]  # no empty domain; an attribute not named may be anything; sorted by name
    opaque: tuple[Condition, ...]  # no repetition, in order of the text


_ALWAYS: Final = Box({}, ())
_EVERYTHING: Final = (_ALWAYS,)  # shared by all who select by topic alone


class _TooManyError(Exception):
    pass


class _Work:
    """What making the boxes of one condition may still take."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = MAX_WORK


def to_boxes(condition: Condition) -> tuple[Box, ...]:
    """No box means that the condition is never true."""
    if condition is tree.TRUE:
        return _EVERYTHING
    try:
        boxes = _boxes(condition, False, _Work())
    except _TooManyError:
        return (Box({}, (condition,)),)
    return tuple(
        [box if len(box.domains) < 2 else Box(dict(sorted(box.domains.items())), box.opaque) for box in boxes]
    )


def _boxes(node: Condition, negated: bool, work: _Work) -> list[Box]:
    # Every subscription comes through here. `match` over classes takes several times as long as isinstance.
    if isinstance(node, tree.And):
        return _sum(node.items, negated, work) if negated else _product(node.items, negated, work)
    if isinstance(node, tree.Or):
        return _product(node.items, negated, work) if negated else _sum(node.items, negated, work)
    if isinstance(node, tree.Not):
        return _boxes(node.item, not negated, work)
    if isinstance(node, tree.Constant):
        return [_ALWAYS] if node.value is (not negated) else []
    constraint = _constraint(node, negated)
    if constraint is not None:
        name, domain = constraint
        return [] if domain.empty else [Box({name: domain}, ())]
    if isinstance(node, tree.Like) and isinstance(node.operand, tree.Attribute):
        return _like(node, node.operand.name, negated)
    return _opaque(node, negated)


def _sum(items: tuple[Condition, ...], negated: bool, work: _Work) -> list[Box]:
    return _bounded([box for item in items for box in _boxes(item, negated, work)])


def _bounded(boxes: list[Box]) -> list[Box]:
    if len(boxes) > MAX_BOXES:
        raise _TooManyError
    return boxes


def _product(items: tuple[Condition, ...], negated: bool, work: _Work) -> list[Box]:
    """The boxes of a conjunction. Constraints on single attributes, mostly all there is, make no boxes."""
    joined: dict[str, Domain] = {}
    alternatives: list[list[Box]] = []
    for item in items:
        constraint = _constraint(item, negated)
        if constraint is None:
            alternatives.append(_boxes(item, negated, work))
        elif not _meet_into(joined, *constraint):
            return []
    if not alternatives:
        return [Box(joined, ())]
    single = _all([Box(joined, ()), *[boxes[0] for boxes in alternatives if len(boxes) == 1]], work)
    product = [] if single is None else [single]
    for boxes in alternatives:
        if len(boxes) == 1:
            continue
        product = [
            both for first in product for second in boxes if (both := _all([first, second], work)) is not None
        ]
        _bounded(product)
    return product


def _meet_into(joined: dict[str, Domain], name: str, domain: Domain) -> bool:
    """Whether anything is left of what the attribute may be."""
    known = joined.get(name)
    if known is not None:
        domain = meet(known, domain)
    joined[name] = domain
    return not domain.empty


def _all(boxes: list[Box], work: _Work) -> Box | None:
    """The box of what is in all of these; None if nothing is."""
    if len(boxes) == 1:
        return boxes[0]
    if work.left < 0:
        raise _TooManyError
    joined: dict[str, Domain] = {}
    opaque: dict[Condition, None] = {}
    for box in boxes:
        left = work.left - 1 - len(box.opaque)
        for name, domain in box.domains.items():
            left -= 1 + len(domain.numbers) + len(domain.texts)
            if not _meet_into(joined, name, domain):
                work.left = left
                return None
        work.left = left
        for item in box.opaque:
            opaque[item] = None
    return Box(joined, tuple(opaque))


def _constraint(node: Condition, negated: bool) -> tuple[str, Domain] | None:
    """The attribute and its values, if that is all there is to the condition; LIKE may be more."""
    if isinstance(node, tree.Compare):
        if isinstance(node.left, tree.Attribute) and isinstance(node.right, tree.Constant):
            operator = tree.NEGATED[node.operator] if negated else node.operator
            return node.left.name, domains.compared(operator, node.right)
    elif isinstance(node, tree.In):
        if isinstance(node.operand, tree.Attribute):
            return node.operand.name, domains.listed(node.values, negated=negated)
    elif isinstance(node, tree.Attribute):
        return node.name, Domain(booleans=domains.FALSE_BIT if negated else domains.TRUE_BIT)
    elif isinstance(node, tree.IsNull):
        return node.name, domains.PRESENT if negated else domains.MISSING
    return None


def _like(node: tree.Like, name: str, negated: bool) -> list[Box]:
    parts = like_parts(node.pattern, node.escape)
    plain = next((at for at, part in enumerate(parts) if not part), len(parts))
    prefix = "".join(part or "" for part in parts[:plain])
    if plain == len(parts):
        exact = domains.compared("=", tree.constant(prefix))
    else:
        exact = domains.prefixed(prefix)
        if any(part != "" for part in parts[plain:]):
            domain = domains.TEXT if negated else exact
            return [Box({name: domain}, (tree.Not(node) if negated else node,))]
    domain = domains.minus(domains.TEXT, exact) if negated else exact
    return [] if domain.empty else [Box({name: domain}, ())]


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
