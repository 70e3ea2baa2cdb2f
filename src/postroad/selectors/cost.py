"""What a condition costs, and how much of it a principal may have.

The cost is one number with two parts. *Evaluating* it: steps of about 10 ns in the kernel, for the event that
is worst for the condition: everything that is indexed about it fits, every item of an AND or OR is asked, and
a text that is searched is as long as a text can be. *Taking it in*, at every broker once: units of 100 us for
reading it, looking for what covers it, and putting it into the index. So conditions that cost a million
together delay an event by 10 ms at most, wherever it passes, and a broker that joins the network works for at
most 100 s until it knows all of them.
"""

from __future__ import annotations

from typing import Final

from postroad.selectors import tree
from postroad.selectors.boxes import Box
from postroad.selectors.predicate import like_parts
from postroad.selectors.tree import Condition, ValueNode

LONGEST_TEXT: Final = 65_535  # bytes of an attribute
_CHARACTERS_PER_STEP: Final = 8  # of a text that is searched, for each word of 64 signs
_BYTES_PER_STEP: Final = 256  # of two texts that are compared
_WORD: Final = 64
_TAKING_IN: Final = 2  # units for any selector
_CHARACTERS_PER_UNIT: Final = 32  # that are read
_SPANS_PER_UNIT: Final = 32  # that are put into boxes and into the index
_OPERATORS_PER_UNIT: Final = 3  # of arithmetic, which sqlglot reads anew in every shape

COST_PER_PRINCIPAL: Final = 12 << 20  # a million different conditions of the usual kind, or 1500 searches


def evaluation_steps(node: Condition | ValueNode) -> int:
    match node:
        case tree.Constant() | tree.Attribute() | tree.IsNull():
            return 1
        case tree.Negate():
            return 1 + evaluation_steps(node.operand)
        case tree.Arithmetic():
            return 1 + evaluation_steps(node.left) + evaluation_steps(node.right)
        case tree.Compare():
            return 1 + evaluation_steps(node.left) + evaluation_steps(node.right) + _text_steps(node)
        case tree.In():
            return 1 + evaluation_steps(node.operand) + len(node.values).bit_length()
        case tree.Like():
            return 1 + evaluation_steps(node.operand) + _like_steps(node)
        case tree.Not():
            return 1 + evaluation_steps(node.item)
        case tree.And() | tree.Or():
            return 1 + sum([1 + evaluation_steps(item) for item in node.items])


def _text_steps(node: tree.Compare) -> int:
    """Two attributes share the bytes that an event has for attributes; a literal is short."""
    if isinstance(node.left, tree.Attribute) and isinstance(node.right, tree.Attribute):
        return LONGEST_TEXT // 2 // _BYTES_PER_STEP
    return 0


def _like_steps(node: tree.Like) -> int:
    """What stands before the first % and behind the last is compared once; between them the text is searched,
    which takes each of its characters as many words as the longest piece has."""
    lengths = [0]
    for part in like_parts(node.pattern, node.escape):
        if part == "":
            lengths.append(0)
        else:
            lengths[-1] += 1
    steps = lengths[0] + lengths[-1]
    if any(lengths[1:-1]):
        steps += (1 + max(lengths[1:-1]) // _WORD) * LONGEST_TEXT // _CHARACTERS_PER_STEP
    return steps


def boxes_steps(boxes: tuple[Box, ...]) -> int:
    """What asking for a selector takes that has these boxes. Equal conditions are asked once."""
    steps = 1
    for box in boxes:
        steps += 1 + sum([domain.size.bit_length() for domain in box.domains.values()])
    return steps + sum([evaluation_steps(condition) for condition in _opaque(boxes)])


def taking_in_units(where: str, boxes: tuple[Box, ...]) -> int:
    spans = sum([1 + sum([domain.size for domain in box.domains.values()]) for box in boxes])
    operators = sum([_operators(condition) for condition in _opaque(boxes)])
    return (
        _TAKING_IN
        + len(where) // _CHARACTERS_PER_UNIT
        + spans // _SPANS_PER_UNIT
        + operators // _OPERATORS_PER_UNIT
    )


def _opaque(boxes: tuple[Box, ...]) -> dict[Condition, None]:
    return dict.fromkeys([condition for box in boxes for condition in box.opaque])


def _operators(node: Condition | ValueNode) -> int:
    """How many there are of arithmetic."""
    match node:
        case tree.Arithmetic():
            return 1 + _operators(node.left) + _operators(node.right)
        case tree.Compare():
            return _operators(node.left) + _operators(node.right)
        case tree.Negate() | tree.In() | tree.Like():
            return _operators(node.operand)
        case tree.Not():
            return _operators(node.item)
        case tree.And() | tree.Or():
            return sum([_operators(item) for item in node.items])
    return 0
